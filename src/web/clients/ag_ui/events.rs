//! The events of AG-UI. Optional members are left out, never null.

use serde_json::{Value, json};

use crate::domain::run::Run;
use crate::domain::usage::TokenUsage;
use crate::web::response::sse;

const PROTOCOL_VERSION: &str = "1.0";

/// Events that are not sent yet.
#[derive(Default)]
pub struct Frames(pub String);

impl Frames {
    pub fn push(&mut self, event: &Value) {
        sse::push_data(&mut self.0, event);
    }
}

pub fn run_started(thread: &str, request: &str, run: &Run) -> Value {
    json!({
        "type": "RUN_STARTED",
        "threadId": thread,
        "runId": request,
        "protocolVersion": PROTOCOL_VERSION,
        "metadata": { "axed/run_id": run.id },
    })
}

/// `outcome` is what the run has come to: success, interrupt or cancelled. `usage` is that of this response, by model.
pub fn run_finished(
    thread: &str,
    request: &str,
    outcome: Value,
    usage: &[(String, TokenUsage)],
) -> Value {
    let usage = usage.iter().map(|(model, tokens)| {
        json!({
            "model": model,
            "inputTokens": tokens.input,
            "outputTokens": tokens.output,
            "totalTokens": tokens.total(),
            "cachedInputTokens": tokens.cache_read,
            "cacheWriteInputTokens": tokens.cache_write,
        })
    });
    json!({
        "type": "RUN_FINISHED",
        "threadId": thread,
        "runId": request,
        "outcome": outcome,
        "usage": usage.collect::<Vec<_>>(),
    })
}

pub fn run_error(message: &str, code: &str) -> Value {
    json!({ "type": "RUN_ERROR", "message": message, "code": code })
}

pub fn text_start(message: &str) -> Value {
    json!({ "type": "TEXT_MESSAGE_START", "messageId": message, "role": "assistant" })
}

pub fn text_content(message: &str, delta: &str) -> Value {
    json!({ "type": "TEXT_MESSAGE_CONTENT", "messageId": message, "delta": delta })
}

pub fn text_end(message: &str) -> Value {
    json!({ "type": "TEXT_MESSAGE_END", "messageId": message })
}

/// A whole call: its start, arguments and end.
pub fn tool_call(call: &str, name: &str, message: &str, arguments: &str) -> [Value; 3] {
    [
        json!({
            "type": "TOOL_CALL_START",
            "toolCallId": call,
            "toolCallName": name,
            "parentMessageId": message,
        }),
        json!({ "type": "TOOL_CALL_ARGS", "toolCallId": call, "delta": arguments }),
        json!({ "type": "TOOL_CALL_END", "toolCallId": call }),
    ]
}

pub fn tool_result(message: &str, call: &str, content: &str) -> Value {
    json!({
        "type": "TOOL_CALL_RESULT",
        "messageId": message,
        "toolCallId": call,
        "content": content,
        "role": "tool",
    })
}

pub fn messages_snapshot(messages: Vec<Value>) -> Value {
    let mut event = json!({ "type": "MESSAGES_SNAPSHOT" });
    event["messages"] = messages.into();
    event
}
