//! Starts runs for clients of other protocols, once for each idempotency key.

use std::sync::Arc;

use crate::domain::run::Run;
use crate::engine::request::{RunRequest, StartError};
use crate::engine::state::broadcaster::Subscription;
use crate::store::{IdempotencyClaim, StoreError};
use crate::web::error::Problem;
use crate::web::routes::runs;
use crate::web::state::AppState;

/// A run that a request has started, or that an earlier request with the same key has.
pub struct StartedRun {
    pub run: Arc<Run>,
    /// Began before the run's first event; `None` without `subscribes`, or if an earlier request started the run.
    pub subscription: Option<Subscription>,
    /// The turn whose calls the earlier request had results for; `None` if it started the run or decided on calls.
    pub seen_turn: Option<u32>,
    /// Whether an earlier request has started or continued it.
    pub is_repeated: bool,
}

/// The run that an earlier request with this key started or continued. Looked up before the request is checked: a repetition gets its
/// response also where a new run would be refused.
pub async fn find(
    state: &AppState,
    claim: Option<&IdempotencyClaim>,
) -> Result<Option<StartedRun>, Problem> {
    let Some((claimed, mut run)) = runs::find_claimed(state, claim).await? else {
        return Ok(None);
    };
    if run.parent_id.is_some() {
        // The request decided on a call of a sub-agent.
        run = runs::require_run(state, run.root_id).await?;
    }
    Ok(Some(StartedRun {
        run: Arc::new(run),
        subscription: None,
        seen_turn: claimed.number.filter(|turn| *turn > 0),
        is_repeated: true,
    }))
}

/// Starts the run of a checked request. With `subscribes`, its providers stream, and no event is missed.
pub async fn start(
    state: &AppState,
    mut request: RunRequest,
    subscribes: bool,
) -> Result<StartedRun, Problem> {
    if subscribes {
        request.stream = request.stream.or(Some(true));
    }
    start_once(state, request, subscribes).await
}

/// As [`start`], but whether its providers stream is left to the request and the agent.
pub async fn start_once(
    state: &AppState,
    request: RunRequest,
    subscribes: bool,
) -> Result<StartedRun, Problem> {
    let claim = request.claim.clone();
    let started = match subscribes {
        true => Box::pin(state.runner.start_and_subscribe(request))
            .await
            .map(|(run, subscription)| (run, Some(subscription))),
        false => Box::pin(state.runner.start(request))
            .await
            .map(|run| (run, None)),
    };
    let error = match started {
        Ok((run, subscription)) => {
            return Ok(StartedRun {
                run,
                subscription,
                seen_turn: None,
                is_repeated: false,
            });
        }
        Err(error) => error,
    };
    let may_be_claimed = matches!(
        error,
        StartError::Store(StoreError::AlreadyClaimed(_)) | StartError::SessionBusy { .. }
    );
    if may_be_claimed && let Some(existing) = find(state, claim.as_ref()).await? {
        // Another request with the same key was quicker.
        return Ok(existing);
    }
    Err(error.into())
}
