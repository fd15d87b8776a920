//! `POST /events`: events of the world outside, for which runs wait.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tracing::info;

use crate::config::KeyScope::Run;
use crate::domain::counted::counted;
use crate::domain::world_event::{self, MAX_DATA_BYTES, WorldEvent};
use crate::store::world_events::Published;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::body::JsonBody;
use crate::web::extract::query::NoQuery;
use crate::web::problem_code::ProblemCode::{self, QueueFull, StoreUnavailable};
use crate::web::response::json::json_response;
use crate::web::route::{Route, post};
use crate::web::state::AppState;

const MAX_ID: usize = 200;
const RETRY_SECONDS: u64 = 60;

pub fn routes() -> Vec<Route> {
    vec![
        post("/events", [Run], publish)
            .describe("publish_event", "Tells waiting runs of an event")
            .details(
                "Each run of the key that waits for it with `wait_for` goes on, with `data` as the result of its call. An event \
                 also counts for waits that begin within `wait.lookback` after it. A run receives an event once.",
            )
            .tag("runs")
            .body_required()
            .request_example("paid", "An order was paid", json!({
                "event": "order.paid", "key": "order-17", "data": {"amount": 12.5}, "id": "evt_1",
            }))
            .response::<PublishedEvent>(202, "The event is recorded.")
            .example(json!({"woken": 1}))
            .problems(&[QueueFull, StoreUnavailable]),
    ]
}

/// An event of the world outside.
#[derive(Default, Deserialize, JsonSchema)]
#[schemars(rename = "EventRequest")]
#[serde(deny_unknown_fields, default)]
struct EventBody {
    /// The name of the event, such as `order.paid`.
    #[schemars(required, with = "String", length(min = 1, max = 100))]
    event: Option<String>,
    /// What it is about, such as the number of an order.
    #[schemars(required, with = "String", length(min = 1, max = 200))]
    key: Option<String>,
    /// What is known of it, at most 256 KiB.
    #[schemars(with = "Value")]
    data: Option<Box<RawValue>>,
    /// Makes repeated requests count once, for 24 hours.
    #[schemars(length(min = 1, max = 200))]
    id: Option<String>,
}

/// What became of an event.
#[derive(Serialize, JsonSchema)]
pub struct PublishedEvent {
    /// The number of runs that waited for it.
    pub woken: u64,
}

async fn publish(
    State(state): State<AppState>,
    principal: Principal,
    _: NoQuery,
    JsonBody(body): JsonBody<EventBody>,
) -> Result<Response, Problem> {
    let EventBody {
        event,
        key,
        data,
        id,
    } = body;
    let required = |value: Option<String>, pointer: &str| {
        value.ok_or_else(|| Problem::invalid_field(pointer, "is required"))
    };
    if id
        .as_ref()
        .is_some_and(|id| !(1..=MAX_ID).contains(&id.chars().count()))
    {
        let why = format!("must be 1 to {MAX_ID} characters");
        return Err(Problem::invalid_field("/id", why));
    }
    let event = WorldEvent {
        owner: principal.key_name().map(str::to_owned),
        name: required(event, "/event")?,
        key: required(key, "/key")?,
        client_id: id,
        data: data.map_or_else(|| RawValue::NULL.to_owned().into(), Arc::from),
    };
    let woken = accept(&state, event).await?;
    Ok(json_response(
        StatusCode::ACCEPTED,
        &PublishedEvent { woken },
    ))
}

/// Records an event, and returns how many runs waited for it.
pub async fn accept(state: &AppState, event: WorldEvent) -> Result<u64, Problem> {
    let invalid = |pointer: &str| {
        let pointer = pointer.to_owned();
        move |why: String| Problem::invalid_field(pointer, why)
    };
    world_event::check_name(&event.name).map_err(invalid("/event"))?;
    world_event::check_key(&event.key).map_err(invalid("/key"))?;
    if event.data.get().len() > MAX_DATA_BYTES {
        let why = format!("has more than {MAX_DATA_BYTES} bytes");
        return Err(Problem::invalid_field("/data", why));
    }
    let name = event.name.clone();
    match state.runner.publish_event(event).await? {
        Published::Woken(0) => Ok(0),
        Published::Woken(count) => {
            info!("The event {name} wakes {}", counted(count, "run"));
            Ok(count)
        }
        Published::Repeated(count) => Ok(count),
        Published::OtherEvent => Err(Problem::invalid_field(
            "/id",
            "was used for another event or key",
        )),
        Published::Full => Err(Problem::new(
            ProblemCode::QueueFull,
            "as many events are kept as wait.max_events allows; try again later",
        )
        .with_retry_after(RETRY_SECONDS)),
    }
}
