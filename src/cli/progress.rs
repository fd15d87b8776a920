//! Shows the events of a run as lines on stderr.

use crate::cli::event_lines::EventLines;
use crate::cli::output;
use crate::domain::counted::counted;
use crate::domain::event::{Event, EventKind};

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
    pub fn on_event(&mut self, event: &Event, is_asking: bool) {
        match &event.kind {
            EventKind::ApprovalRequested { .. } | EventKind::InputRequested { .. } => return,
            kind if event.run_id == event.root_id && kind.name().is_warning() => return,
            _ => {}
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
                        counted(*runs, "run"),
                        counted(*turns, "turn"),
                        counted(*tokens, "token")
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
    fn add(&mut self, event: &Event) {
        match &event.kind {
            EventKind::RunStarted { .. } => self.runs += 1,
            EventKind::TurnCompleted {
                input_tokens,
                output_tokens,
                ..
            } => {
                self.turns += 1;
                self.tokens += input_tokens + output_tokens;
            }
            _ => {}
        }
    }
}
