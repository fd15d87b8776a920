//! The tool calls that wait for approval. The table follows from the events: a request inserts a row, and the decision or
//! the end of the run removes it, each in the transaction of its event.

use rusqlite::{Connection, Row, named_params};

use crate::domain::run::{PendingApproval, Run, RunId};
use crate::store::StoreError;
use crate::store::approvals::MAX_RUN_APPROVALS;
use crate::store::encoding::approval_changes::ApprovalChange;
use crate::store::encoding::integers;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::rows;
use crate::store::sqlite::sql_parts::SUBTREE;
use crate::store::sqlite::statements::Statements;

/// Applies the changes of a write about a run. `first_seq` is the number of its first event.
pub fn apply(
    sql: &mut Statements<'_>,
    run: RunId,
    changes: &[ApprovalChange],
    first_seq: u64,
) -> rusqlite::Result<()> {
    let run = rows::id_bytes(&run);
    for change in changes {
        match change {
            ApprovalChange::Requested {
                index,
                call,
                request,
            } => sql.insert_approval.execute(named_params! {
                ":run": run,
                ":seq": integers::signed(first_seq + *index as u64),
                ":call": call,
                ":request": request,
            })?,
            ApprovalChange::Decided { call } => sql
                .delete_approval
                .execute(named_params! {":run": run, ":call": call})?,
        };
    }
    Ok(())
}

/// Whether any call waits for approval.
pub fn exist(db: &Connection) -> rusqlite::Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM approvals) AS found";
    db.query_row(sql, [], |row| row.get("found"))
}

/// What [`approval`] reads, from `approvals AS a` and its run `r`.
const COLUMNS: &str = "a.run AS run, a.root AS root, a.request AS request, r.agent AS agent";
/// Leaves out runs that are being cancelled.
const IS_UNDECIDED: &str = "r.status IN ('running', 'waiting')";

fn approval(row: &Row<'_>) -> rusqlite::Result<Option<PendingApproval>> {
    let request = row.get_ref("request")?.as_str()?;
    // A damaged row hides neither its run nor the others.
    let Ok(request) = serde_json::from_str(request) else {
        return Ok(None);
    };
    Ok(Some(PendingApproval {
        run_id: rows::id(row, "run")?,
        root_id: rows::id(row, "root")?,
        agent: row.get("agent")?,
        request,
    }))
}

/// The calls of a run and its descendants that wait, at most [`MAX_RUN_APPROVALS`].
pub fn of_run(db: &Connection, run: &Run) -> Result<Vec<PendingApproval>, StoreError> {
    if run.status.is_terminal() {
        return Ok(Vec::new());
    }
    let sql = match run.parent_id {
        None => format!(
            "SELECT {COLUMNS} FROM approvals a CROSS JOIN runs r ON r.id = a.run \
             WHERE a.root = :id AND {IS_UNDECIDED} ORDER BY a.run, a.seq LIMIT :limit"
        ),
        Some(_) => format!(
            "{SUBTREE} SELECT {COLUMNS} FROM tree CROSS JOIN approvals a ON a.run = tree.id \
             CROSS JOIN runs r ON r.id = a.run WHERE {IS_UNDECIDED} ORDER BY a.run, a.seq LIMIT :limit"
        ),
    };
    let mut sql = db.prepare_cached(&sql).map_err(store_error)?;
    let limit = integers::signed(MAX_RUN_APPROVALS as u64);
    let params = named_params! {":id": rows::id_bytes(&run.id), ":limit": limit};
    sql.query_map(params, approval)
        .and_then(|found| found.filter_map(Result::transpose).collect())
        .map_err(store_error)
}
