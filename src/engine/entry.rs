//! The entries of a run's record that the loop writes on its way: the one that starts it, or goes on with it, first.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use tokio::sync::oneshot;

use crate::domain::event::EventKind;
use crate::domain::run::{Run, Status, now};
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::record;
use crate::engine::remains::Remains;
use crate::store::{Change, Claim, Opening, Step, StoreError};

/// Who is told that a root run has been committed.
pub type Accepted = oneshot::Sender<Result<Arc<Run>, StoreError>>;

/// How a run enters the record.
pub enum Entry {
    /// It stands there already, queued.
    Queued,
    /// An earlier process left it at work; this is what it left.
    Resumed(Box<Remains>),
    /// Accepted and started in one transaction.
    New {
        /// A root's caller, who waits for it.
        accepted: Option<Accepted>,
        /// The idempotency key that accepts it.
        claim: Option<Claim>,
    },
}

/// What waits to be written with the next entry.
pub struct Draft {
    /// What changes in the run's record.
    pub change: Change,
    /// Steps that go with it.
    pub steps: Vec<Step>,
    /// Events that go with it.
    pub events: Vec<EventKind>,
    accepted: Option<(Accepted, Arc<Run>)>,
}

impl Draft {
    /// Nothing but a change.
    pub fn of(change: Change) -> Self {
        Self {
            change,
            steps: Vec::new(),
            events: Vec::new(),
            accepted: None,
        }
    }

    /// Whether the model is asked only when this stands: it may be refused, is to be heard before any delta, or has pictures
    /// and files in it, which are read back for the request.
    pub fn comes_first(&self, live: &LiveRun) -> bool {
        live.streams()
            || self.has_attachments()
            || matches!(&self.change, Change::Open(opening) if opening.claim.is_some())
    }

    fn has_attachments(&self) -> bool {
        let mut steps = self.steps.iter();
        steps.any(|step| !step.attachments().is_empty())
    }

    /// Writes it: waits for the commit where somebody does, else hands it over.
    pub async fn write(self, engine: &Engine, live: &LiveRun) -> Result<(), StoreError> {
        let is_waited_for = live.streams() || self.has_attachments();
        let Self {
            change,
            steps,
            events,
            accepted,
        } = self;
        match accepted {
            // Who streams hears of a turn before its first delta.
            None if is_waited_for => engine
                .journal
                .record(live, change, steps, events)
                .await
                .map(drop),
            None => engine.journal.note(live, change, steps, events).await,
            Some((accepted, run)) => {
                let committed = engine
                    .journal
                    .record(live, change, steps, events)
                    .await
                    .map(drop);
                // A caller that went away does not stop the run.
                let _ = accepted.send(committed.clone().map(|()| run));
                committed
            }
        }
    }
}

/// The entry that starts the run.
pub fn begin(engine: &Engine, live: &LiveRun, run: &mut Arc<Run>, entry: Entry) -> Draft {
    let at = now();
    let record = Arc::make_mut(run);
    if let Entry::Resumed(_) = entry {
        record.attempt += 1;
        let resumed = EventKind::RunResumed {
            attempt: record.attempt,
        };
        return Draft {
            events: vec![resumed],
            ..Draft::of(Change::Resume)
        };
    }
    record.status = Status::Running;
    record.started_at = Some(at);
    if live.parent.is_none() {
        // On the calendar's clock, as the wait may have begun in another process.
        let waited = match entry {
            Entry::New { .. } => SignedDuration::ZERO,
            Entry::Queued | Entry::Resumed(_) => at.duration_since(record.created_at),
        };
        engine
            .metrics
            .run_started(Duration::try_from(waited).unwrap_or_default());
    }
    let started = EventKind::RunStarted {
        model: live.agent.model.to_string(),
        agent_version: live.agent.version.clone(),
    };
    match entry {
        Entry::Queued | Entry::Resumed(_) => Draft {
            events: vec![started],
            ..Draft::of(Change::Start {
                at,
                deadline: record::deadline(live).unwrap_or((at, 0)),
            })
        },
        Entry::New { accepted, claim } => {
            let queued = EventKind::RunQueued {
                parent_id: run.parent_id,
                tool_call_id: run.tool_call_id.clone(),
            };
            Draft {
                events: vec![queued, started],
                accepted: accepted.map(|accepted| (accepted, Arc::clone(run))),
                ..Draft::of(Change::Open(Box::new(Opening {
                    run: Arc::clone(run),
                    continuation: record::continuation(live),
                    claim,
                })))
            }
        }
    }
}
