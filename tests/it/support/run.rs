//! A run as the API shows it, with its requests.

use std::fmt;
use std::ops::Index;

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp};
use crate::support::events::Event;
use crate::support::{TEST_TIMEOUT, within_timeout};

/// A run at the moment it was read.
pub struct Run<'a> {
    app: &'a TestApp,
    record: Value,
}

impl<'a> Run<'a> {
    /// The run that this JSON object shows.
    pub fn new(app: &'a TestApp, record: Value) -> Self {
        assert!(record["id"].is_string(), "this is no run: {record}");
        Self { app, record }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        self.record["id"].as_str().unwrap_or_default()
    }

    /// Its status.
    pub fn status(&self) -> &str {
        self.record["status"].as_str().unwrap_or_default()
    }

    /// The final text of a completed run.
    pub fn output(&self) -> &str {
        assert_eq!(self.status(), "completed", "{self:?}");
        self.record["content"].as_str().expect("a text")
    }

    /// The code and the message that it failed with.
    pub fn failure(&self) -> (&str, &str) {
        assert_eq!(self.status(), "failed", "{self:?}");
        let error = &self.record["error"];
        (
            error["code"].as_str().expect("a code"),
            error["message"].as_str().expect("a message"),
        )
    }

    /// Its own input tokens, output tokens and tool calls.
    pub fn usage(&self) -> (u64, u64, u64) {
        usage_in(&self.record)
    }

    /// Its tree's input tokens, output tokens and tool calls.
    pub fn tree_usage(&self) -> (u64, u64, u64) {
        usage_in(&self.record["tree"])
    }

    /// Waits for its end, also if it waits for approval in between.
    pub async fn wait_for_end(&self) -> Run<'a> {
        let path = format!("/runs/{}?wait={}", self.id(), TEST_TIMEOUT.as_secs());
        within_timeout("the run's end", async {
            loop {
                let got = self.app.get(&path).await;
                if got.status != 202 {
                    assert_eq!(got.status, 200, "{}", got.text);
                    return Run::new(self.app, got.json());
                }
            }
        })
        .await
    }

    /// Reads it again.
    pub async fn reload(&self) -> Run<'a> {
        self.app.find(self.id()).await
    }

    /// Its direct children, in the order of the calls.
    pub async fn children(&self) -> Vec<Run<'a>> {
        let got = self.get("/children").await;
        assert_eq!(got.status, 200, "{}", got.text);
        let mut children = Vec::new();
        for child in got.json()["data"].as_array().expect("data") {
            children.push(self.app.find(child["id"].as_str().expect("an id")).await);
        }
        children
    }

    /// Its direct children once the events tell of this many: a child asks its provider before its start is committed.
    pub async fn wait_for_children(&self, count: usize) -> Vec<Run<'a>> {
        let is_child =
            |event: &Event| event.kind() == "run.queued" && event["parent_id"] == *self.id();
        let mut events = self.app.events(self).await;
        events
            .until_matches(|events| events.iter().filter(|event| is_child(event)).count() >= count)
            .await;
        self.children().await
    }

    /// Its tree of summaries.
    pub async fn tree(&self) -> Value {
        let got = self.get("/tree").await;
        assert_eq!(got.status, 200, "{}", got.text);
        got.json()
    }

    /// Its stored events, page after page.
    pub async fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            let after = events.last().map_or(0, |event: &Event| event.seq());
            let got = self.get(&format!("/events?after={after}")).await;
            assert_eq!(got.status, 200, "{}", got.text);
            let page = got.json();
            let data = page["data"].as_array().expect("data");
            if data.is_empty() {
                return events;
            }
            events.extend(data.iter().cloned().map(Event::new));
        }
    }

    /// Its whole tree, itself first: every record as the list shows it.
    pub async fn tree_runs(&self) -> Vec<Value> {
        let path = format!("/runs?all=true&limit=200&root={}", self.id());
        let got = self.app.get(&path).await;
        assert_eq!(got.status, 200, "{}", got.text);
        let page = got.json();
        assert_eq!(page["next_cursor"], Value::Null, "more than a page");
        let mut runs = page["data"].as_array().expect("data").clone();
        runs.reverse();
        runs
    }

    /// Its recorded conversation: the body of `/messages`.
    pub async fn messages(&self) -> Value {
        let got = self.get("/messages").await;
        assert_eq!(got.status, 200, "{}", got.text);
        got.json()
    }

    /// Cancels it and waits until that is settled.
    pub async fn cancel(&self, reason: &str) -> Run<'a> {
        let path = format!("/runs/{}/cancel?wait={}", self.id(), TEST_TIMEOUT.as_secs());
        let got = self.app.post(&path, &json!({"reason": reason})).await;
        assert_eq!(got.status, 200, "{}", got.text);
        Run::new(self.app, got.json())
    }

    /// GETs a path below the run.
    pub async fn get(&self, path: &str) -> ApiResponse {
        self.app.get(&format!("/runs/{}{path}", self.id())).await
    }
}

impl Index<&str> for Run<'_> {
    type Output = Value;

    fn index(&self, key: &str) -> &Value {
        &self.record[key]
    }
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.record)
    }
}

fn usage_in(object: &Value) -> (u64, u64, u64) {
    let count = |key: &str| {
        object[key]
            .as_u64()
            .unwrap_or_else(|| panic!("{key} is missing in {object}"))
    };
    (
        count("input_tokens"),
        count("output_tokens"),
        count("tool_calls"),
    )
}
