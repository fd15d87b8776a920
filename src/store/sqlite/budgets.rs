//! What budgets over time were charged, by quarter hours, and the alerts that are recorded.

use rusqlite::{Connection, named_params};

use crate::domain::calendar::QUARTERS_PER_DAY;
use crate::store::encoding::integers;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::statements::Statements;
use crate::store::usage::{BudgetPeriod, BudgetUsage, KEPT_BUDGET_DAYS, SETTLED_BUDGET_DAYS};
use crate::store::{Change, StoreError};

/// Adds the charges of a change, within the transaction that records it.
pub fn charge(sql: &mut Statements<'_>, change: &Change) -> rusqlite::Result<()> {
    let charges = match change {
        Change::Progress(progress) => &progress.charges,
        Change::Finish(finished) => &finished.progress.charges,
        _ => return Ok(()),
    };
    for charge in charges {
        sql.charge_budget.execute(named_params! {
            ":budget": charge.budget,
            ":quarter": charge.quarter,
            ":tokens": integers::signed(charge.tokens),
            ":cost": integers::signed(charge.cost),
        })?;
        for share in &charge.alerts {
            sql.insert_budget_alert.execute(named_params! {
                ":budget": charge.budget,
                ":period": charge.period_start,
                ":share": share,
            })?;
        }
        let old = named_params! {
            ":budget": charge.budget,
            ":before": charge.quarter - KEPT_BUDGET_DAYS * QUARTERS_PER_DAY,
            ":settled": charge.quarter - SETTLED_BUDGET_DAYS * QUARTERS_PER_DAY,
        };
        sql.trim_budget_usage.execute(old)?;
        sql.trim_budget_alerts.execute(old)?;
    }
    Ok(())
}

pub fn usage(
    db: &Connection,
    budget: &str,
    period: BudgetPeriod,
) -> Result<BudgetUsage, StoreError> {
    read_usage(db, budget, period).map_err(store_error)
}

fn read_usage(
    db: &Connection,
    budget: &str,
    period: BudgetPeriod,
) -> rusqlite::Result<BudgetUsage> {
    let mut usage = BudgetUsage::default();
    let mut sql = db.prepare_cached(
        "SELECT tokens, cost FROM budget_usage WHERE budget = :budget AND quarter >= :start AND quarter < :end",
    )?;
    let params = named_params! {":budget": budget, ":start": period.start, ":end": period.end};
    let mut found = sql.query(params)?;
    while let Some(row) = found.next()? {
        let (tokens, cost) = (row.get("tokens")?, row.get("cost")?);
        usage.tokens = usage.tokens.saturating_add(integers::unsigned(tokens));
        usage.cost = usage.cost.saturating_add(integers::unsigned(cost));
    }
    let mut sql = db.prepare_cached(
        "SELECT share FROM budget_alerts WHERE budget = :budget AND period = :start ORDER BY share",
    )?;
    let params = named_params! {":budget": budget, ":start": period.start};
    let alerts = sql.query_map(params, |row| row.get("share"))?;
    usage.alerts = alerts.collect::<rusqlite::Result<_>>()?;
    Ok(usage)
}
