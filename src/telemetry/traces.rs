//! Spans of traces, with the attributes of OpenTelemetry's conventions for generative AI, and the bounded queue of spans to
//! export.
//!
//! We do not use OpenTelemetry's SDK. It reads the environment itself, exports on a thread of its own, and does not let us
//! choose a trace's id, with which a trace continues after a restart. A span is a plain value that is made when it ends, so an
//! active run keeps only its trace context.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::config::Otlp;
use crate::domain::trace::{SpanId, TraceContext};

/// Attributes, <https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/>, and a few of our own.
pub mod key {
    pub const OPERATION: &str = "gen_ai.operation.name";
    pub const PROVIDER: &str = "gen_ai.provider.name";
    pub const AGENT: &str = "gen_ai.agent.name";
    pub const CONVERSATION: &str = "gen_ai.conversation.id";
    pub const REQUEST_MODEL: &str = "gen_ai.request.model";
    pub const TEMPERATURE: &str = "gen_ai.request.temperature";
    pub const TOP_P: &str = "gen_ai.request.top_p";
    pub const TOP_K: &str = "gen_ai.request.top_k";
    pub const SEED: &str = "gen_ai.request.seed";
    pub const FREQUENCY_PENALTY: &str = "gen_ai.request.frequency_penalty";
    pub const PRESENCE_PENALTY: &str = "gen_ai.request.presence_penalty";
    pub const MAX_TOKENS: &str = "gen_ai.request.max_tokens";
    pub const STOP_SEQUENCES: &str = "gen_ai.request.stop_sequences";
    pub const OUTPUT_TYPE: &str = "gen_ai.output.type";
    pub const RESPONSE_MODEL: &str = "gen_ai.response.model";
    pub const FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
    pub const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
    pub const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
    pub const CACHE_READ_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
    pub const CACHE_WRITE_TOKENS: &str = "gen_ai.usage.cache_creation.input_tokens";
    pub const REASONING_TOKENS: &str = "gen_ai.usage.reasoning.output_tokens";
    pub const TOOL: &str = "gen_ai.tool.name";
    pub const TOOL_TYPE: &str = "gen_ai.tool.type";
    pub const TOOL_CALL: &str = "gen_ai.tool.call.id";
    pub const TOOL_ARGUMENTS: &str = "gen_ai.tool.call.arguments";
    pub const TOOL_RESULT: &str = "gen_ai.tool.call.result";
    pub const SYSTEM: &str = "gen_ai.system_instructions";
    pub const INPUT: &str = "gen_ai.input.messages";
    pub const OUTPUT: &str = "gen_ai.output.messages";
    pub const ERROR: &str = "error.type";
    pub const RUN: &str = "axed.run.id";
    pub const ROOT: &str = "axed.run.root_id";
    pub const DEPTH: &str = "axed.run.depth";
    pub const ATTEMPT: &str = "axed.run.attempt";
    pub const TURN: &str = "axed.turn";
}

/// Largest number of queued spans. Further ones are dropped and counted.
const MAX_QUEUED_SPANS: usize = 2048;
/// Largest number of their bytes: with content a span may have a hundred thousand.
const MAX_QUEUED_BYTES: usize = 32 << 20;
/// Longest name and attribute in characters, except for content.
const MAX_TEXT_CHARS: usize = 200;

/// Queues spans that have ended. Never blocks.
#[derive(Clone, Debug)]
pub struct SpanSender {
    queue: mpsc::Sender<Span>,
    queued_bytes: Arc<AtomicUsize>,
    dropped: Arc<AtomicU64>,
    sampling_ratio: f64,
    records_content: bool,
}

/// Receives the spans to export.
#[derive(Debug)]
pub struct SpanReceiver {
    queue: mpsc::Receiver<Span>,
    /// Bytes of the queued spans.
    queued_bytes: Arc<AtomicUsize>,
    /// Spans that were dropped because the queue was full.
    pub dropped: Arc<AtomicU64>,
}

impl SpanReceiver {
    /// The next span, in the order in which they ended; `None` if the queue is empty and closed.
    pub async fn recv(&mut self) -> Option<Span> {
        let span = self.queue.recv().await?;
        self.queued_bytes.fetch_sub(span.bytes(), Relaxed);
        Some(span)
    }

    /// Accepts no more spans; queued ones can still be received.
    pub fn close(&mut self) {
        self.queue.close();
    }
}

impl SpanSender {
    pub fn new(settings: &Otlp) -> (Self, SpanReceiver) {
        let (sender, queue) = mpsc::channel(MAX_QUEUED_SPANS);
        let (queued_bytes, dropped) = (Arc::<AtomicUsize>::default(), Arc::<AtomicU64>::default());
        let span_sender = Self {
            queue: sender,
            queued_bytes: Arc::clone(&queued_bytes),
            dropped: Arc::clone(&dropped),
            sampling_ratio: settings.sampling,
            records_content: settings.content,
        };
        (
            span_sender,
            SpanReceiver {
                queue,
                queued_bytes,
                dropped,
            },
        )
    }

    /// The share of the traces started here that is recorded, 0 to 1.
    pub fn sampling_ratio(&self) -> f64 {
        self.sampling_ratio
    }

    /// Whether spans contain prompts, replies, tool arguments and tool results.
    pub fn records_content(&self) -> bool {
        self.records_content
    }

    pub fn send(&self, span: Span) {
        let bytes = span.bytes();
        let before = self.queued_bytes.fetch_add(bytes, Relaxed);
        if before + bytes > MAX_QUEUED_BYTES || self.queue.try_send(span).is_err() {
            self.queued_bytes.fetch_sub(bytes, Relaxed);
            self.dropped.fetch_add(1, Relaxed);
        }
    }
}

/// A span that has ended.
#[derive(Debug)]
pub struct Span {
    pub context: TraceContext,
    pub parent: Option<SpanId>,
    /// The operation and its target.
    pub name: String,
    pub kind: SpanKind,
    pub started_at: Timestamp,
    pub ended_at: Timestamp,
    /// Unknown attributes are left out.
    pub attributes: Vec<(&'static str, AttributeValue)>,
    /// Whether the operation failed; the attribute [`key::ERROR`] has the class of error.
    pub is_error: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// Work within this process.
    Internal,
    /// A request to another service.
    Client,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttributeValue {
    Text(String),
    TextList(Vec<String>),
    Int(u64),
    Number(f64),
}

impl Span {
    /// A span that ends now. `operation` is a name from the conventions.
    pub fn new(
        operation: &str,
        target: &str,
        kind: SpanKind,
        context: TraceContext,
        parent: Option<SpanId>,
        started_at: Timestamp,
    ) -> Self {
        let span = Self {
            context,
            parent,
            name: format!("{operation} {}", truncate(target)),
            kind,
            started_at,
            ended_at: Timestamp::now().max(started_at),
            attributes: Vec::with_capacity(16),
            is_error: false,
        };
        span.with_text(key::OPERATION, operation)
    }

    /// About how many bytes the span takes.
    pub fn bytes(&self) -> usize {
        let value_bytes = |value: &AttributeValue| match value {
            AttributeValue::Text(text) => text.len(),
            AttributeValue::TextList(texts) => texts.iter().map(String::len).sum(),
            AttributeValue::Int(_) | AttributeValue::Number(_) => 0,
        };
        let attribute_bytes = self.attributes.iter().map(|(_, value)| value_bytes(value));
        size_of::<Self>() + self.name.len() + attribute_bytes.sum::<usize>()
    }

    /// Adds a text, truncated if it is too long.
    pub fn with_text(self, key: &'static str, text: &str) -> Self {
        self.with_attribute(key, AttributeValue::Text(truncate(text)))
    }

    pub fn with_int(self, key: &'static str, number: u64) -> Self {
        self.with_attribute(key, AttributeValue::Int(number))
    }

    pub fn with_attribute(mut self, key: &'static str, value: AttributeValue) -> Self {
        self.attributes.push((key, value));
        self
    }

    /// Marks the span as failed with this class of error.
    pub fn with_error(mut self, error_type: &str) -> Self {
        self.is_error = true;
        self.with_text(key::ERROR, error_type)
    }
}

fn truncate(text: &str) -> String {
    crate::domain::message::shorten(text, MAX_TEXT_CHARS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::Ordering::Relaxed;

    use jiff::Timestamp;

    use super::{AttributeValue, MAX_QUEUED_BYTES, Span, SpanKind, SpanSender, key};
    use crate::config::Otlp;
    use crate::domain::trace::{SpanId, TraceContext, TraceId};

    fn span(content: usize) -> Span {
        let context = TraceContext {
            trace: TraceId([1; 16]),
            span: SpanId([1; 8]),
            sampled: true,
        };
        let span = Span::new(
            "chat",
            "m",
            SpanKind::Client,
            context,
            None,
            Timestamp::now(),
        );
        span.with_attribute(key::INPUT, AttributeValue::Text("x".repeat(content)))
    }

    #[tokio::test]
    async fn the_queue_is_bounded_in_bytes() {
        let (traces, mut spans) = SpanSender::new(&Otlp {
            endpoint: String::new(),
            headers: BTreeMap::new(),
            resource: BTreeMap::new(),
            sampling: 1.0,
            content: true,
        });
        for _ in 0..20 {
            traces.send(span(MAX_QUEUED_BYTES / 10));
        }
        assert_eq!(spans.dropped.load(Relaxed), 11);
        spans.recv().await.expect("a span");
        traces.send(span(MAX_QUEUED_BYTES / 10));
        assert_eq!(spans.dropped.load(Relaxed), 11, "the queue has space again");
        spans.close();
        let mut remaining = 0;
        while spans.recv().await.is_some() {
            remaining += 1;
        }
        assert_eq!((remaining, spans.queued_bytes.load(Relaxed)), (9, 0));
    }
}
