//! Shows the events of a run as lines on stderr.

use serde_json::Value;

use crate::cli::output;
use crate::cli::tree::seconds;
use crate::domain::message::shorten;
use crate::domain::terminal_text;

pub enum Progress {
    Silent,
    /// One line that is overwritten, on a terminal.
    Line(Totals),
    /// One line for each turn and each child run.
    Lines,
}

#[derive(Default)]
pub struct Totals {
    runs: u64,
    turns: u64,
    tokens: u64,
}

impl Progress {
    /// Shows an event of a run of the daemon at `server`.
    pub fn on_event(&mut self, event: &Value, server: &str) {
        let approval_hint = approval_hint(event, server);
        match self {
            Self::Silent => {}
            Self::Line(totals) => {
                totals.add(event);
                if let (Some(line), Some(approval_hint)) = (event_line(event), &approval_hint) {
                    output::eprint_status(format_args!(""));
                    output::eprint_line(format_args!("{line}\n{approval_hint}"));
                }
                let Totals {
                    runs,
                    turns,
                    tokens,
                } = totals;
                output::eprint_status(format_args!(
                    "{runs} runs, {turns} turns, {tokens} tokens …"
                ));
            }
            Self::Lines => {
                if let Some(line) = event_line(event) {
                    output::eprint_line(format_args!("{line}"));
                }
                if let Some(approval_hint) = approval_hint {
                    output::eprint_line(format_args!("{approval_hint}"));
                }
            }
        }
    }

    /// Erases the status line.
    pub fn clear(&self) {
        if matches!(self, Self::Line(_)) {
            output::eprint_status(format_args!(""));
        }
    }
}

impl Totals {
    fn add(&mut self, event: &Value) {
        match event["type"].as_str() {
            Some("run.started") => self.runs += 1,
            Some("turn.completed") => {
                self.turns += 1;
                self.tokens +=
                    number_field(event, "input_tokens") + number_field(event, "output_tokens");
            }
            _ => {}
        }
    }
}

/// The command that approves the tool call, if the event requests approval.
fn approval_hint(event: &Value, server: &str) -> Option<String> {
    let is_approval = event["type"].as_str()? == "approval.requested";
    let field = |key| text_field(event, key);
    // Models choose ids, and the user may copy the line into a shell.
    let shell_quoted = |id: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
        if !id.is_empty() && id.chars().all(is_plain) {
            return id.to_owned();
        }
        format!("'{}'", id.replace('\'', "'\\''"))
    };
    is_approval.then(|| {
        format!(
            "  axed runs approve {} {} --server {server}   (or deny, with --reason)",
            field("run_id"),
            shell_quoted(&field("tool_call_id"))
        )
    })
}

/// The event as a line, indented by its run's depth. `None` for events that say nothing new to a person.
fn event_line(event: &Value) -> Option<String> {
    let description = describe_event(event)?;
    let depth = usize::try_from(number_field(event, "depth")).unwrap_or(0);
    Some(format!(
        "{}{}: {description}",
        "  ".repeat(depth),
        text_field(event, "agent")
    ))
}

fn describe_event(event: &Value) -> Option<String> {
    Some(match event["type"].as_str()? {
        "turn.completed" => describe_turn(event),
        "agent.called" => format!(
            "→ {}: {}",
            text_field(event, "child_agent"),
            text_field(event, "task")
        ),
        "agent.returned" => format!(
            "← {} after {}{}",
            text_field(event, "child_agent"),
            seconds(number_field(event, "duration_ms")),
            match event["error"].as_str() {
                Some(error) => format!(": {}", terminal_text::sanitize_line(error)),
                None => String::new(),
            }
        ),
        "approval.requested" => {
            // A person decides by this line, so nothing in it may be hidden.
            let arguments = terminal_text::escape_json(&event["arguments"].to_string());
            let shown = shorten(&arguments, 400);
            format!(
                "waiting for approval of {} {shown}",
                text_field(event, "tool")
            )
        }
        "approval.decided" => match event["reason"].as_str() {
            Some(_) => format!(
                "{}: {}",
                text_field(event, "decision"),
                text_field(event, "reason")
            ),
            None => text_field(event, "decision"),
        },
        "retry.scheduled" => describe_retry(event),
        "memory.warning" | "tools.warning" | "loop.warning" | "model.warning" => {
            text_field(event, "message")
        }
        "context.compacted" => format!(
            "conversation compacted from {} to {} tokens",
            number_field(event, "tokens_before"),
            number_field(event, "tokens_after")
        ),
        "batch.submitted" => format!("waiting for batch {}", text_field(event, "batch_id")),
        "run.failed" => format!("failed: {}", text_field(&event["error"], "message")),
        "run.cancelled" => format!("cancelled: {}", text_field(event, "reason")),
        _ => return None,
    })
}

fn describe_turn(event: &Value) -> String {
    let calls = event["tool_calls"].as_array().map_or(0, Vec::len);
    format!(
        "turn {}: {} tokens in, {} out{}",
        number_field(event, "turn"),
        number_field(event, "input_tokens"),
        number_field(event, "output_tokens"),
        match calls {
            0 => String::new(),
            1 => ", 1 tool call".to_owned(),
            several => format!(", {several} tool calls"),
        }
    )
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

fn number_field(event: &Value, key: &str) -> u64 {
    event[key].as_u64().unwrap_or(0)
}

/// Texts come from models, so control characters are removed.
fn text_field(event: &Value, key: &str) -> String {
    terminal_text::sanitize_line(event[key].as_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{approval_hint, event_line};

    #[test]
    fn events_are_described_and_indented_by_depth() {
        let turn = json!({"type": "turn.completed", "agent": "a", "depth": 0, "turn": 1, "input_tokens": 5,
            "output_tokens": 6, "tool_calls": [{}, {}]});
        assert_eq!(
            event_line(&turn).as_deref(),
            Some("a: turn 1: 5 tokens in, 6 out, 2 tool calls")
        );
        let called = json!({"type": "agent.called", "agent": "a", "depth": 1, "child_agent": "b", "task": "x\u{1b}[2J"});
        assert_eq!(
            event_line(&called).as_deref(),
            Some("  a: → b: x\u{fffd}[2J")
        );
        let returned = json!({"type": "agent.returned", "agent": "a", "depth": 0, "child_agent": "b", "duration_ms": 1500, "error": "no"});
        assert_eq!(
            event_line(&returned).as_deref(),
            Some("a: ← b after 1.50 s: no")
        );
        assert_eq!(event_line(&json!({"type": "run.queued"})), None);
        let retry = |attempt: u64, wait: u64| {
            event_line(
                &json!({"type": "retry.scheduled", "agent": "a", "depth": 0, "model": "x/y", "attempt": attempt,
                "wait_ms": wait, "reason": "server: no"}),
            )
        };
        for (attempt, wait, action) in [
            (0, 0, "falling back to x/y"),
            (1, 0, "trying again at once"),
            (1, 1500, "trying again in 1.50 s"),
        ] {
            assert_eq!(
                retry(attempt, wait),
                Some(format!("a: server: no; {action}"))
            );
        }
        let approval = json!({"type": "approval.requested", "agent": "a", "depth": 0, "run_id": "run_1",
            "tool_call_id": "c1", "tool": "write_file", "arguments": {"path": "x"}});
        assert_eq!(
            event_line(&approval).as_deref(),
            Some("a: waiting for approval of write_file {\"path\":\"x\"}")
        );
        assert_eq!(
            approval_hint(&approval, "http://h").as_deref(),
            Some("  axed runs approve run_1 c1 --server http://h   (or deny, with --reason)")
        );
        let mut hostile = approval;
        hostile["tool_call_id"] = json!("c'; rm -rf ~ #");
        assert_eq!(
            approval_hint(&hostile, "http://h").as_deref(),
            Some(
                "  axed runs approve run_1 'c'\\''; rm -rf ~ #' --server http://h   (or deny, with --reason)"
            )
        );
    }
}
