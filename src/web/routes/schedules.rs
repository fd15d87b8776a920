//! `/schedules`: the schedules of agents, when they start runs, and how to start one now.

use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::domain::run::RunId;
use crate::domain::schedule::Schedule;
use crate::domain::timestamp_text;
use crate::engine::schedules::scheduler::{ScheduleState, TriggerError};
use crate::store::schedules::ScheduleId;
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::extract::idempotency;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::SchedulePath;
use crate::web::extract::provider_keys;
use crate::web::extract::query::Query;
use crate::web::extract::request_body;
use crate::web::problem_code::ProblemCode;
use crate::web::response::json::{ListResponse, json_response};
use crate::web::routes::create_run::{ResponseMode, replay, respond_to_start};
use crate::web::state::AppState;
use crate::web::wait;

/// A schedule of an agent.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Schedule")]
pub struct ScheduleView {
    /// The agent that runs.
    agent: String,
    #[serde(flatten)]
    schedule: Schedule,
    /// Whether it starts no run until it is resumed.
    paused: bool,
    /// When it starts a run next; null while it is paused.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    next: Option<Timestamp>,
    /// Its last run; null before the first.
    last: Option<ScheduledRun>,
    /// The last time, if no run started then.
    skipped: Option<SkippedTime>,
}

/// A run of a schedule.
#[derive(Serialize, JsonSchema)]
pub struct ScheduledRun {
    /// The time of the schedule; if the run was triggered, when it was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    at: Timestamp,
    /// The run. It may be deleted.
    run: RunId,
}

/// A time of a schedule at which no run started.
#[derive(Serialize, JsonSchema)]
pub struct SkippedTime {
    /// The time of the schedule.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    at: Timestamp,
    /// Why no run started.
    reason: String,
}

/// The body, which may also be absent.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct NoFields {}

impl ScheduleView {
    fn new(state: ScheduleState) -> Self {
        let ScheduleState {
            agent,
            schedule,
            record,
            next,
        } = state;
        let is_paused = record.as_ref().is_some_and(|it| it.is_paused);
        let last = record.as_ref().and_then(|it| it.last);
        let skipped = record.and_then(|it| {
            let (at, reason) = (it.handled_at, it.error?);
            Some(SkippedTime { at, reason })
        });
        Self {
            agent,
            schedule,
            paused: is_paused,
            next,
            last: last.map(|(at, run)| ScheduledRun { at, run }),
            skipped,
        }
    }
}

/// `GET /schedules`
pub async fn list(
    State(state): State<AppState>,
    principal: Principal,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["agent"])?;
    let agent = query.get("agent");
    let schedules = state.scheduler.list().await?.into_iter();
    let schedules = schedules.filter(|it| agent.is_none_or(|agent| it.agent == agent));
    let visible = schedules.filter(|it| can_see(&principal, it));
    let data = visible.map(ScheduleView::new).collect();
    Ok(json_response(StatusCode::OK, &ListResponse { data }))
}

/// `POST /schedules/{agent}/{name}/trigger`: responds as to a new run.
pub async fn trigger(
    State(state): State<AppState>,
    SchedulePath(id): SchedulePath,
    principal: Principal,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let query = Query::read(&parts.uri, &["wait"])?;
    let wait = wait::requested_wait(&query, &parts.headers, state.settings.max_wait)?;
    provider_keys::refuse(&parts.headers)?;
    let schedule = visible_schedule(&state, &principal, &id).await?;
    let body = request_body::read(&parts, body, state.settings.body_limits()).await?;
    body.json::<NoFields>()?;
    let claim = idempotency::read_key(&parts.headers)?.map(|key| {
        let route = format!("POST /schedules/{}/{}/trigger", id.agent, id.name);
        let hash = idempotency::fingerprint(body.content_type().as_bytes(), b"");
        idempotency::new_claim(principal.key_name(), route, key, hash)
    });
    let mode = ResponseMode::Run { wait };
    if let Some(claim) = &claim
        && let Some(claimed) = state.runner.store().claimed_run(claim.key.clone()).await?
    {
        return Box::pin(replay(&state, &links, &mode, claim, claimed)).await;
    }
    let started = match state.scheduler.trigger(&schedule, claim.clone()).await {
        Ok(run) => Ok((run, None)),
        Err(TriggerError::Start(error)) => Err(error),
        Err(TriggerError::Owner(error)) => {
            let code = ProblemCode::AgentInvalid;
            let detail = format!("no run can start: {error}");
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, code, detail));
        }
    };
    respond_to_start(&state, &links, &mode, started, claim).await
}

/// `POST /schedules/{agent}/{name}/pause`
pub async fn pause(
    State(state): State<AppState>,
    SchedulePath(id): SchedulePath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    set_paused(&state, &principal, &id, request, true).await
}

/// `POST /schedules/{agent}/{name}/resume`
pub async fn resume(
    State(state): State<AppState>,
    SchedulePath(id): SchedulePath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    set_paused(&state, &principal, &id, request, false).await
}

/// The schedule, once the change is committed.
async fn set_paused(
    state: &AppState,
    principal: &Principal,
    id: &ScheduleId,
    request: Request,
    is_paused: bool,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    Query::read(&parts.uri, &[])?;
    let schedule = visible_schedule(state, principal, id).await?;
    let body = request_body::read(&parts, body, state.settings.body_limits()).await?;
    body.json::<NoFields>()?;
    state.scheduler.set_paused(&schedule, is_paused).await?;
    let action = if is_paused { "paused" } else { "resumed" };
    info!(agent = %id.agent, "Schedule {} of agent {} was {action} by a client", id.name, id.agent);
    let schedule = visible_schedule(state, principal, id).await?;
    Ok(json_response(StatusCode::OK, &ScheduleView::new(schedule)))
}

async fn visible_schedule(
    state: &AppState,
    principal: &Principal,
    id: &ScheduleId,
) -> Result<ScheduleState, Problem> {
    let found = state.scheduler.find(id).await?;
    let found = found.filter(|schedule| can_see(principal, schedule));
    found.ok_or_else(|| {
        let (agent, name) = (quote(&id.agent), quote(&id.name));
        let detail = format!("agent {agent} has no schedule {name}");
        Problem::new(StatusCode::NOT_FOUND, ProblemCode::ScheduleNotFound, detail)
    })
}

/// A key sees the schedules whose runs are its own.
fn can_see(principal: &Principal, state: &ScheduleState) -> bool {
    let owner = principal.owner_filter();
    let is_own = owner.is_none_or(|owner| state.schedule.key.as_deref() == Some(owner));
    is_own && principal.can_use_agent(&state.agent)
}
