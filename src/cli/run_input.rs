//! The input of `axed run`: from an argument, stdin and files.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::catalog::prompt::DEFAULT_INPUT;
use crate::cli::exit::InvalidInput;
use crate::cli::output;
use crate::domain::attachment::{FILE_TYPES, IMAGE_TYPES, MediaType};

/// Maximum size of stdin or a file in bytes. A remote daemon rejects what exceeds its `server.max_body`.
const MAX_INPUT_BYTES: usize = 64 << 20;
/// More than any body with such an input: JSON needs at most six bytes for one.
pub const MAX_BODY_BYTES: usize = 8 * MAX_INPUT_BYTES;

/// The input of the argument, or that of stdin if the argument is `-`, or is missing and stdin is no terminal. `None` means
/// the default message.
pub fn read(argument: Option<&str>, has_files: bool) -> anyhow::Result<Option<String>> {
    let is_stdin = is_stdin(argument);
    let text = read_text(argument)?;
    if is_stdin && text.is_none() && !has_files {
        output::eprint_line(format_args!(
            "axed: stdin is empty; the message is \"{DEFAULT_INPUT}\""
        ));
    }
    Ok(text)
}

fn is_stdin(argument: Option<&str>) -> bool {
    match argument {
        Some(argument) => argument == "-",
        None => !std::io::stdin().is_terminal(),
    }
}

/// As [`read`], where `None` means that there is no text.
pub fn read_text(argument: Option<&str>) -> anyhow::Result<Option<String>> {
    if !is_stdin(argument) {
        return Ok(argument.map(str::to_owned));
    }
    let stdin = std::io::stdin();
    let mut bytes = Vec::new();
    stdin
        .take(MAX_INPUT_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .context("could not read the input from stdin")?;
    if bytes.len() > MAX_INPUT_BYTES {
        let message = format!(
            "the input on stdin is larger than {} MiB, the maximum for a run",
            MAX_INPUT_BYTES >> 20
        );
        return Err(InvalidInput(message).into());
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| InvalidInput(format!("the input on stdin is not UTF-8: {error}")))?;
    Ok(Some(text).filter(|text| !text.trim().is_empty()))
}

/// The input as parts: the text, then the files.
pub fn with_files(text: Option<String>, files: &[PathBuf]) -> anyhow::Result<Value> {
    let text = text.map(|text| json!({"type": "text", "text": text}));
    let files = files.iter().map(|file| file_part(file));
    let parts: anyhow::Result<Vec<Value>> = text.map(Ok).into_iter().chain(files).collect();
    Ok(parts?.into())
}

fn file_part(file: &Path) -> anyhow::Result<Value> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|opened| {
            opened
                .take(MAX_INPUT_BYTES as u64 + 1)
                .read_to_end(&mut bytes)
        })
        .map_err(|error| InvalidInput::unreadable(file, &error))?;
    let is_large = bytes.len() > MAX_INPUT_BYTES;
    let detected = MediaType::detect(&bytes).filter(|_| !is_large);
    let Some(media_type) = detected else {
        let reason = match is_large {
            true => format!("larger than {} MiB", MAX_INPUT_BYTES >> 20),
            false => format!("not of a supported type: {IMAGE_TYPES}, {FILE_TYPES}"),
        };
        return Err(InvalidInput(format!("{} is {reason}", file.display())).into());
    };
    let mut part = json!({
        "type": media_type.part_type(), "media_type": media_type, "data": STANDARD.encode(&bytes),
    });
    let name = file.file_name().and_then(OsStr::to_str);
    if let Some(name) = name.filter(|_| !media_type.is_image()) {
        part["name"] = name.into();
    }
    Ok(part)
}
