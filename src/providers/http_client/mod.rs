//! The HTTP client of all providers: sends a request, reads the response whole or as a stream of messages, enforces timeouts
//! and size limits, and converts every failure to a [`ProviderError`]. Does not retry.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use jiff::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use serde_json::value::RawValue;
use url::Url;

use crate::config;
use crate::domain::request_head::RequestHead;
use crate::domain::trace::TraceContext;
use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::http_client::headers::{
    HeaderError, KEY_HEADERS, KeyHeader, default_headers,
};
use crate::providers::http_client::transport::{
    HttpResponse, IDLE_TIMEOUT, Transport, TransportError,
};
use crate::providers::setup_error::SetupError;
use crate::providers::stream_decoder::{ReplyTooLarge, StreamDecoder, StreamFormat, decode_text};
use crate::providers::surrogates::{self, HalfJoiner};
use crate::providers::wire_json::UnreadableJson;
use crate::providers::{ErrorCategory, ProviderError, error_mapping};

pub mod base_url;
mod connector;
pub mod headers;
pub mod transport;

/// How long to wait for the end of a body after its last message, so that the connection can be reused.
const BODY_END_TIMEOUT: Duration = Duration::from_millis(20);
/// How long to wait for the body of an error response. Its status is already known.
const ERROR_BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// See <https://www.w3.org/TR/trace-context/>.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Shorter secrets are not redacted: they could match any text.
const MIN_SECRET_LEN: usize = 6;

/// The client of one service. Clones share its connection pool.
#[derive(Clone)]
pub struct HttpClient {
    transport: Transport,
    url: Url,
    /// The same, as requests have it.
    uri: Uri,
    headers: HeaderMap,
    /// The URL and the headers, as they may be recorded.
    head: Arc<RequestHead>,
    key_variable: String,
    key_header: KeyHeader,
    /// Redacted from every error message.
    secrets: Vec<SecretString>,
    max_reply: usize,
    timeout: Option<Duration>,
    /// The error message if the connection is refused.
    refused_message: Option<String>,
}

/// A request to another endpoint of the service, such as its batch API.
pub struct ApiRequest<'a> {
    pub method: Method,
    /// Relative to the base URL; starts with a slash.
    pub path: &'a str,
    pub query: Option<&'a str>,
    /// `None` means JSON.
    pub content_type: Option<String>,
    /// Empty means no body.
    pub body: Vec<u8>,
}

impl<'a> ApiRequest<'a> {
    pub fn get(path: &'a str) -> Self {
        Self {
            method: Method::GET,
            ..Self::post(path, Vec::new())
        }
    }

    pub fn post(path: &'a str, body: Vec<u8>) -> Self {
        Self {
            method: Method::POST,
            path,
            query: None,
            content_type: None,
            body,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum BodyPart<'a> {
    /// The whole body.
    Document(&'a str),
    /// One message of a stream.
    Message {
        /// The name of its event; empty if it has none.
        event: &'a str,
        data: &'a str,
    },
    /// The message that ends streams on OpenAI's chat API. Some services send it on other wires.
    Done,
    /// The body of a stream ended as HTTP requires, without the message that ends a reply.
    End,
}

/// What a body is by its first bytes: content types are often wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyForm {
    Sse,
    /// One document, or several lines.
    Json,
    /// JSON whose first line is a document.
    JsonLines,
    Other,
}

impl BodyForm {
    /// `None` if more bytes are needed.
    fn of(body: &[u8]) -> Option<Self> {
        const BOM: &[u8] = b"\xef\xbb\xbf";
        const FIELDS: [&[u8]; 5] = [b"data", b"event", b"id", b"retry", b":"];
        if body.len() < BOM.len() && BOM.starts_with(body) {
            return None;
        }
        let body = body.strip_prefix(BOM).unwrap_or(body).trim_ascii_start();
        let line = body.split(|byte| matches!(byte, b'\n' | b'\r')).next()?;
        let is_line_whole = line.len() < body.len();
        if body.is_empty() {
            return None;
        }
        if matches!(body[0], b'{' | b'[') {
            return match (is_line_whole, line.trim_ascii_end().last()) {
                (true, Some(b'}')) => Some(Self::JsonLines),
                (true, _) => Some(Self::Json),
                (false, _) => None,
            };
        }
        let is_field = |field: &&[u8]| {
            let rest = line.strip_prefix(*field);
            rest.is_some_and(|rest| *field == b":" || rest.starts_with(b":"))
        };
        let may_be =
            |field: &&[u8]| !is_line_whole && (field.starts_with(line) || *line == **field);
        match FIELDS.iter().any(is_field) {
            true => Some(Self::Sse),
            false if FIELDS.iter().any(may_be) => None,
            false => Some(Self::Other),
        }
    }
}

/// Why a part of a reply was rejected.
#[derive(Debug)]
pub enum PartError {
    /// The part is not valid JSON for this wire.
    Unreadable(UnreadableJson),
    Failed(ProviderError),
}

impl From<UnreadableJson> for PartError {
    fn from(error: UnreadableJson) -> Self {
        Self::Unreadable(error)
    }
}

impl From<ProviderError> for PartError {
    fn from(error: ProviderError) -> Self {
        Self::Failed(error)
    }
}

impl From<PartError> for ProviderError {
    fn from(error: PartError) -> Self {
        match error {
            PartError::Unreadable(error) => error.into(),
            PartError::Failed(error) => error,
        }
    }
}

/// Why a body could not be read whole.
pub enum BodyError {
    TooLarge(ReplyTooLarge),
    Failed(ProviderError),
}

impl From<BodyError> for ProviderError {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge(error) => error.into(),
            BodyError::Failed(error) => error,
        }
    }
}

impl HttpClient {
    /// A client that posts to `base` and `path` with the configured key. Configured headers override its own.
    pub fn new(
        config: &config::Provider,
        base: &BaseUrl,
        path: &str,
        key_header: KeyHeader,
    ) -> Result<Self, SetupError> {
        let url = base.join(path).into_url();
        let uri = request_uri(&url)?;
        let transport = Transport::new(&uri, base.is_loopback(), config.timeout)?;
        let mut secrets = Vec::new();
        secrets.extend(config.api_key.clone());
        secrets.extend(config.headers.values().cloned());
        secrets.retain(|secret| secret.expose_secret().trim().len() >= MIN_SECRET_LEN);
        Ok(Self {
            transport,
            url,
            uri,
            headers: default_headers(config, key_header)?,
            head: Arc::default(),
            key_variable: config.key_env.clone(),
            key_header,
            secrets,
            max_reply: config.max_reply,
            timeout: config.timeout,
            refused_message: None,
        }
        .with_head())
    }

    fn with_head(mut self) -> Self {
        self.head = Arc::new(self.recorded_head(&self.headers));
        self
    }

    fn recorded_head(&self, headers: &HeaderMap) -> RequestHead {
        RequestHead {
            key_variable: Some(self.key_variable.clone()),
            ..headers::recorded_head(&self.url, headers, &self.secrets)
        }
    }

    /// Where a request with this key is sent, without secrets and without what differs in each request.
    pub fn head(&self, key: Option<&SecretString>) -> Arc<RequestHead> {
        if key.is_none() {
            return Arc::clone(&self.head);
        }
        let headers = self.headers_for_key(key).unwrap_or_default();
        Arc::new(self.recorded_head(&headers))
    }

    /// Adds a header, unless the configuration sets it.
    pub fn with_header(mut self, name: &'static str, value: &str) -> Result<Self, HeaderError> {
        let value =
            HeaderValue::from_str(value.trim()).map_err(|_| HeaderError::BuiltIn { name })?;
        self.headers
            .entry(HeaderName::from_static(name))
            .or_insert(value);
        Ok(self.with_head())
    }

    /// Sets the error message for a refused connection.
    pub fn with_refused_message(mut self, message: String) -> Self {
        self.refused_message = Some(message);
        self
    }

    /// Returns a client for another path of the same service.
    pub fn with_path(&self, base: &BaseUrl, path: &str) -> Result<Self, SetupError> {
        let url = base.join(path).into_url();
        let uri = request_uri(&url)?;
        Ok(Self {
            url,
            uri,
            ..self.clone()
        }
        .with_head())
    }

    /// Posts `body`. `key` replaces the configured key, and `header` is of this request alone.
    pub async fn send(
        &self,
        body: Bytes,
        trace: Option<&TraceContext>,
        key: Option<&SecretString>,
        header: Option<(&HeaderName, HeaderValue)>,
    ) -> Result<HttpResponse, ProviderError> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers_for_key(key)?;
        if let Some(value) = trace.and_then(|trace| HeaderValue::try_from(trace.to_string()).ok()) {
            request.headers_mut().insert(TRACEPARENT, value);
        }
        if let Some((name, value)) = header {
            request.headers_mut().entry(name).or_insert(value);
        }
        let result = self.transport.send(request).await;
        result.map_err(|error| self.redact_secrets(self.connection_error(error)))
    }

    /// Sends a request below `base` and reads the whole response.
    ///
    /// # Errors
    /// The service sent an error, the connection broke, or the response is too large.
    pub async fn call_api(
        &self,
        base: &BaseUrl,
        api_request: ApiRequest<'_>,
        key: Option<&SecretString>,
    ) -> Result<Bytes, ProviderError> {
        let body = self.call_api_for_body(base, api_request, key).await;
        body.map_err(ProviderError::from)
    }

    /// The same, for a caller that treats a response that is too large in another way.
    pub async fn call_api_for_body(
        &self,
        base: &BaseUrl,
        api_request: ApiRequest<'_>,
        key: Option<&SecretString>,
    ) -> Result<Bytes, BodyError> {
        let mut url = base.join(api_request.path).into_url();
        if let Some(query) = api_request.query {
            url.set_query(Some(query));
        }
        let uri = request_uri(&url).map_err(|error| {
            BodyError::Failed(ProviderError::new(
                ErrorCategory::BadRequest,
                error.to_string(),
            ))
        })?;
        let has_body = !api_request.body.is_empty();
        let mut request = Request::new(Full::from(api_request.body));
        *request.method_mut() = api_request.method;
        *request.uri_mut() = uri;
        *request.headers_mut() = self.headers_for_key(key).map_err(BodyError::Failed)?;
        let content_type = api_request.content_type.map(HeaderValue::try_from);
        match (content_type, has_body) {
            (Some(Ok(content_type)), _) => {
                drop(request.headers_mut().insert(CONTENT_TYPE, content_type))
            }
            (_, false) => drop(request.headers_mut().remove(CONTENT_TYPE)),
            (Some(Err(_)) | None, true) => {}
        }
        let result = match self.transport.send(request).await {
            Ok(mut response) if response.status().is_success() => {
                self.read_full_body(&mut response).await
            }
            Ok(response) => {
                let error = Box::pin(self.read_error_response(response)).await;
                Err(BodyError::Failed(error))
            }
            Err(error) => Err(BodyError::Failed(self.connection_error(error))),
        };
        result.map_err(|error| match error {
            BodyError::Failed(error) => BodyError::Failed(self.redact_secrets(error)),
            too_large @ BodyError::TooLarge(_) => too_large,
        })
    }

    fn headers_for_key(&self, key: Option<&SecretString>) -> Result<HeaderMap, ProviderError> {
        let mut headers = self.headers.clone();
        let Some(key) = key else {
            return Ok(headers);
        };
        for name in KEY_HEADERS {
            headers.remove(name);
        }
        let value = self.key_header.value(key).ok_or_else(|| {
            let message = "the request's own key has characters that a header cannot hold";
            ProviderError::new(ErrorCategory::Auth, message)
        })?;
        headers.insert(self.key_header.name(), value);
        Ok(headers)
    }

    /// Passes the body to `on_part`, as one document or as the messages of a stream, whichever the service sends. `on_part`
    /// returns whether the reply is complete; a stream that ends earlier is an error. `stream` is whether the request has
    /// `stream: true`.
    pub async fn read_body(
        &self,
        mut response: HttpResponse,
        format: StreamFormat,
        stream: bool,
        mut on_part: impl FnMut(BodyPart<'_>) -> Result<bool, PartError> + Send,
    ) -> Result<(), ProviderError> {
        if !response.status().is_success() {
            // Boxed because it is rare and would enlarge the future of every request.
            return Err(self.redact_secrets(Box::pin(self.read_error_response(response)).await));
        }
        let result = self.read_reply(&mut response, format, stream, &mut on_part);
        result.await.map_err(|error| self.reply_error(error))
    }

    async fn read_reply(
        &self,
        response: &mut HttpResponse,
        format: StreamFormat,
        stream: bool,
        on_part: &mut (impl FnMut(BodyPart<'_>) -> Result<bool, PartError> + Send),
    ) -> Result<(), ProviderError> {
        let mut start = Vec::new();
        let mut form = None;
        while form.is_none() && start.len() <= self.max_reply {
            let chunk = response.chunk().await;
            let Some(chunk) = chunk.map_err(|error| self.body_error(error))? else {
                break;
            };
            start.extend_from_slice(&chunk);
            form = BodyForm::of(&start);
            // A document is read whole in any case.
            if form.is_none()
                && format == StreamFormat::Sse
                && start.trim_ascii_start().starts_with(b"{")
            {
                break;
            }
        }
        let is_json = matches!(start.trim_ascii_start().first(), Some(b'{' | b'['));
        response.put_back(start.into());
        let labelled = is_stream(response, format, stream);
        let is_whole = match form {
            Some(BodyForm::Sse) => false,
            // One line, or the beginning of one.
            Some(BodyForm::JsonLines) | None if is_json => format == StreamFormat::Sse || !labelled,
            Some(BodyForm::Json | BodyForm::JsonLines) => true,
            Some(BodyForm::Other) | None => !labelled,
        };
        if is_whole {
            let body = self.read_full_body(response).await?;
            return read_document(&decode_text(&body), labelled, on_part);
        }
        let format = match form {
            Some(BodyForm::Sse) => StreamFormat::Sse,
            _ => format,
        };
        self.read_stream(response, format, on_part).await
    }

    /// Completes the error of a reply that had begun: the service may charge for it, and the message may quote a secret.
    pub fn reply_error(&self, mut error: ProviderError) -> ProviderError {
        error.may_be_billed = true;
        self.redact_secrets(error)
    }

    async fn read_stream(
        &self,
        response: &mut HttpResponse,
        format: StreamFormat,
        on_part: &mut (impl FnMut(BodyPart<'_>) -> Result<bool, PartError> + Send),
    ) -> Result<(), ProviderError> {
        let mut decoder = StreamDecoder::new(format, self.max_reply);
        let mut messages = Messages::default();
        let mut remaining = self.max_reply;
        while let Some(mut chunk) = response
            .chunk()
            .await
            .map_err(|error| self.body_error(error))?
        {
            // The bytes before the limit are decoded in any case, so that chunk boundaries make no difference.
            let exceeds_limit = chunk.len() > remaining;
            chunk.truncate(remaining);
            remaining -= chunk.len();
            decoder.feed(chunk);
            while let Some(message) = decoder.next_message()?.map(Cow::into_owned) {
                if messages.push(decoder.event_name(), message, on_part)? {
                    let _ = tokio::time::timeout(BODY_END_TIMEOUT, response.chunk()).await;
                    return Ok(());
                }
            }
            if exceeds_limit {
                return Err(ReplyTooLarge.into());
            }
        }
        let rest = decoder.finish().map(Cow::into_owned);
        let is_complete = match rest {
            // An incomplete message is expected here, but an error that the service sent must not be lost.
            Some(rest) => match messages.push(decoder.event_name(), rest, on_part) {
                Err(PartError::Failed(error)) => return Err(error),
                Err(PartError::Unreadable(_)) => false,
                Ok(is_complete) => is_complete || messages.finish(on_part)?,
            },
            None => messages.finish(on_part)?,
        };
        match is_complete {
            true => Ok(()),
            false => Err(incomplete_stream()),
        }
    }

    async fn read_full_body(&self, response: &mut HttpResponse) -> Result<Bytes, BodyError> {
        let mut total = 0;
        let mut body: Option<Vec<u8>> = None;
        let mut first = Bytes::new();
        // Most replies are one chunk, which is not copied.
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| BodyError::Failed(self.body_error(error)))?
        {
            total += chunk.len();
            if total > self.max_reply {
                return Err(BodyError::TooLarge(ReplyTooLarge));
            }
            match &mut body {
                Some(body) => body.extend_from_slice(&chunk),
                None if first.is_empty() => first = chunk,
                None => body = Some([&first[..], &chunk[..]].concat()),
            }
        }
        Ok(body.map_or(first, Bytes::from))
    }

    /// Reads the body of an error response.
    async fn read_error_response(&self, mut response: HttpResponse) -> ProviderError {
        let status = response.status();
        let retry_after = error_mapping::retry_after(response.headers(), Timestamp::now());
        match tokio::time::timeout(ERROR_BODY_TIMEOUT, self.read_full_body(&mut response)).await {
            Ok(Err(BodyError::TooLarge(too_large))) => ProviderError {
                message: too_large.to_string(),
                ..error_mapping::from_status(status, "", retry_after)
            },
            // The status alone determines the category.
            Ok(Err(BodyError::Failed(_))) | Err(_) => {
                error_mapping::from_status(status, "", retry_after)
            }
            Ok(Ok(body)) => error_mapping::from_status(status, &decode_text(&body), retry_after),
        }
    }

    fn connection_error(&self, error: TransportError) -> ProviderError {
        let host = self.url.host_str().unwrap_or_default();
        let authority = match self.url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        let message = match (error, &self.refused_message) {
            // The connector fails sooner, unless the configured timeout is very short.
            (TransportError::Timeout, _) => return sent(self.timeout_error()),
            (
                TransportError::Connect {
                    is_refused: true, ..
                },
                Some(message),
            ) => message.clone(),
            (TransportError::Connect { cause, .. }, _) => {
                format!("could not connect to {authority}: {cause}")
            }
            (TransportError::Broken { cause }, _) => {
                let message = format!("the connection to {authority} broke: {cause}");
                return sent(ProviderError::new(ErrorCategory::Server, message));
            }
        };
        ProviderError::new(ErrorCategory::Server, message)
    }

    fn body_error(&self, error: TransportError) -> ProviderError {
        match error {
            TransportError::Timeout => self.timeout_error(),
            TransportError::Connect { cause, .. } | TransportError::Broken { cause } => {
                let message = format!("the reply broke off: {cause}");
                ProviderError::new(ErrorCategory::Server, message)
            }
        }
    }

    fn timeout_error(&self) -> ProviderError {
        let message = match self.timeout {
            Some(timeout) => format!("no complete reply within {}s", timeout.as_secs_f64()),
            None => format!("no data for {}s", IDLE_TIMEOUT.as_secs()),
        };
        ProviderError::new(ErrorCategory::Timeout, message)
    }

    /// Removes the configured secrets from the message: some services repeat them.
    fn redact_secrets(&self, error: ProviderError) -> ProviderError {
        self.secrets.iter().fold(error, ProviderError::redact)
    }
}

impl From<ReplyTooLarge> for ProviderError {
    fn from(error: ReplyTooLarge) -> Self {
        Self::new(ErrorCategory::Server, error.to_string())
    }
}

/// Passes on the messages of a stream.
#[derive(Default)]
struct Messages {
    halves: HalfJoiner,
}

impl Messages {
    /// Returns whether the reply is complete.
    fn push(
        &mut self,
        event: &str,
        message: String,
        on_part: &mut impl FnMut(BodyPart<'_>) -> Result<bool, PartError>,
    ) -> Result<bool, PartError> {
        let mut data = message.trim().trim_start_matches('\u{feff}');
        while let Some(rest) = data.strip_prefix("data:") {
            data = rest.trim_start();
        }
        if event.eq_ignore_ascii_case("error") {
            let data = surrogates::repair(data);
            // What it reports besides the error counts too.
            drop(on_part(BodyPart::Message { event, data: &data }));
            return Err(error_mapping::from_error_body(&data).into());
        }
        match data.trim_matches('"') {
            // Some services keep the connection open with these.
            "" | "null" => return Ok(false),
            "[DONE]" | "[done]" => return Ok(self.finish_with(BodyPart::Done, on_part)?),
            _ => {}
        }
        for data in self.halves.push(Cow::Borrowed(data)).into_iter().flatten() {
            if push_checked(BodyPart::Message { event, data: &data }, on_part)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether the reply is complete although the message that ends it is missing.
    fn finish(
        &mut self,
        on_part: &mut impl FnMut(BodyPart<'_>) -> Result<bool, PartError>,
    ) -> Result<bool, ProviderError> {
        self.finish_with(BodyPart::End, on_part)
    }

    fn finish_with(
        &mut self,
        end: BodyPart<'_>,
        on_part: &mut impl FnMut(BodyPart<'_>) -> Result<bool, PartError>,
    ) -> Result<bool, ProviderError> {
        if let Some(data) = self.halves.finish() {
            let event = "";
            if push_checked(BodyPart::Message { event, data: &data }, on_part)? {
                return Ok(true);
            }
        }
        Ok(on_part(end)?)
    }
}

/// Passes on a whole body: one document, or the messages of a stream in one piece. `is_stream` is whether it was to be a stream.
fn read_document(
    body: &str,
    is_stream: bool,
    on_part: &mut impl FnMut(BodyPart<'_>) -> Result<bool, PartError>,
) -> Result<(), ProviderError> {
    let body = surrogates::repair(body.trim_start_matches('\u{feff}'));
    let lines = match body.contains("\n{") {
        true => json_lines(&body),
        false => Vec::new(),
    };
    if lines.len() < 2 {
        let document = push_checked(BodyPart::Document(&body), on_part);
        return match document {
            // Some gateways report their errors as plain text.
            Err(PartError::Unreadable(error)) => {
                let error = || match is_stream {
                    true => incomplete_stream(),
                    false => error.into(),
                };
                Err(error_mapping::plain_error(&body).unwrap_or_else(error))
            }
            document => Ok(document.map(drop)?),
        };
    }
    let mut messages = Messages::default();
    for line in lines {
        if messages.push("", line.to_owned(), on_part)? {
            return Ok(());
        }
    }
    match messages.finish(on_part)? {
        true => Ok(()),
        false => Err(incomplete_stream()),
    }
}

/// The values of a body that has several; empty if it has anything else.
fn json_lines(body: &str) -> Vec<&str> {
    let values = serde_json::Deserializer::from_str(body).into_iter::<&RawValue>();
    let values: Result<Vec<&RawValue>, _> = values.collect();
    values
        .unwrap_or_default()
        .into_iter()
        .map(RawValue::get)
        .collect()
}

/// Passes on a part, unless it reports an error.
fn push_checked(
    part: BodyPart<'_>,
    on_part: &mut impl FnMut(BodyPart<'_>) -> Result<bool, PartError>,
) -> Result<bool, PartError> {
    // What it reports besides the error counts too.
    let pushed = on_part(part);
    let error = match part {
        BodyPart::Document(data) | BodyPart::Message { data, .. } => {
            error_mapping::reported_error(data)
        }
        BodyPart::Done | BodyPart::End => None,
    };
    match (error, pushed) {
        // A builder that has found an error has found the one that says the most.
        (Some(_), Err(PartError::Failed(error))) => Err(error.into()),
        (Some(error), _) => Err(error.into()),
        (None, pushed) => pushed,
    }
}

fn incomplete_stream() -> ProviderError {
    let message = "the stream ended before the reply was complete";
    ProviderError::new(ErrorCategory::Server, message)
}

/// The error of a request that was sent and has no response: the service may have processed it, and charge for it.
fn sent(error: ProviderError) -> ProviderError {
    ProviderError {
        may_be_billed: true,
        ..error
    }
}

/// Whether the body is a stream. A service may send a document to a request for a stream, and the reverse. An HTML error
/// page must not be read as a stream without messages.
fn is_stream(response: &HttpResponse, format: StreamFormat, stream: bool) -> bool {
    let content_type = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_ascii_lowercase();
    let is_type = |kind: &str| content_type.starts_with(kind);
    let (stream_type, is_document) = match format {
        StreamFormat::Sse => (
            "text/event-stream",
            is_type("application/json") || is_type("text/html"),
        ),
        // A stream of JSON lines may have the content type of JSON.
        StreamFormat::Ndjson => ("application/x-ndjson", is_type("text/html")),
    };
    is_type(stream_type) || (stream && !is_document)
}

fn request_uri(url: &Url) -> Result<Uri, SetupError> {
    Uri::try_from(url.as_str()).map_err(|error| SetupError::RequestUrl {
        cause: error.to_string(),
    })
}
