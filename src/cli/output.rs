//! What commands print on stdout. Unlike `println!`, a full disk is an error here and not a panic.

use std::fmt;
use std::io::{self, Write};

use anyhow::Context;

/// Prints a line. A reader that has read enough and left, as `head` does, is no error.
pub fn line(text: fmt::Arguments<'_>) -> anyhow::Result<()> {
    let mut stdout = anstream::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("could not write to stdout")
        }
        _ => Ok(()),
    }
}
