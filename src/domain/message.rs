//! The messages of a conversation, independent of any provider's API.

use std::borrow::Cow;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::attachment::Attachment;
use crate::domain::content::Content;

/// One entry of a conversation.
// Externally tagged: serde buffers internally tagged enums, from which raw JSON cannot be read.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// A message of the user or of the parent run.
    User { content: Content },
    /// A reply of the model.
    Assistant(AssistantMessage),
    /// The results of all tool calls of the previous assistant message, in the order of the calls.
    Tool { tool_results: Vec<ToolResult> },
}

impl Message {
    pub fn user(text: impl Into<Content>) -> Self {
        Self::User {
            content: text.into(),
        }
    }

    pub fn attachments(&self) -> impl Iterator<Item = &Attachment> {
        let (content, results) = match self {
            Self::User { content } => (Some(content), &[][..]),
            Self::Assistant(_) => (None, &[][..]),
            Self::Tool { tool_results } => (None, tool_results.as_slice()),
        };
        let content_attachments = content.into_iter().flat_map(Content::attachments);
        content_attachments.chain(results.iter().flat_map(|result| &result.attachments))
    }

    /// Drops the bytes of images and files, which are in the store.
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

/// A model's reply in the conversation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// The text; may be empty if there are tool calls.
    pub content: String,
    /// The requested tool calls, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The provider's own form of the reply, which is sent back unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<Echo>,
}

/// A provider's own form of an assistant message, which is sent back unchanged to the same model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Echo {
    /// The API, provider and model that it came from. Others get the text and the calls instead.
    pub wire: String,
    /// The body in the format of that API.
    pub body: Arc<RawValue>,
    /// Identifies the system prompt, the tools and the changed messages before it; 0 if unknown.
    #[serde(default)]
    pub prefix: u64,
}

/// A tool call that a reply requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ToolCall {
    /// Unique within the run. Sent to providers, some of which reject a conversation with duplicate ids.
    pub id: String,
    /// The provider's id; empty if it equals `id`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub provider_id: String,
    /// The tool's name as the model wrote it.
    pub name: String,
    /// A JSON object as received; `{}` if the model sent anything else.
    pub arguments: Arc<RawValue>,
    /// What the model sent instead of an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalid_arguments: Option<InvalidArguments>,
}

/// Arguments that are not a JSON object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InvalidArguments {
    /// The reply reached this limit before they were complete. Such a call is not performed.
    CutBy(ReplyLimit),
    /// This text, which may be other JSON. A client's tool gets it as it is.
    Text(Arc<str>),
}

/// A limit at which a service ends a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplyLimit {
    /// The tokens of the reply.
    Tokens,
    /// The tokens of the request and the reply together.
    ContextWindow,
}

impl ToolCall {
    /// The text that the model sent instead of an object.
    pub fn invalid_text(&self) -> Option<&str> {
        match &self.invalid_arguments {
            Some(InvalidArguments::Text(text)) => Some(text),
            Some(InvalidArguments::CutBy(_)) | None => None,
        }
    }

    /// The arguments as the model sent them.
    pub fn sent_arguments(&self) -> &str {
        self.invalid_text().unwrap_or_else(|| self.arguments.get())
    }

    /// The arguments as JSON: a string if they are not an object.
    pub fn arguments_json(&self) -> Cow<'_, RawValue> {
        match self.invalid_text().map(to_raw_value) {
            Some(Ok(text)) => Cow::Owned(text),
            Some(Err(_)) | None => Cow::Borrowed(&self.arguments),
        }
    }

    /// Deserializes the arguments.
    ///
    /// # Errors
    /// A text for the model.
    pub fn parse_arguments<T: DeserializeOwned>(&self) -> Result<T, String> {
        serde_json::from_str(self.arguments.get())
            .map_err(|error| format!("The arguments of {} cannot be read: {error}", self.name))
    }
}

/// The result of a tool call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToolResult {
    /// The `id` of the tool call.
    pub call_id: String,
    /// The text for the model.
    pub content: String,
    /// Whether the text is an error.
    pub is_error: bool,
    /// Images and files in addition to the text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
}

impl ToolResult {
    /// A result without attachments.
    pub fn text(call_id: &str, content: impl Into<String>, is_error: bool) -> Self {
        Self {
            call_id: call_id.to_owned(),
            content: content.into(),
            is_error,
            attachments: Vec::new(),
        }
    }
}

/// The description of a tool for models.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ToolSpec {
    /// The name of the tool.
    pub name: String,
    /// What the tool does, for the model.
    pub description: String,
    /// The JSON Schema of the tool's arguments.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    pub parameters: Arc<RawValue>,
}

impl ToolSpec {
    pub fn new(name: &str, description: &str, parameters: &Arc<RawValue>) -> Self {
        Self {
            name: name.to_owned(),
            description: description.to_owned(),
            parameters: Arc::clone(parameters),
        }
    }
}

/// The object that the JSON is, or is the text of, encoded up to so many times; `None` for anything else.
pub fn encoded_object(json: &str, max_encodings: u32) -> Option<Box<RawValue>> {
    match json.trim_start().starts_with('"') {
        true if max_encodings > 0 => {
            let text: String = serde_json::from_str(json).ok()?;
            encoded_object(&text, max_encodings - 1)
        }
        true => None,
        false => {
            let json: Box<RawValue> = serde_json::from_str(json).ok()?;
            json.get().starts_with('{').then_some(json)
        }
    }
}

/// An empty JSON object, for calls without arguments or whose arguments are not an object.
pub fn empty_arguments() -> Arc<RawValue> {
    Arc::from(RawValue::from_string("{}".to_owned()).unwrap_or_default())
}

/// The beginning of the text, at most so many bytes, cut at a character boundary.
pub fn truncate_to_bytes(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rfind(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or_default()]
}

/// Shortens a text of more than `max_chars` characters to that many and `...`.
pub fn shorten(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}
