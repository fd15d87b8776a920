//! Runs one turn through a provider's batch API: submits the request, pauses the run's clock while it waits, and
//! returns the reply. The batch is recorded before the run waits for it, so that the next process finds it.

use std::time::Duration;

use jiff::SignedDuration;
use secrecy::SecretString;

use crate::domain::event::EventKind;
use crate::domain::run::now;
use crate::domain::usage::Usage;
use crate::engine::approval::pause::{self, PauseReason};
use crate::engine::context::RunContext;
use crate::engine::record::blobs;
use crate::engine::run_loop::turn_error::TurnError;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::pending_batch::{PendingBatch, SubmittedBatch};
use crate::providers::registry::ProviderHandle;
use crate::providers::{
    BatchClient, BatchProvider, BatchStatus, ChatRequest, Delta, ErrorCategory, ProviderError,
    Reply,
};

/// A batch that takes longer than this has expired; services promise a reply within a day.
const MAX_BATCH_AGE: SignedDuration = SignedDuration::from_hours(24);
/// The wait before the first poll; each later wait is twice as long, up to the provider's maximum.
const FIRST_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The timeout of one poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a cancelled run waits for the service to confirm that its batch is cancelled.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

pub struct BatchRequest<'a> {
    pub turn: u32,
    /// `provider/model`.
    pub model: &'a str,
    pub provider: &'a ProviderHandle,
    pub request: ChatRequest<'a>,
}

/// Submits the request as a batch, or takes over the batch that an earlier process submitted, and waits for its reply.
pub async fn complete(
    context: &RunContext,
    batch_request: BatchRequest<'_>,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Result<Reply, ProviderError>, TurnError> {
    let BatchRequest {
        provider, request, ..
    } = batch_request;
    let key = request.api_key;
    let Some(batched) = provider.provider.batch_provider() else {
        let message = "the provider does not support batches";
        return Ok(Err(ProviderError::new(ErrorCategory::BadRequest, message)));
    };
    let name = format!("{}-{}", context.run.scope.run, batch_request.turn);
    let batches = batched.batch_client();
    let submitted = match context.run.pending_batch.get() {
        PendingBatch::Submitted(submitted)
            if submitted.turn == batch_request.turn && submitted.model == batch_request.model =>
        {
            pause::pause(context, PauseReason::Batch, None).await?;
            submitted
        }
        pending => {
            let may_exist = pending
                == PendingBatch::Unknown {
                    turn: batch_request.turn,
                };
            let found = match may_exist {
                true => pause::within_deadline(&context.run, batches.find(&name, key)).await?,
                false => Ok(None),
            };
            let batch = match found {
                Ok(Some(found)) => Ok(found),
                Ok(None) => submit(context, batched, &batch_request, &name).await?,
                Err(error) => Err(error),
            };
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => return Ok(Err(redact_key(error, key))),
            };
            let submitted = SubmittedBatch {
                turn: batch_request.turn,
                model: batch_request.model.to_owned(),
                batch_id: batch,
                submitted_at: now(),
            };
            pause::pause(
                context,
                PauseReason::Batch,
                Some(submitted_event(&submitted)),
            )
            .await?;
            submitted
        }
    };
    context.run.pending_batch.set(PendingBatch::Absent);
    let result = poll_until_done(&context.run, batches, &submitted, &name, key).await;
    if result.is_err() && !context.run.is_suspended() {
        cancel_batch(batches, &submitted, key).await;
    }
    pause::unpause(context, PauseReason::Batch).await?;
    match result? {
        Ok(BatchStatus::Completed { status, body }) => {
            let reply = pause::within_deadline(
                &context.run,
                batched.read_batch_reply(request, status, body, deltas),
            );
            Ok(reply.await?.map_err(|error| redact_key(error, key)))
        }
        Ok(BatchStatus::Failed(error)) => Ok(Err(redact_key(error, key))),
        Ok(BatchStatus::Expired | BatchStatus::InProgress) => Err(TurnError::BatchExpired),
        Err(mut error) => {
            // The service may have replied and charge for it, and there is no way to find out.
            error.may_be_billed = true;
            Ok(Err(redact_key(error, key)))
        }
    }
}

/// Cancels the batch of an earlier process if no turn waits for it any more. Its cost stays unknown and counts as
/// unreported usage.
pub async fn abandon(context: &RunContext) {
    let PendingBatch::Submitted(submitted) = context.run.pending_batch.get() else {
        return;
    };
    context.run.pending_batch.set(PendingBatch::Absent);
    context.run.add_usage(&Usage {
        unreported: 1,
        ..Usage::default()
    });
    let provider_name = submitted.model.split('/').next().unwrap_or_default();
    let keys = &context.run.tree.provider_keys;
    let Ok(key) = keys.get(&context.run.agent, provider_name) else {
        return;
    };
    let provider = context
        .engine
        .providers
        .get_with_key(provider_name, key.is_some());
    if let Some(batched) = provider
        .ok()
        .and_then(|provider| provider.provider.batch_provider())
    {
        cancel_batch(batched.batch_client(), &submitted, key).await;
    }
}

async fn submit(
    context: &RunContext,
    batched: &dyn BatchProvider,
    batch_request: &BatchRequest<'_>,
    name: &str,
) -> Result<Result<String, ProviderError>, TurnError> {
    // A permit is needed to create the batch, not to wait for it.
    let _permit = match &batch_request.provider.permits {
        Some(permits) => pause::within_deadline(&context.run, permits.acquire())
            .await?
            .ok(),
        None => None,
    };
    // The bytes of images and files are dropped before the wait for the batch.
    let blobs = Box::pin(blobs::load(&context.engine, batch_request.request.messages)).await?;
    let request = ChatRequest {
        blobs: blobs.as_ref(),
        ..batch_request.request
    };
    let item = match batched.batch_item(&request) {
        Ok(item) => item,
        Err(error) => return Ok(Err(error)),
    };
    drop(blobs);
    let created = batched
        .batch_client()
        .create(name, &item, batch_request.request.api_key);
    pause::within_deadline(&context.run, created).await
}

/// Polls the batch until it is done or has expired.
async fn poll_until_done(
    run: &ActiveRun,
    batches: &dyn BatchClient,
    submitted: &SubmittedBatch,
    name: &str,
    key: Option<&SecretString>,
) -> Result<Result<BatchStatus, ProviderError>, TurnError> {
    let mut pause = FIRST_POLL_INTERVAL.min(batches.max_poll_interval());
    loop {
        pause::within_deadline(run, tokio::time::sleep(pause)).await?;
        pause = (pause * 2).min(batches.max_poll_interval());
        let poll = batches.poll(&submitted.batch_id, name, key);
        match pause::within_deadline(run, tokio::time::timeout(POLL_TIMEOUT, poll)).await? {
            Ok(Ok(BatchStatus::InProgress)) | Err(_) => {}
            Ok(Ok(status)) => return Ok(Ok(status)),
            Ok(Err(error)) if error.category.is_retryable() => {
                let error = redact_key(error, key);
                tracing::warn!(
                    run.id = %run.scope.run, run.root = %run.scope.root, agent = %run.agent.name,
                    depth = run.scope.depth.0,
                    "Batch {} could not be polled ({error}), retrying in {pause:?}", submitted.batch_id
                );
            }
            Ok(Err(error)) => return Ok(Err(error)),
        }
        if now().duration_since(submitted.submitted_at) >= MAX_BATCH_AGE {
            return Err(TurnError::BatchExpired);
        }
    }
}

/// Cancels a batch that no run waits for. The service may charge for what it has already processed.
async fn cancel_batch(
    batches: &dyn BatchClient,
    submitted: &SubmittedBatch,
    key: Option<&SecretString>,
) {
    let cancelled =
        tokio::time::timeout(CANCEL_TIMEOUT, batches.cancel(&submitted.batch_id, key)).await;
    if let Ok(Err(error)) = cancelled {
        let error = redact_key(error, key);
        tracing::warn!(
            "Batch {} could not be cancelled: {error}",
            submitted.batch_id
        );
    }
}

fn submitted_event(submitted: &SubmittedBatch) -> EventKind {
    EventKind::BatchSubmitted {
        turn: submitted.turn,
        model: submitted.model.clone(),
        batch_id: submitted.batch_id.clone(),
    }
}

fn redact_key(error: ProviderError, key: Option<&SecretString>) -> ProviderError {
    match key {
        Some(key) => error.redact(key),
        None => error,
    }
}
