//! Runs at work in this process: their place, their stop signal, their meter, and who waits for them.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::agent::Agent;
use crate::domain::event::{Event, EventKind};
use crate::domain::message::ToolResult;
use crate::domain::run::{Run, RunId, Scope, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::webhook::Webhook;
use crate::engine::admission::root_permit::RootPermit;
use crate::engine::run_spans::TreeTrace;
use crate::engine::state::ad_hoc_quotas::AdHocQuotas;
use crate::engine::state::budget::{AccountIds, BudgetExceeded, BudgetRefusal, Budgets};
use crate::engine::state::pending_batch::PendingBatchCell;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::workdir::RunWorkdir;
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
    usage: Mutex<UsageCounter>,
    /// A call of this run, or of one below it, was past this limit.
    exceeded_budget: OnceLock<Box<BudgetExceeded>>,
    /// Warnings that are in the record already.
    recorded_warnings: Mutex<Vec<String>>,
    end: watch::Sender<EndState>,
}

/// What all runs of one tree share.
pub struct Tree {
    /// Its accounts.
    pub budgets: Budgets,
    /// The root's right to be at work, and who waits for it.
    pub root_permit: RootPermit,
    /// Whether the root wished for deltas.
    pub is_streaming: bool,
    /// The name of the key that the root was accepted with.
    pub owner: Option<String>,
    /// What its children without a name have used.
    pub ad_hoc_quotas: AdHocQuotas,
    /// Whether it was taken up from its record.
    pub is_recovered: bool,
    /// What a write that failed means for it.
    pub suspension: TreeSuspension,
    /// Where the root's events are told.
    pub webhooks: Vec<Arc<Webhook>>,
    /// Its place in a trace; none where nobody traces.
    pub trace: Option<Box<TreeTrace>>,
    /// How many runs it has had, the root counted.
    pub run_count: AtomicU64,
    /// A person's own keys for its requests.
    pub provider_keys: ProviderKeys,
}

impl Tree {
    /// Counts one more run; false where the tree has had as many as it may.
    pub fn count_run(&self, max: usize) -> bool {
        let max = u64::try_from(max).unwrap_or(u64::MAX);
        let increment = |runs| (runs < max).then_some(runs + 1);
        let result = self
            .run_count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment);
        result.is_ok()
    }

    /// A run that was counted has not come to be.
    pub fn uncount_run(&self) {
        self.run_count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How a tree is stopped when a write about it fails, and what it takes along when it goes on.
#[derive(Debug, Default)]
pub struct TreeSuspension {
    is_suspended: AtomicBool,
    /// When it was last taken up after a failed write, and how often in a row; empty if never.
    pub last_resume: OnceLock<(Instant, u32)>,
    /// Results of tools that must not be repeated, by run and call, which could not be recorded.
    pub unrecorded_results: Mutex<HashMap<(RunId, String), ToolResult>>,
}

/// When a run must have ended.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// The moment.
    pub at: Instant,
    /// The bound in whole seconds that set it, for messages.
    pub seconds: u64,
}

impl Deadline {
    /// This long from now.
    pub fn within(timeout: Duration) -> Self {
        Self {
            at: Instant::now() + timeout,
            seconds: timeout.as_secs(),
        }
    }
}

/// A run's time, and what its calls do: it stands still while all that they do is to wait for a person's word.
#[derive(Debug, Default)]
pub struct Clock {
    /// When the run must have ended; none until its time starts. Moved when it goes on.
    pub deadline: Option<Deadline>,
    /// Since when it stands still.
    pub paused_since: Option<Instant>,
    /// Whether the record says that the run waits.
    pub is_pause_recorded: bool,
    /// Calls that do something.
    pub running_calls: usize,
    /// Calls that wait for a person's word, or for a child all of whose calls do; and a turn that waits for its batch.
    pub waiting_calls: usize,
    /// Of those, the ones that wait for a person's word.
    pub pending_approvals: usize,
    /// Whether a turn waits for its batch.
    pub has_pending_batch: bool,
}

impl Clock {
    /// The deadline, where it comes nearer, or had passed before the time stood still.
    fn active_deadline(&self) -> Option<Deadline> {
        self.deadline
            .filter(|deadline| self.paused_since.is_none_or(|since| deadline.at <= since))
    }
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

/// What a run and its descendants have used so far.
#[derive(Clone, Copy, Debug, Default)]
struct UsageCounter {
    own: Usage,
    tree: TreeUsage,
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
        run.update_usage(|counter| counter.tree.runs += 1);
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
            usage: Mutex::new(UsageCounter {
                own: usage,
                tree: tree_usage,
            }),
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
        self.clock().paused_since.is_some()
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
        self.tree.suspension.is_suspended.load(Ordering::SeqCst)
    }

    /// A write about its tree failed, or its record could not be read: nothing more is written, and the whole tree stops,
    /// until it is taken up from its record.
    pub fn suspend(&self, error: &StoreError) {
        if matches!(error, StoreError::AlreadyClaimed(_)) {
            // Its idempotency key is another run's: this one never was.
            return;
        }
        if self
            .tree
            .suspension
            .is_suspended
            .swap(true, Ordering::SeqCst)
        {
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
        let results = std::mem::take(&mut *lock(&suspended.tree.suspension.unrecorded_results));
        *lock(&self.tree.suspension.unrecorded_results) = results;
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
        lock(&self.tree.suspension.unrecorded_results).insert(key, result);
    }

    /// The result of a call that could not be recorded before its tree was taken up.
    pub fn take_stashed_result(&self, call: &str) -> Option<ToolResult> {
        let mut results = lock(&self.tree.suspension.unrecorded_results);
        results.remove(&(self.scope.run, call.to_owned()))
    }

    /// Books usage for this run and all its ancestors.
    pub fn add_usage(&self, usage: &Usage) {
        lock(&self.usage).own.add(usage);
        self.update_usage(|counter| counter.tree.usage.add(usage));
    }

    /// Its own usage, and that of its whole subtree.
    pub fn usage(&self) -> (Usage, TreeUsage) {
        let counter = lock(&self.usage);
        (counter.own, counter.tree)
    }

    fn update_usage(&self, change: impl Fn(&mut UsageCounter)) {
        for run in self.self_and_ancestors() {
            change(&mut lock(&run.usage));
        }
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

/// All runs at work, by id.
#[derive(Default)]
pub struct ActiveRuns {
    runs: Mutex<HashMap<RunId, Arc<ActiveRun>>>,
}

impl ActiveRuns {
    /// Adds one.
    pub fn add(&self, run: &Arc<ActiveRun>) {
        lock(&self.runs).insert(run.scope.run, Arc::clone(run));
    }

    /// Finds one.
    pub fn get(&self, id: RunId) -> Option<Arc<ActiveRun>> {
        lock(&self.runs).get(&id).cloned()
    }

    /// How many of them do nothing: they are suspended, or wait for an approval and are not queued for a slot to resume.
    pub fn idle_count(&self) -> usize {
        let is_idle = |run: &&Arc<ActiveRun>| {
            let is_queued = run.parent.is_none() && run.tree.root_permit.is_queued();
            !is_queued && (run.is_waiting() || run.is_suspended())
        };
        lock(&self.runs).values().filter(is_idle).count()
    }

    /// How many there are, those that wait for a slot included.
    pub fn count(&self) -> usize {
        lock(&self.runs).len()
    }

    /// Suspends a tree, if it is at work.
    pub fn suspend(&self, root: RunId, error: &StoreError) {
        if let Some(run) = self.get(root) {
            run.suspend(error);
        }
    }

    /// Puts these roots in the place of all runs of `trees`.
    pub fn replace(&self, trees: &HashSet<RunId>, roots: HashMap<RunId, Arc<ActiveRun>>) {
        let mut runs = lock(&self.runs);
        runs.retain(|_, run| !trees.contains(&run.scope.root));
        runs.extend(roots);
    }

    /// Removes one that has ended.
    pub fn remove(&self, id: RunId) {
        lock(&self.runs).remove(&id);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
