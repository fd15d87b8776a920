//! `[clients]`: which protocols of other people's clients the server speaks.

use std::time::Duration;

use crate::settings::kinds::{Flag, Seconds};
use crate::settings::section::section;

section! {
    /// `[clients]`: each is on by default.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Clients {
        /// The console at `/ui/`.
        pub console: bool = true, Flag;
        /// The API of OpenAI's clients below `/v1/`.
        pub openai: bool = true, Flag;
        /// The MCP server at `/mcp`.
        pub mcp: bool = true, Flag;
        /// A2A below `/a2a/`.
        pub a2a: bool = true, Flag;
        /// AG-UI at `/agents/{name}/ag-ui`.
        pub ag_ui: bool = true, Flag;
        /// How long a run waits for the results of its client's tools before it is cancelled.
        pub tool_wait: Duration = Duration::from_secs(3600), Seconds(1);
    }
}
