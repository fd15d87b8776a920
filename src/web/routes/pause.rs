//! `POST /runs/{id}/pause` and `/resume`.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use tracing::info;

use crate::domain::run::{RunId, now};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::ChangedRunPath;
use crate::web::extract::query::Query;
use crate::web::extract::request_body;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::state::AppState;

/// A request to pause or to resume a run; it has no fields.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PauseRequest {}

pub async fn pause(
    State(state): State<AppState>,
    principal: Principal,
    ChangedRunPath(id): ChangedRunPath,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    set_held(&state, &principal, id, &links, request, true).await
}

pub async fn resume(
    State(state): State<AppState>,
    principal: Principal,
    ChangedRunPath(id): ChangedRunPath,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    set_held(&state, &principal, id, &links, request, false).await
}

/// The run: 202 once the change is committed, 200 if there was nothing to change.
async fn set_held(
    state: &AppState,
    principal: &Principal,
    id: RunId,
    links: &str,
    request: Request,
    is_held: bool,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    Query::read(&parts.uri, &[])?;
    let body = request_body::read(&parts, body, state.settings.body_limits()).await?;
    body.json::<PauseRequest>()?;
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
