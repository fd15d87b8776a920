//! What the clients send, and which clients there are.

use crate::providers::thoughtful::{output, thoughtful};
use crate::support::client::{
    KEY, WIRES, complete, complete_hello, provider_config, provider_handle, recorded_stream,
    replay_client,
};
use crate::support::provider::recorded_request::Wire;
use crate::support::replay::{ReceivedRequest, ReplayServer};
use axed::domain::agent::params::Params;
use axed::domain::agent::response_format::ResponseFormat;
use axed::domain::message::{AssistantMessage, Echo, Message, ToolCall, ToolResult, ToolSpec};
use axed::providers::json_prompt::JSON_PROMPT;
use axed::providers::{ChatRequest, Delta};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;

fn raw(json: &Value) -> Arc<RawValue> {
    serde_json::value::to_raw_value(json).expect("JSON").into()
}

fn tool(name: &str) -> ToolSpec {
    ToolSpec {
        name: name.to_owned(),
        description: format!("Does {name}."),
        parameters: raw(&json!({
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
        })),
    }
}

fn result(call: &ToolCall, content: &str, is_error: bool) -> ToolResult {
    ToolResult::text(&call.id, content, is_error)
}

/// A conversation of two turns; returns the second request's body.
async fn conversation(kind: Wire, stream: bool) -> Value {
    let service = ReplayServer::start([thoughtful(kind, stream), recorded_stream(kind)]);
    let served = provider_handle(provider_config(kind, &service.base_url()));
    let params = Params {
        temperature: Some(0.0),
        max_tokens: Some(77),
        top_p: Some(0.5),
        effort: None,
        reasoning_summary: None,
        extra: Default::default(),
        cache: Default::default(),
        service: None,
        // This wire has none, and another one would serve the request.
        stop: match kind {
            Wire::Responses => Vec::new(),
            _ => vec!["STOP".to_owned()],
        },
        response_format: ResponseFormat::Text,
    };
    let tools = [tool("add"), tool("call_agent")];
    let hello = Message::user("hello");
    let question = |messages| ChatRequest {
        tool_choice: None,
        model: "model",
        system: "Be good.",
        messages,
        blobs: None,
        tools: &tools,
        params: &params,
        stream,
        is_prompt_reused: true,
        facts: None,
        cache_key: "sha256:0123abcd",
        conversation_id: "",
        trace: None,
        api_key: None,
    };
    let first = [hello.clone()];
    let (reply, deltas) = complete(&served, question(&first)).await;
    let reply = reply.expect("a reply");
    // On this wire, the text is commentary.
    let text = match kind {
        Wire::Responses => "",
        _ => "Three things.",
    };
    assert_eq!(reply.message.content, text);
    assert_eq!(deltas, if stream { text } else { "" });
    let usage = reply.usage.expect("usage");
    assert_eq!((usage.input, usage.output), (16, 8));
    let calls = &reply.message.tool_calls;
    let arguments: Vec<_> = calls.iter().map(|call| call.arguments.get()).collect();
    assert_eq!(arguments.len(), 3);
    assert_eq!(arguments[1..], ["{}", "{}"], "{kind:?}, streamed: {stream}");

    let results = vec![
        result(&calls[0], "2", false),
        result(&calls[1], "add wants a number", true),
        result(&calls[2], "Unknown tool: \"mad name\"", true),
    ];
    let second = [
        hello,
        Message::Assistant(reply.message),
        Message::Tool {
            tool_results: results,
        },
    ];
    complete(&served, question(&second))
        .await
        .0
        .expect("a reply");
    let last = service.requests().pop().expect("a request");
    serde_json::from_str(&last.body).expect("JSON")
}

#[tokio::test]
async fn anthropic_is_sent_its_blocks_unchanged() {
    for stream in [false, true] {
        let body = conversation(Wire::Anthropic, stream).await;
        let result = |id: &str, content: &str, is_error: bool| json!({"type": "tool_result", "tool_use_id": id, "content": content, "is_error": is_error});
        let cached = json!({"type": "ephemeral"});
        let mut last = result("t3", "Unknown tool: \"mad name\"", true);
        last["cache_control"] = cached.clone();
        let expected = json!([
            {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm, ünd", "signature": "c2ln"},
                {"type": "text", "text": "Three things."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 1.0}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                {"type": "tool_use", "id": "t3", "name": "mad_name", "input": {}},
            ]},
            {"role": "user", "content": [
                result("t1", "2", false),
                result("t2", "add wants a number", true),
                last,
            ]},
        ]);
        assert_eq!(body["messages"], expected, "streamed: {stream}");
        assert_eq!(
            body["system"],
            json!([{"type": "text", "text": "Be good.", "cache_control": cached}])
        );
        assert_eq!(body["tools"][0].get("cache_control"), None);
        assert_eq!(body["tools"][1]["cache_control"], cached);
        assert_eq!(body["tools"][1]["input_schema"]["type"], "object");
        assert_eq!(body["max_tokens"], 77);
        assert_eq!(body["stop_sequences"], json!(["STOP"]));
        assert_eq!(body.get("stream"), stream.then_some(&json!(true)));
    }
}

#[tokio::test]
async fn openai_is_sent_calls_as_text_and_a_message_for_each_result() {
    for stream in [false, true] {
        let body = conversation(Wire::Openai, stream).await;
        let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let result = |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content});
        let expected = json!([
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Three things.", "tool_calls": [
                call("t1", "add", "{\"n\": 1.0}"), call("t2", "add", "{}"), call("t3", "mad_name", "{}"),
            ]},
            result("t1", "2"),
            result("t2", "add wants a number"),
            result("t3", "Unknown tool: \"mad name\""),
        ]);
        assert_eq!(body["messages"], expected, "streamed: {stream}");
        assert_eq!(body["tools"][0]["type"], "function");
        assert_eq!(body["tools"][0]["function"]["parameters"]["type"], "object");
        assert_eq!(body["max_tokens"], 77);
        assert_eq!(body["stop"], json!(["STOP"]));
        assert_eq!(body.get("stream"), stream.then_some(&json!(true)));
        let options = json!({"include_usage": true});
        assert_eq!(body.get("stream_options"), stream.then_some(&options));
    }
}

#[tokio::test]
async fn responses_is_sent_its_items_unchanged_in_order() {
    for stream in [false, true] {
        let body = conversation(Wire::Responses, stream).await;
        let mut output = output();
        // What the service would not take back: no arguments, half of them, a name that it does not allow.
        output[3]["arguments"] = "{}".into();
        output[4]["arguments"] = "{}".into();
        output[4]["name"] = "mad_name".into();
        let result = |id: &str, content: &str| json!({"type": "function_call_output", "call_id": id, "output": content});
        let mut expected = vec![json!({"type": "message", "role": "user", "content": "hello"})];
        expected.extend(output);
        expected.extend([
            result("t1", "2"),
            result("t2", "add wants a number"),
            result("t3", "Unknown tool: \"mad name\""),
        ]);
        assert_eq!(body["input"], Value::from(expected), "streamed: {stream}");
        assert_eq!(body["instructions"], "Be good.");
        assert_eq!(body["tools"][0]["name"], "add");
        assert_eq!(body["tools"][0]["parameters"]["type"], "object");
        assert_eq!(body["tools"][0]["strict"], false);
        assert_eq!(body["max_output_tokens"], 77);
        assert_eq!(body["prompt_cache_key"], "0123abcd");
        assert_eq!(body.get("stop"), None, "it has no such field");
        assert_eq!(body.get("stream"), stream.then_some(&json!(true)));
    }
}

#[tokio::test]
async fn reasoning_is_sent_back_only_to_its_own_model() {
    let service = ReplayServer::start([
        thoughtful(Wire::Responses, false),
        recorded_stream(Wire::Responses),
    ]);
    let served = provider_handle(provider_config(Wire::Responses, &service.base_url()));
    let reply = complete_hello(&served, false).await.0.expect("a reply");
    let calls = reply.message.tool_calls.iter();
    let tool_results = calls.map(|call| result(call, "2", false)).collect();
    let messages = [
        Message::Assistant(reply.message),
        Message::Tool { tool_results },
    ];
    let params = Params::default();
    for (model, keeps) in [("model", true), ("model-mini", false)] {
        let request = ChatRequest {
            tool_choice: None,
            model,
            system: "",
            messages: &messages,
            blobs: None,
            tools: &[],
            params: &params,
            stream: true,
            is_prompt_reused: true,
            facts: None,
            cache_key: "",
            conversation_id: "",
            trace: None,
            api_key: None,
        };
        complete(&served, request).await.0.expect("a reply");
        let seen = service.requests().pop().expect("a request");
        let body: Value = serde_json::from_str(&seen.body).expect("JSON");
        assert_eq!(seen.body.contains("gAAAAA=="), keeps, "{model}");
        let names = body["input"].as_array().expect("items").iter();
        let names: Vec<_> = names.filter_map(|item| item["name"].as_str()).collect();
        assert_eq!(names, ["add", "add", "mad_name"], "{model}");
        assert_eq!(body.get("prompt_cache_key"), None);
    }
}

#[tokio::test]
async fn ollama_is_sent_calls_as_objects_without_ids() {
    for stream in [false, true] {
        let body = conversation(Wire::Ollama, stream).await;
        let call = |name: &str, arguments: Value| json!({"function": {"name": name, "arguments": arguments}});
        let result = |name: &str, content: &str| json!({"role": "tool", "tool_name": name, "content": content});
        let expected = json!([
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Three things.", "thinking": "hm, ünd", "tool_calls": [
                call("add", json!({"n": 1.0})), call("add", json!({})), call("mad name", json!({})),
            ]},
            result("add", "2"),
            result("add", "add wants a number"),
            result("mad name", "Unknown tool: \"mad name\""),
        ]);
        assert_eq!(body["messages"], expected, "streamed: {stream}");
        assert_eq!(body["stream"], stream);
        assert_eq!(
            body["options"],
            json!({"temperature": 0.0, "num_predict": 77, "top_p": 0.5, "stop": ["STOP"]})
        );
    }
}

/// A message that another service answered, with calls in its own spelling.
fn foreign() -> Vec<Message> {
    let call = ToolCall {
        id: "functions.add:0".to_owned(),
        provider_id: String::new(),
        name: "add".to_owned(),
        arguments: raw(&json!({"n": 1})),
        invalid_arguments: None,
    };
    let results = vec![result(&call, "2", false)];
    vec![
        Message::user("hello"),
        Message::Assistant(AssistantMessage {
            content: String::new(),
            tool_calls: vec![call],
            echo: Some(Echo {
                wire: "openai/elsewhere:model".to_owned(),
                body: raw(&json!({"reasoning": {"reasoning_content": "private"}})),
                prefix: 0,
            }),
        }),
        Message::Tool {
            tool_results: results,
        },
    ]
}

/// Checks the messages, the response format and the headers of a request with another service's reply.
fn has_text_and_calls(kind: Wire, seen: &ReceivedRequest, body: &Value, schema: &Value) {
    match kind {
        Wire::Anthropic => {
            let calls = json!([{"type": "tool_use", "id": "functions_add_0", "name": "add", "input": {"n": 1}}]);
            assert_eq!(body["messages"][1]["content"], calls);
            assert_eq!(
                body["messages"][2]["content"][0]["tool_use_id"],
                "functions_add_0"
            );
            assert_eq!(body["max_tokens"], 8192);
            assert_eq!(body.get("system"), None);
            assert_eq!(body.get("temperature"), None);
            assert_eq!(body["tools"][0].get("cache_control"), None);
            assert_eq!(
                body["output_config"],
                json!({"format": {"type": "json_schema", "schema": schema}})
            );
            assert_eq!(seen.headers["x-api-key"], KEY);
            assert_eq!(seen.headers["anthropic-version"], "2023-06-01");
        }
        Wire::Openai => {
            assert_eq!(body["messages"][1]["content"], Value::Null);
            assert_eq!(body["messages"][2]["tool_call_id"], "functions.add:0");
            let format = &body["response_format"];
            assert_eq!(
                (&format["type"], &format["json_schema"]["schema"]),
                (&json!("json_schema"), schema)
            );
            assert_eq!(format["json_schema"]["strict"], true);
            assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
            assert_eq!(seen.path, "/v1/chat/completions");
        }
        Wire::Responses => {
            assert_eq!(
                body["input"][1],
                json!({"type": "function_call", "call_id": "functions_add_0", "name": "add", "arguments": "{\"n\":1}"})
            );
            assert_eq!(body["input"][2]["call_id"], "functions_add_0");
            assert_eq!(
                body["text"],
                json!({"format": {"type": "json_schema", "name": "reply", "schema": schema, "strict": true}})
            );
            assert_eq!(body.get("instructions"), None);
            assert_eq!(body.get("temperature"), None);
            assert_eq!(body.get("max_output_tokens"), None);
            assert_eq!(body["store"], false);
            assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
            assert_eq!(seen.path, "/v1/responses");
        }
        Wire::Ollama => {
            assert_eq!(body["messages"][1]["content"], "");
            assert_eq!(body["format"], *schema);
            assert_eq!(body.get("options"), None);
            assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
        }
    }
}

#[tokio::test]
async fn another_service_gets_text_and_calls_in_its_format() {
    let schema = raw(&json!({"type": "object", "properties": {}, "additionalProperties": false}));
    let params = Params {
        response_format: ResponseFormat::JsonSchema(schema.clone()),
        ..Params::default()
    };
    let messages = foreign();
    for kind in WIRES {
        let (service, served) = replay_client(kind, recorded_stream(kind));
        let request = ChatRequest {
            tool_choice: None,
            model: "model",
            system: "",
            messages: &messages,
            blobs: None,
            tools: &[tool("add")],
            params: &params,
            stream: true,
            is_prompt_reused: false,
            facts: None,
            cache_key: "",
            conversation_id: "",
            trace: None,
            api_key: None,
        };
        complete(&served, request).await.0.expect("a reply");
        let seen = service.requests().pop().expect("a request");
        assert!(!seen.body.contains("private"), "{kind:?}");
        let body: Value = serde_json::from_str(&seen.body).expect("JSON");
        let schema: Value = serde_json::from_str(schema.get()).expect("JSON");
        has_text_and_calls(kind, &seen, &body, &schema);
        assert_eq!(seen.headers["content-type"], "application/json");
    }
}

#[tokio::test]
async fn a_json_object_is_requested_in_the_prompt_too() {
    let params = Params {
        response_format: ResponseFormat::JsonObject,
        ..Params::default()
    };
    let messages = [Message::user("hello")];
    for kind in WIRES {
        for (system, with_json) in [
            ("", JSON_PROMPT.to_owned()),
            ("Be good.", format!("Be good.\n\n{JSON_PROMPT}")),
            ("Reply in Json.", "Reply in Json.".to_owned()),
        ] {
            let (service, served) = replay_client(kind, recorded_stream(kind));
            let request = ChatRequest {
                tool_choice: None,
                model: "model",
                system,
                messages: &messages,
                blobs: None,
                tools: &[],
                params: &params,
                stream: true,
                is_prompt_reused: false,
                facts: None,
                cache_key: "",
                conversation_id: "",
                trace: None,
                api_key: None,
            };
            complete(&served, request).await.0.expect("a reply");
            let seen = service.requests().pop().expect("a request");
            let body: Value = serde_json::from_str(&seen.body).expect("JSON");
            match kind {
                Wire::Anthropic => assert_eq!(body["system"], with_json),
                Wire::Openai => {
                    let first = json!({"role": "system", "content": with_json});
                    assert_eq!(body["messages"][0], first);
                    assert_eq!(body["response_format"], json!({"type": "json_object"}));
                }
                Wire::Responses => {
                    let first =
                        json!({"type": "message", "role": "developer", "content": JSON_PROMPT});
                    assert_eq!(body["input"][0], first);
                    assert_eq!(body["instructions"].as_str().unwrap_or_default(), system);
                }
                Wire::Ollama => {
                    assert_eq!(body["format"], "json");
                    assert!(!seen.body.contains(JSON_PROMPT), "{}", seen.body);
                }
            }
        }
    }
}

#[tokio::test]
async fn a_waiting_request_is_small() {
    for kind in WIRES {
        let served = provider_handle(provider_config(kind, "http://127.0.0.1:1"));
        let messages = [];
        let params = Params::default();
        let request = ChatRequest {
            tool_choice: None,
            model: "model",
            system: "",
            messages: &messages,
            blobs: None,
            tools: &[],
            params: &params,
            stream: true,
            is_prompt_reused: true,
            facts: None,
            cache_key: "",
            conversation_id: "",
            trace: None,
            api_key: None,
        };
        let mut deltas = |_: Delta<'_>| {};
        let future = served.provider.complete(request, &mut deltas);
        let size = std::mem::size_of_val(&*future);
        assert!(size <= 1664, "{kind:?}: {size}");
    }
}
