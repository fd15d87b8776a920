//! Runs one turn through a provider's batch API: submits the request, pauses the run's clock while it waits, and
//! returns the reply. The batch is recorded before the run waits for it, so that the next process finds it.

use std::time::Duration;

use futures_util::future::join_all;
use jiff::SignedDuration;
use secrecy::SecretString;

use crate::domain::event::EventKind;
use crate::domain::run::now;
use crate::domain::service::Service;
use crate::domain::usage::Usage;
use crate::domain::waiting_for::WaitingFor;
use crate::engine::approval::pause;
use crate::engine::cluster::connection;
use crate::engine::context::RunContext;
use crate::engine::run_loop::exchange;
use crate::engine::state::pause::PauseReason;
use crate::engine::state::pending_batch::{PendingBatch, SubmittedBatch};
use crate::engine::state::turn_error::TurnError;
use crate::providers::registry::ProviderHandle;
use crate::providers::{
    BatchClient, BatchItem, BatchProvider, BatchStatus, ChatRequest, Delta, ErrorCategory,
    ProviderError, Reply,
};
use crate::store::{Change, Progress};

/// A batch that takes longer than this has expired; services promise a reply within a day.
const MAX_BATCH_AGE: SignedDuration = SignedDuration::from_hours(24);
/// The wait before the first poll; each later wait is twice as long, up to the provider's maximum.
const FIRST_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The timeout of one poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(60);
/// Polls in a row whose results cannot be read, until the request has failed.
const MAX_UNREADABLE_POLLS: u32 = 3;
/// How long a cancelled run waits for the service at each step: until its batch is made, found, and cancelled.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

pub struct BatchRequest<'a> {
    pub turn: u32,
    /// `provider/model`.
    pub model: &'a str,
    pub provider: &'a ProviderHandle,
    pub request: ChatRequest<'a>,
    /// See [`TurnRequest::progress`](crate::engine::run_loop::turn_request::TurnRequest::progress).
    pub progress: &'a Progress,
}

/// Submits the request as a batch, or takes over the batch that an earlier process submitted, and waits for its reply.
pub async fn complete(
    context: &RunContext,
    batch_request: BatchRequest<'_>,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Reply, TurnError> {
    let key = batch_request.request.api_key;
    let Some(batched) = batch_request.provider.provider.batch_provider() else {
        let message = "the provider does not support batches";
        let error = ProviderError::new(ErrorCategory::BadRequest, message);
        return Err(TurnError::Provider(error));
    };
    let name = batch_name(context, batch_request.turn);
    let result = match start_batch(context, batched, &batch_request, &name, deltas).await {
        Ok(submitted) => {
            deltas(Delta::BatchRecorded);
            let status = wait_for_batch(context, batched, &submitted, &name, key).await;
            report_request(context, batched, &batch_request.request, deltas).await?;
            read_reply(context, batched, batch_request.request, status, deltas).await
        }
        Err(error) => Err(error),
    };
    result.map_err(|error| match error {
        TurnError::Provider(error) => TurnError::Provider(redact(context, error, key)),
        other => other,
    })
}

/// Pauses the run for the batch of this request, which is submitted unless an earlier process did so.
async fn start_batch(
    context: &RunContext,
    batched: &dyn BatchProvider,
    batch_request: &BatchRequest<'_>,
    name: &str,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<SubmittedBatch, TurnError> {
    let turn = batch_request.turn;
    let pending = context.run.pending_batch.get();
    if let PendingBatch::Submitted(submitted) = &pending
        && submitted.turn == turn
        && submitted.model == batch_request.model
    {
        pause::pause(context, PauseReason::Turn(WaitingFor::Batch), None).await?;
        return Ok((**submitted).clone());
    }
    let found = if pending == (PendingBatch::Unknown { turn }) {
        let key = batch_request.request.api_key;
        let found = batched.batch_client().find(name, key);
        let found = pause::within_deadline(&context.run, found).await?;
        let found = found.map_err(TurnError::Provider)?;
        if found.is_none() {
            // The service may have made a batch that it does not find by the name.
            context.run.pending_batch.set(PendingBatch::Absent);
            count_lost_request(context);
        }
        found
    } else {
        None
    };
    let submitted = match found {
        Some(batch_id) => submitted_batch(batch_request, batch_id),
        None => submit(context, batched, batch_request, name, deltas).await?,
    };
    // Recorded before the pause: a client that sees the run wait may count on the batch's id being known. With what earlier
    // batches of the turn have used: from now on nobody reads them again.
    let entries = vec![submitted_event(&submitted).into()];
    let progress = context.run.changed_progress(batch_request.progress);
    let change = progress.map_or(Change::Unchanged, Change::Progress);
    let journal = &context.engine.journal;
    journal.append(&context.run, change, entries).await?;
    pause::pause(context, PauseReason::Turn(WaitingFor::Batch), None).await?;
    Ok(submitted)
}

/// Waits until the batch is done, and ends the pause. Cancels the batch if the run stops waiting for it.
async fn wait_for_batch(
    context: &RunContext,
    batched: &dyn BatchProvider,
    submitted: &SubmittedBatch,
    name: &str,
    key: Option<&SecretString>,
) -> Result<BatchStatus, TurnError> {
    let client = batched.batch_client();
    context.run.pending_batch.set(PendingBatch::Absent);
    let result = poll_until_done(context, client, submitted, name, key).await;
    let is_abandoned = !matches!(&result, Ok(_) | Err(TurnError::Provider(_)));
    if is_abandoned && !context.run.is_suspended() {
        cancel_batch(context, client, &submitted.batch_id, key).await;
    }
    pause::unpause(context, PauseReason::Turn(WaitingFor::Batch)).await?;
    result
}

/// The reply of a batch that is done, or why there is none.
async fn read_reply(
    context: &RunContext,
    batched: &dyn BatchProvider,
    request: ChatRequest<'_>,
    status: Result<BatchStatus, TurnError>,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Reply, TurnError> {
    match status {
        Ok(BatchStatus::Completed { status, body }) => {
            let reply = batched.read_batch_reply(request, status, body, deltas);
            pause::within_deadline(&context.run, reply)
                .await?
                .map_err(TurnError::Provider)
        }
        Ok(BatchStatus::Failed(error) | BatchStatus::Unreadable(error)) => {
            Err(TurnError::Provider(error))
        }
        Ok(BatchStatus::Expired | BatchStatus::InProgress) => Err(TurnError::BatchExpired),
        Err(TurnError::Provider(mut error)) => {
            // The service may have replied and charge for it, and there is no way to find out.
            error.may_be_billed = true;
            Err(TurnError::Provider(error))
        }
        Err(error) => Err(error),
    }
}

/// Cancels the batch that no turn waits for any more: that of an earlier process, or one that may have been made while the run
/// was cancelled. Its cost stays unknown and counts as unreported usage.
pub async fn abandon(context: &RunContext) {
    let pending = context.run.pending_batch.get();
    context.run.pending_batch.set(PendingBatch::Absent);
    match pending {
        PendingBatch::Absent => {}
        PendingBatch::Unknown { turn } => Box::pin(cancel_unrecorded(context, turn)).await,
        PendingBatch::Submitted(submitted) => {
            count_lost_request(context);
            let provider_name = submitted.model.split('/').next().unwrap_or_default();
            if let Some((client, key)) = batch_client(context, provider_name) {
                Box::pin(cancel_batch(context, client, &submitted.batch_id, key)).await;
            }
        }
    }
}

/// Nobody will know what the request used.
fn count_lost_request(context: &RunContext) {
    context.run.add_usage(&Usage {
        unreported: 1,
        ..Usage::default()
    });
}

/// Cancels the batch of a turn that may have been submitted without being recorded, if the service finds it by its name.
async fn cancel_unrecorded(context: &RunContext, turn: u32) {
    let agent = &context.run.agent;
    if agent.params.service != Some(Service::Batch) {
        return;
    }
    count_lost_request(context);
    let name = batch_name(context, turn);
    let models = std::iter::once(&agent.model).chain(&agent.fallback_models);
    let mut providers: Vec<&str> = models.map(|model| model.provider.as_str()).collect();
    providers.dedup();
    let found = providers.into_iter().map(|provider_name| async {
        let (client, key) = batch_client(context, provider_name)?;
        match tokio::time::timeout(CANCEL_TIMEOUT, client.find(&name, key)).await {
            Ok(Ok(batch_id)) => Some((client, key, batch_id?)),
            Ok(Err(error)) => {
                let error = redact(context, error, key);
                tracing::warn!(run.id = %context.run.scope.run, "Batch {name} could not be looked for: {error}");
                None
            }
            Err(_) => None,
        }
    });
    for (client, key, batch_id) in join_all(found).await.into_iter().flatten() {
        cancel_batch(context, client, &batch_id, key).await;
    }
}

/// The batch API of a provider, with the key for it.
fn batch_client<'a>(
    context: &'a RunContext,
    provider_name: &str,
) -> Option<(&'a dyn BatchClient, Option<&'a SecretString>)> {
    let keys = &context.run.tree.provider_keys;
    let key = keys.get(&context.run.agent, provider_name).ok()?;
    let providers = &context.engine.providers;
    let provider = providers.get_with_key(provider_name, key.is_some()).ok()?;
    Some((provider.provider.batch_provider()?.batch_client(), key))
}

/// What the service knows the request of a turn by.
fn batch_name(context: &RunContext, turn: u32) -> String {
    format!("{}-{turn}", context.run.scope.run)
}

async fn submit(
    context: &RunContext,
    batched: &dyn BatchProvider,
    batch_request: &BatchRequest<'_>,
    name: &str,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<SubmittedBatch, TurnError> {
    // A permit is needed to create the batch, not to wait for it.
    let _permit = match &batch_request.provider.permits {
        Some(permits) => {
            let acquired = permits.acquire(context.run.tree.owner.as_deref());
            Some(pause::within_deadline(&context.run, acquired).await?)
        }
        None => None,
    };
    let item = batch_item(context, batched, &batch_request.request).await?;
    let connected = connection::wait_until_connected(context);
    pause::within_deadline(&context.run, connected).await??;
    let key = batch_request.request.api_key;
    deltas(Delta::Submitting);
    let mut created = batched.batch_client().create(name, &item, key);
    match pause::within_deadline(&context.run, &mut created).await {
        Ok(created) => {
            let batch_id = created.map_err(TurnError::Provider)?;
            Ok(submitted_batch(batch_request, batch_id))
        }
        Err(error) if context.run.is_suspended() => Err(error),
        Err(error) => {
            // The service makes the batch whether or not the run waits for it.
            let pending = match tokio::time::timeout(CANCEL_TIMEOUT, created).await {
                Ok(Ok(batch_id)) => {
                    cancel_batch(context, batched.batch_client(), &batch_id, key).await;
                    PendingBatch::Absent
                }
                Ok(Err(_)) => PendingBatch::Absent,
                // `abandon` looks for it.
                Err(_) => PendingBatch::Unknown {
                    turn: batch_request.turn,
                },
            };
            context.run.pending_batch.set(pending);
            Err(error)
        }
    }
}

fn submitted_batch(batch_request: &BatchRequest<'_>, batch_id: String) -> SubmittedBatch {
    SubmittedBatch {
        turn: batch_request.turn,
        model: batch_request.model.to_owned(),
        batch_id,
        submitted_at: now(),
    }
}

/// The bytes of images and files are dropped before the wait for the batch.
async fn batch_item(
    context: &RunContext,
    batched: &dyn BatchProvider,
    request: &ChatRequest<'_>,
) -> Result<BatchItem, TurnError> {
    let blobs = Box::pin(exchange::load_blobs(&context.engine, request.messages)).await?;
    let request = ChatRequest {
        blobs: blobs.as_ref(),
        ..*request
    };
    batched.batch_item(&request).map_err(TurnError::Provider)
}

/// Reports the request for the record of the turn. It is made again, so that it is not in memory while the run waits.
async fn report_request(
    context: &RunContext,
    batched: &dyn BatchProvider,
    request: &ChatRequest<'_>,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<(), TurnError> {
    if !context.engine.settings.requests.is_off && !context.run.is_suspended() {
        let item = batch_item(context, batched, request).await?;
        deltas(Delta::Sending(&item.request));
    }
    Ok(())
}

/// Polls the batch until it is done or has expired. Results that cannot be read are downloaded again, since they are paid for.
async fn poll_until_done(
    context: &RunContext,
    batches: &dyn BatchClient,
    submitted: &SubmittedBatch,
    name: &str,
    key: Option<&SecretString>,
) -> Result<BatchStatus, TurnError> {
    let run = &context.run;
    let mut wait = FIRST_POLL_INTERVAL.min(batches.max_poll_interval());
    let mut unreadable_polls = 0;
    loop {
        pause::within_deadline(run, tokio::time::sleep(wait)).await?;
        wait = (wait * 2).min(batches.max_poll_interval());
        let poll = batches.poll(&submitted.batch_id, name, key);
        let polled = tokio::time::timeout(POLL_TIMEOUT, poll);
        let status = pause::within_deadline(run, polled).await?;
        unreadable_polls = match &status {
            Ok(Ok(BatchStatus::Unreadable(_))) => unreadable_polls + 1,
            _ => 0,
        };
        let error = match status {
            Ok(Ok(BatchStatus::InProgress)) | Err(_) => None,
            Ok(Ok(BatchStatus::Unreadable(error))) if unreadable_polls < MAX_UNREADABLE_POLLS => {
                Some(error)
            }
            Ok(Ok(status)) => return Ok(status),
            Ok(Err(error)) if error.category.is_retryable() => Some(error),
            Ok(Err(error)) => return Err(TurnError::Provider(error)),
        };
        if let Some(error) = error {
            let error = redact(context, error, key);
            tracing::warn!(
                run.id = %run.scope.run, run.root = %run.scope.root, agent = %run.agent.name,
                depth = run.scope.depth.0,
                "Batch {} could not be polled ({error}), retrying in {wait:?}", submitted.batch_id
            );
        }
        // One whose results could not be read is done.
        let is_old = now().duration_since(submitted.submitted_at) >= MAX_BATCH_AGE;
        if is_old && unreadable_polls == 0 {
            return Err(TurnError::BatchExpired);
        }
    }
}

/// Cancels a batch that no run waits for. The service may charge for what it has already processed.
async fn cancel_batch(
    context: &RunContext,
    batches: &dyn BatchClient,
    batch_id: &str,
    key: Option<&SecretString>,
) {
    let cancelled = tokio::time::timeout(CANCEL_TIMEOUT, batches.cancel(batch_id, key)).await;
    if let Ok(Err(error)) = cancelled {
        let error = redact(context, error, key);
        tracing::warn!("Batch {batch_id} could not be cancelled: {error}");
    }
}

fn submitted_event(submitted: &SubmittedBatch) -> EventKind {
    EventKind::BatchSubmitted {
        turn: submitted.turn,
        model: submitted.model.clone(),
        batch_id: submitted.batch_id.clone(),
    }
}

/// Removes the request's own key and what the operator's patterns match.
fn redact(context: &RunContext, error: ProviderError, key: Option<&SecretString>) -> ProviderError {
    let error = match key {
        Some(key) => error.redact(key),
        None => error,
    };
    error.redact_matches(&context.engine.settings.requests.redactor)
}
