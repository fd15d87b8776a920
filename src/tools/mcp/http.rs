//! MCP's "Streamable HTTP": the client that requests go through. It answers every request at once with what the server
//! answered or with what is wrong with that, and notices when the server has lost the session. Knows no tool.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ::http::{HeaderName, HeaderValue};
use futures_util::stream::BoxStream;
use reqwest::header::{ACCEPT, HeaderMap};
use reqwest::{Client, Url};
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

use crate::net::{innermost, is_loopback};
use crate::tools::mcp::http_answer::{self, HttpError};
use crate::tools::mcp::link::Why;

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// Requests at once: a server that answers only when a call is done keeps one for each call.
const MOST_REQUESTS: usize = 256;
/// Most bytes of one event.
const MAX_EVENT: usize = 16 << 20;
/// The header with the session.
const SESSION: &str = "mcp-session-id";
/// How often a stream of events may fail to open again until the session counts as lost.
const MAX_REOPENINGS: u32 = 4;

/// A transport to that address, which nothing has been sent to yet. It cancels `lost` when the server has lost the
/// session, and keeps in `why` what went wrong where nobody waits for it.
///
/// # Errors
/// Why there is none, without a header's value.
pub fn connect(
    url: &str,
    headers: Vec<(String, String)>,
    lost: CancellationToken,
    why: Why,
) -> Result<StreamableHttpClientTransport<HttpClient>, String> {
    let parsed = Url::parse(url).map_err(|why| format!("its url cannot be read: {why}"))?;
    let mut custom = HashMap::with_capacity(headers.len());
    for (name, value) in headers {
        let wrong = || {
            format!(
                "its headers.{name} is no header's value: it must be visible characters on one line"
            )
        };
        let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
        let mut value = HeaderValue::from_str(&value).map_err(|_| wrong())?;
        value.set_sensitive(true);
        custom.insert(parsed, value);
    }
    let mut builder = Client::builder()
        // A redirect would take the headers with it.
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .pool_idle_timeout(Duration::from_secs(60));
    if parsed.host_str().is_some_and(is_loopback) {
        builder = builder.no_proxy();
    }
    if parsed.scheme() == "http" {
        // Without redirects a plain address never needs the system's certificates; reading them takes a while.
        builder = builder.tls_certs_only([]);
    }
    let client = builder.build().map_err(|why| match why.source() {
        Some(cause) => format!("its HTTP client cannot be started: {cause}"),
        None => "its HTTP client cannot be started".to_owned(),
    })?;
    let mut config = StreamableHttpClientTransportConfig::with_uri(url)
        .custom_headers(custom)
        .max_concurrent_requests(MOST_REQUESTS)
        .max_sse_event_size(MAX_EVENT);
    config.retry_config = Arc::new(Reopening);
    let client = HttpClient {
        client,
        lost,
        why,
        streams: Arc::default(),
    };
    Ok(StreamableHttpClientTransport::with_client(client, config))
}

/// What went wrong with a request, where it was this client's.
pub fn find<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e HttpError> {
    match error.downcast_ref::<StreamableHttpError<HttpError>>()? {
        StreamableHttpError::Client(error) => Some(error),
        _ => None,
    }
}

/// The client of one connection.
#[derive(Clone)]
pub struct HttpClient {
    client: Client,
    lost: CancellationToken,
    why: Why,
    streams: Arc<Streams>,
}

/// The streams of events that were opened with GET.
#[derive(Default)]
struct Streams {
    opened: AtomicU32,
    /// Failed attempts since the last one that was opened.
    failed: AtomicU32,
}

impl HttpClient {
    async fn post(
        &self,
        url: &str,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        headers: HashMap<HeaderName, HeaderValue>,
        max_event: usize,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let mut request = self
            .client
            .post(url)
            .headers(headers.into_iter().collect::<HeaderMap>())
            .header(ACCEPT, "text/event-stream, application/json");
        if let Some(session) = &session {
            request = request.header(SESSION, session.as_ref());
        }
        let response = request.json(&message).send().await;
        let response = response.map_err(HttpError::Request)?;
        let is_success = response.status().is_success();
        let JsonRpcMessage::Request(asked) = message else {
            return match is_success {
                true => Ok(StreamableHttpPostResponse::Accepted),
                false => Err(http_answer::refusal(response, session.is_some()).await.0),
            };
        };
        if is_success {
            let new = response.headers().get(SESSION);
            let new = new.and_then(|it| it.to_str().ok()).map(str::to_owned);
            return http_answer::of(response, asked.id, new, max_event).await;
        }
        let (refusal, error) = http_answer::refusal(response, session.is_some()).await;
        let is_handshake = matches!(
            asked.request,
            ClientRequest::InitializeRequest(_) | ClientRequest::DiscoverRequest(_)
        );
        let is_wrong_request = matches!(refusal, HttpError::Status { status, .. } if matches!(status, 400 | 404..=428));
        match error {
            // It may speak the protocol in its other form only.
            Some(error) if is_handshake && is_wrong_request => {
                let error = ServerJsonRpcMessage::error(error.error, Some(asked.id));
                Ok(StreamableHttpPostResponse::Json(error, None))
            }
            _ => Err(refusal),
        }
    }
}

type Result_<T> = Result<T, StreamableHttpError<HttpError>>;

impl StreamableHttpClient for HttpClient {
    type Error = HttpError;

    async fn post_message(
        &self,
        url: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result_<StreamableHttpPostResponse> {
        let post = self.post(&url, message, session, headers, MAX_EVENT);
        post.await.map_err(StreamableHttpError::Client)
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        url: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        max_event: usize,
    ) -> Result_<StreamableHttpPostResponse> {
        // The end of the handshake: the transport ends without a reason where it fails.
        let ends_handshake = matches!(
            &message,
            JsonRpcMessage::Notification(it)
                if matches!(it.notification, ClientNotification::InitializedNotification(_))
        );
        let posted = self.post(&url, message, session, headers, max_event).await;
        posted.map_err(|error| {
            if ends_handshake {
                let _ = self.why.set(error.to_string());
            }
            StreamableHttpError::Client(error)
        })
    }

    async fn delete_session(
        &self,
        url: Arc<str>,
        session: Arc<str>,
        auth: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result_<()> {
        let deleted = self.client.delete_session(url, session, auth, headers);
        deleted.await.map_err(ours)
    }

    async fn get_stream(
        &self,
        url: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        auth: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result_<BoxStream<'static, Result<Sse, SseError>>> {
        self.get_stream_with_max_sse_event_size(url, session, last_event, auth, headers, MAX_EVENT)
            .await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        url: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        auth: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        max_event: usize,
    ) -> Result_<BoxStream<'static, Result<Sse, SseError>>> {
        let is_resumed = last_event.is_some();
        let opened = self
            .client
            .get_stream_with_max_sse_event_size(url, session, last_event, auth, headers, max_event);
        let streams = &self.streams;
        match opened.await {
            Ok(events) => {
                streams.opened.fetch_add(1, Ordering::Relaxed);
                streams.failed.store(0, Ordering::Relaxed);
                Ok(events)
            }
            Err(error) => {
                // A server that never had such a stream is well without one.
                let was_open = is_resumed || streams.opened.load(Ordering::Relaxed) > 0;
                let failed = streams.failed.fetch_add(1, Ordering::Relaxed) + 1;
                let is_refused = matches!(
                    &error,
                    StreamableHttpError::Client(error)
                        if error.status().is_some_and(|it| matches!(it.as_u16(), 400 | 404))
                );
                if was_open && (is_refused || failed >= MAX_REOPENINGS) {
                    self.lost.cancel();
                    // Any other error would be tried again, and whoever waits for an answer in the stream would wait on.
                    return Err(StreamableHttpError::ServerDoesNotSupportSse);
                }
                Err(ours(error))
            }
        }
    }
}

/// An error of the library's own client as one of ours.
fn ours(error: StreamableHttpError<reqwest::Error>) -> StreamableHttpError<HttpError> {
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
            let why = innermost(&other).unwrap_or_else(|| other.to_string());
            StreamableHttpError::Client(HttpError::NoAnswer(why))
        }
    }
}

/// When a stream of events that ended is opened again: soon, then less often.
#[derive(Debug)]
struct Reopening;

impl SseRetryPolicy for Reopening {
    fn retry(&self, times: usize) -> Option<Duration> {
        let doublings = u32::try_from(times).unwrap_or(u32::MAX).min(4);
        Some(Duration::from_millis(500 * (1 << doublings)))
    }
}
