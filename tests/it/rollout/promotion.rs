//! A candidate becomes the current version.

use std::fs;

use serde_json::{Value, json};

use crate::rollout::{
    CANDIDATE, answer, code, rollout, versions, wait_until_loaded, with_candidate,
};
use crate::support::app::{ApiResponse, TestApp};
use crate::support::provider::answer::says;

async fn promote(app: &TestApp) -> ApiResponse {
    app.post("/agents/solo/promote", &json!({})).await
}

/// The file cannot be written: a directory has the name of what would be renamed.
fn make_unwritable(app: &TestApp) {
    fs::create_dir(app.path("agents/.solo.toml.promoted")).expect("a directory");
}

#[tokio::test]
async fn promote_writes_the_file() {
    let mut app = with_candidate(10, "").spawn().await;
    answer(&app, || says("old"), || says("new"));
    let before = app.get("/agents/solo").await.json()["version"].clone();
    let promoted = promote(&app).await;
    assert_eq!(promoted.status, 200, "{}", promoted.text);
    let json = promoted.json();
    assert_eq!(
        (&json["written"], &json["commit"], &json["eval"]),
        (&json!(true), &Value::Null, &Value::Null)
    );
    assert_eq!(
        (&json["previous"], &json["file"]),
        (&before, &json!("solo.toml"))
    );
    let file = fs::read_to_string(app.path("agents/solo.toml")).expect("the file");
    assert_eq!(file, format!("{CANDIDATE}\n{}", rollout(10, "")));
    let agent = app.get("/agents/solo").await.json();
    assert_eq!(
        (&agent["version"], &agent["valid"]),
        (&json["version"], &json!(true))
    );
    let run = app.run("solo", "go").await;
    assert_eq!(
        (&run["model"], &run["variant"]),
        (&json!("next"), &Value::Null)
    );
    assert_eq!(run["agent_version"], json["version"]);
    assert_eq!(code(&promote(&app).await, 409), "no_rollout");
    let ended = versions(&app).await["rollout"].clone();
    assert!(
        ended["promoted_at"].is_string() && ended["percent"] == json!(0.0),
        "{ended}"
    );

    // A file that becomes what it was wins.
    app.write_agent("solo", &rollout(10, ""));
    app.get_until("/agents/solo", |got| got.json()["version"] == before)
        .await;
    app.crash_and_restart().await;
    assert_eq!(app.get("/agents/solo").await.json()["version"], before);
    assert_eq!(app.run("solo", "go").await["model"], "solo");
    // It can become current again.
    assert_eq!(promote(&app).await.status, 200);
    assert_eq!(app.run("solo", "go").await["model"], "next");
}

#[tokio::test]
async fn what_cannot_be_written_is_in_force_until_the_file_changes() {
    let mut app = with_candidate(10, "").spawn().await;
    answer(&app, || says("old"), || says("new"));
    make_unwritable(&app);
    let promoted = promote(&app).await.json();
    assert_eq!(promoted["written"], false);
    let text = promoted["commit"].as_str().expect("a text").to_owned();
    assert_eq!(text, format!("{CANDIDATE}\n{}", rollout(10, "")));
    for _ in 0..2 {
        let run = app.run("solo", "go").await;
        assert_eq!(run["model"], "next");
        assert_eq!(run["agent_version"], promoted["version"]);
        app.crash_and_restart().await;
    }
    // The next candidate is compared with it, and follows it.
    let next = "name = \"solo\"\nmodel = \"anthropic/third\"\n";
    app.write("agents/solo.next.toml", next);
    let is_new = |got: &ApiResponse| got.json()["rollout"]["promoted_at"].is_null();
    app.get_until("/agents/solo/versions", is_new).await;
    app.provider.always("third", |_| says("newest"));
    let second = promote(&app).await.json();
    assert_eq!(second["previous"], promoted["version"]);
    assert_eq!(app.run("solo", "go").await["model"], "third");
    app.crash_and_restart().await;
    assert_eq!(app.run("solo", "go").await["model"], "third");

    // What was committed has the same version.
    let text = second["commit"].as_str().expect("a text");
    app.write("agents/solo.toml", text);
    let is_current = |got: &ApiResponse| got.json()["version"] == second["version"];
    app.get_until("/agents/solo", is_current).await;
    assert_eq!(app.run("solo", "go").await["model"], "third");
    app.write_agent("solo", &format!("description = \"b\"\n{}", rollout(10, "")));
    wait_until_loaded(&app, "b").await;
    let run = app.run("solo", "go").await;
    assert_eq!(
        (&run["model"], &run["variant"]),
        (&json!("solo"), &Value::Null)
    );
}

#[tokio::test]
async fn a_gate_that_does_not_hold_refuses_the_candidate() {
    let scorer =
        "[[scorers]]\nname = \"fine\"\nkind = \"assert\"\nexpect = {contains = \"good\"}\n";
    let gate =
        "[gate]\ndataset = \"release\"\ngates = [\"fine.mean >= 0.9\"]\nscorers = [\"fine\"]\n";
    let app = with_candidate(10, &format!("{gate}{scorer}"))
        .file("agents/solo.next.toml", &format!("{CANDIDATE}{scorer}"))
        .file(
            "datasets/release.jsonl",
            "{\"input\": \"a\"}\n{\"input\": \"b\"}\n",
        )
        .spawn()
        .await;
    app.provider.always("solo", |_| says("good"));
    app.provider.will("next", [says("bad"), says("good")]);
    app.provider.always("next", |_| says("good"));
    let refused = promote(&app).await;
    assert_eq!(code(&refused, 409), "gate_failed");
    assert!(
        refused.text.contains("fine.mean >= 0.9"),
        "{}",
        refused.text
    );
    let evals = app.get("/evals").await.json();
    assert_eq!(evals["data"].as_array().map(Vec::len), Some(1));

    let promoted = promote(&app).await;
    assert_eq!(promoted.status, 200, "{}", promoted.text);
    let eval = promoted.json()["eval"].as_str().expect("an id").to_owned();
    let eval = app.get(&format!("/evals/{eval}")).await.json();
    assert_eq!(eval["result"]["gates"][0]["held"], true);
    let file = fs::read_to_string(app.path("agents/solo.toml")).expect("the file");
    assert!(
        file.contains("[gate]") && file.contains("anthropic/next"),
        "{file}"
    );
    // That evaluation compares other versions.
    let body = json!({"eval": eval["id"]});
    app.write(
        "agents/solo.next.toml",
        &format!("{CANDIDATE}description = \"b\"\n{scorer}"),
    );
    app.get_until("/agents/solo/versions", |got| {
        got.json()["rollout"]["promoted_at"].is_null()
    })
    .await;
    let other = app.post("/agents/solo/promote", &body).await;
    assert_eq!(code(&other, 422), "invalid_field");
}
