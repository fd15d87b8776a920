//! `GET /runs/{a}/diff/{b}`.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use crate::engine::replay::run_diff;
use crate::web::error::Problem;
use crate::web::extract::path::RunPairPath;
use crate::web::extract::query::NoQuery;
use crate::web::response::json::json_response;
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

/// Compares the trees below two runs.
pub async fn diff(
    State(state): State<AppState>,
    RunPairPath(a, b): RunPairPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    let (a, b) = (require_run(&state, a).await?, require_run(&state, b).await?);
    let store = state.runner.store().as_ref();
    let diff = run_diff::diff(store, &a, &b).await?;
    Ok(json_response(StatusCode::OK, &diff))
}
