//! `POST /runs/{id}/fork`.

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::json;

use crate::config::KeyScope;
use crate::domain::run_ref::RunRef;
use crate::engine::fork::request::{ForkError, ForkRequest};
use crate::engine::request::RunRequest;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::fork_request::ForkInput;
use crate::web::extract::idempotency;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{RunPath, check_may_change, run_id};
use crate::web::extract::query::Query;
use crate::web::problem_code::ProblemCode::{
    self, AgentInvalid, IdempotencyConflict, InvalidBody, InvalidModel, InvalidOverride,
    NotForkable, ProviderKeyRefused, ProviderUnavailable, SessionBusy, UnpricedModel,
};
use crate::web::route::{Route, post};
use crate::web::routes::create_run::{
    ParsedRequest, ResponseMode, replay, respond_to_start, with_start,
};
use crate::web::state::AppState;
use crate::web::wait::{Prefer, WaitQuery};

pub fn routes() -> Vec<Route> {
    vec![
        post("/runs/{id}/fork", [KeyScope::Run], fork)
            .describe("fork_run", "Starts a run from a part of another run's record")
            .details(
                "The new root run takes over the recorded prompt, replies and results before the point, and continues \
                 from there, with copies of the runs below it that had not returned. What it takes over costs \
                 nothing, and has no events. Results of child runs that had ended are taken over too. The other run \
                 may be active, and may be deleted later. Responds as `create_run` does.",
            )
            .input::<(Query<WaitQuery>, Prefer)>()
            .request_body::<ForkInput>()
            .request_example("end", "Continue after the last recorded step", json!({}))
            .request_example(
                "turn",
                "Request the third turn anew, of another model",
                json!({"at": {"turn": 3}, "edit": {"model": "openai/gpt-6-sol"}}),
            )
            .problems(&[
                InvalidBody, InvalidModel, InvalidOverride, UnpricedModel, AgentInvalid,
                ProviderUnavailable, ProviderKeyRefused,
            ])
            .with(with_start)
            .problems(&[NotForkable, SessionBusy, IdempotencyConflict]),
    ]
}

/// Accepts a fork. Responds as to a new run.
async fn fork(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    principal: Principal,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    let owner = principal.key_name().map(str::to_owned);
    let ParsedRequest {
        body,
        response_mode,
        idempotency_key,
        trace,
        provider_keys,
    } = Box::pin(ParsedRequest::read(&state.settings, request)).await?;
    let claim = idempotency_key.map(|(key, body)| {
        let route = format!("POST /runs/{id}/fork");
        idempotency::new_claim(owner.as_deref(), route, key, body)
    });
    if let Some(claim) = &claim
        && let Some(claimed) = state.runner.store().claimed_run(claim.key.clone()).await?
    {
        drop(body);
        return Box::pin(replay(&state, &links, &response_mode, claim, claimed)).await;
    }
    let mut input: ForkInput = body.json()?;
    if let Some(run) = input.run_mut()
        && let Ok(part @ RunRef::Part(_)) = run.parse()
    {
        *run = run_id(&principal, &state, &part).await?.to_string();
    }
    check_admin_edit(&principal, &input)?;
    let fork_request = Box::pin(input.into_request(id, owner, &state.settings)).await?;
    let at_run = fork_request.at.run.unwrap_or(id);
    check_may_change(&principal, &state, at_run).await?;
    let mut fork_request = ForkRequest {
        is_by_admin: principal.has_scope(KeyScope::Admin),
        new_run: RunRequest {
            trace,
            provider_keys,
            claim: claim.clone(),
            ..fork_request.new_run
        },
        ..fork_request
    };
    let started = match response_mode {
        ResponseMode::Stream => {
            let stream = &mut fork_request.new_run.stream;
            *stream = stream.or(Some(true));
            let started = Box::pin(state.runner.fork_and_subscribe(fork_request)).await;
            started.map(|(run, listener)| (run, Some(listener)))
        }
        ResponseMode::Run { .. } => Box::pin(state.runner.fork(fork_request))
            .await
            .map(|run| (run, None)),
    };
    let started = match started {
        Err(ForkError::Start(error)) => Err(error),
        started => Ok(started?),
    };
    respond_to_start(&state, &links, &response_mode, started, claim).await
}

/// Whether the principal may replace what the operator or the model wrote.
fn check_admin_edit(principal: &Principal, input: &ForkInput) -> Result<(), Problem> {
    match input.admin_edit() {
        Some(pointer) if !principal.has_scope(KeyScope::Admin) => Err(Problem::new(
            ProblemCode::InsufficientScope,
            format!("{pointer}: needs a key with the scope admin"),
        )),
        _ => Ok(()),
    }
}
