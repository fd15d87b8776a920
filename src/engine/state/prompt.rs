//! What a run starts with.

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::message::Message;
use crate::domain::warning::Warning;

#[derive(Clone, Debug)]
pub struct Prompt {
    /// May be empty.
    pub system: String,
    pub input: RunInput,
    /// Why the agent's memory is missing from the prompt, if it is.
    pub memory_warning: Option<Warning>,
    /// What else is missing from the prompt.
    pub warnings: Vec<Warning>,
}

/// The messages that a run starts with.
#[derive(Clone, Debug, Default)]
pub struct RunInput {
    /// The messages before the user message, oldest first.
    pub earlier: Vec<Message>,
    pub message: Content,
    /// What requests omit of the earlier messages.
    pub compaction: Option<Compaction>,
}

impl RunInput {
    /// Drops the bytes of images and files, which are in the store.
    pub fn drop_data(&mut self) {
        self.message.drop_data();
        self.earlier.iter_mut().for_each(Message::drop_data);
    }
}

impl<T: Into<Content>> From<T> for RunInput {
    fn from(message: T) -> Self {
        Self {
            message: message.into(),
            ..Self::default()
        }
    }
}
