//! Starts the runs of batches, a few at a time, and finishes a batch when each line has its result.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::domain::batch::{Batch, BatchId, BatchLine};
use crate::domain::run::{RunId, now};
use crate::engine::request::{RunRequest, StartError};
use crate::engine::runner::Runner;
use crate::standing_task;
use crate::store::batches::{BatchChange, LineQuery};
use crate::store::{IdempotencyClaim, IdempotencyKey, StoreError};
use crate::web::batches::handle::FeederHandle;
use crate::web::batches::line;
use crate::web::state::{AppState, Settings};

/// Runs of one batch that have not ended.
const MAX_RUNS: usize = 50;
/// Batches of one key whose runs start at the same time; the others wait for their end.
const MAX_BATCHES: usize = 4;
/// When a step is tried again that the store or a full queue prevented.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// How long one wait for the end of a run takes at most.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// How long the idempotency key of a line is kept, unless its run is deleted before.
const CLAIM_RETENTION: SignedDuration = SignedDuration::from_hours(400 * 24);
/// How old lines have to be whose request ended before the batch was accepted.
const UNACCEPTED_AGE: SignedDuration = SignedDuration::from_hours(1);

pub struct Feeder {
    runner: Runner,
    settings: Arc<Settings>,
    handle: Arc<FeederHandle>,
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
            leadership.gained().await;
            let before = now().checked_sub(UNACCEPTED_AGE).unwrap_or(Timestamp::MIN);
            if let Err(error) = self.runner.store().trim_unaccepted_lines(before).await {
                warn!(error = %error, "Lines of batches that were not accepted are removed by the next start: {error}");
            }
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
        let mut feeds: FuturesUnordered<BoxFuture<'_, Batch>> = FuturesUnordered::new();
        let mut fed: HashSet<BatchId> = HashSet::new();
        let mut by_owner: HashMap<Option<String>, usize> = HashMap::new();
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
            tokio::select! {
                Some(batch) = feeds.next() => {
                    fed.remove(&batch.id);
                    if let Some(active) = by_owner.get_mut(&batch.owner) {
                        *active -= 1;
                    }
                    by_owner.retain(|_, active| *active > 0);
                }
                () = self.handle.changed() => {}
                () = self.runner.leadership().poll() => {}
                () = tokio::time::sleep(RETRY_INTERVAL), if !is_complete => {}
            }
        }
    }

    /// Feeds one batch to its end.
    async fn feed(&self, batch: Batch) -> Batch {
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
        loop {
            while running.len() < MAX_RUNS {
                if let (true, Some(start)) = (lines.is_empty(), from) {
                    lines.extend(self.open_lines(batch.id, start).await);
                    from = lines.back().map(|line: &BatchLine| line.index + 1);
                }
                match lines.pop_front() {
                    Some(line) => running.push(self.settle(&batch, line, &token)),
                    None => break,
                }
            }
            if running.next().await.is_none() {
                break;
            }
        }
        drop(running);
        let finish = BatchChange::Finish { at: now() };
        retried(|| self.runner.store().change_batch(batch.id, finish.clone())).await;
        self.handle.leave(batch.id);
        info!(agent = %batch.agent, "{} has ended: {} lines", batch.id, batch.lines);
        batch
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

    /// Starts the run of a line, unless it has one, and waits for its end.
    async fn settle(&self, batch: &Batch, line: BatchLine, token: &CancellationToken) {
        let run = match (line.run, line.body) {
            (Some(run), _) => run,
            (None, Some(body)) => match self.start(batch, line.index, body, token).await {
                Some(run) => run,
                None => return,
            },
            (None, None) => return,
        };
        tokio::select! {
            () = wait_for_end(&self.runner, run) => return,
            () = token.cancelled() => {}
        }
        let batch = retried(|| self.runner.store().batch(batch.id)).await;
        let reason = batch.and_then(|batch| batch.cancel_reason);
        retried(|| Box::pin(self.runner.cancel(run, reason.clone()))).await;
        wait_for_end(&self.runner, run).await;
    }

    /// Starts the run of a line; `None` if it was rejected, or the batch is cancelled.
    async fn start(
        &self,
        batch: &Batch,
        index: u32,
        body: String,
        token: &CancellationToken,
    ) -> Option<RunId> {
        let change = loop {
            if token.is_cancelled() {
                return None;
            }
            let request =
                line::run_request(&body, &batch.agent, batch.owner.as_deref(), &self.settings);
            let started = match Box::pin(request).await {
                Ok(request) => {
                    let request = RunRequest {
                        claim: Some(claim(batch.id, index)),
                        ..request
                    };
                    Box::pin(self.runner.start(request)).await.map(|run| run.id)
                }
                Err(problem) => {
                    let problem = line::problem_json(&problem);
                    break BatchChange::Rejected { index, problem };
                }
            };
            match started {
                Ok(run) => break BatchChange::Started { index, run },
                Err(StartError::Store(StoreError::AlreadyClaimed(claimed))) => {
                    let run = claimed.run;
                    break BatchChange::Started { index, run };
                }
                // Runs of others go first as long as the queue is full.
                Err(StartError::QueueFull(_) | StartError::Store(_) | StartError::Draining) => {
                    tokio::select! {
                        () = tokio::time::sleep(RETRY_INTERVAL) => {}
                        () = token.cancelled() => {}
                    }
                }
                Err(error) => {
                    let problem = line::problem_json(&error.into());
                    break BatchChange::Rejected { index, problem };
                }
            }
        };
        retried(|| self.runner.store().change_batch(batch.id, change.clone())).await;
        match change {
            BatchChange::Started { run, .. } => Some(run),
            _ => None,
        }
    }
}

fn claim(batch: BatchId, index: u32) -> IdempotencyClaim {
    IdempotencyClaim {
        key: IdempotencyKey {
            credential: String::new(),
            route: format!("BATCH {batch}"),
            key: index.to_string(),
        },
        body_hash: [0; 32],
        expires_at: now().checked_add(CLAIM_RETENTION).unwrap_or(Timestamp::MAX),
    }
}

async fn wait_for_end(runner: &Runner, id: RunId) {
    loop {
        match retried(|| Box::pin(runner.wait(id, MAX_WAIT))).await {
            Some(run) if !run.status.is_terminal() => tokio::time::sleep(RETRY_INTERVAL).await,
            _ => return,
        }
    }
}

/// Repeats a step until the store works. Ends never if the store is closed: then the daemon stops.
async fn retried<'s, T>(mut step: impl FnMut() -> BoxFuture<'s, Result<T, StoreError>>) -> T {
    loop {
        match step().await {
            Ok(value) => return value,
            Err(StoreError::Closed) => std::future::pending().await,
            Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}
