//! Runs one turn: sends the conversation to the provider, with retries and fallbacks, and returns its reply.

use std::hash::{BuildHasher, RandomState};

use secrecy::SecretString;
use tokio::time::Instant;

use crate::config::models::ModelFacts;
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Cache, Params};
use crate::domain::event::EventKind;
use crate::domain::service::Service;
use crate::domain::usage::{Cost, Price, Usage};
use crate::engine::approval::pause;
use crate::engine::context::RunContext;
use crate::engine::record::blobs;
use crate::engine::run_loop::batch;
use crate::engine::run_loop::limits;
use crate::engine::run_loop::request_size;
use crate::engine::run_loop::turn_error::TurnError;
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply, TurnRequest};
use crate::engine::run_spans::ChatSpan;
use crate::engine::state::budget::Amount;
use crate::engine::state::pending_batch::PendingBatch;
use crate::providers::registry::ProviderHandle;
use crate::providers::{
    ChatRequest, Delta, ErrorCategory, ProviderError, Reply, content_parts, model_params, retry,
};
use crate::store::{Change, StoreError};

/// Sends the request to the agent's model, then to its fallbacks. The usage is added to the run and its ancestors.
pub async fn request(
    context: &RunContext,
    turn_request: TurnRequest<'_>,
    streamed: &mut StreamedReply,
) -> Result<TurnReply, TurnError> {
    let (agent, started_at) = (&context.run.agent, Instant::now());
    let mut last_error = None;
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
            Err(error) if last_error.is_none() => return Err(error),
            // An unavailable fallback is skipped; the error of the model before it is the one to report.
            Err(_) => continue,
        };
        if let Some(TurnError::Provider(error)) = &last_error {
            withdraw_streamed(context, turn_request.turn, streamed, error);
            let retry_event = EventKind::RetryScheduled {
                turn: turn_request.turn,
                model: model.to_string(),
                attempt: 0,
                wait_ms: 0,
                reason: error.to_string(),
            };
            context
                .engine
                .journal
                .enqueue(
                    &context.run,
                    Change::Unchanged,
                    Vec::new(),
                    vec![retry_event],
                )
                .await?;
        }
        match request_with_retries(context, &turn_request, model, target, streamed).await {
            Err(TurnError::Provider(error)) if error.category.is_retryable() => {
                last_error = Some(TurnError::Provider(error));
            }
            result => {
                if result.is_ok() {
                    context.engine.metrics.turn_completed(started_at.elapsed());
                }
                return result;
            }
        }
    }
    // Unreachable without an error: every agent has at least one model.
    Err(last_error.unwrap_or(TurnError::Cancelled))
}

/// The provider of a request, and the owner's key for it, if there is one.
#[derive(Clone, Copy)]
struct Target<'a> {
    provider: &'a ProviderHandle,
    key: Option<&'a SecretString>,
}

fn resolve_target<'a>(context: &'a RunContext, model: &ModelRef) -> Result<Target<'a>, TurnError> {
    let keys = &context.run.tree.provider_keys;
    let key = keys.get(&context.run.agent, &model.provider);
    let key = key.map_err(TurnError::Provider)?;
    let provider = context
        .engine
        .providers
        .get_with_key(&model.provider, key.is_some());
    let provider = provider.map_err(TurnError::Unavailable)?;
    Ok(Target { provider, key })
}

/// Sends the request to one model, with retries by the agent's policy.
async fn request_with_retries(
    context: &RunContext,
    turn_request: &TurnRequest<'_>,
    model: &ModelRef,
    target: Target<'_>,
    streamed: &mut StreamedReply,
) -> Result<TurnReply, TurnError> {
    let provider = target.provider;
    let policy = &context.run.agent.retry;
    let mut attempt = 0;
    loop {
        let error = match request_once(context, turn_request, model, target, streamed).await {
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
        if !error.category.is_retryable() || attempt > policy.max_retries {
            return Err(TurnError::Provider(error));
        }
        let wait = retry::retry_delay(policy, attempt, error.retry_after, random_fraction());
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
            depth = context.run.scope.depth.0, provider = %provider.name,
            "{} failed ({error}), retrying in {wait:?}", provider.name
        );
        context.engine.metrics.request_retried(&provider.name);
        withdraw_streamed(context, turn_request.turn, streamed, &error);
        let retry_event = EventKind::RetryScheduled {
            turn: turn_request.turn,
            model: model.to_string(),
            attempt,
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            reason: error.to_string(),
        };
        context
            .engine
            .journal
            .enqueue(
                &context.run,
                Change::Unchanged,
                Vec::new(),
                vec![retry_event],
            )
            .await?;
        limits::within_deadline(&context.run, tokio::time::sleep(wait)).await?;
    }
}

/// Sends one request: reserves budget, takes a permit, sends, and adds the usage.
async fn request_once(
    context: &RunContext,
    turn_request: &TurnRequest<'_>,
    model: &ModelRef,
    Target { provider, key }: Target<'_>,
    streamed: &mut StreamedReply,
) -> Result<Reply, TurnError> {
    let model_name = model.to_string();
    let facts = context
        .engine
        .settings
        .models
        .get(&model.provider, &model.model);
    let (mut params, mut warnings) =
        model_params::fit_to_model(&model_name, turn_request.params, facts);
    warnings.extend(model_params::fit_service_tier(
        &model_name,
        &mut params,
        facts,
        &provider.services,
    ));
    if !turn_request.is_turn && params.service == Some(Service::Batch) {
        // A summary request only shortens the conversation; the run does not wait for a batch for it.
        params.to_mut().service = None;
    }
    let is_batch = params.service == Some(Service::Batch);
    let estimated_usage = match context.run.accounts.is_empty() {
        true => Amount::default(),
        false => {
            let price = price_for_request(facts, &params, params.service.unwrap_or_default());
            estimate_usage(turn_request, &params, price.as_ref())
        }
    };
    let reservation = limits::within_deadline(
        &context.run,
        context
            .run
            .tree
            .budgets
            .reserve(&context.run.accounts, estimated_usage),
    )
    .await?
    .map_err(TurnError::Budget)?;
    // A batch loads its own when it is submitted, and drops them afterwards.
    let blobs = match is_batch {
        true => None,
        false => Box::pin(blobs::load(&context.engine, turn_request.messages)).await?,
    };
    warnings.extend(
        provider
            .provider
            .dropped_params_warning(&model.model, &params, facts),
    );
    if blobs.is_some() || is_batch {
        warnings.extend(content_parts::attachment_warnings(
            &model_name,
            turn_request.messages,
            facts,
        ));
    }
    record_warnings(context, turn_request.turn, warnings).await?;
    let chat_span = ChatSpan::start(&context.run);
    let request = ChatRequest {
        model: &model.model,
        system: turn_request.system,
        messages: turn_request.messages,
        blobs: blobs.as_ref(),
        tools: turn_request.tools,
        params: &params,
        facts,
        stream: context.run.is_streaming() && !is_batch,
        multi_turn: !turn_request.tools.is_empty() && context.run.agent.max_turns > 1,
        cache_key: match turn_request.is_turn {
            true => &context.run.agent.version,
            false => "",
        },
        trace: chat_span.as_deref().map(|span| &span.context),
        api_key: key,
    };
    let (mut reported_usage, mut billed_service) = (None, params.service.unwrap_or_default());
    let turn = turn_request.turn;
    let mut on_delta = |delta: Delta<'_>| {
        let event = match delta {
            Delta::Usage(usage) => {
                reported_usage = Some(usage);
                return;
            }
            // The reply in a batch does not say which tier was billed.
            Delta::ServiceTier(_) if is_batch => return,
            Delta::ServiceTier(service) => {
                billed_service = service;
                return;
            }
            _ if !turn_request.is_turn => return,
            Delta::Text(text) => {
                streamed.text.push_str(text);
                let text = text.to_owned();
                EventKind::TextDelta { turn, text }
            }
            Delta::Reasoning(text) => {
                streamed.has_reasoning = true;
                let text = text.to_owned();
                EventKind::ReasoningDelta { turn, text }
            }
            Delta::ReasoningStarted => {
                streamed.has_reasoning = true;
                EventKind::ReasoningStarted { turn }
            }
        };
        context
            .engine
            .journal
            .publish_ephemeral(&context.run, event);
    };
    let result = match is_batch {
        true => {
            let batch_request = batch::BatchRequest {
                turn: turn_request.turn,
                model: &model_name,
                provider,
                request,
            };
            Box::pin(batch::complete(context, batch_request, &mut on_delta)).await
        }
        false => {
            request_now(
                context,
                turn_request.is_turn,
                provider,
                request,
                &mut on_delta,
            )
            .await
        }
    };
    let explain_error = |error| explain(error, model, turn_request, facts);
    let result = result.map(|reply| reply.map_err(explain_error));
    if let Some(chat_span) = chat_span {
        chat_span.end(&context.run, turn_request, model, &result);
    }
    let (token_usage, is_complete) = match &result {
        Ok(Ok(reply)) => (reply.usage, true),
        Ok(Err(error)) if !error.may_be_billed => {
            return Err(TurnError::Provider(error.clone()));
        }
        // A complete reply that was rejected counts as a request.
        Ok(Err(error)) if error.has_final_usage => (reported_usage, true),
        // The request was interrupted: what the service had reported counts, the rest stays unknown.
        Ok(Err(_)) | Err(_) => (reported_usage, false),
    };
    let price = price_for_request(facts, &params, billed_service);
    let usage = Usage {
        tokens: token_usage.unwrap_or_default(),
        model_calls: u64::from(is_complete),
        tool_calls: 0,
        cost: price
            .zip(token_usage)
            .map(|(price, tokens)| price.cost(&tokens)),
        unreported: u64::from(!is_complete || token_usage.is_none()),
    };
    context.run.add_usage(&usage);
    if is_complete || token_usage.is_some() {
        context
            .engine
            .metrics
            .record_usage(&model_name, &usage.tokens, usage.cost);
    }
    reservation.settle(Amount {
        tokens: usage.tokens.total(),
        cost: usage.cost.unwrap_or_default(),
    });
    result?.map_err(TurnError::Provider)
}

/// Sends a request whose reply comes on the same connection.
async fn request_now(
    context: &RunContext,
    is_turn: bool,
    provider: &ProviderHandle,
    request: ChatRequest<'_>,
    on_delta: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Result<Reply, ProviderError>, TurnError> {
    if context.run.pending_batch.get() != PendingBatch::Absent {
        if is_turn {
            // The configuration no longer asks for a batch.
            batch::abandon(context).await;
        }
        pause::ensure_running(context).await?;
    }
    // A permit covers one provider request, not a run: waiting parents would otherwise starve their children.
    let _permit = match &provider.permits {
        Some(permits) => limits::within_deadline(&context.run, permits.acquire())
            .await?
            .ok(),
        None => None,
    };
    limits::within_deadline(&context.run, provider.complete(request, on_delta)).await
}

/// Adds advice to a rejected request with images or files if it is unknown whether the model accepts them.
fn explain(
    error: ProviderError,
    model: &ModelRef,
    turn_request: &TurnRequest<'_>,
    facts: Option<&ModelFacts>,
) -> ProviderError {
    if error.category != ErrorCategory::BadRequest {
        return error;
    }
    match content_parts::in_doubt(&model.provider, &model.model, turn_request.messages, facts) {
        Some(advice) => error.with(&advice),
        None => error,
    }
}

/// Withdraws what subscribers have been sent of a reply that is requested again.
fn withdraw_streamed(
    context: &RunContext,
    turn: u32,
    streamed: &mut StreamedReply,
    error: &ProviderError,
) {
    if streamed.has_reasoning || !streamed.text.is_empty() {
        *streamed = StreamedReply::default();
        let reason = error.to_string();
        let event = EventKind::TextWithdrawn { turn, reason };
        context
            .engine
            .journal
            .publish_ephemeral(&context.run, event);
    }
}

/// Records what a request had to leave out, once per run for each text.
async fn record_warnings(
    context: &RunContext,
    turn: u32,
    warnings: Vec<String>,
) -> Result<(), StoreError> {
    let new_warnings = warnings
        .into_iter()
        .filter(|it| context.run.insert_warning(it));
    let events: Vec<_> = new_warnings
        .map(|message| EventKind::ModelWarning { turn, message })
        .collect();
    match events.is_empty() {
        true => Ok(()),
        false => {
            let journal = &context.engine.journal;
            journal
                .enqueue(&context.run, Change::Unchanged, Vec::new(), events)
                .await
        }
    }
}

fn price_for_request(
    facts: Option<&ModelFacts>,
    params: &Params,
    service: Service,
) -> Option<Price> {
    let price = facts?.price_for(service)?;
    match params.cache {
        Cache::OneHour => Some(price.with_hour_cache()),
        Cache::FiveMinutes | Cache::Off => Some(price),
    }
}

/// The most that a request may use: its estimated input, and the limit of its output.
fn estimate_usage(
    turn_request: &TurnRequest<'_>,
    params: &Params,
    price: Option<&Price>,
) -> Amount {
    const DEFAULT_MAX_TOKENS: u32 = 4096;
    let preamble_bytes = request_size::preamble_bytes(turn_request.system, turn_request.tools);
    let messages_bytes = request_size::messages_bytes(turn_request.messages);
    let max_tokens = params.max_tokens;
    let tokens = crate::domain::usage::TokenUsage {
        input: request_size::tokens_from_bytes(preamble_bytes + messages_bytes),
        output: u64::from(max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
        ..Default::default()
    };
    Amount {
        tokens: tokens.total(),
        cost: price.map_or(Cost(0), |price| price.cost(&tokens)),
    }
}

/// A number in 0..1. The hasher's random keys are good enough to spread retries.
pub fn random_fraction() -> f64 {
    let bits = RandomState::new().hash_one(Instant::now()) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}
