//! Runs one turn: sends the conversation to the provider, with retries and fallbacks, and returns its reply.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::event::EventKind;
use crate::domain::service::Service;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::cluster::connection;
use crate::engine::context::RunContext;
use crate::engine::run_loop::exchange::Exchange;
use crate::engine::run_loop::limits;
use crate::engine::run_loop::played_turn;
use crate::engine::run_loop::provider_request::{self, Target};
use crate::engine::run_loop::rate_limit;
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply, TurnRequest};
use crate::engine::state::failures;
use crate::engine::state::pending_batch::PendingBatch;
use crate::engine::state::turn_error::TurnError;
use crate::providers::{ErrorCategory, ProviderError, ReplyOutcome, retry};
use crate::store::{Change, StoreError};

/// Sends the request to the agent's model, then to its fallbacks. The usage is added to the run and its ancestors.
pub async fn request(
    context: &RunContext,
    turn_request: TurnRequest<'_>,
    streamed: &mut StreamedReply,
    exchange: &mut Exchange,
) -> Result<TurnReply, TurnError> {
    if let Some(playback) = context.model_playback() {
        return Box::pin(played_turn::request(context, &turn_request, &playback)).await;
    }
    if turn_request.is_turn {
        withdraw_lost(context, turn_request.turn);
    }
    let (agent, started_at) = (&context.run.agent, Instant::now());
    let mut last_error: Option<ProviderError> = None;
    let mut last_refusal: Option<TurnReply> = None;
    // `None` also if an earlier process made the request to the agent's own model.
    let mut own_failure: Option<&'static str> = None;
    let models = || std::iter::once(&agent.model).chain(&agent.fallback_models);
    // The batch of an earlier process may belong to a fallback.
    let start_index = match context.run.pending_batch.get() {
        PendingBatch::Submitted(submitted) => {
            models().position(|model| model.to_string() == submitted.model)
        }
        PendingBatch::Absent | PendingBatch::Unknown { .. } => None,
    };
    for model in models().skip(start_index.unwrap_or(0)) {
        let target = match resolve_target(context, model) {
            Ok(target) => target,
            Err(error) if last_error.is_none() && last_refusal.is_none() => return Err(error),
            // An unavailable fallback is skipped; the error of the model before it is the one to report.
            Err(_) => continue,
        };
        let refusal = last_refusal.as_ref().and_then(refusal_error);
        if let Some(error) = refusal.as_ref().or(last_error.as_ref()) {
            let retry = Retry {
                model,
                attempt: 0,
                wait: Duration::ZERO,
                error,
            };
            announce_retry(context, &turn_request, streamed, retry).await?;
        }
        match request_with_retries(context, &turn_request, target, streamed, exchange).await {
            Err(TurnError::Provider(error)) if error.category.is_retryable() => {
                if *model == agent.model {
                    own_failure = own_failure.or(Some(error.category.as_str()));
                }
                last_error = Some(error.with(&model.to_string()));
            }
            Err(TurnError::Provider(error)) if last_refusal.is_none() => {
                return Err(TurnError::Provider(error.with(&model.to_string())));
            }
            Err(TurnError::Provider(_)) => break,
            Ok(reply) if agent.fallback_on_refusal && refusal_error(&reply).is_some() => {
                if *model == agent.model {
                    own_failure = own_failure.or(Some("refused"));
                }
                last_refusal = Some(reply);
            }
            result => {
                if result.is_ok() {
                    let metrics = &context.engine.metrics;
                    metrics.turn_completed(&model.to_string(), started_at.elapsed());
                    if last_error.is_some() || last_refusal.is_some() {
                        warn_of_fallback(context, turn_request.turn, model, own_failure);
                    }
                }
                return result;
            }
        }
    }
    // A refusal says more than the error of a model after it.
    if let Some(refused) = last_refusal {
        let model = refused.requested_model.to_string();
        let metrics = &context.engine.metrics;
        metrics.turn_completed(&model, started_at.elapsed());
        return Ok(refused);
    }
    // Unreachable without an error: every agent has at least one model.
    Err(last_error.map_or(TurnError::Cancelled, TurnError::Provider))
}

/// The error by which a refusal is announced; `None` if the reply is no refusal.
fn refusal_error(turn_reply: &TurnReply) -> Option<ProviderError> {
    let TurnReply {
        reply,
        requested_model,
    } = turn_reply;
    let (text, refusal) = (&reply.message.content, reply.refusal.as_deref());
    let is_refused = reply.outcome == ReplyOutcome::Refused;
    let failure = failures::reply_failure(reply.outcome, text, refusal).filter(|_| is_refused)?;
    let error = ProviderError::new(ErrorCategory::BadRequest, failure.message);
    Some(error.with(&requested_model.to_string()))
}

/// `own_failure` is why the agent's own model gave no reply.
fn warn_of_fallback(
    context: &RunContext,
    turn: u32,
    model: &ModelRef,
    own_failure: Option<&'static str>,
) {
    let own_model = &context.run.agent.model;
    let why = own_failure.map_or_else(String::new, |own| format!(" ({own})"));
    let message = format!("{own_model} gave no reply{why}: the fallback {model} replied");
    let warning = Warning::new(WarningCode::FallbackUsed, &message);
    context.run.warn(warning, Some(turn));
}

fn resolve_target<'a>(
    context: &'a RunContext,
    model: &'a ModelRef,
) -> Result<Target<'a>, TurnError> {
    let keys = &context.run.tree.provider_keys;
    let key = keys.get(&context.run.agent, &model.provider);
    let key = key.map_err(|error| TurnError::Provider(error.with(&model.to_string())))?;
    let provider = context
        .engine
        .providers
        .get_with_key(&model.provider, key.is_some());
    let provider = provider.map_err(TurnError::Unavailable)?;
    Ok(Target {
        model,
        provider,
        key,
    })
}

/// Sends the request to one model, with retries by the agent's policy.
async fn request_with_retries(
    context: &RunContext,
    turn_request: &TurnRequest<'_>,
    target: Target<'_>,
    streamed: &mut StreamedReply,
    exchange: &mut Exchange,
) -> Result<TurnReply, TurnError> {
    let Target {
        model, provider, ..
    } = target;
    let policy = &context.run.agent.retry;
    let (mut attempt, mut retries) = (0, 0);
    let is_batch = turn_request.params.service == Some(Service::Batch);
    loop {
        let connected = connection::wait_until_connected(context);
        limits::within_deadline(&context.run, connected).await??;
        let sent = provider_request::send(context, turn_request, target, streamed, exchange);
        let error = match sent.await {
            Ok(reply) => {
                return Ok(TurnReply {
                    reply,
                    requested_model: model.clone(),
                });
            }
            Err(TurnError::Provider(error)) => error,
            Err(other) => return Err(other),
        };
        attempt += 1;
        // The next request waits with all others of the limit, and that is no retry.
        let waits_for_limit =
            rate_limit::is_refusal(&error) && error.retry_after.is_some() && !is_batch;
        retries += u32::from(!waits_for_limit);
        let is_final = !error.category.is_retryable() || error.is_quota_spent;
        if is_final || retries > policy.max_retries {
            return Err(TurnError::Provider(error));
        }
        let wait = retry::retry_delay(policy, retries, error.retry_after, random_fraction());
        let remaining = context
            .run
            .deadline()
            .map(|deadline| deadline.at.saturating_duration_since(Instant::now()));
        if remaining.is_some_and(|remaining| wait >= remaining) {
            // The service asks for a longer wait than the run has. Its error says more than a timeout would.
            return Err(TurnError::Provider(error));
        }
        tracing::warn!(
            run.id = %context.run.scope.run, run.root = %context.run.scope.root, agent = %context.run.agent.name,
            depth = context.run.scope.depth.0, provider = %provider.name, model = %model.model,
            "{model} failed ({error}), retrying in {wait:?}"
        );
        context.engine.metrics.request_retried(&provider.name);
        let retry = Retry {
            model,
            attempt,
            wait,
            error: &error,
        };
        announce_retry(context, turn_request, streamed, retry).await?;
        if !waits_for_limit {
            limits::within_deadline(&context.run, tokio::time::sleep(wait)).await?;
        }
    }
}

/// Withdraws what subscribers have of this turn, if its reply could not be recorded and is requested again.
fn withdraw_lost(context: &RunContext, turn: u32) {
    let (broadcaster, scope) = (context.engine.journal.broadcaster(), context.run.scope);
    if broadcaster.has_shown(scope.root, scope.run, turn) {
        withdraw(context, turn, "the reply could not be recorded".to_owned());
    }
}

/// Withdraws what subscribers have of this turn.
fn withdraw(context: &RunContext, turn: u32, reason: String) {
    let (broadcaster, run) = (context.engine.journal.broadcaster(), &context.run);
    let event = EventKind::TextWithdrawn { turn, reason };
    run.live_text
        .withdraw(turn, || broadcaster.publish_live(run, event));
}

/// The next request of a turn, after one that failed.
struct Retry<'a> {
    model: &'a ModelRef,
    /// 0 for the first request to a fallback.
    attempt: u32,
    wait: Duration,
    error: &'a ProviderError,
}

/// Withdraws what subscribers have been sent of the failed reply, announces the next request, and records what the failed
/// one has used. A batch that has failed is read again by a process that resumes the run, so what it has used is recorded with
/// the batch that replaces it.
async fn announce_retry(
    context: &RunContext,
    turn_request: &TurnRequest<'_>,
    streamed: &mut StreamedReply,
    retry: Retry<'_>,
) -> Result<(), StoreError> {
    let (run, turn) = (&context.run, turn_request.turn);
    let reason = retry.error.to_string();
    if streamed.has_reasoning || !streamed.text.is_empty() {
        *streamed = StreamedReply {
            has_recorded_batch: streamed.has_recorded_batch,
            ..StreamedReply::default()
        };
        withdraw(context, turn, reason.clone());
    }
    let event = EventKind::RetryScheduled {
        turn,
        model: retry.model.to_string(),
        attempt: retry.attempt,
        wait_ms: u64::try_from(retry.wait.as_millis()).unwrap_or(u64::MAX),
        reason,
    };
    let (journal, entries) = (&context.engine.journal, vec![event.into()]);
    let progress = match streamed.has_recorded_batch {
        true => None,
        false => run.changed_progress(turn_request.progress),
    };
    match progress {
        Some(progress) => {
            let change = Change::Progress(progress);
            let committed = journal.append(run, change, entries);
            committed.await.map(drop)
        }
        None => {
            let change = Change::Unchanged;
            journal.enqueue(run, change, entries).await
        }
    }
}

/// A number in 0..1. The hasher's random keys are good enough to spread retries.
pub fn random_fraction() -> f64 {
    let bits = RandomState::new().hash_one(Instant::now()) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}
