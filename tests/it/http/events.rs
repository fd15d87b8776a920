//! The event log of a tree: numbered without gaps, complete from the first event, closed after the last.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::events::{Event, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, says};

async fn family() -> TestApp {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "read the long book")]), says("done")],
    );
    app
}

fn gapless(events: &[Event]) {
    let numbers: Vec<_> = events.iter().map(Event::seq).collect();
    let expected: Vec<_> = (1..=events.len() as u64).collect();
    assert_eq!(numbers, expected);
}

#[tokio::test]
async fn events_of_a_tree_are_ordered_and_without_gaps() {
    let app = family().await;
    app.provider
        .will("reader", [says("read").with_usage(40, 4)]);

    let run = app.run("planner", "go").await;
    let events = run.events().await;

    gapless(&events);
    assert_eq!(run["last_event"], events.len());
    assert_eq!(
        kinds(&events),
        [
            "run.queued",
            "run.started",
            "turn.started",
            "turn.completed",
            "tool.started",
            "agent.called",
            "run.queued",
            "run.started",
            "turn.started",
            "turn.completed",
            "run.completed",
            "agent.returned",
            "tool.completed",
            "turn.started",
            "turn.completed",
            "run.completed",
        ]
    );
    let child = &run.children().await[0];
    for event in &events {
        assert_eq!(event["root_id"], run["id"]);
        assert!(
            event["time"].as_str().expect("a time").ends_with('Z'),
            "{event:?}"
        );
        let (id, depth, agent) = match event["run_id"] == run["id"] {
            true => (&run["id"], 0, "planner"),
            false => (&child["id"], 1, "reader"),
        };
        assert_eq!((&event["run_id"], &event["agent"]), (id, &json!(agent)));
        assert_eq!(event["depth"], depth);
    }
    let called = &events[5];
    assert_eq!(called["child_id"], child["id"]);
    assert_eq!(called["task"], "read the long book");
    let returned = &events[11];
    assert_eq!(returned["child_id"], child["id"]);
    assert_eq!(returned["characters"], 4);
    assert_eq!(events[12]["is_error"], false);
}

#[tokio::test]
async fn a_stream_sends_stored_events_then_live_ones_to_the_end() {
    let app = family().await;
    let gate = Gate::closed();
    app.provider
        .will("reader", [says("read").after_gate(&gate)]);

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("reader", 1).await;
    let mut live = app.events(&run).await;
    let header = |name: &str| live.headers()[name].to_str().expect("text").to_owned();
    assert_eq!(header("cache-control"), "no-store, no-transform");
    assert_eq!(header("x-accel-buffering"), "no");
    let mut received = live.until("agent.called").await;
    gate.open();
    received.extend(live.rest().await);

    gapless(&received);
    assert_eq!(received.last().map(Event::kind), Some("run.completed"));
    assert_eq!(received, run.events().await);
    // A late subscriber gets the same.
    assert_eq!(app.events(&run).await.rest().await, received);
}

#[tokio::test]
async fn a_stream_can_start_in_the_middle() {
    let app = family().await;
    app.provider.will("reader", [says("read")]);
    let run = app.run("planner", "go").await;
    let all = run.events().await;

    let path = format!("/runs/{}/events?after=10", run.id());
    assert_eq!(app.events_at(&path).await.rest().await, all[10..]);
    let page = app.get(&path).await.json();
    assert_eq!(page["data"].as_array().map(Vec::len), Some(all.len() - 10));
    app.get(&format!("/runs/{}/events?after=x", run.id()))
        .await
        .problem(400);
}

#[tokio::test]
async fn scope_self_excludes_children_and_a_child_has_its_own_stream() {
    let app = family().await;
    app.provider.will("reader", [says("read")]);
    let run = app.run("planner", "go").await;
    let child = run.children().await[0].id().to_owned();
    let all = run.events().await;
    let of = |id: &str| -> Vec<Event> {
        all.iter()
            .filter(|event| event["run_id"] == id)
            .cloned()
            .collect()
    };

    let own = format!("/runs/{}/events?scope=self", run.id());
    assert_eq!(app.events_at(&own).await.rest().await, of(run.id()));
    assert_eq!(app.find(&child).await.events().await, of(&child));
    let path = format!("/runs/{child}/events");
    assert_eq!(app.events_at(&path).await.rest().await, of(&child));
}

#[tokio::test]
async fn deltas_are_live_only() {
    let app = TestApp::setup()
        .agent("solo", "stream = true")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("one two three four").pausing_at(&gate)]);

    let run = app.start("solo", "go").await;
    let mut live = app.events(&run).await;
    let mut received = live.until("run.queued").await;
    gate.open();
    received.extend(live.rest().await);

    let reported: String = received
        .iter()
        .filter(|event| event.kind() == "text.delta")
        .map(|event| event["text"].as_str().expect("a text"))
        .collect();
    assert!(reported.ends_with("two three four"), "{reported}");
    let stored: Vec<_> = received
        .iter()
        .filter(|event| event.seq() > 0)
        .cloned()
        .collect();
    assert_eq!(stored, run.events().await);
    assert!(kinds(&stored).len() == stored.len(), "{stored:?}");
}

#[tokio::test]
async fn events_of_an_unknown_run_are_404() {
    let app = TestApp::spawn().await;
    app.get("/runs/run_00000000-0000-7000-8000-000000000000/events")
        .await
        .problem(404);
}
