//! Splits a streamed body into messages: server-sent events (the WHATWG format, used by OpenAI and Anthropic) or one JSON
//! document per line (Ollama). Chunk boundaries do not matter.

use std::borrow::Cow;

use bytes::{Buf, Bytes};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamFormat {
    /// A message is the data of one server-sent event, or a line that is JSON instead.
    Sse,
    /// A message is a non-blank line.
    Ndjson,
}

/// Longer names of events are dropped.
const MAX_EVENT_NAME: usize = 256;

/// A message or a reply exceeds its size limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("response too large")]
pub struct ReplyTooLarge;

/// As [`String::from_utf8_lossy`], which takes twenty times as many instructions for valid ASCII.
pub fn decode_text(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => String::from_utf8_lossy(bytes),
    }
}

pub struct StreamDecoder {
    format: StreamFormat,
    /// Size limit of one message.
    max_bytes: usize,
    /// Received and not yet decoded.
    chunk: Bytes,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    /// The name of the event that the last message or the data belongs to.
    event: String,
    /// The data of an incomplete event.
    data: Vec<u8>,
    has_data: bool,
    is_at_start: bool,
    is_after_cr: bool,
    /// Whether `data` was returned as a message and must be cleared.
    is_data_consumed: bool,
}

impl StreamDecoder {
    pub fn new(format: StreamFormat, max_bytes: usize) -> Self {
        Self {
            format,
            max_bytes,
            chunk: Bytes::new(),
            line: Vec::new(),
            event: String::new(),
            data: Vec::new(),
            has_data: false,
            is_at_start: true,
            is_after_cr: false,
            is_data_consumed: false,
        }
    }

    /// Takes the next chunk. The caller must have read all messages of the previous one.
    pub fn feed(&mut self, chunk: Bytes) {
        debug_assert!(self.chunk.is_empty());
        self.chunk = chunk;
    }

    /// The next complete message; `None` if it needs more data. Invalid UTF-8 becomes replacement characters.
    pub fn next_message(&mut self) -> Result<Option<Cow<'_, str>>, ReplyTooLarge> {
        self.clear_consumed_data();
        while !self.chunk.is_empty() {
            if std::mem::take(&mut self.is_after_cr) && self.chunk[0] == b'\n' {
                self.chunk.advance(1);
                continue;
            }
            let is_sse = self.format == StreamFormat::Sse;
            let end = self
                .chunk
                .iter()
                .position(|b| *b == b'\n' || (is_sse && *b == b'\r'));
            let Some(end) = end else {
                self.check_size(self.chunk.len())?;
                self.line.extend_from_slice(&self.chunk);
                self.chunk.clear();
                break;
            };
            self.check_size(end)?;
            self.is_after_cr = self.chunk[end] == b'\r';
            let rest = self.chunk.split_to(end);
            self.chunk.advance(1);
            let is_complete = if self.line.is_empty() {
                self.push_line(&rest)
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&rest);
                let is_complete = self.push_line(&line);
                line.clear();
                self.line = line;
                is_complete
            };
            if is_complete {
                self.is_data_consumed = true;
                return Ok(Some(decode_text(&self.data)));
            }
        }
        Ok(None)
    }

    /// The name of the event whose data was returned last; empty if it has none.
    pub fn event_name(&self) -> &str {
        &self.event
    }

    /// The rest at the end of the body: a message without its final line break or blank line, or an incomplete message.
    pub fn finish(&mut self) -> Option<Cow<'_, str>> {
        self.clear_consumed_data();
        let line = std::mem::take(&mut self.line);
        let is_complete = self.push_line(&line) || self.has_data;
        is_complete.then(|| decode_text(&self.data))
    }

    /// Adds one line, without its line break, to `data`. Returns whether `data` now holds a complete message.
    fn push_line(&mut self, line: &[u8]) -> bool {
        let line = match std::mem::take(&mut self.is_at_start) {
            true => line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line),
            false => line,
        };
        if self.format == StreamFormat::Ndjson {
            let line = line.trim_ascii();
            self.data.extend_from_slice(line);
            return !line.is_empty();
        }
        if line.is_empty() {
            if !self.has_data {
                self.event.clear();
            }
            return self.has_data;
        }
        // Some services write an error like this when they fail within a stream.
        if line.starts_with(b"{") && line.trim_ascii_end().ends_with(b"}") && !self.has_data {
            self.data.extend_from_slice(line);
            return true;
        }
        let (field, value) = match line.iter().position(|b| *b == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &b""[..]),
        };
        if field == b"data" {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.has_data = true;
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        } else if field == b"event" && value.len() <= MAX_EVENT_NAME {
            self.event = decode_text(value).trim().to_owned();
        }
        false
    }

    fn clear_consumed_data(&mut self) {
        if std::mem::take(&mut self.is_data_consumed) {
            self.data.clear();
            self.event.clear();
            self.has_data = false;
        }
    }

    fn check_size(&self, added: usize) -> Result<(), ReplyTooLarge> {
        match self.line.len() + self.data.len() + added > self.max_bytes {
            true => Err(ReplyTooLarge),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::{ReplyTooLarge, StreamDecoder, StreamFormat};

    /// All messages of `body`, split into chunks at `cuts` (any numbers), and the rest at its end.
    fn decode(format: StreamFormat, body: &[u8], cuts: &[usize]) -> (Vec<String>, Option<String>) {
        let mut cuts: Vec<_> = cuts.iter().map(|c| c % (body.len() + 1)).collect();
        cuts.extend([0, body.len()]);
        cuts.sort_unstable();
        let mut decoder = StreamDecoder::new(format, 10_000);
        let mut found = Vec::new();
        for pair in cuts.windows(2) {
            decoder.feed(Bytes::copy_from_slice(&body[pair[0]..pair[1]]));
            while let Some(message) = decoder.next_message().expect("short enough") {
                found.push(message.into_owned());
            }
        }
        let rest = decoder.finish().map(|rest| rest.into_owned());
        (found, rest)
    }

    #[test]
    fn an_event_is_its_data() {
        let body = "\u{feff}data: one\n\n: a comment\r\nevent: x\r\nid: 7\r\ndata:two\r\ndata:  lines\r\n\r\n\
                    data: three\r\rretry: 5\n\ndata\n\ndata: [DONE]\n";
        let (found, rest) = decode(StreamFormat::Sse, body.as_bytes(), &[]);
        assert_eq!(found, ["one", "two\n lines", "three", ""]);
        assert_eq!(rest.as_deref(), Some("[DONE]"));
    }

    #[test]
    fn events_have_names_and_json_may_come_without_them() {
        let mut decoder = StreamDecoder::new(StreamFormat::Sse, 1000);
        decoder.feed(Bytes::from_static(
            b"event: error\ndata: one\n\ndata: two\n\nevent: x\n\n{\"error\":1}\ndata: three\n\n",
        ));
        let mut found = Vec::new();
        while let Some(message) = decoder.next_message().expect("short enough") {
            let message = message.into_owned();
            found.push((decoder.event_name().to_owned(), message));
        }
        let pair = |name: &str, data: &str| (name.to_owned(), data.to_owned());
        let expected = [
            pair("error", "one"),
            pair("", "two"),
            pair("", "{\"error\":1}"),
            pair("", "three"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_line_is_a_message() {
        let body = b"{\"a\":1}\r\n\n  \n{\"b\":\"\xff\"}\n{\"c\"";
        let (found, rest) = decode(StreamFormat::Ndjson, body, &[]);
        assert_eq!(found, ["{\"a\":1}", "{\"b\":\"\u{fffd}\"}"]);
        assert_eq!(rest.as_deref(), Some("{\"c\""));
    }

    #[test]
    fn an_endless_message_is_rejected() {
        for format in [StreamFormat::Sse, StreamFormat::Ndjson] {
            let mut decoder = StreamDecoder::new(format, 100);
            let mut fed = 0;
            let rejected = loop {
                decoder.feed(Bytes::from_static(b"data: never ending "));
                fed += 1;
                match decoder.next_message() {
                    Ok(None) => {}
                    other => break other.map(|m| m.map(|m| m.into_owned())),
                }
            };
            assert_eq!((rejected, fed), (Err(ReplyTooLarge), 6));
        }
        let mut decoder = StreamDecoder::new(StreamFormat::Sse, 100);
        decoder.feed(Bytes::from("data: line\n".repeat(30)));
        assert_eq!(decoder.next_message(), Err(ReplyTooLarge));
    }

    proptest! {
        #[test]
        fn chunk_boundaries_make_no_difference(
            pieces in prop::collection::vec(
                prop::sample::select(vec![
                    &b"data: "[..], b"data:", b"event: ping", b": hi", b"{\"a\":\"\xc3\xa4\xf0\x9f\xa6\x80\"}", b"\n", b"\r",
                    b"\r\n", b"\n\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xff\xc3", b" ", b"x",
                ]),
                0..40,
            ),
            cuts in prop::collection::vec(any::<usize>(), 0..20),
        ) {
            let body = pieces.concat();
            for format in [StreamFormat::Sse, StreamFormat::Ndjson] {
                let whole = decode(format, &body, &[]);
                prop_assert_eq!(&decode(format, &body, &cuts), &whole);
                let every: Vec<_> = (0..body.len()).collect();
                prop_assert_eq!(&decode(format, &body, &every), &whole);
            }
        }
    }
}
