//! The contract between the nodes that share a database. A tree of runs that has not ended is driven by one node at a time, its
//! owner.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::duties::Duties;
use crate::store::node_messages::NodeMessages;
use crate::store::run_requests::RunRequests;
#[cfg(doc)]
use crate::store::runs::RunRecords;
use crate::store::usage::SharedBudgets;

/// Who drives a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeOwner {
    ThisNode,
    Node(NodeId),
    /// No node with its labels has it yet, or its owner is gone.
    Nobody,
    /// Its root has ended, or does not exist.
    Ended,
}

/// How far a tree is that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreePosition {
    pub owner: TreeOwner,
    /// The number of its last event.
    pub last_event: u64,
}

/// Another node, as it was seen last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherNode {
    /// The configured name.
    pub name: String,
    /// The digest of its agents; `None` if it is not known.
    pub agents: Option<String>,
    /// What trees may need of it.
    pub labels: Vec<String>,
}

/// A tree whose labels no node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedTree {
    pub root: RunId,
    pub labels: Vec<String>,
    /// Whether it has waited for longer than `max_wait`: its run fails.
    pub is_overdue: bool,
}

/// Which node drives which tree.
pub trait TreeOwners: Send + Sync + 'static {
    /// This process. It changes when the process joins again.
    fn node(&self) -> NodeId;

    /// Whether this node has not reached the database for so long that others may take over its trees soon: it begins no call
    /// then.
    fn is_cut_off(&self) -> bool;

    /// Whether no other node shared the database when this one looked last.
    fn is_alone(&self) -> bool;

    /// The other nodes that share the database, as they were seen last.
    fn other_nodes(&self) -> Vec<OtherNode>;

    /// Lets other nodes know the digest of the agents of this one.
    fn set_agents(&self, digest: String);

    fn tree_owner(&self, root: RunId) -> BoxFuture<'_, Result<TreeOwner, StoreError>>;

    /// The positions of these trees. Those that have ended are left out.
    fn tree_positions(
        &self,
        roots: Vec<RunId>,
    ) -> BoxFuture<'_, Result<HashMap<RunId, TreePosition>, StoreError>>;

    /// The roots of the trees that this node owns.
    fn own_trees(&self) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>>;

    /// Makes this node the owner of trees that nobody owns and whose labels it has, at most `max`, and returns their roots. No
    /// other node gets the same.
    fn claim_trees(&self, max: usize) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>>;

    /// Trees whose labels no node has, at most `max`, if something is to be done for them: this node does not have them yet, they
    /// have no warning, they are being cancelled, or they have waited for `max_wait`.
    fn unserved_trees(
        &self,
        max_wait: Option<Duration>,
        max: usize,
    ) -> BoxFuture<'_, Result<Vec<UnservedTree>, StoreError>>;

    /// Trees that have ended with their root a minute ago or earlier although runs of them have not, at most `max`, without
    /// those of `except`. An older version could leave such runs behind.
    fn abandoned_trees(
        &self,
        except: Vec<RunId>,
        max: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>>;

    /// Lets this node write to a tree whose labels no node has, although it cannot drive it, until a node with the labels claims it.
    /// False if there is such a node, or no such tree.
    fn claim_unserved(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Leaves a tree of this node to nodes with these labels, whether there are any now or not.
    fn hand_over_tree(
        &self,
        root: RunId,
        labels: Vec<String>,
    ) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// Trees with a permit, of one key and one agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningTrees {
    pub owner: Option<String>,
    pub agent: String,
    pub trees: usize,
}

/// A tree that waits for a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingTree {
    pub root: RunId,
    pub owner: Option<String>,
    pub agent: String,
    /// Whether it had a permit before: it waited for a person since.
    pub has_returned: bool,
}

/// What permits are given by.
#[derive(Clone, Debug, Default)]
pub struct PermitDemand {
    pub running: Vec<RunningTrees>,
    /// In their order. The first trees of each key and agent; of a session only its first run.
    pub waiting: Vec<WaitingTree>,
    /// The keys (empty: without keys) that were given a permit before; a greater number is later.
    pub turns: Vec<(String, u64)>,
}

/// Chooses the trees that are given a permit, in order.
pub type DecidePermits = Box<dyn Fn(&PermitDemand) -> Vec<RunId> + Send + Sync>;

/// How many trees have a permit or wait for one, of one key and one agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitLoad {
    pub running: RunningTrees,
    pub waiting: usize,
    /// Those of `waiting` that a node has: it would start them.
    pub waiting_at_nodes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermitChange {
    /// It waits for a person, and gives its permit back.
    Release,
    /// It waits for a permit again if it has none.
    Return,
    /// Nothing can drive it: it gives up its permit, and its place in its session.
    GiveUp,
    /// This node drains: it waits for its permit at another one, if one can drive it.
    HandOver,
}

/// The permits of all nodes together.
pub trait Permits: Send + Sync + 'static {
    fn permit_load(&self) -> BoxFuture<'_, Result<Vec<PermitLoad>, StoreError>>;

    /// Gives permits to trees of any node, alone among all nodes. Returns their number; `None` if another node gives permits at the
    /// moment.
    fn give_permits(&self, decide: DecidePermits)
    -> BoxFuture<'_, Result<Option<u64>, StoreError>>;

    /// Those of these trees of this node that have a permit.
    fn permitted_trees(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>>;

    /// Changes what a tree of this node has or waits for.
    fn change_permit(
        &self,
        root: RunId,
        change: PermitChange,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The runs of a session that have not ended, in their order, and the newest run that it has had.
    fn open_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<OpenSession, StoreError>>;
}

/// A session with what other nodes accepted in it.
#[derive(Clone, Debug, Default)]
pub struct OpenSession {
    pub unfinished: Vec<RunId>,
    pub last_run: Option<RunId>,
}

/// What a store has whose database several nodes share.
pub trait Cluster:
    TreeOwners + Permits + NodeMessages + RunRequests + Duties + SharedBudgets + DatabaseTime
{
}

pub trait DatabaseTime: Send + Sync + 'static {
    /// The time by the database's clock, since any fixed moment.
    fn database_time(&self) -> BoxFuture<'_, Result<Duration, StoreError>>;
}
