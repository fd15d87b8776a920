//! The end of a child run as its caller gets it: a result for the caller's model, and an event.

use crate::domain::event::{EventKind, usage_totals};
use crate::domain::failure::FailureCode;
use crate::domain::run::{Run, Status, now};
use crate::engine::history::run_log::ReturnedIn;

/// The `completion_status` of a task that ran out of turns.
pub const INCOMPLETE: &str = "incomplete";
/// The `completion_status` of a task that was done.
pub const COMPLETE: &str = "complete";

/// The child's final text, or the error.
pub fn result(run: &Run) -> Result<String, String> {
    if run.status == Status::Completed {
        return Ok(run.content.clone().unwrap_or_default());
    }
    match (&run.error, &run.cancel_reason) {
        (Some(failure), _) if failure.code == FailureCode::MaxTurns => Err(failure
            .message
            .replacen("agent exceeded", "sub-agent exceeded", 1)),
        (Some(failure), _) => Err(failure.message.clone()),
        (None, Some(reason)) => Err(format!("cancelled: {reason}")),
        (None, None) => Err("ended without a result".to_owned()),
    }
}

pub fn returned_event(
    tool_call_id: &str,
    run: &Run,
    outcome: &Result<String, String>,
    returned_in: ReturnedIn,
) -> EventKind {
    let (input_tokens, output_tokens, tool_calls) = usage_totals(&run.tree.usage);
    EventKind::AgentReturned {
        tool_call_id: tool_call_id.to_owned(),
        child_id: run.id,
        child_agent: run.agent.clone(),
        duration_ms: run.duration_ms(now()),
        characters: outcome.as_ref().ok().map(|text| text.chars().count()),
        error: outcome.as_ref().err().cloned(),
        input_tokens,
        output_tokens,
        tool_calls,
        awaited_by: returned_in.awaited_by,
        message: returned_in.message,
    }
}

/// The child's result for its caller's model, or the error.
pub fn ad_hoc_result(run: &Run) -> Result<String, String> {
    let text = result(run).map_err(|reason| failure_message(&reason))?;
    match run.completion_status.as_deref() {
        Some(INCOMPLETE) => Ok(format!(
            "[This result is incomplete: no turn was left after {}.]\n\n{text}",
            run.turns
        )),
        _ => Ok(text),
    }
}

/// The text is fixed by the contract.
pub fn failure_message(reason: &str) -> String {
    format!("Subagent task execution failed: {reason}")
}
