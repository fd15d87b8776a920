//! Why a request to a server has no result, and whether it may be sent again.

use rmcp::model::{ErrorCode, ErrorData};

use crate::tools::Effect;

/// A server that cannot be reached now. The text is for the model.
#[derive(Debug, thiserror::Error)]
#[error("MCP server \"{server}\" is not available: {reason}")]
pub struct ServerUnavailable {
    pub server: String,
    pub reason: String,
}

/// Why a request has no result.
#[derive(Debug)]
pub enum RequestError {
    /// There is no connection to send it on.
    Unavailable(ServerUnavailable),
    Failed(RequestFailure),
}

impl From<ServerUnavailable> for RequestError {
    fn from(error: ServerUnavailable) -> Self {
        Self::Unavailable(error)
    }
}

impl From<RequestFailure> for RequestError {
    fn from(failure: RequestFailure) -> Self {
        Self::Failed(failure)
    }
}

/// A request that was sent, or could be, and has no result.
#[derive(Debug)]
pub struct RequestFailure {
    /// For the model, without any secret.
    pub reason: String,
    /// Whether it may be sent once more.
    pub retry: RetrySafety,
}

/// Whether a request may be sent once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetrySafety {
    /// It was surely not performed.
    Always,
    /// It may have been performed.
    IfReadOnly,
    /// It was answered, refused for good, or took too long.
    Never,
}

impl RetrySafety {
    /// Whether a call with this effect may be made once more.
    pub fn allows_retry(self, effect: Effect) -> bool {
        match self {
            Self::Always => true,
            Self::IfReadOnly => effect == Effect::ReadOnly,
            Self::Never => false,
        }
    }
}

/// No server sends it: JSON-RPC's own codes and those of MCP are far above.
const CONNECTION_ERROR: ErrorCode = ErrorCode(i32::MIN);

/// An error that stands in for an answer that did not come.
pub fn connection_error(reason: String) -> ErrorData {
    ErrorData::new(CONNECTION_ERROR, reason, None)
}

/// Whether an error stands in for an answer that did not come.
pub fn is_connection_error(error: &ErrorData) -> bool {
    error.code == CONNECTION_ERROR
}
