//! Lists an agent's root runs by the time of their last change of status.

use crate::domain::run::Status;
use crate::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRun};
use crate::store::encoding::integers::{signed, unsigned};
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::{free_text, params};

pub async fn list(db: &Reader, query: &ChangedQuery) -> StoreResult<ChangedPage> {
    if query.statuses.is_empty() {
        return Ok(ChangedPage::default());
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
    let found = db.rows(&sql(query), params).await?;
    let mut page = ChangedPage::default();
    for row in &found {
        page.total = rows::get(row, "total").map(unsigned)?;
        // A page without runs has one row with the total.
        let Some(run) = rows::optional_id(row, "id")? else {
            break;
        };
        let at = rows::time(row, "at")?.unwrap_or_default();
        page.runs.push(ChangedRun { at, run });
    }
    page.has_more = page.runs.len() > query.limit;
    page.runs.truncate(query.limit);
    Ok(page)
}

fn sql(query: &ChangedQuery) -> String {
    let branches: Vec<String> = query
        .statuses
        .iter()
        .map(|status| branch(*status, query))
        .collect();
    format!(
        "WITH c AS MATERIALIZED (SELECT b.id, b.at FROM ({}) b WHERE :since::bigint IS NULL OR b.at >= :since) \
         SELECT t.total, p.id, p.at FROM (SELECT count(*) AS total FROM c) t \
         LEFT JOIN (SELECT c.id, c.at FROM c WHERE :after_at::bigint IS NULL OR (c.at, c.id) < (:after_at, :after_run) \
         ORDER BY c.at DESC, c.id DESC LIMIT :limit) p ON true ORDER BY p.at DESC, p.id DESC",
        branches.join(" UNION ALL ")
    )
}

fn branch(status: Status, query: &ChangedQuery) -> String {
    let (at, is_ended) = match status.is_terminal() {
        true => ("r.finished_at", "r.finished_at IS NOT NULL"),
        false => (
            "coalesce(r.waiting_since, r.started_at, r.created_at)",
            "r.finished_at IS NULL",
        ),
    };
    let approval = match query.waits_for_approval {
        Some(true) if status == Status::Waiting => {
            "AND EXISTS (SELECT 1 FROM approvals a WHERE a.root = r.id)"
        }
        Some(false) if status == Status::Waiting => {
            "AND NOT EXISTS (SELECT 1 FROM approvals a WHERE a.root = r.id)"
        }
        _ => "",
    };
    // A condition that can be false only for some values of a parameter would hide the index from the planner.
    let owner = match query.owner {
        Some(_) => "r.owner = :owner",
        None => ":owner::text IS NULL",
    };
    let session = match query.session {
        Some(_) => "r.session = :session",
        None => ":session::bytea IS NULL",
    };
    format!(
        "SELECT r.id, {at} AS at FROM runs r WHERE {is_ended} AND NOT r.child AND r.agent = :agent AND r.status = '{}' \
         AND {owner} AND {session} {approval} AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id)",
        status.as_str()
    )
}
