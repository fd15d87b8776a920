//! The contract for requests to runs that another node drives, by the table of requests.

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::domain::node::NodeId;
use crate::store::StoreError;
use crate::store::cluster::TreeOwners;
use crate::store::new_request::{NewRequest, RequestContent, RequestId};
use crate::store::postgres::PostgresStore;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::run_requests::{OpenRequest, RequestChange, RequestState, RunRequests};
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
        Box::pin(self.readers.read(move |db| {
            Box::pin(async move {
                let found = db.rows(OPEN_REQUESTS, params! {":node": node.0}).await?;
                found.iter().map(open_request).collect()
            })
        }))
    }

    fn take_request(
        &self,
        id: RequestId,
    ) -> BoxFuture<'_, Result<Option<RequestContent>, StoreError>> {
        Box::pin(async move {
            if !self.change_request(RequestChange::Take(id)).await? {
                return Ok(None);
            }
            self.readers.read(move |db| Box::pin(content(db, id))).await
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
        Box::pin(self.readers.read(move |db| Box::pin(state(db, id))))
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

fn open_request(row: &tokio_postgres::Row) -> StoreResult<OpenRequest> {
    Ok(OpenRequest {
        id: RequestId(rows::get(row, "id")?),
        run: rows::id(row, "run")?,
        root: rows::id(row, "root")?,
        asker: NodeId(rows::get(row, "asker")?),
        kind: rows::required_text(row, "kind")?,
        is_taken: rows::get(row, "is_taken")?,
    })
}

async fn content(db: &Reader, id: RequestId) -> StoreResult<Option<RequestContent>> {
    let Some(row) = db.row(CONTENT, params! {":id": id.0}).await? else {
        return Ok(None);
    };
    let blobs: Vec<Vec<u8>> = rows::get(&row, "blobs")?;
    Ok(Some(RequestContent {
        body: rows::get(&row, "body")?,
        blobs: blobs.into_iter().map(Bytes::from).collect(),
    }))
}

async fn state(db: &Reader, id: RequestId) -> StoreResult<RequestState> {
    let Some(row) = db.row(STATE, params! {":id": id.0}).await? else {
        return Ok(RequestState::Gone);
    };
    let answer: Option<Vec<u8>> = rows::get(&row, "answer")?;
    Ok(match answer {
        Some(answer) => RequestState::Answered(answer),
        None => RequestState::Open {
            is_taken: rows::get(&row, "is_taken")?,
        },
    })
}
