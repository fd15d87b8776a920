//! Handles the messages of other nodes about trees that are followed.

use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;

use crate::domain::run::RunId;
use crate::engine::cluster::{follow, rate_limits, serve_follower};
use crate::engine::context::Engine;
use crate::engine::state::followed_trees::FollowInput;
use crate::store::node_messages::NodeMessage;

/// Reads messages until the daemon shuts down. Each may be lost: it only makes this node look sooner.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let mut messages = cluster.messages();
    loop {
        let received = tokio::select! {
            received = messages.recv() => received,
            () = engine.shutdown.cancelled() => return,
        };
        match received {
            Ok(message) => on_message(&engine, &message),
            Err(RecvError::Lagged(_)) => {
                for tree in engine.followed.all() {
                    tree.push(FollowInput::Events(u64::MAX));
                    tree.changed.notify_waiters();
                }
            }
            Err(RecvError::Closed) => return,
        }
    }
}

fn on_message(engine: &Arc<Engine>, message: &NodeMessage) {
    let followed = |root: RunId| engine.followed.get(root);
    match message {
        NodeMessage::Events(trees) => {
            for (root, last) in trees {
                if let Some(tree) = followed(*root) {
                    match *last {
                        0 => tree.changed.notify_waiters(),
                        last => tree.push(FollowInput::Events(last)),
                    }
                }
            }
        }
        NodeMessage::Text(text) => {
            if let Some(tree) = followed(text.root) {
                tree.push(FollowInput::Text(Box::new(text.clone())));
            }
        }
        NodeMessage::Follow(request) => serve_follower::on_follow(engine, request),
        NodeMessage::Permits => engine.cluster_permits.wake.notify_one(),
        NodeMessage::FreeTrees => engine.free_trees.notify_one(),
        NodeMessage::Taken(node, roots) => {
            for tree in roots.iter().filter_map(|root| followed(*root)) {
                follow::on_new_owner(engine, &tree, *node);
            }
        }
        NodeMessage::RateLimits(node, reports) => rate_limits::on_reports(engine, *node, reports),
        NodeMessage::Requests | NodeMessage::Answered(_) => {}
    }
}
