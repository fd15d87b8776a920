//! Rebuilds a run's conversation from what an earlier process recorded, and finishes what that process had started. Sends
//! no request to a provider.

use std::sync::Arc;

use jiff::Timestamp;

use crate::domain::content::Content;
use crate::domain::message::{AssistantMessage, ToolCall};
use crate::domain::service::Service;
use crate::domain::structured;
use crate::domain::usage::Usage;
use crate::engine::context::RunContext;
use crate::engine::history::run_log::{RecordedCalls, RecordedRun, RecordedTurn};
use crate::engine::run_loop::delegation::delegate;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, error_ending};
use crate::engine::run_loop::final_text::{self, MAX_RESUMED_CHECKS, OutputCheck};
use crate::engine::run_loop::limits::check_limits;
use crate::engine::run_loop::new_messages;
use crate::engine::run_loop::summary;
use crate::engine::run_loop::tool_results::{self, CallBatch};
use crate::engine::run_loop::turn_loop::TurnLoop;
use crate::engine::state::failures;
use crate::engine::state::pending_batch::PendingBatch;
use crate::record::entry::Entry;
use crate::store::{Change, StoreError};

/// Restores the conversation and executes the recorded calls that have no result. Children that had started are driven
/// to their end even if this run cannot continue; it ends after them. Returns the final text of the task if only its
/// summary is still to be requested.
pub async fn resume(
    turn_loop: &mut TurnLoop<'_>,
    recorded: RecordedRun,
) -> Result<Option<String>, Ending> {
    let run = &turn_loop.context.run;
    if run.clock().pause.is_recorded()
        && matches!(run.pending_batch.get(), PendingBatch::Unknown { .. })
    {
        // A run that waited without a batch has sent nothing.
        run.pending_batch.set(PendingBatch::Absent);
    }
    if has_lost_request(turn_loop.context, &recorded) {
        // The interrupted request is sent again. The cost of the first one stays unknown.
        turn_loop.context.run.add_usage(&Usage {
            unreported: 1,
            ..Usage::default()
        });
    }
    turn_loop.repeats_turn = has_started_turn(turn_loop.context, &recorded);
    turn_loop.write_pending().await?;
    let RecordedRun {
        turns,
        first_messages,
        calls,
        memory_time,
        ..
    } = recorded;
    let calls = Arc::new(calls);
    if !calls.background.is_empty() {
        let (context, drive) = (turn_loop.context, turn_loop.drive_child);
        Box::pin(delegate::recover_background(context, &calls, drive)).await?;
    }
    let mut task_text = None;
    push_messages(turn_loop, first_messages);
    let last_index = turns.len().saturating_sub(1);
    for (index, mut recorded_turn) in turns.into_iter().enumerate() {
        let message = &recorded_turn.message;
        if !message.content.is_empty() {
            turn_loop.state.partial = Some(message.content.clone());
        }
        if !message.tool_calls.is_empty() {
            restore_calls(turn_loop, recorded_turn, &calls).await?;
        } else if let Some(followup) = recorded_turn.followup.take() {
            let has_summary = summary::summary_prompt(&turn_loop.context.run).is_some();
            task_text = has_summary.then(|| message.content.clone());
            restore_followup(turn_loop, recorded_turn, followup);
        } else if index < last_index || !recorded_turn.messages.is_empty() {
            restore_unfinished(turn_loop, recorded_turn);
        } else {
            let is_summary = task_text.is_some();
            let content = match task_text.take() {
                Some(task_text) if message.content.trim().is_empty() => task_text,
                _ => message.content.clone(),
            };
            let RecordedTurn { turn, message, .. } = recorded_turn;
            let final_text = RecordedText {
                content,
                memory_time,
                resume_count: calls.resume_count,
                is_summary,
            };
            restore_final_text(turn_loop, turn, message, final_text).await?;
        }
    }
    if let Some(tokens) = &calls.reported_usage {
        turn_loop.conversation.set_reported_usage(tokens);
    }
    Ok(task_text)
}

/// Whether a request was under way when the earlier process stopped. A known batch is not lost, nor one that is looked for, and a
/// run that waited without one has sent nothing.
fn has_lost_request(context: &RunContext, recorded: &RecordedRun) -> bool {
    let has_batch = match context.run.pending_batch.get() {
        PendingBatch::Submitted(_) => true,
        PendingBatch::Unknown { .. } => context.run.agent.params.service == Some(Service::Batch),
        PendingBatch::Absent => false,
    };
    let has_begun = recorded.calls.last_turn > last_reply(recorded);
    let is_under_way = recorded.is_compacting || (!has_batch && has_begun);
    let has_reply = context.run.has_kept_reply(recorded.calls.last_turn);
    is_under_way && !has_reply && !context.run.clock().pause.is_recorded()
}

/// Whether the request of the next turn may have been sent, or has a batch.
fn has_started_turn(context: &RunContext, recorded: &RecordedRun) -> bool {
    let started_turn = recorded.calls.last_turn.max(recorded.messages.read_in_turn);
    let has_batch = matches!(context.run.pending_batch.get(), PendingBatch::Submitted(_));
    has_batch || started_turn > last_reply(recorded)
}

/// The turn of the last recorded reply; 0 for none.
fn last_reply(recorded: &RecordedRun) -> u32 {
    recorded.turns.last().map_or(0, |last| last.turn)
}

fn push_messages(turn_loop: &mut TurnLoop<'_>, messages: Vec<Content>) {
    for mut content in messages {
        content.drop_data();
        turn_loop.conversation.push_message(content);
    }
}

/// Restores a text that the run did not end with, because it had messages to read.
fn restore_unfinished(turn_loop: &mut TurnLoop<'_>, recorded_turn: RecordedTurn) {
    let conversation = &mut turn_loop.conversation;
    conversation.restore_reply(recorded_turn.turn, recorded_turn.message);
    push_messages(turn_loop, recorded_turn.messages);
    if let Some(compaction) = recorded_turn.compaction {
        turn_loop.conversation.compact(compaction);
    }
}

/// Restores a text that the run did not end with, and the message that followed it.
fn restore_followup(turn_loop: &mut TurnLoop<'_>, recorded_turn: RecordedTurn, followup: String) {
    let conversation = &mut turn_loop.conversation;
    conversation.push_followup(recorded_turn.turn, recorded_turn.message, followup);
    push_messages(turn_loop, recorded_turn.messages);
    if let Some(compaction) = recorded_turn.compaction {
        turn_loop.conversation.compact(compaction);
    }
}

/// The last recorded text of a run.
struct RecordedText {
    content: String,
    memory_time: Option<Timestamp>,
    resume_count: u32,
    /// Whether it is the summary of an ad-hoc sub-agent.
    is_summary: bool,
}

/// Ends the run with a recorded text, or adds the message that asks the model to correct it.
async fn restore_final_text(
    turn_loop: &mut TurnLoop<'_>,
    turn: u32,
    message: AssistantMessage,
    final_text: RecordedText,
) -> Result<(), Ending> {
    let RecordedText {
        content,
        memory_time,
        resume_count,
        is_summary,
    } = final_text;
    let context = turn_loop.context;
    // Once its memory entry may be written, the run only ends.
    let may_continue = !is_summary && memory_time.is_none();
    if may_continue && new_messages::needs_turn(turn_loop).await? {
        turn_loop.conversation.restore_reply(turn, message);
        return new_messages::await_next(turn_loop).await;
    }
    let checked = final_text::check_recorded_output(&context.run, &content, resume_count);
    let errors = match Box::pin(checked).await? {
        OutputCheck::Valid(_) if may_continue && !new_messages::close(turn_loop).await? => {
            turn_loop.conversation.restore_reply(turn, message);
            return Ok(());
        }
        OutputCheck::Valid(text) => {
            return Err(Ending::new(LoopOutcome::Completed {
                structured: text.is_structured(),
                content: text.into_content(content),
                task: turn_loop.conversation.task().into_owned(),
                memory_time: fixed_memory_time(context, memory_time).await?,
            }));
        }
        OutputCheck::Invalid(errors) => errors,
    };
    if !turn_loop.conversation.may_repair() || resume_count >= MAX_RESUMED_CHECKS {
        return Err(Ending::failed(failures::output_invalid(&errors)));
    }
    let followup = structured::repair_prompt(&errors);
    let entry = Entry::Followup {
        content: followup.clone(),
    };
    turn_loop.record(vec![entry]).await?;
    let conversation = &mut turn_loop.conversation;
    conversation.push_followup(turn, message, followup);
    Ok(())
}

/// The time of the run's entry in the agent's memory, recorded if it is not yet. `None` if the agent has no memory.
async fn fixed_memory_time(
    context: &RunContext,
    recorded: Option<Timestamp>,
) -> Result<Option<Timestamp>, StoreError> {
    if recorded.is_some() || !context.run.adds_memory() {
        return Ok(recorded);
    }
    // The earlier process was still checking the reply. From now on the memory entry has a fixed time.
    let at = context.engine.memories.next_time();
    let entries = vec![Entry::Remembers { at }];
    let journal = &context.engine.journal;
    let committed = journal.append(&context.run, Change::Unchanged, entries);
    committed.await?;
    Ok(Some(at))
}

/// Restores a reply that called tools, and executes its calls that have no result.
async fn restore_calls(
    turn_loop: &mut TurnLoop<'_>,
    recorded_turn: RecordedTurn,
    recorded_calls: &Arc<RecordedCalls>,
) -> Result<(), Ending> {
    let RecordedTurn {
        turn,
        message,
        results,
        messages,
        compaction,
        ..
    } = recorded_turn;
    let run = &turn_loop.context.run;
    let has_missing_results = results.iter().any(Option::is_none);
    let is_started = |call: &ToolCall| {
        recorded_calls.started.contains_key(&call.id)
            || recorded_calls.inputs_requested.contains_key(&call.id)
    };
    if has_missing_results && !message.tool_calls.iter().any(is_started) {
        // The earlier process had not yet checked the limits for these calls.
        check_limits(run).map_err(|error| error_ending(run, error))?;
    }
    let batch = CallBatch {
        turn,
        calls: message.tool_calls.clone(),
        results,
        recorded_calls: Arc::clone(recorded_calls),
    };
    turn_loop.conversation.restore_reply(turn, message);
    tool_results::execute_calls(turn_loop, batch).await?;
    push_messages(turn_loop, messages);
    if let Some(compaction) = compaction {
        turn_loop.conversation.compact(compaction);
    }
    Ok(())
}
