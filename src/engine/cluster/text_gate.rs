//! Decides which texts of another node's models are shown: pieces may be lost on their way, and a text with a hole is worse than
//! none until its record.

use std::collections::HashMap;

use crate::domain::run::RunId;
use crate::engine::state::broadcaster::ShownTurns;

#[derive(Debug, Default)]
pub struct TextGate {
    /// The number of the last message.
    last_number: u64,
    /// Whether messages were lost, so that the current turn of each run may have a hole.
    has_gap: bool,
    /// The turns of which nothing more is shown.
    muted: HashMap<RunId, u32>,
    /// The last turn of each run of which something was shown and not withdrawn.
    shown: ShownTurns,
    /// The last turn of each run that is recorded.
    recorded: HashMap<RunId, u32>,
}

impl TextGate {
    /// After others have shown these turns.
    pub fn new(shown: ShownTurns) -> Self {
        Self {
            shown,
            ..Self::default()
        }
    }

    /// Notes the number of a message. A sender that begins has called [`Self::begin`] before its first, which is 1.
    pub fn on_number(&mut self, number: u64) {
        if number != self.last_number + 1 {
            self.muted.clear();
            self.has_gap = true;
        }
        self.last_number = number;
    }

    /// Another sender begins, or the same one again: of the turns that were shown, what was written meanwhile is lost.
    pub fn begin(&mut self) {
        self.muted = self.shown.clone();
        self.has_gap = false;
        self.last_number = 0;
    }

    /// Notes that something of a turn is shown.
    pub fn on_shown(&mut self, run: RunId, turn: u32) {
        self.shown.insert(run, turn);
    }

    /// Notes that what was shown of a run's turn is withdrawn: it may be shown again from its beginning.
    pub fn on_withdrawn(&mut self, run: RunId) {
        self.shown.remove(&run);
    }

    /// Whether a piece of a turn may be shown; `is_withdrawal` if it says that the text so far counts no more.
    pub fn admits(&mut self, run: RunId, turn: u32, is_withdrawal: bool) -> bool {
        if self.recorded.get(&run).is_some_and(|last| turn <= *last) {
            return false;
        }
        if is_withdrawal {
            // The text begins again.
            self.muted.insert(run, 0);
        } else if self.has_gap {
            self.muted.entry(run).or_insert(turn);
        }
        self.muted.get(&run) != Some(&turn)
    }

    /// Pieces that arrive after the record of their turn are late.
    pub fn on_recorded(&mut self, run: RunId, turn: u32) {
        self.recorded.insert(run, turn);
    }
}

#[cfg(test)]
mod tests {
    use super::TextGate;
    use crate::domain::run::RunId;

    #[test]
    fn a_text_with_a_hole_ends() {
        let (run, mut gate) = (RunId::new(), TextGate::default());
        gate.on_number(1);
        assert!(gate.admits(run, 1, false));
        gate.on_number(3);
        assert!(!gate.admits(run, 1, false));
        gate.on_number(4);
        assert!(!gate.admits(run, 1, false));
        assert!(gate.admits(run, 1, true) && gate.admits(run, 1, false));
        gate.on_recorded(run, 1);
        assert!(!gate.admits(run, 1, false) && gate.admits(run, 2, false));
    }

    #[test]
    fn a_sender_that_begins_again_repeats_no_text() {
        let (run, other, mut gate) = (RunId::new(), RunId::new(), TextGate::default());
        gate.on_number(1);
        assert!(gate.admits(run, 1, false));
        gate.on_shown(run, 1);
        gate.begin();
        gate.on_number(1);
        assert!(!gate.admits(run, 1, false) && gate.admits(other, 1, false));
        assert!(gate.admits(run, 2, false));
        // What was admitted and not shown is new to the next sender too.
        gate.begin();
        assert!(gate.admits(run, 2, false));
    }

    #[test]
    fn a_withdrawn_text_may_begin_at_the_next_sender() {
        let (run, mut gate) = (RunId::new(), TextGate::default());
        gate.on_number(1);
        gate.on_shown(run, 1);
        gate.on_number(2);
        assert!(gate.admits(run, 1, true));
        gate.on_withdrawn(run);
        gate.begin();
        gate.on_number(1);
        assert!(gate.admits(run, 1, false));
    }
}
