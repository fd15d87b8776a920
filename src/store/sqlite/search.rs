//! Finds the runs that match a filter, newest first, with bounded work: intersects sorted indexes, each of which skips to
//! where the others are.

use std::collections::{HashSet, VecDeque};

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, ToSql, named_params};
use uuid::Uuid;

use crate::domain::run::{RunId, Status};
use crate::store::StoreError;
use crate::store::encoding::clock_skew::CreatedRange;
use crate::store::encoding::integers;
use crate::store::runs::{Matches, RunFilter};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::{clock, rows};

type StoreResult<T> = Result<T, StoreError>;

/// Budget of one search in index entries read, for each run of a full page. Beyond it the page ends early, with a cursor.
/// A page of 50 runs takes at most about 2 ms.
const COST_PER_RUN: u32 = 40;
/// Budget of one search for a small page.
const MIN_COST: u32 = 2_000;
/// Smallest budget of an intersection, for each of its indexes.
const MIN_INTERSECTION_COST: u32 = 64;
/// Cost of a query besides the entries that it reads, and of reading a run's row.
const QUERY_COST: u32 = 8;
/// Index entries that one query reads.
const MIN_BATCH: usize = 4;
const MAX_BATCH: usize = 64;

/// The ids of the run `:root` and all its descendants.
const SUBTREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (:root) UNION ALL \
     SELECT c.id FROM tree JOIN runs c INDEXED BY runs_children ON c.parent = tree.id) SELECT id FROM tree";

pub fn search(db: &Connection, filter: &RunFilter) -> StoreResult<Matches> {
    let Some(range) = IdRange::new(db, filter)? else {
        return Ok(Matches::default());
    };
    let mut intersections = intersections(db, filter)?;
    let mut ids = Vec::new();
    // From this id on, every intersection has been searched.
    let mut floor = None;
    let mut remaining_cost = max_cost(filter.limit);
    // The last one usually has the most matches, and gets the budget that the others did not use.
    for remaining in (1..=intersections.len()).rev() {
        let intersection = &mut intersections[remaining - 1];
        // Each makes progress, even if there are many.
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

fn max_cost(limit: usize) -> u32 {
    let limit = u32::try_from(limit).unwrap_or(u32::MAX);
    limit.saturating_mul(COST_PER_RUN).max(MIN_COST)
}

/// Ids sort like the numbers that they are.
fn run_id(id: u128) -> RunId {
    RunId(Uuid::from_u128(id))
}

/// The ids that may match.
struct IdRange {
    newest: u128,
    oldest: u128,
    times: CreatedRange,
}

impl IdRange {
    /// `None` if no id can match.
    fn new(db: &Connection, filter: &RunFilter) -> StoreResult<Option<Self>> {
        let times = clock::created_range(db, filter.since, filter.until)?;
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

/// Indexes that are searched together. A run matches if all of them contain it, and its row matches the rest of the filter.
struct Intersection {
    cursors: Vec<IdCursor>,
    /// Whether the row has to be read.
    needs_record: bool,
}

fn intersections(db: &Connection, filter: &RunFilter) -> StoreResult<Vec<Intersection>> {
    if let Some(root) = filter.root {
        let cursor = IdCursor::for_tree(db, root)?;
        return Ok(vec![Intersection::new(vec![cursor], true)]);
    }
    let Marks {
        cursors: mark_cursors,
        needs_record,
    } = mark_cursors(db, filter)?;
    let has_mark_cursors = !mark_cursors.is_empty();
    if has_mark_cursors
        && filter.agent.is_none()
        && filter.owner.is_none()
        && filter.status.is_none()
    {
        let needs_record = needs_record || !filter.include_children;
        return Ok(cross_product(&mark_cursors, &[], needs_record));
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
                needs_record,
            ));
        }
    }
    if filter.status.is_none_or(|status| !status.is_terminal()) {
        intersections.extend(cross_product(&mark_cursors, &[unfinished_cursor()], true));
    }
    Ok(intersections)
}

/// One intersection for each way to choose one cursor of every mark.
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

/// What clients mark runs with.
struct Marks {
    /// For each label and each name of a score, and for the session: that of each owner that has one of this name.
    cursors: Vec<Vec<IdCursor>>,
    /// Whether the session is in the row only, because too many owners have one of this name.
    needs_record: bool,
}

fn mark_cursors(db: &Connection, filter: &RunFilter) -> StoreResult<Marks> {
    let mut cursors: Vec<Vec<IdCursor>> = filter
        .labels
        .iter()
        .map(|label| vec![label_cursor(label)])
        .collect();
    cursors.extend(filter.scored_names().map(|name| vec![score_cursor(name)]));
    let mut needs_record = false;
    if let Some(session) = &filter.session {
        let owners = match &filter.owner {
            Some(owner) => Some(vec![Some(owner.clone())]),
            None => session_owners(db, session)?,
        };
        needs_record = owners.is_none();
        cursors.extend(owners.map(|owners| {
            let owners = owners.into_iter();
            owners.map(|owner| session_cursor(session, owner)).collect()
        }));
    }
    Ok(Marks {
        cursors,
        needs_record,
    })
}

fn label_cursor((key, value): &(String, String)) -> IdCursor {
    IdCursor::new(
        "SELECT run AS id FROM labels WHERE key = :key AND value = :value AND run <= :max_id \
         ORDER BY run DESC LIMIT :limit",
        [
            (":key", key.clone().into()),
            (":value", value.clone().into()),
        ],
    )
}

fn score_cursor(name: &str) -> IdCursor {
    IdCursor::new(
        "SELECT run AS id FROM scores WHERE name = :name AND run <= :max_id GROUP BY run ORDER BY run DESC LIMIT :limit",
        [(":name", name.to_owned().into())],
    )
}

fn session_cursor(session: &str, owner: Option<String>) -> IdCursor {
    IdCursor::new(
        "SELECT id FROM runs INDEXED BY runs_session WHERE session IS NOT NULL AND session = :session AND owner IS :owner \
         AND id <= :max_id ORDER BY id DESC LIMIT :limit",
        [
            (":session", session.to_owned().into()),
            (":owner", owner.into()),
        ],
    )
}

/// The owners of a session of this name; `None` if they are more than a search can read.
fn session_owners(db: &Connection, session: &str) -> StoreResult<Option<Vec<Option<String>>>> {
    const MAX_OWNERS: usize = 64;
    let mut owners = vec![None];
    let mut sql = db
        .prepare_cached(
            "SELECT owner FROM runs INDEXED BY runs_session WHERE session IS NOT NULL AND session = :session \
             AND owner > :owner ORDER BY owner LIMIT 1",
        )
        .map_err(store_error)?;
    let mut last = String::new();
    loop {
        let next: Option<String> = sql
            .query_row(named_params! {":session": session, ":owner": last}, |row| {
                row.get("owner")
            })
            .optional()
            .map_err(store_error)?;
        let Some(owner) = next else {
            return Ok(Some(owners));
        };
        if owners.len() == MAX_OWNERS {
            return Ok(None);
        }
        last.clone_from(&owner);
        owners.push(Some(owner));
    }
}

fn unfinished_cursor() -> IdCursor {
    IdCursor::new(
        "SELECT id FROM runs INDEXED BY runs_unfinished WHERE finished_at IS NULL AND id <= :max_id \
         ORDER BY id DESC LIMIT :limit",
        [],
    )
}

/// Cursors over the runs that ended with this status.
fn ended_cursors(filter: &RunFilter, status: Status, child: i64) -> Vec<IdCursor> {
    let base_params = || {
        [
            (":status", Value::from(status.as_str().to_owned())),
            (":child", child.into()),
        ]
    };
    let mut cursors = Vec::new();
    if let Some(owner) = &filter.owner {
        cursors.push(IdCursor::new(
            "SELECT id FROM runs INDEXED BY runs_finished_by_owner WHERE finished_at IS NOT NULL AND owner = :owner \
             AND status = :status AND child = :child AND id <= :max_id ORDER BY id DESC LIMIT :limit",
            base_params().into_iter().chain([(":owner", owner.clone().into())]),
        ));
    }
    if let Some(agent) = &filter.agent {
        cursors.push(IdCursor::new(
            "SELECT id FROM runs INDEXED BY runs_finished_by_agent WHERE finished_at IS NOT NULL AND agent = :agent \
             AND status = :status AND child = :child AND id <= :max_id ORDER BY id DESC LIMIT :limit",
            base_params().into_iter().chain([(":agent", agent.clone().into())]),
        ));
    }
    if cursors.is_empty() {
        cursors.push(IdCursor::new(
            "SELECT id FROM runs INDEXED BY runs_finished WHERE finished_at IS NOT NULL \
             AND status = :status AND child = :child AND id <= :max_id ORDER BY id DESC LIMIT :limit",
            base_params(),
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

    /// Adds matching ids, at most one more than the limit. If the budget does not suffice for a whole search, returns the
    /// oldest id that was searched.
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

    /// The newest id, at most `max_id`, that all cursors contain.
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

    /// Whether the row matches the parts of the filter that the indexes do not cover.
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
                "SELECT created_at, child, status, owner, agent, session FROM runs WHERE id = :id",
            )
            .map_err(store_error)?;
        let column_matches = |wanted: &Option<String>, actual: Option<&str>| {
            wanted
                .as_deref()
                .is_none_or(|wanted| actual == Some(wanted))
        };
        let is_match = sql
            .query_row(named_params! {":id": id.to_be_bytes()}, |row| {
                let is_in_scope = filter.include_children
                    || filter.root.is_some()
                    || !row.get::<_, bool>("child")?;
                let status = filter.status.map(|status| status.as_str().to_owned());
                Ok(
                    (is_in_range || range.times.contains_time(row.get("created_at")?))
                        && is_in_scope
                        && column_matches(&status, row.get_ref("status")?.as_str_or_null()?)
                        && column_matches(&filter.owner, row.get_ref("owner")?.as_str_or_null()?)
                        && column_matches(&filter.agent, row.get_ref("agent")?.as_str_or_null()?)
                        && column_matches(
                            &filter.session,
                            row.get_ref("session")?.as_str_or_null()?,
                        ),
                )
            })
            .optional()
            .map_err(store_error)?;
        if is_match != Some(true) || filter.root.is_none() {
            return Ok(is_match == Some(true));
        }
        // A search in a tree has no cursors for labels.
        for label in &filter.labels {
            if label_cursor(label).seek(db, id, cost)? != Some(id) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

enum SeekResult {
    Match(u128),
    End,
    /// No newer id matches; the rest was not searched.
    OverBudget(u128),
}

/// Ids of one index, newest first.
#[derive(Clone)]
struct IdCursor {
    sql: &'static str,
    params: Vec<(&'static str, Value)>,
    /// Read ahead.
    buffer: VecDeque<u128>,
    batch: usize,
    is_exhausted: bool,
}

impl IdCursor {
    /// The query has the parameters `:max_id` and `:limit` besides these, and returns the column `id`.
    fn new(sql: &'static str, params: impl IntoIterator<Item = (&'static str, Value)>) -> Self {
        Self {
            sql,
            params: params.into_iter().collect(),
            buffer: VecDeque::new(),
            batch: MIN_BATCH,
            is_exhausted: false,
        }
    }

    /// The runs of a tree. Trees are bounded, so all ids are read.
    fn for_tree(db: &Connection, root: RunId) -> StoreResult<Self> {
        let mut sql = db.prepare_cached(SUBTREE).map_err(store_error)?;
        let ids = sql
            .query_map(named_params! {":root": rows::id_bytes(&root)}, |row| {
                row.get("id").map(u128::from_be_bytes)
            })
            .and_then(Iterator::collect::<rusqlite::Result<HashSet<_>>>)
            .map_err(store_error)?;
        let mut ids: Vec<u128> = ids.into_iter().collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut cursor = Self::new("", []);
        cursor.buffer = ids.into();
        cursor.is_exhausted = true;
        Ok(cursor)
    }

    /// The newest id that is at most `max_id`, which must not grow from call to call.
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
                // Other cursors skip far, so reading ahead is wasted.
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
        let (max_id, limit) = (max_id.to_be_bytes(), integers::signed(self.batch as u64));
        let own = self.params.iter();
        let mut params: Vec<(&str, &dyn ToSql)> =
            own.map(|(name, value)| (*name, value as _)).collect();
        params.extend([(":max_id", &max_id as _), (":limit", &limit as _)]);
        let id_column = sql.column_index("id").map_err(store_error)?;
        let mut found = sql.query(&params[..]).map_err(store_error)?;
        while let Some(row) = found.next().map_err(store_error)? {
            let id = row.get(id_column).map_err(store_error)?;
            self.buffer.push_back(u128::from_be_bytes(id));
        }
        self.is_exhausted = self.buffer.len() < self.batch;
        *cost += QUERY_COST + u32::try_from(self.buffer.len()).unwrap_or(u32::MAX);
        self.batch = (self.batch * 2).min(MAX_BATCH);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::ToSql;

    use super::{IdCursor, ended_cursors, label_cursor, score_cursor, session_cursor};
    use crate::config::Durability;
    use crate::domain::run::Status;
    use crate::store::runs::RunFilter;
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
        cursors.push(score_cursor("good"));
        cursors.push(session_cursor("s", x()));
        cursors.push(super::unfinished_cursor());
        let mut plans = Vec::new();
        for IdCursor { sql, params, .. } in &cursors {
            let own = params.iter();
            let mut params: Vec<(&str, &dyn ToSql)> =
                own.map(|(name, value)| (*name, value as _)).collect();
            params.extend([(":max_id", &[0_u8; 16] as _), (":limit", &1 as _)]);
            let plan: Vec<String> = db
                .prepare(&format!("EXPLAIN QUERY PLAN {sql}"))
                .and_then(|mut sql| {
                    sql.query_map(&params[..], |row| row.get("detail"))?
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
        SEARCH scores USING COVERING INDEX scores_name (name=? AND run<?)
        SEARCH runs USING COVERING INDEX runs_session (session=? AND owner=? AND id<?)
        SEARCH runs USING INDEX runs_unfinished (id<?)
        ");
    }
}
