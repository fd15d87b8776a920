//! Push notifications: configured with a message or for a task, delivered over a crash, removed.

use reqwest::Method;
use serde_json::{Value, json};

use crate::clients::a2a::{error, get, message, post, request, state, task_of, to_task};
use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{hangs, says};
use crate::support::webhook_receiver::{ReceivedMessage, ReceiverReply, WebhookReceiver};
use crate::tools::approvals::{careful, writes};

const CONFIG: &str = "[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nfirst_retry_ms = 1";

fn background(id: &str, config: &Value) -> Value {
    let mut body = message(id, "go");
    body["configuration"] =
        json!({ "returnImmediately": true, "taskPushNotificationConfig": config });
    body
}

fn configs(task: &Value, agent: &str) -> String {
    let id = task["id"].as_str().expect("an id");
    format!("{agent}/tasks/{id}/pushNotificationConfigs")
}

/// The states that the messages report, of this task.
fn states(messages: &[ReceivedMessage], task: &Value) -> Vec<String> {
    let states = messages.iter().map(|message| {
        assert_eq!(message.header("content-type"), "application/a2a+json");
        let update = message.json()["statusUpdate"].clone();
        assert_eq!(
            (&update["taskId"], &update["contextId"]),
            (&task["id"], &task["contextId"])
        );
        assert!(update["status"]["timestamp"].is_string(), "{update}");
        update["status"]["state"]
            .as_str()
            .expect("a state")
            .to_owned()
    });
    states.collect()
}

async fn remove(app: &TestApp, path: &str) -> ApiResponse {
    send(request(app, Method::DELETE, path)).await
}

fn solo() -> Setup {
    TestApp::setup().config(CONFIG).agent("solo", "")
}

#[tokio::test]
async fn a_message_can_bring_a_receiver_of_its_tasks_states() {
    let receiver = WebhookReceiver::start().await;
    let app = careful("").config(CONFIG).spawn().await;
    // A receiver that is added after the request for an approval gets no message about it.
    let gate = Gate::closed();
    let answers = [writes("a").after_gate(&gate), says("done")];
    app.provider.will("careful", answers);
    let config = json!({ "url": receiver.url("/hook?a=b"), "token": "t0ken",
        "authentication": { "scheme": "Bearer", "credentials": "secret" } });
    let task = task_of(&app, "careful", &background("m1", &config)).await;
    gate.open();
    let waiting = async |count: usize| receiver.wait_for_messages(count).await;
    // A run that starts before its receiver is known is not reported as started.
    let mut messages = waiting(1).await;
    while !states(&messages, &task).contains(&"TASK_STATE_INPUT_REQUIRED".to_owned()) {
        messages = waiting(messages.len() + 1).await;
    }
    let last = messages.last().expect("a message");
    assert_eq!(last.uri.to_string(), "/hook?a=b");
    assert_eq!(last.header("x-a2a-notification-token"), "t0ken");
    assert_eq!(last.header("authorization"), "Bearer secret");
    assert!(last.header("webhook-id").starts_with("whd_"));
    task_of(&app, "careful", &to_task(message("m2", "approve"), &task)).await;
    let messages = waiting(messages.len() + 1).await;
    assert_eq!(
        states(&messages, &task).last().map(String::as_str),
        Some("TASK_STATE_COMPLETED")
    );

    let got = get(&app, &configs(&task, "careful")).await.json();
    let shown = &got["configs"][0];
    assert_eq!(
        (&shown["id"], &shown["token"]),
        (&json!("m1"), &json!("t0ken"))
    );
    assert_eq!(shown["authentication"], json!({ "scheme": "Bearer" }));
    // A receiver that comes after the end is notified of it.
    let late = json!({ "id": "late", "url": receiver.url("/late") });
    let got = post(&app, &configs(&task, "careful"), &late).await;
    assert_eq!(
        (got.status, &got.json()["taskId"]),
        (200, &task["id"]),
        "{}",
        got.text
    );
    let messages = waiting(messages.len() + 1).await;
    assert_eq!(messages.last().expect("a message").uri, "/late");
}

#[tokio::test]
async fn a_repeated_message_notifies_nobody_again() {
    let receiver = WebhookReceiver::start().await;
    let app = solo().spawn().await;
    app.provider.will("solo", [says("done")]);
    let mut body = message("m1", "go");
    let config = json!({ "url": receiver.url("/hook") });
    body["configuration"] = json!({ "taskPushNotificationConfig": config });
    let task = task_of(&app, "solo", &body).await;
    let mut messages = receiver.wait_for_messages(1).await;
    while !states(&messages, &task).contains(&"TASK_STATE_COMPLETED".to_owned()) {
        messages = receiver.wait_for_messages(messages.len() + 1).await;
    }
    let id = task["id"].as_str().expect("an id");
    let deliveries = async || {
        let got = app.get(&format!("/runs/{id}/deliveries")).await.json();
        got["data"].as_array().map(Vec::len)
    };
    let count = deliveries().await;
    assert_eq!(task_of(&app, "solo", &body).await["id"], id);
    assert_eq!(deliveries().await, count);

    let path = format!("{}/m1", configs(&task, "solo"));
    assert_eq!(remove(&app, &path).await.status, 200);
    assert_eq!(task_of(&app, "solo", &body).await["id"], id);
    assert_eq!(error(&get(&app, &path).await).0, 404);
}

#[tokio::test]
async fn a_notification_is_delivered_although_the_daemon_crashes() {
    let receiver = WebhookReceiver::start().await;
    let mut app = solo().spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [hangs(), says("done").after_gate(&gate)]);
    let config = json!({ "url": receiver.url("/hook") });
    let task = task_of(&app, "solo", &background("m1", &config)).await;
    app.provider.wait_for_requests(1).await;
    app.crash_and_restart().await;
    app.provider.wait_for_requests(2).await;
    let before = receiver.messages().len();
    receiver.will([ReceiverReply::Status(503)]);
    gate.open();
    // The first attempt fails, the second is the same message.
    let messages = receiver.wait_for_messages(before + 2).await;
    assert_eq!(
        states(&messages, &task).last().map(String::as_str),
        Some("TASK_STATE_COMPLETED")
    );
    let path = configs(&task, "solo");
    let found = get(&app, &format!("{path}/m1")).await.json();
    assert_eq!(found["url"], receiver.url("/hook"));
}

#[tokio::test]
async fn a_receiver_that_was_removed_gets_nothing_more() {
    let receiver = WebhookReceiver::start().await;
    let app = solo().spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let mut body = message("m1", "go");
    body["configuration"] = json!({ "returnImmediately": true });
    let task = task_of(&app, "solo", &body).await;
    app.provider.wait_for_requests(1).await;
    let path = configs(&task, "solo");
    for name in ["kept", "removed"] {
        let config = json!({ "id": name, "url": receiver.url(&format!("/{name}")) });
        let got = post(&app, &path, &config).await;
        assert_eq!(got.status, 200, "{}", got.text);
    }
    for _ in 0..2 {
        let got = remove(&app, &format!("{path}/removed")).await;
        assert_eq!((got.status, got.json()), (200, json!({})));
    }
    let got = get(&app, &format!("{path}/removed")).await;
    assert_eq!(
        error(&got),
        (404, "TASK_NOT_FOUND".into(), "run_not_found".into())
    );
    gate.open();
    let messages = receiver.wait_for_messages(1).await;
    assert_eq!(messages[0].uri, "/kept");
    assert_eq!(states(&messages, &task), ["TASK_STATE_COMPLETED"]);
    let deliveries = app
        .get(&format!(
            "/runs/{}/deliveries",
            task["id"].as_str().expect("an id")
        ))
        .await;
    assert_eq!(
        deliveries.json()["data"].as_array().map(Vec::len),
        Some(1),
        "{}",
        deliveries.text
    );
}

#[tokio::test]
async fn receivers_that_may_not_be_reached_are_refused() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    for (config, field) in [
        (json!({}), "url"),
        (json!({ "url": "ftp://a" }), "url"),
        (json!({ "url": "http://127.0.0.1:9/hook" }), "url"),
        (
            json!({ "url": "https://example.com", "token": "a\nb" }),
            "token",
        ),
        (json!({ "url": "https://example.com", "id": "a/b" }), "id"),
    ] {
        let got = post(&app, "solo/message:send", &background("m1", &config)).await;
        assert_eq!(error(&got).0, 400, "{}", got.text);
        let violation = &got.json()["error"]["details"][1]["fieldViolations"][0]["field"];
        assert_eq!(
            violation,
            &json!(format!("configuration.taskPushNotificationConfig.{field}"))
        );
    }
    assert_eq!(app.provider.requests().len(), 0);
    let task = task_of(&app, "solo", &message("m1", "go")).await;
    assert_eq!(state(&task), "TASK_STATE_COMPLETED");
    let got = post(
        &app,
        &configs(&task, "solo"),
        &json!({ "url": "http://10.0.0.1/" }),
    )
    .await;
    assert_eq!(error(&got).0, 400, "{}", got.text);
    for n in 0..16 {
        let config = json!({ "id": format!("c{n}"), "url": "https://hooks.example/" });
        assert_eq!(
            post(&app, &configs(&task, "solo"), &config).await.status,
            200
        );
    }
    let got = post(
        &app,
        &configs(&task, "solo"),
        &json!({ "url": "https://hooks.example/" }),
    )
    .await;
    assert!(got.text.contains("at most 16"), "{}", got.text);
}
