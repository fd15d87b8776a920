//! Removes trees, a small part in one transaction, so that no run waits long: first a tree's log, from the end, so that no reader
//! sees a gap; then its runs from the leaves up, so that after a crash the remaining runs are still reachable from the root.

use tokio_postgres::Error;
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::store::encoding::run_values;
use crate::store::postgres::connection::{Connection, Query};
use crate::store::postgres::sql::{free_text, values};
use crate::store::postgres::statements::Sql;

/// Largest number of entries, and of runs, of one part.
const PART_ENTRIES: u32 = 256;
const PART_RUNS: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteProgress {
    /// The tree is removed.
    Done,
    /// The tree has another part.
    More,
}

pub async fn delete_part(db: &Connection, root: RunId) -> Result<DeleteProgress, Error> {
    let values = values! {":root": root, ":limit": i64::from(PART_ENTRIES)};
    let entries = Query::new(Sql::DeleteLastEntries, values.into());
    if db.execute(&entries).await?.affected >= PART_ENTRIES.into() {
        return Ok(DeleteProgress::More);
    }
    let values = values! {":root": root, ":limit": i64::from(PART_RUNS)};
    let found = db
        .execute(&Query::new(Sql::LastRuns, values.into()))
        .await?;
    let mut runs: Vec<Uuid> = Vec::new();
    let mut labels = Vec::new();
    for row in &found.rows {
        let run: Uuid = row.try_get("id")?;
        let stored: Option<String> = row.try_get("labels")?;
        let of_run = run_values::labels(stored.as_deref());
        labels.extend(of_run.into_iter().map(|(key, value)| (run, key, value)));
        runs.push(run);
    }
    let mut queries: Vec<Query<'_>> = labels
        .iter()
        .map(|(run, key, value)| {
            let values = values! {
                ":run": *run, ":key": free_text(key), ":value": free_text(value),
            };
            Query::new(Sql::DeleteLabel, values.into())
        })
        .collect();
    let of_runs = [
        Sql::LockAttachments,
        Sql::DeleteAttachments,
        Sql::DeleteClaims,
        Sql::DeleteDeliveries,
        Sql::DeletePushConfigs,
        Sql::DeleteApprovals,
        Sql::DeleteOwnDefinitions,
        Sql::DeleteSessions,
        Sql::DeleteRuns,
    ];
    let query = |sql| Query::new(sql, values! {":runs": runs.clone()}.into());
    queries.extend(of_runs.map(query));
    let is_last = runs.len() < PART_RUNS as usize || runs.contains(&root.0);
    if is_last {
        queries.push(Query::new(Sql::DeleteTree, values! {":root": root}.into()));
    }
    db.execute_all(&queries).await?;
    Ok(match is_last {
        true => DeleteProgress::Done,
        false => DeleteProgress::More,
    })
}
