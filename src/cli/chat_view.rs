//! Shows a run of a chat: its text as the model writes it, and what it does in between.

use std::io::IsTerminal;

use crate::cli::event_lines::EventLines;
use crate::cli::output;
use crate::cli::style::{Color, Styled};
use crate::domain::event::{Event, EventKind};

pub struct ChatView {
    lines: EventLines,
    is_verbose: bool,
    /// Whether text is shown while the model writes it.
    is_streaming: bool,
    /// The text of the root's last turn that is on the terminal.
    shown: String,
}

impl ChatView {
    pub fn new(is_verbose: bool) -> Self {
        Self {
            lines: EventLines::default(),
            is_verbose,
            is_streaming: std::io::stdout().is_terminal(),
            shown: String::new(),
        }
    }

    pub fn on_event(&mut self, event: &Event) {
        let is_root = event.depth == 0;
        // Every line is described, so that later ones can refer to it.
        let line = self.lines.line(event);
        match &event.kind {
            EventKind::TextDelta { text, .. } if is_root => self.show_text(text),
            EventKind::TextWithdrawn { .. } if is_root => {
                self.end_line();
                let note = Styled::default().colored(Color::Yellow, "(the model starts again)");
                output::eprint_styled(&note);
                self.shown.clear();
            }
            EventKind::TurnStarted { .. } if is_root => {
                self.end_line();
                self.shown.clear();
                self.show_line(line.filter(|_| self.is_verbose));
            }
            EventKind::TurnStarted { .. }
            | EventKind::TurnCompleted { .. }
            | EventKind::ToolCompleted {
                is_error: false, ..
            } => self.show_line(line.filter(|_| self.is_verbose)),
            // The prompt for the decision shows it.
            EventKind::ApprovalRequested { .. } | EventKind::InputRequested { .. } => {}
            // The end of the run is shown by `finish`.
            EventKind::RunFailed { .. } | EventKind::RunCancelled { .. } if is_root => {}
            _ => self.show_line(line),
        }
    }

    /// The rest of the text that is being shown may be lost.
    pub fn begin_text_again(&mut self) {
        self.end_line();
        self.shown.clear();
    }

    /// Shows what is not on the terminal yet of a run that has ended.
    pub fn finish(&mut self, content: Option<&str>) -> anyhow::Result<()> {
        let content = content.unwrap_or_default();
        if self.shown.trim_end() == content.trim_end() {
            self.end_line();
            return Ok(());
        }
        self.end_line();
        output::print_line(format_args!("{}", content.trim_end()))
    }

    fn show_text(&mut self, text: &str) {
        if self.is_streaming {
            self.shown.push_str(text);
            output::print_part(text);
        }
    }

    fn show_line(&mut self, line: Option<Styled>) {
        if let Some(line) = line {
            self.end_line();
            output::eprint_styled(&line);
        }
    }

    /// Ends the line that the model's text has begun.
    fn end_line(&mut self) {
        if !self.shown.is_empty() && !self.shown.ends_with('\n') {
            self.show_text("\n");
        }
    }
}
