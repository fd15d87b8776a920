//! Ends a run: decides between its own outcome and a cancel, appends to the agent's memory, commits the terminal state.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::event::EventKind;
use crate::domain::run::{Outcome, Run, now};
use crate::engine::admission::run_permits::RunPermits;
use crate::engine::context::RunContext;
use crate::engine::delegation::child_result;
use crate::engine::memory::memory::NewEntry;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, LoopState};
use crate::engine::run_spans;
use crate::engine::state::failures;
use crate::store::{Change, FinishedRun, Progress, StoreError};

/// Decides the outcome and commits the terminal state. If the record could not be written or read, the run's tree is
/// suspended; a run whose record can never be read fails instead.
pub async fn commit_end(
    context: &RunContext,
    run: Arc<Run>,
    mut state: LoopState,
    ending: Ending,
) -> Result<Arc<Run>, StoreError> {
    let Ending {
        outcome: loop_outcome,
        steps,
        mut events,
    } = ending;
    let loop_outcome = match loop_outcome {
        Ok(loop_outcome) => loop_outcome,
        Err(error) if context.run.is_unreadable(&error) => {
            LoopOutcome::Failed(failures::internal(&error.to_string()))
        }
        Err(error) => {
            context.run.suspend(&error);
            return Err(error);
        }
    };
    if context.run.is_suspended() {
        return Err(StoreError::Suspended);
    }
    let is_incomplete = matches!(loop_outcome, LoopOutcome::Incomplete);
    let (cancel_reason, requested_at) = context.run.begin_finish().await.unzip();
    let outcome = match (cancel_reason, loop_outcome) {
        (Some(reason), _) => Outcome::Cancelled {
            reason,
            partial: state.partial.take(),
        },
        (None, LoopOutcome::Cancelled) => Outcome::Cancelled {
            reason: context.run.cancel_reason(),
            partial: state.partial.take(),
        },
        (None, LoopOutcome::Incomplete) => Outcome::Completed {
            content: state.partial.take().unwrap_or_default(),
            structured: false,
        },
        (None, LoopOutcome::Failed(failure)) => Outcome::Failed {
            failure,
            partial: state.partial.take(),
        },
        (
            None,
            LoopOutcome::Completed {
                content,
                structured,
                task,
                memory_time,
            },
        ) => {
            if context.run.agent.memory.enabled {
                let at = memory_time.unwrap_or_else(|| context.engine.memories.next_time());
                // An earlier attempt may have written the entry before it stopped.
                let entry = NewEntry {
                    time: at,
                    may_exist: run.attempt > 1,
                    task,
                    result: content.clone(),
                };
                events.extend(append_memory(context, entry).await);
            }
            Outcome::Completed {
                content,
                structured,
            }
        }
    };
    events.push(match &outcome {
        Outcome::Completed { content, .. } => EventKind::RunCompleted {
            turns: state.progress.turns,
            characters: content.chars().count(),
        },
        Outcome::Failed { failure, .. } => EventKind::RunFailed {
            error: failure.clone(),
        },
        Outcome::Cancelled { reason, .. } => EventKind::RunCancelled {
            reason: reason.clone(),
        },
    });
    let (own_usage, tree) = context.run.usage();
    state.progress.usage = own_usage;
    let at = now();
    let is_ad_hoc = context.run.agent.ad_hoc.is_some();
    let completion_status = match &outcome {
        Outcome::Completed { .. } if is_incomplete => Some(child_result::INCOMPLETE),
        Outcome::Completed { .. } if is_ad_hoc => Some(child_result::COMPLETE),
        _ => None,
    };
    let finished = FinishedRun {
        completion_status,
        outcome: outcome.clone(),
        finished_at: at,
        progress: state.progress.clone(),
        tree_usage: tree,
    };
    let last_event = context
        .engine
        .journal
        .append(
            &context.run,
            Change::Finish(Box::new(finished)),
            steps,
            events,
        )
        .await?;
    let duration = run
        .started_at
        .map(|_| Duration::from_millis(run.duration_ms(at)));
    context
        .engine
        .metrics
        .run_finished(&run.agent, outcome.status(), duration);
    if let Some(requested_at) = requested_at {
        context
            .engine
            .metrics
            .cancel_completed(requested_at.elapsed());
    }
    let mut run = Arc::unwrap_or_clone(run);
    run.last_event = last_event;
    run.status = outcome.status();
    run.completion_status = completion_status.map(str::to_owned);
    match outcome {
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
    } = state.progress;
    Ok(Arc::new(Run {
        turns,
        model,
        stop_reason,
        usage,
        tree,
        finished_at: Some(at),
        ..run
    }))
}

/// Appends to the agent's memory. A failure becomes a warning and does not fail the run.
async fn append_memory(context: &RunContext, entry: NewEntry) -> Option<EventKind> {
    let (task_engine, task_live) = (Arc::clone(&context.engine), Arc::clone(&context.run));
    let result = tokio::task::spawn_blocking(move || {
        let owner = task_live.tree.owner.as_deref();
        task_engine.memories.append(&task_live.agent, owner, &entry)
    })
    .await;
    let max = context.run.agent.memory.max_entries as usize;
    let message = match result {
        Ok(Ok(count)) if max > 0 && count >= max => format!(
            "memory of agent \"{}\" has {count} entries (max_entries is {max}); run its garbage collection",
            context.run.agent.name
        ),
        Ok(Ok(_)) => return None,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!(
            "memory of agent \"{}\": writing it panicked",
            context.run.agent.name
        ),
    };
    tracing::warn!(
        run.id = %context.run.scope.run, run.root = %context.run.scope.root, agent = %context.run.agent.name,
        depth = context.run.scope.depth.0, "{message}"
    );
    Some(EventKind::MemoryWarning { message })
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
        context
            .engine
            .journal
            .broadcaster()
            .close(context.run.scope.root);
    }
    match &end_result {
        Ok(run) => {
            run_spans::end_run(&context.run, run);
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
            depth = context.run.scope.depth.0, "The end of {} could not be recorded: {error}", context.run.scope.run
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
