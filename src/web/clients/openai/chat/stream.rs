//! A chat completion as Server-Sent Events. The text comes from the run's live deltas. The end comes from the record, which
//! adds what the deltas have left out.

use std::sync::Arc;

use serde::Serialize;

use crate::domain::event::{EventKind, LiveEvent, StoredEvent};
use crate::domain::run::Run;
use crate::domain::usage::TokenUsage;
use crate::engine::state::broadcaster::Subscription;
use crate::web::clients::openai::chat::chat_run::ChatRun;
use crate::web::clients::openai::chat::completion::{ToolCall, Usage, finish_reason};
use crate::web::clients::openai::chat::request::StreamSettings;
use crate::web::clients::openai::error::failure_body;
use crate::web::clients::openai::{DONE, KEEP_ALIVE};
use crate::web::clients::stop::{self, RunFailure, Stop};
use crate::web::error::Problem;
use crate::web::response::sse;
use crate::web::response::stream_driver::{Nothing, Projection, StreamDriver};
use crate::web::state::AppState;

/// Between the texts of two turns, and before a text that replaces one.
const SEPARATOR: &str = "\n\n";

pub struct ChatStream {
    chat_run: ChatRun,
    settings: StreamSettings,
    /// Whether the text is sent as a whole: the model may correct JSON that does not fit its schema.
    is_whole: bool,
    frames: String,
    text: StreamedText,
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

/// A run that has stopped, and what it has used for the response.
pub struct Stopped {
    stop: Stop,
    tokens: TokenUsage,
}

impl Stopped {
    async fn wait(
        state: &AppState,
        run: Arc<Run>,
        seen_turn: Option<u32>,
        baseline: TokenUsage,
    ) -> Result<Self, Problem> {
        let run = stop::wait_for_stop(state, run, seen_turn).await?;
        Ok(Self {
            stop: stop::stop_of(state, &run, seen_turn).await?,
            tokens: stop::tokens_since(state, &run, baseline, seen_turn).await?,
        })
    }
}

impl ChatStream {
    pub fn drive(
        state: &AppState,
        chat_run: ChatRun,
        settings: StreamSettings,
        subscription: Option<Subscription>,
        is_whole: bool,
    ) -> StreamDriver<Self> {
        let ChatRun {
            seen_turn,
            baseline,
            ..
        } = chat_run;
        let (end_state, run) = (state.clone(), Arc::clone(&chat_run.run));
        let end = async move { Stopped::wait(&end_state, run, seen_turn, baseline).await };
        let mut stream = Self {
            chat_run,
            settings,
            is_whole,
            frames: String::new(),
            text: StreamedText::default(),
        };
        stream.push_delta(Delta {
            role: Some("assistant"),
            content: Some(""),
            refusal: Some(None),
            ..Delta::default()
        });
        StreamDriver::new(state, stream, subscription, end)
    }

    fn push_problem(&mut self, problem: &Problem) {
        self.push_failure(&RunFailure {
            status: problem.status(),
            code: problem.code().to_owned(),
            message: problem.detail().to_owned(),
        });
    }

    fn push_failure(&mut self, failure: &RunFailure) {
        sse::push_data(&mut self.frames, &failure_body(failure));
        self.frames.push_str(DONE);
    }

    fn push_end(&mut self, stop: &Stop, tokens: TokenUsage) {
        match stop {
            Stop::Failed(failure) => return self.push_failure(failure),
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
        }
        self.push_choice(Delta::default(), Some(finish_reason(stop)));
        if self.settings.includes_usage {
            self.push_chunk(Vec::new(), Some(Some(tokens.into())));
        }
        self.frames.push_str(DONE);
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
        sse::push_data(&mut self.frames, &chunk);
    }
}

impl Projection for ChatStream {
    const COMMENT: &'static str = KEEP_ALIVE;
    type End = Result<Stopped, Problem>;
    type Read = Nothing;

    fn frames(&mut self) -> &mut String {
        &mut self.frames
    }

    fn on_event(&mut self, _: &StoredEvent) -> serde_json::Result<()> {
        Ok(())
    }

    fn on_live(&mut self, LiveEvent { event, .. }: &LiveEvent) {
        if event.run_id != self.chat_run.run.id || self.is_whole {
            return;
        }
        match &event.kind {
            EventKind::TextDelta { turn, text } => {
                let text = self.text.push(*turn, text);
                self.push_text(&text);
            }
            EventKind::TextWithdrawn { .. } => self.text.withdraw(),
            _ => {}
        }
    }

    fn on_lag(&mut self, _: &mut Subscription) {
        self.text.lose();
    }

    fn on_end(&mut self, end: Result<Stopped, Problem>) {
        match end {
            Ok(Stopped { stop, tokens }) => self.push_end(&stop, tokens),
            Err(problem) => self.push_problem(&problem),
        }
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
