//! `/runs/{id}/deliveries`: the webhook deliveries of a run, and sending one again.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::info;

use crate::config::KeyScope::Admin;
use crate::domain::run::RunId;
use crate::domain::timestamp_text;
use crate::domain::webhook::DeliveryId;
use crate::ssrf;
use crate::store::outbox::{Delivery, DeliveryAttempt, DeliveryStatus};
use crate::web::error::{Problem, quote};
use crate::web::extract::path::{Params, RunPath};
use crate::web::extract::query::NoQuery;
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode;
use crate::web::response::json::{ListResponse, json_response};
use crate::web::route::{Route, get, post};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

pub fn routes() -> Vec<Route> {
    vec![
        get("/runs/{id}/deliveries", [Admin], list)
            .describe("list_deliveries", "Lists the webhook deliveries of a run")
            .details("The newest 1,000 deliveries; the oldest of them is first.")
            .tag("webhooks")
            .response::<ListResponse<DeliveryView>>(200, "The deliveries.")
            .example(json!({"data": [examples::delivery()]})),
        post("/runs/{id}/deliveries/{delivery}/resend", [Admin], resend)
            .describe("resend_delivery", "Sends a webhook delivery again")
            .details("The delivery keeps its id, so that the receiver can detect the repetition.")
            .tag("webhooks")
            .path::<DeliveryId>(
                "delivery",
                "The id of the webhook delivery.",
                ProblemCode::DeliveryNotFound,
            )
            .response::<DeliveryView>(202, "The delivery; it is due now.")
            .example(examples::delivery()),
    ]
}

#[derive(Deserialize)]
struct DeliveryParam {
    delivery: String,
}

/// A webhook delivery. Its URL has no query, which may contain a secret.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Delivery")]
pub struct DeliveryView {
    /// The delivery's id; the header `webhook-id` of all attempts.
    id: DeliveryId,
    /// The run that the event is about.
    run_id: RunId,
    /// The type of the event.
    event: String,
    /// The receiver.
    url: String,
    /// The delivery's status.
    status: DeliveryStatus,
    /// When the event happened.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    created_at: Timestamp,
    /// The last attempts, oldest first.
    attempts: Vec<DeliveryAttempt>,
    /// When the next attempt is due; null if there is none.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    next_attempt_at: Option<Timestamp>,
}

impl DeliveryView {
    fn new(run_id: RunId, delivery: Delivery) -> Self {
        Self {
            id: delivery.id,
            run_id,
            event: delivery.event,
            url: ssrf::redact_query(&delivery.url),
            status: delivery.status,
            created_at: delivery.created_at,
            attempts: delivery.attempts,
            next_attempt_at: delivery.next_attempt_at,
        }
    }
}

async fn list(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let deliveries = state.runner.store().deliveries(id).await?;
    let data: Vec<DeliveryView> = deliveries
        .into_iter()
        .map(|delivery| DeliveryView::new(id, delivery))
        .collect();
    Ok(json_response(StatusCode::OK, &ListResponse { data }))
}

async fn resend(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    Params(DeliveryParam { delivery: name }): Params<DeliveryParam>,
    _: NoQuery,
) -> Result<Response, Problem> {
    let run = require_run(&state, id).await?;
    let not_found = || {
        Problem::new(
            ProblemCode::DeliveryNotFound,
            format!("{id} has no delivery {}", quote(&name)),
        )
    };
    let delivery: DeliveryId = name.parse().map_err(|_| not_found())?;
    let store = state.runner.store();
    if !store.resend(id, delivery).await? {
        return Err(not_found());
    }
    info!(run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0, "Webhook delivery {delivery} of {id} is sent again on request");
    let deliveries = store.deliveries(id).await?;
    let resent = deliveries.into_iter().find(|it| it.id == delivery);
    let resent = resent.ok_or_else(not_found)?;
    Ok(json_response(
        StatusCode::ACCEPTED,
        &DeliveryView::new(id, resent),
    ))
}
