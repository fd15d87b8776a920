//! This process among those that use the database: how it joins, shows that it is alive, and leaves. One uses the database at a
//! time; another one takes over when it has seen no beat of it for a while. No clocks are compared.

use std::cell::Cell;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_postgres::{Client, Error};
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::config::cluster::Cluster;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::error::DatabaseName;

const BEAT_INTERVAL: Duration = Duration::from_secs(2);
/// A node is dead if its beat was the same for this time.
const DEAD_AFTER: Duration = Duration::from_secs(8);
const OBSERVE_INTERVAL: Duration = Duration::from_millis(250);
/// After a longer gap between two observations nothing is known of the time between them.
const MAX_OBSERVE_GAP: Duration = Duration::from_secs(4);

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeRow {
    incarnation: Uuid,
    id: String,
    beat: i64,
}

/// What the beats and the writer tell each other.
#[derive(Default)]
pub struct NodeStatus {
    /// Whether the last transaction could not be committed for the database's sake: then there is no beat.
    pub is_cut_off: Cell<bool>,
    /// Whether another process has taken over. This one writes nothing any more.
    pub is_replaced: Cell<bool>,
    pub replaced: Notify,
}

impl NodeStatus {
    pub fn mark_replaced(&self) {
        if !self.is_replaced.replace(true) {
            error!(
                "Another axed has taken over the database: all runs stop here; stop it, then restart this one"
            );
            self.replaced.notify_one();
        }
    }
}

/// Joins and takes all trees, if no other node is alive; returns this node's identity. Waits until one that may be dead has shown no beat for long enough.
pub async fn join(
    client: &mut Client,
    name: &DatabaseName,
    cluster: &Cluster,
) -> Result<Uuid, StoreError> {
    let mut observed: Option<(NodeRow, Instant)> = None;
    let mut last_read = Instant::now();
    loop {
        let found = read_node(client)
            .await
            .map_err(|error| name.error(&error))?;
        let is_gap = last_read.elapsed() > MAX_OBSERVE_GAP;
        last_read = Instant::now();
        let is_dead = match (&found, &observed) {
            (None, _) => true,
            (Some(node), _) if cluster.unique_names && node.id == cluster.node => true,
            (Some(node), Some((seen, _))) if node != seen => return Err(in_use(name, node)),
            (Some(_), Some((_, since))) if !is_gap => since.elapsed() >= DEAD_AFTER,
            (Some(node), _) => {
                if observed.is_none() {
                    info!(
                        "{name} was in use by the node {}; waiting for a sign of it",
                        node.id
                    );
                }
                observed = Some((node.clone(), Instant::now()));
                false
            }
        };
        if is_dead
            && let Some(joined) = replace(client, found.as_ref(), cluster)
                .await
                .map_err(|error| name.error(&error))?
        {
            return Ok(joined);
        }
        tokio::time::sleep(OBSERVE_INTERVAL).await;
    }
}

fn in_use(name: &DatabaseName, node: &NodeRow) -> StoreError {
    StoreError::Backend(format!(
        "{name} is in use by the axed of the node {}; stop it, or choose another database with data.url",
        node.id
    ))
}

async fn read_node(client: &Client) -> Result<Option<NodeRow>, Error> {
    let found = client
        .query_opt("SELECT incarnation, id, beat FROM nodes LIMIT 1", &[])
        .await?;
    let Some(row) = found else { return Ok(None) };
    Ok(Some(NodeRow {
        incarnation: row.try_get("incarnation")?,
        id: row.try_get("id")?,
        beat: row.try_get("beat")?,
    }))
}

/// Removes the dead node, inserts this one, and takes all trees. `None` if the other node is alive after all, or a third one
/// was faster.
async fn replace(
    client: &mut Client,
    dead: Option<&NodeRow>,
    cluster: &Cluster,
) -> Result<Option<Uuid>, Error> {
    let transaction = client.transaction().await?;
    // Processes that start at once do this one after the other.
    transaction
        .query("SELECT version FROM axed_schema FOR UPDATE", &[])
        .await?;
    if let Some(dead) = dead {
        transaction
            .execute(
                "DELETE FROM nodes WHERE incarnation = $1 AND (beat = $2 OR $3)",
                &[&dead.incarnation, &dead.beat, &cluster.unique_names],
            )
            .await?;
    }
    let others = transaction
        .query("SELECT 1 FROM nodes LIMIT 1", &[])
        .await?;
    if !others.is_empty() {
        return Ok(None);
    }
    let incarnation = RunId::new().0;
    transaction
        .execute(
            "INSERT INTO nodes (incarnation, id, beat, version) VALUES ($1, $2, 0, $3)",
            &[&incarnation, &cluster.node, &env!("CARGO_PKG_VERSION")],
        )
        .await?;
    transaction
        .execute(
            "UPDATE trees SET node = $1, epoch = epoch + 1",
            &[&incarnation],
        )
        .await?;
    transaction.commit().await?;
    Ok(Some(incarnation))
}

/// Raises the beat for ever, while the writer can commit, on a connection of its own.
pub async fn beat(connector: &Connector, incarnation: Uuid, status: &NodeStatus) {
    let mut client: Option<Client> = None;
    let mut ticks = tokio::time::interval(BEAT_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if status.is_cut_off.get() || status.is_replaced.get() {
            continue;
        }
        let beaten = tokio::time::timeout(DEAD_AFTER, raise(connector, &mut client, incarnation));
        match beaten.await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => status.mark_replaced(),
            Ok(Err(error)) => {
                client = None;
                warn!(error = %error, "{}: this node could not show that it is alive: {error}", connector.name);
            }
            Err(_) => {
                client = None;
                warn!(
                    "{}: this node could not show that it is alive in time",
                    connector.name
                );
            }
        }
    }
}

/// Returns false if the node was removed.
async fn raise(
    connector: &Connector,
    client: &mut Option<Client>,
    incarnation: Uuid,
) -> Result<bool, Error> {
    let client = match client {
        Some(client) if !client.is_closed() => client,
        _ => client.insert(connector.connect().await?),
    };
    let beaten = client
        .execute(
            "UPDATE nodes SET beat = beat + 1 WHERE incarnation = $1",
            &[&incarnation],
        )
        .await?;
    Ok(beaten > 0)
}
