//! The JSON of a response and of its items.

use serde_json::{Value, json};

use crate::domain::content::{Content, Part};
use crate::domain::failure::FailureCode;
use crate::domain::message::Message;
use crate::domain::run::{RunId, Status};
use crate::domain::usage::TokenUsage;
use crate::web::clients::call_id::CallRef;
use crate::web::clients::openai::responses::record::ResponseRecord;
use crate::web::clients::stop::{ClientCall, EndReason, end_reason};

/// The whole response.
pub fn response(record: &ResponseRecord) -> Value {
    let (run, echo) = (&record.run, &record.echo);
    let incomplete = incomplete_reason(record);
    let status = match incomplete {
        Some(_) => "incomplete",
        None => record.status(),
    };
    let is_run_done = status == "completed" && !record.ends_with_calls();
    let finished = run.finished_at.filter(|_| is_run_done);
    let error = run.error.as_ref().filter(|_| status == "failed");
    let error = error.map(|error| json!({"code": error.code, "message": error.message}));
    let tools = record.tools.iter().map(|tool| {
        json!({
            "type": "function", "name": tool.name, "description": tool.description,
            "parameters": tool.parameters, "strict": false,
        })
    });
    json!({
        "id": record.reference.to_string(),
        "object": "response",
        "created_at": run.created_at.as_second(),
        "completed_at": finished.map(|at| at.as_second()),
        "status": status,
        "error": error,
        "incomplete_details": incomplete.map(|reason| json!({"reason": reason})),
        "instructions": echo.instructions,
        "model": echo.model,
        "output": output(record),
        "previous_response_id": echo.previous_response_id,
        "conversation": echo.conversation.as_ref().map(|id| json!({"id": id})),
        "tools": tools.collect::<Vec<_>>(),
        "tool_choice": echo.tool_choice,
        "parallel_tool_calls": true,
        "text": {"format": echo.format},
        "reasoning": {"effort": echo.effort, "summary": null},
        "temperature": echo.temperature.unwrap_or(1.0),
        "top_p": echo.top_p.unwrap_or(1.0),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "max_output_tokens": echo.max_output_tokens,
        "max_tool_calls": null,
        "truncation": "disabled",
        "store": echo.store,
        "background": echo.background,
        "service_tier": "default",
        "metadata": echo.metadata,
        "user": echo.user,
        "safety_identifier": null,
        "prompt_cache_key": null,
        "usage": record.tokens.map(usage),
    })
}

fn usage(tokens: TokenUsage) -> Value {
    json!({
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cache_read, "cache_write_tokens": tokens.cache_write},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.total(),
    })
}

/// Why a response that has ended has no complete text.
pub fn incomplete_reason(record: &ResponseRecord) -> Option<&'static str> {
    if record.ends_with_calls() {
        return None;
    }
    let run = &record.run;
    match (run.status, run.error.as_ref().map(|error| error.code)) {
        (Status::Failed, Some(FailureCode::OutputTruncated)) => Some("max_output_tokens"),
        (Status::Failed, Some(FailureCode::Refused)) => Some("content_filter"),
        (Status::Completed, _) => match end_reason(run) {
            EndReason::Done => None,
            EndReason::Length => Some("max_output_tokens"),
            EndReason::Filter => Some("content_filter"),
        },
        _ => None,
    }
}

fn output(record: &ResponseRecord) -> Vec<Value> {
    if !record.has_ended() {
        return Vec::new();
    }
    let texts = record.texts.iter();
    let messages =
        texts.map(|(turn, text)| message(&message_id(record.run.id, *turn), text, "completed"));
    let calls = record
        .calls
        .iter()
        .map(|call| function_call(call, "completed"));
    messages.chain(calls).collect()
}

pub fn message_id(run: RunId, turn: u32) -> String {
    format!("msg_{}_{turn}", run.0.as_simple())
}

pub fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

pub fn message(id: &str, text: &str, status: &str) -> Value {
    let content = match status {
        "in_progress" => json!([]),
        _ => json!([text_part(text)]),
    };
    json!({"type": "message", "id": id, "role": "assistant", "status": status, "content": content})
}

pub fn function_call(client_call: &ClientCall, status: &str) -> Value {
    let ClientCall { id, call } = client_call;
    let arguments = match status {
        "in_progress" => "",
        _ => call.sent_arguments(),
    };
    json!({
        "type": "function_call", "id": function_call_id(id), "call_id": id, "name": call.name,
        "arguments": arguments, "status": status,
    })
}

pub fn function_call_id(call_id: &str) -> String {
    call_id.replacen("call_", "fc_", 1)
}

/// What the request brought: results, or the messages after those of an earlier response.
pub fn input_items(record: &ResponseRecord) -> Vec<Value> {
    if record.seen_turn().is_some() {
        let results = record.results.iter();
        return results
            .map(|(call, result)| function_output(&call.to_id(), &result.content))
            .collect();
    }
    let mut items = Vec::new();
    let messages = record.conversation();
    let inherited = record.prompt_length().saturating_sub(record.echo.messages);
    let own = messages.iter().skip(inherited).take(record.echo.messages);
    for (at, message) in own.enumerate() {
        add_items(record, at, message, &mut items);
    }
    items
}

fn add_items(record: &ResponseRecord, at: usize, message: &Message, items: &mut Vec<Value>) {
    let id = format!("msg_{}_in_{at}", record.run.id.0.as_simple());
    match message {
        Message::User { content } => items.push(json!({
            "type": "message", "id": id, "role": "user", "status": "completed", "content": input_parts(content),
        })),
        Message::Assistant(reply) => {
            if !reply.content.is_empty() {
                items.push(self::message(&id, &reply.content, "completed"));
            }
            items.extend(reply.tool_calls.iter().map(|call| {
                json!({
                    "type": "function_call", "id": format!("fc_{}", call.id), "call_id": call.id, "name": call.name,
                    "arguments": call.sent_arguments(), "status": "completed",
                })
            }));
        }
        Message::Tool { tool_results } => {
            let results = tool_results.iter();
            items.extend(results.map(|it| function_output(&it.call_id, &it.content)));
        }
    }
}

fn function_output(call_id: &str, output: &str) -> Value {
    let id = match CallRef::parse(call_id) {
        Some(_) => call_id.replacen("call_", "fco_", 1),
        None => format!("fco_{call_id}"),
    };
    json!({
        "type": "function_call_output", "id": id, "call_id": call_id, "output": output, "status": "completed",
    })
}

fn input_parts(content: &Content) -> Vec<Value> {
    match content {
        Content::Text(text) => vec![json!({"type": "input_text", "text": text})],
        Content::Parts(parts) => parts
            .iter()
            .map(|part| match part {
                Part::Text { text } => json!({"type": "input_text", "text": text}),
                Part::Image(_) | Part::File(_) | Part::Link(_) => {
                    json!({"type": "input_text", "text": part.to_plain_text()})
                }
            })
            .collect(),
    }
}
