//! `/a2a/{agent}/tasks/{id}/pushNotificationConfigs`: who is notified of the task's states.

use crate::web::clients::a2a::types::{
    AuthenticationInfo, ListTaskPushNotificationConfigsResponse, TaskPushNotificationConfig,
};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::domain::run::{Run, RunId};
use crate::store::push_configs::{MAX_PUSH_CONFIGS, PushConfig};
use crate::web::auth::Principal;
use crate::web::body::request_body::{self, RequestBody};
use crate::web::clients::a2a::context::context_id;
use crate::web::clients::a2a::push_config::PushConfigInput;
use crate::web::clients::a2a::response;
use crate::web::clients::a2a::tasks::{TaskPath, find};
use crate::web::clients::a2a::version::Version1;
use crate::web::error::{Problem, quote};
use crate::web::extract::path::Params;
use crate::web::problem_code::ProblemCode;
use crate::web::state::AppState;

/// `{agent}`, `{id}` and `{config}` of the path of a task's push notifications.
#[derive(Deserialize)]
pub struct TaskConfigPath {
    pub agent: String,
    pub id: String,
    pub config: String,
}

/// `POST …/pushNotificationConfigs`
pub async fn create(
    State(state): State<AppState>,
    _: Version1,
    principal: Principal,
    Params(TaskPath { agent, id }): Params<TaskPath>,
    request: Request,
) -> Result<Response, Problem> {
    let run = find(&state, &principal, &agent, &id).await?;
    let (parts, body) = request.into_parts();
    let body = request_body::read(&parts, body, state.settings.body_limits()).await?;
    respond_to_new(&state, &run, &body).await
}

/// The configuration of a body, added.
pub async fn respond_to_new(
    state: &AppState,
    run: &Run,
    body: &RequestBody,
) -> Result<Response, Problem> {
    let config = add(state, run, body.json()?, "", RunId::new().0.to_string()).await?;
    response::json(&view(run.id, &config))
}

/// Adds a configuration, which is at `pointer` in the body.
pub async fn add(
    state: &AppState,
    run: &Run,
    input: PushConfigInput,
    pointer: &str,
    default_id: String,
) -> Result<PushConfig, Problem> {
    let guard = state.runner.webhook_guard();
    let config = input.into_config(pointer, guard, default_id, context_id(run))?;
    match state
        .runner
        .store()
        .add_push_config(run.id, config.clone())
        .await?
    {
        true => Ok(config),
        false => {
            let why =
                format!("a task has at most {MAX_PUSH_CONFIGS} push notification configurations");
            Err(Problem::invalid_field(pointer, why))
        }
    }
}

/// Whether a task that has not ended lacks this configuration. The end of another one is in the response.
pub async fn is_missing(
    state: &AppState,
    run: &Run,
    input: &PushConfigInput,
    default_id: &str,
) -> Result<bool, Problem> {
    if run.status.is_terminal() {
        return Ok(false);
    }
    let id = input.id_or(default_id);
    let configs = state.runner.store().push_configs(run.id).await?;
    Ok(configs.iter().all(|config| config.id != id))
}

/// `GET …/pushNotificationConfigs/{config}`
pub async fn get(
    State(state): State<AppState>,
    _: Version1,
    principal: Principal,
    Params(TaskConfigPath { agent, id, config }): Params<TaskConfigPath>,
) -> Result<Response, Problem> {
    let run = find(&state, &principal, &agent, &id).await?;
    let configs = state.runner.store().push_configs(run.id).await?;
    let found = configs.into_iter().find(|it| it.id == config);
    let found = found.ok_or_else(|| {
        let detail = format!(
            "the task {id} has no push notification configuration {}",
            quote(&config)
        );
        Problem::new(ProblemCode::RunNotFound, detail)
    })?;
    response::json(&view(run.id, &found))
}

/// `GET …/pushNotificationConfigs`
pub async fn list(
    State(state): State<AppState>,
    _: Version1,
    principal: Principal,
    Params(TaskPath { agent, id }): Params<TaskPath>,
) -> Result<Response, Problem> {
    let run = find(&state, &principal, &agent, &id).await?;
    let configs = state.runner.store().push_configs(run.id).await?;
    response::json(&ListTaskPushNotificationConfigsResponse {
        configs: configs.iter().map(|config| view(run.id, config)).collect(),
    })
}

/// `DELETE …/pushNotificationConfigs/{config}`, also if it does not exist any more.
pub async fn delete(
    State(state): State<AppState>,
    _: Version1,
    principal: Principal,
    Params(TaskConfigPath { agent, id, config }): Params<TaskConfigPath>,
) -> Result<Response, Problem> {
    let run = find(&state, &principal, &agent, &id).await?;
    state
        .runner
        .store()
        .delete_push_config(run.id, config)
        .await?;
    response::json(&json!({}))
}

/// Without the credentials, which nobody gets back.
fn view(task: RunId, config: &PushConfig) -> TaskPushNotificationConfig {
    let authentication = config
        .target
        .scheme
        .clone()
        .map(|scheme| AuthenticationInfo { scheme });
    TaskPushNotificationConfig {
        url: config.url.clone(),
        id: config.id.clone(),
        task_id: task.to_string(),
        token: config.target.token.clone(),
        authentication,
    }
}
