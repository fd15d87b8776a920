//! Prints results on stdout and messages on stderr, and makes all text safe for a terminal. Unlike `println!`, a full
//! disk is an error and not a panic.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use serde_json::Value;

use crate::domain::terminal_text;

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
    match written.and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("could not write to stdout")
        }
        _ => Ok(()),
    }
}
