//! `/a2a/{agent}/tasks/{id}` and its verbs: reads a task, cancels it, subscribes to it.

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::config::KeyScope;
use crate::domain::run::Run;
use crate::web::auth::Principal;
use crate::web::clients::a2a::error::task_ended;
use crate::web::clients::a2a::response;
use crate::web::clients::a2a::stream::TaskStream;
use crate::web::clients::a2a::task::{TaskParts, task};
use crate::web::clients::a2a::version::Version1;
use crate::web::clients::run_wait;
use crate::web::error::{Problem, quote};
use crate::web::extract::path::{Params, visible_run_id};
use crate::web::extract::query::Query;
use crate::web::problem_code::ProblemCode;
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;
use crate::web::wait;

/// The reason of a cancellation by a client.
const CANCELLED: &str = "cancelled by its A2A client";

/// `{agent}` and `{id}` of the path of an agent's task, the id with the verb after it.
#[derive(Deserialize)]
pub struct TaskPath {
    pub agent: String,
    pub id: String,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct TaskQuery {
    history_length: Option<usize>,
    #[serde(rename = "tenant")]
    _tenant: IgnoredAny,
    #[serde(rename = "A2A-Version")]
    _version: IgnoredAny,
}

/// `GET /a2a/{agent}/tasks/{id}`, also with `:subscribe`.
pub async fn get(
    State(state): State<AppState>,
    _: Version1,
    principal: Principal,
    Params(TaskPath { agent, id }): Params<TaskPath>,
    uri: Uri,
) -> Result<Response, Problem> {
    principal.require_scope(KeyScope::Read)?;
    if let Some(id) = id.strip_suffix(":subscribe") {
        return subscribe(&state, &principal, &agent, id).await;
    }
    let Query(query) = Query::<TaskQuery>::read(&uri)?;
    read(&state, &principal, &agent, &id, query.history_length).await
}

pub async fn read(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    id: &str,
    history: Option<usize>,
) -> Result<Response, Problem> {
    let run = find(state, principal, agent, id).await?;
    let task = task(state, &run, TaskParts::with_history(history)).await?;
    Ok(response::with_run_id(response::json(&task)?, run.id))
}

/// `POST /a2a/{agent}/tasks/{id}:cancel` and `:subscribe`.
pub async fn act(
    State(state): State<AppState>,
    _: Version1,
    principal: Principal,
    Params(TaskPath { agent, id }): Params<TaskPath>,
) -> Result<Response, Problem> {
    match id.rsplit_once(':') {
        Some((id, "cancel")) => {
            principal.require_scope(KeyScope::Cancel)?;
            cancel(&state, &principal, &agent, id).await
        }
        Some((id, "subscribe")) => {
            principal.require_scope(KeyScope::Read)?;
            subscribe(&state, &principal, &agent, id).await
        }
        _ => {
            let detail = format!(
                "{} is not a task's id with :cancel or :subscribe",
                quote(&id)
            );
            Err(Problem::new(ProblemCode::RouteNotFound, detail))
        }
    }
}

pub async fn cancel(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    id: &str,
) -> Result<Response, Problem> {
    let run = find(state, principal, agent, id).await?;
    if run.status.is_terminal() {
        let detail = format!("the task {id} has ended: it is {}", run.status.as_str());
        return Err(Problem::new(ProblemCode::RunTerminal, detail));
    }
    let cancelled = state
        .runner
        .cancel(run.id, Some(CANCELLED.to_owned()))
        .await?;
    let cancelled = cancelled.ok_or_else(|| Problem::run_not_found(id))?;
    let run = wait::wait_for_end(state, cancelled, state.settings.max_wait).await;
    let task = task(state, &run, TaskParts::with_history(None)).await?;
    Ok(response::with_run_id(response::json(&task)?, run.id))
}

pub async fn subscribe(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    id: &str,
) -> Result<Response, Problem> {
    let found = find(state, principal, agent, id).await?;
    // First the subscription, then the record: no event is missed.
    let subscription = state.runner.subscribe(found.id).await;
    let run = Arc::new(require_run(state, found.id).await?);
    if run.status.is_terminal() {
        return Err(task_ended(id, run.status.as_str()));
    }
    let first = task(state, &run, TaskParts::with_history(None)).await?;
    let stream = TaskStream::new(state, run, first).await;
    Ok(stream.joining().into_response(state, subscription, false))
}

/// The root run of the agent with this id; 404 if the principal may not see it.
pub async fn find(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    id: &str,
) -> Result<Run, Problem> {
    let run_id = visible_run_id(principal, state, id).await?;
    let run = require_run(state, run_id).await?;
    match run.agent == agent && run.parent_id.is_none() {
        true => Ok(run),
        false => Err(Problem::run_not_found(id)),
    }
}

/// The run once it has ended, or requires input that `run` does not; also if the daemon is stopping.
pub async fn wait_for_stop(state: &AppState, run: Arc<Run>) -> Arc<Run> {
    let id = run.id;
    let stopped = run_wait::wait_for_stop(state.runner.clone(), Arc::clone(&run), true);
    tokio::select! {
        biased;
        stopped = stopped => stopped,
        () = state.closing.cancelled() => {
            let current = state.runner.store().run(id).await;
            current.ok().flatten().map_or(run, Arc::new)
        }
    }
}
