//! Reads sums of usage, and what was charged to budgets.

use uuid::Uuid;

use crate::store::StoreError;
use crate::store::encoding::usage_report::{
    self, GroupSums, Groups, Part, ReportBuilder, SeriesRow,
};
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::params;
use crate::store::usage::{BudgetPeriod, BudgetUsage, UsageQuery, UsageReport};

const SERIES: &str = "SELECT id, owner, session, labels, agent, model FROM usage_series \
     WHERE (:owner::text IS NULL OR owner = :owner) AND (:agent::text IS NULL OR agent = :agent)";
const KEPT: &str = "SELECT min(start) AS first, max(start) AS last FROM usage_quarters";
const BUDGET: &str = "SELECT \
     (SELECT least(coalesce(sum(tokens), 0), 9223372036854775807)::bigint FROM budget_usage \
     WHERE budget = :budget AND quarter >= :start AND quarter < :end AND writer IS DISTINCT FROM :left_out) AS tokens, \
     (SELECT least(coalesce(sum(cost), 0), 9223372036854775807)::bigint FROM budget_usage \
     WHERE budget = :budget AND quarter >= :start AND quarter < :end AND writer IS DISTINCT FROM :left_out) AS cost, \
     ARRAY(SELECT share FROM budget_alerts WHERE budget = :budget AND period = :start ORDER BY share) AS alerts";

pub async fn report(db: &Reader, query: &UsageQuery) -> StoreResult<UsageReport> {
    let Some(period) = period(db, query).await? else {
        return Ok(usage_report::empty_report());
    };
    let groups = groups(db, query).await?;
    let segments = usage_report::segments(query, period);
    let mut parts = Vec::new();
    for (number, segment) in segments.iter().enumerate() {
        parts.extend(segment.parts().into_iter().map(|part| (number, part)));
    }
    let mut sums = vec![GroupSums::new(&groups); segments.len()];
    for (table, is_day) in [("usage_quarters", false), ("usage_days", true)] {
        let of_table: Vec<&(usize, Part)> = parts
            .iter()
            .filter(|(_, part)| part.is_day == is_day)
            .collect();
        add_parts(db, table, &of_table, &groups, &mut sums).await?;
    }
    let mut builder = ReportBuilder::new(period);
    for (segment, sums) in segments.iter().zip(sums) {
        if !builder.add(query, &groups, segment, sums) {
            break;
        }
    }
    Ok(builder.finish(query))
}

async fn period(db: &Reader, query: &UsageQuery) -> StoreResult<Option<(i64, i64)>> {
    let Some(row) = db.row(KEPT, &[]).await? else {
        return Ok(None);
    };
    let first: Option<i64> = rows::get(&row, "first")?;
    let last: Option<i64> = rows::get(&row, "last")?;
    let kept = first.zip(last);
    Ok(kept.and_then(|(first, last)| usage_report::period(query, first, last)))
}

async fn groups(db: &Reader, query: &UsageQuery) -> StoreResult<Groups> {
    let mut groups = Groups::default();
    let params = params! {":owner": query.owner.as_ref(), ":agent": query.agent.as_ref()};
    for row in db.rows(SERIES, params).await? {
        let text = |column| Ok::<_, StoreError>(rows::str(&row, column)?.unwrap_or_default());
        let series = SeriesRow {
            id: rows::get(&row, "id")?,
            owner: text("owner")?,
            session: text("session")?,
            labels: text("labels")?,
            agent: text("agent")?,
            model: text("model")?,
        };
        groups.add(query, &series);
    }
    Ok(groups)
}

/// Adds the sums of parts of one table to those of their segments, in one statement.
async fn add_parts(
    db: &Reader,
    table: &str,
    parts: &[&(usize, Part)],
    groups: &Groups,
    sums: &mut [GroupSums],
) -> StoreResult<()> {
    if parts.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "SELECT p.number, u.series, u.sums FROM unnest(:starts::bigint[], :ends::bigint[]) WITH ORDINALITY p (first, past, number) \
         CROSS JOIN LATERAL (SELECT series, sums FROM {table} WHERE start >= p.first AND start < p.past OFFSET 0) u"
    );
    let starts: Vec<i64> = parts.iter().map(|(_, part)| part.start).collect();
    let ends: Vec<i64> = parts.iter().map(|(_, part)| part.end).collect();
    let params = params! {":starts": starts, ":ends": ends};
    for row in db.rows(&sql, params).await? {
        // Ordinality counts from 1.
        let number: usize = rows::small(&row, "number")?;
        let (segment, part) = parts[number - 1];
        let stored: &[u8] = rows::get(&row, "sums")?;
        let series = rows::get(&row, "series")?;
        groups.apply(&mut sums[*segment], part, series, Some(stored))?;
    }
    Ok(())
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
    let Some(row) = db.row(BUDGET, params).await? else {
        return Ok(BudgetUsage::default());
    };
    let alerts: Vec<i64> = rows::get(&row, "alerts")?;
    Ok(BudgetUsage {
        tokens: rows::count(&row, "tokens")?,
        cost: rows::count(&row, "cost")?,
        alerts: alerts
            .into_iter()
            .filter_map(|share| u32::try_from(share).ok())
            .collect(),
    })
}
