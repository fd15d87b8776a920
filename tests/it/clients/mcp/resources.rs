//! Runs and trees as resources, and what keys may do.

use serde_json::{Value, json};

use crate::clients::mcp::{client, legacy, text};
use crate::support::app::{Setup, TestApp, key};
use crate::support::eventually;
use crate::support::provider::answer::{delegates, says};

fn with_keys(keys: &[(&str, &str)]) -> Setup {
    let sections: String = keys.iter().map(|(name, rest)| key(name, rest)).collect();
    TestApp::setup()
        .config(&sections)
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
}

fn read_json(read: &Value) -> Value {
    let content = &read["contents"][0];
    assert_eq!(content["mimeType"], "application/json");
    serde_json::from_str(content["text"].as_str().expect("a text")).expect("JSON")
}

#[tokio::test]
async fn runs_and_trees_can_be_read() {
    let app = with_keys(&[]).spawn().await;
    app.provider.will(
        "planner",
        [delegates([("reader", "read it")]), says("done")],
    );
    app.provider.will("reader", [says("summary")]);
    let client = client(&app);
    let id = app.run("planner", "plan it").await.id().to_owned();
    let listed = client.result("resources/list", json!({})).await;
    let run = &listed["resources"][0];
    assert_eq!(run["uri"], format!("axed://runs/{id}"));
    assert_eq!(
        (&run["title"], &run["description"]),
        (&json!("planner: completed"), &json!("plan it"))
    );
    let read = client
        .result("resources/read", json!({ "uri": run["uri"] }))
        .await;
    assert_eq!(read_json(&read)["content"], "done");
    let uri = format!("axed://runs/{id}/tree");
    let read = client.result("resources/read", json!({ "uri": uri })).await;
    assert_eq!(read_json(&read)["children"][0]["agent"], "reader");
    let templates = client.result("resources/templates/list", json!({})).await;
    assert_eq!(
        templates["resourceTemplates"][0]["uriTemplate"],
        "axed://runs/{id}"
    );
}

#[tokio::test]
async fn a_missing_resource_is_an_error_of_the_version() {
    let app = TestApp::spawn().await;
    for uri in ["axed://runs/nothing", "file:///etc/passwd"] {
        let error = client(&app)
            .error(200, "resources/read", json!({ "uri": uri }))
            .await;
        assert_eq!(error["code"], -32602, "{error}");
        let got = legacy(&app, "resources/read", json!({ "uri": uri })).await;
        assert_eq!(got.json()["error"]["code"], -32002, "{}", got.text);
    }
}

#[tokio::test]
async fn a_key_sees_and_does_what_its_scopes_and_globs_allow() {
    let keys = [
        ("ada", "scopes = [\"run\", \"read\", \"cancel\"]"),
        ("bob", "scopes = [\"run\", \"read\"]\nagents = [\"reader\"]"),
        ("eve", "scopes = [\"read\"]"),
        ("max", "scopes = [\"run\"]"),
    ];
    let app = with_keys(&keys).spawn().await;
    let by = |name: &str| client(&app).with_tasks().with_key(name);
    app.provider.will("planner", [says("done")]);
    let result = by("ada").call("planner", json!({ "input": "go" })).await;
    let id = result["_meta"]["axed/run_id"].as_str().expect("an id");

    let names = |tools: Value| -> Vec<Value> {
        let tools = tools["tools"].as_array().expect("tools").clone();
        tools.into_iter().map(|tool| tool["name"].clone()).collect()
    };
    let listed = by("bob").result("tools/list", json!({})).await;
    assert_eq!(names(listed), [json!("reader")]);
    let call = json!({ "name": "planner", "arguments": { "input": "go" } });
    let error = by("bob").error(200, "tools/call", call.clone()).await;
    assert_eq!(error["data"]["code"], "agent_not_found");
    let error = by("eve").error(403, "tools/call", call.clone()).await;
    assert_eq!(error["data"]["code"], "insufficient_scope");
    let error = by("max").error(403, "resources/list", json!({})).await;
    assert_eq!(error["data"]["code"], "insufficient_scope");
    for (name, method) in [("bob", "tasks/get"), ("eve", "tasks/get")] {
        let error = by(name).error(200, method, json!({ "taskId": id })).await;
        assert_eq!(error["data"]["code"], "run_not_found", "{name}");
    }
    let error = by("bob")
        .error(403, "tasks/cancel", json!({ "taskId": id }))
        .await;
    assert_eq!(error["data"]["code"], "insufficient_scope");
    let listed = by("eve").result("resources/list", json!({})).await;
    assert_eq!(listed["resources"], json!([]));
    let task = eventually("the task's end", async || {
        let task = by("ada").result("tasks/get", json!({ "taskId": id })).await;
        (task["status"] == "completed").then_some(task)
    })
    .await;
    assert_eq!(text(&task["result"]), "done");

    let got = client(&app)
        .with_key("nobody")
        .send("tools/list", json!({}))
        .await;
    assert_eq!(got.status, 401, "{}", got.text);
    assert_eq!(got.header("www-authenticate"), "Bearer");
    assert_eq!(got.json()["error"]["data"]["code"], "unauthorized");
}
