//! The JSON-RPC binding: the same tasks as over HTTP+JSON, in an envelope.

use reqwest::Method;
use serde_json::{Value, json};

use crate::clients::a2a::{data, kinds, message, result, state, task_of, to_task};
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::provider::answer::says;
use crate::tools::approvals::{careful, writes};

async fn call(app: &TestApp, agent: &str, method: &str, params: &Value) -> ApiResponse {
    let body = json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params });
    let request = app.request(Method::POST, &format!("/a2a/{agent}"));
    send(request.header("a2a-version", "1.0").json(&body)).await
}

async fn result_of(app: &TestApp, agent: &str, method: &str, params: &Value) -> Value {
    let got = call(app, agent, method, params).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(got.header("content-type"), "application/json");
    let body = got.json();
    assert_eq!((&body["jsonrpc"], &body["id"]), (&json!("2.0"), &json!(7)));
    assert!(body["error"].is_null(), "{body}");
    body["result"].clone()
}

/// The code and the reason of an error.
fn error(got: &ApiResponse) -> (i64, String) {
    let error = &got.json()["error"];
    let info = &error["data"][0];
    assert_eq!(info["@type"], "type.googleapis.com/google.rpc.ErrorInfo");
    let reason = info["reason"].as_str().expect("a reason");
    (error["code"].as_i64().expect("a code"), reason.to_owned())
}

#[tokio::test]
async fn a_task_is_the_same_over_both_bindings() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("Hello")]);
    let sent = message("m1", "hi");
    let task = result_of(&app, "solo", "SendMessage", &sent).await["task"].clone();
    assert_eq!(
        (state(&task), result(&task)),
        ("TASK_STATE_COMPLETED", "Hello")
    );
    // The message is known by its id over the other binding too.
    assert_eq!(task_of(&app, "solo", &sent).await["id"], task["id"]);

    let found = json!({ "id": task["id"], "historyLength": 0 });
    let found = result_of(&app, "solo", "GetTask", &found).await;
    assert_eq!((result(&found), found.get("history")), ("Hello", None));
    let listed = json!({ "contextId": task["contextId"], "pageSize": 5, "includeArtifacts": true });
    let listed = result_of(&app, "solo", "ListTasks", &listed).await;
    assert_eq!(listed["tasks"][0]["id"], task["id"]);
    let card = result_of(&app, "solo", "GetExtendedAgentCard", &json!({})).await;
    let bindings = card["supportedInterfaces"].as_array().expect("interfaces");
    let bindings: Vec<_> = bindings.iter().map(|it| &it["protocolBinding"]).collect();
    assert_eq!(bindings, ["HTTP+JSON", "JSONRPC"]);
}

#[tokio::test]
async fn each_event_of_a_stream_is_a_result() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("Hello")]);
    let got = call(&app, "solo", "SendStreamingMessage", &message("m1", "hi")).await;
    assert_eq!(got.header("content-type"), "text/event-stream");
    let events = data(&got.text);
    assert!(events.iter().all(|event| event["id"] == 7), "{events:?}");
    let results: Vec<Value> = events.iter().map(|it| it["result"].clone()).collect();
    let kinds = kinds(&results);
    assert_eq!(kinds.first(), Some(&"task"));
    assert_eq!(kinds.last(), Some(&"statusUpdate"));
}

#[tokio::test]
async fn tasks_are_decided_cancelled_and_watched() {
    let app = careful("").spawn().await;
    app.provider
        .will("careful", [writes("a.txt"), says("done"), writes("a.txt")]);
    let task = result_of(&app, "careful", "SendMessage", &message("m1", "write")).await;
    let task = &task["task"];
    assert_eq!(state(task), "TASK_STATE_INPUT_REQUIRED");
    let approve = to_task(message("m2", "approve"), task);
    let done = result_of(&app, "careful", "SendMessage", &approve).await;
    assert_eq!(state(&done["task"]), "TASK_STATE_COMPLETED");

    let waiting = result_of(&app, "careful", "SendMessage", &message("m3", "write")).await;
    let id = &waiting["task"]["id"];
    let cancelled = result_of(&app, "careful", "CancelTask", &json!({ "id": id })).await;
    assert_eq!(state(&cancelled), "TASK_STATE_CANCELED");
    let again = call(&app, "careful", "CancelTask", &json!({ "id": id })).await;
    assert_eq!(error(&again), (-32002, "TASK_NOT_CANCELABLE".to_owned()));
    let late = call(&app, "careful", "SubscribeToTask", &json!({ "id": id })).await;
    assert_eq!(error(&late), (-32004, "UNSUPPORTED_OPERATION".to_owned()));
}

#[tokio::test]
async fn errors_have_the_codes_of_the_protocol() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let unknown = json!({ "id": "run_00000000-0000-7000-8000-000000000000" });
    for (method, params, expected) in [
        ("GetTask", unknown.clone(), (-32001, "TASK_NOT_FOUND")),
        (
            "GetTask",
            json!({ "id": "x:subscribe" }),
            (-32001, "TASK_NOT_FOUND"),
        ),
        ("GetTask", json!({}), (-32602, "INVALID_FIELD")),
        ("SendMessage", json!({}), (-32602, "INVALID_FIELD")),
        ("message/send", json!({}), (-32601, "METHOD_NOT_ALLOWED")),
    ] {
        let got = call(&app, "solo", method, &params).await;
        assert_eq!((got.status, &got.json()["id"]), (200, &json!(7)));
        let (code, reason) = error(&got);
        assert_eq!((code, reason.as_str()), expected, "{method} {params}");
    }
    let raw = |body: &'static str| {
        let request = app.request(Method::POST, "/a2a/solo").body(body);
        let request = request.header("content-type", "application/json");
        send(request)
    };
    let got = raw("{").await;
    assert_eq!(
        (got.json()["id"].clone(), error(&got).0),
        (Value::Null, -32700)
    );
    assert_eq!(error(&raw("[]").await).0, -32600);
    let old = raw(r#"{"jsonrpc":"2.0","id":"a","method":"GetTask","params":{}}"#).await;
    assert_eq!(error(&old), (-32009, "VERSION_NOT_SUPPORTED".to_owned()));
    assert_eq!(old.json()["id"], "a");
    let nobody = call(&app, "nobody", "SendMessage", &message("m1", "hi")).await;
    assert_eq!(error(&nobody).1, "AGENT_NOT_FOUND");
}
