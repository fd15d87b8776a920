//! What today's services send and want, on the wires as they document them.

use axed::providers::json_prompt::JSON_PROMPT;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::provider::answer::{ScriptedAnswer, calls, fails, raw, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};

fn provider(name: &str) -> String {
    format!("[providers.{name}]\nbase_url = \"{{provider}}\"\napi_key = \"k\"\n")
}

fn sse(events: &[Value]) -> ScriptedAnswer {
    let mut body: String = events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    body.push_str("data: [DONE]\n\n");
    raw(200, "text/event-stream", body)
}

fn chat_chunk(delta: &Value, finish: Option<&str>, usage: Value) -> Value {
    json!({
        "id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "usage": usage,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    })
}

fn list_call() -> Value {
    json!([{"id": "call_123_", "index": 0, "type": "function", "function": {"name": "list_directory", "arguments": "{}"}}])
}

/// A whole response of the Responses API.
fn response(output: &Value) -> ScriptedAnswer {
    let body = json!({
        "id": "r", "object": "response", "status": "completed", "model": "m", "output": output,
        "usage": {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10},
    });
    raw(200, "application/json", body.to_string())
}

fn message_item(text: &str, phase: Option<&str>) -> Value {
    json!({
        "type": "message", "id": format!("msg_{text}"), "status": "completed", "role": "assistant", "phase": phase,
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    })
}

#[tokio::test]
async fn azure_and_bedrock_serve_openais_models_on_responses_and_others_on_chat() {
    let app = TestApp::setup()
        .config(&[provider("azure"), provider("bedrock")].concat())
        .agent("default", "")
        .spawn()
        .await;
    for (model, wire) in [
        ("azure/gpt-6-sol", Wire::Responses),
        ("azure/o4-mini", Wire::Responses),
        ("azure/my-deployment", Wire::Openai),
        ("azure/DeepSeek-V4", Wire::Openai),
        ("bedrock/openai.gpt-6-sol", Wire::Responses),
        ("bedrock/us.openai.gpt-5.6-terra", Wire::Responses),
        ("bedrock/openai.gpt-oss-120b-1:0", Wire::Openai),
    ] {
        let name = model.split_once('/').map_or(model, |(_, name)| name);
        app.provider.will(name, [says("{}")]);
        let body = json!({
            "input": "go", "model": model, "params": {"max_tokens": 50}, "response_format": {"type": "json_object"},
        });
        let run = app.run_with("default", body).await;
        assert_eq!(run.output(), "{}", "{model}: {run:?}");
        let sent = app.provider.wait_for_request(name, 1).await;
        assert_eq!(sent.wire, wire, "{model}");
        let field = match wire {
            Wire::Responses => "max_output_tokens",
            _ => "max_completion_tokens",
        };
        assert_eq!(sent.body[field], 50, "{model}");
        assert!(sent.body["prompt_cache_key"].is_string(), "{model}");
        assert!(sent.body.to_string().contains(JSON_PROMPT), "{model}");
    }
}

#[tokio::test]
async fn commentary_is_no_part_of_the_answer_and_goes_back_as_it_came() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "model = \"responses/solo\"\ntools = [\"list_directory\"]",
        )
        .agent("live", "model = \"responses/live\"\nstream = true")
        .spawn()
        .await;
    let call = json!({
        "type": "function_call", "id": "fc", "call_id": "call_1", "name": "list_directory", "arguments": "{}",
        "status": "completed",
    });
    let first = json!([message_item("I look first.", Some("commentary")), call]);
    let last = json!([
        message_item("Almost there.", Some("commentary")),
        message_item("done", Some("final_answer")),
    ]);
    app.provider
        .will("solo", [response(&first), response(&last)]);
    let run = app
        .run_with("solo", json!({"input": "go", "session": "s"}))
        .await;
    assert_eq!(run.output(), "done");
    let second = app.provider.wait_for_request("solo", 2).await;
    assert_eq!(second.messages()[1..3], *first.as_array().expect("items"));

    app.provider.will("solo", [says("again")]);
    app.run_with("solo", json!({"input": "more", "session": "s"}))
        .await;
    let third = app.provider.wait_for_request("solo", 3).await;
    let phases: Vec<_> = third.messages().iter().map(|item| &item["phase"]).collect();
    assert_eq!(
        phases[4..6],
        ["commentary", "final_answer"],
        "{}",
        third.body
    );

    let item = |phase: &str, text: &str| {
        let mut item = message_item(text, Some(phase));
        item["id"] = phase.into();
        item
    };
    let text_of = |index: u64, phase: &str, text: &str| {
        let mut start = item(phase, "");
        start["content"] = json!([]);
        [
            json!({"type": "response.output_item.added", "output_index": index, "item": start}),
            json!({"type": "response.output_text.delta", "output_index": index, "item_id": phase, "delta": text}),
            json!({"type": "response.output_item.done", "output_index": index, "item": item(phase, text)}),
        ]
    };
    let output = json!([item("commentary", "Wait."), item("final_answer", "done")]);
    let completed = json!({"type": "response.completed", "response": {"status": "completed", "model": "m", "output": output}});
    let events = [
        text_of(0, "commentary", "Wait.").to_vec(),
        text_of(1, "final_answer", "done").to_vec(),
        vec![completed],
    ];
    app.provider.will("live", [sse(&events.concat())]);
    let run = app.run("live", "go").await;
    assert_eq!(run.output(), "done");

    // A reply without any other text is not empty.
    let only = json!([message_item("All of it.", Some("commentary"))]);
    app.provider.will("live", [response(&only)]);
    assert_eq!(app.run("live", "go").await.output(), "All of it.");
}

/// Answers as Claude behind OpenRouter, which refuses a thinking block in pieces.
fn claude_behind_openrouter(seen: &RecordedRequest) -> ScriptedAnswer {
    let replies = seen
        .messages()
        .iter()
        .filter(|it| it["role"] == "assistant");
    let details: Vec<&Value> = replies
        .flat_map(|reply| reply["reasoning_details"].as_array().into_iter().flatten())
        .collect();
    let is_whole = |block: &&Value| block["text"].is_string() && block["signature"].is_string();
    if !details.iter().all(is_whole) {
        return fails(400, "Invalid `signature` in `thinking` block");
    }
    let usage = json!({
        "prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110, "cost": 0.25,
        "cost_details": {"upstream_inference_cost": 7},
    });
    let piece = |mut detail: Value| {
        detail["type"] = "reasoning.text".into();
        detail["index"] = 0.into();
        detail["format"] = "anthropic-claude-v1".into();
        let text = detail["text"].as_str().unwrap_or_default().to_owned();
        chat_chunk(
            &json!({"role": "assistant", "content": "", "reasoning": text, "reasoning_details": [detail]}),
            None,
            Value::Null,
        )
    };
    match details.len() {
        0 => sse(&[
            piece(json!({"text": "Let me "})),
            piece(json!({"text": "look."})),
            piece(json!({"signature": "c2lnbmVk"})),
            chat_chunk(
                &json!({"content": "", "tool_calls": list_call()}),
                Some("tool_calls"),
                Value::Null,
            ),
            chat_chunk(&json!({"content": ""}), Some("tool_calls"), usage),
        ]),
        _ => sse(&[
            chat_chunk(&json!({"content": "done"}), Some("stop"), Value::Null),
            chat_chunk(&json!({"content": ""}), Some("stop"), usage),
        ]),
    }
}

#[tokio::test]
async fn openrouters_reasoning_goes_back_whole_and_its_cost_is_the_runs() {
    let app = TestApp::setup()
        .config(&provider("openrouter"))
        .agent(
            "solo",
            "model = \"openrouter/anthropic/claude-sonnet-5-5\"\nstream = true\ntools = [\"list_directory\"]",
        )
        .spawn()
        .await;
    let model = "anthropic/claude-sonnet-5-5";
    app.provider.always(model, claude_behind_openrouter);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done", "{run:?}");
    assert_eq!(run["tree"]["cost_usd"], 0.5);
    let second = app.provider.wait_for_request(model, 2).await;
    let details = json!([{
        "type": "reasoning.text", "text": "Let me look.", "signature": "c2lnbmVk", "index": 0, "format": "anthropic-claude-v1",
    }]);
    let reply = &second.messages()[second.messages().len() - 2];
    assert_eq!(reply["reasoning_details"], details);
}

#[tokio::test]
async fn mistrals_signed_thinking_goes_back_unchanged_with_a_cache_key() {
    let app = TestApp::setup()
        .config(&provider("mistral"))
        .agent(
            "solo",
            "model = \"mistral/large\"\ntools = [\"list_directory\"]",
        )
        .agent(
            "live",
            "model = \"mistral/live\"\nstream = true\ntools = [\"list_directory\"]",
        )
        .spawn()
        .await;
    let thinking = json!({
        "type": "thinking", "thinking": [{"type": "text", "text": "I look."}], "signature": "c2lnbmVk", "closed": true,
    });
    let content = json!([thinking, {"type": "text", "text": "Looking."}]);
    let message = json!({"role": "assistant", "content": content, "tool_calls": list_call()});
    let whole = json!({
        "id": "1", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    let pieces = [
        json!({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "I "}]}]}),
        json!({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "look."}]}]}),
        json!({"content": [{"type": "thinking", "thinking": [], "signature": "c2lnbmVk", "closed": true}]}),
        json!({"content": "Look"}),
        json!({"content": "ing."}),
    ];
    let mut events: Vec<Value> = pieces
        .iter()
        .map(|delta| chat_chunk(delta, None, Value::Null))
        .collect();
    let usage = json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2});
    let calls = json!({"content": "", "tool_calls": list_call()});
    events.push(chat_chunk(&calls, Some("tool_calls"), usage));
    let whole = raw(200, "application/json", whole.to_string());
    for (agent, model, first) in [("solo", "large", whole), ("live", "live", sse(&events))] {
        app.provider.will(model, [first, says("done")]);
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done", "{run:?}");
        let sent = app.provider.wait_for_request(model, 2).await;
        let reply = sent.messages().iter().find(|it| it["role"] == "assistant");
        assert_eq!(reply.expect("a reply")["content"], content, "{agent}");
        assert!(sent.body["prompt_cache_key"].is_string(), "{}", sent.body);
    }
}

#[tokio::test]
async fn xai_gets_the_same_conversation_id_in_a_run_and_a_session() {
    let app = TestApp::setup()
        .config(&[provider("xai"), provider("gemini")].concat())
        .agent("solo", "model = \"xai/grok\"\ntools = [\"list_directory\"]")
        .agent("other", "model = \"gemini/flash\"")
        .spawn()
        .await;
    app.provider.always("grok", |seen| match seen.turn() % 2 {
        1 => calls([("list_directory", json!({}))]),
        _ => says("done"),
    });
    for session in [None, Some("ada"), Some("ada"), Some("bob")] {
        let body = json!({"input": "go", "session": session});
        assert_eq!(app.run_with("solo", body).await.output(), "done");
    }
    let ids: Vec<String> = app
        .provider
        .requests_for("grok")
        .iter()
        .map(|seen| {
            seen.headers["x-grok-conv-id"]
                .to_str()
                .expect("a text")
                .to_owned()
        })
        .collect();
    assert_eq!(ids.len(), 8);
    assert_eq!(ids[0], ids[1], "one run");
    assert!(ids[2..6].iter().all(|id| *id == ids[2]), "one session");
    let different = [&ids[0], &ids[2], &ids[6]];
    assert!(
        different
            .iter()
            .all(|id| ids.iter().filter(|it| it == id).count() < 5)
    );
    assert!(ids[0] != ids[2] && ids[2] != ids[6] && !ids[2].contains("ada"));

    app.provider.will("flash", [says("done")]);
    app.run("other", "go").await;
    let sent = app.provider.wait_for_request("flash", 1).await;
    assert!(!sent.headers.contains_key("x-grok-conv-id"));
}

#[tokio::test]
async fn json_is_requested_as_each_service_takes_it() {
    let schema = "[params.response_format]\ntype = \"json_schema\"\n[params.response_format.schema]\ntype = \"object\"\n\
                  required = [\"n\"]\nadditionalProperties = false\n[params.response_format.schema.properties.n]\ntype = \"integer\"";
    let object = "[params.response_format]\ntype = \"json_object\"";
    let services: String = ["deepseek", "groq", "mistral", "gemini"]
        .map(provider)
        .concat();
    let app = TestApp::setup()
        .config(&services)
        .agent("schema", &format!("model = \"gemini/x\"\n{schema}"))
        .agent("object", &format!("model = \"gemini/x\"\n{object}"))
        .agent(
            "tools",
            &format!("model = \"groq/x\"\ntools = [\"list_directory\"]\n{object}"),
        )
        .spawn()
        .await;
    // The service, and what it gets of the two: the type of the format, and whether the prompt has the word or the schema.
    for (agent, model, format, in_prompt) in [
        ("object", "deepseek/one", json!("json_object"), true),
        ("object", "groq/two", json!("json_object"), true),
        ("object", "mistral/three", json!("json_object"), true),
        ("object", "gemini/four", json!("json_object"), false),
        ("tools", "groq/five", Value::Null, true),
        ("schema", "deepseek/six", json!("json_object"), true),
        ("schema", "groq/llama-4", json!("json_object"), true),
        (
            "schema",
            "groq/openai/gpt-oss-120b",
            json!("json_schema"),
            false,
        ),
        ("schema", "mistral/seven", json!("json_schema"), false),
        ("schema", "gemini/eight", json!("json_schema"), false),
    ] {
        let name = model.split_once('/').map_or(model, |(_, name)| name);
        app.provider.will(name, [says("{\"n\": 1}")]);
        let body = json!({"input": "go", "model": model});
        let run = app.run_with(agent, body).await;
        assert_eq!(run.status(), "completed", "{model}: {run:?}");
        let sent = app.provider.wait_for_request(name, 1).await;
        assert_eq!(sent.body["response_format"]["type"], format, "{model}");
        assert_eq!(sent.system().contains("JSON"), in_prompt, "{model}");
        let has_schema = sent.system().contains("additionalProperties");
        assert_eq!(has_schema, in_prompt && agent == "schema", "{model}");
    }
}

fn anthropic_refusal(text: &str) -> ScriptedAnswer {
    let content = match text {
        "" => json!([]),
        text => json!([{"type": "text", "text": text}]),
    };
    let body = json!({
        "id": "m", "type": "message", "role": "assistant", "model": "m", "content": content, "stop_reason": "refusal",
        "stop_details": {"type": "refusal", "category": "cyber", "explanation": "It could enable harm."},
        "usage": {"input_tokens": 5, "output_tokens": 1},
    });
    raw(200, "application/json", body.to_string())
}

#[tokio::test]
async fn the_explanation_of_a_refusal_is_kept() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("live", "stream = true")
        .spawn()
        .await;
    for (text, partial) in [("", "It could enable harm."), ("Hello..", "Hello..")] {
        app.provider.will("solo", [anthropic_refusal(text)]);
        let run = app.run("solo", "go").await;
        assert_eq!(run["error"]["code"], "refused", "{run:?}");
        let message = run["error"]["message"].as_str().unwrap_or_default();
        assert!(message.contains("It could enable harm."), "{message}");
        assert_eq!(run["partial_content"], partial);
    }

    let events = [
        json!({"type": "message_start", "message": {"id": "m", "model": "m", "content": [], "usage": {"input_tokens": 5}}}),
        json!({
            "type": "message_delta", "usage": {"output_tokens": 1},
            "delta": {
                "stop_reason": "refusal",
                "stop_details": {"type": "refusal", "category": null, "explanation": "It could enable harm."},
            },
        }),
        json!({"type": "message_stop"}),
    ];
    let body: String = events
        .iter()
        .map(|event| {
            format!(
                "event: {}\ndata: {event}\n\n",
                event["type"].as_str().unwrap_or_default()
            )
        })
        .collect();
    app.provider
        .will("live", [raw(200, "text/event-stream", body)]);
    let run = app.run("live", "go").await;
    assert_eq!(run["partial_content"], "It could enable harm.", "{run:?}");
}

#[tokio::test]
async fn fallbacks_are_tried_after_a_refusal_if_the_agent_says_so() {
    let common =
        "fallback_models = [\"openai/second\", \"openai/third\"]\n[retry]\nmax_retries = 0";
    let app = TestApp::setup()
        .agent("plain", &format!("model = \"anthropic/first\"\n{common}"))
        .agent(
            "brave",
            &format!("model = \"anthropic/first\"\nfallback_on_refusal = true\n{common}"),
        )
        .spawn()
        .await;
    app.provider.will("first", [anthropic_refusal("")]);
    assert_eq!(app.run("plain", "go").await["error"]["code"], "refused");
    assert!(app.provider.requests_for("second").is_empty());

    app.provider.will("first", [anthropic_refusal("Hello..")]);
    app.provider.will("second", [says("No.").into_refusal()]);
    app.provider.will("third", [says("done")]);
    let run = app.run("brave", "go").await;
    assert_eq!((run.status(), run.output()), ("completed", "done"));
    assert_eq!(run["tree"]["model_calls"], 3);
    let warning = run["warnings"][0]["message"].as_str().unwrap_or_default();
    assert!(
        warning.contains("(refused): the fallback openai/third replied"),
        "{warning}"
    );

    // A refusal says more than the error of the model after it.
    app.provider.will("first", [anthropic_refusal("")]);
    for model in ["second", "third"] {
        app.provider.will(model, [fails(503, "overloaded")]);
    }
    let run = app.run("brave", "go").await;
    assert_eq!(run["error"]["code"], "refused", "{run:?}");
    assert_eq!(run["partial_content"], "It could enable harm.");
}

#[tokio::test]
async fn a_prompt_that_ollama_has_cut_is_a_warning() {
    let app = TestApp::setup()
        .agent("plain", "model = \"ollama/llama\"")
        .agent(
            "wide",
            "model = \"ollama/llama\"\n[params.extra]\noptions = { num_ctx = 8192 }",
        )
        .spawn()
        .await;
    for (agent, read, is_cut) in [
        ("plain", 4096, true),
        ("plain", 4095, false),
        ("plain", 5000, false),
        ("wide", 4096, false),
        ("wide", 8192, true),
    ] {
        app.provider
            .will("llama", [says("done").with_usage(read, 5)]);
        let run = app.run(agent, "go").await;
        assert_eq!(run.output(), "done");
        let warnings = run["warnings"].as_array().map_or(0, Vec::len);
        assert_eq!(warnings, usize::from(is_cut), "{agent} {read}: {run:?}");
        if is_cut {
            assert_eq!(run["warnings"][0]["code"], "prompt_cut");
            let message = run["warnings"][0]["message"].as_str().unwrap_or_default();
            assert!(message.contains("num_ctx"), "{message}");
        }
    }
    let sent = app.provider.requests_for("llama").pop().expect("a request");
    assert_eq!(sent.body["options"]["num_ctx"], 8192);
}
