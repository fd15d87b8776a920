//! `GET /runs/{id}/events`: a tree's log, as a page or as a stream (Server-Sent Events of the HTML standard); and the
//! stream that answers a `POST` which starts a run.

use std::convert::Infallible;
use std::fmt::Write;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use schemars::JsonSchema;

use crate::domain::event::Event;
use crate::domain::run::Run;
use crate::engine::journal::Listener;
use crate::store::{EventQuery, RunStore};
use crate::web::error::{Problem, word};
use crate::web::follower::{Follower, PAGE, ends};
use crate::web::query::{Query, RunPath, count};
use crate::web::runs;
use crate::web::state::AppState;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// No cache keeps a stream, and no proxy compresses it, which would hold events back.
const UNCACHED: (HeaderName, &str) = (CACHE_CONTROL, "no-store, no-transform");

/// Events of a page at most.
const MAX_PAGE: usize = 1000;

/// `GET /runs/{id}/events`
pub async fn events(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    request: Request,
) -> Result<Response, Problem> {
    let streamed = wants_stream(request.headers());
    let wish = Wish::read(&request)?;
    drop(request);
    let run = runs::found(&state, id).await?;
    if streamed && wish.comes_back && run.status.is_terminal() && wish.after >= run.last_event {
        // A browser's EventSource comes back after the end of a stream, until it is told that there is no content.
        Ok((StatusCode::NO_CONTENT, [UNCACHED]).into_response())
    } else if streamed {
        Ok(stream(&state, &run, &wish))
    } else {
        page(state.runner.store().as_ref(), &run, &wish).await
    }
}

/// Every event of a root run, from the first. `listener` is one that stood before the run was set going.
pub fn whole(state: &AppState, run: &Run, listener: Option<Listener>) -> Response {
    match listener {
        Some(listener) => answer(Follower::new(state, run, false, 0).hearing_all(listener)),
        None => stream(state, run, &Wish::default()),
    }
}

/// A page of a tree's events.
// Only told: events are kept as JSON, and put together as such.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
#[schemars(inline)]
pub struct EventPage {
    data: Vec<Numbered>,
    /// The `after` of the next page; null once the run has ended and all of it was read.
    next_after: Option<u64>,
}

/// An event as it was committed. In streams `text.…` and `reasoning.…` have no `seq`.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
#[schemars(rename = "Event")]
struct Numbered {
    /// Counts from 1 without gaps over the whole tree.
    seq: u64,
    #[schemars(flatten)]
    event: Event,
}

/// What the query and the headers ask for.
#[derive(Default)]
struct Wish {
    after: u64,
    /// Whether `Last-Event-ID` says where to go on.
    comes_back: bool,
    only: bool,
    limit: usize,
}

impl Wish {
    /// `Last-Event-ID` wins over `?after`: a browser that reconnects repeats the query as it was.
    fn read(request: &Request) -> Result<Self, Problem> {
        let query = Query::read(request.uri(), &["after", "scope", "limit"])?;
        // Stores count in signed numbers.
        let number = |text: &str| text.parse::<u64>().ok().map(|n| n.min(i64::MAX as u64));
        let after = query.parse("after", "an event's number", number)?;
        let last = match request.headers().get(LAST_EVENT_ID) {
            Some(value) if !value.is_empty() => {
                let text = String::from_utf8_lossy(value.as_bytes());
                let last = number(&text).ok_or_else(|| {
                    let why = format_args!("{} is not an event's number", word(&text));
                    Problem::parameter("Last-Event-ID", why)
                })?;
                Some(last)
            }
            _ => None,
        };
        let only = query.parse("scope", "tree or self", |text| match text {
            "tree" => Some(false),
            "self" => Some(true),
            _ => None,
        })?;
        let limit = query.parse("limit", "a number from 1 to 1000", count(MAX_PAGE))?;
        Ok(Self {
            after: last.or(after).unwrap_or(0),
            comes_back: last.is_some(),
            only: only.unwrap_or(false),
            limit: limit.unwrap_or(PAGE),
        })
    }
}

/// Whether `Accept` names an event stream (and not only by a wildcard).
pub fn wants_stream(headers: &HeaderMap) -> bool {
    headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|range| {
            let mut parts = range.split(';').map(str::trim);
            parts
                .next()
                .is_some_and(|kind| kind.eq_ignore_ascii_case("text/event-stream"))
                && !parts.any(|part| matches!(part, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
        })
}

/// `{data, next_after}`; `next_after` is null once the run has ended and all of it was read.
async fn page(store: &dyn RunStore, run: &Run, wish: &Wish) -> Result<Response, Problem> {
    let events = store
        .events(EventQuery {
            root: run.root_id,
            of: run.id,
            only: wish.only,
            after: wish.after,
            limit: wish.limit,
        })
        .await?;
    let last = events.last().map_or(wish.after, |event| event.seq);
    // The run was read before its events: if it had ended then, its terminal event is the last that there will be.
    let ended = events.iter().any(|event| ends(event, run.id));
    let over = ended || run.status.is_terminal() && (events.is_empty() || last >= run.last_event);
    let mut body = String::from("{\"data\":[");
    for (at, event) in events.iter().enumerate() {
        if at > 0 {
            body.push(',');
        }
        body.push_str(&event.data);
    }
    body.push_str("],\"next_after\":");
    if over {
        body.push_str("null}");
    } else {
        let _ = write!(body, "{last}}}");
    }
    let headers = [(CONTENT_TYPE, "application/json")];
    Ok((StatusCode::OK, headers, body).into_response())
}

fn stream(state: &AppState, run: &Run, wish: &Wish) -> Response {
    // Subscribed before the store is read. Where nobody is at work on the tree, the store has all there will be.
    let listener = match run.status.is_terminal() {
        true => None,
        false => state.runner.listen(run.root_id),
    };
    answer(Follower::new(state, run, wish.only, wish.after).hearing(listener))
}

fn answer(follower: Follower) -> Response {
    let chunks = stream::unfold(follower, |mut follower| async move {
        let chunk = follower.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(chunk)), follower))
    });
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        UNCACHED,
        (ACCEL_BUFFERING, "no"),
    ];
    (StatusCode::OK, headers, Body::from_stream(chunks)).into_response()
}

#[cfg(test)]
mod tests {
    use super::wants_stream;

    #[test]
    fn only_a_named_event_stream_is_streamed() {
        let wants = |accept: &'static str| {
            let mut headers = axum::http::HeaderMap::new();
            headers.insert("accept", accept.parse().expect("a value"));
            wants_stream(&headers)
        };
        assert!(wants("text/event-stream"));
        assert!(wants("application/json;q=0.5, Text/Event-Stream; q=0.9"));
        assert!(!wants("*/*"));
        assert!(!wants("application/json, text/event-stream;q=0"));
    }
}
