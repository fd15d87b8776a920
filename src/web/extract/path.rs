//! The variable parts of a path: ids and names. Anything that the caller's key may not see does not exist.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::catalog::LoadError;
use crate::domain::agent::is_agent_name;
use crate::domain::run::RunId;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::route::{Input, Route};
use crate::web::state::AppState;

/// The variable parts of a path as the client spells them: a struct with their names, or a text for the only one.
pub struct Params<T>(pub T);

impl<T> Input for Params<T> {}

impl<T: DeserializeOwned + Send, S: Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let params = Path::<T>::from_request_parts(parts, &()).await;
        params
            .map(|Path(params)| Self(params))
            .map_err(|rejection: PathRejection| {
                let code = ProblemCode::MalformedPath;
                Problem::new(code, rejection.body_text())
            })
    }
}

/// `{id}` of a path.
#[derive(Deserialize)]
pub struct IdParam {
    pub id: String,
}

/// `{id}` of a path. Responds 404 if it is not a run id, or if the principal may not see the run.
pub struct RunPath(pub RunId);

impl Input for RunPath {
    fn describe(route: Route) -> Route {
        route.path::<RunId>("id", "The run's id.", ProblemCode::RunNotFound)
    }
}

impl FromRequestParts<AppState> for RunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let Params(IdParam { id }) = Params::from_request_parts(parts, state).await?;
        visible_run(parts, state, &id).await.map(Self)
    }
}

/// `{id}` of a path. Responds 404 as [`RunPath`] does, and also if the principal may not change the run.
pub struct ChangedRunPath(pub RunId);

impl Input for ChangedRunPath {
    fn describe(route: Route) -> Route {
        RunPath::describe(route)
    }
}

impl FromRequestParts<AppState> for ChangedRunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let Params(IdParam { id: text }) = Params::from_request_parts(parts, state).await?;
        let principal = Principal::from_parts(parts, state)?;
        let id = text.parse().map_err(|_| Problem::run_not_found(&text))?;
        check_may_change(&principal, state, id).await?;
        Ok(Self(id))
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

impl Input for AgentPath {
    fn describe(route: Route) -> Route {
        route.path::<String>("name", "The agent's name.", ProblemCode::AgentNotFound)
    }
}

impl FromRequestParts<AppState> for AgentPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let principal = Principal::from_parts(parts, state)?;
        let Params(name) = Params::<String>::from_request_parts(parts, state).await?;
        if is_agent_name(&name) && principal.can_use_agent(&name) {
            Ok(Self(name))
        } else {
            Err(LoadError::NotFound(name).into())
        }
    }
}

/// `{name}` of a session's path. Responds 404 if it is not a session's name.
pub struct SessionPath(pub String);

impl Input for SessionPath {
    fn describe(route: Route) -> Route {
        route.path::<String>("name", "The session's name.", ProblemCode::SessionNotFound)
    }
}

impl FromRequestParts<AppState> for SessionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let Params(name) = Params::<String>::from_request_parts(parts, state).await?;
        match is_agent_name(&name) {
            true => Ok(Self(name)),
            false => Err(Problem::session_not_found(&name)),
        }
    }
}
