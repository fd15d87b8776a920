//! The tree of a run and its waterfall: one row for each run, and for each step of the runs that are open.

use std::collections::HashMap;

use jiff::Timestamp;
use maud::{Markup, html};

use crate::domain::run::{Run, RunId};
use crate::domain::usage::Cost;
use crate::web::console::format;
use crate::web::console::parts::query_string;
use crate::web::console::request::ConsoleRequest;
use crate::web::console::timeline::{RunTimeline, Span, SpanKind, StepName, StepRow, Timeline};

/// Steps of a tree that are all shown; in a larger tree, only the selected run is open.
const MAX_OPEN_STEPS: usize = 400;
/// Parts of one bar. Further ones are left out.
const MAX_SPANS: usize = 80;
/// The width of the waterfall in its own units.
const WIDTH: i64 = 1000;

pub struct TreeView<'a> {
    pub request: &'a ConsoleRequest,
    pub runs: &'a [Run],
    pub timeline: &'a Timeline,
    /// By run and turn.
    pub costs: &'a HashMap<(RunId, u32), Cost>,
    pub selected: RunId,
    pub step: Option<&'a StepName>,
    pub now: Timestamp,
}

/// The time that the waterfall covers, in milliseconds of the Unix epoch.
#[derive(Clone, Copy)]
struct Axis {
    start: i64,
    length: i64,
    now: i64,
}

impl Axis {
    fn new(runs: &[Run], now: Timestamp) -> Self {
        let now = now.as_millisecond();
        let starts = runs.iter().map(|run| run.created_at.as_millisecond());
        let ends = runs
            .iter()
            .map(|run| run.finished_at.map_or(now, Timestamp::as_millisecond));
        let start = starts.min().unwrap_or(now);
        Self {
            start,
            length: (ends.max().unwrap_or(now) - start).max(1),
            now,
        }
    }

    fn place(self, time: i64) -> i64 {
        ((time - self.start).clamp(0, self.length) * WIDTH) / self.length
    }
}

pub fn render(view: &TreeView<'_>) -> Markup {
    let mut children: HashMap<RunId, Vec<&Run>> = HashMap::new();
    for run in view.runs {
        if let Some(parent) = run.parent_id {
            children.entry(parent).or_default().push(run);
        }
    }
    let axis = Axis::new(view.runs, view.now);
    let steps: usize = view.timeline.runs.values().map(|run| run.steps.len()).sum();
    let mut rows = Vec::new();
    if let Some(first) = view.runs.first() {
        let painter = Painter {
            view,
            axis,
            children,
            opens_all: steps <= MAX_OPEN_STEPS,
        };
        painter.add_run(first, 0, &mut rows);
    }
    html! {
        (head(axis))
        ol.tree { @for row in &rows { (row) } }
        @if view.timeline.is_cut {
            p.muted.small { "The log of this tree is long: only its beginning is drawn." }
        }
        (legend())
    }
}

fn head(axis: Axis) -> Markup {
    html! {
        div.tree-head aria-hidden="true" {
            span { "Step" }
            span { "Waterfall, " (format::duration(axis.length.unsigned_abs())) }
            span.number { "Tokens" }
            span.number { "Cost" }
            span.number { "Time" }
        }
    }
}

fn legend() -> Markup {
    html! {
        p.legend aria-hidden="true" {
            @for kind in SpanKind::ALL { span class=(kind.name()) { (kind.name()) } }
        }
    }
}

struct Painter<'a> {
    view: &'a TreeView<'a>,
    axis: Axis,
    children: HashMap<RunId, Vec<&'a Run>>,
    opens_all: bool,
}

impl Painter<'_> {
    /// The run, its steps, and below each call the run that it started. The depth of a tree is limited, and so is this
    /// recursion.
    fn add_run(&self, run: &Run, level: usize, rows: &mut Vec<Markup>) {
        let empty = RunTimeline::default();
        let timeline = self.view.timeline.runs.get(&run.id).unwrap_or(&empty);
        let is_open = self.opens_all || run.id == self.view.selected;
        rows.push(self.run_row(run, timeline, level));
        let children = self.children.get(&run.id).map_or(&[][..], Vec::as_slice);
        let mut shown = vec![false; children.len()];
        if is_open {
            for step in &timeline.steps {
                rows.push(self.step_row(run, step, level + 1));
                let StepName::Call(call) = &step.step else {
                    continue;
                };
                for (at, child) in children.iter().enumerate() {
                    if !shown[at] && child.tool_call_id.as_ref() == Some(call) {
                        shown[at] = true;
                        self.add_run(child, level + 2, rows);
                    }
                }
            }
        }
        for (at, child) in children.iter().enumerate() {
            if !shown[at] {
                self.add_run(child, level + 1, rows);
            }
        }
    }

    fn run_row(&self, run: &Run, timeline: &RunTimeline, level: usize) -> Markup {
        let request = self.view.request;
        let is_selected = run.id == self.view.selected && self.view.step.is_none();
        let name = run.label.as_deref().unwrap_or(&run.agent);
        let task = run.task.as_deref().map(|task| format::excerpt(task, 60));
        html! {
            li class=(level_class(level)) {
                a.row href=(request.run_href(run.id)) data-row aria-current=[is_selected.then_some("true")] {
                    span.name {
                        span class=(format!("dot {}", run.status.as_str())) title=(run.status.as_str()) {}
                        b { (name) }
                        @if let Some(task) = task { span.muted { (task) } }
                    }
                    (self.bar(timeline.all_spans()))
                    span.number { (format::count(run.usage.tokens.total())) }
                    span.number { (format::cost(run.usage.cost)) }
                    span.number { (format::duration(run.duration_ms(self.view.now))) }
                }
            }
        }
    }

    fn step_row(&self, run: &Run, step: &StepRow, level: usize) -> Markup {
        let is_selected = run.id == self.view.selected && self.view.step == Some(&step.step);
        let (kind, query, cost) = match &step.step {
            StepName::Turn(turn) => {
                let number = turn.to_string();
                let cost = self.view.costs.get(&(run.id, *turn)).copied();
                (
                    format!("turn {turn}"),
                    query_string(&[("turn", &number)]),
                    cost,
                )
            }
            StepName::Call(call) => ("tool".to_owned(), query_string(&[("call", call)]), None),
        };
        let is_turn = matches!(step.step, StepName::Turn(_));
        let took: i64 = step
            .spans
            .iter()
            .map(|span| self.end_of(span) - span.start)
            .sum();
        let href = format!("{}?{query}", self.view.request.run_href(run.id));
        html! {
                    li class=(level_class(level)) {
                        a.row href=(href) data-row aria-current=[is_selected.then_some("true")] {
                            span.name {
                                span class=(if is_turn { "kind model" } else { "kind tool" }) { (kind) }
                                span class=(if step.is_error { "error" } else { "" }) { (step.label) }
                            }
                            (self.bar(step.spans.iter().copied()))
                            span.number {
                                @if let Some((input, output)) = step.tokens { (format::count(input.saturating_add(output))) }
                            }
                            span.number { @if let Some(cost) = cost { (format::cost(Some(cost))) } }
        span.number { @if step.spans.is_empty() { "copied" } @else { (format::duration(took.max(0).unsigned_abs())) } }
                        }
                    }
                }
    }

    fn end_of(&self, span: &Span) -> i64 {
        span.end.unwrap_or(self.axis.now).max(span.start)
    }

    fn bar(&self, spans: impl Iterator<Item = Span>) -> Markup {
        html! {
            svg.bar viewBox=(format!("0 0 {WIDTH} 10")) preserveAspectRatio="none" aria-hidden="true" {
                @for span in spans.take(MAX_SPANS) {
                    @let start = self.axis.place(span.start);
                    @let width = (self.axis.place(self.end_of(&span)) - start).max(3);
                    rect class=(span.kind.name()) x=(start.min(WIDTH - 3)) y="1" width=(width) height="8" {}
                }
            }
        }
    }
}

/// The indentation. Deeper levels than the style sheet has look like the last.
fn level_class(level: usize) -> String {
    format!("l{}", level.min(12))
}
