//! The webhooks of a root run and their messages. A message contains no text of a model or a client.

use std::sync::Arc;

use serde::Serialize;

use crate::config::secrets::is_process_secret_set;
use crate::domain::agent::Agent;
use crate::domain::event::{Event, EventKind, STORED_EVENT_NAMES};
use crate::domain::failure::{Failure, FailureCode};
use crate::domain::run::{RunId, Status};
use crate::domain::score::ScoreValue;
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::webhook::Webhook;
use crate::engine::record::webhook_message;
use crate::engine::request::{RunRequest, StartError, WebhookRequest};
use crate::engine::settings::Settings;
use crate::ssrf;
use crate::store::NewDelivery;

/// The root run's webhooks: the agent's and the request's. A request's webhook that could never be delivered is
/// rejected; a broken one of the agent's settings fails in its deliveries and does not stop the run.
pub fn for_run(
    settings: &Settings,
    request: &RunRequest,
    agent: &Agent,
) -> Result<Vec<Arc<Webhook>>, StartError> {
    let mut webhooks = Vec::new();
    webhooks.extend(agent.webhook.clone().map(Arc::new));
    if let Some(requested) = &request.webhook {
        let owner = request.owner.as_deref();
        let webhook = check_requested(settings, requested, owner, agent)?;
        webhooks.push(Arc::new(webhook));
    }
    Ok(webhooks)
}

fn check_requested(
    settings: &Settings,
    requested: &WebhookRequest,
    owner: Option<&str>,
    agent: &Agent,
) -> Result<Webhook, StartError> {
    let invalid = |field, why: String| StartError::Override { field, reason: why };
    let Some(url) = &requested.url else {
        return Err(invalid("webhook/url", "is required".to_owned()));
    };
    let url = ssrf::parse_url(url).map_err(|error| invalid("webhook/url", error.to_string()))?;
    let result = settings.webhook_guard.check(&url);
    result.map_err(|error| invalid("webhook/url", error.to_string()))?;
    let events = &requested.events;
    if let Some(unknown) = events
        .iter()
        .find(|name| !STORED_EVENT_NAMES.contains(&name.as_str()))
    {
        let unknown: String = unknown.chars().take(64).collect();
        let valid = STORED_EVENT_NAMES.join(", ");
        let why = format!("has {unknown:?}, which is none of: {valid}");
        return Err(invalid("webhook/events", why));
    }
    let events = STORED_EVENT_NAMES
        .iter()
        .filter(|name| events.iter().any(|event| event == *name));
    let secret_env = secret_env(settings, owner, agent).map_err(|why| invalid("webhook", why))?;
    Ok(Webhook {
        url: url.into(),
        secret_env,
        events: events.map(|name| (*name).to_owned()).collect(),
    })
}

/// The secret that signs a request's webhook: that of the requesting key, so that no client learns what other receivers
/// trust. Without keys, it is the operator's.
fn secret_env(
    settings: &Settings,
    owner: Option<&str>,
    agent: &Agent,
) -> Result<Option<String>, String> {
    let is_set = |name: &String| is_process_secret_set(name);
    let Some(key) = owner else {
        let agent_secret = agent.webhook.as_ref().and_then(|it| it.secret_env.clone());
        let effective = agent_secret
            .as_ref()
            .or(settings.webhook_secret_env.as_ref());
        return match effective.is_some_and(is_set) {
            true => Ok(agent_secret),
            false => Err(
                "there is no secret to sign it with: set [webhook] secret_env in the agent's file or [webhooks] \
                 secret_env in the server's configuration, and the variable that it names"
                    .to_owned(),
            ),
        };
    };
    let key_secret = settings.keys.get(key).and_then(Option::as_ref);
    let key_secret = key_secret.filter(|name| is_set(name));
    let why = || {
        format!(
            "there is no secret to sign it with: set webhook_secret_env in [auth.keys.{key}] of the server's \
             configuration, and the variable that it names"
        )
    };
    key_secret.cloned().map(Some).ok_or_else(why)
}

/// The deliveries for these events of a root run with this status, with its own usage and its tree's.
pub fn deliveries(
    webhooks: &[Arc<Webhook>],
    events: &[Event],
    status: Status,
    usage: (&Usage, &TreeUsage),
) -> Vec<NewDelivery> {
    let mut deliveries = Vec::new();
    for event in events {
        let subscribed = webhooks
            .iter()
            .filter(|webhook| webhook.is_subscribed_to(event.kind.name()));
        deliveries.extend(subscribed.map(|webhook| {
            let name = event.kind.name().as_str();
            let data = RunData::new(event, status, usage);
            webhook_message::delivery(Arc::clone(webhook), name, event.time, data)
        }));
    }
    deliveries
}

#[derive(Serialize)]
struct RunData<'a> {
    id: RunId,
    agent: &'a str,
    status: Status,
    input_tokens: u64,
    output_tokens: u64,
    tool_calls: u64,
    tree: TreeData,
    /// Without the message, which may repeat text of a model or a provider.
    error: Option<ErrorData<'a>>,
    /// Of `score.added`, without the comment.
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<ScoreData<'a>>,
}

#[derive(Serialize)]
struct ScoreData<'a> {
    name: &'a str,
    value: &'a ScoreValue,
    author: Option<&'a str>,
}

#[derive(Serialize)]
struct TreeData {
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
struct ErrorData<'a> {
    code: FailureCode,
    category: &'a str,
    retryable: bool,
}

impl<'a> RunData<'a> {
    fn new(event: &'a Event, status: Status, (own, tree): (&Usage, &TreeUsage)) -> Self {
        let TreeUsage { runs, usage } = tree;
        let score = match &event.kind {
            EventKind::ScoreAdded {
                name,
                value,
                author,
                ..
            } => Some(ScoreData {
                name,
                value,
                author: author.as_deref(),
            }),
            _ => None,
        };
        let error = match &event.kind {
            EventKind::RunFailed { error } => Some(ErrorData::new(error)),
            _ => None,
        };
        Self {
            id: event.run_id,
            agent: &event.agent,
            status: status_after(&event.kind).unwrap_or(status),
            input_tokens: own.tokens.input,
            output_tokens: own.tokens.output,
            tool_calls: own.tool_calls,
            tree: TreeData {
                runs: *runs,
                input_tokens: usage.tokens.input,
                output_tokens: usage.tokens.output,
                cache_read_tokens: usage.tokens.cache_read,
                cache_write_tokens: usage.tokens.cache_write,
                model_calls: usage.model_calls,
                tool_calls: usage.tool_calls,
                cost_usd: usage.cost.map(|cost| cost.to_usd()),
                complete: usage.is_complete(),
            },
            error,
            score,
        }
    }
}

impl<'a> ErrorData<'a> {
    fn new(failure: &'a Failure) -> Self {
        Self {
            code: failure.code,
            category: &failure.category,
            retryable: failure.retryable,
        }
    }
}

/// The run's status after this event; `None` if it does not change the status.
fn status_after(kind: &EventKind) -> Option<Status> {
    Some(match kind {
        EventKind::RunQueued { .. } => Status::Queued,
        EventKind::RunCancelling { .. } => Status::Cancelling,
        EventKind::RunCompleted { .. } => Status::Completed,
        EventKind::RunFailed { .. } => Status::Failed,
        EventKind::RunCancelled { .. } => Status::Cancelled,
        _ => return None,
    })
}
