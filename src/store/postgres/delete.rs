//! Removes trees: many small ones in one transaction, and of a large one a small part, so that no run waits long: first its log,
//! from the end, so that no reader sees a gap; then its runs from the leaves up, so that after a crash the remaining runs are
//! still reachable from the root.

use std::collections::HashSet;

use tokio_postgres::{Error, Row};
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::store::encoding::run_values;
use crate::store::postgres::connection::{Connection, Query};
use crate::store::postgres::statements::Sql;
use crate::store::sql::value::values;

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

/// Most roots, entries and runs of one transaction that removes whole trees.
pub const MAX_TREES: usize = 64;
const MAX_ENTRIES: i64 = 4096;
const MAX_RUNS: u32 = 1024;

/// Removes small trees whole, many in one transaction. Returns for each root what it did: `None` if there is no such root,
/// `More` if nothing, because its tree is too large, or the others are.
pub async fn delete_small(
    db: &Connection,
    roots: &[RunId],
) -> Result<Vec<Option<DeleteProgress>>, Error> {
    let ids: Vec<Uuid> = roots.iter().map(|root| root.0).collect();
    let largest = i64::from(PART_ENTRIES);
    let search = [
        Query::new(
            Sql::RootsToDelete,
            values! {":roots": ids.clone(), ":limit": largest + 1}.into(),
        ),
        Query::new(
            Sql::RunsToDelete,
            values! {":roots": ids, ":limit": i64::from(MAX_RUNS) + 1}.into(),
        ),
    ];
    let found = db.execute_all(&search).await?;
    let mut runs = found[1].rows.as_slice();
    let is_cut = runs.len() > MAX_RUNS as usize;
    if is_cut {
        // Those of the last tree may be incomplete.
        let last: Uuid = runs[runs.len() - 1].try_get("root")?;
        let complete = runs.iter().map(|row| row.try_get::<_, Uuid>("root"));
        let complete = complete.take_while(|root| root.as_ref().is_ok_and(|root| *root != last));
        runs = &runs[..complete.count()];
    }
    let mut progress: Vec<Option<DeleteProgress>> = vec![None; roots.len()];
    let (mut entries, mut small) = (0, HashSet::new());
    for row in &found[0].rows {
        let (root, count): (Uuid, i64) = (row.try_get("id")?, row.try_get("entries")?);
        let is_complete = !is_cut || {
            let mut complete = runs
                .iter()
                .filter_map(|row| row.try_get::<_, Uuid>("root").ok());
            complete.any(|complete| complete == root)
        };
        let is_small = is_complete && count <= largest && entries + count <= MAX_ENTRIES;
        if is_small {
            entries += count;
            small.insert(root);
        }
        let deleted = match is_small {
            true => DeleteProgress::Done,
            false => DeleteProgress::More,
        };
        let positions = roots
            .iter()
            .zip(&mut progress)
            .filter(|(it, _)| it.0 == root);
        positions.for_each(|(_, progress)| *progress = Some(deleted));
    }
    let mut doomed = DoomedRuns::default();
    for row in runs {
        if small.contains(&row.try_get::<_, Uuid>("root")?) {
            doomed.add(row)?;
        }
    }
    let roots: Vec<Uuid> = small.into_iter().collect();
    let of_roots = |sql| Query::new(sql, values! {":roots": roots.clone()}.into());
    let mut queries = vec![of_roots(Sql::DeleteEntries)];
    queries.extend(doomed.queries());
    queries.push(of_roots(Sql::DeleteTrees));
    db.execute_all(&queries).await?;
    Ok(progress)
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
    let mut doomed = DoomedRuns::default();
    for row in &found.rows {
        doomed.add(row)?;
    }
    let mut queries = doomed.queries();
    let is_last = doomed.runs.len() < PART_RUNS as usize || doomed.runs.contains(&root.0);
    if is_last {
        let roots = values! {":roots": vec![root.0]};
        queries.push(Query::new(Sql::DeleteTrees, roots.into()));
    }
    db.execute_all(&queries).await?;
    Ok(match is_last {
        true => DeleteProgress::Done,
        false => DeleteProgress::More,
    })
}

/// Runs that are removed with what belongs to each of them.
#[derive(Default)]
struct DoomedRuns {
    runs: Vec<Uuid>,
    labels: Vec<(Uuid, String, String)>,
}

impl DoomedRuns {
    fn add(&mut self, row: &Row) -> Result<(), Error> {
        let run: Uuid = row.try_get("id")?;
        let stored: Option<String> = row.try_get("labels")?;
        let of_run = run_values::labels(stored.as_deref());
        self.labels
            .extend(of_run.into_iter().map(|(key, value)| (run, key, value)));
        self.runs.push(run);
        Ok(())
    }

    fn queries(&self) -> Vec<Query<'_>> {
        let mut queries = Vec::new();
        if !self.labels.is_empty() {
            let keys: Vec<&[u8]> = self
                .labels
                .iter()
                .map(|(_, key, _)| key.as_bytes())
                .collect();
            let texts: Vec<&[u8]> = self
                .labels
                .iter()
                .map(|(.., value)| value.as_bytes())
                .collect();
            let of: Vec<Uuid> = self.labels.iter().map(|(run, ..)| *run).collect();
            let values = values! {":keys": keys, ":values": texts, ":of": of};
            queries.push(Query::new(Sql::DeleteLabels, values.into()));
        }
        let of_runs = [
            Sql::LockLastSessions,
            Sql::LockAttachments,
            Sql::DeleteAttachments,
            Sql::DeleteClaims,
            Sql::DeleteDeliveries,
            Sql::DeletePushConfigs,
            Sql::DeleteInputs,
            Sql::DeleteScores,
            Sql::DeleteScorings,
            Sql::DeleteOwnDefinitions,
            Sql::DeleteSessions,
            Sql::DeleteRuns,
        ];
        let query = |sql| Query::new(sql, values! {":runs": self.runs.clone()}.into());
        queries.extend(of_runs.map(query));
        queries
    }
}
