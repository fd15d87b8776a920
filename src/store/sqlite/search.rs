//! Finds the runs that a filter lets through, newest first, in bounded work: walks sorted indexes side by side, each
//! skipping to where the others are. Knows no run's record.

use std::collections::{HashSet, VecDeque};

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, params_from_iter};
use uuid::Uuid;

use crate::domain::run::{RunId, Status};
use crate::store::sqlite::readers::failed;
use crate::store::sqlite::{clock, rows};
use crate::store::{RunFilter, StoreError};

type Found<T> = Result<T, StoreError>;

/// What one search may cost, in index entries read: some milliseconds. Beyond it the page ends early, with a cursor.
const MAX_COST: u32 = 8_192;
/// What a walk may cost at the least, for each of its indexes.
const MIN_LANE_COST: u32 = 64;
/// What a query costs beside the entries that it reads, and what looking into a run's record costs.
const QUERY_COST: u32 = 8;
/// Index entries that one query reads.
const MIN_BATCH: usize = 4;
const MAX_BATCH: usize = 64;

/// The ids of the run `?1` and all its descendants.
const TREE: &str = "WITH RECURSIVE tree (id) AS (VALUES (?1) UNION ALL \
     SELECT c.id FROM tree JOIN runs c INDEXED BY runs_children ON c.parent = tree.id) SELECT id FROM tree";

/// Runs that fit, newest first.
#[derive(Debug, Default)]
pub struct Hits {
    /// At most as many as the filter wants.
    pub ids: Vec<RunId>,
    /// The search goes on before this one; none where nothing more fits.
    pub next: Option<RunId>,
}

/// The runs that fit.
pub fn search(db: &Connection, filter: &RunFilter) -> Found<Hits> {
    let Some(range) = Range::of(db, filter)? else {
        return Ok(Hits::default());
    };
    let mut lanes = lanes(db, filter)?;
    let mut ids = Vec::new();
    // Above this id every lane has been searched.
    let mut floor = None;
    let mut rest = MAX_COST;
    // The last is the fullest as a rule, and has what the others did not need.
    for left in (1..=lanes.len()).rev() {
        let lane = &mut lanes[left - 1];
        // However many there are, each gets on.
        let least = MIN_LANE_COST * u32::try_from(lane.streams.len()).unwrap_or(u32::MAX);
        let budget = rest / u32::try_from(left).unwrap_or(u32::MAX);
        let mut cost = 0;
        let reached = lane.walk(db, filter, &range, budget.max(least), &mut cost, &mut ids)?;
        floor = floor.max(reached);
        rest = rest.saturating_sub(cost);
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
    Ok(Hits { ids, next })
}

/// Ids as numbers: they sort alike.
fn run_id(id: u128) -> RunId {
    RunId(Uuid::from_u128(id))
}

/// Which ids may fit.
struct Range {
    newest: u128,
    oldest: u128,
    times: clock::Times,
}

impl Range {
    /// None where there are none.
    fn of(db: &Connection, filter: &RunFilter) -> Found<Option<Self>> {
        let times = clock::Times::of(db, filter.since, filter.until)?;
        let before = filter.before.map_or(u128::MAX, |id| id.0.as_u128());
        let before = before.min(times.before().unwrap_or(u128::MAX));
        let Some(newest) = before.checked_sub(1) else {
            return Ok(None);
        };
        let oldest = times.from().unwrap_or(0);
        Ok((oldest <= newest).then_some(Self {
            newest,
            oldest,
            times,
        }))
    }
}

/// Indexes that are walked side by side: a run fits where it is in all of them and its record has what they do not say.
struct Lane {
    streams: Vec<Stream>,
    /// Whether the record has to be looked at.
    is_checked: bool,
}

fn lanes(db: &Connection, filter: &RunFilter) -> Found<Vec<Lane>> {
    if let Some(root) = filter.root {
        let tree = Stream::of_tree(db, root)?;
        return Ok(vec![Lane::new(vec![tree], true)]);
    }
    let marks = marks(db, filter)?;
    let has_marks = !marks.is_empty();
    if has_marks && filter.agent.is_none() && filter.owner.is_none() && filter.status.is_none() {
        return Ok(combined(&marks, &[], !filter.all));
    }
    let mut lanes = Vec::new();
    let children: &[i64] = if filter.all { &[0, 1] } else { &[0] };
    for status in Status::ALL.into_iter().filter(|it| it.is_terminal()) {
        if filter.status.is_some_and(|wanted| wanted != status) {
            continue;
        }
        for child in children {
            lanes.extend(combined(&marks, &ended(filter, status, *child), false));
        }
    }
    if filter.status.is_none_or(|status| !status.is_terminal()) {
        lanes.extend(combined(&marks, &[unfinished()], true));
    }
    Ok(lanes)
}

/// A lane for each way to choose one of the streams of every mark.
fn combined(marks: &[Vec<Stream>], others: &[Stream], is_checked: bool) -> Vec<Lane> {
    let mut lanes = vec![others.to_vec()];
    for one_of in marks {
        lanes = lanes
            .into_iter()
            .flat_map(|lane| {
                one_of.iter().map(move |stream| {
                    let mut lane = lane.clone();
                    lane.push(stream.clone());
                    lane
                })
            })
            .collect();
    }
    lanes
        .into_iter()
        .map(|streams| Lane::new(streams, is_checked))
        .collect()
}

/// What a client has marked runs with: each label, and the session of each owner that has one of this name.
fn marks(db: &Connection, filter: &RunFilter) -> Found<Vec<Vec<Stream>>> {
    let mut marks: Vec<Vec<Stream>> = filter
        .labels
        .iter()
        .map(|label| vec![of_label(label)])
        .collect();
    if let Some(session) = &filter.session {
        let owners = match &filter.owner {
            Some(owner) => vec![Some(owner.clone())],
            None => owners(db, session)?,
        };
        marks.push(
            owners
                .into_iter()
                .map(|owner| of_session(session, owner))
                .collect(),
        );
    }
    Ok(marks)
}

fn of_label((key, value): &(String, String)) -> Stream {
    Stream::new(
        "SELECT run FROM labels WHERE key = ?1 AND value = ?2 AND run <= ?3 ORDER BY run DESC LIMIT ?4",
        [key.clone().into(), value.clone().into()],
    )
}

fn of_session(session: &str, owner: Option<String>) -> Stream {
    Stream::new(
        "SELECT id FROM runs INDEXED BY runs_session WHERE session IS NOT NULL AND session = ?1 AND owner IS ?2 \
         AND id <= ?3 ORDER BY id DESC LIMIT ?4",
        [session.to_owned().into(), owner.into()],
    )
}

/// Who has a session of this name, at most as many as a search can look at.
fn owners(db: &Connection, session: &str) -> Found<Vec<Option<String>>> {
    const MAX_OWNERS: usize = 64;
    let mut owners = vec![None];
    let mut sql = db
        .prepare_cached(
            "SELECT owner FROM runs INDEXED BY runs_session WHERE session IS NOT NULL AND session = ?1 \
             AND owner > ?2 ORDER BY owner LIMIT 1",
        )
        .map_err(failed)?;
    let mut last = String::new();
    while owners.len() < MAX_OWNERS {
        let next: Option<String> = sql
            .query_row([session, &last], |row| row.get(0))
            .optional()
            .map_err(failed)?;
        let Some(owner) = next else { break };
        last.clone_from(&owner);
        owners.push(Some(owner));
    }
    Ok(owners)
}

/// The index of runs that have not ended.
fn unfinished() -> Stream {
    Stream::new(
        "SELECT id FROM runs INDEXED BY runs_unfinished WHERE finished_at IS NULL AND id <= ?1 \
         ORDER BY id DESC LIMIT ?2",
        [],
    )
}

/// The indexes of runs that ended in this way.
fn ended(filter: &RunFilter, status: Status, child: i64) -> Vec<Stream> {
    let place = || [Value::from(status.as_str().to_owned()), child.into()];
    let mut streams = Vec::new();
    if let Some(owner) = &filter.owner {
        streams.push(Stream::new(
            "SELECT id FROM runs INDEXED BY runs_finished_by_owner WHERE finished_at IS NOT NULL AND owner = ?3 \
             AND status = ?1 AND child = ?2 AND id <= ?4 ORDER BY id DESC LIMIT ?5",
            place().into_iter().chain([owner.clone().into()]),
        ));
    }
    if let Some(agent) = &filter.agent {
        streams.push(Stream::new(
            "SELECT id FROM runs INDEXED BY runs_finished_by_agent WHERE finished_at IS NOT NULL AND agent = ?3 \
             AND status = ?1 AND child = ?2 AND id <= ?4 ORDER BY id DESC LIMIT ?5",
            place().into_iter().chain([agent.clone().into()]),
        ));
    }
    if streams.is_empty() {
        streams.push(Stream::new(
            "SELECT id FROM runs INDEXED BY runs_finished WHERE finished_at IS NOT NULL \
             AND status = ?1 AND child = ?2 AND id <= ?3 ORDER BY id DESC LIMIT ?4",
            place(),
        ));
    }
    streams
}

impl Lane {
    fn new(streams: Vec<Stream>, is_checked: bool) -> Self {
        Self {
            streams,
            is_checked,
        }
    }

    /// Adds what fits, one more than is wanted at the most. Returns the oldest id down to which it has looked, where it
    /// has not looked at all.
    fn walk(
        &mut self,
        db: &Connection,
        filter: &RunFilter,
        range: &Range,
        budget: u32,
        cost: &mut u32,
        ids: &mut Vec<u128>,
    ) -> Found<Option<u128>> {
        let mut wanted = filter.limit.saturating_add(1);
        let mut at = range.newest;
        while wanted > 0 {
            let hit = match self.common(db, at, range.oldest, budget, cost)? {
                Step::End => return Ok(None),
                Step::TooMuch(reached) => return Ok(reached.checked_add(1)),
                Step::Hit(id) => id,
            };
            if self.fits(db, filter, range, hit, cost)? {
                ids.push(hit);
                wanted -= 1;
            }
            let Some(next) = hit.checked_sub(1) else {
                return Ok(None);
            };
            at = next;
        }
        Ok(None)
    }

    /// The newest id at or before `at` that all streams have.
    fn common(
        &mut self,
        db: &Connection,
        mut at: u128,
        oldest: u128,
        budget: u32,
        cost: &mut u32,
    ) -> Found<Step> {
        let mut agreed = 0;
        for turn in (0..self.streams.len()).cycle() {
            if *cost > budget {
                return Ok(Step::TooMuch(at));
            }
            match self.streams[turn].seek(db, at, cost)? {
                Some(id) if id < oldest => return Ok(Step::End),
                Some(id) if id == at => agreed += 1,
                Some(id) => (at, agreed) = (id, 1),
                None => return Ok(Step::End),
            }
            if agreed >= self.streams.len() {
                return Ok(Step::Hit(at));
            }
        }
        Ok(Step::End)
    }

    /// Whether the record has what the indexes do not say.
    fn fits(
        &self,
        db: &Connection,
        filter: &RunFilter,
        range: &Range,
        id: u128,
        cost: &mut u32,
    ) -> Found<bool> {
        let is_in_time = range.times.holds(id);
        if !self.is_checked && is_in_time {
            return Ok(true);
        }
        *cost += QUERY_COST;
        let mut sql = db
            .prepare_cached(
                "SELECT created_at, child, status, owner, agent, session FROM runs WHERE id = ?1",
            )
            .map_err(failed)?;
        let is_it = |wanted: &Option<String>, is: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| is == Some(wanted))
        };
        let fits = sql
            .query_row([id.to_be_bytes()], |row| {
                let is_place = filter.all || filter.root.is_some() || !row.get::<_, bool>(1)?;
                let status = filter.status.map(|status| status.as_str().to_owned());
                Ok((is_in_time || range.times.has(row.get(0)?))
                    && is_place
                    && is_it(&status, row.get_ref(2)?.as_str_or_null()?)
                    && is_it(&filter.owner, row.get_ref(3)?.as_str_or_null()?)
                    && is_it(&filter.agent, row.get_ref(4)?.as_str_or_null()?)
                    && is_it(&filter.session, row.get_ref(5)?.as_str_or_null()?))
            })
            .optional()
            .map_err(failed)?;
        if fits != Some(true) || filter.root.is_none() {
            return Ok(fits == Some(true));
        }
        // The labels of a tree's runs are in no stream.
        for label in &filter.labels {
            if of_label(label).seek(db, id, cost)? != Some(id) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// How far the streams came together.
enum Step {
    Hit(u128),
    End,
    /// Nothing newer than this fits; the rest is not known.
    TooMuch(u128),
}

/// Ids of one index, newest first.
#[derive(Clone)]
struct Stream {
    sql: &'static str,
    values: Vec<Value>,
    /// Read and not passed yet.
    ahead: VecDeque<u128>,
    batch: usize,
    is_read: bool,
}

impl Stream {
    /// The query's last two parameters are the newest id that is wanted, and how many are.
    fn new(sql: &'static str, values: impl IntoIterator<Item = Value>) -> Self {
        Self {
            sql,
            values: values.into_iter().collect(),
            ahead: VecDeque::new(),
            batch: MIN_BATCH,
            is_read: false,
        }
    }

    /// The runs of a tree. Trees are bounded, so all of it is read.
    fn of_tree(db: &Connection, root: RunId) -> Found<Self> {
        let mut sql = db.prepare_cached(TREE).map_err(failed)?;
        let ids = sql
            .query_map([rows::bytes(&root)], number)
            .and_then(Iterator::collect::<rusqlite::Result<HashSet<_>>>)
            .map_err(failed)?;
        let mut ids: Vec<u128> = ids.into_iter().collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut stream = Self::new("", []);
        stream.ahead = ids.into();
        stream.is_read = true;
        Ok(stream)
    }

    /// The newest id at or before `at`, which never gets larger from call to call.
    fn seek(&mut self, db: &Connection, at: u128, cost: &mut u32) -> Found<Option<u128>> {
        loop {
            let mut passed = 0;
            while let Some(id) = self.ahead.front() {
                if *id <= at {
                    return Ok(Some(*id));
                }
                self.ahead.pop_front();
                passed += 1;
            }
            if passed >= MIN_BATCH {
                // The others lead: what is read ahead is passed over.
                self.batch = MIN_BATCH;
            }
            if self.is_read {
                return Ok(None);
            }
            self.read(db, at, cost)?;
        }
    }

    fn read(&mut self, db: &Connection, at: u128, cost: &mut u32) -> Found<()> {
        let mut sql = db.prepare_cached(self.sql).map_err(failed)?;
        let mut values = self.values.clone();
        values.push(at.to_be_bytes().to_vec().into());
        values.push(rows::signed(self.batch as u64).into());
        let mut found = sql.query(params_from_iter(values)).map_err(failed)?;
        while let Some(row) = found.next().map_err(failed)? {
            self.ahead.push_back(number(row).map_err(failed)?);
        }
        self.is_read = self.ahead.len() < self.batch;
        *cost += QUERY_COST + u32::try_from(self.ahead.len()).unwrap_or(u32::MAX);
        self.batch = (self.batch * 2).min(MAX_BATCH);
        Ok(())
    }
}

fn number(row: &rusqlite::Row<'_>) -> rusqlite::Result<u128> {
    row.get::<_, [u8; 16]>(0).map(u128::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use rusqlite::params_from_iter;
    use rusqlite::types::Value;

    use super::{Stream, ended, of_label, of_session};
    use crate::config::Durability;
    use crate::domain::run::Status;
    use crate::store::RunFilter;
    use crate::store::sqlite::schema;

    #[test]
    fn every_stream_is_read_along_its_index_alone() {
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
        let mut streams = ended(&filter(x(), x()), Status::Failed, 0);
        streams.extend(ended(&filter(None, None), Status::Failed, 0));
        streams.push(of_label(&("k".to_owned(), "v".to_owned())));
        streams.push(of_session("s", x()));
        streams.push(super::unfinished());
        let mut plans = Vec::new();
        for Stream { sql, values, .. } in streams {
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
