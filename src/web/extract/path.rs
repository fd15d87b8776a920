//! The variable parts of a path: ids and names. Anything that the caller's key may not see does not exist.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::catalog::LoadError;
use crate::domain::agent::is_agent_name;
use crate::domain::run::RunId;
use crate::store::schedules::ScheduleId;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::state::AppState;

/// `{id}` of a path. Responds 404 if it is not a run id, or if the principal may not see the run.
pub struct RunPath(pub RunId);

impl FromRequestParts<AppState> for RunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let text: String = path_params(parts).await?;
        visible_run(parts, state, &text).await.map(Self)
    }
}

/// `{id}` of a path. Responds 404 as [`RunPath`] does, and also if the principal may not change the run.
pub struct ChangedRunPath(pub RunId);

impl FromRequestParts<AppState> for ChangedRunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let text: String = path_params(parts).await?;
        let principal = Principal::from_parts(parts, state)?;
        let id = text.parse().map_err(|_| Problem::run_not_found(&text))?;
        check_may_change(&principal, state, id)
            .await
            .map(|()| Self(id))
    }
}

/// `{id}` and `{delivery}` of a path. The run is checked as in [`RunPath`], the delivery id is not.
pub struct DeliveryPath(pub RunId, pub String);

impl FromRequestParts<AppState> for DeliveryPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let (run, delivery): (String, String) = path_params(parts).await?;
        let run = visible_run(parts, state, &run).await?;
        Ok(Self(run, delivery))
    }
}

/// `{id}` and `{turn}` of a path. The run is checked as in [`RunPath`], the number is not.
pub struct TurnPath(pub RunId, pub String);

impl FromRequestParts<AppState> for TurnPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let (run, turn): (String, String) = path_params(parts).await?;
        let run = visible_run(parts, state, &run).await?;
        Ok(Self(run, turn))
    }
}

/// `{id}` and `{sha256}` of a path. The run is checked as in [`RunPath`], the digest is not.
pub struct PicturePath(pub RunId, pub String);

impl FromRequestParts<AppState> for PicturePath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let (run, digest): (String, String) = path_params(parts).await?;
        let run = visible_run(parts, state, &run).await?;
        Ok(Self(run, digest))
    }
}

/// `{id}` and `{tool_call_id}` of a path. The run is checked as in [`RunPath`], the call id is not.
pub struct CallPath(pub RunId, pub String);

impl FromRequestParts<AppState> for CallPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let (run, call): (String, String) = path_params(parts).await?;
        let run = visible_run(parts, state, &run).await?;
        Ok(Self(run, call))
    }
}

/// `{id}` and `{other}` of a path, each checked as in [`RunPath`].
pub struct RunPairPath(pub RunId, pub RunId);

impl FromRequestParts<AppState> for RunPairPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let (run, other): (String, String) = path_params(parts).await?;
        let run = visible_run(parts, state, &run).await?;
        Ok(Self(run, visible_run(parts, state, &other).await?))
    }
}

async fn visible_run(parts: &Parts, state: &AppState, text: &str) -> Result<RunId, Problem> {
    visible_run_id(&Principal::from_parts(parts, state)?, state, text).await
}

/// The id in `text`, if the principal may see the run; 404 if not.
pub async fn visible_run_id(
    principal: &Principal,
    state: &AppState,
    text: &str,
) -> Result<RunId, Problem> {
    let id: RunId = text.parse().map_err(|_| Problem::run_not_found(text))?;
    if !principal.can_see_all_runs() {
        let store = state.runner.store().as_ref();
        let run = store.run(id).await?;
        let run = run.ok_or_else(|| Problem::run_not_found(id))?;
        if !principal.can_see_run(&run, store).await? {
            return Err(Problem::run_not_found(id));
        }
    }
    Ok(id)
}

/// 404 if the principal may not change the run.
pub async fn check_may_change(
    principal: &Principal,
    state: &AppState,
    id: RunId,
) -> Result<(), Problem> {
    if principal.can_see_all_runs() {
        return Ok(());
    }
    let store = state.runner.store().as_ref();
    let run = store.run(id).await?;
    let run = run.ok_or_else(|| Problem::run_not_found(id))?;
    match principal.can_change_run(&run, store).await? {
        true => Ok(()),
        false => Err(Problem::run_not_found(id)),
    }
}

/// `{name}` of an agent's path. Responds 404 if it is not an agent's name, or if the principal may not use the agent.
pub struct AgentPath(pub String);

impl FromRequestParts<AppState> for AgentPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let principal = Principal::from_parts(parts, state)?;
        let name: String = path_params(parts).await?;
        if is_agent_name(&name) && principal.can_use_agent(&name) {
            Ok(Self(name))
        } else {
            Err(LoadError::NotFound(name).into())
        }
    }
}

/// `{agent}` and `{name}` of a schedule's path. Neither is checked.
pub struct SchedulePath(pub ScheduleId);

impl FromRequestParts<AppState> for SchedulePath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        let (agent, name): (String, String) = path_params(parts).await?;
        Ok(Self(ScheduleId { agent, name }))
    }
}

/// `{agent}` and `{name}` of a trigger's path. Neither is checked.
pub struct TriggerPath {
    pub agent: String,
    pub name: String,
}

impl FromRequestParts<AppState> for TriggerPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        let (agent, name) = path_params(parts).await?;
        Ok(Self { agent, name })
    }
}

/// `{id}` of a batch's path. It is not checked.
pub struct BatchPath(pub String);

impl FromRequestParts<AppState> for BatchPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        path_params(parts).await.map(Self)
    }
}

/// `{id}` of a response's path. It is not checked.
pub struct ResponsePath(pub String);

impl FromRequestParts<AppState> for ResponsePath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        path_params(parts).await.map(Self)
    }
}

/// `{agent}` and `{id}` of the path of an agent's task, the id with the verb after it. Neither is checked.
pub struct TaskPath {
    pub agent: String,
    pub id: String,
}

impl FromRequestParts<AppState> for TaskPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        let (agent, id) = path_params(parts).await?;
        Ok(Self { agent, id })
    }
}

/// `{agent}`, `{id}` and `{config}` of the path of a task's push notifications. None is checked.
pub struct TaskConfigPath {
    pub agent: String,
    pub id: String,
    pub config: String,
}

impl FromRequestParts<AppState> for TaskConfigPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        let (agent, id, config) = path_params(parts).await?;
        Ok(Self { agent, id, config })
    }
}

/// `{name}` of a session's path. Responds 404 if it is not a session's name.
pub struct SessionPath(pub String);

impl FromRequestParts<AppState> for SessionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Problem> {
        let name: String = path_params(parts).await?;
        match is_agent_name(&name) {
            true => Ok(Self(name)),
            false => Err(Problem::session_not_found(&name)),
        }
    }
}

/// The variable parts of the path.
async fn path_params<T: DeserializeOwned + Send>(parts: &mut Parts) -> Result<T, Problem> {
    Path::<T>::from_request_parts(parts, &())
        .await
        .map(|Path(text)| text)
        .map_err(|rejection: PathRejection| {
            Problem::new(
                StatusCode::BAD_REQUEST,
                ProblemCode::MalformedPath,
                rejection.body_text(),
            )
        })
}
