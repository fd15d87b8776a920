//! The contract for owners of trees and for their permits, by the table of trees.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::domain::node::NodeId;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::cluster::{
    Cluster, DecidePermits, OpenSession, OtherNode, PermitChange, PermitLoad, Permits,
    RunningTrees, TreeOwner, TreeOwners, TreePosition, UnservedTree,
};
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::postgres::run_changes::HELD;
use crate::store::postgres::{PostgresStore, permits};
use crate::store::reader::ReadMode;
use crate::store::sql::row::Row;
use crate::store::sql::value::{free_text, params};
use crate::store::write_queue::job::Task;

/// A node without a row owns nothing any more, and none owns a tree whose labels it has not.
const POSITIONS: &str = "SELECT t.root, t.last_event, n.incarnation AS node FROM trees t LEFT JOIN nodes n \
     ON n.incarnation = t.node AND (t.labels IS NULL OR t.labels <@ n.labels) WHERE t.root = ANY(:roots)";
const OWN_TREES: &str = "SELECT t.root FROM trees t JOIN nodes n ON n.incarnation = t.node \
     WHERE t.node = :node AND (t.labels IS NULL OR t.labels <@ n.labels)";
const UNSERVED: &str = "SELECT root, labels, is_overdue FROM (SELECT t.root, t.labels, t.node, r.status, r.warnings, \
     coalesce(extract(epoch FROM now() - t.unserved_at) >= :max_wait::bigint, false) AS is_overdue \
     FROM trees t JOIN runs r ON r.id = t.root WHERE t.labels IS NOT NULL \
     AND NOT EXISTS (SELECT 1 FROM nodes n WHERE t.labels <@ n.labels)) u \
     WHERE is_overdue OR node IS DISTINCT FROM :node OR status = 'cancelling' \
     OR coalesce(warnings, '') NOT LIKE '%\"no_node\"%' ORDER BY root LIMIT :max";
const ABANDONED: &str = "SELECT DISTINCT r.root FROM runs r JOIN runs root ON root.id = r.root WHERE r.finished_at IS NULL \
     AND root.finished_at < extract(epoch FROM now() - interval '1 minute') * 1000 AND r.root <> ALL(:except::uuid[]) \
     AND NOT EXISTS (SELECT 1 FROM trees t WHERE t.root = r.root) \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) LIMIT :max";
const LOAD: &str = "SELECT owner, agent, count(*) FILTER (WHERE permit = 2) AS running, \
     count(*) FILTER (WHERE permit = 1) AS waiting, \
     count(*) FILTER (WHERE permit = 1 AND node IS NOT NULL AND unserved_at IS NULL) AS at_nodes \
     FROM trees GROUP BY owner, agent";
const PERMITTED: &str =
    "SELECT root FROM trees WHERE root = ANY(:roots) AND node = :node AND permit = :held";
const OPEN_SESSION: &str = "SELECT s.last_run, t.root FROM sessions s LEFT JOIN trees t \
     ON t.session = s.name AND coalesce(t.owner, '') = s.owner WHERE s.owner = :owner AND s.name = :name ORDER BY t.root";

impl TreeOwners for PostgresStore {
    fn node(&self) -> NodeId {
        self.node.get()
    }

    fn is_cut_off(&self) -> bool {
        self.node.is_cut_off()
    }

    fn is_alone(&self) -> bool {
        self.node.is_alone()
    }

    fn other_nodes(&self) -> Vec<OtherNode> {
        self.node.others()
    }

    fn set_agents(&self, digest: String) {
        self.node.set_agents(digest);
    }

    fn tree_owner(&self, root: RunId) -> BoxFuture<'_, Result<TreeOwner, StoreError>> {
        Box::pin(async move {
            let mut positions = self.tree_positions(vec![root]).await?;
            let position = positions.remove(&root);
            Ok(position.map_or(TreeOwner::Ended, |position| position.owner))
        })
    }

    fn tree_positions(
        &self,
        roots: Vec<RunId>,
    ) -> BoxFuture<'_, Result<HashMap<RunId, TreePosition>, StoreError>> {
        let this_node = self.node();
        let roots: Vec<Uuid> = roots.into_iter().map(|root| root.0).collect();
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let position = |row: &Row<'_>| {
                    let position = TreePosition {
                        owner: owner(row, this_node)?,
                        last_event: row.get("last_event")?,
                    };
                    Ok((row.get("root")?, position))
                };
                let found = db
                    .query(POSITIONS, params! {":roots": roots}, position)
                    .await?;
                Ok(found.into_iter().collect())
            })
        })
    }

    fn own_trees(&self) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>> {
        let node = self.node();
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":node": node.0};
                let found = db.query(OWN_TREES, params, |row| row.get("root")).await?;
                Ok(found.into_iter().collect())
            })
        })
    }

    fn claim_trees(&self, max: usize) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        let task = move |claimed| Task::ClaimTrees(max, claimed);
        Box::pin(self.queue.roots(task))
    }

    fn unserved_trees(
        &self,
        max_wait: Option<Duration>,
        max: usize,
    ) -> BoxFuture<'_, Result<Vec<UnservedTree>, StoreError>> {
        let node = self.node();
        let max_wait = max_wait.map(|wait| signed(wait.as_secs()));
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params =
                    params! {":node": node.0, ":max_wait": max_wait, ":max": signed(max as u64)};
                let tree = |row: &Row<'_>| {
                    Ok(UnservedTree {
                        root: row.get("root")?,
                        labels: row.list("labels")?,
                        is_overdue: row.get("is_overdue")?,
                    })
                };
                db.query(UNSERVED, params, tree).await
            })
        })
    }

    fn abandoned_trees(
        &self,
        except: Vec<RunId>,
        max: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        let except: Vec<Uuid> = except.into_iter().map(|root| root.0).collect();
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":except": except, ":max": signed(max as u64)};
                db.query(ABANDONED, params, |row| row.get("root")).await
            })
        })
    }

    fn claim_unserved(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::ClaimUnserved(root))
    }

    fn hand_over_tree(
        &self,
        root: RunId,
        labels: Vec<String>,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::HandOverTree(root, labels))
    }
}

impl Permits for PostgresStore {
    fn permit_load(&self) -> BoxFuture<'_, Result<Vec<PermitLoad>, StoreError>> {
        let load = |row: &Row<'_>| {
            Ok(PermitLoad {
                running: RunningTrees {
                    owner: row.get("owner")?,
                    agent: row.get::<Option<String>>("agent")?.unwrap_or_default(),
                    trees: row.get("running")?,
                },
                waiting: row.get("waiting")?,
                waiting_at_nodes: row.get("at_nodes")?,
            })
        };
        self.read(ReadMode::Statement, move |db| {
            Box::pin(db.query(LOAD, &[], load))
        })
    }

    fn give_permits(
        &self,
        decide: DecidePermits,
    ) -> BoxFuture<'_, Result<Option<u64>, StoreError>> {
        Box::pin(async move {
            let given = self.queue.request(Task::GivePermits(decide)).await?;
            Ok((given != permits::BUSY).then_some(given))
        })
    }

    fn permitted_trees(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        let node = self.node();
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let roots: Vec<Uuid> = roots.into_iter().map(|root| root.0).collect();
                let params = params! {":roots": roots, ":node": node.0, ":held": HELD};
                db.query(PERMITTED, params, |row| row.get("root")).await
            })
        })
    }

    fn change_permit(
        &self,
        root: RunId,
        change: PermitChange,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        self.queue.execute(Task::ChangePermit(root, change))
    }

    fn open_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<OpenSession, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let owner = owner.unwrap_or_default();
                let params = params! {":owner": &owner, ":name": free_text(&name)};
                let mut session = OpenSession::default();
                let add = |row: &Row<'_>| {
                    session.last_run = Some(row.get("last_run")?);
                    session.unfinished.extend(row.get::<Option<RunId>>("root")?);
                    Ok(())
                };
                db.query(OPEN_SESSION, params, add).await?;
                Ok(session)
            })
        })
    }
}

/// The owner of a tree that has not ended, by the column `node`.
fn owner(row: &Row<'_>, this_node: NodeId) -> Result<TreeOwner, StoreError> {
    let owner: Option<Uuid> = row.get("node")?;
    Ok(match owner.map(NodeId) {
        None => TreeOwner::Nobody,
        Some(node) if node == this_node => TreeOwner::ThisNode,
        Some(node) => TreeOwner::Node(node),
    })
}

impl Cluster for PostgresStore {}
