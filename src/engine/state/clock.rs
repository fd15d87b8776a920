//! The time of a run: its deadline, which moves while the run is paused.

use jiff::Timestamp;
use tokio::time::Instant;

use crate::domain::run::now;
use crate::domain::waiting_for::WaitingFor;
use crate::engine::state::deadline::Deadline;
use crate::engine::state::pause::{Pause, PauseEvent};
use crate::store::Change;

#[derive(Debug, Default)]
pub struct Clock {
    /// `None` until the run starts. Moved by the length of each pause when it ends.
    pub deadline: Option<Deadline>,
    pub pause: Pause,
    /// What the record says that the run waits for, while it is `waiting`.
    pub recorded: Option<WaitingFor>,
    /// Of a run that an earlier process left waiting: since when, by this node's clock.
    pub waiting_since: Option<Timestamp>,
}

/// What an event means beyond the run that it happened to.
#[derive(Debug)]
pub struct PauseChange {
    pub transition: Option<Transition>,
    /// The change to record for the run.
    pub record: Option<Change>,
}

/// With what the run waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    Paused(WaitingFor),
    Resumed(WaitingFor),
    /// The run stays paused and waits for something else.
    Changed {
        from: WaitingFor,
        to: WaitingFor,
    },
}

impl Clock {
    /// Applies an event to the pause, and moves the deadline if a pause ended. Callers hold the tree's `update_lock`
    /// unless no call of the run waits.
    pub fn apply(&mut self, event: PauseEvent) -> PauseChange {
        let before = self.pause;
        let instant = Instant::now();
        self.pause = before.next(event, instant);
        let (from, to) = (before.waiting_for(), self.pause.waiting_for());
        let is_paused = self.pause.paused_since().is_some();
        if let (Some(since), false) = (before.paused_since(), is_paused)
            && let Some(deadline) = self.deadline.as_mut().filter(|it| it.at > since)
        {
            deadline.at += instant - since;
        }
        // While children in the background work, the runs above do not see the run wait.
        let transition = match (before.is_idle(), self.pause.is_idle()) {
            (false, true) => Some(Transition::Paused(to)),
            (true, false) => Some(Transition::Resumed(from)),
            (true, true) if from != to => Some(Transition::Changed { from, to }),
            (false, false) | (true, true) => None,
        };
        let record = if is_paused && self.recorded != Some(to) {
            self.recorded = Some(to);
            Some(Change::Pause {
                since: now(),
                waiting_for: to,
            })
        } else if before.is_recorded() && !self.pause.is_recorded() {
            self.recorded = None;
            self.deadline.map(|deadline| Change::Unpause {
                deadline: deadline.to_wall_clock(),
            })
        } else {
            None
        };
        PauseChange { transition, record }
    }

    /// The deadline, unless the run was paused before it passed.
    pub fn active_deadline(&self) -> Option<Deadline> {
        let paused_since = self.pause.paused_since();
        self.deadline
            .filter(|deadline| paused_since.is_none_or(|since| deadline.at <= since))
    }
}
