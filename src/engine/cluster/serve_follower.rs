//! Serves the other nodes that follow trees of this one: sends word of new events, and what the models are writing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::futures::OwnedNotified;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::domain::message::truncate_to_bytes;
use crate::engine::cluster::follow;
use crate::engine::context::Engine;
use crate::engine::state::broadcaster::{StreamEvent, Subscription};
use crate::engine::state::live_text::PartialReply;
use crate::store::cluster::Cluster;
use crate::store::node_messages::{Follow, FollowedText, NodeMessage, TextPiece};

/// A node that does not repeat itself for this time follows no more.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(6);
/// Bytes of a text in one message, of which each may need six as JSON.
const MAX_TEXT_BYTES: usize = 1000;

/// A message that another node follows a tree. The first one starts a task, which gets the later ones.
pub fn on_follow(engine: &Arc<Engine>, request: &Follow) {
    if engine.active_runs.get(request.root).is_none() {
        return;
    }
    let Some(requests) = engine.remote_followers.pass_on(request) else {
        return;
    };
    let (engine, request) = (Arc::clone(engine), request.clone());
    let tasks = engine.followed.tasks.clone();
    tasks.spawn(async move {
        let (root, node) = (request.root, request.node);
        tokio::select! {
            () = serve(&engine, request, requests) => {}
            () = engine.shutdown.cancelled() => {}
        }
        engine.remote_followers.remove_closed(root, node);
    });
}

/// Sends one node what happens in one tree, until the tree has ended here or the node follows it no more.
async fn serve(engine: &Arc<Engine>, mut request: Follow, mut requests: mpsc::Receiver<Follow>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let mut follower = Follower {
        cluster,
        request: request.clone(),
        sent_texts: 0,
    };
    let Some(mut events) = follower.begin(engine).await else {
        return;
    };
    let mut forgotten_at = Instant::now() + FORGOTTEN_AFTER;
    let mut changes: Option<Changes> = None;
    loop {
        let Some(root) = engine.active_runs.get(request.root) else {
            return follower.send_rest(events);
        };
        let notify = &root.tree.root_permit.changed;
        let changes = match changes.take() {
            Some(known) if Arc::ptr_eq(&known.notify, notify) => changes.insert(known),
            // What has changed before may not have been sent.
            _ => {
                follower.send_events(0);
                changes.insert(Changes::new(notify))
            }
        };
        tokio::select! {
            received = requests.recv() => {
                let Some(received) = received else { return };
                forgotten_at = Instant::now() + FORGOTTEN_AFTER;
                if received != request {
                    request = received;
                    follower.request = request.clone();
                    let Some(begun) = follower.begin(engine).await else { return };
                    events = begun;
                    // A run may have come to wait meanwhile.
                    follower.send_events(0);
                }
            }
            event = events.recv() => match event {
                Ok(event) => follower.send_event(&event),
                Err(RecvError::Lagged(_)) => follower.skip_texts(),
                Err(RecvError::Closed) => return follower.send_events(u64::MAX),
            },
            // A run may come to wait without an event.
            () = changes.next.as_mut() => {
                *changes = Changes::new(notify);
                follower.send_events(0);
            }
            () = tokio::time::sleep_until(forgotten_at) => return,
        }
    }
}

/// Changes of a tree of which there may be no event.
struct Changes {
    notify: Arc<Notify>,
    /// Resolves after the next change.
    next: Pin<Box<OwnedNotified>>,
}

impl Changes {
    /// Those from now on.
    fn new(notify: &Arc<Notify>) -> Self {
        Self {
            next: Box::pin(Arc::clone(notify).notified_owned()),
            notify: Arc::clone(notify),
        }
    }
}

struct Follower<'a> {
    cluster: &'a dyn Cluster,
    request: Follow,
    sent_texts: u64,
}

impl Follower<'_> {
    /// Subscribes to the tree, and sends what the root's model has written before; `None` if the tree has ended here.
    async fn begin(&mut self, engine: &Engine) -> Option<Subscription> {
        let root = self.request.root;
        // Read before the subscription: later events are announced in their order with the texts, which come too late otherwise.
        let positions = self.cluster.tree_positions(vec![root]).await;
        let subscribed = follow::subscribe_here_with_text(engine, root);
        self.sent_texts = 0;
        let Some((events, reply)) = subscribed else {
            self.send_events(u64::MAX);
            return None;
        };
        if let Some(position) = positions.ok().and_then(|it| it.get(&root).copied()) {
            self.send_events(position.last_event);
        }
        if self.request.text {
            if let Some(reply) = reply
                && let Some(active_run) = engine.active_runs.get(root)
            {
                self.send_before(&active_run.agent.name, &reply);
            }
            self.send_text(TextPiece::Begin);
        }
        Some(events)
    }

    /// See [`NodeMessage::Events`].
    fn send_events(&self, last: u64) {
        self.send(NodeMessage::Events(vec![(self.request.root, last)]));
    }

    fn send_before(&mut self, agent: &str, reply: &PartialReply) {
        let mut rest = reply.text.as_str();
        loop {
            let piece = truncate_to_bytes(rest, MAX_TEXT_BYTES);
            self.send_text(TextPiece::Before {
                agent: agent.to_owned(),
                turn: reply.turn,
                text: piece.to_owned(),
                is_replacement: reply.is_replacement,
            });
            rest = &rest[piece.len()..];
            if rest.is_empty() {
                return;
            }
        }
    }

    /// Sends what the tree has published before its end.
    fn send_rest(&mut self, mut events: Subscription) {
        loop {
            match events.try_recv() {
                Ok(event) => self.send_event(&event),
                Err(TryRecvError::Lagged(_)) => self.skip_texts(),
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        self.send_events(u64::MAX);
    }

    fn send_event(&mut self, event: &StreamEvent) {
        match event {
            StreamEvent::Stored(event) => self.send_events(event.seq),
            StreamEvent::Live(live) => {
                if self.request.text
                    && let Ok(data) = RawValue::from_string(live.data.clone())
                {
                    let name = live.event.kind.name().to_string();
                    self.send_text(TextPiece::Event { name, data });
                }
            }
        }
    }

    /// Some texts are lost: the other node sees that by the numbers.
    fn skip_texts(&mut self) {
        self.sent_texts += 1;
        self.send_events(u64::MAX);
    }

    fn send_text(&mut self, piece: TextPiece) {
        self.sent_texts += 1;
        self.send(NodeMessage::Text(FollowedText {
            root: self.request.root,
            follow: self.request.number,
            number: self.sent_texts,
            piece,
        }));
    }

    fn send(&self, message: NodeMessage) {
        self.cluster.send(Some(self.request.node), message);
    }
}
