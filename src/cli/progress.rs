//! Shows the events of a run as lines on stderr.

use serde_json::Value;

use crate::cli::event_lines::{EventLines, number_field};
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
    /// Shows an event, except requests for approval, which the prompt for them shows, and warnings of the root run, which
    /// are printed after its text. While `is_asking`, the last line of the terminal is a question.
    pub fn on_event(&mut self, event: &Value, is_asking: bool) {
        let name = event["type"].as_str().unwrap_or_default();
        let is_root = event["run_id"] == event["root_id"];
        if name == "approval.requested" || (is_root && name.ends_with(".warning")) {
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
                        "{}, {}, {} …",
                        output::count(*runs, "run"),
                        output::count(*turns, "turn"),
                        output::count(*tokens, "token")
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
