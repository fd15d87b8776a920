//! Deletes ended trees by age and by count, and returns the space to the disk. Works in small steps with rests, so that
//! runs are not delayed.

use std::time::Duration;

use futures_util::future::join_all;
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Retention, RetentionLimit};
use crate::domain::batch::MAX_RECORDING;
use crate::domain::run::{RunId, Status, now};
use crate::engine::wall_clock::{self, WallClock};
use crate::store::StoreError;
use crate::store::batches::BatchRecords;
use crate::store::encoding::clock_skew::{created_ms, first_id};
use crate::store::leadership::Leadership;
use crate::store::retention::{Cutoff, ExpiredQuery, NthNewestQuery, RunRetention};
use crate::store::run_store::RunStore;

/// The time between two passes, unless an age requires a shorter one. Passes also return the space of trees that
/// clients deleted.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest time between two passes.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// How long the results of a batch without runs are kept.
const BATCH_AGE: Duration = Duration::from_secs(24 * 3600);
/// How old a batch that is not accepted has to be. A younger one may be one that a node, whose clock is another, records now.
const UNACCEPTED_AGE: Duration = MAX_RECORDING.saturating_mul(2);
/// The time between two searches for batches to remove, accepted or not.
const BATCH_INTERVAL: Duration = Duration::from_secs(3600);
/// Trees that are deleted at once: the store commits concurrent writes together.
const DELETE_BATCH: usize = 64;
/// Trees of one status that may fail to be deleted before the store is taken to be out of order.
const MAX_FAILURES: usize = 16;
/// Roots counted in one read.
const COUNT_PAGE: usize = 5_000;

/// Runs passes until `stop` is cancelled, while this process is the leader. A later pass, also in another process, deletes
/// what an interrupted one did not.
pub async fn run(
    store: &dyn RunStore,
    (retention, usage_retention): (Retention, Option<Duration>),
    leadership: &Leadership,
    stop: CancellationToken,
) {
    let interval = interval(&retention);
    let mut clock = None;
    let passes = async {
        let mut next_search = Instant::now();
        loop {
            leadership.gained().await;
            let mut pass = Pass::default();
            match trusted_now(store, &mut clock).await {
                Ok(now) => pass.now = now,
                Err(error) => pass.error = Some(error),
            }
            if let Some(now) = pass.now {
                pass.add(trim_usage(store, usage_retention, now).await);
                if next_search <= Instant::now() {
                    let trimmed = trim_batches(store, now).await;
                    if trimmed.is_ok() {
                        next_search = Instant::now() + BATCH_INTERVAL;
                    }
                    pass.add(trimmed);
                }
            }
            run_pass(store, &retention, &mut pass).await;
            if pass.removed > 0 {
                let removed = pass.removed;
                tracing::info!("Removed {removed} ended root runs with their trees: retention");
            }
            match pass.error {
                None => {}
                Some(StoreError::Closed) => return,
                Some(error) => {
                    tracing::warn!(error = %error, "Retention could not remove everything and tries again in {interval:?}: {error}");
                }
            }
            tokio::time::sleep(interval).await;
        }
    };
    tokio::select! {
        () = passes => {}
        () = stop.cancelled() => {}
    }
}

/// A tenth of the shortest age, so that no tree is kept much longer than configured.
fn interval(retention: &Retention) -> Duration {
    let ages = [retention.completed, retention.failed, retention.cancelled];
    let shortest = ages.iter().filter_map(|policy| policy.age).min();
    shortest.map_or(DEFAULT_INTERVAL, |age| {
        (age / 10).clamp(MIN_INTERVAL, DEFAULT_INTERVAL)
    })
}

/// The time by which runs are old. `None` if the clock may be wrong, by those of earlier passes, or by the newest ended run at
/// the first pass.
async fn trusted_now(
    store: &dyn RunRetention,
    clock: &mut Option<WallClock>,
) -> Result<Option<Timestamp>, StoreError> {
    let (now, at) = (now(), Instant::now());
    let newest = match clock {
        Some(_) => None,
        // Those of the last hour may have been made by a clock that is wrong now.
        None => newest_ended(store, now.checked_sub(wall_clock::PROBATION).ok()).await?,
    };
    let clock = clock.get_or_insert_with(|| WallClock::new(now, at, newest));
    Ok(clock.read(now, at).then_some(now))
}

/// When the newest ended root was created that is older than this time.
async fn newest_ended(
    store: &dyn RunRetention,
    before: Option<Timestamp>,
) -> Result<Option<Timestamp>, StoreError> {
    let before = before.map(|before| RunId(first_id(before)));
    let mut newest = None;
    for status in [Status::Completed, Status::Failed, Status::Cancelled] {
        let query = NthNewestQuery {
            status,
            before,
            offset: 0,
        };
        newest = newest.max(store.nth_newest_ended(query).await?);
    }
    Ok(newest.and_then(|run| Timestamp::from_millisecond(created_ms(run)).ok()))
}

/// What a pass has done.
#[derive(Default)]
struct Pass {
    /// See [`trusted_now`].
    now: Option<Timestamp>,
    removed: usize,
    /// The last error. Everything that it did not affect was done.
    error: Option<StoreError>,
}

impl Pass {
    fn add(&mut self, result: Result<(), StoreError>) {
        if let Err(error) = result {
            self.error = Some(error);
        }
    }
}

/// Deletes all expired trees and frees their space.
async fn run_pass(store: &dyn RunRetention, retention: &Retention, pass: &mut Pass) {
    for (status, policy) in [
        (Status::Completed, retention.completed),
        (Status::Failed, retention.failed),
        (Status::Cancelled, retention.cancelled),
    ] {
        let deleted = delete_expired(store, status, policy, pass).await;
        pass.add(deleted);
    }
    let freed = free_space(store).await;
    pass.add(freed);
}

async fn delete_expired(
    store: &dyn RunRetention,
    status: Status,
    policy: RetentionLimit,
    pass: &mut Pass,
) -> Result<(), StoreError> {
    for cutoff in cutoffs(store, status, policy, pass.now).await? {
        delete_before(store, status, cutoff, pass).await?;
    }
    Ok(())
}

async fn free_space(store: &dyn RunRetention) -> Result<(), StoreError> {
    let mut step_started = Instant::now();
    while store.vacuum().await? {
        throttle(&mut step_started).await;
    }
    Ok(())
}

/// Removes the sums of usage that are older than `max_age`.
async fn trim_usage(
    store: &dyn RunStore,
    max_age: Option<Duration>,
    now: Timestamp,
) -> Result<(), StoreError> {
    let Some(before) = max_age.and_then(|age| now.checked_sub(age).ok()) else {
        return Ok(());
    };
    let mut step_started = Instant::now();
    while store.trim_usage(before).await?
        || store.trim_scores(before).await?
        || store.trim_evals(before).await?
    {
        throttle(&mut step_started).await;
    }
    Ok(())
}

async fn trim_batches(store: &dyn BatchRecords, now: Timestamp) -> Result<(), StoreError> {
    if let Ok(before) = now.checked_sub(BATCH_AGE) {
        trim_unused_batches(store, before).await?;
    }
    // The lines of batches whose requests ended early.
    if let Ok(before) = now.checked_sub(UNACCEPTED_AGE) {
        store.trim_unaccepted_lines(before).await?;
    }
    Ok(())
}

/// Removes batches that ended before this time and whose runs are all deleted.
async fn trim_unused_batches(
    store: &dyn BatchRecords,
    before: Timestamp,
) -> Result<(), StoreError> {
    let mut after = None;
    let mut step_started = Instant::now();
    loop {
        let page = store.unused_batches(before, after).await?;
        throttle(&mut step_started).await;
        for id in page.ids {
            while store.trim_batch(id, before).await? {
                throttle(&mut step_started).await;
            }
            throttle(&mut step_started).await;
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

/// The newest roots that have expired, by age and by count.
async fn cutoffs(
    store: &dyn RunRetention,
    status: Status,
    policy: RetentionLimit,
    now: Option<Timestamp>,
) -> Result<Vec<Cutoff>, StoreError> {
    let mut cutoffs = Vec::new();
    // An age before the beginning of time expires nothing.
    if let (Some(age), Some(now)) = (policy.age, now)
        && let Ok(since) = now.checked_sub(age)
    {
        cutoffs.push(Cutoff::EndedBefore(since));
    }
    if let Some(count) = policy.count
        && let Some(oldest_root) = oldest_retained(store, status, count).await?
    {
        cutoffs.push(Cutoff::CreatedBefore(oldest_root));
    }
    Ok(cutoffs)
}

/// The oldest root that `count` allows to keep; `None` if there are not more.
async fn oldest_retained(
    store: &dyn RunRetention,
    status: Status,
    count: usize,
) -> Result<Option<RunId>, StoreError> {
    let mut remaining = count;
    let mut before = None;
    let mut step_started = Instant::now();
    while remaining > 0 {
        let step = remaining.min(COUNT_PAGE);
        let offset = step - 1;
        before = store
            .nth_newest_ended(NthNewestQuery {
                status,
                before,
                offset,
            })
            .await?;
        if before.is_none() {
            return Ok(None);
        }
        remaining -= step;
        throttle(&mut step_started).await;
    }
    Ok(before)
}

/// Deletes expired trees. A few that cannot be deleted do not keep the others.
async fn delete_before(
    store: &dyn RunRetention,
    status: Status,
    cutoff: Cutoff,
    pass: &mut Pass,
) -> Result<(), StoreError> {
    let (mut after, mut failures) = (None, 0);
    let mut step_started = Instant::now();
    loop {
        let query = ExpiredQuery {
            status,
            cutoff,
            after,
        };
        let page = store.expired_roots(query).await?;
        for roots in page.roots.chunks(DELETE_BATCH) {
            let deleted = join_all(roots.iter().map(|root| store.delete(*root))).await;
            pass.removed += deleted.iter().filter(|it| matches!(it, Ok(true))).count();
            for deleted in deleted {
                match deleted {
                    Ok(_) => {}
                    Err(StoreError::Closed) => return Err(StoreError::Closed),
                    Err(error) if failures == MAX_FAILURES => return Err(error),
                    Err(error) => {
                        failures += 1;
                        pass.error = Some(error);
                    }
                }
            }
            throttle(&mut step_started).await;
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

/// Rests as long as the step took: a busy store gets longer rests.
async fn throttle(step_started: &mut Instant) {
    tokio::time::sleep(step_started.elapsed()).await;
    *step_started = Instant::now();
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::interval;
    use crate::config::{Retention, RetentionLimit};

    #[test]
    fn short_ages_shorten_the_interval() {
        let with = |seconds| Retention {
            failed: RetentionLimit {
                age: Some(Duration::from_secs(seconds)),
                count: None,
            },
            ..Retention::default()
        };
        assert_eq!(interval(&Retention::default()), Duration::from_secs(60));
        assert_eq!(interval(&with(86_400)), Duration::from_secs(60));
        assert_eq!(interval(&with(100)), Duration::from_secs(10));
        assert_eq!(interval(&with(1)), Duration::from_secs(1));
    }
}
