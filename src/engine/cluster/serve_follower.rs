//! Serves the other nodes that follow trees of this one: sends word of new events, and what the models are writing.

use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::domain::message::truncate_to_bytes;
use crate::domain::run::RunId;
use crate::engine::cluster::follow;
use crate::engine::context::Engine;
use crate::engine::record::journal::{StreamEvent, Subscription};
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
    let Some(mut events) = follower.begin(engine) else {
        return;
    };
    let mut forgotten_at = Instant::now() + FORGOTTEN_AFTER;
    loop {
        let Some(root) = engine.active_runs.get(request.root) else {
            return follower.send_events(u64::MAX);
        };
        tokio::select! {
            received = requests.recv() => {
                let Some(received) = received else { return };
                forgotten_at = Instant::now() + FORGOTTEN_AFTER;
                if received != request {
                    request = received;
                    follower.request = request.clone();
                    let Some(begun) = follower.begin(engine) else { return };
                    events = begun;
                }
            }
            event = events.recv() => match event {
                Ok(StreamEvent::Stored(event)) => follower.send_events(event.seq),
                Ok(StreamEvent::Ephemeral { run_id, name, data }) => {
                    follower.send_event(run_id, name, &data);
                }
                Err(RecvError::Lagged(_)) => follower.skip_texts(),
                Err(RecvError::Closed) => return follower.send_events(u64::MAX),
            },
            // A run may come to wait without an event.
            () = root.tree.root_permit.changed.notified() => follower.send_events(0),
            () = tokio::time::sleep_until(forgotten_at) => return,
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
    fn begin(&mut self, engine: &Engine) -> Option<Subscription> {
        let subscribed = follow::subscribe_here_with_text(engine, self.request.root);
        self.sent_texts = 0;
        self.send_events(u64::MAX);
        let (events, reply) = subscribed?;
        if self.request.text {
            if let Some(reply) = reply {
                self.send_before(&reply);
            }
            self.send_text(TextPiece::Begin);
        }
        Some(events)
    }

    /// See [`NodeMessage::Events`].
    fn send_events(&self, last: u64) {
        self.send(NodeMessage::Events(vec![(self.request.root, last)]));
    }

    fn send_before(&mut self, reply: &PartialReply) {
        let mut rest = reply.text.as_str();
        loop {
            let piece = truncate_to_bytes(rest, MAX_TEXT_BYTES);
            self.send_text(TextPiece::Before {
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

    fn send_event(&mut self, run: RunId, name: &str, data: &str) {
        if let Ok(data) = RawValue::from_string(data.to_owned())
            && self.request.text
        {
            let name = name.to_owned();
            self.send_text(TextPiece::Event { run, name, data });
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
