//! A turn that a provider's batch answers: the request is handed over, the run waits with its time standing still, and
//! goes on with the reply. The record knows the batch before anybody relies on it, so that the next process finds it.
//! Knows no wire.

use std::time::Duration;

use jiff::SignedDuration;
use secrecy::SecretString;

use crate::domain::event::EventKind;
use crate::domain::run::now;
use crate::domain::usage::Usage;
use crate::engine::blobs;
use crate::engine::left_batch::{LeftBatch, Submitted};
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::turn_error::TurnError;
use crate::engine::waiting::{self, Call};
use crate::providers::batches::{Batches, Look};
use crate::providers::registry::Served;
use crate::providers::{Batched, Category, ChatRequest, Delta, ProviderError, Reply};

/// The longest that a batch is waited for: services promise that.
const LONGEST: SignedDuration = SignedDuration::from_hours(24);
/// The pause before the first look; each later one is twice as long, up to the provider's longest.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// How long one look may take.
const LOOK: Duration = Duration::from_secs(60);
/// How long a cancelled run waits for the service to take its batch back.
const CANCEL: Duration = Duration::from_secs(5);

/// What is asked, of whom, and with whose key.
pub struct Ask<'a> {
    /// The turn.
    pub turn: u32,
    /// `provider/model`.
    pub model: &'a str,
    /// Who answers.
    pub served: &'a Served,
    /// The request.
    pub request: ChatRequest<'a>,
}

/// Has a batch answer the request.
pub async fn complete(
    engine: &Engine,
    live: &LiveRun,
    ask: Ask<'_>,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Result<Reply, ProviderError>, TurnError> {
    let Ask {
        served, request, ..
    } = ask;
    let key = request.key;
    let Some(batched) = served.provider.batched() else {
        let message = "the provider has no batches";
        return Ok(Err(ProviderError::new(Category::BadRequest, message)));
    };
    let name = format!("{}-{}", live.scope.run, ask.turn);
    let batches = batched.batches();
    let submitted = match live.left_batch.get() {
        LeftBatch::Known(known) if known.turn == ask.turn && known.model == ask.model => {
            waiting::rest(engine, live, Call::Batch, None).await?;
            known
        }
        left => {
            let may_be_there = left == LeftBatch::Unknown { turn: ask.turn };
            let found = match may_be_there {
                true => waiting::until(live, batches.find(&name, key)).await?,
                false => Ok(None),
            };
            let batch = match found {
                Ok(Some(found)) => Ok(found),
                Ok(None) => submit(engine, live, batched, &ask, &name).await?,
                Err(error) => Err(error),
            };
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => return Ok(Err(hidden(error, key))),
            };
            let submitted = Submitted {
                turn: ask.turn,
                model: ask.model.to_owned(),
                batch,
                since: now(),
            };
            waiting::rest(engine, live, Call::Batch, Some(told(&submitted))).await?;
            submitted
        }
    };
    live.left_batch.set(LeftBatch::Nothing);
    let waited = wait(live, batches, &submitted, &name, key).await;
    if waited.is_err() && !live.is_suspended() {
        take_back(batches, &submitted, key).await;
    }
    waiting::go(engine, live, Call::Batch).await?;
    match waited? {
        Ok(Look::Answered { status, body }) => {
            let reply = waiting::until(live, batched.hear_item(request, status, body, deltas));
            Ok(reply.await?.map_err(|error| hidden(error, key)))
        }
        Ok(Look::Failed(error)) => Ok(Err(hidden(error, key))),
        Ok(Look::Expired | Look::Working) => Err(TurnError::BatchExpired),
        Err(mut error) => {
            // The service may have answered, and nobody can look.
            error.may_have_cost = true;
            Ok(Err(hidden(error, key)))
        }
    }
}

/// Gives up a batch of an earlier process that no turn came to: what it cost nobody will tell.
pub async fn give_up(engine: &Engine, live: &LiveRun) {
    let LeftBatch::Known(left) = live.left_batch.get() else {
        return;
    };
    live.left_batch.set(LeftBatch::Nothing);
    live.spend(&Usage {
        unreported: 1,
        ..Usage::default()
    });
    let provider = left.model.split('/').next().unwrap_or_default();
    let keys = &live.tree.provider_keys;
    let Ok(key) = keys.get(&live.agent, provider) else {
        return;
    };
    let served = engine.providers.get_for(provider, key.is_some());
    if let Some(batched) = served.ok().and_then(|served| served.provider.batched()) {
        take_back(batched.batches(), &left, key).await;
    }
}

/// Hands the request over.
async fn submit(
    engine: &Engine,
    live: &LiveRun,
    batched: &dyn Batched,
    ask: &Ask<'_>,
    name: &str,
) -> Result<Result<String, ProviderError>, TurnError> {
    // Held while the batch is made, and not while it is waited for.
    let _permit = match &ask.served.permits {
        Some(permits) => waiting::until(live, permits.acquire()).await?.ok(),
        None => None,
    };
    // The bytes of pictures and files are not kept while the batch is waited for.
    let blobs = Box::pin(blobs::load(engine, ask.request.messages)).await?;
    let request = ChatRequest {
        blobs: blobs.as_ref(),
        ..ask.request
    };
    let item = match batched.item(&request) {
        Ok(item) => item,
        Err(error) => return Ok(Err(error)),
    };
    drop(blobs);
    let created = batched.batches().create(name, &item, ask.request.key);
    waiting::until(live, created).await
}

/// Looks at the batch until it is done, or has taken too long.
async fn wait(
    live: &LiveRun,
    batches: &Batches,
    submitted: &Submitted,
    name: &str,
    key: Option<&SecretString>,
) -> Result<Result<Look, ProviderError>, TurnError> {
    let mut pause = FIRST_PAUSE.min(batches.longest_pause);
    loop {
        waiting::until(live, tokio::time::sleep(pause)).await?;
        pause = (pause * 2).min(batches.longest_pause);
        let look = batches.look(&submitted.batch, name, key);
        match waiting::until(live, tokio::time::timeout(LOOK, look)).await? {
            Ok(Ok(Look::Working)) | Err(_) => {}
            Ok(Ok(look)) => return Ok(Ok(look)),
            Ok(Err(error)) if error.category.is_retryable() => {
                let error = hidden(error, key);
                tracing::warn!(
                    run.id = %live.scope.run, run.root = %live.scope.root, agent = %live.agent.name,
                    depth = live.scope.depth.0,
                    "Batch {} could not be looked at ({error}), trying again in {pause:?}", submitted.batch
                );
            }
            Ok(Err(error)) => return Ok(Err(error)),
        }
        if now().duration_since(submitted.since) >= LONGEST {
            return Err(TurnError::BatchExpired);
        }
    }
}

/// Has the service not begin with a batch that nobody waits for. What it has begun it may charge for.
async fn take_back(batches: &Batches, submitted: &Submitted, key: Option<&SecretString>) {
    let cancelled = tokio::time::timeout(CANCEL, batches.cancel(&submitted.batch, key)).await;
    if let Ok(Err(error)) = cancelled {
        let error = hidden(error, key);
        tracing::warn!("Batch {} could not be cancelled: {error}", submitted.batch);
    }
}

fn told(submitted: &Submitted) -> EventKind {
    EventKind::BatchSubmitted {
        turn: submitted.turn,
        model: submitted.model.clone(),
        batch_id: submitted.batch.clone(),
    }
}

fn hidden(error: ProviderError, key: Option<&SecretString>) -> ProviderError {
    match key {
        Some(key) => error.without(key),
        None => error,
    }
}
