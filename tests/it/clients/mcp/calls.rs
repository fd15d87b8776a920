//! Agents as tools: arguments, results, progress, cancellation, approvals by form.

use serde_json::{Value, json};

use crate::clients::mcp::{client, legacy, messages, post, read_until, result, text};
use crate::support::app::{TestApp, key, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};
use crate::tools::approvals::{careful, writes, writes_too_much, wrote};
use crate::tools::ask_person::{asks, curious};

#[tokio::test]
async fn agents_are_tools() {
    let app = TestApp::setup()
        .agent("planner", "description = \"Plans a journey.\"")
        .agent("reader", "")
        .agent("broken", "max_turns = \"many\"")
        .spawn()
        .await;
    let tools = client(&app).result("tools/list", json!({})).await;
    assert_eq!(
        (&tools["ttlMs"], &tools["cacheScope"]),
        (&json!(0), &json!("private"))
    );
    insta::assert_json_snapshot!(tools["tools"]);
}

#[tokio::test]
async fn a_call_returns_the_text_and_what_it_cost() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let answer = says("Take the train.").with_usage(12, 3);
    app.provider.will("solo", [answer]);
    let arguments = json!({ "input": "To Rome", "context": "It is May." });
    let params = json!({ "name": "solo", "arguments": arguments });
    let got = client(&app).send("tools/call", params).await;
    let result = result(&got);
    assert_eq!(text(&result), "Take the train.");
    assert_eq!(
        (&result["isError"], &result["resultType"]),
        (&json!(false), &json!("complete"))
    );
    let meta = &result["_meta"];
    assert_eq!(meta["axed/run_id"], got.header("x-run-id"));
    assert_eq!(meta["axed/usage"]["input_tokens"], 12);
    assert_eq!(meta["axed/usage"]["output_tokens"], 3);
    let run = app.find(got.header("x-run-id")).await;
    assert_eq!(
        (run.status(), run.output()),
        ("completed", "Take the train.")
    );
    let request = app.provider.requests().remove(0);
    assert_eq!(request.user_messages(), ["To Rome\n\nContext:\nIt is May."]);
}

#[tokio::test]
async fn json_answers_are_structured_content() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "[params]\nresponse_format = { type = \"json_object\" }",
        )
        .spawn()
        .await;
    app.provider.will("solo", [says("{\"days\": 3}")]);
    let result = client(&app)
        .call("solo", json!({ "input": "How long?" }))
        .await;
    assert_eq!(result["structuredContent"], json!({ "days": 3 }));
    assert_eq!(text(&result), "{\"days\": 3}");
}

#[tokio::test]
async fn a_failed_run_is_a_tool_error_with_its_code() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [fails(400, "no such model")]);
    let result = client(&app).call("solo", json!({ "input": "go" })).await;
    assert_eq!(result["isError"], true);
    assert!(
        text(&result).starts_with("The agent solo failed: "),
        "{result}"
    );
    assert_eq!(
        result["_meta"]["axed/error"]["code"],
        "provider_bad_request"
    );
}

#[tokio::test]
async fn wrong_arguments_are_errors_that_a_model_can_read() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let result = client(&app).call("solo", json!({ "inptu": "go" })).await;
    assert_eq!(result["isError"], true);
    assert_eq!(
        text(&result),
        "/inptu: unknown argument \"inptu\"; did you mean \"input\"?"
    );
    assert_eq!(result["_meta"]["axed/error"]["code"], "unknown_field");
    let result = client(&app).call("solo", json!({ "input": 5 })).await;
    assert_eq!(result["_meta"]["axed/error"]["code"], "invalid_field");

    let params = json!({ "name": "nobody", "arguments": {} });
    let error = client(&app).error(200, "tools/call", params).await;
    assert_eq!(
        (&error["code"], &error["data"]["code"]),
        (&json!(-32602), &json!("agent_not_found"))
    );
}

#[tokio::test]
async fn a_repeated_call_with_the_same_key_gets_the_run_of_the_first() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("Take the train.")]);
    let client = client(&app);
    let call = async |key: &str, input: &str| {
        let params = json!({ "name": "solo", "arguments": { "input": input } });
        let request = client.request("tools/call", params);
        send(request.header("idempotency-key", key)).await
    };
    let first = call("k1", "To Rome").await;
    assert_eq!(text(&result(&first)), "Take the train.");
    let again = call("k1", "To Rome").await;
    assert_eq!(text(&result(&again)), "Take the train.");
    assert_eq!(again.header("x-run-id"), first.header("x-run-id"));
    assert_eq!(app.provider.requests().len(), 1);
    let other = result(&call("k1", "To Milan").await);
    assert_eq!(other["isError"], true);
    assert_eq!(other["_meta"]["axed/error"]["code"], "idempotency_mismatch");
    let wrong = call("a b", "To Rome").await;
    assert_eq!(messages(&wrong)[0]["error"]["data"]["status"], 400);
}

#[tokio::test]
async fn a_repeated_call_shows_the_approval_that_its_run_waits_for() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let client = client(&app).with_forms();
    let call = async || {
        let params = json!({ "name": "careful", "arguments": { "input": "write" } });
        let request = client.request("tools/call", params);
        result(&send(request.header("idempotency-key", "k1")).await)
    };
    let first = call().await;
    assert_eq!(first["resultType"], "input_required", "{first}");
    let again = call().await;
    assert_eq!(again["requestState"], first["requestState"]);
    assert_eq!(again["inputRequests"], first["inputRequests"]);
}

#[tokio::test]
async fn calls_of_one_session_continue_a_conversation() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("Hello Ada"), says("Ada")]);
    for input in ["I am Ada", "Who am I?"] {
        let arguments = json!({ "input": input, "session": "ada" });
        client(&app).call("solo", arguments).await;
    }
    let request = app.provider.requests().remove(1);
    assert!(
        request.body.to_string().contains("Hello Ada"),
        "{}",
        request.body
    );
}

#[tokio::test]
async fn progress_comes_from_the_events_of_the_tree() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "read it")]), says("done")],
    );
    app.provider.will("reader", [says("summary")]);
    let params = json!({
        "name": "planner",
        "arguments": { "input": "go" },
        "_meta": { "progressToken": "p1" },
    });
    let got = client(&app).send("tools/call", params).await;
    let messages = messages(&got);
    let (last, progress) = messages.split_last().expect("messages");
    assert_eq!(text(&last["result"]), "done");
    let mut numbers = Vec::new();
    let mut texts = Vec::new();
    for message in progress {
        assert_eq!(message["method"], "notifications/progress");
        let params = &message["params"];
        assert_eq!(params["progressToken"], "p1");
        numbers.push(params["progress"].as_f64().expect("a number"));
        texts.push(params["message"].as_str().expect("a text"));
    }
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    for wanted in [
        "planner: queued",
        "planner: turn 1",
        "planner: calls the agent reader: read it",
        "reader: turn 1",
    ] {
        assert!(texts.contains(&wanted), "{wanted} is missing in {texts:#?}");
    }
}

#[tokio::test]
async fn a_client_that_closes_its_request_cancels_the_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [hangs()]);
    let params = json!({
        "name": "solo",
        "arguments": { "input": "go" },
        "_meta": { "progressToken": 1 },
    });
    let request = client(&app).request("tools/call", params);
    let mut response = request.send().await.expect("a response");
    let id = response.headers()["x-run-id"]
        .to_str()
        .expect("an id")
        .to_owned();
    read_until(&mut response, "turn 1").await;
    drop(response);
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    let record = app.get(&format!("/runs/{id}")).await.json();
    assert_eq!(record["cancel_reason"], "the client closed its request");
}

#[tokio::test]
async fn an_earlier_client_cancels_a_call_by_a_notification() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [hangs()]);
    let call = json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {
        "name": "solo", "arguments": { "input": "go" }, "_meta": { "progressToken": 1 },
    }});
    let request = post(&app).header("mcp-session-id", "s1").json(&call);
    let mut response = request.send().await.expect("a response");
    let id = response.headers()["x-run-id"]
        .to_str()
        .expect("an id")
        .to_owned();
    read_until(&mut response, "turn 1").await;
    let cancelled = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": 7, "reason": "no longer wanted" },
    });
    for session in ["another", "s1"] {
        let request = post(&app).header("mcp-session-id", session);
        let got = send(request.json(&cancelled)).await;
        assert_eq!(got.status, 202, "{}", got.text);
    }
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
}

#[tokio::test]
async fn an_approval_is_a_form_and_the_call_is_sent_again_with_it() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let client = client(&app).with_forms();
    let arguments = json!({ "input": "write" });
    let first = client.call("careful", arguments.clone()).await;
    assert_eq!(first["resultType"], "input_required");
    let requests = first["inputRequests"].as_object().expect("requests");
    let (key, form) = requests.iter().next().expect("a request");
    assert_eq!(form["method"], "elicitation/create");
    let properties = &form["params"]["requestedSchema"]["properties"];
    assert_eq!(properties["decision"]["enum"], json!(["approve", "deny"]));
    let default = properties["arguments"]["default"].as_str().expect("JSON");
    let default: Value = serde_json::from_str(default).expect("JSON");
    assert_eq!(default, json!({ "path": "a", "content": "new" }));

    let again = |response: Value| {
        json!({
            "name": "careful",
            "arguments": arguments,
            "requestState": first["requestState"],
            "inputResponses": { key: response },
        })
    };
    // A user who closes the form decides nothing.
    let shown = client
        .result("tools/call", again(json!({ "action": "cancel" })))
        .await;
    assert_eq!(shown["inputRequests"], first["inputRequests"]);
    let edited = "{\"path\": \"b\", \"content\": \"other\"}";
    let content = json!({ "decision": "approve", "arguments": edited });
    let response = json!({ "action": "accept", "content": content });
    let done = client.result("tools/call", again(response)).await;
    assert_eq!(text(&done), "done");
    assert_eq!((wrote(&app, "a"), wrote(&app, "b")), (false, true));
}

#[tokio::test]
async fn a_question_is_a_form_by_its_schema() {
    let app = curious("").spawn().await;
    let city = json!({"type": "object", "required": ["city"],
        "properties": {"city": {"type": "string"}, "nights": {"type": "integer"}}});
    let deep = json!({"type": "array", "items": {"type": "integer"}});
    let turns = [
        asks(json!({"question": "Where?", "schema": city})),
        asks(json!({"question": "How many?", "schema": {"type": "integer"}})),
        asks(json!({"question": "Which?", "schema": deep})),
        asks(json!({"question": "Sure?"})),
        asks(json!({"question": "PIN?"})),
        says("done"),
    ];
    app.provider.will("curious", turns);
    let client = client(&app).with_forms();
    let arguments = json!({ "input": "go" });
    let mut shown = client.call("curious", arguments.clone()).await;
    for (message, field, response, expected) in [
        (
            "Where?",
            "city",
            json!({"action": "accept", "content": {"city": "Oslo", "nights": 2}}),
            Some(json!({"city": "Oslo", "nights": 2})),
        ),
        (
            "How many?",
            "answer",
            json!({"action": "accept", "content": {"answer": 3}}),
            Some(json!(3)),
        ),
        (
            "Which?",
            "answer",
            json!({"action": "accept", "content": {"answer": "[1, 2]"}}),
            Some(json!([1, 2])),
        ),
        (
            "Sure?",
            "answer",
            json!({"action": "accept", "content": {"answer": "yes"}}),
            Some(json!("yes")),
        ),
        ("PIN?", "answer", json!({"action": "decline"}), None),
    ] {
        assert_eq!(shown["resultType"], "input_required", "{shown:#}");
        let requests = shown["inputRequests"].as_object().expect("requests");
        let (key, form) = requests.iter().next().expect("a request");
        let params = &form["params"];
        assert!(
            params["message"]
                .as_str()
                .expect("a text")
                .ends_with(message),
            "{params}"
        );
        assert!(
            params["requestedSchema"]["properties"][field].is_object(),
            "{params}"
        );
        let again = json!({
            "name": "curious", "arguments": arguments, "requestState": shown["requestState"],
            "inputResponses": { key: response },
        });
        let id = shown["requestState"].as_str().expect("a run").to_owned();
        shown = client.result("tools/call", again).await;
        let events = app.find(&id).await.events().await;
        let given = events
            .iter()
            .rfind(|it| it.kind() == "input.answered")
            .expect("an answer");
        assert_eq!(given["answer"], expected.unwrap_or_default());
    }
    assert_eq!(text(&shown), "done");
}

#[tokio::test]
async fn a_form_shows_invisible_characters() {
    let app = careful("").spawn().await;
    let content = "x\u{202e}y\u{200b}z";
    let write = calls([("write_file", json!({ "path": "a", "content": content }))]);
    app.provider.will("careful", [write, says("done")]);
    let client = client(&app).with_forms();
    let first = client.call("careful", json!({ "input": "write" })).await;
    let requests = first["inputRequests"].as_object().expect("requests");
    let (_, form) = requests.iter().next().expect("a request");
    let message = form["params"]["message"].as_str().expect("a text");
    let properties = &form["params"]["requestedSchema"]["properties"];
    let default = properties["arguments"]["default"].as_str().expect("JSON");
    for shown in [message, default] {
        assert!(shown.contains("x\\u202ey\\u200bz"), "{shown}");
    }
    let default: Value = serde_json::from_str(default).expect("JSON");
    assert_eq!(default["content"], content);
}

#[tokio::test]
async fn a_form_has_all_of_the_arguments() {
    let app = careful("").spawn().await;
    let content = format!("{}the end", "x".repeat(20_000));
    let write = json!({ "path": "a", "content": content });
    app.provider.will(
        "careful",
        [calls([("write_file", write.clone())]), says("done")],
    );
    let client = client(&app).with_forms();
    let first = client.call("careful", json!({ "input": "write" })).await;
    let requests = first["inputRequests"].as_object().expect("requests");
    let (_, form) = requests.iter().next().expect("a request");
    let message = form["params"]["message"].as_str().expect("a text");
    assert!(message.contains("the end"), "{message}");
    let default = &form["params"]["requestedSchema"]["properties"]["arguments"]["default"];
    let default: Value = serde_json::from_str(default.as_str().expect("JSON")).expect("JSON");
    assert_eq!(default, write);
}

#[tokio::test]
async fn a_call_with_longer_arguments_than_a_form_shows_is_not_offered() {
    let app = careful("").spawn().await;
    app.provider
        .will("careful", [writes_too_much(), says("done")]);
    let client = client(&app).with_forms();
    let arguments = json!({ "input": "write" });
    let first = client.call("careful", arguments.clone()).await;
    assert_eq!(first["resultType"], "input_required");
    assert_eq!(first["inputRequests"], json!({}));
    let state = first["requestState"].as_str().expect("a state");
    let run = app.find(state).await;
    let call = run["pending_approvals"][0]["tool_call_id"].as_str();
    let key = format!("{state}/{}", call.expect("a call"));
    let again = |decision: &str| {
        let response = json!({ "action": "accept", "content": { "decision": decision } });
        json!({
            "name": "careful",
            "arguments": arguments,
            "requestState": state,
            "inputResponses": { &key: response },
        })
    };
    let refused = client.result("tools/call", again("approve")).await;
    assert_eq!(refused["isError"], true, "{refused}");
    let why = text(&refused);
    assert!(why.contains("too long to be shown"), "{why}");
    let done = client.result("tools/call", again("deny")).await;
    assert_eq!(text(&done), "done");
    assert!(!wrote(&app, "a"));
}

#[tokio::test]
async fn a_key_that_may_not_change_arguments_gets_no_field_for_them() {
    let keys = [
        ("ada", "scopes = [\"run\"]"),
        ("eve", "scopes = [\"run\", \"approve\"]"),
    ];
    let keys: String = keys.iter().map(|(name, rest)| key(name, rest)).collect();
    let app = careful("").config(&keys).spawn().await;
    for (name, may_change) in [("ada", false), ("eve", true)] {
        app.provider.will("careful", [writes(name), says("done")]);
        let client = client(&app).with_forms().with_key(name);
        let arguments = json!({ "input": "write" });
        let first = client.call("careful", arguments.clone()).await;
        let requests = first["inputRequests"].as_object().expect("requests");
        let (id, form) = requests.iter().next().expect("a request");
        let properties = &form["params"]["requestedSchema"]["properties"];
        assert_eq!(properties["arguments"].is_object(), may_change, "{form}");
        let message = form["params"]["message"].as_str().expect("a text");
        assert!(message.contains("\"content\":\"new\""), "{message}");
        let response = json!({ "action": "accept", "content": { "decision": "approve" } });
        let params = json!({
            "name": "careful",
            "arguments": arguments,
            "requestState": first["requestState"],
            "inputResponses": { id: response },
        });
        assert_eq!(text(&client.result("tools/call", params).await), "done");
        assert!(wrote(&app, name));
    }
}

#[tokio::test]
async fn an_earlier_client_waits_for_approvals_that_others_decide() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let called = legacy(
        &app,
        "tools/call",
        json!({ "name": "careful", "arguments": { "input": "write" } }),
    );
    let decided = async {
        let waiting = |got: &crate::support::app::ApiResponse| !got.json()["data"][0].is_null();
        let pending = app.get_until("/approvals", waiting).await.json();
        let (run, call) = (
            &pending["data"][0]["run_id"],
            &pending["data"][0]["tool_call_id"],
        );
        let path = format!(
            "/runs/{}/approvals/{}",
            run.as_str().unwrap(),
            call.as_str().unwrap()
        );
        let decided = app.post(&path, &json!({ "decision": "approve" })).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
    };
    let (called, ()) = tokio::join!(called, decided);
    assert_eq!(text(&result(&called)), "done");
}

#[tokio::test]
async fn a_client_without_streams_waits_for_the_result() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let params = json!({ "name": "solo", "arguments": { "input": "go" } });
    let request = client(&app).request("tools/call", params);
    let (client, request) = request.build_split();
    let mut request = request.expect("a request");
    request
        .headers_mut()
        .insert("accept", "application/json".parse().expect("a value"));
    let called = client.execute(request);
    let opened = async {
        app.provider.wait_for_requests(1).await;
        gate.open();
    };
    let (called, ()) = tokio::join!(called, opened);
    let called = called.expect("a response");
    assert_eq!(called.headers()["content-type"], "application/json");
    let body: Value = called.json().await.expect("JSON");
    assert_eq!(text(&body["result"]), "done");
}

#[tokio::test]
async fn structured_input_is_the_arguments() {
    let schema = "[input_schema]\ntype = \"object\"\nrequired = [\"id\"]\nproperties = { id = { type = \"integer\" } }";
    let app = TestApp::setup().agent("sorter", schema).spawn().await;
    app.provider.always("sorter", |_| says("done"));
    let tools = client(&app).result("tools/list", json!({})).await;
    let offered = &tools["tools"][0]["inputSchema"];
    assert_eq!(
        offered["properties"],
        json!({ "id": { "type": "integer" } })
    );

    let params = json!({ "name": "sorter", "arguments": { "id": "x" } });
    let refused = client(&app).result("tools/call", params).await;
    assert_eq!(refused["isError"], true);
    assert!(
        text(&refused).contains("/input/id: \"x\" is not of type"),
        "{refused}"
    );
    let params = json!({ "name": "sorter", "arguments": { "id": 7 } });
    let answered = client(&app).result("tools/call", params).await;
    assert_eq!(text(&answered), "done");
    let request = app.provider.requests().remove(0);
    assert_eq!(request.user_messages(), [r#"{"id":7}"#]);
}
