//! The entries of a run's record that the loop writes on its way: the one that starts it, or goes on with it, first.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use tokio::sync::oneshot;

use crate::domain::event::EventKind;
use crate::domain::run::{Run, Status, now};
use crate::engine::context::Engine;
use crate::engine::record::run_record;
use crate::engine::replay::run_log::RecordedRun;
use crate::engine::state::active_run::ActiveRun;
use crate::store::{Change, IdempotencyClaim, NewRun, Step, StoreError};

/// Who is told that a root run has been committed.
pub type AcceptedSender = oneshot::Sender<Result<Arc<Run>, StoreError>>;

/// How a run enters the record.
pub enum RunStart {
    /// It stands there already, queued.
    Queued,
    /// An earlier process left it at work; this is what it left.
    Resumed(Box<RecordedRun>),
    /// Accepted and started in one transaction.
    New {
        /// A root's caller, who waits for it.
        accepted: Option<AcceptedSender>,
        /// The idempotency key that accepts it.
        claim: Option<IdempotencyClaim>,
    },
}

/// What waits to be written with the next entry.
pub struct PendingWrite {
    /// What changes in the run's record.
    pub change: Change,
    /// Steps that go with it.
    pub steps: Vec<Step>,
    /// Events that go with it.
    pub events: Vec<EventKind>,
    accepted: Option<(AcceptedSender, Arc<Run>)>,
}

impl PendingWrite {
    /// Nothing but a change.
    pub fn new(change: Change) -> Self {
        Self {
            change,
            steps: Vec::new(),
            events: Vec::new(),
            accepted: None,
        }
    }

    /// Whether the model is asked only when this stands: it may be refused, is to be heard before any delta, or has pictures
    /// and files in it, which are read back for the request.
    pub fn must_commit_first(&self, live: &ActiveRun) -> bool {
        live.is_streaming()
            || self.has_attachments()
            || matches!(&self.change, Change::Create(opening) if opening.claim.is_some())
    }

    fn has_attachments(&self) -> bool {
        let mut steps = self.steps.iter();
        steps.any(|step| !step.attachments().is_empty())
    }

    /// Writes it: waits for the commit where somebody does, else hands it over.
    pub async fn write(self, engine: &Engine, live: &ActiveRun) -> Result<(), StoreError> {
        let must_wait = live.is_streaming() || self.has_attachments();
        let Self {
            change,
            steps,
            events,
            accepted,
        } = self;
        match accepted {
            // Who streams hears of a turn before its first delta.
            None if must_wait => engine
                .journal
                .append(live, change, steps, events)
                .await
                .map(drop),
            None => engine.journal.enqueue(live, change, steps, events).await,
            Some((sender, run)) => {
                let committed = engine
                    .journal
                    .append(live, change, steps, events)
                    .await
                    .map(drop);
                // A caller that went away does not stop the run.
                let _ = sender.send(committed.clone().map(|()| run));
                committed
            }
        }
    }
}

/// The entry that starts the run.
pub fn start_run(
    engine: &Engine,
    live: &ActiveRun,
    run: &mut Arc<Run>,
    start: RunStart,
) -> PendingWrite {
    let at = now();
    let record = Arc::make_mut(run);
    if let RunStart::Resumed(_) = start {
        record.attempt += 1;
        let resumed = EventKind::RunResumed {
            attempt: record.attempt,
        };
        return PendingWrite {
            events: vec![resumed],
            ..PendingWrite::new(Change::Resume)
        };
    }
    record.status = Status::Running;
    record.started_at = Some(at);
    if live.parent.is_none() {
        // On the calendar's clock, as the wait may have begun in another process.
        let queue_time = match start {
            RunStart::New { .. } => SignedDuration::ZERO,
            RunStart::Queued | RunStart::Resumed(_) => at.duration_since(record.created_at),
        };
        engine
            .metrics
            .run_started(Duration::try_from(queue_time).unwrap_or_default());
    }
    let started = EventKind::RunStarted {
        model: live.agent.model.to_string(),
        agent_version: live.agent.version.clone(),
    };
    match start {
        RunStart::Queued | RunStart::Resumed(_) => PendingWrite {
            events: vec![started],
            ..PendingWrite::new(Change::Start {
                at,
                deadline: run_record::wall_clock_deadline(live).unwrap_or((at, 0)),
            })
        },
        RunStart::New { accepted, claim } => {
            let queued = EventKind::RunQueued {
                parent_id: run.parent_id,
                tool_call_id: run.tool_call_id.clone(),
            };
            PendingWrite {
                events: vec![queued, started],
                accepted: accepted.map(|accepted| (accepted, Arc::clone(run))),
                ..PendingWrite::new(Change::Create(Box::new(NewRun {
                    run: Arc::clone(run),
                    resume_state: run_record::continuation(live),
                    claim,
                })))
            }
        }
    }
}
