//! What a tree did at which time, read from its event log: the bars of the waterfall and the steps below each run.

use std::collections::HashMap;

use crate::domain::event::{Event, EventKind};
use crate::domain::run::{RunId, Status};
use crate::engine::blocking::run_blocking;
use crate::store::StoreError;
use crate::store::events::{self, EventPages};
use crate::store::run_store::RunStore;
use crate::store::turn_record::TurnRecord;

/// Events of a tree that are drawn.
const MAX_EVENTS: usize = 100_000;

/// What a run did during a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpanKind {
    Queued,
    Model,
    Tool,
    /// A child run works.
    Child,
    Waiting,
    Retry,
    /// Its last part, if it failed.
    Failed,
}

impl SpanKind {
    pub const ALL: [Self; 7] = [
        Self::Queued,
        Self::Model,
        Self::Tool,
        Self::Child,
        Self::Waiting,
        Self::Retry,
        Self::Failed,
    ];

    /// The class in the style sheet, and the name in the legend.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Model => "model",
            Self::Tool => "tool",
            Self::Child => "child",
            Self::Waiting => "waiting",
            Self::Retry => "retry",
            Self::Failed => "failed",
        }
    }
}

/// A part of a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub kind: SpanKind,
    /// Milliseconds of the Unix epoch.
    pub start: i64,
    /// `None` while it lasts.
    pub end: Option<i64>,
}

/// A turn or a tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRow {
    pub step: StepName,
    /// What is shown: the model or the tool.
    pub label: String,
    pub is_error: bool,
    pub tokens: Option<(u64, u64)>,
    /// Empty for a turn that was copied from another run.
    pub spans: Vec<Span>,
}

impl StepRow {
    fn fail(&mut self) {
        self.is_error = true;
        if let Some(last) = self.spans.last_mut() {
            last.kind = SpanKind::Failed;
        }
    }
}

/// Identifies a step within its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepName {
    Turn(u32),
    Call(String),
}

/// What one run did.
#[derive(Debug, Default)]
pub struct RunTimeline {
    pub steps: Vec<StepRow>,
    /// Spans that belong to no step: the queue, and pauses.
    pub spans: Vec<Span>,
}

impl RunTimeline {
    pub fn all_spans(&self) -> impl Iterator<Item = Span> {
        let steps = self.steps.iter().flat_map(|step| &step.spans);
        self.spans.iter().chain(steps).copied()
    }
}

/// What the runs of a tree did.
#[derive(Debug, Default)]
pub struct Timeline {
    pub runs: HashMap<RunId, RunTimeline>,
    /// Whether the log has more events than are drawn.
    pub is_cut: bool,
}

/// Reads the log of the tree of `root`.
pub async fn read(store: &dyn RunStore, root: RunId) -> Result<Timeline, StoreError> {
    let mut timeline = Timeline::default();
    let mut count = 0;
    let mut pages = EventPages::of_tree(store, root);
    while let Some(events) = pages.next().await? {
        count += events.len();
        // Other requests need this thread.
        timeline = run_blocking(move || {
            for event in &events {
                timeline.add(events::recorded(event)?);
            }
            Ok::<_, StoreError>(timeline)
        })
        .await?;
        if count >= MAX_EVENTS {
            timeline.is_cut = !pages.is_at_end();
            break;
        }
    }
    Ok(timeline)
}

impl Timeline {
    /// Adds a turn that a fork took over: it has no events. Call it for these turns in their order.
    pub fn add_copied_turn(&mut self, run: RunId, turn: &TurnRecord) {
        let steps = &mut self.runs.entry(run).or_default().steps;
        let copied = steps
            .iter()
            .take_while(|step| step.spans.is_empty())
            .count();
        let row = StepRow {
            step: StepName::Turn(turn.turn),
            label: turn.model.clone(),
            is_error: false,
            tokens: turn.usage.map(|usage| (usage.input, usage.output)),
            spans: Vec::new(),
        };
        steps.insert(copied, row);
    }

    fn add(&mut self, event: Event) {
        let run = self.runs.entry(event.run_id).or_default();
        run.add(event.kind, event.time.as_millisecond());
    }
}

impl RunTimeline {
    fn add(&mut self, kind: EventKind, now: i64) {
        match kind {
            EventKind::RunQueued { .. } => self.spans.push(open(SpanKind::Queued, now)),
            EventKind::RunStarted { .. } => close(&mut self.spans, now),
            EventKind::RunPaused { .. } => self.spans.push(open(SpanKind::Waiting, now)),
            // The process that drove the run ended at an unknown time: what it did until then is drawn until now.
            EventKind::RunResumed { .. } => self.close_all(now),
            EventKind::TurnStarted { turn, .. } => self.start_turn(turn, now),
            EventKind::RetryScheduled { turn, wait_ms, .. } => self.retry(turn, wait_ms, now),
            EventKind::BatchSubmitted { turn, .. } => {
                if let Some(row) = self.turn(turn) {
                    close(&mut row.spans, now);
                    row.spans.push(open(SpanKind::Waiting, now));
                }
            }
            EventKind::TurnCompleted {
                turn,
                model,
                input_tokens,
                output_tokens,
                ..
            } => {
                if let Some(row) = self.turn(turn) {
                    close(&mut row.spans, now);
                    row.label = model;
                    row.tokens = Some((input_tokens, output_tokens));
                }
            }
            EventKind::ToolStarted {
                tool_call_id, tool, ..
            } => self.start_call(tool_call_id, tool, SpanKind::Tool, now),
            EventKind::ApprovalRequested {
                tool_call_id, tool, ..
            } => self.start_call(tool_call_id, tool, SpanKind::Waiting, now),
            EventKind::InputRequested { tool_call_id, .. }
            | EventKind::WaitStarted { tool_call_id, .. } => {
                if let Some(row) = self.call(&tool_call_id) {
                    close(&mut row.spans, now);
                    row.spans.push(open(SpanKind::Waiting, now));
                }
            }
            EventKind::AgentCalled {
                tool_call_id,
                child_agent,
                ..
            } => {
                if let Some(row) = self.call(&tool_call_id) {
                    close(&mut row.spans, now);
                    row.spans.push(open(SpanKind::Child, now));
                    row.label = format!("{} → {child_agent}", row.label);
                }
            }
            EventKind::ApprovalDecided { tool_call_id, .. }
            | EventKind::AgentReturned { tool_call_id, .. } => {
                self.end_call(&tool_call_id, false, now);
            }
            EventKind::ToolCompleted {
                tool_call_id,
                is_error,
                ..
            } => self.end_call(&tool_call_id, is_error, now),
            EventKind::RunCompleted { .. } => self.end(Status::Completed, now),
            EventKind::RunFailed { .. } => self.end(Status::Failed, now),
            EventKind::RunCancelled { .. } => self.end(Status::Cancelled, now),
            _ => {}
        }
    }

    fn close_all(&mut self, now: i64) {
        close(&mut self.spans, now);
        for step in &mut self.steps {
            close(&mut step.spans, now);
        }
    }

    /// What the run was doing when it ended has no event of its own.
    fn end(&mut self, status: Status, now: i64) {
        let is_open =
            |step: &&mut StepRow| step.spans.last().is_some_and(|span| span.end.is_none());
        for step in self.steps.iter_mut().filter(is_open) {
            if status == Status::Failed {
                step.fail();
            }
            if step.label.is_empty() {
                status.as_str().clone_into(&mut step.label);
            }
        }
        self.close_all(now);
    }

    fn start_turn(&mut self, turn: u32, now: i64) {
        self.steps.push(StepRow {
            step: StepName::Turn(turn),
            label: String::new(),
            is_error: false,
            tokens: None,
            spans: vec![open(SpanKind::Model, now)],
        });
    }

    fn turn(&mut self, turn: u32) -> Option<&mut StepRow> {
        let name = StepName::Turn(turn);
        self.steps.iter_mut().rev().find(|step| step.step == name)
    }

    fn retry(&mut self, turn: u32, wait_ms: u64, now: i64) {
        let Some(row) = self.turn(turn) else {
            return;
        };
        close(&mut row.spans, now);
        let end = now.saturating_add_unsigned(wait_ms);
        row.spans.push(Span {
            kind: SpanKind::Retry,
            start: now,
            end: Some(end),
        });
        row.spans.push(open(SpanKind::Model, end));
    }

    fn call(&mut self, id: &str) -> Option<&mut StepRow> {
        let is_call = |step: &&mut StepRow| match &step.step {
            StepName::Call(known) => known == id,
            StepName::Turn(_) => false,
        };
        self.steps.iter_mut().rev().find(is_call)
    }

    fn start_call(&mut self, id: String, tool: String, kind: SpanKind, now: i64) {
        if let Some(row) = self.call(&id) {
            close(&mut row.spans, now);
            row.spans.push(open(kind, now));
            return;
        }
        self.steps.push(StepRow {
            step: StepName::Call(id),
            label: tool,
            is_error: false,
            tokens: None,
            spans: vec![open(kind, now)],
        });
    }

    fn end_call(&mut self, id: &str, is_error: bool, now: i64) {
        if let Some(row) = self.call(id) {
            close(&mut row.spans, now);
            if is_error {
                row.fail();
            }
        }
    }
}

fn open(kind: SpanKind, start: i64) -> Span {
    Span {
        kind,
        start,
        end: None,
    }
}

/// Ends the span that lasts, if one does.
fn close(spans: &mut [Span], now: i64) {
    if let Some(last) = spans.last_mut()
        && last.end.is_none()
    {
        last.end = Some(now.max(last.start));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::{EventKind, RunTimeline, Span, SpanKind, StepName};
    use crate::domain::event::Decision;
    use crate::domain::failure::{Failure, FailureCode};
    use crate::domain::input::ArgumentsHash;

    fn add(timeline: &mut RunTimeline, second: i64, kind: EventKind) {
        timeline.add(kind, second * 1000);
    }

    fn arguments() -> Arc<RawValue> {
        RawValue::from_string("{}".to_owned()).expect("JSON").into()
    }

    fn turn_started(turn: u32) -> EventKind {
        EventKind::TurnStarted {
            turn,
            messages: 1,
            results: 0,
        }
    }

    fn span(kind: SpanKind, start: i64, end: i64) -> Span {
        Span {
            kind,
            start: start * 1000,
            end: Some(end * 1000),
        }
    }

    #[test]
    fn events_become_spans_of_steps() {
        let mut run = RunTimeline::default();
        let queued = EventKind::RunQueued {
            parent_id: None,
            tool_call_id: None,
            request: None,
        };
        add(&mut run, 1, queued);
        let started = EventKind::RunStarted {
            model: String::new(),
            agent_version: String::new(),
        };
        add(&mut run, 2, started);
        add(&mut run, 2, turn_started(1));
        let retry = EventKind::RetryScheduled {
            turn: 1,
            model: "m".to_owned(),
            attempt: 1,
            wait_ms: 2000,
            reason: String::new(),
        };
        add(&mut run, 3, retry);
        let completed = EventKind::TurnCompleted {
            turn: 1,
            model: "m".to_owned(),
            stop_reason: None,
            input_tokens: 7,
            output_tokens: 2,
            cache_read_tokens: 0,
            cache_write_tokens: 0,
            reasoning_tokens: None,
            tool_calls: Vec::new(),
        };
        add(&mut run, 6, completed);
        let (tool_call_id, tool) = ("c".to_owned(), "write_file".to_owned());
        let requested = EventKind::ApprovalRequested {
            turn: 1,
            tool_call_id: tool_call_id.clone(),
            tool: tool.clone(),
            arguments: arguments(),
            arguments_hash: ArgumentsHash::compute(&arguments()),
            truncated: false,
            deadline: None,
        };
        add(&mut run, 6, requested);
        let decided = EventKind::ApprovalDecided {
            tool_call_id: tool_call_id.clone(),
            decision: Decision::Approved,
            arguments: None,
            truncated: false,
            reason: None,
            by: None,
        };
        add(&mut run, 8, decided);
        let call = EventKind::ToolStarted {
            turn: 1,
            tool_call_id: tool_call_id.clone(),
            tool: tool.clone(),
            arguments: arguments(),
            truncated: false,
        };
        add(&mut run, 8, call);
        let result = EventKind::ToolCompleted {
            turn: 1,
            tool_call_id,
            tool,
            duration_ms: 1000,
            is_error: true,
            result: String::new(),
            truncated: false,
        };
        add(&mut run, 9, result);
        assert_eq!(run.spans, [span(SpanKind::Queued, 1, 2)]);
        let [turn, tool] = &run.steps[..] else {
            panic!("two steps: {:?}", run.steps);
        };
        assert_eq!(
            (&turn.step, turn.tokens),
            (&StepName::Turn(1), Some((7, 2)))
        );
        let model = [
            span(SpanKind::Model, 2, 3),
            span(SpanKind::Retry, 3, 5),
            span(SpanKind::Model, 5, 6),
        ];
        assert_eq!(turn.spans, model);
        assert!(tool.is_error && tool.label == "write_file" && !turn.is_error);
        let waited = [span(SpanKind::Waiting, 6, 8), span(SpanKind::Failed, 8, 9)];
        assert_eq!(tool.spans, waited);
        add(&mut run, 9, turn_started(2));
        let failed = EventKind::RunFailed {
            error: Failure {
                code: FailureCode::Internal,
                message: "no".to_owned(),
                category: "internal".to_owned(),
                retryable: false,
            },
        };
        add(&mut run, 11, failed);
        let last = run.steps.last().expect("a turn");
        assert!(last.is_error && last.label == "failed");
        assert_eq!(last.spans, [span(SpanKind::Failed, 9, 11)]);
    }
}
