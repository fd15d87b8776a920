//! What an earlier process recorded of a run, taken in again, and what it had begun, finished. Asks no model.

use std::sync::Arc;

use crate::domain::message::ToolCall;
use crate::domain::structured;
use crate::domain::usage::Usage;
use crate::engine::context::Engine;
use crate::engine::replay::run_log::{RecordedRun, RecordedTurn};
use crate::engine::run_loop::conversation::Conversation;
use crate::engine::run_loop::final_text::{self, MAX_RESUMED_CHECKS};
use crate::engine::run_loop::finish::{Ending, LoopOutcome, LoopState};
use crate::engine::run_loop::start::PendingWrite;
use crate::engine::run_loop::summary;
use crate::engine::run_loop::tool_results::{
    CallBatch, ToolContext, check_limits, error_ending, execute_calls,
};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::failures;
use crate::engine::state::pending_batch::PendingBatch;
use crate::store::{Change, Step};

/// Takes in what an earlier process recorded, and finishes what it had begun. Children that it began are driven to
/// their end even where this run is not to go on: it ends after them. Returns the task's text where only a summary is
/// still to be asked for.
pub async fn resume(
    engine: &Arc<Engine>,
    live: &Arc<ActiveRun>,
    state: &mut LoopState,
    tool_context: &ToolContext,
    recorded: RecordedRun,
    draft: PendingWrite,
    conversation: &mut Conversation,
) -> Result<Option<String>, Ending> {
    let RecordedRun {
        turns: replies,
        calls: recorded_calls,
        memory_time: remembers,
        is_compacting,
        ..
    } = recorded;
    let is_batch_known = matches!(live.pending_batch.get(), PendingBatch::Submitted(_));
    let is_request_lost =
        !is_batch_known && recorded_calls.last_turn > replies.last().map_or(0, |reply| reply.turn);
    if is_compacting || is_request_lost {
        // The request that was under way is asked again; what the first one cost nobody will tell.
        live.add_usage(&Usage {
            unreported: 1,
            ..Usage::default()
        });
    }
    draft.write(engine, live).await?;
    let recorded_calls = Arc::new(recorded_calls);
    let mut task_text = None;
    for RecordedTurn {
        turn,
        message,
        results,
        followup: told,
        compaction,
    } in replies
    {
        if !message.content.is_empty() {
            state.partial = Some(message.content.clone());
        }
        if message.tool_calls.is_empty() {
            if let Some(followup) = told {
                task_text = summary::summary_prompt(live).map(|_| message.content.clone());
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
            let checked =
                final_text::check_recorded_output(live, &content, recorded_calls.resume_count);
            match Box::pin(checked).await? {
                Ok(structured) => {
                    let mut memory_time = remembers;
                    if memory_time.is_none() && live.agent.memory.enabled {
                        // The earlier process was still checking the reply: from here on the entry has one time.
                        let at = engine.memories.next_time();
                        let step = Step::Remembers { at };
                        let journal = &engine.journal;
                        journal
                            .append(live, Change::Unchanged, vec![step], Vec::new())
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
                    engine
                        .journal
                        .append(live, change, vec![step], Vec::new())
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
            // The other process had not come to look whether it may perform them.
            if let Err(error) = check_limits(live) {
                return Err(error_ending(live, error));
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
        execute_calls(engine, live, tool_context, batch, conversation).await?;
        if let Some(compaction) = compaction {
            conversation.compact(compaction);
        }
    }
    if let Some(tokens) = &recorded_calls.reported_usage {
        conversation.set_reported_usage(tokens);
    }
    Ok(task_text)
}
