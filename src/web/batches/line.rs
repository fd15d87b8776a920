//! A line of a batch: the body of a request for a run, and what becomes of it.

use bytes::Bytes;
use serde_json::Value;

use crate::engine::request::RunRequest;
use crate::web::body::large_body::body_too_large;
use crate::web::body::request_body::RequestBody;
use crate::web::error::Problem;
use crate::web::extract::run_request::build_run_request;
use crate::web::state::Settings;

/// The request that a line makes, checked as the body of `POST /agents/{name}/runs` is.
pub async fn run_request(
    body: &str,
    agent: &str,
    owner: Option<&str>,
    settings: &Settings,
) -> Result<RunRequest, Problem> {
    if body.len() > settings.max_body {
        return Err(body_too_large(settings.max_body));
    }
    let body = RequestBody::Json(Bytes::copy_from_slice(body.as_bytes()));
    let owner = owner.map(str::to_owned);
    let request = build_run_request(body, agent.to_owned(), owner, settings).await?;
    Ok(request.in_background())
}

/// A problem as the result of a line has it: it belongs to no request.
pub fn problem_json(problem: &Problem) -> String {
    let rendered = problem.render("", "");
    let mut value: Value = serde_json::from_slice(&rendered).unwrap_or_default();
    if let Value::Object(fields) = &mut value {
        fields.remove("instance");
        fields.remove("request_id");
    }
    value.to_string()
}
