//! `/ui/compare`: two trees, aligned by their calls.

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value;

use crate::domain::run::Run;
use crate::domain::run_ref::short_id;
use crate::engine::blocking::run_blocking;
use crate::engine::history::run_diff::{self, Change, DiffNode, RunDiff, TreeTotals};
use crate::web::console::diff;
use crate::web::console::format;
use crate::web::console::layout::{Page, Shell};
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
            "A fork and its source, or two runs of the same agent. The page of a run has the button Compare.",
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
    let compared = run_diff::diff(state.runner.store().as_ref(), &a, &b).await?;
    let totals = totals(request, &a, &b, &compared);
    let (shell, nodes) = (request.shell.clone(), compared.nodes);
    // Models choose how long the texts are.
    let nodes = run_blocking(move || {
        let changed = nodes.iter().filter(|node| is_changed(node));
        let views = changed.map(|node| node_view(&shell, node));
        views.collect::<Vec<_>>()
    });
    let nodes = nodes.await;
    Ok(html! {
        (totals)
        @if nodes.is_empty() { (parts::empty("No differences", "Both trees have the same prompts, replies, calls and results.")) }
        div #difference {}
        @for node in &nodes { (node) }
        @if compared.truncated { p.warning { "There are more differences than are shown." } }
    })
}

fn is_changed(node: &DiffNode) -> bool {
    !node.changes.is_empty() || !node.turns.is_empty() || node.a.is_some() != node.b.is_some()
}

fn totals(request: &ConsoleRequest, a: &Run, b: &Run, diff: &RunDiff) -> Markup {
    let run = |run: &Run| {
        html! {
            a href=(request.run_href(run.id)) { (run.agent) " " code { (short_id(run.id)) } }
            " " (format::status(run.status))
        }
    };
    type Read = fn(&TreeTotals) -> Option<f64>;
    type Show = fn(f64) -> String;
    let count: Show = |number| format::thousands(number as u64);
    let rows: [(&str, Read, Show); 7] = [
        ("Runs", |it| Some(it.runs as f64), count),
        ("Replies", |it| Some(it.model_calls as f64), count),
        ("Tool calls", |it| Some(it.tool_calls as f64), count),
        ("Input tokens", |it| Some(it.input_tokens as f64), count),
        ("Output tokens", |it| Some(it.output_tokens as f64), count),
        ("Cost", |it| it.cost_usd, |usd| format::usd(Some(usd))),
        (
            "Duration",
            |it| Some(it.duration_ms as f64),
            |ms| format::duration(ms as u64),
        ),
    ];
    let shown = |value: Option<f64>, show: Show| value.map_or_else(|| "–".to_owned(), show);
    html! {
        div.scroll role="region" aria-label="Totals" tabindex="0" {
            table.list.totals {
                thead { tr { th { span.sr { "Number" } } th.number { (run(a)) } th.number { (run(b)) } th.number { "Difference" } } }
                tbody {
                    @for (name, of, show) in rows {
                        @let (a, b) = (of(&diff.totals.a), of(&diff.totals.b));
                        tr { th scope="row" { (name) } td.number { (shown(a, show)) } td.number { (shown(b, show)) } td.number { (delta(a, b, show)) } }
                    }
                }
            }
        }
    }
}

/// `+120 (+12 %)`, `−3 ms (−5 %)`; nothing if both are equal or one is unknown.
pub fn delta(a: Option<f64>, b: Option<f64>, show: fn(f64) -> String) -> String {
    let Some((a, b)) = a.zip(b).filter(|(a, b)| a != b) else {
        return String::new();
    };
    let sign = if b > a { '+' } else { '−' };
    let share = match a {
        0.0 => String::new(),
        a => format!(" ({sign}{:.0} %)", (b - a).abs() * 100.0 / a),
    };
    format!("{sign}{}{share}", show((b - a).abs()))
}

fn node_view(shell: &Shell, node: &DiffNode) -> Markup {
    let run_href = |id| shell.href(&format!("/runs/{id}"));
    html! {
        section.diff {
            h2 { code { (node.path) } }
            p.small {
                @match node.a { Some(id) => a href=(run_href(id)) { "first" }, None => span.muted { "not in the first" } }
                " · "
                @match node.b { Some(id) => a href=(run_href(id)) { "second" }, None => span.muted { "not in the second" } }
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
    let (before, after) = match (&change.a, &change.b) {
        (Value::String(a), Value::String(b)) => diff::words(a, b),
        (a, b) if a.is_null() || b.is_null() => (plain(a), plain(b)),
        (a, b) => diff::words(&shown(a), &shown(b)),
    };
    html! {
        div.change {
            h4 { (change.field) @if change.truncated { span.muted { " (cut)" } } }
            div.sides {
                pre.text.before tabindex="0" { (before) }
                pre.text.after tabindex="0" { (after) }
            }
        }
    }
}

fn plain(value: &Value) -> Markup {
    html! { (shown(value)) }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => format::prose(text),
        value => format::pretty_json(&value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::delta;

    #[test]
    fn a_delta_has_a_sign_and_a_share() {
        let show = |number: f64| number.to_string();
        let of = |a, b| delta(Some(a), Some(b), show);
        assert_eq!(of(100.0, 120.0), "+20 (+20 %)");
        assert_eq!(of(4.0, 3.0), "−1 (−25 %)");
        assert_eq!([of(2.0, 2.0), of(0.0, 3.0)], ["", "+3"]);
        assert_eq!(delta(None, Some(1.0), show), "");
    }
}
