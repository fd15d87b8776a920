//! Copies a whole store from one engine to the other, while no daemon uses either. A copy is one transaction of the target: it is
//! complete, or there is none.

mod memories;
mod node_labels;
mod tables;
mod to_postgres;
mod to_sqlite;

use std::path::Path;

use tokio::runtime::Builder;

use crate::store::StoreError;
use crate::store::migrate::node_labels::NodeLabels;
use crate::store::postgres;
use crate::store::sqlite;

/// What was copied of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedTable {
    pub name: &'static str,
    pub rows: u64,
}

/// Which way a store is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the data directory to the PostgreSQL database.
    ToPostgres,
    /// From the PostgreSQL database to the data directory.
    ToSqlite,
}

/// Copies all rows, and returns how many of which table. Blocks. Fails if a daemon uses one of the stores, or if the target
/// has a row already. The labels that nodes need for unfinished runs are in PostgreSQL only: `node_labels` finds them for a copy
/// that goes there.
pub fn migrate(
    dir: &Path,
    url: &str,
    direction: Direction,
    node_labels: NodeLabels<'_>,
) -> Result<Vec<CopiedTable>, StoreError> {
    let copy = || {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| StoreError::Backend(error.to_string()))?;
        runtime.block_on(copy((dir, url), direction, node_labels))
    };
    // The caller may have a runtime, on whose threads another one cannot run.
    std::thread::scope(|scope| {
        let copied = scope.spawn(copy).join();
        copied.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

async fn copy(
    (dir, url): (&Path, &str),
    direction: Direction,
    node_labels: NodeLabels<'_>,
) -> Result<Vec<CopiedTable>, StoreError> {
    match direction {
        Direction::ToPostgres => {
            let source = sqlite::offline::open(dir)?;
            let mut target = postgres::offline::Offline::open(url).await?;
            to_postgres::copy(&source, dir, &mut target, node_labels).await
        }
        Direction::ToSqlite => {
            // A source that cannot be opened leaves no empty database behind.
            let mut source = postgres::offline::Offline::open(url).await?;
            let mut target = sqlite::offline::create(dir)?;
            to_sqlite::check_empty(&target, dir)?;
            to_sqlite::copy(&mut source, &mut target, dir).await
        }
    }
}

fn not_empty(target: &dyn std::fmt::Display, table: &str) -> StoreError {
    StoreError::Backend(format!(
        "{target} is not empty: its table {table} has rows; choose another one"
    ))
}

/// The error of a copy that has not as many rows as its source.
fn check_count(table: &str, source: u64, target: u64) -> Result<(), StoreError> {
    match source == target {
        true => Ok(()),
        false => Err(StoreError::Backend(format!(
            "of the {source} rows of {table}, {target} arrived; nothing was copied"
        ))),
    }
}

fn damaged(table: &str, column: &str, why: &dyn std::fmt::Display) -> StoreError {
    StoreError::Corrupt(format!("{column} in the table {table}: {why}"))
}
