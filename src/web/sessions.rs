//! `GET /sessions/{name}`: the runs of one of the caller's sessions, and how long its conversation is.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::run::{Run, RunId, Status, now};
use crate::engine::history::Recorded;
use crate::store::{PAGE_BYTES, SessionQuery};
use crate::web::auth::Caller;
use crate::web::error::Problem;
use crate::web::query::{Query, SessionPath, count};
use crate::web::runs::{self, MAX_PAGE, PAGE};
use crate::web::state::AppState;
use crate::web::view::RunView;

/// A session, with a page of its runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Session")]
pub struct SessionView<'a> {
    name: &'a str,
    /// Whose conversation is counted.
    agent: Option<&'a str>,
    /// The run with which it stands so.
    run: Option<RunId>,
    /// How many messages it has.
    messages: usize,
    data: Vec<RunView<'a>>,
    next_cursor: Option<RunId>,
}

/// The session of the caller's key: its runs, newest first, and the length of the conversation that its last completed
/// run left. Another key's session does not exist.
pub async fn get(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    caller: Caller,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["agent", "limit", "cursor"])?;
    let limit = query
        .parse("limit", "a number from 1 to 200", count(MAX_PAGE))?
        .unwrap_or(PAGE);
    let wanted = SessionQuery {
        owner: caller.name().map(str::to_owned),
        name: name.clone(),
        agent: query.get("agent").map(str::to_owned),
        status: None,
        before: query.parse("cursor", "a cursor of this list", |text| text.parse().ok())?,
        limit: limit + 1,
    };
    let store = state.runner.store();
    let last = SessionQuery {
        status: Some(Status::Completed),
        before: None,
        limit: 1,
        ..wanted.clone()
    };
    let is_first = wanted.before.is_none();
    let mut found = store.session(wanted).await?;
    let more =
        found.len() > limit || found.iter().map(Run::text_bytes).sum::<usize>() >= PAGE_BYTES;
    found.truncate(limit);
    let next_cursor = found.last().filter(|_| more).map(|run| run.id);
    let found = caller.seen(found, store.as_ref()).await?;
    if found.is_empty() && is_first {
        return Err(Problem::no_such_session(&name));
    }
    let last = caller
        .seen(store.session(last).await?, store.as_ref())
        .await?;
    let last = last.first();
    let messages = match last {
        Some(run) => Recorded::of(store.steps(run.id).await?).messages.len(),
        None => 0,
    };
    let now = now();
    let view = SessionView {
        name: &name,
        agent: last.map(|run| run.agent.as_str()),
        run: last.map(|run| run.id),
        messages,
        data: found
            .iter()
            .map(|run| RunView::new(run, &state.settings.path_prefix, now))
            .collect(),
        next_cursor,
    };
    Ok(runs::json(StatusCode::OK, &view))
}
