//! `/ui/runs/{id}/pictures/{sha256}`: the bytes of a picture in the messages or tool results of a run.

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderName;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use crate::domain::attachment::{Attachment, Digest};
use crate::domain::run::RunId;
use crate::record::entry::{self, Entry};
use crate::web::error::{Problem, quote};
use crate::web::extract::path::{Params, RunPath};
use crate::web::problem_code::ProblemCode;
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

/// The bytes come from a client, a model or a tool: opened by themselves, they are no page and run nothing.
const HEADERS: [(HeaderName, &str); 5] = [
    (CONTENT_SECURITY_POLICY, "default-src 'none'; sandbox"),
    (CACHE_CONTROL, "private, max-age=3600"),
    (VARY, "authorization"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

#[derive(Deserialize)]
pub struct PictureParam {
    sha256: String,
}

pub async fn get(
    State(state): State<AppState>,
    RunPath(run): RunPath,
    Params(PictureParam { sha256: name }): Params<PictureParam>,
) -> Result<Response, Problem> {
    let not_found = || {
        let why = format!("{run} has no picture {}", quote(&name));
        Problem::new(ProblemCode::RouteNotFound, why)
    };
    let digest = Digest::try_from(name.clone()).map_err(|_| not_found())?;
    let picture = find(&state, run, digest).await?;
    // Only these types are shown, whatever the bytes are.
    let picture = picture.filter(|it| it.media_type.is_image());
    let media_type = picture.ok_or_else(not_found)?.media_type;
    let mut blobs = state.runner.store().blobs(vec![digest]).await?;
    let bytes = blobs.remove(&digest).ok_or_else(not_found)?;
    let content_type = [(CONTENT_TYPE, media_type.as_str())];
    Ok((HEADERS, content_type, Body::from(bytes)).into_response())
}

/// The attachment as the run's input or a later step has it. Bytes of other runs have the same digest but are not its own.
async fn find(state: &AppState, id: RunId, digest: Digest) -> Result<Option<Attachment>, Problem> {
    let run = require_run(state, id).await?;
    let mut of_input = run.input.attachments();
    if let Some(found) = of_input.find(|it| it.sha256 == digest) {
        return Ok(Some(found.clone()));
    }
    let steps = entry::steps(state.runner.store().entries(id).await?);
    let mut of_steps = steps.iter().flat_map(Entry::attachments);
    Ok(of_steps.find(|it| it.sha256 == digest).cloned())
}
