//! Clients follow runs at any daemon, whichever drives them: the same events with the same numbers, also when the run's daemon
//! dies or messages between daemons are lost.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use reqwest::Method;
use serde_json::{Value, json};

use crate::cluster::{other, pair, spawn};
use crate::support::app::{TestApp, send};
use crate::support::daemon::Daemon;
use crate::support::events::{Event, Events, assert_complete, count, kinds};
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::{ScriptedAnswer, calls, says};
use crate::support::{eventually, within_timeout};

const WORKER: &str = "workdir = \"work\"\ntools = [\"write_file\"]\n";
/// Connections that listen: what they said last, which may be that they look whether the database answers.
const LISTENERS: &str = "FROM pg_stat_activity WHERE datname = current_database() \
     AND (query LIKE 'UNLISTEN%' OR query = 'SELECT 1')";

/// The events of a run at a daemon, after a number.
pub async fn stream_at(daemon: &Daemon, id: &str, after: u64) -> Events {
    let url = format!("{}/runs/{id}/events", daemon.url);
    let request = daemon
        .client
        .get(url)
        .header("accept", "text/event-stream")
        .header("last-event-id", after.to_string());
    let response = within_timeout("the stream's head", request.send()).await;
    Events::new(response.expect("a response"))
}

pub async fn wait_at(daemon: &Daemon, id: &str) -> Value {
    let url = format!("{}/runs/{id}?wait=180", daemon.url);
    let got = send(daemon.client.get(url)).await;
    assert_eq!(got.status, 200, "{}", got.text);
    got.json()
}

/// A call that is another one in each turn.
fn writes(turn: usize) -> ScriptedAnswer {
    let arguments = json!({"path": format!("{turn}.txt"), "content": "x"});
    calls([("write_file", arguments)])
}

pub fn without_live(events: Vec<Event>) -> Vec<Event> {
    let mut events = events;
    events.retain(|event| event.seq() > 0);
    events
}

pub fn live_text(events: &[Event]) -> String {
    let deltas = events.iter().filter(|event| event.kind() == "text.delta");
    deltas.filter_map(|event| event["text"].as_str()).collect()
}

/// Reads on until the text is whole. A reply that ends before may leave out texts that are late.
pub async fn read_text(stream: &mut Events, events: &mut Vec<Event>, text: &str) {
    let before = live_text(events);
    if before != text {
        let is_whole = |more: &[Event]| before.clone() + &live_text(more) == text;
        events.extend(stream.until_matches(is_whole).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_followed_at_another_daemon() {
    let setup = TestApp::setup()
        .file("work/x.txt", "x")
        .agent("solo", &format!("stream = true\n{WORKER}"));
    let Some((app, second, _)) = pair(setup).await else {
        return;
    };
    let [first_gate, gate, last_gate] = [(); 3].map(|()| Gate::closed());
    const TEXT: &str = "one two three four five six";
    let answers = [
        writes(1).after_gate(&first_gate),
        says(TEXT).pausing_at(&gate).ending_at(&last_gate),
    ];
    app.provider.will("solo", answers);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut there = stream_at(&second, &id, 0).await;
    let mut resumed = stream_at(&second, &id, 2).await;
    let mut events = there.until("turn.started").await;
    let waiting = wait_at(&second, &id);
    let story = async {
        first_gate.open();
        events.extend(there.until("text.delta").await);
        gate.open();
        read_text(&mut there, &mut events, TEXT).await;
        last_gate.open();
        events.extend(there.rest().await);
        events
    };
    let (run, events) = tokio::join!(waiting, story);
    assert_eq!(run["content"], TEXT);
    assert_eq!(live_text(&events), TEXT);
    let deltas = events.iter().position(|event| event.kind() == "text.delta");
    let end = events
        .iter()
        .rposition(|event| event.kind() == "turn.completed");
    assert!(deltas < end, "{:?}", kinds(&events));
    let here = app.find(&id).await.events().await;
    assert_eq!(without_live(events), here);
    assert_complete(&here);
    let resumed = without_live(resumed.until("run.completed").await);
    assert_eq!(resumed, here[2..]);
}

/// A response whose text has begun, with the streams of a client here and of one at another daemon.
async fn begun_response(app: &TestApp, other: &Daemon) -> (Events, Events) {
    let body = json!({"model": "solo", "input": "x", "stream": true, "background": true});
    let request = app.request(Method::POST, "/v1/responses").json(&body);
    let mut here = Events::new(request.send().await.expect("a response"));
    let begun = here.until("response.output_text.delta").await;
    let id = begun[0]["response"]["id"].as_str().expect("an id");
    let path = format!("{}/v1/responses/{id}?stream=true", other.url);
    let response = other.client.get(path).send().await.expect("a response");
    (here, Events::new(response))
}

/// The texts in a field of the events of this type.
fn texts_of(events: &[Event], kind: &str, field: &str) -> String {
    let events = events.iter().filter(|event| event.kind() == kind);
    events.filter_map(|event| event[field].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_the_text_that_was_written_before() {
    let setup = TestApp::setup().agent("solo", "stream = true");
    let Some((app, second, _)) = pair(setup).await else {
        return;
    };
    let gate = Gate::closed();
    let answer = says("one two three four").pausing_at(&gate);
    app.provider.will("solo", [answer]);
    let (_here, mut there) = begun_response(&app, &second).await;
    let mut events = there.until("response.output_text.delta").await;
    gate.open();
    events.extend(there.until("response.completed").await);
    let text = texts_of(&events, "response.output_text.delta", "delta");
    assert_eq!(text, "one two three four");
}

/// Its reply begins anew at the daemon of the client, who has a part of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_is_whole_when_its_run_comes_to_the_daemon_of_its_client() {
    let setup = TestApp::setup().agent("solo", "stream = true");
    let Some((mut app, second, _)) = pair(setup).await else {
        return;
    };
    let text = "one two three four";
    let answers = [says(text).pausing_at(&Gate::closed()), says(text)];
    app.provider.will("solo", answers);
    let (_here, mut there) = begun_response(&app, &second).await;
    let mut events = there.until("response.output_text.delta").await;
    app.daemon.kill().await;
    events.extend(there.until("response.completed").await);
    let shown = texts_of(&events, "response.output_text.delta", "delta");
    assert_eq!(shown, text);
    let done = texts_of(&events, "response.output_text.done", "text");
    assert_eq!(done, text);
    let numbers = events.iter().map(|it| it["sequence_number"].as_u64());
    assert!(numbers.is_sorted(), "{events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_keep_their_streams_when_the_daemon_of_the_run_dies() {
    let Some((mut app, second, _)) = pair(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    let answers = [says("late").after_gate(&gate), says("resumed")];
    app.provider.will("solo", answers);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut stream = stream_at(&second, &id, 0).await;
    let mut events = stream.until("turn.started").await;
    let waiting = wait_at(&second, &id);
    let story = async {
        app.daemon.kill().await;
        events.extend(stream.rest().await);
        events
    };
    let (run, events) = tokio::join!(waiting, story);
    assert_eq!(run["content"], "resumed");
    assert_complete(&without_live(events));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_keep_their_streams_when_their_daemon_loses_the_run() {
    let Some((mut app, second, _)) = pair(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("solo", move |_| says("done").after_gate(&door));
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut stream = stream_at(&app.daemon, &id, 0).await;
    let mut events = stream.until("turn.started").await;
    let first = std::mem::replace(&mut app.daemon, second);
    let waiting = wait_at(&first, &id);
    let story = async {
        first.signal("STOP");
        // The other one asks the model again.
        app.provider.wait_for_request("solo", 2).await;
        first.signal("CONT");
        first.wait_for_log("This node has joined again").await;
        gate.open();
        events.extend(stream.rest().await);
        events
    };
    let (run, events) = tokio::join!(waiting, story);
    assert_eq!(run["content"], "done");
    let events = without_live(events);
    assert_complete(&events);
    assert_eq!(count(&events, "run.completed"), 1);
}

/// Another daemon begins the reply anew, of which the followers have a part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_text_is_shown_twice_when_a_daemon_loses_the_run() {
    let setup = TestApp::setup().agent("solo", "stream = true");
    let Some((mut app, second, _)) = pair(setup).await else {
        return;
    };
    let text = "one two three four five six";
    let (start, gate) = (Gate::closed(), Gate::closed());
    let answers = [
        says(text).after_gate(&start).pausing_at(&Gate::closed()),
        says(text).pausing_at(&gate),
    ];
    app.provider.will("solo", answers);
    let request = json!({"model": "solo", "stream": true, "input": "x"});
    let responses = format!("{}/v1/responses", app.daemon.url);
    let response = app.client.post(responses).json(&request).send();
    let response = within_timeout("the response's head", response).await;
    let mut response = Events::new(response.expect("a response"));
    app.provider.wait_for_request("solo", 1).await;
    let runs = app.get("/runs?limit=1").await.json();
    let id = runs["data"][0]["id"].as_str().expect("an id").to_owned();
    let mut stream = stream_at(&app.daemon, &id, 0).await;
    let mut events = stream.until("turn.started").await;
    start.open();
    events.extend(stream.until("text.delta").await);
    let mut frames = response.until("response.output_text.delta").await;
    let first = std::mem::replace(&mut app.daemon, second);
    first.signal("STOP");
    app.provider.wait_for_request("solo", 2).await;
    first.signal("CONT");
    first.wait_for_log("The store works again").await;
    let mut again = stream_at(&first, &id, 0).await;
    again.until("run.resumed").await;
    gate.open();
    let (rest, last_frames) = tokio::join!(stream.rest(), response.until("response.completed"));
    events.extend(rest);
    frames.extend(last_frames);
    let shown = live_text(&events);
    assert!(!shown.is_empty() && text.starts_with(&shown), "{shown}");
    assert_eq!(count(&events, "run.completed"), 1);
    assert_complete(&without_live(events));
    let deltas = texts_of(&frames, "response.output_text.delta", "delta");
    let whole = texts_of(&frames, "response.output_text.done", "text");
    assert_eq!((deltas.as_str(), whole.as_str()), (text, text));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_messages_only_delay() {
    let Some((app, second, url)) = pair(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let listeners = format!("SELECT count(*) {LISTENERS}");
    eventually("two daemons that listen", async || {
        let count =
            postgres::with_client(&url, async |client| client.query_one(&listeners, &[]).await);
        (count.get::<_, i64>(0) == 2).then_some(())
    })
    .await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut stream = stream_at(&second, &id, 0).await;
    let mut events = stream.until("turn.started").await;
    let waiting = wait_at(&second, &id);
    let story = async {
        let sql = format!("SELECT count(pg_terminate_backend(pid)) {LISTENERS}");
        let ended = postgres::with_client(&url, async |client| client.query_one(&sql, &[]).await);
        assert_eq!(ended.get::<_, i64>(0), 2);
        gate.open();
        events.extend(stream.rest().await);
        events
    };
    let (run, events) = tokio::join!(waiting, story);
    assert_eq!(run["content"], "done");
    assert_complete(&without_live(events));
    second
        .wait_for_log("listening to the other nodes again")
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_gets_no_messages_looks_by_itself() {
    let Some((app, url)) = spawn(TestApp::setup().agent("solo", "")).await else {
        return;
    };
    let mut deaf = other(&app, &url, "second");
    deaf.env("AXED_DATA__LISTEN_URL", "postgres://axed@127.0.0.1:1/axed");
    let second = Daemon::start(deaf).await;
    second
        .wait_for_log("not listening to the other nodes")
        .await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let mut stream = stream_at(&second, &id, 0).await;
    let mut events = stream.until("turn.started").await;
    gate.open();
    events.extend(stream.rest().await);
    assert_complete(&without_live(events));
}

/// Prints how much later an event arrives at another daemon than at the one that drives the run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_at_another_daemon_are_a_little_behind() {
    const TURNS: usize = 40;
    let setup = TestApp::setup()
        .file("work/x.txt", "x")
        .agent("solo", &format!("{WORKER}[limits]\nmax_turns = 50"));
    let Some((app, second, _)) = pair(setup).await else {
        return;
    };
    let gate = Gate::closed();
    let door = gate.clone();
    let count = AtomicUsize::new(0);
    app.provider.always("solo", move |_| {
        let turns = count.fetch_add(1, Ordering::Relaxed) + 1;
        match turns {
            1 => writes(turns).after_gate(&door),
            TURNS => says("done"),
            _ => writes(turns),
        }
    });
    let id = app.start("solo", "x").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    let read = async |daemon: &Daemon| {
        let mut stream = stream_at(daemon, &id, 0).await;
        let mut events = stream.until("turn.started").await;
        gate.open();
        let mut times = Vec::new();
        while let Some(event) = stream.next().await {
            times.push(Instant::now());
            events.push(event);
        }
        assert_complete(&without_live(events));
        times
    };
    let (here, there) = tokio::join!(read(&app.daemon), read(&second));
    let delays = there.iter().zip(&here);
    let mut delays: Vec<_> = delays
        .map(|(there, here)| there.saturating_duration_since(*here))
        .collect();
    delays.sort();
    println!(
        "{} events arrive at another node after {:?} (median), {:?} (95 %), {:?} (at most)",
        delays.len(),
        delays[delays.len() / 2],
        delays[delays.len() * 95 / 100],
        delays[delays.len() - 1]
    );
}
