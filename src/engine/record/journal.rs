//! The one hand that writes the record, and the bell that it rings afterwards. What listeners hear with a number is
//! in the store before they hear it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::broadcast;

use crate::domain::event::{Event, EventKind, StoredEvent};
use crate::domain::run::{Failure, Outcome, Run, RunId, now};
use crate::domain::webhook::Webhook;
use crate::engine::record::webhook_events;
use crate::engine::state::active_run::ActiveRun;
use crate::store::{Change, FinishedRun, Progress, RunStore, Step, StoreError, Write};

/// How many notices a listener may be behind before it has to read the store again.
const BROADCAST_CAPACITY: usize = 256;

/// What a listener to a tree hears.
#[derive(Clone, Debug)]
pub enum StreamEvent {
    /// A committed event.
    Stored(Arc<StoredEvent>),
    /// News without a number (`text.delta`, `reasoning.delta`, …): its run, its name and its JSON.
    Ephemeral {
        /// The run it is about.
        run_id: RunId,
        /// Its name.
        name: &'static str,
        /// The `data` object.
        data: Arc<str>,
    },
}

/// A listener's end: [`Notice`]s from the moment it was made. `Lagged` means: read the store and go on.
pub type Subscription = broadcast::Receiver<StreamEvent>;

/// Who listens to which tree. Lent to the store, which rings after each commit.
#[derive(Debug, Default)]
pub struct EventBroadcaster {
    channels: Mutex<HashMap<RunId, broadcast::Sender<StreamEvent>>>,
}

impl EventBroadcaster {
    /// Whether anyone listens to this root.
    pub fn has_subscribers(&self, root: RunId) -> bool {
        self.lock().contains_key(&root)
    }

    /// Tells committed events to whoever listens.
    pub fn publish(&self, root: RunId, events: Vec<StoredEvent>) {
        self.send(root, || {
            events
                .into_iter()
                .map(|event| StreamEvent::Stored(Arc::new(event)))
        });
    }

    /// Listens to a tree.
    pub fn subscribe(&self, root: RunId) -> Subscription {
        let mut channels = self.lock();
        channels
            .entry(root)
            .or_insert_with(|| broadcast::Sender::new(BROADCAST_CAPACITY))
            .subscribe()
    }

    /// The tree has ended: nothing more will be told.
    pub fn close(&self, root: RunId) {
        self.lock().remove(&root);
    }

    fn send<I: IntoIterator<Item = StreamEvent>>(&self, root: RunId, events: impl FnOnce() -> I) {
        let Some(sender) = self.lock().get(&root).cloned() else {
            return;
        };
        for event in events() {
            // Nobody there any more is no fault.
            let _ = sender.send(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, broadcast::Sender<StreamEvent>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes runs, steps and events; nobody else does.
pub struct Journal {
    store: Arc<dyn RunStore>,
    broadcaster: Arc<EventBroadcaster>,
}

impl Journal {
    /// Over a store that rings these bells.
    pub fn new(store: Arc<dyn RunStore>, broadcaster: Arc<EventBroadcaster>) -> Self {
        Self { store, broadcaster }
    }

    /// The record, for reading.
    pub fn store(&self) -> &Arc<dyn RunStore> {
        &self.store
    }

    /// Who listens.
    pub fn broadcaster(&self) -> &EventBroadcaster {
        &self.broadcaster
    }

    /// Commits a change with its steps and events, and returns the last event's number. The run's tree is suspended if
    /// that fails, and a suspended one writes nothing.
    pub async fn append(
        &self,
        run: &ActiveRun,
        change: Change,
        steps: Vec<Step>,
        kinds: Vec<EventKind>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        let result = self
            .store
            .write(build_write(run, change, steps, kinds))
            .await;
        suspend_on_error(run, result)
    }

    /// Commits what somebody requests of a run, who is told if that fails: the run goes on as if nobody had.
    pub async fn append_request(
        &self,
        run: &ActiveRun,
        change: Change,
        event: EventKind,
    ) -> Result<(), StoreError> {
        check_not_suspended(run)?;
        let write = build_write(run, change, Vec::new(), vec![event]);
        self.store.write(write).await.map(drop)
    }

    /// Hands a change over without waiting: for what the next recorded step makes good.
    pub async fn enqueue(
        &self,
        run: &ActiveRun,
        change: Change,
        steps: Vec<Step>,
        kinds: Vec<EventKind>,
    ) -> Result<(), StoreError> {
        check_not_suspended(run)?;
        let result = self
            .store
            .enqueue(build_write(run, change, steps, kinds))
            .await;
        suspend_on_error(run, result)
    }

    /// Commits a change as [`Journal::record`] does, with writes about other runs in the same transaction.
    pub async fn append_with(
        &self,
        run: &ActiveRun,
        change: Change,
        step: Step,
        kinds: Vec<EventKind>,
        others: Vec<Write>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        let write = build_write(run, change, vec![step], kinds);
        let result = self.store.write_with(write, others).await;
        suspend_on_error(run, result)
    }

    /// Writes something that happened to a run which nobody drives now.
    pub async fn append_inactive(
        &self,
        run: &Run,
        change: Change,
        kind: EventKind,
    ) -> Result<(), StoreError> {
        let write = Write {
            run: run.id,
            root: run.root_id,
            change,
            steps: Vec::new(),
            events: vec![new_event(run, kind)],
            deliveries: Vec::new(),
        };
        self.store.write(write).await.map(drop)
    }

    /// Writes the end of a run that no process drives any more, and tells it to its webhooks.
    pub async fn close_orphan(
        &self,
        run: &Run,
        webhooks: &[Arc<Webhook>],
        failure: Failure,
    ) -> Result<(), StoreError> {
        let kind = EventKind::RunFailed {
            error: failure.clone(),
        };
        let event = new_event(run, kind);
        let closing = FinishedRun {
            completion_status: None,
            outcome: Outcome::Failed {
                failure,
                partial: run.partial_content.clone(),
            },
            finished_at: event.time,
            progress: Progress {
                turns: run.turns,
                model: run.model.clone(),
                stop_reason: run.stop_reason.clone(),
                usage: run.usage,
            },
            tree_usage: run.tree,
        };
        let change = Change::Finish(Box::new(closing));
        let write = Write {
            run: run.id,
            root: run.root_id,
            change,
            steps: Vec::new(),
            deliveries: webhook_events::deliveries(
                webhooks,
                std::slice::from_ref(&event),
                (&run.usage, &run.tree),
            ),
            events: vec![event],
        };
        self.store.write(write).await.map(drop)
    }

    /// Tells listeners something that has no number and may be lost.
    pub fn publish_ephemeral(&self, run: &ActiveRun, kind: EventKind) {
        let root = run.scope.root;
        if !self.broadcaster.has_subscribers(root) {
            return;
        }
        let name = kind.name();
        let data = serde_json::to_string(&run.event(kind)).unwrap_or_default();
        let event = StreamEvent::Ephemeral {
            run_id: run.scope.run,
            name,
            data: data.into(),
        };
        self.broadcaster.send(root, || [event]);
    }
}

/// Whether anything may be written about the run's tree.
fn check_not_suspended(run: &ActiveRun) -> Result<(), StoreError> {
    match run.is_suspended() {
        true => Err(StoreError::Suspended),
        false => Ok(()),
    }
}

/// Suspends the run's tree if its write failed.
fn suspend_on_error<T>(run: &ActiveRun, result: Result<T, StoreError>) -> Result<T, StoreError> {
    if let Err(error) = &result {
        run.suspend(error);
    }
    result
}

/// An event about a run that nobody drives, now.
fn new_event(run: &Run, kind: EventKind) -> Event {
    Event {
        run_id: run.id,
        root_id: run.root_id,
        depth: run.depth.0,
        agent: Arc::from(run.agent.as_str()),
        time: now(),
        kind,
    }
}

/// A write about a run at work, with what its webhook is sent.
pub fn build_write(
    run: &ActiveRun,
    change: Change,
    steps: Vec<Step>,
    kinds: Vec<EventKind>,
) -> Write {
    let events: Vec<Event> = kinds.into_iter().map(|kind| run.event(kind)).collect();
    let webhooks = &run.tree.webhooks;
    let deliveries = match run.parent.is_none() && !webhooks.is_empty() {
        true => {
            let (own, tree) = run.usage();
            webhook_events::deliveries(webhooks, &events, (&own, &tree))
        }
        false => Vec::new(),
    };
    Write {
        run: run.scope.run,
        root: run.scope.root,
        change,
        steps,
        events,
        deliveries,
    }
}
