//! `POST /agents/{name}/runs` and `POST /agents/{name}/dry-run`: the body becomes a checked `RunRequest`.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::{HeaderValue, LOCATION};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::Either;
use serde_json::json;

use crate::catalog::LoadError;
use crate::config::KeyScope;
use crate::domain::run::Run;
use crate::domain::trace::TraceContext;
use crate::engine::request::{DryRun, RunRequest, StartError};
use crate::engine::state::broadcaster::Subscription;
use crate::engine::state::provider_keys::Keys;
use crate::store::{ClaimedRun, IdempotencyClaim, StoreError};
use crate::web::auth::Principal;
use crate::web::body::large_body::{DATA_FIELDS, DataField};
use crate::web::body::request_body::{self, BodyLimits, RequestBody};
use crate::web::error::Problem;
use crate::web::extract::accept::prefers_stream;
use crate::web::extract::idempotency::{self, RepeatKey};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{AgentPath, require_agent, unknown_agent};
use crate::web::extract::provider_keys;
use crate::web::extract::query::Query;
use crate::web::extract::run_request::{CreateRunRequest, build_run_request};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    AgentInvalid, AttachmentsTooLarge, BudgetExhausted, Draining, IdempotencyConflict, InvalidBody,
    InvalidMessages, InvalidModel, InvalidOverride, PromptInvalid, ProviderKeyRefused,
    ProviderUnavailable, QueueFull, SessionBusy, UnpricedModel,
};
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::route::{Route, post};
use crate::web::routes::events::{EVENT_STREAM, STREAM_DESCRIPTION};
use crate::web::routes::{events, runs};
use crate::web::state::{AppState, Settings};
use crate::web::wait::{self, Prefer, WaitQuery};

pub fn routes() -> Vec<Route> {
    vec![
        post("/agents/{name}/runs", [KeyScope::Run], create)
            .with(with_run_body).with(with_start)
            .describe("create_run", "Starts a run")
            .details(
                "Responds at once with 202, unless the client waits (`wait` or `Prefer`) and the run ends in time, or \
                 wants the events (`Accept: text/event-stream`). The run continues if the client disconnects. A failed \
                 run is not an HTTP error: its `status` is `failed`, and its `error` has the reason.",
            )
            .problems(&[SessionBusy, IdempotencyConflict]),
        post("/agents/{name}/dry-run", [KeyScope::Run], dry_run)
            .with(with_run_body)
            .describe("dry_run", "Shows what a run would do, without starting it")
            .details(
                "Checks the request as `create_run` does, and returns the assembled prompt, the tools and the limits. \
                 Sends no request to a model.",
            )
            .response::<DryRun>(200, "What the run would do.")
            .example(examples::dry_run()),
    ]
}

/// What a request that starts a run may have beside its body, and its responses.
pub fn with_start(route: Route) -> Route {
    route
        .tag("runs")
        .input::<RepeatKey>()
        .header(
            "traceparent",
            json!({"type": "string"}),
            "The trace that the run becomes a part of (W3C Trace Context).",
        )
        .header(
            "X-Provider-Key",
            json!({"type": "string", "pattern": "^[^=]+=[!-~]+$"}),
            "`<provider>=<key>`: the client's own key for a provider, used for all requests of this run's tree; one header \
             per provider. Only for agents with `allow_provider_keys`. It is never stored or logged.",
        )
        .response::<RunView<'static>>(
            200,
            "The run, if it ended while the client waited; or its events, if `Accept` names an event stream.",
        )
        .example(examples::run())
        .text_response(200, EVENT_STREAM, STREAM_DESCRIPTION)
        .example(examples::EVENT_STREAM)
        .response::<RunView<'static>>(
            202,
            "The run is accepted and stored; it continues without the client.",
        )
        .example(examples::accepted_run())
        .response_header(&[200, 202], "Location", "The path of the run.")
        .problems(&[QueueFull, BudgetExhausted, Draining])
}

/// The parts of the two routes with the body of a run.
fn with_run_body(route: Route) -> Route {
    route
        .tag("runs")
        .input::<(Query<WaitQuery>, Prefer)>()
        .request_body::<CreateRunRequest>()
        .request_example("text", "A text", json!({"input": "summarize the report"}))
        .request_example(
            "limits",
            "With limits, labels and a session",
            json!({
                "input": "summarize the report", "timeout": 120, "budget": {"max_tokens": 50000},
                "labels": {"team": "blue"}, "session": "ada",
            }),
        )
        .request_example(
            "parts",
            "A text and an image by URL",
            json!({"input": [
                {"type": "text", "text": "describe the image"},
                {"type": "image", "url": "https://example.com/chart.png"},
            ]}),
        )
        .problems(&[
            AttachmentsTooLarge, InvalidBody, InvalidMessages, InvalidModel, InvalidOverride,
            UnpricedModel, AgentInvalid, PromptInvalid, ProviderUnavailable, ProviderKeyRefused,
        ])
        .or_text("The run's input.")
        .or_form(
            "`input` fields are texts and files (images, PDF, text), in order. The other fields of the JSON body are text; \
             objects and lists are JSON.",
        )
}

/// Accepts a run: 202 with its current state, 200 if it ended while the client waited, or an event stream if the client
/// accepts one. A repeated `Idempotency-Key` gets the same responses for the run of the first request.
fn create(
    State(state): State<AppState>,
    AgentPath(agent): AgentPath,
    principal: Principal,
    links: LinkPrefix,
    request: Request,
) -> impl Future<Output = Result<Response, Problem>> {
    // Boxed and not awaited in a block, so that a waiting client keeps nothing of its request.
    let starting = Box::pin(start(state, links, agent, principal, request));
    starting.then(|outcome| match outcome {
        Ok(Outcome::Started(accepted)) => Either::Left(accepted.respond()),
        Ok(Outcome::Replayed(response)) => Either::Right(ready(Ok(response))),
        Err(problem) => Either::Right(ready(Err(problem))),
    })
}

/// What became of a request for a run.
enum Outcome {
    /// Its idempotency key has started a run before.
    Replayed(Response),
    Started(AcceptedRun),
}

/// A run that is accepted, and how its client is answered.
struct AcceptedRun {
    state: AppState,
    links: LinkPrefix,
    response_mode: ResponseMode,
    run: Arc<Run>,
    subscriber: Option<Subscription>,
}

impl AcceptedRun {
    async fn respond(self) -> Result<Response, Problem> {
        respond(
            &self.state,
            &self.links,
            &self.response_mode,
            self.run,
            self.subscriber,
        )
        .await
    }
}

async fn start(
    state: AppState,
    links: LinkPrefix,
    agent: String,
    principal: Principal,
    request: Request,
) -> Result<Outcome, Problem> {
    let owner = principal.key_name().map(str::to_owned);
    let ParsedRequest {
        body,
        response_mode,
        idempotency_key,
        trace,
        provider_keys,
    } = ParsedRequest::read(&state.settings, request).await?;
    let claim = idempotency_key.map(|(key, body)| {
        let route = format!("POST /agents/{agent}/runs");
        idempotency::new_claim(owner.as_deref(), route, key, body)
    });
    if let Some(claim) = &claim
        // Before anything is checked: a repetition is answered also where a new run would be refused.
        && let Some(claimed) = state.runner.store().claimed_run(claim.key.clone()).await?
    {
        drop(body);
        let replayed = Box::pin(replay(&state, &links, &response_mode, claim, claimed)).await?;
        return Ok(Outcome::Replayed(replayed));
    }
    let mut run_request = RunRequest {
        trace,
        provider_keys,
        claim: claim.clone(),
        ..build_run_request(body, agent, owner, &state.settings).await?
    };
    let started = match response_mode {
        ResponseMode::Stream => {
            run_request.stream = run_request.stream.or(Some(true));
            let started = state.runner.start_and_subscribe(run_request).await;
            started.map(|(run, listener)| (run, Some(listener)))
        }
        ResponseMode::Run { .. } => {
            let started = state.runner.start(run_request).await;
            started.map(|run| (run, None))
        }
    };
    match started {
        Ok((run, subscriber)) => Ok(Outcome::Started(AcceptedRun {
            state,
            links,
            response_mode,
            run,
            subscriber,
        })),
        Err(StartError::Load(LoadError::NotFound(agent))) => {
            Err(unknown_agent(&principal, &state, &agent))
        }
        Err(error) => {
            let replayed = replay_refused(&state, &links, &response_mode, error, claim);
            replayed.await.map(Outcome::Replayed)
        }
    }
}

/// The trace context of the client; `None` if the header is missing, invalid or repeated.
fn trace_context(headers: &HeaderMap) -> Option<Box<TraceContext>> {
    let mut values = headers.get_all("traceparent").iter();
    let context = TraceContext::parse(values.next()?.to_str().ok()?)?;
    values.next().is_none().then(|| Box::new(context))
}

/// Shows the run that this request would start. Requests no model.
async fn dry_run(
    State(state): State<AppState>,
    AgentPath(agent): AgentPath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let owner = principal.key_name().map(str::to_owned);
    let parsed = ParsedRequest::read(&state.settings, request).await?;
    require_agent(&principal, &state, &agent)?;
    let run_request = RunRequest {
        provider_keys: parsed.provider_keys,
        ..build_run_request(parsed.body, agent, owner, &state.settings).await?
    };
    Ok(json_response(
        StatusCode::OK,
        &state.runner.dry_run(run_request).await?,
    ))
}

/// The form of the response.
pub enum ResponseMode {
    /// The run, once it has ended or this time is over.
    Run { wait: Duration },
    /// An event stream.
    Stream,
}

/// A parsed request. It holds nothing of the connection's read buffer, since thousands of clients may wait.
pub struct ParsedRequest {
    pub body: RequestBody,
    pub response_mode: ResponseMode,
    /// The idempotency key with the fingerprint of the body.
    pub idempotency_key: Option<(String, [u8; 32])>,
    pub trace: Option<Box<TraceContext>>,
    pub provider_keys: Keys,
}

impl ParsedRequest {
    pub async fn read(settings: &Settings, request: Request) -> Result<Self, Problem> {
        Self::read_with_data(settings, DATA_FIELDS, request).await
    }

    /// Reads a request that has the data of images and files in these fields.
    pub async fn read_with_data(
        settings: &Settings,
        data_fields: &'static [DataField],
        request: Request,
    ) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        let Query(WaitQuery { wait }) = Query::read(&parts.uri)?;
        let wait = Prefer::read(&parts.headers).timeout(wait, settings.max_wait)?;
        let head = Head::read(&parts.headers)?;
        let limits = BodyLimits {
            data_fields,
            ..settings.body_limits_with_attachments()
        };
        let body = request_body::read(&parts, body, limits).await?;
        let response_mode = match prefers_stream(&parts.headers) {
            true => ResponseMode::Stream,
            false => ResponseMode::Run { wait },
        };
        Ok(head.with_body(body, response_mode))
    }

    /// A request that came within another one: its body is a part of that one's.
    pub fn of_part(headers: &HeaderMap, json: Bytes) -> Result<Self, Problem> {
        let wait = Duration::ZERO;
        let head = Head::read(headers)?;
        Ok(head.with_body(RequestBody::Json(json), ResponseMode::Run { wait }))
    }
}

/// What the headers of a request have for its run.
struct Head {
    idempotency_key: Option<String>,
    trace: Option<Box<TraceContext>>,
    provider_keys: Keys,
}

impl Head {
    fn read(headers: &HeaderMap) -> Result<Self, Problem> {
        Ok(Self {
            idempotency_key: idempotency::read_key(headers)?,
            trace: trace_context(headers),
            provider_keys: provider_keys::read(headers)?,
        })
    }

    fn with_body(self, body: RequestBody, response_mode: ResponseMode) -> ParsedRequest {
        let key = self.idempotency_key;
        ParsedRequest {
            idempotency_key: key.map(|key| (key, idempotency::body_hash(&body))),
            body,
            response_mode,
            trace: self.trace,
            provider_keys: self.provider_keys,
        }
    }
}

/// The response to a request that has started a run, or that another request with the same key has overtaken.
pub async fn respond_to_start(
    state: &AppState,
    links: &str,
    response_mode: &ResponseMode,
    started: Result<(Arc<Run>, Option<Subscription>), StartError>,
    claim: Option<IdempotencyClaim>,
) -> Result<Response, Problem> {
    match started {
        Ok((run, subscriber)) => respond(state, links, response_mode, run, subscriber).await,
        Err(error) => Box::pin(replay_refused(state, links, response_mode, error, claim)).await,
    }
}

/// The response to a request that has started no run: that of the run which another request with the same key has started
/// meanwhile, or the error.
async fn replay_refused(
    state: &AppState,
    links: &str,
    response_mode: &ResponseMode,
    error: StartError,
    claim: Option<IdempotencyClaim>,
) -> Result<Response, Problem> {
    let Some(claim) = claim else {
        return Err(error.into());
    };
    let claimed = match &error {
        StartError::Store(StoreError::AlreadyClaimed(claimed)) => Some(*claimed),
        // Perhaps busy with what the same key has started meanwhile.
        StartError::SessionBusy { .. } => {
            state.runner.store().claimed_run(claim.key.clone()).await?
        }
        _ => None,
    };
    match claimed {
        Some(claimed) => replay(state, links, response_mode, &claim, claimed).await,
        None => Err(error.into()),
    }
}

/// The response in the requested mode.
async fn respond(
    state: &AppState,
    links: &str,
    response_mode: &ResponseMode,
    run: Arc<Run>,
    subscriber: Option<Subscription>,
) -> Result<Response, Problem> {
    let location = format!("{links}/runs/{}", run.id);
    let mut response = match response_mode {
        ResponseMode::Stream => events::stream_from_start(state, &run, subscriber).await,
        ResponseMode::Run { wait } => {
            let run = match run.waits_for_person() {
                true => run,
                false => wait::wait_for_end_or_person(state, run, *wait).await,
            };
            runs::finished_or_accepted(links, &run)
        }
    };
    let location = HeaderValue::try_from(location)
        .map_err(|error| Problem::internal(format!("no Location: {error}")))?;
    response.headers_mut().insert(LOCATION, location);
    Ok(response)
}

/// The run that the idempotency key belongs to.
pub async fn replay(
    state: &AppState,
    links: &str,
    response_mode: &ResponseMode,
    claim: &IdempotencyClaim,
    claimed: ClaimedRun,
) -> Result<Response, Problem> {
    idempotency::check_same_body(claim, &claimed)?;
    let run = Arc::new(runs::require_run(state, claimed.run).await?);
    let response = respond(state, links, response_mode, run, None).await?;
    Ok(idempotency::mark_replayed(response))
}
