//! The size limits of one run's requests.

use crate::domain::message::ToolSpec;
use crate::engine::context::RunContext;
use crate::engine::conversation::Conversation;
use crate::engine::conversation::context_window::ContextWindow;
use crate::engine::conversation::request_size::{self, SentAttachments};

#[derive(Clone, Copy, Debug)]
pub struct RequestBounds {
    pub window: ContextWindow,
    /// Bytes of the system prompt, the tool definitions and the schema of the reply.
    pub preamble: usize,
    /// The attachments that one of the models may get.
    pub sent: SentAttachments,
}

impl RequestBounds {
    /// `None` if the model's context window is unknown.
    pub fn new(context: &RunContext, system: &str, tools: &[ToolSpec]) -> Option<Self> {
        let models = &context.engine.settings.models;
        let window = ContextWindow::for_agent(models, &context.run.agent)?;
        Some(Self::with_window(context, system, tools, window))
    }

    pub fn with_window(
        context: &RunContext,
        system: &str,
        tools: &[ToolSpec],
        window: ContextWindow,
    ) -> Self {
        let models = &context.engine.settings.models;
        Self {
            window,
            preamble: request_size::preamble_bytes(
                system,
                tools,
                &context.run.agent.params.response_format,
            ),
            sent: SentAttachments::for_agent(models, &context.run.agent),
        }
    }

    /// The tokens of the next request.
    pub fn estimate_tokens(&self, conversation: &Conversation) -> u64 {
        conversation.estimate_tokens(self.preamble, self.sent)
    }

    /// Whether the next request is too large.
    pub fn is_exceeded(&self, conversation: &Conversation) -> bool {
        self.estimate_tokens(conversation) > self.window.compact_threshold
    }
}
