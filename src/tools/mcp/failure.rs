//! Why a request has no result, and whether it may be sent once more. Knows no connection.

use rmcp::model::{ErrorCode, ErrorData};

use crate::tools::Effect;

/// A request without a result.
#[derive(Debug)]
pub struct Failure {
    /// For the model, without any secret.
    pub why: String,
    /// Whether it may be sent once more.
    pub repeat: Repeat,
}

/// Whether a request may be sent once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// It was surely not performed.
    Always,
    /// It may have been performed.
    IfSafe,
    /// It was answered, refused for good, or took too long.
    Never,
}

impl Repeat {
    /// Whether a call with this effect may be made once more.
    pub fn allows(self, effect: Effect) -> bool {
        match self {
            Self::Always => true,
            Self::IfSafe => effect == Effect::Reads,
            Self::Never => false,
        }
    }
}

/// No server sends it: JSON-RPC's own codes and those of MCP are far above.
const BROKEN: ErrorCode = ErrorCode(i32::MIN);

/// An error that stands in for an answer that did not come.
pub fn broken(why: String) -> ErrorData {
    ErrorData::new(BROKEN, why, None)
}

/// Whether an error stands in for an answer that did not come.
pub fn is_broken(error: &ErrorData) -> bool {
    error.code == BROKEN
}
