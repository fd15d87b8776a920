//! What an evaluation may be, and who may request it.

use reqwest::Method;
use serde_json::{Value, json};

use crate::evals::{SCORED, cases, create, finished, two_versions};
use crate::support::app::{TestApp, key, send};
use crate::support::provider::answer::says;

#[tokio::test]
async fn what_is_no_evaluation_is_refused_by_name() {
    let app = two_versions()
        .file(
            "datasets/release.jsonl",
            "{\"input\": \"x\"}\n{\"inptu\": \"y\"}\n",
        )
        .spawn()
        .await;
    let with = |more: Value| {
        let mut body = json!({"agent": "new", "cases": cases(1)});
        for (key, value) in more.as_object().expect("an object") {
            body[key] = value.clone();
        }
        body
    };
    for (body, why) in [
        (with(json!({"agent": null})), "/agent: is required"),
        (with(json!({"cases": []})), "has no case"),
        (
            with(json!({"cases": [{"id": "a"}]})),
            "line 1: /input: is required",
        ),
        (
            with(json!({"cases": null, "dataset": "release"})),
            "line 2: /inptu: unknown key",
        ),
        (
            with(json!({"cases": null, "dataset": "relaese"})),
            "did you mean \"release\"",
        ),
        (with(json!({"scorers": ["fime"]})), "did you mean \"fine\""),
        (
            with(json!({"gates": ["cost <= 1.1x"]})),
            "/gates/0: compares with an old version",
        ),
        (
            with(json!({"gates": ["tone.mean >= 1"]})),
            "needs the scorer",
        ),
        (
            with(json!({"gates": ["fine"]})),
            "/gates/0: must have one >= or <=",
        ),
        (with(json!({"models": "recorded"})), "not there yet"),
        (with(json!({"tools": "all"})), "/tools: is \"all\""),
        (with(json!({"since": "30d"})), "but only one of them"),
        (with(json!({"repeat": 0})), "/repeat: must be from 1 to 100"),
        (with(json!({"budget": 0})), "/budget: must be above 0"),
        (
            with(json!({"against": "sha256:00"})),
            "the record has no run of agent new",
        ),
    ] {
        let refused = create(&app, body.clone()).await;
        assert!(
            refused.problem(422).contains(why),
            "{body}: {}",
            refused.text
        );
    }
    create(&app, with(json!({"agent": "nwe"})))
        .await
        .problem(404);
    assert_eq!(app.get("/evals").await.json()["data"], json!([]));
}

#[tokio::test]
async fn a_version_of_the_record_runs_as_it_was() {
    let app = TestApp::setup()
        .agent("solo", "system_prompt = \"first\"\n")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.run("solo", "go").await;
    let version = app.get("/agents/solo").await.json()["version"].clone();
    app.write_agent("solo", &format!("system_prompt = \"second\"\n{SCORED}"));
    app.get_until("/agents/solo", |got| got.json()["version"] != version)
        .await;
    let body = json!({"agent": "solo", "against": version, "cases": cases(1)});
    finished(&app, &create(&app, body).await).await;
    let systems = app.provider.requests_for("solo");
    let mut systems: Vec<String> = systems.iter().map(|it| it.system()).collect();
    systems.sort();
    assert_eq!(systems, ["first", "first", "second"]);
}

#[tokio::test]
async fn keys_evaluate_their_agents_and_see_their_own() {
    let app = two_versions()
        .config(&key(
            "amy",
            "scopes = [\"run\", \"read\", \"cancel\"]\nagents = [\"new\"]",
        ))
        .config(&key("bob", "scopes = [\"run\", \"read\"]"))
        .config(&key("root", "scopes = [\"admin\"]"))
        .spawn()
        .await;
    app.provider.always("new", |_| says("good"));
    let post = async |key: &str, body: Value| {
        send(
            app.request(Method::POST, "/evals")
                .bearer_auth(key)
                .json(&body),
        )
        .await
    };
    let get =
        async |key: &str, path: &str| send(app.request(Method::GET, path).bearer_auth(key)).await;
    let accepted = post("amy", json!({"agent": "new", "cases": cases(2)})).await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    let id = accepted.json()["id"].as_str().expect("an id").to_owned();
    post(
        "amy",
        json!({"agent": "new", "against": "old", "cases": cases(1)}),
    )
    .await
    .problem(404);
    post(
        "amy",
        json!({"agent": "new", "tools": "live", "cases": cases(1)}),
    )
    .await
    .problem(403);
    let text = "name = \"new\"\nmodel = \"anthropic/new\"\n";
    post("amy", json!({"definition": text, "cases": cases(1)}))
        .await
        .problem(403);
    let by_text = post("root", json!({"definition": text, "cases": cases(1)})).await;
    assert_eq!(
        (by_text.status, by_text.json()["agent"].as_str()),
        (202, Some("new"))
    );
    get("bob", &format!("/evals/{id}")).await.problem(404);
    assert_eq!(get("bob", "/evals").await.json()["data"], json!([]));
    assert_eq!(get("amy", &format!("/evals/{id}")).await.status, 200);
    assert_eq!(get("root", &format!("/evals/{id}")).await.status, 200);
}
