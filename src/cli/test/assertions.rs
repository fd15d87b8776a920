//! Checks `[expect]` of a recording. Pure.

use serde_json::Value;

use crate::domain::expect::{Expect, ExpectedCall, Order};
use crate::domain::message::shorten;
use crate::domain::run::{Run, Status};
use crate::domain::run_path;
use crate::engine::replay::playback::PlayedCall;
use crate::engine::replay::recording::read::ReadRecording;

/// Most characters of a text in a message.
const MAX_SHOWN: usize = 200;

/// An assertion that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Its key in `[expect]`.
    pub assertion: &'static str,
    pub message: String,
}

/// The assertions that do not hold for this run and the calls of its tree.
pub fn check(file: &ReadRecording, run: &Run, calls: &[PlayedCall]) -> Vec<Failed> {
    let expect = &file.recording.expect;
    let mut failed = Vec::new();
    let mut fail = |assertion, message: String| failed.push(Failed { assertion, message });
    let is_completed = run.status == Status::Completed;
    if let Some(expected) = expect.completed
        && expected != is_completed
    {
        let error = run.error.as_ref().map(|error| error.message.as_str());
        let why = error.or(run.cancel_reason.as_deref());
        let why = why.map_or(String::new(), |why| {
            format!(": {}", shorten(why, MAX_SHOWN))
        });
        fail(
            "completed",
            format!("the run is {}{why}", run.status.as_str()),
        );
    }
    let content = run.content.as_deref().unwrap_or_default();
    let shown = || format!("the final text is {}", quote(content));
    for text in &expect.contains.0 {
        if !content.contains(text.as_str()) {
            fail(
                "contains",
                format!("{} is missing; {}", quote(text), shown()),
            );
        }
    }
    for pattern in &file.matches {
        if !pattern.is_match(content) {
            fail("matches", format!("{pattern} does not match; {}", shown()));
        }
    }
    if let Some(schema) = &file.schema {
        match serde_json::from_str::<Value>(content) {
            Ok(json) => {
                for error in schema.validation_errors(&json) {
                    fail("schema", error);
                }
            }
            Err(error) => fail("schema", format!("the final text is no JSON: {error}")),
        }
    }
    failed.extend(check_calls(expect, calls));
    failed.extend(check_limits(expect, run));
    failed
}

fn check_limits(expect: &Expect, run: &Run) -> Vec<Failed> {
    let mut failed = Vec::new();
    let mut fail = |assertion, message| failed.push(Failed { assertion, message });
    let tokens = run.tree.usage.tokens.total();
    if let Some(max) = expect.max_tokens.filter(|max| tokens > *max) {
        fail(
            "max_tokens",
            format!("the tree used {tokens} tokens, more than {max}"),
        );
    }
    let cost = run.tree.usage.cost.map_or(0.0, |cost| cost.to_usd());
    if let Some(max) = expect.max_cost_usd.filter(|max| cost > *max) {
        fail(
            "max_cost_usd",
            format!("the tree cost {cost} USD, more than {max}"),
        );
    }
    if let Some(max) = expect.max_turns.filter(|max| run.turns > *max) {
        fail(
            "max_turns",
            format!("the root run took {} turns, more than {max}", run.turns),
        );
    }
    failed
}

fn check_calls(expect: &Expect, calls: &[PlayedCall]) -> Vec<Failed> {
    let mut failed = Vec::new();
    let mut used = vec![false; calls.len()];
    let mut next = 0;
    for expected in &expect.calls {
        let first = match expect.order {
            Order::AsListed => next,
            Order::Any => 0,
        };
        let found = (first..calls.len()).find(|it| !used[*it] && is_match(expected, &calls[*it]));
        match found {
            Some(index) => {
                used[index] = true;
                next = index + 1;
            }
            None => {
                let made: Vec<_> = calls.iter().map(|call| call.tool.as_str()).collect();
                let after = match next {
                    0 => String::new(),
                    _ if expect.order == Order::Any => String::new(),
                    index => format!(" after call {index}"),
                };
                failed.push(Failed {
                    assertion: "calls",
                    message: format!(
                        "no call of {}{after}; the calls are: {}",
                        describe(expected),
                        shorten(&made.join(", "), MAX_SHOWN)
                    ),
                });
            }
        }
    }
    for forbidden in &expect.no_call {
        let mut made = calls.iter();
        if let Some(call) = made.find(|call| is_match(forbidden, call)) {
            failed.push(Failed {
                assertion: "no_call",
                message: format!(
                    "{} calls {} in turn {}: {}",
                    call.path,
                    call.tool,
                    call.turn,
                    shorten(&call.arguments, MAX_SHOWN)
                ),
            });
        }
    }
    failed
}

fn is_match(expected: &ExpectedCall, call: &PlayedCall) -> bool {
    if expected.tool != call.tool {
        return false;
    }
    let agent = run_path::agent(&call.path);
    if expected.agent.as_deref().is_some_and(|it| it != agent) {
        return false;
    }
    if expected.arguments.is_empty() {
        return true;
    }
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
    let mut expected = expected.arguments.iter();
    expected.all(|(key, value)| arguments.get(key) == Some(value))
}

fn describe(call: &ExpectedCall) -> String {
    let mut text = call.tool.clone();
    if !call.arguments.is_empty() {
        let arguments = Value::Object(call.arguments.clone()).to_string();
        text.push_str(&format!(" with {}", shorten(&arguments, MAX_SHOWN)));
    }
    if let Some(agent) = &call.agent {
        text.push_str(&format!(" by {agent}"));
    }
    text
}

fn quote(text: &str) -> String {
    format!("\"{}\"", shorten(text, MAX_SHOWN))
}
