//! `/usage`: what ended runs have used, in groups.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::config::KeyScope::Read;
use crate::domain::calendar::time_zone;
use crate::domain::period_budget::PeriodLimit;
use crate::domain::run::now;
use crate::domain::timestamp_text;
use crate::domain::usage_sums::UsageSums;
use crate::engine::state::period_budgets::BudgetStatus;
use crate::store::usage::{UsageDimension, UsageQuery, UsageReport, UsageRow};
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::extract::query::{Labels, Query, parse, parse_time, read_text};
use crate::web::problem_code::ProblemCode::{self, InvalidParameter};
use crate::web::response::json::json_response;
use crate::web::route::{Route, get};
use crate::web::state::AppState;

/// Groups that a response may have.
pub const MAX_ROWS: usize = 10_000;
/// Values that `by` may have.
const MAX_DIMENSIONS: usize = 8;
const DIMENSIONS: &str = "agent, model, label.<name>, session, key, day";

pub fn routes() -> Vec<Route> {
    vec![
        get("/usage", [Read], usage)
            .describe("get_usage", "Sums what ended runs have used")
            .details(
                "A key sees the usage of its own runs, a key with the scope `admin` that of all. A run is counted when \
                 it ends, at the time at which its root was accepted, and stays counted after its deletion. Sums are \
                 exact. `key`, `session`, `label.<name>` and `day` are those of the root run.",
            )
            .response::<UsageView>(200, "The sums.")
            .example(example())
            .problems_with(422, &[InvalidParameter]),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct GroupsQuery {
    /// What the sums are grouped by: one or more of `agent`, `model`, `label.<name>`, `session`, `key`, `day`, separated by
    /// commas.
    #[schemars(example = "agent,model", example = "label.team,day")]
    by: Option<String>,
    /// Only runs whose root was accepted at this time or later: an RFC 3339 time, or a date, which begins at midnight in `tz`.
    /// Rounded down to a quarter hour.
    #[schemars(example = "2026-01-01", example = "2026-01-01T09:00:00Z")]
    since: Option<String>,
    /// Only runs whose root was accepted before this time. Rounded up to a quarter hour.
    until: Option<String>,
    /// Only runs of this agent.
    agent: Option<String>,
    /// The time zone of days and dates, by its IANA name.
    tz: Zone,
    /// `label.<key>=<value>`: only runs whose root has this label. Several labels must all match.
    #[serde(rename = "label.")]
    labels: Labels,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct Zone(
    #[schemars(with = "String", extend("default" = "UTC"), example = "Europe/Berlin")] TimeZone,
);

impl Default for Zone {
    fn default() -> Self {
        Self(TimeZone::UTC)
    }
}

impl<'de> Deserialize<'de> for Zone {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a time zone, such as Europe/Berlin or UTC";
        read_text(deserializer, expected, time_zone).map(Self)
    }
}

/// What ended runs have used, in groups.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UsageReport")]
pub struct UsageView {
    /// One entry for each group, sorted by its values. Without `by` one entry; empty if no run is counted.
    pub data: Vec<UsageGroup>,
    /// The sums over all groups.
    pub totals: UsageNumbers,
    /// From when on runs are counted: the quarter hour of `since`, or of the first run that is kept. Null if none is counted.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    pub since: Option<Timestamp>,
    /// Until when runs are counted: the end of the quarter hour of `until`, or of the last run that is counted.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    pub until: Option<Timestamp>,
    /// How much of the budgets over time is used in their current periods, whatever the query: for a key, of the budgets
    /// that are its own alone; for the scope `admin`, of all.
    pub budgets: Vec<BudgetView>,
}

/// How much of a budget over time is used in its current period.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "BudgetUsage")]
pub struct BudgetView {
    /// The name of the budget.
    pub name: String,
    /// The period: `day` or `month`.
    pub per: &'static str,
    /// The limit in USD; null for a budget in tokens.
    pub limit_usd: Option<f64>,
    /// The limit in tokens; null for a budget in USD.
    pub limit_tokens: Option<u64>,
    /// The cost of the replies that were recorded in the period, in USD.
    pub used_usd: f64,
    /// The tokens of the replies that were recorded in the period, input and output together.
    pub used_tokens: u64,
    /// The used share of the limit, in thousandths, rounded down; from 1000 on, new root runs are refused.
    pub used_thousandths: u64,
    /// When the period began.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub since: Timestamp,
    /// When the next period begins.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub resets_at: Timestamp,
}

/// The usage of the runs of one group. It has the values that `by` names; null stands for runs without that value.
#[derive(Serialize, JsonSchema)]
pub struct UsageGroup {
    /// The agent of the runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<Option<String>>,
    /// The model that replied, as the provider names it. Runs, tool calls and durations count under the model of the run's
    /// last reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Option<String>>,
    /// The session of the root runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<Option<String>>,
    /// The name of the key that started the root runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<Option<String>>,
    /// The day, in the zone `tz`, on which the root runs were accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub day: Option<Date>,
    /// `label.<name>`: the value of the root runs' label.
    #[serde(flatten)]
    pub labels: BTreeMap<String, Option<String>>,
    #[serde(flatten)]
    pub numbers: UsageNumbers,
}

/// Exact sums over runs that have ended, and percentiles of their durations.
#[derive(Serialize, JsonSchema)]
pub struct UsageNumbers {
    /// The number of runs, child runs included.
    pub runs: u64,
    /// The number of root runs.
    pub roots: u64,
    /// The number of runs that failed.
    pub failed: u64,
    /// The number of runs that were cancelled.
    pub cancelled: u64,
    /// Input tokens, cached ones included.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// The input tokens that were read from the provider's cache.
    pub cache_read_tokens: u64,
    /// The input tokens that were written to the provider's cache.
    pub cache_write_tokens: u64,
    /// The output tokens that are reasoning, as far as providers report them.
    pub reasoning_tokens: u64,
    /// The number of replies.
    pub model_calls: u64,
    /// The number of executed tool calls, including failed ones.
    pub tool_calls: u64,
    /// The cost in USD; null if no price is known for any of the models.
    pub cost_usd: Option<f64>,
    /// Whether providers reported the usage of every request.
    pub complete: bool,
    /// The duration in milliseconds that half of the runs do not exceed, within 2 %; null if none has started.
    pub duration_p50_ms: Option<u64>,
    /// The duration in milliseconds that 95 % of the runs do not exceed, within 2 %; null if none has started.
    pub duration_p95_ms: Option<u64>,
}

async fn usage(
    State(state): State<AppState>,
    principal: Principal,
    Query(query): Query<GroupsQuery>,
) -> Result<Response, Problem> {
    let view = visible_usage(&state, &principal, query.into_query()?).await?;
    let view = view.ok_or_else(too_many_groups)?;
    Ok(json_response(StatusCode::OK, &view))
}

pub fn too_many_groups() -> Problem {
    let why = format!(
        "\"by\": there are more than {MAX_ROWS} groups; name fewer values, or a shorter time with since and until"
    );
    Problem::new(ProblemCode::InvalidParameter, why).with_status(StatusCode::UNPROCESSABLE_ENTITY)
}

/// The usage of the runs that the principal may see; `None` if there are more than [`UsageQuery::max_rows`] groups.
pub async fn visible_usage(
    state: &AppState,
    principal: &Principal,
    query: UsageQuery,
) -> Result<Option<UsageView>, Problem> {
    let (budgets, now) = (state.runner.period_budgets(), now());
    let store = state.runner.store().as_ref();
    budgets.read_new_periods(store, now).await?;
    let budgets = budgets.statuses(now).into_iter();
    let budgets = budgets.filter(|status| may_see(principal, status));
    let budgets = budgets.map(BudgetView::from).collect();
    let by = query.by.clone();
    let query = UsageQuery {
        owner: principal.owner_filter().map(str::to_owned),
        visible_agents: principal.admin_globs().cloned(),
        ..query
    };
    let report = state.runner.store().usage(query).await?;
    let UsageReport {
        rows,
        totals,
        since,
        until,
    } = report;
    Ok(rows.map(|rows| UsageView {
        data: rows.into_iter().map(|row| group(&by, row)).collect(),
        totals: UsageNumbers::from(&totals),
        since,
        until,
        budgets,
    }))
}

/// A budget that others use too would show what they use.
fn may_see(principal: &Principal, status: &BudgetStatus) -> bool {
    let own = principal.owner_filter();
    own.is_none() || status.settings.key.as_deref() == own
}

impl From<BudgetStatus> for BudgetView {
    fn from(status: BudgetStatus) -> Self {
        let (limit_usd, limit_tokens) = match status.settings.limit {
            PeriodLimit::Usd(limit) => (Some(limit.to_usd()), None),
            PeriodLimit::Tokens(limit) => (None, Some(limit)),
        };
        Self {
            used_thousandths: status.share(),
            name: status.settings.name,
            per: status.settings.per.as_str(),
            limit_usd,
            limit_tokens,
            used_usd: status.used.cost.to_usd(),
            used_tokens: status.used.tokens,
            since: status.since,
            resets_at: status.resets_at,
        }
    }
}

impl GroupsQuery {
    fn into_query(self) -> Result<UsageQuery, Problem> {
        let Zone(zone) = self.tz;
        let (since, until) = period(&zone, self.since.as_deref(), self.until.as_deref())?;
        Ok(UsageQuery {
            by: self.by.as_deref().map_or(Ok(Vec::new()), parse_by)?,
            since,
            until,
            owner: None,
            agent: self.agent,
            visible_agents: None,
            labels: self.labels.0,
            max_rows: MAX_ROWS,
            time_zone: zone,
        })
    }
}

/// The bounds of a period: times, or dates, which begin at midnight in the zone.
pub fn period(
    zone: &TimeZone,
    since: Option<&str>,
    until: Option<&str>,
) -> Result<(Option<Timestamp>, Option<Timestamp>), Problem> {
    let expected = "an RFC 3339 time or a date, such as 2026-01-31";
    let time = |text: &str| parse_time(text).or_else(|| midnight(zone, text));
    let since = parse("since", since, expected, time)?;
    let until = parse("until", until, expected, time)?;
    if since.zip(until).is_some_and(|(since, until)| since > until) {
        return Err(Problem::parameter("until", "is before since"));
    }
    Ok((since, until))
}

/// The beginning of a date.
fn midnight(zone: &TimeZone, text: &str) -> Option<Timestamp> {
    let is_date = text.len() == 10 && text.bytes().all(|it| it.is_ascii_digit() || it == b'-');
    let date: Date = text.parse().ok().filter(|_| is_date)?;
    Some(date.to_zoned(zone.clone()).ok()?.timestamp())
}

fn parse_by(text: &str) -> Result<Vec<UsageDimension>, Problem> {
    parse_dimensions(text, DIMENSIONS, |name, label| {
        Some(match (name, label) {
            ("agent", _) => UsageDimension::Agent,
            ("model", _) => UsageDimension::Model,
            ("session", _) => UsageDimension::Session,
            ("key", _) => UsageDimension::Key,
            ("day", _) => UsageDimension::Day,
            (_, Some(label)) => UsageDimension::Label(label.to_owned()),
            _ => return None,
        })
    })
}

/// What sums are grouped by: names separated by commas, each once. `dimension` gets a name, and what follows `label.` in it.
pub fn parse_dimensions<T: PartialEq>(
    text: &str,
    known: &str,
    dimension: impl Fn(&str, Option<&str>) -> Option<T>,
) -> Result<Vec<T>, Problem> {
    let mut dimensions = Vec::new();
    let names = text.split(',').map(str::trim);
    for name in names.filter(|name| !name.is_empty()) {
        let label = name
            .strip_prefix("label.")
            .filter(|label| !label.is_empty());
        let Some(dimension) = dimension(name, label) else {
            let why = format_args!("{} is not one of: {known}", quote(name));
            return Err(Problem::parameter("by", why));
        };
        if dimensions.contains(&dimension) {
            let why = format_args!("{} is given twice", quote(name));
            return Err(Problem::parameter("by", why));
        }
        dimensions.push(dimension);
    }
    if dimensions.len() > MAX_DIMENSIONS {
        let why = format_args!("names more than {MAX_DIMENSIONS} values");
        return Err(Problem::parameter("by", why));
    }
    Ok(dimensions)
}

fn group(by: &[UsageDimension], row: UsageRow) -> UsageGroup {
    let mut group = UsageGroup {
        agent: None,
        model: None,
        session: None,
        key: None,
        day: row.day,
        labels: BTreeMap::new(),
        numbers: UsageNumbers::from(&row.sums),
    };
    let named = by.iter().filter(|it| **it != UsageDimension::Day);
    for (dimension, value) in named.zip(row.values) {
        match dimension {
            UsageDimension::Agent => group.agent = Some(value),
            UsageDimension::Model => group.model = Some(value),
            UsageDimension::Session => group.session = Some(value),
            UsageDimension::Key => group.key = Some(value),
            UsageDimension::Label(name) => {
                group.labels.insert(format!("label.{name}"), value);
            }
            UsageDimension::Day => {}
        }
    }
    group
}

impl From<&UsageSums> for UsageNumbers {
    fn from(sums: &UsageSums) -> Self {
        let count = |number: i128| u64::try_from(number.max(0)).unwrap_or(u64::MAX);
        Self {
            runs: count(sums.runs),
            roots: count(sums.roots),
            failed: count(sums.failed),
            cancelled: count(sums.cancelled),
            input_tokens: count(sums.input_tokens),
            output_tokens: count(sums.output_tokens),
            cache_read_tokens: count(sums.cache_read_tokens),
            cache_write_tokens: count(sums.cache_write_tokens),
            reasoning_tokens: count(sums.reasoning_tokens),
            model_calls: count(sums.model_calls),
            tool_calls: count(sums.tool_calls),
            cost_usd: (sums.priced > 0).then_some(sums.cost as f64 / 1e12),
            complete: sums.unreported <= 0,
            duration_p50_ms: sums.durations.percentile(50),
            duration_p95_ms: sums.durations.percentile(95),
        }
    }
}

fn example() -> Value {
    let numbers = || {
        json!({
            "runs": 4, "roots": 2, "failed": 1, "cancelled": 0, "input_tokens": 5210, "output_tokens": 1880,
            "cache_read_tokens": 3072, "cache_write_tokens": 0, "reasoning_tokens": 640, "model_calls": 9,
            "tool_calls": 5, "cost_usd": 0.0213, "complete": true, "duration_p50_ms": 2336, "duration_p95_ms": 9088,
        })
    };
    let mut group = numbers();
    group["agent"] = "planner".into();
    group["label.team"] = "blue".into();
    json!({
        "data": [group], "totals": numbers(), "since": "2026-01-01T00:00:00.000Z", "until": "2026-02-01T00:00:00.000Z",
        "budgets": [{
            "name": "team-blue", "per": "month", "limit_usd": 500.0, "limit_tokens": null, "used_usd": 312.4,
            "used_tokens": 81_350_220, "used_thousandths": 624, "since": "2026-02-01T00:00:00.000Z",
            "resets_at": "2026-03-01T00:00:00.000Z",
        }],
    })
}
