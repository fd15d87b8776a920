//! Finds the runs that a filter lets through, newest first, in bounded work: walks sorted indexes side by side, each
//! skipping to where the others are. Knows no run's record.

use std::collections::{HashSet, VecDeque};

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, params_from_iter};
use uuid::Uuid;

use crate::domain::run::{RunId, Status};
use crate::store::sqlite::reader_pool::store_error;
use crate::store::sqlite::{clock, rows};
use crate::store::{RunFilter, StoreError};

type StoreResult<T> = Result<T, StoreError>;

/// What one search may cost, in index entries read: some milliseconds. Beyond it the page ends early, with a cursor.
const MAX_COST: u32 = 8_192;
/// What a walk may cost at the least, for each of its indexes.
const MIN_INTERSECTION_COST: u32 = 64;
/// What a query costs beside the entries that it reads, and what looking into a run's record costs.
const QUERY_COST: u32 = 8;
/// Index entries that one query reads.
const MIN_BATCH: usize = 4;
const MAX_BATCH: usize = 64;

/// The ids of the run `?1` and all its descendants.
const SUBTREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (?1) UNION ALL \
     SELECT c.id FROM tree JOIN runs c INDEXED BY runs_children ON c.parent = tree.id) SELECT id FROM tree";

/// Runs that fit, newest first.
#[derive(Debug, Default)]
pub struct Matches {
    /// At most as many as the filter wants.
    pub ids: Vec<RunId>,
    /// The search goes on before this one; none where nothing more fits.
    pub next: Option<RunId>,
}

/// The runs that fit.
pub fn search(db: &Connection, filter: &RunFilter) -> StoreResult<Matches> {
    let Some(range) = IdRange::new(db, filter)? else {
        return Ok(Matches::default());
    };
    let mut intersections = intersections(db, filter)?;
    let mut ids = Vec::new();
    // Above this id every lane has been searched.
    let mut floor = None;
    let mut remaining_cost = MAX_COST;
    // The last is the fullest as a rule, and has what the others did not need.
    for remaining in (1..=intersections.len()).rev() {
        let intersection = &mut intersections[remaining - 1];
        // However many there are, each gets on.
        let min_budget =
            MIN_INTERSECTION_COST * u32::try_from(intersection.cursors.len()).unwrap_or(u32::MAX);
        let budget = remaining_cost / u32::try_from(remaining).unwrap_or(u32::MAX);
        let mut cost = 0;
        let searched_to = intersection.walk(
            db,
            filter,
            &range,
            budget.max(min_budget),
            &mut cost,
            &mut ids,
        )?;
        floor = floor.max(searched_to);
        remaining_cost = remaining_cost.saturating_sub(cost);
    }
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.retain(|id| floor.is_none_or(|floor| *id >= floor));
    let mut next = floor;
    if ids.len() > filter.limit {
        ids.truncate(filter.limit);
        next = ids.last().copied();
    }
    let ids = ids.into_iter().map(run_id).collect();
    let next = next.map(run_id);
    Ok(Matches { ids, next })
}

/// Ids as numbers: they sort alike.
fn run_id(id: u128) -> RunId {
    RunId(Uuid::from_u128(id))
}

/// Which ids may fit.
struct IdRange {
    newest: u128,
    oldest: u128,
    times: clock::CreatedRange,
}

impl IdRange {
    /// None where there are none.
    fn new(db: &Connection, filter: &RunFilter) -> StoreResult<Option<Self>> {
        let times = clock::CreatedRange::new(db, filter.since, filter.until)?;
        let before = filter.before.map_or(u128::MAX, |id| id.0.as_u128());
        let before = before.min(times.end_id().unwrap_or(u128::MAX));
        let Some(newest) = before.checked_sub(1) else {
            return Ok(None);
        };
        let oldest = times.oldest_id().unwrap_or(0);
        Ok((oldest <= newest).then_some(Self {
            newest,
            oldest,
            times,
        }))
    }
}

/// Indexes that are walked side by side: a run fits where it is in all of them and its record has what they do not say.
struct Intersection {
    cursors: Vec<IdCursor>,
    /// Whether the record has to be looked at.
    needs_record: bool,
}

fn intersections(db: &Connection, filter: &RunFilter) -> StoreResult<Vec<Intersection>> {
    if let Some(root) = filter.root {
        let cursor = IdCursor::for_tree(db, root)?;
        return Ok(vec![Intersection::new(vec![cursor], true)]);
    }
    let mark_cursors = mark_cursors(db, filter)?;
    let has_mark_cursors = !mark_cursors.is_empty();
    if has_mark_cursors
        && filter.agent.is_none()
        && filter.owner.is_none()
        && filter.status.is_none()
    {
        return Ok(cross_product(&mark_cursors, &[], !filter.include_children));
    }
    let mut intersections = Vec::new();
    let children: &[i64] = if filter.include_children {
        &[0, 1]
    } else {
        &[0]
    };
    for status in Status::ALL.into_iter().filter(|it| it.is_terminal()) {
        if filter.status.is_some_and(|wanted| wanted != status) {
            continue;
        }
        for child in children {
            intersections.extend(cross_product(
                &mark_cursors,
                &ended_cursors(filter, status, *child),
                false,
            ));
        }
    }
    if filter.status.is_none_or(|status| !status.is_terminal()) {
        intersections.extend(cross_product(&mark_cursors, &[unfinished_cursor()], true));
    }
    Ok(intersections)
}

/// A lane for each way to choose one of the streams of every mark.
fn cross_product(
    mark_cursors: &[Vec<IdCursor>],
    others: &[IdCursor],
    needs_record: bool,
) -> Vec<Intersection> {
    let mut combinations = vec![others.to_vec()];
    for alternatives in mark_cursors {
        combinations = combinations
            .into_iter()
            .flat_map(|combination| {
                alternatives.iter().map(move |cursor| {
                    let mut combination = combination.clone();
                    combination.push(cursor.clone());
                    combination
                })
            })
            .collect();
    }
    combinations
        .into_iter()
        .map(|cursors| Intersection::new(cursors, needs_record))
        .collect()
}

/// What a client has marked runs with: each label, and the session of each owner that has one of this name.
fn mark_cursors(db: &Connection, filter: &RunFilter) -> StoreResult<Vec<Vec<IdCursor>>> {
    let mut mark_cursors: Vec<Vec<IdCursor>> = filter
        .labels
        .iter()
        .map(|label| vec![label_cursor(label)])
        .collect();
    if let Some(session) = &filter.session {
        let owners = match &filter.owner {
            Some(owner) => vec![Some(owner.clone())],
            None => session_owners(db, session)?,
        };
        mark_cursors.push(
            owners
                .into_iter()
                .map(|owner| session_cursor(session, owner))
                .collect(),
        );
    }
    Ok(mark_cursors)
}

fn label_cursor((key, value): &(String, String)) -> IdCursor {
    IdCursor::new(
        "SELECT run FROM labels WHERE key = ?1 AND value = ?2 AND run <= ?3 ORDER BY run DESC LIMIT ?4",
        [key.clone().into(), value.clone().into()],
    )
}

fn session_cursor(session: &str, owner: Option<String>) -> IdCursor {
    IdCursor::new(
        "SELECT id FROM runs INDEXED BY runs_session WHERE session IS NOT NULL AND session = ?1 AND owner IS ?2 \
         AND id <= ?3 ORDER BY id DESC LIMIT ?4",
        [session.to_owned().into(), owner.into()],
    )
}

/// Who has a session of this name, at most as many as a search can look at.
fn session_owners(db: &Connection, session: &str) -> StoreResult<Vec<Option<String>>> {
    const MAX_OWNERS: usize = 64;
    let mut owners = vec![None];
    let mut sql = db
        .prepare_cached(
            "SELECT owner FROM runs INDEXED BY runs_session WHERE session IS NOT NULL AND session = ?1 \
             AND owner > ?2 ORDER BY owner LIMIT 1",
        )
        .map_err(store_error)?;
    let mut last = String::new();
    while owners.len() < MAX_OWNERS {
        let next: Option<String> = sql
            .query_row([session, &last], |row| row.get(0))
            .optional()
            .map_err(store_error)?;
        let Some(owner) = next else { break };
        last.clone_from(&owner);
        owners.push(Some(owner));
    }
    Ok(owners)
}

/// The index of runs that have not ended.
fn unfinished_cursor() -> IdCursor {
    IdCursor::new(
        "SELECT id FROM runs INDEXED BY runs_unfinished WHERE finished_at IS NULL AND id <= ?1 \
         ORDER BY id DESC LIMIT ?2",
        [],
    )
}

/// The indexes of runs that ended in this way.
fn ended_cursors(filter: &RunFilter, status: Status, child: i64) -> Vec<IdCursor> {
    let base_values = || [Value::from(status.as_str().to_owned()), child.into()];
    let mut cursors = Vec::new();
    if let Some(owner) = &filter.owner {
        cursors.push(IdCursor::new(
            "SELECT id FROM runs INDEXED BY runs_finished_by_owner WHERE finished_at IS NOT NULL AND owner = ?3 \
             AND status = ?1 AND child = ?2 AND id <= ?4 ORDER BY id DESC LIMIT ?5",
            base_values().into_iter().chain([owner.clone().into()]),
        ));
    }
    if let Some(agent) = &filter.agent {
        cursors.push(IdCursor::new(
            "SELECT id FROM runs INDEXED BY runs_finished_by_agent WHERE finished_at IS NOT NULL AND agent = ?3 \
             AND status = ?1 AND child = ?2 AND id <= ?4 ORDER BY id DESC LIMIT ?5",
            base_values().into_iter().chain([agent.clone().into()]),
        ));
    }
    if cursors.is_empty() {
        cursors.push(IdCursor::new(
            "SELECT id FROM runs INDEXED BY runs_finished WHERE finished_at IS NOT NULL \
             AND status = ?1 AND child = ?2 AND id <= ?3 ORDER BY id DESC LIMIT ?4",
            base_values(),
        ));
    }
    cursors
}

impl Intersection {
    fn new(cursors: Vec<IdCursor>, needs_record: bool) -> Self {
        Self {
            cursors,
            needs_record,
        }
    }

    /// Adds what fits, one more than is wanted at the most. Returns the oldest id down to which it has looked, where it
    /// has not looked at all.
    fn walk(
        &mut self,
        db: &Connection,
        filter: &RunFilter,
        range: &IdRange,
        budget: u32,
        cost: &mut u32,
        ids: &mut Vec<u128>,
    ) -> StoreResult<Option<u128>> {
        let mut wanted = filter.limit.saturating_add(1);
        let mut max_id = range.newest;
        while wanted > 0 {
            let candidate = match self.next_common(db, max_id, range.oldest, budget, cost)? {
                SeekResult::End => return Ok(None),
                SeekResult::OverBudget(searched_to) => return Ok(searched_to.checked_add(1)),
                SeekResult::Match(id) => id,
            };
            if self.matches(db, filter, range, candidate, cost)? {
                ids.push(candidate);
                wanted -= 1;
            }
            let Some(next) = candidate.checked_sub(1) else {
                return Ok(None);
            };
            max_id = next;
        }
        Ok(None)
    }

    /// The newest id at or before `at` that all streams have.
    fn next_common(
        &mut self,
        db: &Connection,
        mut max_id: u128,
        oldest: u128,
        budget: u32,
        cost: &mut u32,
    ) -> StoreResult<SeekResult> {
        let mut agreeing = 0;
        for index in (0..self.cursors.len()).cycle() {
            if *cost > budget {
                return Ok(SeekResult::OverBudget(max_id));
            }
            match self.cursors[index].seek(db, max_id, cost)? {
                Some(id) if id < oldest => return Ok(SeekResult::End),
                Some(id) if id == max_id => agreeing += 1,
                Some(id) => (max_id, agreeing) = (id, 1),
                None => return Ok(SeekResult::End),
            }
            if agreeing >= self.cursors.len() {
                return Ok(SeekResult::Match(max_id));
            }
        }
        Ok(SeekResult::End)
    }

    /// Whether the record has what the indexes do not say.
    fn matches(
        &self,
        db: &Connection,
        filter: &RunFilter,
        range: &IdRange,
        id: u128,
        cost: &mut u32,
    ) -> StoreResult<bool> {
        let is_in_range = range.times.contains_id(id);
        if !self.needs_record && is_in_range {
            return Ok(true);
        }
        *cost += QUERY_COST;
        let mut sql = db
            .prepare_cached(
                "SELECT created_at, child, status, owner, agent, session FROM runs WHERE id = ?1",
            )
            .map_err(store_error)?;
        let column_matches = |wanted: &Option<String>, actual: Option<&str>| {
            wanted
                .as_deref()
                .is_none_or(|wanted| actual == Some(wanted))
        };
        let is_match = sql
            .query_row([id.to_be_bytes()], |row| {
                let is_in_scope =
                    filter.include_children || filter.root.is_some() || !row.get::<_, bool>(1)?;
                let status = filter.status.map(|status| status.as_str().to_owned());
                Ok((is_in_range || range.times.contains_time(row.get(0)?))
                    && is_in_scope
                    && column_matches(&status, row.get_ref(2)?.as_str_or_null()?)
                    && column_matches(&filter.owner, row.get_ref(3)?.as_str_or_null()?)
                    && column_matches(&filter.agent, row.get_ref(4)?.as_str_or_null()?)
                    && column_matches(&filter.session, row.get_ref(5)?.as_str_or_null()?))
            })
            .optional()
            .map_err(store_error)?;
        if is_match != Some(true) || filter.root.is_none() {
            return Ok(is_match == Some(true));
        }
        // The labels of a tree's runs are in no stream.
        for label in &filter.labels {
            if label_cursor(label).seek(db, id, cost)? != Some(id) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// How far the streams came together.
enum SeekResult {
    Match(u128),
    End,
    /// Nothing newer than this fits; the rest is not known.
    OverBudget(u128),
}

/// Ids of one index, newest first.
#[derive(Clone)]
struct IdCursor {
    sql: &'static str,
    values: Vec<Value>,
    /// Read and not passed yet.
    buffer: VecDeque<u128>,
    batch: usize,
    is_exhausted: bool,
}

impl IdCursor {
    /// The query's last two parameters are the newest id that is wanted, and how many are.
    fn new(sql: &'static str, values: impl IntoIterator<Item = Value>) -> Self {
        Self {
            sql,
            values: values.into_iter().collect(),
            buffer: VecDeque::new(),
            batch: MIN_BATCH,
            is_exhausted: false,
        }
    }

    /// The runs of a tree. Trees are bounded, so all of it is read.
    fn for_tree(db: &Connection, root: RunId) -> StoreResult<Self> {
        let mut sql = db.prepare_cached(SUBTREE).map_err(store_error)?;
        let ids = sql
            .query_map([rows::id_bytes(&root)], read_id)
            .and_then(Iterator::collect::<rusqlite::Result<HashSet<_>>>)
            .map_err(store_error)?;
        let mut ids: Vec<u128> = ids.into_iter().collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut cursor = Self::new("", []);
        cursor.buffer = ids.into();
        cursor.is_exhausted = true;
        Ok(cursor)
    }

    /// The newest id at or before `at`, which never gets larger from call to call.
    fn seek(&mut self, db: &Connection, max_id: u128, cost: &mut u32) -> StoreResult<Option<u128>> {
        loop {
            let mut skipped = 0;
            while let Some(id) = self.buffer.front() {
                if *id <= max_id {
                    return Ok(Some(*id));
                }
                self.buffer.pop_front();
                skipped += 1;
            }
            if skipped >= MIN_BATCH {
                // The others lead: what is read ahead is passed over.
                self.batch = MIN_BATCH;
            }
            if self.is_exhausted {
                return Ok(None);
            }
            self.fetch(db, max_id, cost)?;
        }
    }

    fn fetch(&mut self, db: &Connection, max_id: u128, cost: &mut u32) -> StoreResult<()> {
        let mut sql = db.prepare_cached(self.sql).map_err(store_error)?;
        let mut values = self.values.clone();
        values.push(max_id.to_be_bytes().to_vec().into());
        values.push(rows::signed(self.batch as u64).into());
        let mut found = sql.query(params_from_iter(values)).map_err(store_error)?;
        while let Some(row) = found.next().map_err(store_error)? {
            self.buffer.push_back(read_id(row).map_err(store_error)?);
        }
        self.is_exhausted = self.buffer.len() < self.batch;
        *cost += QUERY_COST + u32::try_from(self.buffer.len()).unwrap_or(u32::MAX);
        self.batch = (self.batch * 2).min(MAX_BATCH);
        Ok(())
    }
}

fn read_id(row: &rusqlite::Row<'_>) -> rusqlite::Result<u128> {
    row.get::<_, [u8; 16]>(0).map(u128::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use rusqlite::params_from_iter;
    use rusqlite::types::Value;

    use super::{IdCursor, ended_cursors, label_cursor, session_cursor};
    use crate::config::Durability;
    use crate::domain::run::Status;
    use crate::store::RunFilter;
    use crate::store::sqlite::schema;

    #[test]
    fn every_cursor_is_read_by_index_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("axed.db");
        std::fs::File::create(&file).expect("a file");
        let db = schema::open_writer(&file, Durability::Process).expect("a database");
        let x = || Some("x".to_owned());
        let filter = |owner, agent| RunFilter {
            owner,
            agent,
            ..RunFilter::default()
        };
        let mut cursors = ended_cursors(&filter(x(), x()), Status::Failed, 0);
        cursors.extend(ended_cursors(&filter(None, None), Status::Failed, 0));
        cursors.push(label_cursor(&("k".to_owned(), "v".to_owned())));
        cursors.push(session_cursor("s", x()));
        cursors.push(super::unfinished_cursor());
        let mut plans = Vec::new();
        for IdCursor { sql, values, .. } in cursors {
            let mut values = values;
            values.extend([Value::Blob(vec![0; 16]), 1.into()]);
            let plan: Vec<String> = db
                .prepare(&format!("EXPLAIN QUERY PLAN {sql}"))
                .and_then(|mut sql| {
                    sql.query_map(params_from_iter(values), |row| row.get(3))?
                        .collect()
                })
                .expect("a plan");
            plans.push(plan.join("; "));
        }
        insta::assert_snapshot!(plans.join("\n"), @r"
        SEARCH runs USING COVERING INDEX runs_finished_by_owner (owner=? AND status=? AND child=? AND id<?)
        SEARCH runs USING COVERING INDEX runs_finished_by_agent (agent=? AND status=? AND child=? AND id<?)
        SEARCH runs USING COVERING INDEX runs_finished (status=? AND child=? AND id<?)
        SEARCH labels USING PRIMARY KEY (key=? AND value=? AND run<?)
        SEARCH runs USING COVERING INDEX runs_session (session=? AND owner=? AND id<?)
        SEARCH runs USING INDEX runs_unfinished (id<?)
        ");
    }
}
