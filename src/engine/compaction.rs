//! Makes a conversation shorter if its next request would fill too much of its model's context window. Knows no loop.

use std::sync::Arc;

use crate::domain::agent::{Params, ResponseFormat};
use crate::domain::context::{Compaction, Strategy};
use crate::domain::event::EventKind;
use crate::domain::message::{Message, ToolSpec};
use crate::domain::run::Failure;
use crate::domain::usage::TokenUsage;
use crate::engine::answers::{check, failed_turn};
use crate::engine::close::{Ending, State};
use crate::engine::context_window::Window;
use crate::engine::conversation::Conversation;
use crate::engine::endings;
use crate::engine::entry::Draft;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::request_size;
use crate::engine::summary_request::SummaryRequest;
use crate::engine::turn::{self, Answer, Question, Streamed};
use crate::engine::turn_error::TurnError;
use crate::store::{Change, Step};

/// What the requests of one run are held to.
#[derive(Clone, Copy, Debug)]
pub struct RequestBounds {
    window: Window,
    /// Bytes of system prompt and tools.
    preamble: usize,
}

impl RequestBounds {
    /// For requests that begin like this; `None` if the model's window is not known.
    pub fn of(engine: &Engine, live: &LiveRun, system: &str, tools: &[ToolSpec]) -> Option<Self> {
        Some(Self {
            window: Window::of(&engine.settings.models, &live.agent)?,
            preamble: request_size::preamble(system, tools),
        })
    }

    /// Whether the next request has to become smaller.
    pub fn are_passed(&self, talk: &Conversation) -> bool {
        talk.size(self.preamble) > self.window.limit
    }
}

/// A summary, and what it took.
struct Summary {
    text: String,
    model: String,
    tokens: TokenUsage,
}

/// Why there is no summary.
enum NoSummary {
    /// The provider failed, or the model did not answer: the run can go on without.
    Failed(Failure),
    /// The run ends.
    Ended(Ending),
}

/// Makes the next request, which passes the bounds, smaller as the agent's file says. What waits to be written is
/// written first: a summary may take long.
pub async fn shorten(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    bounds: &RequestBounds,
    talk: &mut Conversation,
    draft: &mut Option<Box<Draft>>,
) -> Result<(), Ending> {
    if check(live).is_err() {
        // The loop ends the run before the request.
        return Ok(());
    }
    if let Some(draft) = draft.take() {
        draft.write(engine, live).await?;
    }
    let RequestBounds { window, preamble } = *bounds;
    let before = talk.size(preamble);
    let settings = &live.agent.context;
    let failure = match settings.strategy {
        Strategy::Fail => {
            let failure = endings::not_compacted(before, &window, settings.compact_at);
            return Err(Ending::failed(failure));
        }
        Strategy::DropToolResults => {
            drop_results(engine, live, state, bounds, talk).await?;
            None
        }
        Strategy::Compact => sum_up(engine, live, state, bounds, talk).await?,
    };
    let after = talk.size(preamble);
    if after <= window.most() {
        return Ok(());
    }
    let largest = largest(talk.messages());
    let too_long = || endings::too_long(after, &window, &largest);
    Err(Ending::failed(failure.unwrap_or_else(too_long)))
}

/// Has the model sum up the oldest turns. Returns why there is no summary, if there is none: the oldest tool results are
/// dropped then.
async fn sum_up(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    bounds: &RequestBounds,
    talk: &mut Conversation,
) -> Result<Option<Failure>, Ending> {
    let RequestBounds { window, preamble } = *bounds;
    let before = talk.size(preamble);
    let room = window.room_beside_summary(preamble);
    let Some((compaction, oldest)) = talk.sent().oldest(room) else {
        return Ok(None);
    };
    let is_small = request_size::messages(oldest) <= window.summary_bytes() / 2;
    if is_small && before <= window.most() {
        // A summary could be as long: the request is larger than it should be, but it can be answered.
        return Ok(None);
    }
    let messages = oldest.len();
    let journal = &engine.journal;
    // In the record before the request is paid for: a process that goes on here knows that there was one.
    let marks = vec![Step::Compacting];
    let marked = journal.record(live, Change::Nothing, marks, Vec::new());
    marked.await?;
    let summary = match summary(engine, live, &window, talk, &compaction, oldest).await {
        Ok(summary) => summary,
        Err(NoSummary::Ended(ending)) => return Err(ending),
        Err(NoSummary::Failed(failure)) => {
            let turn = talk.turn() + 1;
            let message = format!(
                "the conversation could not be summed up ({}); the oldest tool results are dropped instead",
                failure.message
            );
            state.progress.usage = live.usage().0;
            let change = Change::Progress(state.progress.clone());
            let warning = vec![EventKind::ModelWarning { turn, message }];
            journal.note(live, change, Vec::new(), warning).await?;
            drop_results(engine, live, state, bounds, talk).await?;
            return Ok(Some(failure));
        }
    };
    let compaction = Compaction {
        summary: summary.text,
        ..compaction
    };
    let from = talk.sent().compaction().before;
    let (from_turn, to_turn) = turns(talk, from, compaction.before);
    talk.compact(compaction);
    let compacted = EventKind::ContextCompacted {
        turn: talk.turn() + 1,
        strategy: Strategy::Compact,
        from_turn,
        to_turn,
        messages,
        results: 0,
        tokens_before: before,
        tokens_after: talk.size(preamble),
        model: Some(summary.model),
        input_tokens: summary.tokens.input,
        output_tokens: summary.tokens.output,
    };
    record(engine, live, state, talk, compacted).await?;
    Ok(None)
}

/// The model's summary of the oldest messages, in as many requests as their text needs.
async fn summary(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    window: &Window,
    talk: &Conversation,
    compaction: &Compaction,
    oldest: &[Message],
) -> Result<Summary, NoSummary> {
    let current = talk.sent().compaction();
    let is_apart = compaction.task.is_some() && compaction.task == current.task;
    let task = talk.task();
    let request = SummaryRequest {
        task: if is_apart { &task } else { "" },
        most: window.summary_request_bytes(),
        summary: window.summary_bytes(),
    };
    // The shape and the end of the agent's own replies are none for a summary.
    let params = Params {
        response_format: ResponseFormat::Text,
        stop: Vec::new(),
        ..live.agent.params.clone()
    };
    let mut made = Summary {
        text: current.summary.clone(),
        model: String::new(),
        tokens: TokenUsage::default(),
    };
    for piece in request.pieces(oldest) {
        let messages = [Message::user(request.message(&made.text, &piece))];
        let question = Question {
            turn: talk.turn() + 1,
            system: "",
            messages: &messages,
            tools: &[],
            params: &params,
            is_turn: false,
        };
        let mut streamed = Streamed::default();
        let taken = Box::pin(turn::take(engine, live, question, &mut streamed)).await;
        let Answer { reply, asked } = match taken {
            Ok(answer) => answer,
            Err(TurnError::Provider(error)) => {
                return Err(NoSummary::Failed(endings::provider(&error)));
            }
            Err(error) => return Err(NoSummary::Ended(failed_turn(live, error))),
        };
        let tokens = reply.usage.unwrap_or_default();
        made.tokens.input = made.tokens.input.saturating_add(tokens.input);
        made.tokens.output = made.tokens.output.saturating_add(tokens.output);
        let text = request.summary(&reply.message.content);
        if let Some(failure) = endings::no_answer(reply.end, &text) {
            return Err(NoSummary::Failed(failure));
        }
        if text.is_empty() {
            return Err(NoSummary::Failed(endings::no_summary()));
        }
        made.text = text;
        made.model = reply.model.unwrap_or(asked.model);
    }
    Ok(made)
}

/// Drops the oldest tool results until a quarter of what may be sent is free, so that the prompt stays the same for some
/// turns and services can keep it.
async fn drop_results(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    bounds: &RequestBounds,
    talk: &mut Conversation,
) -> Result<(), Ending> {
    let RequestBounds { window, preamble } = *bounds;
    let before = talk.size(preamble);
    let excess = before.saturating_sub(window.limit / 4 * 3);
    let excess = request_size::bytes(excess);
    let Some((compaction, results)) = talk.sent().oldest_results(excess) else {
        return Ok(());
    };
    let current = talk.sent().compaction();
    let from = current.results_before.max(current.before);
    let (from_turn, to_turn) = turns(talk, from, compaction.results_before);
    talk.compact(compaction);
    let compacted = EventKind::ContextCompacted {
        turn: talk.turn() + 1,
        strategy: Strategy::DropToolResults,
        from_turn,
        to_turn,
        messages: 0,
        results,
        tokens_before: before,
        tokens_after: talk.size(preamble),
        model: None,
        input_tokens: 0,
        output_tokens: 0,
    };
    record(engine, live, state, talk, compacted).await
}

/// Commits what requests leave out from now on.
async fn record(
    engine: &Engine,
    live: &LiveRun,
    state: &mut State,
    talk: &Conversation,
    compacted: EventKind,
) -> Result<(), Ending> {
    state.progress.usage = live.usage().0;
    let change = Change::Progress(state.progress.clone());
    let step = Step::Compacted {
        compaction: talk.sent().compaction().clone(),
    };
    let journal = &engine.journal;
    let recorded = journal.record(live, change, vec![step], vec![compacted]);
    recorded.await?;
    Ok(())
}

/// The first and the last turn of the run whose replies are among these recorded messages; 0 if there is none.
fn turns(talk: &Conversation, from: usize, before: usize) -> (u32, u32) {
    let since = |recorded| {
        let replies = talk.sent().replies_since(recorded);
        talk.turn()
            .saturating_sub(u32::try_from(replies).unwrap_or(u32::MAX))
    };
    match since(before) {
        0 => (0, 0),
        last => (since(from) + 1, last),
    }
}

/// What is largest among messages that are too many, for the text of an error.
fn largest(messages: &[Message]) -> String {
    let largest = messages.iter().max_by_key(|it| request_size::message(it));
    let Some(message) = largest else {
        return String::new();
    };
    let bytes = request_size::message(message);
    let kind = match message {
        Message::User { .. } => "a user message",
        Message::Assistant(_) => "a reply",
        Message::Tool { .. } => "the tool results of one turn",
    };
    format!(" ({kind} with {bytes} bytes is the largest part)")
}
