//! What an evaluation has measured: gates, versions by scorers, amounts, errors, and the cases that have flipped.

use std::collections::BTreeSet;

use maud::{Markup, html};

use crate::domain::counted::counted;
use crate::domain::evaluation::{EvalResult, FlippedCase, ScorerResult, VersionTotals};
use crate::web::console::format;
use crate::web::console::interval;
use crate::web::console::pages::compare;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;

/// Flipped cases that are shown at once; the others unfold.
const MAX_FLIPPED: usize = 25;
/// Characters of a case's id in a list.
const CASE_CHARS: usize = 80;

pub fn render(request: &ConsoleRequest, result: &EvalResult) -> Markup {
    let cases = result.totals.cases;
    let in_each = match result.against {
        Some(_) => "in each version",
        None => "without an error",
    };
    html! {
        (gates(result))
        @if cases == 0 {
            (parts::empty("No case counts", &format!("A case counts if a run of it completed {in_each}. The errors below say why none did.")))
        } @else {
            (scorers(result))
            (amounts(result))
        }
        (errors(result))
        (flipped(request, result))
    }
}

fn gates(result: &EvalResult) -> Markup {
    html! {
        @if !result.gates.is_empty() {
            h2 { "Gates" }
            div.scroll role="region" aria-label="Gates" tabindex="0" {
                table.list {
                    thead { tr { th { "Gate" } th { span.sr { "Verdict" } } th { "Why" } } }
                    tbody {
                        @for gate in &result.gates {
                            @let verdict = if gate.held { "held" } else { "fell" };
                            tr { td { code { (gate.gate) } } td { span class=(format!("status {verdict}")) { (verdict) } } td { (gate.why) } }
                        }
                    }
                }
            }
        }
    }
}

fn scorers(result: &EvalResult) -> Markup {
    let has_old = result.against.is_some();
    let all: Vec<_> = result.scorers.values().map(|it| &it.comparison).collect();
    html! {
        @if !result.scorers.is_empty() {
            h2 { "Scores" }
            div.scroll role="region" aria-label="Scores" tabindex="0" {
                table.list.scorers {
                    thead {
                        tr {
                            th { "Scorer" } th.number { "Cases" } th.number { @if has_old { "New mean" } @else { "Mean" } }
                            @if has_old {
                                th.number { "Old mean" } th.number { "Difference" } th { "95 % interval of the difference" }
                                th.number { "Better / worse / same" } th.number { "p" }
                            }
                        }
                    }
                    tbody {
                        @for (name, scorer) in &result.scorers {
                            tr {
                                td.main { b { (name) } (notes(scorer)) }
                                td.number { (scorer.comparison.n) }
                                td.number { (mean(scorer, 0)) }
                                @if has_old {
                                    @let comparison = &scorer.comparison;
                                    td.number { (mean(scorer, 1)) }
                                    td.number { b class=(interval::verdict(comparison)) { (comparison.difference.map_or("–".to_owned(), format::signed)) } }
                                    td { (interval::render(comparison, interval::reach_of(comparison, &all))) }
                                    td.number { (comparison.wins) " / " (comparison.losses) " / " (comparison.ties) }
                                    td.number { (comparison.p.map_or("–".to_owned(), probability)) }
                                }
                            }
                        }
                    }
                }
            }
            @if has_old { p.muted.small { "An interval in color does not contain zero: the difference is hardly chance. p is that of wins and losses (McNemar)." } }
        }
    }
}

fn mean(scorer: &ScorerResult, version: usize) -> String {
    let mean = scorer.versions.get(version).and_then(|it| it.mean);
    mean.map_or("–".to_owned(), format::decimal)
}

fn probability(p: f64) -> String {
    match p {
        p if p < 0.001 => "< 0.001".to_owned(),
        p => format::decimal(p),
    }
}

/// How many cases it would take, how often each label was given, and why there is no score.
fn notes(scorer: &ScorerResult) -> Markup {
    html! {
        @if let Some(needed) = scorer.comparison.needed {
            span.muted.small { "This difference would show with " (counted(needed, "case")) "." }
        }
        @for (label, counts) in &scorer.labels {
            @let counts: Vec<_> = counts.iter().map(u64::to_string).collect();
            span.muted.small { (label) ": " (counts.join(" new, ")) @if counts.len() > 1 { " old" } }
        }
        @for (why, count) in &scorer.errors {
            span.error.small { "No score of " (counted(*count, "run")) ": " (format::excerpt(why, 300)) }
        }
    }
}

fn amounts(result: &EvalResult) -> Markup {
    type Read = fn(&VersionTotals) -> Option<f64>;
    type Show = fn(f64) -> String;
    let milliseconds: Show = |ms| format::duration(ms as u64);
    let tokens: Show = |tokens| format::thousands(tokens.round() as u64);
    let rows: [(&str, Read, Show); 6] = [
        ("Cost", |it| it.cost, |usd| format::usd(Some(usd))),
        ("Tokens", |it| Some(it.tokens), tokens),
        ("Turns", |it| Some(it.turns), format::decimal),
        ("Tool calls", |it| Some(it.tool_calls), format::decimal),
        (
            "Median duration",
            |it| Some(it.duration.p50? as f64),
            milliseconds,
        ),
        (
            "95th percentile of durations",
            |it| Some(it.duration.p95? as f64),
            milliseconds,
        ),
    ];
    let shown = |value: Option<f64>, show: Show| value.map_or_else(|| "–".to_owned(), show);
    let (new, old) = (&result.totals, result.against.as_ref());
    html! {
        h2 { "What " (counted(new.cases, "case")) @if new.cases == 1 { " takes" } @else { " take" } }
        div.scroll role="region" aria-label="Amounts" tabindex="0" {
            table.list.totals {
                thead {
                    tr {
                        th { span.sr { "Amount" } } th.number { @if old.is_some() { "New" } @else { "Sum" } }
                        @if old.is_some() { th.number { "Old" } th.number { "Difference" } }
                    }
                }
                tbody {
                    @for (name, of, show) in rows {
                        tr {
                            th scope="row" { (name) }
                            td.number { (shown(of(new), show)) }
                            @if let Some(old) = old {
                                td.number { (shown(of(old), show)) }
                                td.number { (compare::delta(of(old), of(new), show)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Runs that failed, by code, and those that diverged.
fn errors(result: &EvalResult) -> Markup {
    let both = [Some(&result.totals), result.against.as_ref()];
    let versions: Vec<&VersionTotals> = both.into_iter().flatten().collect();
    let codes: BTreeSet<&String> = versions.iter().flat_map(|it| it.errors.keys()).collect();
    let has_diverged = versions.iter().any(|it| it.diverged > 0);
    html! {
        @if !codes.is_empty() || has_diverged {
            h2 { "Runs that do not count" }
            div.scroll role="region" aria-label="Runs that do not count" tabindex="0" {
                table.list.totals {
                    thead {
                        tr {
                            th { "Error" }
                            @if versions.len() == 1 { th.number { "Runs" } } @else { th.number { "New" } th.number { "Old" } }
                        }
                    }
                    tbody {
                        @for code in codes {
                            tr {
                                th scope="row" { code { (code) } }
                                @for version in &versions { td.number { (version.errors.get(code).copied().unwrap_or_default()) } }
                            }
                        }
                        @if has_diverged {
                            tr {
                                th scope="row" { "Diverged: called a tool that the evaluation does not execute" }
                                @for version in &versions { td.number { (version.diverged) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn flipped(request: &ConsoleRequest, result: &EvalResult) -> Markup {
    let (first, others) = result
        .flipped
        .split_at(result.flipped.len().min(MAX_FLIPPED));
    html! {
        @if !first.is_empty() {
            h2 #flipped { "Flipped cases" }
            p.muted.small { "They pass in one version only, or have another label. A case opens at the first difference of its runs." }
            (flipped_table(request, first, "Flipped cases"))
            @if !others.is_empty() {
                details #more-flipped data-keep {
                    summary { (counted(others.len(), "more flipped case")) }
                    (flipped_table(request, others, "More flipped cases"))
                }
            }
        }
    }
}

fn flipped_table(request: &ConsoleRequest, cases: &[FlippedCase], name: &str) -> Markup {
    html! {
        div.scroll role="region" aria-label=(name) tabindex="0" {
            table.list {
                thead { tr { th { "Case" } th { "Scorers" } th { "Runs" } } }
                tbody {
                    @for case in cases {
                        tr data-row {
                            td.main { a href=(compare_href(request, case)) { (format::excerpt(&case.case, CASE_CHARS)) } }
                            td { (case.scorers.join(", ")) }
                            td.nowrap { a.link href=(request.run_href(case.b)) { "new" } " · " a.link href=(request.run_href(case.a)) { "old" } }
                        }
                    }
                }
            }
        }
    }
}

fn compare_href(request: &ConsoleRequest, case: &FlippedCase) -> String {
    let query = query_string(&[("a", &case.a.to_string()), ("b", &case.b.to_string())]);
    format!("{}?{query}#difference", request.href("/compare"))
}
