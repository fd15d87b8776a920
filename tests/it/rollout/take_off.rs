//! A candidate that is worse is taken off.

use serde_json::{Value, json};

use crate::rollout::{
    CANDIDATE, answer, candidates, rollout, run_many, session, set_percent, versions,
};
use crate::support::app::{ApiResponse, Setup, TestApp};
use crate::support::eventually;
use crate::support::provider::answer::{fails, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::webhooks::messages::{self, SECRET, webhook};

const SCORER: &str =
    "[[scorers]]\nname = \"fine\"\nkind = \"assert\"\nexpect = {contains = \"good\"}\n";

fn compared(percent: u32, min_runs: u32, more: &str) -> Setup {
    let settings = format!("scorers = [\"fine\"]\nmin_runs = {min_runs}\n{SCORER}{more}");
    messages::daemon()
        .agent("solo", &rollout(percent, &settings))
        .file("agents/solo.next.toml", CANDIDATE)
}

async fn stopped(app: &TestApp) -> Value {
    let is_stopped = |got: &ApiResponse| !got.json()["rollout"]["stopped_at"].is_null();
    let got = app.get_until("/agents/solo/versions", is_stopped).await;
    got.json()["rollout"].clone()
}

/// Until the rollout is in the record, runs do not count.
async fn started(app: &TestApp) {
    let is_started = |got: &ApiResponse| !got.json()["rollout"]["started_at"].is_null();
    app.get_until("/agents/solo/versions", is_started).await;
}

#[tokio::test]
async fn bad_scores_take_the_candidate_off_for_good() {
    let receiver = WebhookReceiver::start().await;
    let mut app = compared(50, 12, &webhook(&receiver.url("/hook")))
        .spawn()
        .await;
    answer(&app, || says("good"), || says("bad"));
    started(&app).await;
    session(&app, "sticky").await;
    let got = run_many(&app, 60).await;
    // On a slow machine it is taken off before all of them have started.
    assert!((12..=48).contains(&candidates(&got)), "{got:?}");
    let rollout = stopped(&app).await;
    // The record is first; no run gets the candidate after this line.
    app.daemon.wait_for_log("is taken off").await;
    let loss = &rollout["loss"];
    assert_eq!(
        (&loss["scorer"], &loss["difference"]),
        (&json!("fine"), &json!(-1.0))
    );
    assert!(
        loss["high"].as_f64().is_some_and(|high| high < -0.05),
        "{loss}"
    );
    assert_eq!(rollout["percent"], json!(0.0));
    assert_eq!(candidates(&run_many(&app, 20).await), 0);
    assert_eq!(session(&app, "sticky").await, "current");

    // It is reported once, with the newest run of the candidate.
    let message = eventually("the webhook", async || {
        let messages = receiver.messages().into_iter();
        let mut stopped = messages.filter(|it| it.json()["type"] == "rollout.stopped");
        stopped.next()
    })
    .await;
    assert!(message.is_signed_by(SECRET));
    let data = message.json()["data"].clone();
    assert_eq!(
        (&data["agent"], &data["candidate"]),
        (&json!("solo"), &rollout["candidate"])
    );
    assert_eq!(data["loss"], *loss);
    let run = data["run"].as_str().expect("a run");
    let events = app.find(run).await.events().await;
    let mut events = events.iter().filter(|it| it.kind() == "rollout.stopped");
    assert_eq!(events.next().map(|event| &event["loss"]), Some(loss));
    assert!(events.next().is_none());
    let metrics = app.get("/metrics").await.text;
    assert!(
        metrics.contains("axed_rollouts_stopped_total{agent=\"solo\"} 1\n"),
        "{metrics}"
    );

    // It stays off, also after a kill.
    app.crash_and_restart().await;
    assert_eq!(candidates(&run_many(&app, 20).await), 0);
    // Another candidate starts anew, and so does a share that somebody sets.
    app.write(
        "agents/solo.next.toml",
        &format!("{CANDIDATE}description = \"b\"\n"),
    );
    let other = |got: &ApiResponse| got.json()["rollout"]["candidate"] != rollout["candidate"];
    app.get_until("/agents/solo/versions", other).await;
    started(&app).await;
    assert!(candidates(&run_many(&app, 20).await) > 0);
    app.write("agents/solo.next.toml", CANDIDATE);
    app.get_until("/agents/solo/versions", |got| !other(got))
        .await;
    assert_eq!(candidates(&run_many(&app, 20).await), 0);
    let set = set_percent(&app, 100).await;
    assert_eq!(
        (&set["percent"], &set["stopped_at"]),
        (&json!(100.0), &Value::Null)
    );
    assert_eq!(candidates(&run_many(&app, 5).await), 5);
    // What was scored before does not count.
    assert_eq!(versions(&app).await["rollout"]["stopped_at"], Value::Null);
    let sent = receiver.messages().into_iter();
    let sent = sent.filter(|it| it.json()["type"] == "rollout.stopped");
    assert_eq!(sent.count(), 1);
}

#[tokio::test]
async fn failures_take_the_candidate_off_also_after_a_kill() {
    let mut app = compared(50, 12, "").spawn().await;
    answer(&app, || says("good"), || fails(400, "no"));
    started(&app).await;
    run_many(&app, 60).await;
    // It may have been taken off already.
    app.crash_and_restart().await;
    let rollout = stopped(&app).await;
    let loss = &rollout["loss"];
    assert_eq!(
        (&loss["scorer"], &loss["difference"]),
        (&Value::Null, &json!(-1.0))
    );
    let db = app.database();
    let events = db.contains("entries", "rollout.stopped");
    let count = format!("SELECT count(*) FROM entries WHERE {events}");
    assert_eq!(db.number(&count), Some(1));
}

#[tokio::test]
async fn a_candidate_that_is_as_good_stays() {
    let app = compared(50, 12, "").spawn().await;
    answer(&app, || says("good"), || says("good"));
    started(&app).await;
    run_many(&app, 60).await;
    let is_scored = |got: &ApiResponse| {
        let json = got.json();
        let data = json["data"].as_array().expect("sums").iter();
        data.map(|it| it["n"].as_u64().unwrap_or(0)).sum::<u64>() == 60
    };
    app.get_until("/scores?by=variant", is_scored).await;
    // Another look of the leader.
    app.write_agent("other", "");
    app.get_until("/agents", |got| got.json()["data"][1].is_object())
        .await;
    assert_eq!(versions(&app).await["rollout"]["stopped_at"], Value::Null);
}
