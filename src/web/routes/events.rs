//! `GET /runs/{id}/events`: the event log of a run's tree, as a page or as a stream (Server-Sent Events); and the stream
//! that is the response to a `POST` that starts a run.

use std::fmt::Write;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use schemars::{JsonSchema, Schema};
use serde_json::Value;

use crate::domain::event::{Event, STORED_EVENT_NAMES};
use crate::domain::run::Run;
use crate::engine::record::journal::Subscription;
use crate::store::events::EventQuery;
use crate::store::run_store::RunStore;
use crate::web::error::{Problem, quote};
use crate::web::extract::accept::prefers_stream;
use crate::web::extract::path::RunPath;
use crate::web::extract::query::{Query, count_up_to};
use crate::web::response::event_stream::{EventStream, PAGE_SIZE};
use crate::web::response::sse::NO_CACHE;
use crate::web::routes::runs;
use crate::web::state::AppState;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Maximum events of a page.
const MAX_PAGE_SIZE: usize = 1000;

/// `GET /runs/{id}/events`
pub async fn list(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    request: Request,
) -> Result<Response, Problem> {
    let is_stream = prefers_stream(request.headers());
    let params = EventParams::read(&request)?;
    drop(request);
    let run = runs::require_run(&state, id).await?;
    if is_stream && params.after > 0 && run.status.is_terminal() && params.after >= run.last_event {
        // A browser's EventSource reconnects after the end of a stream until it gets 204.
        Ok((StatusCode::NO_CONTENT, [NO_CACHE]).into_response())
    } else if is_stream {
        Ok(stream_response(&state, &run, &params).await)
    } else {
        page_response(state.runner.store().as_ref(), &run, &params).await
    }
}

/// All events of a root run. `subscriber` is a subscription that began before the run was started.
pub async fn stream_from_start(
    state: &AppState,
    run: &Run,
    subscriber: Option<Subscription>,
) -> Response {
    match subscriber {
        Some(subscriber) => EventStream::new(run, false, 0, state.closing.clone())
            .from_start()
            .drive(state, Some(subscriber))
            .into_response(),
        None => stream_response(state, run, &EventParams::default()).await,
    }
}

/// A page of a tree's events.
// Only for the OpenAPI document: events are stored as JSON, and a page is joined from them.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
#[schemars(rename = "RunEventPage")]
pub struct EventPage {
    /// The events, in the order of their numbers.
    data: Vec<NumberedEvent>,
    /// The `after` of the next page; null if the run has ended and this is its last page.
    next_after: Option<u64>,
}

/// An event of a run. `text.…` and `reasoning.…` events occur only in streams and have no `seq`.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
#[schemars(rename = "RunEvent", transform = number_stored_events)]
struct NumberedEvent {
    /// The event's number in the tree, from 1 without gaps.
    seq: u64,
    #[schemars(flatten)]
    event: Event,
}

/// Moves `seq` from the properties of all events to those of the events that are stored.
fn number_stored_events(schema: &mut Schema) {
    let seq = schema.get_mut("properties").and_then(Value::as_object_mut);
    let Some(seq) = seq.and_then(|properties| properties.shift_remove("seq")) else {
        return;
    };
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.retain(|name| name != "seq");
    }
    let variants = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    for variant in variants.into_iter().flatten() {
        let name = variant["properties"]["type"]["const"].as_str();
        if name.is_some_and(|name| STORED_EVENT_NAMES.contains(&name)) {
            variant["properties"]["seq"] = seq.clone();
            let required = variant["required"].as_array_mut();
            required
                .into_iter()
                .for_each(|names| names.insert(0, "seq".into()));
        }
    }
}

#[derive(Default)]
struct EventParams {
    after: u64,
    run_only: bool,
    limit: usize,
}

impl EventParams {
    /// `Last-Event-ID` wins over `?after`, because a browser that reconnects repeats its first query.
    fn read(request: &Request) -> Result<Self, Problem> {
        let query = Query::read(request.uri(), &["after", "scope", "limit"])?;
        // The store uses signed numbers.
        let parse_seq = |text: &str| text.parse::<u64>().ok().map(|n| n.min(i64::MAX as u64));
        let after = query.parse("after", "an event's number", parse_seq)?;
        let last_event_id = match request.headers().get(LAST_EVENT_ID) {
            Some(value) if !value.is_empty() => {
                let text = String::from_utf8_lossy(value.as_bytes());
                let seq = parse_seq(&text).ok_or_else(|| {
                    let why = format_args!("{} is not an event's number", quote(&text));
                    Problem::parameter("Last-Event-ID", why)
                })?;
                Some(seq)
            }
            _ => None,
        };
        let run_only = query.parse("scope", "tree or self", |text| match text {
            "tree" => Some(false),
            "self" => Some(true),
            _ => None,
        })?;
        let limit = query.parse(
            "limit",
            "a number from 1 to 1000",
            count_up_to(MAX_PAGE_SIZE),
        )?;
        Ok(Self {
            after: last_event_id.or(after).unwrap_or(0),
            run_only: run_only.unwrap_or(false),
            limit: limit.unwrap_or(PAGE_SIZE),
        })
    }
}

async fn page_response(
    store: &dyn RunStore,
    run: &Run,
    params: &EventParams,
) -> Result<Response, Problem> {
    let events = store
        .events(EventQuery {
            root: run.root_id,
            run: run.id,
            exclude_descendants: params.run_only,
            after: params.after,
            limit: params.limit,
        })
        .await?;
    let last_seq = events.last().map_or(params.after, |event| event.seq);
    // The run was read before its events. If it had ended by then, the events include its terminal event.
    let has_ended = events.iter().any(|event| event.ends(run.id));
    let is_over =
        has_ended || run.status.is_terminal() && (events.is_empty() || last_seq >= run.last_event);
    let mut body = String::from("{\"data\":[");
    for (at, event) in events.iter().enumerate() {
        if at > 0 {
            body.push(',');
        }
        body.push_str(&event.data);
    }
    body.push_str("],\"next_after\":");
    if is_over {
        body.push_str("null}");
    } else {
        let _ = write!(body, "{last_seq}}}");
    }
    let headers = [(CONTENT_TYPE, "application/json")];
    Ok((StatusCode::OK, headers, body).into_response())
}

async fn stream_response(state: &AppState, run: &Run, params: &EventParams) -> Response {
    // Subscribes before the store is read. If no task works on the tree, the store has all events.
    let subscriber = match run.status.is_terminal() {
        true => None,
        false => state.runner.subscribe(run.root_id).await,
    };
    EventStream::new(run, params.run_only, params.after, state.closing.clone())
        .drive(state, subscriber)
        .into_response()
}
