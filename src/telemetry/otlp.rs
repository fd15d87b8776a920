//! Sends spans to a collector: OTLP over HTTP in protobuf (<https://opentelemetry.io/docs/specs/otlp/#otlphttp>), in
//! batches, from one task. Knows no runs.
//!
//! The messages are OpenTelemetry's, trace/v1/trace.proto and what it needs, as far as we write them; the tests read them
//! with the official crate.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use prost::Message;
use reqwest::{Client, Url};
use secrecy::ExposeSecret;
use tokio_util::sync::CancellationToken;

use crate::config;
use crate::net::{innermost, is_loopback};
use crate::telemetry::traces::{Kind, Span, Spans, Value};

/// Spans of one request, and after how many bytes it is full: collectors take no request above some MiB.
const BATCH: usize = 512;
const BATCH_BYTES: usize = 2 << 20;
/// How long spans wait for others to go with them.
const GATHER: Duration = Duration::from_secs(1);
/// How long one request may take, and how long its connection.
const PATIENCE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(3);
/// How long a batch that could not be sent waits, and how often it is tried. Meanwhile the queue fills.
const PAUSE: Duration = Duration::from_secs(2);
const TRIES: u32 = 3;
/// How long nothing is said of lost spans after something was.
const SILENCE: Duration = Duration::from_secs(60);

/// A collector, and what it is told of us.
pub struct Collector {
    client: Client,
    url: Url,
    headers: HeaderMap,
    service: String,
    /// Whether it takes nothing now: told once when it begins, and once when it ends.
    is_down: bool,
    /// When it was last told that spans were lost.
    told: Option<Instant>,
}

/// Why a request was not taken.
struct Refused {
    why: String,
    is_final: bool,
}

impl Collector {
    /// The configured one. The error says what is wrong with the configuration.
    pub fn new(settings: &config::Otlp) -> Result<Self, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &settings.headers {
            let header = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| format!("telemetry.otlp_headers.{name} is not a header's name"))?;
            let mut value = HeaderValue::from_str(value.expose_secret()).map_err(|_| {
                format!("telemetry.otlp_headers.{name} has characters that no header may have")
            })?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        let kind = HeaderValue::from_static("application/x-protobuf");
        headers.insert(CONTENT_TYPE, kind);
        let agent = HeaderValue::from_static(concat!("axed/", env!("CARGO_PKG_VERSION")));
        headers.insert(USER_AGENT, agent);
        let url = Url::parse(&settings.endpoint)
            .map_err(|why| format!("telemetry.otlp_endpoint is not a URL ({why})"))?;
        let mut builder = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .timeout(PATIENCE)
            .http1_only();
        if url.scheme() == "http" {
            // A plain address never needs the system's certificates; reading them takes a while.
            builder = builder.tls_certs_only([]);
        }
        if url.host_str().is_some_and(is_loopback) {
            builder = builder.no_proxy();
        }
        let client = builder
            .build()
            .map_err(|why| format!("telemetry: cannot start the HTTP client ({why})"))?;
        Ok(Self {
            client,
            url,
            headers,
            service: settings.service.clone(),
            is_down: false,
            told: None,
        })
    }

    /// Sends what comes until `stop`, and then what waits still. Its owner bounds how long that may take.
    pub async fn feed(mut self, mut spans: Spans, stop: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                first = spans.next() => match first {
                    Some(span) => batch.push(span),
                    // Nobody hands spans over any more.
                    None => return,
                },
                () = stop.cancelled() => break,
            }
            tokio::select! {
                () = fill(&mut batch, &mut spans) => {}
                () = tokio::time::sleep(GATHER) => {}
                () = stop.cancelled() => {}
            }
            self.send(&mut batch, &spans, &stop).await;
        }
        spans.close();
        loop {
            fill(&mut batch, &mut spans).await;
            if batch.is_empty() {
                return;
            }
            self.send(&mut batch, &spans, &stop).await;
        }
    }

    /// Sends a batch, again where that may help, and empties it.
    async fn send(&mut self, batch: &mut Vec<Span>, spans: &Spans, stop: &CancellationToken) {
        let count = batch.len() as u64;
        let body = request(&self.service, batch.drain(..)).encode_to_vec();
        let body = Bytes::from(body);
        let mut tries = 1;
        let refused = loop {
            match self.post(body.clone()).await {
                Ok(()) => return self.tell(spans),
                Err(refused) if refused.is_final || tries == TRIES => break refused,
                Err(refused) => self.complain(&refused),
            }
            tries += 1;
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                // One more try, at once.
                () = stop.cancelled() => tries = TRIES,
            }
        };
        self.complain(&refused);
        spans.lost.fetch_add(count, Relaxed);
    }

    /// Tells that the collector takes spans again, and, now and then, how many were lost.
    fn tell(&mut self, spans: &Spans) {
        if std::mem::take(&mut self.is_down) {
            let lost = spans.lost.swap(0, Relaxed);
            tracing::info!("Traces are sent again; {lost} spans were lost meanwhile");
        } else if self.told.is_none_or(|told| told.elapsed() >= SILENCE) {
            let lost = spans.lost.swap(0, Relaxed);
            if lost > 0 {
                tracing::warn!(
                    "{lost} spans were lost: they ended faster than the collector takes them; a lower \
                     telemetry.trace_sampling makes fewer"
                );
                self.told = Some(Instant::now());
            }
        }
    }

    /// Tells that the collector takes nothing, once until it does again.
    fn complain(&mut self, refused: &Refused) {
        if !std::mem::replace(&mut self.is_down, true) {
            tracing::warn!(
                "Traces cannot be sent to {}: {}; runs are not affected, spans are lost until it takes them",
                self.url.host_str().unwrap_or_default(),
                refused.why
            );
        }
    }

    async fn post(&self, body: Bytes) -> Result<(), Refused> {
        let request = self.client.post(self.url.clone());
        let answered = request
            .headers(self.headers.clone())
            .body(body)
            .send()
            .await;
        // The address may hold a key.
        let response = answered.map_err(|why| Refused {
            why: root_cause(&why),
            is_final: false,
        })?;
        let status = response.status();
        if status.is_success() {
            // Read, so that the connection can be used again; what it says of single spans nobody could act on.
            let _ = tokio::time::timeout(CONNECT, rest(response)).await;
            return Ok(());
        }
        let may_help = [
            StatusCode::TOO_MANY_REQUESTS,
            StatusCode::BAD_GATEWAY,
            StatusCode::SERVICE_UNAVAILABLE,
            StatusCode::GATEWAY_TIMEOUT,
        ];
        Err(Refused {
            why: format!("it answers with status {status}"),
            is_final: !may_help.contains(&status),
        })
    }
}

/// Takes what comes until the batch is full, or nobody hands spans over any more.
async fn fill(batch: &mut Vec<Span>, spans: &mut Spans) {
    let mut bytes: usize = batch.iter().map(Span::bytes).sum();
    while batch.len() < BATCH && bytes < BATCH_BYTES {
        let Some(span) = spans.next().await else {
            return;
        };
        bytes += span.bytes();
        batch.push(span);
    }
}

/// Most bytes of an answer that are read.
const MOST_ANSWERED: usize = 64 << 10;

async fn rest(mut response: reqwest::Response) {
    let mut seen = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        seen += chunk.len();
        if seen > MOST_ANSWERED {
            return;
        }
    }
}

fn root_cause(why: &reqwest::Error) -> String {
    innermost(why).unwrap_or_else(|| match why.is_timeout() {
        true => "it did not answer in time".to_owned(),
        false => "the HTTP client gave no reason".to_owned(),
    })
}

/// `ExportTraceServiceRequest`, and below it the messages of the same names.
#[derive(Message)]
struct Request {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Message)]
struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    spans: Vec<WireSpan>,
}

#[derive(Message)]
struct Scope {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    version: String,
}

#[derive(Message)]
struct WireSpan {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(int32, tag = "6")]
    kind: i32,
    #[prost(fixed64, tag = "7")]
    start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    status: Option<Status>,
    #[prost(fixed32, tag = "16")]
    flags: u32,
}

#[derive(Message)]
struct Status {
    #[prost(int32, tag = "3")]
    code: i32,
}

#[derive(Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Message)]
struct AnyValue {
    #[prost(oneof = "Any", tags = "1, 3, 5")]
    value: Option<Any>,
}

#[derive(prost::Oneof)]
enum Any {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Whole(i64),
    #[prost(message, tag = "5")]
    List(ArrayValue),
}

#[derive(Message)]
struct ArrayValue {
    #[prost(message, repeated, tag = "1")]
    values: Vec<AnyValue>,
}

/// `SPAN_KIND_…`
const INTERNAL: i32 = 1;
const CLIENT: i32 = 3;
/// `STATUS_CODE_ERROR`; what did not fail says nothing, as the conventions want it.
const FAILED: i32 = 2;

fn request(service: &str, spans: impl Iterator<Item = Span>) -> Request {
    let version = env!("CARGO_PKG_VERSION");
    let about = [("service.name", service), ("service.version", version)];
    let about = about.map(|(key, text)| attribute(key, Value::Text(text.to_owned())));
    Request {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: about.into(),
            }),
            scope_spans: vec![ScopeSpans {
                scope: Some(Scope {
                    name: "axed".to_owned(),
                    version: version.to_owned(),
                }),
                spans: spans.map(WireSpan::from).collect(),
            }],
        }],
    }
}

impl From<Span> for WireSpan {
    fn from(span: Span) -> Self {
        let nanoseconds =
            |at: jiff::Timestamp| u64::try_from(at.as_nanosecond()).unwrap_or_default();
        let attributes = span.attributes.into_iter();
        Self {
            trace_id: span.place.trace.0.to_vec(),
            span_id: span.place.span.0.to_vec(),
            parent_span_id: span.parent.map(|id| id.0.to_vec()).unwrap_or_default(),
            name: span.name,
            kind: match span.kind {
                Kind::Internal => INTERNAL,
                Kind::Client => CLIENT,
            },
            start_time_unix_nano: nanoseconds(span.began),
            end_time_unix_nano: nanoseconds(span.ended),
            attributes: attributes
                .map(|(key, value)| attribute(key, value))
                .collect(),
            status: span.failed.then_some(Status { code: FAILED }),
            flags: u32::from(span.place.sampled),
        }
    }
}

fn attribute(key: &str, value: Value) -> KeyValue {
    let any = |any| AnyValue { value: Some(any) };
    let value = match value {
        Value::Text(text) => Any::Text(text),
        Value::Whole(number) => Any::Whole(i64::try_from(number).unwrap_or(i64::MAX)),
        Value::Texts(texts) => Any::List(ArrayValue {
            values: texts.into_iter().map(|text| any(Any::Text(text))).collect(),
        }),
    };
    KeyValue {
        key: key.to_owned(),
        value: Some(any(value)),
    }
}
