//! This process among those that use the database: how it joins, shows that it is alive, watches the others, and leaves. No
//! clocks are compared.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;
use tokio_postgres::{Client, Error};
use tracing::{error, info, warn};

use crate::config::cluster::Cluster;
use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::cluster::OtherNode;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::error::DatabaseName;

const BEAT_INTERVAL: Duration = Duration::from_secs(2);
/// A node is dead if its beat was the same for this time.
const DEAD_AFTER: Duration = Duration::from_secs(8);
const OBSERVE_INTERVAL: Duration = Duration::from_millis(500);
/// After a longer gap between two observations nothing is known of the time between them.
const MAX_OBSERVE_GAP: Duration = Duration::from_secs(4);

/// A node whose last confirmed beat is older begins nothing: others may take over its trees soon.
const CUT_OFF_AFTER: Duration = Duration::from_secs(7);

/// What the rest of this process may know of its node.
#[derive(Clone)]
pub struct CurrentNode {
    shared: Arc<Mutex<SharedNode>>,
    /// Notified when the process has joined again: it gets messages under another id.
    pub joined_again: Arc<Notify>,
}

struct SharedNode {
    /// It changes when the process joins again.
    id: NodeId,
    /// When the last beat was sent that is confirmed.
    last_beat: Duration,
    /// The digest of its agents, which a beat writes.
    agents: Option<String>,
    /// The other nodes, when they were read last.
    others: Vec<OtherNode>,
}

impl CurrentNode {
    pub fn new(node: NodeId, others: Vec<OtherNode>) -> Self {
        let shared = SharedNode {
            id: node,
            last_beat: uptime(),
            agents: None,
            others,
        };
        Self {
            shared: Arc::new(Mutex::new(shared)),
            joined_again: Arc::default(),
        }
    }

    pub fn get(&self) -> NodeId {
        self.lock().id
    }

    pub fn set(&self, node: NodeId) {
        let mut current = self.lock();
        (current.id, current.last_beat) = (node, uptime());
        drop(current);
        self.joined_again.notify_one();
    }

    pub fn is_alone(&self) -> bool {
        self.lock().others.is_empty()
    }

    pub fn others(&self) -> Vec<OtherNode> {
        self.lock().others.clone()
    }

    fn set_others(&self, others: Vec<OtherNode>) {
        self.lock().others = others;
    }

    fn agents(&self) -> Option<String> {
        self.lock().agents.clone()
    }

    pub fn set_agents(&self, digest: String) {
        self.lock().agents = Some(digest);
    }

    /// Whether no beat that was sent within the last seconds is confirmed.
    pub fn is_cut_off(&self) -> bool {
        self.beat_age() >= CUT_OFF_AFTER
    }

    /// How long ago the last beat was sent that is confirmed.
    fn beat_age(&self) -> Duration {
        uptime().saturating_sub(self.lock().last_beat)
    }

    /// Records that the database has a beat of this node that was sent at this time.
    fn confirm_beat(&self, node: NodeId, sent: Duration) {
        let mut current = self.lock();
        if current.id == node {
            current.last_beat = sent;
        }
    }

    fn lock(&self) -> MutexGuard<'_, SharedNode> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time since the machine started, which goes on while it is suspended.
fn uptime() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::try_from(time).unwrap_or_default()
}

/// What the beats and the writer tell each other.
pub struct NodeStatus {
    pub node: CurrentNode,
    /// Whether the last transaction could not be committed for the database's sake: then there is no beat.
    pub is_cut_off: Cell<bool>,
    /// Whether other nodes have taken over the trees of this one. It writes nothing until it has joined again.
    pub is_replaced: Cell<bool>,
    pub replaced: Notify,
}

impl NodeStatus {
    pub fn new(node: CurrentNode) -> Self {
        Self {
            node,
            is_cut_off: Cell::default(),
            is_replaced: Cell::default(),
            replaced: Notify::new(),
        }
    }

    pub fn mark_replaced(&self) {
        if !self.is_replaced.replace(true) {
            error!(
                "Other nodes have taken over the runs of this one, which showed no sign of life, or a process that started under its name \
                 has, by cluster.unique_names: they stop here, and this node joins again"
            );
            self.replaced.notify_one();
        }
    }
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeRow {
    node: NodeId,
    /// The configured name.
    name: String,
    beat: i64,
    agents: Option<String>,
    labels: Vec<String>,
}

impl From<NodeRow> for OtherNode {
    fn from(row: NodeRow) -> Self {
        Self {
            name: row.name,
            agents: row.agents,
            labels: row.labels,
        }
    }
}

/// The last beat of each other node, and since when it was the same.
#[derive(Default)]
struct Observed {
    beats: HashMap<NodeId, (i64, Instant)>,
    last_read: Option<Instant>,
}

impl Observed {
    /// Adds what was just read; returns the nodes that are dead. If this node cannot beat, perhaps nobody can: then no other is dead.
    fn add(&mut self, rows: Vec<NodeRow>, is_beating: bool, now: Instant) -> Vec<NodeRow> {
        let is_gap = self
            .last_read
            .is_some_and(|last| now.duration_since(last) > MAX_OBSERVE_GAP);
        if is_gap || !is_beating {
            self.beats.clear();
        }
        self.last_read = Some(now);
        self.beats
            .retain(|node, _| rows.iter().any(|row| row.node == *node));
        let is_dead = |row: &NodeRow| {
            let seen = self.beats.entry(row.node).or_insert((row.beat, now));
            if seen.0 != row.beat {
                *seen = (row.beat, now);
            }
            now.duration_since(seen.1) >= DEAD_AFTER
        };
        rows.into_iter().filter(is_dead).collect()
    }
}

/// Joins at the start, beside the nodes that there are. A node of the same name is removed if no two have the same.
pub async fn join(client: &mut Client, cluster: &Cluster) -> Result<NodeId, Error> {
    join_beside(client, cluster, cluster.unique_names).await
}

/// Joins after other nodes have removed this one. One of the same name has been started since then, and stays.
pub async fn join_again(client: &mut Client, cluster: &Cluster) -> Result<NodeId, Error> {
    join_beside(client, cluster, false).await
}

async fn join_beside(
    client: &mut Client,
    cluster: &Cluster,
    replaces_equal_name: bool,
) -> Result<NodeId, Error> {
    let transaction = client.transaction().await?;
    // Nobody joins while the whole database is copied.
    transaction
        .query("SELECT version FROM axed_version FOR SHARE", &[])
        .await?;
    if replaces_equal_name {
        transaction
            .execute("DELETE FROM nodes WHERE id = $1", &[&cluster.node])
            .await?;
    }
    let node = insert(&transaction, cluster).await?;
    transaction.commit().await?;
    Ok(node)
}

async fn insert(
    transaction: &tokio_postgres::Transaction<'_>,
    cluster: &Cluster,
) -> Result<NodeId, Error> {
    let node = NodeId(RunId::new().0);
    transaction
        .execute(
            "INSERT INTO nodes (incarnation, id, beat, version, labels) VALUES ($1, $2, 0, $3, $4)",
            &[
                &node.0,
                &cluster.node,
                &env!("CARGO_PKG_VERSION"),
                &cluster.labels,
            ],
        )
        .await?;
    Ok(node)
}

/// Joins as the only node, or fails. Waits until those that may be dead have shown no beat for long enough.
pub async fn join_alone(
    client: &mut Client,
    name: &DatabaseName,
    own_name: &str,
) -> Result<NodeId, StoreError> {
    let error = |error: Error| name.error(&error);
    let mut observed = Observed::default();
    let mut first: Option<Vec<NodeRow>> = None;
    loop {
        let rows = read_nodes(client).await.map_err(error)?;
        if let Some(first) = &first
            && let Some(alive) = rows.iter().find(|row| !first.contains(row))
        {
            return Err(in_use(name, alive));
        }
        if first.is_none() && !rows.is_empty() {
            info!(
                "{name} was in use by the node {}; waiting for a sign of it",
                rows[0].name
            );
        }
        first.get_or_insert_with(|| rows.clone());
        let count = rows.len();
        let dead = observed.add(rows, true, Instant::now());
        if dead.len() == count
            && let Some(node) = replace_all(client, &dead, own_name).await.map_err(error)?
        {
            return Ok(node);
        }
        tokio::time::sleep(OBSERVE_INTERVAL).await;
    }
}

fn in_use(name: &DatabaseName, node: &NodeRow) -> StoreError {
    StoreError::Backend(format!(
        "{name} is in use by the axed of the node {}; stop it, or choose another database with data.url",
        node.name
    ))
}

/// Removes dead nodes and joins. `None` if another one is there after all.
async fn replace_all(
    client: &mut Client,
    dead: &[NodeRow],
    own_name: &str,
) -> Result<Option<NodeId>, Error> {
    let transaction = client.transaction().await?;
    transaction
        .query("SELECT version FROM axed_version FOR UPDATE", &[])
        .await?;
    for row in dead {
        transaction
            .execute(REMOVE_DEAD, &[&row.node.0, &row.beat])
            .await?;
    }
    let others = transaction
        .query("SELECT 1 FROM nodes LIMIT 1", &[])
        .await?;
    if !others.is_empty() {
        return Ok(None);
    }
    let cluster = Cluster {
        node: own_name.to_owned(),
        ..Cluster::default()
    };
    let node = insert(&transaction, &cluster).await?;
    transaction.commit().await?;
    Ok(Some(node))
}

const REMOVE_DEAD: &str = "DELETE FROM nodes WHERE incarnation = $1 AND beat = $2";

/// The nodes beside this one. Some may be dead.
pub async fn read_others(client: &Client, node: NodeId) -> Result<Vec<OtherNode>, Error> {
    let mut rows = read_nodes(client).await?;
    rows.retain(|row| row.node != node);
    Ok(rows.into_iter().map(OtherNode::from).collect())
}

async fn read_nodes(client: &Client) -> Result<Vec<NodeRow>, Error> {
    let found = client
        .query(
            "SELECT incarnation, id, beat, agents, labels FROM nodes",
            &[],
        )
        .await?;
    let row = |row: &tokio_postgres::Row| {
        Ok(NodeRow {
            node: NodeId(row.try_get("incarnation")?),
            name: row.try_get("id")?,
            beat: row.try_get("beat")?,
            agents: row.try_get("agents")?,
            labels: row.try_get("labels")?,
        })
    };
    found.iter().map(row).collect()
}

/// Raises the beat for ever, while the writer can commit, on a connection of its own.
pub async fn beat(connector: &Connector, status: &NodeStatus) {
    let mut client: Option<Client> = None;
    let mut is_failing = false;
    let mut ticks = tokio::time::interval(BEAT_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if status.is_cut_off.get() || status.is_replaced.get() {
            continue;
        }
        let (node, agents, sent) = (status.node.get(), status.node.agents(), uptime());
        let beaten =
            tokio::time::timeout(DEAD_AFTER, raise(connector, &mut client, node, agents)).await;
        let error = match connector.name.in_time(beaten) {
            Ok(is_raised) => {
                if std::mem::take(&mut is_failing) {
                    info!("{}: this node shows again that it is alive", connector.name);
                }
                if is_raised {
                    status.node.confirm_beat(node, sent);
                } else if node == status.node.get() {
                    status.mark_replaced();
                }
                continue;
            }
            Err(error) => error,
        };
        client = None;
        if !std::mem::replace(&mut is_failing, true) {
            warn!(error = %error, "This node could not show that it is alive: {error}");
        }
    }
}

/// Returns false if the node was removed.
async fn raise(
    connector: &Connector,
    client: &mut Option<Client>,
    node: NodeId,
    agents: Option<String>,
) -> Result<bool, Error> {
    let beaten = connected(connector, client)
        .await?
        .execute(
            "UPDATE nodes SET beat = beat + 1, agents = $2 WHERE incarnation = $1",
            &[&node.0, &agents],
        )
        .await?;
    Ok(beaten > 0)
}

async fn connected<'c>(
    connector: &Connector,
    client: &'c mut Option<Client>,
) -> Result<&'c Client, Error> {
    if client.as_ref().is_some_and(Client::is_closed) {
        *client = None;
    }
    match client {
        Some(client) => Ok(client),
        None => Ok(client.insert(connector.connect().await?)),
    }
}

/// Watches the other nodes for ever, on a connection of its own, and removes those that are dead: their trees are free then.
pub async fn watch(connector: &Connector, status: &NodeStatus) {
    let mut client: Option<Client> = None;
    let mut observed = Observed::default();
    loop {
        tokio::time::sleep(OBSERVE_INTERVAL).await;
        let watched = async {
            let client = connected(connector, &mut client).await?;
            let mut rows = read_nodes(client).await?;
            rows.retain(|row| row.node != status.node.get());
            let is_beating = status.node.beat_age() < MAX_OBSERVE_GAP;
            let dead = observed.add(rows.clone(), is_beating, Instant::now());
            rows.retain(|row| !dead.contains(row));
            status
                .node
                .set_others(rows.into_iter().map(OtherNode::from).collect());
            for dead in dead {
                let removed = client
                    .execute(REMOVE_DEAD, &[&dead.node.0, &dead.beat])
                    .await?;
                if removed > 0 {
                    warn!(
                        "The node {} has shown no sign of life for {} s: its runs go on elsewhere",
                        dead.name,
                        DEAD_AFTER.as_secs()
                    );
                }
            }
            Ok::<_, Error>(())
        };
        // Without the database nothing is known of the others: the gap says so.
        if !matches!(tokio::time::timeout(DEAD_AFTER, watched).await, Ok(Ok(()))) {
            client = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_dead_only_for_those_that_beat_themselves() {
        let row = |beat| NodeRow {
            node: NodeId(uuid::Uuid::nil()),
            name: "other".to_owned(),
            beat,
            agents: None,
            labels: Vec::new(),
        };
        let start = Instant::now();
        let mut observed = Observed::default();
        let mut dead_at = |half_seconds, beat, is_beating| {
            let now = start + OBSERVE_INTERVAL * half_seconds;
            !observed.add(vec![row(beat)], is_beating, now).is_empty()
        };
        let mut first_dead = |mut range: std::ops::Range<u32>, beat, is_beating| {
            range.find(|half_seconds| dead_at(*half_seconds, beat, is_beating))
        };
        assert_eq!(first_dead(0..40, 1, false), None);
        assert_eq!(first_dead(40..50, 1, true), None);
        assert_eq!(first_dead(50..100, 2, true), Some(66));
        // Nothing was read for longer than two beats.
        assert_eq!(first_dead(90..106, 2, true), None);
        assert_eq!(first_dead(106..107, 2, true), Some(106));
    }
}
