//! What a tree did at which time, read from its event log: the bars of the waterfall and the steps below each run.

use std::collections::HashMap;

use jiff::Timestamp;
use serde::Deserialize;

use crate::domain::event::{StoredEvent, is_terminal};
use crate::domain::run::RunId;
use crate::engine::blocking::run_blocking;
use crate::store::StoreError;
use crate::store::events::EventPages;
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
}

impl SpanKind {
    pub const ALL: [Self; 6] = [
        Self::Queued,
        Self::Model,
        Self::Tool,
        Self::Child,
        Self::Waiting,
        Self::Retry,
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

/// The members of an event's data that the timeline reads.
#[derive(Deserialize)]
struct EventFields {
    time: Timestamp,
    #[serde(default)]
    turn: Option<u32>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    tool: Option<String>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    child_agent: Option<String>,
    #[serde(default)]
    is_error: bool,
    #[serde(default)]
    wait_ms: i64,
    #[serde(default)]
    input_tokens: u64,
    #[serde(default)]
    output_tokens: u64,
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
            events.iter().for_each(|event| timeline.add(event));
            timeline
        })
        .await;
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

    fn add(&mut self, event: &StoredEvent) {
        let Ok(fields) = serde_json::from_str::<EventFields>(&event.data) else {
            return;
        };
        let run = self.runs.entry(event.run_id).or_default();
        run.add(&event.name, fields);
    }
}

impl RunTimeline {
    fn add(&mut self, name: &str, fields: EventFields) {
        let now = fields.time.as_millisecond();
        match name {
            "run.queued" => self.spans.push(open(SpanKind::Queued, now)),
            "run.started" => close(&mut self.spans, now),
            "run.paused" => self.spans.push(open(SpanKind::Waiting, now)),
            "run.resumed" => self.resume(now),
            "turn.started" => self.start_turn(fields.turn.unwrap_or_default(), now),
            "retry.scheduled" => self.retry(&fields, now),
            "batch.submitted" => self.switch_turn(fields.turn, SpanKind::Waiting, now),
            "turn.completed" => self.end_turn(fields, now),
            "tool.started" => self.start_call(&fields, SpanKind::Tool, now),
            "agent.called" => self.call_agent(&fields, now),
            "approval.requested" => self.start_call(&fields, SpanKind::Waiting, now),
            "approval.decided" | "agent.returned" => self.end_call(&fields, now),
            "tool.completed" => self.end_call(&fields, now),
            name if is_terminal(name) => self.end(name, now),
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
    fn end(&mut self, name: &str, now: i64) {
        let outcome = name.strip_prefix("run.").unwrap_or(name);
        let is_open =
            |step: &&mut StepRow| step.spans.last().is_some_and(|span| span.end.is_none());
        for step in self.steps.iter_mut().filter(is_open) {
            step.is_error |= outcome == "failed";
            if step.label.is_empty() {
                outcome.clone_into(&mut step.label);
            }
        }
        self.close_all(now);
    }

    /// The process that drove the run ended at an unknown time: what it did until then is drawn until now.
    fn resume(&mut self, now: i64) {
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

    fn turn(&mut self, turn: Option<u32>) -> Option<&mut StepRow> {
        let name = StepName::Turn(turn?);
        self.steps.iter_mut().rev().find(|step| step.step == name)
    }

    fn retry(&mut self, fields: &EventFields, now: i64) {
        let Some(row) = self.turn(fields.turn) else {
            return;
        };
        close(&mut row.spans, now);
        let end = now.saturating_add(fields.wait_ms.max(0));
        row.spans.push(Span {
            kind: SpanKind::Retry,
            start: now,
            end: Some(end),
        });
        row.spans.push(open(SpanKind::Model, end));
    }

    fn switch_turn(&mut self, turn: Option<u32>, kind: SpanKind, now: i64) {
        if let Some(row) = self.turn(turn) {
            close(&mut row.spans, now);
            row.spans.push(open(kind, now));
        }
    }

    fn end_turn(&mut self, fields: EventFields, now: i64) {
        if let Some(row) = self.turn(fields.turn) {
            close(&mut row.spans, now);
            row.label = fields.model.unwrap_or_default();
            row.tokens = Some((fields.input_tokens, fields.output_tokens));
        }
    }

    fn call(&mut self, id: &str) -> Option<&mut StepRow> {
        let is_call = |step: &&mut StepRow| match &step.step {
            StepName::Call(known) => known == id,
            StepName::Turn(_) => false,
        };
        self.steps.iter_mut().rev().find(is_call)
    }

    fn start_call(&mut self, fields: &EventFields, kind: SpanKind, now: i64) {
        let Some(id) = &fields.tool_call_id else {
            return;
        };
        if let Some(row) = self.call(id) {
            close(&mut row.spans, now);
            row.spans.push(open(kind, now));
            return;
        }
        self.steps.push(StepRow {
            step: StepName::Call(id.clone()),
            label: fields.tool.clone().unwrap_or_default(),
            is_error: false,
            tokens: None,
            spans: vec![open(kind, now)],
        });
    }

    fn call_agent(&mut self, fields: &EventFields, now: i64) {
        let id = fields.tool_call_id.as_deref().unwrap_or_default();
        if let Some(row) = self.call(id) {
            close(&mut row.spans, now);
            row.spans.push(open(SpanKind::Child, now));
            if let Some(agent) = &fields.child_agent {
                row.label = format!("{} → {agent}", row.label);
            }
        }
    }

    fn end_call(&mut self, fields: &EventFields, now: i64) {
        let id = fields.tool_call_id.as_deref().unwrap_or_default();
        if let Some(row) = self.call(id) {
            close(&mut row.spans, now);
            row.is_error |= fields.is_error;
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
    use super::{RunTimeline, Span, SpanKind, StepName};

    fn add(timeline: &mut RunTimeline, name: &str, second: i64, rest: &str) {
        let time = jiff::Timestamp::from_second(second).expect("a time");
        let data = format!(r#"{{"time":"{time}"{rest}}}"#);
        timeline.add(name, serde_json::from_str(&data).expect("fields"));
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
        add(&mut run, "run.queued", 1, "");
        add(&mut run, "run.started", 2, "");
        add(&mut run, "turn.started", 2, r#","turn":1"#);
        add(
            &mut run,
            "retry.scheduled",
            3,
            r#","turn":1,"wait_ms":2000"#,
        );
        add(
            &mut run,
            "turn.completed",
            6,
            r#","turn":1,"model":"m","input_tokens":7,"output_tokens":2"#,
        );
        let call = r#","turn":1,"tool_call_id":"c","tool":"write_file""#;
        add(&mut run, "approval.requested", 6, call);
        add(&mut run, "approval.decided", 8, call);
        add(&mut run, "tool.started", 8, call);
        add(
            &mut run,
            "tool.completed",
            9,
            &format!(r#"{call},"is_error":true"#),
        );
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
        let waited = [span(SpanKind::Waiting, 6, 8), span(SpanKind::Tool, 8, 9)];
        assert_eq!(tool.spans, waited);
        add(&mut run, "turn.started", 9, r#","turn":2"#);
        add(&mut run, "run.failed", 11, "");
        let last = run.steps.last().expect("a turn");
        assert!(last.is_error && last.label == "failed");
        assert_eq!(last.spans, [span(SpanKind::Model, 9, 11)]);
    }
}
