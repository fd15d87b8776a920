//! Reads a stream of server-sent events, with a reader of its own so that the daemon's writer is really tested.

use std::ops::Index;

use reqwest::Response;
use reqwest::header::HeaderMap;
use serde_json::Value;

use crate::support::within_timeout;

/// A run's event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    data: Value,
}

impl Event {
    /// The event that this JSON object is.
    pub fn new(data: Value) -> Self {
        assert!(data["type"].is_string(), "this is no event: {data}");
        Self { data }
    }

    /// Its type.
    pub fn kind(&self) -> &str {
        self.data["type"].as_str().unwrap_or_default()
    }

    /// Its number; 0 for one that has none.
    pub fn seq(&self) -> u64 {
        self.data["seq"].as_u64().unwrap_or_default()
    }
}

impl Index<&str> for Event {
    type Output = Value;

    fn index(&self, key: &str) -> &Value {
        &self.data[key]
    }
}

/// A stream of events that is being read.
pub struct Events {
    response: Response,
    unread: Vec<u8>,
}

impl Events {
    /// Reads this response's body.
    pub fn new(response: Response) -> Self {
        assert_eq!(response.status(), 200);
        let kind = response.headers()["content-type"].to_str().expect("text");
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        Self {
            response,
            unread: Vec::new(),
        }
    }

    /// The response's headers.
    pub fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The next event; none at the stream's end.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            while let Some(end) = self.unread.windows(2).position(|two| two == b"\n\n") {
                let block: Vec<u8> = self.unread.drain(..end + 2).collect();
                if let Some(event) = event(std::str::from_utf8(&block).expect("UTF-8")) {
                    return Some(event);
                }
            }
            let chunk = within_timeout("an event", self.response.chunk()).await;
            self.unread.extend(chunk.expect("a whole stream")?);
        }
    }

    /// Reads on to the first event of this type, which is the last that is returned.
    pub async fn until(&mut self, kind: &str) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
            if events.last().is_some_and(|event| event.kind() == kind) {
                return events;
            }
        }
        panic!("the stream ended without {kind}: {events:#?}");
    }

    /// Reads on until what was read is as wished.
    pub async fn until_matches(&mut self, condition: impl Fn(&[Event]) -> bool) -> Vec<Event> {
        let mut events = Vec::new();
        while !condition(&events) {
            match self.next().await {
                Some(event) => events.push(event),
                None => panic!("the stream ended too early: {events:#?}"),
            }
        }
        events
    }

    /// Reads to the stream's end.
    pub async fn rest(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

/// The event in a block of lines; `None` if it has only a comment or a `retry`.
fn event(block: &str) -> Option<Event> {
    let field = |name: &str| {
        block
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|value| value.strip_prefix(' ').unwrap_or(value))
    };
    let event = Event::new(serde_json::from_str(field("data")?).expect("JSON in data"));
    assert_eq!(field("event"), Some(event.kind()), "{block}");
    let number = (event.seq() > 0).then(|| event.seq().to_string());
    assert_eq!(field("id"), number.as_deref(), "{block}");
    Some(event)
}

/// How many events are of this type.
pub fn count(events: &[Event], kind: &str) -> usize {
    events.iter().filter(|event| event.kind() == kind).count()
}

/// Checks that the events are a whole log: every number once, in order, from 1.
pub fn assert_complete(events: &[Event]) {
    let numbers: Vec<_> = events.iter().map(Event::seq).collect();
    assert_eq!(numbers, (1..=events.len() as u64).collect::<Vec<_>>());
}

/// The types of events, without those that are live only.
pub fn kinds(events: &[Event]) -> Vec<&str> {
    events
        .iter()
        .map(Event::kind)
        .filter(|kind| !kind.starts_with("text."))
        .collect()
}
