//! The one hand that writes the record, and the bell that it rings afterwards. What listeners hear with a number is
//! in the store before they hear it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::broadcast;

use crate::domain::event::{Event, EventKind, StoredEvent};
use crate::domain::run::{Failure, Outcome, Run, RunId, now};
use crate::domain::webhook::Webhook;
use crate::engine::live::LiveRun;
use crate::engine::webhook;
use crate::store::{Change, Closing, Progress, RunStore, Step, StoreError, Write};

/// How many notices a listener may be behind before it has to read the store again.
const BELL_LENGTH: usize = 256;

/// What a listener to a tree hears.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A committed event.
    Stored(Arc<StoredEvent>),
    /// News without a number (`text.delta`, `reasoning.delta`, …): its run, its name and its JSON.
    Whisper {
        /// The run it is about.
        run_id: RunId,
        /// Its name.
        name: &'static str,
        /// The `data` object.
        data: Arc<str>,
    },
}

/// A listener's end: [`Notice`]s from the moment it was made. `Lagged` means: read the store and go on.
pub type Listener = broadcast::Receiver<Notice>;

/// Who listens to which tree. Lent to the store, which rings after each commit.
#[derive(Debug, Default)]
pub struct Bells {
    trees: Mutex<HashMap<RunId, broadcast::Sender<Notice>>>,
}

impl Bells {
    /// Whether anyone listens to this root.
    pub fn listening(&self, root: RunId) -> bool {
        self.lock().contains_key(&root)
    }

    /// Tells committed events to whoever listens.
    pub fn ring(&self, root: RunId, events: Vec<StoredEvent>) {
        self.tell(root, || {
            events
                .into_iter()
                .map(|event| Notice::Stored(Arc::new(event)))
        });
    }

    /// Listens to a tree.
    pub fn listen(&self, root: RunId) -> Listener {
        let mut trees = self.lock();
        trees
            .entry(root)
            .or_insert_with(|| broadcast::Sender::new(BELL_LENGTH))
            .subscribe()
    }

    /// The tree has ended: nothing more will be told.
    pub fn silence(&self, root: RunId) {
        self.lock().remove(&root);
    }

    fn tell<I: IntoIterator<Item = Notice>>(&self, root: RunId, notices: impl FnOnce() -> I) {
        let Some(bell) = self.lock().get(&root).cloned() else {
            return;
        };
        for notice in notices() {
            // Nobody there any more is no fault.
            let _ = bell.send(notice);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, broadcast::Sender<Notice>>> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes runs, steps and events; nobody else does.
pub struct Journal {
    store: Arc<dyn RunStore>,
    bells: Arc<Bells>,
}

impl Journal {
    /// Over a store that rings these bells.
    pub fn new(store: Arc<dyn RunStore>, bells: Arc<Bells>) -> Self {
        Self { store, bells }
    }

    /// The record, for reading.
    pub fn store(&self) -> &Arc<dyn RunStore> {
        &self.store
    }

    /// Who listens.
    pub fn bells(&self) -> &Bells {
        &self.bells
    }

    /// Commits a change with its steps and events, and returns the last event's number. The run's tree is suspended if
    /// that fails, and a suspended one writes nothing.
    pub async fn record(
        &self,
        live: &LiveRun,
        change: Change,
        steps: Vec<Step>,
        kinds: Vec<EventKind>,
    ) -> Result<u64, StoreError> {
        check(live)?;
        let written = self.store.write(entry(live, change, steps, kinds)).await;
        suspended_by(live, written)
    }

    /// Commits what somebody requests of a run, who is told if that fails: the run goes on as if nobody had.
    pub async fn record_request(
        &self,
        live: &LiveRun,
        change: Change,
        event: EventKind,
    ) -> Result<(), StoreError> {
        check(live)?;
        let write = entry(live, change, Vec::new(), vec![event]);
        self.store.write(write).await.map(drop)
    }

    /// Hands a change over without waiting: for what the next recorded step makes good.
    pub async fn note(
        &self,
        live: &LiveRun,
        change: Change,
        steps: Vec<Step>,
        kinds: Vec<EventKind>,
    ) -> Result<(), StoreError> {
        check(live)?;
        let posted = self.store.post(entry(live, change, steps, kinds)).await;
        suspended_by(live, posted)
    }

    /// Commits a change as [`Journal::record`] does, with writes about other runs in the same transaction.
    pub async fn record_with(
        &self,
        live: &LiveRun,
        change: Change,
        step: Step,
        kinds: Vec<EventKind>,
        others: Vec<Write>,
    ) -> Result<u64, StoreError> {
        check(live)?;
        let write = entry(live, change, vec![step], kinds);
        let written = self.store.write_with(write, others).await;
        suspended_by(live, written)
    }

    /// Writes something that happened to a run which nobody drives now.
    pub async fn record_undriven(
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
            events: vec![event_of(run, kind)],
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
        let event = event_of(run, kind);
        let closing = Closing {
            completion_status: None,
            outcome: Outcome::Failed {
                failure,
                partial: run.partial_content.clone(),
            },
            at: event.time,
            progress: Progress {
                turns: run.turns,
                model: run.model.clone(),
                stop_reason: run.stop_reason.clone(),
                usage: run.usage,
            },
            tree: run.tree,
        };
        let change = Change::Close(Box::new(closing));
        let write = Write {
            run: run.id,
            root: run.root_id,
            change,
            steps: Vec::new(),
            deliveries: webhook::deliveries(
                webhooks,
                std::slice::from_ref(&event),
                (&run.usage, &run.tree),
            ),
            events: vec![event],
        };
        self.store.write(write).await.map(drop)
    }

    /// Tells listeners something that has no number and may be lost.
    pub fn whisper(&self, live: &LiveRun, kind: EventKind) {
        let root = live.scope.root;
        if !self.bells.listening(root) {
            return;
        }
        let name = kind.name();
        let data = serde_json::to_string(&live.event(kind)).unwrap_or_default();
        let notice = Notice::Whisper {
            run_id: live.scope.run,
            name,
            data: data.into(),
        };
        self.bells.tell(root, || [notice]);
    }
}

/// Whether anything may be written about the run's tree.
fn check(live: &LiveRun) -> Result<(), StoreError> {
    match live.is_suspended() {
        true => Err(StoreError::Suspended),
        false => Ok(()),
    }
}

/// Suspends the run's tree if its write failed.
fn suspended_by<T>(live: &LiveRun, written: Result<T, StoreError>) -> Result<T, StoreError> {
    if let Err(error) = &written {
        live.suspend(error);
    }
    written
}

/// An event about a run that nobody drives, now.
fn event_of(run: &Run, kind: EventKind) -> Event {
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
pub fn entry(live: &LiveRun, change: Change, steps: Vec<Step>, kinds: Vec<EventKind>) -> Write {
    let events: Vec<Event> = kinds.into_iter().map(|kind| live.event(kind)).collect();
    let webhooks = &live.tree.webhooks;
    let deliveries = match live.parent.is_none() && !webhooks.is_empty() {
        true => {
            let (own, tree) = live.usage();
            webhook::deliveries(webhooks, &events, (&own, &tree))
        }
        false => Vec::new(),
    };
    Write {
        run: live.scope.run,
        root: live.scope.root,
        change,
        steps,
        events,
        deliveries,
    }
}
