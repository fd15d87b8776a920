//! What is read: runs, pages of them, trees, steps, events and idempotency keys. Knows connections, but neither threads nor writes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Row, ToSql, params, params_from_iter};
use tracing::error;

use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId, now};
use crate::domain::usage::TreeUsage;
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::rows::{
    self, CONTINUATION_COLUMNS, Hash, RUN_COLUMNS, SUMMARY_COLUMNS, USAGE_COLUMNS,
};
use crate::store::sqlite::search;
use crate::store::sqlite::statements::CLAIMED;
use crate::store::{
    ClaimKey, Claimed, Continuation, EventQuery, PAGE_BYTES, RunFilter, RunPage, SessionQuery,
    Step, StoreError, Unfinished,
};

/// The ids of the run `?1` and all its descendants, as `tree`.
const TREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (?1) UNION ALL \
     SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) ";

/// Leaves out the trees that are being removed, from `runs AS r`.
pub const VISIBLE: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";

type Found<T> = Result<T, StoreError>;

/// One run.
pub fn run(db: &Connection, id: RunId) -> Found<Option<Run>> {
    let sql = format!("SELECT {RUN_COLUMNS} FROM runs r WHERE r.id = ?1 AND {VISIBLE}");
    let found = runs(db, &sql, &[rows::bytes(&id)]).map_err(|error| match error {
        StoreError::Damaged(why) => StoreError::Damaged(format!("the record of {id}: {why}")),
        error => error,
    })?;
    Ok(found.into_iter().next())
}

/// The run and its descendants, in the order of their making.
pub fn tree(db: &Connection, id: RunId) -> Found<Vec<Run>> {
    let sql = format!(
        "{TREE} SELECT {SUMMARY_COLUMNS} FROM tree CROSS JOIN runs r ON r.id = tree.id \
         WHERE {VISIBLE} ORDER BY r.id"
    );
    runs(db, &sql, &[rows::bytes(&id)])
}

/// The direct children with their calls, in the order of their making.
pub fn child_calls(db: &Connection, id: RunId) -> Found<Vec<(RunId, Option<String>)>> {
    let sql = format!(
        "SELECT r.id, r.tool_call_id FROM runs r WHERE r.parent = ?1 AND {VISIBLE} ORDER BY r.id"
    );
    let mut sql = db.prepare_cached(&sql).map_err(failed)?;
    sql.query_map([rows::bytes(&id)], |row| {
        Ok((rows::id(row, 0)?, row.get(1)?))
    })
    .and_then(Iterator::collect)
    .map_err(failed)
}

/// The direct children, in the order of their making.
pub fn children(db: &Connection, id: RunId) -> Found<Vec<Run>> {
    let sql =
        format!("SELECT {RUN_COLUMNS} FROM runs r WHERE r.parent = ?1 AND {VISIBLE} ORDER BY r.id");
    runs(db, &sql, &[rows::bytes(&id)])
}

/// Runs that have not ended, parents before their children, among equals oldest first.
pub fn unfinished(db: &Connection) -> Found<Vec<Unfinished>> {
    let sql = format!(
        "SELECT {RUN_COLUMNS}, {CONTINUATION_COLUMNS} FROM runs r INDEXED BY runs_unfinished \
         WHERE r.finished_at IS NULL AND {VISIBLE} ORDER BY r.depth, r.id"
    );
    let mut sql = db.prepare_cached(&sql).map_err(failed)?;
    let mut rows = sql.query([]).map_err(failed)?;
    let mut definitions = HashMap::new();
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(failed)? {
        let read = rows::run(row).map_err(failed).and_then(|mut run| {
            sum_tree(db, &mut run)?;
            Ok(run)
        });
        let run = match read {
            Ok(run) => run,
            // One that cannot be read holds up none of the others.
            Err(error @ StoreError::Damaged(_)) => {
                let id = rows::id(row, 0).unwrap_or(RunId(uuid::Uuid::nil()));
                error!(run.id = %id, error = %error, "The record of {id} is damaged, nobody goes on with it: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let continuation = match continuation(db, row, &mut definitions) {
            Ok(continuation) => continuation,
            // Without it the run cannot go on, and is failed.
            Err(error @ StoreError::Damaged(_)) => {
                let id = run.id;
                error!(run.id = %id, error = %error, "The record of {id} is damaged, it cannot go on: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        found.push(Unfinished { run, continuation });
    }
    Ok(found)
}

/// What the row says of how its run goes on.
fn continuation(
    db: &Connection,
    row: &Row<'_>,
    definitions: &mut HashMap<Hash, Arc<str>>,
) -> Found<Option<Continuation>> {
    let Some(hash) = rows::definition(row).map_err(failed)? else {
        return Ok(None);
    };
    let definition = definition(db, hash, definitions)?;
    let continuation = definition.map(|definition| rows::continuation(row, definition));
    continuation.transpose().map_err(failed)
}

/// What an idempotency key has accepted, unless it has expired.
pub fn claimed(db: &Connection, key: &ClaimKey) -> Found<Option<Claimed>> {
    let now = now().as_millisecond();
    db.prepare_cached(CLAIMED)
        .and_then(|mut sql| {
            sql.query_row(
                params![key.credential, key.route, key.key, now],
                rows::claimed,
            )
            .optional()
        })
        .map_err(failed)
}

/// A page of runs, newest first.
pub fn list(db: &Connection, filter: &RunFilter) -> Found<RunPage> {
    let hits = search::search(db, filter)?;
    let last = hits.ids.last().copied();
    let runs = page(hits.ids, |id| readable(db, id))?;
    let ends_early = runs.last().map(|run| run.id).filter(|id| Some(*id) != last);
    let next = ends_early.or(hits.next);
    Ok(RunPage { runs, next })
}

/// Runs of a session, newest first.
pub fn session(db: &Connection, query: SessionQuery) -> Found<Vec<Run>> {
    // Only roots have sessions.
    let mut select = Select::new(
        "SELECT r.id FROM runs r INDEXED BY runs_session WHERE r.session IS NOT NULL \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)"
            .to_owned(),
    );
    select.and("r.session =", query.name);
    select.and("r.owner IS", query.owner);
    if let Some(agent) = query.agent {
        select.and("r.agent =", agent);
    }
    if let Some(status) = query.status {
        select.and("r.status =", status.as_str());
    }
    if let Some(before) = query.before {
        select.and("r.id <", *rows::bytes(&before));
    }
    let ids = select.newest(db, query.limit)?;
    page(ids, |id| run(db, id))
}

/// One run; none if its record is damaged.
fn readable(db: &Connection, id: RunId) -> Found<Option<Run>> {
    match run(db, id) {
        Err(error @ StoreError::Damaged(_)) => {
            error!(run.id = %id, error = %error, "{id} is left out of a list: {error}");
            Ok(None)
        }
        found => found,
    }
}

/// These runs, as far as a page goes.
fn page(ids: Vec<RunId>, read: impl Fn(RunId) -> Found<Option<Run>>) -> Found<Vec<Run>> {
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
pub fn steps(db: &Connection, id: RunId) -> Found<Vec<Step>> {
    let mut sql = db
        .prepare_cached(&format!(
            "SELECT e.steps FROM runs r CROSS JOIN entries e ON e.root = r.root \
             WHERE r.id = ?1 AND e.run = ?1 AND e.steps IS NOT NULL AND {VISIBLE} ORDER BY e.last_seq, e.id",
        ))
        .map_err(failed)?;
    let mut found = sql.query(params![rows::bytes(&id)]).map_err(failed)?;
    let mut steps = Vec::new();
    while let Some(row) = found.next().map_err(failed)? {
        steps.extend(rows::steps(text(row, 0)?)?);
    }
    Ok(steps)
}

/// A page of events, in order. It ends at the end of a write.
pub fn events(db: &Connection, query: EventQuery) -> Found<Vec<StoredEvent>> {
    let wanted = subtree(db, query)?;
    let mut sql = db
        .prepare_cached(
            "SELECT run, last_seq, count, events FROM entries \
             WHERE root = ?1 AND last_seq > ?2 AND events IS NOT NULL \
             AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = ?1) ORDER BY last_seq",
        )
        .map_err(failed)?;
    let mut found = sql
        .query(params![rows::bytes(&query.root), rows::signed(query.after)])
        .map_err(failed)?;
    let mut events = Vec::new();
    while events.len() < query.limit
        && let Some(row) = found.next().map_err(failed)?
    {
        let run = rows::id(row, 0).map_err(failed)?;
        if wanted.as_ref().is_some_and(|wanted| !wanted.contains(&run)) {
            continue;
        }
        let last = rows::unsigned(row.get(1).map_err(failed)?);
        let count = rows::unsigned(row.get(2).map_err(failed)?);
        let entry = rows::events(run, last, count, text(row, 3)?);
        events.extend(entry.skip_while(|event| event.seq <= query.after));
    }
    Ok(events)
}

/// Whether it can be read.
pub fn check(db: &Connection) -> Found<()> {
    db.prepare_cached("SELECT 1 FROM runs LIMIT 1")
        .and_then(|mut sql| sql.exists([]))
        .map(drop)
        .map_err(failed)
}

/// Whose events are wanted; none means everybody's.
fn subtree(db: &Connection, query: EventQuery) -> Found<Option<HashSet<RunId>>> {
    if query.only {
        return Ok(Some(HashSet::from([query.of])));
    }
    if query.of == query.root {
        return Ok(None);
    }
    let sql = format!("{TREE} SELECT id FROM tree");
    Ok(Some(
        ids(db, &sql, &[rows::bytes(&query.of)])?
            .into_iter()
            .collect(),
    ))
}

/// A query that grows by what a filter asks for.
struct Select {
    sql: String,
    values: Vec<Box<dyn ToSql>>,
}

impl Select {
    fn new(sql: String) -> Self {
        Self {
            sql,
            values: Vec::new(),
        }
    }

    fn and(&mut self, condition: &str, value: impl ToSql + 'static) {
        self.values.push(Box::new(value));
        self.sql += &format!(" AND {condition} ?{}", self.values.len());
    }

    fn newest(mut self, db: &Connection, limit: usize) -> Found<Vec<RunId>> {
        self.values.push(Box::new(rows::signed(limit as u64)));
        self.sql += &format!(" ORDER BY r.id DESC LIMIT ?{}", self.values.len());
        let values: Vec<&dyn ToSql> = self.values.iter().map(AsRef::as_ref).collect();
        ids(db, &self.sql, &values)
    }
}

fn ids(db: &Connection, sql: &str, values: &[&dyn ToSql]) -> Found<Vec<RunId>> {
    let mut sql = db.prepare_cached(sql).map_err(failed)?;
    let found = sql
        .query_map(params_from_iter(values), |row| rows::id(row, 0))
        .map_err(failed)?;
    found.collect::<rusqlite::Result<_>>().map_err(failed)
}

/// The runs that a query finds, with the usage of their trees.
fn runs(db: &Connection, sql: &str, values: &[&dyn ToSql]) -> Found<Vec<Run>> {
    let mut sql = db.prepare_cached(sql).map_err(failed)?;
    let mut runs = sql
        .query_map(params_from_iter(values), rows::run)
        .map_err(failed)?
        .collect::<rusqlite::Result<Vec<Run>>>()
        .map_err(failed)?;
    for run in &mut runs {
        sum_tree(db, run)?;
    }
    Ok(runs)
}

/// A definition's text. Many runs share one: it is read once and kept in `known`.
fn definition(
    db: &Connection,
    hash: Hash,
    known: &mut HashMap<Hash, Arc<str>>,
) -> Found<Option<Arc<str>>> {
    if let Some(text) = known.get(&hash) {
        return Ok(Some(Arc::clone(text)));
    }
    let text: Option<Arc<str>> = db
        .prepare_cached("SELECT body FROM definitions WHERE hash = ?1")
        .and_then(|mut sql| sql.query_row(params![hash], |row| row.get(0)).optional())
        .map_err(failed)?;
    if let Some(text) = &text {
        known.insert(hash, Arc::clone(text));
    }
    Ok(text)
}

/// The record of a run that has ended knows what its tree has used; another's is summed.
fn sum_tree(db: &Connection, run: &mut Run) -> Found<()> {
    if !run.status.is_terminal() {
        run.tree = tree_usage(db, run.id)?;
    }
    Ok(())
}

/// What a run and its descendants have used until now.
fn tree_usage(db: &Connection, id: RunId) -> Found<TreeUsage> {
    let sql =
        format!("{TREE} SELECT {USAGE_COLUMNS} FROM tree CROSS JOIN runs r ON r.id = tree.id");
    let mut sql = db.prepare_cached(&sql).map_err(failed)?;
    let mut found = sql.query(params![rows::bytes(&id)]).map_err(failed)?;
    let mut sum = TreeUsage::default();
    while let Some(row) = found.next().map_err(failed)? {
        sum.runs += 1;
        sum.usage.add(&rows::usage(row, 0).map_err(failed)?);
    }
    Ok(sum)
}

fn text<'r>(row: &'r Row<'_>, column: usize) -> Found<&'r str> {
    let value = row.get_ref(column).map_err(failed)?;
    value
        .as_str()
        .map_err(|error| StoreError::Damaged(error.to_string()))
}
