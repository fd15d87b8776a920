//! On an agent's page: its last evaluations, and a form that starts one.

use maud::{Markup, html};

use crate::catalog::{Entry, datasets};
use crate::config::KeyScope;
use crate::domain::run::now;
use crate::engine::blocking::run_blocking;
use crate::web::console::pages::evals;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;

/// The last evaluations that are shown.
const EVALS: usize = 5;

pub async fn render(
    request: &ConsoleRequest,
    entry: &Entry,
    may_start: bool,
) -> Result<Markup, Problem> {
    let name = &entry.name;
    let last = evals::read(request, Some(name.clone()), None, EVALS).await?;
    let dir = request.state.settings.datasets.clone();
    let known = run_blocking(move || datasets::names(&dir)).await;
    let known = known.unwrap_or_default();
    let is_active = last.evals.iter().any(|it| !it.state.is_terminal());
    Ok(html! {
        h2 #evaluations { "Evaluations" }
        div #evals data-live=(if is_active { "2000" } else { "10000" }) {
            @if last.evals.is_empty() { p.muted { "No evaluation yet." } }
            @else {
                (evals::table(request, &last.evals, now()))
                p { a href=(format!("{}?{}", request.href("/evals"), query_string(&[("agent", name)]))) { "All evaluations of " (name) } }
            }
        }
        @if may_start { (form(request, entry, &known)) }
    })
}

fn form(request: &ConsoleRequest, entry: &Entry, known: &[String]) -> Markup {
    let name = &entry.name;
    let agents = request.state.runner.catalog().current();
    let agents = agents.entries.keys();
    let agents = agents.filter(|it| *it != name && request.principal.can_use_agent(it));
    let has_scorers = entry
        .agent
        .as_ref()
        .is_some_and(|it| !it.scorers.is_empty());
    let dataset = known.first().map_or("NAME", String::as_str);
    html! {
        section.panel aria-labelledby="evaluate-title" {
            h2 #evaluate-title { "Evaluate" }
            (parts::needs_scripts("Starting an evaluation"))
            @if !has_scorers { p.muted.small { "The agent has no scorers: only cost, tokens, durations and errors are compared." } }
            form #evaluate.needs-scripts data-post=(request.shell.api("/evals")) data-then="eval" {
                input type="hidden" name="agent" value=(name);
                div.grid {
                    label { span { "Dataset" } input name="dataset-name" data-field="dataset" list="datasets" required placeholder=(dataset) autocomplete="off"; }
                    label { span { "Against (optional)" } input name="against" list="against" placeholder="another agent, or sha256:…" autocomplete="off"; }
                    label { span { "Budget, USD (optional)" } input name="budget" data-type="decimal" inputmode="decimal" placeholder="5"; }
                }
                datalist #datasets { @for name in known { option value=(name) {} } }
                datalist #against { @for name in agents { option value=(name) {} } }
                details {
                    summary { "Gates, repetitions" }
                    div.grid {
                        label { span { "Times each case runs" } input name="repeat" data-type="number" inputmode="numeric" placeholder="1"; }
                        @if request.may(KeyScope::Admin) {
                            label { span { "Calls of tools" }
                                select name="tools" {
                                    option value="" { "default" }
                                    option value="none" { "none: a call ends its case" }
                                    option value="live" { "live: tools are executed" }
                                }
                            }
                        }
                        label { span { "Gates, one a line" } textarea name="gates" rows="2" data-type="lines" placeholder="errors <= 0" {} }
                    }
                }
                div.actions { button.primary type="submit" { "Evaluate" } span.error role="alert" {} }
            }
            p.muted.small { "Or in a terminal: " code { "axed eval " (name) " --dataset " (dataset) } }
        }
    }
}
