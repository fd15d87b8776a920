//! `POST /agents/{name}/ag-ui`: starts a run, or continues the one that waits for this client.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::value::RawValue;

use crate::config::KeyScope;
use crate::domain::content::Content;
use crate::domain::run::{Run, RunId};
use crate::engine::request::{Overrides, RunRequest};
use crate::engine::state::broadcaster::Subscription;
use crate::engine::state::sessions::OnBusy;
use crate::record::entry::{self, Entry};
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::body::json_body::Object;
use crate::web::clients::ag_ui::content;
use crate::web::clients::ag_ui::input::{NewMessages, ResumeEntry, RunAgentInput};
use crate::web::clients::ag_ui::interrupts;
use crate::web::clients::ag_ui::stream::{AgUiRequest, AgUiStream, Stopped};
use crate::web::clients::ag_ui::usage::Baseline;
use crate::web::clients::call_id::CallRef;
use crate::web::clients::results::{self, NewInput};
use crate::web::clients::run_wait::{self, CancelOnDrop, is_waiting, wait_for_stop};
use crate::web::clients::start::{self, StartedRun};
use crate::web::clients::stop::{self, Stop};
use crate::web::error::Problem;
use crate::web::extract::idempotency;
use crate::web::extract::path::AgentPath;
use crate::web::extract::run_request::check_session_name;
use crate::web::problem_code::ProblemCode;
use crate::web::response::stream_driver::StreamDriver;
use crate::web::routes::create_run::ParsedRequest;
use crate::web::state::AppState;

/// A run, what happens in it from now on, and the steps that the client has seen.
struct FoundRun {
    run: Arc<Run>,
    subscription: Option<Subscription>,
    recorded: Vec<Entry>,
    baseline: Baseline,
    /// Whether the client has not seen the run's record as it is now: then it gets what the run waits for.
    is_unseen: bool,
}

pub async fn post(
    State(state): State<AppState>,
    AgentPath(agent): AgentPath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let (settings, fields) = (&state.settings, content::DATA_FIELDS);
    let parsed = ParsedRequest::read_with_data(settings, fields, request);
    let ParsedRequest {
        body,
        idempotency_key,
        trace,
        provider_keys,
        ..
    } = Box::pin(parsed).await?;
    let read = body.parse(|body| {
        let input: RunAgentInput = body.json()?;
        let messages = input.read_messages()?;
        Ok::<_, Problem>((input, messages))
    });
    let (mut input, messages) = read.await?;
    if input.resume.is_empty() {
        principal.require_scope(KeyScope::Run)?;
    }
    let claim = idempotency_key.map(|(key, body)| {
        let route = format!("POST /agents/{agent}/ag-ui");
        idempotency::new_claim(principal.key_name(), route, key, body)
    });
    let session = check_session_name(input.thread_id.clone()).map_err(|_| {
        let why = "must be 1 to 64 letters, digits, '.', '_' and '-': it is the session";
        Problem::invalid_field("/threadId", why)
    })?;
    let found = if let Some(existing) = start::find(&state, claim.as_ref()).await? {
        repeated(&state, existing).await?
    } else if input.resume.is_empty() {
        let new = NewMessages::read(&messages, state.settings.attachment_counter())?;
        match find_waiting_run(&state, &principal, &agent, &new, claim.as_ref()).await? {
            Some(found) => found,
            None => {
                let run_request = RunRequest {
                    agent,
                    claim,
                    owner: principal.key_name().map(str::to_owned),
                    input: Some(required_content(new)?),
                    context: input.context_text(),
                    session: Some(session),
                    // A run that waits for the client would make this one wait too.
                    on_busy: OnBusy::Reject,
                    overrides: Overrides {
                        client: input.client_additions(&messages)?,
                        ..Overrides::default()
                    },
                    trace,
                    provider_keys,
                    stream: Some(true),
                    ..RunRequest::default()
                };
                let started = run_wait::start(&state, run_request, true).await?;
                FoundRun {
                    run: started.run,
                    subscription: started.subscription,
                    recorded: Vec::new(),
                    baseline: Baseline::default(),
                    is_unseen: false,
                }
            }
        }
    } else {
        let entries = std::mem::take(&mut input.resume).into_iter();
        let entries = entries.map(|Object(entry)| entry).collect();
        resume(&state, &principal, &agent, entries, claim.as_ref()).await?
    };
    let request = AgUiRequest {
        thread: input.thread_id,
        id: input.run_id,
        may_change_arguments: principal.has_scope(KeyScope::Approve),
    };
    Ok(respond(&state, request, input.messages, found))
}

/// The run of an earlier request with the same key.
async fn repeated(state: &AppState, existing: StartedRun) -> Result<FoundRun, Problem> {
    let StartedRun {
        run,
        subscription,
        seen_turn,
        ..
    } = existing;
    let (recorded, baseline) = match seen_turn {
        Some(turn) => {
            let recorded = steps_until(state, run.id, turn).await?;
            let baseline = Baseline::after_turn(state, &run, turn).await?;
            (recorded, baseline)
        }
        None => (Vec::new(), Baseline::default()),
    };
    // A run that has results from the client waits for a place before it goes on.
    let has_results = run.waits_for_client() && seen_turn == Some(run.turns);
    Ok(FoundRun {
        run,
        subscription,
        recorded,
        baseline,
        is_unseen: !has_results,
    })
}

/// The run that waits for these decisions, with the decisions.
async fn resume(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    entries: Vec<ResumeEntry>,
    claim: Option<&IdempotencyClaim>,
) -> Result<FoundRun, Problem> {
    let run = interrupts::interrupted_run(state, principal, agent, &entries).await?;
    let subscription = state.runner.subscribe(run.id).await;
    let recorded = entry::steps(state.runner.store().entries(run.id).await?);
    let decided = interrupts::decide(state, principal, &run, entries, claim).await;
    if let Err(problem) = decided
        // A request with the same key was quicker.
        && start::find(state, claim).await?.is_none()
    {
        return Err(problem);
    }
    Ok(FoundRun {
        baseline: Baseline::of_waiting(&run),
        run: Arc::new(run),
        subscription,
        recorded,
        is_unseen: false,
    })
}

/// The run that waits for these results, with the results in its record; `None` without results.
async fn find_waiting_run(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    new: &NewMessages,
    claim: Option<&IdempotencyClaim>,
) -> Result<Option<FoundRun>, Problem> {
    let calls = new.results.iter();
    let mut calls = calls.filter_map(|result| CallRef::parse(&result.call_id));
    let Some(call) = calls.next_back() else {
        return Ok(None);
    };
    let run = state.runner.store().run(call.run).await?;
    let owner = principal.key_name();
    let run = run.filter(|run| run.owner.as_deref() == owner && run.agent == agent);
    let Some(run) = run.filter(Run::waits_for_client) else {
        return Ok(None);
    };
    let Stop::Calls { calls, .. } = stop::stop_of(state, &run, None).await? else {
        return Ok(None);
    };
    // The client also sends the results of the agent's own tools.
    let mut results = new.results.clone();
    results.retain(|result| calls.iter().any(|call| call.id == result.call_id));
    let subscription = state.runner.subscribe(run.id).await;
    let baseline = Baseline::of_waiting(&run);
    let input = NewInput {
        results: &results,
        message: new.content.as_ref(),
        pointer: "/messages",
        claim,
    };
    let continued = results::continue_run(state, owner, agent, input).await?;
    let Some(continued) = continued else {
        return Ok(None);
    };
    Ok(Some(FoundRun {
        recorded: steps_until(state, run.id, continued.turn).await?,
        run: continued.run,
        subscription,
        baseline,
        is_unseen: false,
    }))
}

/// The steps of the run without the replies that come after the results of a turn.
async fn steps_until(state: &AppState, run: RunId, last: u32) -> Result<Vec<Entry>, Problem> {
    let mut steps = entry::steps(state.runner.store().entries(run).await?);
    steps.retain(|step| match step {
        Entry::Replied { turn, .. } | Entry::CallCompleted { turn, .. } => *turn <= last,
        _ => true,
    });
    Ok(steps)
}

fn required_content(new: NewMessages) -> Result<Content, Problem> {
    match (new.content, new.results.is_empty()) {
        (Some(content), _) => Ok(content),
        (None, true) => {
            let why = "ends with no message of the user, and there is no resume";
            Err(Problem::invalid_field("/messages", why))
        }
        (None, false) => Err(Problem::new(
            ProblemCode::NothingWaits,
            "no run of this agent waits for these results: it has ended, or has them already",
        )),
    }
}

fn respond(
    state: &AppState,
    request: AgUiRequest,
    messages: Box<RawValue>,
    found: FoundRun,
) -> Response {
    let FoundRun {
        run,
        subscription,
        recorded,
        baseline,
        is_unseen,
    } = found;
    let stream = AgUiStream::new(request, Arc::clone(&run), &recorded);
    let (end_state, end_run) = (state.clone(), Arc::clone(&run));
    let mut guard = CancelOnDrop::new(state, run.id);
    let stopped = async move {
        let run = match is_unseen && is_waiting(&end_run) {
            true => end_run,
            false => wait_for_stop(end_state.runner.clone(), end_run, true).await,
        };
        guard.disarm();
        Stopped::read(&end_state, &run, messages, baseline).await
    };
    let closing = state.closing.clone();
    let end = async move { closing.run_until_cancelled(stopped).await };
    let mut response = StreamDriver::new(state, stream, subscription, end).into_response();
    stop::add_run_id(&mut response, &run);
    response
}
