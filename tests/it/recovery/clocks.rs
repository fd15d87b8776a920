//! Clocks that jump: runs that are accepted later sort later, and no run gets more time.

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp};
use crate::support::provider::answer::{calls, hangs, says};

/// Has a run look as if it was accepted when the clock was a year ahead; returns its id.
fn move_ahead(app: &TestApp, id: &str) -> String {
    let millis = u64::from_str_radix(&id[4..17].replace('-', ""), 16).expect("milliseconds");
    let later = format!("{:012x}", millis + 365 * 86_400_000);
    let moved = format!("run_{}-{}{}", &later[..8], &later[8..], &id[17..]);
    let db = app.database();
    let (old, new) = (db.id(id), db.id(&moved));
    db.execute(&format!(
        "UPDATE runs SET id = {new}, root = {new} WHERE id = {old}; \
         UPDATE entries SET root = {new}, run = {new} WHERE root = {old}"
    ));
    moved
}

#[tokio::test]
async fn a_session_continues_its_last_run_after_the_clock_was_set_back() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("one"), says("two"), says("three")]);
    let talk = |input: &str| json!({"input": input, "session": "talk"});
    let first = app.run_with("solo", talk("1")).await.id().to_owned();
    app.daemon.kill().await;
    let first = move_ahead(&app, &first);
    app.restart_after_end().await;

    let second = app.run_with("solo", talk("2")).await.id().to_owned();
    let third = app.run_with("solo", talk("3")).await.id().to_owned();
    assert!(first < second && second < third, "{first} {second} {third}");
    assert_eq!(
        app.provider
            .wait_for_request("solo", 3)
            .await
            .user_messages(),
        ["1", "2", "3"]
    );
    let ids = |page: &Value| -> Vec<String> {
        let runs = page["data"].as_array().expect("runs").iter();
        runs.map(|run| run["id"].as_str().expect("an id").to_owned())
            .collect()
    };
    assert_eq!(
        ids(&app.get("/runs").await.json()),
        [&*third, &second, &first]
    );
    // Times are those of the records, whatever the ids say.
    let created = app.find(&second).await.get("").await.json()["created_at"].clone();
    let created = created.as_str().expect("a time");
    let since = app.get(&format!("/runs?since={created}")).await.json();
    assert_eq!(ids(&since), [&*third, &second]);
    let until = app.get(&format!("/runs?until={created}")).await.json();
    assert_eq!(ids(&until), [&*first]);
}

#[tokio::test]
async fn a_recovered_run_has_no_more_time_than_its_timeout() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [hangs(), hangs()]);
    let run = app
        .start_with("solo", json!({"input": "go", "timeout": 15}))
        .await
        .id()
        .to_owned();
    app.provider.wait_for_request("solo", 1).await;
    app.daemon.kill().await;
    // It was set when the clock was an hour ahead.
    app.database()
        .execute("UPDATE runs SET deadline_at = deadline_at + 3600000");
    app.restart_after_end().await;
    assert_eq!(
        app.find(&run).await.wait_for_end().await.failure().0,
        "timeout"
    );
}

#[tokio::test]
async fn approval_time_counts_in_no_quota_after_a_restart() {
    let mut app = TestApp::setup()
        .agent(
            "solo",
            "tools = [\"delete_path\"]\napprove = [\"delete_path\"]\n[subagent]\nenabled = true\nmax_total_time = 600",
        )
        .spawn()
        .await;
    let delegates =
        |label: &str| calls([("subagent", json!({"label": label, "task_prompt": "go"}))]);
    app.provider.will(
        "solo",
        [
            delegates("first"),
            calls([("delete_path", json!({"path": "none"}))]),
            calls([("delete_path", json!({"path": "none"}))]),
            says("first done"),
            delegates("second"),
            says("second done"),
            says("done"),
        ],
    );
    let run = app.start("solo", "go").await.id().to_owned();
    // Once it waited before the kill, once it still waits.
    for place in 0..2 {
        let path = format!("/runs/{run}/events?after=0");
        let sent = |got: &ApiResponse| -> Vec<Value> {
            let events = got.json()["data"].as_array().cloned().unwrap_or_default();
            let of = |event: &Value| event["type"] == "approval.requested";
            events.into_iter().filter(of).collect()
        };
        let got = app.get_until(&path, |got| sent(got).len() > place).await;
        let request = sent(&got).remove(place);
        let text = |name: &str| request[name].as_str().expect("a text").to_owned();
        let child = text("run_id");
        app.get_until(&format!("/runs/{child}"), |got| {
            got.json()["status"] == "waiting"
        })
        .await;
        app.daemon.kill().await;
        let hour = 3_600_000;
        app.database().execute(&format!(
            "UPDATE runs SET started_at = started_at - {hour}, waiting_since = waiting_since - {hour}, \
             deadline_at = deadline_at - {hour} WHERE waiting_since IS NOT NULL"
        ));
        app.restart_after_end().await;
        let path = format!("/runs/{child}/approvals/{}", text("tool_call_id"));
        let decided = app.post(&path, &json!({"decision": "deny"})).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
    }
    let ended = app.find(&run).await.wait_for_end().await;
    assert_eq!(ended.output(), "done");
    let results = app
        .provider
        .wait_for_request("solo", 7)
        .await
        .tool_results();
    assert!(
        results
            .last()
            .is_some_and(|last| last.contains("second done")),
        "{results:?}"
    );
}
