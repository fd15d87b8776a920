//! `/ui/evals`: the evaluations, newest first.

use jiff::Timestamp;
use maud::{Markup, html};
use serde::Deserialize;

use crate::config::KeyScope::Cancel;
use crate::domain::counted::counted;
use crate::domain::evaluation::{EvalId, EvalState, EvalVersion, Evaluation};
use crate::domain::run::now;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::Cursor;
use crate::web::routes::evals;

const PAGE_SIZE: usize = 25;
/// Characters of a version that are shown: `sha256:` and eight digits.
const VERSION_CHARS: usize = 15;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Form {
    agent: Option<String>,
    cursor: Option<Cursor<EvalId>>,
}

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let Form { agent, cursor } = request.query()?;
    let is_first = cursor.is_none();
    let before = cursor.map(|Cursor(id)| id);
    let list = read(request, agent.clone(), before, PAGE_SIZE).await?;
    let name = agent.unwrap_or_default();
    let next = list.next.map(|next| {
        let query = query_string(&[("agent", &name), ("cursor", &next.to_string())]);
        format!("{}?{query}", request.href("/evals"))
    });
    let is_active = list.evals.iter().any(|it| !it.state.is_terminal());
    let agents = request.state.runner.catalog().current();
    let agents = agents.entries.keys();
    let agents = agents.filter(|name| request.principal.can_use_agent(name));
    let body = html! {
        div.head { h1 { "Evaluations" } }
        form.filters method="get" action=(request.href("/evals")) role="search" data-navigate {
            label { span { "Agent" } input name="agent" list="agents" value=(name) placeholder="Any"; }
            datalist #agents { @for name in agents { option value=(name) {} } }
            div.actions {
                button type="submit" { "Filter" }
                @if !name.is_empty() { a.button.quiet href=(request.href("/evals")) { "Clear" } }
            }
        }
        div #list data-live=(if is_active { "2000" } else { "10000" }) {
            @if !list.evals.is_empty() { (table(request, &list.evals, now())) }
            @else if is_first && name.is_empty() {
                (parts::empty_with(
                    "No evaluations",
                    "An evaluation runs an agent, or two versions of it, over the cases of a dataset. Start one on the agent's page, or in a terminal:",
                    "axed eval planner-scripted --dataset release --server \"$AXED\"",
                ))
            }
            @else { (parts::empty("No evaluations match", "Change or clear the filter.")) }
            (parts::next_page(next))
        }
    };
    Ok(Page::new("Evaluations", "Evaluations", body))
}

/// A page of evaluations; those that have ended with their gates have their results too, which the list of the API leaves out.
pub async fn read(
    request: &ConsoleRequest,
    agent: Option<String>,
    before: Option<EvalId>,
    limit: usize,
) -> Result<evals::VisiblePage, Problem> {
    let mut page =
        evals::visible_page(&request.state, &request.principal, agent, before, limit).await?;
    let store = request.state.runner.store();
    for eval in &mut page.evals {
        if eval.finished_at.is_some()
            && !eval.request.gates.is_empty()
            && let Some(whole) = store.eval(eval.id).await?
        {
            *eval = whole;
        }
    }
    Ok(page)
}

pub fn table(request: &ConsoleRequest, evals: &[Evaluation], now: Timestamp) -> Markup {
    let has_gates = evals.iter().any(|it| !it.request.gates.is_empty());
    let may_cancel = request.may(Cancel) && evals.iter().any(|it| !it.state.is_terminal());
    html! {
        div.scroll role="region" aria-label="Evaluations" tabindex="0" {
            table.list.evals {
                thead {
                    tr {
                        th { "Evaluation" } th { "State" } th { "Progress" } th.number { "Spent" }
                        @if has_gates { th { "Gates" } }
                        th.number { "Accepted" }
                        @if may_cancel { th { span.sr { "Cancel" } } }
                    }
                }
                tbody {
                    @for eval in evals {
                        tr data-row {
                            td.main {
                                a href=(href(request, eval.id)) { (eval.agent) @if let Some(dataset) = &eval.request.dataset { " over " (dataset) } }
                                span.muted.small { (versions(&eval.request.versions)) }
                            }
                            td.state title=[eval.reason.as_deref().map(|reason| format::excerpt(reason, 300))] { (state(eval.state)) }
                            td { (progress(eval)) }
                            td.number { (spent(eval)) }
                            @if has_gates { td { (gates(eval)) } }
                            td.number { (format::ago(eval.created_at, now)) }
                            @if may_cancel { td.number { @if !eval.state.is_terminal() { (cancel_button(request, eval)) } } }
                        }
                    }
                }
            }
        }
    }
}

pub fn href(request: &ConsoleRequest, id: EvalId) -> String {
    request.href(&format!("/evals/{id}"))
}

pub fn state(state: EvalState) -> Markup {
    let name = state.as_str();
    html! { span class=(format!("status {name}")) { (name) } }
}

/// The new version, and the one that it is compared with.
fn versions(versions: &[EvalVersion]) -> Markup {
    html! {
        @for (index, it) in versions.iter().enumerate() {
            @if index > 0 { " against " }
            @if index > 0 && versions[0].agent != it.agent { (it.agent) " " }
            (version(it))
        }
    }
}

/// The beginning of a version's digest.
pub fn version(version: &EvalVersion) -> Markup {
    let short: String = version.version.chars().take(VERSION_CHARS).collect();
    html! { code title=(version.version) { (short) } }
}

pub fn progress(eval: &Evaluation) -> Markup {
    let text = format!(
        "{} of {}",
        format::thousands(eval.ended),
        counted(eval.planned, "run")
    );
    html! {
        @if !eval.state.is_terminal() { progress max=(eval.planned.max(1)) value=(eval.ended) aria-label="Runs that have ended" {} " " }
        span.nowrap { (text) }
    }
}

/// What was spent, and the most that may be.
pub fn spent(eval: &Evaluation) -> Markup {
    html! {
        (format::cost(Some(eval.spent)))
        @if let Some(budget) = eval.request.budget { span.muted { " of " (format::cost(Some(budget))) } }
    }
}

/// How many gates held or fell.
fn gates(eval: &Evaluation) -> Markup {
    let gates = eval.result.as_ref().map(|result| &result.gates[..]);
    let fell = gates.map(|gates| gates.iter().filter(|gate| !gate.held).count());
    html! {
        @match (fell, eval.request.gates.len()) {
            (_, 0) => span.muted { "none" },
            (None, count) => span.muted { (count) },
            (Some(0), count) => { span.status.held { "held" } span.muted.small { " " (count) } },
            (Some(fell), count) => { span.status.fell { "fell" } span.muted.small { " " (fell) " of " (count) } },
        }
    }
}

fn cancel_button(request: &ConsoleRequest, eval: &Evaluation) -> Markup {
    let path = request.shell.api(&format!("/evals/{}/cancel", eval.id));
    html! {
        form.inline.needs-scripts data-post=(path) data-then="reload" {
            button.danger type="submit" aria-label=(format!("Cancel the evaluation of {}", eval.agent)) { "Cancel" }
            span.error role="alert" {}
        }
    }
}
