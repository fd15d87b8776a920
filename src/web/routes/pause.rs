//! `POST /runs/{id}/pause` and `/resume`.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use tracing::info;

use crate::config::KeyScope::Run;
use crate::domain::run::{RunId, now};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::body::JsonBody;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::ChangedRunPath;
use crate::web::extract::query::NoQuery;
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::RunEnded;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::route::{Route, post};
use crate::web::state::AppState;

/// A request to pause or to resume something; it has no fields.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PauseRequest {}

pub fn routes() -> Vec<Route> {
    vec![
        post("/runs/{id}/pause", [Run], pause)
            .with(with_change)
            .describe("pause_run", "Pauses a run and its descendants")
            .details(
                "The run and all runs below it stop at their next step: requests to models and tool calls that have \
                 begun end first. Then they are `waiting` for `resume`, their time limits stand still, and the run \
                 holds no slot. A paused run can be cancelled and gets messages and decisions. A queued run stays \
                 queued until it has a slot.",
            )
            .response::<RunView<'static>>(200, "The run, if it was paused already.")
            .example(examples::accepted_run())
            .response::<RunView<'static>>(202, "The run; the pause is stored.")
            .example(examples::accepted_run()),
        post("/runs/{id}/resume", [Run], resume)
            .with(with_change)
            .describe("resume_run", "Resumes a paused run")
            .details(
                "The run waits for a slot before all runs of its key that have not started. A run below one that \
                 is paused stays paused.",
            )
            .response::<RunView<'static>>(200, "The run, if it was not paused.")
            .example(examples::accepted_run())
            .response::<RunView<'static>>(202, "The run; the end of its pause is stored.")
            .example(examples::accepted_run()),
    ]
}

fn with_change(route: Route) -> Route {
    route
        .request_example("empty", "Without fields", json!({}))
        .problems(&[RunEnded])
}

async fn pause(
    State(state): State<AppState>,
    principal: Principal,
    ChangedRunPath(id): ChangedRunPath,
    links: LinkPrefix,
    _: NoQuery,
    _: JsonBody<PauseRequest>,
) -> Result<Response, Problem> {
    set_held(&state, &principal, id, &links, true).await
}

async fn resume(
    State(state): State<AppState>,
    principal: Principal,
    ChangedRunPath(id): ChangedRunPath,
    links: LinkPrefix,
    _: NoQuery,
    _: JsonBody<PauseRequest>,
) -> Result<Response, Problem> {
    set_held(&state, &principal, id, &links, false).await
}

/// The run: 202 once the change is committed, 200 if there was nothing to change.
async fn set_held(
    state: &AppState,
    principal: &Principal,
    id: RunId,
    links: &str,
    is_held: bool,
) -> Result<Response, Problem> {
    let by = principal.key_name().map(str::to_owned);
    let (run, is_changed) = state.runner.set_held(id, is_held, by).await?;
    if is_changed {
        let action = if is_held { "paused" } else { "resumed" };
        info!(
            run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "{id} was {action} by a client"
        );
    }
    let status = match is_changed {
        true => StatusCode::ACCEPTED,
        false => StatusCode::OK,
    };
    Ok(json_response(status, &RunView::new(&run, links, now())))
}
