//! Limits the requests and calls that read whole trees or sessions at the same time: each holds the texts of runs in memory.

use std::sync::LazyLock;

use crate::fair::fair_semaphore::{FairSemaphore, Permit};

const MAX_CONCURRENT: usize = 2;

static PERMITS: LazyLock<FairSemaphore> = LazyLock::new(|| FairSemaphore::new(MAX_CONCURRENT, &[]));

/// Waits until runs of this key may be read. Fair between keys.
pub async fn acquire(owner: Option<&str>) -> Permit {
    PERMITS.acquire(owner).await
}
