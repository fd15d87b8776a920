//! A chat completion as Server-Sent Events. The text comes from the run's live deltas. The end comes from the record, which
//! adds what the deltas have left out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::Instant;

use crate::domain::run::Run;
use crate::domain::usage::TokenUsage;
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::web::clients::openai::chat::chat_run::ChatRun;
use crate::web::clients::openai::chat::completion::{ToolCall, Usage, finish_reason};
use crate::web::clients::openai::chat::request::StreamSettings;
use crate::web::clients::openai::error::failure_body;
use crate::web::clients::stop::{self, RunFailure, Stop};
use crate::web::error::Problem;
use crate::web::state::AppState;

/// Between the texts of two turns, and before a text that replaces one.
const SEPARATOR: &str = "\n\n";
/// A comment, which clients ignore. Proxies close idle connections.
const KEEP_ALIVE: &str = ": keep-alive\n\n";
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const DONE: &str = "data: [DONE]\n\n";

pub struct ChatStream {
    state: AppState,
    chat_run: ChatRun,
    settings: StreamSettings,
    subscription: Option<Subscription>,
    /// Resolves when the run has stopped; `None` once it has.
    stopped: Option<BoxFuture<'static, Result<Arc<Run>, Problem>>>,
    /// Whether the text is sent as a whole: the model may correct JSON that does not fit its schema.
    is_whole: bool,
    /// Frames that are not sent yet.
    frames: VecDeque<String>,
    text: StreamedText,
    heartbeat_at: Instant,
}

/// The text that was sent.
#[derive(Debug, Default)]
struct StreamedText {
    is_begun: bool,
    /// The turn of the last delta.
    turn: u32,
    /// What was sent of that turn's text: its beginning.
    of_turn: String,
    gap: Gap,
}

/// Deltas that were lost. What follows one of its turn is not sent: the record has the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Gap {
    #[default]
    None,
    /// It is unknown in which turn it ends.
    Open,
    /// It ends in the turn of the last delta.
    InTurn,
}

impl StreamedText {
    /// What to send for a delta.
    fn push(&mut self, turn: u32, text: &str) -> String {
        let mut frame = String::new();
        let is_new = std::mem::replace(&mut self.turn, turn) != turn;
        if is_new {
            self.of_turn.clear();
        }
        self.gap = match self.gap {
            Gap::None => Gap::None,
            Gap::InTurn if is_new => Gap::None,
            Gap::Open | Gap::InTurn => Gap::InTurn,
        };
        if self.gap == Gap::InTurn {
            return frame;
        }
        if self.of_turn.is_empty() && std::mem::replace(&mut self.is_begun, true) {
            frame.push_str(SEPARATOR);
        }
        self.of_turn.push_str(text);
        frame.push_str(text);
        frame
    }

    /// Deltas were lost.
    fn lose(&mut self) {
        self.gap = Gap::Open;
    }

    /// The text of the turn is not part of the reply. The next delta begins another one.
    fn withdraw(&mut self) {
        self.of_turn.clear();
        self.gap = Gap::None;
    }

    /// What is missing of the last turn's text.
    fn rest(&self, text: &str) -> String {
        match text.strip_prefix(self.of_turn.as_str()) {
            Some(rest) if !self.of_turn.is_empty() || !self.is_begun => rest.to_owned(),
            _ if self.of_turn.starts_with(text) && !text.is_empty() => String::new(),
            _ if text.is_empty() => String::new(),
            _ => format!("{SEPARATOR}{text}"),
        }
    }
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: String,
    object: &'static str,
    created: i64,
    model: &'a str,
    choices: Vec<ChunkChoice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

/// `text.delta` and `text.withdrawn`.
#[derive(Deserialize)]
struct TextEvent {
    turn: u32,
    #[serde(default)]
    text: String,
}

impl ChatStream {
    pub fn new(
        state: AppState,
        chat_run: ChatRun,
        settings: StreamSettings,
        subscription: Option<Subscription>,
        is_whole: bool,
    ) -> Self {
        let (run, seen_turn) = (Arc::clone(&chat_run.run), chat_run.seen_turn);
        let stop_state = state.clone();
        let stopped = async move { stop::wait_for_stop(&stop_state, run, seen_turn).await };
        let mut stream = Self {
            state,
            chat_run,
            settings,
            subscription,
            stopped: Some(Box::pin(stopped)),
            is_whole,
            frames: VecDeque::new(),
            text: StreamedText::default(),
            heartbeat_at: Instant::now() + KEEP_ALIVE_INTERVAL,
        };
        stream.push_delta(Delta {
            role: Some("assistant"),
            content: Some(""),
            refusal: Some(None),
            ..Delta::default()
        });
        stream
    }

    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Option<String> {
        while self.frames.is_empty() {
            self.stopped.as_ref()?;
            self.read_more().await;
        }
        self.heartbeat_at = Instant::now() + KEEP_ALIVE_INTERVAL;
        let frames = self.frames.drain(..);
        Some(frames.collect())
    }

    /// Adds frames for what happens next.
    async fn read_more(&mut self) {
        let Some(stopped) = &mut self.stopped else {
            return;
        };
        let received = async {
            match &mut self.subscription {
                Some(subscription) => subscription.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = received => match event {
                Ok(event) => self.on_event(&event),
                Err(RecvError::Lagged(_)) => self.text.lose(),
                Err(RecvError::Closed) => self.subscription = None,
            },
            run = stopped => {
                self.stopped = None;
                self.drain();
                match run {
                    Ok(run) => self.finish(&run).await,
                    Err(problem) => self.push_problem(&problem),
                }
            }
            () = tokio::time::sleep_until(self.heartbeat_at) => {
                self.frames.push_back(KEEP_ALIVE.to_owned());
            }
        }
    }

    /// Reads the deltas that were published before the run stopped.
    fn drain(&mut self) {
        while let Some(subscription) = &mut self.subscription {
            match subscription.try_recv() {
                Ok(event) => self.on_event(&event),
                Err(TryRecvError::Lagged(_)) => self.text.lose(),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }

    fn on_event(&mut self, event: &StreamEvent) {
        let StreamEvent::Ephemeral { run_id, name, data } = event else {
            return;
        };
        if *run_id != self.chat_run.run.id || self.is_whole {
            return;
        }
        let Ok(event) = serde_json::from_str::<TextEvent>(data) else {
            return;
        };
        match *name {
            "text.delta" => {
                let text = self.text.push(event.turn, &event.text);
                self.push_text(&text);
            }
            "text.withdrawn" => self.text.withdraw(),
            _ => {}
        }
    }

    /// Sends the end of the completion.
    async fn finish(&mut self, run: &Run) {
        let seen_turn = self.chat_run.seen_turn;
        let ended = async {
            let stop = stop::stop_of(&self.state, run, seen_turn).await?;
            let baseline = self.chat_run.baseline;
            let tokens = stop::tokens_since(&self.state, run, baseline, seen_turn).await?;
            Ok::<_, Problem>((stop, tokens))
        };
        match ended.await {
            Ok((Stop::Failed(failure), _)) => self.push_failure(&failure),
            Ok((stop, tokens)) => self.push_end(&stop, tokens),
            Err(problem) => self.push_problem(&problem),
        }
    }

    fn push_problem(&mut self, problem: &Problem) {
        self.push_failure(&RunFailure {
            status: problem.status(),
            code: problem.code().to_owned(),
            message: problem.detail().to_owned(),
        });
    }

    fn push_failure(&mut self, failure: &RunFailure) {
        let json = serde_json::to_string(&failure_body(failure)).unwrap_or_default();
        self.frames.push_back(format!("data: {json}\n\n"));
        self.frames.push_back(DONE.to_owned());
    }

    fn push_end(&mut self, stop: &Stop, tokens: TokenUsage) {
        match stop {
            Stop::Completed { content, .. } => self.push_text(&self.text.rest(content)),
            Stop::Refused { explanation } => self.push_delta(Delta {
                refusal: Some(Some(explanation)),
                ..Delta::default()
            }),
            Stop::Calls { content, calls } => {
                self.push_text(&self.text.rest(content));
                let calls = calls.iter().enumerate();
                let calls = calls.map(|(index, call)| ToolCall::new(call, Some(index)));
                self.push_delta(Delta {
                    tool_calls: calls.collect(),
                    ..Delta::default()
                });
            }
            Stop::Failed(_) => {}
        }
        self.push_choice(Delta::default(), Some(finish_reason(stop)));
        if self.settings.includes_usage {
            self.push_chunk(Vec::new(), Some(Some(tokens.into())));
        }
        self.frames.push_back(DONE.to_owned());
    }

    fn push_text(&mut self, text: &str) {
        if !text.is_empty() {
            self.push_delta(Delta {
                content: Some(text),
                ..Delta::default()
            });
        }
    }

    fn push_delta(&mut self, delta: Delta<'_>) {
        self.push_choice(delta, None);
    }

    fn push_choice(&mut self, delta: Delta<'_>, finish_reason: Option<&'static str>) {
        let choice = ChunkChoice {
            index: 0,
            delta,
            logprobs: None,
            finish_reason,
        };
        self.push_chunk(vec![choice], self.settings.includes_usage.then_some(None));
    }

    fn push_chunk(&mut self, choices: Vec<ChunkChoice<'_>>, usage: Option<Option<Usage>>) {
        let chunk = Chunk {
            id: self.chat_run.id(),
            object: "chat.completion.chunk",
            created: self.chat_run.run.created_at.as_second(),
            model: &self.chat_run.model,
            choices,
            usage,
        };
        let json = serde_json::to_string(&chunk).unwrap_or_default();
        self.frames.push_back(format!("data: {json}\n\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::StreamedText;

    #[test]
    fn texts_of_turns_are_separated() {
        let mut text = StreamedText::default();
        assert_eq!(text.push(1, "a"), "a");
        assert_eq!(text.push(1, "b"), "b");
        assert_eq!(text.rest("ab"), "");
        assert_eq!(text.rest("abc"), "c");
        assert_eq!(text.push(2, "c"), "\n\nc");
        text.withdraw();
        assert_eq!(text.push(2, "d"), "\n\nd");
        assert_eq!(text.rest("e"), "\n\ne");
    }

    #[test]
    fn after_a_gap_the_rest_comes_from_the_record() {
        let mut text = StreamedText::default();
        text.push(1, "one ");
        text.lose();
        assert_eq!(text.push(1, "three"), "");
        assert_eq!(text.rest("one two three"), "two three");
        // This turn begins after the gap.
        assert_eq!(text.push(2, "four"), "\n\nfour");
        text.lose();
        // The beginning of this one may be lost.
        assert_eq!(text.push(3, "six"), "");
        assert_eq!(text.rest("five six"), "\n\nfive six");
        text.withdraw();
        assert_eq!(text.push(3, "seven"), "\n\nseven");
    }

    #[test]
    fn the_record_has_what_was_not_streamed() {
        let mut text = StreamedText::default();
        assert_eq!(text.rest("all"), "all");
        text.push(1, "all\n");
        assert_eq!(text.rest("all"), "");
        text.withdraw();
        assert_eq!(text.rest("new"), "\n\nnew");
    }
}
