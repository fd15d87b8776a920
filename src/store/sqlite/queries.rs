//! Reads runs, pages of runs, trees, steps, events and idempotency keys.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Row, RowIndex, Statement, ToSql, named_params};
use tracing::error;

use crate::domain::event::StoredEvent;
use crate::domain::run::{Run, RunId, now};
use crate::domain::run_excerpt;
use crate::domain::usage::TreeUsage;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::{entries, integers};
use crate::store::events::EventQuery;
use crate::store::runs::{ChildCall, PAGE_BYTES, RunFilter, RunPage, SessionQuery, UnfinishedRun};
use crate::store::sqlite::approvals;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::prepared::Named;
use crate::store::sqlite::rows::{
    self, RESUME_COLUMNS, RUN_COLUMNS, SUMMARY_COLUMNS, USAGE_COLUMNS, UsageColumns,
};
use crate::store::sqlite::search;
use crate::store::sqlite::sql_parts::{NOT_DELETED, SUBTREE};
use crate::store::sqlite::statements::FIND_CLAIM;
use crate::store::{ClaimedRun, IdempotencyKey, ResumeState, Step, StoreError};

type StoreResult<T> = Result<T, StoreError>;

pub fn run(db: &Connection, id: RunId) -> StoreResult<Option<Run>> {
    let sql = format!("SELECT {RUN_COLUMNS} FROM runs r WHERE r.id = :id AND {NOT_DELETED}");
    let found =
        query_runs(db, &sql, named_params! {":id": rows::id_bytes(&id)}).map_err(|error| {
            match error {
                StoreError::Corrupt(why) => {
                    StoreError::Corrupt(format!("the record of {id}: {why}"))
                }
                StoreError::Malformed(why) => {
                    StoreError::Malformed(format!("the record of {id}: {why}"))
                }
                error => error,
            }
        })?;
    let mut found = found.into_iter().next();
    if let Some(run) = &mut found {
        run.pending_approvals = approvals::of_run(db, run)?;
    }
    Ok(found)
}

/// The run and its descendants, in the order in which they were created.
pub fn tree(db: &Connection, id: RunId) -> StoreResult<Vec<Run>> {
    let sql = format!(
        "{SUBTREE} SELECT {SUMMARY_COLUMNS} FROM tree CROSS JOIN runs r ON r.id = tree.id \
         WHERE {NOT_DELETED} ORDER BY r.id"
    );
    query_runs(db, &sql, named_params! {":id": rows::id_bytes(&id)})
}

/// The direct children with their tool calls, in the order in which they were created.
pub fn child_calls(db: &Connection, id: RunId) -> StoreResult<Vec<ChildCall>> {
    let sql = format!(
        "SELECT r.id AS id, r.tool_call_id AS tool_call_id FROM runs r WHERE r.parent = :id AND {NOT_DELETED} ORDER BY r.id"
    );
    let mut sql = db.prepare_cached(&sql).map_err(store_error)?;
    sql.query_map(named_params! {":id": rows::id_bytes(&id)}, |row| {
        Ok((rows::id(row, "id")?, row.get("tool_call_id")?))
    })
    .and_then(Iterator::collect)
    .map_err(store_error)
}

/// The direct children, in the order in which they were created.
pub fn children(db: &Connection, id: RunId) -> StoreResult<Vec<Run>> {
    let sql = format!(
        "SELECT {RUN_COLUMNS} FROM runs r WHERE r.parent = :id AND {NOT_DELETED} ORDER BY r.id"
    );
    query_runs(db, &sql, named_params! {":id": rows::id_bytes(&id)})
}

/// What becomes of a run that SQLite cannot read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum IfMalformed {
    Fail,
    /// As a run whose row is damaged.
    LeaveOut,
}

impl IfMalformed {
    /// Whether a run that is read with this error is left out.
    fn leaves_out(self, error: &StoreError) -> bool {
        match error {
            StoreError::Malformed(_) => self == Self::LeaveOut,
            error => error.is_damage(),
        }
    }
}

/// Runs that have not ended, by depth and then by age.
pub fn unfinished_runs(
    db: &Connection,
    if_malformed: IfMalformed,
) -> StoreResult<Vec<UnfinishedRun>> {
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
            // A damaged run does not stop the others.
            Err(error) if if_malformed.leaves_out(&error) => {
                let id = rows::run_id(row).unwrap_or(RunId(uuid::Uuid::nil()));
                error!(run.id = %id, error = %error, "The record of {id} is damaged, it is not resumed: {error}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let resume_state = match resume_state(db, row, &mut definitions) {
            Ok(resume_state) => resume_state,
            // Without it the run cannot continue, and fails.
            Err(error) if if_malformed.leaves_out(&error) => {
                let id = run.id;
                error!(run.id = %id, error = %error, "The record of {id} is damaged, it cannot continue: {error}");
                None
            }
            Err(error) => return Err(error),
        };
        let models = rows::resumed_models(row, &run).map_err(store_error)?;
        found.push(UnfinishedRun {
            run,
            resume_state,
            models,
        });
    }
    Ok(found)
}

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

/// The run that an idempotency key has accepted, unless the key has expired.
pub fn claimed_run(db: &Connection, key: &IdempotencyKey) -> StoreResult<Option<ClaimedRun>> {
    let now = now().as_millisecond();
    db.prepare_cached(FIND_CLAIM)
        .and_then(|mut sql| {
            let params = named_params! {
                ":credential": key.credential,
                ":route": key.route,
                ":key": key.key,
                ":now": now,
            };
            sql.query_row(params, rows::claimed_run).optional()
        })
        .map_err(store_error)
}

/// A page of runs, newest first.
pub fn list(
    db: &Connection,
    filter: &RunFilter,
    if_malformed: IfMalformed,
) -> StoreResult<RunPage> {
    let matches = search::search(db, filter)?;
    let last = matches.ids.last().copied();
    let read = |id| readable(db, id, if_malformed);
    let mut runs = load_page(matches.ids, filter.cut_texts, read)?;
    let ends_early = runs.last().map(|run| run.id).filter(|id| Some(*id) != last);
    let next = ends_early.or(matches.next);
    if let Some(min_cost) = filter.min_cost {
        runs.retain(|run| run.tree.usage.cost.is_some_and(|cost| cost >= min_cost));
    }
    Ok(RunPage { runs, next })
}

/// Runs of a session, newest first.
pub fn session_runs(
    db: &Connection,
    mut query: SessionQuery,
    if_malformed: IfMalformed,
) -> StoreResult<Vec<Run>> {
    let (limit, skip_damaged) = (query.limit, query.skip_damaged);
    let read = |id| {
        if skip_damaged {
            readable(db, id, if_malformed)
        } else {
            run(db, id)
        }
    };
    let mut page: Vec<Run> = Vec::new();
    loop {
        let ids = session_ids(db, &query)?;
        let (is_last, last) = (ids.len() < query.limit, ids.last().copied());
        page.extend(load_page(ids, query.cut_texts, read)?);
        let bytes = page.iter().map(Run::text_bytes).sum::<usize>();
        if is_last || page.len() >= limit || bytes >= PAGE_BYTES {
            return Ok(page);
        }
        // Older runs take the places of those that were left out.
        query.limit = limit - page.len();
        query.before = last;
    }
}

/// Only roots have sessions.
fn session_ids(db: &Connection, query: &SessionQuery) -> StoreResult<Vec<RunId>> {
    let mut select = SelectQuery::new(
        "SELECT r.id AS id FROM runs r INDEXED BY runs_session WHERE r.session IS NOT NULL \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)"
            .to_owned(),
    );
    select.and_where("r.session = :session", ":session", query.name.clone());
    select.and_where("r.owner IS :owner", ":owner", query.owner.clone());
    if let Some(agent) = query.agent.clone() {
        select.and_where("r.agent = :agent", ":agent", agent);
    }
    if let Some(status) = query.status {
        select.and_where("r.status = :status", ":status", status.as_str());
    }
    if let Some(before) = query.before {
        select.and_where("r.id < :before", ":before", *rows::id_bytes(&before));
    }
    select.fetch_newest(db, query.limit)
}

/// A run; `None` if it does not exist or its record is damaged.
fn readable(db: &Connection, id: RunId, if_malformed: IfMalformed) -> StoreResult<Option<Run>> {
    match run(db, id) {
        Err(error) if if_malformed.leaves_out(&error) => {
            error!(run.id = %id, error = %error, "{id} is left out of a list: {error}");
            Ok(None)
        }
        found => found,
    }
}

/// Reads runs until the page has [`PAGE_BYTES`].
fn load_page(
    ids: Vec<RunId>,
    cut_texts: bool,
    read: impl Fn(RunId) -> StoreResult<Option<Run>>,
) -> StoreResult<Vec<Run>> {
    let mut page = Vec::with_capacity(ids.len());
    let mut bytes = 0;
    for id in ids {
        let Some(mut run) = read(id)? else { continue };
        if cut_texts {
            run_excerpt::cut_texts(&mut run);
        }
        bytes += run.text_bytes();
        page.push(run);
        if bytes >= PAGE_BYTES {
            break;
        }
    }
    Ok(page)
}

/// Whether a client has paused the run.
pub fn is_held(db: &Connection, id: RunId) -> StoreResult<bool> {
    db.prepare_cached("SELECT 1 FROM runs WHERE id = :id AND held IS NOT NULL")
        .and_then(|mut sql| sql.exists(named_params! {":id": rows::id_bytes(&id)}))
        .map_err(store_error)
}

/// Steps of a run, in order.
pub fn steps(db: &Connection, id: RunId) -> StoreResult<Vec<Step>> {
    let mut sql = db
        .prepare_cached(&format!(
            "SELECT e.last_seq AS last_seq, e.steps AS steps FROM runs r CROSS JOIN entries e ON e.root = r.root \
             WHERE r.id = :id AND e.run = :id AND e.steps IS NOT NULL AND {NOT_DELETED} ORDER BY e.last_seq, e.id",
        ))
        .map_err(store_error)?;
    let mut found = sql
        .query(named_params! {":id": rows::id_bytes(&id)})
        .map_err(store_error)?;
    let mut steps = Vec::new();
    while let Some(row) = found.next().map_err(store_error)? {
        let last_seq = integers::unsigned(row.get("last_seq").map_err(store_error)?);
        let text = entry_text(row, "steps", id, last_seq)?;
        steps.extend(entries::steps(id, last_seq, text)?);
    }
    Ok(steps)
}

/// A page of events, in order. It ends with the last event of a write.
pub fn events(db: &Connection, query: EventQuery) -> StoreResult<Vec<StoredEvent>> {
    let subtree = subtree_ids(db, query)?;
    let mut sql = db
        .prepare_cached(
            "SELECT run, last_seq, count, events FROM entries \
             WHERE root = :root AND last_seq > :after AND count > 0 \
             AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = :root) ORDER BY last_seq",
        )
        .map_err(store_error)?;
    let columns = EntryColumns::find(&sql).map_err(store_error)?;
    let mut found = sql
        .query(named_params! {
            ":root": rows::id_bytes(&query.root),
            ":after": integers::signed(query.after),
        })
        .map_err(store_error)?;
    let mut events = Vec::new();
    while events.len() < query.limit
        && let Some(row) = found.next().map_err(store_error)?
    {
        let run = rows::id(row, columns.run).map_err(store_error)?;
        if subtree
            .as_ref()
            .is_some_and(|wanted| !wanted.contains(&run))
        {
            continue;
        }
        let last = integers::unsigned(row.get(columns.last_seq).map_err(store_error)?);
        let count = integers::unsigned(row.get(columns.count).map_err(store_error)?);
        let lines = entry_text(row, columns.events, run, last)?;
        let entry = entries::read_events(run, last, count, lines)?;
        events.extend(
            entry
                .into_iter()
                .skip_while(|event| event.seq <= query.after),
        );
    }
    Ok(events)
}

/// The columns of an entry, found once for all rows.
struct EntryColumns {
    run: usize,
    last_seq: usize,
    count: usize,
    events: usize,
}

impl EntryColumns {
    fn find(sql: &Statement<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            run: sql.column_index("run")?,
            last_seq: sql.column_index("last_seq")?,
            count: sql.column_index("count")?,
            events: sql.column_index("events")?,
        })
    }
}

/// Reads from the database.
pub fn check(db: &Connection) -> StoreResult<()> {
    db.prepare_cached("SELECT 1 FROM runs LIMIT 1")
        .and_then(|mut sql| sql.exists([]))
        .map(drop)
        .map_err(store_error)
}

/// The runs whose events are wanted; `None` for the whole tree.
fn subtree_ids(db: &Connection, query: EventQuery) -> StoreResult<Option<HashSet<RunId>>> {
    if query.exclude_descendants {
        return Ok(Some(HashSet::from([query.run])));
    }
    if query.run == query.root {
        return Ok(None);
    }
    let sql = format!("{SUBTREE} SELECT id FROM tree");
    Ok(Some(
        query_ids(db, &sql, named_params! {":id": rows::id_bytes(&query.run)})?
            .into_iter()
            .collect(),
    ))
}

/// A query with a condition for each part of a filter that is set.
struct SelectQuery {
    sql: String,
    params: Vec<(&'static str, Box<dyn ToSql>)>,
}

impl SelectQuery {
    fn new(sql: String) -> Self {
        Self {
            sql,
            params: Vec::new(),
        }
    }

    fn and_where(&mut self, condition: &str, name: &'static str, value: impl ToSql + 'static) {
        self.params.push((name, Box::new(value)));
        self.sql += &format!(" AND {condition}");
    }

    fn fetch_newest(mut self, db: &Connection, limit: usize) -> StoreResult<Vec<RunId>> {
        self.params
            .push((":limit", Box::new(integers::signed(limit as u64))));
        self.sql += " ORDER BY r.id DESC LIMIT :limit";
        let params = self.params.iter();
        let params: Vec<_> = params.map(|(name, value)| (*name, &**value)).collect();
        query_ids(db, &self.sql, &params)
    }
}

fn query_ids(db: &Connection, sql: &str, params: Named<'_>) -> StoreResult<Vec<RunId>> {
    let mut sql = db.prepare_cached(sql).map_err(store_error)?;
    let found = sql
        .query_map(params, |row| rows::id(row, "id"))
        .map_err(store_error)?;
    found.collect::<rusqlite::Result<_>>().map_err(store_error)
}

/// The runs that a query finds, with the usage of their trees.
fn query_runs(db: &Connection, sql: &str, params: Named<'_>) -> StoreResult<Vec<Run>> {
    let mut sql = db.prepare_cached(sql).map_err(store_error)?;
    let mut runs = sql
        .query_map(params, rows::run)
        .map_err(store_error)?
        .collect::<rusqlite::Result<Vec<Run>>>()
        .map_err(store_error)?;
    for run in &mut runs {
        fill_tree_usage(db, run)?;
    }
    Ok(runs)
}

/// The recorded definition of a run's agent.
pub fn definition(db: &Connection, id: RunId) -> StoreResult<Option<Arc<str>>> {
    let sql = format!(
        "SELECT d.body AS body FROM runs r JOIN definitions d ON d.hash = r.definition \
         WHERE r.id = :id AND {NOT_DELETED}"
    );
    db.prepare_cached(&sql)
        .and_then(|mut sql| {
            let params = named_params! {":id": rows::id_bytes(&id)};
            sql.query_row(params, |row| row.get("body")).optional()
        })
        .map_err(store_error)
}

/// The text of a definition. Many runs share one, so it is read once and cached.
pub fn load_definition(
    db: &Connection,
    hash: Hash,
    cache: &mut HashMap<Hash, Arc<str>>,
) -> StoreResult<Option<Arc<str>>> {
    if let Some(text) = cache.get(&hash) {
        return Ok(Some(Arc::clone(text)));
    }
    let text: Option<Arc<str>> = db
        .prepare_cached("SELECT body FROM definitions WHERE hash = :hash")
        .and_then(|mut sql| {
            sql.query_row(named_params! {":hash": hash}, |row| row.get("body"))
                .optional()
        })
        .map_err(store_error)?;
    if let Some(text) = &text {
        cache.insert(hash, Arc::clone(text));
    }
    Ok(text)
}

/// Sums the usage of the tree of a run that has not ended. The row of one that has ended contains it.
fn fill_tree_usage(db: &Connection, run: &mut Run) -> StoreResult<()> {
    if !run.status.is_terminal() {
        run.tree = tree_usage(db, run.id)?;
    }
    Ok(())
}

/// The usage of a run and its descendants until now.
fn tree_usage(db: &Connection, id: RunId) -> StoreResult<TreeUsage> {
    let sql =
        format!("{SUBTREE} SELECT {USAGE_COLUMNS} FROM tree CROSS JOIN runs r ON r.id = tree.id");
    let mut sql = db.prepare_cached(&sql).map_err(store_error)?;
    let columns = UsageColumns::find(&sql).map_err(store_error)?;
    let mut found = sql
        .query(named_params! {":id": rows::id_bytes(&id)})
        .map_err(store_error)?;
    let mut total = TreeUsage::default();
    while let Some(row) = found.next().map_err(store_error)? {
        total.runs += 1;
        total
            .usage
            .add(&rows::usage(row, &columns).map_err(store_error)?);
    }
    Ok(total)
}

/// A text of the entry of a run that ends with this event.
fn entry_text<'r>(
    row: &'r Row<'_>,
    column: impl RowIndex,
    run: RunId,
    last_seq: u64,
) -> StoreResult<&'r str> {
    let value = row.get_ref(column).map_err(store_error)?;
    value
        .as_str()
        .map_err(|error| entries::damaged(run, last_seq, &error.to_string()))
}
