//! What waits for people. The store keeps it together with the events that request and
//! decide them.

use std::ops::ControlFlow;

use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::domain::input::InputKind;
use crate::domain::run::{PendingInput, RunId};
use crate::store::StoreError;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};

/// Most calls that [`Run::pending_inputs`] has; the list has all.
///
/// [`Run::pending_inputs`]: crate::domain::run::Run::pending_inputs
pub const MAX_RUN_INPUTS: usize = 100;

pub trait InputIndex: Send + Sync + 'static {
    /// A page of the pending inputs, by age of their runs.
    fn pending_inputs(&self, query: InputQuery) -> BoxFuture<'_, Result<InputPage, StoreError>>;
}

/// A condition: a person has to give the input `a`.
macro_rules! is_of_person {
    () => {
        "a.kind IN ('approval', 'question')"
    };
}
pub(crate) use is_of_person;

/// Selects the calls of a page. Conditions that are `None` match every call.
#[derive(Clone, Debug, Default)]
pub struct InputQuery {
    /// The API key that has accepted the root.
    pub owner: Option<String>,
    /// `None` for all that people have to give.
    pub kind: Option<InputKind>,
    /// Only calls of this root's tree.
    pub root: Option<RunId>,
    /// Only calls of runs that were created after this one (the cursor).
    pub after: Option<RunId>,
    /// The page ends with the run that reaches this number of calls.
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub struct InputPage {
    pub inputs: Vec<PendingInput>,
    /// [`InputQuery::after`] of the next page; `None` if no more calls wait.
    pub next: Option<RunId>,
}

impl<E: Engine> InputIndex for E {
    fn pending_inputs(&self, query: InputQuery) -> BoxFuture<'_, Result<InputPage, StoreError>> {
        self.read(ReadMode::Snapshot, move |db| {
            Box::pin(async move { page(db, &query).await })
        })
    }
}

/// A page of the calls that wait, by age of their runs. All calls of a run are on one page.
async fn page(db: &Reader, query: &InputQuery) -> StoreResult<InputPage> {
    // A root's tree has one owner.
    let filter = match (query.root, &query.owner) {
        (Some(_), None) => "a.root = :root",
        (Some(_), Some(_)) => "a.root = :root AND a.owner = :owner",
        (None, Some(_)) => "a.owner = :owner AND a.owner IS NOT NULL",
        (None, None) => "true",
    };
    let kind = match query.kind {
        Some(_) => "a.kind = :kind",
        None => is_of_person!(),
    };
    // SQLite's reader stops by itself.
    let sql = format!(
        "SELECT p.* FROM (SELECT a.run, a.seq, a.root, a.request, r.agent FROM inputs a {{CROSS |}}JOIN runs r ON r.id = a.run \
         WHERE {filter} AND {kind} AND a.run > :after AND r.status IN ('running', 'waiting') \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) \
         ORDER BY a.run{{, a.seq| FETCH FIRST :limit ROWS WITH TIES}}) p ORDER BY p.run, p.seq"
    );
    let params = |after: Option<RunId>, limit: usize| {
        [
            (":after", after.map_or(Uuid::nil(), |id| id.0).into()),
            (":root", query.root.into()),
            (":owner", query.owner.as_ref().into()),
            (":kind", query.kind.map(InputKind::as_str).into()),
            (":limit", signed(limit as u64).into()),
        ]
    };
    let mut page = InputPage::default();
    let (mut found, mut last) = (0, None);
    let add = |row: &Row<'_>| {
        let run: RunId = row.get("run")?;
        if page.inputs.len() >= query.limit && last != Some(run) {
            page.next = last;
            return Ok(ControlFlow::Break(()));
        }
        found += 1;
        last = Some(run);
        page.inputs.extend(pending_input(row)?);
        Ok(ControlFlow::Continue(()))
    };
    let first = params(query.after, query.limit.saturating_add(1));
    db.for_each(&sql, &first, add).await?;
    // All that was found belongs to the page, so it is not known yet whether there is more.
    if page.next.is_none() && found > query.limit && db.exists(&sql, &params(last, 1)).await? {
        page.next = last;
    }
    Ok(page)
}

/// `None` if the row is damaged, which hides no others.
fn pending_input(row: &Row<'_>) -> StoreResult<Option<PendingInput>> {
    let Ok(Some(request)) = row.json("request") else {
        return Ok(None);
    };
    Ok(Some(PendingInput {
        run_id: row.get("run")?,
        root_id: row.get("root")?,
        agent: row.get("agent")?,
        request,
    }))
}
