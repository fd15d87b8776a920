//! A run's end: decides once between its own and a cancel, remembers, commits the terminal state. Knows no loop.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::domain::event::EventKind;
use crate::domain::run::{Failure, Outcome, Run, now};
use crate::engine::ad_hoc;
use crate::engine::endings;
use crate::engine::live::LiveRun;
use crate::engine::memory::Entry;
use crate::engine::parts::Engine;
use crate::engine::sessions::Held;
use crate::engine::spans;
use crate::store::{Change, Closing, Progress, Step, StoreError};

/// What outlives the loop, a panic included.
pub struct State {
    /// How far the run is.
    pub progress: Progress,
    /// The model's last text.
    pub partial: Option<String>,
}

/// How the loop ended, with what is still to be recorded.
pub struct Ending {
    /// How; an error where the record could not be written or read.
    pub how: Result<How, StoreError>,
    /// Steps that are committed with it.
    pub steps: Vec<Step>,
    /// Events that are committed with it.
    pub events: Vec<EventKind>,
}

/// How a loop ended.
pub enum How {
    /// With a final text, for this user message.
    Completed {
        /// The text.
        content: String,
        /// Whether JSON was asked for, and the text is it.
        structured: bool,
        /// The message.
        task: String,
        /// The recorded time of its entry in the agent's memory, if that has been chosen.
        remembers: Option<Timestamp>,
    },
    /// Without a turn left: an unnamed agent's last text is all there will be.
    Incomplete,
    /// With a failure.
    Failed(Failure),
    /// Because it was stopped.
    Stopped,
}

impl Ending {
    /// Nothing is left to record.
    pub fn of(how: How) -> Self {
        Self {
            how: Ok(how),
            steps: Vec::new(),
            events: Vec::new(),
        }
    }

    /// With a failure.
    pub fn failed(failure: Failure) -> Self {
        Self::of(How::Failed(failure))
    }

    /// With what is still to be recorded.
    pub fn with(self, steps: Vec<Step>, events: Vec<EventKind>) -> Self {
        Self {
            steps,
            events,
            ..self
        }
    }
}

impl From<StoreError> for Ending {
    fn from(error: StoreError) -> Self {
        Self {
            how: Err(error),
            steps: Vec::new(),
            events: Vec::new(),
        }
    }
}

/// Writes the end: decides between the run's own and a cancel, remembers, commits the terminal state. Suspends the tree of a
/// run whose record could not be written or read; one that never can be read fails.
pub async fn close(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    run: Arc<Run>,
    mut state: State,
    ending: Ending,
) -> Result<Arc<Run>, StoreError> {
    let Ending {
        how,
        steps,
        mut events,
    } = ending;
    let how = match how {
        Ok(how) => how,
        Err(error) if live.is_unreadable(&error) => {
            How::Failed(endings::internal(&error.to_string()))
        }
        Err(error) => {
            live.suspend(&error);
            return Err(error);
        }
    };
    if live.is_suspended() {
        return Err(StoreError::Suspended);
    }
    let is_incomplete = matches!(how, How::Incomplete);
    let (cancelled, asked) = live.begin_end().await.unzip();
    let outcome = match (cancelled, how) {
        (Some(reason), _) => Outcome::Cancelled {
            reason,
            partial: state.partial.take(),
        },
        (None, How::Stopped) => Outcome::Cancelled {
            reason: live.stop_reason(),
            partial: state.partial.take(),
        },
        (None, How::Incomplete) => Outcome::Completed {
            content: state.partial.take().unwrap_or_default(),
            structured: false,
        },
        (None, How::Failed(failure)) => Outcome::Failed {
            failure,
            partial: state.partial.take(),
        },
        (
            None,
            How::Completed {
                content,
                structured,
                task,
                remembers,
            },
        ) => {
            if live.agent.memory.enabled {
                let at = remembers.unwrap_or_else(|| engine.memories.next_time());
                // An earlier attempt may have written it before it ended.
                let entry = Entry {
                    at,
                    may_exist: run.attempt > 1,
                    task,
                    result: content.clone(),
                };
                events.extend(remember(engine, live, entry).await);
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
    let (own, tree) = live.usage();
    state.progress.usage = own;
    let at = now();
    let is_unnamed = live.agent.ad_hoc.is_some();
    let completion_status = match &outcome {
        Outcome::Completed { .. } if is_incomplete => Some(ad_hoc::INCOMPLETE),
        Outcome::Completed { .. } if is_unnamed => Some(ad_hoc::COMPLETE),
        _ => None,
    };
    let closing = Closing {
        completion_status,
        outcome: outcome.clone(),
        at,
        progress: state.progress.clone(),
        tree,
    };
    let last_event = engine
        .journal
        .record(live, Change::Close(Box::new(closing)), steps, events)
        .await?;
    let took = run
        .started_at
        .map(|_| Duration::from_millis(run.duration_ms(at)));
    engine.metrics.run_ended(&run.agent, outcome.status(), took);
    if let Some(asked) = asked {
        engine.metrics.cancel_settled(asked.elapsed());
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

/// Appends to the agent's memory; what goes wrong is told and does not fail the run.
async fn remember(engine: &Arc<Engine>, live: &Arc<LiveRun>, entry: Entry) -> Option<EventKind> {
    let (at_work, of) = (Arc::clone(engine), Arc::clone(live));
    let written = tokio::task::spawn_blocking(move || {
        let key = of.tree.owner.as_deref();
        at_work.memories.append(&of.agent, key, &entry)
    })
    .await;
    let max = live.agent.memory.max_entries as usize;
    let message = match written {
        Ok(Ok(count)) if max > 0 && count >= max => format!(
            "memory of agent \"{}\" has {count} entries (max_entries is {max}); run its garbage collection",
            live.agent.name
        ),
        Ok(Ok(_)) => return None,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!(
            "memory of agent \"{}\": writing it panicked",
            live.agent.name
        ),
    };
    tracing::warn!(
        run.id = %live.scope.run, run.root = %live.scope.root, agent = %live.agent.name,
        depth = live.scope.depth.0, "{message}"
    );
    Some(EventKind::MemoryWarning { message })
}

/// Takes an ended run off the list of those at work and tells everybody who waits. One of a suspended tree stays on the
/// list until the tree is taken up.
pub fn leave(
    engine: &Engine,
    live: &LiveRun,
    closed: Result<Arc<Run>, StoreError>,
) -> Option<Arc<Run>> {
    if closed.is_err() && live.is_suspended() {
        live.announce(None);
        return None;
    }
    engine.live.remove(live.scope.run);
    if live.parent.is_none() {
        engine.journal.bells().silence(live.scope.root);
    }
    match &closed {
        Ok(run) => {
            spans::run_ended(live, run);
            if let Some(error) = &run.error {
                tracing::warn!(
                    run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
                    "{} of agent {} failed: {}", run.id, run.agent, error.message
                );
            }
        }
        // It never was: its caller is told which run stands in its place.
        Err(StoreError::Claimed(_)) => {}
        Err(error) => tracing::error!(
            run.id = %live.scope.run, run.root = %live.scope.root, agent = %live.agent.name,
            depth = live.scope.depth.0, "The end of {} could not be recorded: {error}", live.scope.run
        ),
    }
    let run = closed.ok();
    live.announce(run.clone());
    run
}

/// Ends a run without driving it: one that was cancelled before its time started, or whose record cannot be read. What it
/// held is free before anybody sees its end.
pub async fn without_loop(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    run: Arc<Run>,
    ending: Ending,
    held: Held<'_>,
) -> Option<Arc<Run>> {
    let state = State {
        progress: Progress {
            turns: run.turns,
            model: run.model.clone(),
            stop_reason: run.stop_reason.clone(),
            usage: run.usage,
        },
        partial: None,
    };
    let closed = close(engine, live, run, state, ending).await;
    held.release(live, closed.is_ok());
    leave(engine, live, closed)
}
