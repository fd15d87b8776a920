//! The messages that clients add to an unfinished run, until its conversation has them.

use std::collections::BTreeMap;

use tokio::sync::{Mutex, MutexGuard};

use crate::domain::content::Content;

/// The most messages that wait for a run's next request.
pub const MAX_UNREAD: usize = 32;
/// The most bytes of their texts and attachments together.
const MAX_UNREAD_BYTES: usize = 64 << 20;

/// Locked while a message is committed, so that a run that closes it has all messages that were accepted.
#[derive(Debug, Default)]
pub struct Inbox(Mutex<Messages>);

/// Messages are known by their number, from 1.
#[derive(Debug, Default)]
pub struct Messages {
    /// The last message in the record.
    last_added: u32,
    /// The last message in the conversation.
    last_read: u32,
    unread: BTreeMap<u32, Content>,
    is_closed: bool,
    /// Whether the record may have messages that are not known here yet: of an earlier process, or of a commit whose outcome is
    /// unknown.
    is_incomplete: bool,
}

impl Inbox {
    /// The inbox of a run that an earlier process started, before its record is read.
    pub fn unrestored() -> Self {
        Self(Mutex::new(Messages {
            is_incomplete: true,
            ..Messages::default()
        }))
    }

    pub async fn lock(&self) -> MutexGuard<'_, Messages> {
        self.0.lock().await
    }
}

impl Messages {
    /// Adds all messages that the record has, of which the conversation has the first `read`.
    pub fn restore(&mut self, recorded: &[Content], read: u32) {
        self.is_incomplete = false;
        self.last_read = self.last_read.max(read);
        for (number, content) in (1..).zip(recorded) {
            self.last_added = self.last_added.max(number);
            if number > self.last_read {
                self.insert(number, content.clone());
            }
        }
    }

    /// The record may have a message more.
    pub fn set_incomplete(&mut self) {
        self.is_incomplete = true;
    }

    pub fn next_number(&self) -> u32 {
        self.last_added + 1
    }

    /// Whether one more message of `bytes` may wait.
    pub fn has_capacity(&self, bytes: usize) -> bool {
        has_capacity(self.unread.values(), bytes)
    }

    /// Adds the next message, which is committed.
    pub fn push(&mut self, content: Content) {
        self.last_added += 1;
        self.insert(self.last_added, content);
    }

    fn insert(&mut self, number: u32, mut content: Content) {
        // The store has the bytes of images and files.
        content.drop_data();
        self.unread.insert(number, content);
    }

    pub fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// The messages that the next request includes, with the number of the last one; `None` without any.
    pub fn take_unread(&mut self) -> Option<(Vec<Content>, u32)> {
        let last = *self.unread.last_key_value()?.0;
        self.last_read = last;
        let unread = std::mem::take(&mut self.unread);
        Some((unread.into_values().collect(), last))
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Accepts no more messages: the run ends.
    pub fn close(&mut self) {
        self.is_closed = true;
    }

    pub fn unread_count(&self) -> usize {
        self.unread.len()
    }

    /// How many messages the run has; `None` if that is not known.
    pub fn count(&self) -> Option<u32> {
        (!self.is_incomplete).then_some(self.last_added)
    }
}

/// Whether one more message of `bytes` may wait beside the unread ones.
pub fn has_capacity<'c>(unread: impl ExactSizeIterator<Item = &'c Content>, bytes: usize) -> bool {
    unread.len() < MAX_UNREAD
        && bytes + unread.map(content_bytes).sum::<usize>() <= MAX_UNREAD_BYTES
}

/// The bytes of a message with its images and files.
pub fn content_bytes(content: &Content) -> usize {
    let attached = content.attachments().map(|attachment| attachment.bytes);
    let attached = usize::try_from(attached.sum::<u64>()).unwrap_or(usize::MAX);
    content.text_bytes().saturating_add(attached)
}

#[cfg(test)]
mod tests {
    use super::{MAX_UNREAD, Messages};
    use crate::domain::content::Content;

    fn texts(taken: Option<(Vec<Content>, u32)>) -> (Vec<String>, u32) {
        let (contents, last) = taken.expect("messages");
        let texts = contents.iter().map(|it| it.to_plain_text().into_owned());
        (texts.collect(), last)
    }

    #[test]
    fn messages_are_read_once_and_in_order() {
        let mut messages = Messages::default();
        assert!(messages.take_unread().is_none());
        messages.push("a".into());
        messages.push("b".into());
        let first = texts(messages.take_unread());
        assert_eq!(first, (vec!["a".to_owned(), "b".to_owned()], 2));
        messages.push("c".into());
        assert_eq!(texts(messages.take_unread()), (vec!["c".to_owned()], 3));
        assert!(!messages.has_unread());
        assert_eq!((messages.next_number(), messages.count()), (4, Some(3)));
    }

    #[test]
    fn the_record_adds_only_what_is_missing() {
        let mut messages = Messages::default();
        let recorded = ["a", "b", "c"].map(Content::from);
        messages.restore(&recorded, 1);
        messages.restore(&recorded, 1);
        messages.push("d".into());
        let unread = ["b", "c", "d"].map(str::to_owned).to_vec();
        assert_eq!(texts(messages.take_unread()), (unread, 4));
    }

    #[test]
    fn the_number_of_unread_messages_is_limited() {
        let mut messages = Messages::default();
        for _ in 0..MAX_UNREAD {
            assert!(messages.has_capacity(1));
            messages.push("x".into());
        }
        assert!(!messages.has_capacity(1));
        messages.take_unread();
        assert!(messages.has_capacity(1) && !messages.has_capacity(super::MAX_UNREAD_BYTES + 1));
    }
}
