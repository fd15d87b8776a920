//! Exports spans to a collector: OTLP over HTTP in protobuf (<https://opentelemetry.io/docs/specs/otlp/#otlphttp>), in
//! batches, from one task.
//!
//! The messages are the parts of OpenTelemetry's trace/v1/trace.proto that we write; the tests read them with the official
//! crate `opentelemetry-proto`. That crate is not used here because it requires the whole SDK.

use std::collections::BTreeMap;
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
use crate::ssrf::{is_loopback, root_cause};
use crate::standing_task;
use crate::telemetry::traces::{AttributeValue, Span, SpanKind, SpanReceiver};

/// Largest number of spans and bytes of one request: collectors reject requests above some MiB.
const MAX_BATCH_SPANS: usize = 512;
const MAX_BATCH_BYTES: usize = 2 << 20;
/// How long spans wait for others of the same request.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Limits for a request and for its connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The wait between attempts to send a batch, and their number. The queue fills in the meantime.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
const MAX_ATTEMPTS: u32 = 3;
/// The shortest time between two warnings about dropped spans.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

pub struct OtlpExporter {
    client: Client,
    url: Url,
    headers: HeaderMap,
    /// The attributes of the daemon.
    resource: BTreeMap<String, String>,
    /// Whether the collector rejects requests now: logged once at the start and once at the end.
    is_down: bool,
    /// When dropped spans were last logged.
    warned_at: Option<Instant>,
}

struct ExportError {
    reason: String,
    is_permanent: bool,
}

impl OtlpExporter {
    /// The error says what is wrong with the configuration.
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
        let content_type = HeaderValue::from_static("application/x-protobuf");
        headers.insert(CONTENT_TYPE, content_type);
        let user_agent = HeaderValue::from_static(concat!("axed/", env!("CARGO_PKG_VERSION")));
        headers.insert(USER_AGENT, user_agent);
        let url = Url::parse(&settings.endpoint)
            .map_err(|why| format!("telemetry.otlp_endpoint is not a URL ({why})"))?;
        let mut builder = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .http1_only();
        if url.scheme() == "http" {
            // Plain HTTP needs no system certificates, and reading them is slow.
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
            resource: settings.resource.clone(),
            is_down: false,
            warned_at: None,
        })
    }

    /// Sends spans until `stop`, then the rest of the queue. The caller bounds the time for the rest.
    pub async fn run(self, spans: SpanReceiver, stop: CancellationToken) {
        // Never waited for: it lends both to one start after the other.
        let parts = &tokio::sync::Mutex::new((self, spans));
        let start = |stop| async move {
            let mut parts = parts.lock().await;
            let (exporter, spans) = &mut *parts;
            exporter.export(spans, stop).await;
        };
        standing_task::run("Sending traces", &stop, start).await;
    }

    async fn export(&mut self, spans: &mut SpanReceiver, stop: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                first = spans.recv() => match first {
                    Some(span) => batch.push(span),
                    // All senders were dropped.
                    None => return,
                },
                () = stop.cancelled() => break,
            }
            tokio::select! {
                () = fill(&mut batch, spans) => {}
                () = tokio::time::sleep(BATCH_INTERVAL) => {}
                () = stop.cancelled() => {}
            }
            self.send(&mut batch, spans, &stop).await;
        }
        spans.close();
        loop {
            fill(&mut batch, spans).await;
            if batch.is_empty() {
                return;
            }
            self.send(&mut batch, spans, &stop).await;
        }
    }

    /// Sends a batch, with retries, and empties it.
    async fn send(
        &mut self,
        batch: &mut Vec<Span>,
        spans: &SpanReceiver,
        stop: &CancellationToken,
    ) {
        let count = batch.len() as u64;
        let body = export_request(&self.resource, batch.drain(..)).encode_to_vec();
        let body = Bytes::from(body);
        let mut attempt = 1;
        let export_error = loop {
            match self.post(body.clone()).await {
                Ok(()) => return self.log_dropped_spans(spans),
                Err(export_error) if export_error.is_permanent || attempt == MAX_ATTEMPTS => {
                    break export_error;
                }
                Err(export_error) => self.log_outage(&export_error),
            }
            attempt += 1;
            tokio::select! {
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
                // One last attempt, at once.
                () = stop.cancelled() => attempt = MAX_ATTEMPTS,
            }
        };
        self.log_outage(&export_error);
        spans.dropped.fetch_add(count, Relaxed);
    }

    /// Logs that the collector accepts spans again and, at intervals, how many were dropped.
    fn log_dropped_spans(&mut self, spans: &SpanReceiver) {
        if std::mem::take(&mut self.is_down) {
            let dropped = spans.dropped.swap(0, Relaxed);
            tracing::info!("Traces are sent again; {dropped} spans were lost meanwhile");
        } else if self
            .warned_at
            .is_none_or(|warned_at| warned_at.elapsed() >= WARN_INTERVAL)
        {
            let dropped = spans.dropped.swap(0, Relaxed);
            if dropped > 0 {
                tracing::warn!(
                    "{dropped} spans were lost: they ended faster than the collector takes them; a lower \
                     telemetry.trace_sampling makes fewer"
                );
                self.warned_at = Some(Instant::now());
            }
        }
    }

    /// Logs that the collector rejects spans, once until it accepts them again.
    fn log_outage(&mut self, error: &ExportError) {
        if !std::mem::replace(&mut self.is_down, true) {
            tracing::warn!(
                "Traces cannot be sent to {}: {}; runs are not affected, spans are lost until it takes them",
                self.url.host_str().unwrap_or_default(),
                error.reason
            );
        }
    }

    async fn post(&self, body: Bytes) -> Result<(), ExportError> {
        let request = self.client.post(self.url.clone());
        let result = request
            .headers(self.headers.clone())
            .body(body)
            .send()
            .await;
        // The error must not contain the URL, which may have a key.
        let response = result.map_err(|why| ExportError {
            reason: describe_error(&why),
            is_permanent: false,
        })?;
        let status = response.status();
        if status.is_success() {
            // Reads the body so that the connection can be reused. Errors for single spans are ignored.
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, drain_body(response)).await;
            return Ok(());
        }
        let retryable = [
            StatusCode::TOO_MANY_REQUESTS,
            StatusCode::BAD_GATEWAY,
            StatusCode::SERVICE_UNAVAILABLE,
            StatusCode::GATEWAY_TIMEOUT,
        ];
        Err(ExportError {
            reason: format!("it answers with status {status}"),
            is_permanent: !retryable.contains(&status),
        })
    }
}

/// Receives spans until the batch is full or the queue is closed.
async fn fill(batch: &mut Vec<Span>, spans: &mut SpanReceiver) {
    let mut bytes: usize = batch.iter().map(Span::bytes).sum();
    while batch.len() < MAX_BATCH_SPANS && bytes < MAX_BATCH_BYTES {
        let Some(span) = spans.recv().await else {
            return;
        };
        bytes += span.bytes();
        batch.push(span);
    }
}

/// Largest number of bytes of a response that are read.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

async fn drain_body(mut response: reqwest::Response) {
    let mut bytes = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        bytes += chunk.len();
        if bytes > MAX_RESPONSE_BYTES {
            return;
        }
    }
}

fn describe_error(error: &reqwest::Error) -> String {
    root_cause(error).unwrap_or_else(|| match error.is_timeout() {
        true => "it did not answer in time".to_owned(),
        false => "the HTTP client gave no reason".to_owned(),
    })
}

/// `ExportTraceServiceRequest`, and below it the messages of the same names.
#[derive(Message)]
struct ExportRequest {
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
    #[prost(oneof = "Any", tags = "1, 3, 4, 5")]
    value: Option<Any>,
}

#[derive(prost::Oneof)]
enum Any {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Int(i64),
    #[prost(double, tag = "4")]
    Number(f64),
    #[prost(message, tag = "5")]
    Array(ArrayValue),
}

#[derive(Message)]
struct ArrayValue {
    #[prost(message, repeated, tag = "1")]
    values: Vec<AnyValue>,
}

/// `SPAN_KIND_…`
const SPAN_KIND_INTERNAL: i32 = 1;
const SPAN_KIND_CLIENT: i32 = 3;
/// `STATUS_CODE_ERROR`. Spans that did not fail have no status, as the conventions require.
const STATUS_CODE_ERROR: i32 = 2;

fn export_request(
    resource: &BTreeMap<String, String>,
    spans: impl Iterator<Item = Span>,
) -> ExportRequest {
    let version = env!("CARGO_PKG_VERSION");
    let resource_attributes = resource.iter();
    let resource_attributes =
        resource_attributes.map(|(key, text)| attribute(key, AttributeValue::Text(text.clone())));
    ExportRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: resource_attributes.collect(),
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
            trace_id: span.context.trace.0.to_vec(),
            span_id: span.context.span.0.to_vec(),
            parent_span_id: span.parent.map(|id| id.0.to_vec()).unwrap_or_default(),
            name: span.name,
            kind: match span.kind {
                SpanKind::Internal => SPAN_KIND_INTERNAL,
                SpanKind::Client => SPAN_KIND_CLIENT,
            },
            start_time_unix_nano: nanoseconds(span.started_at),
            end_time_unix_nano: nanoseconds(span.ended_at),
            attributes: attributes
                .map(|(key, value)| attribute(key, value))
                .collect(),
            status: span.is_error.then_some(Status {
                code: STATUS_CODE_ERROR,
            }),
            flags: u32::from(span.context.sampled),
        }
    }
}

fn attribute(key: &str, value: AttributeValue) -> KeyValue {
    let wrap = |any| AnyValue { value: Some(any) };
    let value = match value {
        AttributeValue::Text(text) => Any::Text(text),
        AttributeValue::Int(number) => Any::Int(i64::try_from(number).unwrap_or(i64::MAX)),
        AttributeValue::Number(number) => Any::Number(number),
        AttributeValue::TextList(texts) => Any::Array(ArrayValue {
            values: texts
                .into_iter()
                .map(|text| wrap(Any::Text(text)))
                .collect(),
        }),
    };
    KeyValue {
        key: key.to_owned(),
        value: Some(wrap(value)),
    }
}
