//! Starts the runs of batches, a few at a time, and finishes a batch when each line has its result.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::domain::batch::{Batch, BatchId, BatchLine};
use crate::domain::counted::counted;
use crate::domain::run::{RunId, now};
use crate::engine::request::{RunRequest, StartError};
use crate::engine::runner::Runner;
use crate::engine::state::period_budgets::BudgetExhausted;
use crate::standing_task;
use crate::store::batches::{BatchChange, LineQuery};
use crate::store::{IdempotencyClaim, StoreError};
use crate::web::batches::line;
use crate::web::state::driver_handle::DriverHandle;
use crate::web::state::{AppState, Settings};

/// Runs of one batch that have not ended.
const MAX_RUNS: usize = 50;
/// Batches of one key whose runs start at the same time; the others wait for their end.
const MAX_BATCHES: usize = 4;
/// When a step is tried again that the store or a full queue prevented.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// When a used-up budget is looked at again, unless it resets before: the clock may have been wrong.
const BUDGET_INTERVAL: Duration = Duration::from_secs(60);
/// How long one wait for the end of a run takes at most.
const MAX_WAIT: Duration = Duration::from_secs(3600);

pub struct Feeder {
    runner: Runner,
    settings: Arc<Settings>,
    handle: Arc<DriverHandle<BatchId>>,
}

/// A batch that is not fed any more: it has ended, or has no runs and waits for a budget.
struct Fed {
    batch: Batch,
    exhausted: Option<BudgetExhausted>,
}

/// A line that waits for a budget.
struct Deferred {
    line: BatchLine,
    exhausted: BudgetExhausted,
}

/// A wait for a budget.
struct BudgetWait {
    exhausted: BudgetExhausted,
    until: Instant,
}

impl BudgetWait {
    fn new(exhausted: BudgetExhausted) -> Self {
        let remaining = exhausted.resets_at.duration_since(now());
        let remaining = Duration::try_from(remaining).unwrap_or_default();
        let pause = remaining.clamp(RETRY_INTERVAL, BUDGET_INTERVAL);
        Self {
            exhausted,
            until: Instant::now() + pause,
        }
    }

    fn is_over(&self) -> bool {
        self.until <= Instant::now()
    }
}

/// Why a line has no run.
enum Refusal {
    /// The queue is full, or the store does not work.
    Busy,
    Budget(BudgetExhausted),
    /// For good; the JSON of the problem.
    Rejected(String),
}

impl Feeder {
    pub fn new(state: &AppState) -> Self {
        Self {
            runner: state.runner.clone(),
            settings: Arc::clone(&state.settings),
            handle: Arc::clone(&state.feeder),
        }
    }

    /// Feeds all batches until `stop` is cancelled, while this process is the leader. The next start, or leader, continues.
    pub async fn run(&self, stop: CancellationToken) {
        standing_task::run("Feeding batches", &stop, |stop| self.run_until(stop)).await;
    }

    async fn run_until(&self, stop: CancellationToken) {
        let leadership = self.runner.leadership();
        let feed = async {
            loop {
                leadership.gained().await;
                tokio::select! {
                    () = self.feed_all() => return,
                    () = leadership.lost() => {}
                }
            }
        };
        tokio::select! {
            () = feed => {}
            () = stop.cancelled() => {}
        }
    }

    async fn feed_all(&self) {
        // Those that were fed before the leadership was lost.
        self.handle.leave_all();
        let mut feeds: FuturesUnordered<BoxFuture<'_, Fed>> = FuturesUnordered::new();
        let mut fed: HashSet<BatchId> = HashSet::new();
        let mut by_owner: HashMap<Option<String>, usize> = HashMap::new();
        // Those of batches that have not ended.
        let mut waits: HashMap<BatchId, BudgetWait> = HashMap::new();
        loop {
            let mut is_complete = true;
            match self.runner.store().unfinished_batches().await {
                Ok(batches) => {
                    for batch in batches {
                        if fed.contains(&batch.id) {
                            if batch.cancel_reason.is_some() {
                                // Another node may have accepted the cancel.
                                self.handle.cancel(batch.id);
                            }
                            continue;
                        }
                        let wait = waits.get(&batch.id);
                        if batch.cancel_reason.is_none() && wait.is_some_and(|it| !it.is_over()) {
                            continue;
                        }
                        let active = by_owner.entry(batch.owner.clone()).or_default();
                        if *active < MAX_BATCHES {
                            *active += 1;
                            fed.insert(batch.id);
                            feeds.push(Box::pin(self.feed(batch)));
                        }
                    }
                }
                Err(StoreError::Closed) => return,
                Err(_) => is_complete = false,
            }
            let open_waits = waits.values().filter(|wait| !wait.is_over());
            let next_wait = open_waits.map(|wait| wait.until).min();
            tokio::select! {
                Some(end) = feeds.next() => {
                    fed.remove(&end.batch.id);
                    if let Some(active) = by_owner.get_mut(&end.batch.owner) {
                        *active -= 1;
                    }
                    by_owner.retain(|_, active| *active > 0);
                    update_waits(&mut waits, end);
                }
                () = self.handle.changed() => {}
                () = self.runner.leadership().poll() => {}
                () = sleep_until(next_wait) => {}
                () = tokio::time::sleep(RETRY_INTERVAL), if !is_complete => {}
            }
        }
    }

    /// Feeds one batch to its end, or until it has no runs and waits for a budget: other batches are fed meanwhile.
    async fn feed(&self, batch: Batch) -> Fed {
        let token = self.handle.enter(batch.id);
        // Read after the token is there: a cancel in between is seen in one of both.
        if retried(|| self.runner.store().batch(batch.id))
            .await
            .is_some_and(|it| it.cancel_reason.is_some())
        {
            token.cancel();
        }
        let mut lines = VecDeque::new();
        let mut from = Some(0);
        let mut running = FuturesUnordered::new();
        let mut wait: Option<BudgetWait> = None;
        loop {
            // A cancelled batch waits for nothing.
            wait = wait.filter(|it| !it.is_over() && !token.is_cancelled());
            while wait.is_none() && running.len() < MAX_RUNS {
                if let (true, Some(start)) = (lines.is_empty(), from) {
                    lines.extend(self.open_lines(batch.id, start).await);
                    from = lines.back().map(|line: &BatchLine| line.index + 1);
                }
                match lines.pop_front() {
                    Some(line) => running.push(self.settle(&batch, line, &token)),
                    None => break,
                }
            }
            if running.is_empty() {
                break;
            }
            tokio::select! {
                settled = running.next() => {
                    if let Some(Some(Deferred { line, exhausted })) = settled {
                        lines.push_front(line);
                        wait = Some(BudgetWait::new(exhausted));
                    }
                }
                () = sleep_until(wait.as_ref().map(|wait| wait.until)) => {}
                () = token.cancelled(), if wait.is_some() => {}
            }
        }
        drop(running);
        let exhausted = wait.map(|wait| wait.exhausted);
        if exhausted.is_none() {
            let finish = BatchChange::Finish { at: now() };
            retried(|| self.runner.store().change_batch(batch.id, finish.clone())).await;
            info!(agent = %batch.agent, "{} has ended: {}", batch.id, counted(batch.lines, "line"));
        }
        self.handle.leave(batch.id);
        Fed { batch, exhausted }
    }

    async fn open_lines(&self, batch: BatchId, from: u32) -> Vec<BatchLine> {
        let query = LineQuery {
            batch,
            from,
            limit: MAX_RUNS,
            only_open: true,
        };
        retried(|| self.runner.store().batch_lines(query)).await
    }

    /// Starts the run of a line, unless it has one, and waits for its end. Returns the line if it has to wait for a budget.
    async fn settle(
        &self,
        batch: &Batch,
        line: BatchLine,
        token: &CancellationToken,
    ) -> Option<Deferred> {
        let run = match (line.run, line.body.as_deref()) {
            (Some(run), _) => run,
            (None, Some(body)) => match self.start(batch, line.index, body, token).await {
                Ok(run) => run?,
                Err(exhausted) => return Some(Deferred { line, exhausted }),
            },
            (None, None) => return None,
        };
        tokio::select! {
            () = wait_for_end(&self.runner, run) => return None,
            () = token.cancelled() => {}
        }
        let batch = retried(|| self.runner.store().batch(batch.id)).await;
        let reason = batch.and_then(|batch| batch.cancel_reason);
        retried(|| Box::pin(self.runner.cancel(run, reason.clone()))).await;
        wait_for_end(&self.runner, run).await;
        None
    }

    /// Starts the run of a line; `None` if it was rejected, or the batch is cancelled.
    async fn start(
        &self,
        batch: &Batch,
        index: u32,
        body: &str,
        token: &CancellationToken,
    ) -> Result<Option<RunId>, BudgetExhausted> {
        let refusal = loop {
            if token.is_cancelled() {
                break None;
            }
            match self.try_start(batch, index, body).await {
                Ok(run) => return Ok(Some(self.record_start(batch.id, index, run).await)),
                Err(Refusal::Busy) => {
                    tokio::select! {
                        () = tokio::time::sleep(RETRY_INTERVAL) => {}
                        () = token.cancelled() => {}
                    }
                }
                Err(refusal) => break Some(refusal),
            }
        };
        // A process that died before it recorded the start has perhaps started the run that is refused now.
        let key = claim(batch.id, index).key;
        let claimed = retried(|| self.runner.store().claimed_run(key.clone())).await;
        if let Some(claimed) = claimed {
            let run = self.record_start(batch.id, index, claimed.run).await;
            return Ok(Some(run));
        }
        match refusal {
            Some(Refusal::Budget(exhausted)) => return Err(exhausted),
            Some(Refusal::Rejected(problem)) => {
                let change = BatchChange::Rejected { index, problem };
                retried(|| self.runner.store().change_batch(batch.id, change.clone())).await;
            }
            Some(Refusal::Busy) | None => {}
        }
        Ok(None)
    }

    async fn try_start(&self, batch: &Batch, index: u32, body: &str) -> Result<RunId, Refusal> {
        let owner = batch.owner.as_deref();
        let request = line::run_request(body, &batch.agent, owner, &self.settings);
        let request = Box::pin(request).await;
        let request = request.map_err(|it| Refusal::Rejected(line::problem_json(&it)))?;
        let request = RunRequest {
            claim: Some(claim(batch.id, index)),
            ..request
        };
        match Box::pin(self.runner.start(request)).await {
            Ok(run) => Ok(run.id),
            Err(StartError::Store(StoreError::AlreadyClaimed(claimed))) => Ok(claimed.run),
            // Runs of others go first as long as the queue is full.
            Err(StartError::QueueFull(_) | StartError::Store(_) | StartError::Draining) => {
                Err(Refusal::Busy)
            }
            Err(StartError::BudgetExhausted(exhausted)) => Err(Refusal::Budget(exhausted)),
            Err(error) => Err(Refusal::Rejected(line::problem_json(&error.into()))),
        }
    }

    async fn record_start(&self, batch: BatchId, index: u32, run: RunId) -> RunId {
        let change = BatchChange::Started { index, run };
        retried(|| self.runner.store().change_batch(batch, change.clone())).await;
        run
    }
}

/// Keeps the wait of a batch that is to be fed again, and says so once for each period of its budget.
fn update_waits(waits: &mut HashMap<BatchId, BudgetWait>, fed: Fed) {
    let Fed { batch, exhausted } = fed;
    let earlier = waits.remove(&batch.id);
    let Some(exhausted) = exhausted else {
        return;
    };
    if earlier.is_none_or(|it| it.exhausted != exhausted) {
        info!(agent = %batch.agent, budget.name = %exhausted.name, "{} waits: {exhausted}", batch.id);
    }
    waits.insert(batch.id, BudgetWait::new(exhausted));
}

/// Never ends without a time.
async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

fn claim(batch: BatchId, index: u32) -> IdempotencyClaim {
    IdempotencyClaim::own(format!("BATCH {batch}"), index.to_string(), now())
}

pub async fn wait_for_end(runner: &Runner, id: RunId) {
    loop {
        match retried(|| Box::pin(runner.wait(id, MAX_WAIT))).await {
            Some(run) if !run.status.is_terminal() => tokio::time::sleep(RETRY_INTERVAL).await,
            _ => return,
        }
    }
}

/// Repeats a step until the store works. Ends never if the store is closed: then the daemon stops.
pub async fn retried<'s, T>(mut step: impl FnMut() -> BoxFuture<'s, Result<T, StoreError>>) -> T {
    loop {
        match step().await {
            Ok(value) => return value,
            Err(StoreError::Closed) => std::future::pending().await,
            Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}
