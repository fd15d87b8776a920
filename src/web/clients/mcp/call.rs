//! `tools/call`: starts a run of the agent, or continues to wait for one whose approvals the client has answered.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use rmcp::model::{CallToolRequestParams, CreateTaskResult, ErrorCode, InputResponses, JsonObject};
use serde_json::{Value, json};

use crate::config::KeyScope;
use crate::domain::agent::is_agent_name;
use crate::domain::run::{Run, RunId};
use crate::domain::trace::TraceContext;
use crate::engine::request::RunRequest;
use crate::engine::state::broadcaster::Subscription;
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::body::request_body::RequestBody;
use crate::web::clients::mcp::call_stream::CallStream;
use crate::web::clients::mcp::open_calls::{CallKey, OpenCalls};
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{RpcError, RpcRequest, problem_data};
use crate::web::clients::mcp::server_info::complete;
use crate::web::clients::mcp::{approvals, call_result, tasks, tools};
use crate::web::clients::run_wait::{self, CancelOnDrop};
use crate::web::clients::start;
use crate::web::error::{Problem, quote};
use crate::web::extract::idempotency;
use crate::web::extract::path::visible_run_id;
use crate::web::extract::provider_keys;
use crate::web::extract::run_request::build_run_request;
use crate::web::problem_code::ProblemCode;
use crate::web::response::stream_driver::StreamDriver;
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;
use crate::web::wait;

/// A run that ends within this time is answered with its result also if the client takes tasks.
const TASK_DELAY: Duration = Duration::from_secs(1);

/// The answer to a call.
pub enum CallOutcome {
    Result {
        result: Value,
        run: Option<RunId>,
    },
    Waiting {
        run: RunId,
        stream: Box<StreamDriver<CallStream>>,
    },
}

/// A run that was started or found, and what happens in it from now on.
struct CalledRun {
    run: Arc<Run>,
    events: Option<Subscription>,
}

pub async fn call(
    state: &AppState,
    open_calls: &Arc<OpenCalls>,
    principal: &Principal,
    headers: &HeaderMap,
    caller: &Caller,
    request: &RpcRequest,
) -> Result<CallOutcome, RpcError> {
    let params: CallToolRequestParams = request.params().await?;
    match params.request_state {
        Some(_) => principal.require_any_scope(&[KeyScope::Run, KeyScope::Approve])?,
        None => principal.require_scope(KeyScope::Run)?,
    }
    let agent = params.name.as_ref();
    let is_known = is_agent_name(agent)
        && principal.can_use_agent(agent)
        && state.runner.catalog().current().entries.contains_key(agent);
    if !is_known {
        return Err(unknown_tool(agent));
    }
    let called = match params.request_state.as_deref() {
        Some(id) => {
            let responses = params.input_responses.unwrap_or_default();
            continue_run(state, principal, agent, id, &responses).await
        }
        None => {
            let claim = read_claim(principal, headers, agent, params.arguments.as_ref())?;
            let start = start_run(
                state,
                principal,
                headers,
                caller,
                agent,
                params.arguments,
                claim,
            );
            start.await
        }
    };
    match called {
        Ok(called) => {
            let respond = respond(
                state, open_calls, principal, headers, caller, request, called,
            );
            respond.await
        }
        Err(problem) if is_for_model(&problem) => Ok(CallOutcome::Result {
            result: complete(call_result::from_problem(&problem), caller.is_modern)?,
            run: None,
        }),
        Err(problem) => Err(problem.into()),
    }
}

/// Whether the client's model may be able to do something about it.
fn is_for_model(problem: &Problem) -> bool {
    matches!(
        problem.status(),
        StatusCode::BAD_REQUEST
            | StatusCode::CONFLICT
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY
    )
}

fn unknown_tool(name: &str) -> RpcError {
    let detail = format!("there is no tool {}", quote(name));
    let problem = Problem::new(ProblemCode::AgentNotFound, detail.as_str());
    RpcError::new(ErrorCode::INVALID_PARAMS, detail).with_data(problem_data(&problem))
}

/// The claim of the request's idempotency key. A repetition may have another id, but calls the same agent with the same
/// arguments.
fn read_claim(
    principal: &Principal,
    headers: &HeaderMap,
    agent: &str,
    arguments: Option<&JsonObject>,
) -> Result<Option<IdempotencyClaim>, Problem> {
    let Some(key) = idempotency::read_key(headers)? else {
        return Ok(None);
    };
    let call = json!([agent, arguments]).to_string();
    let fingerprint = idempotency::fingerprint(b"", call.as_bytes());
    let route = "POST /mcp".to_owned();
    let claim = idempotency::new_claim(principal.key_name(), route, key, fingerprint);
    Ok(Some(claim))
}

async fn start_run(
    state: &AppState,
    principal: &Principal,
    headers: &HeaderMap,
    caller: &Caller,
    agent: &str,
    arguments: Option<JsonObject>,
    claim: Option<IdempotencyClaim>,
) -> Result<CalledRun, Problem> {
    if let Some(existing) = start::find(state, claim.as_ref()).await? {
        let events = state.runner.subscribe(existing.run.id).await;
        let run = showing_approvals(Arc::unwrap_or_clone(existing.run));
        return Ok(CalledRun { run, events });
    }
    let agents = state.runner.catalog().current();
    let body = tools::run_request_body(agents.get(agent)?, arguments)?;
    let body = RequestBody::Json(body.into());
    let owner = principal.key_name().map(str::to_owned);
    let request = build_run_request(body, agent.to_owned(), owner, &state.settings).await?;
    let traceparent = caller.traceparent.as_deref();
    let request = RunRequest {
        trace: traceparent.and_then(TraceContext::parse).map(Box::new),
        provider_keys: provider_keys::read(headers)?,
        claim,
        ..request
    };
    let started = run_wait::start(state, request, caller.progress_token.is_some()).await?;
    Ok(CalledRun {
        run: started.run,
        events: started.subscription,
    })
}

/// The run as if it did not wait, so that its pending approvals are shown again.
fn showing_approvals(mut run: Run) -> Arc<Run> {
    run.pending_inputs.clear();
    run.waiting_for = None;
    Arc::new(run)
}

/// The run that an earlier answer to this call named, with the client's decisions applied. The id is no secret and grants
/// nothing: the key's own rights are checked.
async fn continue_run(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    id: &str,
    responses: &InputResponses,
) -> Result<CalledRun, Problem> {
    let id = visible_run_id(principal, state, id).await?;
    let run = require_run(state, id).await?;
    if run.agent != agent || run.parent_id.is_some() {
        return Err(Problem::run_not_found(id));
    }
    let events = state.runner.subscribe(id).await;
    let is_decided = approvals::apply(state, principal, &run, responses).await?;
    let run = match is_decided {
        true => Arc::new(run),
        false => showing_approvals(run),
    };
    Ok(CalledRun { run, events })
}

async fn respond(
    state: &AppState,
    open_calls: &Arc<OpenCalls>,
    principal: &Principal,
    headers: &HeaderMap,
    caller: &Caller,
    request: &RpcRequest,
    called: CalledRun,
) -> Result<CallOutcome, RpcError> {
    let CalledRun { run, events } = called;
    let id = run.id;
    // A key that cannot read the task is of no use for it.
    if caller.supports_tasks() && principal.has_scope(KeyScope::Read) {
        let mut guard = CancelOnDrop::new(state, id);
        let run = wait::wait_for_end_or_person(state, run, TASK_DELAY).await;
        guard.disarm();
        let result = match run.status.is_terminal() {
            true => complete(call_result::from_run(&run, true), true)?,
            false => {
                let task = tasks::task(state, &run);
                let mut result = CreateTaskResult::new(task);
                result.meta = Some(call_result::run_meta(&run));
                complete(result, true)?
            }
        };
        let run = Some(id);
        return Ok(CallOutcome::Result { result, run });
    }
    let request = request.id.clone();
    let key = match caller.is_modern {
        true => None,
        false => CallKey::new(principal, headers, request.clone()),
    };
    let open_call = key.map(|key| open_calls.add(key));
    let stream = CallStream::drive(state, principal, caller, request, run, events, open_call);
    Ok(CallOutcome::Waiting {
        run: id,
        stream: Box::new(stream),
    })
}
