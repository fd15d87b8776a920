//! A request to a run that another node drives.

use bytes::Bytes;
use uuid::Uuid;

use crate::domain::run::RunId;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub Uuid);

impl RequestId {
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        Self(RunId::new().0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRequest {
    pub id: RequestId,
    pub run: RunId,
    pub root: RunId,
    /// Its name, such as `cancel`.
    pub kind: &'static str,
    pub content: RequestContent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestContent {
    /// JSON.
    pub body: Vec<u8>,
    /// The bytes of the pictures and files in it.
    pub blobs: Vec<Bytes>,
}
