//! Brings unfinished runs back to life where their record ends, after a restart or once a store that failed works again:
//! no run is ever left `running` without an owner. Knows no loop; the runner drives what is revived.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::domain::run::{Run, RunId, Scope, Status, now};
use crate::domain::webhook::Webhook;
use crate::engine::ad_hoc;
use crate::engine::budget::Budgets;
use crate::engine::definitions;
use crate::engine::endings;
use crate::engine::live::{Deadline, LiveRun, Recorded, Tree, TreeSuspension};
use crate::engine::parts::Engine;
use crate::engine::provider_keys::ProviderKeys;
use crate::engine::quotas::Quotas;
use crate::engine::record;
use crate::engine::root_slot::RootSlot;
use crate::engine::spans::Trace;
use crate::engine::workdir::RunWorkdir;
use crate::store::{StoreError, Unfinished};

/// Child runs that an earlier process left unfinished, until their parents come to the calls that made them.
#[derive(Default)]
pub struct Left {
    children: Mutex<HashMap<RunId, Unfinished>>,
}

impl Left {
    /// Brings a child back to life below `parent`, whose accounts `callers` are drawn on too, once, and lists it among the runs at work: a cancel finds it either
    /// here or there.
    pub fn hand_over(
        &self,
        engine: &Engine,
        child: RunId,
        parent: &Arc<LiveRun>,
        callers: &[usize],
    ) -> Option<(Arc<LiveRun>, Run)> {
        let mut children = self.lock();
        let found = children.remove(&child)?;
        let live = revive(engine, &found, Some(parent), callers)?;
        engine.live.add(&live);
        engine.suspension.changed.notify_waiters();
        Some((live, found.run))
    }

    /// Whether a child waits here.
    pub fn contains(&self, child: RunId) -> bool {
        self.lock().contains_key(&child)
    }

    /// Has a child begin cancelled when its turn comes, as the record says; false if it is not here.
    pub fn cancel(&self, child: RunId, reason: &str) -> bool {
        let mut children = self.lock();
        let Some(found) = children.get_mut(&child) else {
            return false;
        };
        found.run.status = Status::Cancelling;
        found.run.cancel_reason = Some(reason.to_owned());
        true
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Unfinished>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fails what no call came back to of a tree whose root has ended, deepest first: a child that could not be revived may
/// have left children of its own.
pub async fn sweep(engine: &Engine, root: RunId) -> Result<(), StoreError> {
    let mut left = {
        let mut children = engine.left.lock();
        let of_root: Vec<RunId> = children
            .values()
            .filter(|found| found.run.root_id == root)
            .map(|found| found.run.id)
            .collect();
        of_root
            .into_iter()
            .filter_map(|id| children.remove(&id))
            .collect::<Vec<_>>()
    };
    left.sort_by_key(|found| (found.run.depth, found.run.id));
    engine.suspension.changed.notify_waiters();
    for found in left.into_iter().rev() {
        interrupt(engine, found.run.id, &[]).await?;
    }
    Ok(())
}

/// A root run that can go on.
pub struct Revived {
    /// The run at work.
    pub live: Arc<LiveRun>,
    /// Its record.
    pub run: Arc<Run>,
    /// Whole seconds that it may take from its start, where it still waits for a slot.
    pub timeout: u64,
}

/// The root runs of `unfinished` (parents before their children) that can go on, in its order; their children wait in
/// `engine.left`. What cannot go on is failed as `interrupted`, children before their parents.
pub async fn revive_all(
    engine: &Engine,
    unfinished: Vec<Unfinished>,
) -> Result<Vec<Revived>, StoreError> {
    let mut revived = Vec::new();
    let mut alive = HashSet::new();
    let mut orphans = Vec::new();
    for found in unfinished {
        match found.run.parent_id {
            None => match revive(engine, &found, None, &[]) {
                Some(live) => {
                    alive.insert(found.run.id);
                    let timeout = found
                        .continuation
                        .map_or(0, |continuation| continuation.timeout);
                    revived.push(Revived {
                        live,
                        run: Arc::new(found.run),
                        timeout,
                    });
                }
                None => orphans.push(found),
            },
            Some(parent) if alive.contains(&parent) => {
                alive.insert(found.run.id);
                engine.left.lock().insert(found.run.id, found);
            }
            Some(_) => orphans.push(found),
        }
    }
    for orphan in orphans.into_iter().rev() {
        let webhooks = orphan.continuation.as_ref();
        let webhooks = webhooks.map_or(&[][..], |continuation| &continuation.webhooks);
        interrupt(engine, orphan.run.id, webhooks).await?;
    }
    Ok(revived)
}

/// Fails a run that cannot go on.
pub async fn interrupt(
    engine: &Engine,
    id: RunId,
    webhooks: &[Arc<Webhook>],
) -> Result<(), StoreError> {
    let run = match engine.journal.store().run(id).await {
        Ok(Some(run)) => run,
        Ok(None) => return Ok(()),
        // Its end cannot be recorded either; it delays no other run.
        Err(error @ StoreError::Damaged(_)) => {
            tracing::error!(run.id = %id, error = %error, "{id} cannot be failed as interrupted: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let message = format!(
        "the daemon stopped while this run was {}",
        run.status.as_str()
    );
    engine
        .journal
        .close_orphan(&run, webhooks, endings::interrupted(&message))
        .await?;
    engine.metrics.run_ended(&run.agent, Status::Failed, None);
    tracing::warn!(
        run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
        "{} was {} when the daemon stopped and cannot go on; it is failed as interrupted", run.id, run.status.as_str()
    );
    Ok(())
}

/// The run as it stood: its definition, place, accounts, meter, deadline and stop; none where the record lacks what
/// that takes. `callers` are the accounts that it draws on beside its own.
pub fn revive(
    engine: &Engine,
    found: &Unfinished,
    parent: Option<&Arc<LiveRun>>,
    callers: &[usize],
) -> Option<Arc<LiveRun>> {
    let Unfinished { run, continuation } = found;
    let continuation = continuation.as_ref()?;
    let agent = definitions::read(&continuation.definition)?;
    let scope = match parent {
        None => Scope::root(run.id, agent.delegation.max_depth),
        Some(parent) => {
            let scope = &parent.scope;
            let limit = match agent.ad_hoc {
                Some(_) => scope.ad_hoc_limit(ad_hoc::settings(&parent.agent).max_depth),
                None => scope.max_depth,
            };
            scope.child(run.id, agent.delegation.max_depth, limit)?
        }
    };
    let tree = match parent {
        Some(parent) => Arc::clone(&parent.tree),
        None => Arc::new(Tree {
            budgets: Budgets::default(),
            slot: RootSlot::default(),
            stream: continuation.stream,
            owner: run.owner.clone(),
            quotas: Quotas::default(),
            is_revived: true,
            suspension: TreeSuspension::default(),
            webhooks: continuation.webhooks.clone(),
            trace: Trace::of(engine.traces.as_ref(), None, run.id),
            runs: AtomicU64::new(run.tree.runs),
            provider_keys: ProviderKeys::recorded(&agent.given_keys),
        }),
    };
    let accounts = tree.budgets.open(&agent.budget, callers, &run.tree);
    let recorded = Recorded {
        definition: Arc::clone(&continuation.definition),
        workdir: RunWorkdir::known(continuation.workdir),
        own: run.usage,
        below: run.tree,
    };
    let live = LiveRun::again(scope, agent, tree, parent.cloned(), accounts, recorded);
    if let Some((at, seconds)) = continuation.deadline {
        // Time that it waited for a person is not its own, whether a daemon stood beside it or not.
        let since = continuation.waiting_since.unwrap_or_else(now);
        live.set_deadline(Deadline {
            at: Instant::now() + record::time_left(since.duration_until(at), seconds),
            seconds,
        });
        live.clock().is_told = continuation.waiting_since.is_some();
    }
    if run.status == Status::Cancelling {
        live.cancel(
            run.cancel_reason
                .as_deref()
                .unwrap_or("requested by client"),
        );
    }
    Some(live)
}
