//! Reads runs, trees, entries, events, attachments and idempotency keys.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use tracing::error;
use uuid::Uuid;

use crate::domain::attachment::{Blobs, Digest};
use crate::domain::event::StoredEvent;
use crate::domain::input::{InputKind, InputRequest};
use crate::domain::run::{Run, RunId, now};
use crate::domain::usage::TreeUsage;
use crate::record::entry::RecordedEntry;
use crate::record::event::Origin;
use crate::settings::choice::Choice;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::entries;
use crate::store::encoding::integers::signed;
use crate::store::events::EventQuery;
use crate::store::reader::Reader;
use crate::store::run_rows::{self, USAGE_COLUMNS};
use crate::store::runs::{ChildCall, SleepingTree, UnfinishedRun};
use crate::store::sql::dialect::Texts;
use crate::store::sql::row::{FromCell, Row, StoreResult};
use crate::store::sql::value::{Params, free_text, params};
use crate::store::{ClaimedRun, IdempotencyKey, ResumeState, StoreError};

/// The run `:id` and all its descendants.
macro_rules! subtree {
    () => {
        "(WITH RECURSIVE tree (id) AS (SELECT :id::uuid \
         UNION ALL SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) SELECT id FROM tree)"
    };
}
/// Values of a list of ids, or of blobs.
macro_rules! any {
    ($name:literal) => {
        concat!(
            "{IN (SELECT unhex(value) FROM json_each(",
            $name,
            "))|= ANY(",
            $name,
            ")}"
        )
    };
}
/// Whether all runs of a tree that have not ended wait for a time or an event; the root is `s`.
macro_rules! sleeps {
    () => {
        "s.finished_at IS NULL AND s.parent IS NULL AND s.status = 'waiting' AND s.waiting_for IN ('\"sleep\"', '\"event\"') \
         AND s.id NOT IN (SELECT c.root FROM runs c WHERE c.finished_at IS NULL AND c.parent IS NOT NULL \
         AND NOT (c.status = 'waiting' AND coalesce(c.waiting_for, '') IN ('\"sleep\"', '\"event\"')))"
    };
}

static RUN: LazyLock<Texts> = LazyLock::new(|| run_rows::select_with_inputs("r.id = :id"));
static TREE: LazyLock<Texts> =
    LazyLock::new(|| run_rows::select_summaries(concat!("r.id IN ", subtree!(), " ORDER BY r.id")));
static CHILDREN: LazyLock<Texts> =
    LazyLock::new(|| run_rows::select("r.parent = :id ORDER BY r.id"));
static UNFINISHED: LazyLock<Texts> = LazyLock::new(|| {
    run_rows::select_with_resume_states(concat!(
        "r.finished_at IS NULL AND r.root NOT IN (SELECT s.id FROM runs s WHERE ",
        sleeps!(),
        ") ORDER BY r.depth, r.id"
    ))
});
/// There is no index by root.
static UNFINISHED_TREES: LazyLock<Texts> = LazyLock::new(|| {
    run_rows::select_with_resume_states(concat!(
        "r.finished_at IS NULL AND r.id IN (WITH RECURSIVE tree (id) AS (SELECT s.id FROM runs s WHERE s.id ",
        any!(":roots"),
        " UNION ALL SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) SELECT id FROM tree) ORDER BY r.depth, r.id"
    ))
});
/// With each wait of theirs, if they have any.
macro_rules! waits_of {
    ($condition:expr) => {
        concat!(
            "SELECT s.id, s.owner, s.session, s.last_event, a.seq, a.kind, a.request FROM runs s \
             LEFT JOIN inputs a ON a.root = s.id WHERE ",
            $condition,
            " ORDER BY s.id"
        )
    };
}
const SLEEPING: &str = waits_of!(sleeps!());
const SLEEPING_OF: &str = waits_of!(concat!(sleeps!(), " AND s.id ", any!(":roots")));
const WAITS_OF: &str = waits_of!(concat!(
    "s.status = 'waiting' AND s.id NOT IN (SELECT c.root FROM runs c WHERE c.finished_at IS NULL AND c.status <> 'waiting') \
     AND s.id ",
    any!(":roots")
));
static TREE_USAGE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT {USAGE_COLUMNS} FROM runs r WHERE r.id IN {}",
        subtree!()
    )
});

const CHILD_CALLS: &str = "SELECT r.id, r.tool_call_id FROM runs r WHERE r.parent = :id \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) ORDER BY r.id";
const IS_HELD: &str = "SELECT 1 FROM runs WHERE id = :id AND held IS NOT NULL";
const DEFINITION: &str = "SELECT d.body FROM runs r JOIN definitions d ON d.hash = r.definition \
     WHERE r.id = :id AND NOT EXISTS (SELECT 1 FROM deletions x WHERE x.root = r.root)";
const DEFINITIONS: &str = concat!(
    "SELECT hash, body FROM definitions WHERE hash ",
    any!(":hashes")
);
const BLOBS: &str = concat!(
    "SELECT hash, data FROM attachments WHERE hash ",
    any!(":hashes")
);
/// The run that an idempotency key has accepted, unless the key has expired, and the hash of the request's body.
pub const FIND_CLAIM: &str = "SELECT run, body, message FROM claims \
     WHERE credential = :credential AND route = :route AND key = :key AND expires > :now \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = run)";
const ENTRIES: &str = "SELECT e.last_seq, e.count, e.entries, e.texts \
     FROM runs r {CROSS |}JOIN entries e ON e.root = r.root \
     WHERE r.id = :id AND e.run = :id AND (e.entries IS NOT NULL OR e.count > 0) \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) ORDER BY e.last_seq, e.id";
/// A page of entries with events. Each has at least one, so there are enough entries.
macro_rules! events {
    ($of:expr) => {
        concat!(
            "SELECT e.run, e.last_seq, e.count, e.entries, r.depth, r.agent \
             FROM entries e {CROSS |}JOIN runs r ON r.id = e.run WHERE e.root = :root AND e.last_seq > :after AND e.count > 0 ",
            $of,
            " AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = :root) ORDER BY e.last_seq LIMIT :limit"
        )
    };
}
const TREE_EVENTS: &str = events!("");
const RUN_EVENTS: &str = events!("AND e.run = :id");
const SUBTREE_EVENTS: &str = events!(concat!("AND e.run IN ", subtree!()));

pub async fn run(db: &Reader, id: RunId) -> StoreResult<Option<Run>> {
    let sql = RUN.of(db.dialect());
    let read = async {
        let mut found = db
            .first(sql, params! {":id": id}, run_rows::run_with_inputs)
            .await?;
        fill_tree_usage(db, found.as_mut_slice()).await?;
        Ok(found)
    };
    read.await.map_err(|error| match error {
        StoreError::Corrupt(why) => StoreError::Corrupt(format!("the record of {id}: {why}")),
        StoreError::Malformed(why) => StoreError::Malformed(format!("the record of {id}: {why}")),
        error => error,
    })
}

/// The run and its descendants, in the order in which they were created.
pub async fn tree(db: &Reader, id: RunId) -> StoreResult<Vec<Run>> {
    let sql = TREE.of(db.dialect());
    let mut runs = db
        .query(sql, params! {":id": id}, run_rows::summary)
        .await?;
    fill_tree_usage(db, &mut runs).await?;
    Ok(runs)
}

/// The direct children, in the order in which they were created.
pub async fn children(db: &Reader, id: RunId) -> StoreResult<Vec<Run>> {
    let sql = CHILDREN.of(db.dialect());
    let mut runs = db.query(sql, params! {":id": id}, run_rows::run).await?;
    fill_tree_usage(db, &mut runs).await?;
    Ok(runs)
}

/// Sums the usage of the trees of runs that have not ended, if the query that read them did not: see [`run_rows::select`].
async fn fill_tree_usage(db: &Reader, runs: &mut [Run]) -> StoreResult<()> {
    if let Reader::Postgres(_) = db {
        return Ok(());
    }
    for run in runs.iter_mut().filter(|run| !run.status.is_terminal()) {
        let mut total = TreeUsage::default();
        let add = |row: &Row<'_>| {
            total.runs += 1;
            total.usage.add(&run_rows::usage(row, 0)?);
            Ok(())
        };
        db.query(&TREE_USAGE, params! {":id": run.id}, add).await?;
        run.tree = total;
    }
    Ok(())
}

/// The direct children with their tool calls, in the order in which they were created.
pub async fn child_calls(db: &Reader, id: RunId) -> StoreResult<Vec<ChildCall>> {
    let call = |row: &Row<'_>| Ok((row.get("id")?, row.get("tool_call_id")?));
    db.query(CHILD_CALLS, params! {":id": id}, call).await
}

/// Whether a client has paused the run.
pub async fn is_held(db: &Reader, id: RunId) -> StoreResult<bool> {
    db.exists(IS_HELD, params! {":id": id}).await
}

/// The entries of a run, in order.
pub async fn entries(db: &Reader, id: RunId) -> StoreResult<Vec<RecordedEntry>> {
    let mut found = Vec::new();
    let add = |row: &Row<'_>| {
        let (last_seq, count) = (row.get("last_seq")?, row.get("count")?);
        let json = entry_text(row, "entries", id, last_seq)?;
        let texts = entry_text(row, "texts", id, last_seq)?;
        found.extend(entries::entries(id, (last_seq, count), (json, texts))?);
        Ok(())
    };
    db.query(ENTRIES, params! {":id": id}, add).await?;
    Ok(found)
}

/// A page of events, in order. It ends with the last event of a write.
pub async fn events(db: &Reader, query: EventQuery) -> StoreResult<Vec<StoredEvent>> {
    let sql = match (query.exclude_descendants, query.run == query.root) {
        (true, _) => RUN_EVENTS,
        (false, true) => TREE_EVENTS,
        (false, false) => SUBTREE_EVENTS,
    };
    let params = params! {
        ":root": query.root, ":after": signed(query.after), ":limit": signed(query.limit as u64), ":id": query.run,
    };
    let mut events = Vec::new();
    let add = |row: &Row<'_>| {
        if events.len() >= query.limit {
            return Ok(ControlFlow::Break(()));
        }
        let (run, last) = (row.get(0)?, row.get(1)?);
        let json = entry_text(row, "entries", run, last)?;
        let origin = Origin {
            run_id: run,
            root_id: query.root,
            depth: row.get(4)?,
            agent: row.get(5)?,
        };
        let page = entries::read_events(&origin, last, row.get(2)?, json)?;
        let page = page.into_iter();
        events.extend(page.skip_while(|event| event.seq <= query.after));
        Ok(ControlFlow::Continue(()))
    };
    db.for_each(sql, params, add).await?;
    Ok(events)
}

/// A text of the entry of a run that ends with this event.
fn entry_text<'r, T: FromCell<'r>>(
    row: &Row<'r>,
    column: &'static str,
    run: RunId,
    last_seq: u64,
) -> StoreResult<T> {
    row.get(column).map_err(|error| match error {
        StoreError::Corrupt(why) => entries::damaged(run, last_seq, &why),
        error => error,
    })
}

/// The recorded definition of a run's agent.
pub async fn definition(db: &Reader, id: RunId) -> StoreResult<Option<Arc<str>>> {
    db.first(DEFINITION, params! {":id": id}, |row| row.get("body"))
        .await
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
    let text = |row: &Row<'_>| Ok((row.get("hash")?, row.get("body")?));
    let params = params! {":hashes": wanted};
    let found = db.query(DEFINITIONS, params, text).await?;
    Ok(found.into_iter().collect())
}

/// The bytes with these digests; unknown digests are left out.
pub async fn blobs(db: &Reader, digests: &[Digest]) -> StoreResult<Blobs> {
    if digests.is_empty() {
        return Ok(Blobs::new());
    }
    let hashes: Vec<&[u8]> = digests.iter().map(|digest| &digest.0[..]).collect();
    let blob = |row: &Row<'_>| {
        let data: Vec<u8> = row.get("data")?;
        Ok((Digest(row.get("hash")?), Bytes::from(data)))
    };
    let params = params! {":hashes": hashes};
    let found = db.query(BLOBS, params, blob).await?;
    Ok(found.into_iter().collect())
}

/// Runs that have not ended, by depth and then by age.
pub async fn unfinished_runs(db: &Reader) -> StoreResult<Vec<UnfinishedRun>> {
    unfinished(db, &UNFINISHED, &[]).await
}

/// As [`unfinished_runs`], of these trees.
pub async fn unfinished_trees(db: &Reader, roots: &[RunId]) -> StoreResult<Vec<UnfinishedRun>> {
    let roots: Vec<Uuid> = roots.iter().map(|root| root.0).collect();
    unfinished(db, &UNFINISHED_TREES, params! {":roots": roots}).await
}

/// The trees that sleep, of these roots or of all.
pub async fn sleeping_trees(
    db: &Reader,
    roots: Option<&[RunId]>,
) -> StoreResult<Vec<SleepingTree>> {
    match roots {
        None => waits(db, SLEEPING, &[]).await,
        Some(roots) => waits(db, SLEEPING_OF, roots).await,
    }
}

/// What these trees wait for.
pub async fn waits_of(db: &Reader, roots: &[RunId]) -> StoreResult<Vec<SleepingTree>> {
    waits(db, WAITS_OF, roots).await
}

async fn waits(db: &Reader, sql: &str, roots: &[RunId]) -> StoreResult<Vec<SleepingTree>> {
    let mut trees: Vec<SleepingTree> = Vec::new();
    let add = |row: &Row<'_>| {
        let root: RunId = row.get("id")?;
        if trees.last().is_none_or(|last| last.root != root) {
            trees.push(SleepingTree {
                root,
                owner: row.get("owner")?,
                session: row.get("session")?,
                waits: 0,
                inputs: Vec::new(),
                until: None,
                has_changed: true,
            });
        }
        let Some(tree) = trees.last_mut() else {
            return Ok(());
        };
        let request: Option<InputRequest> = row.json("request")?;
        let Some(request) = request else {
            return Ok(());
        };
        tree.waits += 1;
        let kind: String = row.get("kind")?;
        if let Some(kind @ (InputKind::Approval | InputKind::Question)) = InputKind::named(&kind) {
            tree.inputs.push((kind, request.requested_at));
        }
        tree.until = [tree.until, request.deadline].into_iter().flatten().min();
        tree.has_changed &= row.get::<Option<u64>>("seq")? != Some(row.get("last_event")?);
        Ok(())
    };
    let roots: Vec<Uuid> = roots.iter().map(|root| root.0).collect();
    db.query(sql, params! {":roots": roots}, add).await?;
    Ok(trees)
}

async fn unfinished(
    db: &Reader,
    sql: &Texts,
    params: Params<'_, '_>,
) -> StoreResult<Vec<UnfinishedRun>> {
    let time = now();
    let mut params = params.to_vec();
    params.push((":now", time.as_millisecond().into()));
    let mut found = Vec::new();
    let add = |row: &Row<'_>| {
        let read =
            run_rows::run(row).and_then(|run| Ok((run_rows::resumed_models(row, &run)?, run)));
        let (models, run) = match read {
            Ok(read) => read,
            Err(error) if db.leaves_out(&error) => {
                let id = run_rows::run_id(row).unwrap_or(RunId(Uuid::nil()));
                log_damaged(id, &error);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let hash = run_rows::definition_hash(row);
        // The text of the definition is read for all at once.
        let state = hash.and_then(|hash| {
            let state = hash.map(|_| run_rows::resume_state(row, time, "".into()));
            Ok(hash.zip(state.transpose()?))
        });
        let state = match state {
            Ok(state) => state,
            // Without it the run cannot continue, and fails.
            Err(error) if db.leaves_out(&error) => {
                let id = run.id;
                error!(run.id = %id, error = %error, "The record of {id} is damaged, it cannot continue: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        found.push((run, state, models));
        Ok(())
    };
    db.query(sql.of(db.dialect()), &params, add).await?;
    let hashes = found
        .iter()
        .filter_map(|(_, state, _)| Some(state.as_ref()?.0));
    let definitions = definitions(db, hashes.collect()).await?;
    let mut unfinished = Vec::with_capacity(found.len());
    for (mut run, state, models) in found {
        match fill_tree_usage(db, std::slice::from_mut(&mut run)).await {
            Err(error) if db.leaves_out(&error) => {
                log_damaged(run.id, &error);
                continue;
            }
            filled => filled?,
        }
        let with_definition = |(hash, state)| {
            let definition = Arc::clone(definitions.get(&hash)?);
            Some(ResumeState {
                definition,
                ..state
            })
        };
        unfinished.push(UnfinishedRun {
            run,
            resume_state: state.and_then(with_definition),
            models,
        });
    }
    Ok(unfinished)
}

/// A damaged run does not stop the others.
fn log_damaged(id: RunId, error: &StoreError) {
    error!(run.id = %id, error = %error, "The record of {id} is damaged, it is not resumed: {error}");
}

/// The run that an idempotency key has accepted, unless the key has expired.
pub async fn claimed_run(db: &Reader, key: &IdempotencyKey) -> StoreResult<Option<ClaimedRun>> {
    let params = params! {
        ":credential": &key.credential,
        ":route": &key.route,
        ":key": free_text(&key.key),
        ":now": now().as_millisecond(),
    };
    let claimed = |row: &Row<'_>| {
        Ok(ClaimedRun {
            run: row.get("run")?,
            body_hash: row.get("body")?,
            number: row.get("message")?,
        })
    };
    db.first(FIND_CLAIM, params, claimed).await
}

/// Reads from the database.
pub async fn check(db: &Reader) -> StoreResult<()> {
    db.exists("SELECT 1 FROM runs LIMIT 1", &[]).await.map(drop)
}
