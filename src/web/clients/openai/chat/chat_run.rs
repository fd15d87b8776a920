//! The run behind a chat completion.

use std::sync::Arc;

use crate::domain::run::Run;
use crate::domain::usage::TokenUsage;
use crate::web::clients::results;
use crate::web::clients::start::StartedRun;
use crate::web::error::Problem;
use crate::web::state::AppState;

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

    /// The run of an earlier request with the same idempotency key.
    pub async fn repeated(
        state: &AppState,
        existing: StartedRun,
        model: String,
    ) -> Result<Self, Problem> {
        let StartedRun { run, seen_turn, .. } = existing;
        let baseline = match seen_turn {
            Some(turn) => results::tokens_until(state, &run, turn).await?,
            None => TokenUsage::default(),
        };
        Ok(Self {
            run,
            model,
            seen_turn,
            baseline,
        })
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
