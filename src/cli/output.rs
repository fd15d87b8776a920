//! Prints results on stdout and messages on stderr, and makes all text safe for a terminal. Unlike `println!`, a full
//! disk is an error and not a panic.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use serde_json::Value;

use crate::cli::style::Styled;
use crate::domain::terminal_text;

/// What a command prints on stdout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people: fits the terminal; on a pipe, columns with tabs
    #[default]
    Table,
    /// As table, with more columns and whole ids
    Wide,
    /// As in the HTTP API
    Json,
}

#[derive(Clone, Copy, Debug, clap::Args)]
pub struct FormatArgs {
    /// Output format: table, wide (more columns) or json
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        value_enum,
        default_value_t,
        hide_default_value = true,
        hide_possible_values = true
    )]
    format: Format,
    /// Short for -o json
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

impl FormatArgs {
    pub fn is_json(self) -> bool {
        self.json || self.format == Format::Json
    }

    pub fn is_wide(self) -> bool {
        self.format == Format::Wide
    }
}

/// The columns of the terminal that stdout is; `None` if it is none.
pub fn stdout_width() -> Option<u16> {
    terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| width.0)
}

/// A reader that closes the pipe early, as `head` does, is not an error.
pub fn print_line(text: fmt::Arguments<'_>) -> anyhow::Result<()> {
    write_stdout(&terminal_text::sanitize_lines(&format!("{text}\n")))
}

/// Pretty-printed.
pub fn print_json(value: &Value) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    write_stdout(&format!("{}\n", terminal_text::escape_json(&text)))
}

pub fn print_json_line(value: &Value) -> anyhow::Result<()> {
    write_stdout(&format!(
        "{}\n",
        terminal_text::escape_json(&value.to_string())
    ))
}

/// Prints a text for scripts: unchanged, unless stdout is a terminal.
pub fn print_document(text: &str) -> anyhow::Result<()> {
    if io::stdout().is_terminal() {
        write_stdout(&terminal_text::sanitize_lines(text))
    } else {
        write_stdout(text)
    }
}

/// Prints text that is already safe for a terminal. Its colours are left out where colours are not wanted.
pub fn print_safe(text: &str) -> anyhow::Result<()> {
    let mut stdout = anstream::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    check_written(written.and_then(|()| stdout.flush()))
}

/// Prints a part of a text that is still being written. If stdout is closed, the end of the text reports it.
pub fn print_part(text: &str) {
    let mut stdout = io::stdout().lock();
    let text = terminal_text::sanitize_lines(text);
    let _ = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
}

pub fn print_styled(line: &Styled) -> anyhow::Result<()> {
    print_safe(&format!("{}\n", line.as_str()))
}

pub fn eprint_styled(line: &Styled) {
    let _ = writeln!(anstream::stderr(), "{}", line.as_str());
}

pub fn eprint_line(text: fmt::Arguments<'_>) {
    // If stderr is closed, there is nowhere to report it.
    let _ = writeln!(
        io::stderr(),
        "{}",
        terminal_text::sanitize_lines(&text.to_string())
    );
}

/// Overwrites the previous status line on stderr; an empty text only erases it.
pub fn eprint_status(text: fmt::Arguments<'_>) {
    let mut stderr = anstream::stderr().lock();
    let text = terminal_text::sanitize_line(&text.to_string());
    let _ = write!(stderr, "\r\x1b[K{text}").and_then(|()| stderr.flush());
}

fn write_stdout(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    check_written(written.and_then(|()| stdout.flush()))
}

fn check_written(written: io::Result<()>) -> anyhow::Result<()> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("could not write to stdout")
        }
        _ => Ok(()),
    }
}
