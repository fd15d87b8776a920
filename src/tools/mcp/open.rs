//! Opens a connection to a server: starts its process or its HTTP client, and performs the protocol's handshake.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::model::{
    ClientCapabilities, ClientConfig, CustomRequest, CustomResult, ElicitationCapability,
    ErrorCode, ErrorData, FormElicitationCapability, Implementation, ProtocolVersion,
    UrlElicitationCapability,
};
use rmcp::service::{
    ClientInitializeError, NotificationContext, RequestContext, RunningService, RxJsonRpcMessage,
    TxJsonRpcMessage, serve_client_with_lifecycle_and_ct,
};
use rmcp::transport::Transport;
use rmcp::{ClientHandler, ClientLifecycleMode, RoleClient};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::config::environment::Environment;
use crate::domain::mcp::{MAX_OPEN_TIMEOUT, McpTransport};
use crate::tools::mcp::close_state::CloseState;
use crate::tools::mcp::driver::{SessionDriver, StderrTask};
use crate::tools::mcp::failure::is_connection_error;
use crate::tools::mcp::http_transport::HttpTransport;
use crate::tools::mcp::message::ELICITATION;
use crate::tools::mcp::oauth::logins::login_tokens::TokenError;
use crate::tools::mcp::oauth::sources::TokenSources;
use crate::tools::mcp::oauth::token_source::TokenSource;
use crate::tools::mcp::open_questions::OpenQuestions;
use crate::tools::mcp::secrets::{TemplateTable, read_secret_files};
use crate::tools::mcp::session::McpSession;
use crate::tools::mcp::{http, stderr, stdio};

pub struct OpenConnection {
    pub session: Arc<McpSession>,
    pub driver: SessionDriver,
}

/// Opens a connection to the server `name`.
///
/// # Errors
/// Why it cannot be opened, without any secret. The text follows `MCP server "x" is not available:`.
pub async fn open(
    name: &str,
    transport: &McpTransport,
    environment: &Environment,
    token_sources: &TokenSources,
    opening: &Opening,
    asks_unnamed: &Arc<AtomicBool>,
) -> Result<OpenConnection, OpenError> {
    let deadline = Instant::now() + MAX_OPEN_TIMEOUT;
    let (templates, tokens) = match transport {
        McpTransport::Stdio { env, .. } => (env, None),
        McpTransport::StreamableHttp {
            url,
            headers,
            oauth,
        } => {
            let source = oauth.as_ref().map(|it| token_sources.source(name, url, it));
            (headers, source.transpose()?)
        }
    };
    let tokens = tokens.as_ref();
    check_login(tokens).await?;
    let environment = &read_secret_files(templates, environment).await?;
    // Most servers use the handshake. Those that use only the protocol without one reject it.
    let initialize = ClientLifecycleMode::Initialize;
    let server = Server {
        name,
        transport,
        environment,
        tokens,
        opening,
        asks_unnamed,
    };
    let opened = server.try_open(initialize, deadline).await;
    if opened.is_err() {
        // The server may have refused a login that is valid otherwise.
        check_login(tokens).await?;
    }
    match opened {
        Ok(opened) => Ok(opened),
        Err(ConnectError::Refused(reason)) => {
            let preferred_versions = vec![ProtocolVersion::LATEST];
            let discover = ClientLifecycleMode::Discover { preferred_versions };
            let opened = server.try_open(discover, deadline).await;
            opened.map_err(|_| OpenError::Failed(reason))
        }
        Err(ConnectError::Failed(reason)) => Err(OpenError::Failed(reason)),
    }
}

async fn check_login(tokens: Option<&Arc<TokenSource>>) -> Result<(), OpenError> {
    let Some(tokens) = tokens else {
        return Ok(());
    };
    tokens.check_login().await.map_err(|error| match error {
        TokenError::LoginNeeded(reason) => OpenError::LoginNeeded(reason),
        TokenError::Failed(reason) => OpenError::Failed(reason),
    })
}

/// Why a connection cannot be opened.
pub enum OpenError {
    /// The operator has to log in first. Nothing was sent to the server.
    LoginNeeded(String),
    Failed(String),
}

impl From<String> for OpenError {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}

enum ConnectError {
    /// The server answered, and rejected this form of the protocol.
    Refused(String),
    Failed(String),
}

/// What is known of a connection that is being opened.
#[derive(Default)]
pub struct Opening(Mutex<Option<CloseState>>);

impl Opening {
    /// The reason with the last lines that the server wrote, without any secret.
    pub fn explain(&self, reason: &str) -> String {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(state) => state.redact(&state.tail.explain(reason)),
            None => reason.to_owned(),
        }
    }

    fn set(&self, state: Option<CloseState>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

/// A server that is being connected to.
struct Server<'o> {
    name: &'o str,
    transport: &'o McpTransport,
    environment: &'o Environment,
    tokens: Option<&'o Arc<TokenSource>>,
    opening: &'o Opening,
    /// Whether the server asks without saying for which call.
    asks_unnamed: &'o Arc<AtomicBool>,
}

impl Server<'_> {
    async fn try_open(
        &self,
        mode: ClientLifecycleMode,
        deadline: Instant,
    ) -> Result<OpenConnection, ConnectError> {
        let (name, environment, tokens) = (self.name, self.environment, self.tokens);
        let mut close_state = CloseState::default();
        let list_changes = Arc::new(AtomicU64::new(0));
        let questions = Arc::new(OpenQuestions::new(Arc::clone(self.asks_unnamed)));
        let handshake = Handshake {
            handler: Handler {
                list_changes: Arc::clone(&list_changes),
                questions: Arc::clone(&questions),
                lost: close_state.lost.clone(),
            },
            mode,
            deadline,
            stop: close_state.stop.clone(),
            lost: close_state.lost.clone(),
        };
        let mut stderr_task = StderrTask::default();
        let opened = match self.transport {
            McpTransport::Stdio { command, args, env } => {
                let env = close_state
                    .secrets
                    .expand_templates(TemplateTable::Env, env, environment)
                    .map_err(ConnectError::Failed)?;
                let inherited = stdio::INHERITED_VARIABLES.iter();
                let inherited = inherited.filter_map(|name| environment.get(*name));
                close_state.secrets.show_in_results(inherited);
                let (close_reason, tail) =
                    (Arc::clone(&close_state.reason), close_state.tail.clone());
                let started = stdio::start(command, args, env, environment, close_reason, tail);
                let (process, stderr) = started.map_err(ConnectError::Failed)?;
                self.opening.set(Some(close_state.clone()));
                let (secrets, tail) = (close_state.secrets.clone(), close_state.tail.clone());
                let reader = stderr::log_stderr(name.to_owned(), stderr, secrets, tail);
                stderr_task.reader = Some(Box::pin(reader));
                let opened = stderr_task.concurrently(handshake.perform(process)).await;
                if opened.is_err() {
                    stderr_task.drain().await;
                }
                opened
            }
            McpTransport::StreamableHttp { url, headers, .. } => {
                // The query is added first, because expanding the headers sorts all secrets.
                if let Some((_, query)) = url.split_once('?') {
                    close_state.secrets.add(query);
                }
                let headers = close_state
                    .secrets
                    .expand_templates(TemplateTable::Headers, headers, environment)
                    .map_err(ConnectError::Failed)?;
                close_state.issued = tokens.map(|it| Arc::clone(&it.secrets));
                let (lost, reason) = (close_state.retired.clone(), Arc::clone(&close_state.reason));
                let client =
                    http::connect(url, headers, tokens.cloned(), lost, Arc::clone(&reason));
                let client = client.map_err(ConnectError::Failed)?;
                handshake.perform(HttpTransport::new(client, reason)).await
            }
        };
        self.opening.set(None);
        let service = opened.map_err(|error| error.into_connect_error(&close_state))?;
        let session = McpSession::new(
            service.peer().clone(),
            has_change_notifications(&service),
            list_changes,
            close_state.clone(),
            questions,
        );
        Ok(OpenConnection {
            session: Arc::new(session),
            driver: SessionDriver {
                service: Box::pin(async move { drop(service.waiting().await) }),
                stderr: stderr_task,
                close_state,
            },
        })
    }
}

type McpService = RunningService<RoleClient, Handler>;

/// Whether the server announces changes of its tools. It does so only within a session, and only if it declares the
/// capability.
fn has_change_notifications(service: &McpService) -> bool {
    let server_info = service.peer().peer_info();
    server_info.as_ref().is_some_and(|info| {
        let tools = info.capabilities.tools.as_ref();
        info.protocol_version.has_initialize()
            && tools.is_some_and(|tools| tools.list_changed == Some(true))
    })
}

/// The parameters of one handshake.
struct Handshake {
    handler: Handler,
    mode: ClientLifecycleMode,
    deadline: Instant,
    stop: CancellationToken,
    lost: CancellationToken,
}

impl Handshake {
    async fn perform<T: Transport<RoleClient> + 'static>(
        self,
        transport: T,
    ) -> Result<McpService, HandshakeError> {
        let transport = ReportingTransport {
            transport,
            lost: self.lost,
        };
        let serving =
            serve_client_with_lifecycle_and_ct(self.handler, transport, self.mode, self.stop);
        match timeout_at(self.deadline, serving).await {
            Ok(service) => service.map_err(|error| HandshakeError::Failed(Box::new(error))),
            Err(_) => Err(HandshakeError::TimedOut),
        }
    }
}

/// Tells when the transport has ended: the SDK goes on for a while then, for requests of the server that are not answered.
struct ReportingTransport<T> {
    transport: T,
    lost: CancellationToken,
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for ReportingTransport<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        self.transport.send(message)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        let message = self.transport.receive().await;
        if message.is_none() {
            self.lost.cancel();
        }
        message
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.transport.close().await
    }
}

enum HandshakeError {
    TimedOut,
    Failed(Box<ClientInitializeError>),
}

impl HandshakeError {
    fn into_connect_error(self, close_state: &CloseState) -> ConnectError {
        let explain = |reason: &str| close_state.redact(&close_state.tail.explain(reason));
        let error = match self {
            Self::TimedOut => {
                let reason = format!("it did not answer within {MAX_OPEN_TIMEOUT:?}");
                return ConnectError::Failed(explain(&reason));
            }
            Self::Failed(error) => error,
        };
        let reason = match close_state.reason.get() {
            Some(reason) => close_state.redact(reason),
            None => explain(&describe_init_error(&error)),
        };
        match &*error {
            ClientInitializeError::JsonRpcError(error) if !is_connection_error(error) => {
                ConnectError::Refused(reason)
            }
            _ => ConnectError::Failed(reason),
        }
    }
}

fn describe_init_error(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::JsonRpcError(error) => error.message.to_string(),
        ClientInitializeError::TransportError { error, .. } => {
            http::error_reason(error.error.as_ref())
        }
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

/// Counts announcements that the tools changed, and passes questions to people on to the calls that they are about. Other requests
/// of a server are refused.
struct Handler {
    list_changes: Arc<AtomicU64>,
    questions: Arc<OpenQuestions>,
    /// The transport has ended.
    lost: CancellationToken,
}

impl ClientHandler for Handler {
    fn get_info(&self) -> ClientConfig {
        let axed = Implementation::new("axed", env!("CARGO_PKG_VERSION"));
        let elicitation = ElicitationCapability::new()
            .with_form(FormElicitationCapability::new())
            .with_url(UrlElicitationCapability::new());
        let mut capabilities = ClientCapabilities::default();
        capabilities.elicitation = Some(elicitation);
        ClientConfig::new(capabilities, axed)
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.list_changes.fetch_add(1, Ordering::AcqRel);
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        context: RequestContext<RoleClient>,
    ) -> Result<CustomResult, ErrorData> {
        if request.method != ELICITATION {
            let code = ErrorCode::METHOD_NOT_FOUND;
            return Err(ErrorData::new(code, request.method, None));
        }
        let params = request.params.unwrap_or_default();
        tokio::select! {
            answer = self.questions.ask(params, context.ct) => answer.map(CustomResult),
            () = self.lost.cancelled() => Err(ErrorData::internal_error("disconnected", None)),
        }
    }
}
