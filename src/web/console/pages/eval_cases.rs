//! The cases of an evaluation with their runs, a page of them.

use maud::{Markup, html};

use crate::domain::counted::counted;
use crate::domain::evaluation::{EvalId, Evaluation, NEW};
use crate::domain::score::ScoreValue;
use crate::web::console::format;
use crate::web::console::pages::evals;
use crate::web::console::parts::query_string;
use crate::web::console::request::ConsoleRequest;
use crate::web::response::eval::{CaseRunView, CaseView, CasesPage};

/// Cases of one page.
pub const PAGE_SIZE: usize = 25;
const CASE_CHARS: usize = 80;
const ARGUMENT_CHARS: usize = 300;

/// Which columns the table has.
#[derive(Clone, Copy)]
struct Columns {
    has_old: bool,
    has_scores: bool,
    has_cost: bool,
}

impl Columns {
    /// Without that of the case.
    fn count(self) -> usize {
        3 + [self.has_old, self.has_scores, self.has_cost]
            .into_iter()
            .filter(|it| *it)
            .count()
    }
}

pub fn render(request: &ConsoleRequest, eval: &Evaluation, start: u32, page: &CasesPage) -> Markup {
    let mut runs = page.data.iter().flat_map(|case| &case.runs);
    let columns = Columns {
        has_old: eval.request.versions.len() > 1,
        has_scores: !eval.request.scorers.is_empty(),
        has_cost: runs.any(|run| run.cost_usd.is_some()),
    };
    let runs_of_case = u64::from(eval.request.repeat) * eval.request.versions.len() as u64;
    let total = eval.planned / runs_of_case.max(1);
    let end = u64::from(start) + page.data.len() as u64;
    html! {
        h2 #cases { "Cases" }
        @if page.data.is_empty() { p.muted { "No more cases." } }
        @else {
            div.scroll role="region" aria-label="Cases" tabindex="0" {
                table.list.cases {
                    thead {
                        tr {
                            th { "Case" }
                            @if columns.has_old { th { "Version" } }
                            th { "Run" }
                            @if columns.has_scores { th { "Scores" } }
                            th.number { "Tokens" }
                            @if columns.has_cost { th.number { "Cost" } }
                            th.number { "Duration" }
                        }
                    }
                    tbody { @for case in &page.data { (rows(request, case, columns)) } }
                }
            }
        }
        nav.pages aria-label="Pages of cases" {
            p.muted.small { (u64::from(start) + 1) " to " (end) " of " (counted(total, "case")) }
            @if start > 0 { a.button href=(href(request, eval.id, start.saturating_sub(PAGE_SIZE as u32))) rel="prev" { "Back" } }
            @if end < total { a.button href=(href(request, eval.id, end as u32)) rel="next" { "More cases" } }
        }
    }
}

fn href(request: &ConsoleRequest, id: EvalId, start: u32) -> String {
    let query = match start {
        0 => String::new(),
        start => format!("?{}", query_string(&[("cursor", &start.to_string())])),
    };
    format!("{}{query}#cases", evals::href(request, id))
}

/// A row for each run.
fn rows(request: &ConsoleRequest, case: &CaseView, columns: Columns) -> Markup {
    let name = html! {
        (format::excerpt(&case.case, CASE_CHARS))
        @if let Some(source) = case.run { span.muted.small { "from " a href=(request.run_href(source)) { "a recorded run" } } }
    };
    html! {
        @if case.runs.is_empty() {
            tr { td.main { (name) } td.muted colspan=(columns.count()) { "No run has started." } }
        }
        @for (index, run) in case.runs.iter().enumerate() {
            tr {
                @if index == 0 { td.main rowspan=(case.runs.len()) { (name) } }
                @if columns.has_old {
                    td.nowrap { @if run.version == NEW { "new" } @else { "old" } @if run.repeat > 0 { span.muted { " again" } } }
                }
                td { (ending(request, run)) }
                @if columns.has_scores { td { (scores(run)) } }
                td.number { (run.tokens.map_or(String::new(), format::count)) }
                @if columns.has_cost { td.number { (format::usd(run.cost_usd)) } }
                td.number { (run.duration_ms.map_or(String::new(), format::duration)) }
            }
        }
    }
}

fn ending(request: &ConsoleRequest, run: &CaseRunView) -> Markup {
    let outcome = run.outcome.map_or("running", |outcome| outcome.as_str());
    html! {
        span class=(format!("status {outcome}")) { (outcome) } " "
        @if let Some(id) = run.run_id { a.link href=(request.run_href(id)) { "Open" } }
        @if let Some(code) = &run.error { div.error.small { (code) } }
        @if let Some(call) = &run.diverged {
            div.small.muted title=(format::excerpt(&call.arguments, ARGUMENT_CHARS)) {
                (call.path) " calls " code { (call.tool) } " in turn " (call.turn)
            }
        }
    }
}

fn scores(run: &CaseRunView) -> Markup {
    html! {
        @for (index, (name, value)) in run.scores.iter().enumerate() {
            @if index > 0 { ", " }
            span.nowrap {
                (name) " "
                b { @match value { ScoreValue::Number(number) => { (format::decimal(number.to_f64())) }, ScoreValue::Label(label) => { (label) } } }
            }
        }
        @for (name, why) in &run.unscored { div.error.small { (name) ": " (format::excerpt(why, ARGUMENT_CHARS)) } }
    }
}
