//! Accepts the evaluations that schedules start.

use axum::http::StatusCode;
use tokio_util::sync::CancellationToken;

use crate::engine::schedules::scheduler::{DueEval, EvalRefusal};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::evals::request::{EvalBody, NewEval, check_accepts};

use crate::web::state::AppState;

/// Accepts them until `stop` is cancelled.
pub async fn run(state: AppState, stop: CancellationToken) {
    let accept_all = async {
        while let Some(due) = state.scheduler.due_eval().await {
            let accepted = Box::pin(accept(&state, &due)).await.map_err(refusal);
            // The scheduler has perhaps stopped meanwhile.
            let _ = due.accepted.send(accepted);
        }
    };
    tokio::select! {
        () = accept_all => {}
        () = stop.cancelled() => {}
    }
}

async fn accept(state: &AppState, due: &DueEval) -> Result<(), Problem> {
    if state.runner.store().eval(due.id).await?.is_some() {
        return Ok(());
    }
    let principal = Principal::of_owner(&state.settings, due.owner.as_deref());
    let eval = NewEval::check(state, &principal, EvalBody::of_schedule(due)).await?;
    check_accepts(state, &principal).await?;
    eval.accept(state).await?;
    Ok(())
}

fn refusal(problem: Problem) -> EvalRefusal {
    let status = problem.status();
    EvalRefusal {
        why: problem.detail().to_owned(),
        is_temporary: status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS,
    }
}
