//! The summary of an ad-hoc sub-agent: one more turn after its task is done.

use crate::domain::event::EventKind;
use crate::domain::waiting_for::WaitingFor;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::approval::pause;
use crate::engine::run_loop::compaction;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, error_ending};
use crate::engine::run_loop::exchange::Exchange;
use crate::engine::run_loop::limits::check_limits;
use crate::engine::run_loop::record_turn;
use crate::engine::run_loop::request_bounds::RequestBounds;
use crate::engine::run_loop::turn;
use crate::engine::run_loop::turn_loop::{NewReply, TurnLoop};
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply, TurnRequest};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::pause::PauseReason;
use crate::engine::state::turn_error::TurnError;
use crate::providers::ReplyOutcome;
use crate::store::Change;

/// The message that requests a summary, if this is an ad-hoc sub-agent that has one configured.
pub fn summary_prompt(run: &ActiveRun) -> Option<&str> {
    run.agent.ad_hoc.as_ref()?.summary_prompt.as_deref()
}

/// Requests the summary: a turn without tools, which does not count. If it fails, `task_text`, the final text of the
/// task, is the result.
pub async fn request_summary(turn_loop: &mut TurnLoop<'_>, task_text: String) -> Ending {
    // Without tools the prefix of the request differs from the earlier ones.
    turn_loop.conversation.drop_thinking(0);
    let turn = turn_loop.conversation.turn() + 1;
    let run = &turn_loop.context.run;
    let result = match Box::pin(compact(turn_loop)).await {
        Ok(()) => {
            let requested = request(turn_loop, turn).await;
            requested.map_err(|error| error_ending(run, error))
        }
        Err(ending) => Err(ending),
    };
    match result {
        Ok(turn_reply) => push_summary(turn_loop, turn, turn_reply, task_text),
        Err(Ending {
            outcome: Ok(LoopOutcome::Failed(failure)),
            ..
        }) => {
            let message = format!(
                "the task could not be summarized ({}); its last text is the result instead",
                failure.message
            );
            run.warn(
                Warning::new(WarningCode::NotSummarized, &message),
                Some(turn),
            );
            let warning = EventKind::ModelWarning { turn, message };
            completed_with(turn_loop, task_text).with_entries(vec![warning.into()])
        }
        Err(ending) => ending,
    }
}

fn completed_with(turn_loop: &TurnLoop<'_>, content: String) -> Ending {
    Ending::new(LoopOutcome::Completed {
        content,
        structured: false,
        task: turn_loop.conversation.task().into_owned(),
        memory_time: None,
    })
}

async fn compact(turn_loop: &mut TurnLoop<'_>) -> Result<(), Ending> {
    match RequestBounds::new(turn_loop.context, &turn_loop.preamble.system, &[]) {
        Some(bounds) if bounds.is_exceeded(&turn_loop.conversation) => {
            compaction::compact(turn_loop, &bounds).await
        }
        _ => Ok(()),
    }
}

async fn request(turn_loop: &TurnLoop<'_>, turn: u32) -> Result<TurnReply, TurnError> {
    let context = turn_loop.context;
    pause::wait_while_held(context, PauseReason::Turn(WaitingFor::Resume)).await?;
    check_limits(&context.run)?;
    let turn_started = EventKind::TurnStarted {
        turn,
        messages: turn_loop.conversation.messages().len(),
        results: 0,
    };
    let journal = &context.engine.journal;
    let commit = journal.append(&context.run, Change::Unchanged, vec![turn_started.into()]);
    commit.await?;
    let turn_request = TurnRequest {
        tools: &[],
        // Without the tools, the prompt begins in another way.
        is_prompt_reused: false,
        ..turn_loop.turn_request(turn)
    };
    // If the summary is interrupted, the result is the text of the task, not a part of the summary.
    let mut streamed = StreamedReply::default();
    let mut exchange = Exchange::default();
    let result = turn::request(context, turn_request, &mut streamed, &mut exchange).await;
    record_turn::record(context, turn, exchange, &result).await;
    result
}

/// The ending with the summary, or with the text of the task if the summary is incomplete or empty.
fn push_summary(
    turn_loop: &mut TurnLoop<'_>,
    turn: u32,
    turn_reply: TurnReply,
    task_text: String,
) -> Ending {
    let TurnReply {
        reply,
        requested_model,
    } = turn_reply;
    let progress = &mut turn_loop.state.progress;
    progress.model = reply.model.unwrap_or(requested_model.model);
    progress.stop_reason = reply.stop_reason;
    turn_loop.context.run.update_progress(progress);
    let report = turn_loop.reply_report(reply.usage.unwrap_or_default(), &[]);
    let mut message = reply.message;
    message.tool_calls.clear();
    let is_summary = reply.outcome == ReplyOutcome::Complete && !message.content.trim().is_empty();
    let content = match is_summary {
        true => message.content.clone(),
        false => task_text,
    };
    let reply = NewReply {
        turn,
        message,
        report,
    };
    completed_with(turn_loop, content).with_entries(vec![reply.into()])
}
