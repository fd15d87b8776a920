//! Checks assertions: those of a test's `[expect]`, and of scorers.

use std::collections::VecDeque;
use std::sync::Arc;

use regex::Regex;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::counted::counted;
use crate::domain::expect::{Expect, ExpectedCall, Order};
use crate::domain::json_schema::Schema;
use crate::domain::message::shorten;
use crate::domain::run::{Run, Status};
use crate::domain::run_path;
use crate::validation;

/// Most characters of a text in a message.
const MAX_SHOWN: usize = 200;

/// An assertion that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Its key in `[expect]`.
    pub assertion: &'static str,
    pub message: String,
}

/// A tool call of a tree.
#[derive(Clone, Debug)]
pub struct PlayedCall {
    /// The run that made it: see [`run_path`].
    pub path: String,
    pub turn: u32,
    /// From 1.
    pub position: usize,
    pub tool: String,
    /// JSON.
    pub arguments: String,
}

/// Assertions whose patterns are compiled.
#[derive(Debug)]
pub struct Assertions {
    pub expect: Expect,
    matches: Vec<Regex>,
    schema: Option<Schema>,
}

impl Assertions {
    /// # Errors
    /// The key of the assertion, and what is wrong with it.
    pub fn compile(expect: Expect) -> Result<Self, (&'static str, String)> {
        let matches = expect.matches.0.iter().map(|pattern| Regex::new(pattern));
        let matches: Result<Vec<_>, _> = matches.collect();
        let matches = matches.map_err(|error| ("matches", format!("matches: {error}")))?;
        let schema = expect.schema.as_ref().map(compile_schema).transpose();
        let schema = schema.map_err(|why| ("schema", format!("schema: {why}")))?;
        Ok(Self {
            expect,
            matches,
            schema,
        })
    }
}

fn compile_schema(schema: &Value) -> Result<Schema, String> {
    let raw: Box<RawValue> = match schema {
        Value::String(json) => serde_json::from_str(json).map_err(|error| error.to_string())?,
        table => to_raw_value(table).map_err(|error| error.to_string())?,
    };
    validation::compile_schema_blocking(Arc::from(raw))
}

/// The assertions that do not hold for this run, the calls of its tree and its cost, which is `None` if it is not known.
pub fn check(
    assertions: &Assertions,
    run: &Run,
    calls: &[PlayedCall],
    cost_usd: Option<f64>,
) -> Vec<Failed> {
    let expect = &assertions.expect;
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
    for pattern in &assertions.matches {
        if !pattern.is_match(content) {
            fail("matches", format!("{pattern} does not match; {}", shown()));
        }
    }
    if let Some(schema) = &assertions.schema {
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
    failed.extend(check_limits(expect, run, cost_usd));
    failed
}

fn check_limits(expect: &Expect, run: &Run, cost_usd: Option<f64>) -> Vec<Failed> {
    let mut failed = Vec::new();
    let mut fail = |assertion, message: String| failed.push(Failed { assertion, message });
    let tokens = run.tree.usage.tokens.total();
    if let Some(max) = expect.max_tokens.filter(|max| tokens > *max) {
        fail(
            "max_tokens",
            format!(
                "the tree used {}, more than {max}",
                counted(tokens, "token")
            ),
        );
    }
    match (expect.max_cost_usd, cost_usd) {
        (Some(max), Some(cost)) if cost > max => fail(
            "max_cost_usd",
            format!("the tree cost {cost} USD, more than {max}"),
        ),
        (Some(_), None) => {
            let why = match tokens {
                0 => "its replies have no usage",
                _ => "no price of the tree's models is known",
            };
            fail("max_cost_usd", format!("the cost is not known: {why}"));
        }
        _ => {}
    }
    if let Some(max) = expect.max_turns.filter(|max| run.turns > *max) {
        fail(
            "max_turns",
            format!(
                "the root run took {}, more than {max}",
                counted(run.turns, "turn")
            ),
        );
    }
    failed
}

fn check_calls(expect: &Expect, calls: &[PlayedCall]) -> Vec<Failed> {
    let missing = match expect.order {
        Order::AsListed => missing_in_order(&expect.calls, calls),
        Order::Any => missing_in_any_order(&expect.calls, calls),
    };
    let made: Vec<_> = calls.iter().map(|call| call.tool.as_str()).collect();
    let made = shorten(&made.join(", "), MAX_SHOWN);
    let missing = missing.into_iter().map(|missing| Failed {
        assertion: "calls",
        message: format!("no {missing}; the calls are: {made}"),
    });
    let mut failed: Vec<Failed> = missing.collect();
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

fn missing_in_order(expected: &[ExpectedCall], calls: &[PlayedCall]) -> Vec<String> {
    let mut missing = Vec::new();
    let mut next = 0;
    for expected in expected {
        let found = (next..calls.len()).find(|it| is_match(expected, &calls[*it]));
        match found {
            Some(index) => next = index + 1,
            None if next == 0 => missing.push(format!("call of {}", describe(expected))),
            None => missing.push(format!("call of {} after call {next}", describe(expected))),
        }
    }
    missing
}

fn missing_in_any_order(expected: &[ExpectedCall], calls: &[PlayedCall]) -> Vec<String> {
    let matches = expected.iter().map(|expected| {
        let indexes = 0..calls.len();
        let matching = indexes.filter(|index| is_match(expected, &calls[*index]));
        matching.collect::<Vec<usize>>()
    });
    let mut matching = Matching::new(matches.collect(), calls.len());
    let mut missing = Vec::new();
    for (index, expected) in expected.iter().enumerate() {
        if !matching.add(index) {
            let another = match matching.matches[index].is_empty() {
                true => "call",
                false => "other call",
            };
            missing.push(format!("{another} of {}", describe(expected)));
        }
    }
    missing
}

/// Gives each expected call a call of its own, as many as there can be.
struct Matching {
    /// The calls that match each expected one.
    matches: Vec<Vec<usize>>,
    /// The call of each expected one.
    calls: Vec<Option<usize>>,
    /// The expected one of each call.
    expected: Vec<Option<usize>>,
}

impl Matching {
    fn new(matches: Vec<Vec<usize>>, calls: usize) -> Self {
        Self {
            calls: vec![None; matches.len()],
            expected: vec![None; calls],
            matches,
        }
    }

    /// Gives this expected one a call; others may get another one for it. Returns false if there is none. Looks at each call
    /// once.
    fn add(&mut self, expected: usize) -> bool {
        // The expected one from which the search came to each call.
        let mut origins = vec![None; self.expected.len()];
        let mut pending = VecDeque::from([expected]);
        while let Some(expected) = pending.pop_front() {
            for &call in &self.matches[expected] {
                if origins[call].is_some() {
                    continue;
                }
                origins[call] = Some(expected);
                match self.expected[call] {
                    Some(other) => pending.push_back(other),
                    None => {
                        self.shift(call, &origins);
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Gives the free call to the expected one at its origin, the call that this one had to the one at that call's origin,
    /// and so on.
    fn shift(&mut self, free: usize, origins: &[Option<usize>]) {
        let mut next = Some(free);
        while let Some(call) = next {
            let origin = origins[call];
            self.expected[call] = origin;
            next = origin.and_then(|expected| self.calls[expected].replace(call));
        }
    }
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{PlayedCall, check_calls};
    use crate::domain::expect::{Expect, ExpectedCall, Order};

    /// The messages about calls of `read_file` with these paths, in any order; an expected one without a path is any call.
    fn failures(expected: &[Option<&str>], made: &[&str]) -> Vec<String> {
        let calls = expected.iter().map(|path| {
            let arguments = match path {
                Some(path) => json!({"path": path}),
                None => json!({}),
            };
            ExpectedCall {
                tool: "read_file".to_owned(),
                arguments: arguments.as_object().cloned().unwrap_or_default(),
                agent: None,
            }
        });
        let expect = Expect {
            calls: calls.collect(),
            order: Order::Any,
            ..Expect::default()
        };
        let made: Vec<PlayedCall> = (1..)
            .zip(made)
            .map(|(turn, path)| call(turn, path))
            .collect();
        let failed = check_calls(&expect, &made);
        failed.into_iter().map(|failed| failed.message).collect()
    }

    fn call(turn: u32, path: &str) -> PlayedCall {
        let arguments: Value = json!({"path": path});
        PlayedCall {
            path: "solo".to_owned(),
            turn,
            position: 1,
            tool: "read_file".to_owned(),
            arguments: arguments.to_string(),
        }
    }

    #[test]
    fn in_any_order_each_expected_call_gets_its_own() {
        let none: Vec<String> = Vec::new();
        assert_eq!(failures(&[None, Some("a")], &["a", "b"]), none);
        assert_eq!(failures(&[Some("a"), None], &["b", "a"]), none);
        assert_eq!(
            failures(&[None, None, Some("b"), Some("a")], &["a", "b", "c", "d"]),
            none
        );
        let calls = "the calls are: read_file";
        assert_eq!(
            failures(&[Some("b")], &["a"]),
            [format!(
                "no call of read_file with {{\"path\":\"b\"}}; {calls}"
            )]
        );
        assert_eq!(
            failures(&[None, Some("a")], &["a"]),
            [format!(
                "no other call of read_file with {{\"path\":\"a\"}}; {calls}"
            )]
        );
        assert_eq!(failures(&[None; 301], &["a"; 300]).len(), 1);
    }
}
