//! Reads runs, trees, steps, events and idempotency keys.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use tokio_postgres::Row;
use tracing::error;
use uuid::Uuid;

use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId, now};
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::entries;
use crate::store::encoding::integers::signed;
use crate::store::events::EventQuery;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::postgres::run_rows;
use crate::store::reader::Reader;
use crate::store::runs::{ChildCall, UnfinishedRun};
use crate::store::sql::value::{free_text, params};
use crate::store::{ClaimedRun, IdempotencyKey, ResumeState, Step, StoreError};

/// The run `:id` and all its descendants.
macro_rules! subtree {
    () => {
        "(WITH RECURSIVE tree (id) AS (SELECT :id::uuid \
         UNION ALL SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) SELECT id FROM tree)"
    };
}

static RUN: LazyLock<String> = LazyLock::new(|| run_rows::select_with_approvals("r.id = :id"));
static TREE: LazyLock<String> = LazyLock::new(|| {
    run_rows::select_summaries(concat!("r.id IN ", subtree!())) + " ORDER BY r.id"
});
static CHILDREN: LazyLock<String> =
    LazyLock::new(|| run_rows::select("r.parent = :id") + " ORDER BY r.id");
static UNFINISHED: LazyLock<String> = LazyLock::new(|| {
    run_rows::select_with_resume_states("r.finished_at IS NULL") + " ORDER BY r.depth, r.id"
});
static UNFINISHED_TREES: LazyLock<String> = LazyLock::new(|| {
    run_rows::select_with_resume_states("r.finished_at IS NULL AND r.root = ANY(:roots)")
        + " ORDER BY r.depth, r.id"
});
const CHILD_CALLS: &str = "SELECT r.id, r.tool_call_id FROM runs r WHERE r.parent = :id \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) ORDER BY r.id";
const IS_HELD: &str = "SELECT 1 FROM runs WHERE id = :id AND held IS NOT NULL";
const DEFINITION: &str = "SELECT d.body FROM runs r JOIN definitions d ON d.hash = r.definition \
     WHERE r.id = :id AND NOT EXISTS (SELECT 1 FROM deletions x WHERE x.root = r.root)";
/// The run that an idempotency key has accepted, unless the key has expired.
const FIND_CLAIM: &str = "SELECT run, body, message FROM claims \
     WHERE credential = :credential AND route = :route AND key = :key AND expires > :now \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = run)";
const STEPS: &str = "SELECT e.last_seq, e.steps FROM runs r JOIN entries e ON e.root = r.root \
     WHERE r.id = :id AND e.run = :id AND e.steps IS NOT NULL \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) ORDER BY e.last_seq, e.id";

/// A page of entries with events. Each has at least one, so there are enough entries.
macro_rules! events {
    ($of:expr) => {
        concat!(
            "SELECT e.run, e.last_seq, e.count, e.events FROM entries e \
             WHERE e.root = :root AND e.last_seq > :after AND e.count > 0 ",
            $of,
            " AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = :root) ORDER BY e.last_seq LIMIT :limit"
        )
    };
}

const TREE_EVENTS: &str = events!("");
const RUN_EVENTS: &str = events!("AND e.run = :id");
const SUBTREE_EVENTS: &str = events!(concat!("AND e.run IN ", subtree!()));

pub async fn run(db: &Reader, id: RunId) -> StoreResult<Option<Run>> {
    let found = db.row(&RUN, params! {":id": id}).await?;
    let run = found.as_ref().map(run_rows::run_with_approvals).transpose();
    run.map_err(|error| match error {
        StoreError::Corrupt(why) => StoreError::Corrupt(format!("the record of {id}: {why}")),
        error => error,
    })
}

/// The run and its descendants, in the order in which they were created.
pub async fn tree(db: &Reader, id: RunId) -> StoreResult<Vec<Run>> {
    let found = db.rows(&TREE, params! {":id": id}).await?;
    found.iter().map(run_rows::summary).collect()
}

/// The direct children, in the order in which they were created.
pub async fn children(db: &Reader, id: RunId) -> StoreResult<Vec<Run>> {
    let found = db.rows(&CHILDREN, params! {":id": id}).await?;
    found.iter().map(run_rows::run).collect()
}

/// The direct children with their tool calls, in the order in which they were created.
pub async fn child_calls(db: &Reader, id: RunId) -> StoreResult<Vec<ChildCall>> {
    let found = db.rows(CHILD_CALLS, params! {":id": id}).await?;
    let call = |row: &Row| Ok((rows::id(row, "id")?, rows::text(row, "tool_call_id")?));
    found.iter().map(call).collect()
}

/// Whether a client has paused the run.
pub async fn is_held(db: &Reader, id: RunId) -> StoreResult<bool> {
    Ok(db.row(IS_HELD, params! {":id": id}).await?.is_some())
}

/// Steps of a run, in order.
pub async fn steps(db: &Reader, id: RunId) -> StoreResult<Vec<Step>> {
    let mut steps = Vec::new();
    for row in db.rows(STEPS, params! {":id": id}).await? {
        let last_seq = rows::count(&row, "last_seq")?;
        let text = rows::str(&row, "steps")?.unwrap_or_default();
        steps.extend(entries::steps(id, last_seq, text)?);
    }
    Ok(steps)
}

/// A page of events, in order. It ends with the last event of a write.
pub async fn events(db: &Reader, query: EventQuery) -> StoreResult<Vec<StoredEvent>> {
    let (root, run, after) = (query.root, query.run, signed(query.after));
    let limit = signed(query.limit as u64);
    let found = if !query.exclude_descendants && run == root {
        let params = params! {":root": root, ":after": after, ":limit": limit};
        db.rows(TREE_EVENTS, params).await?
    } else {
        let sql = match query.exclude_descendants {
            true => RUN_EVENTS,
            false => SUBTREE_EVENTS,
        };
        let params = params! {":root": root, ":after": after, ":limit": limit, ":id": run};
        db.rows(sql, params).await?
    };
    let mut events = Vec::new();
    for row in &found {
        if events.len() >= query.limit {
            break;
        }
        let run = rows::id(row, "run")?;
        let last = rows::count(row, "last_seq")?;
        let count = rows::count(row, "count")?;
        let lines = rows::str(row, "events")?.unwrap_or_default();
        let entry = entries::read_events(run, last, count, lines)?;
        events.extend(
            entry
                .into_iter()
                .skip_while(|event| event.seq <= query.after),
        );
    }
    Ok(events)
}

/// The recorded definition of a run's agent.
pub async fn definition(db: &Reader, id: RunId) -> StoreResult<Option<Arc<str>>> {
    let found = db.row(DEFINITION, params! {":id": id}).await?;
    let text = found.map(|row| rows::required_text(&row, "body"));
    Ok(text.transpose()?.map(Arc::from))
}

/// The texts of definitions, and of others that runs share, by their hash.
pub async fn definitions(
    db: &Reader,
    mut hashes: Vec<Hash>,
) -> StoreResult<HashMap<Hash, Arc<str>>> {
    hashes.sort_unstable();
    hashes.dedup();
    if hashes.is_empty() {
        return Ok(HashMap::new());
    }
    let wanted: Vec<&[u8]> = hashes.iter().map(|hash| &hash[..]).collect();
    let sql = "SELECT hash, body FROM definitions WHERE hash = ANY(:hashes)";
    let found = db.rows(sql, params! {":hashes": wanted}).await?;
    let text = |row: &Row| {
        let hash = rows::hash(row, "hash")?.unwrap_or_default();
        Ok((hash, rows::required_text(row, "body")?.into()))
    };
    found.iter().map(text).collect()
}

/// Runs that have not ended, by depth and then by age.
pub async fn unfinished_runs(db: &Reader) -> StoreResult<Vec<UnfinishedRun>> {
    let found = db.rows(&UNFINISHED, &[]).await?;
    with_resume_states(db, &found).await
}

/// As [`unfinished_runs`], of these trees.
pub async fn unfinished_trees(db: &Reader, roots: &[RunId]) -> StoreResult<Vec<UnfinishedRun>> {
    let roots: Vec<Uuid> = roots.iter().map(|root| root.0).collect();
    let found = db
        .rows(&UNFINISHED_TREES, params! {":roots": roots})
        .await?;
    with_resume_states(db, &found).await
}

async fn with_resume_states(db: &Reader, found: &[Row]) -> StoreResult<Vec<UnfinishedRun>> {
    let mut hashes: Vec<Hash> = Vec::new();
    for row in found {
        hashes.extend(run_rows::definition_hash(row).unwrap_or_default());
    }
    let definitions = definitions(db, hashes).await?;
    let runs = found
        .iter()
        .filter_map(|row| unfinished_run(row, &definitions));
    Ok(runs.collect())
}

/// `None` if the run is damaged, which does not stop the others.
fn unfinished_run(row: &Row, definitions: &HashMap<Hash, Arc<str>>) -> Option<UnfinishedRun> {
    let read = run_rows::run(row).and_then(|run| Ok((run_rows::resumed_models(row, &run)?, run)));
    let (models, run) = match read {
        Ok(read) => read,
        Err(error) => {
            let id = run_rows::run_id(row).unwrap_or(RunId(Uuid::nil()));
            error!(run.id = %id, error = %error, "The record of {id} is damaged, it is not resumed: {error}");
            return None;
        }
    };
    let resume_state = resume_state(row, definitions).unwrap_or_else(|error| {
        let id = run.id;
        // Without it the run cannot continue, and fails.
        error!(run.id = %id, error = %error, "The record of {id} is damaged, it cannot continue: {error}");
        None
    });
    Some(UnfinishedRun {
        run,
        resume_state,
        models,
    })
}

fn resume_state(
    row: &Row,
    definitions: &HashMap<Hash, Arc<str>>,
) -> StoreResult<Option<ResumeState>> {
    let Some(hash) = run_rows::definition_hash(row)? else {
        return Ok(None);
    };
    let definition = definitions.get(&hash).cloned();
    let state = definition.map(|definition| run_rows::resume_state(row, definition));
    state.transpose()
}

/// The run that an idempotency key has accepted, unless the key has expired.
pub async fn claimed_run(db: &Reader, key: &IdempotencyKey) -> StoreResult<Option<ClaimedRun>> {
    let params = params! {
        ":credential": &key.credential,
        ":route": &key.route,
        ":key": free_text(&key.key),
        ":now": now().as_millisecond(),
    };
    let found = db.row(FIND_CLAIM, params).await?;
    found.as_ref().map(run_rows::claimed_run).transpose()
}

/// Reads from the database.
pub async fn check(db: &Reader) -> StoreResult<()> {
    db.row("SELECT 1 FROM runs LIMIT 1", &[]).await.map(drop)
}
