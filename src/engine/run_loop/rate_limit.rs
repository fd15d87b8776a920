//! Has a request wait until the provider's rate limit has something left for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::SignedDuration;

use crate::domain::event::{DelayReason, EventKind};
use crate::domain::rate_limit::Priority;
use crate::domain::run::now;
use crate::domain::usage::TokenUsage;
use crate::engine::context::RunContext;
use crate::engine::run_loop::limits;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::turn_error::TurnError;
use crate::providers::rate_limits::limiter::{Demand, Limiter, RequestEnd, Slot, WaitingRequest};
use crate::providers::{ErrorCategory, ProviderError, Reply};
use crate::store::{Change, StoreError};

/// Longer waits have an event.
const MIN_DELAY: Duration = Duration::from_secs(1);

/// The priority of a run's requests: those of runs below a background run are background too.
pub fn priority(run: &ActiveRun) -> Priority {
    let mut runs = run.self_and_ancestors();
    match runs.any(|run| run.agent.priority == Priority::Background) {
        true => Priority::Background,
        false => Priority::Interactive,
    }
}

/// Waits in the queue of the provider's limiter. The run's time goes on.
pub async fn wait(
    context: &RunContext,
    turn: u32,
    limiter: &Arc<Limiter>,
    demand: Demand,
) -> Result<Slot, TurnError> {
    let run = &context.run;
    let owner = run.tree.owner.as_deref();
    let mut request = limiter.enter(demand, owner, priority(run));
    let deadline = run.deadline().map(|deadline| deadline.at.into_std());
    let first = tokio::time::timeout(MIN_DELAY, request.slot(deadline));
    let slot = match limits::within_deadline(run, first).await? {
        Ok(slot) => slot,
        Err(_) => {
            announce(context, turn, &request).await?;
            limits::within_deadline(run, request.slot(deadline)).await?
        }
    };
    slot.map_err(|too_long| {
        let message = format!(
            "the rate limit leaves nothing for another {}, which is longer than the run has left",
            seconds(too_long.wait)
        );
        let mut error = ProviderError::new(ErrorCategory::RateLimit, message);
        error.retry_after = Some(too_long.wait);
        TurnError::Provider(error)
    })
}

fn seconds(wait: Duration) -> String {
    format!("{}s", wait.as_secs_f64().ceil())
}

async fn announce(
    context: &RunContext,
    turn: u32,
    request: &WaitingRequest,
) -> Result<(), StoreError> {
    let until = request.until().and_then(|until| {
        let wait = until.saturating_duration_since(Instant::now());
        now().checked_add(SignedDuration::try_from(wait).ok()?).ok()
    });
    let event = EventKind::TurnDelayed {
        turn,
        reason: DelayReason::RateLimit,
        until,
    };
    let journal = &context.engine.journal;
    journal
        .enqueue(&context.run, Change::Unchanged, vec![event.into()])
        .await
}

/// Gives back what the request did not use. `reported` is the usage that is known of an interrupted reply. A refusal gets the wait that
/// the limiter knows; but a flexible tier that is busy, as `is_flexible`, has no limit.
pub fn settle(
    slot: Slot,
    mut result: Result<Reply, TurnError>,
    reported: Option<TokenUsage>,
    is_flexible: bool,
) -> Result<Reply, TurnError> {
    let end = match &result {
        Ok(reply) => RequestEnd::Used(reply.usage),
        Err(TurnError::Provider(error)) => match failed_end(error, reported) {
            RequestEnd::Refused(None) if is_flexible => RequestEnd::Failed,
            end => end,
        },
        Err(_) => RequestEnd::Used(reported),
    };
    let wait = slot.settle(&end);
    if let (Err(TurnError::Provider(error)), Some(wait)) = (&mut result, wait) {
        error.retry_after = Some(wait);
    }
    result
}

/// What a failed request counts for.
pub fn failed_end(error: &ProviderError, reported: Option<TokenUsage>) -> RequestEnd {
    match (is_refusal(error), error.may_be_billed) {
        (true, _) => RequestEnd::Refused(error.retry_after),
        (false, true) => RequestEnd::Used(reported),
        (false, false) => RequestEnd::Failed,
    }
}

/// Whether the service refused the request because of a limit that a wait helps against.
pub fn is_refusal(error: &ProviderError) -> bool {
    error.category == ErrorCategory::RateLimit && !error.is_quota_spent
}
