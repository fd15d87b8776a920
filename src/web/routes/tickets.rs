//! `POST /runs/{id}/events/ticket`: a short-lived secret for the URL of the run's events, because a browser's `EventSource`
//! cannot send a key in a header.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CACHE_CONTROL;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::config::KeyScope::Read;
use crate::domain::run::now;
use crate::domain::timestamp_text;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::path::RunPath;
use crate::web::extract::query::NoQuery;
use crate::web::response::json::json_response;
use crate::web::route::{Route, post};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;
use crate::web::tickets::LIFETIME;

pub fn routes() -> Vec<Route> {
    vec![
        post("/runs/{id}/events/ticket", [Read], create)
            .describe("create_event_ticket", "Issues a ticket for the events of a run")
            .details("The ticket opens the events of this run for 60 seconds without a key. It is never logged.")
            .response::<TicketView>(201, "The ticket, for the parameter `ticket` of the events.")
            .example(json!({"ticket": "axed_ticket_AAABn…", "expires_at": "2026-03-01T09:31:00.000Z"})),
    ]
}

/// A ticket for the events of one run.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EventTicket")]
pub struct TicketView {
    /// The value of `?ticket=`.
    ticket: String,
    /// Until then a client may connect with it. Connections that are open then stay open.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    expires_at: Timestamp,
}

async fn create(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
    principal: Principal,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let expires_at = now() + LIFETIME;
    let (store, key) = (state.runner.store(), principal.key());
    let key = key.map(Arc::as_ref);
    let ticket = state.ticket_signer.issue(store.as_ref(), id, key).await?;
    let mut response = json_response(StatusCode::CREATED, &TicketView { ticket, expires_at });
    let no_store = HeaderValue::from_static("no-store");
    response.headers_mut().insert(CACHE_CONTROL, no_store);
    Ok(response)
}
