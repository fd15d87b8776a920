//! What all runs of one tree share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use crate::domain::agent::tool_use::ToolUse;
use crate::domain::message::ToolResult;
use crate::domain::run::RunId;
use crate::domain::suspension::SuspensionCause;
use crate::domain::webhook::Webhook;
use crate::engine::state::ad_hoc_quotas::AdHocQuotas;
use crate::engine::state::budget::Budgets;
use crate::engine::state::evaluated_tree::EvaluatedTree;
use crate::engine::state::kept_reply::StoredReply;
use crate::engine::state::period_budgets::TreeBudgets;
use crate::engine::state::pinned_agents::PinnedAgents;
use crate::engine::state::prompt_leads::PromptLeads;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::state::root_permit::RootPermit;
use crate::engine::state::tree_trace::TreeTrace;
use crate::store::StoreError;

/// A tree that ran this long since it was resumed has left its earlier suspensions behind.
const RESET_AFTER: Duration = Duration::from_secs(60);

pub struct Tree {
    pub budgets: Budgets,
    /// The budgets over time that hold for it.
    pub period_budgets: TreeBudgets,
    pub root_permit: RootPermit,
    /// Whether the root's request enables streamed deltas.
    pub is_streaming: bool,
    /// The name of the key that started the root.
    pub owner: Option<Box<str>>,
    /// The usage of its ad-hoc sub-agents.
    pub ad_hoc_quotas: AdHocQuotas,
    /// Whether it was resumed from its record.
    pub is_recovered: bool,
    /// Whether it slept before: its runs go on as if nothing had happened.
    pub has_slept: bool,
    /// Whether it fell asleep in this process.
    pub has_slept_here: bool,
    /// Whether its runs add nothing to the memory of their agents.
    pub keeps_memory: bool,
    /// Set if an evaluation has started it.
    pub evaluation: Option<EvaluatedTree>,
    pub suspension: TreeSuspension,
    /// The root's webhooks.
    pub webhooks: Box<[Arc<Webhook>]>,
    /// `None` if there is no trace.
    pub trace: Option<Box<TreeTrace>>,
    /// The prompts that its runs have in the caches of their services.
    pub prompt_leads: PromptLeads,
    /// Whether the root's client sends the conversation again with its next message.
    pub is_chat: bool,
    /// The number of its runs, including the root.
    pub run_count: AtomicU64,
    /// Bytes of the conversations of its active runs, as of their last requests.
    pub conversation_bytes: AtomicUsize,
    /// The client's own keys for its requests.
    pub provider_keys: ProviderKeys,
    /// The labels that a node needs to drive it, until the root is recorded.
    pub node_labels: Arc<[String]>,
    /// What its runs call other agents in. Empty if they can call none, or if an older version accepted it.
    pub pinned_agents: OnceLock<Arc<PinnedAgents>>,
}

impl Tree {
    /// The tree of a root that is accepted now.
    pub fn new(
        owner: Option<String>,
        period_budgets: TreeBudgets,
        webhooks: Vec<Arc<Webhook>>,
        provider_keys: ProviderKeys,
    ) -> Self {
        Self {
            budgets: Budgets::default(),
            period_budgets,
            root_permit: RootPermit::default(),
            is_streaming: false,
            owner: owner.map(String::into_boxed_str),
            ad_hoc_quotas: AdHocQuotas::default(),
            is_recovered: false,
            has_slept: false,
            has_slept_here: false,
            keeps_memory: false,
            evaluation: None,
            suspension: TreeSuspension::default(),
            webhooks: webhooks.into_boxed_slice(),
            trace: None,
            prompt_leads: PromptLeads::default(),
            is_chat: false,
            run_count: AtomicU64::new(1),
            conversation_bytes: AtomicUsize::new(0),
            provider_keys,
            node_labels: Arc::default(),
            pinned_agents: OnceLock::new(),
        }
    }

    /// The evaluation that has started it, unless its tools are live.
    pub fn played(&self) -> Option<&EvaluatedTree> {
        let evaluation = self.evaluation.as_ref();
        evaluation.filter(|it| it.settings.tools != ToolUse::Live)
    }

    /// Pins the tree, once, before its runs call others.
    pub fn pin(&self, agents: Option<Arc<PinnedAgents>>) {
        if let Some(agents) = agents {
            self.pinned_agents.get_or_init(|| agents);
        }
    }

    /// Counts one more run; false if the tree has `max` runs.
    pub fn count_run(&self, max: usize) -> bool {
        let max = u64::try_from(max).unwrap_or(u64::MAX);
        let increment = |runs| (runs < max).then_some(runs + 1);
        let result = self
            .run_count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, increment);
        result.is_ok()
    }

    /// Reverts [`Tree::count_run`] for a run that was not started.
    pub fn uncount_run(&self) {
        self.run_count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the tree is suspended, and the state that is kept until it is resumed.
#[derive(Debug, Default)]
pub struct TreeSuspension {
    cause: OnceLock<SuspensionCause>,
    /// Its tasks end because it only sleeps.
    is_asleep: AtomicBool,
    /// How many of its waits keep it awake.
    kept_awake: AtomicU32,
    /// When it was last resumed after a failed write, and how often in a row; empty if never.
    pub last_resume: OnceLock<(Instant, u32)>,
    /// Results of mutating tools that could not be recorded, by run and call.
    unrecorded_results: Mutex<HashMap<(RunId, String), ToolResult>>,
    /// Replies that could not be recorded, by run.
    unrecorded_replies: Mutex<HashMap<RunId, StoredReply>>,
    /// When the start of calls of mutating tools could not be recorded, by run and call. They have not begun, although the record may
    /// have their start: only its answer may be lost.
    unrecorded_starts: Mutex<HashMap<(RunId, String), Timestamp>>,
}

/// See [`TreeSuspension::keep_awake`].
pub struct AwakeGuard<'s>(&'s TreeSuspension);

impl Drop for AwakeGuard<'_> {
    fn drop(&mut self) {
        self.0.kept_awake.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the log says of a tree after this error.
pub fn suspension_text(error: &StoreError) -> &'static str {
    match error {
        StoreError::Fenced => "stops at this node",
        error if error.is_damage() => "is suspended, and resumed soon to try again",
        _ => "is suspended until the store works again",
    }
}

impl TreeSuspension {
    /// Whether nothing of the tree is recorded any more until it is resumed.
    pub fn is_suspended(&self) -> bool {
        self.cause.get().is_some() || self.is_asleep()
    }

    /// Keeps the tree awake until the result is dropped.
    pub fn keep_awake(&self) -> AwakeGuard<'_> {
        self.kept_awake.fetch_add(1, Ordering::Relaxed);
        AwakeGuard(self)
    }

    pub fn is_kept_awake(&self) -> bool {
        self.kept_awake.load(Ordering::Relaxed) > 0
    }

    pub fn is_asleep(&self) -> bool {
        self.is_asleep.load(Ordering::Acquire)
    }

    pub fn fall_asleep(&self) {
        self.is_asleep.store(true, Ordering::Release);
    }

    /// Why it is suspended; `None` if it is not.
    pub fn cause(&self) -> Option<SuspensionCause> {
        self.cause.get().copied()
    }

    /// Marks the tree as suspended by this error; returns whether it was already.
    pub fn mark(&self, error: &StoreError) -> bool {
        if self.is_asleep() {
            return true;
        }
        let cause = match error {
            StoreError::Refused(_) => SuspensionCause::WriteRefused,
            error if error.is_damage() => SuspensionCause::RecordDamaged,
            _ => SuspensionCause::StoreFailed,
        };
        self.cause.set(cause).is_err()
    }

    /// Whether it was suspended by what is damaged of it.
    pub fn is_by_damage(&self) -> bool {
        self.cause.get() == Some(&SuspensionCause::RecordDamaged)
    }

    /// Whether the store failed, and not only what was written of this tree.
    pub fn is_by_store(&self) -> bool {
        self.cause.get() == Some(&SuspensionCause::StoreFailed)
    }

    /// How often in a row the tree was suspended before, each time but the first soon after it was resumed.
    pub fn previous_count(&self) -> u32 {
        match self.last_resume.get() {
            Some((at, attempts)) if at.elapsed() < RESET_AFTER => attempts + 1,
            _ => 0,
        }
    }

    pub fn unrecorded_results(&self) -> MutexGuard<'_, HashMap<(RunId, String), ToolResult>> {
        self.unrecorded_results
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn unrecorded_replies(&self) -> MutexGuard<'_, HashMap<RunId, StoredReply>> {
        self.unrecorded_replies
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn unrecorded_starts(&self) -> MutexGuard<'_, HashMap<(RunId, String), Timestamp>> {
        self.unrecorded_starts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspensions_in_a_row_follow_a_resume_soon() {
        let resumed = |at: Instant| {
            let suspension = TreeSuspension::default();
            suspension.last_resume.set((at, 1)).expect("no resume yet");
            suspension
        };
        let long_ago = Instant::now().checked_sub(RESET_AFTER).expect("a time");
        assert_eq!(TreeSuspension::default().previous_count(), 0);
        assert_eq!(resumed(Instant::now()).previous_count(), 2);
        assert_eq!(resumed(long_ago).previous_count(), 0);
    }

    #[test]
    fn the_first_error_is_the_cause() {
        let suspension = TreeSuspension::default();
        assert!(!suspension.mark(&StoreError::Malformed("a page".to_owned())));
        assert!(suspension.mark(&StoreError::DiskFull));
        assert!(suspension.is_suspended() && suspension.is_by_damage());
    }
}
