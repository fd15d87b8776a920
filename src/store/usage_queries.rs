//! Reads sums of usage, and what was charged to budgets.

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use uuid::Uuid;

use crate::store::StoreError;
use crate::store::encoding::usage_report::{
    self, GroupSums, Groups, Part, ReportBuilder, SeriesRow,
};
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::params;
use crate::store::usage::{BudgetPeriod, BudgetUsage, UsageLog, UsageQuery, UsageReport};
use crate::store::write_queue::job::Task;

const SERIES: &str = "SELECT id, owner, session, labels, agent, model FROM usage_series \
     WHERE (:owner::text IS NULL OR owner = :owner) AND (:agent::text IS NULL OR agent = :agent)";
const KEPT: &str = "SELECT (SELECT min(start) FROM usage_quarters) AS first, (SELECT max(start) FROM usage_quarters) AS last";

/// The sums of several parts, which are numbered from 1.
macro_rules! sums {
    ($table:literal) => {
        concat!(
            "SELECT {p.key + 1, u.series, u.sums FROM json_each(:starts) p CROSS JOIN json_each(:ends) e ON e.key = p.key \
             CROSS JOIN ", $table, " u ON u.start >= p.value AND u.start < e.value\
             |p.number, u.series, u.sums FROM unnest(:starts::bigint[], :ends::bigint[]) WITH ORDINALITY p (first, past, number) \
             CROSS JOIN LATERAL (SELECT series, sums FROM ", $table, " WHERE start >= p.first AND start < p.past OFFSET 0) u}"
        )
    };
}
const QUARTERS: &str = sums!("usage_quarters");
const DAYS: &str = sums!("usage_days");

/// The amounts of a period, to be added up, and a row with the shares whose alerts are recorded.
const BUDGET: &str = "SELECT {tokens, cost|least(coalesce(sum(tokens), 0), 9223372036854775807)::bigint AS tokens, \
     least(coalesce(sum(cost), 0), 9223372036854775807)::bigint AS cost}, NULL::text AS alerts FROM budget_usage \
     WHERE budget = :budget AND quarter >= :start AND quarter < :end {|AND writer IS DISTINCT FROM :left_out::uuid} \
     UNION ALL SELECT 0, 0, {json_group_array(share)|json_agg(share)::text} \
     FROM (SELECT share FROM budget_alerts WHERE budget = :budget AND period = :start ORDER BY share) a";

impl<E: Engine> UsageLog for E {
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
        self.read(ReadMode::LongSnapshot, move |db| {
            Box::pin(async move { report(db, &query).await })
        })
    }

    fn budget_usage(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { budget_usage(db, &budget, period, None).await })
        })
    }

    fn trim_usage(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue().is_positive(Task::TrimUsage(before))
    }
}

/// `left_out` is a writer whose charges do not count.
pub async fn budget_usage(
    db: &Reader,
    budget: &str,
    period: BudgetPeriod,
    left_out: Option<Uuid>,
) -> StoreResult<BudgetUsage> {
    let params = params! {
        ":budget": budget, ":start": period.start, ":end": period.end, ":left_out": left_out,
    };
    let mut usage = BudgetUsage::default();
    let add = |row: &Row<'_>| {
        let amount = |column| Ok(row.get::<Option<u64>>(column)?.unwrap_or_default());
        usage.tokens = usage.tokens.saturating_add(amount("tokens")?);
        usage.cost = usage.cost.saturating_add(amount("cost")?);
        let shares: Option<Vec<u32>> = row.json("alerts")?;
        usage.alerts.extend(shares.unwrap_or_default());
        Ok(())
    };
    db.query(BUDGET, params, add).await?;
    Ok(usage)
}

async fn report(db: &Reader, query: &UsageQuery) -> StoreResult<UsageReport> {
    let kept = db.first(KEPT, &[], |row| Ok((row.get("first")?, row.get("last")?)));
    let (first, last): (Option<i64>, Option<i64>) = kept.await?.unwrap_or_default();
    let kept = first.zip(last);
    let Some(period) = kept.and_then(|(first, last)| usage_report::period(query, first, last))
    else {
        return Ok(usage_report::empty_report());
    };
    let mut groups = Groups::default();
    let add = |row: &Row<'_>| {
        let series = SeriesRow {
            id: row.get("id")?,
            owner: row.get("owner")?,
            session: row.get("session")?,
            labels: row.get("labels")?,
            agent: row.get("agent")?,
            model: row.get("model")?,
        };
        groups.add(query, &series);
        Ok(())
    };
    let params = params! {":owner": query.owner.as_ref(), ":agent": query.agent.as_ref()};
    db.query(SERIES, params, add).await?;
    let segments = usage_report::segments(query, period);
    let mut parts = Vec::new();
    for (number, segment) in segments.iter().enumerate() {
        parts.extend(segment.parts().into_iter().map(|part| (number, part)));
    }
    let (days, quarters): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(_, part)| part.is_day);
    let mut sums = vec![GroupSums::new(&groups); segments.len()];
    add_parts(db, QUARTERS, &quarters, &groups, &mut sums).await?;
    add_parts(db, DAYS, &days, &groups, &mut sums).await?;
    let mut builder = ReportBuilder::new(period);
    for (segment, sums) in segments.iter().zip(sums) {
        if !builder.add(query, &groups, segment, sums) {
            break;
        }
    }
    Ok(builder.finish(query))
}

/// Adds the sums of parts, each with the number of its segment, to those of their segments, in one statement.
async fn add_parts(
    db: &Reader,
    sql: &str,
    parts: &[(usize, Part)],
    groups: &Groups,
    sums: &mut [GroupSums],
) -> StoreResult<()> {
    if parts.is_empty() {
        return Ok(());
    }
    let starts: Vec<i64> = parts.iter().map(|(_, part)| part.start).collect();
    let ends: Vec<i64> = parts.iter().map(|(_, part)| part.end).collect();
    let add = |row: &Row<'_>| {
        // By position: a search for the names would take longer than the rest.
        let (segment, part) = &parts[row.get::<usize>(0)? - 1];
        let (series, stored) = (row.get(1)?, row.get(2).ok());
        groups.apply(&mut sums[*segment], part, series, stored)
    };
    let params = params! {":starts": starts, ":ends": ends};
    db.query(sql, params, add).await.map(drop)
}
