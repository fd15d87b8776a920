//! What a run has come to when its client gets a response: its end, or calls for the client.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::{HeaderName, HeaderValue};
use axum::response::Response;

use crate::domain::event::{EventKind, EventName};
use crate::domain::failure::FailureCode;
use crate::domain::message::ToolCall;
use crate::domain::run::{Run, Status};
use crate::domain::usage::TokenUsage;
use crate::record::entry::{self, Entry};
use crate::store::events::{self, EventPages};
use crate::web::clients::call_id::CallRef;
use crate::web::error::Problem;
use crate::web::state::AppState;
use crate::web::wait;

/// The id of the run that a response is about.
pub const RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);
/// The time between two looks at a run that this process does not drive.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The words of providers for a reply that reached its limit of tokens.
const LENGTH_REASONS: [&str; 4] = [
    "length",
    "max_tokens",
    "max_output_tokens",
    "model_context_window_exceeded",
];
/// Stop reasons of replies that call tools.
const CALL_REASONS: [&str; 3] = ["tool_use", "tool_calls", "function_call"];
const FILTER_REASONS: [&str; 2] = ["content_filter", "refusal"];

/// A run that has stopped.
#[derive(Debug)]
pub enum Stop {
    Completed {
        content: String,
        reason: EndReason,
    },
    /// The model refused; the text is its explanation.
    Refused {
        explanation: String,
    },
    /// The client has to execute these calls.
    Calls {
        content: String,
        calls: Vec<ClientCall>,
    },
    Failed(RunFailure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    Done,
    Length,
    Filter,
}

/// A call for the client, with the id that it is given out with.
#[derive(Debug)]
pub struct ClientCall {
    pub id: String,
    pub call: ToolCall,
}

/// A run that has no result.
#[derive(Debug)]
pub struct RunFailure {
    pub status: StatusCode,
    pub code: String,
    pub message: String,
}

/// The run when it has ended, or waits for its client; also if the daemon is stopping. `seen_turn` is a turn for whose calls
/// the run has results already.
///
/// # Errors
/// 404 if another request has deleted the run.
pub async fn wait_for_stop(
    state: &AppState,
    mut run: Arc<Run>,
    seen_turn: Option<u32>,
) -> Result<Arc<Run>, Problem> {
    loop {
        if run.status.is_terminal() || state.closing.is_cancelled() || has_calls(&run, seen_turn) {
            return Ok(run);
        }
        let next = wait::wait_for_end_or_person(state, Arc::clone(&run), FOREVER).await;
        if *next == *run {
            tokio::time::sleep(POLL_INTERVAL).await;
            // A run that is gone looks as it did before.
            if let Ok(None) = state.runner.store().run(run.id).await {
                return Err(Problem::run_not_found(run.id));
            }
        }
        run = next;
    }
}

/// The run when it has ended; also if the daemon is stopping.
pub async fn wait_for_end(state: &AppState, run: Arc<Run>) -> Arc<Run> {
    wait::wait_for_end(state, run, FOREVER).await
}

fn has_calls(run: &Run, seen_turn: Option<u32>) -> bool {
    run.waits_for_client() && seen_turn != Some(run.turns)
}

/// What the run has come to.
pub async fn stop_of(state: &AppState, run: &Run, seen_turn: Option<u32>) -> Result<Stop, Problem> {
    match run.status {
        Status::Completed => completed(state, run).await,
        Status::Failed => Ok(failed(run)),
        Status::Cancelled => {
            let reason = run.cancel_reason.as_deref().unwrap_or_default();
            Ok(Stop::Failed(RunFailure {
                status: StatusCode::CONFLICT,
                code: "cancelled".to_owned(),
                message: format!("the run {} was cancelled: {reason}", run.id),
            }))
        }
        _ if has_calls(run, seen_turn) => client_calls(state, run).await,
        _ => Ok(Stop::Failed(interrupted(run))),
    }
}

async fn completed(state: &AppState, run: &Run) -> Result<Stop, Problem> {
    let content = run.content.clone().unwrap_or_default();
    let stop_reason = run.stop_reason.as_deref().unwrap_or_default();
    let may_have_calls = content.is_empty() || CALL_REASONS.contains(&stop_reason);
    if may_have_calls
        && let Stop::Calls { content, calls } = client_calls(state, run).await?
        && !calls.is_empty()
    {
        return Ok(Stop::Calls { content, calls });
    }
    Ok(Stop::Completed {
        content,
        reason: end_reason(run),
    })
}

/// The daemon stops before the run has.
pub fn interrupted(run: &Run) -> RunFailure {
    RunFailure {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: "draining".to_owned(),
        message: format!(
            "the daemon is stopping; the run {} continues at its next start",
            run.id
        ),
    }
}

/// Why the last reply of a completed run ended.
pub fn end_reason(run: &Run) -> EndReason {
    let stop_reason = run.stop_reason.as_deref().unwrap_or_default();
    if LENGTH_REASONS.contains(&stop_reason) {
        EndReason::Length
    } else if FILTER_REASONS.contains(&stop_reason) {
        EndReason::Filter
    } else {
        EndReason::Done
    }
}

fn failed(run: &Run) -> Stop {
    let partial = run.partial_content.clone().unwrap_or_default();
    let Some(error) = &run.error else {
        return Stop::Failed(RunFailure {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            code: "internal".to_owned(),
            message: format!("the run {} failed", run.id),
        });
    };
    let status = match error.code {
        FailureCode::OutputTruncated => {
            return Stop::Completed {
                content: partial,
                reason: EndReason::Length,
            };
        }
        FailureCode::Refused => {
            let explanation = match partial.is_empty() {
                true => error.message.clone(),
                false => partial,
            };
            return Stop::Refused { explanation };
        }
        FailureCode::ProviderRateLimit | FailureCode::BudgetExceeded => {
            StatusCode::TOO_MANY_REQUESTS
        }
        FailureCode::ProviderOverloaded | FailureCode::Interrupted | FailureCode::NoNode => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        FailureCode::ProviderAuth
        | FailureCode::ProviderBadRequest
        | FailureCode::ProviderServer => StatusCode::BAD_GATEWAY,
        FailureCode::Timeout => StatusCode::GATEWAY_TIMEOUT,
        FailureCode::Config
        | FailureCode::MaxTurns
        | FailureCode::LoopDetected
        | FailureCode::OutputInvalid
        | FailureCode::Diverged
        | FailureCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    };
    Stop::Failed(RunFailure {
        status,
        code: error.code.to_string(),
        message: error.message.clone(),
    })
}

/// The calls of the last reply that have no result.
async fn client_calls(state: &AppState, run: &Run) -> Result<Stop, Problem> {
    let (mut content, mut calls) = (String::new(), Vec::new());
    let mut answered = Vec::new();
    for step in entry::steps(state.runner.store().entries(run.id).await?) {
        match step {
            Entry::Replied { turn, message, .. } if turn == run.turns => {
                (content, calls) = (message.content, message.tool_calls);
            }
            Entry::CallCompleted { turn, position, .. } if turn == run.turns => {
                answered.push(position)
            }
            _ => {}
        }
    }
    let calls = (0..).zip(calls);
    let open = calls.filter(|(position, _)| !answered.contains(position));
    let calls = open.map(|(position, call)| ClientCall {
        id: CallRef {
            run: run.id,
            turn: run.turns,
            position,
        }
        .to_id(),
        call,
    });
    Ok(Stop::Calls {
        content,
        calls: calls.collect(),
    })
}

pub fn add_run_id(response: &mut Response, run: &Run) {
    if let Ok(id) = HeaderValue::try_from(run.id.to_string()) {
        response.headers_mut().insert(RUN_ID, id);
    }
}

/// The tokens of the run's tree since `baseline`. Reasoning is that of the root's own turns after `seen_turn`.
pub async fn tokens_since(
    state: &AppState,
    run: &Run,
    baseline: TokenUsage,
    seen_turn: Option<u32>,
) -> Result<TokenUsage, Problem> {
    let tokens = run.tree.usage.tokens;
    let turns = state.runner.store().turns(run.id).await?;
    let new_turns = turns
        .iter()
        .filter(|turn| Some(turn.turn) > seen_turn && !turn.is_copied);
    let reasoning = new_turns
        .filter_map(|turn| turn.usage)
        .map(|it| it.reasoning);
    Ok(TokenUsage {
        input: tokens.input.saturating_sub(baseline.input),
        output: tokens.output.saturating_sub(baseline.output),
        cache_read: tokens.cache_read.saturating_sub(baseline.cache_read),
        cache_write: tokens.cache_write.saturating_sub(baseline.cache_write),
        reasoning: reasoning.sum(),
    })
}

/// The tokens of the turns after `after`, up to `end`, of the summaries that their requests needed, and of the child runs that
/// their calls started.
pub async fn tokens_in(
    state: &AppState,
    run: &Run,
    steps: &[Entry],
    after: u32,
    end: Option<u32>,
) -> Result<TokenUsage, Problem> {
    let turns = after.saturating_add(1)..=end.unwrap_or(u32::MAX);
    let mut tokens = TokenUsage::default();
    let mut add = |part: &TokenUsage| {
        tokens.input += part.input;
        tokens.output += part.output;
        tokens.cache_read += part.cache_read;
        tokens.cache_write += part.cache_write;
        tokens.reasoning += part.reasoning;
    };
    let store = state.runner.store();
    for turn in store.turns(run.id).await? {
        let is_in = turns.contains(&turn.turn) && !turn.is_copied;
        if let Some(usage) = turn.usage.filter(|_| is_in) {
            add(&usage);
        }
    }
    let summaries = steps
        .iter()
        .filter(|it| matches!(it, Entry::Compacted { .. }));
    add(&summary_tokens(state, run, &turns, summaries.count()).await?);
    let replies = steps.iter().filter_map(|step| match step {
        Entry::Replied { turn, message, .. } if turns.contains(turn) => Some(&message.tool_calls),
        _ => None,
    });
    let calls: Vec<&str> = replies.flatten().map(|call| call.id.as_str()).collect();
    for child in store.children(run.id).await? {
        let call = child.tool_call_id.as_deref();
        if call.is_some_and(|call| calls.contains(&call)) {
            add(&child.tree.usage.tokens);
        }
    }
    Ok(tokens)
}

/// The tokens of the recorded summaries that shortened the requests of these turns. `count` is how many the run has.
async fn summary_tokens(
    state: &AppState,
    run: &Run,
    turns: &RangeInclusive<u32>,
    mut count: usize,
) -> Result<TokenUsage, Problem> {
    let mut tokens = TokenUsage::default();
    let mut pages = EventPages::of_run(&**state.runner.store(), run.root_id, run.id);
    while count > 0
        && let Some(page) = pages.next().await?
    {
        for event in &page {
            if event.name != EventName::ContextCompacted {
                continue;
            }
            count = count.saturating_sub(1);
            let EventKind::ContextCompacted {
                turn,
                input_tokens,
                output_tokens,
                ..
            } = events::recorded(event)?.kind
            else {
                continue;
            };
            if turn > *turns.end() {
                return Ok(tokens);
            }
            if turns.contains(&turn) {
                tokens.input = tokens.input.saturating_add(input_tokens);
                tokens.output = tokens.output.saturating_add(output_tokens);
            }
        }
    }
    Ok(tokens)
}
