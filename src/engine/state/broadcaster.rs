//! The subscribers to trees, and the channels that their events are published through.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use crate::domain::event::{EventKind, LiveEvent, StoredEvent};
use crate::domain::run::{RunId, now};
use crate::engine::state::active_run::ActiveRun;

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

    /// Publishes an event without a number, which may be lost.
    pub fn publish_live(&self, run: &ActiveRun, kind: EventKind) {
        let run_id = run.scope.run;
        let note = |channel: &mut Channel| channel.note_shown(run_id, &kind);
        let Some(sender) = self.sender(run.scope.root, note) else {
            return;
        };
        let event = LiveEvent::from(run.origin().event(now(), kind));
        let _ = sender.send(StreamEvent::Live(Arc::new(event)));
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
