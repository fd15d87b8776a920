//! Scorers of live runs: assertions, judges and services, sampled, bounded in money, once for each run.

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, says};
use crate::support::webhook_receiver::{ReceiverReply, WebhookReceiver};
use crate::webhooks::messages::{self, SECRET};

const JUDGED: &str = "[[scorers]]\nname = \"grounded\"\nkind = \"judge\"\nagent = \"judge\"\n";
const JUDGE: &str = "system_prompt = \"Grade the output.\"";

/// Waits until the run has so many scores, and returns them.
async fn scores(app: &TestApp, run: &str, count: usize) -> Vec<Value> {
    let path = format!("/runs/{run}/scores");
    let list = |got: &ApiResponse| got.json()["data"].as_array().expect("scores").clone();
    let got = app.get_until(&path, |got| list(got).len() >= count).await;
    list(&got)
}

/// Waits for an event of this type, and returns it.
async fn event(app: &TestApp, run: &str, kind: &str) -> Value {
    let path = format!("/runs/{run}/events");
    let find = |got: &ApiResponse| -> Option<Value> {
        let json = got.json();
        let mut events = json["data"].as_array().expect("events").iter();
        events.find(|it| it["type"] == kind).cloned()
    };
    let got = app.get_until(&path, |got| find(got).is_some()).await;
    find(&got).expect("the event")
}

async fn judges(app: &TestApp) -> Vec<Value> {
    let page = app.get("/runs?agent=judge").await.json();
    page["data"].as_array().expect("runs").clone()
}

#[tokio::test]
async fn a_judge_scores_ended_runs_once_over_kills() {
    let mut app = TestApp::setup()
        .agent("solo", JUDGED)
        .agent("judge", JUDGE)
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.always("solo", |_| says("the answer"));
    let verdict = r#"{"value": 0.75, "comment": "cites a page"}"#;
    app.provider
        .will("judge", [says(verdict).after_gate(&gate)]);
    app.provider.always("judge", move |seen| {
        assert!(
            seen.user_messages()[0].contains("the answer"),
            "what is judged"
        );
        says(verdict)
    });
    let body = json!({"input": "go", "context": "It is Monday."});
    let run = app.run_with("solo", body).await.id().to_owned();
    app.provider.wait_for_request("judge", 1).await;
    app.crash_and_restart().await;
    gate.open();
    let scores = scores(&app, &run, 1).await;
    assert_eq!(scores.len(), 1);
    let score = &scores[0];
    assert_eq!(
        (&score["name"], &score["value"]),
        (&json!("grounded"), &json!(0.75))
    );
    assert_eq!(
        (&score["author"], &score["comment"]),
        (&json!("scorer:grounded"), &json!("cites a page"))
    );
    let added = event(&app, &run, "score.added").await;
    assert_eq!(added["replaced"], false);

    // The judge's run is marked, and is neither scored nor counted itself.
    let judges = judges(&app).await;
    assert_eq!(judges.len(), 1, "{judges:?}");
    assert_eq!(judges[0]["labels"], json!({"scorer": "solo/grounded"}));
    let input: Value =
        serde_json::from_str(judges[0]["input"].as_str().expect("a text")).expect("JSON");
    assert_eq!(
        input,
        json!({"input": "go", "output": "the answer", "context": "It is Monday.", "expected": null})
    );
    let sums = app.get("/scores?by=agent,name").await.json();
    assert_eq!(sums["data"].as_array().map(Vec::len), Some(1));
    let line = "axed_scores_total{agent=\"solo\",scorer=\"grounded\"} 1\n";
    let is_counted = |got: &ApiResponse| got.text.contains(line);
    app.get_until("/metrics", is_counted).await;
}

#[tokio::test]
async fn an_answer_that_does_not_fit_is_an_event_and_no_score() {
    let app = TestApp::setup()
        .agent("solo", JUDGED)
        .agent("judge", JUDGE)
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.provider.always("judge", |_| says(r#"{"value": null}"#));
    let run = app.run("solo", "go").await;
    let failed = event(&app, run.id(), "score.failed").await;
    assert_eq!(failed["name"], "grounded");
    let why = failed["message"].as_str().expect("a text");
    assert!(why.contains("judge") && why.contains("run_"), "{why}");
    assert_eq!(scores(&app, run.id(), 0).await.len(), 0);
    let metrics = app.get("/metrics").await.text;
    let line = "axed_scores_failed_total{agent=\"solo\",scorer=\"grounded\"} 1\n";
    assert!(metrics.contains(line), "{metrics}");
}

#[tokio::test]
async fn assertions_score_the_calls_and_the_text_of_failed_runs_too() {
    let scorer = "[[scorers]]\nname = \"short\"\nkind = \"assert\"\n\
        expect = { completed = true, contains = \"done\", calls = [{ tool = \"find_path\" }], max_turns = 2 }";
    let app = TestApp::setup()
        .agent("solo", &format!("tools = [\"find_path\"]\n{scorer}"))
        .spawn()
        .await;
    app.provider
        .always("solo", |seen| match seen.tool_results().len() {
            _ if seen.user_messages()[0].contains("fail") => {
                crate::support::provider::answer::fails(400, "no")
            }
            0 => calls([("find_path", json!({"pattern": "*.md"}))]),
            _ => says("done"),
        });
    let good = app.run("solo", "go").await;
    let list = scores(&app, good.id(), 1).await;
    assert_eq!(
        (&list[0]["value"], &list[0]["comment"]),
        (&json!(1), &Value::Null)
    );
    let bad = app.run("solo", "fail").await;
    let list = scores(&app, bad.id(), 1).await;
    assert_eq!(list[0]["value"], 0);
    let why = list[0]["comment"].as_str().expect("a reason");
    assert!(
        why.contains("completed: the run is failed") && why.contains("no call of find_path"),
        "{why}"
    );
}

#[tokio::test]
async fn a_service_scores_by_a_signed_request() {
    let receiver = WebhookReceiver::start().await;
    receiver.will([ReceiverReply::Status(400)]);
    let scorer = format!(
        "[[scorers]]\nname = \"policy\"\nkind = \"http\"\nurl = \"{}\"",
        receiver.url("/score")
    );
    let app = messages::daemon().agent("solo", &scorer).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;
    let message = receiver.wait_for_messages(1).await.remove(0);
    assert!(message.is_signed_by(SECRET));
    let body = message.json();
    assert_eq!(
        (&body["run"]["id"], &body["output"]),
        (&json!(run.id()), &json!("done"))
    );
    let failed = event(&app, run.id(), "score.failed").await;
    assert!(
        failed["message"].as_str().expect("a text").contains("400"),
        "{failed}"
    );
}

#[tokio::test]
async fn samples_money_and_removed_scorers_leave_runs_unscored() {
    let scorer = "[[scorers]]\nname = \"dear\"\nkind = \"judge\"\nagent = \"judge\"\nper_day_usd = 0.0\n\
        [[scorers]]\nname = \"rare\"\nkind = \"judge\"\nagent = \"judge\"\nsample = 0.0\n\
        [[scorers]]\nname = \"ok\"\nkind = \"assert\"\nexpect = { completed = true }";
    let app = TestApp::setup()
        .agent("solo", scorer)
        .agent("judge", JUDGE)
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let run = app.run("solo", "go").await;
    let list = scores(&app, run.id(), 1).await;
    assert_eq!(list[0]["name"], "ok");
    let line = "axed_scores_skipped_total{agent=\"solo\",scorer=\"dear\",reason=\"budget\"} 1\n";
    app.get_until("/metrics", |got| got.text.contains(line))
        .await;
    assert_eq!(judges(&app).await.len(), 0);
    // A client cannot mark its runs, and so keep them from scorers and webhooks.
    for mark in ["scorer", "evaluation"] {
        let body = json!({"input": "go", "labels": {mark: "x"}});
        let refused = app.post("/agents/solo/runs", &body).await;
        assert!(refused.problem(422).contains(&format!("/labels/{mark}")));
    }
}

#[tokio::test]
async fn a_file_with_a_scorer_that_cannot_work_is_named() {
    let app = TestApp::setup()
        .agent("solo", JUDGED)
        .agent("judge", "")
        .agent("broken", "[[scorers]]\nname = \"a\"\nkind = \"assert\"\nexpect = { contains = \"x\", judge = [] , max = 3 }")
        .spawn()
        .await;
    let broken = app.get("/agents/broken").await.text;
    assert!(broken.contains("unknown field `max`"), "{broken}");
    let solo = app.get("/agents/solo").await.text;
    assert!(
        solo.contains("the judge \\\"judge\\\" has no prompt"),
        "{solo}"
    );
}
