//! Pages of the tool calls that wait for approval.

use tokio_postgres::Row;
use uuid::Uuid;

use crate::domain::run::{PendingApproval, RunId};
use crate::store::approvals::{ApprovalPage, ApprovalQuery};
use crate::store::encoding::integers::signed;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::params;

/// A page of the calls that wait, by age of their runs. All calls of a run are on one page.
pub async fn list(db: &Reader, query: &ApprovalQuery) -> StoreResult<ApprovalPage> {
    // A root's tree has one owner.
    let filter = match (query.root, &query.owner) {
        (Some(_), _) => "a.root = :root AND (:owner::text IS NULL OR a.owner = :owner)",
        (None, Some(_)) => "a.owner = :owner AND :root::uuid IS NULL",
        (None, None) => ":root::uuid IS NULL AND :owner::text IS NULL",
    };
    let sql = format!(
        "SELECT p.* FROM (SELECT a.run, a.seq, a.root, a.request, r.agent FROM approvals a JOIN runs r ON r.id = a.run \
         WHERE {filter} AND a.run > :after AND r.status IN ('running', 'waiting') \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) \
         ORDER BY a.run FETCH FIRST :limit ROWS WITH TIES) p ORDER BY p.run, p.seq"
    );
    let fetch = async |after: Option<RunId>, limit: usize| {
        let params = params! {
            ":after": after.map_or(Uuid::nil(), |id| id.0),
            ":root": query.root,
            ":owner": query.owner.as_ref(),
            ":limit": signed(limit as u64),
        };
        db.rows(&sql, params).await
    };
    let found = fetch(query.after, query.limit.saturating_add(1)).await?;
    let mut page = ApprovalPage::default();
    let mut last = None;
    for row in &found {
        let run = rows::id(row, "run")?;
        if page.approvals.len() >= query.limit && last != Some(run) {
            page.next = last;
            return Ok(page);
        }
        last = Some(run);
        page.approvals.extend(approval(row)?);
    }
    // All that was found belongs to the page, so it is not known yet whether there is more.
    if found.len() > query.limit && !fetch(last, 1).await?.is_empty() {
        page.next = last;
    }
    Ok(page)
}

/// `None` if the row is damaged, which hides no others.
fn approval(row: &Row) -> StoreResult<Option<PendingApproval>> {
    let Ok(Some(request)) = rows::json(row, "request") else {
        return Ok(None);
    };
    Ok(Some(PendingApproval {
        run_id: rows::id(row, "run")?,
        root_id: rows::id(row, "root")?,
        agent: rows::required_text(row, "agent")?,
        request,
    }))
}
