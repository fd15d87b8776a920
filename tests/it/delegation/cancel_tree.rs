//! A large tree is cancelled whole, and a cancel that meets an end of another kind is decided once.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::support::TEST_TIMEOUT;
use crate::support::app::{Setup, TestApp};
use crate::support::events::{Event, assert_complete, count, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::run::Run;

/// Agents `l0` to `l4`, each of which calls three of the next; the last ones never get a reply from their model.
fn scenario(of_l3: &str) -> Setup {
    TestApp::setup()
        .agent(
            "l0",
            "sub_agents = [\"l1\"]\n[sub_agents_config]\nmax_depth = 4",
        )
        .agent("l1", "sub_agents = [\"l2\"]")
        .agent("l2", "sub_agents = [\"l3\"]")
        .agent("l3", &format!("sub_agents = [\"l4\"]\n{of_l3}"))
        .agent("l4", "")
}

async fn at_work(app: &TestApp, leaves: usize) -> Run<'_> {
    for (caller, called) in [("l0", "l1"), ("l1", "l2"), ("l2", "l3"), ("l3", "l4")] {
        app.provider.always(caller, move |_| {
            delegates([(called, "a"), (called, "b"), (called, "c")])
        });
    }
    app.provider.always("l4", |_| hangs());
    let run = app.start("l0", "go").await;
    app.provider.wait_for_concurrency("l4", leaves).await;
    run
}

/// The position of each run's end in the log; every run has one, and it is a cancel for this reason.
fn ends(events: &[Event], reason: &str) -> BTreeMap<String, u64> {
    let mut ends = BTreeMap::new();
    for event in events {
        if ["run.completed", "run.failed", "run.cancelled"].contains(&event.kind()) {
            assert_eq!(event.kind(), "run.cancelled", "{event:?}");
            assert_eq!(event["reason"], reason);
            let run = event["run_id"].as_str().expect("an id").to_owned();
            let before = ends.insert(run, event.seq());
            assert_eq!(before, None, "ended twice: {event:?}");
        }
    }
    ends
}

#[tokio::test]
async fn a_tree_of_121_runs_is_cancelled_from_the_leaves_up() {
    let app = scenario("").spawn().await;
    let run = at_work(&app, 81).await;

    let cancelled = run.cancel("the office is closed").await;

    assert_eq!(cancelled.status(), "cancelled");
    assert_eq!(cancelled["cancel_reason"], "the office is closed");
    assert_eq!(cancelled["tree"]["runs"], 121);
    app.provider.wait_for_disconnects(81).await;
    assert_eq!(app.provider.requests_for("l4").len(), 81);
    let family = run.tree_runs().await;
    assert_eq!(family.len(), 121);
    let events = run.events().await;
    assert_complete(&events);
    let ends = ends(&events, "the office is closed");
    assert_eq!(ends.len(), 121);
    for record in &family {
        assert_eq!(record["status"], "cancelled", "{record}");
        assert_eq!(record["cancel_reason"], "the office is closed", "{record}");
        assert!(record["finished_at"].is_string(), "{record}");
        if let Some(parent) = record["parent_id"].as_str() {
            let own = ends[record["id"].as_str().expect("an id")];
            assert!(own < ends[parent], "a parent ended before {record}");
        }
    }
    let last = events.last().expect("events");
    assert_eq!(
        (last.kind(), &last["run_id"]),
        ("run.cancelled", &run["id"])
    );
    let reported = events
        .iter()
        .filter(|event| event.kind() == "run.cancelling");
    let reported: Vec<_> = reported
        .map(|event| (&event["run_id"], event.seq()))
        .collect();
    assert_eq!(reported.len(), 1, "one cancel was requested");
    assert_eq!(reported[0].0, &run["id"]);
    assert!(ends.values().all(|end| *end > reported[0].1));
}

#[tokio::test]
async fn a_tree_is_cancelling_until_its_last_run_has_ended() {
    let app = scenario("").spawn().await;
    let run = at_work(&app, 81).await;

    let looking = async {
        let mut seen = vec!["running".to_owned()];
        loop {
            let now = run.reload().await;
            if seen.last().is_some_and(|last| last != now.status()) {
                seen.push(now.status().to_owned());
            }
            if now.status() == "cancelled" {
                // What is read after this is no older.
                return (seen, run.tree_runs().await);
            }
        }
    };
    let path = format!("/runs/{}/cancel", run.id());
    let body = json!({"reason": "enough"});
    let ((seen, family), answer) = tokio::join!(looking, app.post(&path, &body));

    let steps: Vec<_> = seen.iter().map(String::as_str).collect();
    assert!(
        matches!(
            steps[..],
            ["running", "cancelling", "cancelled"] | ["running", "cancelled"]
        ),
        "{steps:?}"
    );
    let answered = answer.json();
    match answer.status {
        202 => assert_eq!(answered["status"], "cancelling"),
        status => assert_eq!((status, &answered["status"]), (200, &json!("cancelled"))),
    }
    assert_eq!(answered["cancel_reason"], "enough");
    assert_eq!(family.len(), 121);
    for record in family {
        assert_eq!(record["status"], "cancelled", "{record}");
    }
}

#[tokio::test]
async fn queued_children_of_a_cancelled_tree_never_start() {
    let app = scenario("[sub_agents_config]\nmax_concurrent = 1")
        .spawn()
        .await;
    let run = at_work(&app, 27).await;

    let cancelled = run.cancel("enough").await;

    assert_eq!(cancelled.status(), "cancelled");
    app.provider.wait_for_disconnects(27).await;
    assert_eq!(app.provider.requests_for("l4").len(), 27);
    assert_eq!(cancelled["tree"]["runs"], 1 + 3 + 9 + 27 + 27);
    let events = run.events().await;
    assert_eq!(ends(&events, "enough").len(), 67);
    assert_eq!(count(&events, "agent.called"), 66);
    let metrics = app.get("/metrics").await.text;
    for line in ["axed_runs_running 0", "axed_runs_queued 0"] {
        assert!(metrics.lines().any(|found| found == line), "{metrics}");
    }
}

#[tokio::test]
async fn a_cancelled_branch_ends_and_its_caller_continues() {
    let app = scenario("").spawn().await;
    let run = at_work(&app, 81).await;
    app.provider.will("l0", [says("did without it")]);
    let branches = run.children().await;

    let branch = branches[1].cancel("not this one").await;

    assert_eq!(branch.status(), "cancelled");
    assert_eq!(branch["tree"]["runs"], 40);
    app.provider.wait_for_disconnects(27).await;
    assert_eq!(run.reload().await.status(), "running");
    let records = run.tree_runs().await;
    let of = |status: &str| records.iter().filter(|run| run["status"] == status).count();
    assert_eq!((of("cancelled"), of("running")), (40, 81));
    for branch in [&branches[0], &branches[2]] {
        branch.cancel("nor this").await;
    }
    let ended = run.wait_for_end().await;
    assert_eq!(ended.output(), "did without it");
    let seen = app.provider.requests_for("l0");
    let results = seen[1].tool_results();
    assert!(
        results[1].contains("cancelled: not this one"),
        "{results:?}"
    );
}

/// The record, the log and the responses to the cancel and to a waiting client agree.
fn all_agree(record: &Value, cancel: &Value, waited: &Value, events: &[Event]) {
    let status = record["status"].as_str().expect("a status");
    for answer in [cancel, waited] {
        for field in [
            "status",
            "content",
            "cancel_reason",
            "finished_at",
            "last_event",
        ] {
            assert_eq!(answer[field], record[field], "{field}: {answer} {record}");
        }
    }
    assert_complete(events);
    let own = |event: &&Event| event["run_id"] == record["id"];
    let endings: Vec<_> = events
        .iter()
        .filter(own)
        .map(Event::kind)
        .filter(|kind| ["run.completed", "run.failed", "run.cancelled"].contains(kind))
        .collect();
    assert_eq!(endings, [format!("run.{status}")]);
    assert_eq!(kinds(events).last(), endings.last(), "the end is the last");
    let sent = events
        .iter()
        .filter(|event| event.kind() == "run.cancelling");
    let sent: Vec<_> = sent
        .filter(own)
        .map(|event| event["reason"].clone())
        .collect();
    match status {
        "completed" => {
            assert_eq!(record["content"], "done");
            assert_eq!(record["cancel_reason"], json!(null));
        }
        "cancelled" => {
            assert_eq!(record["content"], json!(null));
            assert_eq!(sent, [record["cancel_reason"].clone()]);
        }
        other => panic!("{other}: {record}"),
    }
}

#[tokio::test]
async fn a_cancel_that_races_with_an_end_is_decided_once() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.always("reader", |_| says("read"));
    for round in 0..120 {
        let gate = Gate::closed();
        // In every other round the run has a child behind it when it comes to its end.
        if round % 2 == 0 {
            app.provider
                .will("planner", [says("done").after_gate(&gate)]);
        } else {
            let last = says("done").after_gate(&gate);
            app.provider
                .will("planner", [delegates([("reader", "x")]), last]);
        }
        let before = app.provider.requests().len();
        let run = app.start("planner", "go").await;
        app.provider
            .wait_for_requests(before + 1 + round % 2 * 2)
            .await;

        let wait = TEST_TIMEOUT.as_secs();
        let path = format!("/runs/{}/cancel?wait={wait}", run.id());
        let ended = format!("?wait={wait}");
        let reasons = ["one", "two"].map(|reason| json!({"reason": reason}));
        // The later the gate opens, the more often the cancel wins.
        let opening = async {
            for _ in 0..round % 12 {
                tokio::task::yield_now().await;
            }
            gate.open();
        };
        let (one, two, waited, ()) = tokio::join!(
            app.post(&path, &reasons[0]),
            app.post(&path, &reasons[1]),
            run.get(&ended),
            opening,
        );

        let record = run.get("").await.json();
        let events = run.events().await;
        for answer in [one, two] {
            assert_eq!(answer.status, 200, "{}", answer.text);
            all_agree(&record, &answer.json(), &waited.json(), &events);
        }
    }
}

#[tokio::test]
async fn a_child_that_has_not_resumed_can_be_cancelled() {
    let mut app = TestApp::setup()
        // On PostgreSQL runs that had a permit keep it.
        .sqlite()
        .agent("first", "")
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.always("first", |_| hangs());
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [hangs()]);
    let first = app.start("first", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("first", 1).await;
    let planner = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("reader", 1).await;
    // A request may be on its way before its turn is on the record.
    for (run, turns) in [(&first, 1), (&planner, 2)] {
        let mut events = app.events(&app.find(run).await).await;
        let begun = |events: &[Event]| count(events, "turn.started") == turns;
        events.until_matches(begun).await;
    }
    let config = std::fs::read_to_string(app.path("config/axed.toml")).expect("a file");
    // The next daemon has one slot, and the older run takes it: the planner stays in line, and its child with it.
    app.write(
        "config/axed.toml",
        &format!("{config}\n[runs]\nmax_running = 1\n"),
    );
    app.crash_and_restart().await;
    app.provider.wait_for_request("first", 2).await;
    let parent = app.find(&planner).await;
    let child = &parent.children().await[0];
    assert_eq!(child.status(), "running");

    for reason in ["not needed", "too late"] {
        let path = format!("/runs/{}/cancel", child.id());
        let got = app.post(&path, &json!({"reason": reason})).await;
        assert_eq!(got.status, 202, "{}", got.text);
        assert_eq!(got.json()["status"], "cancelling");
        assert_eq!(got.json()["cancel_reason"], "not needed");
    }
    app.find(&first).await.cancel("make space").await;

    assert_eq!(parent.wait_for_end().await.output(), "done");
    let child = child.reload().await;
    assert_eq!(child.status(), "cancelled");
    assert_eq!(child["cancel_reason"], "not needed");
    assert_eq!(
        app.provider.requests_for("reader").len(),
        1,
        "requested again"
    );
    let seen = app.provider.requests_for("planner");
    let results = seen[1].tool_results();
    assert!(results[0].contains("cancelled: not needed"), "{results:?}");
    let events = parent.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.cancelling"), 1);
}
