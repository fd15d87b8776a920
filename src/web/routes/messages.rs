//! `POST /runs/{id}/messages`: adds a message to an unfinished run.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::info;

use crate::config::KeyScope::Run;
use crate::domain::content::{Content, Part};
use crate::domain::run::RunId;
use crate::engine::control::add_message::{AddMessageError, MessageRequest};
use crate::store::{ClaimedRun, IdempotencyClaim, StoreError};
use crate::web::auth::Principal;
use crate::web::body::content::{AttachmentCounter, ContentInput};
use crate::web::body::request_body::{self, RequestBody};
use crate::web::error::Problem;
use crate::web::extract::idempotency::{self, RepeatKey};
use crate::web::extract::path::ChangedRunPath;
use crate::web::extract::query::NoQuery;
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    AttachmentsTooLarge, Draining, IdempotencyConflict, RunEnded, TooManyMessages,
};
use crate::web::response::json::json_response;
use crate::web::route::{Route, post};
use crate::web::state::{AppState, Settings};

pub fn routes() -> Vec<Route> {
    vec![
        post("/runs/{id}/messages", [Run], add)
            .describe("add_run_message", "Adds a message to an unfinished run")
            .details(
                "The run's next request to its model includes the message, after the results of tool calls. A run \
                 that would end with a reply takes another turn if it has unread messages; out of turns, it ends \
                 with the warning `message_unread`.",
            )
            .request_body::<NewMessageRequest>()
            .body_required()
            .request_example("text", "A text", json!({"content": "only the first quarter"}))
            .or_text("The message.")
            .response::<AddedMessage>(202, "The message is stored.")
            .example(json!({"run_id": examples::ROOT, "number": 1}))
            .problems(&[
                RunEnded, TooManyMessages, IdempotencyConflict, AttachmentsTooLarge, Draining,
            ]),
    ]
}

/// A message to a run that has not ended.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "MessageRequest")]
#[serde(deny_unknown_fields, default)]
pub struct NewMessageRequest {
    /// The message: a text, or parts. Images and files need `data`.
    #[schemars(required, with = "ContentInput")]
    content: Option<ContentInput>,
}

/// A message that was added to a run.
#[derive(Serialize, JsonSchema)]
pub struct AddedMessage {
    /// The run that reads it.
    run_id: RunId,
    /// Counts the messages that were added to the run, from 1; the run reads them in this order.
    number: u32,
}

/// 202 once the message is committed.
async fn add(
    State(state): State<AppState>,
    principal: Principal,
    ChangedRunPath(id): ChangedRunPath,
    _: NoQuery,
    RepeatKey(key): RepeatKey,
    request: Request,
) -> Result<Response, Problem> {
    let by = principal.key_name().map(str::to_owned);
    let (parts, body) = request.into_parts();
    let limits = state.settings.body_limits_with_attachments();
    let body = Box::pin(request_body::read(&parts, body, limits)).await?;
    let claim = key.map(|key| {
        let hash = idempotency::body_hash(&body);
        let route = format!("POST /runs/{id}/messages");
        idempotency::new_claim(by.as_deref(), route, key, hash)
    });
    if let Some(claim) = &claim
        // Before anything is checked: a repetition is answered also if the run has ended since.
        && let Some(claimed) = state.runner.store().claimed_run(claim.key.clone()).await?
    {
        return replay(claim, &claimed);
    }
    let content = parse_content(body, &state.settings)?;
    let message = MessageRequest {
        content,
        by,
        claim: claim.clone(),
    };
    let number = match (state.runner.add_message(id, message).await, claim) {
        (Ok(number), _) => number,
        // Another request with the same key was quicker.
        (Err(AddMessageError::Store(StoreError::AlreadyClaimed(claimed))), Some(claim)) => {
            return replay(&claim, &claimed);
        }
        (Err(error), _) => return Err(error.into()),
    };
    info!(run.id = %id, "Message {number} was added to {id}");
    Ok(added_response(id, number))
}

fn added_response(run_id: RunId, number: u32) -> Response {
    json_response(StatusCode::ACCEPTED, &AddedMessage { run_id, number })
}

fn replay(claim: &IdempotencyClaim, claimed: &ClaimedRun) -> Result<Response, Problem> {
    idempotency::check_same_body(claim, claimed)?;
    let response = added_response(claimed.run, claimed.number.unwrap_or_default());
    Ok(idempotency::mark_replayed(response))
}

fn parse_content(body: RequestBody, settings: &Settings) -> Result<Content, Problem> {
    let input = match body {
        RequestBody::Text(text) => Some(text.into()),
        other => other.json::<NewMessageRequest>()?.content,
    };
    let mut counter = AttachmentCounter::new(settings.attachments);
    let content = input.map(|input| input.into_content("/content", &mut counter));
    let content = content.transpose()?.unwrap_or_default();
    if content.is_blank() {
        let why = "is required: a text, or parts";
        return Err(Problem::invalid_field("/content", why));
    }
    reject_links(&content, "/content")?;
    Ok(content)
}

/// Refuses pictures and files that would have to be fetched. `pointer` is the place of the parts in the body.
pub fn reject_links(content: &Content, pointer: &str) -> Result<(), Problem> {
    let mut parts = content.parts().unwrap_or_default().iter();
    match parts.position(|part| matches!(part, Part::Link(_))) {
        None => Ok(()),
        Some(at) => {
            let why = "is fetched only for the input of a new run; send the bytes";
            Err(Problem::invalid_field(format!("{pointer}/{at}/url"), why))
        }
    }
}
