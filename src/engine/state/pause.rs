//! Whether a run is paused, as a state machine. A run is paused while at least one of its calls waits and none runs; its
//! time limit is then paused.

use tokio::time::Instant;

use crate::domain::run::WaitingFor;

/// What a call of a run, or its turn, waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseReason {
    /// A call waits for human approval.
    Approval,
    /// A call waits until fewer of its siblings run. Such a call does not pause its run, but it does not keep it running
    /// either.
    Queue,
    /// The turn itself, not a call, waits for its batch.
    Batch,
}

/// What changes the calls of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEvent {
    CallsStarted(usize),
    CallFinished,
    CallPaused(PauseReason),
    CallResumed(PauseReason),
    /// The child run of a call was paused.
    ChildPaused,
    /// The child run of a call was resumed.
    ChildResumed,
    /// The run, or a run below it, is about to do something, and no call has changed.
    Resumed,
}

/// How many calls of a run are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    running: usize,
    /// Calls that wait for approval or whose child run is paused, and a turn that waits for its batch.
    waiting: usize,
    /// The waiting calls that wait for approval.
    pending_approvals: usize,
    has_pending_batch: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    Running(Calls),
    /// All calls wait. The record says that the run is `waiting`.
    Paused {
        calls: Calls,
        since: Instant,
    },
    /// The run is not paused, but the record still says that it is `waiting`, as an earlier process left it.
    Resuming(Calls),
}

impl Default for Pause {
    fn default() -> Self {
        Self::Running(Calls::default())
    }
}

impl Pause {
    /// The state after an event that happens at `now`.
    pub fn next(self, event: PauseEvent, now: Instant) -> Self {
        let calls = self.calls().after(event);
        let is_paused = calls.waiting > 0 && calls.running == 0;
        match (self, is_paused) {
            (Self::Paused { since, .. }, true) => Self::Paused { calls, since },
            (Self::Running(_) | Self::Resuming(_), true) => Self::Paused { calls, since: now },
            (Self::Running(_), false) => Self::Running(calls),
            (Self::Paused { .. } | Self::Resuming(_), false) if event.is_resumption() => {
                Self::Running(calls)
            }
            (Self::Paused { .. } | Self::Resuming(_), false) => Self::Resuming(calls),
        }
    }

    pub fn paused_since(&self) -> Option<Instant> {
        match self {
            Self::Paused { since, .. } => Some(*since),
            Self::Running(_) | Self::Resuming(_) => None,
        }
    }

    /// Whether the record says that the run is `waiting`.
    pub fn is_recorded(&self) -> bool {
        matches!(self, Self::Paused { .. } | Self::Resuming(_))
    }

    pub fn has_waiting_calls(&self) -> bool {
        self.calls().waiting > 0
    }

    /// What a paused run waits for.
    pub fn waiting_for(&self) -> WaitingFor {
        let calls = self.calls();
        match (calls.has_pending_batch, calls.pending_approvals) {
            (true, _) => WaitingFor::Batch,
            (false, 0) => WaitingFor::Children,
            (false, _) => WaitingFor::Approval,
        }
    }

    fn calls(&self) -> Calls {
        match self {
            Self::Running(calls) | Self::Paused { calls, .. } | Self::Resuming(calls) => *calls,
        }
    }
}

impl PauseEvent {
    /// Whether the run does something after this event, so that the record must not say `waiting` any more.
    pub fn is_resumption(self) -> bool {
        match self {
            Self::CallResumed(_) | Self::ChildResumed | Self::Resumed => true,
            Self::CallsStarted(_)
            | Self::CallFinished
            | Self::CallPaused(_)
            | Self::ChildPaused => false,
        }
    }
}

impl Calls {
    fn after(mut self, event: PauseEvent) -> Self {
        match event {
            PauseEvent::CallsStarted(count) => self.running += count,
            PauseEvent::CallFinished | PauseEvent::CallPaused(PauseReason::Queue) => {
                self.running = self.running.saturating_sub(1);
            }
            PauseEvent::CallPaused(PauseReason::Approval) => {
                self.running = self.running.saturating_sub(1);
                self.waiting += 1;
                self.pending_approvals += 1;
            }
            PauseEvent::CallPaused(PauseReason::Batch) => {
                self.waiting += 1;
                self.has_pending_batch = true;
            }
            PauseEvent::CallResumed(PauseReason::Queue) => self.running += 1,
            PauseEvent::CallResumed(PauseReason::Approval) => {
                self.running += 1;
                self.waiting = self.waiting.saturating_sub(1);
                self.pending_approvals = self.pending_approvals.saturating_sub(1);
            }
            PauseEvent::CallResumed(PauseReason::Batch) => {
                self.waiting = self.waiting.saturating_sub(1);
                self.has_pending_batch = false;
            }
            PauseEvent::ChildPaused => {
                self.running = self.running.saturating_sub(1);
                self.waiting += 1;
            }
            PauseEvent::ChildResumed => {
                self.running += 1;
                self.waiting = self.waiting.saturating_sub(1);
            }
            PauseEvent::Resumed => {}
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::PauseEvent::{
        CallFinished, CallPaused, CallResumed, CallsStarted, ChildPaused, ChildResumed, Resumed,
    };
    use super::PauseReason::{Approval, Batch, Queue};
    use super::{Calls, Pause, PauseEvent};
    use crate::domain::run::WaitingFor;

    fn after(start: Pause, events: &[PauseEvent]) -> Pause {
        let now = Instant::now();
        events
            .iter()
            .fold(start, |pause, event| pause.next(*event, now))
    }

    fn is_paused(events: &[PauseEvent]) -> bool {
        after(Pause::default(), events).paused_since().is_some()
    }

    #[test]
    fn a_run_is_paused_while_a_call_waits_and_none_runs() {
        assert!(!is_paused(&[CallsStarted(1)]));
        assert!(is_paused(&[CallsStarted(1), CallPaused(Approval)]));
        assert!(!is_paused(&[CallsStarted(2), CallPaused(Approval)]));
        assert!(is_paused(&[
            CallsStarted(2),
            CallPaused(Approval),
            CallFinished
        ]));
        assert!(is_paused(&[
            CallsStarted(2),
            CallPaused(Approval),
            ChildPaused
        ]));
        let resumed = [CallsStarted(1), CallPaused(Approval), CallResumed(Approval)];
        assert_eq!(
            after(Pause::default(), &resumed),
            after(Pause::default(), &[CallsStarted(1)])
        );
        assert!(is_paused(&[CallPaused(Batch)]));
        assert!(!is_paused(&[CallPaused(Batch), CallResumed(Batch)]));
        assert!(!is_paused(&[CallsStarted(1), ChildPaused, ChildResumed]));
    }

    #[test]
    fn a_queued_call_pauses_its_run_only_beside_a_waiting_one() {
        assert!(!is_paused(&[CallsStarted(1), CallPaused(Queue)]));
        let both = [CallsStarted(2), ChildPaused, CallPaused(Queue)];
        assert!(is_paused(&both));
        assert!(!after(after(Pause::default(), &both), &[CallResumed(Queue)]).is_recorded());
    }

    #[test]
    fn a_pause_keeps_its_start() {
        let start = Instant::now();
        let paused = Pause::default()
            .next(CallsStarted(2), start)
            .next(CallPaused(Approval), start)
            .next(CallPaused(Approval), start);
        let later = start + Duration::from_secs(5);
        let resumed_and_paused = paused
            .next(CallResumed(Approval), later)
            .next(CallPaused(Approval), later);
        assert_eq!(paused.next(Resumed, later).paused_since(), Some(start));
        assert_eq!(resumed_and_paused.paused_since(), Some(later));
    }

    #[test]
    fn a_recovered_pause_stays_on_the_record_until_the_run_resumes() {
        let recovered = Pause::Resuming(Calls::default());
        assert!(recovered.is_recorded() && recovered.paused_since().is_none());
        let started = after(recovered, &[CallsStarted(1)]);
        assert!(started.is_recorded());
        let paused = after(started, &[CallPaused(Approval)]);
        assert!(paused.is_recorded() && paused.paused_since().is_some());
        assert!(!after(recovered, &[Resumed]).is_recorded());
        assert!(!after(paused, &[CallResumed(Approval)]).is_recorded());
    }

    #[test]
    fn a_batch_comes_before_approvals_and_children() {
        let waiting_for = |events: &[PauseEvent]| after(Pause::default(), events).waiting_for();
        assert_eq!(waiting_for(&[CallPaused(Batch)]), WaitingFor::Batch);
        let child = [CallsStarted(2), ChildPaused];
        assert_eq!(waiting_for(&child), WaitingFor::Children);
        let approval = [CallsStarted(2), ChildPaused, CallPaused(Approval)];
        assert_eq!(waiting_for(&approval), WaitingFor::Approval);
    }
}
