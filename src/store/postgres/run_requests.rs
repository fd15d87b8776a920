//! The contract for requests to runs that another node drives, by the table of requests.

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::domain::node::NodeId;
use crate::store::StoreError;
use crate::store::cluster::TreeOwners;
use crate::store::engine::Engine;
use crate::store::new_request::{NewRequest, RequestContent, RequestId};
use crate::store::postgres::PostgresStore;
use crate::store::reader::{ReadMode, Reader};
use crate::store::run_requests::{OpenRequest, RequestChange, RequestState, RunRequests};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::params;
use crate::store::write_queue::job::Task;

/// The first open request of each kind to each tree.
const OPEN_REQUESTS: &str = "SELECT id, run, root, asker, kind, is_taken FROM (SELECT DISTINCT ON (r.root, r.kind) \
     r.id, r.number, r.run, r.root, r.asker, r.kind, r.is_taken FROM requests r JOIN trees t ON t.root = r.root \
     WHERE t.node = :node AND r.answer IS NULL ORDER BY r.root, r.kind, r.number) first ORDER BY number LIMIT 256";
const CONTENT: &str = "SELECT body, blobs FROM requests WHERE id = :id";
const STATE: &str = "SELECT is_taken, answer FROM requests WHERE id = :id";

impl RunRequests for PostgresStore {
    fn add_request(&self, request: NewRequest) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let change = RequestChange::Add(Box::new(request));
            self.change_request(change).await.map(drop)
        })
    }

    fn open_requests(&self) -> BoxFuture<'_, Result<Vec<OpenRequest>, StoreError>> {
        let node = self.node();
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                db.query(OPEN_REQUESTS, params! {":node": node.0}, open_request)
                    .await
            })
        })
    }

    fn take_request(
        &self,
        id: RequestId,
    ) -> BoxFuture<'_, Result<Option<RequestContent>, StoreError>> {
        Box::pin(async move {
            if !self.change_request(RequestChange::Take(id)).await? {
                return Ok(None);
            }
            self.read(ReadMode::Statement, move |db| Box::pin(content(db, id)))
                .await
        })
    }

    fn answer_request(
        &self,
        id: RequestId,
        answer: Vec<u8>,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.change_request(RequestChange::Answer(id, answer)))
    }

    fn request_state(&self, id: RequestId) -> BoxFuture<'_, Result<RequestState, StoreError>> {
        self.read(ReadMode::Statement, move |db| Box::pin(state(db, id)))
    }

    fn withdraw_request(&self, id: RequestId) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.change_request(RequestChange::Withdraw(id)))
    }

    fn void_request(&self, request: OpenRequest) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let change = RequestChange::Void(Box::new(request));
            self.change_request(change).await.map(drop)
        })
    }

    fn delete_request(&self, id: RequestId) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let deleted = self.change_request(RequestChange::Delete(id)).await;
            deleted.map(drop)
        })
    }

    fn trim_requests(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.change_request(RequestChange::Trim).await.map(drop) })
    }
}

impl PostgresStore {
    /// Whether it changed a row.
    async fn change_request(&self, change: RequestChange) -> Result<bool, StoreError> {
        let node = self.node();
        self.queue
            .is_positive(Task::ChangeRequest(node, change))
            .await
    }
}

fn open_request(row: &Row<'_>) -> StoreResult<OpenRequest> {
    Ok(OpenRequest {
        id: RequestId(row.get("id")?),
        run: row.get("run")?,
        root: row.get("root")?,
        asker: NodeId(row.get("asker")?),
        kind: row.get("kind")?,
        is_taken: row.get("is_taken")?,
    })
}

async fn content(db: &Reader, id: RequestId) -> StoreResult<Option<RequestContent>> {
    let content = |row: &Row<'_>| {
        let blobs: Vec<Vec<u8>> = row.list("blobs")?;
        Ok(RequestContent {
            body: row.get("body")?,
            blobs: blobs.into_iter().map(Bytes::from).collect(),
        })
    };
    db.first(CONTENT, params! {":id": id.0}, content).await
}

async fn state(db: &Reader, id: RequestId) -> StoreResult<RequestState> {
    let state = |row: &Row<'_>| {
        Ok(match row.get("answer")? {
            Some(answer) => RequestState::Answered(answer),
            None => RequestState::Open {
                is_taken: row.get("is_taken")?,
            },
        })
    };
    let found = db.first(STATE, params! {":id": id.0}, state).await?;
    Ok(found.unwrap_or(RequestState::Gone))
}
