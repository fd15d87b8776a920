//! `/runs/{id}/approvals/{tool_call_id}`: a person's word on a tool call that waits for it.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use tracing::info;

use crate::domain::event::Decision;
use crate::domain::run::now;
use crate::engine::remains::Decided;
use crate::web::auth::Caller;
use crate::web::body;
use crate::web::error::{Problem, word};
use crate::web::query::{CallPath, Query};
use crate::web::runs::{json, reason};
use crate::web::state::AppState;
use crate::web::view::RunView;

/// A person's word.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "DecisionRequest", extend("required" = ["decision"]))]
#[serde(deny_unknown_fields, default)]
pub struct Answer {
    #[schemars(required)]
    decision: Option<Verdict>,
    /// What the model reads where the call is denied.
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
    caller: Caller,
    CallPath(id, call): CallPath,
    request: Request,
) -> Result<Response, Problem> {
    let answer: Answer = {
        let (parts, body) = request.into_parts();
        let settings = &state.settings;
        Query::read(&parts.uri, &[])?;
        let sent = body::read(&parts.headers, body, settings.bounds());
        sent.await?.json()?
    };
    let verdict = answer.decision.ok_or_else(|| {
        let why = "is required: \"approve\" or \"deny\"";
        Problem::field("invalid_field", "/decision", why)
    })?;
    let decided = Decided {
        decision: match verdict {
            Verdict::Approve => Decision::Approved,
            Verdict::Deny => Decision::Denied,
        },
        reason: reason(answer.reason)?,
        by: caller.name().map(str::to_owned),
    };
    let run = state.runner.decide(id, &call, decided).await?;
    info!(
        run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
        "The tool call {} of {id} was decided: {verdict:?}", word(&call)
    );
    let view = RunView::new(&run, &state.settings.path_prefix, now());
    Ok(json(StatusCode::ACCEPTED, &view))
}
