//! `GET /runs/{id}/events`: the event log of a run's tree, as a page or as a stream (Server-Sent Events); and the stream
//! that is the response to a `POST` that starts a run.

use std::fmt::Write;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::config::KeyScope::Read;
use crate::domain::event::{Event, STORED_EVENT_NAMES};
use crate::domain::run::Run;
use crate::engine::state::broadcaster::Subscription;
use crate::store::events::EventQuery;
use crate::store::run_store::RunStore;
use crate::web::error::{Problem, quote};
use crate::web::extract::accept::WantsStream;
use crate::web::extract::path::RunPath;
use crate::web::extract::query::{Count, Query, read_text};
use crate::web::openapi::examples;
use crate::web::response::event_stream::{EventStream, PAGE_SIZE};
use crate::web::response::sse::NO_CACHE;
use crate::web::route::{Input, Route, get};
use crate::web::routes::runs;
use crate::web::state::AppState;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

pub const EVENT_STREAM: &str = "text/event-stream";
pub const STREAM_DESCRIPTION: &str = "\
    Server-Sent Events. Each block has `event:` (the type), `data:` (a `RunEvent` as JSON on one line) and, if the event is \
    stored, `id:` (its `seq`). `text.…` and `reasoning.…` events are live only, without an id. A comment is sent at least \
    every 10 seconds. The stream ends after the run's last event.";

pub fn routes() -> Vec<Route> {
    vec![
        get("/runs/{id}/events", [Read], list)
            .describe("list_run_events", "Returns the events of a run and its descendants")
            .details(
                "A page as JSON; or a stream that follows the run, if `Accept` names `text/event-stream`. A stream \
                 that was interrupted continues without a gap after `Last-Event-ID`.",
            )
            .query::<TicketQuery>()
            .response::<EventPage>(
                200,
                "The page; or the stream, if `Accept` names an event stream.",
            )
            .example(json!({"data": examples::events(), "next_after": 3}))
            .text_response(200, EVENT_STREAM, STREAM_DESCRIPTION)
            .example(examples::EVENT_STREAM)
            .empty_response(
                204,
                "The run has ended and has no event after `Last-Event-ID` or `after`: the client should not reconnect.",
            )
.or_ticket(),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct EventsQuery {
    /// Only events with a larger number.
    after: Option<Seq>,
    /// The runs whose events are returned.
    scope: EventScope,
    /// Approximate maximum of events of a page.
    limit: Count<1000, PAGE_SIZE>,
}

/// Read by the check of the key.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
struct TicketQuery {
    /// A ticket for this run, in place of a key; for a browser's `EventSource`.
    ticket: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
enum EventScope {
    #[default]
    Tree,
    /// Without the events of descendants.
    #[serde(rename = "self")]
    Run,
}

/// The number of an event.
#[derive(Clone, Copy, JsonSchema)]
#[schemars(inline)]
struct Seq(u64);

impl<'de> Deserialize<'de> for Seq {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read_text(deserializer, A_SEQ, parse_seq).map(Self)
    }
}

const A_SEQ: &str = "an event's number";

fn parse_seq(text: &str) -> Option<u64> {
    // The store uses signed numbers.
    text.parse::<u64>().ok().map(|n| n.min(i64::MAX as u64))
}

/// The number of the last event that the client has.
struct LastEventId(Option<u64>);

impl<S: Sync> FromRequestParts<S> for LastEventId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let value = parts.headers.get(LAST_EVENT_ID);
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            return Ok(Self(None));
        };
        let text = String::from_utf8_lossy(value.as_bytes());
        let seq = parse_seq(&text).ok_or_else(|| {
            Problem::parameter(
                "Last-Event-ID",
                format_args!("{} is not {A_SEQ}", quote(&text)),
            )
        })?;
        Ok(Self(Some(seq)))
    }
}

impl Input for LastEventId {
    fn describe(route: Route) -> Route {
        route.header(
            "Last-Event-ID",
            json!({"type": "integer", "format": "int64", "minimum": 0}),
            "The number of the last event that the client has; wins over `after`.",
        )
    }
}

async fn list(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    Query(query): Query<EventsQuery>,
    LastEventId(last): LastEventId,
    WantsStream(is_stream): WantsStream,
) -> Result<Response, Problem> {
    let params = EventParams {
        // A browser that reconnects repeats its first query.
        after: last.or(query.after.map(|Seq(seq)| seq)).unwrap_or(0),
        run_only: query.scope == EventScope::Run,
        limit: query.limit.0,
    };
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
