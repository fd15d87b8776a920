//! The stream below hyper. It disconnects a client that stops reading, suppresses hyper's own error responses without a body
//! (the listener sends a problem instead), and closes so that the client can still read the response.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, timeout};

/// The client preface of HTTP/2 with prior knowledge (RFC 9113, 3.4); no HTTP/1 request begins so. It is read before hyper
/// gets the connection, because hyper would wait for the rest without a timeout.
const H2: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Maximum bytes and time for which a closing connection still reads what its client has sent.
const LINGER_BYTES: u64 = 8 << 20;
const LINGER: Duration = Duration::from_secs(2);

/// A TCP stream with the bytes that were read ahead.
pub struct Connection {
    stream: TcpStream,
    /// The bytes that were read to detect the protocol, and how many of them hyper has read.
    lookahead: [u8; H2.len()],
    lookahead_len: usize,
    lookahead_read: usize,
    /// How long a write may make no progress.
    write_timeout: Duration,
    stall_timer: Option<Pin<Box<Sleep>>>,
    suppressed_status: Option<u16>,
}

impl Connection {
    pub fn new(stream: TcpStream, write_timeout: Duration) -> Self {
        Self {
            stream,
            lookahead: [0; H2.len()],
            lookahead_len: 0,
            lookahead_read: 0,
            write_timeout,
            stall_timer: None,
            suppressed_status: None,
        }
    }

    /// Whether the client speaks HTTP/2. The bytes that are read for this are read again by hyper.
    pub async fn speaks_h2(&mut self) -> io::Result<bool> {
        while self.lookahead_len < H2.len()
            && self.lookahead[..self.lookahead_len] == H2[..self.lookahead_len]
        {
            match self
                .stream
                .read(&mut self.lookahead[self.lookahead_len..])
                .await?
            {
                0 => break,
                read => self.lookahead_len += read,
            }
        }
        Ok(self.lookahead[..self.lookahead_len] == H2[..])
    }

    /// The status of the error response of hyper's that was suppressed.
    pub fn suppressed_status(&self) -> Option<u16> {
        self.suppressed_status
    }

    /// Sends these last bytes and closes.
    pub async fn close_with(mut self, last: &[u8]) {
        // A client that does not read this has left.
        let _ = timeout(LINGER, self.stream.write_all(last)).await;
        self.close().await;
    }

    /// Shuts down the write side, then reads on for a while: closing with unread bytes resets the connection, and the
    /// client would lose a response that it has not read yet.
    pub async fn close(mut self) {
        let _ = timeout(LINGER, async {
            self.stream.shutdown().await?;
            let mut rest = (&mut self.stream).take(LINGER_BYTES);
            tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
        })
        .await;
    }

    /// Detects an error response of hyper's own by its empty body, which no handler sends. The middle of a body cannot look
    /// like one: all bodies are JSON or events, where a carriage return is escaped.
    fn suppress_refusal(&mut self, bytes: &[u8]) -> bool {
        if !bytes.starts_with(b"HTTP/1.1 4") || self.suppressed_status.is_some() {
            return false;
        }
        let Ok(head) = std::str::from_utf8(bytes) else {
            return false;
        };
        let status = head.get(9..12).and_then(|status| status.parse().ok());
        if !head.contains("\r\ncontent-length: 0\r\n") {
            return false;
        }
        self.suppressed_status = status;
        status.is_some()
    }

    /// The outcome of a write, or an error if the client has read nothing for too long.
    fn check_stall<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stall_timer = None;
            return outcome;
        }
        let stall_timer = self
            .stall_timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(self.write_timeout)));
        ready!(stall_timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.lookahead_read < this.lookahead_len {
            let lookahead = &this.lookahead[this.lookahead_read..this.lookahead_len];
            let count = lookahead.len().min(buf.remaining());
            buf.put_slice(&lookahead[..count]);
            this.lookahead_read += count;
            // Reads on in the same call: hyper doubles its buffer for a head that arrives in two pieces. The next read
            // reports an error or the end again.
            if buf.remaining() > 0 {
                let _ = pin!(&mut this.stream).poll_read(cx, buf);
            }
            return Poll::Ready(Ok(()));
        }
        pin!(&mut this.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.suppress_refusal(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        let outcome = pin!(&mut this.stream).poll_write(cx, buf);
        this.check_stall(cx, outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if bufs.first().is_some_and(|head| this.suppress_refusal(head)) {
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        let outcome = pin!(&mut this.stream).poll_write_vectored(cx, bufs);
        this.check_stall(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A TCP stream has nothing to flush.
        Poll::Ready(Ok(()))
    }

    /// Does nothing: [`Connection::close`] shuts down after hyper has returned the stream.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
