//! Rebuilds a run's conversation from what an earlier process recorded, and finishes what that process had started.
//! Sends no request to a provider.

use std::sync::Arc;

use crate::domain::message::ToolCall;
use crate::domain::structured;
use crate::domain::usage::Usage;
use crate::engine::context::RunContext;
use crate::engine::replay::run_log::{RecordedRun, RecordedTurn};
use crate::engine::run_loop::conversation::Conversation;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, LoopState, error_ending};
use crate::engine::run_loop::final_text::{self, MAX_RESUMED_CHECKS};
use crate::engine::run_loop::limits::check_limits;
use crate::engine::run_loop::start::PendingWrite;
use crate::engine::run_loop::summary;
use crate::engine::run_loop::tool_results::{CallBatch, ToolContext, execute_calls};
use crate::engine::state::failures;
use crate::engine::state::pending_batch::PendingBatch;
use crate::store::{Change, Step};

/// Restores the conversation and executes the recorded calls that have no result. Children that had started are driven
/// to their end even if this run cannot continue; it ends after them. Returns the final text of the task if only its
/// summary is still to be requested.
pub async fn resume(
    context: &RunContext,
    state: &mut LoopState,
    tool_context: &ToolContext,
    recorded: RecordedRun,
    pending_write: PendingWrite,
    conversation: &mut Conversation,
) -> Result<Option<String>, Ending> {
    let RecordedRun {
        turns,
        calls: recorded_calls,
        memory_time: recorded_memory_time,
        is_compacting,
        ..
    } = recorded;
    let is_batch_known = matches!(context.run.pending_batch.get(), PendingBatch::Submitted(_));
    let is_request_lost =
        !is_batch_known && recorded_calls.last_turn > turns.last().map_or(0, |last| last.turn);
    if is_compacting || is_request_lost {
        // The interrupted request is sent again. The cost of the first one stays unknown.
        context.run.add_usage(&Usage {
            unreported: 1,
            ..Usage::default()
        });
    }
    pending_write.write(context).await?;
    let recorded_calls = Arc::new(recorded_calls);
    let mut task_text = None;
    for RecordedTurn {
        turn,
        message,
        results,
        followup,
        compaction,
    } in turns
    {
        if !message.content.is_empty() {
            state.partial = Some(message.content.clone());
        }
        if message.tool_calls.is_empty() {
            if let Some(followup) = followup {
                task_text = summary::summary_prompt(&context.run).map(|_| message.content.clone());
                conversation.push_followup(turn, message, followup);
                if let Some(compaction) = compaction {
                    conversation.compact(compaction);
                }
                continue;
            }
            let content = match task_text.take() {
                Some(task) if message.content.trim().is_empty() => task,
                _ => message.content.clone(),
            };
            let checked = final_text::check_recorded_output(
                &context.run,
                &content,
                recorded_calls.resume_count,
            );
            match Box::pin(checked).await? {
                Ok(structured) => {
                    let mut memory_time = recorded_memory_time;
                    if memory_time.is_none() && context.run.agent.memory.enabled {
                        // The earlier process was still checking the reply. From now on the memory entry has a fixed
                        // time.
                        let at = context.engine.memories.next_time();
                        let step = Step::Remembers { at };
                        let journal = &context.engine.journal;
                        journal
                            .append(&context.run, Change::Unchanged, vec![step], Vec::new())
                            .await?;
                        memory_time = Some(at);
                    }
                    return Err(Ending::new(LoopOutcome::Completed {
                        content,
                        structured,
                        task: conversation.task().into_owned(),
                        memory_time,
                    }));
                }
                Err(errors)
                    if !conversation.may_repair()
                        || recorded_calls.resume_count >= MAX_RESUMED_CHECKS =>
                {
                    return Err(Ending::failed(failures::output_invalid(&errors)));
                }
                Err(errors) => {
                    let followup = structured::repair_prompt(&errors);
                    let step = Step::Said {
                        content: followup.clone(),
                    };
                    let change = Change::Progress(state.progress.clone());
                    context
                        .engine
                        .journal
                        .append(&context.run, change, vec![step], Vec::new())
                        .await?;
                    conversation.push_followup(turn, message, followup);
                    continue;
                }
            }
        }
        let has_missing_results = results.iter().any(Option::is_none);
        let is_started = |call: &ToolCall| {
            recorded_calls.started.contains(&call.id)
                || recorded_calls.approvals_requested.contains_key(&call.id)
        };
        if has_missing_results && !message.tool_calls.iter().any(is_started) {
            // The earlier process had not yet checked the limits for these calls.
            if let Err(error) = check_limits(&context.run) {
                return Err(error_ending(&context.run, error));
            }
        }
        let calls = message.tool_calls.clone();
        conversation.restore_reply(turn, message);
        let batch = CallBatch {
            turn,
            calls,
            results,
            recorded_calls: Arc::clone(&recorded_calls),
        };
        execute_calls(context, tool_context, batch, conversation).await?;
        if let Some(compaction) = compaction {
            conversation.compact(compaction);
        }
    }
    if let Some(tokens) = &recorded_calls.reported_usage {
        conversation.set_reported_usage(tokens);
    }
    Ok(task_text)
}
