//! Which webhook a root run tells its events to, and what it says: a thin message that holds no text of a model's or a
//! caller's. Knows neither how messages are delivered nor how they are kept.

use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;

use crate::config::load::secret;
use crate::domain::agent::Agent;
use crate::domain::event::{Event, EventKind, NAMES};
use crate::domain::run::{Failure, FailureCode, RunId, Status};
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::webhook::{DeliveryId, Webhook};
use crate::engine::ask::{RunAsk, StartError};
use crate::engine::parts::Settings;
use crate::net;
use crate::store::outbox::NewDelivery;

/// The root run's webhook: the request's over the file's, field by field. A request's own is refused where it could
/// never be delivered; what is wrong with a file's shows in its deliveries, and does not keep the run from its work.
pub fn of(
    settings: &Settings,
    ask: &RunAsk,
    agent: &Agent,
) -> Result<Option<Arc<Webhook>>, StartError> {
    let file = agent.webhook.as_ref();
    let Some(asked) = &ask.webhook else {
        return Ok(file.cloned().map(Arc::new));
    };
    let refused = |field, why: String| StartError::Override { field, why };
    let url = match (&asked.url, file) {
        (Some(url), _) => {
            let url = net::parse(url).map_err(|why| refused("webhook/url", why))?;
            let checked = settings.webhook_guard.check(&url);
            checked.map_err(|error| refused("webhook/url", error.to_string()))?;
            String::from(url)
        }
        (None, Some(file)) => file.url.clone(),
        (None, None) => {
            let why = format!("is required: the agent {} has no webhook", agent.name);
            return Err(refused("webhook/url", why));
        }
    };
    let events = match &asked.events {
        Some(events) => {
            if let Some(wrong) = events.iter().find(|name| !NAMES.contains(&name.as_str())) {
                let wrong: String = wrong.chars().take(64).collect();
                let known = NAMES.join(", ");
                let why = format!("has {wrong:?}, which is none of: {known}");
                return Err(refused("webhook/events", why));
            }
            NAMES
                .iter()
                .filter(|name| events.iter().any(|event| event == *name))
                .map(|name| (*name).to_owned())
                .collect()
        }
        None => file.map_or_else(Vec::new, |file| file.events.clone()),
    };
    let secret_env = file.and_then(|file| file.secret_env.clone());
    let signs = secret_env.as_ref().or(settings.webhook_secret_env.as_ref());
    if signs.and_then(|name| secret(name)).is_none() {
        let why = "there is no secret to sign it with: set [webhook] secret_env in the agent's file or [webhooks] \
                   secret_env in the server's configuration, and the variable that it names";
        return Err(refused("webhook", why.to_owned()));
    }
    Ok(Some(Arc::new(Webhook {
        url,
        secret_env,
        events,
    })))
}

/// What is told of these events of a root run, whose usage and whose tree's stand so.
pub fn deliveries(
    webhook: &Arc<Webhook>,
    events: &[Event],
    (own, tree): (&Usage, &TreeUsage),
) -> Vec<NewDelivery> {
    let told = events
        .iter()
        .filter(|event| webhook.wants(event.kind.name()));
    told.map(|event| NewDelivery {
        id: DeliveryId::new(),
        webhook: Arc::clone(webhook),
        event: event.kind.name(),
        body: serde_json::to_string(&Message::of(event, own, tree)).unwrap_or_default(),
        at: event.time,
    })
    .collect()
}

/// The body, in the form that standardwebhooks.com recommends: `type`, `timestamp`, `data`.
#[derive(Serialize)]
struct Message<'a> {
    r#type: &'static str,
    timestamp: Timestamp,
    data: Told<'a>,
}

#[derive(Serialize)]
struct Told<'a> {
    id: RunId,
    agent: &'a str,
    status: Status,
    input_tokens: u64,
    output_tokens: u64,
    tool_calls: u64,
    tree: Tree,
    /// Without its message, which may repeat what a model or a provider said.
    error: Option<Error<'a>>,
}

#[derive(Serialize)]
struct Tree {
    runs: u64,
    input_tokens: u64,
    output_tokens: u64,
    cache_read_tokens: u64,
    cache_write_tokens: u64,
    model_calls: u64,
    tool_calls: u64,
    cost_usd: Option<f64>,
    complete: bool,
}

#[derive(Serialize)]
struct Error<'a> {
    code: FailureCode,
    category: &'a str,
    retryable: bool,
}

impl<'a> Message<'a> {
    fn of(event: &'a Event, own: &Usage, tree: &TreeUsage) -> Self {
        let TreeUsage { runs, usage } = tree;
        let error = match &event.kind {
            EventKind::RunFailed { error } => Some(Error::of(error)),
            _ => None,
        };
        Self {
            r#type: event.kind.name(),
            timestamp: event.time,
            data: Told {
                id: event.run_id,
                agent: &event.agent,
                status: status_after(&event.kind),
                input_tokens: own.tokens.input,
                output_tokens: own.tokens.output,
                tool_calls: own.tool_calls,
                tree: Tree {
                    runs: *runs,
                    input_tokens: usage.tokens.input,
                    output_tokens: usage.tokens.output,
                    cache_read_tokens: usage.tokens.cache_read,
                    cache_write_tokens: usage.tokens.cache_write,
                    model_calls: usage.model_calls,
                    tool_calls: usage.tool_calls,
                    cost_usd: usage.cost.map(|cost| cost.usd()),
                    complete: usage.complete(),
                },
                error,
            },
        }
    }
}

impl<'a> Error<'a> {
    fn of(failure: &'a Failure) -> Self {
        Self {
            code: failure.code,
            category: &failure.category,
            retryable: failure.retryable,
        }
    }
}

/// Where a run stands once it has come to this event.
fn status_after(kind: &EventKind) -> Status {
    match kind {
        EventKind::RunQueued { .. } => Status::Queued,
        EventKind::RunCancelling { .. } => Status::Cancelling,
        EventKind::RunCompleted { .. } => Status::Completed,
        EventKind::RunFailed { .. } => Status::Failed,
        EventKind::RunCancelled { .. } => Status::Cancelled,
        _ => Status::Running,
    }
}
