//! Which events of a write receivers of push notifications are notified of.

use jiff::Timestamp;

use crate::domain::event::{Event, EventName};
use crate::domain::run::RunId;

/// An event that receivers are notified of.
#[derive(Clone, Copy, Debug)]
pub struct NotifiedEvent {
    pub name: EventName,
    pub time: Timestamp,
}

/// The last event of a write that receivers are notified of: the states of a task.
pub fn notified_event(root: RunId, events: &[Event]) -> Option<NotifiedEvent> {
    let mut events = events.iter().rev();
    let event = events.find(|event| match event.kind.name() {
        EventName::ApprovalRequested | EventName::InputRequested => true,
        EventName::RunStarted => event.run_id == root,
        name => event.run_id == root && name.is_terminal(),
    })?;
    Some(NotifiedEvent {
        name: event.kind.name(),
        time: event.time,
    })
}
