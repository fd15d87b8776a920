//! What all runs of one tree share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::time::Instant;

use crate::domain::message::ToolResult;
use crate::domain::run::RunId;
use crate::domain::webhook::Webhook;
use crate::engine::state::ad_hoc_quotas::AdHocQuotas;
use crate::engine::state::budget::Budgets;
use crate::engine::state::provider_keys::ProviderKeys;
use crate::engine::state::root_permit::RootPermit;
use crate::engine::state::tree_trace::TreeTrace;

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
    unrecorded_results: Mutex<HashMap<(RunId, String), ToolResult>>,
}

impl TreeSuspension {
    pub fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }

    /// Marks the tree as suspended; returns whether it was already.
    pub fn mark(&self) -> bool {
        self.is_suspended.swap(true, Ordering::SeqCst)
    }

    pub fn unrecorded_results(&self) -> MutexGuard<'_, HashMap<(RunId, String), ToolResult>> {
        self.unrecorded_results
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
