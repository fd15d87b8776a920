//! How two runs differ.

use serde_json::{Value, json};

use crate::forks::fork;
use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{calls, delegates, says};

fn field<'a>(changes: &'a Value, name: &str) -> &'a Value {
    let changes = changes["changes"].as_array().expect("changes");
    let found = changes.iter().find(|change| change["field"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {changes:#?}"))
}

#[tokio::test]
async fn trees_are_compared_by_the_calls_that_led_to_each_run() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "tools = [\"list_directory\"]")
        .spawn()
        .await;
    let lists = |path: &str| calls([("list_directory", json!({"path": path}))]);
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.will("reader", [lists("."), says("a book")]);
    let source = app.run("planner", "go").await;
    let reader = source.children().await.remove(0).id().to_owned();
    app.provider.will("planner", [says("longer")]);
    app.provider
        .will("reader", [lists("agents"), says("a book")]);
    let body = json!({"at": {"run": reader, "turn": 1}});
    let forked = fork(&app, source.id(), &body).await;

    let path = format!("/runs/{}/diff/{}", source.id(), forked.id());
    let diff = app.get(&path).await.json();
    let nodes = diff["nodes"].as_array().expect("nodes");
    let paths: Vec<&Value> = nodes.iter().map(|node| &node["path"]).collect();
    assert_eq!(paths, ["planner", "planner/1.1:reader"]);
    assert_eq!(nodes[1]["a"], reader);
    assert_eq!(
        nodes[0]["turns"].as_array().map(Vec::len),
        Some(1),
        "{diff}"
    );
    let last = field(&nodes[0]["turns"][0], "text");
    assert_eq!((&last["a"], &last["b"]), (&json!("done"), &json!("longer")));
    let first = field(&nodes[1]["turns"][0], "calls/1/arguments");
    assert_eq!(first["b"], json!({"path": "agents"}));
    let totals = &diff["totals"];
    assert_eq!(
        (&totals["a"]["model_calls"], &totals["b"]["model_calls"]),
        (&json!(4), &json!(3))
    );

    // A run that both trees have is not compared.
    app.provider.will("planner", [says("longer")]);
    let reusing = fork(&app, source.id(), &json!({"at": {"turn": 2}})).await;
    let path = format!("/runs/{}/diff/{}", source.id(), reusing.id());
    let diff = app.get(&path).await.json();
    assert_eq!(diff["nodes"][1]["a"], diff["nodes"][1]["b"]);

    let url = &app.daemon.url;
    let arguments = ["runs", "diff", source.id(), forked.id(), "--server", url];
    let output = axed_command(&app.path("."), &arguments).output().await;
    let output = output.expect("an output");
    let text = String::from_utf8_lossy(&output.stdout);
    for line in [
        "planner",
        "  turn 2",
        "    - done",
        "    + longer",
        "planner/1.1:reader",
    ] {
        assert!(
            text.lines().any(|it| it == line),
            "{line:?} is not in {text}"
        );
    }
}

#[tokio::test]
async fn a_run_that_is_not_there_has_no_differences() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one")]);
    let run = app.run("solo", "go").await;
    let none = "run_00000000-0000-7000-8000-000000000000";
    let path = format!("/runs/{}/diff/{none}", run.id());
    app.get(&path).await.problem(404);
}
