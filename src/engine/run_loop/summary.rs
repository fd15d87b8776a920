//! The summary of an ad-hoc sub-agent: one more turn after its task is done.

use crate::domain::event::EventKind;
use crate::engine::context::RunContext;
use crate::engine::run_loop::compaction::{self, RequestBounds};
use crate::engine::run_loop::conversation::Conversation;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, LoopState, error_ending};
use crate::engine::run_loop::limits::check_limits;
use crate::engine::run_loop::turn;
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply, TurnRequest};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::turn_error::TurnError;
use crate::providers::ReplyOutcome;
use crate::store::{Change, Step};

/// The message that requests a summary, if this is an ad-hoc sub-agent that has one configured.
pub fn summary_prompt(run: &ActiveRun) -> Option<&str> {
    run.agent.ad_hoc.as_ref()?.summary_prompt.as_deref()
}

/// Requests the summary: a turn without tools, which does not count. If it fails, `fallback`, the final text of the
/// task, is the result.
pub async fn request_summary(
    context: &RunContext,
    state: &mut LoopState,
    system: &str,
    conversation: &mut Conversation,
    fallback: String,
) -> Ending {
    // Without tools the prefix of the request differs from the earlier ones.
    conversation.drop_thinking(0);
    let task = conversation.task().into_owned();
    let completed_with = |content| LoopOutcome::Completed {
        content,
        structured: false,
        task,
        memory_time: None,
    };
    let bounds = RequestBounds::new(context, system, &[]);
    if let Some(bounds) = bounds.filter(|bounds| bounds.is_exceeded(conversation)) {
        let mut pending_write = None;
        let compacting =
            compaction::compact(context, state, &bounds, conversation, &mut pending_write);
        match Box::pin(compacting).await {
            Ok(()) => {}
            Err(ending) if matches!(ending.outcome, Ok(LoopOutcome::Failed(_))) => {
                return Ending::new(completed_with(fallback));
            }
            Err(ending) => return ending,
        }
    }
    let turn = conversation.turn() + 1;
    let turn_started = EventKind::TurnStarted {
        turn,
        messages: conversation.messages().len(),
        results: 0,
    };
    let turn_request = TurnRequest {
        turn,
        system,
        messages: conversation.messages(),
        tools: &[],
        params: &context.run.agent.params,
        is_turn: true,
    };
    // If the summary is interrupted, the result is the text of the task, not a part of the summary.
    let mut streamed = StreamedReply::default();
    let result = async {
        check_limits(&context.run)?;
        let journal = &context.engine.journal;
        let commit = journal.append(
            &context.run,
            Change::Unchanged,
            Vec::new(),
            vec![turn_started],
        );
        commit.await?;
        turn::request(context, turn_request, &mut streamed).await
    };
    let TurnReply {
        reply,
        requested_model,
    } = match result.await {
        Ok(turn_reply) => turn_reply,
        Err(error @ (TurnError::Cancelled | TurnError::Store(_))) => {
            return error_ending(&context.run, error);
        }
        Err(_) => return Ending::new(completed_with(fallback)),
    };
    let tokens = reply.usage.unwrap_or_default();
    state.progress.model = reply.model.unwrap_or(requested_model.model);
    state.progress.stop_reason = reply.stop_reason;
    state.progress.usage = context.run.usage().0;
    let completed = EventKind::TurnCompleted {
        turn,
        model: state.progress.model.clone(),
        stop_reason: state.progress.stop_reason.clone(),
        input_tokens: tokens.input,
        output_tokens: tokens.output,
        cache_read_tokens: tokens.cache_read,
        cache_write_tokens: tokens.cache_write,
        reasoning_tokens: (tokens.reasoning > 0).then_some(tokens.reasoning),
        tool_calls: Vec::new(),
    };
    let mut message = reply.message;
    message.tool_calls.clear();
    let is_summary = reply.outcome == ReplyOutcome::Complete && !message.content.trim().is_empty();
    let content = match is_summary {
        true => message.content.clone(),
        false => fallback,
    };
    Ending::new(completed_with(content))
        .with_records(vec![Step::Reply { turn, message }], vec![completed])
}
