//! The JSON of a chat completion.

use serde::Serialize;

use crate::domain::usage::TokenUsage;
use crate::web::clients::openai::chat::chat_run::ChatRun;
use crate::web::clients::stop::{ClientCall, EndReason, Stop};

#[derive(Serialize)]
pub struct Completion<'a> {
    id: String,
    object: &'static str,
    created: i64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    usage: Usage,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<()>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: Option<&'a str>,
    annotations: [(); 0],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

/// A call for the client. Streams number them.
#[derive(Serialize)]
pub struct ToolCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: &'a str,
    r#type: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl<'a> ToolCall<'a> {
    pub fn new(client_call: &'a ClientCall, index: Option<usize>) -> Self {
        let ClientCall { id, call } = client_call;
        Self {
            index,
            id,
            r#type: "function",
            function: Function {
                name: &call.name,
                arguments: call.sent_arguments(),
            },
        }
    }
}

/// The tokens of the whole tree.
#[derive(Serialize)]
pub struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
}

impl From<TokenUsage> for Usage {
    fn from(tokens: TokenUsage) -> Self {
        Self {
            prompt_tokens: tokens.input,
            completion_tokens: tokens.output,
            total_tokens: tokens.total(),
            prompt_tokens_details: PromptDetails {
                cached_tokens: tokens.cache_read,
            },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: tokens.reasoning,
            },
        }
    }
}

impl<'a> Completion<'a> {
    /// `stop` is not a failure.
    pub fn new(chat_run: &'a ChatRun, stop: &'a Stop, tokens: TokenUsage) -> Self {
        let (content, refusal, calls) = match stop {
            Stop::Completed { content, .. } => (Some(content.as_str()), None, &[][..]),
            Stop::Refused { explanation } => (None, Some(explanation.as_str()), &[][..]),
            Stop::Calls { content, calls } => {
                let content = Some(content.as_str()).filter(|text| !text.is_empty());
                (content, None, calls.as_slice())
            }
            Stop::Failed(failure) => (None, Some(failure.message.as_str()), &[][..]),
        };
        let message = Message {
            role: "assistant",
            content,
            refusal,
            annotations: [],
            tool_calls: calls.iter().map(|call| ToolCall::new(call, None)).collect(),
        };
        Self {
            id: chat_run.id(),
            object: "chat.completion",
            created: chat_run.run.created_at.as_second(),
            model: &chat_run.model,
            choices: [Choice {
                index: 0,
                message,
                logprobs: None,
                finish_reason: finish_reason(stop),
            }],
            usage: tokens.into(),
        }
    }
}

pub fn finish_reason(stop: &Stop) -> &'static str {
    match stop {
        Stop::Completed { reason, .. } => match reason {
            EndReason::Done => "stop",
            EndReason::Length => "length",
            EndReason::Filter => "content_filter",
        },
        Stop::Refused { .. } | Stop::Failed(_) => "content_filter",
        Stop::Calls { .. } => "tool_calls",
    }
}
