//! The parts of a run that these commands show.

use std::collections::BTreeMap;

use anyhow::Context;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::domain::content::Content;
use crate::domain::counted::counted;
use crate::domain::failure::Failure;
use crate::domain::run::{RunId, Status};
use crate::domain::terminal_text::escape_json;
use crate::domain::waiting_for::WaitingFor;
use crate::domain::world_event::WaitedEvent;

#[derive(Deserialize)]
pub struct RunDetails {
    pub id: RunId,
    pub agent: String,
    pub status: Status,
    pub input: Content,
    pub content: Option<String>,
    pub partial_content: Option<String>,
    pub model: String,
    pub turns: u64,
    pub duration_ms: u64,
    pub created_at: Timestamp,
    pub parent_id: Option<RunId>,
    pub session: Option<String>,
    #[serde(default)]
    pub labels: serde_json::Map<String, Value>,
    #[serde(default)]
    pub scores: BTreeMap<String, ScoreSummary>,
    pub cancel_reason: Option<String>,
    pub error: Option<Failure>,
    pub waiting_for: Option<WaitingFor>,
    #[serde(default)]
    pub wait: Option<WaitDetails>,
    #[serde(default)]
    pub pending_approvals: Vec<WaitingCall>,
    pub tree: TreeUsage,
}

/// What the wait for an event or a time is for.
#[derive(Deserialize)]
pub struct WaitDetails {
    until: Option<Timestamp>,
    #[serde(flatten)]
    event: Option<WaitedEvent>,
}

#[derive(Deserialize)]
pub struct ScoreSummary {
    mean: Option<f64>,
    #[serde(default)]
    counts: BTreeMap<String, u64>,
}

/// A call that waits for approval. Its arguments may be cut.
#[derive(Deserialize)]
pub struct WaitingCall {
    pub tool: String,
    pub arguments: Value,
}

impl RunDetails {
    /// Why the run did not complete, or what it waits for, on one line; empty if there is nothing to say.
    pub fn reason(&self) -> String {
        if let Some(failure) = &self.error {
            return failure.message.clone();
        }
        if let Some(reason) = &self.cancel_reason {
            return reason.clone();
        }
        if let [call, others @ ..] = &self.pending_approvals[..] {
            let arguments = escape_json(&call.arguments.to_string());
            let more = match others.len() {
                0 => String::new(),
                more => format!(" and {}", counted(more, "more call")),
            };
            return format!("waits for approval of {}{more}: {arguments}", call.tool);
        }
        let waits = |it| format!("waits {}", self.explain_wait(it));
        self.waiting_for.map_or_else(String::new, waits)
    }

    /// As [`explain_wait`], with the event and the time.
    pub fn explain_wait(&self, waiting_for: WaitingFor) -> String {
        let Some(wait) = &self.wait else {
            return explain_wait(waiting_for).to_owned();
        };
        let until = wait.until.map(|until| format!("until {until:.0}"));
        match (waiting_for, &wait.event, until) {
            (WaitingFor::Event, Some(WaitedEvent { event, key }), until) => {
                let until = until.map(|until| format!(", {until}"));
                format!(
                    "for the event {event} of {key}{}",
                    until.unwrap_or_default()
                )
            }
            (WaitingFor::Sleep, _, Some(until)) => until,
            _ => explain_wait(waiting_for).to_owned(),
        }
    }

    /// The means and labels of its scores, such as `grounded 0.8, tone friendly`.
    pub fn scores_text(&self) -> String {
        let texts = self.scores.iter().map(|(name, score)| {
            let mean = score
                .mean
                .map(|mean| format!(" {}", (mean * 1e3).round() / 1e3));
            let labels = score.counts.iter().map(|(label, count)| match count {
                1 => format!(" {label}"),
                count => format!(" {label} ({count})"),
            });
            format!(
                "{name}{}",
                mean.into_iter().chain(labels).collect::<String>()
            )
        });
        texts.collect::<Vec<_>>().join(", ")
    }
}

/// What a run waits for.
pub fn explain_wait(waiting_for: WaitingFor) -> &'static str {
    match waiting_for {
        WaitingFor::Approval => "for approval",
        WaitingFor::Input => "for a person's answer",
        WaitingFor::Reconcile => "for what a person knows of a call",
        WaitingFor::Resume => "until a client resumes it",
        WaitingFor::ClientTools => "for the results of its client's tools",
        WaitingFor::Event => "for an event",
        WaitingFor::Agents => "for agents in the background",
        WaitingFor::Batch => "for a batch of its provider",
        WaitingFor::Sleep => "until a time",
    }
}

/// Usage of a run and its descendants.
#[derive(Deserialize)]
pub struct TreeUsage {
    pub runs: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub tool_calls: u64,
    pub cost_usd: Option<f64>,
}

pub const UNKNOWN_RUN_FORMAT: &str = "this version of axed cannot read the daemon's response";

pub fn parse_run(run: Value) -> anyhow::Result<RunDetails> {
    serde_json::from_value(run).context(UNKNOWN_RUN_FORMAT)
}
