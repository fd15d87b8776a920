//! Which webhooks a root run tells its events to, and what it says: a thin message that holds no text of a model's or a
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
use crate::engine::ask::{RunAsk, StartError, WebhookAsk};
use crate::engine::parts::Settings;
use crate::net;
use crate::store::outbox::NewDelivery;

/// The root run's webhooks: its agent's, and the request's own. The request's is refused where it could never be
/// delivered; what is wrong with the file's shows in its deliveries, and does not keep the run from its work.
pub fn of(
    settings: &Settings,
    ask: &RunAsk,
    agent: &Agent,
) -> Result<Vec<Arc<Webhook>>, StartError> {
    let mut webhooks = Vec::new();
    webhooks.extend(agent.webhook.clone().map(Arc::new));
    if let Some(asked) = &ask.webhook {
        let owner = ask.owner.as_deref();
        let webhook = asked_for(settings, asked, owner, agent)?;
        webhooks.push(Arc::new(webhook));
    }
    Ok(webhooks)
}

/// A request's webhook, checked.
fn asked_for(
    settings: &Settings,
    asked: &WebhookAsk,
    owner: Option<&str>,
    agent: &Agent,
) -> Result<Webhook, StartError> {
    let refused = |field, why: String| StartError::Override { field, why };
    let Some(url) = &asked.url else {
        return Err(refused("webhook/url", "is required".to_owned()));
    };
    let url = net::parse(url).map_err(|why| refused("webhook/url", why))?;
    let checked = settings.webhook_guard.check(&url);
    checked.map_err(|error| refused("webhook/url", error.to_string()))?;
    let events = &asked.events;
    if let Some(wrong) = events.iter().find(|name| !NAMES.contains(&name.as_str())) {
        let wrong: String = wrong.chars().take(64).collect();
        let known = NAMES.join(", ");
        let why = format!("has {wrong:?}, which is none of: {known}");
        return Err(refused("webhook/events", why));
    }
    let events = NAMES
        .iter()
        .filter(|name| events.iter().any(|event| event == *name));
    let secret_env = secret_env(settings, owner, agent).map_err(|why| refused("webhook", why))?;
    Ok(Webhook {
        url: url.into(),
        secret_env,
        events: events.map(|name| (*name).to_owned()).collect(),
    })
}

/// What signs a request's webhook: the own secret of the key that it came with, so that no client learns what another's
/// receivers trust. Without keys all is the operator's.
fn secret_env(
    settings: &Settings,
    owner: Option<&str>,
    agent: &Agent,
) -> Result<Option<String>, String> {
    let is_set = |name: &String| secret(name).is_some();
    let Some(key) = owner else {
        let of_file = agent.webhook.as_ref().and_then(|it| it.secret_env.clone());
        let signs = of_file.as_ref().or(settings.webhook_secret_env.as_ref());
        return match signs.is_some_and(is_set) {
            true => Ok(of_file),
            false => Err(
                "there is no secret to sign it with: set [webhook] secret_env in the agent's file or [webhooks] \
                 secret_env in the server's configuration, and the variable that it names"
                    .to_owned(),
            ),
        };
    };
    let signs = settings.keys.get(key).and_then(Option::as_ref);
    let signs = signs.filter(|name| is_set(name));
    let why = || {
        format!(
            "there is no secret to sign it with: set webhook_secret_env in [auth.keys.{key}] of the server's \
             configuration, and the variable that it names"
        )
    };
    signs.cloned().map(Some).ok_or_else(why)
}

/// What is told of these events of a root run, whose usage and whose tree's stand so.
pub fn deliveries(
    webhooks: &[Arc<Webhook>],
    events: &[Event],
    (own, tree): (&Usage, &TreeUsage),
) -> Vec<NewDelivery> {
    let mut deliveries = Vec::new();
    for event in events {
        let told = webhooks
            .iter()
            .filter(|webhook| webhook.wants(event.kind.name()));
        deliveries.extend(told.map(|webhook| NewDelivery {
            id: DeliveryId::new(),
            webhook: Arc::clone(webhook),
            event: event.kind.name(),
            body: serde_json::to_string(&Message::of(event, own, tree)).unwrap_or_default(),
            at: event.time,
        }));
    }
    deliveries
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
