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
use crate::tools::mcp::failure::{Failure, Repeat, is_broken};
use crate::tools::mcp::http_answer::HttpError;
use crate::tools::mcp::secrets::Secrets;
use crate::tools::mcp::stderr::{self, Tail};
use crate::tools::mcp::{http, stdio};

/// Calls at work on one connection.
const MOST_CALLS: usize = 1024;
/// The longest that opening one may take.
const OPENING: Duration = Duration::from_secs(10);
/// The longest that an orderly end may take.
const CLOSING: Duration = Duration::from_secs(6);
/// How long a server whose answer took too long may take to show that it answers at all.
const PING_TIMEOUT: Duration = Duration::from_secs(3);
/// How long what a process wrote last may take to be read after its end.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);
/// Most characters of why something failed.
const MOST_CHARACTERS: usize = 1500;

/// An open connection, as calls use it.
pub struct Link {
    /// For requests.
    pub peer: Peer<RoleClient>,
    /// Whether the server tells when its tools change.
    tells_changes: bool,
    changes: Arc<AtomicU64>,
    at_work: AtomicUsize,
    /// Notified when no call is at work any more.
    unused: Notify,
    used: Mutex<Instant>,
    has_answered: AtomicBool,
    end: End,
}

/// How a connection is ended, and why it did.
#[derive(Clone, Default)]
struct End {
    stop: CancellationToken,
    /// Takes no more calls: those at work may end.
    retired: CancellationToken,
    why: Why,
    secrets: Secrets,
    tail: Tail,
}

/// Why a connection ended, in words that follow `MCP server "x" is not available:`; the first reason stands.
pub type Why = Arc<OnceLock<String>>;

/// An open connection with what its one task keeps.
pub struct Keeper {
    /// As calls use it.
    pub link: Arc<Link>,
    /// The task's part.
    pub running: Running,
}

/// What goes on while a connection is open.
pub struct Running {
    service: BoxFuture<'static, ()>,
    words: Words,
    end: End,
}

/// Why a connection ended.
pub struct Ended(pub String);

/// What a process writes on its standard error, being logged.
struct Words {
    listening: Option<BoxFuture<'static, ()>>,
}

/// Opens a connection to a server.
///
/// # Errors
/// Why it cannot be, without any secret.
pub async fn open(
    name: &str,
    transport: &McpTransport,
    environment: &Environment,
) -> Result<Keeper, String> {
    let until = Instant::now() + OPENING;
    // Nearly every server knows the handshake. Those that know only the protocol without one refuse it.
    let known = ClientLifecycleMode::Initialize;
    match attempt(name, transport, environment, known, until).await {
        Ok(keeper) => Ok(keeper),
        Err(Unopened::Refused(why)) => {
            let preferred_versions = vec![ProtocolVersion::LATEST];
            let later = ClientLifecycleMode::Discover { preferred_versions };
            let later = attempt(name, transport, environment, later, until).await;
            later.map_err(|_| why)
        }
        Err(Unopened::Failed(why)) => Err(why),
    }
}

enum Unopened {
    /// The server answered, and does not want to speak like this.
    Refused(String),
    Failed(String),
}

async fn attempt(
    name: &str,
    transport: &McpTransport,
    environment: &Environment,
    mode: ClientLifecycleMode,
    until: Instant,
) -> Result<Keeper, Unopened> {
    let mut end = End::default();
    let changes = Arc::new(AtomicU64::new(0));
    let ear = Ear {
        changes: Arc::clone(&changes),
    };
    let mut words = Words { listening: None };
    let served = match transport {
        McpTransport::Stdio { command, args, env } => {
            let env = end
                .secrets
                .fill("env", env, environment)
                .map_err(Unopened::Failed)?;
            let (why, tail) = (Arc::clone(&end.why), end.tail.clone());
            let started = stdio::start(command, args, env, environment, why, tail);
            let (process, output) = started.map_err(Unopened::Failed)?;
            let (name, secrets, tail) = (name.to_owned(), end.secrets.clone(), end.tail.clone());
            words.listening = Some(Box::pin(stderr::read(name, output, secrets, tail)));
            let served = timeout_at(until, words.beside(serve(ear, process, mode, &end))).await;
            if !matches!(served, Ok(Ok(_))) {
                words.end().await;
            }
            served
        }
        McpTransport::StreamableHttp { url, headers } => {
            // Before the headers, which put all of them in order.
            if let Some((_, query)) = url.split_once('?') {
                end.secrets.add(query);
            }
            let headers = end
                .secrets
                .fill("headers", headers, environment)
                .map_err(Unopened::Failed)?;
            let (lost, why) = (end.retired.clone(), Arc::clone(&end.why));
            let client = http::connect(url, headers, lost, why).map_err(Unopened::Failed)?;
            timeout_at(until, serve(ear, client, mode, &end)).await
        }
    };
    let service = match served {
        Ok(Ok(service)) => service,
        Ok(Err(error)) => {
            let why = match end.why.get() {
                Some(why) => end.told(why),
                None => end.told(&end.tail.explain(&not_opened(&error))),
            };
            return Err(match error {
                ClientInitializeError::JsonRpcError(error) if !is_broken(&error) => {
                    Unopened::Refused(why)
                }
                _ => Unopened::Failed(why),
            });
        }
        Err(_) => {
            let why = format!("it did not answer within {OPENING:?}");
            return Err(Unopened::Failed(end.told(&end.tail.explain(&why))));
        }
    };
    let info = service.peer().peer_info();
    let has_handshake = info
        .as_ref()
        .is_some_and(|info| info.protocol_version.has_initialize());
    let capabilities = info
        .as_ref()
        .and_then(|info| info.capabilities.tools.clone());
    let tells_changes =
        has_handshake && capabilities.is_some_and(|tools| tools.list_changed == Some(true));
    let link = Link {
        peer: service.peer().clone(),
        // Without a session nobody tells us; a server that does not promise to is asked each time, too.
        tells_changes,
        changes,
        at_work: AtomicUsize::new(0),
        unused: Notify::new(),
        used: Mutex::new(Instant::now()),
        has_answered: AtomicBool::new(false),
        end: end.clone(),
    };
    let running = Running {
        service: Box::pin(async move { drop(service.waiting().await) }),
        words,
        end,
    };
    Ok(Keeper {
        link: Arc::new(link),
        running,
    })
}

async fn serve<T: Transport<RoleClient> + 'static>(
    ear: Ear,
    transport: T,
    mode: ClientLifecycleMode,
    end: &End,
) -> Result<RunningService<RoleClient, Ear>, ClientInitializeError> {
    serve_client_with_lifecycle_and_ct(ear, transport, mode, end.stop.clone()).await
}

impl Link {
    /// Whether it takes no more calls.
    pub fn is_closed(&self) -> bool {
        let end = &self.end;
        end.stop.is_cancelled() || end.retired.is_cancelled() || self.peer.is_transport_closed()
    }

    /// Resolves when it takes no more calls because the server failed, and a new one is to be opened for the next.
    pub async fn retired(&self) {
        self.end.retired.cancelled().await;
    }

    /// Resolves when no call is at work.
    pub async fn unused(&self) {
        while self.at_work.load(Ordering::Acquire) > 0 {
            self.unused.notified().await;
        }
    }

    /// Whether [`Link::changes`] counts every change.
    pub fn tells_changes(&self) -> bool {
        self.tells_changes
    }

    /// How often the list of tools has changed.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Whether any call was answered.
    pub fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    /// Ends it.
    pub fn give_up(&self, why: &str) {
        let _ = self.end.why.set(why.to_owned());
        self.end.stop.cancel();
    }

    /// Somebody is about to call.
    pub fn touch(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Comes back when nobody has called for so long.
    pub async fn idle_for(&self, time: Duration) {
        loop {
            let used = *self.used.lock().unwrap_or_else(PoisonError::into_inner);
            let mut until = used + time;
            if self.at_work.load(Ordering::Relaxed) > 0 {
                until = Instant::now() + time;
            }
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
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
        limit: Duration,
    ) -> Result<CallToolResult, Failure> {
        let _work = self.begin()?;
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let Ok(answer) = timeout(limit, self.peer.call_tool_once(params)).await else {
            if !self.answers().await {
                self.end.retired.cancel();
            }
            return Err(Failure {
                why: format!("it did not answer within {} s", limit.as_secs()),
                repeat: Repeat::Never,
            });
        };
        match answer.map_err(|error| self.failure(&error))? {
            CallToolResponse::Complete(result) => {
                self.is_well();
                Ok(result)
            }
            _ => Err(Failure {
                why: "it asks for what a run cannot give: a person's input, or to wait for a task"
                    .to_owned(),
                repeat: Repeat::Never,
            }),
        }
    }

    /// A request was answered.
    pub fn is_well(&self) {
        self.has_answered.store(true, Ordering::Relaxed);
    }

    /// Counts a request as at work until the guard is dropped.
    ///
    /// # Errors
    /// There are too many, or this connection takes no more of them.
    pub fn begin(&self) -> Result<Work<'_>, Failure> {
        let work = Work(self);
        let before = self.at_work.fetch_add(1, Ordering::AcqRel);
        if self.is_closed() {
            return Err(Failure {
                why: self.closed(),
                repeat: Repeat::Always,
            });
        }
        if before >= MOST_CALLS {
            let why = format!("{MOST_CALLS} calls are at work there already; call again later");
            return Err(Failure {
                why,
                repeat: Repeat::Never,
            });
        }
        Ok(work)
    }

    /// Whether it answers anything at all.
    async fn answers(&self) -> bool {
        let ping = ClientRequest::PingRequest(PingRequest::default());
        match timeout(PING_TIMEOUT, self.peer.send_request(ping)).await {
            Ok(Ok(_)) => true,
            // Not every server knows it.
            Ok(Err(ServiceError::McpError(error))) => !is_broken(&error),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Why a request failed. If the server gave no proper answer, the connection takes no more calls.
    pub fn failure(&self, error: &ServiceError) -> Failure {
        let (why, repeat) = match error {
            ServiceError::McpError(error) if is_broken(error) => {
                (self.end.told(&error.message), Repeat::IfSafe)
            }
            ServiceError::McpError(error) => {
                self.is_well();
                (self.end.told(&error.message), Repeat::Never)
            }
            ServiceError::UnexpectedResponse => {
                let why = "it answered with something that is no tool's result".to_owned();
                (why, Repeat::Never)
            }
            ServiceError::TransportSend(error) => {
                let error = error.error.as_ref();
                let repeat = http::find(error).map_or(Repeat::IfSafe, HttpError::repeat);
                (self.end.told(&root_cause(error)), repeat)
            }
            ServiceError::TransportClosed => (self.closed(), Repeat::IfSafe),
            other => (self.end.told(&other.to_string()), Repeat::IfSafe),
        };
        let is_answered = matches!(
            error,
            ServiceError::McpError(error) if !is_broken(error)
        );
        if !is_answered {
            self.end.retired.cancel();
        }
        Failure { why, repeat }
    }

    fn closed(&self) -> String {
        match self.end.why.get() {
            Some(why) => self.end.told(why),
            None => "the connection ended before it answered".to_owned(),
        }
    }
}

impl Running {
    /// Comes back when the connection has ended. May be dropped and called again.
    pub async fn ended(&mut self) -> Ended {
        self.words.beside(&mut self.service).await;
        let why = self
            .end
            .why
            .get()
            .map_or("it closed the connection", String::as_str);
        Ended(self.end.told(why))
    }

    /// Ends it in order.
    pub async fn close(&mut self) {
        self.end.stop.cancel();
        // What does not end by then is dropped, and with it its process.
        let _ = timeout(CLOSING, self.ended()).await;
    }
}

impl Words {
    /// Reads what was written to its end, if that comes soon.
    async fn end(&mut self) {
        if let Some(listening) = self.listening.take() {
            let _ = timeout(STDERR_TIMEOUT, listening).await;
        }
    }

    /// Does the work while what is written is logged: a full pipe would stop the writer.
    async fn beside<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        if let Some(listening) = &mut self.listening {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = listening => {}
            }
            self.listening = None;
        }
        work.await
    }
}

impl End {
    /// As it may be told: without secrets, on one line, of a bounded length.
    fn told(&self, why: &str) -> String {
        let line = why.split_whitespace().collect::<Vec<_>>().join(" ");
        shorten(&self.secrets.hide(&line), MOST_CHARACTERS)
    }
}

/// A request at work.
pub struct Work<'l>(&'l Link);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.touch();
        if self.0.at_work.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.unused.notify_one();
        }
    }
}

/// What a server may tell by itself: only that its tools changed. What it asks for is refused, as we promise nothing.
struct Ear {
    changes: Arc<AtomicU64>,
}

impl ClientHandler for Ear {
    fn get_info(&self) -> ClientConfig {
        let axed = Implementation::new("axed", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(Default::default(), axed)
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

fn not_opened(error: &ClientInitializeError) -> String {
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
        if let Some(error) = http::find(cause) {
            return error.to_string();
        }
        match cause.source() {
            Some(inner) => cause = inner,
            None => return cause.to_string(),
        }
    }
}
