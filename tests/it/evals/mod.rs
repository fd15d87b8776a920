//! Evaluations: two versions of an agent over the same cases, on a real daemon.

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::provider::answer::{calls, delegates, says};

mod backtest;
mod kills;
mod requests;
mod sentinel;

/// An agent with an assertion as its scorer: the answer has the word good.
const SCORED: &str =
    "[[scorers]]\nname = \"fine\"\nkind = \"assert\"\nexpect = {contains = \"good\"}\n";

fn cases(count: usize) -> Value {
    (0..count)
        .map(|number| json!({"id": format!("c{number}"), "input": format!("case {number}")}))
        .collect()
}

fn two_versions() -> Setup {
    let setup = TestApp::setup().agent("new", SCORED);
    setup.agent("old", "")
}

async fn create(app: &TestApp, body: Value) -> ApiResponse {
    app.post("/evals", &body).await
}

/// The evaluation once it has ended.
async fn finished(app: &TestApp, accepted: &ApiResponse) -> Value {
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    let json = accepted.json();
    let id = json["id"].as_str().expect("an id").to_owned();
    let path = format!("/evals/{id}?wait=1");
    let is_finished = |got: &ApiResponse| !got.json()["finished_at"].is_null();
    app.get_until(&path, is_finished).await.json()
}

#[tokio::test]
async fn the_new_version_is_compared_with_the_old_one() {
    let app = two_versions().spawn().await;
    app.provider.always("new", |_| says("good"));
    // The old one fails three of eight.
    app.provider.always("old", |request| {
        let input = request.user_messages().concat();
        match ["case 0", "case 1", "case 2"]
            .iter()
            .any(|case| input.contains(case))
        {
            true => says("bad"),
            false => says("good"),
        }
    });
    let body = json!({
        "agent": "new", "against": "old", "cases": cases(8), "gates": ["fine >= 0", "errors <= 0", "tokens <= 2x"],
    });
    let accepted = create(&app, body).await;
    assert_eq!(accepted.json()["planned"], 16);
    let eval = finished(&app, &accepted).await;
    assert_eq!(eval["state"], "completed", "{eval}");
    let fine = &eval["result"]["scorers"]["fine"];
    assert_eq!(
        fine["versions"],
        json!([{"n": 8, "mean": 1.0}, {"n": 8, "mean": 0.625}])
    );
    assert_eq!(
        (&fine["difference"], &fine["wins"], &fine["losses"]),
        (&json!(0.375), &json!(3), &json!(0))
    );
    let p = fine["p"].as_f64().expect("a number");
    assert!((p - 0.25).abs() < 1e-9, "{p}");
    let result = &eval["result"];
    let held: Vec<&Value> = result["gates"]
        .as_array()
        .expect("gates")
        .iter()
        .map(|it| &it["held"])
        .collect();
    assert_eq!(held.len(), 3);
    assert_eq!((held[1], held[2]), (&json!(true), &json!(true)));
    let flipped = result["flipped"].as_array().expect("cases");
    assert_eq!(flipped.len(), 3);
    let compare = flipped[0]["compare"].as_str().expect("a path");
    assert_eq!(app.get(compare).await.status, 200);

    // The runs are marked, and their cases list them.
    let id = eval["id"].as_str().expect("an id");
    let marked = app
        .get(&format!("/runs?label.evaluation={id}&limit=100"))
        .await
        .json();
    assert_eq!(marked["data"].as_array().expect("runs").len(), 16);
    let page = app.get(&format!("/evals/{id}/cases?limit=5")).await.json();
    let first = &page["data"][0];
    assert_eq!(
        (&first["case"], &first["runs"][1]["scores"]["fine"]),
        (&json!("c0"), &json!(0))
    );
    let next = page["next_cursor"].as_str().expect("a cursor");
    let rest = app
        .get(&format!("/evals/{id}/cases?limit=5&cursor={next}"))
        .await
        .json();
    assert_eq!(
        (rest["data"].as_array().map(Vec::len), &rest["next_cursor"]),
        (Some(3), &Value::Null)
    );
    let listed = app.get("/evals").await.json();
    assert_eq!(
        (&listed["data"][0]["id"], &listed["data"][0]["result"]),
        (&json!(id), &Value::Null)
    );
}

#[tokio::test]
async fn a_call_of_a_tool_ends_its_case_and_nothing_is_performed() {
    let app = TestApp::setup()
        .agent("boss", "sub_agents = [\"clerk\"]\n")
        .agent("clerk", "tools = [\"write_file\"]\n")
        .spawn()
        .await;
    app.provider.always("boss", |request| match request.turn() {
        1 => delegates([("clerk", "file it")]),
        _ => says("filed"),
    });
    app.provider.always("clerk", |request| {
        match request.user_messages().concat().contains("file it") {
            true => calls([("write_file", json!({"path": "made.txt", "content": "x"}))]),
            false => says("nothing"),
        }
    });
    let accepted = create(
        &app,
        json!({"agent": "boss", "cases": cases(1), "gates": ["diverged <= 5%"]}),
    )
    .await;
    let eval = finished(&app, &accepted).await;
    assert_eq!(
        (&eval["state"], &eval["result"]["diverged"]),
        (&json!("completed"), &json!(1)),
        "{eval}"
    );
    assert_eq!(eval["result"]["gates"][0]["held"], false);
    let id = eval["id"].as_str().expect("an id");
    let page = app.get(&format!("/evals/{id}/cases")).await.json();
    let run = &page["data"][0]["runs"][0];
    assert_eq!(run["outcome"], "diverged");
    let diverged = &run["diverged"];
    assert_eq!(
        (&diverged["path"], &diverged["turn"]),
        (&json!("boss/1.1:clerk"), &json!(1))
    );
    assert_eq!(diverged["tool"], "write_file");
    assert!(
        diverged["arguments"]
            .as_str()
            .is_some_and(|it| it.contains("made.txt"))
    );
    // The caller does not go on.
    assert_eq!(app.provider.requests_for("boss").len(), 1);
    assert!(!app.path("made.txt").exists());
}
