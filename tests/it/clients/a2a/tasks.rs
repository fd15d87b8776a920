//! Tasks: cancellation, lists, and what a key may see.

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::{Value, json};

use crate::clients::a2a::{error, get, message, post, request, state, task_of, to_task};
use crate::support::app::{TestApp, send};
use crate::support::provider::answer::{hangs, says};
use crate::tools::approvals::{careful, writes};

fn id(task: &Value) -> &str {
    task["id"].as_str().expect("an id")
}

#[tokio::test]
async fn a_task_is_cancelled_once() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.will("solo", [hangs()]);
    let mut body = message("m1", "go");
    body["configuration"] = json!({ "returnImmediately": true });
    let task = task_of(&app, "solo", &body).await;
    let path = format!("solo/tasks/{}:cancel", id(&task));
    let got = post(&app, &path, &json!({})).await;
    assert_eq!(got.status, 200, "{}", got.text);
    assert_eq!(state(&got.json()), "TASK_STATE_CANCELED");
    let got = post(&app, &path, &json!({})).await;
    assert_eq!(
        error(&got),
        (400, "TASK_NOT_CANCELABLE".into(), "run_terminal".into())
    );

    let not_found = (404, "TASK_NOT_FOUND".to_owned(), "run_not_found".to_owned());
    let other = get(&app, &format!("other/tasks/{}", id(&task))).await;
    assert_eq!(error(&other), not_found);
    let nothing = get(&app, "solo/tasks/nothing").await;
    assert_eq!(error(&nothing), not_found);
    let got = post(&app, &format!("solo/tasks/{}", id(&task)), &json!({})).await;
    assert_eq!(error(&got).2, "route_not_found");
}

#[tokio::test]
async fn a_key_finds_only_its_own_tasks() {
    let keys = [
        ("ada", "[\"run\", \"read\", \"cancel\"]"),
        ("bob", "[\"run\", \"read\", \"cancel\"]"),
        ("eve", "[\"read\"]"),
    ];
    let keys = keys.map(|(name, scopes)| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = {scopes}\n")
    });
    let app = TestApp::setup()
        .config(&keys.concat())
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let send_as = async |key: &str, method: Method, path: &str, body: &Value| {
        send(request(&app, method, path).bearer_auth(key).json(body)).await
    };
    let got = send_as(
        "ada",
        Method::POST,
        "solo/message:send",
        &message("m1", "go"),
    )
    .await;
    let task = got.json()["task"].clone();
    let path = format!("solo/tasks/{}", id(&task));
    let found = send_as("ada", Method::GET, &path, &json!({})).await;
    assert_eq!(state(&found.json()), "TASK_STATE_COMPLETED");

    let cancel = format!("{path}:cancel");
    let subscribe = format!("{path}:subscribe");
    let answer = to_task(message("m2", "approve"), &task);
    for (method, path, body) in [
        (Method::GET, path.as_str(), &json!({})),
        (Method::POST, &cancel, &json!({})),
        (Method::POST, &subscribe, &json!({})),
        (Method::POST, "solo/message:send", &answer),
    ] {
        let got = send_as("bob", method, path, body).await;
        assert_eq!(
            error(&got),
            (404, "TASK_NOT_FOUND".into(), "run_not_found".into()),
            "{path}"
        );
    }
    // The same id of a message is another one of another key.
    let got = send_as(
        "bob",
        Method::POST,
        "solo/message:send",
        &message("m1", "go"),
    )
    .await;
    assert_ne!(got.json()["task"]["id"], task["id"]);

    let got = send_as(
        "eve",
        Method::POST,
        "solo/message:send",
        &message("m1", "go"),
    )
    .await;
    assert_eq!(
        error(&got),
        (
            403,
            "INSUFFICIENT_SCOPE".into(),
            "insufficient_scope".into()
        )
    );
    let got = send_as("eve", Method::POST, &cancel, &json!({})).await;
    assert_eq!(error(&got).0, 403);
}

#[tokio::test]
async fn a_card_needs_a_key_if_there_are_keys() {
    let sha256 = KeyHash::digest(b"eve");
    let key = format!("[auth.keys.eve]\nsha256 = \"{sha256}\"\nscopes = [\"read\"]\n");
    let app = TestApp::setup()
        .config(&key)
        .agent("solo", "")
        .spawn()
        .await;
    for path in [
        "/a2a/solo/.well-known/agent-card.json",
        "/.well-known/agent-card.json",
    ] {
        let got = app.get(path).await;
        assert_eq!(
            error(&got),
            (401, "UNAUTHORIZED".into(), "unauthorized".into())
        );
        assert_eq!(got.header("www-authenticate"), "Bearer");
        let card = send(app.request(Method::GET, path).bearer_auth("eve"))
            .await
            .json();
        let scheme = &card["securitySchemes"]["key"]["httpAuthSecurityScheme"];
        assert_eq!(scheme["scheme"], "Bearer");
        assert_eq!(
            card["securityRequirements"],
            json!([{ "schemes": { "key": { "list": [] } } }])
        );
    }
}

#[tokio::test]
async fn tasks_are_listed_by_their_last_change() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("other", "")
        .spawn()
        .await;
    app.provider
        .will("solo", [hangs(), says("one"), says("two"), says("three")]);
    app.provider.will("other", [says("else")]);
    let mut body = message("m0", "go");
    body["configuration"] = json!({ "returnImmediately": true });
    let first = task_of(&app, "solo", &body).await;
    app.provider.wait_for_requests(1).await;
    let mut tasks = Vec::new();
    for n in 1..4 {
        let mut body = message(&format!("m{n}"), "go");
        body["message"]["contextId"] = json!(format!("context-{}", n % 2));
        tasks.push(task_of(&app, "solo", &body).await);
    }
    task_of(&app, "other", &message("m1", "go")).await;
    let ids = |page: &Value| -> Vec<String> {
        let tasks = page["tasks"].as_array().expect("tasks").iter();
        tasks.map(|task| id(task).to_owned()).collect()
    };
    let id_of = |at: usize| id(&tasks[at]).to_owned();
    let list = async |query: &str| {
        let got = get(&app, &format!("solo/tasks?{query}")).await;
        assert_eq!(got.status, 200, "{}", got.text);
        got.json()
    };
    let page = list("pageSize=2").await;
    assert_eq!(ids(&page), [id_of(2), id_of(1)]);
    assert_eq!(
        (&page["totalSize"], &page["pageSize"]),
        (&json!(4), &json!(2))
    );
    assert_eq!(page["tasks"][0].get("artifacts"), None);
    let token = page["nextPageToken"].as_str().expect("a token").to_owned();
    // The oldest task is the one that changes last.
    post(
        &app,
        &format!("solo/tasks/{}:cancel", id(&first)),
        &json!({}),
    )
    .await;
    let page = list(&format!("pageSize=2&pageToken={token}")).await;
    assert_eq!(ids(&page), [id_of(0)]);
    assert_eq!(page["nextPageToken"], "");
    let page = list("includeArtifacts=true&historyLength=1&pageSize=2").await;
    assert_eq!(ids(&page), [id(&first).to_owned(), id_of(2)]);
    assert_eq!(
        page["tasks"][1]["artifacts"][0]["parts"][0]["text"],
        "three"
    );
    assert_eq!(
        page["tasks"][1]["history"].as_array().map(Vec::len),
        Some(1)
    );

    assert_eq!(
        ids(&list("contextId=context-1").await),
        [id_of(2), id_of(0)]
    );
    assert_eq!(ids(&list("status=TASK_STATE_CANCELED").await), [id(&first)]);
    assert_eq!(list("status=TASK_STATE_WORKING").await["totalSize"], 0);
    assert_eq!(
        list("statusTimestampAfter=2999-01-01T00:00:00Z").await["tasks"],
        json!([])
    );
}

#[tokio::test]
async fn a_run_without_a_session_is_found_by_its_own_context() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await.id().to_owned();
    let task = get(&app, &format!("solo/tasks/{run}")).await.json();
    assert_eq!(task["contextId"], run.as_str());
    for (agent, query, count) in [
        ("solo", "", 1),
        ("solo", "&status=TASK_STATE_COMPLETED", 1),
        ("solo", "&status=TASK_STATE_WORKING", 0),
        ("solo", "&statusTimestampAfter=2999-01-01T00:00:00Z", 0),
        ("other", "", 0),
    ] {
        let path = format!("{agent}/tasks?contextId={run}{query}");
        let page = get(&app, &path).await.json();
        assert_eq!(page["totalSize"], count, "{path}");
        assert_eq!(page["tasks"].as_array().map(Vec::len), Some(count));
    }
}

#[tokio::test]
async fn a_wrong_filter_is_refused() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    for wrong in [
        "pageSize=0",
        "pageSize=101",
        "pageToken=x",
        "status=DONE",
        "historyLength=-1",
        "statuz=x",
    ] {
        let got = get(&app, &format!("solo/tasks?{wrong}")).await;
        assert_eq!(error(&got).0, 400, "{wrong}: {}", got.text);
    }
}

#[tokio::test]
async fn a_list_shows_which_tasks_require_input_and_only_a_keys_own() {
    let keys = ["ada", "bob"].map(|name| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"run\", \"read\"]\n")
    });
    let app = careful("").config(&keys.concat()).spawn().await;
    app.provider.always("careful", |_| writes("a"));
    let send_as = async |key: &str, method: Method, path: &str, body: &Value| {
        send(request(&app, method, path).bearer_auth(key).json(body)).await
    };
    let got = send_as(
        "ada",
        Method::POST,
        "careful/message:send",
        &message("m1", "write"),
    )
    .await;
    let task = got.json()["task"].clone();
    assert_eq!(state(&task), "TASK_STATE_INPUT_REQUIRED");
    let none = json!({});
    for (key, status, count) in [
        ("ada", "TASK_STATE_INPUT_REQUIRED", 1),
        ("ada", "TASK_STATE_WORKING", 0),
        ("bob", "TASK_STATE_INPUT_REQUIRED", 0),
    ] {
        let path = format!("careful/tasks?status={status}");
        let page = send_as(key, Method::GET, &path, &none).await.json();
        assert_eq!(page["totalSize"], count, "{key} {status}");
        assert_eq!(page["tasks"].as_array().map(Vec::len), Some(count));
    }
    let configs = format!("careful/tasks/{}/pushNotificationConfigs", id(&task));
    let got = send_as("bob", Method::GET, &configs, &none).await;
    assert_eq!(error(&got).1, "TASK_NOT_FOUND");
}
