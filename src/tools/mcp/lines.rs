//! The output of a server process, line by line. It fails at a line that is too long, and at an answer that is not
//! valid: the transport would skip it, and the request that waits for it would wait on.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncBufRead, AsyncRead, BufReader, ReadBuf};

use crate::domain::message::shorten;
use crate::tools::mcp::close_state::CloseReason;

const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Bytes at each end of a line that are kept.
const MAX_END_BYTES: usize = 512;
/// Most characters of an invalid answer that are shown.
const MAX_SHOWN_CHARS: usize = 200;

/// A server's output. Its reader gets at most one line at a time.
pub struct BoundedLines<R> {
    output: BufReader<R>,
    line: Line,
    transport: Arc<TransportState>,
    close_reason: CloseReason,
}

/// What the transport does with the lines.
#[derive(Default)]
pub struct TransportState {
    /// Set when the last line was a message.
    pub has_received: AtomicBool,
    /// Whether requests wait for an answer.
    pub is_waiting: AtomicBool,
}

impl<R: AsyncRead> BoundedLines<R> {
    pub fn new(output: R, transport: Arc<TransportState>, close_reason: CloseReason) -> Self {
        Self {
            output: BufReader::new(output),
            line: Line::default(),
            transport,
            close_reason,
        }
    }

    fn fail(&self, why: String) -> Poll<io::Result<()>> {
        let _ = self.close_reason.set(why.clone());
        Poll::Ready(Err(io::Error::other(why)))
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for BoundedLines<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.line.is_complete {
            let line = std::mem::take(&mut this.line);
            let was_message = this.transport.has_received.swap(false, Ordering::Relaxed);
            let is_waiting = this.transport.is_waiting.load(Ordering::Relaxed);
            if !was_message && is_waiting && line.looks_like_answer() {
                let beginning = String::from_utf8_lossy(&line.head);
                let beginning = shorten(beginning.trim_end(), MAX_SHOWN_CHARS);
                return this.fail(format!("its answer is not a JSON-RPC message: {beginning}"));
            }
        }
        let available = ready!(Pin::new(&mut this.output).poll_fill_buf(context))?;
        let line_end = available.iter().position(|byte| *byte == b'\n');
        let length = line_end.map_or(available.len(), |at| at + 1);
        let part = &available[..length.min(buffer.remaining())];
        buffer.put_slice(part);
        this.line.push(part);
        let read = part.len();
        Pin::new(&mut this.output).consume(read);
        if this.line.bytes > MAX_MESSAGE_BYTES {
            return this.fail(format!(
                "it sent a message of more than {MAX_MESSAGE_BYTES} bytes"
            ));
        }
        Poll::Ready(Ok(()))
    }
}

/// The line that is being read.
#[derive(Default)]
struct Line {
    bytes: usize,
    head: Vec<u8>,
    tail: Vec<u8>,
    is_complete: bool,
}

impl Line {
    fn push(&mut self, part: &[u8]) {
        self.bytes += part.len();
        self.is_complete = part.last() == Some(&b'\n');
        let missing = MAX_END_BYTES - self.head.len();
        self.head
            .extend_from_slice(&part[..missing.min(part.len())]);
        let end = part.len().saturating_sub(MAX_END_BYTES);
        self.tail.extend_from_slice(&part[end..]);
        let excess = self.tail.len().saturating_sub(MAX_END_BYTES);
        self.tail.drain(..excess);
    }

    /// Whether this is rather an answer than a line of a log. Some servers write `jsonrpc` last.
    fn looks_like_answer(&self) -> bool {
        let head = String::from_utf8_lossy(&self.head);
        let tail = String::from_utf8_lossy(&self.tail);
        let contains = |key: &str| head.contains(key) || tail.contains(key);
        head.starts_with('{')
            && !contains("\"method\"")
            && contains("\"jsonrpc\"")
            && (contains("\"result\"") || contains("\"error\""))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use tokio::io::{AsyncBufReadExt, BufReader};

    use super::{BoundedLines, TransportState};
    use crate::tools::mcp::close_state::CloseReason;

    /// The lines that are read of this output, none of which is a message, and why it failed.
    async fn read(output: &str, is_waiting: bool) -> (Vec<String>, Option<String>) {
        let (transport, close_reason) =
            (Arc::new(TransportState::default()), CloseReason::default());
        transport.is_waiting.store(is_waiting, Ordering::Relaxed);
        let lines = BoundedLines::new(output.as_bytes(), transport, Arc::clone(&close_reason));
        let mut lines = BufReader::new(lines).lines();
        let mut read = Vec::new();
        while let Ok(Some(line)) = lines.next_line().await {
            read.push(line);
        }
        (read, close_reason.get().cloned())
    }

    #[tokio::test]
    async fn an_invalid_answer_ends_the_output() {
        let long = "x".repeat(100_000);
        for answer in [
            r#"{"jsonrpc": "2.0", "id": 1, "result": NaN}"#.to_owned(),
            r#"{"id":1,"error":{]},"jsonrpc":"2.0"}"#.to_owned(),
            format!(r#"{{"result":{{"text":"{long}","mean":NaN}},"jsonrpc":"2.0","id":1}}"#),
        ] {
            let output = format!("a log\n{answer}\nmore\n");
            let (read_lines, why) = read(&output, true).await;
            assert_eq!(read_lines, ["a log", answer.as_str()]);
            let why = why.expect("a reason");
            let expected = format!("its answer is not a JSON-RPC message: {}", &answer[..30]);
            assert!(why.starts_with(&expected) && why.len() < 300, "{why}");
            let (read_lines, why) = read(&output, false).await;
            assert_eq!((read_lines.len(), why), (3, None), "nothing waits for it");
        }
    }

    #[tokio::test]
    async fn lines_that_are_no_answers_are_skipped() {
        let output = "started\n{\"level\": \"error\"}\n\n{\"jsonrpc\": \"2.0\", \"method\": \"error\"\n\
                      sent {\"jsonrpc\": \"2.0\", \"result\": 1}\n{\"text\": \"{\\\"jsonrpc\\\": 2, \\\"result\\\": 1}\"}\n";
        let (read_lines, why) = read(output, true).await;
        assert_eq!((read_lines.len(), why), (6, None));
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_ends_the_output() {
        let output = "x".repeat((16 << 20) + 1);
        let (read_lines, why) = read(&output, false).await;
        assert!(read_lines.is_empty());
        assert_eq!(
            why.as_deref(),
            Some("it sent a message of more than 16777216 bytes")
        );
    }
}
