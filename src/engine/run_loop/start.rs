//! The writes of a run that wait for the next commit, and the first of them: the one that starts or resumes the run.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use serde_json::value::RawValue;

use crate::domain::event::{EventKind, ResumeCause};
use crate::domain::run::{Run, Status, now};
use crate::engine::admission::acceptance::Acceptance;
use crate::engine::context::RunContext;
use crate::engine::history::run_log::RecordedRun;
use crate::engine::record::run_record;
use crate::engine::state::active_run::ActiveRun;
use crate::record::entry::Entry;
use crate::store::{Change, IdempotencyClaim, NewRun, QueueEntry, StoreError};

/// How a run enters the record.
pub enum RunStart {
    /// It is recorded as queued.
    Queued,
    /// It is recorded as queued, with what it took over from another run.
    Forked(Box<RecordedRun>),
    /// An earlier process recorded this much of it.
    Resumed(Box<RecordedRun>),
    /// It is accepted and started in one transaction.
    New {
        /// Notifies the caller of a root run.
        acceptance: Option<Acceptance>,
        /// The idempotency key that the run claims.
        claim: Option<IdempotencyClaim>,
        /// What the request of a root run set, for its first event.
        request: Option<Arc<RawValue>>,
    },
}

/// What the next commit writes.
pub struct PendingWrite {
    pub change: Change,
    pub entries: Vec<Entry>,
    acceptance: Option<(Acceptance, Arc<Run>)>,
}

impl Default for PendingWrite {
    fn default() -> Self {
        Self::new(Change::Unchanged)
    }
}

impl PendingWrite {
    pub fn new(change: Change) -> Self {
        Self {
            change,
            entries: Vec::new(),
            acceptance: None,
        }
    }

    /// Whether the request to the provider has to wait for this commit: because the commit may be rejected, because its
    /// events have to reach subscribers before the first delta, or because the request reads back images and files from
    /// it.
    pub fn must_commit_first(&self, run: &ActiveRun) -> bool {
        run.is_streaming()
            || self.has_attachments()
            || matches!(&self.change, Change::Create(new_run) if new_run.claim.is_some())
    }

    fn has_attachments(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|entry| !entry.attachments().is_empty())
    }

    /// Waits for the commit if somebody depends on it, else only enqueues the write.
    pub async fn write(self, context: &RunContext) -> Result<(), StoreError> {
        // A restart counts before the call that may have caused it is repeated.
        let must_wait = context.run.is_streaming()
            || self.has_attachments()
            || matches!(self.change, Change::Resume);
        let Self {
            change,
            entries,
            acceptance,
        } = self;
        match acceptance {
            // A streaming client gets the start of a turn before its first delta.
            None if must_wait => context
                .engine
                .journal
                .append(&context.run, change, entries)
                .await
                .map(drop),
            None => {
                context
                    .engine
                    .journal
                    .enqueue(&context.run, change, entries)
                    .await
            }
            Some((acceptance, run)) => {
                let committed = context
                    .engine
                    .journal
                    .append(&context.run, change, entries)
                    .await
                    .map(drop);
                acceptance.answer(committed.clone().map(|()| run));
                committed
            }
        }
    }
}

pub fn start_run(context: &RunContext, run: &mut Arc<Run>, start: RunStart) -> PendingWrite {
    let at = now();
    let record = Arc::make_mut(run);
    if let RunStart::Resumed(_) = start {
        if context.run.tree.has_slept {
            return PendingWrite::new(Change::Unchanged);
        }
        record.attempt += 1;
        let resumed = EventKind::RunResumed {
            attempt: record.attempt,
            cause: ResumeCause::Restart,
            by: None,
        };
        return PendingWrite {
            entries: vec![resumed.into()],
            ..PendingWrite::new(Change::Resume)
        };
    }
    record.status = Status::Running;
    record.started_at = Some(at);
    if context.run.parent.is_none() {
        // Wall-clock time, because the run may have been queued by an earlier process.
        let queue_time = match start {
            RunStart::New { .. } => SignedDuration::ZERO,
            RunStart::Queued | RunStart::Forked(_) | RunStart::Resumed(_) => {
                at.duration_since(record.created_at)
            }
        };
        context
            .engine
            .metrics
            .run_started(Duration::try_from(queue_time).unwrap_or_default());
    }
    let started = EventKind::RunStarted {
        model: context.run.agent.model.to_string(),
        agent_version: context.run.agent.version.clone(),
    };
    match start {
        RunStart::Queued | RunStart::Forked(_) | RunStart::Resumed(_) => PendingWrite {
            entries: vec![started.into()],
            ..PendingWrite::new(Change::Start {
                at,
                deadline: run_record::wall_clock_deadline(&context.run).unwrap_or((at, 0)),
            })
        },
        RunStart::New {
            acceptance,
            claim,
            request,
        } => {
            let queued = EventKind::RunQueued {
                parent_id: run.parent_id,
                tool_call_id: run.tool_call_id.clone(),
                request,
            };
            PendingWrite {
                entries: vec![queued.into(), started.into()],
                acceptance: acceptance.map(|it| (it, Arc::clone(run))),
                ..PendingWrite::new(Change::Create(Box::new(NewRun {
                    run: Arc::clone(run),
                    resume_state: run_record::continuation(&context.run),
                    claim,
                    entry: QueueEntry::STARTED,
                    node_labels: Arc::clone(&context.run.tree.node_labels),
                    pinned_agents: run_record::pinned_agents(&context.run),
                })))
            }
        }
    }
}
