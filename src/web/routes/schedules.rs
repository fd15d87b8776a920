//! `/schedules`: the schedules of agents, when they start runs, and how to start one now.

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::info;

use crate::config::KeyScope::{Read, Run};
use crate::domain::evaluation::EvalId;
use crate::domain::run::RunId;
use crate::domain::schedule::{Schedule, Started};
use crate::domain::timestamp_text;
use crate::engine::schedules::scheduler::{ScheduleState, TriggerError, Triggered};
use crate::store::schedules::ScheduleId;
use crate::web::auth::Principal;
use crate::web::body::request_body::RequestBody;
use crate::web::error::{Problem, quote};
use crate::web::extract::body::JsonBody;
use crate::web::extract::idempotency::{self, RepeatKey};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::Params;
use crate::web::extract::provider_keys::NoProviderKeys;
use crate::web::extract::query::{NoQuery, Query};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    self, AgentInvalid, BudgetExhausted, Draining, InvalidModel, ProviderUnavailable, QueueFull,
    ScheduleNotFound,
};
use crate::web::response::eval::EvalView;
use crate::web::response::json::{ListResponse, json_response};
use crate::web::response::run::RunView;
use crate::web::route::{Input, Route, get, post};
use crate::web::routes::create_run::{ResponseMode, replay, respond_to_start};
use crate::web::routes::evals;
use crate::web::routes::pause::PauseRequest;
use crate::web::state::AppState;
use crate::web::wait::{Prefer, WaitQuery};

pub fn routes() -> Vec<Route> {
    vec![
        get("/schedules", [Read], list)
            .describe("list_schedules", "Lists the schedules of agents")
            .details(
                "Sorted by agent, then in the order of the agent's file. A key sees the schedules whose runs are its \
                 own, a key with the scope `admin` all.",
            )
            .response::<ListResponse<ScheduleView>>(200, "The schedules.")
            .example(json!({"data": [example()]})),
        post("/schedules/{agent}/{name}/trigger", [Run], trigger)
            .describe("trigger_schedule", "Starts a run of a schedule now")
            .details(
                "The run has the schedule's input, labels and owner. It starts even if the schedule is paused, or its \
                 last run has not ended. The times of the schedule stay as they are. A schedule with `eval` starts its \
                 evaluation: the response is that of `POST /evals`, and an `Idempotency-Key` has no effect.",
            )
            .response::<RunView<'static>>(200, "The run has ended.")
            .example(examples::run())
            .response::<RunView<'static>>(202, "The run is accepted.")
            .example(examples::accepted_run())
            .response_header(&[200, 202], "Location", "The URL of the run.")
            .problems(&[
                AgentInvalid, ProviderUnavailable, InvalidModel, QueueFull, BudgetExhausted,
                Draining,
            ]),
        post("/schedules/{agent}/{name}/pause", [Run], pause)
            .describe("pause_schedule", "Pauses a schedule")
            .details(
                "It starts no run until it is resumed, also after a restart of the daemon. Runs that have started \
                 continue.",
            )
            .request_example("empty", "Without fields", json!({}))
            .response::<ScheduleView>(200, "The schedule.")
            .example(example()),
        post("/schedules/{agent}/{name}/resume", [Run], resume)
            .describe("resume_schedule", "Resumes a paused schedule")
            .details("Times during the pause are not missed: the next one starts a run.")
            .request_example("empty", "Without fields", json!({}))
            .response::<ScheduleView>(200, "The schedule.")
            .example(example()),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Only schedules of this agent.
    agent: Option<String>,
}

/// The schedule of a path. Responds 404 if there is none that the principal may see.
struct VisibleSchedule(ScheduleState);

impl Input for VisibleSchedule {
    fn describe(route: Route) -> Route {
        route
            .path::<String>("agent", "The agent's name.", ScheduleNotFound)
            .path::<String>("name", "The schedule's name.", ScheduleNotFound)
    }
}

impl FromRequestParts<AppState> for VisibleSchedule {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let principal = Principal::from_parts(parts, state)?;
        let Params(ScheduleParams { agent, name }) =
            Params::from_request_parts(parts, state).await?;
        let id = ScheduleId { agent, name };
        let found = state.scheduler.find(&id).await?;
        let found = found.filter(|schedule| can_see(&principal, schedule));
        found.map(Self).ok_or_else(|| not_found(&id))
    }
}

#[derive(Deserialize)]
struct ScheduleParams {
    agent: String,
    name: String,
}

fn not_found(id: &ScheduleId) -> Problem {
    let (agent, name) = (quote(&id.agent), quote(&id.name));
    let detail = format!("agent {agent} has no schedule {name}");
    Problem::new(ProblemCode::ScheduleNotFound, detail)
}

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
    /// What it has started last; null before the first.
    last: Option<LastStart>,
    /// The last time, if nothing started then.
    skipped: Option<SkippedTime>,
}

/// What a schedule has started.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ScheduleStart")]
pub struct LastStart {
    /// The time of the schedule; if it was triggered, when it was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    at: Timestamp,
    /// The run, which may be deleted; null for an evaluation.
    run: Option<RunId>,
    /// The evaluation, which may be deleted; null for a run.
    eval: Option<EvalId>,
}

impl LastStart {
    fn new(at: Timestamp, started: Started) -> Self {
        let (run, eval) = started.ids();
        Self { at, run, eval }
    }
}

/// A time of a schedule at which nothing started.
#[derive(Serialize, JsonSchema)]
pub struct SkippedTime {
    /// The time of the schedule.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    at: Timestamp,
    /// Why nothing started.
    reason: String,
}

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
            last: last.map(|(at, started)| LastStart::new(at, started)),
            skipped,
        }
    }
}

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    Query(ListQuery { agent }): Query<ListQuery>,
) -> Result<Response, Problem> {
    let schedules = state.scheduler.list().await?.into_iter();
    let schedules = schedules.filter(|it| agent.as_ref().is_none_or(|agent| it.agent == *agent));
    let visible = schedules.filter(|it| can_see(&principal, it));
    let data = visible.map(ScheduleView::new).collect();
    Ok(json_response(StatusCode::OK, &ListResponse { data }))
}

/// Responds as to a new run.
async fn trigger(
    State(state): State<AppState>,
    (principal, links): (Principal, LinkPrefix),
    (Query(WaitQuery { wait }), prefer): (Query<WaitQuery>, Prefer),
    RepeatKey(key): RepeatKey,
    _: NoProviderKeys,
    VisibleSchedule(schedule): VisibleSchedule,
    body: RequestBody,
) -> Result<Response, Problem> {
    let wait = prefer.timeout(wait, state.settings.max_wait)?;
    body.json::<PauseRequest>()?;
    let claim = key.map(|key| {
        let (agent, name) = (&schedule.agent, &schedule.schedule.name);
        let route = format!("POST /schedules/{agent}/{name}/trigger");
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
        Ok(Triggered::Run(run)) => Ok((run, None)),
        Ok(Triggered::Eval(id)) => {
            let deadline = Instant::now() + wait;
            let eval = evals::wait_for_end(&state, id, deadline).await?;
            return evals::accepted(&EvalView::new(eval, &links));
        }
        Err(TriggerError::Start(error)) => Err(error),
        Err(TriggerError::Eval(refusal)) => {
            let detail = format!("no evaluation can start: {refusal}");
            return Err(Problem::new(ProblemCode::AgentInvalid, detail));
        }
        Err(TriggerError::Owner(error)) => {
            let detail = format!("no run can start: {error}");
            return Err(Problem::new(ProblemCode::AgentInvalid, detail));
        }
    };
    respond_to_start(&state, &links, &mode, started, claim).await
}

async fn pause(
    State(state): State<AppState>,
    _: NoQuery,
    VisibleSchedule(schedule): VisibleSchedule,
    _: JsonBody<PauseRequest>,
) -> Result<Response, Problem> {
    set_paused(&state, schedule, true).await
}

async fn resume(
    State(state): State<AppState>,
    _: NoQuery,
    VisibleSchedule(schedule): VisibleSchedule,
    _: JsonBody<PauseRequest>,
) -> Result<Response, Problem> {
    set_paused(&state, schedule, false).await
}

/// The schedule, once the change is committed.
async fn set_paused(
    state: &AppState,
    schedule: ScheduleState,
    is_paused: bool,
) -> Result<Response, Problem> {
    state.scheduler.set_paused(&schedule, is_paused).await?;
    let id = ScheduleId {
        agent: schedule.agent,
        name: schedule.schedule.name,
    };
    let action = if is_paused { "paused" } else { "resumed" };
    info!(agent = %id.agent, "Schedule {} of agent {} was {action} by a client", id.name, id.agent);
    let schedule = state
        .scheduler
        .find(&id)
        .await?
        .ok_or_else(|| not_found(&id))?;
    Ok(json_response(StatusCode::OK, &ScheduleView::new(schedule)))
}

/// A key sees the schedules whose runs are its own.
fn can_see(principal: &Principal, state: &ScheduleState) -> bool {
    let owner = principal.owner_filter();
    let is_own = owner.is_none_or(|owner| state.schedule.key.as_deref() == Some(owner));
    is_own && principal.can_use_agent(&state.agent)
}

fn example() -> Value {
    json!({
        "agent": "planner", "name": "morning", "cron": "30 7 * * mon-fri", "timezone": "Europe/Berlin",
        "input": "Sum up the tickets of yesterday.", "eval": null, "overlap": "skip", "missed": "once", "labels": {"team": "blue"},
        "key": null, "paused": false, "next": "2026-03-02T06:30:00.000Z",
        "last": {"at": "2026-02-27T06:30:00.000Z", "run": examples::ROOT, "eval": null}, "skipped": null,
    })
}
