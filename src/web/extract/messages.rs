//! The earlier messages that a client sends with a run: reads them and checks the order that providers require.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::domain::content::{Content, Part};
use crate::domain::message::{
    AssistantMessage, InvalidArguments, Message, ToolCall, ToolResult, empty_arguments,
    encoded_object,
};
use crate::web::body::content::{AttachmentCounter, ContentInput};
use crate::web::body::json_body::{self, MAX_DEPTH, Object};
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;

// As it is read. `MessageSchema` tells which message has which fields.
/// An earlier message, in the form that `GET /runs/{id}/messages` returns.
#[derive(Deserialize, JsonSchema)]
#[schemars(with = "MessageSchema", rename = "MessageInput")]
#[serde(deny_unknown_fields)]
pub struct MessageInput {
    role: Role,
    content: Option<ContentInput>,
    tool_calls: Option<Vec<Object<ToolCallInput>>>,
    tool_results: Option<Vec<Object<ToolResultInput>>>,
}

/// An earlier message, in the form that `GET /runs/{id}/messages` returns.
#[derive(Deserialize, JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
#[schemars(rename = "MessageInput")]
#[serde(tag = "role", rename_all = "lowercase", deny_unknown_fields)]
enum MessageSchema {
    /// A message of the user.
    User {
        /// A text, or parts.
        content: ContentInput,
    },
    /// A reply of the model. It has a text, tool calls, or both.
    Assistant {
        /// The text.
        content: Option<String>,
        /// The tool calls that the reply requests.
        tool_calls: Option<Vec<ToolCallInput>>,
    },
    /// The results of all tool calls of the message before.
    Tool {
        /// One result for each call.
        tool_results: Vec<ToolResultInput>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    User,
    Assistant,
    Tool,
}

/// A tool call of an earlier reply.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ToolCallInput {
    /// The call's id, unique within its message.
    id: String,
    /// The name of the tool.
    name: String,
    /// The arguments: an object, or the text that the model sent instead of one; absent means none.
    #[schemars(with = "Option<serde_json::Value>")]
    arguments: Option<Box<RawValue>>,
}

/// The result of a tool call of the message before.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ToolResultInput {
    /// The `id` of the tool call.
    call_id: String,
    /// A text, or parts.
    content: ContentInput,
    /// Whether the content is an error.
    #[serde(default)]
    is_error: bool,
}

/// The messages, checked: the first is a user's, results follow right after their calls, no two replies are adjacent.
/// Results are put into the order of their calls.
pub fn parse_messages(
    inputs: Vec<Object<MessageInput>>,
    counter: &mut AttachmentCounter,
) -> Result<Vec<Message>, Problem> {
    let mut messages: Vec<Message> = Vec::with_capacity(inputs.len());
    for (at, Object(message)) in inputs.into_iter().enumerate() {
        let message = message.check(&format!("/messages/{at}"), counter)?;
        let message = message
            .into_message(messages.last())
            .map_err(|why| invalid_message(at, why))?;
        messages.push(message);
    }
    match unanswered_calls(messages.last()) {
        [] => Ok(messages),
        [call, ..] => Err(invalid_message(
            messages.len() - 1,
            format!(
                "calls tools and is the last; the call {} has no result",
                quote(&call.id)
            ),
        )),
    }
}

fn invalid_message(at: usize, why: String) -> Problem {
    Problem::field(ProblemCode::InvalidMessages, format!("/messages/{at}"), why)
}

/// A message whose content is checked.
struct CheckedMessage {
    role: Role,
    content: Option<Content>,
    tool_calls: Option<Vec<Object<ToolCallInput>>>,
    tool_results: Option<Vec<ToolResult>>,
}

impl MessageInput {
    /// Checks the content; `pointer` is the message's place in the body.
    fn check(
        self,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<CheckedMessage, Problem> {
        let content_pointer = format!("{pointer}/content");
        let content = self
            .content
            .map(|content| content.into_content(&content_pointer, counter));
        let results = self.tool_results.map(|results| {
            let results = results.into_iter().enumerate();
            let results = results.map(|(at, Object(result))| {
                let result_pointer = format!("{pointer}/tool_results/{at}/content");
                result.into_result(&result_pointer, counter)
            });
            results.collect::<Result<_, _>>()
        });
        Ok(CheckedMessage {
            role: self.role,
            content: content.transpose()?,
            tool_calls: self.tool_calls,
            tool_results: results.transpose()?,
        })
    }
}

impl ToolResultInput {
    /// The result: its texts joined, and its images and files as attachments.
    fn into_result(
        self,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<ToolResult, Problem> {
        let result = |content| ToolResult::text(&self.call_id, content, self.is_error);
        let parts = match self.content.into_content(pointer, counter)? {
            Content::Text(text) => return Ok(result(text)),
            Content::Parts(parts) => parts,
        };
        let (mut texts, mut attachments) = (Vec::new(), Vec::new());
        for (at, part) in parts.into_iter().enumerate() {
            match part {
                Part::Link(_) => {
                    let part_pointer = format!("{pointer}/{at}/url");
                    let why = "is only for a user's message; send data";
                    return Err(Problem::invalid_field(part_pointer, why));
                }
                Part::Text { text } => texts.push(text),
                Part::Image(attachment) | Part::File(attachment) => attachments.push(attachment),
            }
        }
        Ok(ToolResult {
            attachments,
            ..result(texts.join("\n"))
        })
    }
}

impl CheckedMessage {
    /// The message, if it may follow `last`.
    fn into_message(self, last: Option<&Message>) -> Result<Message, String> {
        let name_if = |is: bool, name| if is { Some(name) } else { None };
        let extra = match self.role {
            Role::User => name_if(self.tool_calls.is_some(), "tool_calls")
                .or(name_if(self.tool_results.is_some(), "tool_results")),
            Role::Assistant => name_if(self.tool_results.is_some(), "tool_results"),
            Role::Tool => name_if(self.tool_calls.is_some(), "tool_calls")
                .or(name_if(self.content.is_some(), "content")),
        };
        if let Some(extra) = extra {
            return Err(format!("a message of this role has no {extra}"));
        }
        if let ([call, ..], Role::User | Role::Assistant) = (unanswered_calls(last), self.role) {
            return Err(format!(
                "comes before the result of the call {}",
                quote(&call.id)
            ));
        }
        let content = self.content.unwrap_or_default();
        match self.role {
            Role::User if content.is_blank() => Err("needs a content".to_owned()),
            Role::User => Ok(Message::User { content }),
            Role::Assistant => match last {
                None => Err("the first message is a user's".to_owned()),
                Some(Message::Assistant(_)) => {
                    Err("follows another reply; there is a user's message between two".to_owned())
                }
                Some(Message::User { .. } | Message::Tool { .. }) => match content {
                    Content::Text(text) => {
                        assistant_message(text, self.tool_calls.unwrap_or_default())
                    }
                    Content::Parts(_) => Err("the content of a reply is a text".to_owned()),
                },
            },
            Role::Tool => tool_message(
                unanswered_calls(last),
                self.tool_results.unwrap_or_default(),
            ),
        }
    }
}

/// The tool calls of a message. The next message has to contain their results.
fn unanswered_calls(last: Option<&Message>) -> &[ToolCall] {
    match last {
        Some(Message::Assistant(reply)) => &reply.tool_calls,
        _ => &[],
    }
}

fn assistant_message(
    content: String,
    calls: Vec<Object<ToolCallInput>>,
) -> Result<Message, String> {
    if content.trim().is_empty() && calls.is_empty() {
        return Err("needs a content, or tool_calls".to_owned());
    }
    let mut ids = HashSet::new();
    let mut tool_calls = Vec::with_capacity(calls.len());
    for Object(ToolCallInput {
        id,
        name,
        arguments,
    }) in calls
    {
        if id.is_empty() || name.is_empty() {
            return Err("a tool call has an id and a name that are not empty".to_owned());
        }
        if !ids.insert(id.clone()) {
            return Err(format!("has two calls with the id {}", quote(&id)));
        }
        let (arguments, invalid_arguments) = match arguments.as_deref().map(RawValue::get) {
            None => (empty_arguments(), None),
            // OpenAI writes an object as a text.
            Some(json) => match (encoded_object(json, 1), serde_json::from_str(json)) {
                // serde skips raw JSON without recursion, so its depth has not been checked yet.
                (Some(object), _) if json_body::nesting_depth(object.get()) <= MAX_DEPTH => {
                    (Arc::from(object), None)
                }
                (None, Ok(text)) => (empty_arguments(), Some(InvalidArguments::Text(text))),
                _ => {
                    return Err(format!(
                        "the arguments of the call {} are no object of at most {MAX_DEPTH} levels, and no text",
                        quote(&id)
                    ));
                }
            },
        };
        tool_calls.push(ToolCall {
            id,
            provider_id: String::new(),
            name,
            arguments,
            invalid_arguments,
        });
    }
    Ok(Message::Assistant(AssistantMessage {
        content,
        tool_calls,
        echo: None,
    }))
}

/// The message with one result for each call.
fn tool_message(calls: &[ToolCall], results: Vec<ToolResult>) -> Result<Message, String> {
    if calls.is_empty() {
        return Err("does not follow a reply with tool calls".to_owned());
    }
    let mut ordered: Vec<Option<ToolResult>> = calls.iter().map(|_| None).collect();
    let positions: HashMap<&str, usize> = calls
        .iter()
        .enumerate()
        .map(|(position, call)| (call.id.as_str(), position))
        .collect();
    for result in results {
        let call_id = quote(&result.call_id);
        let Some(position) = positions.get(result.call_id.as_str()) else {
            return Err(format!(
                "answers {call_id}, which the reply before it does not call"
            ));
        };
        if ordered[*position].is_some() {
            return Err(format!("has two results for the call {call_id}"));
        }
        ordered[*position] = Some(result);
    }
    if let Some((call, _)) = calls
        .iter()
        .zip(&ordered)
        .find(|(_, found)| found.is_none())
    {
        return Err(format!("has no result for the call {}", quote(&call.id)));
    }
    Ok(Message::Tool {
        tool_results: ordered.into_iter().flatten().collect(),
    })
}
