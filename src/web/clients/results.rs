//! Results of tools that a client executed: found by their call ids, they go to the run that waits for them.

use std::sync::Arc;

use crate::domain::attachment::Digest;
use crate::domain::content::{Content, Part};
use crate::domain::message::ToolResult;
use crate::domain::run::{Run, RunId};
use crate::domain::usage::TokenUsage;
use crate::engine::control::add_message::{AddMessageError, MessageRequest};
use crate::engine::control::client_results::ClientResultsError;
use crate::engine::state::client_calls::{ClientResult, ClientResults};
use crate::record::entry::{self, Entry};
use crate::store::{IdempotencyClaim, StoreError};
use crate::web::clients::call_id::CallRef;
use crate::web::clients::stop::{self, Stop};
use crate::web::error::Problem;
use crate::web::extract::idempotency;
use crate::web::problem_code::ProblemCode;
use crate::web::state::AppState;

/// A run that has got results.
pub struct ContinuedRun {
    pub run: Arc<Run>,
    /// The turn whose calls they are for.
    pub turn: u32,
    /// What the tree had used before.
    pub baseline: TokenUsage,
}

/// What a request gives a run.
pub struct NewInput<'a> {
    pub results: &'a [ToolResult],
    /// A message after the results.
    pub message: Option<&'a Content>,
    /// JSON Pointer to both in the body.
    pub pointer: &'static str,
    pub claim: Option<&'a IdempotencyClaim>,
}

/// Gives results to their run; `None` if no run of this key and agent waits for them.
pub async fn continue_run(
    state: &AppState,
    owner: Option<&str>,
    agent: &str,
    input: NewInput<'_>,
) -> Result<Option<ContinuedRun>, Problem> {
    let Some((id, turn, results)) = client_results(input.results) else {
        return Ok(None);
    };
    let Some(run) = state.runner.store().run(id).await? else {
        return Ok(None);
    };
    if run.owner.as_deref() != owner || run.agent != agent || run.status.is_terminal() {
        return Ok(None);
    }
    if !(run.waits_for_client() && run.turns == turn) {
        return repeated(state, run, turn, &results).await;
    }
    if let Some(content) = input.message {
        // A refused request leaves nothing in the run.
        reject_links(content, input.pointer)?;
        require_all(state, &run, &input).await?;
        add_message(state, &run, content).await?;
    }
    let given = ClientResults {
        turn,
        results,
        claim: input.claim.cloned(),
    };
    match state.runner.add_client_results(id, &given).await {
        Ok(()) => Ok(Some(ContinuedRun {
            baseline: run.tree.usage.tokens,
            turn,
            run: Arc::new(run),
        })),
        Err(ClientResultsError::NotWaiting(_)) => repeated(state, run, turn, &given.results).await,
        Err(ClientResultsError::Store(StoreError::AlreadyClaimed(claimed))) => {
            // Another request with the same key was quicker.
            if let Some(claim) = input.claim {
                idempotency::check_same_body(claim, &claimed)?;
            }
            repeated(state, run, turn, &given.results).await
        }
        Err(ClientResultsError::Missing(position)) => {
            let call = CallRef {
                run: id,
                turn,
                position,
            };
            Err(missing(&call.to_id(), input.pointer))
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses results that leave calls of the turn open.
async fn require_all(state: &AppState, run: &Run, input: &NewInput<'_>) -> Result<(), Problem> {
    let Stop::Calls { calls, .. } = stop::stop_of(state, run, None).await? else {
        return Ok(());
    };
    let has_result = |id: &str| input.results.iter().any(|result| result.call_id == id);
    match calls.iter().find(|call| !has_result(&call.id)) {
        Some(call) => Err(missing(&call.id, input.pointer)),
        None => Ok(()),
    }
}

fn missing(call: &str, pointer: &str) -> Problem {
    let why = format!("the call {call:?} has no result; send all at once");
    Problem::field(ProblemCode::InvalidMessages, pointer, why)
}

/// URLs are fetched before the first turn only.
fn reject_links(content: &Content, pointer: &str) -> Result<(), Problem> {
    let mut parts = content.parts().unwrap_or_default().iter();
    if parts.any(|part| matches!(part, Part::Link(_))) {
        let why = "a picture or file after results of tools cannot be a URL; send its bytes";
        return Err(Problem::invalid_field(pointer, why));
    }
    Ok(())
}

/// A request whose results the run has: it joins the run.
async fn repeated(
    state: &AppState,
    run: Run,
    turn: u32,
    results: &[ClientResult],
) -> Result<Option<ContinuedRun>, Problem> {
    if !has_results(state, run.id, turn, results).await? {
        return Ok(None);
    }
    Ok(Some(ContinuedRun {
        baseline: tokens_until(state, &run, turn).await?,
        turn,
        run: Arc::new(run),
    }))
}

/// What the tree of the run had used when it waited for the results of a turn.
pub async fn tokens_until(state: &AppState, run: &Run, turn: u32) -> Result<TokenUsage, Problem> {
    let steps = entry::steps(state.runner.store().entries(run.id).await?);
    stop::tokens_in(state, run, &steps, 0, Some(turn)).await
}

/// Adds the message that comes with the results of the last turn, unless an earlier request has.
async fn add_message(state: &AppState, run: &Run, content: &Content) -> Result<(), Problem> {
    let json = serde_json::to_vec(content).map_err(|error| Problem::internal(error.to_string()))?;
    let fingerprint = idempotency::fingerprint(b"", &json);
    let claim = idempotency::new_claim(
        run.owner.as_deref(),
        // No route of a client has such a name.
        format!(
            "message with the results of turn {} of {}",
            run.turns, run.id
        ),
        Digest(fingerprint).to_string(),
        fingerprint,
    );
    let message = MessageRequest {
        content: content.clone(),
        by: run.owner.clone(),
        claim: Some(claim),
    };
    match state.runner.add_message(run.id, message).await {
        Ok(_) | Err(AddMessageError::Store(StoreError::AlreadyClaimed(_))) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The run and the turn that all results are for; `None` if they are for no run, or for several.
fn client_results(results: &[ToolResult]) -> Option<(RunId, u32, Vec<ClientResult>)> {
    let first = CallRef::parse(&results.first()?.call_id)?;
    let mut client_results = Vec::with_capacity(results.len());
    for result in results {
        // Results of the agent's own calls are not sent by clients.
        let call = CallRef::parse(&result.call_id)?;
        if (call.run, call.turn) != (first.run, first.turn) {
            return None;
        }
        client_results.push(ClientResult {
            position: call.position,
            content: result.content.clone(),
            is_error: result.is_error,
            attachments: result.attachments.clone(),
        });
    }
    Some((first.run, first.turn, client_results))
}

/// Whether the run has recorded exactly these results.
async fn has_results(
    state: &AppState,
    id: RunId,
    turn: u32,
    results: &[ClientResult],
) -> Result<bool, Problem> {
    let steps = entry::steps(state.runner.store().entries(id).await?);
    let is_recorded = |wanted: &ClientResult| {
        steps.iter().any(|step| match step {
            Entry::CallCompleted {
                turn: recorded_turn,
                position,
                result,
                ..
            } => {
                *recorded_turn == turn
                    && *position == wanted.position
                    && result.content == wanted.content
            }
            _ => false,
        })
    };
    Ok(results.iter().all(is_recorded))
}
