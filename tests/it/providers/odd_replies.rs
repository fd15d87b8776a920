//! Replies in other shapes than the services' documentation has: as gateways and compatible servers were reported to send
//! them.

use std::io::Write;
use std::time::Duration;

use axed::providers::ErrorCategory;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::support::client::{
    ComparableReply, WIRES, complete_hello, expect_error, replay_client, wire_name,
};
use crate::support::provider::recorded_request::Wire;
use crate::support::replay::CannedResponse;

const A: &str = "{\"path\":\"a\"}";

fn stream(events: &[Value]) -> String {
    let lines = events.iter().map(|event| format!("data: {event}\n\n"));
    lines.collect()
}

fn sse(body: impl Into<Vec<u8>>) -> CannedResponse {
    CannedResponse::new(200, "text/event-stream", body)
}

fn text_delta(wire: Wire, text: &str) -> Value {
    match wire {
        Wire::Anthropic => json!({"type": "content_block_delta", "index": 0,
            "delta": {"type": "text_delta", "text": text}}),
        Wire::Openai => json!({"choices": [{"index": 0, "delta": {"content": text}}]}),
        Wire::Responses => json!({"type": "response.output_text.delta", "output_index": 0,
            "content_index": 0, "item_id": "m", "delta": text}),
        Wire::Ollama => json!({"message": {"role": "assistant", "content": text}, "done": false}),
    }
}

/// What ends a stream, with its usage.
fn end(wire: Wire) -> Vec<Value> {
    let usage = json!({"input_tokens": 7, "output_tokens": 3});
    match wire {
        Wire::Anthropic => vec![
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}),
            json!({"type": "message_stop"}),
        ],
        Wire::Openai => vec![
            json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
            json!("[DONE]"),
        ],
        Wire::Responses => vec![json!({"type": "response.completed",
            "response": {"status": "completed", "output": [], "usage": usage}})],
        Wire::Ollama => vec![json!({"message": {"content": ""}, "done": true,
            "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 3})],
    }
}

/// A whole reply that says hello.
fn document(wire: Wire) -> Value {
    let usage = json!({"input_tokens": 7, "output_tokens": 3});
    match wire {
        Wire::Anthropic => json!({"content": [{"type": "text", "text": "hello"}],
            "stop_reason": "end_turn", "usage": usage}),
        Wire::Openai => json!({"choices": [{"message": {"content": "hello"},
            "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
        Wire::Responses => json!({"status": "completed", "usage": usage, "output": [
            {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "hello"}]}]}),
        Wire::Ollama => json!({"message": {"content": "hello"}, "done": true,
            "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 3}),
    }
}

/// The messages of a stream in the form of its wire.
fn body(wire: Wire, messages: &[Value]) -> String {
    match wire {
        Wire::Ollama => messages.iter().map(|line| format!("{line}\n")).collect(),
        _ => stream(messages),
    }
}

async fn read(wire: Wire, answer: CannedResponse, stream: bool) -> ComparableReply {
    let (_service, served) = replay_client(wire, answer);
    let (reply, deltas) = complete_hello(&served, stream).await;
    let reply = reply.unwrap_or_else(|error| panic!("{wire:?}: {error}"));
    let reply = ComparableReply::from(reply);
    let expected = if stream { reply.text.as_str() } else { "" };
    assert_eq!(deltas, expected, "{wire:?}");
    reply
}

async fn assert_hello(wire: Wire, answer: CannedResponse, stream: bool) {
    let reply = read(wire, answer, stream).await;
    assert_eq!(reply.text, "hello", "{wire:?}");
    let usage = reply.usage.map(|usage| (usage.input, usage.output));
    assert_eq!(usage, Some((7, 3)), "{wire:?}");
}

async fn calls(wire: Wire, events: &[Value]) -> Vec<(String, String)> {
    let answer = CannedResponse::new(200, "text/event-stream", body(wire, events));
    let calls = read(wire, answer, true).await.calls;
    let calls = calls.into_iter();
    calls
        .map(|(_, name, arguments)| (name, arguments.to_string()))
        .collect()
}

fn call(name: &str, arguments: &str) -> (String, String) {
    (name.to_owned(), arguments.to_owned())
}

#[tokio::test]
async fn an_error_in_any_wrapping_is_no_reply() {
    let wrappings = [
        json!({"object": "error", "message": "engine died", "type": "InternalServerError", "code": 500}),
        json!({"error": {"message": "engine died"}}),
        json!({"error": "engine died"}),
        json!({"errors": [{"message": "engine died"}]}),
        json!({"detail": "engine died"}),
        json!({"code": 1001, "msg": "engine died"}),
        json!({"message": "engine died", "type": "internal"}),
        json!([{"error": {"message": "engine died"}}]),
    ];
    for wire in WIRES {
        for wrapping in &wrappings {
            let whole = CannedResponse::json(200, &wrapping.to_string());
            let error = expect_error(wire, whole, false).await;
            assert_eq!(
                error.to_string(),
                "server: engine died",
                "{wire:?} {wrapping}"
            );
            let mut messages = vec![text_delta(wire, "part of "), wrapping.clone()];
            messages.extend(end(wire));
            let error = expect_error(wire, sse(body(wire, &messages)), true).await;
            assert_eq!(
                error.to_string(),
                "server: engine died",
                "{wire:?} {wrapping}"
            );
            assert!(error.may_be_billed);
        }
        for data in ["{\"reason\":1,\"message\":\"engine died\"}", "engine died"] {
            let begun = stream(&[text_delta(wire, "part of ")]);
            let error = sse(format!("{begun}event: error\ndata: {data}\n\n"));
            let error = expect_error(wire, error, true).await;
            assert_eq!(error.to_string(), "server: engine died", "{wire:?} {data}");
        }
    }
    let choice = json!({"choices": [{"message": {"content": "part of "}, "finish_reason": "error",
        "error": {"code": 502, "message": "engine died"}}]});
    let error = expect_error(
        Wire::Openai,
        CannedResponse::json(200, &choice.to_string()),
        false,
    );
    assert_eq!(error.await.to_string(), "server: engine died");
    let cancelled = json!({"type": "response.completed", "response": {"status": "cancelled",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "part"}]}]}});
    let error = expect_error(Wire::Responses, sse(stream(&[cancelled])), true).await;
    assert_eq!(error.category, ErrorCategory::Server, "{error}");
}

#[tokio::test]
async fn text_is_found_wherever_it_is() {
    let completed = |output: Value| {
        json!({"type": "response.completed", "response": {"status": "completed", "output": output,
            "usage": {"input_tokens": 7, "output_tokens": 3}}})
    };
    let part = json!({"type": "output_text", "text": "hello"});
    let item = json!({"type": "message", "id": "m", "content": [part]});
    let about = |mut event: Value| {
        event["item_id"] = json!("m");
        event["output_index"] = json!(0);
        event["content_index"] = json!(0);
        event
    };
    let text_done = about(json!({"type": "response.output_text.done", "text": "hello"}));
    let part_done = about(json!({"type": "response.content_part.done", "part": part}));
    let delta = |text: &str| about(json!({"type": "response.output_text.delta", "delta": text}));
    for events in [
        vec![text_done.clone(), completed(json!([]))],
        vec![part_done.clone(), completed(json!(null))],
        vec![completed(json!([item]))],
        vec![
            json!({"type": "response.output_item.added", "output_index": 0, "item": item}),
            completed(json!([])),
        ],
        vec![
            delta("hel"),
            delta("lo"),
            text_done,
            part_done,
            completed(json!([item])),
        ],
        // Another id than that of the deltas.
        vec![
            about(json!({"type": "response.output_text.delta", "delta": "hello", "item_id": "x"})),
            completed(json!([item])),
        ],
    ] {
        assert_hello(Wire::Responses, sse(stream(&events)), true).await;
    }
    let mut named = String::new();
    for event in [delta("hello"), completed(json!([]))] {
        let mut data = event.clone();
        data.as_object_mut().expect("an object").remove("type");
        named += &format!(
            "event: {}\ndata: {data}\n\n",
            event["type"].as_str().expect("a type")
        );
    }
    assert_hello(Wire::Responses, sse(named), true).await;

    // A delta without the beginning of its block.
    let mut events = vec![
        text_delta(Wire::Anthropic, "hel"),
        text_delta(Wire::Anthropic, "lo"),
    ];
    events.extend(end(Wire::Anthropic));
    assert_hello(Wire::Anthropic, sse(stream(&events)), true).await;

    // The message so far beside its next piece, or at the end.
    let chunk =
        |delta: Value, message: Value| json!({"choices": [{"delta": delta, "message": message}]});
    let content = |text: &str| json!({"content": text});
    for chunks in [
        vec![
            chunk(content("hel"), content("hel")),
            chunk(content("lo"), content("hello")),
        ],
        vec![
            chunk(content("hel"), json!(null)),
            chunk(content("lo"), json!(null)),
            chunk(json!({}), content("hello")),
        ],
        vec![
            chunk(json!(null), content("hel")),
            chunk(json!(null), content("hello")),
        ],
        vec![
            chunk(json!(null), content("hel")),
            chunk(json!(null), content("lo")),
        ],
    ] {
        let chunks: Vec<_> = chunks.into_iter().chain(end(Wire::Openai)).collect();
        assert_hello(Wire::Openai, sse(stream(&chunks)), true).await;
    }
}

#[tokio::test]
async fn pieces_of_calls_are_put_together() {
    let read_a = call("read_file", A);
    // Text and call have the same index.
    let text = json!({"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Let me look."}]});
    let function = |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "id": format!("f{id}"), "call_id": id, "name": name, "arguments": arguments});
    let added = |item: &Value| json!({"type": "response.output_item.added", "output_index": 0, "item": item});
    let done = |item: &Value| json!({"type": "response.output_item.done", "output_index": 0, "item": item});
    let piece = |id: &str, delta: &str| json!({"type": "response.function_call_arguments.delta", "output_index": 0, "item_id": id, "delta": delta});
    let completed = |output: &[&Value]| json!({"type": "response.completed", "response": {"status": "completed", "output": output}});
    let (whole, blank) = (
        function("c", "read_file", A),
        function("c", "read_file", ""),
    );
    let other = function("d", "list", "{}");
    for events in [
        vec![
            added(&json!({"type": "message", "id": "m", "content": []})),
            json!({"type": "response.output_text.delta", "output_index": 0, "item_id": "m", "delta": "Let me look."}),
            added(&blank),
            piece("fc", A),
            done(&whole),
            done(&text),
            completed(&[&text, &whole]),
        ],
        // What is done has no arguments.
        vec![
            added(&blank),
            piece("fc", A),
            json!({"type": "response.function_call_arguments.done", "item_id": "fc", "output_index": 0, "arguments": ""}),
            done(&blank),
            completed(&[&blank]),
        ],
        // A placeholder before the pieces, and another id in them.
        vec![
            added(&function("c", "read_file", "{}")),
            piece("zz", "{\"path\":"),
            piece("zy", "\"a\"}"),
            completed(&[&whole]),
        ],
    ] {
        assert_eq!(
            calls(Wire::Responses, &events).await,
            std::slice::from_ref(&read_a),
            "{events:?}"
        );
    }
    let interleaved = [
        added(&blank),
        added(&function("d", "list", "")),
        piece("fc", "{\"path\":"),
        piece("fd", "{"),
        piece("fc", "\"a\"}"),
        piece("fd", "}"),
        done(&whole),
        done(&other),
        completed(&[&whole, &other]),
    ];
    assert_eq!(
        calls(Wire::Responses, &interleaved).await,
        [read_a.clone(), call("list", "{}")]
    );

    let start = |index: Value, id: &str, name: &str, input: Value| {
        json!({"type": "content_block_start", "index": index,
            "content_block": {"type": "tool_use", "id": id, "name": name, "input": input}})
    };
    let delta = |index: Value, json: Value| {
        json!({"type": "content_block_delta", "index": index,
            "delta": {"type": "input_json_delta", "partial_json": json}})
    };
    let text = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
    for events in [
        vec![
            text,
            text_delta(Wire::Anthropic, "x"),
            start(json!(0), "c", "read_file", json!({})),
            delta(json!(0), json!(A)),
        ],
        vec![
            start(json!(null), "c", "read_file", json!({})),
            delta(json!(null), json!("{}")),
            delta(json!(null), json!(A)),
        ],
        vec![
            start(json!(0), "c", "read_file", json!({"path": "a"})),
            delta(json!(0), json!("")),
        ],
        vec![
            start(json!("0"), "c", "read_file", json!({})),
            delta(json!(0), json!({"path": "a"})),
        ],
        vec![
            start(json!(0), "c", "read_file", json!({})),
            delta(json!(0), json!(A)),
            start(json!(0), "c", "read_file", json!({"path": "a"})),
        ],
    ] {
        let events: Vec<_> = events.into_iter().chain(end(Wire::Anthropic)).collect();
        assert_eq!(
            calls(Wire::Anthropic, &events).await,
            std::slice::from_ref(&read_a),
            "{events:?}"
        );
    }

    let line = |call: Value, done: bool| json!({"message": {"content": "", "tool_calls": [call]}, "done": done});
    let ollama = |id: Value, arguments: Value| json!({"id": id, "function": {"index": 0, "name": "read_file", "arguments": arguments}});
    for lines in [
        vec![
            line(ollama(json!(1), json!({"path": "a"})), false),
            line(ollama(json!(1), json!({"path": "a"})), true),
        ],
        vec![
            line(ollama(json!(null), json!({})), false),
            line(ollama(json!(null), json!(A)), true),
        ],
        vec![
            line(ollama(json!("k"), json!("{\"path\":")), false),
            line(ollama(json!("k"), json!("\"a\"}")), true),
        ],
    ] {
        assert_eq!(
            calls(Wire::Ollama, &lines).await,
            std::slice::from_ref(&read_a),
            "{lines:?}"
        );
    }
}

#[tokio::test]
async fn usage_that_comes_late_and_empty_replaces_nothing() {
    for (wire, late) in [
        (Wire::Openai, json!({"choices": [], "usage": {}})),
        (Wire::Openai, json!({"choices": [], "usage": null})),
        (
            Wire::Openai,
            json!({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}),
        ),
        (
            Wire::Anthropic,
            json!({"type": "message_delta", "delta": {}, "usage": {}}),
        ),
        (
            Wire::Anthropic,
            json!({"type": "message_delta", "delta": {}, "usage": {"input_tokens": 0, "output_tokens": null}}),
        ),
        (
            Wire::Anthropic,
            json!({"type": "message_delta", "delta": {}, "usage": {"output_tokens": "many"}}),
        ),
    ] {
        let mut events = vec![
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        ];
        if wire == Wire::Openai {
            events.clear();
        }
        events.push(text_delta(wire, "hello"));
        let mut ends = end(wire);
        let last = ends.pop().expect("an end");
        events.extend(ends);
        events.extend([late, last]);
        assert_hello(wire, sse(stream(&events)), true).await;
    }
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 3});
    let events = [
        text_delta(Wire::Openai, "hello"),
        json!({"choices": [{"delta": {}, "finish_reason": "stop", "usage": usage}]}),
        json!("[DONE]"),
    ];
    assert_hello(Wire::Openai, sse(stream(&events)), true).await;
}

#[tokio::test]
async fn types_that_nothing_depends_on_may_be_others() {
    for (wire, body) in [
        (
            Wire::Openai,
            r#"{"id":1,"model":7,"created":"now","choices":{"index":"0","message":{"role":"assistant","content":["hel",{"text":"lo"}],"refusal":false,"tool_calls":false},"finish_reason":"stop"},"usage":{"prompt_tokens":"7","completion_tokens":3.0}}"#,
        ),
        (
            Wire::Openai,
            r#"{"choices":[{"message":{"content":"hello","content":null},"finish_reason":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"prompt_tokens":7,"completion_tokens":3}}"#,
        ),
        (
            Wire::Anthropic,
            r#"{"id":1,"model":false,"content":[{"type":"text","text":"hello","text":""}],"stop_reason":"end_turn","usage":{"input_tokens":"7","output_tokens":3}}"#,
        ),
        (
            Wire::Responses,
            r#"{"id":1,"model":[],"incomplete_details":"no","error":false,"status":"completed","output":[{"type":"message","id":1,"content":[{"type":"output_text","text":"hello"}]}],"usage":{"input_tokens":7,"output_tokens":"3"}}"#,
        ),
        (
            Wire::Ollama,
            r#"{"model":1,"message":{"content":"hello","thinking":false,"tool_calls":null},"done":"true","done_reason":"stop","prompt_eval_count":"7","eval_count":3}"#,
        ),
    ] {
        assert_hello(wire, CannedResponse::json(200, body), false).await;
    }
    let number = json!({"choices": [{"message": {"content": 42}, "finish_reason": "stop"}]});
    let reply = read(
        Wire::Openai,
        CannedResponse::json(200, &number.to_string()),
        false,
    )
    .await;
    assert_eq!(reply.text, "42");
}

#[tokio::test]
async fn halves_of_characters_are_joined_or_replaced() {
    for wire in WIRES {
        let escaped = |text: &str| {
            text_delta(wire, text)
                .to_string()
                .replace('<', "\\ud83d")
                .replace('>', "\\ude00")
        };
        let body = |texts: [&str; 2]| {
            let ends = end(wire).into_iter().map(|it| it.to_string());
            let messages = texts.map(escaped).into_iter().chain(ends);
            match wire {
                Wire::Ollama => messages.map(|line| line + "\n").collect::<String>(),
                _ => messages.map(|data| format!("data: {data}\n\n")).collect(),
            }
        };
        for (texts, expected) in [
            (["hi <", ">!"], "hi \u{1f600}!"),
            (["hi <", "!"], "hi \u{fffd}!"),
            (["hi >", "!<"], "hi \u{fffd}!\u{fffd}"),
        ] {
            for answer in [sse(body(texts)), sse(body(texts)).in_chunks(3)] {
                assert_eq!(read(wire, answer, true).await.text, expected, "{wire:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_body_is_read_by_what_it_is() {
    for wire in WIRES {
        let document = document(wire);
        let mut messages = vec![text_delta(wire, "hel"), text_delta(wire, "lo")];
        messages.extend(end(wire));
        let streamed = body(wire, &messages);
        let lines: String = messages.iter().map(|it| format!("{it}\n")).collect();
        let pretty = serde_json::to_string_pretty(&document).expect("JSON");
        let documents = [
            document.to_string(),
            pretty,
            format!("\u{feff}{document}\n"),
        ];
        let streams = [streamed, lines, stream(&messages)];
        for kind in [
            "text/event-stream",
            "application/json",
            "text/plain",
            "application/x-ndjson",
            "",
        ] {
            for text in documents.iter().chain(&streams) {
                let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
                gzip.write_all(text.as_bytes()).expect("written");
                let gzip = gzip.finish().expect("compressed");
                for is_stream in [false, true] {
                    let answer = CannedResponse::new(200, kind, text.as_bytes());
                    assert_hello(wire, answer.clone().in_chunks(2), is_stream).await;
                    assert_hello(wire, answer, is_stream).await;
                    let answer = CannedResponse::new(200, kind, gzip.clone()).in_chunks(5);
                    assert_hello(wire, answer, is_stream).await;
                }
            }
        }
        // Messages that only keep the connection open, and the end of another wire.
        let begun = stream(&messages[..1]);
        let rest = stream(&messages[1..]);
        let filled = format!(
            "data:\n\n{begun}event: ping\ndata: \n\n: hi\n\ndata: null\n\n{rest}data: [DONE]\n\n"
        );
        assert_hello(wire, sse(filled), true).await;
    }
    let anthropic = [
        text_delta(Wire::Anthropic, "hello"),
        end(Wire::Anthropic)[0].clone(),
        json!("[DONE]"),
    ];
    assert_hello(Wire::Anthropic, sse(stream(&anthropic)), true).await;
    for wire in [Wire::Anthropic, Wire::Responses, Wire::Ollama] {
        let cut = [text_delta(wire, "hello"), json!("[DONE]")];
        let error = expect_error(wire, sse(stream(&cut)), true).await;
        let expected = "server: the stream ended before the reply was complete";
        assert_eq!(error.to_string(), expected, "{}", wire_name(wire));
    }
}

#[tokio::test]
async fn an_error_keeps_its_words_and_its_wait() {
    let quota = json!([{"error": {"code": 429, "message": "Quota exceeded", "status": "RESOURCE_EXHAUSTED",
        "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3s"}]}}]);
    let quoted = json!({"error": {"message": "Provider returned error", "code": 400,
        "metadata": {"raw": "{\"error\":{\"message\":\"at most 1 image\"}}", "provider_name": "Upstream"}}});
    for wire in WIRES {
        let error = expect_error(wire, CannedResponse::json(429, &quota.to_string()), true).await;
        assert_eq!(error.to_string(), "rate_limit: Quota exceeded");
        assert_eq!(error.retry_after, Some(Duration::from_secs(3)));
        let error = expect_error(wire, CannedResponse::json(400, &quoted.to_string()), false).await;
        assert_eq!(
            error.to_string(),
            "bad_request: Provider returned error: at most 1 image"
        );
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(b"{\"error\":{\"message\":\"Try again in 1.5s.\"}}")
            .expect("written");
        let gzip = gzip.finish().expect("compressed");
        let answer = CannedResponse::new(503, "application/json", gzip);
        let error = expect_error(wire, answer, false).await;
        assert_eq!(error.to_string(), "server: Try again in 1.5s.");
        assert_eq!(error.retry_after, Some(Duration::from_millis(1500)));
    }
}
