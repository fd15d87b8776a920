//! The events of a run that say which replies are recorded.

use crate::domain::event::{EventKind, EventName};
use crate::domain::run::Run;
use crate::store::StoreError;
use crate::store::events::{self, EventPages};
use crate::web::state::AppState;

/// The recorded replies of a run.
#[derive(Clone, Debug, Default)]
pub struct Replies {
    /// Turns with the numbers of their events, ascending.
    completed: Vec<(u32, u64)>,
    /// The number of the last event by which the run continued after a restart or a pause; 0 for none.
    pub resumed: u64,
}

impl Replies {
    pub async fn read(state: &AppState, run: &Run) -> Result<Self, StoreError> {
        let mut replies = Self::default();
        let mut pages = EventPages::of_run(&**state.runner.store(), run.root_id, run.id);
        while let Some(page) = pages.next().await? {
            for event in &page {
                if let EventName::RunResumed | EventName::TurnCompleted = event.name {
                    replies.add(event.seq, &events::recorded(event)?.kind);
                }
            }
        }
        Ok(replies)
    }

    /// Adds an event of the run. Returns the turn that it completes.
    pub fn add(&mut self, seq: u64, kind: &EventKind) -> Option<u32> {
        match kind {
            EventKind::RunResumed { .. } => self.resumed = self.resumed.max(seq),
            EventKind::TurnCompleted { turn, .. } => {
                if self.event(*turn).is_none() {
                    self.completed.push((*turn, seq));
                    self.completed.sort_unstable();
                }
                return Some(*turn);
            }
            _ => {}
        }
        None
    }

    /// The number of the event of a turn's reply.
    pub fn event(&self, turn: u32) -> Option<u64> {
        let mut completed = self.completed.iter();
        completed.find(|(known, _)| *known == turn).map(|it| it.1)
    }

    /// The number of the event of the last reply before a turn; 0 for the first.
    pub fn before(&self, turn: u32) -> u64 {
        let earlier = self.completed.iter().rev().find(|(known, _)| *known < turn);
        earlier.map_or(0, |(_, event)| *event)
    }
}
