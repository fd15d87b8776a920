//! The tree of a run and its waterfall: one row for each run, and for each step of the runs that are open. In a large tree,
//! the runs below others are shown when one of these is selected, or all with `?open=all`.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use jiff::Timestamp;
use maud::{Markup, html};

use crate::domain::counted::counted;
use crate::domain::run::{Run, RunId};
use crate::domain::usage::Cost;
use crate::web::console::format;
use crate::web::console::parts::query_string;
use crate::web::console::request::ConsoleRequest;
use crate::web::console::timeline::{RunTimeline, Span, SpanKind, StepName, StepRow, Timeline};

/// Steps of a tree that are all shown; in a larger tree, only the selected run is open.
const MAX_OPEN_STEPS: usize = 400;
/// Runs of a tree that are all shown; in a larger tree, only those on the path to the selected run and their children.
const MAX_OPEN_RUNS: usize = 300;
/// Rows of a page, unless all are wanted. The selected ones are always shown.
const MAX_ROWS: usize = 600;
/// Rows of a page if all are wanted.
const MAX_ALL_ROWS: usize = 10_000;
/// The width of the waterfall in its own units, and of its shortest part.
const WIDTH: i64 = 1000;
const MIN_WIDTH: i64 = 3;
/// Distances between the marks of the time axis, in milliseconds.
#[rustfmt::skip]
const TICKS: [i64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, 3_600_000, 7_200_000, 21_600_000, 86_400_000,
];

pub struct TreeView<'a> {
    pub request: &'a ConsoleRequest,
    pub runs: &'a [Run],
    pub timeline: &'a Timeline,
    /// By run and turn.
    pub costs: &'a HashMap<(RunId, u32), Cost>,
    pub selected: RunId,
    pub step: Option<&'a StepName>,
    /// Whether a large tree is shown whole.
    pub opens_all: bool,
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

    /// Round times after the start at which the axis has a mark, at most six.
    fn ticks(self) -> impl Iterator<Item = i64> {
        let step = TICKS.into_iter().find(|step| self.length / step < 6);
        let step = step.unwrap_or(self.length);
        (0..=self.length / step).map(move |tick| tick * step)
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
    let mut rows = Rows::default();
    if let Some(first) = view.runs.first() {
        let painter = Painter {
            view,
            axis,
            path: path(view),
            children,
            opens_runs: view.opens_all || view.runs.len() <= MAX_OPEN_RUNS,
            opens_steps: steps <= MAX_OPEN_STEPS,
        };
        painter.add_run(first, None, 0, &mut rows);
    }
    let has_cost = !view.costs.is_empty() || view.runs.iter().any(|run| run.usage.cost.is_some());
    html! {
        div.tree-grid.no-cost[!has_cost] {
        (head(axis))
        ol.tree { @for row in &rows.shown { (row) } }
        @if rows.folded > 0 || rows.left_out > 0 { (more(view, &rows)) }
        @if view.timeline.is_cut {
            p.note { "The log of this tree is long: only its beginning is drawn." }
        }
        (legend())
        }
    }
}

/// The selected run and those above it.
fn path(view: &TreeView<'_>) -> HashSet<RunId> {
    let parents: HashMap<RunId, RunId> = view
        .runs
        .iter()
        .filter_map(|run| Some((run.id, run.parent_id?)))
        .collect();
    let mut path = HashSet::new();
    let mut next = Some(view.selected);
    while let Some(run) = next.filter(|run| path.insert(*run)) {
        next = parents.get(&run).copied();
    }
    path
}

#[derive(Default)]
struct Rows {
    shown: Vec<Markup>,
    /// Runs below those that are not open.
    folded: usize,
    /// Rows beyond the limit.
    left_out: usize,
}

fn more(view: &TreeView<'_>, rows: &Rows) -> Markup {
    let href = step_href(view, view.selected, view.step, true);
    html! {
        p.note {
            @if rows.folded > 0 { (counted(rows.folded, "run")) " below others: select one of these to see its runs. " }
            @if rows.left_out > 0 { (counted(rows.left_out, "more row")) ". " }
            @if !view.opens_all { a href=(href) { "Show all" } }
        }
    }
}

/// The address of a run or of its step.
fn step_href(view: &TreeView<'_>, run: RunId, step: Option<&StepName>, opens_all: bool) -> String {
    let turn = match step {
        Some(StepName::Turn(turn)) => turn.to_string(),
        _ => String::new(),
    };
    let call = match step {
        Some(StepName::Call(call)) => call,
        _ => "",
    };
    let open = if opens_all { "all" } else { "" };
    let query = query_string(&[("turn", &turn), ("call", call), ("open", open)]);
    let href = view.request.run_href(run);
    match query.is_empty() {
        true => href,
        false => format!("{href}?{query}"),
    }
}

fn head(axis: Axis) -> Markup {
    html! {
        div.tree-head {
            span { "Step" }
            svg.axis aria-hidden="true" {
                @for tick in axis.ticks() {
                    @let x = format!("{:.2}%", tick as f64 * 100.0 / axis.length as f64);
                    line x1=(x) x2=(x) y1="26" y2="34" {}
                    @if tick < axis.length * 94 / 100 {
                        text x=(x) y="20" class=(if tick == 0 { "start" } else { "middle" }) { (format::tick(tick.unsigned_abs())) }
                    }
                }
            }
            span.number { "Tokens" }
            span.number.cost { "Cost" }
            span.number { "Time" }
            div.divider role="separator" tabindex="0" aria-orientation="vertical" aria-label="Width of the first column"
                aria-valuemin="20" aria-valuemax="70" aria-valuenow="42" {}
        }
    }
}

fn legend() -> Markup {
    html! {
        p.legend aria-hidden="true" {
            @for kind in SpanKind::ALL { span class=(kind.name()) { (kind.name()) } }
        }
        // The style sheet fills retries with it.
        svg.sr aria-hidden="true" {
            defs {
                pattern #hatched width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
                    rect width="8" height="8" class="between" {}
                    rect width="4" height="8" class="stripe" {}
                }
            }
        }
    }
}

struct Painter<'a> {
    view: &'a TreeView<'a>,
    axis: Axis,
    path: HashSet<RunId>,
    children: HashMap<RunId, Vec<&'a Run>>,
    opens_runs: bool,
    opens_steps: bool,
}

impl Painter<'_> {
    /// The run, its steps, and in place of each delegation the run that it started. The depth of a tree is limited, and so
    /// is this recursion.
    fn add_run(&self, run: &Run, caller: Option<(&Run, &StepRow)>, level: usize, rows: &mut Rows) {
        let empty = RunTimeline::default();
        let timeline = self.view.timeline.runs.get(&run.id).unwrap_or(&empty);
        let is_on_path = self.path.contains(&run.id);
        let is_open = self.opens_runs || is_on_path;
        let folded = if is_open { 0 } else { self.descendants(run) };
        rows.folded += folded;
        let is_called = caller.is_some_and(|(run, step)| self.is_selected(run, step));
        self.add(rows, is_on_path || is_called, || {
            self.run_row(run, timeline, caller, level, folded)
        });
        if !is_open {
            return;
        }
        let children = self.children.get(&run.id).map_or(&[][..], Vec::as_slice);
        let mut shown = HashSet::new();
        if self.opens_steps || run.id == self.view.selected {
            for step in &timeline.steps {
                let of_call = children.iter().filter(|child| {
                    let call = child.tool_call_id.as_ref();
                    matches!(&step.step, StepName::Call(id) if call == Some(id))
                });
                let mut is_delegation = false;
                for child in of_call {
                    is_delegation = true;
                    if shown.insert(child.id) {
                        self.add_run(child, Some((run, step)), level + 1, rows);
                    }
                }
                if !is_delegation {
                    let is_selected = self.is_selected(run, step);
                    self.add(rows, is_selected, || self.step_row(run, step, level + 1));
                }
            }
        }
        for child in children {
            if !shown.contains(&child.id) {
                self.add_run(child, None, level + 1, rows);
            }
        }
    }

    fn add(&self, rows: &mut Rows, is_needed: bool, row: impl FnOnce() -> Markup) {
        let max = match self.view.opens_all {
            true => MAX_ALL_ROWS,
            false => MAX_ROWS,
        };
        match is_needed || rows.shown.len() < max {
            true => rows.shown.push(row()),
            false => rows.left_out += 1,
        }
    }

    fn descendants(&self, run: &Run) -> usize {
        let children = self.children.get(&run.id).map_or(&[][..], Vec::as_slice);
        let below: usize = children.iter().map(|child| self.descendants(child)).sum();
        children.len() + below
    }

    fn is_selected(&self, run: &Run, step: &StepRow) -> bool {
        run.id == self.view.selected && self.view.step == Some(&step.step)
    }

    fn run_row(
        &self,
        run: &Run,
        timeline: &RunTimeline,
        caller: Option<(&Run, &StepRow)>,
        level: usize,
        folded: usize,
    ) -> Markup {
        let href = step_href(self.view, run.id, None, self.view.opens_all);
        let is_called = caller.is_some_and(|(run, step)| self.is_selected(run, step));
        let is_selected = run.id == self.view.selected && self.view.step.is_none() || is_called;
        // What the call waited for before the run began.
        let waits = caller.iter().flat_map(|(_, step)| &step.spans);
        let waits = waits.filter(|span| span.kind == SpanKind::Waiting);
        let spans = waits.copied().chain(timeline.all_spans());
        let status = run.status.as_str();
        let name = run.label.as_deref().unwrap_or(&run.agent);
        let task = run.task.as_deref().map(|task| format::excerpt(task, 60));
        html! {
            li class=(level_class(level)) aria-level=(level + 1) data-level=(level) {
                @if folded == 0 && !timeline.steps.is_empty() {
                    button.fold.needs-scripts type="button" data-fold=(run.id) aria-expanded="true" aria-label=(format!("Fold {name}")) {}
                }
                a.row href=(href) data-row aria-current=[is_selected.then_some("true")] {
                    span.name {
                        span class=(format!("dot {status}")) role="img" aria-label=(status) title=(status) {}
                        @if caller.is_some() { span.muted { "→" } }
                        b class=(if run.error.is_some() { "error" } else { "" }) { (name) }
                        @if folded > 0 { span.kind { "+ " (counted(folded, "run")) } }
                        @if let Some(task) = task { span.muted { (task) } }
                    }
                    (self.bar(spans))
                    span.number { (tokens(run.usage.tokens.total())) }
                    span.number.cost { (format::cost(run.usage.cost)) }
                    span.number { (format::duration(run.duration_ms(self.view.now))) }
                }
            }
        }
    }

    fn step_row(&self, run: &Run, step: &StepRow, level: usize) -> Markup {
        let is_selected = self.is_selected(run, step);
        let (kind, cost) = match &step.step {
            StepName::Turn(turn) => {
                let cost = self.view.costs.get(&(run.id, *turn)).copied();
                (format!("turn {turn}"), cost)
            }
            StepName::Call(_) => ("tool".to_owned(), None),
        };
        let is_turn = matches!(step.step, StepName::Turn(_));
        let took: i64 = step
            .spans
            .iter()
            .map(|span| self.end_of(span) - span.start)
            .sum();
        let href = step_href(self.view, run.id, Some(&step.step), self.view.opens_all);
        html! {
            li class=(level_class(level)) aria-level=(level + 1) data-level=(level) {
                a.row href=(href) data-row aria-current=[is_selected.then_some("true")] {
                    span.name {
                        span class=(if is_turn { "kind model" } else { "kind tool" }) { (kind) }
                        span class=(if step.is_error { "error" } else { "" }) { (step.label) }
                    }
                    (self.bar(step.spans.iter().copied()))
                    span.number {
                        @if let Some((input, output)) = step.tokens { (tokens(input.saturating_add(output))) }
                    }
                    span.number.cost { @if let Some(cost) = cost { (format::cost(Some(cost))) } }
                    span.number { @if step.spans.is_empty() { "copied" } @else { (format::duration(took.max(0).unsigned_abs())) } }
                }
            }
        }
    }

    fn end_of(&self, span: &Span) -> i64 {
        span.end.unwrap_or(self.axis.now).max(span.start)
    }

    /// One path for each kind of span, so that a page with thousands of spans has few elements. For people who do not see
    /// the bar, its label has when it starts and how long each kind lasts.
    fn bar(&self, spans: impl Iterator<Item = Span>) -> Markup {
        let mut paths: [Path; SpanKind::ALL.len()] = Default::default();
        let mut spans: Vec<Span> = spans.collect();
        spans.sort_by_key(|span| span.start);
        let mut label = spans.first().map_or_else(
            || "nothing".to_owned(),
            |span| {
                let after = (span.start - self.axis.start).max(0).unsigned_abs();
                format!("from {}", format::duration(after))
            },
        );
        for span in spans {
            let path = &mut paths[span.kind as usize];
            path.count(span.start, self.end_of(&span));
            let start = self.axis.place(span.start).min(WIDTH - MIN_WIDTH);
            let end = self.axis.place(self.end_of(&span)).max(start + MIN_WIDTH);
            path.add(start, end);
        }
        for (kind, path) in SpanKind::ALL.iter().zip(&paths) {
            if !path.parts.is_empty() {
                let duration = format::duration(path.milliseconds.unsigned_abs());
                let _ = write!(label, ", {} {duration}", kind.name());
            }
        }
        html! {
            svg.bar viewBox=(format!("0 0 {WIDTH} 10")) preserveAspectRatio="none" role="img" aria-label=(label) {
                @for (kind, path) in SpanKind::ALL.iter().zip(&paths) {
                    @if !path.parts.is_empty() { path class=(kind.name()) d=(path.data()) {} }
                }
            }
        }
    }
}

/// The parts of a bar that have one color, from left to right.
#[derive(Default)]
struct Path {
    parts: Vec<(i64, i64)>,
    /// How long the spans last together; what overlaps counts once.
    milliseconds: i64,
    counted_until: i64,
}

impl Path {
    /// `start` must not decrease from call to call.
    fn count(&mut self, start: i64, end: i64) {
        self.milliseconds += (end - start.max(self.counted_until)).max(0);
        self.counted_until = self.counted_until.max(end);
    }

    /// `start` must not decrease from call to call.
    fn add(&mut self, start: i64, end: i64) {
        match self.parts.last_mut() {
            Some((_, last)) if start <= *last => *last = end.max(*last),
            _ => self.parts.push((start, end)),
        }
    }

    fn data(&self) -> String {
        let mut data = String::with_capacity(self.parts.len() * 20);
        for (start, end) in &self.parts {
            let width = end - start;
            let _ = write!(data, "M{start} 1h{width}v8h-{width}z");
        }
        data
    }
}

/// A number of tokens. A screen reader does not see the head of the column.
fn tokens(number: u64) -> Markup {
    html! { (format::count(number)) span.sr { " tokens" } }
}

/// The indentation. Deeper levels than the style sheet has look like the last.
fn level_class(level: usize) -> String {
    format!("l{}", level.min(12))
}
