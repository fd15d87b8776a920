//! Scheduled evaluations: a service that changes beneath an unchanged agent is noticed.

use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::evals::SCORED;
use crate::schedules::{move_back, only_schedule, schedule_at, wait_until_seen};
use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::eventually;
use crate::support::provider::answer::says;
use crate::support::webhook_receiver::WebhookReceiver;
use crate::webhooks::messages::{self, SECRET, webhook};

const NIGHTLY: &str = "[[schedules]]\nname = \"nightly\"\ncron = \"0 0 1 1 *\"\neval = {dataset = \"release\", against = \"last\"}\n";
const DATASET: &str = "{\"id\": \"a\", \"input\": \"one\"}\n{\"id\": \"b\", \"input\": \"two\"}\n{\"id\": \"c\", \"input\": \"three\"}\n";

fn watched(more: &str) -> Setup {
    messages::daemon()
        .agent("solo", &format!("{more}\n{SCORED}"))
        .file("datasets/release.jsonl", DATASET)
}

/// The evaluation that a schedule has started, at its end.
async fn triggered(app: &TestApp) -> Value {
    let accepted = app
        .post("/schedules/solo/nightly/trigger", &json!({}))
        .await;
    super::finished(app, &accepted).await
}

#[tokio::test]
async fn an_evaluation_that_is_worse_than_the_last_one_is_reported_once() {
    let receiver = WebhookReceiver::start().await;
    let hook = webhook(&receiver.url("/hook"));
    let app = watched(&format!("{NIGHTLY}{hook}")).spawn().await;
    app.provider.always("solo", |_| says("good"));
    let first = triggered(&app).await;
    assert_eq!(
        (&first["state"], &first["planned"], &first["against_eval"]),
        (&json!("completed"), &json!(3), &Value::Null)
    );
    assert_eq!(first["scorers"], json!(["fine"]));
    let schedule = only_schedule(&app).await;
    assert_eq!(schedule["last"]["eval"], first["id"]);
    assert_eq!(schedule["last"]["run"], Value::Null);

    // Nothing has changed.
    let second = triggered(&app).await;
    assert_eq!(second["against_eval"], first["id"]);
    assert_eq!(
        second["result"]["scorers"]["fine"]["difference"],
        json!(0.0)
    );
    let before = app.provider.requests().len();

    app.provider.always("solo", |_| says("bad"));
    let third = triggered(&app).await;
    let fine = &third["result"]["scorers"]["fine"];
    assert_eq!(third["against_eval"], second["id"]);
    assert_eq!(
        (&fine["difference"], &fine["high"]),
        (&json!(-1.0), &json!(-1.0))
    );
    assert_eq!(third["result"]["flipped"].as_array().map(Vec::len), Some(3));
    // Only the new version runs.
    assert_eq!(app.provider.requests().len() - before, 3);

    let message = eventually("the webhook", async || {
        let mut messages = receiver.messages().into_iter();
        messages.find(|it| it.json()["type"] == "eval.regressed")
    })
    .await;
    assert!(message.is_signed_by(SECRET));
    let data = message.json()["data"].clone();
    assert_eq!(
        (
            &data["agent"],
            &data["schedule"],
            &data["eval"],
            &data["against"]
        ),
        (
            &json!("solo"),
            &json!("nightly"),
            &third["id"],
            &second["id"]
        )
    );
    assert_eq!(data["scorers"]["fine"]["difference"], json!(-1.0));
    let run = data["run"].as_str().expect("a run");
    let events = app.find(run).await.events().await;
    let mut events = events.iter().filter(|it| it.kind() == "eval.regressed");
    assert_eq!(events.next().map(|it| &it["eval"]), Some(&third["id"]));
    app.daemon.wait_for_log("is worse than").await;

    // As bad as the last one.
    triggered(&app).await;
    let regressed = receiver.messages();
    let regressed = regressed
        .iter()
        .filter(|it| it.json()["type"] == "eval.regressed");
    assert_eq!(regressed.count(), 1);
}

#[tokio::test]
async fn a_time_starts_one_evaluation_also_over_kills() {
    let schedule = schedule_at(SignedDuration::from_hours(1), "missed = \"once\"");
    let eval = "eval = {dataset = \"release\"}";
    let mut app = watched(&schedule.replace("input = \"go\"", eval))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("good"));
    wait_until_seen(&app).await;
    let has_last = |list: &ApiResponse| list.json()["data"][0]["last"].is_object();
    let mut first = None;
    for _ in 0..3 {
        app.daemon.kill().await;
        // As if the kill had come between the evaluation's record and the schedule's.
        move_back(&app, SignedDuration::from_hours(24));
        app.restart_after_end().await;
        let list = app.get_until("/schedules", has_last).await.json();
        let last = list["data"][0]["last"].clone();
        assert_eq!(first.get_or_insert_with(|| last.clone()), &last);
    }
    let id = first.as_ref().and_then(|last| last["eval"].as_str());
    let path = format!("/evals/{}", id.expect("an evaluation"));
    let ended = app
        .get_until(&path, |got| !got.json()["finished_at"].is_null())
        .await
        .json();
    assert_eq!(
        (&ended["state"], &ended["ended"]),
        (&json!("completed"), &json!(3))
    );
    let evals = app.get("/evals").await.json();
    assert_eq!(evals["data"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn a_schedule_without_its_dataset_says_so() {
    let app = watched(&NIGHTLY.replace("release", "relaese"))
        .spawn()
        .await;
    let refused = app
        .post("/schedules/solo/nightly/trigger", &json!({}))
        .await;
    assert_eq!(refused.status, 422, "{}", refused.text);
    assert!(
        refused.text.contains("there is no dataset relaese"),
        "{}",
        refused.text
    );
    let body = json!({"agent": "solo", "against": "last", "cases": [{"id": "a", "input": "x"}]});
    let refused = app.post("/evals", &body).await;
    assert_eq!(
        refused.json()["errors"][0]["pointer"],
        "/against",
        "{}",
        refused.text
    );
}
