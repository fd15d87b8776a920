//! The run behind a chat completion.

use std::sync::Arc;

use crate::domain::run::Run;
use crate::domain::usage::TokenUsage;

/// A run whose next stop is the response.
pub struct ChatRun {
    pub run: Arc<Run>,
    /// The model as the client named it.
    pub model: String,
    /// The turn whose calls the client has given results for; `None` if the request started the run.
    pub seen_turn: Option<u32>,
    /// What the run's tree had used before the request.
    pub baseline: TokenUsage,
}

impl ChatRun {
    /// A run that the request has started.
    pub fn new(run: Arc<Run>, model: String) -> Self {
        Self {
            run,
            model,
            seen_turn: None,
            baseline: TokenUsage::default(),
        }
    }

    /// Another one for each request that continues the run.
    pub fn id(&self) -> String {
        let uuid = self.run.id.0.as_simple();
        match self.seen_turn {
            None => format!("chatcmpl-{uuid}"),
            Some(turn) => format!("chatcmpl-{uuid}-{turn}"),
        }
    }
}
