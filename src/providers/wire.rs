//! The one HTTP client of the providers: sends a body, reads the reply whole or in messages, within bounds, and turns
//! every way this can fail into a [`ProviderError`]. Knows no service's JSON, no retry policy and no run.

use std::borrow::Cow;
use std::error::Error as _;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use jiff::Timestamp;
use reqwest::{Body, Client, Request, Response, Url};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};

use crate::config;
use crate::domain::trace::TraceContext;
use crate::net::{innermost, is_loopback};
use crate::providers::lines::{Format, Messages, TooLong};
use crate::providers::{Category, ProviderError, refusal};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a service may say nothing. A model on a slow machine reads a long prompt for minutes before its first word.
const IDLE: Duration = Duration::from_secs(600);
/// How long the end of a body may take after its last message, so that the connection can be used again.
const LINGER: Duration = Duration::from_millis(20);
/// How long we wait for the words of a refusal whose status we already know.
const REFUSAL: Duration = Duration::from_secs(10);
/// Tells a service where a request stands in a trace (<https://www.w3.org/TR/trace-context/>).
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Secrets shorter than this are not looked for in messages: they would be found in any text.
const MIN_SECRET: usize = 6;

/// Anthropic's header for its key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The headers that carry a key to one service or another: with a person's own key none of them is the operator's.
const KEY_HEADERS: [HeaderName; 4] = [
    AUTHORIZATION,
    X_API_KEY,
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];

/// The header in which a service takes its key.
#[derive(Clone, Copy, Debug)]
pub enum KeyHeader {
    /// `x-api-key`
    ApiKey,
    /// `authorization: Bearer …`
    Bearer,
}

impl KeyHeader {
    fn name(self) -> HeaderName {
        match self {
            Self::ApiKey => X_API_KEY,
            Self::Bearer => AUTHORIZATION,
        }
    }

    /// The header's value; `None` if a header cannot hold the key.
    fn value(self, key: &SecretString) -> Option<HeaderValue> {
        let key = key.expose_secret().trim();
        match self {
            Self::ApiKey => secret_value(key),
            Self::Bearer => secret_value(&format!("Bearer {key}")),
        }
    }
}

/// Where a service is.
#[derive(Clone, Debug)]
pub struct Base {
    url: Url,
}

impl Base {
    /// Reads `http(s)://host[:port][/path]`, with or without a slash at its end. An address without a scheme is `http`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let bad =
            |why: &str| format!("base_url {why}; it should look like http://localhost:8000/v1");
        let full = match text.contains("://") {
            true => Cow::Borrowed(text),
            false => Cow::Owned(format!("http://{text}")),
        };
        // The text itself is not repeated: it may hold a password.
        let mut url = Url::parse(&full).map_err(|why| bad(&format!("is not a URL ({why})")))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(bad("must start with http:// or https://"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(bad(
                "must not hold a user or password (use api_key or headers)",
            ));
        }
        let path = url.path().trim_end_matches('/').to_owned();
        url.set_path(&path);
        url.set_fragment(None);
        Ok(Self { url })
    }

    /// Whether it is more than a scheme and an authority.
    pub fn has_path(&self) -> bool {
        self.url.path() != "/"
    }

    /// The host's name.
    pub fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// This address with `path` (which starts with a slash) at its end; a query stays.
    pub fn join(&self, path: &str) -> Self {
        let mut url = self.url.clone();
        let whole = format!("{}{path}", self.url.path().trim_end_matches('/'));
        url.set_path(&whole);
        Self { url }
    }

    fn is_loopback(&self) -> bool {
        is_loopback(self.host())
    }
}

impl std::fmt::Display for Base {
    /// Without slash at its end and without query, which may hold a key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut url = self.url.clone();
        url.set_query(None);
        f.write_str(url.as_str().trim_end_matches('/'))
    }
}

/// A service's client: its address, its headers, its bounds and its pooled connections, which copies share.
#[derive(Clone)]
pub struct Wire {
    client: Client,
    url: Url,
    headers: HeaderMap,
    key_header: KeyHeader,
    /// Looked for in every error message.
    secrets: Vec<SecretString>,
    max_reply: usize,
    timeout: Option<Duration>,
    /// What is said when nobody listens at the address.
    refused: Option<String>,
}

/// What a service answered, as far as it has come: its head is here, its body may be on its way.
pub struct Answered(Response);

impl Answered {
    /// An answer that has come already, in these chunks. It is read as one from the network is.
    ///
    /// # Errors
    /// A status or a content type that HTTP does not have.
    pub fn whole(
        status: u16,
        content_type: &str,
        chunks: impl IntoIterator<Item = Bytes, IntoIter: Send + 'static>,
    ) -> Result<Self, http::Error> {
        let chunks = stream::iter(chunks.into_iter().map(Ok::<_, io::Error>));
        let head = http::Response::builder()
            .status(status)
            .header(CONTENT_TYPE, content_type);
        Ok(Self(head.body(Body::wrap_stream(chunks))?.into()))
    }
}

/// A request beside those for replies: to make or to look at something at the service.
pub struct Call<'a> {
    /// GET or POST.
    pub method: Method,
    /// Below the base, with a slash at its beginning.
    pub path: &'a str,
    /// What follows the path.
    pub query: Option<&'a str>,
    /// The type of the body, where it is not JSON.
    pub content_type: Option<String>,
    /// Empty for none.
    pub body: Vec<u8>,
}

impl<'a> Call<'a> {
    /// Reads what is at `path`.
    pub fn get(path: &'a str) -> Self {
        Self {
            method: Method::GET,
            ..Self::post(path, Vec::new())
        }
    }

    /// Posts JSON, or nothing.
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

/// What the body of a reply is made of.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// All of it, as one document.
    Whole(&'a str),
    /// One message of a stream.
    Message(&'a str),
}

impl Wire {
    /// A client that posts to `base` and `path` with the configured key. The headers of the config win over its own.
    pub fn new(
        config: &config::Provider,
        base: &Base,
        path: &str,
        key_header: KeyHeader,
    ) -> Result<Self, String> {
        let Base { url } = base.join(path);
        let mut builder = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .read_timeout(IDLE)
            .tcp_nodelay(true)
            // A run of thousands of agents ends one turn and starts the next: its connections are worth keeping.
            .pool_max_idle_per_host(usize::MAX)
            .pool_idle_timeout(Duration::from_secs(60))
            // One connection a request: in HTTP/2 all would share one, and wait there for a free stream.
            .http1_only()
            // A compressor holds deltas back.
            .no_gzip();
        if let Some(timeout) = config.timeout {
            builder = builder.timeout(timeout);
        }
        if base.is_loopback() {
            builder = builder.no_proxy();
        }
        if url.scheme() == "http" {
            // Without redirects a plain address never needs the system's certificates; reading them takes a while.
            builder = builder.tls_certs_only([]);
        }
        let client = builder
            .build()
            .map_err(|why| format!("cannot start its HTTP client: {}", root_cause(&why)))?;
        let mut secrets = Vec::new();
        secrets.extend(config.api_key.clone());
        secrets.extend(config.headers.values().cloned());
        secrets.retain(|secret| secret.expose_secret().trim().len() >= MIN_SECRET);
        Ok(Self {
            client,
            url,
            headers: all_headers(config, key_header)?,
            key_header,
            secrets,
            max_reply: config.max_reply,
            timeout: config.timeout,
            refused: None,
        })
    }

    /// The same client that sends this header too, unless one of its name is configured.
    pub fn with_header(mut self, name: &'static str, value: &str) -> Result<Self, String> {
        let value = secret_value(value)
            .ok_or_else(|| format!("its {name} header has characters that no header may have"))?;
        self.headers
            .entry(HeaderName::from_static(name))
            .or_insert(value);
        Ok(self)
    }

    /// The same client that says this if nobody listens at the address.
    pub fn when_refused(mut self, text: String) -> Self {
        self.refused = Some(text);
        self
    }

    /// The same client for another path of its service.
    pub fn elsewhere(&self, base: &Base, path: &str) -> Self {
        Self {
            url: base.join(path).url,
            ..self.clone()
        }
    }

    /// Posts `body`, with its place in a trace, and with a person's own `key` in place of the configured one.
    pub async fn send(
        &self,
        body: Vec<u8>,
        trace: Option<&TraceContext>,
        key: Option<&SecretString>,
    ) -> Result<Answered, ProviderError> {
        let mut request = Request::new(Method::POST, self.url.clone());
        *request.headers_mut() = self.headers_with(key)?;
        if let Some(value) = trace.and_then(|trace| HeaderValue::try_from(trace.to_string()).ok()) {
            request.headers_mut().insert(TRACEPARENT, value);
        }
        *request.body_mut() = Some(body.into());
        match self.client.execute(request).await {
            Ok(response) => Ok(Answered(response)),
            Err(why) => Err(self.cleaned(self.unreached(&why))),
        }
    }

    /// Calls the service below `base`, and reads its answer whole.
    ///
    /// # Errors
    /// The service refused, the connection broke, or the answer is too long.
    pub async fn call(
        &self,
        base: &Base,
        call: Call<'_>,
        key: Option<&SecretString>,
    ) -> Result<Bytes, ProviderError> {
        let Base { mut url } = base.join(call.path);
        if let Some(query) = call.query {
            url.set_query(Some(query));
        }
        let mut request = Request::new(call.method, url);
        *request.headers_mut() = self.headers_with(key)?;
        let kind = call.content_type.map(HeaderValue::try_from);
        match (kind, call.body.is_empty()) {
            (Some(Ok(kind)), _) => drop(request.headers_mut().insert(CONTENT_TYPE, kind)),
            (_, true) => drop(request.headers_mut().remove(CONTENT_TYPE)),
            (Some(Err(_)) | None, false) => {}
        }
        if !call.body.is_empty() {
            *request.body_mut() = Some(call.body.into());
        }
        let answered = match self.client.execute(request).await {
            Ok(mut response) if response.status().is_success() => self.whole(&mut response).await,
            Ok(response) => Err(Box::pin(self.refusal(response)).await),
            Err(why) => Err(self.unreached(&why)),
        };
        answered.map_err(|error| self.cleaned(error))
    }

    fn headers_with(&self, key: Option<&SecretString>) -> Result<HeaderMap, ProviderError> {
        let mut headers = self.headers.clone();
        let Some(key) = key else {
            return Ok(headers);
        };
        for name in KEY_HEADERS {
            headers.remove(name);
        }
        let value = self.key_header.value(key).ok_or_else(|| {
            let message = "the request's own key has characters that no header may have";
            ProviderError::new(Category::Auth, message)
        })?;
        headers.insert(self.key_header.name(), value);
        Ok(headers)
    }

    /// Hands an answer over to `hear`, as one document or message by message, whichever the service sends; a stream is
    /// cut as `format` says. `hear` says whether the reply is complete; a stream that ends before that has broken off.
    /// `stream` is whether a stream was asked for.
    pub async fn hear(
        &self,
        Answered(mut response): Answered,
        format: Format,
        stream: bool,
        mut hear: impl FnMut(Part<'_>) -> Result<bool, ProviderError> + Send,
    ) -> Result<(), ProviderError> {
        if !response.status().is_success() {
            // Boxed because it is rare and would make every waiting request larger.
            return Err(self.cleaned(Box::pin(self.refusal(response)).await));
        }
        let heard = match is_stream(&response, format, stream) {
            true => self.hear_messages(&mut response, format, &mut hear).await,
            false => match self.whole(&mut response).await {
                Ok(body) => hear(Part::Whole(&String::from_utf8_lossy(&body))).map(|_| ()),
                Err(why) => Err(why),
            },
        };
        heard.map_err(|error| self.broke_off(error))
    }

    /// An error from a reply that had begun: it may have to be paid for, and it may quote the service.
    pub fn broke_off(&self, mut error: ProviderError) -> ProviderError {
        error.may_have_cost = true;
        self.cleaned(error)
    }

    async fn hear_messages(
        &self,
        response: &mut Response,
        format: Format,
        hear: &mut (impl FnMut(Part<'_>) -> Result<bool, ProviderError> + Send),
    ) -> Result<(), ProviderError> {
        let mut messages = Messages::new(format, self.max_reply);
        let mut room = self.max_reply;
        while let Some(mut chunk) = response.chunk().await.map_err(|why| self.cut(&why))? {
            // What comes before the bound is heard in any case: how the network cuts must make no difference.
            let is_too_much = chunk.len() > room;
            chunk.truncate(room);
            room -= chunk.len();
            messages.feed(chunk);
            while let Some(message) = messages.next_message()? {
                if hear(Part::Message(&message))? {
                    let _ = tokio::time::timeout(LINGER, response.chunk()).await;
                    return Ok(());
                }
            }
            if is_too_much {
                return Err(TooLong.into());
            }
        }
        let complete = match messages.rest() {
            // Half a message is no surprise here, but an error that the service reported must not be lost.
            Some(rest) => match hear(Part::Message(&rest)) {
                Err(error) if !error.message.starts_with(UNREADABLE) => return Err(error),
                heard => heard.unwrap_or(false),
            },
            None => false,
        };
        match complete {
            true => Ok(()),
            false => Err(ProviderError::new(
                Category::Server,
                "the stream ended before the reply was complete",
            )),
        }
    }

    async fn whole(&self, response: &mut Response) -> Result<Bytes, ProviderError> {
        let mut seen = 0;
        let mut body: Option<Vec<u8>> = None;
        let mut first = Bytes::new();
        // Most replies are one chunk, which need not be copied.
        while let Some(chunk) = response.chunk().await.map_err(|why| self.cut(&why))? {
            self.count(&mut seen, &chunk)?;
            match &mut body {
                Some(body) => body.extend_from_slice(&chunk),
                None if first.is_empty() => first = chunk,
                None => body = Some([&first[..], &chunk[..]].concat()),
            }
        }
        Ok(body.map_or(first, Bytes::from))
    }

    fn count(&self, seen: &mut usize, chunk: &Bytes) -> Result<(), ProviderError> {
        *seen += chunk.len();
        match *seen > self.max_reply {
            true => Err(TooLong.into()),
            false => Ok(()),
        }
    }

    /// Reads why the service said no.
    async fn refusal(&self, mut response: Response) -> ProviderError {
        let status = response.status();
        let retry_after = refusal::retry_after(response.headers(), Timestamp::now());
        match tokio::time::timeout(REFUSAL, self.whole(&mut response)).await {
            Ok(Err(too_long)) if too_long.message == TOO_LARGE => ProviderError {
                message: TOO_LARGE.to_owned(),
                ..refusal::from_status(status, "", retry_after)
            },
            // The status has come, so what it means is known, whatever became of the words.
            Ok(Err(_)) | Err(_) => refusal::from_status(status, "", retry_after),
            Ok(Ok(body)) => {
                refusal::from_status(status, &String::from_utf8_lossy(&body), retry_after)
            }
        }
    }

    /// A request that got no reply.
    fn unreached(&self, why: &reqwest::Error) -> ProviderError {
        if let Some(refused) = self.refused.as_ref().filter(|_| is_refused(why)) {
            return ProviderError::new(Category::Server, refused.clone());
        }
        let host = self.url.host_str().unwrap_or_default();
        let place = match self.url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        let cause = root_cause(why);
        if why.is_connect() {
            let message = format!("could not connect to {place}: {cause}");
            return ProviderError::new(Category::Server, message);
        }
        if why.is_timeout() {
            return self.too_late();
        }
        let message = format!("the connection to {place} broke: {cause}");
        ProviderError::new(Category::Server, message)
    }

    /// A reply whose body broke off.
    fn cut(&self, why: &reqwest::Error) -> ProviderError {
        match why.is_timeout() {
            true => self.too_late(),
            false => ProviderError::new(
                Category::Server,
                format!("the reply broke off: {}", root_cause(why)),
            ),
        }
    }

    fn too_late(&self) -> ProviderError {
        let message = match self.timeout {
            Some(timeout) => format!("no whole reply within {}s", timeout.as_secs_f64()),
            None => format!("nothing came for {}s", IDLE.as_secs()),
        };
        ProviderError::new(Category::Timeout, message)
    }

    /// The error without our secrets, which some services repeat.
    fn cleaned(&self, mut error: ProviderError) -> ProviderError {
        for secret in &self.secrets {
            let secret = secret.expose_secret().trim();
            if error.message.contains(secret) {
                error.message = error.message.replace(secret, "[redacted]");
            }
        }
        error
    }
}

/// The error of a reply that exceeds its bound.
const TOO_LARGE: &str = "response too large";
/// How the error of a reply that cannot be read begins.
const UNREADABLE: &str = "failed to parse response";

impl From<TooLong> for ProviderError {
    fn from(_: TooLong) -> Self {
        Self::new(Category::Server, TOO_LARGE)
    }
}

/// Reads a service's JSON.
pub fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, ProviderError> {
    serde_json::from_str(text)
        .map_err(|why| ProviderError::new(Category::Server, format!("{UNREADABLE}: {why}")))
}

/// Writes a request's JSON.
pub fn write(body: &impl Serialize) -> Result<Vec<u8>, ProviderError> {
    serde_json::to_vec(body).map_err(|why| {
        let message = format!("the request cannot be written as JSON: {why}");
        ProviderError::new(Category::BadRequest, message)
    })
}

/// Adds `more` to `text`; the first piece, often the only one, is not copied.
pub fn append(text: &mut String, more: String) {
    match text.is_empty() {
        true => *text = more,
        false => text.push_str(&more),
    }
}

/// Whether the body is a stream. A service may send a document though it was asked for a stream, and the reverse; and an
/// error page must not be read as a stream without messages.
fn is_stream(response: &Response, format: Format, stream: bool) -> bool {
    let content_type = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_ascii_lowercase();
    let is = |kind: &str| content_type.starts_with(kind);
    let (own, whole) = match format {
        Format::Sse => (
            "text/event-stream",
            is("application/json") || is("text/html"),
        ),
        // A stream of JSON lines may well call itself JSON.
        Format::Ndjson => ("application/x-ndjson", is("text/html")),
    };
    is(own) || (stream && !whole)
}

fn all_headers(config: &config::Provider, key_header: KeyHeader) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(
        USER_AGENT,
        HeaderValue::from_static(concat!("axed/", env!("CARGO_PKG_VERSION"))),
    );
    if let Some(key) = &config.api_key {
        let value = key_header
            .value(key)
            .ok_or_else(|| "its api_key has characters that no header may have".to_owned())?;
        headers.insert(key_header.name(), value);
    }
    for (name, value) in &config.headers {
        let header = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| format!("headers.{name} is not a header's name"))?;
        if [CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING].contains(&header) {
            return Err(format!(
                "headers.{name} is set by the HTTP client: remove it"
            ));
        }
        let value = secret_value(value.expose_secret())
            .ok_or_else(|| format!("headers.{name} has characters that no header may have"))?;
        headers.insert(header, value);
    }
    Ok(headers)
}

fn secret_value(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text.trim()).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn is_refused(why: &reqwest::Error) -> bool {
    let mut cause = why.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>()
            && error.kind() == io::ErrorKind::ConnectionRefused
        {
            return true;
        }
        cause = error.source();
    }
    false
}

fn root_cause(why: &reqwest::Error) -> String {
    innermost(why).unwrap_or_else(|| "the HTTP client gave no reason".to_owned())
}

#[cfg(test)]
mod tests {
    use super::Base;

    #[test]
    fn an_address_is_read_with_or_without_its_trimmings() {
        let shown = |text: &str| Base::parse(text).expect("an address").to_string();
        assert_eq!(shown("http://localhost:8000/"), "http://localhost:8000");
        assert_eq!(shown(" https://a.b/v1// "), "https://a.b/v1");
        assert_eq!(shown("127.0.0.1:11434"), "http://127.0.0.1:11434");
        assert_eq!(shown("https://a.b/v1?key=secret"), "https://a.b/v1");
        let joined = Base::parse("https://a.b/v1/?q=1")
            .expect("an address")
            .join("/chat");
        assert_eq!(joined.url.as_str(), "https://a.b/v1/chat?q=1");
        for bad in ["", "ftp://a", "http://", "http://me:secret@a", "http://a b"] {
            let why = Base::parse(bad).expect_err("no address");
            assert!(
                why.starts_with("base_url ") && !why.contains("secret"),
                "{why}"
            );
        }
    }
}
