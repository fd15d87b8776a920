//! The text of the reply that a model is writing, for clients that begin to follow it before its end.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The text of a reply that is not recorded yet.
#[derive(Debug, Default)]
pub struct LiveText(Mutex<Option<Box<PartialReply>>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartialReply {
    pub turn: u32,
    pub text: String,
    /// Whether other text of the same turn was published before, and withdrawn.
    pub is_replacement: bool,
}

impl LiveText {
    /// Adds a piece and publishes it. A reader has each piece either in its text or in its subscription.
    pub fn push(&self, turn: u32, piece: &str, publish: impl FnOnce()) {
        let mut reply = self.lock();
        let reply = reply.get_or_insert_default();
        if reply.turn != turn {
            **reply = PartialReply {
                turn,
                ..PartialReply::default()
            };
        }
        reply.text.push_str(piece);
        publish();
    }

    /// Removes the text and publishes that.
    pub fn withdraw(&self, turn: u32, publish: impl FnOnce()) {
        let mut reply = self.lock();
        **reply.get_or_insert_default() = PartialReply {
            turn,
            text: String::new(),
            is_replacement: true,
        };
        publish();
    }

    /// Adds what was written of a reply before, and publishes it to those who had subscribed before it was known.
    pub fn restore(&self, before: &PartialReply, publish: impl FnOnce()) {
        let mut reply = self.lock();
        let reply = reply.get_or_insert_default();
        if reply.turn != before.turn {
            **reply = PartialReply {
                turn: before.turn,
                ..PartialReply::default()
            };
        }
        reply.text.push_str(&before.text);
        reply.is_replacement |= before.is_replacement;
        publish();
    }

    pub fn clear(&self) {
        *self.lock() = None;
    }

    /// Subscribes, and returns the text that was published before.
    pub fn read<T>(&self, subscribe: impl FnOnce() -> T) -> (T, Option<PartialReply>) {
        let reply = self.lock();
        (subscribe(), reply.as_deref().cloned())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<PartialReply>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{LiveText, PartialReply};

    #[test]
    fn a_reader_has_the_text_of_the_current_reply() {
        let live = LiveText::default();
        let text = || live.read(|| ()).1;
        assert_eq!(text(), None);
        live.push(1, "one", || ());
        live.push(2, "t", || ());
        live.push(2, "wo", || ());
        let reply = |text: &str, is_replacement| PartialReply {
            turn: 2,
            text: text.to_owned(),
            is_replacement,
        };
        assert_eq!(text(), Some(reply("two", false)));
        live.withdraw(2, || ());
        live.push(2, "zwei", || ());
        assert_eq!(text(), Some(reply("zwei", true)));
        live.clear();
        assert_eq!(text(), None);
    }
}
