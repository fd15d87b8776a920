//! Where the time of a run went, from its events: for the error of a run that is out of time.

use std::collections::HashSet;
use std::fmt;

use jiff::{SignedDuration, Timestamp};

use crate::domain::event::{EventKind, ResumeCause};
use crate::domain::run::now;
use crate::engine::context::RunContext;
use crate::store::StoreError;
use crate::store::events::{self, EventPages};

#[derive(Debug, Default)]
pub struct TimeSpent {
    queued: SignedDuration,
    at_model: SignedDuration,
    in_tools: SignedDuration,
    waiting: SignedDuration,
    stopped: SignedDuration,
    /// What the run does since its last event.
    has_started: bool,
    is_requesting: bool,
    is_paused: bool,
    started: HashSet<String>,
    running_calls: usize,
    waiting_calls: usize,
    last: Option<Timestamp>,
}

impl TimeSpent {
    /// Until now.
    pub async fn of_run(context: &RunContext) -> Result<Self, StoreError> {
        let (store, scope) = (context.engine.journal.store(), context.run.scope);
        let mut pages = EventPages::of_run(&**store, scope.root, scope.run);
        let mut spent = Self::default();
        while let Some(page) = pages.next().await? {
            for event in page {
                let event = events::recorded(&event)?;
                spent.apply(event.time, &event.kind);
            }
        }
        spent.advance(now());
        Ok(spent)
    }

    fn apply(&mut self, time: Timestamp, event: &EventKind) {
        if let EventKind::RunResumed {
            cause: ResumeCause::Restart,
            ..
        } = event
        {
            // No process drove the run.
            let elapsed = self.elapsed(time);
            self.stopped += elapsed;
        } else {
            self.advance(time);
        }
        match event {
            EventKind::RunStarted { .. } => self.has_started = true,
            EventKind::RunPaused { .. } => self.is_paused = true,
            EventKind::RunResumed { .. } => self.is_paused = false,
            EventKind::TurnStarted { .. } => self.is_requesting = true,
            EventKind::TurnCompleted { .. } => self.is_requesting = false,
            // Another start of a call follows a person's answer, with which it runs already.
            EventKind::ToolStarted { tool_call_id, .. } => {
                self.running_calls += usize::from(self.started.insert(tool_call_id.clone()));
            }
            EventKind::ToolCompleted { .. } => {
                self.running_calls = self.running_calls.saturating_sub(1);
            }
            EventKind::ApprovalRequested { .. } => self.waiting_calls += 1,
            EventKind::ApprovalDecided { .. } => {
                self.waiting_calls = self.waiting_calls.saturating_sub(1);
            }
            // The call that asks has started, but does nothing meanwhile.
            EventKind::InputRequested { .. } | EventKind::WaitStarted { .. } => {
                self.running_calls = self.running_calls.saturating_sub(1);
                self.waiting_calls += 1;
            }
            EventKind::InputAnswered { .. } | EventKind::WaitEnded { .. } => {
                self.waiting_calls = self.waiting_calls.saturating_sub(1);
                self.running_calls += 1;
            }
            _ => {}
        }
    }

    /// Counts the time since the last event.
    fn advance(&mut self, time: Timestamp) {
        let elapsed = self.elapsed(time);
        if !self.has_started {
            self.queued += elapsed;
        } else if self.is_requesting {
            self.at_model += elapsed;
        } else if self.running_calls > 0 {
            self.in_tools += elapsed;
        } else if self.is_paused || self.waiting_calls > 0 {
            self.waiting += elapsed;
        }
    }

    fn elapsed(&mut self, time: Timestamp) -> SignedDuration {
        let last = self.last.replace(time).unwrap_or(time);
        last.duration_until(time).max(SignedDuration::ZERO)
    }
}

/// In seconds, without what took less than half of one. The time in the queue is before the run's limit begins.
impl fmt::Display for TimeSpent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.at_model, "at the model"),
            (self.in_tools, "in tools"),
            (self.waiting, "waiting"),
            (self.stopped, "stopped"),
            (self.queued, "in the queue before"),
        ];
        let parts = parts.map(|(time, place)| ((time.as_millis() + 500) / 1000, place));
        let shown = parts.iter().filter(|(seconds, _)| *seconds > 0);
        for (index, (seconds, place)) in shown.enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{seconds}s {place}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::TimeSpent;
    use crate::domain::event::EventKind;

    #[test]
    fn the_time_between_events_belongs_to_what_the_run_does() {
        let mut spent = TimeSpent::default();
        let mut apply = |second: i64, name: &str, data: serde_json::Value| {
            let kind: EventKind =
                serde_json::from_str(&json!({ name: data }).to_string()).expect(name);
            spent.apply(Timestamp::from_second(second).expect("a time"), &kind);
        };
        let call = json!({"turn": 1, "tool_call_id": "c", "tool": "t", "arguments": {}});
        let result = json!({"turn": 1, "tool_call_id": "c", "tool": "t", "duration_ms": 1, "is_error": false, "result": ""});
        let approval = json!({"turn": 1, "tool_call_id": "d", "tool": "t", "arguments": {}, "arguments_hash": format!("sha256:{:064}", 0)});
        let reply = json!({
            "turn": 1, "model": "m", "stop_reason": null, "input_tokens": 1, "output_tokens": 1, "cache_read_tokens": 0,
            "cache_write_tokens": 0, "tool_calls": [],
        });
        apply(0, "run.queued", json!({}));
        apply(
            4,
            "run.started",
            json!({"model": "a/m", "agent_version": "1"}),
        );
        apply(
            4,
            "turn.started",
            json!({"turn": 1, "messages": 1, "results": 0}),
        );
        apply(34, "turn.completed", reply);
        apply(34, "tool.started", call);
        apply(35, "approval.requested", approval);
        apply(41, "tool.completed", result);
        apply(50, "run.resumed", json!({"attempt": 2, "cause": "restart"}));
        apply(
            53,
            "approval.decided",
            json!({"tool_call_id": "d", "decision": "approved"}),
        );
        apply(
            60,
            "turn.started",
            json!({"turn": 2, "messages": 3, "results": 1}),
        );
        assert_eq!(
            spent.to_string(),
            "30s at the model, 7s in tools, 3s waiting, 9s stopped, 4s in the queue before"
        );
        assert_eq!(TimeSpent::default().to_string(), "");
    }
}
