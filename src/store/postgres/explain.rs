//! Why a write was refused, found after its transaction was rolled back.

use tokio_postgres::Error;
use uuid::Uuid;

use crate::domain::run::{RunId, now};
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::postgres::commit::WriterState;
use crate::store::postgres::connection::{Connection, Query};
use crate::store::postgres::statements::Sql;
use crate::store::sql::value::{free_text, values};
use crate::store::{Change, ClaimedRun, IdempotencyClaim, StoreError};

/// What a refused write is for its caller.
pub enum Explanation {
    /// It is to be ignored with its events.
    Ignored,
    /// Its tree has ended with its root, although a run of it has not.
    TreeEnded,
    Rejected(StoreError),
}

/// What the run and its tree were when the write was refused.
struct Refused {
    node: Option<Uuid>,
    epoch: Option<i64>,
    /// Whether the run exists.
    is_found: bool,
    has_ended: bool,
    is_cancelling: bool,
}

pub async fn explain(
    db: &Connection,
    state: &WriterState,
    write: &EncodedWrite,
) -> Result<Explanation, Error> {
    let creates_root = write.run == write.root && matches!(write.change, Change::Create(_));
    let values = values! {":root": write.root, ":run": write.run};
    let found = db
        .execute(&Query::new(Sql::ExplainWrite, values.into()))
        .await?;
    let refused = match found.rows.first() {
        Some(row) => {
            let status: Option<String> = row.try_get("status")?;
            Refused {
                node: row.try_get("node")?,
                epoch: row.try_get("epoch")?,
                is_found: status.is_some(),
                has_ended: row.try_get::<_, Option<i64>>("finished_at")?.is_some(),
                is_cancelling: status.as_deref() == Some("cancelling"),
            }
        }
        None if creates_root => Refused {
            node: None,
            epoch: None,
            is_found: false,
            has_ended: false,
            is_cancelling: false,
        },
        None => return Ok(Explanation::Rejected(StoreError::RunNotFound(write.root))),
    };
    if let Some(claim) = claim(&write.change)
        && let Some(claimed) = find_claim(db, claim).await?
    {
        return Ok(Explanation::Rejected(StoreError::AlreadyClaimed(claimed)));
    }
    if let Change::Create(new_run) = &write.change
        && let Some(source) = new_run.run.fork.as_ref().and_then(|fork| fork.from)
    {
        let source = source.run;
        let exists = Query::new(Sql::HasRoot, values! {":id": source}.into());
        if db.execute(&exists).await?.affected == 0 {
            return Ok(Explanation::Rejected(StoreError::SourceDeleted(source)));
        }
    }
    if creates_root && !is_removed(db, state).await? {
        return Ok(Explanation::Rejected(StoreError::SessionChanged));
    }
    let epoch = state.trees.get(&write.root).copied();
    let is_owned = refused.node == Some(state.node.0) && refused.epoch == epoch;
    let has_tree = refused.epoch.is_some();
    if creates_root || (has_tree && !is_owned) {
        // A new root is refused only if the node was replaced. A tree without a node was left to others.
        return Ok(Explanation::Rejected(StoreError::Fenced));
    }
    let is_create = matches!(write.change, Change::Create(_));
    if !has_tree && (is_create || refused.is_found && !refused.has_ended) {
        return Ok(Explanation::TreeEnded);
    }
    Ok(refused.explain(write))
}

impl Refused {
    fn explain(&self, write: &EncodedWrite) -> Explanation {
        let is_changeable = self.is_found && !self.has_ended && !self.is_cancelling;
        if !self.is_found {
            return Explanation::Rejected(StoreError::RunNotFound(write.run));
        }
        let error = match write.change {
            Change::RequestCancel { .. } => return Explanation::Ignored,
            Change::Hold | Change::Release if is_changeable => return Explanation::Ignored,
            Change::AddMessage(_) if is_changeable => StoreError::MessagesChanged(write.run),
            Change::Finish(_) if !self.has_ended => StoreError::MessagesChanged(write.run),
            _ => StoreError::AlreadyTerminal(write.run),
        };
        Explanation::Rejected(error)
    }
}

/// Whether other nodes have removed this one.
pub async fn is_removed(db: &Connection, state: &WriterState) -> Result<bool, Error> {
    Ok(db.execute(&state.guard()).await?.affected == 0)
}

fn claim(change: &Change) -> Option<&IdempotencyClaim> {
    match change {
        Change::Create(new_run) => new_run.claim.as_ref(),
        other => other.request_claim().map(|(claim, _)| claim),
    }
}

async fn find_claim(
    db: &Connection,
    claim: &IdempotencyClaim,
) -> Result<Option<ClaimedRun>, Error> {
    let key = &claim.key;
    let values = values! {
        ":credential": &key.credential,
        ":route": &key.route,
        ":key": free_text(&key.key),
        ":now": now().as_millisecond(),
    };
    let found = db
        .execute(&Query::new(Sql::FindClaim, values.into()))
        .await?;
    let Some(row) = found.rows.first() else {
        return Ok(None);
    };
    let body: Vec<u8> = row.try_get("body")?;
    let number: Option<i64> = row.try_get("message")?;
    Ok(Some(ClaimedRun {
        run: RunId(row.try_get("run")?),
        body_hash: body.try_into().unwrap_or_default(),
        number: number.and_then(|number| u32::try_from(number).ok()),
    }))
}
