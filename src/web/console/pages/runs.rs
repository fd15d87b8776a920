//! `/ui/`: the runs, newest first.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use maud::{Markup, html};
use serde::Deserialize;

use crate::config::KeyScope::Cancel;
use crate::domain::run::{RunId, Status, now};
use crate::domain::usage::Cost;
use crate::store::runs::{RunFilter, RunPage};
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::{self, Cursor};
use crate::web::routes::runs;

/// Runs of a page.
const PAGE_SIZE: usize = 50;
/// How long one request searches for runs above a cost, which no index contains.
const MAX_SEARCH: Duration = Duration::from_millis(100);

/// The filter as the form has it.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Form {
    status: Option<Status>,
    agent: Option<String>,
    session: Option<String>,
    label: Option<String>,
    cost: Option<String>,
    cursor: Option<Cursor<RunId>>,
}

impl Form {
    /// The fields that are shown.
    fn fields(&self) -> [(&'static str, &str); 5] {
        fn text(field: &Option<String>) -> &str {
            field.as_deref().unwrap_or_default()
        }
        [
            ("status", self.status.map_or("", Status::as_str)),
            ("agent", text(&self.agent)),
            ("session", text(&self.session)),
            ("label", text(&self.label)),
            ("cost", text(&self.cost)),
        ]
    }

    fn get(&self, name: &str) -> &str {
        let mut fields = self.fields().into_iter();
        fields
            .find(|(known, _)| *known == name)
            .map_or("", |(_, text)| text)
    }

    fn is_empty(&self) -> bool {
        self.cursor.is_none() && self.fields().iter().all(|(_, text)| text.is_empty())
    }

    fn filter(&self) -> Result<RunFilter, Problem> {
        let expected = "a label, such as team=search";
        let label = query::parse("label", self.label.as_deref(), expected, |text| {
            let (name, value) = text.split_once('=')?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        })?;
        let min_cost = query::parse("cost", self.cost.as_deref(), "an amount in USD", |text| {
            let usd: f64 = text.parse().ok()?;
            (usd.is_finite() && usd >= 0.0).then(|| Cost::from_usd(usd))
        })?;
        Ok(RunFilter {
            agent: self.agent.clone(),
            status: self.status,
            session: self.session.clone(),
            labels: label.into_iter().collect(),
            min_cost,
            before: self.cursor.as_ref().map(|Cursor(id)| *id),
            limit: PAGE_SIZE,
            cut_texts: true,
            ..RunFilter::default()
        })
    }
}

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let form: Form = request.query()?;
    let found = find(request, &form).await?;
    let runs = &found.runs;
    let next = found.next.map(|cursor| {
        let cursor = cursor.to_string();
        let mut pairs = form.fields().to_vec();
        pairs.push(("cursor", &cursor));
        format!("{}?{}", request.href("/"), query_string(&pairs))
    });
    let cancels = request.may(Cancel) && runs.iter().any(|run| !run.status.is_terminal());
    let body = html! {
        div.head { h1 { "Runs" } a.button.primary href=(request.href("/agents")) { "Start a run" } }
        (filters(request, &form))
        form data-cancel-many=(request.shell.api("/runs/")) {
            div #list data-live=(if form.get("cost").is_empty() { "3000" } else { "15000" }) {
                @if runs.is_empty() && form.is_empty() {
                    (parts::empty("No runs yet", "Open an agent to start one, or send a request to the API."))
                } @else if runs.is_empty() && next.is_some() {
                    (parts::empty("No newer runs match", "Older ones may: search further."))
                } @else if runs.is_empty() {
                    (parts::empty("No runs match", "Change or clear the filter."))
                } @else {
                    (parts::run_table(request, runs, now(), true))
                }
                (further(&found, next))
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

/// A page of runs. The store ends a page early after some work, so more are read until the page is full or the time is over.
async fn find(request: &ConsoleRequest, form: &Form) -> Result<RunPage, Problem> {
    let start = Instant::now();
    let mut filter = form.filter()?;
    let mut page = RunPage::default();
    loop {
        let more = runs::visible_page(&request.state, &request.principal, filter.clone()).await?;
        page.runs.extend(more.runs);
        page.next = more.next;
        filter.before = more.next;
        filter.limit = PAGE_SIZE.saturating_sub(page.runs.len());
        if more.next.is_none() || filter.limit == 0 || start.elapsed() > MAX_SEARCH {
            return Ok(page);
        }
    }
}

/// The link to the next page; if the search ended early, with the time that it has come to.
fn further(page: &RunPage, href: Option<String>) -> Markup {
    let is_full = page.runs.len() >= PAGE_SIZE;
    let searched_to = page.next.filter(|_| !is_full).and_then(time_of);
    html! {
        @if let (Some(time), Some(href)) = (searched_to, &href) {
            nav.pages aria-label="Pages" {
                p.muted { "The runs since " (format::instant(time)) " were searched." }
                a.button href=(href) rel="next" { "Search older runs" }
            }
        } @else { (parts::next_page(href)) }
    }
}

/// When the run was accepted, as its id has it.
fn time_of(id: RunId) -> Option<Timestamp> {
    let (seconds, _) = id.0.get_timestamp()?.to_unix();
    Timestamp::from_second(seconds.try_into().ok()?).ok()
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
