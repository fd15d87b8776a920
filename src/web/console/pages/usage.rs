//! `/ui/usage`: cost and tokens over time, by agent, model or a label.

use std::collections::BTreeMap;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use maud::{Markup, html};
use serde::Deserialize;

use crate::domain::counted::counted;
use crate::domain::run::now;
use crate::store::usage::{UsageDimension, UsageQuery};
use crate::web::console::chart::{Chart, Series};
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query;
use crate::web::routes::usage::{
    BudgetView, MAX_ROWS, UsageGroup, UsageNumbers, UsageView, too_many_groups, visible_usage,
};

/// Series with a color of their own; the others are one.
const MAX_SERIES: usize = 7;
/// Groups of the table.
const MAX_TABLE: usize = 100;
const PERIODS: [(&str, i32); 3] = [("7", 7), ("30", 30), ("90", 90)];

/// What the page groups by.
struct Grouping {
    dimension: UsageDimension,
    label: String,
}

impl Grouping {
    fn name(&self) -> &'static str {
        match self.dimension {
            UsageDimension::Model => "model",
            UsageDimension::Label(_) => "label",
            _ => "agent",
        }
    }

    /// The value of a group.
    fn value<'g>(&self, group: &'g UsageGroup) -> &'g str {
        let value = match &self.dimension {
            UsageDimension::Model => group.model.as_ref(),
            UsageDimension::Label(_) => group.labels.values().next(),
            _ => group.agent.as_ref(),
        };
        value.and_then(Option::as_deref).unwrap_or("(none)")
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FormQuery {
    by: GroupBy,
    label: String,
    days: Option<String>,
}

#[derive(Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum GroupBy {
    #[default]
    Agent,
    Model,
    Label,
}

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let FormQuery { by, label, days } = request.query()?;
    let days = query::parse("days", days.as_deref(), "7, 30 or 90", |text| {
        let period = PERIODS.iter().find(|(name, _)| *name == text);
        period.map(|(_, days)| *days)
    })?;
    let days = days.unwrap_or(30);
    let lacks_label = by == GroupBy::Label && label.is_empty();
    let dimension = match by {
        GroupBy::Label if !lacks_label => UsageDimension::Label(label.clone()),
        GroupBy::Agent | GroupBy::Label => UsageDimension::Agent,
        GroupBy::Model => UsageDimension::Model,
    };
    let grouping = Grouping { dimension, label };
    let dates = last_days(now(), days);
    let usage = Usage::read(request, &grouping, dates[0]).await?;
    let body = html! {
        div.head { h1 { "Usage" } }
        (form(request, &grouping, days))
        @if lacks_label { p.warning role="status" { "Name the label to group by. Until then, the page groups by agent." } }
        @if usage.groups.data.is_empty() {
            (parts::empty_with("Nothing used", "No run has ended in this time. Choose more days, or start a run:", "axed run planner-scripted \"Prepare the release\""))
        } @else {
            (summary(&usage.groups.totals))
            (charts(&usage, &grouping, &dates))
            (table(&usage.groups, &grouping))
        }
        (budgets(&usage.groups.budgets))
    };
    Ok(Page::new("Usage", "Usage", body))
}

struct Usage {
    groups: UsageView,
    /// The sums of all groups by day, if there are too many groups to read each by day. Else `groups` has the days.
    days: Option<UsageView>,
}

impl Usage {
    async fn read(
        request: &ConsoleRequest,
        grouping: &Grouping,
        first: Date,
    ) -> Result<Self, Problem> {
        let since = first.to_zoned(TimeZone::UTC).map(|time| time.timestamp());
        let since = since.ok();
        let by = grouping.dimension.clone();
        let both = vec![by.clone(), UsageDimension::Day];
        if let Some(groups) = read(request, both, since).await? {
            return Ok(Self { groups, days: None });
        }
        let (groups, days) = tokio::try_join!(
            read(request, vec![by], since),
            read(request, vec![UsageDimension::Day], since),
        )?;
        Ok(Self {
            groups: groups.ok_or_else(too_many_groups)?,
            days,
        })
    }
}

async fn read(
    request: &ConsoleRequest,
    by: Vec<UsageDimension>,
    since: Option<Timestamp>,
) -> Result<Option<UsageView>, Problem> {
    let query = UsageQuery {
        by,
        time_zone: TimeZone::UTC,
        since,
        until: None,
        owner: None,
        agent: None,
        visible_agents: None,
        labels: Vec::new(),
        max_rows: MAX_ROWS,
    };
    visible_usage(&request.state, &request.principal, query).await
}

fn last_days(now: Timestamp, days: i32) -> Vec<Date> {
    let today = now.to_zoned(TimeZone::UTC).date();
    let day = |back: i32| today.saturating_sub(back.days());
    (0..days).rev().map(day).collect()
}

fn form(request: &ConsoleRequest, grouping: &Grouping, days: i32) -> Markup {
    html! {
        form.filters method="get" action=(request.href("/usage")) data-navigate {
            label { span { "By" }
                select name="by" {
                    @for name in ["agent", "model", "label"] {
                        option value=(name) selected[name == grouping.name()] { (name) }
                    }
                }
            }
            label { span { "Label" } input name="label" value=(grouping.label) placeholder="team"; }
            label { span { "Days" }
                select name="days" {
                    @for (name, number) in PERIODS { option value=(name) selected[number == days] { (name) } }
                }
            }
            div.actions { button type="submit" { "Show" } }
        }
    }
}

fn summary(totals: &UsageNumbers) -> Markup {
    let numbers = [
        ("Cost", format::usd(totals.cost_usd)),
        ("Runs", format::count(totals.runs)),
        ("Input tokens", format::count(totals.input_tokens)),
        ("Output tokens", format::count(totals.output_tokens)),
        ("Tool calls", format::count(totals.tool_calls)),
        ("Failed", format::count(totals.failed)),
    ];
    html! {
        dl.numbers { @for (name, number) in numbers { div { dt { (name) } dd { (number) } } } }
    }
}

fn charts(usage: &Usage, grouping: &Grouping, dates: &[Date]) -> Markup {
    let by = match &usage.days {
        None => format!("by {}", grouping.name()),
        Some(_) => format!(
            "of all {}s, which are too many to tell apart by day",
            grouping.name()
        ),
    };
    let name = |group: &UsageGroup| match &usage.days {
        None => grouping.value(group).to_owned(),
        Some(_) => "all".to_owned(),
    };
    let data = &usage.days.as_ref().unwrap_or(&usage.groups).data;
    let cost = |numbers: &UsageNumbers| numbers.cost_usd.unwrap_or(0.0);
    let tokens = |numbers: &UsageNumbers| (numbers.input_tokens + numbers.output_tokens) as f64;
    let chart = |title: &str, series, format| Chart {
        title: format!("{title} {by}"),
        days: dates.to_vec(),
        series,
        format,
    };
    // The same order in both charts, so that a group has one color.
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for group in data {
        let sum = sums.entry(name(group)).or_default();
        sum.0 += cost(&group.numbers);
        sum.1 += tokens(&group.numbers);
    }
    let mut order: Vec<(String, (f64, f64))> = sums.into_iter().collect();
    order.sort_by(|(_, a), (_, b)| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
    let order: Vec<String> = order.into_iter().map(|(name, _)| name).collect();
    let has_cost = data.iter().any(|group| group.numbers.cost_usd.is_some());
    let cost = chart("Cost", series(data, name, &order, dates, cost), |usd| {
        format::usd(Some(usd))
    });
    let tokens = series(data, name, &order, dates, tokens);
    let tokens = chart("Tokens", tokens, |tokens| format::count(tokens as u64));
    html! { @if has_cost { (cost.render()) } (tokens.render()) }
}

/// The first groups of the order, and the sum of the others.
fn series(
    groups: &[UsageGroup],
    name: impl Fn(&UsageGroup) -> String,
    order: &[String],
    dates: &[Date],
    of: impl Fn(&UsageNumbers) -> f64,
) -> Vec<Series> {
    let names = order.iter().take(MAX_SERIES).cloned();
    let others = order.len().saturating_sub(MAX_SERIES);
    let others = (others > 0).then(|| counted(others, "other"));
    let series = |name| Series {
        name,
        values: vec![0.0; dates.len()],
    };
    let mut all: Vec<Series> = names.chain(others).map(series).collect();
    for group in groups {
        let at = group
            .day
            .and_then(|day| dates.iter().position(|date| *date == day));
        let index = order.iter().position(|it| *it == name(group));
        if let (Some(at), Some(index)) = (at, index) {
            all[index.min(MAX_SERIES)].values[at] += of(&group.numbers);
        }
    }
    all
}

fn table(usage: &UsageView, grouping: &Grouping) -> Markup {
    #[derive(Default)]
    struct Row {
        runs: u64,
        failed: u64,
        input: u64,
        output: u64,
        cost: Option<f64>,
    }
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for group in &usage.data {
        let row = rows.entry(grouping.value(group)).or_default();
        row.runs += group.numbers.runs;
        row.failed += group.numbers.failed;
        row.input += group.numbers.input_tokens;
        row.output += group.numbers.output_tokens;
        if let Some(cost) = group.numbers.cost_usd {
            row.cost = Some(row.cost.unwrap_or(0.0) + cost);
        }
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|(_, a), (_, b)| b.cost.unwrap_or(0.0).total_cmp(&a.cost.unwrap_or(0.0)));
    let count = rows.len();
    rows.truncate(MAX_TABLE);
    html! {
        div.scroll role="region" aria-label="Usage" tabindex="0" {
            table.list {
                thead {
                    tr {
                        th { (grouping.name()) } th.number { "Runs" } th.number { "Failed" }
                        th.number { "Input tokens" } th.number { "Output tokens" } th.number { "Cost" }
                    }
                }
                tbody {
                    @for (name, row) in &rows {
                        tr {
                            td.main { (name) } td.number { (format::thousands(row.runs)) } td.number { (format::thousands(row.failed)) }
                            td.number { (format::thousands(row.input)) } td.number { (format::thousands(row.output)) } td.number { (format::usd(row.cost)) }
                        }
                    }
                }
            }
        }
        @if count > rows.len() { p.muted.small { "The " (rows.len()) " most expensive of " (counted(count, grouping.name())) "." } }
    }
}

fn budgets(budgets: &[BudgetView]) -> Markup {
    html! {
        @if !budgets.is_empty() {
            h2 { "Budgets" }
            div.scroll role="region" aria-label="Budgets" tabindex="0" {
                table.list {
                    thead { tr { th { "Budget" } th.number { "Used" } th.number { "Limit" } th { "Share" } th.number { "Resets" } } }
                    tbody {
                        @for budget in budgets {
                            @let share = budget.used_thousandths.min(1000);
                            tr {
                                td.main { (budget.name) span.muted.small { " a " (budget.per) } }
                                @if let Some(limit) = budget.limit_usd {
                                    td.number { (format::usd(Some(budget.used_usd))) } td.number { (format::usd(Some(limit))) }
                                } @else {
                                    td.number { (format::count(budget.used_tokens)) }
                                    td.number { (format::count(budget.limit_tokens.unwrap_or_default())) }
                                }
                                td { meter min="0" max="1000" value=(share) aria-label=(format!("{} percent used", share / 10)) {} }
                                td.number { (format::instant(budget.resets_at)) }
                            }
                        }
                    }
                }
            }
        }
    }
}
