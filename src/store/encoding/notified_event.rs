//! Which events of a write receivers of push notifications are notified of.

use jiff::Timestamp;

use crate::domain::event::Event;
use crate::domain::run::RunId;

/// Events of a root run that are states of a task.
pub const ROOT_EVENTS: [&str; 4] = [
    "run.started",
    "run.completed",
    "run.failed",
    "run.cancelled",
];
/// An event of any run of the tree that is a state of the task.
const APPROVAL_REQUESTED: &str = "approval.requested";

/// An event that receivers are notified of.
#[derive(Clone, Copy, Debug)]
pub struct NotifiedEvent {
    pub name: &'static str,
    pub time: Timestamp,
}

/// The last event of a write that receivers are notified of.
pub fn notified_event(root: RunId, events: &[Event]) -> Option<NotifiedEvent> {
    let mut events = events.iter().rev();
    let event = events.find(|event| {
        let name = event.kind.name();
        name == APPROVAL_REQUESTED || event.run_id == root && ROOT_EVENTS.contains(&name)
    })?;
    Some(NotifiedEvent {
        name: event.kind.name(),
        time: event.time,
    })
}
