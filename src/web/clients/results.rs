//! Results of tools that a client executed: found by their call ids, they go to the run that waits for them.

use std::sync::Arc;

use crate::domain::content::Content;
use crate::domain::message::ToolResult;
use crate::domain::run::{Run, RunId};
use crate::domain::usage::TokenUsage;
use crate::engine::add_message::MessageRequest;
use crate::engine::client_results::ClientResultsError;
use crate::engine::state::client_calls::ClientResult;
use crate::store::Step;
use crate::web::clients::call_id::CallRef;
use crate::web::error::Problem;
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

/// Gives results to their run; `None` if no run of this key and agent waits for them.
pub async fn continue_run(
    state: &AppState,
    owner: Option<&str>,
    agent: &str,
    results: &[ToolResult],
    new_message: Option<&Content>,
) -> Result<Option<ContinuedRun>, Problem> {
    let Some((id, turn, results)) = client_results(results) else {
        return Ok(None);
    };
    let Some(run) = state.runner.store().run(id).await? else {
        return Ok(None);
    };
    if run.owner.as_deref() != owner || run.agent != agent || run.status.is_terminal() {
        return Ok(None);
    }
    let continued = |run: Run| ContinuedRun {
        baseline: run.tree.usage.tokens,
        turn,
        run: Arc::new(run),
    };
    if !(run.waits_for_client() && run.turns == turn) {
        // A repeated request joins the run that its results have reached.
        let is_same = has_results(state, id, turn, &results).await?;
        return Ok(is_same.then(|| continued(run)));
    }
    if let Some(content) = new_message {
        let message = MessageRequest {
            content: content.clone(),
            by: owner.map(str::to_owned),
            claim: None,
        };
        state.runner.add_message(id, message).await?;
    }
    match state.runner.add_client_results(id, turn, &results).await {
        Ok(()) => Ok(Some(continued(run))),
        Err(ClientResultsError::NotWaiting(_)) => {
            let is_same = has_results(state, id, turn, &results).await?;
            Ok(is_same.then(|| continued(run)))
        }
        Err(ClientResultsError::Missing(position)) => {
            let call = CallRef {
                run: id,
                turn,
                position,
            };
            let why = format!(
                "the call {:?} has no result; send all at once",
                call.to_id()
            );
            Err(Problem::field(
                ProblemCode::InvalidMessages,
                "/messages",
                why,
            ))
        }
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
    let steps = state.runner.store().steps(id).await?;
    let is_recorded = |wanted: &ClientResult| {
        steps.iter().any(|step| match step {
            Step::Result {
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
