//! `/ui/`: the runs, newest first.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use maud::{Markup, html};
use serde::Deserialize;

use crate::config::KeyScope::Cancel;
use crate::domain::failure::FailureCode;
use crate::domain::run::{RunId, Status, now};
use crate::domain::score::ScoreFilter;
use crate::domain::search_text::SearchText;
use crate::domain::usage::Cost;
use crate::store::runs::{RunFilter, RunPage, StatusCount};
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
    q: Option<String>,
    status: Option<Status>,
    agent: Option<String>,
    session: Option<String>,
    label: Option<String>,
    cost: Option<String>,
    error: Option<FailureCode>,
    score: Option<String>,
    since: Option<Since>,
    cursor: Option<Cursor<RunId>>,
}

/// How long ago a run was accepted at most.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
enum Since {
    #[serde(rename = "1h")]
    Hour,
    #[serde(rename = "24h")]
    Day,
    #[serde(rename = "7d")]
    Week,
    #[serde(rename = "30d")]
    Month,
}

impl Since {
    /// Its name, what is shown, and hours.
    const ALL: [(Self, &str, &str, i64); 4] = [
        (Self::Hour, "1h", "last hour", 1),
        (Self::Day, "24h", "last 24 hours", 24),
        (Self::Week, "7d", "last 7 days", 168),
        (Self::Month, "30d", "last 30 days", 720),
    ];

    fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(since, ..)| *since == self);
        found.map_or("", |(_, name, ..)| name)
    }

    fn time(self) -> Option<Timestamp> {
        let (.., hours) = Self::ALL.iter().find(|(since, ..)| *since == self)?;
        now().checked_sub(SignedDuration::from_hours(*hours)).ok()
    }
}

impl Form {
    /// The fields that are shown.
    fn fields(&self) -> [(&'static str, String); 9] {
        let text = |field: &Option<String>| field.clone().unwrap_or_default();
        [
            ("q", text(&self.q)),
            ("status", self.status.map_or("", Status::as_str).to_owned()),
            ("agent", text(&self.agent)),
            ("session", text(&self.session)),
            ("label", text(&self.label)),
            ("cost", text(&self.cost)),
            ("score", text(&self.score)),
            (
                "error",
                self.error.map(|code| code.to_string()).unwrap_or_default(),
            ),
            ("since", self.since.map_or("", Since::name).to_owned()),
        ]
    }

    fn get(&self, name: &str) -> String {
        let mut fields = self.fields().into_iter();
        let found = fields.find(|(known, _)| *known == name);
        found.map(|(_, text)| text).unwrap_or_default()
    }

    /// Whether the rows of runs are compared with it.
    fn searches(&self) -> bool {
        self.error.is_some() || self.q.is_some() || self.cost.is_some() || self.score.is_some()
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
        let expected = "a name and a condition, such as thumbs<1, tone=friendly or thumbs none";
        let score = query::parse("score", self.score.as_deref(), expected, ScoreFilter::parse)?;
        let expected = "a text of at most 200 characters";
        let text = query::parse("q", self.q.as_deref(), expected, SearchText::parse)?;
        Ok(RunFilter {
            text,
            error_code: self.error,
            since: self.since.and_then(Since::time),
            agent: self.agent.clone(),
            status: self.status,
            session: self.session.clone(),
            labels: label.into_iter().collect(),
            scores: score.into_iter().collect(),
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
    let counted = runs::visible_counts(&request.state, &request.principal, form.filter()?).await?;
    let runs = &found.runs;
    let next = found.next.map(|cursor| {
        let cursor = cursor.to_string();
        let mut pairs = form.fields().to_vec();
        pairs.push(("cursor", cursor));
        format!("{}?{}", request.href("/"), address_query(&pairs))
    });
    let cancels = request.may(Cancel) && runs.iter().any(|run| !run.status.is_terminal());
    let body = html! {
        div.head { h1 { "Runs" } (counts(request, &form, &counted)) a.button.primary href=(request.href("/agents")) { "Start a run" } }
        (filters(request, &form))
        form data-cancel-many=(request.shell.api("/runs/")) {
            div #list data-live=(if form.searches() { "15000" } else { "3000" }) {
                @if runs.is_empty() && form.is_empty() {
                    (parts::empty_with("No runs yet", "Open an agent to start one, or send a request:", &first_request(request)))
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

/// The number of runs by status, each a link to them.
fn counts(request: &ConsoleRequest, form: &Form, counts: &Option<Vec<StatusCount>>) -> Markup {
    let href = |status: Status| {
        let fields = form.fields().map(|(name, value)| match name {
            "status" => (name, status.as_str().to_owned()),
            _ => (name, value),
        });
        format!("{}?{}", request.href("/"), address_query(&fields))
    };
    let period = form.since.map_or("24h", Since::name);
    html! {
        nav #counts.counts aria-label="Runs by status" data-live {
            @for count in counts.iter().flatten().filter(|count| count.runs > 0) {
                @let is_current = form.status == Some(count.status);
                a href=(href(count.status)) aria-current=[is_current.then_some("true")] {
                    (format::status(count.status)) " "
                    b { (format::thousands(count.runs as u64)) @if count.is_minimum { "+" } }
                    @if count.status.is_terminal() { span.muted { " in " (period) } }
                }
            }
        }
    }
}

fn address_query(pairs: &[(&'static str, String)]) -> String {
    let pairs: Vec<_> = pairs
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    query_string(&pairs)
}

/// A command that starts a run of the first agent.
fn first_request(request: &ConsoleRequest) -> String {
    let agents = request.state.runner.catalog().current();
    let valid = agents.entries.values().filter(|it| it.agent.is_some());
    let mut names = valid.map(|it| it.name.as_str());
    let scripted = names.clone().find(|name| *name == "planner-scripted");
    let name = scripted.or_else(|| names.next()).unwrap_or("NAME");
    format!("axed run {name} 'Hello'")
}

fn filters(request: &ConsoleRequest, form: &Form) -> Markup {
    let agents = request.state.runner.catalog().current();
    let agents = agents.entries.keys();
    let agents = agents.filter(|name| request.principal.can_use_agent(name));
    html! {
        form.filters method="get" action=(request.href("/")) role="search" data-navigate {
            label.grow { span { "Search" } input name="q" type="search" value=(form.get("q")) placeholder="text of an input or answer, or an id" maxlength="200" data-search; }
            label { span { "Status" }
                select name="status" {
                    option value="" { "Any" }
                    @for status in Status::ALL.map(Status::as_str) {
                        option value=(status) selected[form.status.is_some_and(|it| it.as_str() == status)] { (status) }
                    }
                }
            }
            label { span { "Agent" } input name="agent" list="agents" value=(form.get("agent")) placeholder="Any"; }
            datalist #agents { @for name in agents { option value=(name) {} } }
            label { span { "Accepted" }
                select name="since" {
                    option value="" { "Any time" }
                    @for (since, name, text, _) in Since::ALL { option value=(name) selected[form.since == Some(since)] { (text) } }
                }
            }
            label { span { "Error" }
                select name="error" {
                    option value="" { "Any" }
                    @for code in FailureCode::ALL { option value=(code) selected[form.error == Some(code)] { (code) } }
                }
            }
            label { span { "Session" } input name="session" value=(form.get("session")) placeholder="Any"; }
            label { span { "Label" } input name="label" value=(form.get("label")) placeholder="team=search"; }
            label { span { "Cost from, USD" } input name="cost" inputmode="decimal" value=(form.get("cost")) placeholder="0.10"; }
            label { span { "Score" } input name="score" value=(form.get("score")) placeholder="thumbs<1"; }
            div.actions {
                button type="submit" { "Filter" }
                @if !form.is_empty() { a.button.quiet href=(request.href("/")) { "Clear" } }
            }
        }
    }
}
