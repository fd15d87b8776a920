//! The client for MCP's "Streamable HTTP" transport. Every request ends at once with the server's answer or with what
//! is wrong with it. The client also notices when the server has lost the session.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ::http::{HeaderName, HeaderValue};
use futures_util::stream::{BoxStream, StreamExt};
use reqwest::header::{ACCEPT, HeaderMap};
use reqwest::{Client, RequestBuilder, Response, Url};
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ClientRequest, JsonRpcMessage, ServerJsonRpcMessage,
};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::client_side_sse::SseRetryPolicy;
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpClientTransportConfig, StreamableHttpError,
    StreamableHttpPostResponse,
};
use sse_stream::Sse;
use tokio_util::sync::CancellationToken;

use crate::ssrf::{is_loopback, root_cause};
use crate::tools::mcp::close_state::CloseReason;
use crate::tools::mcp::http_response::{self, AwaitedRequest, HttpError};
use crate::tools::mcp::message::{self, RequestKind};
use crate::tools::mcp::oauth::challenge::{Challenge, ChallengeKind};
use crate::tools::mcp::oauth::logins::login_tokens::TokenError;
use crate::tools::mcp::oauth::token::AccessToken;
use crate::tools::mcp::oauth::token_source::TokenSource;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Requests at once. A server that answers only when a call is done occupies one for each call.
const MAX_CONCURRENT_REQUESTS: usize = 256;
const MAX_EVENT_BYTES: usize = 16 << 20;
const SESSION_ID_HEADER: &str = "mcp-session-id";
/// The shortest wait before an event stream is reopened, whatever the server states.
const MIN_REOPEN_DELAY: Duration = Duration::from_millis(500);
/// After this many failures to reopen an event stream, the session counts as lost.
const MAX_REOPEN_FAILURES: u32 = 4;

/// Builds a transport to `url` without sending anything yet. The transport cancels `session_lost` when the server has
/// lost the session, and sets `close_reason` for failures that no request reports.
///
/// # Errors
/// The URL or a header is invalid. The text contains no header's value.
pub fn connect(
    url: &str,
    headers: Vec<(String, String)>,
    tokens: Option<Arc<TokenSource>>,
    session_lost: CancellationToken,
    close_reason: CloseReason,
) -> Result<StreamableHttpClientTransport<HttpClient>, String> {
    let parsed = Url::parse(url).map_err(|why| format!("its url cannot be read: {why}"))?;
    let mut header_map = HashMap::with_capacity(headers.len());
    for (name, value) in headers {
        let invalid_header = || {
            format!(
                "its headers.{name} is not a valid header value: it must be visible characters on one line"
            )
        };
        let header_name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| invalid_header())?;
        let mut value = HeaderValue::from_str(&value).map_err(|_| invalid_header())?;
        value.set_sensitive(true);
        header_map.insert(header_name, value);
    }
    let mut builder = Client::builder()
        // A redirect would forward the headers.
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .pool_idle_timeout(Duration::from_secs(60));
    if parsed.host_str().is_some_and(is_loopback) {
        builder = builder.no_proxy();
    }
    if parsed.scheme() == "http" {
        // Plain HTTP without redirects never needs the system's certificates, which take a while to read.
        builder = builder.tls_certs_only([]);
    }
    let client = builder.build().map_err(|why| match why.source() {
        Some(cause) => format!("its HTTP client cannot be started: {cause}"),
        None => "its HTTP client cannot be started".to_owned(),
    })?;
    let mut config = StreamableHttpClientTransportConfig::with_uri(url)
        .custom_headers(header_map)
        .max_concurrent_requests(MAX_CONCURRENT_REQUESTS)
        .max_sse_event_size(MAX_EVENT_BYTES);
    config.retry_config = Arc::new(ReopenPolicy);
    let client = HttpClient {
        client,
        tokens,
        session_lost,
        close_reason,
        streams: Arc::default(),
    };
    Ok(StreamableHttpClientTransport::with_client(client, config))
}

/// The error of this client that a transport error wraps, if it does.
pub fn find_http_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e HttpError> {
    match error.downcast_ref::<StreamableHttpError<HttpError>>()? {
        StreamableHttpError::Client(error) => Some(error),
        _ => None,
    }
}

/// The innermost cause. The outer ones contain the URL, which may hold a secret.
pub fn error_reason(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    loop {
        if let Some(error) = find_http_error(cause) {
            return error.to_string();
        }
        match cause.source() {
            Some(inner) => cause = inner,
            None => return cause.to_string(),
        }
    }
}

/// The HTTP client of one connection.
#[derive(Clone)]
pub struct HttpClient {
    client: Client,
    /// Provides the access tokens, if the server requires them.
    tokens: Option<Arc<TokenSource>>,
    session_lost: CancellationToken,
    close_reason: CloseReason,
    streams: Arc<StreamCounts>,
}

/// The event streams that were opened with GET.
#[derive(Default)]
struct StreamCounts {
    opened: AtomicU32,
    /// Failed attempts since a stream was last opened.
    failed_in_row: AtomicU32,
}

impl HttpClient {
    async fn post(
        &self,
        url: &str,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        headers: HashMap<HeaderName, HeaderValue>,
        max_event: usize,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let mut request = self
            .client
            .post(url)
            .headers(headers.into_iter().collect::<HeaderMap>())
            .header(ACCEPT, "text/event-stream, application/json");
        if let Some(session_id) = &session_id {
            request = request.header(SESSION_ID_HEADER, session_id.as_ref());
        }
        let request = request.json(&message);
        let response = match &self.tokens {
            None => request.send().await.map_err(HttpError::Request)?,
            Some(tokens) => send_with_token(request, tokens).await?,
        };
        let is_success = response.status().is_success();
        let JsonRpcMessage::Request(request) = message else {
            return match is_success {
                true => Ok(StreamableHttpPostResponse::Accepted),
                false => Err(
                    http_response::error_response(response, session_id.is_some())
                        .await
                        .0,
                ),
            };
        };
        if is_success {
            let new_session_id = response.headers().get(SESSION_ID_HEADER);
            let new_session_id = new_session_id
                .and_then(|it| it.to_str().ok())
                .map(str::to_owned);
            let request = AwaitedRequest {
                kind: RequestKind::of(&request.request),
                call_key: message::call_key(&request.request),
                id: request.id,
            };
            return http_response::parse_response(response, request, new_session_id, max_event)
                .await;
        }
        let (http_error, json_rpc_error) =
            http_response::error_response(response, session_id.is_some()).await;
        let is_handshake = matches!(
            request.request,
            ClientRequest::InitializeRequest(_) | ClientRequest::DiscoverRequest(_)
        );
        let is_rejected_request = matches!(http_error, HttpError::Status { status, .. } if matches!(status, 400 | 404..=428));
        match json_rpc_error {
            // The server may support only the other form of the protocol.
            Some(json_rpc_error) if is_handshake && is_rejected_request => {
                let reply = ServerJsonRpcMessage::error(json_rpc_error.error, Some(request.id));
                Ok(StreamableHttpPostResponse::Json(reply, None))
            }
            _ => Err(http_error),
        }
    }
}

/// Sends a request with an access token. Another token is obtained once if the server refuses the first one, and once if
/// it demands more scopes; in both cases it did not execute the request.
async fn send_with_token(
    request: RequestBuilder,
    tokens: &Arc<TokenSource>,
) -> Result<Response, HttpError> {
    let mut answered: Vec<ChallengeKind> = Vec::new();
    let no_token = |error: TokenError| HttpError::NoToken(error.to_string());
    let mut token = tokens.token().await.map_err(no_token)?;
    loop {
        // The body is in memory, so that the request can be sent again.
        let Some(mut attempt) = request.try_clone() else {
            let why = "the request cannot be sent again".to_owned();
            return Err(HttpError::InvalidResponse(why));
        };
        if let Some(token) = &token {
            attempt = attempt.bearer_auth(&token.secret);
        }
        let response = attempt.send().await.map_err(HttpError::Request)?;
        let Some(challenge) = Challenge::of(response.status(), response.headers()) else {
            return Ok(response);
        };
        if answered.contains(&challenge.kind) {
            return match tokens.refused() {
                Some(error) => Err(no_token(error)),
                None => Ok(response),
            };
        }
        answered.push(challenge.kind);
        let next = tokens.renew(token, challenge).await;
        token = Some(next.map_err(no_token)?);
    }
}

type TransportResult<T> = Result<T, StreamableHttpError<HttpError>>;

impl HttpClient {
    /// The token for requests that the library sends.
    async fn stream_token(&self) -> Option<String> {
        let token: Option<Arc<AccessToken>> = self.tokens.as_ref()?.token().await.ok()?;
        token.map(|token| token.secret.clone())
    }
}

impl StreamableHttpClient for HttpClient {
    type Error = HttpError;

    async fn post_message(
        &self,
        url: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> TransportResult<StreamableHttpPostResponse> {
        let post = self.post(&url, message, session_id, headers, MAX_EVENT_BYTES);
        post.await.map_err(StreamableHttpError::Client)
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        url: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        max_event: usize,
    ) -> TransportResult<StreamableHttpPostResponse> {
        // If the end of the handshake fails, the transport ends without a reason, so it is noted here.
        let ends_handshake = matches!(
            &message,
            JsonRpcMessage::Notification(it)
                if matches!(it.notification, ClientNotification::InitializedNotification(_))
        );
        let posted = self
            .post(&url, message, session_id, headers, max_event)
            .await;
        posted.map_err(|error| {
            if ends_handshake {
                let _ = self.close_reason.set(error.to_string());
            }
            StreamableHttpError::Client(error)
        })
    }

    async fn delete_session(
        &self,
        url: Arc<str>,
        session_id: Arc<str>,
        auth: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> TransportResult<()> {
        let auth = self.stream_token().await.or(auth);
        let deleted = self.client.delete_session(url, session_id, auth, headers);
        deleted.await.map_err(convert_error)
    }

    async fn get_stream(
        &self,
        url: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event: Option<String>,
        auth: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> TransportResult<BoxStream<'static, Result<Sse, SseError>>> {
        self.get_stream_with_max_sse_event_size(
            url,
            session_id,
            last_event,
            auth,
            headers,
            MAX_EVENT_BYTES,
        )
        .await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        url: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event: Option<String>,
        auth: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        max_event: usize,
    ) -> TransportResult<BoxStream<'static, Result<Sse, SseError>>> {
        let is_resumed = last_event.is_some();
        let auth = self.stream_token().await.or(auth);
        let opened = self.client.get_stream_with_max_sse_event_size(
            url, session_id, last_event, auth, headers, max_event,
        );
        let streams = &self.streams;
        match opened.await {
            Ok(events) => {
                streams.opened.fetch_add(1, Ordering::Relaxed);
                streams.failed_in_row.store(0, Ordering::Relaxed);
                Ok(events.then(read_event).boxed())
            }
            Err(error) => {
                // A server that never had such a stream works without one.
                let was_open = is_resumed || streams.opened.load(Ordering::Relaxed) > 0;
                let failed = streams.failed_in_row.fetch_add(1, Ordering::Relaxed) + 1;
                let is_refused = matches!(
                    &error,
                    StreamableHttpError::Client(error)
                        if error.status().is_some_and(|it| matches!(it.as_u16(), 400 | 404))
                );
                if was_open && (is_refused || failed >= MAX_REOPEN_FAILURES) {
                    self.session_lost.cancel();
                    // The transport would retry after any other error, and a request that waits for its answer in the
                    // stream would wait on.
                    return Err(StreamableHttpError::ServerDoesNotSupportSse);
                }
                Err(convert_error(error))
            }
        }
    }
}

/// Reads the message of an event, and keeps the transport from reopening an event stream at once: it would after an error,
/// or with `retry: 0`.
async fn read_event(event: Result<Sse, SseError>) -> Result<Sse, SseError> {
    match event {
        Ok(event) => {
            let mut event = http_response::read_stream_event(event);
            let min_delay = MIN_REOPEN_DELAY.as_millis() as u64;
            event.retry = event.retry.map(|delay| delay.max(min_delay));
            Ok(event)
        }
        Err(error) => {
            tokio::time::sleep(MIN_REOPEN_DELAY).await;
            Err(error)
        }
    }
}

/// Converts an error of the library's own client.
fn convert_error(error: StreamableHttpError<reqwest::Error>) -> StreamableHttpError<HttpError> {
    match error {
        StreamableHttpError::Client(error) => {
            StreamableHttpError::Client(HttpError::Request(error))
        }
        StreamableHttpError::ServerDoesNotSupportSse => {
            StreamableHttpError::ServerDoesNotSupportSse
        }
        StreamableHttpError::AuthRequired(error) => StreamableHttpError::AuthRequired(error),
        StreamableHttpError::InsufficientScope(error) => {
            StreamableHttpError::InsufficientScope(error)
        }
        other => {
            let cause = root_cause(&other).unwrap_or_else(|| other.to_string());
            StreamableHttpError::Client(HttpError::InvalidResponse(cause))
        }
    }
}

/// The delay before an event stream is reopened doubles up to a limit.
#[derive(Debug)]
struct ReopenPolicy;

impl SseRetryPolicy for ReopenPolicy {
    fn retry(&self, times: usize) -> Option<Duration> {
        let doublings = u32::try_from(times).unwrap_or(u32::MAX).min(4);
        Some(MIN_REOPEN_DELAY.saturating_mul(1 << doublings))
    }
}
