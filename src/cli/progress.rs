//! Shows the events of a run as lines on stderr.

use serde_json::Value;

use crate::cli::event_lines::{EventLines, number_field, text_field};
use crate::cli::output;

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
    /// Shows an event of a run of the daemon at `server`.
    pub fn on_event(&mut self, event: &Value, server: &str) {
        let approval_hint = approval_hint(event, server);
        match self {
            Self::Silent => {}
            Self::Line(totals) => {
                totals.add(event);
                if let Some(approval_hint) = &approval_hint
                    && let Some(line) = EventLines::default().line(event)
                {
                    output::eprint_status(format_args!(""));
                    output::eprint_styled(&line);
                    output::eprint_line(format_args!("{approval_hint}"));
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
            Self::Lines(lines) => {
                if let Some(line) = lines.line(event) {
                    output::eprint_styled(&line);
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
pub fn approval_hint(event: &Value, server: &str) -> Option<String> {
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
