//! The versions of an agent's file that its last runs were started with.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use maud::{Markup, html};

use crate::domain::counted::counted;
use crate::domain::run::{Run, Status, now};
use crate::domain::score::ScoreSummary;
use crate::store::runs::RunFilter;
use crate::store::score_sums::{ScoreDimension, ScoreRow};
use crate::web::console::format;
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::routes::{runs, scores};

/// Runs that are read: versions are in no index.
const MAX_RUNS: usize = 1_000;
const PAGE_SIZE: usize = 200;
const MAX_TIME: Duration = Duration::from_millis(50);

struct Version {
    name: String,
    runs: usize,
    failed: usize,
    first: Timestamp,
    last: Timestamp,
}

pub async fn render(
    request: &ConsoleRequest,
    agent: &str,
    current: Option<&str>,
) -> Result<Markup, Problem> {
    let (versions, runs) = read(request, agent).await?;
    let by = vec![ScoreDimension::Version, ScoreDimension::Name];
    let scores = scores::visible_sums(&request.state, &request.principal, agent, by).await?;
    if versions.is_empty() && current.is_none() {
        return Ok(html! {});
    }
    let is_current = |name: &str| current == Some(name);
    let now = now();
    Ok(html! {
        h2 { "Versions" }
        div.scroll role="region" aria-label="Versions" tabindex="0" {
            table.list {
                thead {
                    tr { th { "Version" } th.number { "Runs" } th.number { "Failed" } th.number { "First run" } th.number { "Last run" } @if !scores.is_empty() { th { "Scores of all runs" } } }
                }
                tbody {
                    @if let Some(current) = current.filter(|current| versions.iter().all(|it| it.name != **current)) {
                        tr { td { (name(current, true)) } td.number { "0" } td.number { "0" } td.number { "–" } td.number { "–" } @if !scores.is_empty() { td {} } }
                    }
                    @for version in &versions {
                        tr {
                            td { (name(&version.name, is_current(&version.name))) }
                            td.number { (version.runs) }
                            td.number { (version.failed) }
                            td.number { (format::ago(version.first, now)) }
                            td.number { (format::ago(version.last, now)) }
                            @if !scores.is_empty() { td { (bars(&version.name, &scores)) } }
                        }
                    }
                }
            }
        }
        @if runs > 0 { p.muted.small { "Of the last " (counted(runs, "run")) "." } }
    })
}

/// The scores of a version, a line each; means from 0 to 1 as a bar too.
fn bars(version: &str, scores: &[ScoreRow]) -> Markup {
    let of_version = scores.iter().filter_map(|row| match &row.values[..] {
        [Some(of), Some(name)] if of == version => Some((name, &row.scores)),
        _ => None,
    });
    html! { @for (name, scores) in of_version { (bar(name, scores)) } }
}

fn bar(name: &str, scores: &ScoreSummary) -> Markup {
    let mean = scores.numbers.mean();
    html! {
        div.line {
            @if let Some(mean) = mean.filter(|mean| (0.0..=1.0).contains(mean)) {
                meter min="0" max="1" value=(mean) aria-label=(name) {} " "
            }
            span { (parts::score(name, scores)) " " span.muted.small { (counted(scores.n(), "score")) } }
        }
    }
}

fn name(version: &str, is_current: bool) -> Markup {
    html! { code title=(version) { (format::excerpt(version, 19)) } @if is_current { " " span.label { "current" } } }
}

/// The versions, latest first, and of how many runs they are.
async fn read(request: &ConsoleRequest, agent: &str) -> Result<(Vec<Version>, usize), Problem> {
    let start = Instant::now();
    let mut filter = RunFilter {
        agent: Some(agent.to_owned()),
        include_children: true,
        limit: PAGE_SIZE,
        cut_texts: true,
        ..RunFilter::default()
    };
    let (mut versions, mut count) = (Vec::new(), 0);
    loop {
        let page = runs::visible_page(&request.state, &request.principal, filter.clone()).await?;
        page.runs.iter().for_each(|run| add(&mut versions, run));
        count += page.runs.len();
        filter.before = page.next;
        if page.next.is_none() || count >= MAX_RUNS || start.elapsed() > MAX_TIME {
            return Ok((versions, count));
        }
    }
}

/// Runs are added from the newest to the oldest.
fn add(versions: &mut Vec<Version>, run: &Run) {
    let failed = usize::from(run.status == Status::Failed);
    match versions.iter_mut().find(|it| it.name == run.agent_version) {
        Some(version) => {
            version.runs += 1;
            version.failed += failed;
            version.first = run.created_at;
        }
        None => versions.push(Version {
            name: run.agent_version.clone(),
            runs: 1,
            failed,
            first: run.created_at,
            last: run.created_at,
        }),
    }
}
