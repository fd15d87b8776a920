//! Lists an agent's root runs by the time of their last change of status. Reads the entries of an index, and rows only of
//! runs that have not ended or belong to a session.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rusqlite::{Connection, ToSql};

use crate::domain::run::Status;
use crate::store::StoreError;
use crate::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRun};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;

const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)";
const HAS_APPROVAL: &str = "EXISTS (SELECT 1 FROM approvals a WHERE a.root = r.id)";

pub fn list(db: &Connection, query: &ChangedQuery) -> Result<ChangedPage, StoreError> {
    let mut page = PageBuilder {
        query,
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
        let sql = format!(
            "SELECT r.id AS id, r.finished_at AS at FROM runs r INDEXED BY {index} WHERE r.finished_at IS NOT NULL AND {NOT_DELETED}"
        );
        self.read(db, sql, status)
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
        let sql = format!(
            "SELECT r.id AS id, coalesce(r.waiting_since, r.started_at, r.created_at) AS at \
             FROM runs r INDEXED BY runs_unfinished WHERE r.finished_at IS NULL AND {NOT_DELETED} {approval}"
        );
        self.read(db, sql, status)
    }

    fn read(&mut self, db: &Connection, mut sql: String, status: Status) -> rusqlite::Result<()> {
        let status = status.as_str();
        let mut params: Vec<(&str, &dyn ToSql)> =
            vec![(":agent", &self.query.agent), (":status", &status)];
        sql.push_str(" AND r.child = 0 AND r.agent = :agent AND r.status = :status");
        if let Some(owner) = &self.query.owner {
            sql.push_str(" AND r.owner IS NOT NULL AND r.owner = :owner");
            params.push((":owner", owner));
        }
        if let Some(session) = &self.query.session {
            sql.push_str(" AND r.session IS NOT NULL AND r.session = :session");
            params.push((":session", session));
        }
        let mut sql = db.prepare_cached(&sql)?;
        let mut found = sql.query(params.as_slice())?;
        while let Some(row) = found.next()? {
            let at = rows::time(row, "at")?.unwrap_or_default();
            let run = rows::id(row, "id")?;
            self.add(ChangedRun { at, run });
        }
        Ok(())
    }

    fn add(&mut self, run: ChangedRun) {
        if self.query.since.is_some_and(|since| run.at < since) {
            return;
        }
        self.total += 1;
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
