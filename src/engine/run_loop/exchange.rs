//! What a turn sends and when, for its record.

use std::collections::BTreeSet;

use jiff::Timestamp;
use tokio::time::Instant;

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::Effort;
use crate::domain::attachment::Blobs;
use crate::domain::message::Message;
use crate::domain::run::now;
use crate::domain::usage::{TokenUsage, Usage};
use crate::engine::context::Engine;
use crate::engine::state::turn_error::TurnError;
use crate::providers::{Delta, SentRequest};
use crate::store::StoreError;
use crate::store::turn_record::TurnAttempt;

/// The requests of one turn: the first one, its retries, and those to fallbacks.
#[derive(Debug, Default)]
pub struct Exchange {
    pub attempts: Vec<TurnAttempt>,
    /// The last request.
    pub sent: Option<SentRequest>,
    /// The images and files of the last request.
    pub blobs: Option<Blobs>,
    pub effort: Option<Effort>,
    /// Until the first text of a streamed reply, else until the response began; from the start of the last attempt.
    pub first_token_ms: Option<u64>,
    has_token: bool,
    /// Of all attempts.
    pub usage: Usage,
    /// Whether a provider reported its tokens.
    pub has_tokens: bool,
    pub reasoning_tokens: u64,
    /// The model that the last attempt is billed for, and what it has used.
    pub billed: Option<(String, Usage)>,
    current: Option<Attempt>,
}

#[derive(Debug)]
struct Attempt {
    provider: String,
    model: String,
    started_at: Timestamp,
    start: Instant,
    status: Option<u16>,
}

impl Exchange {
    pub fn begin(&mut self, model: &ModelRef, effort: Option<Effort>) {
        self.effort = effort;
        self.first_token_ms = None;
        self.has_token = false;
        self.current = Some(Attempt {
            provider: model.provider.clone(),
            model: model.model.clone(),
            started_at: now(),
            start: Instant::now(),
            status: None,
        });
    }

    pub fn receive(&mut self, delta: &Delta<'_>) {
        let Some(attempt) = &mut self.current else {
            return;
        };
        let elapsed = || u64::try_from(attempt.start.elapsed().as_millis()).ok();
        match delta {
            Delta::Sending(sent) => self.sent = Some((*sent).clone()),
            Delta::ResponseStarted { status, .. } => {
                self.first_token_ms = elapsed();
                attempt.status = Some(*status);
            }
            Delta::Text(_) | Delta::Reasoning(_) | Delta::ReasoningStarted if !self.has_token => {
                self.first_token_ms = elapsed();
                self.has_token = true;
            }
            Delta::Text(_) | Delta::Reasoning(_) | Delta::ReasoningStarted => {}
            Delta::Submitting
            | Delta::BatchRecorded
            | Delta::Billing(_)
            | Delta::Usage(_)
            | Delta::Cost(_) => {}
        }
    }

    pub fn add_usage(&mut self, model: &str, usage: &Usage, tokens: Option<TokenUsage>) {
        self.billed = Some((model.to_owned(), *usage));
        self.usage.add(usage);
        self.has_tokens |= tokens.is_some();
        self.reasoning_tokens += tokens.map_or(0, |tokens| tokens.reasoning);
    }

    /// The tokens of all attempts; `None` if no provider reported them.
    pub fn tokens(&self) -> Option<TokenUsage> {
        let reasoning = self.reasoning_tokens;
        let tokens = TokenUsage {
            reasoning,
            ..self.usage.tokens
        };
        self.has_tokens.then_some(tokens)
    }

    /// Ends an attempt. `error` is `None` if there is a reply.
    pub fn end(&mut self, error: Option<&TurnError>) {
        let Some(attempt) = self.current.take() else {
            return;
        };
        let duration_ms = u64::try_from(attempt.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.attempts.push(TurnAttempt {
            provider: attempt.provider,
            model: attempt.model,
            status: attempt.status,
            error: error.map(error_text),
            started_at: attempt.started_at,
            duration_ms,
        });
    }
}

fn error_text(error: &TurnError) -> String {
    match error {
        TurnError::Cancelled => "the run was cancelled".to_owned(),
        TurnError::DeadlineExceeded => "timeout: the run's time was over".to_owned(),
        TurnError::Budget(exceeded) => exceeded.to_string(),
        TurnError::Provider(error) => error.to_string(),
        TurnError::BatchExpired => "timeout: the batch was not done within a day".to_owned(),
        TurnError::Unavailable(unavailable) => unavailable.to_string(),
        TurnError::Store(error) => error.to_string(),
    }
}

/// The bytes of these messages' images and files, which are in memory only during a request; `None` if there are none.
pub async fn load_blobs(
    engine: &Engine,
    messages: &[Message],
) -> Result<Option<Blobs>, StoreError> {
    let digests = messages.iter().flat_map(Message::attachments);
    let digests: BTreeSet<_> = digests.map(|attachment| attachment.sha256).collect();
    if digests.is_empty() {
        return Ok(None);
    }
    let digests = digests.into_iter().collect();
    let blobs = engine.journal.store().blobs(digests).await?;
    Ok(Some(blobs))
}
