//! The failures that runs end with, and what a call is told that is broken off, in the contract's words.

use crate::domain::message::shorten;
use crate::domain::run::{Failure, FailureCode};
use crate::engine::budget::Exceeded;
use crate::engine::context_window::Window;
use crate::engine::live::{Deadline, LiveRun};
use crate::engine::turn_error::TurnError;
use crate::providers::registry::Unavailable;
use crate::providers::{Category, End, ProviderError};

fn failure(code: FailureCode, category: &str, message: String, retryable: bool) -> Failure {
    Failure {
        code,
        message,
        category: category.to_owned(),
        retryable,
    }
}

/// The prompt could not be made.
pub fn config(message: &str) -> Failure {
    failure(FailureCode::Config, "config", message.to_owned(), false)
}

/// A fault of ours.
pub fn internal(message: &str) -> Failure {
    failure(FailureCode::Internal, "internal", message.to_owned(), false)
}

/// The process ended in the middle of it.
pub fn interrupted(message: &str) -> Failure {
    failure(
        FailureCode::Interrupted,
        "internal",
        message.to_owned(),
        true,
    )
}

/// What a call is told whose run was stopped, or ran out of time, before it had its result.
pub fn broken_off(live: &LiveRun, error: &TurnError) -> String {
    match error {
        TurnError::Overdue => overdue(live.deadline()).message,
        _ => format!("cancelled: {}", live.stop_reason()),
    }
}

/// The deadline passed.
pub fn overdue(deadline: Option<Deadline>) -> Failure {
    let seconds = deadline.map_or(0, |deadline| deadline.seconds);
    failure(
        FailureCode::Timeout,
        "timeout",
        format!("timeout after {seconds}s"),
        true,
    )
}

/// A batch was not done in time.
pub fn batch_expired() -> Failure {
    let message = "timeout: the batch with the request was not done within 24 hours";
    failure(FailureCode::Timeout, "timeout", message.to_owned(), true)
}

/// The turns ran out.
pub fn max_turns(turns: u32) -> Failure {
    failure(
        FailureCode::MaxTurns,
        "agent",
        format!("agent exceeded maximum conversation turns ({turns})"),
        false,
    )
}

/// The same calls gave the same results again and again.
pub fn looped(repeats: u32) -> Failure {
    let message = format!("the same tool calls gave the same results {repeats} times in a row");
    failure(FailureCode::LoopDetected, "agent", message, false)
}

/// The final text does not have the shape that was asked for, and asking again did not help.
pub fn output_invalid(errors: &[String]) -> Failure {
    let message = format!(
        "the final text does not have the shape that was asked for: {}",
        errors.join("; ")
    );
    failure(FailureCode::OutputInvalid, "agent", message, false)
}

/// Why the run ends with a reply that is no answer; none where it is one.
pub fn no_answer(reply: End, text: &str) -> Option<Failure> {
    let (code, message) = match reply {
        End::Answer => return None,
        End::Truncated => {
            let message = "the reply reached its limit of tokens before any text or tool call; raise params.max_tokens";
            (FailureCode::OutputTruncated, message.to_owned())
        }
        End::Refused if text.trim().is_empty() => {
            let message = "the model, or a filter of its service, refused to answer";
            (FailureCode::Refused, message.to_owned())
        }
        End::Refused => {
            let message = format!("the model refused to answer: {}", shorten(text.trim(), 200));
            (FailureCode::Refused, message)
        }
    };
    Some(failure(code, "agent", message, false))
}

/// A request for a summary was answered with nothing.
pub fn no_summary() -> Failure {
    let message = "the model gave no summary of the conversation".to_owned();
    failure(FailureCode::ProviderServer, "server", message, true)
}

/// The next request does not fit the model's window, and nothing is left that could be taken out of it.
pub fn too_long(tokens: u64, window: &Window, largest: &str) -> Failure {
    config(&format!(
        "the next request has about {tokens} tokens, and {} tokens of the model's context window of {} are for \
         requests: nothing more can be taken out of the conversation{largest}; use a model with a larger window, lower \
         params.max_tokens, or let tools return less at once ([tools] max_result)",
        window.most(),
        window.tokens
    ))
}

/// The next request passes the bound, and the agent's file says that the run fails then.
pub fn not_compacted(tokens: u64, window: &Window, compact_at: f64) -> Failure {
    config(&format!(
        "the next request has about {tokens} tokens, more than the {} that context.compact_at = {compact_at} allows of \
         the model's context window of {}, and context.strategy is \"fail\": set it to \"compact\" or \
         \"drop_tool_results\", or use a model with a larger window",
        window.limit, window.tokens
    ))
}

/// A budget is spent.
pub fn budget(exceeded: &Exceeded) -> Failure {
    failure(
        FailureCode::BudgetExceeded,
        "budget",
        exceeded.to_string(),
        false,
    )
}

/// The provider failed: `<category>: <message>`.
pub fn provider(error: &ProviderError) -> Failure {
    let code = match error.category {
        Category::Auth => FailureCode::ProviderAuth,
        Category::BadRequest => FailureCode::ProviderBadRequest,
        Category::RateLimit => FailureCode::ProviderRateLimit,
        Category::Overloaded => FailureCode::ProviderOverloaded,
        Category::Server => FailureCode::ProviderServer,
        Category::Timeout => FailureCode::Timeout,
    };
    failure(
        code,
        error.category.as_str(),
        error.to_string(),
        error.category.is_retryable(),
    )
}

/// The provider is not there, or has no key.
pub fn unavailable(unavailable: &Unavailable) -> Failure {
    match unavailable {
        Unavailable::Unsupported { .. }
        | Unavailable::MissingAddress { .. }
        | Unavailable::Broken(_) => config(&unavailable.to_string()),
        Unavailable::MissingKey { .. } => failure(
            FailureCode::ProviderAuth,
            Category::Auth.as_str(),
            unavailable.to_string(),
            false,
        ),
    }
}
