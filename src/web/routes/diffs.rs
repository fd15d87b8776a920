//! `GET /runs/{a}/diff/{b}`.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::KeyScope::Read;
use crate::engine::history::run_diff::{self, RunDiff};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::path::{Params, RunPath, describe_run, visible_run_id};
use crate::web::extract::query::NoQuery;
use crate::web::response::json::json_response;
use crate::web::route::{Route, get};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

pub fn routes() -> Vec<Route> {
    vec![
        get("/runs/{id}/diff/{other}", [Read], diff)
            .describe("diff_runs", "Compares two runs and the runs below them")
            .details(
                "Runs are compared if the same calls led to them. A fork has the runs whose results it took over. \
                 Long texts are cut.",
            )
            .with(|route| describe_run(route, "other", "The id of the other run."))
            .response::<RunDiff>(200, "The differences.")
            .example(example()),
    ]
}

#[derive(Deserialize)]
struct OtherParam {
    other: String,
}

async fn diff(
    State(state): State<AppState>,
    RunPath(a): RunPath,
    Params(OtherParam { other }): Params<OtherParam>,
    principal: Principal,
    _: NoQuery,
) -> Result<Response, Problem> {
    let b = visible_run_id(&principal, &state, &other).await?;
    let (a, b) = (require_run(&state, a).await?, require_run(&state, b).await?);
    let store = state.runner.store().as_ref();
    let diff = run_diff::diff(store, &a, &b).await?;
    Ok(json_response(StatusCode::OK, &diff))
}

fn example() -> Value {
    json!({
                    "nodes": [{
                        "path": "planner",
                        "a": "run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d",
                        "b": "run_019a1f3c-9a10-7c21-8d66-4a2f7b8c9d0e",
                        "changes": [],
                        "turns": [{"turn": 2, "changes": [{"field": "text", "a": "yes", "b": "no"}]}],
                    }],
                    "totals": {
                        "a": {
                            "runs": 1, "model_calls": 2, "tool_calls": 1, "input_tokens": 1204, "output_tokens": 188,
                            "cost_usd": null, "duration_ms": 4000,
                        },
                        "b": {
                            "runs": 1, "model_calls": 1, "tool_calls": 0, "input_tokens": 803, "output_tokens": 92,
                            "cost_usd": null, "duration_ms": 2000,
                        },
                    },
    })
}
