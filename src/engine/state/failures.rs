//! The failures of runs, and the results of interrupted calls.

use crate::domain::failure::{Failure, FailureCode};
use crate::domain::message::shorten;
use crate::domain::node::describe_labels;
use crate::domain::run::Status;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::budget::BudgetExceeded;
use crate::engine::state::deadline::Deadline;
use crate::engine::state::turn_error::TurnError;
use crate::providers::registry::ProviderUnavailable;
use crate::providers::{ErrorCategory, ProviderError, ReplyOutcome};

fn failure(code: FailureCode, category: &str, message: String, retryable: bool) -> Failure {
    Failure {
        code,
        message,
        category: category.to_owned(),
        retryable,
    }
}

pub fn config(message: &str) -> Failure {
    failure(FailureCode::Config, "config", message.to_owned(), false)
}

pub fn internal(message: &str) -> Failure {
    failure(FailureCode::Internal, "internal", message.to_owned(), false)
}

/// Of a run that nothing can resume. What was at work may have begun a call that is not safe to repeat.
pub fn interrupted(status: Status) -> Failure {
    let message = format!("the daemon stopped while this run was {}", status.as_str());
    let is_retryable = status == Status::Queued;
    failure(FailureCode::Interrupted, "internal", message, is_retryable)
}

/// Not retryable: the same request may perform the call a second time.
pub fn interrupted_call(tool: &str) -> Failure {
    let message = format!(
        "the daemon stopped while tool \"{tool}\" was running; it may or may not have finished, and it is not safe to \
         repeat"
    );
    failure(FailureCode::Interrupted, "internal", message, false)
}

pub fn diverged(tool: &str) -> Failure {
    let message =
        format!("a call of tool \"{tool}\" ended the case: its evaluation does not perform it");
    failure(FailureCode::Diverged, "agent", message, false)
}

pub fn no_node(labels: &[String]) -> Failure {
    let message = format!("no node had {} in time", describe_labels(labels));
    failure(FailureCode::NoNode, "config", message, true)
}

/// The result of a call whose run was cancelled or overdue before the call ended.
pub fn interruption_message(run: &ActiveRun, error: &TurnError) -> String {
    match error {
        TurnError::DeadlineExceeded => deadline_exceeded(run.deadline()).message,
        _ => format!("cancelled: {}", run.cancel_reason()),
    }
}

pub fn deadline_exceeded(deadline: Option<Deadline>) -> Failure {
    let seconds = deadline.map_or(0, |deadline| deadline.seconds);
    failure(
        FailureCode::Timeout,
        "timeout",
        format!("timeout after {seconds}s"),
        true,
    )
}

pub fn batch_expired() -> Failure {
    let message = "timeout: the batch with the request was not done within 24 hours";
    failure(FailureCode::Timeout, "timeout", message.to_owned(), true)
}

pub fn max_turns(turns: u32) -> Failure {
    failure(
        FailureCode::MaxTurns,
        "agent",
        format!("agent exceeded maximum conversation turns ({turns})"),
        false,
    )
}

pub fn loop_detected(repeats: u32) -> Failure {
    let message = format!("the same tool calls gave the same results {repeats} times in a row");
    failure(FailureCode::LoopDetected, "agent", message, false)
}

pub fn output_invalid(errors: &[String]) -> Failure {
    let message = format!(
        "the final text does not match the requested format: {}",
        errors.join("; ")
    );
    failure(FailureCode::OutputInvalid, "agent", message, false)
}

/// Why a reply ends the run as a failure; `None` if it is an answer. `refusal` is the service's explanation beside the text.
pub fn reply_failure(end: ReplyOutcome, text: &str, refusal: Option<&str>) -> Option<Failure> {
    let text = match end {
        ReplyOutcome::Refused => refusal.unwrap_or(text),
        ReplyOutcome::Complete | ReplyOutcome::Truncated => text,
    };
    let (code, message) = match end {
        ReplyOutcome::Complete => return None,
        ReplyOutcome::Truncated => {
            let message = "the reply reached its limit of tokens before any text or tool call; raise params.max_tokens";
            (FailureCode::OutputTruncated, message.to_owned())
        }
        ReplyOutcome::Refused if text.trim().is_empty() => {
            let message = "the model, or a filter of its service, refused to answer";
            (FailureCode::Refused, message.to_owned())
        }
        ReplyOutcome::Refused => {
            let message = format!("the model refused to answer: {}", shorten(text.trim(), 200));
            (FailureCode::Refused, message)
        }
    };
    Some(failure(code, "agent", message, false))
}

pub fn empty_summary() -> Failure {
    let message = "the model gave no summary of the conversation".to_owned();
    failure(FailureCode::ProviderServer, "server", message, true)
}

pub fn budget_exceeded(exceeded: &BudgetExceeded) -> Failure {
    failure(
        FailureCode::BudgetExceeded,
        "budget",
        exceeded.to_string(),
        false,
    )
}

/// `<category>: <message>`.
pub fn provider_error(error: &ProviderError) -> Failure {
    let code = match error.category {
        ErrorCategory::Auth => FailureCode::ProviderAuth,
        ErrorCategory::BadRequest => FailureCode::ProviderBadRequest,
        ErrorCategory::RateLimit => FailureCode::ProviderRateLimit,
        ErrorCategory::Overloaded => FailureCode::ProviderOverloaded,
        ErrorCategory::Server => FailureCode::ProviderServer,
        ErrorCategory::Timeout => FailureCode::Timeout,
    };
    failure(
        code,
        error.category.as_str(),
        error.to_string(),
        error.category.is_retryable(),
    )
}

pub fn provider_unavailable(unavailable: &ProviderUnavailable) -> Failure {
    match unavailable {
        ProviderUnavailable::Unsupported { .. }
        | ProviderUnavailable::MissingAddress { .. }
        | ProviderUnavailable::Misconfigured(_) => config(&unavailable.to_string()),
        ProviderUnavailable::MissingKey { .. } => failure(
            FailureCode::ProviderAuth,
            ErrorCategory::Auth.as_str(),
            unavailable.to_string(),
            false,
        ),
    }
}
