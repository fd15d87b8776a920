//! Agent files that change under the daemon: in force soon, whole, and never worse than the last good one.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::provider::answer::{delegates, says};

fn field<'a>(listed: &'a Value, agent: &str, key: &str) -> &'a Value {
    let data = listed["data"].as_array().expect("data");
    let entry = data.iter().find(|entry| entry["name"] == agent);
    &entry.unwrap_or_else(|| panic!("{agent} is not in {listed}"))[key]
}

#[tokio::test]
async fn a_changed_file_is_loaded_soon() {
    let app = TestApp::setup()
        .agent("solo", "system_prompt = \"Old.\"")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let old = app.run("solo", "go").await;

    app.write_agent("solo", "system_prompt = \"New.\"");
    app.write_agent("extra", "");
    app.get_until("/agents/solo", |got| got.text.contains("New."))
        .await;
    app.get_until("/agents/extra", |got| got.status == 200)
        .await;
    let new = app.run("solo", "go").await;

    assert_eq!(
        app.provider.wait_for_request("solo", 1).await.system(),
        "Old."
    );
    assert_eq!(
        app.provider.wait_for_request("solo", 2).await.system(),
        "New."
    );
    assert_ne!(old["agent_version"], new["agent_version"]);
    std::fs::remove_file(app.path("agents/extra.toml")).expect("remove a file");
    app.get_until("/agents/extra", |got| got.status == 404)
        .await;
}

#[tokio::test]
async fn sighup_reloads_if_nothing_is_watched() {
    let app = TestApp::setup()
        .config("[agents]\nwatch = false")
        .agent("solo", "")
        .spawn()
        .await;

    app.write_agent("extra", "");
    app.daemon.signal("HUP");

    app.get_until("/agents/extra", |got| got.status == 200)
        .await;
}

#[tokio::test]
async fn a_file_that_becomes_invalid_keeps_its_last_valid_definition() {
    let app = TestApp::setup()
        .agent("solo", "system_prompt = \"Good.\"")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let listed = app.get("/agents").await.json();
    let version = field(&listed, "solo", "version").clone();
    assert_eq!(field(&listed, "solo", "valid"), &json!(true));
    assert_eq!(field(&listed, "solo", "error"), &json!(null));

    app.write(
        "agents/solo.toml",
        "name = \"solo\"\nmodel = \"anthropic/solo\"\nsystem_promt = \"Bad.\"\n",
    );
    let broken = |text: &str| text.contains("system_promt");
    let listed = app
        .get_until("/agents", |got| broken(&got.text))
        .await
        .json();

    let error = field(&listed, "solo", "error").as_str().expect("an error");
    for part in ["solo.toml", "3", "system_promt", "system_prompt"] {
        assert!(error.contains(part), "{part} is missing in {error}");
    }
    assert_eq!(field(&listed, "solo", "version"), &version);
    assert_eq!(field(&listed, "other", "valid"), &json!(true));
    let run = app.run("solo", "go").await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["agent_version"], version);
    assert_eq!(
        app.provider.wait_for_request("solo", 1).await.system(),
        "Good."
    );
}

#[tokio::test]
async fn a_directory_that_is_gone_for_a_moment_keeps_its_agents() {
    let app = TestApp::setup()
        .agent("solo", "system_prompt = \"Old.\"")
        .agent("extra", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));

    std::fs::rename(app.path("agents"), app.path("moved")).expect("move the directory");
    app.daemon.wait_for_log("keeping what it held").await;
    assert_eq!(app.run("solo", "go").await.output(), "done");

    // What changed meanwhile is loaded once it is there again.
    std::fs::remove_file(app.path("moved/extra.toml")).expect("remove a file");
    std::fs::rename(app.path("moved"), app.path("agents")).expect("move the directory");
    app.get_until("/agents/extra", |got| got.status == 404)
        .await;
    assert_eq!(app.get("/agents/solo").await.status, 200);
}

#[tokio::test]
async fn a_file_that_was_never_valid_is_listed_and_refused() {
    let app = TestApp::setup()
        .file("agents/blank.toml", "name = \" \"\nmodel = \"a/b\"\n")
        .file("agents/torn.toml", "name = \"torn\nmodel = ")
        .agent("fine", "")
        .spawn()
        .await;

    let listed = app.get("/agents").await.json();

    let names: Vec<_> = listed["data"]
        .as_array()
        .expect("data")
        .iter()
        .map(|entry| entry["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(names, ["blank", "fine", "torn"]);
    assert_eq!(field(&listed, "blank", "valid"), &json!(false));
    let error = field(&listed, "blank", "error").as_str().expect("an error");
    assert!(
        error.contains("agent config missing required field: name"),
        "{error}"
    );
    let error = field(&listed, "torn", "error").as_str().expect("an error");
    assert!(
        error.contains("failed to parse agent config \"torn\": "),
        "{error}"
    );
    for agent in ["blank", "torn"] {
        app.post(&format!("/agents/{agent}/runs"), &json!({}))
            .await
            .problem(422);
    }
}

#[tokio::test]
async fn a_run_keeps_the_version_it_started_with() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "system_prompt = \"Old.\"\nsub_agents = [\"reader\"]",
        )
        .agent("reader", "")
        .spawn()
        .await;
    let gate = crate::support::gate::Gate::closed();
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider
        .will("reader", [says("read").after_gate(&gate)]);

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("reader", 1).await;
    app.write_agent("planner", "system_prompt = \"New.\"");
    app.get_until("/agents/planner", |got| got.text.contains("New."))
        .await;
    gate.open();
    let ended = run.wait_for_end().await;

    assert_eq!(ended.output(), "done");
    assert_eq!(ended["agent_version"], run["agent_version"]);
    let second = app.provider.wait_for_request("planner", 2).await;
    assert_eq!(second.system(), "Old.");
    assert_eq!(second.tool_names(), ["call_agent"]);
}

#[tokio::test]
async fn the_first_of_several_directories_wins() {
    let app = TestApp::setup()
        .argument("--agents")
        .argument("mine")
        .argument("--agents")
        .argument("theirs")
        .file(
            "mine/solo.toml",
            "name = \"solo\"\nmodel = \"anthropic/mine\"\n",
        )
        .file(
            "theirs/solo.toml",
            "name = \"solo\"\nmodel = \"anthropic/theirs\"\n",
        )
        .file(
            "theirs/more.toml",
            "name = \"more\"\nmodel = \"anthropic/more\"\n",
        )
        .spawn()
        .await;
    app.provider.always("mine", |_| says("mine"));

    assert_eq!(app.run("solo", "go").await.output(), "mine");
    assert_eq!(app.get("/agents/more").await.status, 200);
}

#[tokio::test]
async fn secrets_are_never_shown() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;

    let mut reported = app.daemon.log();
    let id = run.id();
    for path in [
        "/agents".to_owned(),
        "/agents/solo".to_owned(),
        format!("/runs/{id}"),
        format!("/runs/{id}/events"),
        format!("/runs/{id}/messages"),
    ] {
        reported.push_str(&app.get(&path).await.text);
    }

    assert!(!reported.contains("key-of-"), "{reported}");
}
