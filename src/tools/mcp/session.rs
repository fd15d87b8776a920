//! An open connection: the protocol's handshake, calls, and its end. A request that is not properly answered fails at
//! once, and the connection takes no more: the next call opens a new one. Knows no list of tools.

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientConfig, ClientRequest,
    Implementation, JsonObject, PingRequest, ProtocolVersion,
};
use rmcp::service::{
    ClientInitializeError, NotificationContext, RunningService, serve_client_with_lifecycle_and_ct,
};
use rmcp::transport::Transport;
use rmcp::{ClientHandler, ClientLifecycleMode, Peer, RoleClient, ServiceError};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::config::load::Environment;
use crate::domain::mcp::McpTransport;
use crate::domain::message::shorten;
use crate::tools::mcp::failure::{RequestFailure, RetrySafety, is_connection_error};
use crate::tools::mcp::http_response::HttpError;
use crate::tools::mcp::secrets::Secrets;
use crate::tools::mcp::stderr::{self, StderrTail};
use crate::tools::mcp::{http, stdio};

/// Calls at work on one connection.
const MAX_CALLS: usize = 1024;
/// The longest that opening one may take.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest that an orderly end may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(6);
/// How long a server whose answer took too long may take to show that it answers at all.
const PING_TIMEOUT: Duration = Duration::from_secs(3);
/// How long what a process wrote last may take to be read after its end.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);
/// Most characters of why something failed.
const MAX_REASON_CHARS: usize = 1500;

/// An open connection, as calls use it.
pub struct McpSession {
    /// For requests.
    pub peer: Peer<RoleClient>,
    /// Whether the server tells when its tools change.
    has_change_notifications: bool,
    list_changes: Arc<AtomicU64>,
    in_flight: AtomicUsize,
    /// Notified when no call is at work any more.
    idle: Notify,
    last_used: Mutex<Instant>,
    has_answered: AtomicBool,
    close_state: CloseState,
}

/// How a connection is ended, and why it did.
#[derive(Clone, Default)]
struct CloseState {
    stop: CancellationToken,
    /// Takes no more calls: those at work may end.
    retired: CancellationToken,
    reason: CloseReason,
    secrets: Secrets,
    tail: StderrTail,
}

/// Why a connection ended, in words that follow `MCP server "x" is not available:`; the first reason stands.
pub type CloseReason = Arc<OnceLock<String>>;

/// An open connection with what its one task keeps.
pub struct OpenConnection {
    /// As calls use it.
    pub session: Arc<McpSession>,
    /// The task's part.
    pub driver: SessionDriver,
}

/// What goes on while a connection is open.
pub struct SessionDriver {
    service: BoxFuture<'static, ()>,
    stderr: StderrTask,
    close_state: CloseState,
}

/// Why a connection ended.
pub struct Disconnected(pub String);

/// What a process writes on its standard error, being logged.
struct StderrTask {
    reader: Option<BoxFuture<'static, ()>>,
}

/// Opens a connection to a server.
///
/// # Errors
/// Why it cannot be, without any secret.
pub async fn open(
    name: &str,
    transport: &McpTransport,
    environment: &Environment,
) -> Result<OpenConnection, String> {
    let deadline = Instant::now() + OPEN_TIMEOUT;
    // Nearly every server knows the handshake. Those that know only the protocol without one refuse it.
    let handshake = ClientLifecycleMode::Initialize;
    match try_open(name, transport, environment, handshake, deadline).await {
        Ok(opened) => Ok(opened),
        Err(ConnectError::Refused(reason)) => {
            let preferred_versions = vec![ProtocolVersion::LATEST];
            let without_handshake = ClientLifecycleMode::Discover { preferred_versions };
            let opened = try_open(name, transport, environment, without_handshake, deadline).await;
            opened.map_err(|_| reason)
        }
        Err(ConnectError::Failed(reason)) => Err(reason),
    }
}

enum ConnectError {
    /// The server answered, and does not want to speak like this.
    Refused(String),
    Failed(String),
}

async fn try_open(
    name: &str,
    transport: &McpTransport,
    environment: &Environment,
    mode: ClientLifecycleMode,
    deadline: Instant,
) -> Result<OpenConnection, ConnectError> {
    let mut close_state = CloseState::default();
    let list_changes = Arc::new(AtomicU64::new(0));
    let handler = NotificationHandler {
        list_changes: Arc::clone(&list_changes),
    };
    let mut stderr_task = StderrTask { reader: None };
    let opened = match transport {
        McpTransport::Stdio { command, args, env } => {
            let env = close_state
                .secrets
                .expand_templates("env", env, environment)
                .map_err(ConnectError::Failed)?;
            let (close_reason, tail) = (Arc::clone(&close_state.reason), close_state.tail.clone());
            let started = stdio::start(command, args, env, environment, close_reason, tail);
            let (process, stderr) = started.map_err(ConnectError::Failed)?;
            let (name, secrets, tail) = (
                name.to_owned(),
                close_state.secrets.clone(),
                close_state.tail.clone(),
            );
            stderr_task.reader = Some(Box::pin(stderr::log_stderr(name, stderr, secrets, tail)));
            let opened = timeout_at(
                deadline,
                stderr_task.concurrently(serve(handler, process, mode, &close_state)),
            )
            .await;
            if !matches!(opened, Ok(Ok(_))) {
                stderr_task.drain().await;
            }
            opened
        }
        McpTransport::StreamableHttp { url, headers } => {
            // Before the headers, which put all of them in order.
            if let Some((_, query)) = url.split_once('?') {
                close_state.secrets.add(query);
            }
            let headers = close_state
                .secrets
                .expand_templates("headers", headers, environment)
                .map_err(ConnectError::Failed)?;
            let (session_lost, close_reason) =
                (close_state.retired.clone(), Arc::clone(&close_state.reason));
            let client = http::connect(url, headers, session_lost, close_reason)
                .map_err(ConnectError::Failed)?;
            timeout_at(deadline, serve(handler, client, mode, &close_state)).await
        }
    };
    let service = match opened {
        Ok(Ok(service)) => service,
        Ok(Err(error)) => {
            let reason = match close_state.reason.get() {
                Some(text) => close_state.redact(text),
                None => close_state.redact(&close_state.tail.explain(&describe_init_error(&error))),
            };
            return Err(match error {
                ClientInitializeError::JsonRpcError(error) if !is_connection_error(&error) => {
                    ConnectError::Refused(reason)
                }
                _ => ConnectError::Failed(reason),
            });
        }
        Err(_) => {
            let reason = format!("it did not answer within {OPEN_TIMEOUT:?}");
            return Err(ConnectError::Failed(
                close_state.redact(&close_state.tail.explain(&reason)),
            ));
        }
    };
    let server_info = service.peer().peer_info();
    let has_handshake = server_info
        .as_ref()
        .is_some_and(|info| info.protocol_version.has_initialize());
    let capabilities = server_info
        .as_ref()
        .and_then(|info| info.capabilities.tools.clone());
    let has_change_notifications =
        has_handshake && capabilities.is_some_and(|tools| tools.list_changed == Some(true));
    let session = McpSession {
        peer: service.peer().clone(),
        // Without a session nobody tells us; a server that does not promise to is asked each time, too.
        has_change_notifications,
        list_changes,
        in_flight: AtomicUsize::new(0),
        idle: Notify::new(),
        last_used: Mutex::new(Instant::now()),
        has_answered: AtomicBool::new(false),
        close_state: close_state.clone(),
    };
    let driver = SessionDriver {
        service: Box::pin(async move { drop(service.waiting().await) }),
        stderr: stderr_task,
        close_state,
    };
    Ok(OpenConnection {
        session: Arc::new(session),
        driver,
    })
}

async fn serve<T: Transport<RoleClient> + 'static>(
    handler: NotificationHandler,
    transport: T,
    mode: ClientLifecycleMode,
    close_state: &CloseState,
) -> Result<RunningService<RoleClient, NotificationHandler>, ClientInitializeError> {
    serve_client_with_lifecycle_and_ct(handler, transport, mode, close_state.stop.clone()).await
}

impl McpSession {
    /// Whether it takes no more calls.
    pub fn is_closed(&self) -> bool {
        let end = &self.close_state;
        end.stop.is_cancelled() || end.retired.is_cancelled() || self.peer.is_transport_closed()
    }

    /// Resolves when it takes no more calls because the server failed, and a new one is to be opened for the next.
    pub async fn wait_retired(&self) {
        self.close_state.retired.cancelled().await;
    }

    /// Resolves when no call is at work.
    pub async fn wait_idle(&self) {
        while self.in_flight.load(Ordering::Acquire) > 0 {
            self.idle.notified().await;
        }
    }

    /// Whether [`Link::changes`] counts every change.
    pub fn has_change_notifications(&self) -> bool {
        self.has_change_notifications
    }

    /// How often the list of tools has changed.
    pub fn list_changes(&self) -> u64 {
        self.list_changes.load(Ordering::Acquire)
    }

    /// Whether any call was answered.
    pub fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    /// Ends it.
    pub fn close(&self, reason: &str) {
        let _ = self.close_state.reason.set(reason.to_owned());
        self.close_state.stop.cancel();
    }

    /// Somebody is about to call.
    pub fn touch(&self) {
        *self
            .last_used
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Comes back when nobody has called for so long.
    pub async fn wait_unused_for(&self, time: Duration) {
        loop {
            let last_used = *self
                .last_used
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let mut deadline = last_used + time;
            if self.in_flight.load(Ordering::Relaxed) > 0 {
                deadline = Instant::now() + time;
            }
            if deadline <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(deadline).await;
        }
    }

    /// Calls a tool by the server's own name for it. If the future is dropped, the server is notified that nobody waits
    /// any more.
    ///
    /// # Errors
    /// Why there is no result.
    pub async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
        time_limit: Duration,
    ) -> Result<CallToolResult, RequestFailure> {
        let _guard = self.begin_request()?;
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let Ok(response) = timeout(time_limit, self.peer.call_tool_once(params)).await else {
            if !self.is_responsive().await {
                self.close_state.retired.cancel();
            }
            return Err(RequestFailure {
                reason: format!("it did not answer within {} s", time_limit.as_secs()),
                retry: RetrySafety::Never,
            });
        };
        match response.map_err(|error| self.classify_error(&error))? {
            CallToolResponse::Complete(result) => {
                self.mark_answered();
                Ok(result)
            }
            _ => Err(RequestFailure {
                reason:
                    "it asks for what a run cannot give: a person's input, or to wait for a task"
                        .to_owned(),
                retry: RetrySafety::Never,
            }),
        }
    }

    /// A request was answered.
    pub fn mark_answered(&self) {
        self.has_answered.store(true, Ordering::Relaxed);
    }

    /// Counts a request as at work until the guard is dropped.
    ///
    /// # Errors
    /// There are too many, or this connection takes no more of them.
    pub fn begin_request(&self) -> Result<InFlightGuard<'_>, RequestFailure> {
        let guard = InFlightGuard(self);
        let in_flight = self.in_flight.fetch_add(1, Ordering::AcqRel);
        if self.is_closed() {
            return Err(RequestFailure {
                reason: self.close_reason(),
                retry: RetrySafety::Always,
            });
        }
        if in_flight >= MAX_CALLS {
            let reason = format!("{MAX_CALLS} calls are at work there already; call again later");
            return Err(RequestFailure {
                reason,
                retry: RetrySafety::Never,
            });
        }
        Ok(guard)
    }

    /// Whether it answers anything at all.
    async fn is_responsive(&self) -> bool {
        let ping = ClientRequest::PingRequest(PingRequest::default());
        match timeout(PING_TIMEOUT, self.peer.send_request(ping)).await {
            Ok(Ok(_)) => true,
            // Not every server knows it.
            Ok(Err(ServiceError::McpError(error))) => !is_connection_error(&error),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Why a request failed. If the server gave no proper answer, the connection takes no more calls.
    pub fn classify_error(&self, error: &ServiceError) -> RequestFailure {
        let (reason, retry) = match error {
            ServiceError::McpError(error) if is_connection_error(error) => (
                self.close_state.redact(&error.message),
                RetrySafety::IfReadOnly,
            ),
            ServiceError::McpError(error) => {
                self.mark_answered();
                (self.close_state.redact(&error.message), RetrySafety::Never)
            }
            ServiceError::UnexpectedResponse => {
                let reason = "it answered with something that is no tool's result".to_owned();
                (reason, RetrySafety::Never)
            }
            ServiceError::TransportSend(error) => {
                let error = error.error.as_ref();
                let retry = http::find_http_error(error)
                    .map_or(RetrySafety::IfReadOnly, HttpError::retry_safety);
                (self.close_state.redact(&root_cause(error)), retry)
            }
            ServiceError::TransportClosed => (self.close_reason(), RetrySafety::IfReadOnly),
            other => (
                self.close_state.redact(&other.to_string()),
                RetrySafety::IfReadOnly,
            ),
        };
        let is_answered = matches!(
            error,
            ServiceError::McpError(error) if !is_connection_error(error)
        );
        if !is_answered {
            self.close_state.retired.cancel();
        }
        RequestFailure { reason, retry }
    }

    fn close_reason(&self) -> String {
        match self.close_state.reason.get() {
            Some(reason) => self.close_state.redact(reason),
            None => "the connection ended before it answered".to_owned(),
        }
    }
}

impl SessionDriver {
    /// Comes back when the connection has ended. May be dropped and called again.
    pub async fn wait_closed(&mut self) -> Disconnected {
        self.stderr.concurrently(&mut self.service).await;
        let reason = self
            .close_state
            .reason
            .get()
            .map_or("it closed the connection", String::as_str);
        Disconnected(self.close_state.redact(reason))
    }

    /// Ends it in order.
    pub async fn close(&mut self) {
        self.close_state.stop.cancel();
        // What does not end by then is dropped, and with it its process.
        let _ = timeout(CLOSE_TIMEOUT, self.wait_closed()).await;
    }
}

impl StderrTask {
    /// Reads what was written to its end, if that comes soon.
    async fn drain(&mut self) {
        if let Some(listening) = self.reader.take() {
            let _ = timeout(STDERR_TIMEOUT, listening).await;
        }
    }

    /// Does the work while what is written is logged: a full pipe would stop the writer.
    async fn concurrently<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        if let Some(listening) = &mut self.reader {
            tokio::select! {
                biased;
                output = &mut work => return output,
                () = listening => {}
            }
            self.reader = None;
        }
        work.await
    }
}

impl CloseState {
    /// As it may be told: without secrets, on one line, of a bounded length.
    fn redact(&self, text: &str) -> String {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        shorten(&self.secrets.redact(&line), MAX_REASON_CHARS)
    }
}

/// A request at work.
pub struct InFlightGuard<'l>(&'l McpSession);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.touch();
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_one();
        }
    }
}

/// What a server may tell by itself: only that its tools changed. What it asks for is refused, as we promise nothing.
struct NotificationHandler {
    list_changes: Arc<AtomicU64>,
}

impl ClientHandler for NotificationHandler {
    fn get_info(&self) -> ClientConfig {
        let axed = Implementation::new("axed", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(Default::default(), axed)
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.list_changes.fetch_add(1, Ordering::AcqRel);
    }
}

fn describe_init_error(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::JsonRpcError(error) => error.message.to_string(),
        ClientInitializeError::TransportError { error, .. } => root_cause(error.error.as_ref()),
        ClientInitializeError::ConnectionClosed(_) => {
            "it closed the connection before it answered".to_owned()
        }
        ClientInitializeError::ExpectedInitResponse(_)
        | ClientInitializeError::ExpectedInitResult(_) => {
            "it answered the handshake with something else".to_owned()
        }
        other => other.to_string(),
    }
}

/// The innermost reason. The outer ones name the address, which may hold a secret.
fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    loop {
        if let Some(error) = http::find_http_error(cause) {
            return error.to_string();
        }
        match cause.source() {
            Some(inner) => cause = inner,
            None => return cause.to_string(),
        }
    }
}
