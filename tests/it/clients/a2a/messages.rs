//! Messages: what a task is made of, structured input, files, repetitions, messages to a task.

use serde_json::{Value, json};

use crate::clients::a2a::{error, get, message, post, result, state, task_of, to_task, with_parts};
use crate::support::app::TestApp;
use crate::support::attachments::{base64, png_with_suffix};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, fails, says};
use crate::tools::approvals::{careful, writes, writes_too_much, wrote};
use crate::tools::ask_person::{asks, curious};

#[tokio::test]
async fn a_message_becomes_a_task_with_a_result() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("Hello Ada").with_usage(12, 3), says("Ada")]);
    let task = task_of(&app, "solo", &message("m1", "I am Ada")).await;
    assert_eq!(
        (state(&task), result(&task)),
        ("TASK_STATE_COMPLETED", "Hello Ada")
    );
    assert_eq!(task["metadata"]["axed/usage"]["inputTokens"], 12);
    let history = task["history"].as_array().expect("messages");
    let roles: Vec<_> = history.iter().map(|it| &it["role"]).collect();
    assert_eq!(roles, ["ROLE_USER", "ROLE_AGENT"]);
    assert_eq!(history[0]["parts"], json!([{ "text": "I am Ada" }]));
    assert_eq!(history[0]["taskId"], task["id"]);
    let run = app.find(task["id"].as_str().expect("an id")).await;
    assert_eq!((run.status(), run.output()), ("completed", "Hello Ada"));

    // The context is a session: its conversation continues, and each task has its own messages.
    let mut second = message("m2", "Who am I?");
    second["message"]["contextId"] = task["contextId"].clone();
    second["configuration"] = json!({ "historyLength": 1 });
    let second = task_of(&app, "solo", &second).await;
    assert_eq!(second["contextId"], task["contextId"]);
    assert_eq!(second["history"].as_array().map(Vec::len), Some(1));
    let request = app.provider.requests().remove(1);
    assert_eq!(request.user_messages(), ["I am Ada", "Who am I?"]);
    let path = format!(
        "solo/tasks/{}?historyLength=0",
        second["id"].as_str().expect("an id")
    );
    let found = get(&app, &path).await.json();
    assert_eq!((result(&found), found.get("history")), ("Ada", None));
}

#[tokio::test]
async fn data_is_the_input_of_an_agent_that_takes_objects() {
    let schema = "[input_schema]\ntype = \"object\"\nrequired = [\"city\"]\n[params]\nresponse_format = { type = \"json_object\" }";
    let app = TestApp::setup()
        .agent("form", schema)
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("form", [says("{\"days\": 3}")]);
    let parts = json!([{ "data": { "city": "Rome" } }, { "text": "Soon." }]);
    let task = task_of(&app, "form", &with_parts("m1", &parts)).await;
    let parts = &task["artifacts"][0]["parts"];
    assert_eq!(parts[0]["text"], "{\"days\": 3}");
    assert_eq!(
        parts[1],
        json!({ "data": { "days": 3 }, "mediaType": "application/json" })
    );
    let sent = app.provider.requests().remove(0).user_messages().join("");
    assert!(
        sent.contains("{\"city\":\"Rome\"}") && sent.contains("Soon."),
        "{sent}"
    );
    let wrong = with_parts("m2", &json!([{ "data": { "town": "Rome" } }]));
    let got = post(&app, "form/message:send", &wrong).await;
    assert_eq!(
        error(&got),
        (400, "INVALID_FIELD".into(), "invalid_field".into())
    );

    app.provider.will("solo", [says("a list")]);
    task_of(
        &app,
        "solo",
        &with_parts("m3", &json!([{ "data": [1, 2] }])),
    )
    .await;
    let request = app.provider.requests().remove(1);
    assert_eq!(request.user_messages(), ["[1,2]"]);
}

#[tokio::test]
async fn pictures_do_not_count_towards_the_bound_of_the_body() {
    let setup = TestApp::setup().agent("solo", "");
    let app = setup.server("max_body = 600").spawn().await;
    app.provider.will("solo", [says("a dot")]);
    let picture = base64(&png_with_suffix(&"x".repeat(2000)));
    let parts = json!([{ "text": "What is it?" }, { "raw": picture, "mediaType": "image/png" }]);
    let task = task_of(&app, "solo", &with_parts("m1", &parts)).await;
    assert_eq!(result(&task), "a dot");
    for part in ["text", "data", "url"] {
        let parts = json!([{ part: "x".repeat(2000) }]);
        let got = post(&app, "solo/message:send", &with_parts("m2", &parts)).await;
        assert_eq!(error(&got).2, "body_too_large", "{}", got.text);
    }
}

#[tokio::test]
async fn pictures_reach_the_model_and_other_files_are_refused() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("a dot")]);
    let data = base64(&png_with_suffix(""));
    let parts = json!([{ "text": "What is it?" }, { "raw": data, "mediaType": "image/png" }]);
    let task = task_of(&app, "solo", &with_parts("m1", &parts)).await;
    assert_eq!(result(&task), "a dot");
    let request = app.provider.requests().remove(0);
    assert!(request.body.to_string().contains(&data), "{}", request.body);
    let shown = &task["history"][0]["parts"][1]["data"];
    assert_eq!(shown["mediaType"], "image/png");

    let video = json!([{ "raw": data, "mediaType": "video/mp4" }]);
    let got = post(&app, "solo/message:send", &with_parts("m2", &video)).await;
    let expected = (
        400,
        "CONTENT_TYPE_NOT_SUPPORTED".into(),
        "unsupported_media_type".into(),
    );
    assert_eq!(error(&got), expected);
}

#[tokio::test]
async fn wrong_messages_are_refused_with_the_field() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let mut agent = message("m1", "go");
    agent["message"]["role"] = json!("ROLE_AGENT");
    let mut context = message("m1", "go");
    context["message"]["contextId"] = json!("not a session");
    for (body, field) in [
        (json!({}), "message"),
        (message("", "go"), "message.messageId"),
        (with_parts("m1", &json!([])), "message.parts"),
        (
            with_parts("m1", &json!([{ "text": 5 }])),
            "message.parts[0].text",
        ),
        (agent, "message.role"),
        (context, "message.contextId"),
    ] {
        let got = post(&app, "solo/message:send", &body).await;
        assert_eq!(error(&got).0, 400, "{}", got.text);
        let violations = &got.json()["error"]["details"][1]["fieldViolations"];
        assert_eq!(violations[0]["field"], field, "{}", got.text);
    }
    assert_eq!(app.provider.requests().len(), 0);
}

#[tokio::test]
async fn a_repeated_message_is_the_same_task_also_after_a_crash() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done")]);
    let first = task_of(&app, "solo", &message("m1", "go")).await;
    app.crash_and_restart().await;
    let again = task_of(&app, "solo", &message("m1", "go")).await;
    assert_eq!((&again["id"], result(&again)), (&first["id"], "done"));
    assert_eq!(app.provider.requests().len(), 1);
    // Another content is another message.
    app.provider.will("solo", [says("other")]);
    let other = task_of(&app, "solo", &message("m1", "stop")).await;
    assert_eq!(result(&other), "other");
}

#[tokio::test]
async fn a_task_survives_a_crash_while_its_client_is_away() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("lost").after_gate(&gate), says("done")]);
    let mut body = message("m1", "go");
    body["configuration"] = json!({ "returnImmediately": true });
    let task = task_of(&app, "solo", &body).await;
    assert!(
        ["TASK_STATE_SUBMITTED", "TASK_STATE_WORKING"].contains(&state(&task)),
        "{task}"
    );
    app.provider.wait_for_requests(1).await;
    app.crash_and_restart().await;
    let path = format!("solo/tasks/{}", task["id"].as_str().expect("an id"));
    let found = app
        .get_until(&format!("/a2a/{path}?A2A-Version=1.0"), |got| {
            state(&got.json()) == "TASK_STATE_COMPLETED"
        })
        .await;
    assert_eq!(result(&found.json()), "done");
}

#[tokio::test]
async fn input_that_a_task_requires_is_an_approval() {
    let mut app = careful("").spawn().await;
    app.provider
        .will("careful", [writes("a"), writes("b"), says("done")]);
    let task = task_of(&app, "careful", &message("m1", "write")).await;
    assert_eq!(state(&task), "TASK_STATE_INPUT_REQUIRED");
    let request = &task["status"]["message"]["parts"][1]["data"];
    assert_eq!(request["tool"], "write_file");
    assert_eq!(request["arguments"]["path"], "a");
    assert!(!wrote(&app, "a"));

    let unclear = to_task(message("m2", "if you like"), &task);
    let got = post(&app, "careful/message:send", &unclear).await;
    assert_eq!(
        error(&got),
        (400, "INVALID_FIELD".into(), "invalid_field".into())
    );
    assert!(got.text.contains("approve or deny"), "{}", got.text);
    let mut elsewhere = to_task(message("m2", "approve"), &task);
    elsewhere["message"]["contextId"] = json!("other");
    let got = post(&app, "careful/message:send", &elsewhere).await;
    assert_eq!(error(&got).0, 400, "{}", got.text);

    app.crash_and_restart().await;
    let changed = json!([{ "data": {
        "approvalId": request["approvalId"], "decision": "approve", "reason": "fine",
        "arguments": { "path": "c", "content": "new" },
    } }]);
    let task = task_of(&app, "careful", &to_task(with_parts("m3", &changed), &task)).await;
    assert_eq!(state(&task), "TASK_STATE_INPUT_REQUIRED", "{task:#}");
    assert!(wrote(&app, "c") && !wrote(&app, "a"));
    let denied = to_task(message("m4", "Deny"), &task);
    let task = task_of(&app, "careful", &denied).await;
    assert_eq!(
        (state(&task), result(&task)),
        ("TASK_STATE_COMPLETED", "done")
    );
    assert!(!wrote(&app, "b"));

    let got = post(
        &app,
        "careful/message:send",
        &to_task(message("m5", "more"), &task),
    )
    .await;
    assert_eq!(
        error(&got),
        (400, "UNSUPPORTED_OPERATION".into(), "run_ended".into())
    );
}

#[tokio::test]
async fn input_that_a_task_requires_is_an_answer() {
    let app = curious("").spawn().await;
    let form = json!({"question": "How many?", "schema": {"type": "integer"}});
    let text = || asks(json!({"question": "Which city?", "options": ["Oslo"]}));
    let turns = [
        text(),
        text(),
        asks(form),
        asks(json!({"question": "PIN?"})),
        says("done"),
    ];
    app.provider.will("curious", turns);
    let task = task_of(&app, "curious", &message("m1", "go")).await;
    assert_eq!(state(&task), "TASK_STATE_INPUT_REQUIRED");
    let parts = &task["status"]["message"]["parts"];
    assert_eq!(parts[0]["text"], "curious asks: Which city? (Oslo)");
    assert_eq!(parts[1]["data"]["question"], "Which city?");
    // A text answers, also one that could decide.
    let task = task_of(&app, "curious", &to_task(message("m2", "Rome"), &task)).await;
    let task = task_of(&app, "curious", &to_task(message("m3", "approve"), &task)).await;
    let question = &task["status"]["message"]["parts"][1]["data"];
    assert_eq!(
        (&question["question"], &question["schema"]["type"]),
        (&json!("How many?"), &json!("integer"))
    );
    for (number, wrong) in [
        json!([{ "text": "3" }]),
        json!([{ "data": { "inputId": question["inputId"], "answer": "3" } }]),
        json!([{ "data": { "inputId": "run/other", "answer": 3 } }]),
        json!([{ "data": { "inputId": question["inputId"], "answer": 3, "decline": "no" } }]),
    ]
    .into_iter()
    .enumerate()
    {
        let wrong = to_task(with_parts(&format!("w{number}"), &wrong), &task);
        let got = post(&app, "curious/message:send", &wrong).await;
        assert_eq!(error(&got).0, 400, "{}", got.text);
    }
    let answer = json!([{ "data": { "inputId": question["inputId"], "answer": 3 } }]);
    let task = task_of(&app, "curious", &to_task(with_parts("m4", &answer), &task)).await;
    let question = &task["status"]["message"]["parts"][1]["data"];
    let decline = json!([{ "data": { "inputId": question["inputId"], "decline": "secret" } }]);
    let task = task_of(&app, "curious", &to_task(with_parts("m5", &decline), &task)).await;
    assert_eq!(
        (state(&task), result(&task)),
        ("TASK_STATE_COMPLETED", "done")
    );
    let run = app.find(task["id"].as_str().expect("an id")).await;
    let messages = run.messages().await.to_string();
    for result in [
        "answered: Rome",
        "answered: approve",
        "answered: 3",
        "to answer: secret",
    ] {
        assert!(messages.contains(result), "{result}: {messages}");
    }
}

#[tokio::test]
async fn a_repeated_decision_is_not_one_on_the_next_call() {
    let mut app = careful("").spawn().await;
    app.provider
        .will("careful", [writes("a"), writes("b"), says("done")]);
    let task = task_of(&app, "careful", &message("m1", "write")).await;
    let approve = to_task(message("m2", "approve"), &task);
    let waits_for_b = |task: &Value| {
        let parts = task["status"]["message"]["parts"]
            .as_array()
            .expect("parts");
        let mut requests = parts.iter().map(|part| &part["data"]["arguments"]["path"]);
        assert_eq!(state(task), "TASK_STATE_INPUT_REQUIRED", "{task:#}");
        requests.any(|path| path == "b")
    };
    assert!(waits_for_b(&task_of(&app, "careful", &approve).await));
    // Its client has not got the response.
    assert!(waits_for_b(&task_of(&app, "careful", &approve).await));
    app.crash_and_restart().await;
    assert!(waits_for_b(&task_of(&app, "careful", &approve).await));
    assert!(wrote(&app, "a") && !wrote(&app, "b"));
    let next = to_task(message("m3", "approve"), &task);
    let task = task_of(&app, "careful", &next).await;
    assert_eq!(state(&task), "TASK_STATE_COMPLETED", "{task:#}");
    assert!(wrote(&app, "b"));
}

#[tokio::test]
async fn a_repeated_decision_on_a_call_of_a_sub_agent_is_the_same_task() {
    let app = careful("").spawn().await;
    app.provider.will(
        "planner",
        [delegates([("careful", "write")]), says("all done")],
    );
    app.provider
        .will("careful", [writes("a"), writes("b"), says("done")]);
    let task = task_of(&app, "planner", &message("m1", "go")).await;
    let approve = to_task(message("m2", "approve"), &task);
    for _ in 0..2 {
        let shown = task_of(&app, "planner", &approve).await;
        assert_eq!(shown["id"], task["id"]);
        assert_eq!(state(&shown), "TASK_STATE_INPUT_REQUIRED", "{shown:#}");
    }
    assert!(wrote(&app, "a") && !wrote(&app, "b"));
}

#[tokio::test]
async fn several_approvals_are_decided_by_their_ids() {
    let app = careful("").spawn().await;
    let write = |path: &str| ("write_file", json!({ "path": path, "content": "new" }));
    app.provider
        .will("careful", [calls([write("a"), write("b")]), says("done")]);
    let task = task_of(&app, "careful", &message("m1", "write")).await;
    // The task is shown with all of its requests.
    let parts = task["status"]["message"]["parts"]
        .as_array()
        .expect("parts");
    // Calls of one reply may ask in any order.
    let request_for = |path: &str| {
        let mut requests = parts.iter().map(|part| &part["data"]);
        let found = requests.find(|request| request["arguments"]["path"] == path);
        found.expect("a request")
    };
    let got = post(
        &app,
        "careful/message:send",
        &to_task(message("m2", "approve"), &task),
    )
    .await;
    assert!(got.text.contains("several calls wait"), "{}", got.text);
    let decide = |request: &Value, decision: &str| json!({ "data": { "approvalId": request["approvalId"], "decision": decision } });
    let both = json!([
        decide(request_for("a"), "approve"),
        decide(request_for("b"), "deny")
    ]);
    let task = task_of(&app, "careful", &to_task(with_parts("m3", &both), &task)).await;
    assert_eq!(state(&task), "TASK_STATE_COMPLETED", "{task:#}");
    assert!(wrote(&app, "a") && !wrote(&app, "b"));
}

#[tokio::test]
async fn a_call_whose_arguments_cannot_be_shown_is_not_approved() {
    let app = careful("").spawn().await;
    app.provider
        .will("careful", [writes_too_much(), says("done")]);
    let task = task_of(&app, "careful", &message("m1", "write")).await;
    assert_eq!(state(&task), "TASK_STATE_INPUT_REQUIRED");
    let parts = &task["status"]["message"]["parts"];
    assert_eq!(parts.as_array().map(Vec::len), Some(1), "{parts}");
    let data = json!([{ "data": { "decision": "approve" } }]);
    for approval in [message("m2", "approve"), with_parts("m3", &data)] {
        let got = post(&app, "careful/message:send", &to_task(approval, &task)).await;
        assert_eq!(
            error(&got),
            (400, "INVALID_FIELD".into(), "invalid_field".into())
        );
        assert!(got.text.contains("too long to be shown"), "{}", got.text);
    }
    let denied = task_of(&app, "careful", &to_task(message("m4", "deny"), &task)).await;
    assert_eq!(
        (state(&denied), result(&denied)),
        ("TASK_STATE_COMPLETED", "done")
    );
    assert!(!wrote(&app, "a"));
}

#[tokio::test]
async fn a_message_to_a_task_at_work_is_added_to_it() {
    let app = TestApp::setup()
        .agent("reader", "workdir = \"work\"\ntools = [\"read_file\"]")
        .file("work/here.txt", "what it says")
        .spawn()
        .await;
    let gate = Gate::closed();
    let reads = calls([("read_file", json!({ "path": "here.txt" }))]).after_gate(&gate);
    app.provider.will("reader", [reads, says("done")]);
    let mut body = message("m1", "read it");
    body["configuration"] = json!({ "returnImmediately": true });
    let task = task_of(&app, "reader", &body).await;
    app.provider.wait_for_requests(1).await;
    let mut more = to_task(message("m2", "and be brief"), &task);
    more["configuration"] = json!({ "returnImmediately": true });
    task_of(&app, "reader", &more).await;
    // A repetition adds nothing.
    task_of(&app, "reader", &more).await;
    let got = post(
        &app,
        "reader/message:send",
        &to_task(message("m3", "approve"), &task),
    )
    .await;
    assert_eq!(error(&got).2, "nothing_waits");
    gate.open();
    app.find(task["id"].as_str().expect("an id"))
        .await
        .wait_for_end()
        .await;
    let request = app.provider.requests().remove(1);
    assert_eq!(request.user_messages(), ["read it", "and be brief"]);
}

#[tokio::test]
async fn a_failed_run_is_a_failed_task() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [fails(400, "no such model")]);
    let task = task_of(&app, "solo", &message("m1", "go")).await;
    assert_eq!(state(&task), "TASK_STATE_FAILED");
    assert!(
        task["status"]["message"]["parts"][0]["text"].is_string(),
        "{task:#}"
    );
    assert_eq!(
        task["metadata"]["axed/error"]["code"],
        "provider_bad_request"
    );
    assert_eq!(task.get("artifacts"), None);
}
