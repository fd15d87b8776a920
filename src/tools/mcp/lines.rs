//! The output of a server process, line by line, and the messages in a line. Lines of logs between them are skipped.

use std::io;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

use crate::domain::lenient_json;
use crate::domain::message::shorten;
use crate::tools::mcp::message::{self, Message};

const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Most characters of an invalid answer that are shown.
const MAX_SHOWN_CHARS: usize = 200;
/// Bytes at each end of a line by which an invalid answer is recognized.
const MAX_END_BYTES: usize = 512;

/// A server's output.
pub struct LineReader<R> {
    output: BufReader<R>,
    line: Vec<u8>,
}

impl<R: AsyncRead + Unpin> LineReader<R> {
    pub fn new(output: R) -> Self {
        Self {
            output: BufReader::new(output),
            line: Vec::new(),
        }
    }

    /// The next line without its end; `None` at the end of the output. Cancel safe.
    ///
    /// # Errors
    /// The output cannot be read, or the line is too long.
    pub async fn next_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let available = self.output.fill_buf().await?;
            if available.is_empty() {
                let rest = std::mem::take(&mut self.line);
                return Ok(Some(rest).filter(|rest| !rest.is_empty()));
            }
            let line_end = available.iter().position(|byte| *byte == b'\n');
            let length = line_end.unwrap_or(available.len());
            self.line.extend_from_slice(&available[..length]);
            self.output
                .consume(length + usize::from(line_end.is_some()));
            if self.line.len() > MAX_MESSAGE_BYTES {
                let why = format!("it sent a message of more than {MAX_MESSAGE_BYTES} bytes");
                return Err(io::Error::other(why));
            }
            if line_end.is_some() {
                return Ok(Some(std::mem::take(&mut self.line)));
            }
        }
    }
}

/// The messages in a line, and whether the line has other text before them.
pub struct LineMessages {
    pub messages: Vec<Message>,
    pub may_be_log: bool,
}

/// The messages in a line; none in a line of a log.
///
/// # Errors
/// The beginning of an answer that cannot be read.
pub fn read_line(line: &[u8]) -> Result<LineMessages, String> {
    let mut may_be_log = false;
    let values = match lenient_json::from_slice(line) {
        Ok(value) => vec![value],
        Err(_) => {
            let text = String::from_utf8_lossy(line);
            let json = ["{\"jsonrpc\"", "{ \"jsonrpc\""];
            let start = json.iter().filter_map(|start| text.find(start)).min();
            may_be_log =
                start.is_some_and(|start| !text[..start].trim_matches('\u{feff}').is_empty());
            start.map_or_else(Vec::new, |start| first_values(&text[start..]))
        }
    };
    if values.is_empty() && looks_like_answer(line) {
        let beginning = String::from_utf8_lossy(&line[..line.len().min(MAX_END_BYTES)]);
        return Err(shorten(beginning.trim_end(), MAX_SHOWN_CHARS));
    }
    Ok(LineMessages {
        messages: values.into_iter().flat_map(message::read).collect(),
        may_be_log,
    })
}

/// The JSON values that a text begins with.
fn first_values(text: &str) -> Vec<Value> {
    let text = lenient_json::repair(text);
    let values = serde_json::Deserializer::from_str(&text).into_iter();
    values.map_while(Result::ok).collect()
}

/// Whether this is rather an answer than a line of a log. Some servers write `jsonrpc` last.
fn looks_like_answer(line: &[u8]) -> bool {
    let head = String::from_utf8_lossy(&line[..line.len().min(MAX_END_BYTES)]);
    let tail = String::from_utf8_lossy(&line[line.len().saturating_sub(MAX_END_BYTES)..]);
    let contains = |key: &str| head.contains(key) || tail.contains(key);
    head.starts_with('{')
        && !contains("\"method\"")
        && contains("\"jsonrpc\"")
        && (contains("\"result\"") || contains("\"error\""))
}

#[cfg(test)]
mod tests {
    use super::{LineReader, read_line};

    /// The number of messages in each line, or the beginning of an answer that cannot be read.
    fn read(line: &str) -> Result<(usize, bool), String> {
        let read = read_line(line.as_bytes())?;
        Ok((read.messages.len(), read.may_be_log))
    }

    #[test]
    fn an_invalid_answer_is_shown() {
        let long = "x".repeat(100_000);
        for answer in [
            r#"{"jsonrpc": "2.0", "id": 1, "result": [}"#.to_owned(),
            r#"{"id":1,"error":{]},"jsonrpc":"2.0"}"#.to_owned(),
            format!(r#"{{"result":{{"text":"{long}","mean":?}},"jsonrpc":"2.0","id":1}}"#),
        ] {
            let why = read(&answer).expect_err("an invalid answer");
            assert!(why.starts_with(&answer[..30]) && why.len() < 300, "{why}");
        }
    }

    #[test]
    fn messages_are_found_in_noise() {
        let answer = r#"{"jsonrpc": "2.0", "id": 1, "result": 1}"#;
        for (line, messages, may_be_log) in [
            (answer.to_owned(), 1, false),
            (format!("{answer}\r"), 1, false),
            (format!("\u{feff}{answer}"), 1, false),
            (format!("{answer}{answer} done"), 2, false),
            (format!("[{answer}, {answer}]"), 2, false),
            (format!("sent {answer}"), 1, true),
            (answer.replace("1}", "NaN}"), 1, false),
        ] {
            assert_eq!(read(&line), Ok((messages, may_be_log)), "{line}");
        }
    }

    #[test]
    fn lines_that_are_no_messages_are_skipped() {
        for line in [
            "",
            "started",
            "{\"level\": \"info\"}",
            "{\"method\": \"GET\", \"path\": \"/\"}",
            "{\"jsonrpc\": \"2.0\", \"method\": \"error\"",
            "{\"text\": \"{\\\"jsonrpc\\\": 2, \\\"result\\\": 1}\"}",
            "null",
        ] {
            assert_eq!(read(line).map(|(messages, _)| messages), Ok(0), "{line}");
        }
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_is_an_error() {
        let output = "a\nb".to_owned() + &"x".repeat(16 << 20);
        let mut lines = LineReader::new(output.as_bytes());
        let first = lines.next_line().await.expect("a line");
        assert_eq!(first.as_deref(), Some(&b"a"[..]));
        let why = lines.next_line().await.expect_err("too long").to_string();
        assert_eq!(why, "it sent a message of more than 16777216 bytes");
    }
}
