//! Charges budgets over time, by quarter hours.

use rusqlite::named_params;

use crate::domain::calendar::QUARTERS_PER_DAY;
use crate::store::Change;
use crate::store::encoding::integers;
use crate::store::sqlite::statements::Statements;
use crate::store::usage::{KEPT_BUDGET_DAYS, SETTLED_BUDGET_DAYS};

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
