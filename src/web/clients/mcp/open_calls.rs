//! Calls of clients of earlier versions, which cancel a call by a notification of its own instead of closing the request.

use std::collections::HashMap;
use std::sync::Arc;

use axum::http::HeaderMap;
use parking_lot::Mutex;
use rmcp::model::RequestId;
use tokio_util::sync::CancellationToken;

use crate::web::auth::Principal;

/// The header of the session that `initialize` names, which identifies a client of an earlier version.
pub const SESSION_HEADER: &str = "mcp-session-id";

/// Maximum characters of a session id that a client sends.
const MAX_SESSION: usize = 128;

/// The calls at work, by who made them. Only the server that answers a call can cancel it this way.
#[derive(Debug, Default)]
pub struct OpenCalls(Mutex<HashMap<CallKey, CancellationToken>>);

/// A request id is unique only within its client's session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallKey {
    owner: Option<String>,
    session: String,
    request: RequestId,
}

impl CallKey {
    /// `None` without a session.
    pub fn new(principal: &Principal, headers: &HeaderMap, request: RequestId) -> Option<Self> {
        let session = headers.get(SESSION_HEADER)?.to_str().ok()?;
        (session.len() <= MAX_SESSION).then(|| Self {
            owner: principal.key_name().map(str::to_owned),
            session: session.to_owned(),
            request,
        })
    }
}

impl OpenCalls {
    pub fn add(self: &Arc<Self>, key: CallKey) -> OpenCall {
        let cancelled = CancellationToken::new();
        self.0.lock().insert(key.clone(), cancelled.clone());
        OpenCall {
            calls: Arc::clone(self),
            key,
            cancelled,
        }
    }

    /// Does nothing if there is no such call.
    pub fn cancel(&self, key: &CallKey) {
        if let Some(cancelled) = self.0.lock().get(key) {
            cancelled.cancel();
        }
    }
}

/// A call at work; it is forgotten when this is dropped.
#[derive(Debug)]
pub struct OpenCall {
    calls: Arc<OpenCalls>,
    key: CallKey,
    pub cancelled: CancellationToken,
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.calls.0.lock().remove(&self.key);
    }
}
