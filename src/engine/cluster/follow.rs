//! Follows trees for clients of this node, whichever node drives them. Events come from the store, so that none is missing when a
//! message is lost or the tree gets another owner; texts come from the node that drives the tree.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tracing::debug;

use crate::domain::event::{Event, EventKind, EventName, LiveEvent, StoredEvent};
use crate::domain::node::NodeId;
use crate::domain::run::{RunId, now};
use crate::engine::cluster::text_gate::TextGate;
use crate::engine::context::Engine;
use crate::engine::state::broadcaster::{ShownTurns, StreamEvent, Subscription};
use crate::engine::state::followed_trees::{FollowInput, FollowedTree, NewFollowed};
use crate::engine::state::live_text::PartialReply;
use crate::store::StoreError;
use crate::store::cluster::{Cluster, TreeOwner, TreePosition};
use crate::store::events::EventQuery;
use crate::store::node_messages::{FollowedText, NodeMessage, TextPiece};

/// How often the positions of all followed trees are read, in case a message was lost.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The owner of a tree hears of its followers in every second poll.
const POLLS_PER_FOLLOW: u32 = 2;
/// Events that are read at once.
const PAGE_SIZE: usize = 200;
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long what is committed may be known before the message about it, which comes after the texts that were sent before.
const MAX_MESSAGE_DELAY: Duration = Duration::from_millis(300);
/// How long a new follower waits for what others have, or for the text that was written before.
const MAX_CATCH_UP: Duration = Duration::from_secs(2);
const MAX_TEXT_WAIT: Duration = Duration::from_millis(300);

/// A subscription to a tree that this process drives; `None` if it does not.
pub fn subscribe_here(engine: &Engine, root: RunId) -> Option<Subscription> {
    match engine.active_runs.get(root) {
        // It may be another node's by now.
        Some(run) if run.is_suspended() && engine.journal.store().cluster().is_some() => {
            return None;
        }
        None if !engine.sleeps_here(root) => return None,
        _ => {}
    }
    let broadcaster = engine.journal.broadcaster();
    let subscription = broadcaster.subscribe(root);
    if engine.active_runs.get(root).is_none() && !engine.sleeps_here(root) {
        // The tree ended between the two checks: nobody else would close its channel.
        broadcaster.close(root);
        return None;
    }
    Some(subscription)
}

/// As [`subscribe_here`], with the text of the root's reply that was published before the subscription.
pub fn subscribe_here_with_text(
    engine: &Engine,
    root: RunId,
) -> Option<(Subscription, Option<PartialReply>)> {
    let Some(active_run) = engine.active_runs.get(root) else {
        return Some((subscribe_here(engine, root)?, None));
    };
    let (subscription, reply) = active_run.live_text.read(|| subscribe_here(engine, root));
    Some((subscription?, reply))
}

/// A subscription to a tree of any node; `None` if the tree has ended, or if no other node shares the database.
pub async fn subscribe(engine: &Arc<Engine>, root: RunId, text: bool) -> Option<Subscription> {
    let (_, subscription) = join(engine, root, text).await?;
    Some(subscription)
}

/// As [`subscribe`], with the text of the root's reply that was published before the subscription.
pub async fn subscribe_with_text(
    engine: &Arc<Engine>,
    root: RunId,
) -> Option<(Subscription, Option<PartialReply>)> {
    let (tree, _kept) = join(engine, root, true).await?;
    Some(tree.text.read(|| tree.sender.subscribe().into()))
}

async fn join(
    engine: &Arc<Engine>,
    root: RunId,
    text: bool,
) -> Option<(Arc<FollowedTree>, Subscription)> {
    let cluster = engine.journal.store().cluster()?;
    let positions = cluster.tree_positions(vec![root]).await.ok()?;
    let position = *positions.get(&root)?;
    let (tree, mut subscription, new) = engine.followed.join(root, position.last_event, text);
    on_position(cluster, &tree, position, true);
    match new {
        Some(new) => start(engine, new, ShownTurns::default()),
        None => {
            // What happened before the subscription is not part of it.
            let mut cursor = tree.cursor.subscribe();
            let mut caught_up = async |wait| {
                let caught_up = cursor.wait_for(|cursor| *cursor >= position.last_event);
                tokio::time::timeout(wait, caught_up).await.is_ok()
            };
            if !caught_up(MAX_MESSAGE_DELAY).await {
                tree.push(FollowInput::Events(u64::MAX));
                caught_up(MAX_CATCH_UP).await;
            }
            subscription = subscription.resubscribe();
        }
    }
    if text && tree.owner().is_some() {
        // From the owner's answer on no text is missed. Without one, the text is taken to begin with the next piece.
        let mut has_text = tree.has_text.subscribe();
        let _ = tokio::time::timeout(MAX_TEXT_WAIT, has_text.wait_for(|has_text| *has_text)).await;
    }
    Some((tree, subscription))
}

/// This node drives a tree no more: ends the subscriptions to it, or goes on with them if other nodes may drive it.
pub fn release(engine: &Arc<Engine>, root: RunId) {
    let broadcaster = engine.journal.broadcaster();
    let is_clustered = engine.journal.store().cluster().is_some();
    if !is_clustered || engine.draining.is_cancelled() {
        return broadcaster.close(root);
    }
    let Some((sender, last_event, shown)) = broadcaster.take(root) else {
        return;
    };
    if sender.receiver_count() > 0
        && let Some(new) = engine.followed.adopt(root, last_event, sender)
    {
        start(engine, new, shown);
    }
}

/// The followers may have texts of the turns `shown`.
fn start(engine: &Arc<Engine>, new: NewFollowed, shown: ShownTurns) {
    let NewFollowed { tree, inputs } = new;
    let cursor = *tree.cursor.borrow();
    let relay = Relay {
        engine: Arc::clone(engine),
        cursor,
        tree,
        here: None,
        gate: TextGate::new(shown),
    };
    engine.followed.tasks.spawn(relay.run(inputs));
}

/// Looks at the positions of all followed trees now and then, until the daemon shuts down.
pub async fn poll(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    for round in 0_u32.. {
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = engine.shutdown.cancelled() => return,
        }
        let trees = engine.followed.all();
        if trees.is_empty() {
            continue;
        }
        let roots = trees.iter().map(|tree| tree.root).collect();
        let Ok(positions) = cluster.tree_positions(roots).await else {
            continue;
        };
        let is_due = round.is_multiple_of(POLLS_PER_FOLLOW);
        for tree in &trees {
            if let Some(position) = positions.get(&tree.root) {
                on_position(cluster, tree, *position, is_due);
            }
        }
        push_missed(&trees, &positions).await;
    }
}

/// Wakes the tasks of trees of which a message was lost, if it is not just late.
async fn push_missed(trees: &[Arc<FollowedTree>], positions: &HashMap<RunId, TreePosition>) {
    let last_event = |tree: &FollowedTree| positions.get(&tree.root).map(|it| it.last_event);
    let is_behind = |tree: &FollowedTree| {
        last_event(tree).is_none_or(|last_event| last_event > *tree.cursor.borrow())
    };
    let mut missed: Vec<_> = trees.iter().filter(|tree| is_behind(tree)).collect();
    if missed.is_empty() {
        return;
    }
    tokio::time::sleep(MAX_MESSAGE_DELAY).await;
    missed.retain(|tree| is_behind(tree));
    for tree in missed {
        tree.push(match last_event(tree) {
            Some(_) => FollowInput::Events(u64::MAX),
            None => FollowInput::Ended,
        });
    }
}

/// Tells a node that has just taken a tree that this one follows it: what its model writes soon is not lost.
pub fn on_new_owner(engine: &Engine, tree: &FollowedTree, owner: NodeId) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    if owner != cluster.node() && tree.set_owner(Some(owner)) {
        let follow = tree.follow(cluster.node());
        cluster.send(Some(owner), NodeMessage::Follow(follow));
    }
}

/// Wakes the task of a tree if it has something to do, and tells the owner that the tree is followed.
fn on_position(cluster: &dyn Cluster, tree: &FollowedTree, position: TreePosition, is_due: bool) {
    let owner = match position.owner {
        TreeOwner::Node(node) => Some(node),
        TreeOwner::ThisNode | TreeOwner::Nobody | TreeOwner::Ended => None,
    };
    let is_new = tree.set_owner(owner);
    if let Some(owner) = owner
        && (is_due || is_new)
    {
        let follow = tree.follow(cluster.node());
        cluster.send(Some(owner), NodeMessage::Follow(follow));
    }
    if owner.is_none() || tree.sender.receiver_count() == 0 {
        tree.push(FollowInput::Events(u64::MAX));
    }
}

/// The task of a followed tree.
struct Relay {
    engine: Arc<Engine>,
    tree: Arc<FollowedTree>,
    /// The number of the last event that was published.
    cursor: u64,
    /// The subscription to the tree while this process drives it.
    here: Option<Subscription>,
    gate: TextGate,
}

enum Progress {
    Continues,
    Ended,
}

impl Relay {
    /// Publishes until the tree has ended, or until nobody follows it any more.
    async fn run(mut self, mut inputs: mpsc::Receiver<FollowInput>) {
        let engine = Arc::clone(&self.engine);
        tokio::select! {
            () = self.relay(&mut inputs) => {}
            () = engine.shutdown.cancelled() => {}
        }
        engine.followed.remove(&self.tree);
    }

    async fn relay(&mut self, inputs: &mut mpsc::Receiver<FollowInput>) {
        if self.cursor == 0 && !self.find_cursor().await {
            return;
        }
        let mut needs_store = Some(u64::MAX);
        let mut next_input = None;
        loop {
            if self.engine.followed.remove_if_unused(&self.tree) {
                return;
            }
            if self.here.is_none()
                && let Progress::Ended = self.begin_here(&mut needs_store).await
            {
                return;
            }
            if let Some(last) = needs_store.take()
                && let Progress::Ended = self.read_store(last).await
            {
                return;
            }
            let received = async {
                match &mut self.here {
                    Some(subscription) => subscription.recv().await,
                    None => std::future::pending().await,
                }
            };
            let input = async {
                match next_input.take() {
                    Some(input) => Some(input),
                    None => inputs.recv().await,
                }
            };
            tokio::select! {
                event = received => match event {
                    Ok(StreamEvent::Stored(event)) if event.seq == self.cursor + 1 => {
                        if let Progress::Ended = self.publish(event) {
                            return;
                        }
                    }
                    Ok(StreamEvent::Stored(event)) if event.seq <= self.cursor => {}
                    Ok(StreamEvent::Stored(_)) | Err(RecvError::Lagged(_)) => {
                        needs_store = Some(u64::MAX);
                    }
                    Ok(StreamEvent::Live(event)) => self.publish_live(event),
                    Err(RecvError::Closed) => {
                        self.here = None;
                        needs_store = Some(u64::MAX);
                    }
                },
                input = input => match input {
                    Some(FollowInput::Events(_)) if self.here.is_some() => {}
                    Some(FollowInput::Events(mut last)) => {
                        // Those that came in one message are read at once.
                        next_input = loop {
                            match inputs.try_recv() {
                                Ok(FollowInput::Events(next)) => last = last.max(next),
                                other => break other.ok(),
                            }
                        };
                        needs_store = Some(last);
                    }
                    Some(FollowInput::Text(text)) if self.here.is_none() => self.on_text(*text),
                    Some(FollowInput::Text(_)) => {}
                    Some(FollowInput::Ended) | None => {
                        self.read_store(u64::MAX).await;
                        return;
                    }
                },
            }
        }
    }

    /// Finds where to begin if nothing was published before: with the last event, so that the followers see that there are more.
    /// Returns false if the tree has ended.
    async fn find_cursor(&mut self) -> bool {
        let (root, store) = (self.tree.root, self.engine.journal.store());
        let Some(cluster) = store.cluster() else {
            return false;
        };
        loop {
            match cluster.tree_positions(vec![root]).await {
                Ok(positions) => {
                    let position = positions.get(&root);
                    self.cursor = position.map_or(0, |it| it.last_event.saturating_sub(1));
                    return position.is_some();
                }
                Err(StoreError::Closed) => return false,
                Err(_) => tokio::time::sleep(STORE_RETRY_INTERVAL).await,
            }
        }
    }

    /// Subscribes to the tree if this process drives it, and reads the store.
    async fn begin_here(&mut self, needs_store: &mut Option<u64>) -> Progress {
        let active_run = self.engine.active_runs.get(self.tree.root);
        let Some(active_run) = active_run.filter(|it| !it.is_suspended()) else {
            return Progress::Continues;
        };
        // First the subscription, then the store: no event is missed.
        let subscribed = subscribe_here_with_text(&self.engine, self.tree.root);
        let Some((subscription, reply)) = subscribed else {
            return Progress::Continues;
        };
        self.here = Some(subscription);
        *needs_store = None;
        if let Progress::Ended = self.read_store(u64::MAX).await {
            return Progress::Ended;
        }
        self.on_new_sender();
        if let Some(reply) = reply {
            self.on_text_before(&active_run.agent.name, &reply);
        }
        self.tree.has_text.send_replace(true);
        Progress::Continues
    }

    /// Clears the text of the last sender, of which the next one writes no continuation.
    fn on_new_sender(&mut self) {
        self.gate.begin();
        self.tree.text.clear();
    }

    /// Publishes what the store has up to the event with the number `last`: texts that another node has sent come before
    /// the events after them. Tries again until it works.
    async fn read_store(&mut self, last: u64) -> Progress {
        while last > self.cursor {
            let query = EventQuery {
                root: self.tree.root,
                run: self.tree.root,
                exclude_descendants: false,
                after: self.cursor,
                limit: PAGE_SIZE,
            };
            let events = match self.engine.journal.store().events(query).await {
                Ok(events) => events,
                Err(StoreError::Closed) => return Progress::Ended,
                Err(error) => {
                    debug!(run.root = %self.tree.root, "Following {} pauses: {error}", self.tree.root);
                    tokio::time::sleep(STORE_RETRY_INTERVAL).await;
                    match self.tree.sender.receiver_count() {
                        0 => return Progress::Continues,
                        _ => continue,
                    }
                }
            };
            let is_last = events.len() < PAGE_SIZE;
            for event in events {
                if event.seq > last {
                    return Progress::Continues;
                }
                if let Progress::Ended = self.publish(Arc::new(event)) {
                    return Progress::Ended;
                }
            }
            if is_last {
                break;
            }
        }
        Progress::Continues
    }

    fn publish(&mut self, event: Arc<StoredEvent>) -> Progress {
        self.cursor = event.seq;
        let has_ended = event.ends(self.tree.root);
        if event.name == EventName::TurnCompleted
            && let Ok(EventKind::TurnCompleted { turn, .. }) = event.read().map(|it| it.kind)
        {
            self.gate.on_recorded(event.run_id, turn);
        }
        // Without followers, the task ends soon.
        let _ = self.tree.sender.send(StreamEvent::Stored(event));
        self.tree.cursor.send_replace(self.cursor);
        match has_ended {
            true => Progress::Ended,
            false => Progress::Continues,
        }
    }

    /// A text of the node that drives the tree.
    fn on_text(&mut self, text: FollowedText) {
        if !self.tree.is_number(text.follow) {
            return;
        }
        if text.number == 1 {
            self.on_new_sender();
        }
        self.gate.on_number(text.number);
        match text.piece {
            TextPiece::Before {
                agent,
                turn,
                text,
                is_replacement,
            } => self.on_text_before(
                &agent,
                &PartialReply {
                    turn,
                    text,
                    is_replacement,
                },
            ),
            TextPiece::Begin => {
                self.tree.has_text.send_replace(true);
            }
            TextPiece::Event { name, data } => {
                let name = EventName::parse(&name);
                let event = name.and_then(|name| Event::read(name, data.get()).ok());
                // A node of a newer version may have other events.
                if let Some(event) = event {
                    let data = data.get().to_owned();
                    self.publish_live(Arc::new(LiveEvent { event, data }));
                }
            }
        }
    }

    /// A text of the root that was published before its publisher knew of the followers here, who do not have it.
    fn on_text_before(&mut self, agent: &str, reply: &PartialReply) {
        let root = self.tree.root;
        if !self.gate.admits(root, reply.turn, false) {
            return;
        }
        // A node of an older version does not name the agent.
        let is_shown = !agent.is_empty() && !reply.text.is_empty();
        if is_shown {
            self.gate.on_shown(root, reply.turn);
        }
        let (turn, text) = (reply.turn, reply.text.clone());
        let event = Event {
            run_id: root,
            root_id: root,
            depth: 0,
            agent: agent.into(),
            time: now(),
            kind: EventKind::TextDelta { turn, text },
        };
        self.tree.text.restore(reply, || {
            if is_shown {
                let event = StreamEvent::Live(Arc::new(event.into()));
                let _ = self.tree.sender.send(event);
            }
        });
    }

    /// Publishes an event without a number, if it does not follow on a hole.
    fn publish_live(&mut self, live: Arc<LiveEvent>) {
        let run = live.event.run_id;
        let (turn, is_withdrawal) = match live.event.kind {
            EventKind::TextDelta { turn, .. }
            | EventKind::ReasoningDelta { turn, .. }
            | EventKind::ReasoningStarted { turn } => (turn, false),
            EventKind::TextWithdrawn { turn, .. } => (turn, true),
            _ => return,
        };
        if !self.gate.admits(run, turn, is_withdrawal) {
            return;
        }
        if is_withdrawal {
            self.gate.on_withdrawn(run);
        } else {
            self.gate.on_shown(run, turn);
        }
        let tree = &self.tree;
        let publish = || drop(tree.sender.send(StreamEvent::Live(Arc::clone(&live))));
        match &live.event.kind {
            _ if run != tree.root => publish(),
            EventKind::TextDelta { text, .. } => tree.text.push(turn, text, publish),
            EventKind::TextWithdrawn { .. } => tree.text.withdraw(turn, publish),
            _ => publish(),
        }
    }
}
