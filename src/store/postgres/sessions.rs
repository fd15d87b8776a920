//! Lists sessions.

use tokio_postgres::Row;

use crate::store::encoding::integers::signed;
use crate::store::postgres::reader_pool::Reader;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::postgres::sql::{free_text, params};
use crate::store::sessions::{SessionListQuery, SessionPage, SessionRecord};

/// A page of sessions, sorted by name.
pub async fn list(db: &Reader, query: &SessionListQuery) -> StoreResult<SessionPage> {
    let params = params! {
        ":owner": query.owner.as_ref(),
        ":after": free_text(query.after.as_deref().unwrap_or_default()),
        ":limit": signed(query.limit as u64).saturating_add(1),
    };
    let found = db.rows(&list_sql(query), params).await?;
    let sessions = found.iter().map(record).collect::<StoreResult<_>>()?;
    let mut page = SessionPage {
        sessions,
        next: None,
    };
    if page.sessions.len() > query.limit {
        page.sessions.truncate(query.limit);
        page.next = page.sessions.last().map(|it| it.name.clone());
    }
    Ok(page)
}

/// Finds the names by skipping along the index, and then the runs of each.
fn list_sql(query: &SessionListQuery) -> String {
    let runs = match query.owner {
        Some(_) => "runs r WHERE r.session IS NOT NULL AND r.owner = :owner",
        None => "runs r WHERE r.session IS NOT NULL AND r.owner IS NULL AND :owner::text IS NULL",
    };
    let runs = format!("{runs} AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)");
    format!(
        "WITH RECURSIVE names (name) AS ((SELECT r.session FROM {runs} AND r.session > :after ORDER BY r.session LIMIT 1) \
         UNION ALL SELECT n.session FROM names CROSS JOIN LATERAL \
         (SELECT r.session FROM {runs} AND r.session > names.name ORDER BY r.session LIMIT 1) n) \
         SELECT p.name, (SELECT count(*) FROM {runs} AND r.session = p.name) AS runs, \
         l.id AS last, l.agent, f.created_at, coalesce(l.finished_at, l.created_at) AS updated_at \
         FROM (SELECT name FROM names LIMIT :limit) p \
         CROSS JOIN LATERAL (SELECT r.created_at FROM {runs} AND r.session = p.name ORDER BY r.id LIMIT 1) f \
         CROSS JOIN LATERAL (SELECT r.id, r.agent, r.finished_at, r.created_at FROM {runs} AND r.session = p.name \
         ORDER BY r.id DESC LIMIT 1) l ORDER BY p.name"
    )
}

fn record(row: &Row) -> StoreResult<SessionRecord> {
    Ok(SessionRecord {
        name: rows::required_text(row, "name")?,
        runs: rows::count(row, "runs")?,
        last_run: rows::id(row, "last")?,
        last_agent: rows::required_text(row, "agent")?,
        created_at: rows::time(row, "created_at")?.unwrap_or_default(),
        updated_at: rows::time(row, "updated_at")?.unwrap_or_default(),
    })
}
