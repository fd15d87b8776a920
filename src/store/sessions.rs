//! Sessions. A session is the name that root runs share; it exists while a run has the name.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{free_text, params};

pub trait SessionIndex: Send + Sync + 'static {
    /// A page of a key's sessions, sorted by name.
    fn sessions(&self, query: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>>;

    /// Removes the name from all runs of a session: the runs stay. Of a long session several transactions each remove a
    /// part, oldest runs first. Returns false if there is no such session. The caller ensures that all its runs have ended
    /// and that no run enters it meanwhile.
    fn delete_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;
}

#[derive(Clone, Debug, Default)]
pub struct SessionListQuery {
    /// The API key that the sessions belong to; `None` without keys.
    pub owner: Option<String>,
    /// Only sessions whose names sort after this one (the cursor).
    pub after: Option<String>,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct SessionPage {
    pub sessions: Vec<SessionRecord>,
    /// [`SessionListQuery::after`] of the next page; `None` if there are no more sessions.
    pub next: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SessionRecord {
    pub name: String,
    /// The number of its runs.
    pub runs: u64,
    pub last_run: RunId,
    pub last_agent: String,
    /// When its first run was accepted, of those that are stored.
    pub created_at: Timestamp,
    /// When its last run ended or, if that has not ended, was accepted.
    pub updated_at: Timestamp,
}

/// The next name of a session in SQLite.
const NEXT_NAME: &str = "SELECT session FROM runs INDEXED BY runs_session_names WHERE session IS NOT NULL \
     AND owner IS :owner AND session > :after ORDER BY session LIMIT 1";
const FIND: &str = "SELECT :name AS name, s.runs AS runs, l.id AS last, l.agent AS agent, f.created_at AS created_at, \
     coalesce(l.finished_at, l.created_at) AS updated_at FROM \
     (SELECT count(*) AS runs, min(id) AS first, max(id) AS last FROM runs r INDEXED BY runs_session_names \
     WHERE session IS NOT NULL AND owner IS :owner AND session = :name \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)) s \
     CROSS JOIN runs f ON f.id = s.first CROSS JOIN runs l ON l.id = s.last";

impl<E: Engine> SessionIndex for E {
    fn sessions(&self, query: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move { page(db, &query).await })
        })
    }

    fn delete_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue().forget_session(owner, name)
    }
}

/// A page of sessions, sorted by name.
async fn page(db: &Reader, query: &SessionListQuery) -> StoreResult<SessionPage> {
    let mut sessions = match db {
        Reader::Sqlite(_) => list_by_name(db, query).await?,
        Reader::Postgres(_) => {
            let params = params! {
                ":owner": query.owner.as_ref(),
                ":after": free_text(query.after.as_deref().unwrap_or_default()),
                ":limit": signed(query.limit as u64).saturating_add(1),
            };
            db.query(&list_sql(query), params, record).await?
        }
    };
    let has_more = sessions.len() > query.limit;
    sessions.truncate(query.limit);
    let next = sessions.last().map(|it| it.name.clone());
    Ok(SessionPage {
        next: next.filter(|_| has_more),
        sessions,
    })
}

/// The sessions of a page and one more, one after the other.
async fn list_by_name(db: &Reader, query: &SessionListQuery) -> StoreResult<Vec<SessionRecord>> {
    let mut sessions = Vec::new();
    let mut last = query.after.clone().unwrap_or_default();
    while sessions.len() <= query.limit {
        let params = params! {":owner": query.owner.as_ref(), ":after": &last};
        let Some(name) = db
            .first(NEXT_NAME, params, |row| row.get("session"))
            .await?
        else {
            break;
        };
        last = name;
        let params = params! {":owner": query.owner.as_ref(), ":name": &last};
        // There is none if all runs of the session are being deleted.
        sessions.extend(db.first(FIND, params, record).await?);
    }
    Ok(sessions)
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

fn record(row: &Row<'_>) -> StoreResult<SessionRecord> {
    Ok(SessionRecord {
        name: row.get("name")?,
        runs: row.get("runs")?,
        last_run: row.get("last")?,
        last_agent: row.get("agent")?,
        created_at: row.get("created_at")?,
        updated_at: row.get("updated_at")?,
    })
}
