//! `POST /triggers/{agent}/{name}`: a signed webhook of another service starts a run. The route is open: the signature takes the
//! place of a key.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tracing::warn;
use url::form_urlencoded;

use crate::config::secrets::process_secret;
use crate::domain::content::Content;
use crate::domain::run::{RunId, now};
use crate::domain::text_template::TextTemplate;
use crate::domain::trigger::{Trigger, TriggerKind};
use crate::domain::world_event::WorldEvent;
use crate::engine::request::{RunRequest, StartError};
use crate::store::{IdempotencyClaim, IdempotencyKey, StoreError};
use crate::web::body::large_body::body_too_large;
use crate::web::body::request_body;
use crate::web::error::Problem;
use crate::web::extract::idempotency;
use crate::web::extract::path::Params;
use crate::web::extract::provider_keys;
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    self, BodyTooLarge, BudgetExhausted, Draining, InvalidBody, InvalidJson, InvalidSignature,
    MalformedBody, QueueFull, RequestTimeout, StoreFull, StoreUnavailable, TriggerNotFound,
    UnsupportedCharset, UnsupportedEncoding, UnsupportedMediaType,
};
use crate::web::response::json::json_response;
use crate::web::route::{Route, post};
use crate::web::routes::world_events;
use crate::web::state::AppState;
use crate::webhooks::inbound::SignedHeaders;

/// How long an event is known by its id, unless its run is deleted before. Senders repeat an event for some days.
const RETENTION: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Enough for the name of an event, or its key.
const MAX_TEMPLATE_BYTES: usize = 1_000;
const FORM: &str = "application/x-www-form-urlencoded";
const RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

pub fn routes() -> Vec<Route> {
    let text = || json!({"type": "string"});
    let example = || json!({"run": examples::ROOT});
    vec![
        // Open: the signature takes the place of a key.
        post("/triggers/{agent}/{name}", [], receive)
            .describe("receive_trigger", "Starts a run for an event of another service")
            .details(
                "The receiver of a webhook whose signature takes the place of a key: Standard Webhooks, GitHub or \
                 Stripe, as the trigger's `kind` says. The body is the sender's JSON, at most \
                 `server.max_trigger_body`. An event starts one run, however often it is sent.",
            )
            .path::<String>("agent", "The agent's name.", TriggerNotFound)
            .path::<String>("name", "The trigger's name.", TriggerNotFound)
            .header("webhook-id", text(), "Standard Webhooks: the event's id.")
            .header(
                "webhook-timestamp",
                text(),
                "Standard Webhooks: when it was signed, in seconds since 1970.",
            )
            .header("webhook-signature", text(), "Standard Webhooks: the signatures.")
            .header("X-GitHub-Delivery", text(), "GitHub: the event's id.")
            .header("X-Hub-Signature-256", text(), "GitHub: the signature.")
            .header(
                "Stripe-Signature",
                text(),
                "Stripe: the time and the signatures. The event's id is `id` of the body.",
            )
            .response::<TriggeredRun>(
                200,
                "The event was received before, or is a `ping` of GitHub.",
            )
            .example(example())
            .response::<TriggeredRun>(202, "A run has started.")
            .example(example())
            .response_header(&[200, 202], "x-run-id", "The id of the run.")
            .problems(&[
                InvalidJson, MalformedBody, InvalidSignature, RequestTimeout, BodyTooLarge,
                UnsupportedMediaType, UnsupportedCharset, UnsupportedEncoding, QueueFull,
                BudgetExhausted, Draining, StoreUnavailable, StoreFull,
            ])
            .problems_with(400, &[InvalidBody]),
    ]
}

#[derive(Deserialize)]
struct TriggerParams {
    agent: String,
    name: String,
}

/// What the sender learns.
#[derive(Serialize, JsonSchema)]
pub struct TriggeredRun {
    /// The run that the event has started; null for an event that starts none.
    run: Option<RunId>,
}

/// A trigger that can start runs.
struct UsableTrigger {
    trigger: Trigger,
    secret: SecretString,
    owner: Option<String>,
}

/// 202 with the new run, 200 if the event was received before.
async fn receive(
    State(state): State<AppState>,
    Params(TriggerParams { agent, name }): Params<TriggerParams>,
    request: Request,
) -> Result<Response, Problem> {
    let usable = find(&state, &agent, &name).ok_or_else(not_found)?;
    let UsableTrigger {
        trigger,
        secret,
        owner,
    } = usable;
    let (mut parts, body) = request.into_parts();
    let headers = parts.headers.clone();
    let header = |name| headers.get(name).and_then(|it| it.to_str().ok());
    let signed = SignedHeaders::read(trigger.kind, header, now()).ok_or_else(invalid_signature)?;
    let is_form = trigger.kind == TriggerKind::Github && has_form(&parts.headers);
    if is_form {
        // The body is read as it is: the signature is over its bytes.
        parts.headers.remove(CONTENT_TYPE);
    }
    let body = request_body::read(&parts, body, state.settings.trigger_limits()).await?;
    let bytes = body.identity_bytes();
    if !signed.are_of(&secret, bytes) {
        return Err(invalid_signature());
    }
    provider_keys::refuse(&parts.headers)?;
    if is_ping(&trigger, &parts.headers) {
        let nothing = TriggeredRun { run: None };
        return Ok(json_response(StatusCode::OK, &nothing));
    }
    let payload = match is_form {
        true => Cow::Owned(form_payload(bytes)?),
        false => Cow::Borrowed(bytes),
    };
    let value: Value = serde_json::from_slice(&payload).map_err(|error| {
        let detail = format!("the body is no JSON: {error}");
        Problem::new(ProblemCode::InvalidJson, detail)
    })?;
    let event = signed.event_id(&value).ok_or_else(|| {
        let detail = "the event has no id";
        Problem::new(ProblemCode::InvalidBody, detail).with_status(StatusCode::BAD_REQUEST)
    })?;
    if let Some(wake) = &trigger.wake {
        let (payload, values) = (
            payload.into_owned(),
            Map::from_iter([("body".to_owned(), value)]),
        );
        let values = Value::Object(values);
        let render = |template: &TextTemplate| {
            template
                .render(&values, MAX_TEMPLATE_BYTES)
                .unwrap_or_default()
        };
        let data = String::from_utf8_lossy(&payload).into_owned();
        let event = WorldEvent {
            owner,
            name: render(&wake.event),
            key: render(&wake.key),
            client_id: Some(format!("trigger {agent}/{name} {event}")),
            data: RawValue::from_string(data)
                .map_err(|error| Problem::internal(error.to_string()))?
                .into(),
        };
        world_events::accept(&state, event).await?;
        return Ok(json_response(
            StatusCode::ACCEPTED,
            &TriggeredRun { run: None },
        ));
    }
    let max_bytes = state.settings.max_body;
    let input = match &trigger.input_template {
        Some(template) => {
            let values = Map::from_iter([("body".to_owned(), value)]);
            template.render(&Value::Object(values), max_bytes)
        }
        None => Some(String::from_utf8_lossy(&payload).into_owned()),
    };
    let run_request = RunRequest {
        input: Some(Content::from(
            input.ok_or_else(|| body_too_large(max_bytes))?,
        )),
        labels: trigger.labels,
        owner,
        claim: Some(claim(&agent, &name, event, bytes)),
        agent,
        ..RunRequest::default()
    };
    match Box::pin(state.runner.start(run_request)).await {
        Ok(run) => respond(StatusCode::ACCEPTED, run.id),
        Err(StartError::Store(StoreError::AlreadyClaimed(claimed))) => {
            let response = respond(StatusCode::OK, claimed.run)?;
            Ok(idempotency::mark_replayed(response))
        }
        Err(
            error @ (StartError::Store(_)
            | StartError::Draining
            | StartError::QueueFull(_)
            | StartError::BudgetExhausted(_)),
        ) => Err(error.into()),
        // What is wrong with the agent is for the log of the daemon, not for the sender.
        Err(error) => Err(Problem::internal(error.to_string())),
    }
}

/// `None` if there is no such trigger, or if it can start no runs: the sender does not learn which.
fn find(state: &AppState, agent: &str, name: &str) -> Option<UsableTrigger> {
    let agents = state.runner.catalog().current();
    let definition = Arc::clone(agents.get(agent).ok()?);
    let trigger = definition.triggers.iter().find(|it| it.name == name)?;
    let unusable = |why: String| {
        warn!(
            agent,
            "Trigger {name} of agent {agent} refuses events: {why}"
        );
    };
    let secret = match process_secret(&trigger.secret_env) {
        Ok(Some(secret)) => secret,
        Ok(None) => {
            unusable(format!(
                "the environment variable {} is not set",
                trigger.secret_env
            ));
            return None;
        }
        Err(error) => {
            unusable(error.to_string());
            return None;
        }
    };
    let owners = state.scheduler.owners();
    match owners.owner(agent, trigger.key.as_deref()) {
        Ok(owner) => Some(UsableTrigger {
            trigger: trigger.clone(),
            secret,
            owner,
        }),
        Err(error) => {
            unusable(error.to_string());
            None
        }
    }
}

fn not_found() -> Problem {
    let detail = "there is no such trigger";
    Problem::new(ProblemCode::TriggerNotFound, detail)
}

fn invalid_signature() -> Problem {
    let detail = "the signature is missing or wrong, or its time is more than 5 minutes away";
    Problem::new(ProblemCode::InvalidSignature, detail)
}

fn has_form(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|it| it.to_str().ok());
    let media_type = content_type.and_then(|it| it.split(';').next());
    media_type.is_some_and(|it| it.trim().eq_ignore_ascii_case(FORM))
}

/// The JSON of an event that GitHub sends as a field of a form, as it does unless its webhook is set to JSON.
fn form_payload(body: &[u8]) -> Result<Vec<u8>, Problem> {
    let mut fields = form_urlencoded::parse(body);
    let payload = fields.find(|(name, _)| name == "payload");
    let (_, payload) = payload.ok_or_else(|| {
        let detail = "the form has no field payload";
        Problem::new(ProblemCode::InvalidBody, detail).with_status(StatusCode::BAD_REQUEST)
    })?;
    Ok(payload.into_owned().into_bytes())
}

/// GitHub's first event, which only tests the webhook.
fn is_ping(trigger: &Trigger, headers: &HeaderMap) -> bool {
    let event = headers.get("x-github-event").map(HeaderValue::as_bytes);
    trigger.kind == TriggerKind::Github && event == Some(b"ping")
}

fn claim(agent: &str, name: &str, event: String, body: &[u8]) -> IdempotencyClaim {
    IdempotencyClaim {
        key: IdempotencyKey {
            credential: String::new(),
            route: format!("POST /triggers/{agent}/{name}"),
            key: event,
        },
        body_hash: idempotency::fingerprint(b"", body),
        expires_at: now().checked_add(RETENTION).unwrap_or(Timestamp::MAX),
    }
}

fn respond(status: StatusCode, run: RunId) -> Result<Response, Problem> {
    let mut response = json_response(status, &TriggeredRun { run: Some(run) });
    let value = HeaderValue::try_from(run.to_string())
        .map_err(|error| Problem::internal(format!("no {RUN_ID}: {error}")))?;
    response.headers_mut().insert(RUN_ID, value);
    Ok(response)
}
