//! `read_file`: returns numbered lines of a text file, in bounded memory however long the file and its lines are.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::attachment::{Attachment, MediaType};
use crate::tools::ToolOutput;
use crate::tools::files::workdir_fs::{WorkdirFs, describe_error, is_binary, parse_path};

pub const DESCRIPTION: &str = "Read a text file of the working directory. Each line comes as \"<number>: <text>\"; the number \
                         and the colon are not part of the file. For a long file, read it in parts with offset and \
                         limit. A picture (PNG, JPEG, WebP, GIF) is shown to you. Other binary files are refused.";

/// Longer lines are truncated.
const MAX_SHOWN_LINE_BYTES: u64 = 8 << 10;
/// The longest line that is read to its end.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    /// The file, relative to the working directory, such as "src/main.rs".
    path: String,
    /// The number of the first line to show; the file's first line is 1.
    #[serde(default = "default_offset")]
    #[schemars(range(min = 1))]
    offset: u64,
    /// How many lines to show at most.
    #[serde(default = "default_limit")]
    #[schemars(range(min = 1))]
    limit: u64,
}

fn default_offset() -> u64 {
    1
}

fn default_limit() -> u64 {
    2000
}

pub fn read_file(fs: &WorkdirFs, arguments: ReadFile) -> Result<ToolOutput, String> {
    let path = parse_path(&arguments.path)?;
    let (file, meta) = fs.open(&path)?;
    let mut file = BufReader::with_capacity(64 << 10, fs.stop.stoppable_reader(file));
    let head = file
        .fill_buf()
        .map_err(|error| describe_error(&path, &error))?;
    if is_binary(head) {
        if MediaType::detect(head).is_some_and(MediaType::is_image) {
            return read_image(fs, &path, &mut file, meta.len());
        }
        return Err(format!(
            "{} is a binary file of {} bytes; only text can be read",
            path.display(),
            meta.len()
        ));
    }
    if head.is_empty() {
        return Ok("(the file is empty)".to_owned().into());
    }
    let skipped = arguments.offset.saturating_sub(1);
    for number in 0..skipped {
        if skip_line(&mut file, &path, number + 1)? == 0 {
            return Err(format!(
                "{} has only {number} lines; offset {} is behind its end",
                path.display(),
                arguments.offset
            ));
        }
    }
    let mut text = String::new();
    let mut number = skipped;
    let end = skipped.saturating_add(arguments.limit);
    loop {
        let buffered = file
            .fill_buf()
            .map_err(|error| describe_error(&path, &error))?;
        if buffered.is_empty() {
            break;
        }
        if number == end || (!text.is_empty() && text.len() >= fs.max_output_bytes()) {
            text.push_str(&format!(
                "... (more follows; continue with offset {})\n",
                number + 1
            ));
            break;
        }
        number += 1;
        let line = next_line(&mut file, &path, number)?;
        let line = format!("{number}: {line}\n");
        if !text.is_empty() && text.len() + line.len() > fs.max_output_bytes() {
            text.push_str(&format!(
                "... (more follows; continue with offset {number})\n"
            ));
            break;
        }
        text.push_str(&line);
    }
    if text.is_empty() {
        return Err(format!(
            "{} has only {skipped} lines; offset {} is behind its end",
            path.display(),
            arguments.offset
        ));
    }
    text.pop();
    Ok(text.into())
}

/// Returns the image as an attachment, if it is not too large.
fn read_image(
    fs: &WorkdirFs,
    path: &Path,
    file: &mut impl Read,
    size: u64,
) -> Result<ToolOutput, String> {
    let max_bytes = fs.shared.max_image_bytes;
    let mut data = Vec::new();
    let read = file.take(max_bytes as u64 + 1).read_to_end(&mut data);
    read.map_err(|error| describe_error(path, &error))?;
    let display_path = path.display();
    let image = (data.len() <= max_bytes).then(|| Attachment::from_bytes(data.into(), None));
    let Some(image) = image.flatten() else {
        return Err(format!(
            "{display_path} is a picture of {size} bytes, and at most {max_bytes} are shown"
        ));
    };
    Ok(ToolOutput {
        text: format!(
            "{display_path}: {}, {} bytes",
            image.media_type, image.bytes
        ),
        attachments: vec![image],
        ..ToolOutput::default()
    })
}

/// The next line without its line ending, truncated if it is long.
fn next_line(file: &mut impl BufRead, path: &Path, number: u64) -> Result<String, String> {
    let mut line = Vec::new();
    let read = file
        .by_ref()
        .take(MAX_SHOWN_LINE_BYTES)
        .read_until(b'\n', &mut line);
    read.map_err(|error| describe_error(path, &error))?;
    if line.last() == Some(&b'\n') {
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        return Ok(String::from_utf8_lossy(&line).into_owned());
    }
    let rest = skip_line(file, path, number)?;
    let text = String::from_utf8_lossy(&line);
    if rest == 0 {
        return Ok(text.into_owned());
    }
    // The cut may have split a character.
    let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let total_bytes = line.len() as u64 + rest;
    Ok(format!("{text} ... (line cut, it has {total_bytes} bytes)"))
}

/// Skips to the next line. Returns the number of bytes skipped.
fn skip_line(file: &mut impl BufRead, path: &Path, number: u64) -> Result<u64, String> {
    let skipped = file.by_ref().take(MAX_LINE_BYTES).skip_until(b'\n');
    let skipped = skipped.map_err(|error| describe_error(path, &error))? as u64;
    match skipped {
        MAX_LINE_BYTES => Err(format!(
            "line {number} of {} is longer than {MAX_LINE_BYTES} bytes; only the lines before it can be read, with a limit",
            path.display()
        )),
        skipped => Ok(skipped),
    }
}
