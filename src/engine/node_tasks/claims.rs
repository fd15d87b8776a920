//! Takes over trees that no node drives: their node is gone, or the one that has accepted them has not the labels that they need.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use crate::domain::agent::Agent;
use crate::domain::counted::counted;
use crate::domain::node::describe_labels;
use crate::domain::run::RunId;
use crate::engine::admission::placement;
use crate::engine::cluster::permits;
use crate::engine::cluster::retry_log::RetryLog;
use crate::engine::context::Engine;
use crate::engine::record::agent_snapshots;
use crate::engine::recovery;
use crate::engine::root_run;
use crate::store::StoreError;
use crate::store::cluster::Cluster;
use crate::store::node_messages::NodeMessage;
use crate::store::runs::UnfinishedRun;

/// Trees that are claimed at once: other nodes take the rest meanwhile.
const MAX_CLAIMED: usize = 16;
const CLAIM_INTERVAL: Duration = Duration::from_secs(1);
/// How many times as long until this node looks for trees that it owns and does not drive.
const ROUNDS_PER_CHECK: u32 = 4;

/// Takes over trees until the daemon drains.
pub async fn run(engine: Arc<Engine>) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let mut log = RetryLog::new("Taking over runs");
    let (mut undriven, mut given_up) = (HashSet::new(), HashSet::new());
    let jitter = Duration::from_millis(fastrand::u64(0..100));
    let mut ticks = tokio::time::interval(CLAIM_INTERVAL + jitter);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut round = 0_u32;
    loop {
        let is_check = tokio::select! {
            _ = ticks.tick() => {
                round = round.wrapping_add(1);
                round.is_multiple_of(ROUNDS_PER_CHECK)
            }
            () = engine.free_trees.notified() => false,
            () = engine.draining.cancelled() => return,
        };
        // A node without a working store resumes its own trees first.
        if engine.suspension.is_store_down() {
            continue;
        }
        let done = match is_check {
            true => take_undriven(&engine, cluster, &mut undriven, &mut given_up).await,
            false => claim(&engine, cluster).await.map(|claimed| {
                if claimed == MAX_CLAIMED {
                    // There may be more, for every node.
                    cluster.send(None, NodeMessage::FreeTrees);
                    engine.free_trees.notify_one();
                }
            }),
        };
        log.add(&done);
    }
}

/// Claims trees until there are none, and resumes them. Returns their number.
pub async fn claim_all(engine: &Arc<Engine>, cluster: &dyn Cluster) -> Result<usize, StoreError> {
    let mut count = 0;
    loop {
        match claim(engine, cluster).await? {
            0 => return Ok(count),
            claimed => count += claimed,
        }
    }
}

async fn claim(engine: &Arc<Engine>, cluster: &dyn Cluster) -> Result<usize, StoreError> {
    let mut roots = cluster.claim_trees(MAX_CLAIMED).await?;
    let count = roots.len();
    if count > 0 {
        let sleeping = recovery::sleeping::load(engine, Some(roots.clone())).await?;
        roots.retain(|root| !sleeping.contains(root));
        if !sleeping.is_empty() {
            announce(cluster, sleeping);
        }
        resume_trees(engine, roots, true).await?;
    }
    Ok(count)
}

/// Resumes trees that sleep, unless other nodes have taken them.
pub async fn wake(engine: &Arc<Engine>, roots: Vec<RunId>) -> Result<(), StoreError> {
    resume_trees(engine, roots, true).await.map(drop)
}

/// Leaves trees whose providers this node cannot send requests to, and removes their runs.
async fn leave_to_others(
    engine: &Engine,
    cluster: &dyn Cluster,
    unfinished: &mut Vec<UnfinishedRun>,
) -> Result<HashSet<RunId>, StoreError> {
    let mut agents: HashMap<RunId, Vec<Arc<Agent>>> = HashMap::new();
    let mut root_agents = Vec::new();
    for UnfinishedRun {
        run, resume_state, ..
    } in unfinished.iter()
    {
        let definition = resume_state.as_ref().map(|it| &it.definition);
        if let Some(agent) = definition.and_then(|json| agent_snapshots::parse(json)) {
            if run.id == run.root_id {
                root_agents.push((run.id, Arc::clone(&agent)));
            }
            agents.entry(run.root_id).or_default().push(agent);
        }
    }
    let mut left = HashSet::new();
    for (root, agent) in root_agents {
        let mut needed = agents.remove(&root).unwrap_or_default();
        let store = &**engine.journal.store();
        match engine.agent_pins.load(store, root, &agent).await? {
            Some(pinned) => needed.extend(pinned.agents.values().cloned()),
            None => {
                let current = engine.catalog.current();
                needed.extend(current.callable(&agent).into_values().cloned());
            }
        }
        if let Some(labels) = placement::elsewhere(engine, &agent, &needed) {
            tracing::info!(run.id = %root, run.root = %root, "{root} is left to a node with {}", describe_labels(&labels));
            cluster.hand_over_tree(root, labels).await?;
            left.insert(root);
        }
    }
    if !left.is_empty() {
        unfinished.retain(|it| !left.contains(&it.run.root_id));
        cluster.send(None, NodeMessage::FreeTrees);
    }
    Ok(left)
}

/// Resumes trees that belong to this node although nothing here drives them: the answer to a claim was lost, or the trees
/// could not be read after it. `before` has those that were found so the last time: one that was found once may just have ended.
/// What cannot be resumed even then is damaged: it is given up, so that others get its permit and its place in its session.
async fn take_undriven(
    engine: &Arc<Engine>,
    cluster: &dyn Cluster,
    before: &mut HashSet<RunId>,
    given_up: &mut HashSet<RunId>,
) -> Result<(), StoreError> {
    let mut undriven = cluster.own_trees().await?;
    undriven.retain(|root| {
        let is_driven = engine.active_runs.get(*root).is_some();
        !is_driven && !engine.sleeping_trees.contains(*root)
    });
    given_up.retain(|root| undriven.contains(root));
    undriven.retain(|root| !given_up.contains(root));
    let again = undriven.iter().filter(|root| before.contains(root));
    let again: Vec<RunId> = again.copied().collect();
    *before = undriven;
    for root in resume(engine, again).await? {
        permits::give_up(engine, cluster, root).await?;
        given_up.insert(root);
    }
    Ok(())
}

/// Resumes trees of this node, and returns those that cannot be resumed. Those that are suspended here are left to what resumes
/// them once their tasks have ended.
pub async fn resume(engine: &Arc<Engine>, roots: Vec<RunId>) -> Result<Vec<RunId>, StoreError> {
    resume_trees(engine, roots, false).await
}

async fn resume_trees(
    engine: &Arc<Engine>,
    mut roots: Vec<RunId>,
    may_leave: bool,
) -> Result<Vec<RunId>, StoreError> {
    let all = roots.clone();
    let are_asleep = roots
        .iter()
        .all(|root| engine.sleeping_trees.contains(*root));
    let _gate = engine.suspension.resume_lock.write().await;
    roots.retain(|root| engine.active_runs.get(*root).is_none());
    if roots.is_empty() {
        engine.sleeping_trees.remove(&all);
        return Ok(Vec::new());
    }
    let store = engine.journal.store();
    let owned = store.clear_failed(roots.clone()).await?;
    if may_leave {
        // Others may have taken them since this node claimed them.
        roots.retain(|root| owned.contains(root));
    }
    let mut unfinished = store.unfinished_trees(roots.clone()).await?;
    if let Some(cluster) = store.cluster().filter(|_| may_leave) {
        let left = leave_to_others(engine, cluster, &mut unfinished).await?;
        roots.retain(|root| !left.contains(root));
    }
    let recovered = recovery::recover_all(engine, unfinished).await;
    let recovered = recovered.inspect_err(|_| {
        // Another node may take the trees.
        for root in &roots {
            engine.orphans.take_tree(*root);
        }
    })?;
    let resumed: HashSet<RunId> = recovered.iter().map(|root| root.run.id).collect();
    roots.retain(|root| !resumed.contains(root));
    let kept = engine.sleeping_trees.take_session_guards(&all).into_iter();
    let kept = kept.map(|(root, guard)| (root, (None, Some(guard))));
    root_run::resume_all(engine, recovered, kept.collect());
    engine.sleeping_trees.remove(&all);
    if let Some(cluster) = store.cluster().filter(|_| !are_asleep) {
        announce(cluster, resumed);
    }
    engine.suspension.changed.notify_waiters();
    Ok(roots)
}

/// Tells the other nodes which trees this one has, and performs what was requested of them and the last owner has not performed.
fn announce(cluster: &dyn Cluster, resumed: HashSet<RunId>) {
    tracing::info!("Taking over {}", counted(resumed.len(), "root run"));
    if !resumed.is_empty() {
        let taken = resumed.into_iter().collect();
        cluster.send(None, NodeMessage::Taken(cluster.node(), taken));
    }
    cluster.send(Some(cluster.node()), NodeMessage::Requests);
}
