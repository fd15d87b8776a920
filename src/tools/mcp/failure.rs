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

/// A request that has no result although a connection was open.
#[derive(Debug)]
pub struct RequestFailure {
    /// For the model, without any secret.
    pub reason: String,
    pub retry: RetrySafety,
}

/// Whether a request may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetrySafety {
    /// It was certainly not executed.
    Always,
    /// It may have been executed, and its answer is no result.
    IfReadOnly,
    /// It may have been executed: the connection broke before its answer.
    EndUnknown,
    /// It was answered, rejected for good, or took too long.
    Never,
}

impl RetrySafety {
    pub fn allows_retry(self, effect: Effect) -> bool {
        match self {
            Self::Always => true,
            Self::IfReadOnly | Self::EndUnknown => effect == Effect::ReadOnly,
            Self::Never => false,
        }
    }
}

/// No server sends this code: those of JSON-RPC and MCP are far above.
const CONNECTION_ERROR: ErrorCode = ErrorCode(i32::MIN);

/// A local error in place of an answer that did not arrive.
pub fn connection_error(reason: String) -> ErrorData {
    ErrorData::new(CONNECTION_ERROR, reason, None)
}

/// Whether this is a local error in place of an answer that did not arrive.
pub fn is_connection_error(error: &ErrorData) -> bool {
    error.code == CONNECTION_ERROR
}
