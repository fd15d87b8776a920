//! Providers get back what they sent: ids, thinking, arguments; and the fields beside them.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::provider::answer::{ScriptedAnswer, delegates, fails, raw, says};
use crate::support::provider::recorded_request::RecordedRequest;

const PLANNER: &str = "system_prompt = \"Plan.\"\nsub_agents = [\"reader\"]";

fn anthropic(content: Value) -> ScriptedAnswer {
    raw(200, "application/json", anthropic_body(content).to_string())
}

fn anthropic_body(content: Value) -> Value {
    json!({
        "id": "m", "type": "message", "role": "assistant", "model": "planner", "content": content,
        "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    })
}

/// A stream with these events of its blocks.
fn anthropic_stream(block_events: &[Value]) -> ScriptedAnswer {
    let start = json!({"type": "message_start", "message": {
        "id": "m", "type": "message", "role": "assistant", "model": "planner", "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": 1, "output_tokens": 0}}});
    let end = [
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null},
            "usage": {"output_tokens": 4}}),
        json!({"type": "message_stop"}),
    ];
    let events = std::iter::once(&start).chain(block_events).chain(&end);
    let stream: String = events
        .map(|event| {
            format!(
                "event: {}\ndata: {event}\n\n",
                event["type"].as_str().expect("a type")
            )
        })
        .collect();
    raw(200, "text/event-stream", stream)
}

fn ask(id: &str, task: &str) -> Value {
    json!({
        "type": "tool_use", "id": id, "name": "call_agent",
        "input": {"task": task, "agent": "reader"},
    })
}

#[tokio::test]
async fn thinking_is_sent_back_unchanged() {
    let app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let said = json!([
        {"type": "thinking", "thinking": "Who could read?", "signature": "c2lnbmVk"},
        {"type": "redacted_thinking", "data": "aGlkZGVu"},
        {"type": "text", "text": "I ask the reader."},
        ask("toolu_1", "x"),
    ]);
    app.provider
        .will("planner", [anthropic(said.clone()), says("done")]);
    app.provider.will("reader", [says("read")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let echoed = app.provider.wait_for_request("planner", 2).await.body["messages"][1].clone();
    assert_eq!(echoed, json!({"role": "assistant", "content": said}));
    let text = run.messages().await.to_string();
    assert!(text.contains("I ask the reader."), "{text}");
}

#[tokio::test]
async fn thinking_at_the_end_is_not_sent_back() {
    let app = TestApp::setup().agent("planner", "").spawn().await;
    let thinking = |text: &str| json!({"type": "thinking", "thinking": text, "signature": "c2ln"});
    let text = json!({"type": "text", "text": "So far."});
    let ended = |content| {
        let mut body: Value = anthropic_body(content);
        body["stop_reason"] = json!("end_turn");
        raw(200, "application/json", body.to_string())
    };
    app.provider.will(
        "planner",
        [
            ended(json!([thinking("a"), {"type": "text", "text": "\n"}])),
            ended(json!([thinking("b"), text, thinking("c")])),
            says("done"),
        ],
    );
    for input in ["one", "two", "three"] {
        let run = app
            .run_with("planner", json!({"input": input, "session": "s"}))
            .await;
        assert_eq!(run.status(), "completed");
    }
    let sent = &app.provider.wait_for_request("planner", 3).await.body;
    let replies: Vec<&Value> = (sent["messages"].as_array().expect("messages").iter())
        .filter(|message| message["role"] == "assistant")
        .map(|message| &message["content"])
        .collect();
    assert_eq!(replies, [&json!([thinking("b"), text])], "{sent}");
}

#[tokio::test]
async fn streamed_thinking_is_sent_back_too() {
    let app = TestApp::setup()
        .agent("planner", &format!("stream = true\n{PLANNER}"))
        .agent("reader", "")
        .spawn()
        .await;
    let events = [
        json!({"type": "content_block_start", "index": 0, "content_block":
            {"type": "thinking", "thinking": "", "signature": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta":
            {"type": "thinking_delta", "thinking": "Who could "}}),
        json!({"type": "content_block_delta", "index": 0, "delta":
            {"type": "thinking_delta", "thinking": "read?"}}),
        json!({"type": "content_block_delta", "index": 0, "delta":
            {"type": "signature_delta", "signature": "c2lnbmVk"}}),
        json!({"type": "content_block_stop", "index": 0}),
        // As a real server sends it: without `input`.
        json!({"type": "content_block_start", "index": 1, "content_block":
            {"type": "tool_use", "id": "toolu_1", "name": "call_agent"}}),
        json!({"type": "content_block_delta", "index": 1, "delta":
            {"type": "input_json_delta", "partial_json": "{\"agent\": \"reader\", \"task\": \"x\"}"}}),
        json!({"type": "content_block_stop", "index": 1}),
    ];
    app.provider
        .will("planner", [anthropic_stream(&events), says("done")]);
    app.provider.will("reader", [says("read")]);

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let echoed = &app.provider.wait_for_request("planner", 2).await.body["messages"][1]["content"];
    assert_eq!(
        echoed[0],
        json!({"type": "thinking", "thinking": "Who could read?", "signature": "c2lnbmVk"})
    );
    assert_eq!(echoed[1]["input"], json!({"agent": "reader", "task": "x"}));
}

/// Answers as Anthropic does, which refuses other names of tools in a conversation than `[A-Za-z0-9_-]{1,64}`.
fn checks_names(seen: &RecordedRequest) -> ScriptedAnswer {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let blocks = seen.messages().iter();
    let blocks = blocks.filter_map(|message| message["content"].as_array());
    let mut calls = blocks.flatten().filter(|block| block["type"] == "tool_use");
    let has_allowed_name = |call: &Value| {
        let name = call["name"].as_str().unwrap_or_default();
        (1..=64).contains(&name.len()) && name.chars().all(is_allowed)
    };
    match calls.all(has_allowed_name) {
        true => says("done"),
        false => fails(400, "String should match pattern '^[a-zA-Z0-9_-]{1,64}$'"),
    }
}

#[tokio::test]
async fn invented_names_beside_thinking_are_sent_back_as_the_service_accepts_them() {
    let thinking = json!({"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"});
    let call =
        |id: &str, name: &str| json!({"type": "tool_use", "id": id, "name": name, "input": {}});
    let blocks = [
        thinking.clone(),
        call("toolu_1", "functions.fly"),
        call("toolu_2", ""),
    ];
    let indexed = blocks.iter().enumerate();
    let events = indexed.flat_map(|(index, block)| {
        [
            json!({"type": "content_block_start", "index": index, "content_block": block}),
            json!({"type": "content_block_stop", "index": index}),
        ]
    });
    let events: Vec<Value> = events.collect();
    for (is_streamed, reply) in [
        (false, anthropic(json!(blocks))),
        (true, anthropic_stream(&events)),
    ] {
        let app = TestApp::setup()
            .agent("planner", &format!("stream = {is_streamed}\n{PLANNER}"))
            .agent("reader", "")
            .spawn()
            .await;
        app.provider.will("planner", [reply]);
        app.provider.always("planner", checks_names);

        assert_eq!(app.run("planner", "go").await.output(), "done");

        let sent = app.provider.wait_for_request("planner", 2).await;
        let echoed = &sent.body["messages"][1]["content"];
        assert_eq!(echoed[0], thinking);
        assert_eq!(echoed[1]["name"], "functions_fly");
        assert_eq!(echoed[2]["name"], "_");
    }
}

#[tokio::test]
async fn equal_call_ids_are_made_unique_and_never_echoed() {
    let app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            anthropic(json!([ask("same", "one"), ask("same", "two")])),
            says("done"),
        ],
    );
    app.provider
        .always("reader", |seen| says(seen.user_messages()[0].clone()));

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let reported = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(reported.tool_results(), ["Task: one", "Task: two"]);
    let messages = &reported.body["messages"];
    let (calls, results) = (&messages[1]["content"], &messages[2]["content"]);
    assert_eq!(calls[0]["id"], "same");
    assert_ne!(calls[1]["id"], "same");
    for n in 0..2 {
        assert_eq!(calls[n]["id"], results[n]["tool_use_id"], "{messages}");
    }
    let children = run.children().await;
    assert_ne!(children[0]["tool_call_id"], children[1]["tool_call_id"]);
}

#[tokio::test]
async fn equal_call_ids_beside_thinking_are_made_unique_over_turns() {
    let app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let thinking = json!({"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"});
    let said = |task: &str| anthropic(json!([thinking, ask("same", task)]));
    app.provider
        .will("planner", [said("one"), said("two"), says("done")]);
    app.provider.always("reader", |_| says("read"));

    assert_eq!(app.run("planner", "go").await.output(), "done");

    let body = app
        .provider
        .wait_for_request("planner", 3)
        .await
        .body
        .clone();
    let block = |message: usize, at: usize| body["messages"][message]["content"][at].clone();
    for message in [1, 3] {
        assert_eq!(block(message, 0), thinking);
        assert_eq!(
            block(message, 1)["id"],
            block(message + 1, 0)["tool_use_id"]
        );
    }
    assert_eq!(block(1, 1)["id"], "same");
    assert_ne!(block(3, 1)["id"], "same");
    assert_eq!(block(3, 1)["input"]["task"], "two");
}

#[tokio::test]
async fn prompts_of_more_than_one_turn_are_marked_for_the_cache() {
    let app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "system_prompt = \"Read.\"")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read")]);

    app.run("planner", "go").await;

    let mark = json!({"type": "ephemeral"});
    let planner = &app.provider.wait_for_request("planner", 1).await.body;
    assert_eq!(planner["system"][0]["cache_control"], mark, "{planner}");
    assert_eq!(planner["tools"][0]["cache_control"], mark, "{planner}");
    let reader = app
        .provider
        .wait_for_request("reader", 1)
        .await
        .body
        .to_string();
    assert!(
        !reader.contains("cache_control"),
        "one turn is all it has: {reader}"
    );
}

#[tokio::test]
async fn a_response_format_is_sent_in_each_wires_format() {
    let shape = "[params.response_format]\ntype = \"json_schema\"\n\
                 schema = { type = \"object\", properties = { n = { type = \"integer\" } } }";
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let app = TestApp::setup()
        .agent("open", &format!("model = \"openai/open\"\n{shape}"))
        .agent("new", &format!("model = \"responses/new\"\n{shape}"))
        .agent("local", &format!("model = \"ollama/local\"\n{shape}"))
        .spawn()
        .await;
    for agent in ["open", "new", "local"] {
        app.provider.will(agent, [says("{\"n\": 1}")]);
        assert_eq!(app.run(agent, "go").await.output(), "{\"n\": 1}");
    }

    let open = &app.provider.wait_for_request("open", 1).await.body["response_format"];
    assert_eq!(open["type"], "json_schema");
    assert_eq!(open["json_schema"]["schema"], schema);
    let new = &app.provider.wait_for_request("new", 1).await.body["text"]["format"];
    assert_eq!(
        (&new["type"], &new["schema"], &new["strict"]),
        (&json!("json_schema"), &schema, &json!(false))
    );
    assert_eq!(
        app.provider.wait_for_request("local", 1).await.body["format"],
        schema
    );
}

#[tokio::test]
async fn anthropic_gets_a_schema_as_it_accepts_it_or_in_the_prompt() {
    let with = |schema: &str| {
        format!(
            "system_prompt = \"Count.\"\n[params.response_format]\ntype = \"json_schema\"\nschema = {schema}"
        )
    };
    let closed = "{ type = \"object\", properties = { n = { type = \"integer\", minimum = 1 } } }";
    let open = "{ type = \"object\", properties = { n = { type = \"integer\" } }, additionalProperties = true }";
    let app = TestApp::setup()
        .agent("closed", &with(closed))
        .agent("open", &with(open))
        .spawn()
        .await;
    app.provider
        .will("closed", [says("{\"n\": 0}"), says("{\"n\": 1}")]);
    app.provider.will("open", [says("{\"m\": 1}")]);
    for agent in ["closed", "open"] {
        let run = app.run(agent, "go").await;
        assert_eq!(run.status(), "completed");
    }
    let closed = &app.provider.wait_for_request("closed", 1).await.body;
    let part = json!({"type": "integer", "description": "{\"minimum\":1}"});
    assert_eq!(
        closed["output_config"]["format"]["schema"],
        json!({"type": "object", "properties": {"n": part}, "additionalProperties": false})
    );
    assert_eq!(closed["system"], "Count.");
    let repaired = &app.provider.wait_for_request("closed", 2).await.body;
    assert!(
        repaired["messages"].to_string().contains("minimum"),
        "{repaired}"
    );
    let open = &app.provider.wait_for_request("open", 1).await.body;
    assert_eq!(open["output_config"], Value::Null);
    let system = open["system"].as_str().expect("a prompt");
    assert!(
        system.starts_with("Count.\n\nYour final answer is JSON alone"),
        "{system}"
    );
    assert!(system.contains("\"additionalProperties\":true"), "{system}");
}

/// A response with thoughts, as OpenAI's own types have it.
fn response(output: &Value) -> ScriptedAnswer {
    let body = json!({
        "id": "resp_1", "object": "response", "created_at": 0, "status": "completed", "model": "planner",
        "output": output, "error": null, "incomplete_details": null,
        "usage": {"input_tokens": 9, "output_tokens": 7, "total_tokens": 16,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 5}},
    });
    raw(200, "application/json", body.to_string())
}

fn thought(n: u32) -> Value {
    json!({"type": "reasoning", "id": format!("rs_{n}"), "summary": [], "encrypted_content": format!("gAAA{n}=="),
        "status": "completed"})
}

fn item(n: u32, task: &str) -> Value {
    let arguments = json!({"agent": "reader", "task": task}).to_string();
    json!({"type": "function_call", "id": format!("fc_{n}"), "call_id": format!("call_{n}"), "name": "call_agent",
        "arguments": arguments, "status": "completed"})
}

#[tokio::test]
async fn encrypted_reasoning_is_sent_back_in_order_over_all_turns() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("model = \"responses/planner\"\n{PLANNER}"),
        )
        .agent("reader", "")
        .spawn()
        .await;
    let said = json!({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]});
    let first = json!([thought(1), said, item(1, "a"), thought(2), item(2, "b")]);
    let second = json!([thought(3), item(3, "c")]);
    app.provider.will(
        "planner",
        [response(&first), response(&second), says("done")],
    );
    app.provider
        .always("reader", |seen| says(seen.user_messages()[0].clone()));

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let output = |n: u32, task: &str| json!({"type": "function_call_output", "call_id": format!("call_{n}"), "output": format!("Task: {task}")});
    let mut expected = vec![json!({"type": "message", "role": "user", "content": "go"})];
    expected.extend(first.as_array().expect("items").clone());
    expected.extend([output(1, "a"), output(2, "b")]);
    let input = |body: &Value| body["input"].as_array().expect("items").clone();
    assert_eq!(
        input(&app.provider.wait_for_request("planner", 2).await.body),
        expected
    );
    expected.extend(second.as_array().expect("items").clone());
    expected.push(output(3, "c"));
    assert_eq!(
        input(&app.provider.wait_for_request("planner", 3).await.body),
        expected
    );
    let turn = run.events().await;
    let turn = turn.iter().find(|event| event.kind() == "turn.completed");
    assert_eq!(turn.expect("a turn")["reasoning_tokens"], 5);
}

#[tokio::test]
async fn a_fallback_does_not_get_another_models_reasoning() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "model = \"responses/planner\"\nfallback_models = [\"responses/other\", \"openai/third\"]\n\
             sub_agents = [\"reader\"]\n[retry]\nmax_retries = 0",
        )
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            response(&json!([thought(1), item(1, "a")])),
            fails(529, "busy"),
        ],
    );
    app.provider.will("other", [fails(529, "busy")]);
    app.provider.will("third", [says("done")]);
    app.provider.will("reader", [says("read")]);

    assert_eq!(app.run("planner", "go").await.output(), "done");

    for (model, turn, is_sent) in [
        ("planner", 2, true),
        ("other", 1, false),
        ("third", 1, false),
    ] {
        let body = app
            .provider
            .wait_for_request(model, turn)
            .await
            .body
            .to_string();
        assert_eq!(body.contains("gAAA1=="), is_sent, "{model}: {body}");
        assert!(body.contains("call_1"), "{model}: {body}");
    }
}

#[tokio::test]
async fn equal_call_ids_beside_encrypted_reasoning_are_made_unique_over_turns() {
    let app = TestApp::setup()
        .agent(
            "planner",
            &format!("model = \"responses/planner\"\n{PLANNER}"),
        )
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            response(&json!([thought(1), item(1, "one")])),
            response(&json!([thought(2), item(1, "two")])),
            says("done"),
        ],
    );
    app.provider.always("reader", |_| says("read"));

    assert_eq!(app.run("planner", "go").await.output(), "done");

    let body = app
        .provider
        .wait_for_request("planner", 3)
        .await
        .body
        .clone();
    let input = body["input"].as_array().expect("items");
    assert_eq!((&input[1], &input[4]), (&thought(1), &thought(2)));
    assert_eq!(input[2]["call_id"], "call_1");
    assert_ne!(input[5]["call_id"], "call_1");
    for call in [2, 5] {
        assert_eq!(input[call]["call_id"], input[call + 1]["call_id"]);
    }
}
