//! A run that this process drives: its place in its tree, its cancel, its usage and its end.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::agent::Agent;
use crate::domain::message::ToolResult;
use crate::domain::run::{Run, RunId, Scope};
use crate::domain::usage::{CallLimit, Cost, ModelUsage, TreeUsage, Usage};
use crate::domain::warning::{RunWarning, Warning};
use crate::engine::state::background::BackgroundChildren;
use crate::engine::state::budget::{AccountIds, Amount, BudgetExceeded, BudgetRefusal};
use crate::engine::state::clock::Clock;
use crate::engine::state::deadline::Deadline;
use crate::engine::state::inbox::Inbox;
use crate::engine::state::kept_reply::{KeptReply, StoredReply};
use crate::engine::state::live_text::LiveText;
use crate::engine::state::pending_batch::PendingBatchCell;
use crate::engine::state::period_budgets;
use crate::engine::state::run_warnings::RunWarnings;
use crate::engine::state::run_workdir::RunWorkdir;
use crate::engine::state::tree::{Tree, suspension_text};
use crate::engine::state::turn_log::TurnLog;
use crate::engine::state::usage::UsageCounter;
use crate::record::event::Origin;
use crate::store::{Progress, StoreError};

/// After this many suspensions in a row, about a minute, a run that is to end anyway does not wait for its record any more.
const MAX_READ_SUSPENSIONS: u32 = 9;
/// After this many suspensions in a row, about twelve seconds, what SQLite calls damaged is: a disk that fails looks the same.
pub const MAX_MALFORMED_SUSPENSIONS: u32 = 7;

pub struct ActiveRun {
    pub scope: Scope,
    /// The agent as the run started with it, including the request's overrides.
    pub agent: Arc<Agent>,
    pub tree: Arc<Tree>,
    pub parent: Option<Arc<ActiveRun>>,
    /// The budget accounts that it draws on.
    pub accounts: AccountIds,
    /// The agent as recorded.
    pub agent_json: Arc<str>,
    pub workdir: RunWorkdir,
    /// Cancelled together with the parent's.
    pub cancel_token: CancellationToken,
    /// The batch that an earlier process submitted, until its turn is done.
    pub pending_batch: PendingBatchCell,
    pub inbox: Inbox,
    /// Empty until it starts a child in the background.
    pub background: OnceLock<Box<BackgroundChildren>>,
    pub turn_log: TurnLog,
    /// Only of a root whose providers stream.
    pub live_text: LiveText,
    agent_name: Arc<str>,
    /// Whether a client has paused it.
    is_held: AtomicBool,
    clock: Mutex<Clock>,
    phase: Mutex<Phase>,
    usage: UsageCounter,
    /// Its own usage that is charged to budgets over time.
    charged: Mutex<Usage>,
    /// The refusals of calls of this run or of runs below it, one for each limit.
    refusals: Mutex<Vec<BudgetRefusal>>,
    warnings: Mutex<RunWarnings>,
    end: watch::Sender<EndState>,
    /// Its part of the tree's.
    conversation_bytes: AtomicUsize,
}

/// Decides once between the run's own end and a cancel.
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

/// What became of a tree that was to fall asleep.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SleepAttempt {
    Asleep,
    /// Something keeps it awake just now.
    Busy,
    /// It does not only wait, or has what is only in memory.
    Awake,
}

/// The answer to a cancel request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CancelState {
    /// The first request, not yet recorded.
    Started,
    /// An earlier request with this reason is not yet recorded.
    Pending(String),
    /// An earlier request is recorded.
    Recorded,
    /// The run is ending by itself.
    TooLate,
}

#[derive(Clone, Debug)]
enum EndState {
    Pending,
    Recorded(Arc<Run>),
    /// No task drives the run any more, and its end could not be recorded.
    Lost,
}

/// The recorded state of a run.
pub struct RestoredState {
    pub agent_json: Arc<str>,
    pub workdir: RunWorkdir,
    pub usage: Usage,
    pub tree_usage: TreeUsage,
    /// The usage by model, without tool calls.
    pub models: Vec<ModelUsage>,
    pub warnings: Vec<RunWarning>,
    pub inbox: Inbox,
    pub is_held: bool,
}

impl ActiveRun {
    /// A new run. Its usage counts for its ancestors too.
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
                models: Vec::new(),
                warnings: Vec::new(),
                inbox: Inbox::default(),
                is_held: false,
            },
        );
        run.self_and_ancestors()
            .for_each(|run| run.usage.count_run());
        run
    }

    /// A run of an earlier process. Its usage is already counted for its ancestors.
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
            models,
            warnings,
            inbox,
            is_held,
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
            is_held: AtomicBool::new(is_held),
            clock: Mutex::default(),
            phase: Mutex::new(Phase::Open),
            charged: Mutex::new(usage),
            usage: UsageCounter::new(usage, tree_usage, models),
            refusals: Mutex::default(),
            pending_batch: PendingBatchCell::default(),
            inbox,
            background: OnceLock::new(),
            turn_log: TurnLog::default(),
            live_text: LiveText::default(),
            warnings: Mutex::new(RunWarnings::restored(warnings)),
            end: watch::Sender::new(EndState::Pending),
            conversation_bytes: AtomicUsize::new(0),
        })
    }

    /// Whether its end adds an entry to its agent's memory.
    pub fn adds_memory(&self) -> bool {
        let tree = &self.tree;
        self.agent.memory.enabled && !tree.keeps_memory && tree.evaluation.is_none()
    }

    /// What all its events have.
    pub fn origin(&self) -> Origin {
        Origin {
            run_id: self.scope.run,
            root_id: self.scope.root,
            depth: self.scope.depth.0,
            agent: Arc::clone(&self.agent_name),
        }
    }

    /// Whether its providers stream: if its root's request or its agent's settings say so.
    pub fn is_streaming(&self) -> bool {
        self.tree.is_streaming || self.agent.stream
    }

    /// The earliest deadline of this run and its ancestors, ignoring paused ones.
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

    /// Whether the run is paused.
    pub fn is_waiting(&self) -> bool {
        self.clock().pause.paused_since().is_some()
    }

    /// Whether the run is paused, and nothing below it works.
    pub fn is_idle(&self) -> bool {
        self.clock().pause.is_idle()
    }

    /// Its children in the background.
    pub fn background(&self) -> &BackgroundChildren {
        let max = self.agent.delegation.max_concurrent;
        self.background
            .get_or_init(|| Box::new(BackgroundChildren::new(max)))
    }

    /// Whether this run is a child that it has started in the background.
    pub fn has_in_background(&self, child: RunId) -> bool {
        let background = self.background.get();
        background.is_some_and(|it| it.contains(child))
    }

    /// Counts its conversation among those of the tree; 0 when it has ended.
    pub fn set_conversation_bytes(&self, bytes: usize) {
        let before = self.conversation_bytes.swap(bytes, Ordering::Relaxed);
        let of_tree = &self.tree.conversation_bytes;
        of_tree.fetch_add(bytes, Ordering::Relaxed);
        of_tree.fetch_sub(before, Ordering::Relaxed);
    }

    /// Whether the run does not begin another step: a client has paused it, or one above it.
    pub fn is_held(&self) -> bool {
        let mut runs = self.self_and_ancestors();
        runs.any(|run| run.is_held.load(Ordering::SeqCst))
    }

    pub fn set_held(&self, is_held: bool) {
        self.is_held.store(is_held, Ordering::SeqCst);
        self.tree.root_permit.changed.notify_waiters();
    }

    /// Changes of its calls need the tree's `update_lock`.
    pub fn clock(&self) -> MutexGuard<'_, Clock> {
        lock(&self.clock)
    }

    pub fn set_deadline(&self, deadline: Deadline) {
        self.clock().deadline = Some(deadline);
    }

    /// Records that a call of this run was refused, for this run and the ancestors that share the account.
    pub fn record_refusal(&self, refusal: &BudgetRefusal) {
        let shares_account = |run: &&Self| run.accounts.contains(&refusal.account);
        for run in self.self_and_ancestors().take_while(shares_account) {
            let mut refusals = lock(&run.refusals);
            if !refusals.contains(refusal) {
                refusals.push(refusal.clone());
            }
        }
    }

    /// The limits that refused calls of this run or of runs below it.
    pub fn refused_by(&self) -> Vec<CallLimit> {
        let refusals = lock(&self.refusals);
        refusals.iter().map(|refusal| refusal.limit).collect()
    }

    /// Restores the refusals of an earlier process: an account that is full now has the recorded limit.
    pub fn restore_refusals(&self, refused_by: &[CallLimit]) {
        if refused_by.is_empty() {
            return;
        }
        let refusals = self.tree.budgets.refusals(&self.accounts);
        for limit in refused_by {
            for refusal in refusals.iter().filter(|it| it.limit == *limit) {
                self.record_refusal(refusal);
            }
        }
    }

    /// Adds a warning to the run, which the next write records, and logs it. Returns false if the run has it already.
    /// `turn` is `None` before the first turn.
    pub fn warn(&self, warning: Warning, turn: Option<u32>) -> bool {
        let warning = warning.in_turn(turn);
        let is_new = lock(&self.warnings).insert(warning.clone());
        if is_new {
            tracing::warn!(
                run.id = %self.scope.run, run.root = %self.scope.root, agent = %self.agent.name,
                depth = self.scope.depth.0, code = %warning.code, "{}", warning.message
            );
        }
        is_new
    }

    /// All warnings, if there are new ones since the last call.
    pub fn take_unrecorded_warnings(&self) -> Option<Vec<RunWarning>> {
        lock(&self.warnings).take_unrecorded()
    }

    pub fn warnings(&self) -> Vec<RunWarning> {
        lock(&self.warnings).to_vec()
    }

    pub fn check_budgets(&self) -> Result<(), BudgetExceeded> {
        // The first limit that was reached is reported.
        let refused = lock(&self.refusals).first().map(|it| it.exceeded.clone());
        match refused {
            Some(exceeded) => Err(exceeded),
            None => self.tree.budgets.check(&self.accounts),
        }
    }

    /// Whether a write about its tree failed.
    pub fn is_suspended(&self) -> bool {
        self.tree.suspension.is_suspended()
    }

    /// Marks the tree of this root as asleep, so that nothing of it is recorded any more, unless it is suspended, changes, or has
    /// what is only in memory.
    pub fn fall_asleep(&self) -> SleepAttempt {
        let Ok(_unchanged) = self.tree.root_permit.update_lock.try_lock() else {
            return SleepAttempt::Busy;
        };
        let may_sleep = !self.is_suspended()
            && !self.tree.suspension.is_kept_awake()
            && !self.tree.is_chat
            && !self.tree.provider_keys.is_needed()
            && self.tree.trace.as_ref().is_none_or(|it| !it.has_caller())
            && self.clock().pause.sleeping().is_some();
        if !may_sleep {
            return SleepAttempt::Awake;
        }
        self.tree.suspension.fall_asleep();
        SleepAttempt::Asleep
    }

    /// Suspends the tree after a failed write or an unreadable record: all its runs stop until it is resumed from its record.
    pub fn suspend(&self, error: &StoreError) {
        if matches!(
            error,
            StoreError::AlreadyClaimed(_)
                | StoreError::SourceDeleted(_)
                | StoreError::SessionChanged
        ) {
            // Another run has its idempotency key or its place in the session, or its source is gone: this run, or what a
            // request brought to it, was never accepted.
            return;
        }
        if self.tree.suspension.mark(error) {
            return;
        }
        tracing::warn!(
            run.id = %self.scope.run, run.root = %self.scope.root, agent = %self.agent.name,
            depth = self.scope.depth.0, error = %error,
            "{} {}: {error}", self.scope.root, suspension_text(error)
        );
        let root = self.self_and_ancestors().last().unwrap_or(self);
        root.cancel_token.cancel();
    }

    /// Whether the run ends with this read error of its record, because it is to end in any case: damage that stays, or a store that
    /// could again and again not be read, does not keep it for ever. Otherwise the tree is suspended, as after a failed write.
    pub fn is_unreadable(&self, error: &StoreError) -> bool {
        let is_final = match error {
            StoreError::Corrupt(_) | StoreError::Malformed(_) => true,
            StoreError::Backend(_) | StoreError::Refused(_) => {
                self.tree.suspension.previous_count() >= MAX_READ_SUSPENSIONS
            }
            _ => false,
        };
        is_final && self.is_to_end() && !self.is_suspended()
    }

    /// Whether the conversation that the run is to continue can never be read: it is the record of another run.
    pub fn has_lost_history(&self, error: &StoreError) -> bool {
        let suspensions = self.tree.suspension.previous_count();
        let is_final = match error {
            StoreError::Corrupt(_) => true,
            StoreError::Malformed(_) => suspensions >= MAX_MALFORMED_SUSPENSIONS,
            _ => self.is_unreadable(error),
        };
        is_final && !self.is_suspended()
    }

    /// Whether its deadline has passed, or it was cancelled.
    fn is_to_end(&self) -> bool {
        let is_overdue = |deadline: Deadline| deadline.at <= Instant::now();
        self.deadline().is_some_and(is_overdue)
            || self
                .self_and_ancestors()
                .any(|run| matches!(*lock(&run.phase), Phase::Cancelling { .. }))
    }

    /// Takes over what the suspended tree could not record.
    pub fn inherit_from(&self, suspended: &Self, attempts: u32) {
        let results = std::mem::take(&mut *suspended.tree.suspension.unrecorded_results());
        *self.tree.suspension.unrecorded_results() = results;
        let replies = std::mem::take(&mut *suspended.tree.suspension.unrecorded_replies());
        *self.tree.suspension.unrecorded_replies() = replies;
        let starts = std::mem::take(&mut *suspended.tree.suspension.unrecorded_starts());
        *self.tree.suspension.unrecorded_starts() = starts;
        lock(&self.warnings).inherit_from(&lock(&suspended.warnings));
        let _ = self
            .tree
            .suspension
            .last_resume
            .set((Instant::now(), attempts));
        let keys = &self.tree.provider_keys;
        keys.restore_from(&suspended.tree.provider_keys);
    }

    /// Keeps a reply that could not be recorded until the tree is resumed.
    pub fn keep_reply(&self, reply: StoredReply) {
        let mut replies = self.tree.suspension.unrecorded_replies();
        replies.insert(self.scope.run, reply);
    }

    pub fn has_kept_reply(&self, turn: u32) -> bool {
        let replies = self.tree.suspension.unrecorded_replies();
        replies
            .get(&self.scope.run)
            .is_some_and(|it| it.kept.turn == turn)
    }

    /// The reply of this turn that could not be recorded before the tree was suspended.
    pub fn take_kept_reply(&self, turn: u32) -> Option<KeptReply> {
        let taken = self
            .tree
            .suspension
            .unrecorded_replies()
            .remove(&self.scope.run);
        taken.map(|it| it.kept).filter(|kept| kept.turn == turn)
    }

    /// Keeps a result that could not be recorded until the tree is resumed.
    pub fn stash_result(&self, result: ToolResult) {
        let key = (self.scope.run, result.call_id.clone());
        self.tree
            .suspension
            .unrecorded_results()
            .insert(key, result);
    }

    /// The result of a call that could not be recorded before the tree was suspended.
    pub fn take_stashed_result(&self, call: &str) -> Option<ToolResult> {
        let mut results = self.tree.suspension.unrecorded_results();
        results.remove(&(self.scope.run, call.to_owned()))
    }

    /// Keeps that a call has not begun because its start at this time could not be recorded.
    pub fn keep_unrecorded_start(&self, call: &str, at: Timestamp) {
        let key = (self.scope.run, call.to_owned());
        self.tree.suspension.unrecorded_starts().insert(key, at);
    }

    /// See [`ActiveRun::keep_unrecorded_start`].
    pub fn unrecorded_start(&self, call: &str) -> Option<Timestamp> {
        let starts = self.tree.suspension.unrecorded_starts();
        starts.get(&(self.scope.run, call.to_owned())).copied()
    }

    /// The call begins now.
    pub fn forget_unrecorded_start(&self, call: &str) {
        let mut starts = self.tree.suspension.unrecorded_starts();
        starts.remove(&(self.scope.run, call.to_owned()));
    }

    /// Adds usage to this run and all its ancestors.
    pub fn add_usage(&self, usage: &Usage) {
        self.usage.add_own(usage);
        self.self_and_ancestors()
            .for_each(|run| run.usage.add_to_tree(usage));
    }

    /// Adds usage of a request to this model to this run and all its ancestors.
    pub fn add_model_usage(&self, model: &str, usage: &Usage) {
        self.usage.add_own_of_model(model, usage);
        self.self_and_ancestors()
            .for_each(|run| run.usage.add_to_tree(usage));
    }

    /// What the run has used since the last call, for budgets over time.
    pub fn take_uncharged(&self, used: &Usage) -> Amount {
        let mut charged = lock(&self.charged);
        let amount = period_budgets::amount_since(&charged, used);
        *charged = *used;
        amount
    }

    /// Takes back what could not be recorded.
    pub fn restore_uncharged(&self, amount: Amount) {
        let mut charged = lock(&self.charged);
        let input = &mut charged.tokens.input;
        let from_output = amount.tokens.saturating_sub(*input);
        *input = input.saturating_sub(amount.tokens);
        charged.tokens.output = charged.tokens.output.saturating_sub(from_output);
        let cost = charged.cost.unwrap_or_default().0;
        charged.cost = Some(Cost(cost.saturating_sub(amount.cost.0)));
    }

    /// Sets the usage of the run's progress to what it has used so far.
    pub fn update_progress(&self, progress: &mut Progress) {
        progress.usage = self.usage.get().0;
        progress.models = self.usage.models_besides(&progress.model);
    }

    /// The progress with what requests have used since it was updated; `None` if that is nothing.
    pub fn changed_progress(&self, progress: &Progress) -> Option<Progress> {
        if self.usage.get().0.of_requests() == progress.usage.of_requests() {
            return None;
        }
        let mut changed = progress.clone();
        if changed.model.is_empty() {
            changed.model = self.usage.last_model().unwrap_or_default();
        }
        self.update_progress(&mut changed);
        Some(changed)
    }

    /// Its own usage, and that of its whole subtree.
    pub fn usage(&self) -> (Usage, TreeUsage) {
        self.usage.get()
    }

    /// Begins a cancel, which [`ActiveRun::cancel`] completes and [`ActiveRun::withdraw_cancel`] reverts.
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

    /// Stops the run with its descendants after the cancel was recorded, unless the run is ending by itself.
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

    /// Whether the run is ending: a cancel comes too late.
    pub fn is_ending(&self) -> bool {
        matches!(*lock(&self.phase), Phase::Ending)
    }

    /// Reverts a cancel that could not be recorded.
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

    /// Begins the run's own end: a later cancel comes too late. Returns the reason and time of an earlier cancel, if
    /// there is one. Waits while a cancel is being recorded, because that may fail.
    pub async fn begin_finish(&self) -> Option<(String, Instant)> {
        loop {
            // Subscribe before looking, so that no change is missed.
            let mut changed = pin!(self.tree.root_permit.changed.notified());
            changed.as_mut().enable();
            if let Some(cancel_request) = self.try_begin_finish() {
                return cancel_request;
            }
            changed.await;
        }
    }

    /// `None` while a cancel is being recorded.
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

    /// The reason of its own cancel or the nearest ancestor's.
    pub fn cancel_reason(&self) -> String {
        let reason = self
            .self_and_ancestors()
            .find_map(|run| match &*lock(&run.phase) {
                Phase::Cancelling { reason, .. } => Some(reason.clone()),
                Phase::Open | Phase::Ending => None,
            });
        reason.unwrap_or_else(|| "stopped".to_owned())
    }

    /// Notifies everyone who waits for the end; `None` if the end could not be recorded.
    pub fn publish_end(&self, run: Option<Arc<Run>>) {
        self.end
            .send_replace(run.map_or(EndState::Lost, EndState::Recorded));
    }

    /// The record at the run's end; `None` if the end could not be recorded.
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
