//! Counts the usage of the runs that an older version has recorded, when its file is migrated.

use rusqlite::{Connection, Row, named_params};

use crate::domain::run::Status;
use crate::store::encoding::ended_runs::EndedRun;
use crate::store::sqlite::rows::{self, USAGE_COLUMNS, UsageColumns};
use crate::store::sqlite::sql_parts::ENDED_COLUMNS;
use crate::store::sqlite::statements::Statements;
use crate::store::sqlite::usage_rollup::{self, UsageRollup};

/// Only the newest runs are counted, so that a migration takes seconds.
const MAX_RUNS: u32 = 500_000;
/// Rows that are written at once.
const FLUSH_ROWS: usize = 4_096;

pub fn fill(db: &Connection) -> rusqlite::Result<()> {
    let mut statements = Statements::new(db)?;
    let mut usage = UsageRollup::default();
    let mut sql = db.prepare(&format!(
        "SELECT {ENDED_COLUMNS}, r.root AS root, r.finished_at AS finished_at, r.status AS status, {USAGE_COLUMNS} \
         FROM runs r WHERE r.finished_at IS NOT NULL ORDER BY r.id DESC LIMIT :limit"
    ))?;
    let columns = UsageColumns::find(&sql)?;
    let mut found = sql.query(named_params! {":limit": MAX_RUNS})?;
    while let Some(row) = found.next()? {
        // A damaged row is not counted.
        if let Ok(ended) = ended_run(row, &columns) {
            usage.count(&mut statements, rows::id(row, "root")?, ended)?;
        }
        if usage.pending() >= FLUSH_ROWS {
            usage.flush(&mut statements)?;
        }
    }
    usage.flush(&mut statements)
}

fn ended_run(row: &Row<'_>, columns: &UsageColumns) -> rusqlite::Result<EndedRun> {
    let status: String = row.get("status")?;
    Ok(EndedRun {
        row: usage_rollup::read_ended_row(row)?,
        status: status.parse().unwrap_or(Status::Completed),
        finished_at: row.get("finished_at")?,
        usage: rows::usage(row, columns)?,
    })
}
