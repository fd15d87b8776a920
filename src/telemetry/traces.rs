//! Spans of traces: what one says, in the words of OpenTelemetry's conventions for generative AI, and the bounded queue
//! on which they wait to be sent. Knows neither who makes spans nor how they are sent.
//!
//! Our own, and not OpenTelemetry's SDK: that reads the environment by itself, exports from a thread of its own, and
//! lets nobody choose a trace's id, which here is what lets a trace go on over a restart. A span is a plain value that
//! is made when it ends, so a run at work carries nothing but its tree's place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::config::Otlp;
use crate::domain::trace::{SpanId, TraceContext};

/// Attributes, <https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/>, and a few of our own.
#[expect(missing_docs, reason = "the names are the conventions'")]
pub mod key {
    pub const OPERATION: &str = "gen_ai.operation.name";
    pub const PROVIDER: &str = "gen_ai.provider.name";
    pub const AGENT: &str = "gen_ai.agent.name";
    pub const CONVERSATION: &str = "gen_ai.conversation.id";
    pub const REQUEST_MODEL: &str = "gen_ai.request.model";
    pub const RESPONSE_MODEL: &str = "gen_ai.response.model";
    pub const FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
    pub const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
    pub const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
    pub const CACHE_READ_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
    pub const CACHE_WRITE_TOKENS: &str = "gen_ai.usage.cache_creation.input_tokens";
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

/// Spans that wait to be sent; further ones are lost, and counted.
const MOST_WAITING: usize = 2048;
/// And most bytes of those: with content a span may have a hundred thousand.
const MOST_BYTES: usize = 32 << 20;
/// Longest name and attribute in characters, but for content that was asked for.
const LONGEST: usize = 200;

/// Where spans go that have ended. Handing one over never waits.
#[derive(Clone, Debug)]
pub struct Traces {
    queue: mpsc::Sender<Span>,
    bytes: Arc<AtomicUsize>,
    lost: Arc<AtomicU64>,
    sampling: f64,
    content: bool,
}

/// The other end: what is to be sent.
#[derive(Debug)]
pub struct Spans {
    queue: mpsc::Receiver<Span>,
    /// Of those that wait.
    bytes: Arc<AtomicUsize>,
    /// How many found the queue full.
    pub lost: Arc<AtomicU64>,
}

impl Spans {
    /// The next span, in the order in which they ended; none once nobody hands any over and none waits.
    pub async fn next(&mut self) -> Option<Span> {
        let span = self.queue.recv().await?;
        self.bytes.fetch_sub(span.bytes(), Relaxed);
        Some(span)
    }

    /// Takes no more spans; those that wait still come.
    pub fn close(&mut self) {
        self.queue.close();
    }
}

impl Traces {
    /// A queue for the spans of one daemon.
    pub fn new(settings: &Otlp) -> (Self, Spans) {
        let (sender, queue) = mpsc::channel(MOST_WAITING);
        let (bytes, lost) = (Arc::<AtomicUsize>::default(), Arc::<AtomicU64>::default());
        let traces = Self {
            queue: sender,
            bytes: Arc::clone(&bytes),
            lost: Arc::clone(&lost),
            sampling: settings.sampling,
            content: settings.content,
        };
        (traces, Spans { queue, bytes, lost })
    }

    /// Which share of the traces that begin here is kept, 0 to 1.
    pub fn sampling(&self) -> f64 {
        self.sampling
    }

    /// Whether spans are to hold what models, tools and their users say.
    pub fn content(&self) -> bool {
        self.content
    }

    /// Hands over a span that has ended.
    pub fn send(&self, span: Span) {
        let bytes = span.bytes();
        let before = self.bytes.fetch_add(bytes, Relaxed);
        if before + bytes > MOST_BYTES || self.queue.try_send(span).is_err() {
            self.bytes.fetch_sub(bytes, Relaxed);
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

/// A span that has ended.
#[derive(Debug)]
pub struct Span {
    /// Its place.
    pub place: TraceContext,
    /// The span that it is below.
    pub parent: Option<SpanId>,
    /// What was done, and with what.
    pub name: String,
    /// What kind of span.
    pub kind: Kind,
    /// When it began.
    pub began: Timestamp,
    /// When it ended.
    pub ended: Timestamp,
    /// What else is known of it; what is unknown is left out.
    pub attributes: Vec<(&'static str, Value)>,
    /// Whether what it stands for failed; why is in the attribute [`key::ERROR`].
    pub failed: bool,
}

/// The kinds of span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Work within this process.
    Internal,
    /// A request to another service.
    Client,
}

/// What an attribute says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what they are")]
pub enum Value {
    Text(String),
    Texts(Vec<String>),
    Whole(u64),
}

impl Span {
    /// A span that began then and ends now, of `operation` (a word of the conventions) on `what`.
    pub fn of(
        operation: &str,
        what: &str,
        kind: Kind,
        place: TraceContext,
        parent: Option<SpanId>,
        began: Timestamp,
    ) -> Self {
        let span = Self {
            place,
            parent,
            name: format!("{operation} {}", cut(what)),
            kind,
            began,
            ended: Timestamp::now().max(began),
            attributes: Vec::with_capacity(12),
            failed: false,
        };
        span.text(key::OPERATION, operation)
    }

    /// About how many bytes it takes.
    pub fn bytes(&self) -> usize {
        let of = |value: &Value| match value {
            Value::Text(text) => text.len(),
            Value::Texts(texts) => texts.iter().map(String::len).sum(),
            Value::Whole(_) => 0,
        };
        let said = self.attributes.iter().map(|(_, value)| of(value));
        size_of::<Self>() + self.name.len() + said.sum::<usize>()
    }

    /// With a text, cut where it is too long.
    pub fn text(self, key: &'static str, text: &str) -> Self {
        self.with(key, Value::Text(cut(text)))
    }

    /// With a number.
    pub fn number(self, key: &'static str, number: u64) -> Self {
        self.with(key, Value::Whole(number))
    }

    /// With what it says.
    pub fn with(mut self, key: &'static str, value: Value) -> Self {
        self.attributes.push((key, value));
        self
    }

    /// With the class of error that it failed with.
    pub fn failed(mut self, class: &str) -> Self {
        self.failed = true;
        self.text(key::ERROR, class)
    }
}

fn cut(text: &str) -> String {
    crate::domain::message::shorten(text, LONGEST)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::Ordering::Relaxed;

    use jiff::Timestamp;

    use super::{Kind, MOST_BYTES, Span, Traces, Value, key};
    use crate::config::Otlp;
    use crate::domain::trace::{SpanId, TraceContext, TraceId};

    fn span(content: usize) -> Span {
        let place = TraceContext {
            trace: TraceId([1; 16]),
            span: SpanId([1; 8]),
            sampled: true,
        };
        let span = Span::of("chat", "m", Kind::Client, place, None, Timestamp::now());
        span.with(key::INPUT, Value::Text("x".repeat(content)))
    }

    #[tokio::test]
    async fn what_waits_has_a_bound_in_bytes_too() {
        let (traces, mut spans) = Traces::new(&Otlp {
            endpoint: String::new(),
            headers: BTreeMap::new(),
            service: String::new(),
            sampling: 1.0,
            content: true,
        });
        for _ in 0..20 {
            traces.send(span(MOST_BYTES / 10));
        }
        assert_eq!(spans.lost.load(Relaxed), 11);
        spans.next().await.expect("a span");
        traces.send(span(MOST_BYTES / 10));
        assert_eq!(spans.lost.load(Relaxed), 11, "there is room again");
        spans.close();
        let mut left = 0;
        while spans.next().await.is_some() {
            left += 1;
        }
        assert_eq!((left, spans.bytes.load(Relaxed)), (9, 0));
    }
}
