//! Sums of scores by day, which outlive the runs.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::domain::calendar::{QUARTERS_PER_DAY, quarter_from, quarter_of, quarter_start};
use crate::domain::glob::Matcher;
use crate::domain::score::{Moments, ScoreSummary};
use crate::store::changes::Changes;
use crate::store::encoding::run_values;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{params, values};

/// Groups of one report.
pub const MAX_GROUPS: usize = 10_000;
/// Sums that one step of a trim removes.
const TRIM_ROWS: u32 = 1_000;

pub trait ScoreSums: Send + Sync + 'static {
    /// Sums of scores. A score counts at the time at which the root of its run was accepted.
    fn score_report(&self, query: ScoreQuery) -> BoxFuture<'_, StoreResult<ScoreReport>>;

    /// Removes a part of the sums before this time; true if there may be more.
    fn trim_scores(&self, before: Timestamp) -> BoxFuture<'_, StoreResult<bool>>;
}

/// What sums of scores are grouped by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScoreDimension {
    Agent,
    Version,
    /// The version that root runs of an agent with a rollout got.
    Variant,
    Name,
    /// The value of the root's label with this name.
    Label(String),
    /// The day in UTC on which the root was accepted.
    Day,
}

#[derive(Clone, Debug)]
pub struct ScoreQuery {
    pub by: Vec<ScoreDimension>,
    /// Rounded down to a day in UTC.
    pub since: Option<Timestamp>,
    /// Rounded up to a day in UTC.
    pub until: Option<Timestamp>,
    /// Only of runs of this key.
    pub owner: Option<String>,
    pub agent: Option<String>,
    pub name: Option<String>,
    /// Only of runs of agents that match; `None` means all.
    pub visible_agents: Option<Matcher>,
    /// Only of trees whose roots have all of these labels.
    pub labels: Vec<(String, String)>,
}

impl ScoreQuery {
    /// All scores of one owner's runs, or of all, of agents that match.
    pub fn of(owner: Option<&str>, agents: Option<&Matcher>, by: Vec<ScoreDimension>) -> Self {
        Self {
            by,
            since: None,
            until: None,
            owner: owner.map(str::to_owned),
            agent: None,
            name: None,
            visible_agents: agents.cloned(),
            labels: Vec::new(),
        }
    }
}

/// Sorted by their values; `None` if there are more than [`MAX_GROUPS`].
pub type ScoreReport = Option<Vec<ScoreRow>>;

#[derive(Clone, Debug)]
pub struct ScoreRow {
    /// In the order of [`ScoreQuery::by`], without the day; `None` for runs without such a value.
    pub values: Vec<Option<String>>,
    pub day: Option<Date>,
    pub scores: ScoreSummary,
}

/// Summed here: there may be many days.
const REPORT: &str = "SELECT min(k.agent) AS agent, min(k.version) AS version, min(k.variant) AS variant, min(k.labels) AS labels, min(k.name) AS name, \
     t.label, t.day, sum(t.n)::bigint AS n, sum(t.sum_2)::bigint AS sum_2, sum(t.sum_1)::bigint AS sum_1, \
     sum(t.sum_0)::bigint AS sum_0, sum(t.square_4)::bigint AS square_4, sum(t.square_3)::bigint AS square_3, \
     sum(t.square_2)::bigint AS square_2, sum(t.square_1)::bigint AS square_1, sum(t.square_0)::bigint AS square_0 \
     FROM (SELECT series, label, CASE WHEN :by_day::boolean THEN day ELSE 0 END AS day, n, sum_2, sum_1, sum_0, \
     square_4, square_3, square_2, square_1, square_0 FROM score_sums WHERE n > 0 AND day >= :since AND day < :until) t \
     JOIN score_series k ON k.id = t.series WHERE (:owner::text IS NULL OR k.owner = :owner) \
     AND (:agent::text IS NULL OR k.agent = :agent) AND (:name::text IS NULL OR k.name = :name) \
     GROUP BY t.series, t.label, t.day";
const TRIM: &str = "DELETE FROM score_sums WHERE (day, series, label) IN \
     (SELECT day, series, label FROM score_sums WHERE day < :before ORDER BY day LIMIT :rows)";
const TRIM_SERIES: &str = "DELETE FROM score_series WHERE NOT EXISTS (SELECT 1 FROM score_sums t WHERE t.series = score_series.id)";

impl<E: Engine> ScoreSums for E {
    fn score_report(&self, query: ScoreQuery) -> BoxFuture<'_, StoreResult<ScoreReport>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move { report(db, &query).await })
        })
    }

    fn trim_scores(&self, before: Timestamp) -> BoxFuture<'_, StoreResult<bool>> {
        let old = values! {":before": day_of(before), ":rows": TRIM_ROWS};
        let trim = self.commit(Changes::one(TRIM, old).and(TRIM_SERIES, []));
        Box::pin(async move { Ok(trim.await?[0] >= u64::from(TRIM_ROWS)) })
    }
}

type GroupKey = (Vec<Option<String>>, Option<Date>);

async fn report(db: &Reader, query: &ScoreQuery) -> StoreResult<ScoreReport> {
    let mut groups: BTreeMap<GroupKey, ScoreSummary> = BTreeMap::new();
    let add = |row: &Row<'_>| {
        let labels: Option<String> = row.get("labels")?;
        let labels = run_values::labels(labels.as_deref());
        let (agent, name): (String, String) = (row.get("agent")?, row.get("name")?);
        let is_visible = query
            .visible_agents
            .as_ref()
            .is_none_or(|it| it.is_match(&agent));
        let has_labels = query
            .labels
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value));
        if !is_visible || !has_labels {
            return Ok(());
        }
        let (mut values, mut day) = (Vec::new(), None);
        for dimension in &query.by {
            values.push(match dimension {
                ScoreDimension::Agent => Some(agent.clone()),
                ScoreDimension::Version => row.get("version")?,
                ScoreDimension::Variant => {
                    let variant: String = row.get("variant")?;
                    Some(variant).filter(|it| !it.is_empty())
                }
                ScoreDimension::Name => Some(name.clone()),
                ScoreDimension::Label(key) => labels.get(key).cloned(),
                ScoreDimension::Day => {
                    let number: i64 = row.get("day")?;
                    let start = quarter_start(number.saturating_mul(QUARTERS_PER_DAY));
                    day = Some(start.to_zoned(TimeZone::UTC).date());
                    continue;
                }
            });
        }
        let group = groups.entry((values, day)).or_default();
        let (label, n): (String, u64) = (row.get("label")?, row.get("n")?);
        match label.is_empty() {
            true => group.numbers.add(&moments(row, n)?),
            false => *group.labels.entry(label).or_default() += n,
        }
        Ok(())
    };
    let params = params! {
        ":by_day": query.by.contains(&ScoreDimension::Day),
        ":since": query.since.map_or(i64::MIN, day_of),
        ":until": query.until.map_or(i64::MAX, day_from),
        ":owner": query.owner.as_ref(),
        ":agent": query.agent.as_ref(),
        ":name": query.name.as_ref(),
    };
    db.query(REPORT, params, add).await?;
    if groups.len() > MAX_GROUPS {
        return Ok(None);
    }
    let rows = groups.into_iter().map(|((values, day), scores)| ScoreRow {
        values,
        day,
        scores,
    });
    Ok(Some(rows.collect()))
}

/// The number of the day that contains this time, counted from 1970.
fn day_of(time: Timestamp) -> i64 {
    quarter_of(time).div_euclid(QUARTERS_PER_DAY)
}

/// The first day that does not begin before this time.
fn day_from(time: Timestamp) -> i64 {
    -(-quarter_from(time)).div_euclid(QUARTERS_PER_DAY)
}

/// A number is summed in parts of six digits: see `store/scores`.
fn moments(row: &Row<'_>, n: u64) -> StoreResult<Moments> {
    let total = |columns: &[&'static str]| {
        columns.iter().try_fold(0_i128, |total, column| {
            let part: i64 = row.get(*column)?;
            Ok(total.saturating_mul(1_000_000).saturating_add(part.into()))
        })
    };
    Ok(Moments {
        n,
        sum: total(&["sum_2", "sum_1", "sum_0"])?,
        squares: total(&["square_4", "square_3", "square_2", "square_1", "square_0"])?,
    })
}
