//! Events of a run's tree as lines for people.

use std::collections::HashMap;

use serde_json::Value;

use crate::cli::age::seconds;
use crate::cli::style::{Color, Styled};
use crate::domain::message::shorten;
use crate::domain::terminal_text::{escape_json, sanitize_line};

/// Most characters of arguments in a line; of those that a person decides by, and of results.
const MAX_ARGUMENTS: usize = 200;
const MAX_APPROVAL_ARGUMENTS: usize = 400;
const MAX_RESULT: usize = 200;
/// Most calls whose end is awaited; above that, the oldest facts about calls are forgotten.
const MAX_CALLS: usize = 10_000;

/// Remembers of earlier events what later lines show.
#[derive(Default)]
pub struct EventLines {
    input_tokens: u64,
    output_tokens: u64,
    calls: HashMap<(String, String), Call>,
}

/// A tool call that has begun.
#[derive(Default)]
struct Call {
    /// That of an ad-hoc sub-agent.
    label: Option<String>,
    /// Whether a line shows how the child run of this call ended.
    is_reported: bool,
}

impl EventLines {
    /// The event as a line, indented by its run's depth. `None` for events that say nothing new to a person.
    pub fn line(&mut self, event: &Value) -> Option<Styled> {
        let (color, text) = self.describe(event)?;
        let depth = usize::try_from(number_field(event, "depth")).unwrap_or(0);
        let agent = text_field(event, "agent");
        let line = Styled::default().plain("  ".repeat(depth.min(16)));
        let line = line.colored(Color::Cyan, agent).plain(": ");
        Some(line.colored(color, text))
    }

    /// As [`EventLines::line`], without colours and indentation.
    pub fn plain_line(&mut self, event: &Value) -> Option<String> {
        let (_, text) = self.describe(event)?;
        Some(format!("{}: {text}", text_field(event, "agent")))
    }

    fn describe(&mut self, event: &Value) -> Option<(Option<Color>, String)> {
        let usual = |text| Some((None, text));
        match event["type"].as_str()? {
            "turn.started" => Some((Some(Color::Dim), describe_turn_start(event))),
            "turn.completed" => usual(self.describe_turn_end(event)),
            "tool.started" => usual(self.describe_call(event)),
            "tool.completed" => self.describe_result(event),
            "agent.called" => usual(self.describe_child(event)),
            "agent.returned" => Some(self.describe_child_end(event)),
            "approval.requested" => {
                // A person decides by this line, so nothing in it may be hidden.
                let arguments = arguments_text(event, MAX_APPROVAL_ARGUMENTS);
                let tool = text_field(event, "tool");
                let text = format!("waiting for approval of {tool}{arguments}");
                Some((Some(Color::Yellow), text))
            }
            "approval.decided" if !event["arguments"].is_null() => {
                let arguments = arguments_text(event, MAX_APPROVAL_ARGUMENTS);
                usual(format!("approved with other arguments{arguments}"))
            }
            "approval.decided" => usual(match event["reason"].as_str() {
                Some(_) => format!(
                    "{}: {}",
                    text_field(event, "decision"),
                    text_field(event, "reason")
                ),
                None => text_field(event, "decision"),
            }),
            "message.added" => usual(describe_message(event)),
            "retry.scheduled" => Some((Some(Color::Yellow), describe_retry(event))),
            "memory.warning" | "tools.warning" | "loop.warning" | "model.warning" => {
                let message = text_field(event, "message");
                Some((Some(Color::Yellow), format!("warning: {message}")))
            }
            "context.compacted" => usual(format!(
                "conversation compacted from {} to {} tokens",
                number_field(event, "tokens_before"),
                number_field(event, "tokens_after")
            )),
            "batch.submitted" => usual(format!(
                "waiting for batch {}",
                text_field(event, "batch_id")
            )),
            "run.paused" => Some((Some(Color::Yellow), "paused".to_owned() + &by(event))),
            "run.resumed" if event["cause"] == "request" => {
                usual("resumed".to_owned() + &by(event))
            }
            "run.forked" => usual(describe_fork(event)),
            "run.resumed" => usual("resumed, after a restart or at another node".to_owned()),
            "run.failed" => {
                let message = text_field(&event["error"], "message");
                Some((Some(Color::Red), format!("failed: {message}")))
            }
            "run.cancelled" => {
                let reason = text_field(event, "reason");
                Some((Some(Color::Yellow), format!("cancelled: {reason}")))
            }
            _ => None,
        }
    }

    fn describe_turn_end(&mut self, event: &Value) -> String {
        self.input_tokens += number_field(event, "input_tokens");
        self.output_tokens += number_field(event, "output_tokens");
        let calls = event["tool_calls"].as_array();
        let names = calls
            .into_iter()
            .flatten()
            .take(20)
            .map(|call| text_field(call, "name"));
        let names = names.collect::<Vec<_>>().join(", ");
        let stop_reason = match text_field(event, "stop_reason") {
            reason if reason.is_empty() => "ended".to_owned(),
            reason => reason,
        };
        format!(
            "turn {}: {stop_reason}, {}; tokens so far: in {}, out {}",
            number_field(event, "turn"),
            match calls.map_or(0, Vec::len) {
                0 => "no tool calls".to_owned(),
                1 => format!("1 tool call ({names})"),
                several => format!("{several} tool calls ({names})"),
            },
            self.input_tokens,
            self.output_tokens,
        )
    }

    fn describe_call(&mut self, event: &Value) -> String {
        if self.calls.len() >= MAX_CALLS {
            self.calls.clear();
        }
        let label = event["arguments"]["label"].as_str().map(str::to_owned);
        let call = Call {
            label,
            is_reported: false,
        };
        self.calls.insert(call_key(event), call);
        format!(
            "→ {}{}",
            text_field(event, "tool"),
            arguments_text(event, MAX_ARGUMENTS)
        )
    }

    /// `None` if the end of the call's child run was shown already.
    fn describe_result(&mut self, event: &Value) -> Option<(Option<Color>, String)> {
        let call = self.calls.remove(&call_key(event)).unwrap_or_default();
        if call.is_reported {
            return None;
        }
        let tool = text_field(event, "tool");
        let after = seconds(number_field(event, "duration_ms"));
        let result = match event["result"].as_str().map(str::trim) {
            Some(result) if !result.is_empty() => {
                format!(": {}", shorten(&sanitize_line(result), MAX_RESULT))
            }
            _ => String::new(),
        };
        Some(match event["is_error"].as_bool() {
            Some(true) => (
                Some(Color::Red),
                format!("✗ {tool} failed after {after}{result}"),
            ),
            _ => (None, format!("← {tool} after {after}{result}")),
        })
    }

    fn describe_child(&mut self, event: &Value) -> String {
        let label = self
            .calls
            .get(&call_key(event))
            .and_then(|call| call.label.as_deref());
        format!(
            "→ {}{} (depth {}): {}",
            text_field(event, "child_agent"),
            match label {
                Some(label) => format!(" \"{}\"", sanitize_line(&shorten(label, 40))),
                None => String::new(),
            },
            number_field(event, "child_depth"),
            text_field(event, "task")
        )
    }

    fn describe_child_end(&mut self, event: &Value) -> (Option<Color>, String) {
        let call = self.calls.entry(call_key(event)).or_default();
        call.is_reported = true;
        let label = call.label.as_deref();
        let child = match label {
            Some(label) => format!(
                "{} \"{}\"",
                text_field(event, "child_agent"),
                sanitize_line(&shorten(label, 40))
            ),
            None => text_field(event, "child_agent"),
        };
        let after = seconds(number_field(event, "duration_ms"));
        match event["error"].as_str() {
            Some(error) => (
                Some(Color::Red),
                format!("✗ {child} failed after {after}: {}", sanitize_line(error)),
            ),
            None => (
                None,
                format!(
                    "← {child} after {after}, {}",
                    counted(number_field(event, "characters"), "character")
                ),
            ),
        }
    }
}

fn describe_fork(event: &Value) -> String {
    let source = text_field(&event["forked_from"], "run");
    let turns = number_field(event, "turns");
    let noun = if turns == 1 { "turn" } else { "turns" };
    format!("continues {source} after {turns} {noun}")
}

fn describe_turn_start(event: &Value) -> String {
    format!(
        "turn {}: {}, {}",
        number_field(event, "turn"),
        counted(number_field(event, "messages"), "message"),
        counted(number_field(event, "results"), "pending result"),
    )
}

/// Who did it, after a space; empty without keys.
fn by(event: &Value) -> String {
    match text_field(event, "by") {
        by if by.is_empty() => by,
        by => format!(" by {by}"),
    }
}

fn describe_message(event: &Value) -> String {
    let content = shorten(&text_field(event, "content"), MAX_RESULT);
    match text_field(event, "by") {
        by if by.is_empty() => format!("message: {content}"),
        by => format!("message from {by}: {content}"),
    }
}

fn describe_retry(event: &Value) -> String {
    let reason = text_field(event, "reason");
    // Attempt 0 is the first request to a fallback model, which is sent at once.
    if number_field(event, "attempt") == 0 {
        return format!("{reason}; falling back to {}", text_field(event, "model"));
    }
    match number_field(event, "wait_ms") {
        0 => format!("{reason}; trying again at once"),
        wait => format!("{reason}; trying again in {}", seconds(wait)),
    }
}

/// After a space, on one line; empty if the event has none.
fn arguments_text(event: &Value, max: usize) -> String {
    let arguments = match &event["arguments"] {
        Value::Null => return String::new(),
        // The beginning of arguments that are too long for an event.
        Value::String(beginning) if event["truncated"] == true => format!("{beginning}…"),
        arguments => arguments.to_string(),
    };
    format!(
        " {}",
        shorten(&sanitize_line(&escape_json(&arguments)), max)
    )
}

fn counted(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Ids of calls are unique within a run.
fn call_key(event: &Value) -> (String, String) {
    let id = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
    (id("run_id"), id("tool_call_id"))
}

pub fn number_field(event: &Value, key: &str) -> u64 {
    event[key].as_u64().unwrap_or(0)
}

/// Texts come from models, so control characters are removed.
pub fn text_field(event: &Value, key: &str) -> String {
    sanitize_line(event[key].as_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::EventLines;

    /// Without colours.
    fn line(lines: &mut EventLines, event: Value) -> Option<String> {
        let line = lines.line(&event)?;
        Some(anstream::adapter::strip_str(line.as_str()).to_string())
    }

    #[test]
    fn turns_show_what_goes_in_and_what_comes_out() {
        let lines = &mut EventLines::default();
        let start = json!({"type": "turn.started", "agent": "a", "depth": 0, "turn": 2, "messages": 1, "results": 2});
        assert_eq!(
            line(lines, start).as_deref(),
            Some("a: turn 2: 1 message, 2 pending results")
        );
        let end = |calls: Value| {
            json!({"type": "turn.completed", "agent": "a", "depth": 1, "turn": 2, "stop_reason": "tool_use",
                "input_tokens": 10, "output_tokens": 5, "tool_calls": calls})
        };
        assert_eq!(
            line(lines, end(json!([{"id": "1", "name": "x\u{1b}[2J"}]))).as_deref(),
            Some("  a: turn 2: tool_use, 1 tool call (x\u{fffd}[2J); tokens so far: in 10, out 5")
        );
        assert_eq!(
            line(lines, end(json!([]))).as_deref(),
            Some("  a: turn 2: tool_use, no tool calls; tokens so far: in 20, out 10")
        );
    }

    #[test]
    fn calls_show_arguments_and_results() {
        let lines = &mut EventLines::default();
        let call = |kind: &str, more: Value| {
            let mut event = json!({"type": kind, "agent": "a", "depth": 0, "run_id": "r", "tool_call_id": "c",
                "tool": "read_file", "duration_ms": 1500});
            for (key, value) in more.as_object().expect("fields") {
                event[key] = value.clone();
            }
            event
        };
        for (event, expected) in [
            (
                call("tool.started", json!({"arguments": {"path": "a\u{1b}b"}})),
                "a: → read_file {\"path\":\"a\\u001bb\"}",
            ),
            (
                call(
                    "tool.started",
                    json!({"arguments": "{\"path\":\"aa", "truncated": true}),
                ),
                "a: → read_file {\"path\":\"aa…",
            ),
            (
                call(
                    "tool.completed",
                    json!({"is_error": false, "result": "one\ntwo"}),
                ),
                "a: ← read_file after 1.50 s: one two",
            ),
            (
                call(
                    "tool.completed",
                    json!({"is_error": true, "result": "no such file"}),
                ),
                "a: ✗ read_file failed after 1.50 s: no such file",
            ),
        ] {
            assert_eq!(line(lines, event).as_deref(), Some(expected));
        }
    }

    #[test]
    fn sub_agents_show_their_task_and_how_they_ended() {
        let lines = &mut EventLines::default();
        let event = |kind: &str, error: Value| {
            json!({"type": kind, "agent": "a", "depth": 0, "run_id": "r", "tool_call_id": "c", "tool": "subagent",
                "child_agent": "b", "child_depth": 1, "task": "look\u{202e}", "duration_ms": 1500, "characters": 12,
                "error": error, "is_error": true, "arguments": {"label": "docs"}})
        };
        line(lines, event("tool.started", Value::Null)).expect("a line");
        for (kind, error, expected) in [
            (
                "agent.called",
                Value::Null,
                Some("a: → b \"docs\" (depth 1): look\u{fffd}"),
            ),
            (
                "agent.returned",
                Value::Null,
                Some("a: ← b \"docs\" after 1.50 s, 12 characters"),
            ),
            (
                "agent.returned",
                json!("no"),
                Some("a: ✗ b \"docs\" failed after 1.50 s: no"),
            ),
            ("tool.completed", Value::Null, None),
        ] {
            assert_eq!(
                line(lines, event(kind, error)).as_deref(),
                expected,
                "{kind}"
            );
        }
    }

    #[test]
    fn retries_and_failures_are_lines() {
        let lines = &mut EventLines::default();
        let retry = |attempt: u64, wait: u64| {
            json!({"type": "retry.scheduled", "agent": "a", "depth": 0, "model": "x/y", "attempt": attempt,
                "wait_ms": wait, "reason": "server: no"})
        };
        for (attempt, wait, action) in [
            (0, 0, "falling back to x/y"),
            (1, 0, "trying again at once"),
            (1, 1500, "trying again in 1.50 s"),
        ] {
            assert_eq!(
                line(lines, retry(attempt, wait)),
                Some(format!("a: server: no; {action}"))
            );
        }
        let failed = json!({"type": "run.failed", "agent": "a", "depth": 0, "error": {"message": "no\nmore"}});
        assert_eq!(line(lines, failed).as_deref(), Some("a: failed: no more"));
        assert_eq!(line(lines, json!({"type": "run.queued"})), None);
    }
}
