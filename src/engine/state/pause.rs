//! Whether a run is paused, as a state machine. A run is paused while at least one of its calls waits and none runs; its
//! time limit is then paused.

use tokio::time::Instant;

use crate::domain::waiting_for::WaitingFor;

/// What a call of a run, or its turn, waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseReason {
    /// A call waits for this.
    Call(WaitingFor),
    /// A call waits until fewer of its siblings run. Such a call does not pause its run, but it does not keep it running
    /// either.
    Queue,
    /// The turn itself, not a call, waits for this.
    Turn(WaitingFor),
}

/// What changes the calls of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEvent {
    CallsStarted(usize),
    CallFinished,
    CallPaused(PauseReason),
    CallResumed(PauseReason),
    /// A call that waited for one thing waits for another now.
    CallChanged {
        from: PauseReason,
        to: PauseReason,
    },
    /// The child run of a call was paused.
    ChildPaused(WaitingFor),
    /// The child run of a call was resumed; it had waited for this.
    ChildResumed(WaitingFor),
    /// The paused child run of a call waits for something else now.
    ChildChanged {
        from: WaitingFor,
        to: WaitingFor,
    },
    /// The run, or a run below it, is about to do something, and no call has changed.
    Resumed,
}

/// How many calls of a run are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    running: usize,
    /// Calls that wait, or whose child run is paused, and a turn that waits: by what it is that they wait for, in the order of
    /// [`WaitingFor::ALL`].
    waiting: [usize; WaitingFor::ALL.len()],
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
        let is_paused = calls.waiting() > 0 && calls.running == 0;
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
        self.calls().waiting() > 0
    }

    /// What a paused run waits for: the first that applies to it or to one of its children.
    pub fn waiting_for(&self) -> WaitingFor {
        let mut counts = WaitingFor::ALL.into_iter().zip(self.calls().waiting);
        let first = counts.find(|(_, count)| *count > 0);
        first.map_or(WaitingFor::Batch, |(waiting_for, _)| waiting_for)
    }

    /// How many calls and child runs a paused run waits for, if all of them wait for a time or an event.
    pub fn sleeping(&self) -> Option<usize> {
        let Self::Paused { calls, .. } = self else {
            return None;
        };
        let sleeping = [WaitingFor::Sleep, WaitingFor::Event];
        let sleeping = sleeping.map(|it| calls.waiting[it as usize]).iter().sum();
        (calls.waiting() == sleeping).then_some(sleeping)
    }

    fn calls(&self) -> Calls {
        match self {
            Self::Running(calls) | Self::Paused { calls, .. } | Self::Resuming(calls) => *calls,
        }
    }
}

impl PauseReason {
    /// `None` if the run does not wait for it.
    fn waiting_for(self) -> Option<WaitingFor> {
        match self {
            Self::Call(waiting_for) | Self::Turn(waiting_for) => Some(waiting_for),
            Self::Queue => None,
        }
    }

    fn is_of_call(self) -> bool {
        !matches!(self, Self::Turn(_))
    }
}

impl PauseEvent {
    /// Whether the run does something after this event, so that the record must not say `waiting` any more.
    pub fn is_resumption(self) -> bool {
        match self {
            Self::CallResumed(_) | Self::ChildResumed(_) | Self::Resumed => true,
            Self::CallsStarted(_)
            | Self::CallFinished
            | Self::CallPaused(_)
            | Self::CallChanged { .. }
            | Self::ChildPaused(_)
            | Self::ChildChanged { .. } => false,
        }
    }
}

impl Calls {
    fn waiting(self) -> usize {
        self.waiting.iter().sum()
    }

    fn after(self, event: PauseEvent) -> Self {
        match event {
            PauseEvent::CallsStarted(count) => self.start(count),
            PauseEvent::CallFinished => self.stop(),
            PauseEvent::CallPaused(reason) if reason.is_of_call() => {
                self.stop().wait_for(reason.waiting_for())
            }
            PauseEvent::CallPaused(reason) => self.wait_for(reason.waiting_for()),
            PauseEvent::CallResumed(reason) if reason.is_of_call() => {
                self.start(1).wait_no_more(reason.waiting_for())
            }
            PauseEvent::CallResumed(reason) => self.wait_no_more(reason.waiting_for()),
            PauseEvent::CallChanged { from, to } => self
                .wait_no_more(from.waiting_for())
                .wait_for(to.waiting_for()),
            PauseEvent::ChildPaused(reason) => self.stop().wait_for(Some(reason)),
            PauseEvent::ChildResumed(reason) => self.start(1).wait_no_more(Some(reason)),
            PauseEvent::ChildChanged { from, to } => {
                self.wait_no_more(Some(from)).wait_for(Some(to))
            }
            PauseEvent::Resumed => self,
        }
    }

    fn start(mut self, count: usize) -> Self {
        self.running += count;
        self
    }

    fn stop(mut self) -> Self {
        self.running = self.running.saturating_sub(1);
        self
    }

    fn wait_for(mut self, reason: Option<WaitingFor>) -> Self {
        if let Some(reason) = reason {
            self.waiting[reason as usize] += 1;
        }
        self
    }

    fn wait_no_more(mut self, reason: Option<WaitingFor>) -> Self {
        if let Some(reason) = reason {
            let count = &mut self.waiting[reason as usize];
            *count = count.saturating_sub(1);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::PauseEvent::{
        CallChanged, CallFinished, CallPaused, CallResumed, CallsStarted, ChildChanged,
        ChildPaused, ChildResumed, Resumed,
    };
    use super::PauseReason::Queue;
    use super::{Calls, Pause, PauseEvent, PauseReason};
    use crate::domain::waiting_for::WaitingFor;

    const APPROVAL: PauseReason = PauseReason::Call(WaitingFor::Approval);
    const BATCH: PauseReason = PauseReason::Turn(WaitingFor::Batch);
    const CALL_HELD: PauseReason = PauseReason::Call(WaitingFor::Resume);
    const TURN_HELD: PauseReason = PauseReason::Turn(WaitingFor::Resume);

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
        assert!(is_paused(&[CallsStarted(1), CallPaused(APPROVAL)]));
        assert!(!is_paused(&[CallsStarted(2), CallPaused(APPROVAL)]));
        assert!(is_paused(&[
            CallsStarted(2),
            CallPaused(APPROVAL),
            CallFinished
        ]));
        assert!(is_paused(&[
            CallsStarted(2),
            CallPaused(APPROVAL),
            ChildPaused(WaitingFor::Approval)
        ]));
        let resumed = [CallsStarted(1), CallPaused(APPROVAL), CallResumed(APPROVAL)];
        assert_eq!(
            after(Pause::default(), &resumed),
            after(Pause::default(), &[CallsStarted(1)])
        );
        assert!(is_paused(&[CallPaused(BATCH)]));
        assert!(!is_paused(&[CallPaused(BATCH), CallResumed(BATCH)]));
        assert!(!is_paused(&[
            CallsStarted(1),
            ChildPaused(WaitingFor::Resume),
            ChildResumed(WaitingFor::Resume)
        ]));
    }

    #[test]
    fn a_queued_call_pauses_its_run_only_beside_a_waiting_one() {
        assert!(!is_paused(&[CallsStarted(1), CallPaused(Queue)]));
        let child = ChildPaused(WaitingFor::Approval);
        let both = [CallsStarted(2), child, CallPaused(Queue)];
        assert!(is_paused(&both));
        assert!(!after(after(Pause::default(), &both), &[CallResumed(Queue)]).is_recorded());
    }

    #[test]
    fn a_pause_keeps_its_start() {
        let start = Instant::now();
        let paused = Pause::default()
            .next(CallsStarted(2), start)
            .next(CallPaused(APPROVAL), start)
            .next(CallPaused(APPROVAL), start);
        let later = start + Duration::from_secs(5);
        let resumed_and_paused = paused
            .next(CallResumed(APPROVAL), later)
            .next(CallPaused(APPROVAL), later);
        assert_eq!(paused.next(Resumed, later).paused_since(), Some(start));
        assert_eq!(resumed_and_paused.paused_since(), Some(later));
    }

    #[test]
    fn a_recovered_pause_stays_on_the_record_until_the_run_resumes() {
        let recovered = Pause::Resuming(Calls::default());
        assert!(recovered.is_recorded() && recovered.paused_since().is_none());
        let started = after(recovered, &[CallsStarted(1)]);
        assert!(started.is_recorded());
        let paused = after(started, &[CallPaused(APPROVAL)]);
        assert!(paused.is_recorded() && paused.paused_since().is_some());
        assert!(!after(recovered, &[Resumed]).is_recorded());
        assert!(!after(paused, &[CallResumed(APPROVAL)]).is_recorded());
    }

    #[test]
    fn a_held_turn_and_held_calls_pause_their_run() {
        assert!(is_paused(&[CallPaused(TURN_HELD)]));
        assert!(!is_paused(&[CallPaused(TURN_HELD), CallResumed(TURN_HELD)]));
        let one_held = [CallsStarted(2), CallPaused(CALL_HELD)];
        assert!(!is_paused(&one_held));
        assert!(is_paused(&[
            CallsStarted(2),
            CallPaused(CALL_HELD),
            CallPaused(CALL_HELD)
        ]));
    }

    #[test]
    fn an_approval_comes_before_a_resume_and_a_batch() {
        let waiting_for = |events: &[PauseEvent]| after(Pause::default(), events).waiting_for();
        assert_eq!(waiting_for(&[CallPaused(BATCH)]), WaitingFor::Batch);
        let held = [
            CallsStarted(2),
            ChildPaused(WaitingFor::Batch),
            CallPaused(CALL_HELD),
        ];
        assert_eq!(waiting_for(&held), WaitingFor::Resume);
        let child = ChildPaused(WaitingFor::Resume);
        let approval = [CallsStarted(2), child, CallPaused(APPROVAL)];
        assert_eq!(waiting_for(&approval), WaitingFor::Approval);
        let decided = CallChanged {
            from: APPROVAL,
            to: CALL_HELD,
        };
        assert_eq!(
            waiting_for(&[approval.as_slice(), &[decided]].concat()),
            WaitingFor::Resume
        );
        let of_child = ChildChanged {
            from: WaitingFor::Resume,
            to: WaitingFor::Batch,
        };
        assert_eq!(
            waiting_for(&[CallsStarted(1), child, of_child]),
            WaitingFor::Batch
        );
    }
}
