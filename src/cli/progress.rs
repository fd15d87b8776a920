//! Shows the events of a run as lines on stderr.

use serde_json::Value;

use crate::cli::event_lines::{EventLines, number_field, text_field};
use crate::cli::output;
use crate::cli::pending::approve_command;

pub enum Progress {
    Silent,
    /// One line that is overwritten, on a terminal.
    Line(Totals),
    /// A line for each turn, each tool call and each child run.
    Lines(Box<EventLines>),
}

#[derive(Default)]
pub struct Totals {
    runs: u64,
    turns: u64,
    tokens: u64,
}

impl Progress {
    /// Shows an event, except requests for approval: whoever has them decided shows them. While `is_asking`, the last line
    /// of the terminal is a question.
    pub fn on_event(&mut self, event: &Value, is_asking: bool) {
        if event["type"] == "approval.requested" {
            return;
        }
        match self {
            Self::Silent => {}
            Self::Line(totals) => {
                totals.add(event);
                let Totals {
                    runs,
                    turns,
                    tokens,
                } = totals;
                if !is_asking {
                    output::eprint_status(format_args!(
                        "{runs} runs, {turns} turns, {tokens} tokens …"
                    ));
                }
            }
            Self::Lines(lines) => {
                if let Some(line) = lines.line(event) {
                    output::eprint_styled(&line);
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
pub fn approval_hint(event: &Value, server: &str) -> Option<String> {
    let is_approval = event["type"].as_str()? == "approval.requested";
    is_approval.then(|| {
        let call = text_field(event, "tool_call_id");
        let command = approve_command(&text_field(event, "run_id"), &call, server);
        format!("  {command}   (or deny, with --reason)")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::approval_hint;

    #[test]
    fn an_approval_shows_the_command_that_decides_it() {
        let approval = json!({"type": "approval.requested", "agent": "a", "depth": 0, "run_id": "run_1",
            "tool_call_id": "c1", "tool": "write_file", "arguments": {"path": "x"}});
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
