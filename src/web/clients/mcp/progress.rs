//! Progress of a call, from the events of its run's tree.

use rmcp::model::{ProgressNotificationParam, ProgressToken};
use serde_json::{Value, json};

use crate::domain::event::{Event, EventKind};
use crate::domain::message::shorten;

/// Maximum characters of a text that a model or a provider wrote.
const MAX_TEXT: usize = 200;

/// The notification about an event; `None` for events that say nothing new to a person.
#[expect(
    clippy::cast_precision_loss,
    reason = "a tree has far fewer than 2^53 events"
)]
pub fn notification(token: &ProgressToken, seq: u64, event: &Event) -> Option<Value> {
    let text = describe(event)?;
    // The number of the event grows, and progress has to.
    let params = ProgressNotificationParam::new(token.clone(), seq as f64)
        .with_message(format!("{}: {text}", event.agent));
    Some(json!({ "jsonrpc": "2.0", "method": "notifications/progress", "params": params }))
}

fn describe(event: &Event) -> Option<String> {
    let short = |text: &str| shorten(text, MAX_TEXT);
    Some(match &event.kind {
        EventKind::RunQueued { .. } if event.depth == 0 => "queued".to_owned(),
        EventKind::RunStarted { .. } if event.depth == 0 => "started".to_owned(),
        EventKind::TurnStarted { turn, .. } => format!("turn {turn}"),
        EventKind::ToolStarted { tool, .. } => format!("calls {}", short(tool)),
        EventKind::AgentCalled {
            child_agent, task, ..
        } => format!("calls the agent {}: {}", short(child_agent), short(task)),
        EventKind::AgentReturned { child_agent, .. } => {
            format!("the agent {} has returned", short(child_agent))
        }
        EventKind::ApprovalRequested { tool, .. } => {
            format!("waits for approval of {}", short(tool))
        }
        EventKind::ApprovalDecided { decision, .. } => decision.as_str().to_owned(),
        EventKind::InputRequested { question, .. } => {
            format!("waits for an answer: {}", short(question))
        }
        kind @ EventKind::WaitStarted { .. } => {
            format!("waits {}", short(&kind.waits().unwrap_or_default()))
        }
        EventKind::WaitEnded { .. } => "goes on".to_owned(),
        EventKind::InputAnswered { outcome, .. } => outcome.as_str().to_owned(),
        EventKind::RetryScheduled { reason, .. } => {
            format!("repeats a request to its model: {}", short(reason))
        }
        EventKind::TurnDelayed { .. } => "waits for the rate limit of its provider".to_owned(),
        EventKind::BatchSubmitted { .. } => "waits for a batch of its provider".to_owned(),
        EventKind::RunPaused { .. } => "paused".to_owned(),
        EventKind::RunResumed { .. } => "resumed".to_owned(),
        EventKind::RunCancelling { .. } => "is being cancelled".to_owned(),
        _ => return None,
    })
}
