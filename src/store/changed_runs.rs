//! Lists of an agent's root runs by the time of their last change of status. No index has their order, because each run would pay
//! for it: those of ended runs are sorted by the entries of an index.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::{RunId, Status};
use crate::store::StoreError;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::inputs::is_of_person;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{free_text, params};

pub trait ChangedRuns: Send + Sync + 'static {
    /// A page of runs, last changed first.
    fn changed_runs(&self, query: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>>;
}

/// A run with the time of its last change of status, which is its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangedRun {
    pub at: Timestamp,
    pub run: RunId,
}

/// Conditions that are `None` match every run.
#[derive(Clone, Debug, Default)]
pub struct ChangedQuery {
    pub agent: String,
    pub owner: Option<String>,
    pub session: Option<String>,
    pub statuses: Vec<Status>,
    /// Of runs that wait: whether they, or runs below them, wait for input of a person.
    pub waits_for_input: Option<bool>,
    pub since: Option<Timestamp>,
    /// Only runs after this one in the list (the cursor).
    pub after: Option<ChangedRun>,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct ChangedPage {
    pub runs: Vec<ChangedRun>,
    pub has_more: bool,
    /// The number of runs that match, on all pages.
    pub total: u64,
}

impl<E: Engine> ChangedRuns for E {
    fn changed_runs(&self, query: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move { page(db, &query).await })
        })
    }
}

async fn page(db: &Reader, query: &ChangedQuery) -> StoreResult<ChangedPage> {
    let mut page = ChangedPage::default();
    if query.statuses.is_empty() {
        return Ok(page);
    }
    let params = params! {
        ":agent": &query.agent,
        ":owner": query.owner.as_ref(),
        ":session": query.session.as_deref().map(free_text),
        ":since": query.since.map(|since| since.as_millisecond()),
        ":after_at": query.after.map(|after| after.at.as_millisecond()),
        ":after_run": query.after.map(|after| after.run),
        ":limit": signed(query.limit as u64).saturating_add(1),
    };
    let add = |row: &Row<'_>| {
        page.total = row.get("total")?;
        // A page without runs has one row with the total.
        if let Some(run) = row.get("id")? {
            let at = row.get("at")?;
            page.runs.push(ChangedRun { at, run });
        }
        Ok(())
    };
    db.query(&sql(query), params, add).await?;
    page.has_more = page.runs.len() > query.limit;
    page.runs.truncate(query.limit);
    Ok(page)
}

fn sql(query: &ChangedQuery) -> String {
    let statuses = query.statuses.iter();
    let branches: Vec<String> = statuses.map(|status| branch(*status, query)).collect();
    let after = match query.after {
        Some(_) => "WHERE (c.at, c.id) < (:after_at, :after_run)",
        None => "",
    };
    // SQLite reads the entries twice, which costs less than to keep them.
    format!(
        "WITH c AS {{NOT |}}MATERIALIZED (SELECT b.id, b.at FROM ({}) b) \
         SELECT t.total, p.id, p.at FROM (SELECT count(*) AS total FROM c) t \
         LEFT JOIN (SELECT c.id, c.at FROM c {after} ORDER BY c.at DESC, c.id DESC LIMIT :limit) p ON true \
         ORDER BY p.at DESC, p.id DESC",
        branches.join(" UNION ALL ")
    )
}

fn branch(status: Status, query: &ChangedQuery) -> String {
    let (at, index, is_ended) = match status.is_terminal() {
        true => (
            "r.finished_at",
            match (&query.session, &query.owner) {
                (Some(_), _) => "runs_session",
                (None, Some(_)) => "runs_finished_by_owner",
                (None, None) => "runs_finished_by_agent",
            },
            "r.finished_at IS NOT NULL",
        ),
        false => (
            "coalesce(r.waiting_since, r.started_at, r.created_at)",
            "runs_unfinished",
            "r.finished_at IS NULL",
        ),
    };
    let mut sql = format!(
        "SELECT r.id, {at} AS at FROM runs r {{INDEXED BY {index}|}} WHERE {is_ended} AND {{r.child = 0|NOT r.child}} AND r.agent = :agent \
         AND r.status = '{}' AND {{(NOT EXISTS (SELECT 1 FROM deletions) OR |}}NOT EXISTS \
         (SELECT 1 FROM deletions d WHERE d.root = r.id){{)|}}",
        status.as_str()
    );
    // A condition that can be false only for some values of a parameter would hide the index from the planner.
    if query.owner.is_some() {
        sql += " AND r.owner IS NOT NULL AND r.owner = :owner";
    }
    if query.session.is_some() {
        sql += " AND r.session IS NOT NULL AND r.session = :session";
    }
    if query.since.is_some() {
        sql += &format!(" AND {at} >= :since");
    }
    match query.waits_for_input {
        Some(true) if status == Status::Waiting => {
            sql += concat!(
                " AND EXISTS (SELECT 1 FROM inputs a WHERE a.root = r.id AND ",
                is_of_person!(),
                ")"
            );
        }
        Some(false) if status == Status::Waiting => {
            sql += concat!(
                " AND NOT EXISTS (SELECT 1 FROM inputs a WHERE a.root = r.id AND ",
                is_of_person!(),
                ")"
            );
        }
        _ => {}
    }
    sql
}
