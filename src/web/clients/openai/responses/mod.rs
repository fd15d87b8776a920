//! `/v1/responses`: runs of agents as responses, which are kept and can be continued.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::domain::run::Run;
use crate::engine::request::RunRequest;
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::clients::call_id::CallRef;
use crate::web::clients::openai::create_request::CreateRequest;
use crate::web::clients::openai::error::failure_response;
use crate::web::clients::openai::responses::numbers::Cursor;
use crate::web::clients::openai::responses::record::ResponseRecord;
use crate::web::clients::openai::responses::reference::ResponseRef;
use crate::web::clients::openai::responses::request::{ReadInput, ResponsesRequest};
use crate::web::clients::openai::responses::stream::{LiveEvents, ResponseStream};
use crate::web::clients::results::{self, ContinuedRun, NewInput};
use crate::web::clients::start::{self, StartedRun};
use crate::web::clients::stop;
use crate::web::error::Problem;
use crate::web::extract::path::Params;
use crate::web::extract::query::Query;
use crate::web::problem_code::ProblemCode;
use crate::web::response::json::json_response;
use crate::web::state::AppState;

pub mod echo;
pub mod frames;
pub mod numbers;
pub mod object;
pub mod record;
pub mod reference;
pub mod replies;
pub mod request;
pub mod stream;

/// How the client gets the response.
#[derive(Clone, Copy)]
struct Delivery {
    is_stream: bool,
    is_background: bool,
    /// Whether the run is kept after the response.
    is_stored: bool,
    /// Whether the request has an idempotency key.
    has_key: bool,
}

/// A response whose run is at work.
struct OpenResponse {
    run: Arc<Run>,
    number: u32,
    live: LiveEvents,
}

/// `POST /v1/responses`
pub async fn create(
    State(state): State<AppState>,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let owner = principal.key_name().map(str::to_owned);
    let read = CreateRequest::read(&state.settings, &principal, "/v1/responses", request);
    let CreateRequest {
        body,
        claim,
        trace,
        provider_keys,
    } = Box::pin(read).await?;
    let input: ResponsesRequest = body.parse(|body| body.json()).await?;
    input.check()?;
    let delivery = Delivery {
        is_stream: input.stream.unwrap_or_default(),
        is_background: input.background.unwrap_or_default(),
        is_stored: input.stores(),
        has_key: claim.is_some(),
    };
    if let Some(existing) = start::find(&state, claim.as_ref()).await? {
        let open = OpenResponse::new(&state, existing).await?;
        return respond(&state, open, delivery).await;
    }
    let read = input.read_input(&principal, &state)?;
    if let Some(open) = continue_run(&state, owner.as_deref(), &read, claim.as_ref()).await? {
        return respond(&state, open, delivery).await;
    }
    let previous = match input.previous_response_id() {
        Some(id) => Some(previous_response(&state, &principal, id).await?),
        None => None,
    };
    let field_names = input.field_names();
    let prepared = input.prepare(read, previous.as_ref(), owner.as_deref(), &state);
    let run_request = RunRequest {
        claim,
        trace,
        provider_keys,
        ..Box::pin(prepared)
            .await
            .map_err(|problem| problem.with_field_names(&field_names))?
    };
    let run_request = RunRequest {
        owner,
        ..run_request
    };
    let started = start::start(&state, run_request, delivery.is_stream)
        .await
        .map_err(|problem| problem.with_field_names(&field_names))?;
    let open = OpenResponse::new(&state, started).await?;
    respond(&state, open, delivery).await
}

async fn continue_run(
    state: &AppState,
    owner: Option<&str>,
    read: &ReadInput,
    claim: Option<&IdempotencyClaim>,
) -> Result<Option<OpenResponse>, Problem> {
    let (results, message) = read.new_results();
    let first = results.first().map(|result| result.call_id.as_str());
    let Some(call) = first.and_then(CallRef::parse) else {
        return Ok(None);
    };
    // A run of another protocol has no response to continue.
    if !ResponseRecord::has_responses(state, call.run).await? {
        return Ok(None);
    }
    let input = NewInput {
        results: &results,
        message,
        pointer: "/input",
        claim,
    };
    let continued = results::continue_run(state, owner, &read.agent, input).await?;
    let Some(ContinuedRun { run, turn, .. }) = continued else {
        return Ok(None);
    };
    Ok(Some(OpenResponse {
        live: LiveEvents::Joined(state.runner.subscribe_with_text(run.id).await),
        number: ResponseRecord::number_after(state, &run, turn).await?,
        run,
    }))
}

/// The response that a request continues. It has to have ended.
async fn previous_response(
    state: &AppState,
    principal: &Principal,
    id: &str,
) -> Result<ResponseRecord, Problem> {
    let pointer = "/previous_response_id";
    let previous = ResponseRecord::find(state, principal, id).await?;
    match previous.has_ended() {
        true => Ok(previous),
        false => Err(Problem::invalid_field(
            pointer,
            format!("the response {id} has not ended"),
        )),
    }
}

impl OpenResponse {
    async fn new(state: &AppState, started: StartedRun) -> Result<Self, Problem> {
        let live = match started.subscription {
            Some(subscription) => LiveEvents::FromStart(subscription),
            None => LiveEvents::Joined(state.runner.subscribe_with_text(started.run.id).await),
        };
        let number = match started.seen_turn {
            Some(turn) => ResponseRecord::number_after(state, &started.run, turn).await?,
            None => 1,
        };
        Ok(Self {
            run: started.run,
            number,
            live,
        })
    }

    async fn record(&self, state: &AppState, run: Arc<Run>) -> Result<ResponseRecord, Problem> {
        let record = ResponseRecord::load(state, run, self.number).await?;
        // Another request may have deleted the run.
        record.ok_or_else(|| {
            let reference = ResponseRef {
                run: self.run.id,
                number: self.number,
            };
            ResponseRef::not_found(&reference.to_string())
        })
    }
}

async fn respond(
    state: &AppState,
    open: OpenResponse,
    delivery: Delivery,
) -> Result<Response, Problem> {
    let run = Arc::clone(&open.run);
    let run_use = state.runner.use_run(run.id, delivery.is_stored);
    let mut response = if delivery.is_stream {
        let record = open.record(state, Arc::clone(&run)).await?;
        let stream = ResponseStream::drive(state, record, open.live, None, run_use).await;
        stream.into_response()
    } else if delivery.is_background {
        let record = open.record(state, Arc::clone(&run)).await?;
        json_response(StatusCode::OK, &object::response(&record))
    } else {
        let record = open.record(state, Arc::clone(&run)).await?;
        let stopped = stop::wait_for_stop(state, Arc::clone(&run), record.seen_turn()).await?;
        let record = open.record(state, stopped).await?;
        if !record.has_ended() {
            let failure = stop::interrupted(&record.run);
            return Ok(failure_response(&failure, &record.run, delivery.has_key));
        }
        record.finish(run_use).await;
        json_response(StatusCode::OK, &object::response(&record))
    };
    stop::add_run_id(&mut response, &run);
    Ok(response)
}

/// `GET /v1/responses/{id}`
pub async fn get(
    State(state): State<AppState>,
    principal: Principal,
    Params(id): Params<String>,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = StreamQuery::read(&uri)?;
    if query.stream {
        return stream_again(&state, &principal, &id, query.starting_after).await;
    }
    let record = ResponseRecord::find(&state, &principal, &id).await?;
    let mut response = json_response(StatusCode::OK, &object::response(&record));
    stop::add_run_id(&mut response, &record.run);
    Ok(response)
}

/// The events of a response after a number, or all of them.
async fn stream_again(
    state: &AppState,
    principal: &Principal,
    id: &str,
    starting_after: Option<u64>,
) -> Result<Response, Problem> {
    let mut record = ResponseRecord::find(state, principal, id).await?;
    let run = Arc::clone(&record.run);
    let mut subscription = None;
    if !record.has_ended() {
        subscription = state.runner.subscribe_with_text(run.id).await;
        // Read again, so that no event is missed.
        record = ResponseRecord::find(state, principal, id).await?;
    }
    let cursor = starting_after.map(Cursor::new);
    let live = LiveEvents::Joined(subscription);
    let stream = ResponseStream::drive(state, record, live, cursor, None).await;
    let mut response = stream.into_response();
    stop::add_run_id(&mut response, &run);
    Ok(response)
}

/// How a response is read. Other parameters are passed over.
#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamQuery {
    stream: bool,
    /// The number of the last event that the client has.
    starting_after: Option<u64>,
}

impl StreamQuery {
    fn read(uri: &Uri) -> Result<Self, Problem> {
        let Query(query) = Query::<Self>::read(uri)?;
        match query.starting_after.is_some() && !query.stream {
            true => Err(Problem::parameter("starting_after", "needs stream=true")),
            false => Ok(query),
        }
    }
}

/// `DELETE /v1/responses/{id}`: the run with all its responses.
pub async fn delete(
    State(state): State<AppState>,
    principal: Principal,
    Params(id): Params<String>,
) -> Result<Response, Problem> {
    let record = ResponseRecord::find(&state, &principal, &id).await?;
    if !record.run.status.is_terminal() {
        let status = record.run.status.as_str();
        return Err(Problem::new(
            ProblemCode::RunNotTerminal,
            format!("{id} is {status}; cancel it first"),
        ));
    }
    state.runner.store().delete(record.run.id).await?;
    let deleted = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(StatusCode::OK, &deleted))
}

/// `POST /v1/responses/{id}/cancel`
pub async fn cancel(
    State(state): State<AppState>,
    principal: Principal,
    Params(id): Params<String>,
) -> Result<Response, Problem> {
    let record = ResponseRecord::find(&state, &principal, &id).await?;
    let (run, number) = (Arc::clone(&record.run), record.reference.number);
    if !run.status.is_terminal() {
        state.runner.cancel(run.id, None).await?;
    }
    let stopped = stop::wait_for_end(&state, run).await;
    let record = ResponseRecord::load(&state, stopped, number).await?;
    let record = record.ok_or_else(|| ResponseRef::not_found(&id))?;
    Ok(json_response(StatusCode::OK, &object::response(&record)))
}

/// `GET /v1/responses/{id}/input_items`
pub async fn input_items(
    State(state): State<AppState>,
    principal: Principal,
    Params(id): Params<String>,
    uri: Uri,
) -> Result<Response, Problem> {
    let record = ResponseRecord::find(&state, &principal, &id).await?;
    let mut items = object::input_items(&record);
    let query = uri.query().unwrap_or_default();
    if !query.split('&').any(|it| it == "order=asc") {
        items.reverse();
    }
    let id_of = |item: Option<&Value>| item.map(|item| item["id"].clone());
    let list = json!({
        "object": "list", "first_id": id_of(items.first()), "last_id": id_of(items.last()), "has_more": false,
        "data": items,
    });
    Ok(json_response(StatusCode::OK, &list))
}
