//! The trees that clients of this node follow and that another node drives, or did so when they began.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, broadcast, mpsc, watch};
use tokio_util::task::TaskTracker;

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::engine::state::broadcaster::{self, StreamEvent, Subscription};
use crate::engine::state::live_text::LiveText;
use crate::store::node_messages::{Follow, FollowedText};

/// Texts that may wait while events are read. More of them are lost.
const MAX_INPUTS: usize = 1024;

/// What the task of a followed tree is to do.
#[derive(Debug)]
pub enum FollowInput {
    /// There are events up to this number, or this process drives the tree, or nobody follows it any more.
    Events(u64),
    /// The tree has ended, or was deleted.
    Ended,
    Text(Box<FollowedText>),
}

/// A tree with its followers. A task of its own publishes to them.
pub struct FollowedTree {
    pub root: RunId,
    /// See [`Follow::number`].
    number: u64,
    pub sender: broadcast::Sender<StreamEvent>,
    /// The number of the last event that was published.
    pub cursor: watch::Sender<u64>,
    /// What the root's model has written of its reply.
    pub text: LiveText,
    /// Whether `text` has what was written before the first event.
    pub has_text: watch::Sender<bool>,
    wants_text: AtomicBool,
    /// The node that drives the tree, when that was last read.
    owner: Mutex<Option<NodeId>>,
    inputs: mpsc::Sender<FollowInput>,
    /// Notified when a node says that something has changed of which there is no event.
    pub changed: Notify,
}

impl FollowedTree {
    /// If there is no place for the input, it is lost, and the next look at the tree's position makes up for it.
    pub fn push(&self, input: FollowInput) {
        let _ = self.inputs.try_send(input);
    }

    /// The message to the owner of the tree that this node, `node`, follows it.
    pub fn follow(&self, node: NodeId) -> Follow {
        Follow {
            root: self.root,
            node,
            number: self.number,
            text: self.wants_text.load(Ordering::Relaxed),
        }
    }

    /// Returns whether it is another one than before.
    pub fn set_owner(&self, owner: Option<NodeId>) -> bool {
        let mut current = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, owner) != owner
    }

    pub fn owner(&self) -> Option<NodeId> {
        *self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_number(&self, number: u64) -> bool {
        self.number == number
    }
}

/// A tree that was added, with what its task needs.
pub struct NewFollowed {
    pub tree: Arc<FollowedTree>,
    pub inputs: mpsc::Receiver<FollowInput>,
}

#[derive(Default)]
pub struct FollowedTrees {
    trees: Mutex<HashMap<RunId, Arc<FollowedTree>>>,
    last_number: AtomicU64,
    /// Owns the task of every followed tree, of every tree that another node follows, and of every temporary run.
    pub tasks: TaskTracker,
}

impl FollowedTrees {
    pub fn get(&self, root: RunId) -> Option<Arc<FollowedTree>> {
        self.lock().get(&root).cloned()
    }

    pub fn all(&self) -> Vec<Arc<FollowedTree>> {
        self.lock().values().cloned().collect()
    }

    /// Follows a tree, whose last event so far is `last_event`; with `text`, also what its models are writing.
    pub fn join(
        &self,
        root: RunId,
        last_event: u64,
        text: bool,
    ) -> (Arc<FollowedTree>, Subscription, Option<NewFollowed>) {
        let mut trees = self.lock();
        if let Some(tree) = trees.get(&root) {
            tree.wants_text.fetch_or(text, Ordering::Relaxed);
            return (Arc::clone(tree), tree.sender.subscribe().into(), None);
        }
        let (sender, subscription) = broadcaster::channel();
        let new = self.insert(&mut trees, root, (last_event, text), sender);
        (Arc::clone(&new.tree), subscription, Some(new))
    }

    /// Goes on publishing to followers of a tree that this node drives no more. `None` if others follow it already: these
    /// subscriptions end.
    pub fn adopt(
        &self,
        root: RunId,
        last_event: u64,
        sender: broadcast::Sender<StreamEvent>,
    ) -> Option<NewFollowed> {
        let mut trees = self.lock();
        if trees.contains_key(&root) {
            return None;
        }
        Some(self.insert(&mut trees, root, (last_event, true), sender))
    }

    fn insert(
        &self,
        trees: &mut HashMap<RunId, Arc<FollowedTree>>,
        root: RunId,
        (last_event, text): (u64, bool),
        sender: broadcast::Sender<StreamEvent>,
    ) -> NewFollowed {
        let (input_sender, inputs) = mpsc::channel(MAX_INPUTS);
        let tree = Arc::new(FollowedTree {
            root,
            number: self.last_number.fetch_add(1, Ordering::Relaxed) + 1,
            sender,
            cursor: watch::Sender::new(last_event),
            text: LiveText::default(),
            has_text: watch::Sender::new(false),
            wants_text: AtomicBool::new(text),
            owner: Mutex::new(None),
            inputs: input_sender,
            changed: Notify::new(),
        });
        trees.insert(root, Arc::clone(&tree));
        NewFollowed { tree, inputs }
    }

    /// Removes a tree that nobody follows any more; returns whether it has.
    pub fn remove_if_unused(&self, tree: &FollowedTree) -> bool {
        let mut trees = self.lock();
        let is_unused = tree.sender.receiver_count() == 0;
        if is_unused {
            trees.remove(&tree.root);
        }
        is_unused
    }

    /// Ends all subscriptions to a tree, once its task has ended too.
    pub fn remove(&self, tree: &Arc<FollowedTree>) {
        let mut trees = self.lock();
        if trees
            .get(&tree.root)
            .is_some_and(|it| Arc::ptr_eq(it, tree))
        {
            trees.remove(&tree.root);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Arc<FollowedTree>>> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
