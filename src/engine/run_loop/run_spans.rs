//! The spans of runs, model requests and tool calls.
//!
//! The ids of traces and spans derive from the ids of runs and calls, so that another process that resumes a run
//! continues its trace. Only the caller's `traceparent` is lost then.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::Params;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, truncate_to_bytes};
use crate::domain::run::{Run, RunId, Status};
use crate::domain::trace::{SpanId, TraceContext, TraceId};
use crate::domain::usage::TokenUsage;
use crate::engine::run_loop::turn_request::TurnRequest;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::tree_trace::TreeTrace;
use crate::engine::state::turn_error::TurnError;
use crate::providers::Reply;
use crate::telemetry::traces::{AttributeValue, Span, SpanKind, key};

/// The longest text in an attribute that holds content.
const MAX_CONTENT_BYTES: usize = 16 << 10;

/// A model request in progress.
pub struct ChatSpan {
    /// Sent to the provider.
    pub context: TraceContext,
    started_at: Timestamp,
}

impl ChatSpan {
    /// `None` if the tree has no trace.
    pub fn start(run: &ActiveRun) -> Option<Box<Self>> {
        let context = match run.tree.trace.as_deref()? {
            TreeTrace::Exported { id, .. } => {
                // The hasher's keys are random; a span id of only zeros is invalid.
                let random = RandomState::new().hash_one(Instant::now()) | 1;
                sampled_context(*id, SpanId(random.to_be_bytes()))
            }
            TreeTrace::Propagated(caller) => *caller,
        };
        let started_at = Timestamp::now();
        Some(Box::new(Self {
            context,
            started_at,
        }))
    }

    /// Ends and exports the span `chat {model}`.
    pub fn end(
        &self,
        run: &ActiveRun,
        turn_request: &TurnRequest<'_>,
        model: &ModelRef,
        result: &Result<Reply, TurnError>,
    ) {
        let Some(TreeTrace::Exported { exporter: to, .. }) = run.tree.trace.as_deref() else {
            return;
        };
        let parent = Some(run_span_id(run.scope.run));
        let span = Span::new(
            "chat",
            &model.model,
            SpanKind::Client,
            self.context,
            parent,
            self.started_at,
        );
        let span = with_request_model(with_run(span, run), model)
            .with_int(key::TURN, turn_request.turn.into());
        let mut span = with_params(span, turn_request.params);
        if to.records_content() {
            let system =
                json!([{"type": "text", "content": truncate_content(turn_request.system)}]);
            span = span.with_attribute(key::SYSTEM, AttributeValue::Text(system.to_string()));
            span = span.with_attribute(
                key::INPUT,
                AttributeValue::Text(messages_json(turn_request.messages)),
            );
        }
        to.send(match result {
            Ok(reply) => {
                let output = to.records_content().then(|| reply_json(reply));
                let span = with_response(span, reply.model.as_deref(), reply.usage.as_ref());
                let span = match &reply.stop_reason {
                    Some(reason) => span.with_attribute(
                        key::FINISH_REASONS,
                        AttributeValue::TextList(vec![truncate(reason, 64)]),
                    ),
                    None => span,
                };
                match output {
                    Some(output) => span.with_attribute(
                        key::OUTPUT,
                        AttributeValue::Text(json!([output]).to_string()),
                    ),
                    None => span,
                }
            }
            Err(TurnError::Provider(error)) => span.with_error(error.category.as_str()),
            Err(TurnError::DeadlineExceeded) => span.with_error("timeout"),
            Err(_) => span.with_error("cancelled"),
        });
    }
}

/// Exports the span `execute_tool {tool}` of a tool call that has just ended.
pub fn end_tool_call(
    run: &ActiveRun,
    turn: u32,
    call: &ToolCall,
    result: &ToolResult,
    duration: Duration,
) {
    let Some(TreeTrace::Exported {
        exporter: to, id, ..
    }) = run.tree.trace.as_deref()
    else {
        return;
    };
    let context = sampled_context(*id, call_span_id(run.scope.run, &call.id));
    let duration = SignedDuration::try_from(duration).unwrap_or_default();
    let started_at = Timestamp::now()
        .saturating_sub(duration)
        .unwrap_or_default();
    let parent = Some(run_span_id(run.scope.run));
    let span = Span::new(
        "execute_tool",
        &call.name,
        SpanKind::Internal,
        context,
        parent,
        started_at,
    );
    let mut span = with_run(span, run)
        .with_text(key::TOOL, &call.name)
        .with_text(key::TOOL_TYPE, "function")
        .with_text(key::TOOL_CALL, &call.id)
        .with_int(key::TURN, turn.into());
    if to.records_content() {
        span = span
            .with_attribute(
                key::TOOL_ARGUMENTS,
                AttributeValue::Text(truncate_content(call.sent_arguments())),
            )
            .with_attribute(
                key::TOOL_RESULT,
                AttributeValue::Text(truncate_content(&result.content)),
            );
    }
    to.send(match result.is_error {
        true => span.with_error("tool_error"),
        false => span,
    });
}

/// Exports the span `invoke_agent {agent}` of a run whose end was recorded. It begins when the run started, perhaps in
/// another process.
pub fn end_run(run: &ActiveRun, record: &Run) {
    let (
        Some(TreeTrace::Exported {
            exporter: to,
            id,
            caller_span: caller,
            ..
        }),
        Some(started_at),
    ) = (run.tree.trace.as_deref(), record.started_at)
    else {
        return;
    };
    let parent = match (&run.parent, &record.tool_call_id) {
        (Some(parent), Some(call)) => Some(call_span_id(parent.scope.run, call)),
        (Some(parent), None) => Some(run_span_id(parent.scope.run)),
        (None, _) => *caller,
    };
    let context = sampled_context(*id, run_span_id(record.id));
    let span = Span::new(
        "invoke_agent",
        &record.agent,
        SpanKind::Internal,
        context,
        parent,
        started_at,
    );
    let span = with_request_model(with_run(span, run), &run.agent.model);
    let mut span = with_response(
        with_params(span, &run.agent.params),
        Some(&record.model),
        Some(&record.usage.tokens),
    )
    .with_int(key::ATTEMPT, record.attempt.into());
    if to.records_content() {
        let message_json = |role: &str, text: &str| json!({"role": role, "parts": [{"type": "text", "content": truncate_content(text)}]});
        let input = json!([message_json("user", &record.input.to_plain_text())]);
        span = span.with_attribute(key::INPUT, AttributeValue::Text(input.to_string()));
        if let Some(text) = &record.content {
            let mut output = message_json("assistant", text);
            output["finish_reason"] = finish_reason(record.stop_reason.as_deref(), false).into();
            let output = json!([output]).to_string();
            span = span.with_attribute(key::OUTPUT, AttributeValue::Text(output));
        }
    }
    to.send(match (&record.status, &record.error) {
        (Status::Cancelled, _) => span.with_error("cancelled"),
        (_, Some(failure)) => {
            let code = serde_json::to_value(failure.code).unwrap_or_default();
            span.with_error(code.as_str().unwrap_or(&failure.category))
        }
        (_, None) => span,
    });
}

fn with_run(span: Span, run: &ActiveRun) -> Span {
    let scope = &run.scope;
    let run_id = scope.run.to_string();
    let session = match run.tree.trace.as_deref() {
        Some(TreeTrace::Exported { session, .. }) => session.as_deref(),
        Some(TreeTrace::Propagated(_)) | None => None,
    };
    span.with_text(key::AGENT, &run.agent.name)
        // Without a session, each run is a conversation of its own.
        .with_text(key::CONVERSATION, session.unwrap_or(&run_id))
        .with_text(key::RUN, &run_id)
        .with_text(key::ROOT, &scope.root.to_string())
        .with_int(key::DEPTH, scope.depth.0.into())
}

fn with_request_model(span: Span, model: &ModelRef) -> Span {
    span.with_text(key::PROVIDER, &model.provider)
        .with_text(key::REQUEST_MODEL, &model.model)
}

/// The parameters as they were requested; a model that refuses one does not get it.
fn with_params(span: Span, params: &Params) -> Span {
    let extra = |name: &str| params.extra.get(name).and_then(Json::as_f64);
    let numbers = [
        (key::TEMPERATURE, params.temperature),
        (key::TOP_P, params.top_p),
        (key::TOP_K, extra("top_k")),
        (key::FREQUENCY_PENALTY, extra("frequency_penalty")),
        (key::PRESENCE_PENALTY, extra("presence_penalty")),
    ];
    let seed = params.extra.get("seed").and_then(Json::as_u64);
    let counts = [
        (key::MAX_TOKENS, params.max_tokens.map(u64::from)),
        (key::SEED, seed),
    ];
    let numbers = numbers.into_iter();
    let numbers = numbers.filter_map(|(key, it)| Some((key, AttributeValue::Number(it?))));
    let counts = counts.into_iter();
    let counts = counts.filter_map(|(key, it)| Some((key, AttributeValue::Int(it?))));
    let stop = (!params.stop.is_empty()).then(|| {
        let texts = params.stop.iter().map(|text| truncate(text, 64));
        (
            key::STOP_SEQUENCES,
            AttributeValue::TextList(texts.collect()),
        )
    });
    let output = match params.response_format {
        ResponseFormat::Text => "text",
        ResponseFormat::JsonObject | ResponseFormat::JsonSchema(_) => "json",
    };
    numbers.chain(counts).chain(stop).fold(
        span.with_text(key::OUTPUT_TYPE, output),
        |span, (key, value)| span.with_attribute(key, value),
    )
}

fn with_response(span: Span, model: Option<&str>, tokens: Option<&TokenUsage>) -> Span {
    let mut span = match model {
        Some(model) => span.with_text(key::RESPONSE_MODEL, model),
        None => span,
    };
    if let Some(tokens) = tokens {
        span = span
            .with_int(key::INPUT_TOKENS, tokens.input)
            .with_int(key::OUTPUT_TOKENS, tokens.output)
            .with_int(key::CACHE_READ_TOKENS, tokens.cache_read)
            .with_int(key::CACHE_WRITE_TOKENS, tokens.cache_write);
        if tokens.reasoning > 0 {
            span = span.with_int(key::REASONING_TOKENS, tokens.reasoning);
        }
    }
    span
}

fn sampled_context(trace: TraceId, span: SpanId) -> TraceContext {
    TraceContext {
        trace,
        span,
        sampled: true,
    }
}

/// The half of a run's id that differs from other runs.
fn run_span_id(run: RunId) -> SpanId {
    let [_, _, _, _, _, _, _, _, id @ ..] = *run.0.as_bytes();
    SpanId(id)
}

fn call_span_id(run: RunId, call: &str) -> SpanId {
    let hash = Sha256::new()
        .chain_update(run.0.as_bytes())
        .chain_update(call);
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(hash.finalize());
    SpanId([a, b, c, d, e, f, g, h | 1])
}

/// The newest messages that fit, as JSON of the OpenTelemetry conventions.
fn messages_json(messages: &[Message]) -> String {
    let mut remaining = MAX_CONTENT_BYTES;
    let mut recent = VecDeque::new();
    for message in messages.iter().rev() {
        let message = match message {
            Message::User { content } => {
                json!({"role": "user", "parts": [{"type": "text", "content": truncate_within(&content.to_plain_text(), &mut remaining)}]})
            }
            Message::Assistant(reply) => assistant_json(reply, &mut remaining),
            Message::Tool { tool_results } => {
                let part = |result: &ToolResult| json!({"type": "tool_call_response", "id": result.call_id, "response": truncate_within(&result.content, &mut remaining)});
                let parts: Vec<Json> = tool_results.iter().map(part).collect();
                json!({"role": "tool", "parts": parts})
            }
        };
        recent.push_front(message);
        if remaining == 0 {
            break;
        }
    }
    Json::Array(recent.into()).to_string()
}

/// An output message needs a reason for its end: readers drop it without.
fn reply_json(reply: &Reply) -> Json {
    let mut json = assistant_json(&reply.message, &mut { MAX_CONTENT_BYTES });
    let has_calls = !reply.message.tool_calls.is_empty();
    json["finish_reason"] = finish_reason(reply.stop_reason.as_deref(), has_calls).into();
    json
}

/// The conventions' word for a provider's reason.
fn finish_reason(stop_reason: Option<&str>, has_calls: bool) -> &'static str {
    match stop_reason.unwrap_or_default().to_lowercase().as_str() {
        _ if has_calls => "tool_call",
        "length" | "max_tokens" | "max_output_tokens" | "model_context_window_exceeded" => "length",
        "content_filter" | "refusal" | "safety" | "recitation" => "content_filter",
        "error" => "error",
        _ => "stop",
    }
}

fn assistant_json(reply: &AssistantMessage, remaining: &mut usize) -> Json {
    let mut parts = Vec::new();
    if !reply.content.is_empty() {
        parts.push(json!({"type": "text", "content": truncate_within(&reply.content, remaining)}));
    }
    for call in &reply.tool_calls {
        let arguments = truncate_within(call.sent_arguments(), remaining);
        // Whole arguments as JSON, truncated ones as text.
        let arguments: Json =
            serde_json::from_str(&arguments).unwrap_or_else(|_| Json::String(arguments));
        parts.push(
            json!({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments}),
        );
    }
    json!({"role": "assistant", "parts": parts})
}

fn truncate_content(text: &str) -> String {
    truncate(text, MAX_CONTENT_BYTES)
}

fn truncate_within(text: &str, remaining: &mut usize) -> String {
    let truncated = truncate(text, *remaining);
    *remaining = remaining.saturating_sub(text.len());
    truncated
}

/// At most `max_bytes` of the text, followed by dots if it is longer.
fn truncate(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_owned();
    }
    format!("{}...", truncate_to_bytes(text, max_bytes))
}

#[cfg(test)]
mod tests {
    use super::{MAX_CONTENT_BYTES, call_span_id, messages_json, run_span_id};
    use crate::domain::message::Message;
    use crate::domain::run::RunId;

    #[test]
    fn span_ids_differ() {
        let (one, other) = (RunId::new(), RunId::new());
        assert_ne!(run_span_id(one), run_span_id(other));
        assert_ne!(call_span_id(one, "a"), call_span_id(one, "b"));
        assert_ne!(call_span_id(one, "a"), call_span_id(other, "a"));
        assert_eq!(call_span_id(one, "a"), call_span_id(one, "a"));
    }

    #[test]
    fn content_is_bounded_and_the_newest_stays() {
        let user = |content: String| Message::user(content);
        let long = [user("old".to_owned()), user("é".repeat(MAX_CONTENT_BYTES))];
        let json = messages_json(&long);
        assert!(json.len() < MAX_CONTENT_BYTES + 200);
        assert!(!json.contains("old") && json.contains("é..."));
        let short = messages_json(&[user("a".to_owned()), user("b".to_owned())]);
        assert_eq!(
            short,
            r#"[{"role":"user","parts":[{"type":"text","content":"a"}]},{"role":"user","parts":[{"type":"text","content":"b"}]}]"#
        );
    }
}
