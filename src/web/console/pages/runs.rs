//! `/ui/`: the runs, newest first.

use axum::response::Response;
use maud::{Markup, html};

use crate::config::KeyScope::Cancel;
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::usage::Cost;
use crate::store::runs::RunFilter;
use crate::web::console::layout::Page;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::Query;
use crate::web::routes::runs;

/// Runs of a page.
const PAGE_SIZE: usize = 50;
/// Runs that one request reads to find those above a cost.
const MAX_SCANNED: usize = 2_000;

const PARAMS: [&str; 6] = ["status", "agent", "session", "label", "cost", "cursor"];

pub async fn page(request: ConsoleRequest) -> Response {
    let page = render(&request).await;
    request.respond(page)
}

/// The filter as the form has it.
struct Form {
    query: Query,
    min_cost: Option<Cost>,
}

impl Form {
    fn get(&self, name: &str) -> &str {
        self.query.get(name).unwrap_or_default()
    }

    fn is_empty(&self) -> bool {
        PARAMS.iter().all(|name| self.get(name).is_empty())
    }

    fn filter(&self) -> Result<RunFilter, Problem> {
        let label = self
            .query
            .parse("label", "a label, such as team=search", |text| {
                let (name, value) = text.split_once('=')?;
                Some((name.trim().to_owned(), value.trim().to_owned()))
            })?;
        Ok(RunFilter {
            agent: self.query.get("agent").map(str::to_owned),
            status: self
                .query
                .parse("status", "a status of a run", |text| text.parse().ok())?,
            session: self.query.get("session").map(str::to_owned),
            labels: label.into_iter().collect(),
            before: self
                .query
                .parse("cursor", "a cursor of this list", |text| text.parse().ok())?,
            limit: PAGE_SIZE,
            cut_texts: true,
            ..RunFilter::default()
        })
    }
}

async fn render(request: &ConsoleRequest) -> Result<Page, Problem> {
    let query = request.query(&PARAMS)?;
    let min_cost = query.parse("cost", "an amount in USD", |text| {
        let usd: f64 = text.parse().ok()?;
        (usd.is_finite() && usd >= 0.0).then(|| Cost::from_usd(usd))
    })?;
    let form = Form { query, min_cost };
    let (runs, next) = find(request, &form).await?;
    let next = next.map(|cursor| {
        let cursor = cursor.to_string();
        let pairs = PARAMS.map(|name| match name {
            "cursor" => (name, cursor.as_str()),
            name => (name, form.get(name)),
        });
        format!("{}?{}", request.href("/"), query_string(&pairs))
    });
    let cancels = request.may(Cancel) && runs.iter().any(|run| !run.status.is_terminal());
    let body = html! {
        div.head { h1 { "Runs" } a.button.primary href=(request.href("/agents")) { "Start a run" } }
        (filters(request, &form))
        form data-cancel-many=(request.shell.api("/runs/")) {
            div #list data-live="3000" {
                @if runs.is_empty() && form.is_empty() {
                    (parts::empty("No runs yet", "Open an agent to start one, or send a request to the API."))
                } @else if runs.is_empty() {
                    (parts::empty("No runs match", "Change or clear the filter."))
                } @else {
                    (parts::run_table(request, &runs, now(), true))
                }
                (parts::next_page(next))
            }
            @if cancels {
                div.bar {
                    button.danger type="submit" disabled { "Cancel the selected runs" }
                    span.error role="alert" {}
                }
            }
        }
    };
    Ok(Page::new("Runs", "Runs", body))
}

/// A page of runs, and the cursor of the next. Costs are in no index: runs are read until enough match.
async fn find(request: &ConsoleRequest, form: &Form) -> Result<(Vec<Run>, Option<RunId>), Problem> {
    let mut filter = form.filter()?;
    let Some(min_cost) = form.min_cost else {
        let page = runs::visible_page(&request.state, &request.principal, filter).await?;
        return Ok((page.runs, page.next));
    };
    filter.limit = 200;
    let (mut found, mut scanned) = (Vec::new(), 0);
    loop {
        let page = runs::visible_page(&request.state, &request.principal, filter.clone()).await?;
        scanned += page.runs.len().max(1);
        let expensive = |run: &Run| run.tree.usage.cost.is_some_and(|cost| cost >= min_cost);
        for run in page.runs.into_iter().filter(expensive) {
            found.push(run);
            if found.len() == PAGE_SIZE {
                let next = found.last().map(|run| run.id);
                return Ok((found, next));
            }
        }
        filter.before = page.next;
        if page.next.is_none() || scanned >= MAX_SCANNED {
            return Ok((found, page.next));
        }
    }
}

fn filters(request: &ConsoleRequest, form: &Form) -> Markup {
    let agents = request.state.runner.catalog().current();
    let agents = agents.entries.keys();
    let agents = agents.filter(|name| request.principal.can_use_agent(name));
    html! {
        form.filters method="get" action=(request.href("/")) role="search" data-navigate {
            label { span { "Status" }
                select name="status" {
                    option value="" { "Any" }
                    @for status in Status::ALL.map(Status::as_str) {
                        option value=(status) selected[status == form.get("status")] { (status) }
                    }
                }
            }
            label { span { "Agent" } input name="agent" list="agents" value=(form.get("agent")) placeholder="Any" data-search; }
            datalist #agents { @for name in agents { option value=(name) {} } }
            label { span { "Session" } input name="session" value=(form.get("session")) placeholder="Any"; }
            label { span { "Label" } input name="label" value=(form.get("label")) placeholder="team=search"; }
            label { span { "Cost from, USD" } input name="cost" inputmode="decimal" value=(form.get("cost")) placeholder="0.10"; }
            div.actions {
                button type="submit" { "Filter" }
                @if !form.is_empty() { a.button.quiet href=(request.href("/")) { "Clear" } }
            }
        }
    }
}
