//! A trace collector: a real HTTP server that keeps the spans it gets.

use crate::support::within_timeout;
use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode as State;
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A span as the collector read it.
#[derive(Clone, Debug)]
pub struct Span {
    pub trace: String,
    pub id: String,
    pub parent: String,
    pub name: String,
    pub kind: SpanKind,
    pub failed: bool,
    pub from: u64,
    pub to: u64,
    pub says: BTreeMap<String, Value>,
}

impl Span {
    /// The value of an attribute; null if it is missing.
    pub fn of(&self, key: &str) -> &Value {
        self.says.get(key).unwrap_or(&Value::Null)
    }
}

/// A collector: an HTTP server that takes OTLP and keeps it.
pub struct Collector {
    pub url: String,
    pub reported: Arc<watch::Sender<Reported>>,
    pub _serving: JoinSet<()>,
}

#[derive(Clone, Debug, Default)]
pub struct Reported {
    pub spans: Vec<Span>,
    pub headers: Vec<HeaderMap>,
    pub services: Vec<String>,
    /// What the daemon says of itself.
    pub resources: Vec<BTreeMap<String, Value>>,
    /// Requests that are still to be refused.
    pub refusals: usize,
    pub refused: usize,
}

impl Collector {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let reported: Arc<watch::Sender<Reported>> = Arc::default();
        let keeping = Arc::clone(&reported);
        let take = async move |headers: HeaderMap, body: Bytes| take(&keeping, headers, &body);
        let router = Router::new().route("/v1/traces", post(take));
        let mut serving = JoinSet::new();
        serving.spawn(async { axum::serve(listener, router).await.expect("serve") });
        Self {
            url,
            reported,
            _serving: serving,
        }
    }

    /// The key of the configuration that names it.
    pub fn config(&self) -> String {
        format!("[telemetry]\notlp_endpoint = \"{}\"", self.url)
    }

    /// What it has received, once that matches.
    pub async fn until(&self, what: &str, wish: impl FnMut(&Reported) -> bool) -> Reported {
        let mut reported = self.reported.subscribe();
        let reported = within_timeout(what, reported.wait_for(wish)).await;
        reported.expect("the collector is there").clone()
    }

    /// All spans, once there are that many.
    pub async fn spans(&self, count: usize) -> Vec<Span> {
        let what = format!("{count} spans");
        let reported = self
            .until(&what, |reported| reported.spans.len() >= count)
            .await;
        assert_eq!(reported.spans.len(), count, "{:#?}", reported.spans);
        reported.spans
    }
}

fn take(
    reported: &watch::Sender<Reported>,
    headers: HeaderMap,
    body: &[u8],
) -> (StatusCode, Vec<u8>) {
    let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
    let mut is_refused = false;
    reported.send_modify(|reported| {
        if reported.refusals > 0 {
            reported.refusals -= 1;
            reported.refused += 1;
            is_refused = true;
            return;
        }
        reported.headers.push(headers);
        for of_resource in request.resource_spans {
            let resource = of_resource.resource.expect("a resource");
            let about = read(resource.attributes);
            let name = about["service.name"].as_str().expect("a name");
            reported.services.push(name.to_owned());
            reported.resources.push(about.clone());
            for of_scope in of_resource.scope_spans {
                reported
                    .spans
                    .extend(of_scope.spans.into_iter().map(|span| {
                        let state = span.status.as_ref().map(|status| status.code());
                        Span {
                            kind: span.kind(),
                            failed: state == Some(State::Error),
                            trace: hex(&span.trace_id),
                            id: hex(&span.span_id),
                            parent: hex(&span.parent_span_id),
                            name: span.name,
                            from: span.start_time_unix_nano,
                            to: span.end_time_unix_nano,
                            says: read(span.attributes),
                        }
                    }));
            }
        }
    });
    match is_refused {
        true => (StatusCode::SERVICE_UNAVAILABLE, Vec::new()),
        false => (StatusCode::OK, Vec::new()),
    }
}

pub fn read(
    attributes: Vec<opentelemetry_proto::tonic::common::v1::KeyValue>,
) -> BTreeMap<String, Value> {
    let value = |any: Option<Any>| match any {
        Some(Any::StringValue(text)) => json!(text),
        Some(Any::IntValue(number)) => json!(number),
        Some(Any::DoubleValue(number)) => json!(number),
        Some(Any::ArrayValue(list)) => {
            let text = |item: opentelemetry_proto::tonic::common::v1::AnyValue| match item.value {
                Some(Any::StringValue(text)) => text,
                other => panic!("no text: {other:?}"),
            };
            json!(list.values.into_iter().map(text).collect::<Vec<_>>())
        }
        other => panic!("an attribute that nobody writes: {other:?}"),
    };
    let pair = |pair: opentelemetry_proto::tonic::common::v1::KeyValue| {
        (pair.key, value(pair.value.and_then(|any| any.value)))
    };
    attributes.into_iter().map(pair).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
