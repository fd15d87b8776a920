//! The contract for requests to runs that another node drives: to cancel a run, to decide on a call, to add a message and the
//! like. A request is committed; the owner of the run's tree performs it and writes its answer.

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::new_request::{NewRequest, RequestContent, RequestId};

/// The answer to a request that is not performed: no change has it.
pub const NO_ANSWER: &[u8] = b"null";

pub trait RunRequests: Send + Sync + 'static {
    /// Commits a request. Nothing happens if it is there already.
    fn add_request(&self, request: NewRequest) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Requests without an answer to runs of trees that this node owns, in the order of their arrival; not all if there are
    /// many.
    fn open_requests(&self) -> BoxFuture<'_, Result<Vec<OpenRequest>, StoreError>>;

    /// Marks a request as taken, and returns what it says: this node performs it now. `None` if there is no such request
    /// without an answer, or if another node owns the tree.
    fn take_request(
        &self,
        id: RequestId,
    ) -> BoxFuture<'_, Result<Option<RequestContent>, StoreError>>;

    /// Writes the answer. Returns false if the request is gone, has an answer, or if another node owns the tree.
    fn answer_request(
        &self,
        id: RequestId,
        answer: Vec<u8>,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    fn request_state(&self, id: RequestId) -> BoxFuture<'_, Result<RequestState, StoreError>>;

    /// Removes a request that no node has taken; it will never be performed. Returns false if one has taken it.
    fn withdraw_request(&self, id: RequestId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Has no node perform a request that may be committed only later; does nothing if one has taken it.
    fn void_request(&self, request: OpenRequest) -> BoxFuture<'_, Result<(), StoreError>>;

    fn delete_request(&self, id: RequestId) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Removes requests of some minutes ago that have an answer, or whose trees have ended: nobody waits for them any more.
    fn trim_requests(&self) -> BoxFuture<'_, Result<(), StoreError>>;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    pub id: RequestId,
    pub run: RunId,
    pub root: RunId,
    /// The node that waits for the answer, unless it is gone.
    pub asker: NodeId,
    pub kind: String,
    /// Whether a node has taken it. If that is gone, it may have performed the request.
    pub is_taken: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestState {
    Open {
        is_taken: bool,
    },
    /// JSON.
    Answered(Vec<u8>),
    /// It was removed.
    Gone,
}

/// What changes the table of requests.
#[derive(Debug)]
pub enum RequestChange {
    Add(Box<NewRequest>),
    Void(Box<OpenRequest>),
    Take(RequestId),
    Answer(RequestId, Vec<u8>),
    Withdraw(RequestId),
    Delete(RequestId),
    Trim,
}

impl RequestChange {
    /// About how many bytes it writes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Add(request) => {
                let blobs = request.content.blobs.iter().map(Bytes::len);
                request.content.body.len() + blobs.sum::<usize>()
            }
            Self::Answer(_, answer) => answer.len(),
            Self::Void(_) | Self::Take(_) | Self::Withdraw(_) | Self::Delete(_) | Self::Trim => 0,
        }
    }
}
