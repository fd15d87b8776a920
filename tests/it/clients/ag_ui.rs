//! AG-UI: events of a chat, tool calls and results, interrupts, tools of the client, keys.

use reqwest::Method;
use serde_json::{Value, json};

use crate::clients::openai::client_tools::NO_OBJECTS;
use crate::support::app::{ApiResponse, TestApp, key, send};
use crate::support::attachments::{PDF, PNG, base64, png_with_suffix};
use crate::support::provider::answer::{calls, fails, hangs, says};
use crate::tools::approvals::{careful, writes, writes_too_much, wrote};
use crate::tools::ask_person::{asks, curious};

fn user(id: &str, text: &str) -> Value {
    json!({ "id": id, "role": "user", "content": text })
}

fn input(run: &str, messages: &[Value]) -> Value {
    json!({ "threadId": "t1", "runId": run, "messages": messages, "tools": [], "context": [],
        "state": {}, "forwardedProps": {} })
}

async fn post(app: &TestApp, agent: &str, body: &Value) -> ApiResponse {
    let path = format!("/agents/{agent}/ag-ui");
    let request = app.request(Method::POST, &path);
    send(request.header("accept", "text/event-stream").json(body)).await
}

/// The events of a response.
async fn events(app: &TestApp, agent: &str, body: &Value) -> Vec<Value> {
    let got = post(app, agent, body).await;
    assert_eq!(got.status, 200, "{}", got.text);
    let data = got.text.lines().filter_map(|it| it.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).expect("JSON"))
        .collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let kinds = events.iter().map(|event| event["type"].as_str());
    let mut kinds: Vec<&str> = kinds.map(|kind| kind.expect("a type")).collect();
    kinds.dedup();
    kinds
}

fn find<'e>(events: &'e [Value], kind: &str) -> &'e Value {
    let found = events.iter().find(|event| event["type"] == kind);
    found.unwrap_or_else(|| panic!("{kind} in {events:#?}"))
}

/// The messages of the client after the response.
fn snapshot(events: &[Value]) -> Vec<Value> {
    let snapshot = find(events, "MESSAGES_SNAPSHOT");
    snapshot["messages"].as_array().expect("messages").clone()
}

#[tokio::test]
async fn a_run_is_the_events_of_a_chat() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("Hello Ada"), says("Ada")]);
    let first = events(&app, "solo", &input("r1", &[user("m1", "I am Ada")])).await;
    assert_eq!(
        kinds(&first),
        [
            "RUN_STARTED",
            "TEXT_MESSAGE_START",
            "TEXT_MESSAGE_CONTENT",
            "TEXT_MESSAGE_END",
            "MESSAGES_SNAPSHOT",
            "RUN_FINISHED"
        ]
    );
    assert_eq!(
        (&first[0]["threadId"], &first[0]["runId"]),
        (&json!("t1"), &json!("r1"))
    );
    let run = first[0]["metadata"]["axed/run_id"].as_str().expect("an id");
    assert_eq!(app.find(run).await.output(), "Hello Ada");
    let finished = find(&first, "RUN_FINISHED");
    assert_eq!(finished["outcome"]["type"], "success");
    let mut messages = snapshot(&first);
    assert_eq!(messages[0], user("m1", "I am Ada"));
    assert_eq!(messages[1]["content"], "Hello Ada");
    // The thread is a session: its conversation continues.
    messages.push(user("m2", "Who am I?"));
    events(&app, "solo", &input("r2", &messages)).await;
    let request = app.provider.requests().remove(1);
    assert_eq!(request.user_messages(), ["I am Ada", "Who am I?"]);
}

#[tokio::test]
async fn a_repeated_request_shows_the_run_of_the_first() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("Hello Ada"), says("again")]);
    let body = input("r1", &[user("m1", "I am Ada")]);
    let send = async |body: &Value| {
        let request = app.request(Method::POST, "/agents/solo/ag-ui");
        let request = request.header("accept", "text/event-stream");
        send(request.header("idempotency-key", "k1").json(body)).await
    };
    for _ in 0..2 {
        let got = send(&body).await;
        assert_eq!(got.status, 200, "{}", got.text);
        assert!(got.text.contains("Hello Ada"), "{}", got.text);
        assert!(got.text.contains("RUN_FINISHED"), "{}", got.text);
    }
    assert_eq!(app.provider.requests().len(), 1);
    let other = send(&input("r1", &[user("m1", "I am Bob")])).await;
    assert_eq!(other.status, 422, "{}", other.text);
    assert!(other.text.contains("with another body"), "{}", other.text);
}

#[tokio::test]
async fn pictures_and_documents_are_attachments_of_the_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("a dot"), says("the same")]);
    let inline =
        |kind: &str, value: String| json!({ "type": "data", "mimeType": kind, "value": value });
    let picture = inline("image/png", base64(PNG));
    let document = inline("application/pdf", base64(PDF));
    let content = json!([
        { "type": "text", "text": "What is it?" },
        { "type": "image", "source": picture },
        { "type": "document", "source": document, "metadata": { "filename": "a.pdf" } },
    ]);
    let message = json!({ "id": "m1", "role": "user", "content": content });
    let first = events(&app, "solo", &input("r1", std::slice::from_ref(&message))).await;
    let run = first[0]["metadata"]["axed/run_id"].as_str().expect("an id");
    let parts = app.find(run).await["input"].clone();
    let kinds: Vec<&Value> = [0, 1, 2].map(|at| &parts[at]["type"]).to_vec();
    assert_eq!(kinds, ["text", "image", "file"]);
    assert_eq!(parts[2]["name"], "a.pdf");
    let mut messages = snapshot(&first);
    assert_eq!(messages[0], message);
    // Clients of earlier versions send binary parts, and a URL can hold its data.
    let url = format!("data:image/png;base64,{}", base64(PNG));
    let content = json!([
        { "type": "binary", "mimeType": "image/png", "data": base64(PNG) },
        { "type": "image", "source": { "type": "url", "value": url } },
    ]);
    messages.push(json!({ "id": "m2", "role": "user", "content": content }));
    events(&app, "solo", &input("r2", &messages)).await;
    let sent = app.provider.requests().remove(1);
    let sent = sent.messages().last().expect("a message").to_string();
    assert_eq!(sent.matches(&base64(PNG)).count(), 2, "{sent}");
}

#[tokio::test]
async fn pictures_do_not_count_towards_the_bound_of_the_body() {
    let setup = TestApp::setup().agent("solo", "");
    let app = setup.server("max_body = 900").spawn().await;
    app.provider.will("solo", [says("the same")]);
    let picture = base64(&png_with_suffix(&"x".repeat(2000)));
    let url = format!("data:image/png;base64,{picture}");
    let content = json!([
        { "type": "image", "source": { "type": "data", "mimeType": "image/png", "value": picture } },
        { "type": "image", "source": { "type": "url", "value": url } },
        { "type": "binary", "mimeType": "image/png", "data": picture },
    ]);
    let message = json!({ "id": "m1", "role": "user", "content": content });
    let seen = events(&app, "solo", &input("r1", &[message])).await;
    assert_eq!(find(&seen, "RUN_FINISHED")["outcome"]["type"], "success");
    let mut body = input("r2", &[user("m2", "x")]);
    body["context"] = json!([{ "description": "page", "value": "x".repeat(2000) }]);
    let refused = post(&app, "solo", &body).await;
    assert_eq!(refused.status, 413, "{}", refused.text);
    assert!(refused.text.contains("server.max_body"), "{}", refused.text);
}

#[tokio::test]
async fn parts_that_no_run_can_have_are_refused_by_their_place() {
    let app = TestApp::setup()
        .agent("solo", "")
        .config("[limits]\nattachments = 1\n")
        .spawn()
        .await;
    let png = base64(PNG);
    let picture = json!({ "type": "image", "source": { "type": "data", "mimeType": "image/png", "value": png } });
    let typed = |kind: &str| json!({ "type": "document", "source": { "type": "data", "mimeType": kind, "value": png } });
    for (parts, status, expected) in [
        (
            json!([{ "type": "video", "source": {} }]),
            422,
            "/messages/0/content/0/type: video is not supported",
        ),
        (
            json!([{ "type": "image", "source": { "type": "file", "value": "f_1" } }]),
            422,
            "/messages/0/content/0/source: is a file of a provider",
        ),
        (
            json!([{ "type": "image" }]),
            422,
            "/messages/0/content/0: is no part of a message: missing field `source`",
        ),
        (
            json!([{ "type": "image", "source": { "type": "url", "value": "ftp://a/b" } }]),
            422,
            "/messages/0/content/0/source/value: ",
        ),
        (
            json!([typed("text/csv")]),
            422,
            "/messages/0/content/0/source/mimeType: \"text/csv\" is not supported",
        ),
        (
            json!([picture, picture]),
            413,
            "/messages/0/content/1/source/value: a request has at most 1 images and files",
        ),
    ] {
        let message = json!({ "id": "m1", "role": "user", "content": parts });
        let refused = post(&app, "solo", &input("r1", &[message])).await;
        assert_eq!(refused.status, status, "{}", refused.text);
        let message = refused.json()["message"]
            .as_str()
            .expect("a message")
            .to_owned();
        assert!(message.contains(expected), "{message}");
    }
    assert!(app.provider.requests().is_empty());
}

#[tokio::test]
async fn tool_calls_have_arguments_and_results() {
    let app = TestApp::setup()
        .agent("reader", "workdir = \"work\"\ntools = [\"read_file\"]")
        .file("work/here.txt", "what it says")
        .spawn()
        .await;
    let reads = calls([("read_file", json!({ "path": "here.txt" }))]);
    app.provider.will("reader", [reads, says("done")]);
    let events = events(&app, "reader", &input("r1", &[user("m1", "read it")])).await;
    let start = find(&events, "TOOL_CALL_START");
    assert_eq!(start["toolCallName"], "read_file");
    let arguments = find(&events, "TOOL_CALL_ARGS")["delta"].as_str();
    let arguments: Value = serde_json::from_str(arguments.expect("JSON")).expect("JSON");
    assert_eq!(arguments, json!({ "path": "here.txt" }));
    let result = find(&events, "TOOL_CALL_RESULT");
    assert_eq!(result["toolCallId"], start["toolCallId"]);
    assert!(
        result["content"]
            .as_str()
            .is_some_and(|it| it.contains("what it says"))
    );
    let messages = snapshot(&events);
    let roles: Vec<&Value> = messages.iter().map(|message| &message["role"]).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
    assert_eq!(messages[2]["toolCallId"], messages[1]["toolCalls"][0]["id"]);
}

#[tokio::test]
async fn an_approval_is_an_interrupt_and_resume_answers_it() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let first = events(&app, "careful", &input("r1", &[user("m1", "write")])).await;
    let outcome = &find(&first, "RUN_FINISHED")["outcome"];
    assert_eq!(outcome["type"], "interrupt");
    let interrupt = &outcome["interrupts"][0];
    let call = find(&first, "TOOL_CALL_START");
    assert_eq!(interrupt["toolCallId"], call["toolCallId"]);
    assert!(!wrote(&app, "a"));

    let resume = |entries: Value| {
        let mut body = input("r2", &snapshot(&first));
        body["resume"] = entries;
        body
    };
    let wrong = json!([{ "interruptId": interrupt["id"], "status": "resolved", "payload": 1 }]);
    let got = post(&app, "careful", &resume(wrong)).await;
    assert_eq!(
        (got.status, &got.json()["code"]),
        (422, &json!("invalid_field"))
    );

    let payload = json!({ "decision": "approve" });
    let entry =
        json!([{ "interruptId": interrupt["id"], "status": "resolved", "payload": payload }]);
    let second = events(&app, "careful", &resume(entry)).await;
    assert_eq!(find(&second, "RUN_FINISHED")["outcome"]["type"], "success");
    assert!(wrote(&app, "a"));
    let started = second
        .iter()
        .filter(|event| event["type"] == "TOOL_CALL_START");
    assert_eq!(started.count(), 0, "{second:#?}");
    let result = find(&second, "TOOL_CALL_RESULT");
    assert_eq!(result["toolCallId"], call["toolCallId"]);
    assert_eq!(second[0]["metadata"], first[0]["metadata"]);
    let roles: Vec<Value> = snapshot(&second)
        .iter()
        .map(|it| it["role"].clone())
        .collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
}

#[tokio::test]
async fn a_question_is_an_interrupt_and_resume_answers_it() {
    let app = curious("").spawn().await;
    let question = json!({"question": "How many?", "schema": {"type": "integer"}});
    let second = json!({"question": "Sure?"});
    app.provider
        .will("curious", [asks(question), asks(second), says("done")]);
    let first = events(&app, "curious", &input("r1", &[user("m1", "go")])).await;
    let interrupt = &find(&first, "RUN_FINISHED")["outcome"]["interrupts"][0];
    assert_eq!(
        (&interrupt["reason"], &interrupt["message"]),
        (&json!("input"), &json!("How many?"))
    );
    let properties = &interrupt["responseSchema"]["properties"];
    assert_eq!(properties["answer"], json!({"type": "integer"}));
    let call = find(&first, "TOOL_CALL_START");
    assert_eq!(interrupt["toolCallId"], call["toolCallId"]);
    let resume = |run: &str, interrupt: &Value, more: Value| {
        let mut entry = json!({ "interruptId": interrupt["id"], "status": "resolved" });
        for (name, value) in more.as_object().expect("fields") {
            entry[name] = value.clone();
        }
        let mut body = input(run, &snapshot(&first));
        body["resume"] = json!([entry]);
        body
    };
    for wrong in [json!("three"), json!({"answer": "three"}), json!({})] {
        let body = resume("r2", interrupt, json!({ "payload": wrong }));
        let got = post(&app, "curious", &body).await;
        assert_eq!(got.status, 422, "{}", got.text);
    }
    let body = resume("r2", interrupt, json!({ "payload": { "answer": 3 } }));
    let second = events(&app, "curious", &body).await;
    let interrupt = &find(&second, "RUN_FINISHED")["outcome"]["interrupts"][0];
    assert_eq!(interrupt["message"], "Sure?");
    let body = resume("r3", interrupt, json!({ "status": "cancelled" }));
    let third = events(&app, "curious", &body).await;
    assert_eq!(find(&third, "RUN_FINISHED")["outcome"]["type"], "success");
    let result = find(&third, "TOOL_CALL_RESULT");
    assert_eq!(
        result["content"],
        "A person declined to answer: cancelled by the user"
    );
}

#[tokio::test]
async fn a_call_whose_arguments_cannot_be_shown_is_no_interrupt() {
    let app = careful("").spawn().await;
    app.provider
        .will("careful", [writes_too_much(), says("done")]);
    let first = events(&app, "careful", &input("r1", &[user("m1", "write")])).await;
    let outcome = &find(&first, "RUN_FINISHED")["outcome"];
    assert_eq!(outcome, &json!({ "type": "interrupt", "interrupts": [] }));
    let run = first[0]["metadata"]["axed/run_id"].as_str().expect("a run");
    let waiting = app.find(run).await;
    let call = waiting["pending_approvals"][0]["tool_call_id"].as_str();
    let id = format!("{run}/{}", call.expect("a call"));
    let resume = |decision: &str| {
        let mut body = input("r2", &[]);
        let payload = json!({ "decision": decision });
        body["resume"] = json!([{ "interruptId": id, "status": "resolved", "payload": payload }]);
        body
    };
    let got = post(&app, "careful", &resume("approve")).await;
    assert_eq!(got.status, 422, "{}", got.text);
    assert!(got.text.contains("too long to be shown"), "{}", got.text);
    let second = events(&app, "careful", &resume("deny")).await;
    assert_eq!(find(&second, "RUN_FINISHED")["outcome"]["type"], "success");
    assert!(!wrote(&app, "a"));
}

#[tokio::test]
async fn a_key_that_may_not_change_arguments_gets_no_field_for_them() {
    let keys = key("ada", "scopes = [\"run\"]") + &key("eve", "scopes = [\"run\", \"approve\"]");
    let app = careful("").config(&keys).spawn().await;
    for (name, may_change) in [("ada", false), ("eve", true)] {
        app.provider.will("careful", [writes(name)]);
        let request = app.request(Method::POST, "/agents/careful/ag-ui");
        let request = request
            .bearer_auth(name)
            .header("accept", "text/event-stream");
        let body = input("r1", &[user("m1", "write")]);
        let got = send(request.json(&body)).await;
        assert_eq!(got.status, 200, "{}", got.text);
        let events = got.text.lines().filter_map(|it| it.strip_prefix("data: "));
        let events: Vec<Value> = events
            .map(|data| serde_json::from_str(data).expect("JSON"))
            .collect();
        let interrupt = &find(&events, "RUN_FINISHED")["outcome"]["interrupts"][0];
        let properties = &interrupt["responseSchema"]["properties"];
        assert_eq!(
            properties["arguments"].is_object(),
            may_change,
            "{interrupt}"
        );
        assert_eq!(interrupt["metadata"]["arguments"]["path"], name);
    }
}

#[tokio::test]
async fn a_repeated_resume_shows_the_run() {
    let app = careful("").spawn().await;
    app.provider
        .will("careful", [writes("a"), writes("b"), says("done")]);
    let first = events(&app, "careful", &input("r1", &[user("m1", "write")])).await;
    let interrupt = &find(&first, "RUN_FINISHED")["outcome"]["interrupts"][0];
    let mut body = input("r2", &snapshot(&first));
    body["resume"] = json!([{ "interruptId": interrupt["id"], "status": "resolved",
        "payload": { "decision": "approve" } }]);
    for _ in 0..2 {
        let request = app.request(Method::POST, "/agents/careful/ag-ui");
        let got = send(request.header("Idempotency-Key", "k").json(&body)).await;
        assert_eq!(got.status, 200, "{}", got.text);
        assert!(got.text.contains("\"path\\\":\\\"b\\\""), "{}", got.text);
    }
    assert!(wrote(&app, "a") && !wrote(&app, "b"));
}

#[tokio::test]
async fn the_clients_tools_are_executed_by_the_client() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let opens = calls([("open_page", json!({ "page": "map" }))]);
    let open = says("It is open").with_usage(20, 3).with_model("other-1");
    app.provider
        .will("solo", [opens.with_usage(10, 2).with_model("one-1"), open]);
    let with_tools = |run: &str, messages: &[Value]| {
        let mut body = input(run, messages);
        body["tools"] = json!([{ "name": "open_page", "description": "Opens a page.",
            "parameters": { "type": "object", "properties": { "page": { "type": "string" } } } }]);
        body
    };
    let body = with_tools("r1", &[user("m1", "Show the map")]);
    let first = events(&app, "solo", &body).await;
    let outcome = &find(&first, "RUN_FINISHED")["outcome"];
    let call = &find(&first, "TOOL_CALL_START")["toolCallId"];
    assert_eq!(outcome["pendingToolCallIds"], json!([call]));
    let mut messages = snapshot(&first);
    messages.push(json!({ "id": "m2", "role": "tool", "toolCallId": call, "content": "opened" }));
    let source = json!({ "type": "url", "value": "https://pics.example/a.png" });
    let picture = json!([{ "type": "image", "source": source }]);
    let mut with_url = messages.clone();
    with_url.push(json!({ "id": "m3", "role": "user", "content": picture }));
    let refused = post(&app, "solo", &with_tools("r2", &with_url)).await;
    assert_eq!(refused.status, 422, "{}", refused.text);
    assert!(refused.text.contains("/messages: "), "{}", refused.text);
    let second = events(&app, "solo", &with_tools("r2", &messages)).await;
    assert_eq!(second[0]["metadata"], first[0]["metadata"]);
    let ids = |messages: &[Value]| -> Vec<Value> {
        messages
            .iter()
            .map(|message| message["id"].clone())
            .collect()
    };
    let mut shown = snapshot(&second);
    let last = shown.pop().expect("a message");
    assert_eq!(last["content"], "It is open");
    assert_eq!(ids(&shown), ids(&messages), "the client's ids stay");
    for (events, model, tokens) in [(&first, "one-1", 12), (&second, "other-1", 23)] {
        let usage = &find(events, "RUN_FINISHED")["usage"];
        assert_eq!(usage.as_array().map(Vec::len), Some(1), "{usage}");
        assert_eq!(usage[0]["model"], model, "{usage}");
        assert_eq!(usage[0]["totalTokens"], tokens, "{usage}");
    }
    let outcome = &find(&second, "RUN_FINISHED")["outcome"];
    assert_eq!(
        outcome,
        &json!({ "type": "success", "pendingToolCallIds": [] })
    );
    let request = app.provider.requests().remove(1);
    assert_eq!(request.tool_results(), ["opened"]);
    let got = post(&app, "solo", &with_tools("r3", &messages)).await;
    assert_eq!(
        (got.status, &got.json()["code"]),
        (409, &json!("nothing_waits"))
    );
}

#[tokio::test]
async fn arguments_that_are_no_object_are_shown_as_they_came() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let long = "Bonn, ".repeat(1000);
    for sent in NO_OBJECTS.into_iter().chain([long.as_str()]) {
        app.provider
            .will("solo", [calls([("open_page", json!(sent))]), says("Open")]);
        let with_tools = |messages: &[Value]| {
            let mut body = input("r1", messages);
            body["threadId"] = json!(sent.len().to_string());
            body["tools"] = json!([{ "name": "open_page", "description": "Opens a page.",
                "parameters": { "type": "object" } }]);
            body
        };
        let first = events(&app, "solo", &with_tools(&[user("m1", "Show the map")])).await;
        assert_eq!(find(&first, "TOOL_CALL_ARGS")["delta"], sent);
        let mut messages = snapshot(&first);
        let call = messages[1]["toolCalls"][0].clone();
        assert_eq!(call["function"]["arguments"], sent);
        messages.push(
            json!({ "id": "m2", "role": "tool", "toolCallId": call["id"], "content": "opened" }),
        );
        let second = events(&app, "solo", &with_tools(&messages)).await;
        assert_eq!(find(&second, "TEXT_MESSAGE_CONTENT")["delta"], "Open");
    }
}

#[tokio::test]
async fn failures_cancellations_and_refusals_have_events() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [fails(400, "no such model"), hangs()]);
    let failed = events(&app, "solo", &input("r1", &[user("m1", "go")])).await;
    let error = failed.last().expect("an event");
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("RUN_ERROR"), &json!("provider_bad_request"))
    );

    let body = input("r2", &[user("m1", "go")]);
    let running = events(&app, "solo", &body);
    let cancelled = async {
        app.provider.wait_for_requests(2).await;
        let runs = app.get("/runs?status=running").await.json();
        let id = runs["data"][0]["id"].as_str().expect("an id").to_owned();
        app.post(&format!("/runs/{id}/cancel"), &json!({})).await
    };
    let (running, _) = tokio::join!(running, cancelled);
    assert_eq!(
        find(&running, "RUN_FINISHED")["outcome"],
        json!({ "type": "cancelled" })
    );

    let got = post(&app, "solo", &input("r3", &[])).await;
    assert_eq!(
        (got.status, &got.json()["type"]),
        (422, &json!("RUN_ERROR"))
    );
    let got = post(&app, "nobody", &input("r3", &[user("m1", "go")])).await;
    assert_eq!(
        (got.status, &got.json()["code"]),
        (404, &json!("agent_not_found"))
    );
}
