//! What the tree of a run that an evaluation has started does with calls of tools, and the recorded results that it has left.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{OnceCell, SemaphorePermit};

use crate::domain::agent::tool_use::{EvalTools, ToolUse};
use crate::domain::attachment::Digest;
use crate::domain::evaluation::SOURCE_LABEL;
use crate::domain::ignore::Ignore;
use crate::domain::message::ToolResult;
use crate::domain::recording::ToolRecording;
use crate::domain::run::RunId;

pub struct EvaluatedTree {
    pub settings: EvalTools,
    /// The root of the recorded tree whose results the calls get.
    pub source: Option<RunId>,
    /// Loaded by the first call that needs it.
    pub results: OnceCell<PlayedResults>,
    /// The tools that MCP servers offered to the recorded tree, loaded by the first run with servers.
    pub mcp_tools: OnceCell<Vec<ToolRecording>>,
    /// Whether a run of the tree has made a call that is neither recorded nor performed.
    has_diverged: AtomicBool,
}

impl EvaluatedTree {
    /// `labels` are those of the root.
    pub fn new(settings: &EvalTools, labels: &BTreeMap<String, String>) -> Self {
        let source = labels.get(SOURCE_LABEL);
        let source = source.filter(|_| settings.tools == ToolUse::Recorded);
        Self {
            settings: settings.clone(),
            source: source.and_then(|id| id.parse().ok()),
            results: OnceCell::new(),
            mcp_tools: OnceCell::new(),
            has_diverged: AtomicBool::new(false),
        }
    }

    pub fn diverge(&self) {
        self.has_diverged.store(true, Ordering::Relaxed);
    }

    pub fn has_diverged(&self) -> bool {
        self.has_diverged.load(Ordering::Relaxed)
    }
}

/// What the record says of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlayedCall {
    Result(ToolResult),
    /// A person approved that another agent is called.
    ApprovedDelegation,
}

/// The recorded calls of a tree that the new tree has not repeated yet.
#[derive(Debug, Default)]
pub struct PlayedResults {
    calls: Mutex<HashMap<Digest, VecDeque<PlayedCall>>>,
    pub ignore: Ignore,
    /// Its share of the memory for recorded results.
    pub space: Option<SemaphorePermit<'static>>,
}

impl PlayedResults {
    pub fn new(ignore: Ignore) -> Self {
        Self {
            ignore,
            ..Self::default()
        }
    }

    /// Adds a call behind those with the same key.
    pub fn add(&self, key: Digest, call: PlayedCall) {
        self.calls().entry(key).or_default().push_back(call);
    }

    /// Takes the first call with this key.
    pub fn take(&self, key: Digest) -> Option<PlayedCall> {
        self.calls().get_mut(&key)?.pop_front()
    }

    /// Removes the call that the new tree has repeated before a restart. A result that is none of these came from elsewhere.
    pub fn discard(&self, key: Digest, result: &ToolResult) {
        let mut calls = self.calls();
        let Some(calls) = calls.get_mut(&key) else {
            return;
        };
        let is_used = |call: &PlayedCall| match call {
            PlayedCall::ApprovedDelegation => true,
            PlayedCall::Result(recorded) => {
                (&recorded.content, recorded.is_error) == (&result.content, result.is_error)
                    && recorded.attachments == result.attachments
            }
        };
        if let Some(index) = calls.iter().position(is_used) {
            calls.remove(index);
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<Digest, VecDeque<PlayedCall>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{PlayedCall, PlayedResults};
    use crate::domain::attachment::Digest;
    use crate::domain::message::ToolResult;

    #[test]
    fn results_are_used_up_in_order_and_what_a_restart_has_used_stays_used() {
        let key = Digest::compute(b"a call");
        let result = |text: &str| ToolResult::text("c", text, false);
        let results = PlayedResults::default();
        for text in ["one", "two", "two", "three"] {
            results.add(key, PlayedCall::Result(result(text)));
        }
        assert_eq!(results.take(key), Some(PlayedCall::Result(result("one"))));
        results.discard(key, &result("three"));
        results.discard(key, &result("of no record"));
        results.discard(key, &result("two"));
        assert_eq!(results.take(key), Some(PlayedCall::Result(result("two"))));
        assert_eq!(results.take(key), None);
        assert_eq!(results.take(Digest::compute(b"another")), None);
    }
}
