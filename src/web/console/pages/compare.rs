//! `/ui/compare`: two trees, aligned by their calls.

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value;

use crate::domain::run::Run;
use crate::engine::history::run_diff::{self, Change, DiffNode, RunDiff, TreeTotals};
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::routes::runs::require_run;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CompareQuery {
    a: Option<String>,
    b: Option<String>,
}

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let query: CompareQuery = request.query()?;
    let (a, b) = (query.a.as_deref(), query.b.as_deref());
    let result = match a.zip(b) {
        Some((a, b)) => compare(request, a, b).await?,
        None => parts::empty(
            "Choose two runs",
            "A fork and its source, or two runs of the same agent.",
        ),
    };
    let body = html! {
        div.head { h1 { "Compare" } }
        form.filters method="get" action=(request.href("/compare")) data-navigate {
            label.grow { span { "First run" } input name="a" value=(a.unwrap_or_default()) placeholder="run_…" required spellcheck="false"; }
            label.grow { span { "Second run" } input name="b" value=(b.unwrap_or_default()) placeholder="run_…" required spellcheck="false"; }
            div.actions { button type="submit" { "Compare" } }
        }
        (result)
    };
    Ok(Page::new("Compare", "Compare", body))
}

async fn compare(request: &ConsoleRequest, a: &str, b: &str) -> Result<Markup, Problem> {
    let (a, b) = (
        request.visible_run(a.trim()).await?,
        request.visible_run(b.trim()).await?,
    );
    let state = &request.state;
    let (a, b) = (require_run(state, a).await?, require_run(state, b).await?);
    let diff = run_diff::diff(state.runner.store().as_ref(), &a, &b).await?;
    let changed = diff.nodes.iter().filter(|node| is_changed(node)).count();
    Ok(html! {
        (totals(request, &a, &b, &diff))
        @if changed == 0 { (parts::empty("No differences", "Both trees have the same prompts, replies, calls and results.")) }
        @for node in diff.nodes.iter().filter(|node| is_changed(node)) { (node_view(request, node)) }
        @if diff.truncated { p.warning { "There are more differences than are shown." } }
    })
}

fn is_changed(node: &DiffNode) -> bool {
    !node.changes.is_empty() || !node.turns.is_empty() || node.a.is_some() != node.b.is_some()
}

fn totals(request: &ConsoleRequest, a: &Run, b: &Run, diff: &RunDiff) -> Markup {
    let run = |run: &Run| {
        html! {
            a href=(request.run_href(run.id)) { (run.agent) " " code { (parts::short_id(&run.id.to_string())) } }
            " " (format::status(run.status))
        }
    };
    type Read = fn(&TreeTotals) -> String;
    let rows: [(&str, Read); 7] = [
        ("Runs", |it| it.runs.to_string()),
        ("Replies", |it| it.model_calls.to_string()),
        ("Tool calls", |it| it.tool_calls.to_string()),
        ("Input tokens", |it| it.input_tokens.to_string()),
        ("Output tokens", |it| it.output_tokens.to_string()),
        ("Cost", |it| format::usd(it.cost_usd)),
        ("Duration", |it| format::duration(it.duration_ms)),
    ];
    html! {
        div.scroll role="region" aria-label="Totals" tabindex="0" {
            table.list.totals {
                thead { tr { th { span.sr { "Number" } } th.number { (run(a)) } th.number { (run(b)) } } }
                tbody {
                    @for (name, of) in rows {
                        tr { th scope="row" { (name) } td.number { (of(&diff.totals.a)) } td.number { (of(&diff.totals.b)) } }
                    }
                }
            }
        }
    }
}

fn node_view(request: &ConsoleRequest, node: &DiffNode) -> Markup {
    html! {
        section.diff {
            h2 { code { (node.path) } }
            p.small {
                @match node.a { Some(id) => a href=(request.run_href(id)) { "first" }, None => span.muted { "not in the first" } }
                " · "
                @match node.b { Some(id) => a href=(request.run_href(id)) { "second" }, None => span.muted { "not in the second" } }
            }
            @if !node.changes.is_empty() { h3.sr { "Run" } }
            @for change in &node.changes { (change_view(change)) }
            @for turn in &node.turns {
                h3 { "Turn " (turn.turn) }
                @for change in &turn.changes { (change_view(change)) }
            }
        }
    }
}

fn change_view(change: &Change) -> Markup {
    html! {
        div.change {
            h4 { (change.field) @if change.truncated { span.muted { " (cut)" } } }
            div.sides {
                pre.text.before tabindex="0" { (shown(&change.a)) }
                pre.text.after tabindex="0" { (shown(&change.b)) }
            }
        }
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => format::prose(text),
        value => format::pretty_json(&value.to_string()),
    }
}
