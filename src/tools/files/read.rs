//! `read_file`: lines of a text file with their numbers, in bounded memory however long file and lines are.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::attachment::{Attachment, MediaType};
use crate::tools::Output;
use crate::tools::files::ground::{Ground, is_binary, place, told};

/// What models are told.
pub const ABOUT: &str = "Read a text file of the working directory. Each line comes as \"<number>: <text>\"; the number \
                         and the colon are not part of the file. For a long file, read it in parts with offset and \
                         limit. A picture (PNG, JPEG, WebP, GIF) is shown to you. Other binary files are refused.";

/// Bytes of a line that are shown.
const SHOWN_LINE: u64 = 8 << 10;
/// Bytes of a line that are looked through for its end.
const LONGEST_LINE: u64 = 16 << 20;

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    /// The file, relative to the working directory, such as "src/main.rs".
    path: String,
    /// The number of the first line to show; the file's first line is 1.
    #[serde(default = "first_line")]
    #[schemars(range(min = 1))]
    offset: u64,
    /// How many lines to show at most.
    #[serde(default = "some_lines")]
    #[schemars(range(min = 1))]
    limit: u64,
}

fn first_line() -> u64 {
    1
}

fn some_lines() -> u64 {
    2000
}

/// Reads it.
pub fn read(ground: &Ground, asked: ReadFile) -> Result<Output, String> {
    let path = place(&asked.path)?;
    let (file, meta) = ground.open(&path)?;
    let mut file = BufReader::with_capacity(64 << 10, ground.stop.reading(file));
    let start = file.fill_buf().map_err(|error| told(&path, &error))?;
    if is_binary(start) {
        if MediaType::of(start).is_some_and(MediaType::is_image) {
            return picture(ground, &path, &mut file, meta.len());
        }
        return Err(format!(
            "{} is a binary file of {} bytes; only text can be read",
            path.display(),
            meta.len()
        ));
    }
    if start.is_empty() {
        return Ok("(the file is empty)".to_owned().into());
    }
    let skipped = asked.offset.saturating_sub(1);
    for number in 0..skipped {
        if skip_line(&mut file, &path, number + 1)? == 0 {
            return Err(format!(
                "{} has only {number} lines; offset {} is behind its end",
                path.display(),
                asked.offset
            ));
        }
    }
    let mut text = String::new();
    let mut number = skipped;
    let end = skipped.saturating_add(asked.limit);
    loop {
        let at_end = file.fill_buf().map_err(|error| told(&path, &error))?;
        if at_end.is_empty() {
            break;
        }
        if number == end || (!text.is_empty() && text.len() >= ground.room()) {
            text.push_str(&format!(
                "... (more follows; go on with offset {})\n",
                number + 1
            ));
            break;
        }
        number += 1;
        let line = next_line(&mut file, &path, number)?;
        let line = format!("{number}: {line}\n");
        if !text.is_empty() && text.len() + line.len() > ground.room() {
            text.push_str(&format!("... (more follows; go on with offset {number})\n"));
            break;
        }
        text.push_str(&line);
    }
    if text.is_empty() {
        return Err(format!(
            "{} has only {skipped} lines; offset {} is behind its end",
            path.display(),
            asked.offset
        ));
    }
    text.pop();
    Ok(text.into())
}

/// The picture itself, if it is not too large.
fn picture(
    ground: &Ground,
    path: &Path,
    file: &mut impl Read,
    size: u64,
) -> Result<Output, String> {
    let most = ground.shared.max_picture;
    let mut data = Vec::new();
    let read = file.take(most as u64 + 1).read_to_end(&mut data);
    read.map_err(|error| told(path, &error))?;
    let shown = path.display();
    let picture = (data.len() <= most).then(|| Attachment::of(data.into(), None));
    let Some(picture) = picture.flatten() else {
        return Err(format!(
            "{shown} is a picture of {size} bytes, and at most {most} are shown"
        ));
    };
    Ok(Output {
        text: format!("{shown}: {}, {} bytes", picture.media_type, picture.bytes),
        attachments: vec![picture],
    })
}

/// The next line without its end, cut where it is long.
fn next_line(file: &mut impl BufRead, path: &Path, number: u64) -> Result<String, String> {
    let mut line = Vec::new();
    let read = file.by_ref().take(SHOWN_LINE).read_until(b'\n', &mut line);
    read.map_err(|error| told(path, &error))?;
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
    // The cut may have gone through a character.
    let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let whole = line.len() as u64 + rest;
    Ok(format!("{text} ... (line cut, it has {whole} bytes)"))
}

/// Goes to the next line; how many bytes it went.
fn skip_line(file: &mut impl BufRead, path: &Path, number: u64) -> Result<u64, String> {
    let skipped = file.by_ref().take(LONGEST_LINE).skip_until(b'\n');
    let skipped = skipped.map_err(|error| told(path, &error))? as u64;
    match skipped {
        LONGEST_LINE => Err(format!(
            "line {number} of {} is longer than {LONGEST_LINE} bytes; only the lines before it can be read, with a limit",
            path.display()
        )),
        skipped => Ok(skipped),
    }
}
