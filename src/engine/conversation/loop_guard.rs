//! Finds a run that repeats itself: the same calls with the same results, turn after turn. Pure.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::domain::message::{ToolCall, ToolResult};

/// The loop guard's verdict on a batch of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopVerdict {
    Continue,
    /// The same batch came this many times in a row; a hint was added to its results.
    Warn(u32),
    /// The same batch came too many times; the run has to fail.
    Stop(u32),
}

/// Compares the batches (names, arguments, raw results) of successive turns.
#[derive(Debug)]
pub struct LoopGuard {
    warn_after: u32,
    stop_after: u32,
    last_batch_hash: Option<u64>,
    repeats: u32,
}

impl LoopGuard {
    /// Warns and stops after so many batches that are the same; 0 is never.
    pub fn new(warn_after: u32, stop_after: u32) -> Self {
        Self {
            warn_after,
            stop_after,
            last_batch_hash: None,
            repeats: 0,
        }
    }

    pub fn compare(&mut self, calls: &[ToolCall], results: &[ToolResult]) -> LoopVerdict {
        let mut hasher = DefaultHasher::new();
        for call in calls {
            (&call.name, call.sent_arguments()).hash(&mut hasher);
        }
        for result in results {
            (&result.content, result.is_error).hash(&mut hasher);
            let attachments = result.attachments.iter();
            attachments.for_each(|attachment| attachment.sha256.hash(&mut hasher));
        }
        let batch_hash = Some(hasher.finish());
        self.repeats = if self.last_batch_hash == batch_hash {
            self.repeats + 1
        } else {
            1
        };
        self.last_batch_hash = batch_hash;
        match self.repeats {
            times if self.stop_after > 0 && times >= self.stop_after => LoopVerdict::Stop(times),
            times if self.warn_after > 0 && times >= self.warn_after => LoopVerdict::Warn(times),
            _ => LoopVerdict::Continue,
        }
    }
}
