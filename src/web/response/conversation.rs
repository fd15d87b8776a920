//! A run's conversation as recorded, page by page.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::domain::content::Content;
use crate::domain::message::{Message, ToolCall, ToolResult};
use crate::engine::history::{self, RecordedConversation};
use crate::store::runs::PAGE_BYTES;

/// A run's conversation as recorded.
#[derive(Serialize, JsonSchema)]
pub struct Conversation<'a> {
    /// The system prompt; null until the run has started.
    system: Option<&'a str>,
    /// The messages, oldest first.
    data: Vec<MessageView<'a>>,
    /// The `after` of the next page; null on the last page.
    next_after: Option<usize>,
}

/// A message of a conversation.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Message")]
#[serde(tag = "role", rename_all = "lowercase")]
enum MessageView<'a> {
    /// A message of the user, or of the parent run.
    User {
        /// A text, or parts.
        content: &'a Content,
    },
    /// A reply of the model.
    Assistant {
        /// The text; may be empty if there are tool calls.
        content: &'a str,
        /// The tool calls that the model requests.
        tool_calls: Vec<ToolCallView<'a>>,
    },
    /// The results of the tool calls of the message before.
    Tool {
        /// In the order of the calls.
        tool_results: &'a [ToolResult],
    },
}

/// A tool call that a model requests.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ToolCall")]
struct ToolCallView<'a> {
    /// The call's id, unique within the run.
    id: &'a str,
    /// The name of the tool.
    name: &'a str,
    /// The arguments: an object, or the text that the model sent instead of one.
    #[schemars(with = "serde_json::Value")]
    arguments: Cow<'a, RawValue>,
}

impl<'a> From<&'a ToolCall> for ToolCallView<'a> {
    fn from(call: &'a ToolCall) -> Self {
        Self {
            id: &call.id,
            name: &call.name,
            arguments: call.arguments_json(),
        }
    }
}

impl<'a> Conversation<'a> {
    /// The page after the first `after` messages. It ends with the message that reaches [`PAGE_BYTES`].
    pub fn page(recorded: &'a RecordedConversation, after: usize) -> Self {
        let mut bytes = 0;
        let mut data = Vec::new();
        for message in recorded.messages.iter().skip(after) {
            data.push(match message {
                Message::User { content } => MessageView::User { content },
                Message::Assistant(reply) => MessageView::Assistant {
                    content: &reply.content,
                    tool_calls: reply.tool_calls.iter().map(ToolCallView::from).collect(),
                },
                Message::Tool { tool_results } => MessageView::Tool { tool_results },
            });
            bytes += history::message_bytes(message);
            if bytes >= PAGE_BYTES {
                break;
            }
        }
        let end = after.saturating_add(data.len());
        Self {
            system: recorded.system.as_deref(),
            data,
            next_after: (end < recorded.messages.len()).then_some(end),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;

    use super::Conversation;
    use crate::domain::message::{AssistantMessage, ToolCall, ToolResult};
    use crate::engine::history::RecordedConversation;
    use crate::record::entry::{Entry, ReplyReport};
    use crate::store::runs::PAGE_BYTES;

    fn call(id: &str) -> ToolCall {
        ToolCall {
            id: id.to_owned(),
            provider_id: "p".to_owned(),
            name: "call_agent".to_owned(),
            arguments: Arc::from(
                RawValue::from_string(r#"{"b":1,"a":2}"#.to_owned()).expect("JSON"),
            ),
            invalid_arguments: None,
        }
    }

    fn steps() -> Vec<Entry> {
        let result = |position, call: &str| Entry::CallCompleted {
            turn: 1,
            position,
            tool: String::new(),
            duration_ms: 0,
            result: ToolResult::text(call, format!("result of {call}"), false),
            refused_by: Vec::new(),
        };
        vec![
            Entry::Prompted {
                system: "be brief".to_owned(),
                message: "go".into(),
                earlier: Vec::new(),
                compaction: None,
            },
            Entry::Replied {
                turn: 1,
                message: AssistantMessage {
                    content: String::new(),
                    tool_calls: vec![call("c1"), call("c2")],
                    echo: None,
                },
                report: ReplyReport::default(),
            },
            result(1, "c2"),
            result(0, "c1"),
            Entry::Replied {
                turn: 2,
                message: AssistantMessage {
                    content: "done".to_owned(),
                    ..AssistantMessage::default()
                },
                report: ReplyReport::default(),
            },
        ]
    }

    #[test]
    fn a_conversation_reads_in_the_order_of_its_calls() {
        let recorded = RecordedConversation::from_steps(steps());
        let conversation = serde_json::to_string(&Conversation::page(&recorded, 0)).expect("JSON");
        insta::assert_snapshot!(conversation, @r#"{"system":"be brief","data":[{"role":"user","content":"go"},{"role":"assistant","content":"","tool_calls":[{"id":"c1","name":"call_agent","arguments":{"b":1,"a":2}},{"id":"c2","name":"call_agent","arguments":{"b":1,"a":2}}]},{"role":"tool","tool_results":[{"call_id":"c1","content":"result of c1","is_error":false},{"call_id":"c2","content":"result of c2","is_error":false}]},{"role":"assistant","content":"done","tool_calls":[]}],"next_after":null}"#);
        let rest = serde_json::to_value(Conversation::page(&recorded, 3)).expect("JSON");
        assert_eq!(rest["data"][0]["content"], "done");
        assert_eq!(rest["data"].as_array().map(Vec::len), Some(1));
        let long = || Entry::Followup {
            content: "x".repeat(PAGE_BYTES),
        };
        let recorded = RecordedConversation::from_steps(vec![long(), long()]);
        let first = serde_json::to_value(Conversation::page(&recorded, 0)).expect("JSON");
        assert_eq!(first["next_after"], 1);
        let second = serde_json::to_value(Conversation::page(&recorded, 1)).expect("JSON");
        assert_eq!(second["next_after"], serde_json::Value::Null);
        assert!(
            serde_json::to_string(&Conversation::page(&RecordedConversation::default(), 0))
                .expect("JSON")
                .contains("null")
        );
    }
}
