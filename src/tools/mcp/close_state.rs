//! How a connection ends, and why it did.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

use crate::domain::message::shorten;
use crate::tools::mcp::secrets::Secrets;
use crate::tools::mcp::stderr::StderrTail;

/// Most characters of a reason.
const MAX_REASON_CHARS: usize = 1500;

/// How a connection is ended, and why it did.
#[derive(Clone, Default)]
pub struct CloseState {
    pub stop: CancellationToken,
    /// Takes no more calls: those at work may end.
    pub retired: CancellationToken,
    pub reason: CloseReason,
    pub secrets: Secrets,
    pub tail: StderrTail,
}

/// Why a connection ended, in words that follow `MCP server "x" is not available:`; the first reason stands.
pub type CloseReason = Arc<OnceLock<String>>;

impl CloseState {
    /// As it may be told: without secrets, on one line, of a bounded length.
    pub fn redact(&self, text: &str) -> String {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        shorten(&self.secrets.redact(&line), MAX_REASON_CHARS)
    }
}
