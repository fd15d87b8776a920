//! Which times start a run: each at most one, over restarts and kills.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::schedules::{move_back, only_schedule, run_ids, schedule_at, wait_until_seen};
use crate::support::app::{ApiResponse, TestApp};
use crate::support::eventually;
use crate::support::provider::answer::{hangs, says};

const HOUR: SignedDuration = SignedDuration::from_hours(1);
const DAY: SignedDuration = SignedDuration::from_hours(24);

fn has_last_run(list: &ApiResponse) -> bool {
    list.json()["data"][0]["last"].is_object()
}

/// A daemon whose schedule was due that long ago, while no daemon ran.
async fn daemon_that_was_down(ago: SignedDuration, more: &str) -> TestApp {
    let mut app = TestApp::setup()
        .agent("solo", &schedule_at(ago, more))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    wait_until_seen(&app).await;
    app.daemon.kill().await;
    move_back(&app, DAY);
    app.restart_after_end().await;
    app
}

#[tokio::test]
async fn a_time_of_this_minute_starts_a_run_with_the_settings_of_the_schedule() {
    // The minute that ends next: a missed time is started, too.
    let more = "missed = \"once\"\nlabels = { team = \"blue\" }";
    let app = daemon_that_was_down(SignedDuration::ZERO, more).await;
    let list = app.get_until("/schedules", has_last_run).await.json();
    let schedule = &list["data"][0];
    let id = schedule["last"]["run"].as_str().expect("a run");
    let run = app.find(id).await.wait_for_end().await;
    assert_eq!(run.status(), "completed");
    assert_eq!(run["input"], "go");
    assert_eq!(run["labels"], json!({"team": "blue"}));
    let time =
        |value: &Value| -> Timestamp { value.as_str().expect("a time").parse().expect("it") };
    let (at, next) = (time(&schedule["last"]["at"]), time(&schedule["next"]));
    assert_eq!(at.as_second() % 60, 0);
    assert!(next > Timestamp::now() && next <= at + DAY, "{schedule}");
    assert_eq!(schedule["skipped"], Value::Null);
}

#[tokio::test]
async fn an_object_is_the_input_of_an_agent_that_takes_objects() {
    let schema =
        "[input_schema]\ntype = \"object\"\nproperties = { days = { type = \"integer\" } }\n";
    let schedule = schedule_at(HOUR, "").replace("input = \"go\"", "input = { days = 3 }");
    let template = "input_template = \"The last {days} days\"\n";
    let app = TestApp::setup()
        .agent("solo", &format!("{template}{schema}{schedule}"))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    assert_eq!(only_schedule(&app).await["input"], json!({"days": 3}));
    let started = app.post("/schedules/solo/daily/trigger", &json!({})).await;
    let id = started.json()["id"].as_str().expect("a run").to_owned();
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "completed");
    assert_eq!(run["input"], r#"{"days":3}"#);
    let request = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(request.user_messages(), ["The last 3 days"]);
}

#[tokio::test]
async fn a_time_starts_one_run_even_if_the_daemon_is_killed_before_it_knows_of_it() {
    let mut app = daemon_that_was_down(HOUR, "missed = \"once\"").await;
    let first = app.get_until("/schedules", has_last_run).await.json();
    let file = std::fs::read_to_string(app.path("agents/solo.toml")).expect("the file");
    for missed in ["once", "skip", "once"] {
        app.daemon.kill().await;
        // As if the kill had come between the run's record and the schedule's.
        move_back(&app, DAY);
        let missed = format!("missed = \"{missed}\"");
        app.write(
            "agents/solo.toml",
            &file.replace("missed = \"once\"", &missed),
        );
        app.restart_after_end().await;
        let again = app.get_until("/schedules", has_last_run).await.json();
        assert_eq!(again["data"][0]["last"], first["data"][0]["last"]);
    }
    assert_eq!(run_ids(&app).await.len(), 1);
}

#[tokio::test]
async fn a_missed_time_starts_a_run_only_if_the_schedule_says_so() {
    let app = daemon_that_was_down(HOUR * 3, "missed = \"once\"").await;
    app.get_until("/schedules", has_last_run).await;
    assert_eq!(run_ids(&app).await.len(), 1);

    let app = daemon_that_was_down(HOUR * 3, "").await;
    let list = app
        .get_until("/schedules", |list| {
            list.json()["data"][0]["skipped"].is_object()
        })
        .await;
    let skipped = &list.json()["data"][0]["skipped"];
    assert_eq!(skipped["reason"], "the daemon did not run at that time");
    assert!(run_ids(&app).await.is_empty());
}

#[tokio::test]
async fn a_time_at_which_the_queue_was_full_is_missed_for_that_reason() {
    let once = schedule_at(HOUR * 3, "missed = \"once\"");
    let app = TestApp::setup()
        .config("[runs]\nmax_running = 1\nmax_queued = 0")
        .agent("blocker", "")
        .agent("solo", &once)
        .spawn()
        .await;
    app.provider.always("blocker", |_| hangs());
    wait_until_seen(&app).await;
    app.start("blocker", "go").await;
    app.provider.wait_for_request("blocker", 1).await;
    let earlier = (Timestamp::now() - DAY).as_second();
    let move_back = format!("UPDATE schedules SET handled_at = {earlier}");
    app.database().execute(&move_back);
    // A change of the file wakes the scheduler.
    app.write_agent("solo", &once.replace("\"go\"", "\"come\""));
    app.daemon
        .wait_for_log("Schedule daily of agent solo is tried again")
        .await;

    // From now on it is too late for the time.
    app.write_agent("solo", &once.replace("\"once\"", "\"skip\""));
    let is_skipped = |list: &ApiResponse| list.json()["data"][0]["skipped"].is_object();
    let list = app.get_until("/schedules", is_skipped).await.json();
    let reason = &list["data"][0]["skipped"]["reason"];
    assert_eq!(
        reason,
        "the queue is full: 1 running, 0 queued; try again later"
    );
    app.daemon
        .wait_for_log("Schedule daily of agent solo starts no run at")
        .await;
}

#[tokio::test]
async fn a_new_schedule_misses_no_times_of_the_past() {
    let app = TestApp::setup()
        .agent("solo", &schedule_at(HOUR, "missed = \"once\""))
        .spawn()
        .await;
    wait_until_seen(&app).await;
    // One whose times change has missed none, either.
    let other = schedule_at(HOUR * 2, "missed = \"once\"");
    app.write_agent("solo", &other);
    let cron = other
        .lines()
        .find(|line| line.starts_with("cron"))
        .expect("a cron");
    let db = app.database();
    eventually("the new times in the store", async || {
        let times = db.text("SELECT times FROM schedules");
        cron.contains(times.trim_end_matches(" UTC")).then_some(())
    })
    .await;
    assert!(run_ids(&app).await.is_empty());
}

#[tokio::test]
async fn a_time_is_skipped_held_or_started_while_the_last_run_has_not_ended() {
    for overlap in ["skip", "queue", "allow"] {
        let more = format!("missed = \"once\"\noverlap = \"{overlap}\"");
        let mut app = TestApp::setup()
            .agent("solo", &schedule_at(HOUR, &more))
            .spawn()
            .await;
        app.provider.will("solo", [hangs(), hangs(), hangs()]);
        let first = app.post("/schedules/solo/daily/trigger", &json!({})).await;
        let first = first.json()["id"].as_str().expect("an id").to_owned();
        app.provider.wait_for_request("solo", 1).await;
        app.daemon.kill().await;
        let earlier = (Timestamp::now() - DAY).as_second();
        let move_back = format!("UPDATE schedules SET handled_at = {earlier}");
        app.database().execute(&move_back);
        app.restart_after_end().await;
        match overlap {
            "allow" => {
                app.get_until("/runs", |page| page.json()["data"][1].is_object())
                    .await;
            }
            "skip" => {
                let is_skipped = |list: &ApiResponse| list.json()["data"][0]["skipped"].is_object();
                let list = app.get_until("/schedules", is_skipped).await.json();
                let reason = &list["data"][0]["skipped"]["reason"];
                assert_eq!(reason, &format!("{first} had not ended"));
                assert_eq!(run_ids(&app).await, [first]);
            }
            _ => {
                // The held time survives another kill.
                let db = app.database();
                eventually("a held time", async || {
                    db.number("SELECT held_at FROM schedules")
                })
                .await;
                app.provider.wait_for_request("solo", 2).await;
                app.crash_and_restart().await;
                app.provider.wait_for_request("solo", 3).await;
                app.provider.always("solo", |_| says("done"));
                assert_eq!(run_ids(&app).await, [first.as_str()]);
                app.post(&format!("/runs/{first}/cancel"), &json!({})).await;
                app.get_until("/runs", |page| page.json()["data"][1].is_object())
                    .await;
                assert_eq!(run_ids(&app).await.len(), 2);
            }
        }
    }
}

/// A daemon whose schedule has a run that does not end, and a held time. Further columns are as `more` says; returns the run, too.
async fn daemon_with_a_held_time(
    missed: &str,
    held_at: Timestamp,
    more: impl Fn(&TestApp) -> String,
) -> (TestApp, String) {
    let keys = format!("missed = \"{missed}\"\noverlap = \"queue\"");
    let mut app = TestApp::setup()
        .agent("solo", &schedule_at(HOUR, &keys))
        .spawn()
        .await;
    app.provider.will("solo", [hangs(), hangs()]);
    app.provider.always("solo", |_| says("done"));
    let first = app.post("/schedules/solo/daily/trigger", &json!({})).await;
    let first = first.json()["id"].as_str().expect("an id").to_owned();
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.kill().await;
    let hold = format!("UPDATE schedules SET held_at = {}", held_at.as_second());
    app.database().execute(&format!("{hold}, {}", more(&app)));
    app.restart_after_end().await;
    app.provider.wait_for_request("solo", 2).await;
    (app, first)
}

#[tokio::test]
async fn a_held_time_starts_its_run_even_if_a_later_one_was_missed() {
    let earlier = (Timestamp::now() - DAY).as_second();
    let held_at = Timestamp::now() - HOUR * 2;
    let (app, first) =
        daemon_with_a_held_time("skip", held_at, |_| format!("handled_at = {earlier}")).await;
    let is_skipped = |list: &ApiResponse| list.json()["data"][0]["skipped"].is_object();
    let list = app.get_until("/schedules", is_skipped).await.json();
    let reason = &list["data"][0]["skipped"]["reason"];
    assert_eq!(reason, "the daemon did not run at that time");

    app.post(&format!("/runs/{first}/cancel"), &json!({})).await;
    app.get_until("/runs", |page| page.json()["data"][1].is_object())
        .await;
    let second = run_ids(&app).await[0].clone();
    assert_eq!(
        app.find(&second).await.wait_for_end().await.output(),
        "done"
    );
}

#[tokio::test]
async fn the_run_of_a_held_time_makes_no_skipped_time_due_again() {
    let handled_at = Timestamp::now().as_second() / 60 * 60;
    let held_at = Timestamp::now() - HOUR * 2;
    let (app, first) = daemon_with_a_held_time("once", held_at, |app| {
        let reason = app.database().free_text("it had not ended");
        format!("handled_at = {handled_at}, error = {reason}")
    })
    .await;
    app.post(&format!("/runs/{first}/cancel"), &json!({})).await;
    let is_other = |list: &ApiResponse| list.json()["data"][0]["last"]["run"] != json!(first);
    let list = app.get_until("/schedules", is_other).await.json();
    let schedule = &list["data"][0];
    let at: Timestamp = schedule["last"]["at"]
        .as_str()
        .and_then(|text| text.parse().ok())
        .expect("a time");
    assert_eq!(at.as_second(), held_at.as_second());
    let db = app.database();
    assert_eq!(db.number("SELECT held_at FROM schedules"), None);
    assert_eq!(
        db.number("SELECT handled_at FROM schedules"),
        Some(handled_at)
    );
    assert_eq!(schedule["skipped"]["reason"], "it had not ended");
    assert_eq!(run_ids(&app).await.len(), 2);
}

#[tokio::test]
async fn a_schedule_that_was_taken_out_comes_back_as_new_and_paused_if_it_was() {
    let schedule = schedule_at(HOUR, "missed = \"once\"\noverlap = \"queue\"");
    let app = TestApp::setup().agent("solo", &schedule).spawn().await;
    app.provider.will("solo", [hangs()]);
    app.provider.always("solo", |_| says("done"));
    let first = app.post("/schedules/solo/daily/trigger", &json!({})).await;
    let first = first.json()["id"].as_str().expect("an id").to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let db = app.database();
    // A time waits for the end of the run.
    let held_at = (Timestamp::now() - HOUR * 2).as_second();
    db.execute(&format!("UPDATE schedules SET held_at = {held_at}"));

    for is_paused in [false, true] {
        if is_paused {
            let paused = app.post("/schedules/solo/daily/pause", &json!({})).await;
            assert_eq!(paused.status, 200, "{}", paused.text);
        }
        app.write_agent("solo", "");
        eventually("the schedule to be known as removed", async || {
            let times = db.text("SELECT times FROM schedules");
            times.is_empty().then_some(())
        })
        .await;
        assert_eq!(db.number("SELECT held_at FROM schedules"), None);
        let list = app.get("/schedules").await.json();
        assert_eq!(list["data"], json!([]));
        if !is_paused {
            app.find(&first).await.cancel("enough").await;
        }
        // It is out for a day, in which a time passes.
        let earlier = (Timestamp::now() - DAY).as_second();
        db.execute(&format!("UPDATE schedules SET handled_at = {earlier}"));

        let a_minute_ago = Timestamp::now().as_second() - 60;
        app.write_agent("solo", &schedule);
        eventually("the schedule to be known again", async || {
            let times = db.text("SELECT times FROM schedules");
            (!times.is_empty()).then_some(())
        })
        .await;
        let handled_at = db.number("SELECT handled_at FROM schedules");
        assert!(handled_at > Some(a_minute_ago), "{handled_at:?}");
        assert_eq!(only_schedule(&app).await["paused"], is_paused);
        assert_eq!(run_ids(&app).await, [first.as_str()]);
    }
}

#[tokio::test]
async fn a_schedule_of_an_invalid_file_is_not_taken_out() {
    let schedule = schedule_at(HOUR, "missed = \"once\"");
    let mut app = TestApp::setup().agent("solo", &schedule).spawn().await;
    app.provider.always("solo", |_| says("done"));
    wait_until_seen(&app).await;
    app.daemon.kill().await;
    move_back(&app, DAY);
    app.write_agent("solo", &format!("colour = \"blue\"\n{schedule}"));
    app.write_agent("other", &schedule);
    app.restart_after_end().await;
    let db = app.database();
    eventually("the schedule of the other agent", async || {
        (db.count("schedules") == 2).then_some(())
    })
    .await;
    assert!(run_ids(&app).await.is_empty());

    app.write_agent("solo", &schedule);
    app.get_until("/runs", |page| page.json()["data"][0]["agent"] == "solo")
        .await;
}

#[tokio::test]
async fn a_pause_survives_a_restart_and_a_trigger_starts_a_run_nevertheless() {
    let mut app = TestApp::setup()
        .agent("solo", &schedule_at(HOUR, "missed = \"once\""))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let paused = app.post("/schedules/solo/daily/pause", &json!({})).await;
    assert_eq!(paused.status, 200, "{}", paused.text);
    assert_eq!(paused.json()["paused"], true);
    assert_eq!(paused.json()["next"], Value::Null);
    app.daemon.kill().await;
    move_back(&app, DAY);
    app.restart_after_end().await;
    assert_eq!(only_schedule(&app).await["paused"], true);

    let triggered = app
        .post("/schedules/solo/daily/trigger?wait=180", &json!({}))
        .await;
    assert_eq!(triggered.status, 200, "{}", triggered.text);
    assert_eq!(triggered.json()["status"], "completed");
    let id = triggered.json()["id"].clone();
    assert_eq!(
        run_ids(&app).await.len(),
        1,
        "the missed time started nothing"
    );

    let resumed = app.post("/schedules/solo/daily/resume", &json!({})).await;
    assert_eq!(resumed.json()["paused"], false);
    assert_eq!(resumed.json()["last"]["run"], id);
    assert_eq!(run_ids(&app).await.len(), 1, "nor does it after the pause");
}

#[tokio::test]
async fn a_repeated_trigger_with_the_same_idempotency_key_starts_one_run() {
    let app = TestApp::setup()
        .agent("solo", &schedule_at(HOUR, ""))
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let trigger = async || {
        let request = app.request(
            reqwest::Method::POST,
            "/schedules/solo/daily/trigger?wait=180",
        );
        crate::support::app::send(request.header("idempotency-key", "once")).await
    };
    let (first, second) = (trigger().await, trigger().await);
    assert_eq!((first.status, second.status), (200, 200), "{}", second.text);
    assert_eq!(first.json()["id"], second.json()["id"]);
    assert_eq!(second.header("idempotency-replayed"), "true");
}
