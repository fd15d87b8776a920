//! Lists sessions.

use tokio_postgres::Row;

use crate::store::encoding::integers::signed;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sessions::{SessionListQuery, SessionPage, SessionRecord};
use crate::store::sql::value::{free_text, params};

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

/// Finds the names by skipping along an index, and then the runs of each. The columns are compared as one, so that the server
/// does not read all runs in the order of their ids.
fn list_sql(query: &SessionListQuery) -> String {
    // Those of one owner are together in one index; the other one has the sessions of all.
    let (columns, owner, is_visible) = match query.owner {
        Some(_) => ("r.owner, r.session", ":owner, ", "true"),
        None => ("r.session", "", "r.owner IS NULL"),
    };
    let order = columns.replace(',', " DESC,");
    let runs = format!(
        "runs r WHERE r.session IS NOT NULL AND {is_visible} \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)"
    );
    let next = |after: &str| {
        format!(
            "SELECT r.session, r.owner FROM {runs} AND ({columns}) > ({owner}{after}) ORDER BY {columns} LIMIT 1"
        )
    };
    let (first, following) = (next(":after"), next("names.name"));
    let of_session = format!("{runs} AND ({columns}) = ({owner}p.name)");
    format!(
        "WITH RECURSIVE names (name, owner) AS (({first}) UNION ALL SELECT n.session, n.owner FROM names \
         CROSS JOIN LATERAL ({following}) n WHERE names.owner IS NOT DISTINCT FROM :owner::text) \
         SELECT p.name, (SELECT count(*) FROM {of_session}) AS runs, \
         l.id AS last, l.agent, f.created_at, coalesce(l.finished_at, l.created_at) AS updated_at \
         FROM (SELECT name FROM names WHERE owner IS NOT DISTINCT FROM :owner::text LIMIT :limit) p \
         CROSS JOIN LATERAL (SELECT r.created_at FROM {runs} \
         AND ({columns}, r.id) >= ({owner}p.name, '00000000-0000-0000-0000-000000000000') \
         ORDER BY {columns}, r.id LIMIT 1) f \
         CROSS JOIN LATERAL (SELECT r.id, r.agent, r.finished_at, r.created_at FROM {runs} \
         AND ({columns}, r.id) <= ({owner}p.name, 'ffffffff-ffff-ffff-ffff-ffffffffffff') \
         ORDER BY {order} DESC, r.id DESC LIMIT 1) l ORDER BY p.name"
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
