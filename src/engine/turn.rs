//! One turn: asks the model until it has a reply, the retries are spent, or time, budget or stop end it. Knows no
//! tools and no storage engine.

use std::hash::{BuildHasher, RandomState};

use secrecy::SecretString;
use tokio::time::Instant;

use crate::config::models::ModelFacts;
use crate::domain::agent::{Cache, ModelRef, Params};
use crate::domain::event::EventKind;
use crate::domain::message::{Message, ToolSpec};
use crate::domain::service::Service;
use crate::domain::usage::{Cost, Price, Usage};
use crate::engine::budget::Amount;
use crate::engine::left_batch::LeftBatch;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::request_size;
use crate::engine::spans::Chat;
use crate::engine::turn_error::TurnError;
use crate::engine::{batch, blobs, waiting};
use crate::providers::registry::Served;
use crate::providers::{Category, ChatRequest, Delta, ProviderError, Reply, fit, parts, retry};
use crate::store::{Change, StoreError};

/// What is asked of the model.
pub struct Question<'a> {
    /// The turn's number.
    pub turn: u32,
    /// The assembled prompt.
    pub system: &'a str,
    /// The conversation.
    pub messages: &'a [Message],
    /// The tools on offer.
    pub tools: &'a [ToolSpec],
    /// Sampling parameters.
    pub params: &'a Params,
    /// Whether it is a turn of the run's conversation: what else is requested is not streamed to subscribers.
    pub is_turn: bool,
}

/// What listeners have been sent of a reply and that has not been withdrawn.
#[derive(Debug, Default)]
pub struct Streamed {
    /// Its text: what there is of a reply that is broken off.
    pub text: String,
    has_reasoning: bool,
}

/// A reply, and who gave it.
pub struct Answer {
    /// The reply.
    pub reply: Reply,
    /// The model that was asked.
    pub asked: ModelRef,
}

/// Takes one turn. Usage of the reply is booked for the run and its ancestors.
pub async fn take(
    engine: &Engine,
    live: &LiveRun,
    question: Question<'_>,
    streamed: &mut Streamed,
) -> Result<Answer, TurnError> {
    let (agent, clock) = (&live.agent, Instant::now());
    let mut failed = None;
    let models = || std::iter::once(&agent.model).chain(&agent.fallback_models);
    // A batch of an earlier process is of a model that was come to.
    let at = match live.left_batch.get() {
        LeftBatch::Known(left) => models().position(|model| model.to_string() == left.model),
        LeftBatch::Nothing | LeftBatch::Unknown { .. } => None,
    };
    for model in models().skip(at.unwrap_or(0)) {
        let target = match target(engine, live, model) {
            Ok(target) => target,
            Err(error) if failed.is_none() => return Err(error),
            // A fallback that is not there is passed over, and does not hide why the model before it failed.
            Err(_) => continue,
        };
        if let Some(TurnError::Provider(error)) = &failed {
            withdraw(engine, live, question.turn, streamed, error);
            let scheduled = EventKind::RetryScheduled {
                turn: question.turn,
                model: model.to_string(),
                attempt: 0,
                wait_ms: 0,
                reason: error.to_string(),
            };
            engine
                .journal
                .note(live, Change::Nothing, Vec::new(), vec![scheduled])
                .await?;
        }
        match ask(engine, live, &question, model, target, streamed).await {
            Err(TurnError::Provider(error)) if error.category.is_retryable() => {
                failed = Some(TurnError::Provider(error));
            }
            ended => {
                if ended.is_ok() {
                    engine.metrics.turn_taken(clock.elapsed());
                }
                return ended;
            }
        }
    }
    // At least one model was asked, so there is a failure to tell.
    Err(failed.unwrap_or(TurnError::Stopped))
}

/// Who answers a request, and the person's own key that it carries.
#[derive(Clone, Copy)]
struct Target<'a> {
    served: &'a Served,
    key: Option<&'a SecretString>,
}

/// Who answers this run's requests for a model.
fn target<'a>(
    engine: &'a Engine,
    live: &'a LiveRun,
    model: &ModelRef,
) -> Result<Target<'a>, TurnError> {
    let keys = &live.tree.provider_keys;
    let key = keys.get(&live.agent, &model.provider);
    let key = key.map_err(TurnError::Provider)?;
    let served = engine.providers.get_for(&model.provider, key.is_some());
    let served = served.map_err(TurnError::Unavailable)?;
    Ok(Target { served, key })
}

/// Asks one model, again where its agent's policy says so.
async fn ask(
    engine: &Engine,
    live: &LiveRun,
    question: &Question<'_>,
    model: &ModelRef,
    target: Target<'_>,
    streamed: &mut Streamed,
) -> Result<Answer, TurnError> {
    let served = target.served;
    let policy = &live.agent.retry;
    let mut attempt = 0;
    loop {
        let error = match ask_once(engine, live, question, model, target, streamed).await {
            Ok(reply) => {
                return Ok(Answer {
                    reply,
                    asked: model.clone(),
                });
            }
            Err(TurnError::Provider(error)) => error,
            Err(other) => return Err(other),
        };
        attempt += 1;
        if !error.category.is_retryable() || attempt > policy.max_retries {
            return Err(TurnError::Provider(error));
        }
        let wait = retry::wait(policy, attempt, error.retry_after, random());
        let left = live
            .deadline()
            .map(|deadline| deadline.at.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| wait >= left) {
            // The service would have us wait longer than the run has: its own words say more than a timeout would.
            return Err(TurnError::Provider(error));
        }
        tracing::warn!(
            run.id = %live.scope.run, run.root = %live.scope.root, agent = %live.agent.name,
            depth = live.scope.depth.0, provider = %served.name,
            "{} failed ({error}), trying again in {wait:?}", served.name
        );
        engine.metrics.retried(&served.name);
        withdraw(engine, live, question.turn, streamed, &error);
        let scheduled = EventKind::RetryScheduled {
            turn: question.turn,
            model: model.to_string(),
            attempt,
            wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            reason: error.to_string(),
        };
        engine
            .journal
            .note(live, Change::Nothing, Vec::new(), vec![scheduled])
            .await?;
        bounded(live, tokio::time::sleep(wait)).await?;
    }
}

/// One request: reserves budget, takes a permit, asks, books.
async fn ask_once(
    engine: &Engine,
    live: &LiveRun,
    question: &Question<'_>,
    model: &ModelRef,
    Target { served, key }: Target<'_>,
    streamed: &mut Streamed,
) -> Result<Reply, TurnError> {
    let asked = model.to_string();
    let facts = engine.settings.models.get(&model.provider, &model.model);
    let (mut params, mut warnings) = fit::fit(&asked, question.params, facts);
    warnings.extend(fit::fit_service(
        &asked,
        &mut params,
        facts,
        &served.services,
    ));
    if !question.is_turn && params.service == Some(Service::Batch) {
        // What only shortens the conversation is not waited for.
        params.to_mut().service = None;
    }
    let is_batch = params.service == Some(Service::Batch);
    let wanted = match live.accounts.is_empty() {
        true => Amount::default(),
        false => {
            let price = price(facts, &params, params.service.unwrap_or_default());
            estimate(question, &params, price.as_ref())
        }
    };
    let reservation = bounded(live, live.tree.budgets.reserve(&live.accounts, wanted))
        .await?
        .map_err(TurnError::Budget)?;
    // A batch takes its own when it is made, and lets go of them.
    let blobs = match is_batch {
        true => None,
        false => Box::pin(blobs::load(engine, question.messages)).await?,
    };
    warnings.extend(served.provider.left_out(&model.model, &params, facts));
    if blobs.is_some() || is_batch {
        warnings.extend(parts::warnings(&asked, question.messages, facts));
    }
    warn(engine, live, question.turn, warnings).await?;
    let chat = Chat::begin(live);
    let request = ChatRequest {
        model: &model.model,
        system: question.system,
        messages: question.messages,
        blobs: blobs.as_ref(),
        tools: question.tools,
        params: &params,
        facts,
        stream: live.streams() && !is_batch,
        multi_turn: !question.tools.is_empty() && live.agent.max_turns > 1,
        cache_key: match question.is_turn {
            true => &live.agent.version,
            false => "",
        },
        trace: chat.as_deref().map(|chat| &chat.place),
        key,
    };
    let (mut reported, mut billed) = (None, params.service.unwrap_or_default());
    let turn = question.turn;
    let mut take_in = |delta: Delta<'_>| {
        let event = match delta {
            Delta::Usage(usage) => {
                reported = Some(usage);
                return;
            }
            // What a reply in a batch says is another matter.
            Delta::Billed(_) if is_batch => return,
            Delta::Billed(service) => {
                billed = service;
                return;
            }
            _ if !question.is_turn => return,
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
        engine.journal.whisper(live, event);
    };
    let answered = match is_batch {
        true => {
            let ask = batch::Ask {
                turn: question.turn,
                model: &asked,
                served,
                request,
            };
            Box::pin(batch::complete(engine, live, ask, &mut take_in)).await
        }
        false => {
            at_once(
                engine,
                live,
                question.is_turn,
                served,
                request,
                &mut take_in,
            )
            .await
        }
    };
    let explained = |error| explained(error, model, question, facts);
    let answered = answered.map(|reply| reply.map_err(explained));
    if let Some(chat) = chat {
        chat.end(live, question, model, &answered);
    }
    let (known, is_whole) = match &answered {
        Ok(Ok(reply)) => (reply.usage, true),
        Ok(Err(error)) if !error.may_have_cost => {
            return Err(TurnError::Provider(error.clone()));
        }
        // A reply that came whole and was rejected counts as one that was taken.
        Ok(Err(error)) if error.is_counted => (reported, true),
        // The request was under way: what the service had reported counts, and nobody will tell the rest.
        Ok(Err(_)) | Err(_) => (reported, false),
    };
    let price = price(facts, &params, billed);
    let spent = Usage {
        tokens: known.unwrap_or_default(),
        model_calls: u64::from(is_whole),
        tool_calls: 0,
        cost: price.zip(known).map(|(price, tokens)| price.of(&tokens)),
        unreported: u64::from(!is_whole || known.is_none()),
    };
    live.spend(&spent);
    if is_whole || known.is_some() {
        engine.metrics.spent(&asked, &spent.tokens, spent.cost);
    }
    reservation.settle(Amount {
        tokens: spent.tokens.total(),
        cost: spent.cost.unwrap_or_default(),
    });
    answered?.map_err(TurnError::Provider)
}

/// Asks for a reply at once.
async fn at_once(
    engine: &Engine,
    live: &LiveRun,
    is_turn: bool,
    served: &Served,
    request: ChatRequest<'_>,
    take_in: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Result<Reply, ProviderError>, TurnError> {
    if live.left_batch.get() != LeftBatch::Nothing {
        if is_turn {
            // The configuration has changed, so that no batch is gone on with.
            batch::give_up(engine, live).await;
        }
        waiting::resume(engine, live).await?;
    }
    // A permit covers one provider request, not a run: waiting parents would otherwise starve their children.
    let _permit = match &served.permits {
        Some(permits) => bounded(live, permits.acquire()).await?.ok(),
        None => None,
    };
    bounded(live, served.complete(request, take_in)).await
}

/// A refusal of a request with pictures or files of which it is not known whether the model takes them: with a word on it.
fn explained(
    error: ProviderError,
    model: &ModelRef,
    question: &Question<'_>,
    facts: Option<&ModelFacts>,
) -> ProviderError {
    if error.category != Category::BadRequest {
        return error;
    }
    match parts::in_doubt(&model.provider, &model.model, question.messages, facts) {
        Some(advice) => error.with(&advice),
        None => error,
    }
}

/// Takes back what listeners have been sent of a reply that is requested anew.
fn withdraw(
    engine: &Engine,
    live: &LiveRun,
    turn: u32,
    streamed: &mut Streamed,
    error: &ProviderError,
) {
    if streamed.has_reasoning || !streamed.text.is_empty() {
        *streamed = Streamed::default();
        let reason = error.to_string();
        let event = EventKind::TextWithdrawn { turn, reason };
        engine.journal.whisper(live, event);
    }
}

/// Records what a request had to leave out, once for each text of a run.
async fn warn(
    engine: &Engine,
    live: &LiveRun,
    turn: u32,
    warnings: Vec<String>,
) -> Result<(), StoreError> {
    let new = warnings.into_iter().filter(|it| live.warn_once(it));
    let events: Vec<_> = new
        .map(|message| EventKind::ModelWarning { turn, message })
        .collect();
    match events.is_empty() {
        true => Ok(()),
        false => {
            let journal = &engine.journal;
            journal
                .note(live, Change::Nothing, Vec::new(), events)
                .await
        }
    }
}

/// What a request with these parameters costs on this tier.
fn price(facts: Option<&ModelFacts>, params: &Params, service: Service) -> Option<Price> {
    let price = facts?.price_on(service)?;
    match params.cache {
        Cache::OneHour => Some(price.with_hour_cache()),
        Cache::FiveMinutes | Cache::Off => Some(price),
    }
}

/// Waits for something within the run's deadline and as long as nobody stops it.
pub async fn bounded<T>(live: &LiveRun, work: impl Future<Output = T>) -> Result<T, TurnError> {
    let overdue = async {
        match live.deadline() {
            Some(deadline) => tokio::time::sleep_until(deadline.at).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = live.stop.cancelled() => Err(TurnError::Stopped),
        done = work => Ok(done),
        () = overdue => Err(TurnError::Overdue),
    }
}

/// What a request may use: its estimated input, and the most it may answer.
fn estimate(question: &Question<'_>, params: &Params, price: Option<&Price>) -> Amount {
    const DEFAULT_MAX_TOKENS: u32 = 4096;
    let preamble = request_size::preamble(question.system, question.tools);
    let messages = request_size::messages(question.messages);
    let max_tokens = params.max_tokens;
    let tokens = crate::domain::usage::TokenUsage {
        input: request_size::tokens(preamble + messages),
        output: u64::from(max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
        ..Default::default()
    };
    Amount {
        tokens: tokens.total(),
        cost: price.map_or(Cost(0), |price| price.of(&tokens)),
    }
}

/// A number in 0..1, good enough to spread retries: the hasher's keys are random.
pub fn random() -> f64 {
    let bits = RandomState::new().hash_one(Instant::now()) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}
