//! `/v1/responses` as streams that clients read again, from where they stopped.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, hangs, says};
use crate::support::within_timeout;
use reqwest::{Method, Response};

/// A stream that is being read.
struct Reader {
    response: Response,
    unread: Vec<u8>,
    /// Whether `[DONE]` was read.
    is_done: bool,
}

impl Reader {
    async fn post(app: &TestApp, body: Value) -> Self {
        let request = app.request(Method::POST, "/v1/responses").json(&body);
        Self::new(request.send().await.expect("a response"))
    }

    async fn get(app: &TestApp, path: &str) -> Self {
        let request = app.request(Method::GET, path);
        Self::new(request.send().await.expect("a response"))
    }

    fn new(response: Response) -> Self {
        assert_eq!(response.status(), 200);
        Self {
            response,
            unread: Vec::new(),
            is_done: false,
        }
    }

    async fn next(&mut self) -> Option<Value> {
        loop {
            while let Some(end) = self.unread.windows(2).position(|two| two == b"\n\n") {
                let block: Vec<u8> = self.unread.drain(..end + 2).collect();
                let block = String::from_utf8(block).expect("UTF-8");
                match block.lines().find_map(|line| line.strip_prefix("data: ")) {
                    None => {}
                    Some("[DONE]") => self.is_done = true,
                    Some(data) => return Some(serde_json::from_str(data).expect("JSON")),
                }
            }
            let chunk = within_timeout("an event", self.response.chunk()).await;
            self.unread.extend(chunk.ok()??);
        }
    }

    /// The events up to the first of this type.
    async fn until(&mut self, kind: &str) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
            if events.last().is_some_and(|it| it["type"] == kind) {
                return events;
            }
        }
        panic!("the stream ended without {kind}: {events:#?}");
    }

    /// The events to the end.
    async fn rest(mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        assert!(self.is_done, "{events:#?}");
        events
    }
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let kinds = events.iter().filter_map(|it| it["type"].as_str());
    kinds
        .map(|kind| kind.trim_start_matches("response."))
        .collect()
}

fn numbers(events: &[Value]) -> Vec<u64> {
    let numbers = events.iter().map(|it| it["sequence_number"].as_u64());
    numbers.map(|it| it.expect("a number")).collect()
}

fn deltas(events: &[Value]) -> String {
    events
        .iter()
        .filter_map(|it| it["delta"].as_str())
        .collect()
}

fn path(created: &Value) -> String {
    let id = created["response"]["id"].as_str().expect("an id");
    format!("/v1/responses/{id}?stream=true")
}

fn request() -> Value {
    json!({"model": "solo", "input": "go", "background": true, "stream": true})
}

const DONE: [&str; 4] = [
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "completed",
];

#[tokio::test]
async fn a_finished_response_is_streamed_again_after_any_event() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one two three")]);
    let first = Reader::post(&app, request()).await.rest().await;
    assert_eq!(deltas(&first), "one two three");
    let path = path(&first[0]);

    let again = Reader::get(&app, &path).await.rest().await;
    assert_eq!(kinds(&again)[..2], ["created", "in_progress"]);
    assert_eq!(deltas(&again), "one two three");
    assert_eq!(again.last(), first.last());

    let without_deltas = |events: &[Value]| -> Vec<Value> {
        let events = events.iter().filter(|it| it["delta"].is_null());
        events.cloned().collect()
    };
    for (at, event) in first.iter().enumerate() {
        let after = format!("{path}&starting_after={}", event["sequence_number"]);
        let rest = Reader::get(&app, &after).await.rest().await;
        let expected = without_deltas(&first[at + 1..]);
        assert_eq!(kinds(&rest), kinds(&expected), "after {event}");
        // Another event may have been committed before the first frames of the item were sent.
        let done = rest
            .iter()
            .filter(|it| DONE.contains(&&it["type"].as_str().unwrap_or_default()[9..]));
        assert!(done.clone().all(|it| expected.contains(it)), "{rest:#?}");
        assert!(
            numbers(&rest)
                .iter()
                .all(|it| *it > event["sequence_number"].as_u64().unwrap_or_default())
        );
    }
}

#[tokio::test]
async fn a_reply_that_is_being_written_continues_from_memory() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("one two three").pausing_at(&gate)]);
    let mut first = Reader::post(&app, request()).await;
    let begun = first.until("response.output_text.delta").await;
    drop(first);
    let path = path(&begun[0]);
    let begun_numbers = numbers(&begun);
    let at = |index: usize| format!("{path}&starting_after={}", begun_numbers[index]);

    let mut whole = Reader::get(&app, &path).await;
    let mut live = Reader::get(&app, &at(begun.len() - 1)).await;
    let mut before_item = Reader::get(&app, &at(1)).await;
    let mut before_part = Reader::get(&app, &at(2)).await;
    let seen = whole.until("response.output_text.delta").await;
    assert_eq!(seen, begun);
    let seen = before_item.until("response.output_text.delta").await;
    assert_eq!(seen, begun[2..]);
    let seen = before_part.until("response.output_text.delta").await;
    assert_eq!(seen, begun[3..]);
    gate.open();
    let rest = live.until("response.completed").await;
    assert_eq!(deltas(&begun) + &deltas(&rest), "one two three");
    assert_eq!(kinds(&rest)[kinds(&rest).len() - 4..], DONE);
    let mut all = begun_numbers.clone();
    all.extend(numbers(&rest));
    assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");
    for mut other in [whole, before_item, before_part] {
        assert_eq!(other.until("response.completed").await, rest);
    }
}

#[tokio::test]
async fn a_stream_is_read_on_after_the_daemon_was_killed() {
    let mut app = TestApp::setup()
        .agent("solo", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let look = delegates([("reader", "the clock")]).with_text("I look.");
    app.provider.will("reader", [says("12:00")]);
    let gate = Gate::closed();
    app.provider.will(
        "solo",
        [
            look,
            says("half a reply").pausing_at(&gate),
            says("It is noon."),
        ],
    );
    let mut first = Reader::post(&app, request()).await;
    let mut seen = first.until("response.output_item.done").await;
    seen.extend(first.until("response.output_text.delta").await);
    let path = path(&seen[0]);
    let numbers_seen = numbers(&seen);
    let last = numbers_seen[seen.len() - 1];

    app.crash_and_restart().await;

    let mut again = Reader::get(&app, &format!("{path}&starting_after={last}")).await;
    let rest = again.until("response.completed").await;
    // The client has the item of the second reply; its text comes as a whole, because it is another one.
    assert_eq!(kinds(&rest), DONE);
    assert_eq!(rest[0]["text"], "It is noon.");
    assert_eq!(rest[0]["item_id"], seen[seen.len() - 1]["item_id"]);
    assert_eq!(rest[0]["output_index"], 1);
    let texts = rest[3]["response"]["output"].as_array().expect("items");
    assert_eq!(texts.len(), 2);
    // A client that has nothing of the second reply gets its item.
    let first_done = numbers_seen[seen.len() - 4];
    let again = Reader::get(&app, &format!("{path}&starting_after={first_done}")).await;
    let rest = again.rest().await;
    assert_eq!(
        kinds(&rest)[..2],
        ["output_item.added", "content_part.added"]
    );
    assert_eq!(kinds(&rest)[2..], DONE);
}

#[tokio::test]
async fn calls_for_the_client_are_streamed_again() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will(
        "solo",
        [calls([("weather", json!({"city": "Bonn"}))]), hangs()],
    );
    let mut body = request();
    body["tools"] =
        json!([{"type": "function", "name": "weather", "parameters": {"type": "object"}}]);
    let first = Reader::post(&app, body.clone()).await.rest().await;
    let path = path(&first[0]);
    for after in [first.len() - 5, first.len() - 3] {
        let number = &first[after]["sequence_number"];
        let rest = Reader::get(&app, &format!("{path}&starting_after={number}")).await;
        let expected: Vec<Value> = first[after + 1..]
            .iter()
            .filter(|it| it["delta"].is_null())
            .cloned()
            .collect();
        assert_eq!(rest.rest().await, expected);
    }
    // The run is at its next response.
    let call = &first[2]["item"]["call_id"];
    body["input"] = json!([{"type": "function_call_output", "call_id": call, "output": "rain"}]);
    let mut second = Reader::post(&app, body).await;
    second.until("response.in_progress").await;
    let rest = Reader::get(&app, &path).await.rest().await;
    assert_eq!(rest.last(), first.last());
}

#[tokio::test]
async fn a_place_in_a_stream_is_checked() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one")]);
    let events = Reader::post(&app, request()).await.rest().await;
    let path = path(&events[0]);
    for (query, param) in [
        ("?stream=true&starting_after=soon", "starting_after"),
        ("?stream=yes", "stream"),
    ] {
        let refused = app.get(&path.replace("?stream=true", query)).await;
        assert_eq!(refused.status, 400, "{}", refused.text);
        assert!(refused.text.contains(param), "{}", refused.text);
    }
    let path = path.replace("?stream=true", "?starting_after=1");
    let refused = app.get(&path).await;
    assert_eq!(refused.status, 400, "{}", refused.text);
    assert!(refused.text.contains("stream=true"), "{}", refused.text);
    // Beyond the end there is only the end.
    let path = path.replace("starting_after=1", "stream=true&include_obfuscation=false");
    let rest = Reader::get(&app, &format!("{path}&starting_after=9007199254740000")).await;
    assert_eq!(kinds(&rest.rest().await), ["completed"]);
}
