//! Streams of events that clients rely on: the answer to a POST, and one that is cut and taken up again.

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::events::{Event, Events, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};
use crate::support::within_timeout;

/// Starts a run and listens to it, in one request.
async fn post(app: &TestApp, agent: &str, body: Value) -> Events {
    let request = app
        .request(Method::POST, &format!("/agents/{agent}/runs"))
        .header("accept", "text/event-stream")
        .json(&body);
    let response = within_timeout("the stream's head", request.send()).await;
    Events::new(response.expect("a head"))
}

/// The id of the run that a stream is of.
fn id(stream: &Events) -> String {
    let location = stream.headers()["location"].to_str().expect("text");
    let id = location.rsplit('/').next().expect("an id");
    id.to_owned()
}

/// Listens on after this event.
async fn resume(app: &TestApp, path: &str, last: u64) -> Response {
    let request = app
        .request(Method::GET, path)
        .header("accept", "text/event-stream")
        .header("last-event-id", last.to_string());
    within_timeout("the stream's head", request.send())
        .await
        .expect("a head")
}

fn numbers(events: &[Event]) -> Vec<u64> {
    let numbers = events.iter().map(Event::seq);
    numbers.filter(|number| *number > 0).collect()
}

fn gapless(events: &[Event]) -> bool {
    let numbers = numbers(events);
    numbers == (1..=numbers.len() as u64).collect::<Vec<_>>()
}

#[tokio::test]
async fn a_streaming_post_sends_every_event_and_delta_in_order() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let words: Vec<String> = (0..200).map(|n| format!("{n:0>999} ")).collect();
    let text = words.concat();
    app.provider.will("solo", [says(text.trim_end())]);

    let stream = post(&app, "solo", json!({"input": "go"})).await;
    let id = id(&stream);
    assert_eq!(stream.headers()["cache-control"], "no-store, no-transform");
    assert_eq!(stream.headers()["location"], format!("/runs/{id}"));
    let reported = stream.rest().await;

    assert!(gapless(&reported), "{:?}", numbers(&reported));
    let all: Vec<_> = reported.iter().map(Event::kind).collect();
    let (before, rest) = all.split_at(3);
    let (deltas, after) = rest.split_at(rest.len() - 2);
    assert_eq!(before, ["run.queued", "run.started", "turn.started"]);
    assert!(deltas.iter().all(|kind| *kind == "text.delta"), "{all:?}");
    assert_eq!(after, ["turn.completed", "run.completed"]);
    let deltas = reported.iter().filter_map(|event| event["text"].as_str());
    assert_eq!(deltas.collect::<String>(), text.trim_end());
    assert_eq!(app.find(&id).await.output(), text.trim_end());
}

#[tokio::test]
async fn a_streaming_post_sends_the_events_of_the_whole_tree() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = ["1", "2", "3", "4"].map(|task| ("reader", task));
    app.provider.will(
        "planner",
        [
            delegates(tasks).with_text("let me see "),
            says("all is done"),
        ],
    );
    app.provider.always("reader", |_| says("what I have read"));

    let reported = post(&app, "planner", json!({})).await.rest().await;

    assert!(gapless(&reported), "{:?}", numbers(&reported));
    let run = app
        .find(reported[0]["run_id"].as_str().expect("an id"))
        .await;
    let numbered: Vec<_> = reported.iter().filter(|event| event.seq() > 0).collect();
    assert_eq!(numbered, run.events().await.iter().collect::<Vec<_>>());
    // A delta belongs to the last started turn of its run, which has not completed.
    for (at, delta) in reported.iter().enumerate() {
        if delta.kind() == "text.delta" {
            let turn = reported[..at].iter().rev().find(|event| {
                event.seq() > 0
                    && event["run_id"] == delta["run_id"]
                    && event.kind().starts_with("turn.")
            });
            let turn = turn.expect("a turn");
            assert_eq!(turn.kind(), "turn.started", "{delta:?}");
            assert_eq!(turn["turn"], delta["turn"]);
        }
    }
    let deltas = reported.iter().filter(|event| event.kind() == "text.delta");
    assert_eq!(deltas.count(), 3 + 4 * 4 + 3);
}

#[tokio::test]
async fn a_streaming_post_that_is_refused_is_a_problem() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let ask = |agent: &str, body: &'static str| {
        app.request(Method::POST, &format!("/agents/{agent}/runs"))
            .header("accept", "text/event-stream")
            .body(body)
    };
    send(ask("nobody", "")).await.problem(404);
    send(ask("solo", "{\"inptu\": 1}")).await.problem(422);
}

#[tokio::test]
async fn the_preferred_media_type_decides_between_a_stream_and_json() {
    const STREAM: &str = "text/event-stream";
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let input = json!({"input": "go"});
    for (accept, streams) in [
        ("text/event-stream, application/json", true),
        ("application/json;q=0.5, text/event-stream", true),
        ("Text/Event-Stream;q=0.2, */*; q=0.1", true),
        ("text/event-stream;q=0.1, application/json", false),
        ("application/json;q=0.9, text/event-stream; q=0.8", false),
        ("text/event-stream;q=0, */*", false),
        ("*/*", false),
    ] {
        let accepting =
            async |request: RequestBuilder| send(request.header("accept", accept)).await;
        let kind = |got: &ApiResponse| got.header("content-type").starts_with(STREAM);
        let post = app.request(Method::POST, "/agents/solo/runs?wait=180");
        let started = accepting(post.json(&input)).await;
        assert_eq!(kind(&started), streams, "{accept}: {}", started.text);
        let location = started.header("location").to_owned();
        let events = format!("{location}/events");
        let read = accepting(app.request(Method::GET, &events)).await;
        assert_eq!(kind(&read), streams, "{accept}: {}", read.text);
        let last = "run.completed";
        assert!(read.text.contains(last), "{accept}: {}", read.text);
    }
}

#[tokio::test]
async fn a_body_can_turn_deltas_off() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("one two three"));

    let reported = post(&app, "solo", json!({"stream": false}))
        .await
        .rest()
        .await;

    assert_eq!(kinds(&reported).len(), reported.len(), "{reported:?}");
    assert!(!app.provider.requests()[0].wants_stream());
}

#[tokio::test]
async fn disconnecting_from_a_streaming_post_does_not_stop_the_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);

    let mut stream = post(&app, "solo", json!({})).await;
    let id = id(&stream);
    stream.until("turn.started").await;
    app.provider.wait_for_concurrency("solo", 1).await;
    drop(stream);
    gate.open();

    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_quiet_stream_sends_comments() {
    let app = TestApp::setup().agent("slow", "").spawn().await;
    app.provider.will("slow", [hangs()]);
    let run = app.start("slow", "go").await;
    let path = format!("/runs/{}/events", run.id());
    let mut stream = resume(&app, &path, 0).await;

    within_timeout("a heartbeat", async {
        let mut reported = String::new();
        while !reported.ends_with("\n\n:\n\n") {
            let chunk = stream.chunk().await.expect("a whole stream");
            reported.push_str(&String::from_utf8_lossy(&chunk.expect("no end")));
        }
        let first = "retry: 2000\nid: 1\nevent: run.queued\n";
        assert!(reported.starts_with(first), "{reported}");
        assert!(reported.contains("event: turn.started"), "{reported}");
    })
    .await;
}

#[tokio::test]
async fn the_first_block_is_an_event_and_is_sent_at_once() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let request = app
        .request(Method::POST, "/agents/solo/runs")
        .header("accept", "text/event-stream")
        .json(&json!({"stream": false}));
    let mut stream = within_timeout("a head", request.send())
        .await
        .expect("a head");
    let mut reported = String::new();
    while !reported.contains("event: turn.started") || !reported.ends_with("\n\n") {
        let chunk = within_timeout("a chunk", stream.chunk())
            .await
            .expect("a stream")
            .expect("no end");
        let is_first = reported.is_empty();
        reported.push_str(&String::from_utf8_lossy(&chunk));
        if is_first {
            let first = "retry: 2000\nid: 1\nevent: run.queued\n";
            assert!(reported.starts_with(first), "{reported}");
        }
    }
    let last = reported.matches("\nid: ").count() as u64;

    // A client without missed events gets a comment, so that it sees the stream open.
    let path = stream.headers()["location"].to_str().expect("text");
    let mut stream = resume(&app, &format!("{path}/events"), last).await;
    let first = within_timeout("a chunk", stream.chunk())
        .await
        .expect("a stream");
    // A heartbeat may follow in the same chunk.
    let first = String::from_utf8_lossy(&first.expect("a chunk")).replace(":\n\n", "");
    assert_eq!(first, "");
    gate.open();
    let mut rest = String::new();
    while let Some(chunk) = within_timeout("a chunk", stream.chunk())
        .await
        .expect("a stream")
    {
        rest.push_str(&String::from_utf8_lossy(&chunk));
    }
    let next = format!("retry: 2000\nid: {}\nevent: turn.completed\n", last + 1);
    assert!(
        rest.trim_start_matches(":\n\n").starts_with(&next),
        "{rest}"
    );
    assert_eq!(rest.matches("retry:").count(), 1, "{rest}");
}

/// A client that keeps what it received, and the number of the last whole event.
#[derive(Default)]
struct Reader {
    reported: Vec<Event>,
    cuts: usize,
}

impl Reader {
    fn last(&self) -> u64 {
        self.reported.last().map_or(0, Event::seq)
    }

    /// Listens on, reads a few events, and hangs up.
    async fn reads(&mut self, app: &TestApp, path: &str, few: usize) {
        let mut stream = Events::new(resume(app, path, self.last()).await);
        for _ in 0..few {
            let event = stream.next().await.expect("another event");
            if event.seq() > 0 {
                self.reported.push(event);
            }
        }
        self.cuts += 1;
    }
}

#[tokio::test]
async fn a_client_that_reconnects_a_hundred_times_gets_every_event_once() {
    const CHILDREN: usize = 25;
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]\nstream = true")
        .agent("reader", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    let tasks: [(&str, &str); CHILDREN] = [("reader", "read"); CHILDREN];
    app.provider.will(
        "planner",
        [
            delegates(tasks).with_text("let me see"),
            says("done").after_gate(&gate),
        ],
    );
    app.provider.always("reader", |_| says("read"));
    let run = app.start("planner", "go").await;
    let (path, id) = (format!("/runs/{}/events", run.id()), run.id().to_owned());
    let mut reader = Reader::default();

    // While the tree is active.
    for few in (0..50).map(|n| 1 + n % 3) {
        reader.reads(&app, &path, few).await;
    }
    gate.open();
    app.find(&id).await.wait_for_end().await;
    // After its end, over five daemons, of which every other one is killed.
    for n in 0..50 {
        if n % 10 == 5 {
            match n % 20 {
                5 => app.crash_and_restart().await,
                _ => app.restart().await,
            }
        }
        reader.reads(&app, &path, 1 + n % 2).await;
    }
    assert_eq!(reader.cuts, 100);
    let rest = Events::new(resume(&app, &path, reader.last()).await);
    reader.reported.extend(rest.rest().await);

    assert!(gapless(&reader.reported), "{:?}", numbers(&reader.reported));
    assert_eq!(reader.reported, app.find(&id).await.events().await);
    assert_eq!(
        reader.reported.last().map(Event::kind),
        Some("run.completed")
    );
    assert_eq!(resume(&app, &path, reader.last()).await.status(), 204);
}

#[tokio::test]
async fn reconnecting_after_the_end_returns_204() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read")]);
    let run = app.run("planner", "go").await;
    let child = run.children().await.remove(0);
    for (run, scope) in [
        (&run, "tree"),
        (&run, "self"),
        (&child, "tree"),
        (&child, "self"),
    ] {
        let last = run["last_event"].as_u64().expect("a number");
        let path = format!("/runs/{}/events?scope={scope}", run.id());
        let over = resume(&app, &path, last).await;
        assert_eq!(over.status(), 204, "{path}");
        assert_eq!(over.headers()["cache-control"], "no-store, no-transform");
        // The first request of an `EventSource` has only the query.
        for after in [last, last + 1] {
            let path = format!("{path}&after={after}");
            let over = app
                .request(Method::GET, &path)
                .header("accept", "text/event-stream");
            assert_eq!(send(over).await.status, 204, "{path}");
        }
        let nearly = Events::new(resume(&app, &path, last - 1).await)
            .rest()
            .await;
        assert_eq!(numbers(&nearly), [last], "{path}");
        // A page is a page.
        let page: ApiResponse = app.get(&format!("{path}&after={last}")).await;
        assert_eq!(
            (page.status, page.json()["next_after"].is_null()),
            (200, true)
        );
    }
}
