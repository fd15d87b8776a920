//! A store over the real one that lets so many writes through and then takes no more, as if the process had died
//! between two commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axed::domain::attachment::{Blobs, Digest};
use axed::domain::event::StoredEvent;
use axed::domain::run::{Run, RunId};
use axed::domain::webhook::DeliveryId;
use axed::store::outbox::{Delivery, Due, DueQuery, Tried};
use axed::store::{
    ChildCall, ClaimKey, Claimed, EventQuery, Gap, NewestEnded, Outlived, OutlivedPage, RunFilter,
    RunPage, RunStore, SessionQuery, Step, StoreError, Unfinished, Write,
};
use futures_util::future::{BoxFuture, pending};
use tokio::sync::{Notify, watch};

/// The store until it dies.
pub struct Crashing {
    real: Arc<dyn RunStore>,
    writes: AtomicUsize,
    lets_through: usize,
    told: watch::Sender<usize>,
}

impl Crashing {
    /// Lets so many writes through.
    pub fn new(real: Arc<dyn RunStore>, lets_through: usize) -> Self {
        Self {
            real,
            writes: AtomicUsize::new(0),
            lets_through,
            told: watch::Sender::new(0),
        }
    }

    /// Waits until so many writes have been handed over.
    pub async fn handed_over(&self, count: usize) {
        let mut told = self.told.subscribe();
        let reached = told.wait_for(|writes| *writes >= count).await;
        reached.expect("the store is there");
    }

    /// Waits until it has died.
    pub async fn died(&self) {
        self.handed_over(self.lets_through.saturating_add(1)).await;
    }

    /// How many writes were handed over.
    pub fn writes(&self) -> usize {
        self.writes.load(Ordering::SeqCst)
    }

    fn lives(&self) -> bool {
        let before = self.writes.fetch_add(1, Ordering::SeqCst);
        self.told
            .send_modify(|writes| *writes = (*writes).max(before + 1));
        before < self.lets_through
    }
}

impl RunStore for Crashing {
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        match self.lives() {
            true => self.real.write(write),
            false => Box::pin(pending()),
        }
    }

    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        match self.lives() {
            true => self.real.write_with(write, others),
            false => Box::pin(pending()),
        }
    }

    fn post(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        match self.lives() {
            true => self.real.post(write),
            false => Box::pin(pending()),
        }
    }

    fn on_gap(&self, gap: Gap) {
        self.real.on_gap(gap);
    }

    fn mend(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<(), StoreError>> {
        self.real.mend(roots)
    }

    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
        self.real.run(id)
    }

    fn session(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.real.session(query)
    }

    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
        self.real.list(filter)
    }

    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.real.tree(id)
    }

    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
        self.real.children(id)
    }

    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
        self.real.child_calls(id)
    }

    fn steps(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>> {
        self.real.steps(id)
    }

    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
        self.real.blobs(digests)
    }

    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
        self.real.events(query)
    }

    fn unfinished(&self) -> BoxFuture<'_, Result<Vec<Unfinished>, StoreError>> {
        self.real.unfinished()
    }

    fn claimed(&self, key: ClaimKey) -> BoxFuture<'_, Result<Option<Claimed>, StoreError>> {
        self.real.claimed(key)
    }

    fn due(&self, query: DueQuery) -> BoxFuture<'_, Result<Due, StoreError>> {
        self.real.due(query)
    }

    fn tried(&self, tried: Tried) -> BoxFuture<'_, Result<(), StoreError>> {
        self.real.tried(tried)
    }

    fn deliveries(&self, run: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
        self.real.deliveries(run)
    }

    fn resend(&self, run: RunId, id: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.real.resend(run, id)
    }

    fn outbox(&self) -> Arc<Notify> {
        self.real.outbox()
    }

    fn outlived(&self, query: Outlived) -> BoxFuture<'_, Result<OutlivedPage, StoreError>> {
        self.real.outlived(query)
    }

    fn newest_ended(&self, query: NewestEnded) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        self.real.newest_ended(query)
    }

    fn tidy(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.real.tidy()
    }

    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.real.delete(root)
    }

    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.real.check()
    }

    fn commits(&self) -> u64 {
        self.real.commits()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.real.close()
    }
}
