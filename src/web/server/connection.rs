//! A client's connection as hyper sees it: cuts off a client that takes nothing, holds back the bare refusals that hyper
//! makes of its own (the contract wants a problem with a body), and closes so that a client can still read the answer.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, timeout};

/// How HTTP/2 begins with prior knowledge (RFC 9113, 3.4); no HTTP/1 request does. Read whole before hyper has the
/// connection, because hyper would wait for the rest without end.
const H2: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Most bytes and longest time that a closing connection still reads what its client had under way.
const LINGER_BYTES: u64 = 8 << 20;
const LINGER: Duration = Duration::from_secs(2);

/// A TCP stream with what was read ahead from it.
pub struct Connection {
    stream: TcpStream,
    /// What was read to tell the protocol, and how much of it was handed on.
    lookahead: [u8; H2.len()],
    lookahead_len: usize,
    lookahead_read: usize,
    /// How long the client may take nothing while we have something for it.
    write_timeout: Duration,
    stall_timer: Option<Pin<Box<Sleep>>>,
    suppressed_status: Option<u16>,
}

impl Connection {
    /// A connection just accepted.
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

    /// Whether the client speaks HTTP/2. Reads only as much as is needed to tell, and gives it back later.
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

    /// The status of the refusal that hyper wanted to send and that was held back.
    pub fn suppressed_status(&self) -> Option<u16> {
        self.suppressed_status
    }

    /// Sends these last bytes and closes.
    pub async fn close_with(mut self, last: &[u8]) {
        // A client that does not take the refusal is gone; there is nobody left to tell.
        let _ = timeout(LINGER, self.stream.write_all(last)).await;
        self.close().await;
    }

    /// Ends our side, then reads on for a while: closing over unread bytes resets the connection, and the client would
    /// lose an answer that it has not read yet.
    pub async fn close(mut self) {
        let _ = timeout(LINGER, async {
            self.stream.shutdown().await?;
            let mut rest = (&mut self.stream).take(LINGER_BYTES);
            tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
        })
        .await;
    }

    /// Notes a refusal of hyper's own: an error without a body, which no handler of ours ever answers with. The middle of
    /// a body cannot look like one: all our bodies are JSON or events, where a carriage return is escaped.
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

    /// Passes on a write's outcome, and an error where the client has taken nothing for too long.
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
            // What came with it goes along: hyper makes its buffer twice as large for a head that comes in two pieces.
            // An error or an end shows again in the next read.
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

    /// Does nothing: [`Socket::close`] does it, when hyper has let go.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
