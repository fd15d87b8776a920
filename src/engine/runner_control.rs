//! What clients change about an accepted run: cancel, decide, add a message, pause, delete a session. Part of the runner's
//! public face.

use std::sync::Arc;

use tokio::sync::oneshot;
use tracing::warn;

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::run::{Run, RunId};
use crate::engine::add_message::{self, AddMessageError, MessageRequest};
use crate::engine::admission::delete_session::{self, DeleteSessionError};
use crate::engine::admission::sessions::SessionKey;
use crate::engine::approval::decision::{self, DecideError};
use crate::engine::cancel;
use crate::engine::client_results::{self, ClientResultsError};
use crate::engine::hold::{self, HoldError};
use crate::engine::record::journal::Subscription;
use crate::engine::runner::Runner;
use crate::engine::state::approval_decision::ApprovalDecision;
use crate::engine::state::client_calls::ClientResult;
use crate::engine::state::live_text::PartialReply;
use crate::ssrf::SsrfGuard;
use crate::store::StoreError;

/// The reason of a cancellation that names none.
const DEFAULT_REASON: &str = "requested by client";

impl Runner {
    /// Requests that a run and its descendants stop. Returns the record, which is `cancelling` or terminal; `None` if
    /// there is no such run. [`Runner::wait`] waits for the end.
    pub async fn cancel(
        &self,
        id: RunId,
        reason: Option<String>,
    ) -> Result<Option<Arc<Run>>, StoreError> {
        let receiver = self.spawn_cancel(id, reason);
        receiver.await.unwrap_or(Err(StoreError::Closed))?;
        Ok(self.store().run(id).await?.map(Arc::new))
    }

    /// Like [`Runner::cancel`], for a caller that cannot wait. A cancellation that fails is logged.
    pub fn cancel_later(&self, id: RunId, reason: &str) {
        drop(self.spawn_cancel(id, Some(reason.to_owned())));
    }

    fn spawn_cancel(
        &self,
        id: RunId,
        reason: Option<String>,
    ) -> oneshot::Receiver<Result<(), StoreError>> {
        let reason = reason.unwrap_or_else(|| DEFAULT_REASON.to_owned());
        let (sender, receiver) = oneshot::channel();
        let engine = Arc::clone(&self.engine);
        // In a task of its own: a client that disconnects must not interrupt a cancel.
        self.engine.tasks.spawn(async move {
            tokio::select! {
                cancelled = cancel::cancel(&engine, id, &reason) => {
                    if let Err(Err(error)) = sender.send(cancelled) {
                        warn!(run.id = %id, "Cannot cancel {id}: {error}");
                    }
                }
                () = engine.shutdown.cancelled() => {}
            }
        });
        receiver
    }

    /// Decides on a tool call that waits for approval. Returns the run's record once the decision is committed.
    pub async fn decide(
        &self,
        id: RunId,
        call: &str,
        decision: ApprovalDecision,
    ) -> Result<Run, DecideError> {
        decision::decide(&self.engine, id, call, decision).await?;
        let run = self.store().run(id).await?;
        run.ok_or(DecideError::RunNotFound(id))
    }

    /// Whether the final text of a run that this process drives has to be JSON.
    pub fn has_json_format(&self, id: RunId) -> bool {
        let active_run = self.engine.active_runs.get(id);
        active_run
            .is_some_and(|run| !matches!(run.agent.params.response_format, ResponseFormat::Text))
    }

    /// Like [`Runner::subscribe`], with the text of the root's reply that was published before the subscription.
    pub fn subscribe_with_text(&self, root: RunId) -> Option<(Subscription, Option<PartialReply>)> {
        let active_run = self.engine.active_runs.get(root)?;
        let (subscription, reply) = active_run.live_text.read(|| self.subscribe(root));
        Some((subscription?, reply))
    }

    /// The text of the reply that a run's model is writing, if this process drives the run.
    pub fn partial_reply(&self, id: RunId) -> Option<PartialReply> {
        let active_run = self.engine.active_runs.get(id)?;
        active_run.live_text.read(|| ()).1
    }

    /// The addresses that receivers may have whose URLs clients choose.
    pub fn webhook_guard(&self) -> &SsrfGuard {
        &self.engine.settings.webhook_guard
    }

    /// Gives a run the results of the calls of a turn that its client executes. Returns once they are committed.
    pub async fn add_client_results(
        &self,
        id: RunId,
        turn: u32,
        results: &[ClientResult],
    ) -> Result<(), ClientResultsError> {
        client_results::deliver(&self.engine, id, turn, results).await
    }

    /// Adds a message to an unfinished run, and returns its number once it is committed.
    pub async fn add_message(
        &self,
        id: RunId,
        request: MessageRequest,
    ) -> Result<u32, AddMessageError> {
        let (sender, receiver) = oneshot::channel();
        let engine = Arc::clone(&self.engine);
        // In a task of its own: a client that disconnects must not interrupt the write.
        self.engine.tasks.spawn(async move {
            tokio::select! {
                added = add_message::add_message(&engine, id, &request) => drop(sender.send(added)),
                () = engine.shutdown.cancelled() => {}
            }
        });
        receiver.await.unwrap_or(Err(StoreError::Closed.into()))
    }

    /// Pauses a run with all below it, or resumes it. Returns its record and whether that changed anything.
    pub async fn set_held(
        &self,
        id: RunId,
        is_held: bool,
        by: Option<String>,
    ) -> Result<(Arc<Run>, bool), HoldError> {
        let (sender, receiver) = oneshot::channel();
        let engine = Arc::clone(&self.engine);
        // In a task of its own: a client that disconnects must not interrupt the change.
        self.engine.tasks.spawn(async move {
            tokio::select! {
                changed = hold::set_held(&engine, id, is_held, by) => drop(sender.send(changed)),
                () = engine.shutdown.cancelled() => {}
            }
        });
        let is_changed = receiver.await.unwrap_or(Err(StoreError::Closed.into()))?;
        let run = self.store().run(id).await?;
        let run = run.ok_or(HoldError::RunNotFound(id))?;
        Ok((Arc::new(run), is_changed))
    }

    /// Deletes a session in which no run is unfinished: its name and its conversation; its runs stay.
    pub async fn delete_session(&self, key: SessionKey) -> Result<(), DeleteSessionError> {
        let (sender, receiver) = oneshot::channel();
        let engine = Arc::clone(&self.engine);
        // In a task of its own: a client that disconnects must not interrupt a deletion.
        self.engine.tasks.spawn(async move {
            let _ = sender.send(delete_session::delete_session(&engine, key).await);
        });
        receiver
            .await
            .unwrap_or(Err(DeleteSessionError::Store(StoreError::Closed)))
    }
}
