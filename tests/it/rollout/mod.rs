//! Rollouts: a share of the runs gets a candidate, which is taken off if it is worse, or becomes the current version.

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::provider::answer::{ScriptedAnswer, delegates, fails, says};
use crate::support::run::Run;

mod cluster;
mod promotion;
mod take_off;

/// The candidate's file.
const CANDIDATE: &str = "name = \"solo\"\nmodel = \"anthropic/next\"\n";

fn rollout(percent: u32, more: &str) -> String {
    format!("[rollout]\ncandidate = \"solo.next.toml\"\npercent = {percent}\n{more}")
}

fn with_candidate(percent: u32, more: &str) -> Setup {
    let setup = TestApp::setup().agent("solo", &rollout(percent, more));
    setup.file("agents/solo.next.toml", CANDIDATE)
}

/// Both versions answer so.
fn answer(app: &TestApp, current: fn() -> ScriptedAnswer, candidate: fn() -> ScriptedAnswer) {
    app.provider.always("solo", move |_| current());
    app.provider.always("next", move |_| candidate());
}

/// Which version answered, which the run has to say.
fn variant(run: &Run<'_>) -> String {
    let expected = match run["model"].as_str() {
        Some("solo") => "current",
        _ => "candidate",
    };
    assert_eq!(run["variant"], expected, "{}", run["model"]);
    expected.to_owned()
}

/// The code of a problem with this status.
fn code(response: &ApiResponse, status: u16) -> String {
    response.problem(status);
    response.json()["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

async fn session(app: &TestApp, name: &str) -> String {
    let body = json!({"input": "go", "session": name});
    variant(&app.run_with("solo", body).await)
}

/// Which versions so many sessions get.
async fn sessions(app: &TestApp, count: usize) -> Vec<String> {
    let names: Vec<String> = (0..count)
        .map(|number| format!("session-{number}"))
        .collect();
    join_all(names.iter().map(|name| session(app, name))).await
}

async fn run_many(app: &TestApp, count: usize) -> Vec<String> {
    let runs = join_all((0..count).map(|_| app.run("solo", "go"))).await;
    runs.iter()
        .map(|run| run["variant"].as_str().unwrap_or("none").to_owned())
        .collect()
}

fn candidates(variants: &[String]) -> usize {
    variants.iter().filter(|it| *it == "candidate").count()
}

async fn set_percent(app: &TestApp, percent: u32) -> Value {
    let body = json!({ "percent": percent });
    let set = app.post("/agents/solo/rollout", &body).await;
    assert_eq!(set.status, 200, "{}", set.text);
    set.json()
}

async fn versions(app: &TestApp) -> Value {
    app.get("/agents/solo/versions").await.json()
}

async fn wait_until_loaded(app: &TestApp, description: &str) {
    let is_loaded = |got: &ApiResponse| got.json()["description"] == *description;
    app.get_until("/agents/solo", is_loaded).await;
}

#[tokio::test]
async fn a_share_of_the_sessions_gets_the_candidate_and_keeps_it() {
    let mut app = with_candidate(40, "").spawn().await;
    answer(&app, || says("old"), || says("new"));
    let first = sessions(&app, 40).await;
    assert!((6..=28).contains(&candidates(&first)), "{first:?}");
    assert_eq!(sessions(&app, 40).await, first);
    app.crash_and_restart().await;
    assert_eq!(sessions(&app, 40).await, first);

    // The candidate gets nothing now, and its sessions move back.
    let set = set_percent(&app, 0).await;
    assert_eq!(
        (&set["percent"], &set["file"]),
        (&json!(0.0), &json!("solo.next.toml"))
    );
    assert_eq!(candidates(&sessions(&app, 40).await), 0);
    // Sessions stay with what they have; new ones get the candidate.
    set_percent(&app, 100).await;
    assert_eq!(candidates(&sessions(&app, 40).await), 0);
    assert_eq!(session(&app, "another").await, "candidate");
    app.crash_and_restart().await;
    assert_eq!(session(&app, "one-more").await, "candidate");

    // A changed percent of the file wins.
    app.write_agent("solo", &format!("description = \"b\"\n{}", rollout(0, "")));
    wait_until_loaded(&app, "b").await;
    assert_eq!(session(&app, "one-more").await, "current");
}

#[tokio::test]
async fn runs_without_a_session_are_shared_and_children_get_the_current_version() {
    let app = with_candidate(50, "")
        .agent("boss", "sub_agents = [\"solo\"]\n")
        .spawn()
        .await;
    answer(&app, || says("old"), || says("new"));
    let got = run_many(&app, 40).await;
    assert!((5..=35).contains(&candidates(&got)), "{got:?}");
    set_percent(&app, 100).await;
    assert_eq!(candidates(&run_many(&app, 5).await), 5);
    app.provider
        .will("boss", [delegates([("solo", "go")]), says("done")]);
    let boss = app.run("boss", "go").await;
    let child = &boss.children().await[0];
    assert_eq!(
        (&boss["variant"], &child["variant"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(child["model"], "solo");

    // The candidate is no agent of its own.
    let listed = app.get("/agents").await.json();
    let names: Vec<&Value> = listed["data"]
        .as_array()
        .expect("agents")
        .iter()
        .map(|it| &it["name"])
        .collect();
    assert_eq!(names, ["boss", "solo"]);
    let called = app
        .post("/agents/solo.next/runs", &json!({"input": "go"}))
        .await;
    assert_eq!(code(&called, 404), "agent_not_found");

    // Lists and sums know what runs got.
    let page = app.get("/runs?variant=candidate&limit=200").await.json();
    let found = page["data"].as_array().expect("runs");
    assert_eq!(found.len(), candidates(&got) + 5);
    assert!(found.iter().all(|run| run["variant"] == "candidate"));
    let id = found[0]["id"].as_str().expect("an id");
    app.post(
        &format!("/runs/{id}/scores"),
        &json!({"name": "thumbs", "value": true}),
    )
    .await;
    let sums = app.get("/scores?by=variant").await.json();
    assert_eq!(
        (&sums["data"][0]["variant"], &sums["data"][0]["n"]),
        (&json!("candidate"), &json!(1))
    );
    let versions = versions(&app).await;
    let of = |variant: &str| {
        let data = versions["data"].as_array().expect("versions").clone();
        data.into_iter()
            .find(|it| it["variant"] == variant)
            .expect("a version")
    };
    let (current, candidate) = (of("current"), of("candidate"));
    assert_eq!(current["runs"], json!(40 - candidates(&got) + 1));
    assert_eq!(candidate["runs"], json!(candidates(&got) + 5));
    assert_eq!(candidate["scores"]["thumbs"], json!({"n": 1, "mean": 1.0}));
    assert_eq!(versions["rollout"]["candidate"], candidate["version"]);
    let dry = app
        .post("/agents/solo/dry-run", &json!({"input": "go"}))
        .await;
    assert_eq!(dry.json()["agent_version"], current["version"]);
}

#[tokio::test]
async fn a_fork_of_a_candidates_run_is_not_rolled_out() {
    let app = with_candidate(100, "").spawn().await;
    answer(&app, || says("old"), || says("new"));
    let run = app.run("solo", "go").await;
    assert_eq!(variant(&run), "candidate");
    let fork = app
        .post(
            &format!("/runs/{}/fork", run.id()),
            &json!({"at": {"turn": 1}}),
        )
        .await
        .json();
    let fork = app.find(fork["id"].as_str().expect("an id")).await;
    let fork = fork.wait_for_end().await;
    assert_eq!(
        (&fork["variant"], &fork["model"]),
        (&Value::Null, &json!("next"))
    );
}

#[tokio::test]
async fn a_broken_candidate_is_an_error_of_the_file_that_names_it() {
    let app = TestApp::setup()
        .agent("solo", &rollout(100, ""))
        .spawn()
        .await;
    answer(&app, || says("old"), || says("new"));
    let refused = app.post("/agents/solo/runs", &json!({"input": "go"})).await;
    assert_eq!(code(&refused, 422), "agent_invalid");
    assert!(
        refused.text.contains("there is no file"),
        "{}",
        refused.text
    );

    app.write("agents/solo.next.toml", CANDIDATE);
    app.get_until("/agents/solo", |got| got.json()["valid"] == true)
        .await;
    assert_eq!(variant(&app.run("solo", "go").await), "candidate");

    // The last good one stays.
    for (text, why) in [
        ("name = \"solo\"\nmodel = 1\n", "model"),
        (
            "name = \"other\"\nmodel = \"anthropic/next\"\n",
            "is not solo",
        ),
    ] {
        app.write("agents/solo.next.toml", text);
        let is_broken = |got: &ApiResponse| {
            let error = got.json()["error"].as_str().unwrap_or_default().to_owned();
            error.contains("rollout.candidate") && error.contains(why)
        };
        app.get_until("/agents/solo", is_broken).await;
        assert_eq!(variant(&app.run("solo", "go").await), "candidate");
    }
    for (more, why) in [
        ("scorers = [\"fine\"]\n", "has no such scorer"),
        ("[gate]\ngates = [\"errors <= 0\"]\n", "gate.dataset"),
        (
            "[gate]\ndataset = \"d\"\ngates = [\"errors\"]\n",
            "gate.gates",
        ),
    ] {
        app.write_agent("solo", &rollout(100, more));
        let has_error = |got: &ApiResponse| {
            let error = got.json()["error"].as_str().unwrap_or_default().to_owned();
            error.contains(why)
        };
        app.get_until("/agents/solo", has_error).await;
    }
}

#[tokio::test]
async fn agents_without_a_rollout_have_none() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    answer(&app, || says("old"), || fails(500, "no"));
    assert_eq!(app.run("solo", "go").await["variant"], Value::Null);
    let versions = versions(&app).await;
    assert_eq!(
        (&versions["data"][0]["runs"], &versions["rollout"]),
        (&json!(1), &Value::Null)
    );
    for path in ["rollout", "promote"] {
        let body = match path {
            "rollout" => json!({"percent": 5}),
            _ => json!({}),
        };
        let refused = app.post(&format!("/agents/solo/{path}"), &body).await;
        assert_eq!(code(&refused, 409), "no_rollout");
    }
    assert_eq!(app.database().count("rollouts"), 0);
}
