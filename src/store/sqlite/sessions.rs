//! Lists sessions, and removes a session's name from its runs.

use jiff::Timestamp;
use rusqlite::{Connection, Row, named_params};

use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::encoding::integers;
use crate::store::sessions::{SessionListQuery, SessionPage, SessionRecord};
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;
use crate::store::sqlite::statements::Statements;
use crate::store::write_queue::job::ForgetProgress;

/// Runs that lose their session's name in one transaction.
const PART_RUNS: u32 = 256;

/// A page of sessions, sorted by name.
pub fn list(db: &Connection, query: &SessionListQuery) -> Result<SessionPage, StoreError> {
    read_list(db, query).map_err(store_error)
}

fn read_list(db: &Connection, query: &SessionListQuery) -> rusqlite::Result<SessionPage> {
    let mut next_name = db.prepare_cached(
        "SELECT session FROM runs INDEXED BY runs_session_names WHERE session IS NOT NULL \
         AND owner IS :owner AND session > :after ORDER BY session LIMIT 1",
    )?;
    let mut find_session = db.prepare_cached(
        "SELECT s.runs AS runs, l.id AS last, l.agent AS agent, f.created_at AS created_at, \
         coalesce(l.finished_at, l.created_at) AS updated_at FROM \
         (SELECT count(*) AS runs, min(id) AS first, max(id) AS last FROM runs r INDEXED BY runs_session_names \
         WHERE session IS NOT NULL AND owner IS :owner AND session = :name \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)) s \
         CROSS JOIN runs f ON f.id = s.first CROSS JOIN runs l ON l.id = s.last",
    )?;
    let mut page = SessionPage::default();
    let mut last = query.after.clone().unwrap_or_default();
    loop {
        let mut names = next_name.query(named_params! {":owner": query.owner, ":after": last})?;
        let Some(name) = names.next()?.map(|row| row.get("session")).transpose()? else {
            return Ok(page);
        };
        if page.sessions.len() >= query.limit {
            page.next = page.sessions.last().map(|it| it.name.clone());
            return Ok(page);
        }
        last = name;
        let mut found = find_session.query(named_params! {":owner": query.owner, ":name": last})?;
        // There is none if all runs of the session are being deleted.
        if let Some(row) = found.next()? {
            page.sessions.push(record(row, last.clone())?);
        }
    }
}

fn record(row: &Row<'_>, name: String) -> rusqlite::Result<SessionRecord> {
    let time = |column: &str| {
        let time = rows::time(row, column)?;
        Ok::<_, rusqlite::Error>(time.unwrap_or(Timestamp::UNIX_EPOCH))
    };
    Ok(SessionRecord {
        runs: integers::unsigned(row.get("runs")?),
        last_run: rows::id(row, "last")?,
        last_agent: row.get("agent")?,
        created_at: time("created_at")?,
        updated_at: time("updated_at")?,
        name,
    })
}

/// Removes a session's name from the oldest of its runs: the conversation is that of the last one, so it is either whole or
/// gone.
pub fn forget_part(
    sql: &mut Statements<'_>,
    owner: Option<&str>,
    name: &str,
) -> rusqlite::Result<ForgetProgress> {
    let runs: Vec<RunId> = sql
        .session_runs
        .query(named_params! {":owner": owner, ":session": name, ":limit": PART_RUNS})?
        .mapped(|row| rows::id(row, "id"))
        .collect::<rusqlite::Result<_>>()?;
    for run in &runs {
        sql.forget_session
            .execute(named_params! {":id": rows::id_bytes(run)})?;
    }
    Ok(match runs.len() {
        0 => ForgetProgress::NotFound,
        many if many == PART_RUNS as usize => ForgetProgress::More,
        _ => ForgetProgress::Done,
    })
}
