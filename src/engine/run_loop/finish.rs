//! Ends a run: decides between its own outcome and a cancel, appends to the agent's memory, commits the terminal state.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::counted::counted;
use crate::domain::event::EventKind;
use crate::domain::excerpt::TextExcerpt;
use crate::domain::failure::Failure;
use crate::domain::memory_entry;
use crate::domain::run::{Outcome, Run, Status, now};
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::admission::run_permits::RunPermits;
use crate::engine::context::RunContext;
use crate::engine::history::time_spent::TimeSpent;
use crate::engine::memories::MemoryError;
use crate::engine::record::run_record;
use crate::engine::recovery::interrupted_runs;
use crate::engine::run_loop::delegation::child_result;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, LoopState};
use crate::engine::run_loop::run_spans;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::failures;
use crate::record::entry::Entry;
use crate::record::event::MAX_CONTENT_BYTES;
use crate::store::memories::NewMemoryEntry;
use crate::store::{Change, FinishedRun, Progress, StoreError};

/// Decides the outcome and commits the terminal state. If the record could not be written or read, the run's tree is
/// suspended; a run whose record can never be read fails instead, and one that was not accepted leaves nothing.
pub async fn commit_end(
    context: &RunContext,
    record: Arc<Run>,
    mut state: LoopState,
    ending: Ending,
) -> Result<Arc<Run>, StoreError> {
    let run = &context.run;
    let loop_outcome = match ending.outcome {
        Ok(LoopOutcome::TimedOut(failure)) => {
            LoopOutcome::Failed(with_time_spent(context, failure).await)
        }
        Ok(loop_outcome) => loop_outcome,
        Err(error) if ending.is_refused => return Err(error),
        Err(error) if run.is_unreadable(&error) => {
            LoopOutcome::Failed(failures::internal(&error.to_string()))
        }
        Err(error) => {
            run.suspend(&error);
            return Err(error);
        }
    };
    if run.is_suspended() {
        return Err(StoreError::Suspended);
    }
    if run.parent.is_none()
        && let Err(error) = interrupted_runs::fail_orphans(&context.engine, run.scope.run).await
        && !run.is_unreadable(&error)
    {
        run.suspend(&error);
        return Err(error);
    }
    let messages = close_inbox(run, state.progress.turns).await;
    let is_incomplete = matches!(loop_outcome, LoopOutcome::Incomplete);
    let (cancel_reason, cancel_requested_at) = run.begin_finish().await.unzip();
    let mut entries = ending.entries;
    let outcome = match cancel_reason {
        Some(reason) => Outcome::Cancelled {
            reason,
            partial: state.partial.take(),
        },
        None => {
            let turn = state.progress.turns;
            match append_memory(context, &loop_outcome, record.attempt, turn).await {
                Ok(event) => entries.extend(event.map(Entry::from)),
                Err(error) => {
                    run.suspend(&error);
                    return Err(error);
                }
            }
            own_outcome(context, loop_outcome, state.partial.take())
        }
    };
    entries.push(end_event(&outcome, &state.progress).into());
    let (_, tree_usage) = run.usage();
    run.update_progress(&mut state.progress);
    let finished = FinishedRun {
        completion_status: match &outcome {
            Outcome::Completed { .. } if is_incomplete => Some(child_result::INCOMPLETE),
            Outcome::Completed { .. } if run.agent.ad_hoc.is_some() => Some(child_result::COMPLETE),
            _ => None,
        },
        scorers: scorers(context, &record, outcome.status()),
        outcome,
        finished_at: now(),
        progress: state.progress,
        tree_usage,
        messages,
    };
    let change = Change::Finish(Box::new(finished.clone()));
    let journal = &context.engine.journal;
    let last_event = journal.append(run, change, entries).await?;
    let metrics = &context.engine.metrics;
    let milliseconds = record
        .started_at
        .map(|_| record.duration_ms(finished.finished_at));
    let duration = milliseconds.map(Duration::from_millis);
    metrics.run_finished(&record.agent, &finished.outcome, duration);
    if let Some(requested_at) = cancel_requested_at {
        metrics.cancel_completed(requested_at.elapsed());
    }
    let mut record = final_record(record, finished, last_event);
    record.warnings = run.warnings();
    Ok(Arc::new(record))
}

/// The scorers of the agent's file of today that are to score the run.
fn scorers(context: &RunContext, record: &Run, status: Status) -> Vec<String> {
    if record.parent_id.is_some() || record.is_marked() {
        return Vec::new();
    }
    let agents = context.engine.catalog.current();
    let agent = agents.entries.get(&record.agent);
    let scorers = agent
        .and_then(|it| it.agent.as_ref())
        .map(|it| it.scorers.iter());
    let scorers = scorers.into_iter().flatten();
    let taken = scorers.filter(|it| it.scores(status) && it.takes(record.id));
    taken.map(|it| it.name.clone()).collect()
}

/// The failure of a run that is out of time, with where the time went.
async fn with_time_spent(context: &RunContext, failure: Failure) -> Failure {
    // If the record cannot be read, the end will not be recorded either.
    let spent = TimeSpent::of_run(context).await.unwrap_or_default();
    let spent = spent.to_string();
    match spent.is_empty() {
        true => failure,
        false => Failure {
            message: format!("{}: {spent}", failure.message),
            ..failure
        },
    }
}

/// Accepts no more messages of a run that ends, and warns of unread ones. Returns how many messages the run has, if that is
/// known.
async fn close_inbox(run: &ActiveRun, turn: u32) -> Option<u32> {
    let mut messages = run.inbox.lock().await;
    messages.close();
    let text = match messages.unread_count() {
        0 => return messages.count(),
        1 => "a message was not read: the run ended before its next request".to_owned(),
        count => format!("{count} messages were not read: the run ended before its next request"),
    };
    let warning = Warning::new(WarningCode::MessageUnread, &text);
    run.warn(warning, (turn > 0).then_some(turn));
    messages.count()
}

/// The outcome of a run that was not cancelled while it finished.
fn own_outcome(
    context: &RunContext,
    loop_outcome: LoopOutcome,
    partial: Option<String>,
) -> Outcome {
    match loop_outcome {
        LoopOutcome::Cancelled => Outcome::Cancelled {
            reason: context.run.cancel_reason(),
            partial,
        },
        LoopOutcome::Incomplete => Outcome::Completed {
            content: partial.unwrap_or_default(),
            structured: false,
        },
        LoopOutcome::Failed(failure) | LoopOutcome::TimedOut(failure) => {
            Outcome::Failed { failure, partial }
        }
        LoopOutcome::Completed {
            content,
            structured,
            ..
        } => Outcome::Completed {
            content,
            structured,
        },
    }
}

fn end_event(outcome: &Outcome, progress: &Progress) -> EventKind {
    match outcome {
        Outcome::Completed { content, .. } => {
            let excerpt = TextExcerpt::new(content, MAX_CONTENT_BYTES);
            EventKind::RunCompleted {
                turns: progress.turns,
                characters: content.chars().count(),
                content: excerpt.text,
                truncated: excerpt.truncated,
            }
        }
        Outcome::Failed { failure, .. } => EventKind::RunFailed {
            error: failure.clone(),
        },
        Outcome::Cancelled { reason, .. } => EventKind::RunCancelled {
            reason: reason.clone(),
        },
    }
}

/// The record of a run with its committed end.
fn final_record(record: Arc<Run>, finished: FinishedRun, last_event: u64) -> Run {
    let mut run = Arc::unwrap_or_clone(record);
    run.last_event = last_event;
    run.status = finished.outcome.status();
    run.completion_status = finished.completion_status.map(str::to_owned);
    match finished.outcome {
        Outcome::Completed {
            content,
            structured,
        } => {
            run.content = Some(content);
            run.structured = structured;
        }
        Outcome::Failed { failure, partial } => {
            run.error = Some(failure);
            run.partial_content = partial;
        }
        Outcome::Cancelled { reason, partial } => {
            run.cancel_reason = Some(reason);
            run.partial_content = partial;
        }
    }
    let Progress {
        turns,
        model,
        stop_reason,
        usage,
        ..
    } = finished.progress;
    Run {
        turns,
        model,
        stop_reason,
        usage,
        tree: finished.tree_usage,
        finished_at: Some(finished.finished_at),
        ..run
    }
}

/// Appends a completed run to the agent's memory. A file that cannot be written becomes a warning and does not fail the run; a
/// failure of the store is an error, as for the end of the run, unless it is final: the next attempt appends the entry if it is
/// missing.
async fn append_memory(
    context: &RunContext,
    loop_outcome: &LoopOutcome,
    attempt: u32,
    turn: u32,
) -> Result<Option<EventKind>, StoreError> {
    let LoopOutcome::Completed {
        content,
        task,
        memory_time,
        ..
    } = loop_outcome
    else {
        return Ok(None);
    };
    // A test leaves the memory as it is.
    if !context.run.adds_memory() || context.playback().is_some() {
        return Ok(None);
    }
    let RunContext { engine, run } = context;
    let time = memory_time.unwrap_or_else(|| engine.memories.next_time());
    let entry = NewMemoryEntry {
        run: run.scope.run,
        text: memory_entry::render(time, task, content),
        // An earlier attempt may have written the entry before it stopped.
        may_exist: attempt > 1,
    };
    let owner = run.tree.owner.as_deref();
    let result = engine.memories.append(&run.agent, owner, entry).await;
    let max = run.agent.memory.max_entries as usize;
    let (code, message) = match result {
        Ok(count) if max > 0 && count >= max => {
            let entries = counted(count, "entry");
            let message = format!(
                "memory of agent \"{}\" has {entries} (max_entries is {max}); run its garbage collection",
                run.agent.name
            );
            (WarningCode::MemoryFull, message)
        }
        Ok(_) => return Ok(None),
        Err(MemoryError::Store { error, .. }) if !run.is_unreadable(&error) => return Err(error),
        Err(error) => (WarningCode::MemoryNotWritten, error.to_string()),
    };
    run.warn(Warning::new(code, &message), Some(turn));
    Ok(Some(EventKind::MemoryWarning { message }))
}

/// Removes a finished run from the active runs and notifies everyone who waits for it. A run of a suspended tree stays
/// listed until the tree is resumed.
pub fn finish(context: &RunContext, end_result: Result<Arc<Run>, StoreError>) -> Option<Arc<Run>> {
    if end_result.is_err() && context.run.is_suspended() {
        context.run.publish_end(None);
        return None;
    }
    context.engine.active_runs.remove(context.run.scope.run);
    if context.run.parent.is_none() {
        let root = context.run.scope.root;
        context.engine.cluster_permits.tree_ended(root);
        context.engine.journal.broadcaster().close(root);
    }
    match &end_result {
        Ok(run) => {
            run_spans::end_run(&context.run, run);
            run_record::log_end(run);
            if let Some(error) = &run.error {
                tracing::warn!(
                    run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
                    "{} of agent {} failed: {}", run.id, run.agent, error.message
                );
            }
        }
        // The run never existed: its caller gets the run that claimed the idempotency key first.
        Err(StoreError::AlreadyClaimed(_)) => {}
        Err(error) => tracing::error!(
            run.id = %context.run.scope.run, run.root = %context.run.scope.root, agent = %context.run.agent.name,
            depth = context.run.scope.depth.0, "The end of {} is not recorded: {error}", context.run.scope.run
        ),
    }
    let run = end_result.ok();
    context.run.publish_end(run.clone());
    run
}

/// Ends a run without the loop: it was cancelled before its clock started, or its record cannot be read. Its permits
/// are released before its end is published.
pub async fn finish_without_loop(
    context: &RunContext,
    run: Arc<Run>,
    ending: Ending,
    permits: RunPermits<'_>,
) -> Option<Arc<Run>> {
    let state = LoopState::new(&run);
    let end_result = commit_end(context, run, state, ending).await;
    permits.release(&context.run, end_result.is_ok());
    finish(context, end_result)
}
