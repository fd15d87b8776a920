//! Reads a server's HTTP response to one request: the answer, or what came instead.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{BoxStream, unfold};
use futures_util::{Stream, StreamExt};
use reqwest::Response;
use reqwest::header::CONTENT_TYPE;
use rmcp::model::{RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::{SseError, StreamableHttpPostResponse};
use serde::Deserialize;
use sse_stream::{Sse, SseStream};

use crate::domain::lenient_json;
use crate::domain::message::shorten;
use crate::ssrf::root_cause;
use crate::tools::mcp::failure::{RetrySafety, connection_error};
use crate::tools::mcp::message::{self, Answer, Message, RequestKind};

const MAX_BODY_BYTES: usize = 16 << 20;
const MAX_ERROR_BODY_BYTES: usize = 16 << 10;
/// The longest that reading an error's body may take.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(2);
/// Most characters of a body that are shown.
const MAX_LINE_CHARS: usize = 200;

/// Why a POST has no usable answer.
#[derive(Debug)]
pub enum HttpError {
    /// 400 or 404 within a session: the server does not know the session and did nothing.
    SessionLost { status: u16, line: String },
    /// Another status that is no success.
    Status { status: u16, line: String },
    /// There is no access token for the request, which was not executed.
    NoToken(String),
    /// A success status without an answer to the request.
    InvalidResponse(String),
    /// The request or its response was interrupted.
    Request(reqwest::Error),
}

impl HttpError {
    /// Whether the request may be sent again.
    pub fn retry_safety(&self) -> RetrySafety {
        match self {
            Self::SessionLost { .. } => RetrySafety::Always,
            Self::Status { status, .. } if *status >= 500 => RetrySafety::IfReadOnly,
            Self::Status { .. } | Self::NoToken(_) => RetrySafety::Never,
            Self::Request(error) if error.is_connect() => RetrySafety::Always,
            Self::InvalidResponse(_) => RetrySafety::IfReadOnly,
            Self::Request(_) => RetrySafety::EndUnknown,
        }
    }
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SessionLost { status, line } | Self::Status { status, line } => {
                write!(f, "HTTP {status}")?;
                match line.as_str() {
                    "" => Ok(()),
                    line => write!(f, ": {line}"),
                }
            }
            Self::InvalidResponse(why) | Self::NoToken(why) => f.write_str(why),
            // The outer causes contain the URL, which may hold a secret.
            Self::Request(error) => match root_cause(error) {
                Some(cause) => f.write_str(&cause),
                None => f.write_str("the request failed"),
            },
        }
    }
}

impl Error for HttpError {}

/// The error for a response without a success status, with the first line of its body.
pub async fn error_response(
    mut response: Response,
    has_session: bool,
) -> (HttpError, Option<JsonRpcError>) {
    let status = response.status().as_u16();
    let mut body = Vec::new();
    let read = async {
        while body.len() < MAX_ERROR_BODY_BYTES
            && let Ok(Some(chunk)) = response.chunk().await
        {
            body.extend_from_slice(&chunk);
        }
    };
    // The part that arrived in time is enough.
    let _ = tokio::time::timeout(ERROR_BODY_TIMEOUT, read).await;
    let error = lenient_json::from_slice::<JsonRpcError>(&body).ok();
    let line = match &error {
        Some(error) => shorten(error.error.message.trim(), MAX_LINE_CHARS),
        None => first_line(&body),
    };
    let http_error = match has_session && matches!(status, 400 | 404) {
        true => HttpError::SessionLost { status, line },
        false => HttpError::Status { status, line },
    };
    (http_error, error)
}

/// The body of an error response, if it is JSON-RPC.
#[derive(Deserialize)]
pub struct JsonRpcError {
    pub error: rmcp::model::ErrorData,
}

/// A request whose answer is awaited.
pub struct AwaitedRequest {
    pub id: RequestId,
    pub kind: RequestKind,
    /// The key of a call.
    pub call_key: Option<String>,
}

impl AwaitedRequest {
    fn is_answered_by(&self, answer: &Answer) -> bool {
        match &self.id {
            RequestId::Number(number) => answer.request_number() == Some(*number),
            RequestId::String(_) => false,
        }
    }

    fn read(&self, answer: Answer) -> ServerJsonRpcMessage {
        answer.into_message(self.id.clone(), self.kind)
    }
}

/// Returns the answer to the request from a response with a success status.
///
/// # Errors
/// The response does not contain the answer.
pub async fn parse_response(
    response: Response,
    request: AwaitedRequest,
    session_id: Option<String>,
    max_event_bytes: usize,
) -> Result<StreamableHttpPostResponse, HttpError> {
    let status = response.status().as_u16();
    let content_type = response.headers().get(CONTENT_TYPE);
    let content_type = content_type.map(|it| String::from_utf8_lossy(it.as_bytes()).into_owned());
    let kind = content_type
        .as_deref()
        .unwrap_or_default()
        .to_ascii_lowercase();
    if kind.starts_with("text/event-stream") && status == 200 {
        let events = SseStream::from_bytes_stream(limit_event_size(
            response.bytes_stream(),
            max_event_bytes,
        ));
        let events = require_answer(events.boxed(), request);
        return Ok(StreamableHttpPostResponse::Sse(events, session_id));
    }
    let body = read_body(response, MAX_BODY_BYTES).await?;
    if body.is_empty() {
        let why = format!("it gave no answer (HTTP {status} without a body)");
        return Err(HttpError::InvalidResponse(why));
    }
    let json = lenient_json::from_slice(&body).map_err(|_| {
        let line = first_line(&body);
        if kind.starts_with("application/json") {
            let why = format!("its answer is not a JSON-RPC message: {line}");
            return HttpError::InvalidResponse(why);
        }
        let content_type = match content_type {
            Some(it) => format!("content type {}", shorten(&it, 100)),
            None => "no content type".to_owned(),
        };
        HttpError::InvalidResponse(format!(
            "it answered with {content_type} instead of JSON or an event stream (HTTP {status}: {line})"
        ))
    })?;
    let messages = message::read(json);
    let mut why = match messages.is_empty() {
        true => format!(
            "its answer is not a JSON-RPC message: {}",
            first_line(&body)
        ),
        false => "it answered with a message of its own instead of a result".to_owned(),
    };
    for message in messages {
        match message {
            Message::Answer(answer) if request.is_answered_by(&answer) => {
                let answer = request.read(answer);
                return Ok(StreamableHttpPostResponse::Json(answer, session_id));
            }
            Message::Answer(answer) => why = answer.describe_mismatch(Some(&request.id)),
            Message::Other(_) => {}
        }
    }
    Err(HttpError::InvalidResponse(why))
}

/// Passes events on, as the SDK reads them. If they end without an answer to the request, appends an error event. A resumable stream,
/// whose events have ids, is left to the transport to resume.
fn require_answer(events: EventStream, request: AwaitedRequest) -> EventStream {
    let state = AnswerStream {
        events,
        request,
        is_answered: false,
        is_resumable: false,
    };
    let next = |state: Option<AnswerStream>| async move {
        let mut state = state?;
        let event = state.events.next().await;
        let reason = match event {
            Some(Ok(mut event)) => {
                state.is_resumable |= event.id.is_some();
                match state.read_event(&mut event) {
                    None => return Some((Ok(event), Some(state))),
                    Some(reason) => reason,
                }
            }
            None if state.is_answered || state.is_resumable => return None,
            None => "it closed the stream before its answer".to_owned(),
            Some(Err(error)) if state.is_resumable => return Some((Err(error), None)),
            Some(Err(SseError::Body(cause))) => {
                format!("the stream broke before its answer: {cause}")
            }
            Some(Err(error)) => format!("the stream broke before its answer: {error}"),
        };
        let error = ServerJsonRpcMessage::error(connection_error(reason), Some(state.request.id));
        let event = Sse {
            data: serde_json::to_string(&error).ok(),
            ..Sse::default()
        };
        Some((Ok(event), None))
    };
    unfold(Some(state), next).boxed()
}

type EventStream = BoxStream<'static, Result<Sse, SseError>>;

struct AnswerStream {
    events: EventStream,
    request: AwaitedRequest,
    is_answered: bool,
    is_resumable: bool,
}

impl AnswerStream {
    /// Replaces the message of an event by one that the SDK reads. Returns what is wrong with the event, if anything.
    fn read_event(&mut self, event: &mut Sse) -> Option<String> {
        let data = message_data(event)?;
        if self.is_answered {
            return None;
        }
        let Ok(json) = lenient_json::from_slice(data.as_bytes()) else {
            let line = first_line(data.as_bytes());
            return Some(format!(
                "it sent an event that is not a JSON-RPC message: {line}"
            ));
        };
        let mut mismatch = None;
        for message in message::read(json) {
            match message {
                Message::Answer(answer) if self.request.is_answered_by(&answer) => {
                    self.is_answered = true;
                    event.data = serde_json::to_string(&self.request.read(answer)).ok();
                    return None;
                }
                Message::Answer(answer) => {
                    mismatch = Some(answer.describe_mismatch(Some(&self.request.id)));
                }
                Message::Other(mut message) => {
                    if let Some(key) = &self.request.call_key {
                        message::mark_question(&mut message, key);
                    }
                    event.data = serde_json::to_string(&message).ok();
                }
            }
        }
        mismatch
    }
}

/// The data of an event that carries messages.
fn message_data(event: &Sse) -> Option<&str> {
    let data = event.data.as_deref();
    let data = data.filter(|data| !data.trim().is_empty());
    data.filter(|_| matches!(event.event.as_deref(), None | Some("" | "message")))
}

/// An event of a stream that no single request has opened, with its message as the SDK reads it.
pub fn read_stream_event(mut event: Sse) -> Sse {
    let json = message_data(&event).map(|data| lenient_json::from_slice(data.as_bytes()));
    let Some(Ok(json)) = json else {
        return event;
    };
    for message in message::read(json) {
        let message = match message {
            Message::Answer(answer) => answer.into_guessed_message(),
            Message::Other(message) => Some(*message),
        };
        if let Some(message) = message {
            event.data = serde_json::to_string(&message).ok();
        }
    }
    event
}

/// The body, if it has at most `max_bytes`.
async fn read_body(mut response: Response, max_bytes: usize) -> Result<Vec<u8>, HttpError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(HttpError::Request)? {
        if body.len() + chunk.len() > max_bytes {
            let why = format!("its answer has more than {max_bytes} bytes");
            return Err(HttpError::InvalidResponse(why));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The first line of a body that is not blank.
fn first_line(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(MAX_ERROR_BODY_BYTES)]);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty());
    shorten(line.unwrap_or_default(), MAX_LINE_CHARS).replace(char::is_control, "\u{fffd}")
}

/// Passes bytes on, and fails if an event is too long.
fn limit_event_size(
    bytes: impl Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
    max_event_bytes: usize,
) -> impl Stream<Item = Result<Bytes, HttpError>> + Send + 'static {
    let (mut event_bytes, mut line_bytes) = (0_usize, 0_usize);
    bytes.map(move |chunk| {
        let chunk = chunk.map_err(HttpError::Request)?;
        for byte in &chunk {
            match byte {
                b'\n' if line_bytes == 0 => event_bytes = 0,
                b'\n' => line_bytes = 0,
                b'\r' => {}
                _ => {
                    line_bytes += 1;
                    event_bytes += 1;
                }
            }
            if event_bytes > max_event_bytes {
                let why = format!("an event has more than {max_event_bytes} bytes");
                return Err(HttpError::InvalidResponse(why));
            }
        }
        Ok(chunk)
    })
}
