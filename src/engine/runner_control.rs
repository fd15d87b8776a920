//! What clients change about an accepted run: cancel, decide, add a message, pause, delete a session. Part of the runner's
//! public face.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::message::shorten;
use crate::domain::run::{Run, RunId, now};
use crate::domain::world_event::{WorldEvent, wake_key};
use crate::engine::admission::delete_session::{self, DeleteSessionError};
use crate::engine::approval::decision::{self, DecideError};
use crate::engine::approval::reconcile;
use crate::engine::blocking::run_blocking;
use crate::engine::cluster::follow;
use crate::engine::context::Engine;
use crate::engine::control::add_message::{self, AddMessageError, MessageRequest};
use crate::engine::control::cancel_anywhere;
use crate::engine::control::client_results::{self, ClientResultsError};
use crate::engine::control::hold::{self, HoldError};
use crate::engine::control::perform_change;
use crate::engine::control::run_change::RunChange;
use crate::engine::control::send_change;
use crate::engine::delete_at_end::RunUse;
use crate::engine::history::run_log;
use crate::engine::record::agent_snapshots;
use crate::engine::record::scores::{self, ScoreRequest};
use crate::engine::runner::Runner;
use crate::engine::state::broadcaster::Subscription;
use crate::engine::state::client_calls::ClientResults;
use crate::engine::state::input_answer::InputAnswer;
use crate::engine::state::live_text::PartialReply;
use crate::engine::state::sessions::SessionKey;
use crate::engine::variants;
use crate::engine::workdir;
use crate::ssrf::SsrfGuard;
use crate::standing_task;
use crate::store::StoreError;
use crate::store::scores::ScoreChange;
use crate::store::world_events::{NewWorldEvent, Published};
use crate::workdirs::handle::WorkdirHandle;

/// The time between two looks at what is recorded of rollouts.
const ROLLOUT_INTERVAL: Duration = Duration::from_secs(2);
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
        Ok(self.run(id).await?.map(Arc::new))
    }

    /// Like [`Runner::cancel`], for a caller that cannot wait. A cancellation that fails is logged.
    pub fn cancel_later(&self, id: RunId, reason: &str) {
        drop(self.spawn_cancel(id, Some(reason.to_owned())));
    }

    /// Performs this to its end, also if nobody waits for it any longer.
    pub fn perform<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.engine.tasks.spawn(task)
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
                cancelled = cancel_anywhere::cancel(&engine, id, &reason) => {
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
        decision: InputAnswer,
    ) -> Result<Run, DecideError> {
        let engine = &self.engine;
        let change = || RunChange::Decide {
            call: call.to_owned(),
            arguments: decision.arguments.clone(),
            decision: decision.clone(),
        };
        match send_change::send(engine, id, change).await {
            Some(decided) => decided,
            None => decision::decide(engine, id, call, decision).await,
        }?;
        let run = self.run(id).await?;
        run.ok_or(DecideError::RunNotFound(id))
    }

    /// Records what a person says of a call whose end is not known. Returns the run's record once that is committed.
    pub async fn reconcile(
        &self,
        id: RunId,
        call: &str,
        answer: InputAnswer,
    ) -> Result<Run, DecideError> {
        let recorded_calls = run_log::load_calls(&self.engine, id).await?;
        let starts = recorded_calls.starts.get(call);
        let starts = starts.ok_or_else(|| DecideError::CallNotFound {
            run: id,
            call: shorten(call, 80),
        })?;
        let question = reconcile::question_id(call, *starts);
        self.decide(id, &question, answer).await
    }

    /// Whether the final text of a run that is at work has to be JSON.
    pub async fn has_json_format(&self, id: RunId) -> bool {
        let agent = match self.engine.active_runs.get(id) {
            Some(active_run) => Some(Arc::clone(&active_run.agent)),
            // Another node may drive it, or it sleeps.
            None => {
                let definition = self.store().definition(id).await.ok().flatten();
                definition.and_then(|json| agent_snapshots::parse(&json))
            }
        };
        agent.is_some_and(|agent| !matches!(agent.params.response_format, ResponseFormat::Text))
    }

    /// Like [`Runner::subscribe`], with the text of the root's reply that was published before the subscription.
    pub async fn subscribe_with_text(
        &self,
        root: RunId,
    ) -> Option<(Subscription, Option<PartialReply>)> {
        let engine = &self.engine;
        if engine.followed.get(root).is_none()
            && let Some(subscribed) = follow::subscribe_here_with_text(engine, root)
        {
            return Some(subscribed);
        }
        follow::subscribe_with_text(engine, root).await
    }

    /// The text of the reply that a run's model is writing, if this process drives the run, or if a client follows it here.
    pub fn partial_reply(&self, id: RunId) -> Option<PartialReply> {
        let engine = &self.engine;
        match engine.active_runs.get(id) {
            Some(active_run) => active_run.live_text.read(|| ()).1,
            None => engine.followed.get(id)?.text.read(|| ()).1,
        }
    }

    /// The text of a file that a run could replace; `None` without one, or if it is long or no text.
    pub async fn workdir_text(&self, id: RunId, path: String) -> Option<String> {
        const MAX_BYTES: u64 = 256 << 10;
        let dir = match self.engine.active_runs.get(id) {
            Some(active_run) => Arc::clone(active_run.workdir.dir()?),
            None => workdir::open_recorded(&self.engine, id).await?,
        };
        run_blocking(move || {
            let file = WorkdirHandle::new(dir)
                .open_regular(Path::new(&path))
                .ok()??;
            let mut text = String::new();
            let read = file.take(MAX_BYTES + 1).read_to_string(&mut text).ok()?;
            (read as u64 <= MAX_BYTES).then_some(text)
        })
        .await
    }

    /// The addresses that receivers may have whose URLs clients choose.
    pub fn webhook_guard(&self) -> &SsrfGuard {
        &self.engine.settings.webhook_guard
    }

    /// Notes that a client needs the record of a run, until the value is dropped. After the end of the run and of all such uses,
    /// the run is deleted unless the last of them has `is_kept`. `None` if it is kept anyway.
    pub fn use_run(&self, id: RunId, is_kept: bool) -> Option<RunUse> {
        RunUse::begin(&self.engine, id, is_kept)
    }

    /// Gives a run the results of the calls of a turn that its client executes. Returns once they are committed.
    pub async fn add_client_results(
        &self,
        id: RunId,
        given: &ClientResults,
    ) -> Result<(), ClientResultsError> {
        let engine = &self.engine;
        let change = || RunChange::AddClientResults(given.clone());
        match send_change::send(engine, id, change).await {
            Some(delivered) => delivered,
            None => client_results::deliver(engine, id, given).await,
        }
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
                added = add_message(&engine, id, &request) => drop(sender.send(added)),
                () = engine.shutdown.cancelled() => {}
            }
        });
        receiver.await.unwrap_or(Err(StoreError::Closed.into()))
    }

    /// Scores a run whose tree has ended.
    pub async fn add_score(
        &self,
        run: &Run,
        request: ScoreRequest,
    ) -> Result<ScoreChange, StoreError> {
        scores::add(self.store().as_ref(), run, request).await
    }

    /// Pauses a run with all below it, or resumes it. Returns its record and whether that changed anything.
    /// Records an event of the world outside, and lets the runs of the owner go on that wait for it.
    pub async fn publish_event(&self, event: WorldEvent) -> Result<Published, StoreError> {
        let WorldEvent {
            owner,
            name,
            key,
            client_id,
            data,
        } = event;
        let kept = self.engine.settings.world_events;
        let event = NewWorldEvent {
            id: RunId::new().0,
            owner: owner.unwrap_or_default(),
            wake: wake_key(&name, &key),
            client_id,
            data,
            at: now(),
            lookback: kept.lookback,
            max_kept: kept.max_events,
        };
        let published = self.engine.journal.store().publish_event(event).await;
        self.engine.waits_ended.notify_one();
        published
    }

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
                changed = set_held(&engine, id, is_held, by) => drop(sender.send(changed)),
                () = engine.shutdown.cancelled() => {}
            }
        });
        let is_changed = receiver.await.unwrap_or(Err(StoreError::Closed.into()))?;
        let run = self.run(id).await?;
        let run = run.ok_or(HoldError::RunNotFound(id))?;
        Ok((Arc::new(run), is_changed))
    }

    /// Performs what other nodes request of runs that this node drives, until `stop` is cancelled.
    pub async fn serve_nodes(&self, stop: CancellationToken) {
        let serve = |stop| perform_change::serve(Arc::clone(&self.engine), stop);
        standing_task::run("Performing requests of other nodes", &stop, serve).await;
    }

    /// Reads what the record says of rollouts, if an agent has one.
    pub async fn read_rollouts(&self) -> Result<(), StoreError> {
        match variants::rolled_out(&self.catalog().current()).next() {
            Some(_) => variants::refresh(&self.engine).await,
            None => Ok(()),
        }
    }

    /// Keeps what this process knows of rollouts up to date, while agents have any.
    pub async fn follow_rollouts(&self, stop: CancellationToken) {
        let mut reloads = self.catalog().subscribe();
        loop {
            let has_rollouts = variants::rolled_out(&self.catalog().current())
                .next()
                .is_some();
            if let Err(error) = self.read_rollouts().await
                && !matches!(error, StoreError::Closed)
            {
                warn!(error = %error, "What is recorded of rollouts could not be read, trying again: {error}");
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(ROLLOUT_INTERVAL), if has_rollouts => {}
                Ok(()) = reloads.changed() => reloads.mark_unchanged(),
            }
        }
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

async fn add_message(
    engine: &Arc<Engine>,
    id: RunId,
    request: &MessageRequest,
) -> Result<u32, AddMessageError> {
    match send_change::send(engine, id, || RunChange::AddMessage(request.clone())).await {
        Some(added) => added,
        None => add_message::add_message(engine, id, request).await,
    }
}

async fn set_held(
    engine: &Arc<Engine>,
    id: RunId,
    is_held: bool,
    by: Option<String>,
) -> Result<bool, HoldError> {
    let change = || RunChange::SetHeld {
        is_held,
        by: by.clone(),
    };
    match send_change::send(engine, id, change).await {
        Some(changed) => changed,
        None => hold::set_held(engine, id, is_held, by).await,
    }
}
