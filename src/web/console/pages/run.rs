//! `/ui/runs/{id}`: the run in its tree, and one step of it. The address of a turn is `?turn=2`, of a tool call `?call=<id>`,
//! of the run's events `?view=events`. `?open=all` shows a large tree whole.

use std::collections::HashMap;

use maud::{Markup, html};

use crate::domain::run::{Run, RunId, now};
use crate::domain::run_ref::short_id;
use crate::domain::usage::Cost;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::pages::inspector::{self, RunPageQuery, Selection};
use crate::web::console::pages::{run_actions, tree};
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::console::timeline::{self, Timeline};
use crate::web::error::Problem;
use crate::web::routes::approvals;
use crate::web::routes::runs::require_run;

/// Runs whose costs by turn are read for one page.
const MAX_PRICED_RUNS: usize = 40;
/// Runs of a tree that are listed; of a larger one, only those below the run of the page.
const MAX_RUNS: usize = 2_000;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let id = request.visible_run(request.param("id")).await?;
    let query: RunPageQuery = request.query()?;
    let selection = Selection::new(&query);
    let run = require_run(&request.state, id).await?;
    let store = request.state.runner.store().as_ref();
    let mut runs = store.tree(run.root_id).await?;
    if runs.len() > MAX_RUNS {
        runs = store.tree(id).await?;
        runs.truncate(MAX_RUNS);
    }
    let mut timeline = timeline::read(store, run.root_id).await?;
    let costs = add_turns(request, &runs, id, &mut timeline).await?;
    let view = tree::TreeView {
        request,
        runs: &runs,
        timeline: &timeline,
        costs: &costs,
        selected: id,
        step: selection.step(),
        opens_all: query.open.is_some(),
        now: now(),
    };
    let inspector = {
        let shown = approvals::with_whole_arguments(&request.state, &run).await?;
        inspector::render(request, &shown, &query, &selection).await?
    };
    let root_live = runs.iter().find(|it| it.id == run.root_id).map_or_else(
        || !run.status.is_terminal(),
        |root| !root.status.is_terminal(),
    );
    let body = html! {
        (heading(request, &run))
        div.split data-run=(id) data-root=(run.root_id) data-active[root_live] data-after=(last_event(&runs, &run)) {
            section.tree-pane aria-labelledby="tree-title" { h2.sr #tree-title { "Tree and waterfall" } div #tree data-live { (tree::render(&view)) } }
            section.inspector aria-labelledby="details-title" { h2.sr #details-title { "Details" } div #inspector data-live { (inspector) } }
        }
    };
    Ok(Page {
        is_wide: true,
        ..Page::new("Runs", format!("{} {}", run.agent, short_id(id)), body)
    })
}

/// The number of the last event that the page shows.
fn last_event(runs: &[Run], run: &Run) -> u64 {
    let root = runs.iter().find(|it| it.id == run.root_id);
    root.unwrap_or(run).last_event
}

/// What each turn cost, by run and turn. Turns that were copied are added to the timeline.
async fn add_turns(
    request: &ConsoleRequest,
    runs: &[Run],
    selected: RunId,
    timeline: &mut Timeline,
) -> Result<HashMap<(RunId, u32), Cost>, Problem> {
    let mut costs = HashMap::new();
    let store = request.state.runner.store();
    let ids = runs.iter().map(|run| run.id);
    let ids = ids.filter(|id| runs.len() <= MAX_PRICED_RUNS || *id == selected);
    for id in ids {
        for turn in store.turns(id).await? {
            if turn.is_copied {
                timeline.add_copied_turn(id, &turn);
            }
            if let Some(cost) = turn.cost {
                costs.insert((id, turn.turn), cost);
            }
        }
    }
    Ok(costs)
}

fn heading(request: &ConsoleRequest, run: &Run) -> Markup {
    let now = now();
    html! {
        div.head.run-head {
            div {
                h1 {
                    a href=(request.href(&format!("/agents/{}", run.agent))) { (run.agent) }
                    " " code.muted { (short_id(run.id)) }
                }
                dl #state.line data-live {
                    div { dt { "Status" } dd { (format::status(run.status)) @if let Some(cause) = run.suspended { " " span.status.failed { (cause.describe()) } } @else if let Some(cause) = parts::waiting_for(run) { " " span.muted { (cause) } } } }
                    div { dt { "Duration" } dd { (format::duration(run.duration_ms(now))) } }
                    div {
                        dt { "Tokens" }
                        dd {
                            (format::count(run.usage.tokens.total()))
                            @if run.tree.runs > 1 { span.muted { " own · " } (format::count(run.tree.usage.tokens.total())) span.muted { " tree" } }
                        }
                    }
                    @if let Some(cost) = run.tree.usage.cost { div { dt { "Cost" } dd { (format::cost(Some(cost))) } } }
                    @if !run.scores.is_empty() { div { dt { "Scores" } dd { (parts::scores(&run.scores)) } } }
                    @if run.tree.runs > 1 { div { dt { "Runs" } dd { (run.tree.runs) } } }
                    div { dt { "Accepted" } dd { (format::ago(run.created_at, now)) } }
                    @if let Some(from) = run.fork.as_ref().and_then(|fork| fork.from) {
                        div { dt { "Fork of" } dd { a href=(compare_href(request, from.run, run)) { "compare with its source" } } }
                    }
                }
            }
            div #actions.actions data-live { (run_actions::buttons(request, run)) }
            (parts::needs_scripts("Changing a run"))
        }
        div #wait data-live { (run_actions::wait_notice(request, run)) }
    }
}

fn compare_href(request: &ConsoleRequest, source: RunId, fork: &Run) -> String {
    let query = parts::query_string(&[("a", &source.to_string()), ("b", &fork.id.to_string())]);
    format!("{}?{query}", request.href("/compare"))
}
