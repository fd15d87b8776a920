//! A run's time, and whether it is paused.

use tokio::time::Instant;

use crate::engine::state::deadline::Deadline;

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
    pub fn active_deadline(&self) -> Option<Deadline> {
        self.deadline
            .filter(|deadline| self.paused_since.is_none_or(|since| deadline.at <= since))
    }
}
