//! Writes the record. Events with a number are in the store before any subscriber sees them.

use std::sync::Arc;

use jiff::Timestamp;

use crate::domain::event::{Event, EventKind};
use crate::domain::failure::Failure;
use crate::domain::run::{Outcome, Run, Status, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::warning::RunWarning;
use crate::domain::webhook::Webhook;
use crate::engine::record::budget_charges::{self, PendingCharge};
use crate::engine::record::webhook_events;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::broadcaster::EventBroadcaster;
use crate::record::entry::{Entry, RecordedEntry};
use crate::record::event::Origin;
use crate::store::run_store::RunStore;
use crate::store::turn_record::TurnEntry;
use crate::store::{Change, FinishedRun, Progress, StoreError, Write};

/// The only writer of runs and their entries.
pub struct Journal {
    store: Arc<dyn RunStore>,
    broadcaster: Arc<EventBroadcaster>,
}

impl Journal {
    /// The store publishes through `broadcaster`.
    pub fn new(store: Arc<dyn RunStore>, broadcaster: Arc<EventBroadcaster>) -> Self {
        Self { store, broadcaster }
    }

    /// For reading.
    pub fn store(&self) -> &Arc<dyn RunStore> {
        &self.store
    }

    pub fn broadcaster(&self) -> &EventBroadcaster {
        &self.broadcaster
    }

    /// Commits a change with its entries, and returns the last event's number. A failure suspends the run's
    /// tree, and nothing is written about a suspended tree.
    pub async fn append(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        if let Change::Claim(_) = &change {
            return self.append_claim(run, change, entries).await;
        }
        let (write, charge) = build_charged_write(run, change, entries);
        let result = self.store.write(complete_write(run, write)).await;
        budget_charges::settle(run, charge, result.as_ref().err());
        suspend_on_error(run, result)
    }

    /// Commits what requests have used since the progress was recorded, if anything.
    pub async fn append_usage(
        &self,
        run: &ActiveRun,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let Some(progress) = run.changed_progress(progress) else {
            return Ok(());
        };
        let change = Change::Progress(progress);
        let committed = self.append(run, change, Vec::new());
        committed.await.map(drop)
    }

    /// Commits what a request with an idempotency key brings. If an earlier request had the key, nothing is recorded, and the run
    /// continues: so warnings and turns are left to the next write.
    async fn append_claim(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<u64, StoreError> {
        let write = build_write(run, change, entries.clone());
        let result = self.store.write(write).await;
        if result.is_ok() {
            run.turn_log.add_entries(&entries);
        }
        suspend_on_error(run, result)
    }

    /// Commits a change that a client requested. If that fails, only the client is notified: the run continues.
    /// Returns the last event's number; 0 if the store ignored the change.
    pub async fn append_request(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        self.store.write(build_write(run, change, entries)).await
    }

    /// Writes a change without waiting for the commit, if the next recorded step makes up for its loss.
    pub async fn enqueue(
        &self,
        run: &ActiveRun,
        change: Change,
        entries: Vec<Entry>,
    ) -> Result<(), StoreError> {
        check_not_suspended(run)?;
        let (write, charge) = build_charged_write(run, change, entries);
        let result = self.store.enqueue(complete_write(run, write)).await;
        budget_charges::settle(run, charge, result.as_ref().err());
        suspend_on_error(run, result)
    }

    /// Commits a write like [`Journal::append`], with writes about other runs in the same transaction.
    pub async fn append_with(
        &self,
        run: &ActiveRun,
        write: Write,
        others: Vec<Write>,
    ) -> Result<u64, StoreError> {
        check_not_suspended(run)?;
        let write = complete_write(run, write);
        let result = self.store.write_with(write, others).await;
        suspend_on_error(run, result)
    }

    /// Commits a change and an entry of a run that is not driven at the moment. Returns its number; 0 if the store ignored the
    /// change.
    pub async fn append_inactive(
        &self,
        run: &Run,
        change: Change,
        entry: Entry,
    ) -> Result<u64, StoreError> {
        let mut write = inactive_write(run, change, vec![entry]);
        if run.parent_id.is_none() {
            let webhooks = self.store.webhooks(run.id).await?;
            write = with_deliveries(write, &webhooks, Status::Running, (&run.usage, &run.tree));
        }
        self.store.write(write).await
    }

    /// Commits warnings of a run that is not driven at the moment.
    pub async fn warn_inactive(
        &self,
        run: &Run,
        warnings: Vec<RunWarning>,
    ) -> Result<(), StoreError> {
        let write = Write {
            warnings: Some(warnings),
            ..inactive_write(run, Change::Unchanged, Vec::new())
        };
        self.store.write(write).await.map(drop)
    }

    /// Commits the failure of a run that no process drives any more, and notifies its webhooks.
    pub async fn close_orphan(
        &self,
        run: &Run,
        webhooks: &[Arc<Webhook>],
        failure: Failure,
    ) -> Result<(), StoreError> {
        let kind = EventKind::RunFailed {
            error: failure.clone(),
        };
        let closing = FinishedRun {
            completion_status: None,
            outcome: Outcome::Failed {
                failure,
                partial: run.partial_content.clone(),
            },
            finished_at: now(),
            progress: Progress {
                turns: run.turns,
                model: run.model.clone(),
                stop_reason: run.stop_reason.clone(),
                usage: run.usage,
                models: Vec::new(),
                charges: Vec::new(),
            },
            tree_usage: run.tree,
            messages: None,
            scorers: Vec::new(),
        };
        let change = Change::Finish(Box::new(closing));
        let write = inactive_write(run, change, vec![kind.into()]);
        let write = with_deliveries(write, webhooks, run.status, (&run.usage, &run.tree));
        self.store.write(write).await.map(drop)
    }
}

fn check_not_suspended(run: &ActiveRun) -> Result<(), StoreError> {
    match run.is_suspended() {
        true => Err(StoreError::Suspended),
        false => Ok(()),
    }
}

fn suspend_on_error<T>(run: &ActiveRun, result: Result<T, StoreError>) -> Result<T, StoreError> {
    if let Err(error) = &result {
        run.suspend(error);
    }
    result
}

/// A write about a run that is not driven at the moment.
pub fn inactive_write(run: &Run, change: Change, entries: Vec<Entry>) -> Write {
    write(Origin::from(run), change, entries)
}

fn write(origin: Origin, change: Change, entries: Vec<Entry>) -> Write {
    // The end has one time, in the row of the run, its event and its webhook.
    let time = match &change {
        Change::Finish(finished) => finished.finished_at,
        _ => now(),
    };
    Write {
        origin,
        change,
        entries: recorded(time, false, entries).collect(),
        deliveries: Vec::new(),
        warnings: None,
        turns: Vec::new(),
    }
}

fn recorded(
    time: Timestamp,
    is_copied: bool,
    entries: impl IntoIterator<Item = Entry>,
) -> impl Iterator<Item = RecordedEntry> {
    let entries = entries.into_iter();
    entries.map(move |entry| RecordedEntry {
        time,
        is_copied,
        entry,
    })
}

/// The entries of a run that a fork begins with: those of its beginning, and those that are copied from its source.
pub fn fork_entries(
    begun: impl IntoIterator<Item = EventKind>,
    copied: Vec<Entry>,
) -> Vec<RecordedEntry> {
    let (time, begun) = (now(), begun.into_iter().map(Entry::Event));
    let begun = recorded(time, false, begun);
    begun.chain(recorded(time, true, copied)).collect()
}

/// Adds the warnings and the turns that are not recorded yet. If the write fails, the tree is suspended: it keeps the
/// warnings, and takes the turns again.
fn complete_write(run: &ActiveRun, mut write: Write) -> Write {
    let entries = write.entries.iter().map(|it| &it.entry);
    run.turn_log.add_entries(entries);
    write.turns.extend(run.turn_log.take_unrecorded());
    write.warnings = run.take_unrecorded_warnings();
    write
}

/// A write about an active run that also charges budgets over time.
fn build_charged_write(
    run: &ActiveRun,
    mut change: Change,
    mut entries: Vec<Entry>,
) -> (Write, PendingCharge) {
    let charge = budget_charges::charge(run, &mut change, &mut entries);
    let mut write = build_write(run, change, entries);
    write.deliveries.extend(charge.deliveries());
    (write, charge)
}

/// A write about an active run, including its webhook deliveries.
pub fn build_write(run: &ActiveRun, change: Change, entries: Vec<Entry>) -> Write {
    with_own_deliveries(run, write(run.origin(), change, entries))
}

/// As [`build_write`], of a root that is a fork.
pub fn build_fork_write(
    run: &ActiveRun,
    change: Change,
    entries: Vec<RecordedEntry>,
    turns: Vec<TurnEntry>,
) -> Write {
    let write = Write {
        entries,
        turns,
        ..write(run.origin(), change, Vec::new())
    };
    with_own_deliveries(run, write)
}

fn with_own_deliveries(run: &ActiveRun, write: Write) -> Write {
    match run.parent {
        None => {
            let (own, tree) = run.usage();
            with_deliveries(write, &run.tree.webhooks, Status::Running, (&own, &tree))
        }
        Some(_) => write,
    }
}

/// Adds the deliveries of a root's events.
fn with_deliveries(
    mut write: Write,
    webhooks: &[Arc<Webhook>],
    status: Status,
    usage: (&Usage, &TreeUsage),
) -> Write {
    if !webhooks.is_empty() {
        let events: Vec<Event> = write.origin.events(&write.entries).collect();
        write.deliveries = webhook_events::deliveries(webhooks, &events, status, usage);
    }
    write
}
