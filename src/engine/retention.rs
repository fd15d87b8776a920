//! Removes what is kept no longer: ended trees by age and by count, and then the space that they leave. Works in small
//! steps and rests between them, so that runs do not wait. Knows no storage engine.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Kept, Retention};
use crate::domain::run::{RunId, Status, now};
use crate::store::{EndedBefore, NewestEnded, Outlived, RunStore, StoreError};

/// From one pass to the next, where no age asks for more. Passes also give back what clients' deletions left.
const USUAL_PAUSE: Duration = Duration::from_secs(60);
/// However short the ages are.
const LEAST_PAUSE: Duration = Duration::from_secs(1);
/// Trees handed over at once: the store commits together what waits together.
const AT_ONCE: usize = 8;
/// Roots counted in one read.
const COUNTED: usize = 5_000;

/// Passes now and again and again, until it is told to stop. What a pass had no time for, the next one finds, in another
/// process too.
pub async fn keep(store: Arc<dyn RunStore>, retention: Retention, stop: CancellationToken) {
    let pause = pause(&retention);
    let passing = async {
        loop {
            match pass(store.as_ref(), &retention).await {
                Ok(0) => {}
                Ok(removed) => {
                    tracing::info!("Removed {removed} ended root runs with their trees: retention");
                }
                Err(StoreError::Closed) => return,
                Err(error) => {
                    tracing::warn!(error = %error, "Retention stopped halfway and goes on in {pause:?}: {error}");
                }
            }
            tokio::time::sleep(pause).await;
        }
    };
    tokio::select! {
        () = passing => {}
        () = stop.cancelled() => {}
    }
}

/// A tenth of the shortest age, so that nothing is kept much longer than it should be.
fn pause(retention: &Retention) -> Duration {
    let ages = [retention.completed, retention.failed, retention.cancelled];
    let shortest = ages.iter().filter_map(|kept| kept.age).min();
    shortest.map_or(USUAL_PAUSE, |age| {
        (age / 10).clamp(LEAST_PAUSE, USUAL_PAUSE)
    })
}

/// Removes everything that is due and tidies up; returns how many roots went.
async fn pass(store: &dyn RunStore, retention: &Retention) -> Result<usize, StoreError> {
    let mut removed = 0;
    for (status, kept) in [
        (Status::Completed, retention.completed),
        (Status::Failed, retention.failed),
        (Status::Cancelled, retention.cancelled),
    ] {
        for before in due(store, status, kept).await? {
            removed += remove(store, status, before).await?;
        }
    }
    let mut began = Instant::now();
    while store.tidy().await? {
        rest(&mut began).await;
    }
    Ok(removed)
}

/// Where what is old begins now, by each of the two bounds.
async fn due(
    store: &dyn RunStore,
    status: Status,
    kept: Kept,
) -> Result<Vec<EndedBefore>, StoreError> {
    let mut due = Vec::new();
    // Nothing is older than time itself.
    if let Some(age) = kept.age
        && let Ok(since) = now().checked_sub(age)
    {
        due.push(EndedBefore::Time(since));
    }
    if let Some(count) = kept.count
        && let Some(oldest) = oldest_kept(store, status, count).await?
    {
        due.push(EndedBefore::Run(oldest));
    }
    Ok(due)
}

/// The oldest root that is kept where so many are; none where there are not more.
async fn oldest_kept(
    store: &dyn RunStore,
    status: Status,
    count: usize,
) -> Result<Option<RunId>, StoreError> {
    let mut left = count;
    let mut before = None;
    let mut began = Instant::now();
    while left > 0 {
        let step = left.min(COUNTED);
        let but = step - 1;
        before = store
            .newest_ended(NewestEnded {
                status,
                before,
                but,
            })
            .await?;
        if before.is_none() {
            return Ok(None);
        }
        left -= step;
        rest(&mut began).await;
    }
    Ok(before)
}

/// Removes what is old; returns how many roots went.
async fn remove(
    store: &dyn RunStore,
    status: Status,
    before: EndedBefore,
) -> Result<usize, StoreError> {
    let mut removed = 0;
    let mut after = None;
    let mut began = Instant::now();
    loop {
        let query = Outlived {
            status,
            before,
            after,
        };
        let page = store.outlived(query).await?;
        for roots in page.roots.chunks(AT_ONCE) {
            let gone = try_join_all(roots.iter().map(|root| store.delete(*root))).await?;
            removed += gone.into_iter().filter(|gone| *gone).count();
            rest(&mut began).await;
        }
        after = page.next;
        if after.is_none() {
            return Ok(removed);
        }
    }
}

/// Rests as long as the step took: the busier the store, the longer.
async fn rest(began: &mut Instant) {
    tokio::time::sleep(began.elapsed()).await;
    *began = Instant::now();
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::pause;
    use crate::config::{Kept, Retention};

    #[test]
    fn short_ages_are_looked_after_more_often() {
        let with = |seconds| Retention {
            failed: Kept {
                age: Some(Duration::from_secs(seconds)),
                count: None,
            },
            ..Retention::default()
        };
        assert_eq!(pause(&Retention::default()), Duration::from_secs(60));
        assert_eq!(pause(&with(86_400)), Duration::from_secs(60));
        assert_eq!(pause(&with(100)), Duration::from_secs(10));
        assert_eq!(pause(&with(1)), Duration::from_secs(1));
    }
}
