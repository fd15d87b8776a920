//! What commands print: on stdout their result, on stderr what they say about it. Whatever is printed is made fit for a
//! terminal here. Unlike `println!`, a full disk is an error here and not a panic.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use serde_json::Value;

use crate::domain::terminal_text;

/// Prints lines on stdout. A reader that has read enough and left, as `head` does, is no error.
pub fn print_line(text: fmt::Arguments<'_>) -> anyhow::Result<()> {
    write_stdout(&terminal_text::sanitize_lines(&format!("{text}\n")))
}

/// Prints a value as JSON, over several lines.
pub fn print_json(value: &Value) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    write_stdout(&format!("{}\n", terminal_text::escape_json(&text)))
}

/// Prints a value as JSON on one line.
pub fn print_json_line(value: &Value) -> anyhow::Result<()> {
    write_stdout(&format!(
        "{}\n",
        terminal_text::escape_json(&value.to_string())
    ))
}

/// Prints a text that scripts read: each byte as it is, unless stdout is a terminal.
pub fn print_document(text: &str) -> anyhow::Result<()> {
    if io::stdout().is_terminal() {
        write_stdout(&terminal_text::sanitize_lines(text))
    } else {
        write_stdout(text)
    }
}

/// Prints lines on stderr.
pub fn eprint_line(text: fmt::Arguments<'_>) {
    // Nobody is there to be informed that stderr is closed.
    let _ = writeln!(
        io::stderr(),
        "{}",
        terminal_text::sanitize_lines(&text.to_string())
    );
}

/// Writes a line on stderr over the one that was written so before; without a text only erases it.
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
