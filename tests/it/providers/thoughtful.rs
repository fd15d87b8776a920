//! A reply with thinking, text and tool calls, in the format of each wire.

use crate::support::provider::recorded_request::Wire;
use crate::support::replay::CannedResponse;
use serde_json::{Value, json};

/// A first reply with thinking, text and three tool calls, one of which has half its arguments and an invalid name.
pub fn thoughtful(kind: Wire, stream: bool) -> CannedResponse {
    match (kind, stream) {
        (Wire::Anthropic, false) => thoughtful_anthropic(),
        (Wire::Anthropic, true) => thoughtful_anthropic_stream(),
        (Wire::Openai, false) => thoughtful_openai(),
        (Wire::Openai, true) => thoughtful_openai_stream(),
        (Wire::Responses, _) => thoughtful_response(stream),
        (Wire::Ollama, _) => thoughtful_ollama(stream),
    }
}

/// Each value as one line or event of a stream.
fn lines(prefix: &str, end: &str, values: &[Value]) -> String {
    let lines = values.iter().map(|value| format!("{prefix}{value}{end}"));
    lines.collect()
}

fn thoughtful_anthropic() -> CannedResponse {
    CannedResponse::json(
        200,
        &json!({
            "type": "message", "model": "m", "stop_reason": "tool_use",
            "usage": {"input_tokens": 7, "output_tokens": 8, "cache_creation_input_tokens": 9},
            "content": [
                {"type": "thinking", "thinking": "hm, ünd", "signature": "c2ln"},
                {"type": "text", "text": ""},
                {"type": "text", "text": "Three things."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 1.0}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                {"type": "tool_use", "id": "t3", "name": "mad name", "input": "half"},
            ],
        })
        .to_string(),
    )
}

fn thoughtful_anthropic_stream() -> CannedResponse {
    let delta = |index: u64, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let start = |index: u64, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
    let events = [
        json!({"type": "message_start", "message": {"model": "m", "content": [],
                    "usage": {"input_tokens": 7, "output_tokens": 1, "cache_creation_input_tokens": 9}}}),
        start(
            0,
            json!({"type": "thinking", "thinking": "", "signature": ""}),
        ),
        delta(0, json!({"type": "thinking_delta", "thinking": "hm, "})),
        json!({"type": "ping"}),
        delta(0, json!({"type": "thinking_delta", "thinking": "ünd"})),
        delta(0, json!({"type": "signature_delta", "signature": "c2ln"})),
        start(1, json!({"type": "text", "text": ""})),
        start(2, json!({"type": "text", "text": ""})),
        delta(2, json!({"type": "text_delta", "text": "Three "})),
        delta(2, json!({"type": "text_delta", "text": "things."})),
        start(3, json!({"type": "tool_use", "id": "t1", "name": "add"})),
        delta(
            3,
            json!({"type": "input_json_delta", "partial_json": "{\"n\":"}),
        ),
        delta(
            3,
            json!({"type": "input_json_delta", "partial_json": " 1.0}"}),
        ),
        start(
            4,
            json!({"type": "tool_use", "id": "t2", "name": "add", "input": {}}),
        ),
        start(
            5,
            json!({"type": "tool_use", "id": "t3", "name": "mad name", "input": {}}),
        ),
        delta(
            5,
            json!({"type": "input_json_delta", "partial_json": "{\"n\": \"ha"}),
        ),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 8}}),
        json!({"type": "message_stop"}),
    ];
    CannedResponse::new(
        200,
        "text/event-stream",
        lines("event: x\ndata: ", "\n\n", &events),
    )
}

fn thoughtful_openai() -> CannedResponse {
    CannedResponse::json(
            200,
            &json!({
                "model": "m", "usage": {"prompt_tokens": 16, "completion_tokens": 8},
                "choices": [{"finish_reason": "tool_calls", "message": {
                    "role": "assistant", "content": "Three things.",
                    "tool_calls": [
                        {"id": "t1", "type": "function", "function": {"name": "add", "arguments": "{\"n\": 1.0}"}},
                        {"id": "t2", "type": "function", "function": {"name": "add", "arguments": ""}},
                        {"id": "t3", "type": "function", "function": {"name": "mad name", "arguments": "{\"n\": \"ha"}},
                    ],
                }}],
            })
            .to_string(),
        )
}

fn thoughtful_openai_stream() -> CannedResponse {
    let delta =
        |delta: Value| json!({"model": "m", "choices": [{"delta": delta, "finish_reason": null}]});
    let call = |index: u64, id: Option<&str>, name: Option<&str>, arguments: &str| {
        delta(
            json!({"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}]}),
        )
    };
    let events = [
        delta(json!({"role": "assistant", "content": null})),
        delta(json!({"content": "Three "})),
        delta(json!({"content": "things."})),
        call(0, Some("t1"), Some("add"), "{\"n\":"),
        call(0, None, None, " 1.0}"),
        call(1, Some("t2"), Some("add"), ""),
        call(2, Some("t3"), Some("mad name"), "{\"n\": \"ha"),
        json!({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 8}}),
    ];
    let body = lines("data: ", "\r\n\r\n", &events) + "data: [DONE]\r\n\r\n";
    CannedResponse::new(200, "text/event-stream", body)
}

fn thoughtful_ollama(stream: bool) -> CannedResponse {
    let call =
        |name: &str, arguments: Value| json!({"function": {"name": name, "arguments": arguments}});
    let message = json!({"role": "assistant", "content": "Three things.", "thinking": "hm, ünd", "tool_calls": [
        call("add", json!({"n": 1.0})), call("add", json!({})), call("mad name", json!("half")),
    ]});
    let mut last = json!({"model": "m", "done": true, "done_reason": "stop", "prompt_eval_count": 16, "eval_count": 8});
    if stream {
        let first = json!({"model": "m", "message": message, "done": false});
        CannedResponse::new(200, "application/x-ndjson", lines("", "\n", &[first, last]))
    } else {
        last["message"] = message;
        CannedResponse::json(200, &last.to_string())
    }
}

/// The output items of a thoughtful response, as the service's own types have them.
pub fn output() -> [Value; 5] {
    let call = |n: u32, name: &str, arguments: &str, status: &str| {
        json!({"type": "function_call", "id": format!("fc_{n}"), "call_id": format!("t{n}"), "name": name,
            "arguments": arguments, "status": status})
    };
    [
        json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAA=="}),
        json!({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
            "content": [{"type": "output_text", "text": "Three things.", "annotations": [], "logprobs": []}]}),
        call(1, "add", "{\"n\": 1.0}", "completed"),
        call(2, "add", "", "completed"),
        call(3, "mad name", "{\"n\": \"ha", "incomplete"),
    ]
}

fn thoughtful_response(stream: bool) -> CannedResponse {
    let response = json!({
        "id": "resp_1", "object": "response", "status": "completed", "model": "m", "error": null,
        "incomplete_details": null, "output": output(),
        "usage": {"input_tokens": 16, "output_tokens": 8, "total_tokens": 24,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5},
            "output_tokens_details": {"reasoning_tokens": 3}},
    });
    if !stream {
        return CannedResponse::json(200, &response.to_string());
    }
    let at = |kind: &str, place: u64, more: (&str, Value)| json!({"type": format!("response.{kind}"), "output_index": place, more.0: more.1});
    let [thought, said, first, second, third] = output();
    let begun = |item: &Value, field: &str, empty: Value| {
        let mut item = item.clone();
        item["status"] = "in_progress".into();
        item[field] = empty;
        item
    };
    let added = "output_item.added";
    let events = [
        json!({"type": "response.created", "response": {"status": "in_progress", "output": []}}),
        // What came first of the thoughts is not the whole of them.
        at(
            added,
            0,
            ("item", begun(&thought, "encrypted_content", "gAA".into())),
        ),
        at("reasoning_summary_text.delta", 0, ("delta", "hm".into())),
        at("output_item.done", 0, ("item", thought)),
        at(added, 1, ("item", begun(&said, "content", json!([])))),
        at("output_text.delta", 1, ("delta", "Three ".into())),
        json!({"type": "response.something.new", "delta": {"is": ["no", "text"]}, "output_index": 1}),
        at("output_text.delta", 1, ("delta", "things.".into())),
        at("output_item.done", 1, ("item", said)),
        // Calls of one reply may come in pieces that are mixed.
        at(added, 2, ("item", begun(&first, "arguments", "".into()))),
        at(added, 3, ("item", begun(&second, "arguments", "".into()))),
        at(
            "function_call_arguments.delta",
            2,
            ("delta", "{\"n\":".into()),
        ),
        at(added, 4, ("item", begun(&third, "arguments", "".into()))),
        at(
            "function_call_arguments.delta",
            4,
            ("delta", "{\"n\": \"ha".into()),
        ),
        at(
            "function_call_arguments.delta",
            2,
            ("delta", " 1.0}".into()),
        ),
        at("output_item.done", 3, ("item", second)),
        at("output_item.done", 2, ("item", first)),
        at("output_item.done", 4, ("item", third)),
        json!({"type": "response.completed", "response": response}),
    ];
    let lines = events.iter().map(|event| {
        format!(
            "event: {}\ndata: {event}\n\n",
            event["type"].as_str().expect("a type")
        )
    });
    CannedResponse::new(200, "text/event-stream", lines.collect::<String>())
}
