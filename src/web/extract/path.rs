//! The variable parts of a path: ids and names. Anything that the caller's key may not see does not exist.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::catalog::LoadError;
use crate::domain::agent::is_agent_name;
use crate::domain::run::{Run, RunId};
use crate::domain::run_ref::{self, IdPart, RunRef};
use crate::store::runs::RunFilter;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::route::{Input, Route};
use crate::web::state::AppState;

/// Maximum number of runs that the error about an ambiguous part of an id names.
const MAX_CANDIDATES: usize = 10;
/// Among so many of the newest runs, the one is searched that a client may have meant.
const SIMILAR_AMONG: usize = 50;

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

/// `{id}` of a path, or a part of an id that names one run. Responds 404 if there is no such run, or if the principal may not see
/// it, and 400 if a part names several.
pub struct RunPath(pub RunId);

impl Input for RunPath {
    fn describe(route: Route) -> Route {
        describe_run(route, "id", "The run's id.")
    }
}

/// Adds a run of the path to an operation.
pub fn describe_run(route: Route, name: &'static str, description: &'static str) -> Route {
    route
        .path::<RunRef>(name, description, ProblemCode::RunNotFound)
        .problems(&[ProblemCode::AmbiguousRun])
}

impl FromRequestParts<AppState> for RunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let Params(IdParam { id }) = Params::from_request_parts(parts, state).await?;
        let principal = Principal::from_parts(parts, state)?;
        visible_run_id(&principal, state, &id).await.map(Self)
    }
}

/// `{id}` of a path. Responds as [`RunPath`] does, and 404 also if the principal may not change the run.
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
        let run = text.parse().map_err(|_| Problem::run_not_found(&text))?;
        let id = run_id(&principal, state, &run).await?;
        check_may_change(&principal, state, id).await?;
        Ok(Self(id))
    }
}

/// The id of the run in `text`, if the principal may see the run; 404 if not.
pub async fn visible_run_id(
    principal: &Principal,
    state: &AppState,
    text: &str,
) -> Result<RunId, Problem> {
    let run = text.parse().map_err(|_| Problem::run_not_found(text))?;
    let id = run_id(principal, state, &run).await?;
    if matches!(run, RunRef::Id(_)) && !principal.can_see_all_runs() {
        let store = state.runner.store().as_ref();
        let found = store.run(id).await?;
        let is_visible = match &found {
            Some(found) => principal.can_see_run(found, store).await?,
            None => false,
        };
        if !is_visible {
            return Err(unknown_run(principal, state, &run).await);
        }
    }
    Ok(id)
}

/// The id of a run that a client names: a whole id as it is, a part of one if it names one of the runs that the principal may
/// see.
pub async fn run_id(
    principal: &Principal,
    state: &AppState,
    run: &RunRef,
) -> Result<RunId, Problem> {
    let part = match run {
        RunRef::Id(id) => return Ok(*id),
        RunRef::Part(part) => part,
    };
    let store = state.runner.store().as_ref();
    let owner = principal.owner_filter().map(str::to_owned);
    let ids = store.runs_named(part.clone(), owner, MAX_CANDIDATES + 1);
    let mut ids = ids.await?;
    if let [id] = ids[..]
        && principal.can_see_all_runs()
    {
        return Ok(id);
    }
    let has_more = ids.len() > MAX_CANDIDATES;
    ids.truncate(MAX_CANDIDATES);
    let mut runs = Vec::with_capacity(ids.len());
    for id in ids {
        runs.extend(store.run(id).await?);
    }
    let runs = principal.visible_runs(runs, store).await?;
    match &runs[..] {
        [] => Err(unknown_run(principal, state, run).await),
        [run] if !has_more => Ok(run.id),
        runs => Err(ambiguous_run(part, runs, has_more)),
    }
}

fn ambiguous_run(part: &IdPart, runs: &[Run], has_more: bool) -> Problem {
    let candidates = runs.iter().map(|run| {
        let created = run.created_at;
        format!("{} ({}, {created:.0})", run.id, run.agent)
    });
    let others = has_more.then(|| "and others".to_owned());
    let candidates: Vec<String> = candidates.chain(others).collect();
    let detail = format!("several runs have {part}: {}", candidates.join(", "));
    Problem::new(ProblemCode::AmbiguousRun, detail)
}

/// 404, with the run that the client may have meant: one of the newest.
pub async fn unknown_run(principal: &Principal, state: &AppState, run: &RunRef) -> Problem {
    let store = state.runner.store();
    let newest = RunFilter {
        owner: principal.owner_filter().map(str::to_owned),
        include_children: true,
        cut_texts: true,
        limit: SIMILAR_AMONG,
        ..RunFilter::default()
    };
    // Without them the run is unknown all the same.
    let runs = match store.list(newest).await {
        Ok(page) => principal.visible_runs(page.runs, store.as_ref()).await,
        Err(error) => Err(error),
    };
    let ids = runs.unwrap_or_default().into_iter().map(|run| run.id);
    let similar = run_ref::similar_run(run, ids);
    Problem::run_not_found_but(run, similar)
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

/// 404 if the agent has no file.
pub fn require_agent(principal: &Principal, state: &AppState, name: &str) -> Result<(), Problem> {
    match state.runner.catalog().current().entries.contains_key(name) {
        true => Ok(()),
        false => Err(unknown_agent(principal, state, name)),
    }
}

/// 404, with the agent that the client may have meant.
pub fn unknown_agent(principal: &Principal, state: &AppState, name: &str) -> Problem {
    let agents = state.runner.catalog().current();
    let known = agents.entries.keys().map(String::as_str);
    let usable = known.filter(|known| principal.can_use_agent(known));
    Problem::agent_not_found(name, usable)
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
