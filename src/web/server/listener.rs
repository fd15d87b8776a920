//! Accepts connections, serves HTTP/1.1 and h2c on them, and shuts down gracefully.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{unconstrained, yield_now};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service;
use tracing::{debug, warn};

use crate::domain::counted::counted;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::server::connection::Connection;
use crate::web::server::forwarded::PeerAddress;
use crate::web::server::middleware;
use crate::web::server::pending::{
    CloseSignal, FirstBody, PendingConnection, PendingConnections, PendingLimits,
};

/// Maximum bytes of a request's head: request line and all headers. Over HTTP/1.1 up to twice as many pass, because hyper
/// looks at the size of its buffer only before it reads on.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Maximum concurrent streams of an HTTP/2 connection.
const MAX_STREAMS: u32 = 256;
/// Interval of HTTP/2 pings, and the timeout of each.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// Connections that the system queues until they are accepted. Linux's own limit is 4096 too.
const BACKLOG: u32 = 4096;
/// Connections that are accepted before other tasks of this thread may run.
const ACCEPT_BATCH: usize = 1024;
/// The pause after an accept that failed, usually for lack of file descriptors.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// How long a client may take to send a request's head, to send the next request of a connection, and to read the
    /// next part of a response.
    pub client: Duration,
    /// How long requests in flight may take after shutdown has begun.
    pub shutdown: Duration,
}

/// Listens on this address, also if its port was in use until just now.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // On Windows this would take over a port that is in use.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections until `shutdown` is cancelled. Then it lets requests in flight finish, and returns when all
/// connections are closed, at the latest after `timeouts.shutdown`.
///
/// Event streams end when the `closing` token of the router's state is cancelled: cancel that token first.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    timeouts: Timeouts,
    pending_limits: PendingLimits,
    shutdown: CancellationToken,
) {
    let connections = TaskTracker::new();
    let mut connection_server = ConnectionServer {
        router,
        timeouts,
        pending: PendingConnections::new(pending_limits),
        close_idle: shutdown.child_token(),
        abort: CancellationToken::new(),
        tasks: connections.clone(),
    };
    let mut batch = 0;
    loop {
        let accepted = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            accepted = unconstrained(listener.accept()) => accepted,
        };
        batch = (batch + 1) % ACCEPT_BATCH;
        if batch == 0 {
            yield_now().await;
        }
        match accepted {
            Ok((stream, peer)) => {
                // Added here and not in the task, so that connections are ordered by their arrival.
                let pending = connection_server.pending.add(peer.ip());
                connections.spawn(connection_server.clone().handle(stream, pending));
            }
            Err(error) if is_client_error(&error) => {}
            Err(error) => {
                // Most likely there is no file descriptor left: idle connections are closed to free some.
                warn!("Cannot accept connections, closing idle ones and trying again: {error}");
                connection_server.close_idle.cancel();
                connection_server.pending.close_all();
                connection_server.close_idle = shutdown.child_token();
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    () = tokio::time::sleep(ACCEPT_RETRY_INTERVAL) => {}
                }
            }
        }
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(timeouts.shutdown, connections.wait())
        .await
        .is_err()
    {
        warn!(
            "Closing {} that did not end in time",
            counted(connections.len(), "connection")
        );
        connection_server.abort.cancel();
        connections.wait().await;
    }
}

/// Whether the client left before it was accepted.
fn is_client_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
    )
}

/// Serves one connection; cloned for each.
#[derive(Clone)]
struct ConnectionServer {
    router: Router,
    timeouts: Timeouts,
    pending: Arc<PendingConnections>,
    /// When this is cancelled, connections end as soon as they have no request in flight.
    close_idle: CancellationToken,
    /// When this is cancelled, connections end at once.
    abort: CancellationToken,
    tasks: TaskTracker,
}

impl ConnectionServer {
    async fn handle(
        self,
        stream: TcpStream,
        (pending, close_signal): (Arc<PendingConnection>, CloseSignal),
    ) {
        let abort = self.abort.clone();
        // Head and body have the client timeout each, so only HTTP/2 without a request exceeds both.
        let request_timeout = 2 * self.timeouts.client;
        let mut connection = pin!(self.serve_connection(stream, pending));
        tokio::select! {
            biased;
            () = abort.cancelled() => return,
            () = connection.as_mut() => return,
            // Boxed, so that it takes no memory for the rest of the connection's life.
            is_overdue = Box::pin(close_signal.should_close(request_timeout)) => if is_overdue {
                debug!("Closing a connection without a complete request");
                return;
            },
        }
        tokio::select! {
            biased;
            () = abort.cancelled() => {}
            () = connection => {}
        }
    }

    async fn serve_connection(self, stream: TcpStream, pending: Arc<PendingConnection>) {
        // Responses are written at once; waiting to fill a segment would only delay them.
        let _ = stream.set_nodelay(true);
        let mut socket = Connection::new(stream, self.timeouts.client);
        let first = tokio::select! {
            biased;
            () = self.close_idle.cancelled() => return,
            first = tokio::time::timeout(self.timeouts.client, socket.speaks_h2()) => first,
        };
        match first {
            // Boxed: the state of HTTP/2 is several times as large, and few connections need it.
            Ok(Ok(true)) => Box::pin(self.serve_http2(socket, pending)).await,
            Ok(Ok(false)) => self.serve_http1(socket, pending).await,
            Ok(Err(_)) | Err(_) => {}
        }
    }

    async fn serve_http1(self, socket: Connection, pending: Arc<PendingConnection>) {
        let router = self.router;
        let service = service_fn(move |request| respond(router.clone(), request, &pending));
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.timeouts.client)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(socket), service);
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = self.close_idle.cancelled() => {
                std::pin::Pin::new(&mut connection).graceful_shutdown();
                (&mut connection).await
            }
        };
        let parts = connection.into_parts();
        let has_unread = !parts.read_buf.is_empty();
        let socket = parts.io.into_inner();
        // Boxed, so that it takes no memory before.
        Box::pin(end_http1(socket, ended, has_unread, &self.close_idle)).await;
    }

    async fn serve_http2(self, socket: Connection, pending: Arc<PendingConnection>) {
        let router = self.router;
        let service = service_fn(move |request| respond(router.clone(), request, &pending));
        let connection = http2::Builder::new(TrackedExecutor(self.tasks))
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_INTERVAL)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEAD_BYTES as u32)
            .serve_connection(TokioIo::new(socket), service);
        let mut connection = pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = self.close_idle.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            debug!("A connection ended early: {error}");
        }
    }
}

/// Ends a connection whose last request is done, or could not be read.
async fn end_http1(
    socket: Connection,
    ended: hyper::Result<()>,
    has_unread: bool,
    close_idle: &CancellationToken,
) {
    let (code, why) = match ended {
        Err(error) if error.is_timeout() && has_unread => (
            ProblemCode::RequestTimeout,
            "the request's head did not arrive in time".to_owned(),
        ),
        Err(error) => {
            debug!("A connection ended early: {error}");
            match socket.suppressed_status() {
                Some(431 | 414) => (
                    ProblemCode::HeadTooLarge,
                    format!(
                        "the request's head is larger than {MAX_HEAD_BYTES} bytes, or has too many fields"
                    ),
                ),
                Some(_) => (
                    ProblemCode::MalformedRequest,
                    format!("the request cannot be read: {error}"),
                ),
                None => return,
            }
        }
        // Every request has its response; shutdown does not wait for the client to close too.
        Ok(()) => {
            tokio::select! {
                () = socket.close() => {}
                () = close_idle.cancelled() => {}
            }
            return;
        }
    };
    let problem = problem_response(code, &why);
    socket.close_with(&problem).await;
}

/// Answers one request. The connection is settled when its first request is complete or answered.
fn respond(
    mut router: Router,
    mut request: hyper::Request<Incoming>,
    pending: &Arc<PendingConnection>,
) -> impl Future<Output = Result<Response, Infallible>> + use<> {
    let unsettled = (!pending.is_settled()).then(|| Arc::clone(pending));
    request.extensions_mut().insert(PeerAddress(pending.peer()));
    let response = router.call(request.map(|body| match &unsettled {
        Some(pending) => Body::new(FirstBody::new(body, Arc::clone(pending))),
        None => Body::new(body),
    }));
    let unsettled = unsettled.filter(|pending| !pending.is_settled());
    // An `async` block would have space for `response` twice.
    response.inspect(move |_| {
        if let Some(pending) = unsettled {
            pending.settle();
        }
    })
}

/// Spawns HTTP/2 streams as tasks of the listener, which waits for them.
#[derive(Clone)]
struct TrackedExecutor(TaskTracker);

impl<F> hyper::rt::Executor<F> for TrackedExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: F) {
        self.0.spawn(stream);
    }
}

/// An HTTP/1.1 response to a request that hyper could not read.
fn problem_response(code: ProblemCode, why: &str) -> Vec<u8> {
    let id = middleware::new_request_id();
    let id = id.to_str().unwrap_or_default();
    let status = code.status();
    let body = Problem::new(code, why).render("", id);
    let mut response = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\n\
         x-request-id: {id}\r\nconnection: close\r\n\r\n",
        body.len()
    )
    .into_bytes();
    response.extend_from_slice(&body);
    response
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use axum::Router;
    use axum::body::Bytes;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::Notify;
    use tokio::task::JoinSet;
    use tokio_util::sync::CancellationToken;

    use super::{PendingLimits, Timeouts, serve};
    use crate::web::server::middleware::{MiddlewareConfig, surround};

    struct TestServer {
        address: SocketAddr,
        stop: CancellationToken,
        /// Notified when the handler of `/held` has begun.
        begun: Arc<Notify>,
        /// Lets that handler return.
        release: Arc<Notify>,
        serving: JoinSet<()>,
    }

    async fn start_server(client: Duration, shutdown: Duration) -> TestServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (begun, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (stop, held) = (CancellationToken::new(), (begun.clone(), release.clone()));
        let router = Router::new()
            .route("/", get(async || "fine"))
            .route("/much", get(async || Bytes::from(vec![b'x'; 64 << 20])))
            .route("/taken", post(async |body: Bytes| body.len().to_string()))
            .route(
                "/held",
                get(async move || {
                    held.0.notify_one();
                    held.1.notified().await;
                    "held"
                }),
            );
        let router = surround(router, MiddlewareConfig::default());
        let timeouts = Timeouts { client, shutdown };
        let mut serving = JoinSet::new();
        let pending = PendingLimits {
            per_address: 100,
            total: 100,
        };
        serving.spawn(serve(listener, router, timeouts, pending, stop.clone()));
        TestServer {
            address,
            stop,
            begun,
            release,
            serving,
        }
    }

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    async fn send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(bytes).await.expect("sent");
        stream
    }

    async fn read_rest(mut stream: TcpStream) -> String {
        let mut text = Vec::new();
        stream.read_to_end(&mut text).await.expect("an answer");
        String::from_utf8_lossy(&text).into_owned()
    }

    fn assert_problem(answer: &str, status: u16, code: &str) {
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
        assert!(
            answer.contains("content-type: application/problem+json"),
            "{answer}"
        );
        assert!(answer.contains("x-request-id: req_"), "{answer}");
        assert!(answer.contains(&format!(r#""code":"{code}""#)), "{answer}");
    }

    #[tokio::test]
    async fn a_request_is_answered() {
        let server = start_server(LONG, LONG).await;
        let get = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        let answer = read_rest(send(server.address, get).await).await;
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("fine"),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn malformed_requests_get_a_problem() {
        let server = start_server(LONG, LONG).await;
        let answer =
            read_rest(send(server.address, b"\x16\x03\x01\x00hello there\r\n\r\n").await).await;
        assert_problem(&answer, 400, "malformed_request");

        let mut huge = b"GET / HTTP/1.1\r\nhost: a\r\nx-huge: ".to_vec();
        huge.resize(1 << 20, b'x');
        huge.extend_from_slice(b"\r\n\r\n");
        let answer = read_rest(send(server.address, &huge).await).await;
        assert_problem(&answer, 431, "head_too_large");

        let many: String = (0..1000).map(|n| format!("x-{n}: 1\r\n")).collect();
        let many = format!("GET / HTTP/1.1\r\nhost: a\r\n{many}\r\n");
        let answer = read_rest(send(server.address, many.as_bytes()).await).await;
        assert_problem(&answer, 431, "head_too_large");
    }

    #[tokio::test]
    async fn a_slow_head_times_out() {
        let server = start_server(SHORT, LONG).await;
        let answer = read_rest(send(server.address, b"GET / HTTP/1.1\r\nhos").await).await;
        assert_problem(&answer, 408, "request_timeout");
        for half in [&b"PR"[..], b"PRI * HTTP/2.0\r\n\r\nSM"] {
            assert_eq!(read_rest(send(server.address, half).await).await, "");
        }
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_disconnected() {
        let mut server = start_server(SHORT, LONG).await;
        let stream = send(server.address, b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server.stop.cancel();
        // Returns long before the shutdown timeout: the connection was closed, although the client did not read.
        let ended = tokio::time::timeout(LONG / 2, server.serving.join_next()).await;
        assert!(ended.is_ok());
        drop(stream);
    }

    #[tokio::test]
    async fn shutdown_lets_requests_in_flight_finish() {
        let mut server = start_server(LONG, LONG).await;
        let idle = TcpStream::connect(server.address)
            .await
            .expect("a connection");
        let held = send(server.address, b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server.begun.notified().await;
        server.stop.cancel();
        assert_eq!(read_rest(idle).await, "");
        server.release.notify_one();
        let answer = read_rest(held).await;
        assert!(answer.ends_with("held"), "{answer}");
        assert!(
            server
                .serving
                .join_next()
                .await
                .is_some_and(|ended| ended.is_ok())
        );
        assert!(TcpStream::connect(server.address).await.is_err());
    }

    #[tokio::test]
    async fn shutdown_has_a_timeout() {
        let mut server = start_server(LONG, SHORT).await;
        let held = send(server.address, b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server.begun.notified().await;
        server.stop.cancel();
        assert!(
            server
                .serving
                .join_next()
                .await
                .is_some_and(|ended| ended.is_ok())
        );
        assert_eq!(read_rest(held).await, "");
    }
}
