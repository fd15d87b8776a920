//! `[clients]`: which protocols of other people's clients the server speaks.

use std::time::Duration;

/// How long a run waits for a client's tool results by default.
const DEFAULT_TOOL_WAIT: Duration = Duration::from_secs(3600);

/// Each is on by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clients {
    /// The console at `/ui/`.
    pub console: bool,
    /// The API of OpenAI's clients below `/v1/`.
    pub openai: bool,
    /// The MCP server at `/mcp`.
    pub mcp: bool,
    /// A2A below `/a2a/`.
    pub a2a: bool,
    /// AG-UI at `/agents/{name}/ag-ui`.
    pub ag_ui: bool,
    /// How long a run waits for the results of its client's tools before it is cancelled.
    pub tool_wait: Duration,
}

impl Default for Clients {
    fn default() -> Self {
        Self {
            console: true,
            openai: true,
            mcp: true,
            a2a: true,
            ag_ui: true,
            tool_wait: DEFAULT_TOOL_WAIT,
        }
    }
}
