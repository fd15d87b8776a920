//! A conversation's messages as every provider and every tool shares them. Knows no wire.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::attachment::Attachment;
use crate::domain::content::Content;

/// One entry of a conversation.
// Tagged from outside: raw JSON cannot be read back through serde's buffered (internal) tags.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// What the user (or the parent run) says.
    User {
        /// The text, or text with pictures and files.
        content: Content,
    },
    /// What the model said.
    Assistant(AssistantMessage),
    /// The results of all tool calls of the assistant message before it, in the order of the calls.
    Tool {
        /// One result for each call.
        tool_results: Vec<ToolResult>,
    },
}

impl Message {
    /// A user's text.
    pub fn user(text: impl Into<Content>) -> Self {
        Self::User {
            content: text.into(),
        }
    }

    /// The pictures and files in it.
    pub fn attachments(&self) -> impl Iterator<Item = &Attachment> {
        let (content, results) = match self {
            Self::User { content } => (Some(content), &[][..]),
            Self::Assistant(_) => (None, &[][..]),
            Self::Tool { tool_results } => (None, tool_results.as_slice()),
        };
        let content_attachments = content.into_iter().flat_map(Content::attachments);
        content_attachments.chain(results.iter().flat_map(|result| &result.attachments))
    }

    /// Drops the bytes of its pictures and files, which are in the store.
    pub fn drop_data(&mut self) {
        match self {
            Self::User { content } => content.drop_data(),
            Self::Assistant(_) => {}
            Self::Tool { tool_results } => {
                let attachments = tool_results.iter_mut().flat_map(|it| &mut it.attachments);
                attachments.for_each(|attachment| attachment.data = None);
            }
        }
    }
}

/// A model's reply as it stands in the conversation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// Its text; may be empty beside tool calls.
    pub content: String,
    /// What it asks for, in its order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// What the provider sent, for sending it back unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<Echo>,
}

/// A provider's own form of an assistant message, to be sent back to the same model unchanged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Echo {
    /// The wire, provider and model it came from; any other uses text and calls instead.
    pub wire: String,
    /// The body in that wire's own shape.
    pub body: Arc<RawValue>,
    /// Identifies the system prompt, the tools and the changed messages before it; 0 if nobody knows.
    #[serde(default)]
    pub prefix: u64,
}

/// One tool call that a reply asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ToolCall {
    /// Unique within the run, and what providers are sent: some refuse a conversation with equal ids.
    pub id: String,
    /// The id that the provider gave; empty if it is the same as `id`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub provider_id: String,
    /// The tool's name as the model wrote it.
    pub name: String,
    /// A JSON object, kept as it came; `{}` where the model sent something else.
    pub arguments: Arc<RawValue>,
}

impl ToolCall {
    /// What `name` is called with, as the tool that has that name reads it.
    ///
    /// # Errors
    /// Why it cannot be read, for the model.
    pub fn parse_arguments<T: DeserializeOwned>(&self) -> Result<T, String> {
        serde_json::from_str(self.arguments.get())
            .map_err(|error| format!("The arguments of {} cannot be read: {error}", self.name))
    }
}

/// What a tool call came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToolResult {
    /// The call's `id`.
    pub call_id: String,
    /// The text that the model reads.
    pub content: String,
    /// Whether the text is an error.
    pub is_error: bool,
    /// Pictures and files beside the text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
}

impl ToolResult {
    /// A result that is a text.
    pub fn text(call_id: &str, content: impl Into<String>, is_error: bool) -> Self {
        Self {
            call_id: call_id.to_owned(),
            content: content.into(),
            is_error,
            attachments: Vec::new(),
        }
    }
}

/// A tool as it is offered to a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ToolSpec {
    /// The name that calls use.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// JSON Schema of its arguments, an object schema.
    pub parameters: Arc<RawValue>,
}

impl ToolSpec {
    /// A tool of that name, for which `parameters` is the schema of the arguments.
    pub fn new(name: &str, description: &str, parameters: &Arc<RawValue>) -> Self {
        Self {
            name: name.to_owned(),
            description: description.to_owned(),
            parameters: Arc::clone(parameters),
        }
    }
}

/// An empty JSON object, for calls whose arguments are missing or are not an object.
pub fn empty_arguments() -> Arc<RawValue> {
    Arc::from(RawValue::from_string("{}".to_owned()).unwrap_or_default())
}

/// The beginning of the text that has at most so many bytes, cut on a character's boundary.
pub fn truncate_to_bytes(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rfind(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or_default()]
}

/// The text itself, or its first `characters` characters and `...`: for names and previews that others chose.
pub fn shorten(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}
