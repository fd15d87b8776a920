//! Lists an agent's root runs by the time of their last change of status. Of ended runs it counts and sorts the entries of an
//! index, and reads rows only of a session; no index has their order, because each run would pay for it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rusqlite::{Connection, ToSql};

use crate::domain::run::Status;
use crate::store::StoreError;
use crate::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRun};
use crate::store::encoding::integers;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;

const NOT_DELETED: &str = "AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)";
const HAS_APPROVAL: &str = "EXISTS (SELECT 1 FROM approvals a WHERE a.root = r.id)";

pub fn list(db: &Connection, query: &ChangedQuery) -> Result<ChangedPage, StoreError> {
    let has_deletions = db
        .prepare_cached("SELECT EXISTS (SELECT 1 FROM deletions)")
        .and_then(|mut sql| sql.query_row([], |row| row.get(0)));
    let mut page = PageBuilder {
        query,
        // A condition that is evaluated for every entry.
        not_deleted: match has_deletions.map_err(store_error)? {
            true => NOT_DELETED,
            false => "",
        },
        newest: BinaryHeap::new(),
        total: 0,
    };
    for status in &query.statuses {
        let read = match status.is_terminal() {
            true => page.read_ended(db, *status),
            false => page.read_unfinished(db, *status),
        };
        read.map_err(store_error)?;
    }
    Ok(page.finish())
}

struct PageBuilder<'q> {
    query: &'q ChangedQuery,
    not_deleted: &'static str,
    /// At most one more than the page has.
    newest: BinaryHeap<Reverse<ChangedRun>>,
    total: u64,
}

impl PageBuilder<'_> {
    fn read_ended(&mut self, db: &Connection, status: Status) -> rusqlite::Result<()> {
        let index = match (&self.query.session, &self.query.owner) {
            (Some(_), _) => "runs_session",
            (None, Some(_)) => "runs_finished_by_owner",
            (None, None) => "runs_finished_by_agent",
        };
        let mut conditions = Conditions::new(self.query, status);
        if let Some(since) = self.query.since {
            conditions.add("r.finished_at >= :since", ":since", since.as_millisecond());
        }
        let from = format!(
            "FROM runs r INDEXED BY {index} WHERE r.finished_at IS NOT NULL {}",
            self.not_deleted
        );
        let count: i64 = db
            .prepare_cached(&format!("SELECT count(*) {from} {}", conditions.sql))?
            .query_row(&*conditions.params(), |row| row.get(0))?;
        self.total += u64::try_from(count).unwrap_or_default();
        if let Some(after) = self.query.after {
            let place = "(r.finished_at, r.id) < (:after_at, :after_run)";
            conditions.add(place, ":after_at", after.at.as_millisecond());
            conditions.bind(":after_run", rows::id_bytes(&after.run).to_vec());
        }
        conditions.bind(":limit", integers::signed(self.query.limit as u64 + 1));
        let sql = format!(
            "SELECT r.id AS id, r.finished_at AS at {from} {} ORDER BY r.finished_at DESC, r.id DESC LIMIT :limit",
            conditions.sql
        );
        for run in read(db, &sql, &conditions)? {
            self.add(run);
        }
        Ok(())
    }

    fn read_unfinished(&mut self, db: &Connection, status: Status) -> rusqlite::Result<()> {
        let approval = match self
            .query
            .waits_for_approval
            .filter(|_| status == Status::Waiting)
        {
            None => String::new(),
            Some(true) => format!("AND {HAS_APPROVAL}"),
            Some(false) => format!("AND NOT {HAS_APPROVAL}"),
        };
        let conditions = Conditions::new(self.query, status);
        let sql = format!(
            "SELECT r.id AS id, coalesce(r.waiting_since, r.started_at, r.created_at) AS at \
             FROM runs r INDEXED BY runs_unfinished WHERE r.finished_at IS NULL {} {} {approval}",
            self.not_deleted, conditions.sql
        );
        for run in read(db, &sql, &conditions)? {
            if self.query.since.is_none_or(|since| run.at >= since) {
                self.total += 1;
                self.add(run);
            }
        }
        Ok(())
    }

    fn add(&mut self, run: ChangedRun) {
        if self.query.after.is_none_or(|after| run < after) {
            self.newest.push(Reverse(run));
            if self.newest.len() > self.query.limit + 1 {
                self.newest.pop();
            }
        }
    }

    fn finish(self) -> ChangedPage {
        let mut runs: Vec<ChangedRun> = self.newest.into_iter().map(|Reverse(run)| run).collect();
        runs.sort_unstable_by(|a, b| b.cmp(a));
        let has_more = runs.len() > self.query.limit;
        runs.truncate(self.query.limit);
        ChangedPage {
            runs,
            has_more,
            total: self.total,
        }
    }
}

/// Conditions of a query, with their parameters.
struct Conditions {
    sql: String,
    params: Vec<(&'static str, Box<dyn ToSql>)>,
}

impl Conditions {
    /// Those that do not depend on whether the runs have ended.
    fn new(query: &ChangedQuery, status: Status) -> Self {
        let mut conditions = Self {
            sql: "AND r.child = 0".to_owned(),
            params: Vec::new(),
        };
        conditions.add("r.agent = :agent", ":agent", query.agent.clone());
        conditions.add("r.status = :status", ":status", status.as_str());
        if let Some(owner) = query.owner.clone() {
            conditions.add("r.owner IS NOT NULL AND r.owner = :owner", ":owner", owner);
        }
        if let Some(session) = query.session.clone() {
            let sql = "r.session IS NOT NULL AND r.session = :session";
            conditions.add(sql, ":session", session);
        }
        conditions
    }

    fn add(&mut self, sql: &str, name: &'static str, value: impl ToSql + 'static) {
        self.sql += &format!(" AND {sql}");
        self.bind(name, value);
    }

    fn bind(&mut self, name: &'static str, value: impl ToSql + 'static) {
        self.params.push((name, Box::new(value)));
    }

    fn params(&self) -> Vec<(&'static str, &dyn ToSql)> {
        let params = self.params.iter();
        params.map(|(name, value)| (*name, &**value)).collect()
    }
}

fn read(db: &Connection, sql: &str, conditions: &Conditions) -> rusqlite::Result<Vec<ChangedRun>> {
    let mut sql = db.prepare_cached(sql)?;
    let found = sql.query_map(&*conditions.params(), |row| {
        Ok(ChangedRun {
            at: rows::time(row, "at")?.unwrap_or_default(),
            run: rows::id(row, "id")?,
        })
    })?;
    found.collect()
}
