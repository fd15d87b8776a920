//! What the runs of an evaluation do with calls of tools.

use crate::settings::choice::choice;

choice! {
    /// What the runs of an evaluation do with calls of tools.
    pub enum ToolUse {
        /// Tools are offered; a call is a divergence and ends the case. Other agents are called.
        None = "none",
        /// Tools are executed.
        Live = "live",
    }
}
