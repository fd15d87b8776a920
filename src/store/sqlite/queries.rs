//! What is read: runs, pages of them, trees, steps, events and idempotency keys. Knows connections, but neither threads nor writes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Row, ToSql, params, params_from_iter};
use tracing::error;

use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId, now};
use crate::domain::usage::TreeUsage;
use crate::store::sqlite::reader_pool::store_error;
use crate::store::sqlite::rows::{
    self, Hash, RESUME_COLUMNS, RUN_COLUMNS, SUMMARY_COLUMNS, USAGE_COLUMNS,
};
use crate::store::sqlite::search;
use crate::store::sqlite::statements::FIND_CLAIM;
use crate::store::{
    ClaimedRun, EventQuery, IdempotencyKey, PAGE_BYTES, ResumeState, RunFilter, RunPage,
    SessionQuery, Step, StoreError, UnfinishedRun,
};

/// The ids of the run `?1` and all its descendants, as `tree`.
const SUBTREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (?1) UNION ALL \
     SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) ";

/// Leaves out the trees that are being removed, from `runs AS r`.
pub const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";

type StoreResult<T> = Result<T, StoreError>;

/// One run.
pub fn run(db: &Connection, id: RunId) -> StoreResult<Option<Run>> {
    let sql = format!("SELECT {RUN_COLUMNS} FROM runs r WHERE r.id = ?1 AND {NOT_DELETED}");
    let found = query_runs(db, &sql, &[rows::id_bytes(&id)]).map_err(|error| match error {
        StoreError::Corrupt(why) => StoreError::Corrupt(format!("the record of {id}: {why}")),
        error => error,
    })?;
    Ok(found.into_iter().next())
}

/// The run and its descendants, in the order of their making.
pub fn tree(db: &Connection, id: RunId) -> StoreResult<Vec<Run>> {
    let sql = format!(
        "{SUBTREE} SELECT {SUMMARY_COLUMNS} FROM tree CROSS JOIN runs r ON r.id = tree.id \
         WHERE {NOT_DELETED} ORDER BY r.id"
    );
    query_runs(db, &sql, &[rows::id_bytes(&id)])
}

/// The direct children with their calls, in the order of their making.
pub fn child_calls(db: &Connection, id: RunId) -> StoreResult<Vec<(RunId, Option<String>)>> {
    let sql = format!(
        "SELECT r.id, r.tool_call_id FROM runs r WHERE r.parent = ?1 AND {NOT_DELETED} ORDER BY r.id"
    );
    let mut sql = db.prepare_cached(&sql).map_err(store_error)?;
    sql.query_map([rows::id_bytes(&id)], |row| {
        Ok((rows::id(row, 0)?, row.get(1)?))
    })
    .and_then(Iterator::collect)
    .map_err(store_error)
}

/// The direct children, in the order of their making.
pub fn children(db: &Connection, id: RunId) -> StoreResult<Vec<Run>> {
    let sql = format!(
        "SELECT {RUN_COLUMNS} FROM runs r WHERE r.parent = ?1 AND {NOT_DELETED} ORDER BY r.id"
    );
    query_runs(db, &sql, &[rows::id_bytes(&id)])
}

/// Runs that have not ended, parents before their children, among equals oldest first.
pub fn unfinished_runs(db: &Connection) -> StoreResult<Vec<UnfinishedRun>> {
    let sql = format!(
        "SELECT {RUN_COLUMNS}, {RESUME_COLUMNS} FROM runs r INDEXED BY runs_unfinished \
         WHERE r.finished_at IS NULL AND {NOT_DELETED} ORDER BY r.depth, r.id"
    );
    let mut sql = db.prepare_cached(&sql).map_err(store_error)?;
    let mut rows = sql.query([]).map_err(store_error)?;
    let mut definitions = HashMap::new();
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(store_error)? {
        let run = rows::run(row).map_err(store_error).and_then(|mut run| {
            fill_tree_usage(db, &mut run)?;
            Ok(run)
        });
        let run = match run {
            Ok(run) => run,
            // One that cannot be read holds up none of the others.
            Err(error @ StoreError::Corrupt(_)) => {
                let id = rows::id(row, 0).unwrap_or(RunId(uuid::Uuid::nil()));
                error!(run.id = %id, error = %error, "The record of {id} is damaged, nobody goes on with it: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let resume_state = match resume_state(db, row, &mut definitions) {
            Ok(resume_state) => resume_state,
            // Without it the run cannot go on, and is failed.
            Err(error @ StoreError::Corrupt(_)) => {
                let id = run.id;
                error!(run.id = %id, error = %error, "The record of {id} is damaged, it cannot go on: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        found.push(UnfinishedRun { run, resume_state });
    }
    Ok(found)
}

/// What the row says of how its run goes on.
fn resume_state(
    db: &Connection,
    row: &Row<'_>,
    definitions: &mut HashMap<Hash, Arc<str>>,
) -> StoreResult<Option<ResumeState>> {
    let Some(hash) = rows::definition_hash(row).map_err(store_error)? else {
        return Ok(None);
    };
    let definition = load_definition(db, hash, definitions)?;
    let resume_state = definition.map(|definition| rows::resume_state(row, definition));
    resume_state.transpose().map_err(store_error)
}

/// What an idempotency key has accepted, unless it has expired.
pub fn claimed_run(db: &Connection, key: &IdempotencyKey) -> StoreResult<Option<ClaimedRun>> {
    let now = now().as_millisecond();
    db.prepare_cached(FIND_CLAIM)
        .and_then(|mut sql| {
            sql.query_row(
                params![key.credential, key.route, key.key, now],
                rows::claimed_run,
            )
            .optional()
        })
        .map_err(store_error)
}

/// A page of runs, newest first.
pub fn list(db: &Connection, filter: &RunFilter) -> StoreResult<RunPage> {
    let matches = search::search(db, filter)?;
    let last = matches.ids.last().copied();
    let runs = load_page(matches.ids, |id| readable(db, id))?;
    let ends_early = runs.last().map(|run| run.id).filter(|id| Some(*id) != last);
    let next = ends_early.or(matches.next);
    Ok(RunPage { runs, next })
}

/// Runs of a session, newest first.
pub fn session_runs(db: &Connection, query: SessionQuery) -> StoreResult<Vec<Run>> {
    // Only roots have sessions.
    let mut select = SelectQuery::new(
        "SELECT r.id FROM runs r INDEXED BY runs_session WHERE r.session IS NOT NULL \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)"
            .to_owned(),
    );
    select.and_where("r.session =", query.name);
    select.and_where("r.owner IS", query.owner);
    if let Some(agent) = query.agent {
        select.and_where("r.agent =", agent);
    }
    if let Some(status) = query.status {
        select.and_where("r.status =", status.as_str());
    }
    if let Some(before) = query.before {
        select.and_where("r.id <", *rows::id_bytes(&before));
    }
    let ids = select.fetch_newest(db, query.limit)?;
    load_page(ids, |id| run(db, id))
}

/// One run; none if its record is damaged.
fn readable(db: &Connection, id: RunId) -> StoreResult<Option<Run>> {
    match run(db, id) {
        Err(error @ StoreError::Corrupt(_)) => {
            error!(run.id = %id, error = %error, "{id} is left out of a list: {error}");
            Ok(None)
        }
        found => found,
    }
}

/// These runs, as far as a page goes.
fn load_page(
    ids: Vec<RunId>,
    read: impl Fn(RunId) -> StoreResult<Option<Run>>,
) -> StoreResult<Vec<Run>> {
    let mut page = Vec::with_capacity(ids.len());
    let mut bytes = 0;
    for id in ids {
        let Some(run) = read(id)? else { continue };
        bytes += run.text_bytes();
        page.push(run);
        if bytes >= PAGE_BYTES {
            break;
        }
    }
    Ok(page)
}

/// Steps of a run, in order.
pub fn steps(db: &Connection, id: RunId) -> StoreResult<Vec<Step>> {
    let mut sql = db
        .prepare_cached(&format!(
            "SELECT e.steps FROM runs r CROSS JOIN entries e ON e.root = r.root \
             WHERE r.id = ?1 AND e.run = ?1 AND e.steps IS NOT NULL AND {NOT_DELETED} ORDER BY e.last_seq, e.id",
        ))
        .map_err(store_error)?;
    let mut found = sql
        .query(params![rows::id_bytes(&id)])
        .map_err(store_error)?;
    let mut steps = Vec::new();
    while let Some(row) = found.next().map_err(store_error)? {
        steps.extend(rows::steps(text_column(row, 0)?)?);
    }
    Ok(steps)
}

/// A page of events, in order. It ends at the end of a write.
pub fn events(db: &Connection, query: EventQuery) -> StoreResult<Vec<StoredEvent>> {
    let subtree = subtree_ids(db, query)?;
    let mut sql = db
        .prepare_cached(
            "SELECT run, last_seq, count, events FROM entries \
             WHERE root = ?1 AND last_seq > ?2 AND events IS NOT NULL \
             AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = ?1) ORDER BY last_seq",
        )
        .map_err(store_error)?;
    let mut found = sql
        .query(params![
            rows::id_bytes(&query.root),
            rows::signed(query.after)
        ])
        .map_err(store_error)?;
    let mut events = Vec::new();
    while events.len() < query.limit
        && let Some(row) = found.next().map_err(store_error)?
    {
        let run = rows::id(row, 0).map_err(store_error)?;
        if subtree
            .as_ref()
            .is_some_and(|wanted| !wanted.contains(&run))
        {
            continue;
        }
        let last = rows::unsigned(row.get(1).map_err(store_error)?);
        let count = rows::unsigned(row.get(2).map_err(store_error)?);
        let entry = rows::events(run, last, count, text_column(row, 3)?);
        events.extend(entry.skip_while(|event| event.seq <= query.after));
    }
    Ok(events)
}

/// Whether it can be read.
pub fn check(db: &Connection) -> StoreResult<()> {
    db.prepare_cached("SELECT 1 FROM runs LIMIT 1")
        .and_then(|mut sql| sql.exists([]))
        .map(drop)
        .map_err(store_error)
}

/// Whose events are wanted; none means everybody's.
fn subtree_ids(db: &Connection, query: EventQuery) -> StoreResult<Option<HashSet<RunId>>> {
    if query.exclude_descendants {
        return Ok(Some(HashSet::from([query.run])));
    }
    if query.run == query.root {
        return Ok(None);
    }
    let sql = format!("{SUBTREE} SELECT id FROM tree");
    Ok(Some(
        query_ids(db, &sql, &[rows::id_bytes(&query.run)])?
            .into_iter()
            .collect(),
    ))
}

/// A query that grows by what a filter asks for.
struct SelectQuery {
    sql: String,
    values: Vec<Box<dyn ToSql>>,
}

impl SelectQuery {
    fn new(sql: String) -> Self {
        Self {
            sql,
            values: Vec::new(),
        }
    }

    fn and_where(&mut self, condition: &str, value: impl ToSql + 'static) {
        self.values.push(Box::new(value));
        self.sql += &format!(" AND {condition} ?{}", self.values.len());
    }

    fn fetch_newest(mut self, db: &Connection, limit: usize) -> StoreResult<Vec<RunId>> {
        self.values.push(Box::new(rows::signed(limit as u64)));
        self.sql += &format!(" ORDER BY r.id DESC LIMIT ?{}", self.values.len());
        let values: Vec<&dyn ToSql> = self.values.iter().map(AsRef::as_ref).collect();
        query_ids(db, &self.sql, &values)
    }
}

fn query_ids(db: &Connection, sql: &str, values: &[&dyn ToSql]) -> StoreResult<Vec<RunId>> {
    let mut sql = db.prepare_cached(sql).map_err(store_error)?;
    let found = sql
        .query_map(params_from_iter(values), |row| rows::id(row, 0))
        .map_err(store_error)?;
    found.collect::<rusqlite::Result<_>>().map_err(store_error)
}

/// The runs that a query finds, with the usage of their trees.
fn query_runs(db: &Connection, sql: &str, values: &[&dyn ToSql]) -> StoreResult<Vec<Run>> {
    let mut sql = db.prepare_cached(sql).map_err(store_error)?;
    let mut runs = sql
        .query_map(params_from_iter(values), rows::run)
        .map_err(store_error)?
        .collect::<rusqlite::Result<Vec<Run>>>()
        .map_err(store_error)?;
    for run in &mut runs {
        fill_tree_usage(db, run)?;
    }
    Ok(runs)
}

/// A definition's text. Many runs share one: it is read once and kept in `known`.
fn load_definition(
    db: &Connection,
    hash: Hash,
    cache: &mut HashMap<Hash, Arc<str>>,
) -> StoreResult<Option<Arc<str>>> {
    if let Some(text) = cache.get(&hash) {
        return Ok(Some(Arc::clone(text)));
    }
    let text: Option<Arc<str>> = db
        .prepare_cached("SELECT body FROM definitions WHERE hash = ?1")
        .and_then(|mut sql| sql.query_row(params![hash], |row| row.get(0)).optional())
        .map_err(store_error)?;
    if let Some(text) = &text {
        cache.insert(hash, Arc::clone(text));
    }
    Ok(text)
}

/// The record of a run that has ended knows what its tree has used; another's is summed.
fn fill_tree_usage(db: &Connection, run: &mut Run) -> StoreResult<()> {
    if !run.status.is_terminal() {
        run.tree = tree_usage(db, run.id)?;
    }
    Ok(())
}

/// What a run and its descendants have used until now.
fn tree_usage(db: &Connection, id: RunId) -> StoreResult<TreeUsage> {
    let sql =
        format!("{SUBTREE} SELECT {USAGE_COLUMNS} FROM tree CROSS JOIN runs r ON r.id = tree.id");
    let mut sql = db.prepare_cached(&sql).map_err(store_error)?;
    let mut found = sql
        .query(params![rows::id_bytes(&id)])
        .map_err(store_error)?;
    let mut total = TreeUsage::default();
    while let Some(row) = found.next().map_err(store_error)? {
        total.runs += 1;
        total.usage.add(&rows::usage(row, 0).map_err(store_error)?);
    }
    Ok(total)
}

fn text_column<'r>(row: &'r Row<'_>, column: usize) -> StoreResult<&'r str> {
    let value = row.get_ref(column).map_err(store_error)?;
    value
        .as_str()
        .map_err(|error| StoreError::Corrupt(error.to_string()))
}
