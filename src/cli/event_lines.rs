//! Events of a run's tree as lines for people.

use std::collections::HashMap;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::cli::age::seconds;
use crate::cli::style::{Color, Styled};
use crate::domain::event::{CalledTool, Event, EventKind, ResumeCause};
use crate::domain::message::shorten;
use crate::domain::run::RunId;
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
    /// By run and id: ids of calls are unique within a run.
    calls: HashMap<(RunId, String), Call>,
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
    pub fn line(&mut self, event: &Event) -> Option<Styled> {
        let (color, text) = self.describe(event)?;
        let line = Styled::default().plain("  ".repeat(usize::from(event.depth.min(16))));
        let line = line.colored(Color::Cyan, sanitize_line(&event.agent));
        Some(line.plain(": ").colored(color, text))
    }

    /// As [`EventLines::line`], without colours and indentation.
    pub fn plain_line(&mut self, event: &Event) -> Option<String> {
        let (_, text) = self.describe(event)?;
        Some(format!("{}: {text}", sanitize_line(&event.agent)))
    }

    fn describe(&mut self, event: &Event) -> Option<(Option<Color>, String)> {
        let run = event.run_id;
        let yellow = |text| (Some(Color::Yellow), text);
        let (color, text) = match &event.kind {
            EventKind::TurnStarted {
                turn,
                messages,
                results,
            } => {
                let messages = counted(*messages as u64, "message");
                let results = counted(*results as u64, "pending result");
                (
                    Some(Color::Dim),
                    format!("turn {turn}: {messages}, {results}"),
                )
            }
            EventKind::TurnCompleted {
                turn,
                stop_reason,
                input_tokens,
                output_tokens,
                tool_calls,
                ..
            } => {
                self.input_tokens += input_tokens;
                self.output_tokens += output_tokens;
                let reason = sanitize_line(stop_reason.as_deref().unwrap_or_default());
                let reason = if reason.is_empty() { "ended" } else { &reason };
                let calls = describe_calls(tool_calls);
                let (input, output) = (self.input_tokens, self.output_tokens);
                (
                    None,
                    format!(
                        "turn {turn}: {reason}, {calls}; tokens so far: in {input}, out {output}"
                    ),
                )
            }
            EventKind::ToolStarted {
                tool_call_id,
                tool,
                arguments,
                truncated,
                ..
            } => {
                if self.calls.len() >= MAX_CALLS {
                    self.calls.clear();
                }
                let arguments = arguments_value(arguments);
                let call = Call {
                    label: arguments["label"].as_str().map(str::to_owned),
                    is_reported: false,
                };
                self.calls.insert((run, tool_call_id.clone()), call);
                let arguments = arguments_text(&arguments, *truncated, MAX_ARGUMENTS);
                (None, format!("→ {}{arguments}", sanitize_line(tool)))
            }
            EventKind::ToolCompleted {
                tool_call_id,
                tool,
                duration_ms,
                is_error,
                result,
                ..
            } => {
                let call = self.calls.remove(&(run, tool_call_id.clone()));
                // The end of the call's child run was shown already.
                if call.is_some_and(|call| call.is_reported) {
                    return None;
                }
                let (tool, after) = (sanitize_line(tool), seconds(*duration_ms));
                let result = match result.trim() {
                    "" => String::new(),
                    result => format!(": {}", shorten(&sanitize_line(result), MAX_RESULT)),
                };
                match is_error {
                    true => {
                        let text = format!("✗ {tool} failed after {after}{result}");
                        (Some(Color::Red), text)
                    }
                    false => (None, format!("← {tool} after {after}{result}")),
                }
            }
            EventKind::AgentCalled {
                tool_call_id,
                child_agent,
                child_depth,
                task,
                ..
            } => {
                let call = self.calls.get(&(run, tool_call_id.clone()));
                let child = child_name(child_agent, call);
                let task = sanitize_line(task);
                (None, format!("→ {child} (depth {child_depth}): {task}"))
            }
            EventKind::AgentReturned {
                tool_call_id,
                child_agent,
                duration_ms,
                characters,
                error,
                ..
            } => {
                let call = self.calls.entry((run, tool_call_id.clone())).or_default();
                call.is_reported = true;
                let child = child_name(child_agent, Some(call));
                let after = seconds(*duration_ms);
                match error {
                    Some(error) => {
                        let error = sanitize_line(error);
                        let text = format!("✗ {child} failed after {after}: {error}");
                        (Some(Color::Red), text)
                    }
                    None => {
                        let characters = characters.unwrap_or_default() as u64;
                        let characters = counted(characters, "character");
                        (None, format!("← {child} after {after}, {characters}"))
                    }
                }
            }
            EventKind::ApprovalRequested {
                tool,
                arguments,
                truncated,
                ..
            } => {
                // A person decides by this line, so nothing in it may be hidden.
                let arguments = arguments_value(arguments);
                let arguments = arguments_text(&arguments, *truncated, MAX_APPROVAL_ARGUMENTS);
                let tool = sanitize_line(tool);
                yellow(format!("waiting for approval of {tool}{arguments}"))
            }
            EventKind::ApprovalDecided {
                arguments: Some(arguments),
                truncated,
                ..
            } => {
                let arguments = arguments_value(arguments);
                let arguments = arguments_text(&arguments, *truncated, MAX_APPROVAL_ARGUMENTS);
                (None, format!("approved with other arguments{arguments}"))
            }
            EventKind::ApprovalDecided {
                decision, reason, ..
            } => {
                let reason = reason.as_deref().map(sanitize_line);
                let reason = reason.map(|reason| format!(": {reason}"));
                let decision = decision.as_str();
                (None, format!("{decision}{}", reason.unwrap_or_default()))
            }
            EventKind::InputRequested {
                question,
                options,
                server,
                ..
            } => {
                let options = match options.is_empty() {
                    true => String::new(),
                    false => format!(" ({})", options.join(" / ")),
                };
                let question = sanitize_line(&format!("{question}{options}"));
                let asks = match server {
                    Some(server) => format!("its server {} asks", sanitize_line(server)),
                    None => "asks".to_owned(),
                };
                yellow(format!("{asks}: {question}"))
            }
            EventKind::InputAnswered {
                outcome,
                answer,
                reason,
                ..
            } => {
                let text = answer.as_deref().map(RawValue::get).or(reason.as_deref());
                let text =
                    text.map(|text| format!(": {}", shorten(&sanitize_line(text), MAX_RESULT)));
                (
                    None,
                    format!("{}{}", outcome.as_str(), text.unwrap_or_default()),
                )
            }
            EventKind::WaitStarted { .. } => {
                let text = event.kind.waits().unwrap_or_default();
                (None, format!("waits {}", sanitize_line(&text)))
            }
            EventKind::WaitEnded { data, .. } => {
                let data = data.as_deref().map(RawValue::get);
                let data = data.map(|it| format!(": {}", shorten(&sanitize_line(it), MAX_RESULT)));
                (None, format!("goes on{}", data.unwrap_or_default()))
            }
            EventKind::MessageAdded { content, by, .. } => {
                let content = shorten(&sanitize_line(content), MAX_RESULT);
                let from = by_whom(by.as_deref(), "from");
                (None, format!("message{from}: {content}"))
            }
            EventKind::RetryScheduled {
                model,
                attempt,
                wait_ms,
                reason,
                ..
            } => {
                let reason = sanitize_line(reason);
                yellow(match (attempt, wait_ms) {
                    // Attempt 0 is the first request to a fallback model, which is sent at once.
                    (0, _) => format!("{reason}; falling back to {}", sanitize_line(model)),
                    (_, 0) => format!("{reason}; trying again at once"),
                    (_, wait) => format!("{reason}; trying again in {}", seconds(*wait)),
                })
            }
            EventKind::TurnDelayed { .. } => {
                yellow("waiting for the rate limit of the provider".to_owned())
            }
            EventKind::MemoryWarning { message }
            | EventKind::ToolsWarning { message }
            | EventKind::LoopWarning { message, .. }
            | EventKind::ModelWarning { message, .. } => {
                yellow(format!("warning: {}", sanitize_line(message)))
            }
            EventKind::ContextCompacted {
                tokens_before,
                tokens_after,
                ..
            } => (
                None,
                format!("conversation compacted from {tokens_before} to {tokens_after} tokens"),
            ),
            EventKind::BatchSubmitted { batch_id, .. } => (
                None,
                format!("waiting for batch {}", sanitize_line(batch_id)),
            ),
            EventKind::RunPaused { by } => {
                yellow(format!("paused{}", by_whom(by.as_deref(), "by")))
            }
            EventKind::RunResumed {
                cause: ResumeCause::Request,
                by,
                ..
            } => (None, format!("resumed{}", by_whom(by.as_deref(), "by"))),
            EventKind::RunResumed { .. } => (
                None,
                "resumed, after a restart or at another node".to_owned(),
            ),
            EventKind::RunForked {
                forked_from, turns, ..
            } => {
                let turns = counted(u64::from(*turns), "turn");
                (None, format!("continues {} after {turns}", forked_from.run))
            }
            EventKind::RunFailed { error } => {
                let text = format!("failed: {}", sanitize_line(&error.message));
                (Some(Color::Red), text)
            }
            EventKind::RunCancelled { reason } => {
                yellow(format!("cancelled: {}", sanitize_line(reason)))
            }
            _ => return None,
        };
        Some((color, text))
    }
}

fn describe_calls(calls: &[CalledTool]) -> String {
    let names = calls.iter().take(20).map(|call| sanitize_line(&call.name));
    let names = names.collect::<Vec<_>>().join(", ");
    match calls.len() {
        0 => "no tool calls".to_owned(),
        1 => format!("1 tool call ({names})"),
        several => format!("{several} tool calls ({names})"),
    }
}

fn child_name(agent: &str, call: Option<&Call>) -> String {
    let agent = sanitize_line(agent);
    match call.and_then(|call| call.label.as_deref()) {
        Some(label) => format!("{agent} \"{}\"", sanitize_line(&shorten(label, 40))),
        None => agent,
    }
}

/// Who did it, after a space and a preposition; empty without keys.
fn by_whom(key: Option<&str>, preposition: &str) -> String {
    match key.map(sanitize_line) {
        Some(key) if !key.is_empty() => format!(" {preposition} {key}"),
        _ => String::new(),
    }
}

fn arguments_value(arguments: &RawValue) -> Value {
    serde_json::from_str(arguments.get()).unwrap_or_default()
}

/// After a space, on one line; empty if the event has none.
fn arguments_text(arguments: &Value, is_truncated: bool, max: usize) -> String {
    let arguments = match arguments {
        Value::Null => return String::new(),
        // The beginning of arguments that are too long for an event.
        Value::String(beginning) if is_truncated => format!("{beginning}…"),
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::EventLines;
    use crate::domain::event::{Event, EventName};

    /// Without colours.
    fn line(lines: &mut EventLines, fields: Value) -> Option<String> {
        let id = "run_019a2b3c-0000-7000-8000-000000000001";
        let mut event = json!({"run_id": id, "root_id": id, "child_id": id, "time": "2026-01-01T00:00:00Z", "agent": "a", "depth": 0, "turn": 1,
            "model": "x/y", "cache_read_tokens": 0, "cache_write_tokens": 0, "input_tokens": 0, "output_tokens": 0,
            "tool_calls": 0, "result": ""});
        let (all, fields) = (event.as_object_mut()?, fields.as_object()?.clone());
        all.extend(fields);
        let name = EventName::parse(event["type"].as_str()?)?;
        let event = Event::read(name, &event.to_string()).expect("an event");
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
            let mut event = json!({"type": kind, "agent": "a", "depth": 0, "tool_call_id": "c",
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
            json!({"type": kind, "agent": "a", "depth": 0, "tool_call_id": "c", "tool": "subagent",
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
        let failed = json!({"type": "run.failed", "agent": "a", "depth": 0, "error": {"message": "no\nmore",
            "code": "internal", "category": "internal", "retryable": false}});
        assert_eq!(line(lines, failed).as_deref(), Some("a: failed: no more"));
        assert_eq!(line(lines, json!({"type": "run.queued"})), None);
    }
}
