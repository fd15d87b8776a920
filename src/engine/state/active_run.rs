//! Runs at work in this process: their place, their stop signal, their meter, and who waits for them.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::agent::Agent;
use crate::domain::event::{Event, EventKind};
use crate::domain::message::ToolResult;
use crate::domain::run::{Run, Scope, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::state::budget::{AccountIds, BudgetExceeded, BudgetRefusal};
use crate::engine::state::clock::Clock;
use crate::engine::state::deadline::Deadline;
use crate::engine::state::pending_batch::PendingBatchCell;
use crate::engine::state::run_workdir::RunWorkdir;
use crate::engine::state::tree::Tree;
use crate::engine::state::usage::UsageCounter;
use crate::store::StoreError;

/// After so many suspensions in a row, about a minute, a record that cannot be read counts as damaged.
const MAX_READ_ATTEMPTS: u32 = 8;

/// One run at work.
pub struct ActiveRun {
    /// Its place in the tree.
    pub scope: Scope,
    /// The definition it started with, the request's overrides applied.
    pub agent: Arc<Agent>,
    /// What its whole tree shares.
    pub tree: Arc<Tree>,
    /// The run that called it.
    pub parent: Option<Arc<ActiveRun>>,
    /// The accounts it draws on.
    pub accounts: AccountIds,
    /// Its definition as another process will read it.
    pub agent_json: Arc<str>,
    /// The directory of its files.
    pub workdir: RunWorkdir,
    /// Heard by everything that waits for this run's sake; cancelled with the parent's.
    pub cancel_token: CancellationToken,
    /// The batch that an earlier process left, until its turn is taken.
    pub pending_batch: PendingBatchCell,
    agent_name: Arc<str>,
    clock: Mutex<Clock>,
    phase: Mutex<Phase>,
    usage: UsageCounter,
    /// A call of this run, or of one below it, was past this limit.
    exceeded_budget: OnceLock<Box<BudgetExceeded>>,
    /// Warnings that are in the record already.
    recorded_warnings: Mutex<Vec<String>>,
    end: watch::Sender<EndState>,
}

/// Decides once between an end of its own and somebody's cancel.
#[derive(Debug)]
enum Phase {
    Open,
    Cancelling {
        reason: String,
        requested_at: Instant,
        is_recorded: bool,
    },
    Ending,
}

/// What a run makes of a request to cancel it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CancelState {
    /// It is the first such request: the record does not say so yet.
    Started,
    /// There was one before, for this reason, that the record does not show yet.
    Pending(String),
    /// The record shows one.
    Recorded,
    /// The run is ending by itself.
    TooLate,
}

/// What those who wait for a run are told.
#[derive(Clone, Debug)]
enum EndState {
    Pending,
    Recorded(Arc<Run>),
    /// Nobody drives it any more, and its end could not be recorded.
    Lost,
}

/// What the record has of a run.
pub struct RestoredState {
    /// Its definition as another process will read it.
    pub agent_json: Arc<str>,
    /// The directory of its files.
    pub workdir: RunWorkdir,
    /// Its own usage.
    pub usage: Usage,
    /// Its subtree's.
    pub tree_usage: TreeUsage,
}

impl ActiveRun {
    /// A run that is about to be opened. Its descendants' usage will count for it, and its own for its ancestors.
    pub fn new(
        scope: Scope,
        agent: Arc<Agent>,
        tree: Arc<Tree>,
        parent: Option<Arc<ActiveRun>>,
        accounts: AccountIds,
        agent_json: Arc<str>,
    ) -> Arc<Self> {
        let run = Self::resume(
            scope,
            agent,
            tree,
            parent,
            accounts,
            RestoredState {
                agent_json,
                workdir: RunWorkdir::default(),
                usage: Usage::default(),
                tree_usage: TreeUsage::default(),
            },
        );
        run.self_and_ancestors()
            .for_each(|run| run.usage.count_run());
        run
    }

    /// A run that an earlier process opened; its usage counts for its ancestors already.
    pub fn resume(
        scope: Scope,
        agent: Arc<Agent>,
        tree: Arc<Tree>,
        parent: Option<Arc<ActiveRun>>,
        accounts: AccountIds,
        state: RestoredState,
    ) -> Arc<Self> {
        let RestoredState {
            agent_json: definition,
            workdir,
            usage,
            tree_usage,
        } = state;
        let cancel_token = parent
            .as_ref()
            .map_or_else(CancellationToken::new, |parent| {
                parent.cancel_token.child_token()
            });
        let agent_name = Arc::from(agent.name.as_str());
        Arc::new(Self {
            scope,
            agent,
            tree,
            parent,
            accounts,
            agent_json: definition,
            workdir,
            cancel_token,
            agent_name,
            clock: Mutex::default(),
            phase: Mutex::new(Phase::Open),
            usage: UsageCounter::new(usage, tree_usage),
            exceeded_budget: OnceLock::new(),
            pending_batch: PendingBatchCell::default(),
            recorded_warnings: Mutex::default(),
            end: watch::Sender::new(EndState::Pending),
        })
    }

    /// An event about this run, now.
    pub fn event(&self, kind: EventKind) -> Event {
        Event {
            run_id: self.scope.run,
            root_id: self.scope.root,
            depth: self.scope.depth.0,
            agent: Arc::clone(&self.agent_name),
            time: now(),
            kind,
        }
    }

    /// Whether it asks its providers for deltas: where its root wished for them, or its own file says so.
    pub fn is_streaming(&self) -> bool {
        self.tree.is_streaming || self.agent.stream
    }

    /// When it must have ended, as far as that is known now: its own deadline or an ancestor's, but of none whose time
    /// stands still.
    pub fn deadline(&self) -> Option<Deadline> {
        let deadlines = self
            .self_and_ancestors()
            .filter_map(|run| run.clock().active_deadline());
        deadlines.min_by_key(|deadline| deadline.at)
    }

    /// This run and all above it, the root last.
    pub fn self_and_ancestors(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |run| run.parent.as_deref())
    }

    /// Whether all that it does is to wait for a person's word.
    pub fn is_waiting(&self) -> bool {
        self.clock().pause.paused_since().is_some()
    }

    /// Its clock. Who changes what its calls do has the tree's turn.
    pub fn clock(&self) -> MutexGuard<'_, Clock> {
        lock(&self.clock)
    }

    /// Starts its clock.
    pub fn set_deadline(&self, deadline: Deadline) {
        self.clock().deadline = Some(deadline);
    }

    /// Remembers that a call of this run was refused, here and above as far as the limit reaches.
    pub fn record_refusal(&self, refusal: &BudgetRefusal) {
        let shares_account = |run: &&Self| run.accounts.contains(&refusal.account);
        for run in self.self_and_ancestors().take_while(shares_account) {
            // The first limit that was reached is the one that is told.
            let _ = run.exceeded_budget.set(Box::new(refusal.exceeded.clone()));
        }
    }

    /// Remembers what an earlier process refused, by the error that a call's result recorded: an account that is full now
    /// refuses in the same words.
    pub fn restore_refusal(&self, recorded: &str) {
        for refusal in self.tree.budgets.refusals(&self.accounts) {
            if recorded.contains(&refusal.exceeded.to_string()) {
                return self.record_refusal(&refusal);
            }
        }
    }

    /// Whether this warning is new to the run.
    pub fn insert_warning(&self, warning: &str) -> bool {
        let mut warnings = lock(&self.recorded_warnings);
        let is_new = !warnings.iter().any(|known| known == warning);
        if is_new {
            warnings.push(warning.to_owned());
        }
        is_new
    }

    /// Whether its budgets let it go on.
    pub fn check_budgets(&self) -> Result<(), BudgetExceeded> {
        match self.exceeded_budget.get() {
            Some(exceeded) => Err(BudgetExceeded::clone(exceeded)),
            None => self.tree.budgets.check(&self.accounts),
        }
    }

    /// Whether a write about its tree failed.
    pub fn is_suspended(&self) -> bool {
        self.tree.suspension.is_suspended()
    }

    /// A write about its tree failed, or its record could not be read: nothing more is written, and the whole tree stops,
    /// until it is taken up from its record.
    pub fn suspend(&self, error: &StoreError) {
        if matches!(error, StoreError::AlreadyClaimed(_)) {
            // Its idempotency key is another run's: this one never was.
            return;
        }
        if self.tree.suspension.mark() {
            return;
        }
        tracing::warn!(
            run.id = %self.scope.run, run.root = %self.scope.root, agent = %self.agent.name,
            depth = self.scope.depth.0, error = %error,
            "{} is suspended until the store works again: {error}", self.scope.root
        );
        let root = self.self_and_ancestors().last().unwrap_or(self);
        root.cancel_token.cancel();
    }

    /// Whether an error of a read is final for the run: what was read is damaged, or could not be read again and again
    /// although the store works otherwise. A write that failed has suspended the tree, and is not final.
    pub fn is_unreadable(&self, error: &StoreError) -> bool {
        let last_resume = self.tree.suspension.last_resume.get();
        let attempts = last_resume.map_or(0, |(_, attempts)| *attempts);
        let is_final = match error {
            StoreError::Corrupt(_) => true,
            StoreError::Backend(_) => attempts >= MAX_READ_ATTEMPTS,
            _ => false,
        };
        is_final && !self.is_suspended()
    }

    /// Takes over what its tree, suspended as `before` and now taken up once more, could not record.
    pub fn inherit_from(&self, suspended: &Self, attempts: u32) {
        let results = std::mem::take(&mut *suspended.tree.suspension.unrecorded_results());
        *self.tree.suspension.unrecorded_results() = results;
        let _ = self
            .tree
            .suspension
            .last_resume
            .set((Instant::now(), attempts));
        let keys = &self.tree.provider_keys;
        keys.restore_from(&suspended.tree.provider_keys);
    }

    /// Keeps the result of a call that could not be recorded for when the tree is taken up.
    pub fn stash_result(&self, result: ToolResult) {
        let key = (self.scope.run, result.call_id.clone());
        self.tree
            .suspension
            .unrecorded_results()
            .insert(key, result);
    }

    /// The result of a call that could not be recorded before its tree was taken up.
    pub fn take_stashed_result(&self, call: &str) -> Option<ToolResult> {
        let mut results = self.tree.suspension.unrecorded_results();
        results.remove(&(self.scope.run, call.to_owned()))
    }

    /// Books usage for this run and all its ancestors.
    pub fn add_usage(&self, usage: &Usage) {
        self.usage.add_own(usage);
        self.self_and_ancestors()
            .for_each(|run| run.usage.add_to_tree(usage));
    }

    /// Its own usage, and that of its whole subtree.
    pub fn usage(&self) -> (Usage, TreeUsage) {
        self.usage.get()
    }

    /// Takes a request to cancel, which holds once [`LiveRun::cancel`] follows and not if
    /// [`LiveRun::withdraw_cancel`] does.
    pub fn begin_cancel(&self, reason: &str) -> CancelState {
        let mut phase = lock(&self.phase);
        match &*phase {
            Phase::Open => {}
            Phase::Cancelling {
                is_recorded: true, ..
            } => return CancelState::Recorded,
            Phase::Cancelling { reason, .. } => return CancelState::Pending(reason.clone()),
            Phase::Ending => return CancelState::TooLate,
        }
        *phase = Phase::Cancelling {
            reason: reason.to_owned(),
            requested_at: Instant::now(),
            is_recorded: false,
        };
        CancelState::Started
    }

    /// The record shows the cancel: stops the run with its descendants, unless it is ending by itself.
    pub fn cancel(&self, reason: &str) {
        {
            let mut phase = lock(&self.phase);
            match &mut *phase {
                Phase::Open => {
                    *phase = Phase::Cancelling {
                        reason: reason.to_owned(),
                        requested_at: Instant::now(),
                        is_recorded: true,
                    };
                }
                Phase::Cancelling { is_recorded, .. } => *is_recorded = true,
                Phase::Ending => {}
            }
        }
        self.cancel_token.cancel();
        self.tree.root_permit.changed.notify_waiters();
    }

    /// Whether it is ending by itself or because it was stopped: a cancel comes too late.
    pub fn is_ending(&self) -> bool {
        matches!(*lock(&self.phase), Phase::Ending)
    }

    /// The cancel could not be recorded: the run goes on as if nobody had requested it.
    pub fn withdraw_cancel(&self) {
        let mut phase = lock(&self.phase);
        if let Phase::Cancelling {
            is_recorded: false, ..
        } = *phase
        {
            *phase = Phase::Open;
        }
        drop(phase);
        self.tree.root_permit.changed.notify_waiters();
    }

    /// Takes the run's own end: from now on a cancel comes too late. Its reason and when it was asked for, where a
    /// cancel came first. One that is being recorded is waited for, as it may yet fail.
    pub async fn begin_finish(&self) -> Option<(String, Instant)> {
        loop {
            // Listens before it looks.
            let mut changed = pin!(self.tree.root_permit.changed.notified());
            changed.as_mut().enable();
            if let Some(cancel_request) = self.try_begin_finish() {
                return cancel_request;
            }
            changed.await;
        }
    }

    /// None while a cancel is being recorded.
    fn try_begin_finish(&self) -> Option<Option<(String, Instant)>> {
        let mut phase = lock(&self.phase);
        if let Phase::Cancelling {
            is_recorded: false, ..
        } = *phase
        {
            return None;
        }
        Some(match std::mem::replace(&mut *phase, Phase::Ending) {
            Phase::Cancelling {
                reason,
                requested_at,
                ..
            } => Some((reason, requested_at)),
            Phase::Open | Phase::Ending => None,
        })
    }

    /// Why this run was stopped: its own cancel's reason, or the nearest ancestor's.
    pub fn cancel_reason(&self) -> String {
        let reason = self
            .self_and_ancestors()
            .find_map(|run| match &*lock(&run.phase) {
                Phase::Cancelling { reason, .. } => Some(reason.clone()),
                Phase::Open | Phase::Ending => None,
            });
        reason.unwrap_or_else(|| "stopped".to_owned())
    }

    /// Tells everybody who waits that it has ended: its record, or none where that could not be written.
    pub fn publish_end(&self, run: Option<Arc<Run>>) {
        self.end
            .send_replace(run.map_or(EndState::Lost, EndState::Recorded));
    }

    /// The record at its end, once it has ended; none where that could not be written.
    pub async fn wait_for_end(&self) -> Option<Arc<Run>> {
        let mut receiver = self.end.subscribe();
        let state = receiver
            .wait_for(|state| !matches!(state, EndState::Pending))
            .await;
        match state.as_deref() {
            Ok(EndState::Recorded(run)) => Some(Arc::clone(run)),
            Ok(EndState::Pending | EndState::Lost) | Err(_) => None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
