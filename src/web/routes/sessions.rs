//! `GET /sessions/{name}`: the runs of a session, and the length of its conversation.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::run::{Run, RunId, Status, now};
use crate::engine::replay::history::RecordedConversation;
use crate::store::runs::{PAGE_BYTES, SessionQuery};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::SessionPath;
use crate::web::extract::query::{Query, count_up_to};
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::routes::runs::{DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE};
use crate::web::state::AppState;

/// A session with a page of its runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Session")]
pub struct SessionView<'a> {
    name: &'a str,
    /// The agent of `run`.
    agent: Option<&'a str>,
    /// The last completed run.
    run: Option<RunId>,
    /// The number of messages of that run's conversation, which the next run of the session continues.
    messages: usize,
    data: Vec<RunView<'a>>,
    next_cursor: Option<RunId>,
}

/// `GET /sessions/{name}`: runs newest first. Sessions of other keys are not found.
pub async fn get(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    links: LinkPrefix,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["agent", "limit", "cursor"])?;
    let limit = query
        .parse(
            "limit",
            "a number from 1 to 200",
            count_up_to(MAX_PAGE_SIZE),
        )?
        .unwrap_or(DEFAULT_PAGE_SIZE);
    let session_query = SessionQuery {
        owner: principal.key_name().map(str::to_owned),
        name: name.clone(),
        agent: query.get("agent").map(str::to_owned),
        status: None,
        before: query.parse("cursor", "a cursor of this list", |text| text.parse().ok())?,
        limit: limit + 1,
    };
    let store = state.runner.store();
    let last_query = SessionQuery {
        status: Some(Status::Completed),
        before: None,
        limit: 1,
        ..session_query.clone()
    };
    let is_first = session_query.before.is_none();
    let mut runs = store.session_runs(session_query).await?;
    let has_more =
        runs.len() > limit || runs.iter().map(Run::text_bytes).sum::<usize>() >= PAGE_BYTES;
    runs.truncate(limit);
    let next_cursor = runs.last().filter(|_| has_more).map(|run| run.id);
    let runs = principal.visible_runs(runs, store.as_ref()).await?;
    if runs.is_empty() && is_first {
        return Err(Problem::session_not_found(&name));
    }
    let last = principal
        .visible_runs(store.session_runs(last_query).await?, store.as_ref())
        .await?;
    let last = last.first();
    let messages = match last {
        Some(run) => RecordedConversation::from_steps(store.steps(run.id).await?)
            .messages
            .len(),
        None => 0,
    };
    let now = now();
    let view = SessionView {
        name: &name,
        agent: last.map(|run| run.agent.as_str()),
        run: last.map(|run| run.id),
        messages,
        data: runs
            .iter()
            .map(|run| RunView::new(run, &links, now))
            .collect(),
        next_cursor,
    };
    Ok(json_response(StatusCode::OK, &view))
}
