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

/// What changes the calls of a run, or its children.
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
    /// A child in the background has changed, which no call of the run waits for.
    Background(BackgroundEvent),
}

/// What happens to a child in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundEvent {
    Started,
    Ended,
    Paused(WaitingFor),
    Resumed(WaitingFor),
    Changed {
        from: WaitingFor,
        to: WaitingFor,
    },
    /// It, or a run below it, is about to do something.
    Works,
}

/// How many calls and children of a run are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Calls, and the children that they wait for; a turn that waits.
    own: Counts,
    /// Children in the background.
    background: Counts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    running: u32,
    /// Those that wait, or whose child run is paused: by what it is that they wait for, in the order of [`WaitingFor::ALL`].
    waiting: [u32; WaitingFor::ALL.len()],
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
        let is_paused = calls.own.waiting() > 0 && calls.own.running == 0;
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

    /// Whether the run is paused, and no child in the background works.
    pub fn is_idle(&self) -> bool {
        self.paused_since().is_some() && self.calls().background.running == 0
    }

    pub fn has_waiting_calls(&self) -> bool {
        self.calls().own.waiting() > 0
    }

    /// What a paused run waits for: the first that applies to it or to one of its children. Children in the background count
    /// if none of them works.
    pub fn waiting_for(&self) -> WaitingFor {
        let Calls { own, background } = self.calls();
        let shows_background = background.running == 0;
        let mut reasons = WaitingFor::ALL.into_iter();
        let first = reasons.find(|reason| {
            let reason = *reason as usize;
            own.waiting[reason] > 0 || (shows_background && background.waiting[reason] > 0)
        });
        first.unwrap_or(WaitingFor::Batch)
    }

    /// How many calls and children an idle run waits for, if none of them needs memory meanwhile.
    pub fn sleeping(&self) -> Option<u32> {
        let Calls { own, background } = self.calls();
        let sleeping = own.sleeping() + background.sleeping();
        (self.is_idle() && own.waiting() + background.waiting() == sleeping).then_some(sleeping)
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
            | Self::ChildChanged { .. }
            | Self::Background(_) => false,
        }
    }

    /// Whether the run, or a run below it, does something after this event.
    pub fn is_work(self) -> bool {
        let in_background = matches!(
            self,
            Self::Background(BackgroundEvent::Works | BackgroundEvent::Resumed(_))
        );
        in_background || self.is_resumption()
    }

    /// The event of a child, if it is in the background.
    pub fn in_background(self) -> Self {
        match self {
            Self::ChildPaused(reason) => Self::Background(BackgroundEvent::Paused(reason)),
            Self::ChildResumed(reason) => Self::Background(BackgroundEvent::Resumed(reason)),
            Self::ChildChanged { from, to } => {
                Self::Background(BackgroundEvent::Changed { from, to })
            }
            Self::Resumed => Self::Background(BackgroundEvent::Works),
            other => other,
        }
    }
}

impl Calls {
    fn after(self, event: PauseEvent) -> Self {
        let Self { own, background } = self;
        match event {
            PauseEvent::Background(event) => Self {
                background: background.after_background(event),
                ..self
            },
            event => Self {
                own: own.after(event),
                ..self
            },
        }
    }
}

impl Counts {
    fn waiting(self) -> u32 {
        self.waiting.iter().sum()
    }

    fn sleeping(self) -> u32 {
        let all = WaitingFor::ALL.into_iter();
        let sleeping = all.filter(|it| it.may_sleep());
        sleeping.map(|it| self.waiting[it as usize]).sum()
    }

    fn after_background(self, event: BackgroundEvent) -> Self {
        match event {
            BackgroundEvent::Started => self.start(1),
            BackgroundEvent::Ended => self.stop(),
            BackgroundEvent::Paused(reason) => self.after(PauseEvent::ChildPaused(reason)),
            BackgroundEvent::Resumed(reason) => self.after(PauseEvent::ChildResumed(reason)),
            BackgroundEvent::Changed { from, to } => {
                self.after(PauseEvent::ChildChanged { from, to })
            }
            BackgroundEvent::Works => self,
        }
    }

    fn after(self, event: PauseEvent) -> Self {
        match event {
            PauseEvent::CallsStarted(count) => self.start(u32::try_from(count).unwrap_or(u32::MAX)),
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
            PauseEvent::Resumed | PauseEvent::Background(_) => self,
        }
    }

    fn start(mut self, count: u32) -> Self {
        self.running = self.running.saturating_add(count);
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

    use super::BackgroundEvent::{Ended, Paused, Resumed as BackgroundResumed, Started};
    use super::PauseEvent::{
        CallChanged, CallFinished, CallPaused, CallResumed, CallsStarted, ChildChanged,
        ChildPaused, ChildResumed, Resumed,
    };
    use super::PauseReason::Queue;
    use super::{Calls, Pause, PauseEvent, PauseReason};
    use crate::domain::waiting_for::WaitingFor;

    const APPROVAL: PauseReason = PauseReason::Call(WaitingFor::Approval);
    const AGENTS: PauseReason = PauseReason::Call(WaitingFor::Agents);
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
    fn children_in_the_background_neither_pause_their_parent_nor_hide_what_all_of_them_wait_for() {
        let of_child = |event| PauseEvent::Background(event);
        let [one, two] = [of_child(Started), of_child(Started)];
        let asks = of_child(Paused(WaitingFor::Approval));
        assert!(!is_paused(&[one, asks]), "its own turn goes on");
        let waits = [one, two, CallsStarted(1), CallPaused(AGENTS)];
        let after = |events: &[PauseEvent]| after(Pause::default(), &[&waits, events].concat());
        let seen = |events: &[PauseEvent]| {
            let pause = after(events);
            assert!(pause.paused_since().is_some(), "{events:?}");
            (pause.is_idle(), pause.waiting_for())
        };
        assert_eq!(seen(&[]), (false, WaitingFor::Agents));
        assert_eq!(seen(&[asks]), (false, WaitingFor::Agents));
        let ended = of_child(Ended);
        assert_eq!(seen(&[asks, ended]), (true, WaitingFor::Approval));
        let resumed = of_child(BackgroundResumed(WaitingFor::Approval));
        assert_eq!(seen(&[asks, ended, resumed]), (false, WaitingFor::Agents));
        assert!(!after(&[CallResumed(AGENTS)]).is_recorded());
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
