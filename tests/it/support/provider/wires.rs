//! Writes answers down as the services do, whole or as a stream.

use axum::body::Bytes;
use serde_json::{Value, json};

use crate::support::provider::answer::{Content, ScriptedAnswer, Thought, Tokens};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};

/// An answer in the format of a wire.
pub struct EncodedAnswer {
    /// HTTP's status.
    pub status: u16,
    /// The content type.
    pub kind: &'static str,
    /// What is sent, in pieces: the events of a stream, or the two halves of a body.
    pub pieces: Vec<Bytes>,
    /// How many of them make up the first part, before a pause or a cut.
    pub first_pieces: usize,
    /// What an endless answer repeats.
    pub filler: Bytes,
}

/// Writes `answer` to `seen`.
pub fn encode(seen: &RecordedRequest, answer: &ScriptedAnswer) -> EncodedAnswer {
    match &answer.content {
        Content::Raw { status, kind, body } => halves(*status, kind, body),
        Content::Error { status, message } => {
            let body = error(seen.wire, *status, message).to_string();
            halves(*status, "application/json", &Bytes::from(body))
        }
        Content::Reply { text, calls } => {
            let reply = Reply {
                text,
                calls,
                usage: answer.usage,
                refuses: answer.is_refusal,
                thought: answer.thought.as_ref(),
                stop: answer
                    .stop_reason
                    .as_deref()
                    .unwrap_or(match answer.is_refusal {
                        true if seen.wire == Wire::Anthropic => "refusal",
                        _ => default_stop_reason(seen.wire, !calls.is_empty()),
                    }),
                model: answer.model.as_deref().unwrap_or(seen.model()),
                number: seen.number,
                tier: answer.tier.or(seen.body["service_tier"].as_str()),
            };
            match (seen.wire, seen.wants_stream()) {
                (Wire::Anthropic, true) => reply.anthropic_stream(),
                (Wire::Openai, true) => reply.openai_stream(seen),
                (Wire::Responses, true) => reply.responses_stream(),
                (Wire::Ollama, true) => reply.ollama_stream(),
                (wire, false) => {
                    let body = match wire {
                        Wire::Anthropic => reply.anthropic(),
                        Wire::Openai => reply.openai(),
                        Wire::Responses => reply.responses(),
                        Wire::Ollama => reply.ollama(),
                    };
                    halves(200, "application/json", &Bytes::from(body.to_string()))
                }
            }
        }
    }
}

struct Reply<'a> {
    text: &'a str,
    calls: &'a [(String, Value)],
    usage: Option<Tokens>,
    refuses: bool,
    thought: Option<&'a Thought>,
    stop: &'a str,
    model: &'a str,
    number: usize,
    tier: Option<&'a str>,
}

impl Reply<'_> {
    fn id(&self, index: usize) -> String {
        format!("call_{}_{index}", self.number)
    }

    /// What only its own model can read again.
    fn secret(&self) -> String {
        format!("c2VjcmV0{}", self.number)
    }

    /// The text of its thinking; empty if it has none or if it is encrypted.
    fn thought(&self) -> &str {
        match self.thought {
            Some(Thought::Readable(text)) => text,
            Some(Thought::Hidden) | None => "",
        }
    }

    fn anthropic(&self) -> Value {
        let mut blocks = Vec::new();
        if self.thought.is_some() {
            blocks.push(
                json!({"type": "thinking", "thinking": self.thought(), "signature": self.secret()}),
            );
        }
        if !self.text.is_empty() {
            blocks.push(json!({"type": "text", "text": self.text}));
        }
        for (index, (name, arguments)) in self.calls.iter().enumerate() {
            blocks.push(
                json!({"type": "tool_use", "id": self.id(index), "name": name, "input": arguments}),
            );
        }
        let mut body = json!({
            "id": format!("msg_{}", self.number), "type": "message", "role": "assistant",
            "model": self.model, "content": blocks, "stop_reason": self.stop, "stop_sequence": null,
        });
        if let Some(tokens) = self.usage {
            body["usage"] = anthropic_usage(tokens);
        }
        body
    }

    fn anthropic_stream(&self) -> EncodedAnswer {
        let event = |data: Value| {
            let name = data["type"].as_str().unwrap_or_default();
            Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
        };
        let mut message = json!({
            "id": format!("msg_{}", self.number), "type": "message", "role": "assistant",
            "model": self.model, "content": [], "stop_reason": null, "stop_sequence": null,
        });
        if let Some(tokens) = self.usage {
            message["usage"] = anthropic_usage(Tokens {
                output: 1,
                ..tokens
            });
        }
        let mut pieces = vec![
            event(json!({"type": "message_start", "message": message})),
            event(json!({"type": "ping"})),
        ];
        let mut blocks = Vec::new();
        if self.thought.is_some() {
            let text = split_words(self.thought())
                .map(|text| json!({"type": "thinking_delta", "thinking": text}));
            let signature = json!({"type": "signature_delta", "signature": self.secret()});
            blocks.push((
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                text.chain([signature]).collect(),
            ));
        }
        if !self.text.is_empty() {
            let deltas =
                split_words(self.text).map(|text| json!({"type": "text_delta", "text": text}));
            blocks.push((
                json!({"type": "text", "text": ""}),
                deltas.collect::<Vec<_>>(),
            ));
        }
        for (index, (name, arguments)) in self.calls.iter().enumerate() {
            let start =
                json!({"type": "tool_use", "id": self.id(index), "name": name, "input": {}});
            let arguments = sent_text(arguments);
            let deltas = in_two(&arguments)
                .map(|part| json!({"type": "input_json_delta", "partial_json": part}));
            blocks.push((start, deltas.to_vec()));
        }
        for (index, (start, deltas)) in blocks.into_iter().enumerate() {
            pieces.push(event(
                json!({"type": "content_block_start", "index": index, "content_block": start}),
            ));
            pieces.extend(deltas.into_iter().map(|delta| {
                event(json!({"type": "content_block_delta", "index": index, "delta": delta}))
            }));
            pieces.push(event(json!({"type": "content_block_stop", "index": index})));
        }
        let mut end = json!({
            "type": "message_delta",
            "delta": {"stop_reason": self.stop, "stop_sequence": null},
        });
        if let Some(tokens) = self.usage {
            end["usage"] = json!({"output_tokens": tokens.output});
        }
        pieces.push(event(end));
        pieces.push(event(json!({"type": "message_stop"})));
        let filler = event(json!({
            "type": "content_block_delta", "index": 0,
            "delta": {"type": "text_delta", "text": "on and on ".repeat(400)},
        }));
        // The head, the ping, the block's start and its first delta.
        stream("text/event-stream", pieces, 4, filler)
    }

    fn openai(&self) -> Value {
        let mut message = json!({
            "role": "assistant",
            "content": if self.text.is_empty() { Value::Null } else { self.text.into() },
        });
        if self.refuses {
            message["refusal"] = message["content"].take();
        }
        if let Some((field, value)) = self.openai_thoughts() {
            message[field] = value;
        }
        if !self.calls.is_empty() {
            let calls = self
                .calls
                .iter()
                .enumerate()
                .map(|(index, (name, arguments))| {
                    json!({
                        "id": self.id(index), "type": "function",
                        "function": {"name": name, "arguments": sent_text(arguments)},
                    })
                });
            message["tool_calls"] = calls.collect();
        }
        let mut body = json!({
            "id": format!("chatcmpl-{}", self.number), "object": "chat.completion", "created": 0,
            "model": self.model,
            "choices": [{"index": 0, "message": message, "finish_reason": self.stop}],
        });
        if let Some(tier) = self.tier {
            body["service_tier"] = tier.into();
        }
        if let Some(tokens) = self.usage {
            body["usage"] = openai_usage(tokens);
        }
        body
    }

    fn openai_stream(&self, seen: &RecordedRequest) -> EncodedAnswer {
        let chunk = |choices: Value, usage: Value| {
            let mut data = json!({
                "id": format!("chatcmpl-{}", self.number), "object": "chat.completion.chunk",
                "created": 0, "model": self.model, "choices": choices,
            });
            if !usage.is_null() {
                data["usage"] = usage;
            }
            if let Some(tier) = self.tier {
                data["service_tier"] = tier.into();
            }
            Bytes::from(format!("data: {data}\n\n"))
        };
        let delta = |delta: Value| {
            chunk(
                json!([{"index": 0, "delta": delta, "finish_reason": null}]),
                Value::Null,
            )
        };
        let mut pieces = vec![delta(json!({"role": "assistant", "content": ""}))];
        if let Some((field, value)) = self.openai_thoughts() {
            match value.as_str() {
                Some(text) => {
                    pieces.extend(split_words(text).map(|text| delta(json!({field: text}))))
                }
                None => pieces.push(delta(json!({field: value}))),
            }
        }
        let field = if self.refuses { "refusal" } else { "content" };
        pieces.extend(split_words(self.text).map(|text| delta(json!({field: text}))));
        for (index, (name, arguments)) in self.calls.iter().enumerate() {
            pieces.push(delta(json!({"tool_calls": [{
                "index": index, "id": self.id(index), "type": "function",
                "function": {"name": name, "arguments": ""},
            }]})));
            let arguments = sent_text(arguments);
            pieces.extend(in_two(&arguments).map(|part| {
                delta(json!({"tool_calls": [{"index": index, "function": {"arguments": part}}]}))
            }));
        }
        pieces.push(chunk(
            json!([{"index": 0, "delta": {}, "finish_reason": self.stop}]),
            Value::Null,
        ));
        let wants_usage = seen.body["stream_options"]["include_usage"] == true;
        if let Some(tokens) = self.usage.filter(|_| wants_usage) {
            pieces.push(chunk(json!([]), openai_usage(tokens)));
        }
        pieces.push(Bytes::from_static(b"data: [DONE]\n\n"));
        let filler = delta(json!({"content": "on and on ".repeat(400)}));
        stream("text/event-stream", pieces, 2, filler)
    }

    /// As DeepSeek has it; a hidden one as OpenRouter has it.
    fn openai_thoughts(&self) -> Option<(&'static str, Value)> {
        Some(match self.thought? {
            Thought::Readable(text) => ("reasoning_content", text.as_str().into()),
            Thought::Hidden => (
                "reasoning_details",
                json!([{"type": "reasoning.encrypted", "data": self.secret()}]),
            ),
        })
    }

    /// The output items, in the order in which a model gives them.
    fn responses_items(&self) -> Vec<Value> {
        let mut items = Vec::new();
        if self.thought.is_some() {
            let summary = Some(self.thought()).filter(|text| !text.is_empty());
            let summary = summary.map(|text| json!({"type": "summary_text", "text": text}));
            items.push(json!({
                "type": "reasoning", "id": format!("rs_{}", self.number), "encrypted_content": self.secret(),
                "summary": summary.into_iter().collect::<Vec<_>>(), "status": "completed",
            }));
        }
        if !self.text.is_empty() {
            let part = match self.refuses {
                true => json!({"type": "refusal", "refusal": self.text}),
                false => {
                    json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []})
                }
            };
            items.push(json!({
                "type": "message", "id": format!("msg_{}", self.number), "role": "assistant",
                "status": "completed", "content": [part],
            }));
        }
        for (index, (name, arguments)) in self.calls.iter().enumerate() {
            items.push(json!({
                "type": "function_call", "id": format!("fc_{}_{index}", self.number), "call_id": self.id(index),
                "name": name, "arguments": sent_text(arguments), "status": "completed",
            }));
        }
        items
    }

    fn responses(&self) -> Value {
        let (status, details) = match self.stop {
            "completed" => ("completed", Value::Null),
            reason => ("incomplete", json!({"reason": reason})),
        };
        let mut body = self.responses_begun(status);
        body["output"] = self.responses_items().into();
        body["incomplete_details"] = details;
        if let Some(tokens) = self.usage {
            body["usage"] = json!({
                "input_tokens": tokens.total_input(), "output_tokens": tokens.output,
                "total_tokens": tokens.total_input() + tokens.output,
                "input_tokens_details": {
                    "cached_tokens": tokens.cache_read, "cache_write_tokens": tokens.cache_write,
                },
                "output_tokens_details": {"reasoning_tokens": 0},
            });
        }
        body
    }

    fn responses_begun(&self, status: &str) -> Value {
        json!({
            "id": format!("resp_{}", self.number), "object": "response", "created_at": 0, "status": status,
            "model": self.model, "error": null, "incomplete_details": null, "instructions": null, "metadata": {},
            "output": [], "parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto", "tools": [],
            "top_p": 1.0, "usage": null, "service_tier": self.tier,
        })
    }

    fn responses_stream(&self) -> EncodedAnswer {
        let mut pieces = Vec::new();
        let mut send = |mut data: Value| {
            data["sequence_number"] = pieces.len().into();
            let name = data["type"].as_str().unwrap_or_default();
            pieces.push(Bytes::from(format!("event: {name}\ndata: {data}\n\n")));
        };
        for kind in ["response.created", "response.in_progress"] {
            send(json!({"type": kind, "response": self.responses_begun("in_progress")}));
        }
        for (index, item) in self.responses_items().into_iter().enumerate() {
            let id = item["id"].clone();
            let mut begun = item.clone();
            begun["status"] = "in_progress".into();
            let is_call = item["type"] == "function_call";
            let is_thought = item["type"] == "reasoning";
            let (field, empty) = match (is_call, is_thought) {
                (true, _) => ("arguments", "".into()),
                (_, true) => ("summary", json!([])),
                _ => ("content", json!([])),
            };
            begun[field] = empty;
            send(
                json!({"type": "response.output_item.added", "output_index": index, "item": begun}),
            );
            if is_thought {
                for part in split_words(self.thought()) {
                    send(json!({
                        "type": "response.reasoning_summary_text.delta", "item_id": id,
                        "output_index": index, "summary_index": 0, "delta": part,
                    }));
                }
            } else if is_call {
                let arguments = item["arguments"].as_str().unwrap_or_default();
                for part in in_two(arguments) {
                    send(json!({
                        "type": "response.function_call_arguments.delta", "item_id": id,
                        "output_index": index, "delta": part,
                    }));
                }
                send(json!({
                    "type": "response.function_call_arguments.done", "item_id": id, "output_index": index,
                    "arguments": arguments,
                }));
            } else {
                let (kind, field) = match self.refuses {
                    true => ("refusal", "refusal"),
                    false => ("output_text", "text"),
                };
                let at = |kind: String| {
                    let mut event = json!({
                        "type": kind, "item_id": id, "output_index": index, "content_index": 0,
                    });
                    if !self.refuses {
                        event["logprobs"] = json!([]);
                    }
                    event
                };
                for part in split_words(self.text) {
                    let mut event = at(format!("response.{kind}.delta"));
                    event["delta"] = part.into();
                    send(event);
                }
                let mut event = at(format!("response.{kind}.done"));
                event[field] = self.text.into();
                send(event);
            }
            send(json!({"type": "response.output_item.done", "output_index": index, "item": item}));
        }
        let response = self.responses();
        let status = response["status"].as_str().unwrap_or_default();
        send(json!({"type": format!("response.{status}"), "response": response}));
        let filler = json!({
            "type": "response.output_text.delta", "item_id": "msg", "output_index": 0, "content_index": 0,
            "delta": "on and on ".repeat(400), "logprobs": [], "sequence_number": 0,
        });
        let filler = Bytes::from(format!("data: {filler}\n\n"));
        // The response, the beginning of its first item, and that one's first delta.
        stream("text/event-stream", pieces, 4, filler)
    }

    fn ollama(&self) -> Value {
        let mut body = self.ollama_line(self.text, self.calls, true);
        if !self.thought().is_empty() {
            body["message"]["thinking"] = self.thought().into();
        }
        self.ollama_end(&mut body);
        body
    }

    fn ollama_stream(&self) -> EncodedAnswer {
        let line = |value: Value| Bytes::from(format!("{value}\n"));
        let thoughts = split_words(self.thought()).map(|text| {
            let mut thinks = self.ollama_line("", &[], false);
            thinks["message"]["thinking"] = text.into();
            line(thinks)
        });
        let mut pieces: Vec<_> = thoughts.collect();
        pieces.extend(split_words(self.text).map(|text| line(self.ollama_line(text, &[], false))));
        if !self.calls.is_empty() {
            pieces.push(line(self.ollama_line("", self.calls, false)));
        }
        let mut end = self.ollama_line("", &[], true);
        self.ollama_end(&mut end);
        pieces.push(line(end));
        let filler = line(self.ollama_line(&"on and on ".repeat(400), &[], false));
        stream("application/x-ndjson", pieces, 1, filler)
    }

    fn ollama_line(&self, text: &str, calls: &[(String, Value)], done: bool) -> Value {
        let mut message = json!({"role": "assistant", "content": text});
        if !calls.is_empty() {
            let calls = calls.iter().map(
                |(name, arguments)| json!({"function": {"name": name, "arguments": arguments}}),
            );
            message["tool_calls"] = calls.collect();
        }
        json!({
            "model": self.model, "created_at": "2026-01-01T00:00:00Z", "message": message, "done": done,
        })
    }

    fn ollama_end(&self, body: &mut Value) {
        body["done_reason"] = self.stop.into();
        if let Some(tokens) = self.usage {
            body["prompt_eval_count"] = tokens.total_input().into();
            body["eval_count"] = tokens.output.into();
        }
    }
}

fn anthropic_usage(tokens: Tokens) -> Value {
    json!({
        "input_tokens": tokens.input, "output_tokens": tokens.output,
        "cache_read_input_tokens": tokens.cache_read, "cache_creation_input_tokens": tokens.cache_write,
    })
}

fn openai_usage(tokens: Tokens) -> Value {
    json!({
        "prompt_tokens": tokens.total_input(), "completion_tokens": tokens.output,
        "total_tokens": tokens.total_input() + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cache_read},
    })
}

fn default_stop_reason(wire: Wire, calls: bool) -> &'static str {
    match (wire, calls) {
        (Wire::Anthropic, false) => "end_turn",
        (Wire::Anthropic, true) => "tool_use",
        (Wire::Openai, true) => "tool_calls",
        // Ollama reports this for a turn with tool calls as well.
        (Wire::Openai, false) | (Wire::Ollama, _) => "stop",
        (Wire::Responses, _) => "completed",
    }
}

fn error(wire: Wire, status: u16, message: &str) -> Value {
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    match wire {
        Wire::Anthropic => json!({"type": "error", "error": {"type": kind, "message": message}}),
        Wire::Openai | Wire::Responses => {
            json!({"error": {"message": message, "type": kind, "code": null}})
        }
        Wire::Ollama => json!({"error": message}),
    }
}

fn split_words(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(' ')
}

fn in_two(text: &str) -> [&str; 2] {
    // Arguments of stories may hold more than ASCII: cut between characters.
    let middle = (text.len() / 2..=text.len()).find(|&at| text.is_char_boundary(at));
    let (left, right) = text.split_at(middle.unwrap_or_default());
    [left, right]
}

/// The text of a call's arguments. A text is sent as it is, JSON or not.
fn sent_text(arguments: &Value) -> String {
    match arguments {
        Value::String(text) => text.clone(),
        json => json.to_string(),
    }
}

fn stream(kind: &'static str, pieces: Vec<Bytes>, first: usize, filler: Bytes) -> EncodedAnswer {
    EncodedAnswer {
        status: 200,
        kind,
        first_pieces: first.min(pieces.len() - 1),
        pieces,
        filler,
    }
}

fn halves(status: u16, kind: &'static str, body: &Bytes) -> EncodedAnswer {
    let middle = body.len() / 2;
    EncodedAnswer {
        status,
        kind,
        pieces: vec![body.slice(..middle), body.slice(middle..)],
        first_pieces: 1,
        filler: Bytes::from(vec![b'a'; 4000]),
    }
}
