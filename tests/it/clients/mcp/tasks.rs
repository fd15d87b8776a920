//! Runs as tasks: long calls, approvals, cancellation, restarts, and who sees them.

use serde_json::{Value, json};

use crate::clients::mcp::{McpClient, client, messages, read_until, text};
use crate::support::app::TestApp;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{hangs, says};
use crate::tools::approvals::{careful, writes, wrote};

/// Calls an agent whose run takes long; the task's id.
async fn start(client: &McpClient<'_>, agent: &str) -> String {
    let task = client.call(agent, json!({ "input": "go" })).await;
    assert_eq!(task["resultType"], "task", "{task}");
    let id = task["taskId"].as_str().expect("an id");
    assert_eq!(task["_meta"]["axed/run_id"], id);
    id.to_owned()
}

/// The task once it has this status. Clients poll, and so does this story.
async fn until(client: &McpClient<'_>, id: &str, status: &str) -> Value {
    eventually(status, async || {
        let task = client.result("tasks/get", json!({ "taskId": id })).await;
        (task["status"] == status).then_some(task)
    })
    .await
}

#[tokio::test]
async fn a_long_run_is_a_task_that_survives_a_restart() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [hangs(), says("at last").after_gate(&gate)]);
    let id = start(&client(&app).with_tasks(), "solo").await;
    app.provider.wait_for_request("solo", 1).await;
    app.crash_and_restart().await;
    let client = client(&app).with_tasks();
    let task = client.result("tasks/get", json!({ "taskId": id })).await;
    assert_eq!(task["status"], "working");
    assert_eq!(
        (&task["ttlMs"], &task["pollIntervalMs"]),
        (&Value::Null, &json!(1000))
    );
    gate.open();
    let task = until(&client, &id, "completed").await;
    assert_eq!(text(&task["result"]), "at last");
    assert_eq!(task["resultType"], "complete");
    assert_eq!(app.find(&id).await.output(), "at last");
}

#[tokio::test]
async fn a_short_run_is_answered_at_once() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let client = client(&app).with_tasks();
    // A busy machine may need longer than the second after which a call becomes a task.
    let result = eventually("an answer at once", async || {
        let result = client.call("solo", json!({ "input": "go" })).await;
        (result["resultType"] == "complete").then_some(result)
    })
    .await;
    assert_eq!(text(&result), "done");
}

#[tokio::test]
async fn an_approval_is_an_input_request_of_the_task() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let client = client(&app).with_tasks();
    let id = start(&client, "careful").await;
    let task = until(&client, &id, "input_required").await;
    let requests = task["inputRequests"].as_object().expect("requests");
    let (key, _) = requests.iter().next().expect("a request");
    let content = json!({ "decision": "approve" });
    let responses = json!({ key: { "action": "accept", "content": content }, "other": {} });
    let params = json!({ "taskId": id, "inputResponses": responses });
    let acknowledged = client.result("tasks/update", params.clone()).await;
    assert_eq!(acknowledged["resultType"], "complete");
    let task = until(&client, &id, "completed").await;
    assert_eq!(text(&task["result"]), "done");
    assert!(wrote(&app, "a"));
    // What was answered before is ignored.
    client.result("tasks/update", params).await;
}

#[tokio::test]
async fn a_subscription_gets_the_states_of_its_tasks() {
    let app = careful("").spawn().await;
    app.provider.will("careful", [writes("a"), says("done")]);
    let client = client(&app).with_tasks();
    let id = start(&client, "careful").await;
    let unknown = "run_00000000-0000-7000-8000-000000000000";
    let filter = json!({ "taskIds": [id, unknown], "toolsListChanged": true });
    let params = json!({ "notifications": filter });
    let request = client.request("subscriptions/listen", params.clone());
    let mut stream = request.send().await.expect("a response");
    read_until(&mut stream, "\"input_required\"").await;
    let task = until(&client, &id, "input_required").await;
    let requests = task["inputRequests"].as_object().expect("requests");
    let (key, _) = requests.iter().next().expect("a request");
    let responses = json!({ key: { "action": "accept", "content": { "decision": "approve" } } });
    let update = json!({ "taskId": id, "inputResponses": responses });
    client.result("tasks/update", update).await;
    // It ends with its last task.
    read_until(&mut stream, "\"id\":7,\"result\"").await;

    let seen = messages(&client.send("subscriptions/listen", params).await);
    let [acknowledged, notified, end] = seen.as_slice() else {
        panic!("{seen:#?}");
    };
    let method = "notifications/subscriptions/acknowledged";
    assert_eq!(acknowledged["method"], method);
    let accepted = &acknowledged["params"]["notifications"];
    assert_eq!(accepted, &json!({ "taskIds": [id] }));
    assert_eq!(notified["method"], "notifications/tasks");
    assert_eq!(notified["params"]["status"], "completed");
    assert_eq!(text(&notified["params"]["result"]), "done");
    assert_eq!(
        (&end["id"], &end["result"]["resultType"]),
        (&json!(7), &json!("complete"))
    );
    for meta in [
        &acknowledged["params"]["_meta"],
        &notified["params"]["_meta"],
        &end["result"]["_meta"],
    ] {
        assert_eq!(meta["io.modelcontextprotocol/subscriptionId"], 7);
    }
}

#[tokio::test]
async fn a_declined_form_denies_the_call() {
    let app = careful("").spawn().await;
    app.provider
        .will("careful", [writes("a"), says("understood")]);
    let client = client(&app).with_tasks();
    let id = start(&client, "careful").await;
    let task = until(&client, &id, "input_required").await;
    let requests = task["inputRequests"].as_object().expect("requests");
    let (key, _) = requests.iter().next().expect("a request");
    let responses = json!({ key: { "action": "decline" } });
    let params = json!({ "taskId": id, "inputResponses": responses });
    client.result("tasks/update", params).await;
    until(&client, &id, "completed").await;
    assert!(!wrote(&app, "a"));
}

#[tokio::test]
async fn a_task_can_be_cancelled() {
    let app = TestApp::setup()
        .config("[data.retention]\nage = \"1h\"")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    let client = client(&app).with_tasks();
    let id = start(&client, "solo").await;
    client.result("tasks/cancel", json!({ "taskId": id })).await;
    let task = until(&client, &id, "cancelled").await;
    assert_eq!(task["statusMessage"], "cancelled by its MCP client");
    assert!(
        task["ttlMs"].as_u64().is_some_and(|ttl| ttl >= 3_600_000),
        "{task}"
    );
    assert_eq!(app.find(&id).await.status(), "cancelled");
}

#[tokio::test]
async fn tasks_need_a_client_that_declares_them() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let params = json!({ "taskId": "run_00000000-0000-7000-8000-000000000000" });
    for method in ["tasks/get", "tasks/cancel", "tasks/update"] {
        let error = client(&app).error(400, method, params.clone()).await;
        assert_eq!(error["code"], -32021);
    }
    let error = client(&app)
        .with_tasks()
        .error(200, "tasks/get", params)
        .await;
    assert_eq!(
        (&error["code"], &error["data"]["code"]),
        (&json!(-32602), &json!("run_not_found"))
    );
}
