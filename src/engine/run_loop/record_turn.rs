//! Records what a turn sent, as differences from the run's previous request.

use std::sync::Arc;

use bytes::Bytes;

use crate::domain::request_head::RequestHead;
use crate::engine::blocking::run_blocking;
use crate::engine::context::RunContext;
use crate::engine::run_loop::exchange::Exchange;
use crate::engine::run_loop::turn_request::TurnReply;
use crate::engine::state::turn_error::TurnError;
use crate::engine::state::turn_log::{News, PreviousRequest};
use crate::providers::SentRequest;
use crate::store::request_delta::{self, RecordedText};
use crate::store::turn_record::{
    BodyDelta, SharedText, StoredRequest, TurnEntry, TurnRecord, TurnStatus,
};
use crate::store::turns::MAX_DIFFERENCES;

/// Larger bodies are encoded off the runtime's threads. A search for patterns is slower than one for texts.
const MAX_INLINE_BODY: usize = 1 << 20;
const MAX_INLINE_REDACTION: usize = 32 << 10;

/// Leaves the turn to the next write of the run, which is that of its reply or of the run's end.
pub async fn record(
    context: &RunContext,
    turn: u32,
    mut exchange: Exchange,
    result: &Result<TurnReply, TurnError>,
) {
    let Some(last) = exchange.attempts.last() else {
        return;
    };
    if let Err(TurnError::Store(_)) = result {
        return;
    }
    let reply = result.as_ref().ok().map(|it| &it.reply);
    let (provider, model) = (last.provider.clone(), last.model.clone());
    let sent = exchange.sent.take();
    let request_bytes = sent.as_ref().map(|sent| sent.body.len() as u64);
    let blobs = exchange.blobs.take();
    let attachments = blobs.iter().flat_map(request_delta::attachment_texts);
    let encoded = match sent {
        Some(sent) => Some(encode(context, turn, sent, attachments.collect()).await),
        None => None,
    };
    let record = TurnRecord {
        turn,
        provider,
        model,
        effort: exchange.effort,
        status: match result {
            Ok(_) => TurnStatus::Completed,
            Err(TurnError::Cancelled) => TurnStatus::Cancelled,
            Err(_) => TurnStatus::Failed,
        },
        is_copied: false,
        is_redacted: encoded.as_ref().is_some_and(|it| it.is_redacted),
        request_bytes,
        first_token_ms: exchange.first_token_ms,
        usage: exchange.tokens(),
        cost: exchange.usage.cost,
        attempts: exchange.attempts,
        stop_reason: reply.and_then(|reply| reply.stop_reason.clone()),
        tool_calls: reply.map_or(0, |reply| {
            u32::try_from(reply.message.tool_calls.len()).unwrap_or(u32::MAX)
        }),
    };
    let request = encoded.map(|it| it.request);
    context.run.turn_log.add(TurnEntry { record, request });
}

struct EncodedRequest {
    request: StoredRequest,
    is_redacted: bool,
}

async fn encode(
    context: &RunContext,
    turn: u32,
    sent: SentRequest,
    attachments: Vec<RecordedText>,
) -> EncodedRequest {
    let News {
        previous,
        has_steps,
        texts: new_texts,
    } = context.run.turn_log.take_news();
    let base = match &previous {
        Some(previous) if previous.differences < MAX_DIFFERENCES => {
            base_body(context, previous).await
        }
        _ => None,
    };
    // A request that is stored whole refers to all texts of the run.
    let is_prompt_new = turn == 1 && has_steps;
    let mut texts = match base.is_none() && !is_prompt_new {
        true => recorded_texts(context).await.unwrap_or(new_texts),
        false => new_texts,
    };
    texts.extend(attachments);
    let redactor = &context.engine.settings.requests.redactor;
    let is_large = sent.body.len() > MAX_INLINE_BODY
        || !redactor.is_empty() && sent.body.len() > MAX_INLINE_REDACTION;
    let SentRequest { head, body } = sent;
    let differences = match (&base, &previous) {
        (Some(_), Some(previous)) => previous.differences + 1,
        _ => 0,
    };
    let encoder = context.clone();
    let work = move || encode_body(&encoder, base.as_deref(), body, texts);
    let encoded = match is_large {
        true => run_blocking(work).await,
        false => work(),
    };
    let large_bodies = &context.engine.active_runs.large_bodies;
    let is_same_head = previous.is_some_and(|previous| previous.head == head);
    context.run.turn_log.set_previous(PreviousRequest {
        turn,
        head: Arc::clone(&head),
        body: large_bodies.keep(encoded.body),
        differences,
    });
    let head: Option<Arc<RequestHead>> = (!is_same_head).then_some(head);
    EncodedRequest {
        request: StoredRequest {
            head,
            body: encoded.delta,
            shared_text: encoded.shared_text,
        },
        is_redacted: encoded.is_redacted,
    }
}

/// The body of the previous request; `None` if it cannot be read: then the next one is stored whole.
async fn base_body(context: &RunContext, previous: &PreviousRequest) -> Option<Bytes> {
    if let Some(kept) = &previous.body {
        return Some(kept.body.clone());
    }
    let store = context.engine.journal.store();
    let recorded = store.turn(context.run.scope.run, previous.turn).await;
    let request = recorded.ok()??.request?;
    Some(Bytes::from(request.body))
}

async fn recorded_texts(context: &RunContext) -> Option<Vec<RecordedText>> {
    let store = context.engine.journal.store();
    let entries = store.entries(context.run.scope.run).await.ok()?;
    let texts = entries
        .iter()
        .map(|it| request_delta::entry_texts(&it.entry));
    Some(texts.flatten().collect())
}

struct EncodedBody {
    delta: BodyDelta,
    /// As it is recorded.
    body: Bytes,
    is_redacted: bool,
    shared_text: Option<Arc<SharedText>>,
}

fn encode_body(
    context: &RunContext,
    base: Option<&[u8]>,
    body: Bytes,
    mut texts: Vec<RecordedText>,
) -> EncodedBody {
    let redactor = &context.engine.settings.requests.redactor;
    let redacted = match redactor.is_empty() {
        true => None,
        false => redactor.redact_json(&String::from_utf8_lossy(&body)),
    };
    let is_redacted = redacted.is_some();
    let body = redacted.map_or(body, Bytes::from);
    let shared_text = match base {
        Some(_) => None,
        None => {
            let shared_texts = &context.engine.agent_snapshots.shared_texts;
            shared_texts.find(&context.run.agent.name, &body)
        }
    };
    if let Some(shared) = &shared_text {
        // First: it may contain other texts.
        texts.insert(0, (&**shared).into());
    }
    EncodedBody {
        delta: request_delta::encode(base, &body, &texts),
        body,
        is_redacted,
        shared_text,
    }
}
