//! `/runs/{id}/approvals/{tool_call_id}`: approves or denies a tool call that waits for approval.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use tracing::info;

use crate::domain::event::Decision;
use crate::domain::run::now;
use crate::engine::state::approval_decision::ApprovalDecision;
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::CallPath;
use crate::web::extract::query::Query;
use crate::web::extract::request_body;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::routes::runs::check_reason;
use crate::web::state::AppState;

/// A person's decision on a tool call.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "DecisionRequest", extend("required" = ["decision"]))]
#[serde(deny_unknown_fields, default)]
pub struct DecisionRequest {
    #[schemars(required)]
    decision: Option<Verdict>,
    /// The model reads this if the call is denied.
    #[schemars(length(max = 1000))]
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Approve,
    Deny,
}

/// `POST /runs/{id}/approvals/{tool_call_id}`: 202 once the decision is committed.
pub async fn decide(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    CallPath(id, call): CallPath,
    request: Request,
) -> Result<Response, Problem> {
    let decision_request: DecisionRequest = {
        let (parts, body) = request.into_parts();
        let settings = &state.settings;
        Query::read(&parts.uri, &[])?;
        let request_body = request_body::read(&parts.headers, body, settings.body_limits());
        request_body.await?.json()?
    };
    let verdict = decision_request.decision.ok_or_else(|| {
        let why = "is required: \"approve\" or \"deny\"";
        Problem::invalid_field("/decision", why)
    })?;
    let decision = ApprovalDecision {
        decision: match verdict {
            Verdict::Approve => Decision::Approved,
            Verdict::Deny => Decision::Denied,
        },
        reason: check_reason(decision_request.reason)?,
        by: principal.key_name().map(str::to_owned),
    };
    let run = state.runner.decide(id, &call, decision).await?;
    info!(
        run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
        "The tool call {} of {id} was decided: {verdict:?}", quote(&call)
    );
    let view = RunView::new(&run, &links, now());
    Ok(json_response(StatusCode::ACCEPTED, &view))
}
