//! Scores of runs: by keys, by feedback links, in lists, sums, events and webhooks.

use reqwest::Method;
use serde_json::{Value, json};

use crate::runs::run_search::{found, ids};
use crate::support::app::{ApiResponse, Setup, TestApp, key, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::webhooks::messages::{self, webhook};

async fn score(app: &TestApp, run: &str, body: Value) -> ApiResponse {
    app.post(&format!("/runs/{run}/scores"), &body).await
}

async fn as_key(app: &TestApp, key: &str, method: Method, path: &str, body: Value) -> ApiResponse {
    send(app.request(method, path).bearer_auth(key).json(&body)).await
}

/// The group of each name, without its name.
async fn sums(app: &TestApp, query: &str) -> Vec<Value> {
    let got = app.get(&format!("/scores?{query}")).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()["data"].as_array().expect("groups").clone()
}

fn solo() -> Setup {
    TestApp::setup().agent("solo", "")
}

#[tokio::test]
async fn a_run_has_one_score_of_each_name_and_author() {
    let mut app = solo().spawn().await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;
    let first = json!({"name": "grounded", "value": 0.2, "comment": "guesses", "turn": 1});
    let added = score(&app, run.id(), first).await;
    assert_eq!(added.status, 201, "{}", added.text);
    let json = added.json();
    assert_eq!(
        (&json["name"], &json["value"], &json["turn"]),
        (&json!("grounded"), &json!(0.2), &json!(1))
    );
    assert_eq!(
        (&json["author"], &json["run_id"]),
        (&Value::Null, &json!(run.id()))
    );

    let replaced = score(&app, run.id(), json!({"name": "grounded", "value": 0.8})).await;
    assert_eq!(replaced.status, 200, "{}", replaced.text);
    assert_eq!(
        score(&app, run.id(), json!({"name": "thumbs", "value": true}))
            .await
            .status,
        201
    );
    assert_eq!(
        score(&app, run.id(), json!({"name": "tone", "value": "friendly"}))
            .await
            .status,
        201
    );

    app.crash_and_restart().await;
    let wanted = json!({
        "grounded": {"n": 1, "mean": 0.8}, "thumbs": {"n": 1, "mean": 1.0}, "tone": {"n": 1, "counts": {"friendly": 1}},
    });
    let record = app
        .get(&format!("/runs/{}", run_id(&app).await))
        .await
        .json();
    assert_eq!(record["scores"], wanted);
    assert_eq!(app.get("/runs").await.json()["data"][0]["scores"], wanted);
    let id = record["id"].as_str().expect("an id");
    let listed = app.get(&format!("/runs/{id}/scores")).await.json();
    let names: Vec<&Value> = listed["data"]
        .as_array()
        .expect("scores")
        .iter()
        .map(|it| &it["name"])
        .collect();
    assert_eq!(names, ["grounded", "thumbs", "tone"]);
    let groups = sums(&app, "by=name").await;
    assert_eq!(
        groups[0],
        json!({"name": "grounded", "n": 1, "mean": 0.8, "variance": null, "counts": {}})
    );
    assert_eq!(groups[2]["counts"], json!({"friendly": 1}));

    // The events are numbered after those of the run.
    let page = app.get(&format!("/runs/{id}/events")).await.json();
    let events = page["data"].as_array().expect("events");
    let scores: Vec<&Value> = events
        .iter()
        .filter(|it| it["type"] == "score.added")
        .collect();
    let replaced: Vec<&Value> = scores.iter().map(|it| &it["replaced"]).collect();
    assert_eq!(replaced, [false, true, false, false]);
    assert_eq!(scores[0]["comment"], "guesses");
    assert_eq!(events.last().expect("one")["seq"], events.len());
    assert_eq!(record["last_event"], events.len());
}

async fn run_id(app: &TestApp) -> String {
    let page = app.get("/runs").await.json();
    page["data"][0]["id"].as_str().expect("an id").to_owned()
}

#[tokio::test]
async fn what_is_no_score_is_refused_by_name() {
    let app = solo().spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let run = app.start("solo", "go").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    let early = score(&app, run.id(), json!({"name": "good", "value": 1})).await;
    assert!(early.problem(409).contains("has not ended"));
    gate.open();
    let run = run.wait_for_end().await;
    for (body, why) in [
        (json!({"value": 1}), "/name: is required"),
        (json!({"name": "good"}), "/value: is required"),
        (json!({"name": "a b", "value": 1}), "is no name of a score"),
        (json!({"name": "good", "value": 1e300}), "/value"),
        (json!({"name": "good", "value": ""}), "/value"),
        (json!({"name": "good", "value": "x".repeat(65)}), "/value"),
        (json!({"name": "good", "value": [1]}), "/value"),
        (
            json!({"name": "good", "value": 1, "turn": 2}),
            "has no turn 2",
        ),
        (
            json!({"name": "good", "value": 1, "comment": "x".repeat(2_001)}),
            "at most 2000 characters",
        ),
    ] {
        let refused = score(&app, run.id(), body.clone()).await;
        assert!(
            refused.problem(422).contains(why),
            "{body}: {}",
            refused.text
        );
    }
    let unknown = score(
        &app,
        "run_00000000-0000-7000-8000-000000000000",
        json!({"name": "good", "value": 1}),
    )
    .await;
    unknown.problem(404);
    for query in ["by=model", "by=name,name", "since=tomorrow"] {
        app.get(&format!("/scores?{query}")).await.problem(400);
    }
    app.get("/runs?score.good=0.5").await.problem(400);
    assert_eq!(sums(&app, "").await, Vec::<Value>::new());
}

#[tokio::test]
async fn runs_are_listed_by_their_scores() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("other", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.provider.always("other", |_| says("done"));
    let mut runs = Vec::new();
    for (agent, value) in [
        ("solo", json!(0.2)),
        ("solo", json!(0.9)),
        ("other", json!("bad")),
        ("solo", json!(null)),
    ] {
        let run = app.run(agent, "go").await;
        if !value.is_null() {
            assert_eq!(
                score(&app, run.id(), json!({"name": "good", "value": value}))
                    .await
                    .status,
                201
            );
        }
        runs.push(run.id().to_owned());
    }
    for (query, wanted) in [
        ("score.good=<0.5", &[0][..]),
        ("score.good=<=0.2", &[0]),
        ("score.good=>0.2", &[1]),
        ("score.good=>=0.2", &[1, 0]),
        ("score.good==bad", &[2]),
        ("score.good=none", &[3]),
        ("score.good=>=0&agent=solo&status=completed", &[1, 0]),
        ("score.good=>=0&agent=other", &[]),
        ("score.other=<9", &[]),
        ("score.good=>=0&q=done&limit=1", &[1, 0]),
    ] {
        let found = found(&app, query).await;
        let wanted: Vec<&str> = wanted.iter().map(|at: &usize| runs[*at].as_str()).collect();
        assert_eq!(ids(&found), wanted, "{query}");
    }
}

#[tokio::test]
async fn sums_stay_when_runs_are_deleted_and_forget_deleted_scores() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"solo\"]")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider
        .always("planner", |seen| match seen.tool_results().len() {
            0 => delegates([("solo", "x")]),
            _ => says("done"),
        });
    app.provider.always("solo", |_| says("done"));
    let mut runs = Vec::new();
    for (team, value) in [("blue", 0.1), ("blue", 0.4), ("red", 1.0)] {
        let run = app
            .run_with("planner", json!({"input": "go", "labels": {"team": team}}))
            .await;
        score(&app, run.id(), json!({"name": "good", "value": value})).await;
        let child = run.children().await.remove(0);
        score(&app, child.id(), json!({"name": "good", "value": 0})).await;
        runs.push(run.id().to_owned());
    }
    let groups = sums(&app, "by=agent,label.team&name=good").await;
    let shown: Vec<_> = groups
        .iter()
        .map(|it| {
            (
                it["agent"].clone(),
                it["label.team"].clone(),
                it["n"].clone(),
                it["mean"].clone(),
            )
        })
        .collect();
    let row = |agent: &str, team: &str, n: u32, mean: f64| {
        (json!(agent), json!(team), json!(n), json!(mean))
    };
    assert_eq!(
        shown,
        [
            row("planner", "blue", 2, 0.25),
            row("planner", "red", 1, 1.0),
            row("solo", "blue", 2, 0.0),
            row("solo", "red", 1, 0.0),
        ]
    );
    let variance = groups[0]["variance"].as_f64().expect("a number");
    assert!((variance - 0.045).abs() < 1e-12, "{variance}");
    assert_eq!(sums(&app, "by=day,agent&label.team=red").await.len(), 2);
    assert_eq!(sums(&app, "until=2020-01-01").await.len(), 0);

    assert_eq!(
        app.delete(&format!("/runs/{}/scores/good", runs[0]))
            .await
            .status,
        204
    );
    app.delete(&format!("/runs/{}/scores/good", runs[0]))
        .await
        .problem(404);
    let groups = sums(&app, "agent=planner&label.team=blue").await;
    assert_eq!(
        (&groups[0]["n"], &groups[0]["mean"]),
        (&json!(1), &json!(0.4))
    );
    assert_eq!(app.delete(&format!("/runs/{}", runs[1])).await.status, 204);
    let groups = sums(&app, "agent=planner&label.team=blue").await;
    assert_eq!(
        (&groups[0]["n"], &groups[0]["mean"]),
        (&json!(1), &json!(0.4))
    );
}

#[tokio::test]
async fn keys_score_their_own_runs_and_admins_any() {
    let keys = ["ada", "bob"].map(|name| key(name, "scopes = [\"run\", \"read\"]"));
    let app = solo()
        .config(&(keys.concat() + &key("root", "scopes = [\"admin\"]")))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let run = as_key(
        &app,
        "ada",
        Method::POST,
        "/agents/solo/runs?wait=180",
        json!({"input": "go"}),
    )
    .await;
    let id = run.json()["id"].as_str().expect("an id").to_owned();
    let scores = format!("/runs/{id}/scores");
    let good = |value: f64| json!({"name": "good", "value": value});
    assert_eq!(
        as_key(&app, "ada", Method::POST, &scores, good(0.5))
            .await
            .json()["author"],
        "ada"
    );
    as_key(&app, "bob", Method::POST, &scores, good(0.5))
        .await
        .problem(404);
    as_key(&app, "bob", Method::GET, &scores, Value::Null)
        .await
        .problem(404);
    assert_eq!(
        as_key(&app, "root", Method::POST, &scores, good(1.0))
            .await
            .status,
        201
    );
    let seen = as_key(&app, "ada", Method::GET, "/scores", Value::Null)
        .await
        .json();
    assert_eq!(
        (&seen["data"][0]["n"], &seen["data"][0]["mean"]),
        (&json!(2), &json!(0.75))
    );
    let seen = as_key(&app, "bob", Method::GET, "/scores", Value::Null)
        .await
        .json();
    assert_eq!(seen["data"], json!([]));

    let own = format!("{scores}/good");
    as_key(
        &app,
        "ada",
        Method::DELETE,
        &format!("{own}?author=root"),
        Value::Null,
    )
    .await
    .problem(403);
    assert_eq!(
        as_key(
            &app,
            "root",
            Method::DELETE,
            &format!("{own}?author=ada"),
            Value::Null
        )
        .await
        .status,
        204
    );
    let left = as_key(&app, "ada", Method::GET, &scores, Value::Null)
        .await
        .json();
    assert_eq!(
        (
            left["data"].as_array().map(Vec::len),
            &left["data"][0]["author"]
        ),
        (Some(1), &json!("root"))
    );
}

#[tokio::test]
async fn a_feedback_link_scores_its_run_without_a_key_until_its_end() {
    let mut app = solo()
        .config(
            &(key("ada", "scopes = [\"run\", \"read\"]")
                + "[telemetry]\nlog = \"axed=debug,info\""),
        )
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let run = as_key(
        &app,
        "ada",
        Method::POST,
        "/agents/solo/runs?wait=180",
        json!({"input": "go"}),
    )
    .await;
    let id = run.json()["id"].as_str().expect("an id").to_owned();
    let links = format!("/runs/{id}/feedback-links");
    for expires_in in [json!("31d"), json!(0), json!("soon"), json!(2_592_001)] {
        let body = json!({"name": "thumbs", "expires_in": expires_in});
        as_key(&app, "ada", Method::POST, &links, body)
            .await
            .problem(422);
    }
    let body = json!({"name": "thumbs", "expires_in": "7d"});
    let link = as_key(&app, "ada", Method::POST, &links, body).await;
    assert_eq!(link.status, 201, "{}", link.text);
    let url = link.json()["url"].as_str().expect("a URL").to_owned();
    let path = url[url.find("/feedback/").expect("a path")..].to_owned();

    // A restart ends no link.
    app.crash_and_restart().await;
    assert_eq!(app.get(&path).await.json()["name"], "thumbs");
    let given = app
        .post(&path, &json!({"value": false, "comment": "too long"}))
        .await;
    assert_eq!(
        (given.status, given.json()),
        (
            201.try_into().expect("a status"),
            json!({"name": "thumbs", "value": 0})
        )
    );
    assert_eq!(app.post(&path, &json!({"value": true})).await.status, 200);
    app.post(&path, &json!({"value": true, "name": "other"}))
        .await
        .problem(422);
    app.post(&format!("{path}x"), &json!({"value": true}))
        .await
        .problem(404);
    app.get("/feedback/x").await.problem(404);
    // Each score is an event: a link that anybody has does not fill the record.
    app.database().execute("UPDATE scores SET revision = 1000");
    let refused = app.post(&path, &json!({"value": true})).await;
    assert!(refused.problem(409).contains("replaced 1000 times"));
    let scores = as_key(
        &app,
        "ada",
        Method::GET,
        &format!("/runs/{id}/scores"),
        Value::Null,
    )
    .await
    .json();
    assert_eq!(scores["data"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        (&scores["data"][0]["author"], &scores["data"][0]["value"]),
        (&json!("feedback"), &json!(1))
    );
    app.daemon.wait_for_log("/feedback/…").await;
    let log = app.daemon.log();
    assert!(!log.contains(&path), "{log}");

    let body = json!({"name": "thumbs", "expires_in": 1});
    let short = as_key(&app, "ada", Method::POST, &links, body).await.json();
    let url = short["url"].as_str().expect("a URL");
    let path = &url[url.find("/feedback/").expect("a path")..];
    let ended = app
        .get_until(path, |got: &ApiResponse| got.status == 404)
        .await;
    assert!(ended.problem(404).contains("its time is over"));
}

#[tokio::test]
async fn a_score_is_delivered_to_the_webhook_that_asks_for_it() {
    let receiver = WebhookReceiver::start().await;
    let hook = format!(
        "{}\nevents = [\"score.added\"]",
        webhook(&receiver.url("/"))
    );
    let app = messages::daemon().agent("solo", &hook).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;
    let body = json!({"name": "good", "value": 0.5, "comment": "a secret thought"});
    assert_eq!(score(&app, run.id(), body).await.status, 201);
    let message = receiver.wait_for_messages(1).await.remove(0);
    let json = message.json();
    assert_eq!(
        (&json["type"], &json["data"]["status"]),
        (&json!("score.added"), &json!("completed"))
    );
    assert_eq!(
        json["data"]["score"],
        json!({"name": "good", "value": 0.5, "author": null})
    );
    assert!(!String::from_utf8_lossy(&message.body).contains("secret thought"));
}
