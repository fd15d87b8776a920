//! How a connection ends, and why it did.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

use crate::domain::message::shorten;
use crate::tools::mcp::oauth::token::IssuedSecrets;
use crate::tools::mcp::secrets::Secrets;
use crate::tools::mcp::stderr::StderrTail;

const MAX_REASON_CHARS: usize = 1500;

/// Ends a connection, and holds the reason why it ended.
#[derive(Clone, Default)]
pub struct CloseState {
    pub stop: CancellationToken,
    /// Takes no more calls; calls in flight may finish.
    pub retired: CancellationToken,
    /// The transport has ended.
    pub lost: CancellationToken,
    pub reason: CloseReason,
    pub secrets: Secrets,
    /// Access tokens, which change while the connection is open.
    pub issued: Option<Arc<IssuedSecrets>>,
    pub tail: StderrTail,
}

/// Why a connection ended. The text follows `MCP server "x" is not available:`. The first reason is kept.
pub type CloseReason = Arc<OnceLock<String>>;

impl CloseState {
    /// The result of a tool without secrets.
    pub fn redact_result(&self, text: String) -> String {
        let text = self.secrets.redact_result(text);
        match &self.issued {
            Some(issued) => issued.redact(text),
            None => text,
        }
    }

    /// The text without secrets, on one line and of a bounded length.
    pub fn redact(&self, text: &str) -> String {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let line = self.secrets.redact(&line);
        let line = match &self.issued {
            Some(issued) => issued.redact(line),
            None => line,
        };
        shorten(&line, MAX_REASON_CHARS)
    }
}
