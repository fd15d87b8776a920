//! Writes the record. Events with a number are in the store before any subscriber sees them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use jiff::Timestamp;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use crate::domain::event::{Event, EventKind, LiveEvent, StoredEvent};
use crate::domain::failure::Failure;
use crate::domain::run::{Outcome, Run, RunId, now};
use crate::domain::warning::RunWarning;
use crate::domain::webhook::Webhook;
use crate::engine::record::budget_charges::{self, PendingCharge};
use crate::engine::record::webhook_events;
use crate::engine::state::active_run::ActiveRun;
use crate::record::entry::{Entry, RecordedEntry};
use crate::record::event::Origin;
use crate::store::run_store::RunStore;
use crate::store::turn_record::TurnEntry;
use crate::store::{Change, FinishedRun, Progress, StoreError, Write};

/// The number of events that a subscriber may lag behind before it must read the store.
const BROADCAST_CAPACITY: usize = 256;

#[derive(Clone, Debug)]
pub enum StreamEvent {
    /// A committed event.
    Stored(Arc<StoredEvent>),
    /// An event without a number.
    Live(Arc<LiveEvent>),
}

/// Events since the subscription. After `Lagged`, read the store and continue.
#[derive(Debug)]
pub struct Subscription {
    // Before the entry, so that this receiver is gone when the entry looks for others.
    receiver: broadcast::Receiver<StreamEvent>,
    entry: Option<ChannelEntry>,
}

/// The entry of a channel, whose ring goes with its last subscription: it is larger than all else that a waiting run keeps.
#[derive(Clone, Debug)]
struct ChannelEntry {
    channels: Weak<Channels>,
    root: RunId,
}

type Channels = Mutex<HashMap<RunId, Channel>>;

/// The subscribers by tree. The store publishes through it after each commit.
#[derive(Debug, Default)]
pub struct EventBroadcaster {
    channels: Arc<Channels>,
}

/// The subscribers to one tree.
#[derive(Debug, Default)]
struct Channel {
    /// `None` if there are no subscribers.
    sender: Option<broadcast::Sender<StreamEvent>>,
    /// The number of the last event that was published; 0 if none was.
    last_event: u64,
    shown: ShownTurns,
}

impl Subscription {
    pub async fn recv(&mut self) -> Result<StreamEvent, RecvError> {
        self.receiver.recv().await
    }

    pub fn try_recv(&mut self) -> Result<StreamEvent, TryRecvError> {
        self.receiver.try_recv()
    }

    /// A subscription to the same events from now on.
    pub fn resubscribe(&self) -> Self {
        Self {
            receiver: self.receiver.resubscribe(),
            entry: self.entry.clone(),
        }
    }
}

/// To a channel without an entry.
impl From<broadcast::Receiver<StreamEvent>> for Subscription {
    fn from(receiver: broadcast::Receiver<StreamEvent>) -> Self {
        Self {
            receiver,
            entry: None,
        }
    }
}

impl Drop for ChannelEntry {
    fn drop(&mut self) {
        let Some(channels) = self.channels.upgrade() else {
            return;
        };
        let mut channels = lock(&channels);
        let Some(channel) = channels.get_mut(&self.root) else {
            return;
        };
        let is_unused = |it: &mut broadcast::Sender<_>| it.receiver_count() == 0;
        if channel.sender.take_if(is_unused).is_some() && channel.shown.is_empty() {
            channels.remove(&self.root);
        }
    }
}

fn lock(channels: &Channels) -> MutexGuard<'_, HashMap<RunId, Channel>> {
    channels.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Channel {
    fn note_shown(&mut self, run: RunId, kind: &EventKind) {
        match kind {
            EventKind::TextWithdrawn { .. } => drop(self.shown.remove(&run)),
            EventKind::TextDelta { turn, .. }
            | EventKind::ReasoningDelta { turn, .. }
            | EventKind::ReasoningStarted { turn } => drop(self.shown.insert(run, *turn)),
            _ => {}
        }
    }
}

/// The last turn of each run of which a text was published and not withdrawn.
pub type ShownTurns = HashMap<RunId, u32>;

/// A channel with its first subscription.
pub fn channel() -> (broadcast::Sender<StreamEvent>, Subscription) {
    let (sender, receiver) = broadcast::channel(BROADCAST_CAPACITY);
    (sender, receiver.into())
}

impl EventBroadcaster {
    pub fn has_subscribers(&self, root: RunId) -> bool {
        let channels = lock(&self.channels);
        channels.get(&root).is_some_and(|it| it.sender.is_some())
    }

    pub fn publish(&self, root: RunId, events: Vec<StoredEvent>) {
        let last_event = events.last().map_or(0, |event| event.seq);
        let sender = self.sender(root, |channel| {
            channel.last_event = channel.last_event.max(last_event);
        });
        let Some(sender) = sender else { return };
        for event in events {
            // A send without receivers fails, which is no error here.
            let _ = sender.send(StreamEvent::Stored(Arc::new(event)));
        }
    }

    pub fn subscribe(&self, root: RunId) -> Subscription {
        let mut channels = lock(&self.channels);
        let sender = &mut channels.entry(root).or_default().sender;
        let sender = sender.get_or_insert_with(|| broadcast::Sender::new(BROADCAST_CAPACITY));
        Subscription {
            receiver: sender.subscribe(),
            entry: Some(ChannelEntry {
                channels: Arc::downgrade(&self.channels),
                root,
            }),
        }
    }

    /// Ends all subscriptions to the tree.
    pub fn close(&self, root: RunId) {
        lock(&self.channels).remove(&root);
    }

    /// Stops publishing to the subscriptions to a tree, and returns where somebody else may go on, with the number of the last
    /// event that they have, 0 if they have none, and with the texts.
    pub fn take(&self, root: RunId) -> Option<(broadcast::Sender<StreamEvent>, u64, ShownTurns)> {
        let channel = lock(&self.channels).remove(&root)?;
        Some((channel.sender?, channel.last_event, channel.shown))
    }

    /// Whether the subscribers may have a text of this turn, of an earlier request.
    pub fn has_shown(&self, root: RunId, run: RunId, turn: u32) -> bool {
        let channels = lock(&self.channels);
        let channel = channels.get(&root);
        channel.is_some_and(|it| it.shown.get(&run) == Some(&turn))
    }

    /// The sender to the subscribers of a tree, after noting in its channel what will be sent; none without subscribers.
    fn sender(
        &self,
        root: RunId,
        note: impl FnOnce(&mut Channel),
    ) -> Option<broadcast::Sender<StreamEvent>> {
        let mut channels = lock(&self.channels);
        let channel = channels.get_mut(&root)?;
        note(channel);
        channel.sender.clone()
    }
}

/// The only writer of runs and their entries.
pub struct Journal {
    store: Arc<dyn RunStore>,
    broadcaster: Arc<EventBroadcaster>,
}

impl Journal {
    /// The store publishes through `broadcaster`.
    pub fn new(store: Arc<dyn RunStore>, broadcaster: Arc<EventBroadcaster>) -> Self {
        Self { store, broadcaster }
    }

    /// For reading.
    pub fn store(&self) -> &Arc<dyn RunStore> {
        &self.store
    }

    pub fn broadcaster(&self) -> &EventBroadcaster {
        &self.broadcaster
    }

    /// Commits a change with its entries, and returns the last event's number. A failure suspends the run's
    /// tree, and nothing is written about a suspended tree.
    pub async fn append(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        if let Change::Claim(_) = &change {
            return self.append_claim(run, change, entries).await;
        }
        let (write, charge) = build_charged_write(run, change, entries);
        let result = self.store.write(complete_write(run, write)).await;
        budget_charges::settle(run, charge, result.as_ref().err());
        suspend_on_error(run, result)
    }

    /// Commits what requests have used since the progress was recorded, if anything.
    pub async fn append_usage(
        &self,
        run: &ActiveRun,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let Some(progress) = run.changed_progress(progress) else {
            return Ok(());
        };
        let change = Change::Progress(progress);
        let committed = self.append(run, change, Vec::new());
        committed.await.map(drop)
    }

    /// Commits what a request with an idempotency key brings. If an earlier request had the key, nothing is recorded, and the run
    /// continues: so warnings and turns are left to the next write.
    async fn append_claim(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<u64, StoreError> {
        let write = build_write(run, change, entries.clone());
        let result = self.store.write(write).await;
        if result.is_ok() {
            run.turn_log.add_entries(&entries);
        }
        suspend_on_error(run, result)
    }

    /// Commits a change that a client requested. If that fails, only the client is notified: the run continues.
    /// Returns the event's number; 0 if the store ignored the change.
    pub async fn append_request(
        &self,
        run: &ActiveRun,
        change: Change,
        entry: Entry,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        let write = build_write(run, change, vec![entry]);
        self.store.write(write).await
    }

    /// Writes a change without waiting for the commit, if the next recorded step makes up for its loss.
    pub async fn enqueue(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<(), StoreError> {
        check_not_suspended(run)?;
        let (write, charge) = build_charged_write(run, change, entries);
        let result = self.store.enqueue(complete_write(run, write)).await;
        budget_charges::settle(run, charge, result.as_ref().err());
        suspend_on_error(run, result)
    }

    /// Commits a write like [`Journal::append`], with writes about other runs in the same transaction.
    pub async fn append_with(
        &self,
        run: &ActiveRun,
        write: Write,
        others: Vec<Write>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        let write = complete_write(run, write);
        let result = self.store.write_with(write, others).await;
        suspend_on_error(run, result)
    }

    /// Commits a change and an entry of a run that is not driven at the moment. Returns its number; 0 if the store ignored the
    /// change.
    pub async fn append_inactive(
        &self,
        run: &Run,
        change: Change,
        entry: Entry,
    ) -> Result<u64, StoreError> {
        self.store
            .write(inactive_write(run, change, vec![entry]))
            .await
    }

    /// Commits warnings of a run that is not driven at the moment.
    pub async fn warn_inactive(
        &self,
        run: &Run,
        warnings: Vec<RunWarning>,
    ) -> Result<(), StoreError> {
        let write = Write {
            warnings: Some(warnings),
            ..inactive_write(run, Change::Unchanged, Vec::new())
        };
        self.store.write(write).await.map(drop)
    }

    /// Commits the failure of a run that no process drives any more, and notifies its webhooks.
    pub async fn close_orphan(
        &self,
        run: &Run,
        webhooks: &[Arc<Webhook>],
        failure: Failure,
    ) -> Result<(), StoreError> {
        let kind = EventKind::RunFailed {
            error: failure.clone(),
        };
        let time = now();
        let event = Origin::from(run).event(time, kind.clone());
        let closing = FinishedRun {
            completion_status: None,
            outcome: Outcome::Failed {
                failure,
                partial: run.partial_content.clone(),
            },
            finished_at: time,
            progress: Progress {
                turns: run.turns,
                model: run.model.clone(),
                stop_reason: run.stop_reason.clone(),
                usage: run.usage,
                models: Vec::new(),
                charges: Vec::new(),
            },
            tree_usage: run.tree,
            messages: None,
        };
        let change = Change::Finish(Box::new(closing));
        let write = Write {
            deliveries: webhook_events::deliveries(webhooks, &[event], (&run.usage, &run.tree)),
            ..inactive_write(run, change, vec![kind.into()])
        };
        self.store.write(write).await.map(drop)
    }

    /// Publishes an event without a number, which may be lost.
    pub fn publish_ephemeral(&self, run: &ActiveRun, kind: EventKind) {
        let run_id = run.scope.run;
        let note = |channel: &mut Channel| channel.note_shown(run_id, &kind);
        let Some(sender) = self.broadcaster.sender(run.scope.root, note) else {
            return;
        };
        let event = LiveEvent::from(run.origin().event(now(), kind));
        let _ = sender.send(StreamEvent::Live(Arc::new(event)));
    }
}

fn check_not_suspended(run: &ActiveRun) -> Result<(), StoreError> {
    match run.is_suspended() {
        true => Err(StoreError::Suspended),
        false => Ok(()),
    }
}

fn suspend_on_error<T>(run: &ActiveRun, result: Result<T, StoreError>) -> Result<T, StoreError> {
    if let Err(error) = &result {
        run.suspend(error);
    }
    result
}

/// A write about a run that is not driven at the moment.
pub fn inactive_write(run: &Run, change: Change, entries: Vec<Entry>) -> Write {
    write(Origin::from(run), change, entries)
}

fn write(origin: Origin, change: Change, entries: Vec<Entry>) -> Write {
    // The end has one time, in the row of the run, its event and its webhook.
    let time = match &change {
        Change::Finish(finished) => finished.finished_at,
        _ => now(),
    };
    Write {
        origin,
        change,
        entries: recorded(time, false, entries).collect(),
        deliveries: Vec::new(),
        warnings: None,
        turns: Vec::new(),
    }
}

fn recorded(
    time: Timestamp,
    is_copied: bool,
    entries: impl IntoIterator<Item = Entry>,
) -> impl Iterator<Item = RecordedEntry> {
    let entries = entries.into_iter();
    entries.map(move |entry| RecordedEntry {
        time,
        is_copied,
        entry,
    })
}

/// The entries of a run that a fork begins with: those of its beginning, and those that are copied from its source.
pub fn fork_entries(
    begun: impl IntoIterator<Item = EventKind>,
    copied: Vec<Entry>,
) -> Vec<RecordedEntry> {
    let (time, begun) = (now(), begun.into_iter().map(Entry::Event));
    let begun = recorded(time, false, begun);
    begun.chain(recorded(time, true, copied)).collect()
}

/// Adds the warnings and the turns that are not recorded yet. If the write fails, the tree is suspended: it keeps the
/// warnings, and takes the turns again.
fn complete_write(run: &ActiveRun, mut write: Write) -> Write {
    let entries = write.entries.iter().map(|it| &it.entry);
    run.turn_log.add_entries(entries);
    write.turns.extend(run.turn_log.take_unrecorded());
    write.warnings = run.take_unrecorded_warnings();
    write
}

/// A write about an active run that also charges budgets over time.
fn build_charged_write(
    run: &ActiveRun,
    mut change: Change,
    mut entries: Vec<Entry>,
) -> (Write, PendingCharge) {
    let charge = budget_charges::charge(run, &mut change, &mut entries);
    let mut write = build_write(run, change, entries);
    write.deliveries.extend(charge.deliveries());
    (write, charge)
}

/// A write about an active run, including its webhook deliveries.
pub fn build_write(run: &ActiveRun, change: Change, entries: Vec<Entry>) -> Write {
    with_deliveries(run, write(run.origin(), change, entries))
}

/// As [`build_write`], of a root that is a fork.
pub fn build_fork_write(
    run: &ActiveRun,
    change: Change,
    entries: Vec<RecordedEntry>,
    turns: Vec<TurnEntry>,
) -> Write {
    let write = Write {
        entries,
        turns,
        ..write(run.origin(), change, Vec::new())
    };
    with_deliveries(run, write)
}

fn with_deliveries(run: &ActiveRun, mut write: Write) -> Write {
    let webhooks = &run.tree.webhooks;
    if run.parent.is_none() && !webhooks.is_empty() {
        let events: Vec<Event> = write.origin.events(&write.entries).collect();
        let (own, tree) = run.usage();
        write.deliveries = webhook_events::deliveries(webhooks, &events, (&own, &tree));
    }
    write
}

#[cfg(test)]
mod tests {
    use super::{EventBroadcaster, EventKind, lock};
    use crate::domain::run::RunId;

    #[test]
    fn a_channel_goes_with_its_last_subscription() {
        let broadcaster = EventBroadcaster::default();
        let (root, run) = (RunId::new(), RunId::new());
        let first = broadcaster.subscribe(root);
        let second = first.resubscribe();
        drop(first);
        assert!(broadcaster.has_subscribers(root));
        drop(second);
        assert!(lock(&broadcaster.channels).is_empty());

        // Who subscribes again may have the text.
        let subscription = broadcaster.subscribe(root);
        let shown = EventKind::ReasoningStarted { turn: 2 };
        broadcaster.sender(root, |channel| channel.note_shown(run, &shown));
        drop(subscription);
        assert!(!broadcaster.has_subscribers(root));
        assert!(broadcaster.has_shown(root, run, 2));

        // Another node's subscribers have the ring.
        let mut moved = broadcaster.subscribe(root);
        let (sender, ..) = broadcaster.take(root).expect("subscribers");
        let here = broadcaster.subscribe(root);
        drop(sender);
        assert!(moved.try_recv().is_err());
        drop(moved);
        assert!(broadcaster.has_subscribers(root));
        drop(here);
        assert!(lock(&broadcaster.channels).is_empty());
    }
}
