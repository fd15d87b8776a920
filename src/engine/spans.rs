//! What a tree, a run, a request to a model and a tool call are in a trace. Knows no exporter.
//!
//! A trace is named after its root run, and a span after its run or call, so that a trace goes on where another process
//! goes on with the runs: nothing of it has to be kept. Only what a caller's `traceparent` said is forgotten then.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use crate::domain::agent::ModelRef;
use crate::domain::message::{AssistantMessage, Message, ToolCall, ToolResult, beginning};
use crate::domain::run::{Run, RunId, Status};
use crate::domain::trace::{SpanId, TraceContext, TraceId};
use crate::domain::usage::TokenUsage;
use crate::engine::live::LiveRun;
use crate::engine::turn::Question;
use crate::engine::turn_error::TurnError;
use crate::providers::{ProviderError, Reply};
use crate::telemetry::traces::{Kind, Span, Traces, Value, key};

/// Most bytes of texts in one attribute that holds content.
const MOST_CONTENT: usize = 16 << 10;

/// What the runs of one tree share of their trace.
pub enum Trace {
    /// They leave spans in it.
    Kept {
        /// Where those go.
        to: Traces,
        /// The trace.
        id: TraceId,
        /// The caller's span, which the root's is below.
        caller: Option<SpanId>,
    },
    /// They leave nothing in it; the services that they ask are told where the caller stands.
    PassedOn(TraceContext),
}

impl Trace {
    /// The trace of a tree: the caller's, as it wishes, or one of its own, if it is among those that are kept.
    pub fn of(
        traces: Option<&Traces>,
        caller: Option<&TraceContext>,
        root: RunId,
    ) -> Option<Box<Self>> {
        let kept = |to: &Traces, id, caller| Self::Kept {
            to: to.clone(),
            id,
            caller,
        };
        let trace = match (traces, caller) {
            (Some(to), Some(caller)) if caller.sampled => kept(to, caller.trace, Some(caller.span)),
            (_, Some(caller)) => Self::PassedOn(*caller),
            (Some(to), None) if is_among(root, to.sampling()) => {
                kept(to, TraceId(*root.0.as_bytes()), None)
            }
            (_, None) => return None,
        };
        Some(Box::new(trace))
    }
}

/// Whether a root's own trace is kept: always the same for the same run.
fn is_among(root: RunId, share: f64) -> bool {
    let [.., a, b, c, d] = *root.0.as_bytes();
    // These bytes of an id are random; those before them may count up.
    let place = f64::from(u32::from_be_bytes([a, b, c, d])) / (f64::from(u32::MAX) + 1.0);
    place < share
}

/// A request to a model that is under way.
pub struct Chat {
    /// Where it stands: what its service is told.
    pub place: TraceContext,
    began: Timestamp,
}

impl Chat {
    /// One that begins now; none where nobody traces.
    pub fn begin(live: &LiveRun) -> Option<Box<Self>> {
        let place = match live.tree.trace.as_deref()? {
            Trace::Kept { id, .. } => {
                // The hasher's keys are random; no span is all zeros.
                let random = RandomState::new().hash_one(Instant::now()) | 1;
                place(*id, SpanId(random.to_be_bytes()))
            }
            Trace::PassedOn(caller) => *caller,
        };
        let began = Timestamp::now();
        Some(Box::new(Self { place, began }))
    }

    /// Its span, `chat {model}`.
    pub fn end(
        &self,
        live: &LiveRun,
        question: &Question<'_>,
        model: &ModelRef,
        answered: &Result<Result<Reply, ProviderError>, TurnError>,
    ) {
        let Some(Trace::Kept { to, .. }) = live.tree.trace.as_deref() else {
            return;
        };
        let run = live.scope.run;
        let parent = Some(run_span(run));
        let span = Span::of(
            "chat",
            &model.model,
            Kind::Client,
            self.place,
            parent,
            self.began,
        );
        let mut span = asked(of_run(span, live), model).number(key::TURN, question.turn.into());
        if to.content() {
            let system = json!([{"type": "text", "content": cut(question.system)}]);
            span = span.with(key::SYSTEM, Value::Text(system.to_string()));
            span = span.with(key::INPUT, Value::Text(said(question.messages)));
        }
        to.send(match answered {
            Ok(Ok(reply)) => {
                let words = to.content().then(|| replied(&reply.message));
                let span = answered_by(span, reply.model.as_deref(), reply.usage.as_ref());
                let span = match &reply.stop_reason {
                    Some(why) => {
                        span.with(key::FINISH_REASONS, Value::Texts(vec![cut_to(why, 64)]))
                    }
                    None => span,
                };
                match words {
                    Some(words) => span.with(key::OUTPUT, Value::Text(json!([words]).to_string())),
                    None => span,
                }
            }
            Ok(Err(error)) => span.failed(error.category.as_str()),
            Err(TurnError::Overdue) => span.failed("timeout"),
            Err(_) => span.failed("cancelled"),
        });
    }
}

/// The span of a tool call that ended now, `execute_tool {tool}`.
pub fn tool_ended(live: &LiveRun, turn: u32, call: &ToolCall, result: &ToolResult, took: Duration) {
    let Some(Trace::Kept { to, id, .. }) = live.tree.trace.as_deref() else {
        return;
    };
    let run = live.scope.run;
    let place = place(*id, call_span(run, &call.id));
    let took = SignedDuration::try_from(took).unwrap_or_default();
    let began = Timestamp::now().saturating_sub(took).unwrap_or_default();
    let parent = Some(run_span(run));
    let span = Span::of(
        "execute_tool",
        &call.name,
        Kind::Internal,
        place,
        parent,
        began,
    );
    let mut span = of_run(span, live)
        .text(key::TOOL, &call.name)
        .text(key::TOOL_TYPE, "function")
        .text(key::TOOL_CALL, &call.id)
        .number(key::TURN, turn.into());
    if to.content() {
        span = span
            .with(key::TOOL_ARGUMENTS, Value::Text(cut(call.arguments.get())))
            .with(key::TOOL_RESULT, Value::Text(cut(&result.content)));
    }
    to.send(match result.is_error {
        true => span.failed("tool_error"),
        false => span,
    });
}

/// The span of a run whose end was recorded, `invoke_agent {agent}`: from its start, which may have been in another
/// process.
pub fn run_ended(live: &LiveRun, run: &Run) {
    let (Some(Trace::Kept { to, id, caller }), Some(began)) =
        (live.tree.trace.as_deref(), run.started_at)
    else {
        return;
    };
    let parent = match (&live.parent, &run.tool_call_id) {
        (Some(parent), Some(call)) => Some(call_span(parent.scope.run, call)),
        (Some(parent), None) => Some(run_span(parent.scope.run)),
        (None, _) => *caller,
    };
    let place = place(*id, run_span(run.id));
    let span = Span::of(
        "invoke_agent",
        &run.agent,
        Kind::Internal,
        place,
        parent,
        began,
    );
    let mut span = answered_by(
        asked(of_run(span, live), &live.agent.model),
        Some(&run.model),
        Some(&run.usage.tokens),
    )
    .number(key::ATTEMPT, run.attempt.into());
    if to.content() {
        let words = |role: &str, text: &str| json!([{"role": role, "parts": [{"type": "text", "content": cut(text)}]}]);
        span = span.with(
            key::INPUT,
            Value::Text(words("user", &run.input.plain()).to_string()),
        );
        if let Some(text) = &run.content {
            let words = words("assistant", text).to_string();
            span = span.with(key::OUTPUT, Value::Text(words));
        }
    }
    to.send(match (&run.status, &run.error) {
        (Status::Cancelled, _) => span.failed("cancelled"),
        (_, Some(failure)) => {
            let code = serde_json::to_value(failure.code).unwrap_or_default();
            span.failed(code.as_str().unwrap_or(&failure.category))
        }
        (_, None) => span,
    });
}

fn of_run(span: Span, live: &LiveRun) -> Span {
    let scope = &live.scope;
    let run = scope.run.to_string();
    span.text(key::AGENT, &live.agent.name)
        // What a run and its model say to each other is a conversation of its own.
        .text(key::CONVERSATION, &run)
        .text(key::RUN, &run)
        .text(key::ROOT, &scope.root.to_string())
        .number(key::DEPTH, scope.depth.0.into())
}

fn asked(span: Span, model: &ModelRef) -> Span {
    span.text(key::PROVIDER, &model.provider)
        .text(key::REQUEST_MODEL, &model.model)
}

fn answered_by(span: Span, model: Option<&str>, tokens: Option<&TokenUsage>) -> Span {
    let mut span = match model {
        Some(model) => span.text(key::RESPONSE_MODEL, model),
        None => span,
    };
    if let Some(tokens) = tokens {
        span = span
            .number(key::INPUT_TOKENS, tokens.input)
            .number(key::OUTPUT_TOKENS, tokens.output);
        for (key, count) in [
            (key::CACHE_READ_TOKENS, tokens.cache_read),
            (key::CACHE_WRITE_TOKENS, tokens.cache_write),
        ] {
            if count > 0 {
                span = span.number(key, count);
            }
        }
    }
    span
}

fn place(trace: TraceId, span: SpanId) -> TraceContext {
    TraceContext {
        trace,
        span,
        sampled: true,
    }
}

/// A run's span: the half of its id that tells it from others.
fn run_span(run: RunId) -> SpanId {
    let [_, _, _, _, _, _, _, _, id @ ..] = *run.0.as_bytes();
    SpanId(id)
}

/// The span of one of a run's calls.
fn call_span(run: RunId, call: &str) -> SpanId {
    let hash = Sha256::new()
        .chain_update(run.0.as_bytes())
        .chain_update(call);
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(hash.finalize());
    SpanId([a, b, c, d, e, f, g, h | 1])
}

/// The newest messages that fit, in the conventions' JSON.
fn said(messages: &[Message]) -> String {
    let mut room = MOST_CONTENT;
    let mut told = VecDeque::new();
    for message in messages.iter().rev() {
        let message = match message {
            Message::User { content } => {
                json!({"role": "user", "parts": [{"type": "text", "content": take(&content.plain(), &mut room)}]})
            }
            Message::Assistant(said) => spoken(said, &mut room),
            Message::Tool { tool_results } => {
                let part = |result: &ToolResult| json!({"type": "tool_call_response", "id": result.call_id, "response": take(&result.content, &mut room)});
                let parts: Vec<Json> = tool_results.iter().map(part).collect();
                json!({"role": "tool", "parts": parts})
            }
        };
        told.push_front(message);
        if room == 0 {
            break;
        }
    }
    Json::Array(told.into()).to_string()
}

fn replied(said: &AssistantMessage) -> Json {
    spoken(said, &mut { MOST_CONTENT })
}

fn spoken(said: &AssistantMessage, room: &mut usize) -> Json {
    let mut parts = Vec::new();
    if !said.content.is_empty() {
        parts.push(json!({"type": "text", "content": take(&said.content, room)}));
    }
    for call in &said.tool_calls {
        let arguments = take(call.arguments.get(), room);
        // Whole ones as what they are, cut ones as text.
        let arguments: Json =
            serde_json::from_str(&arguments).unwrap_or_else(|_| Json::String(arguments));
        parts.push(
            json!({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments}),
        );
    }
    json!({"role": "assistant", "parts": parts})
}

fn cut(text: &str) -> String {
    cut_to(text, MOST_CONTENT)
}

fn take(text: &str, room: &mut usize) -> String {
    let taken = cut_to(text, *room);
    *room = room.saturating_sub(text.len());
    taken
}

/// At most so many bytes of the text, and dots where it is longer.
fn cut_to(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    format!("{}...", beginning(text, most))
}

#[cfg(test)]
mod tests {
    use super::{MOST_CONTENT, call_span, is_among, run_span, said};
    use crate::domain::message::Message;
    use crate::domain::run::RunId;

    #[test]
    fn spans_are_told_apart_and_a_share_is_a_share() {
        let (one, other) = (RunId::new(), RunId::new());
        assert_ne!(run_span(one), run_span(other));
        assert_ne!(call_span(one, "a"), call_span(one, "b"));
        assert_ne!(call_span(one, "a"), call_span(other, "a"));
        assert_eq!(call_span(one, "a"), call_span(one, "a"));
        assert!(is_among(one, 1.0) && !is_among(one, 0.0));
        let kept = (0..4000).filter(|_| is_among(RunId::new(), 0.25)).count();
        assert!((700..1300).contains(&kept), "{kept}");
    }

    #[test]
    fn content_is_bounded_and_the_newest_stays() {
        let user = |content: String| Message::user(content);
        let long = [user("old".to_owned()), user("é".repeat(MOST_CONTENT))];
        let told = said(&long);
        assert!(told.len() < MOST_CONTENT + 200);
        assert!(!told.contains("old") && told.contains("é..."));
        let short = said(&[user("a".to_owned()), user("b".to_owned())]);
        assert_eq!(
            short,
            r#"[{"role":"user","parts":[{"type":"text","content":"a"}]},{"role":"user","parts":[{"type":"text","content":"b"}]}]"#
        );
    }
}
