//! How many requests to runs of other nodes wait for their answers. Each has a row, and a task that looks at it now and then, also
//! after its client has gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// For each owner of runs.
const MAX_REQUESTS: usize = 256;
/// How often an answer is looked for in case the message of its node is lost: the more rarely, the more requests there are.
const MIN_POLL_SECONDS: usize = 1;
const MAX_POLL_SECONDS: usize = 5;
const REQUESTS_PER_SECOND: usize = 100;

#[derive(Default)]
pub struct SentRequests {
    by_owner: Mutex<HashMap<Option<String>, usize>>,
}

/// A request that waits for its answer.
pub struct SentRequest {
    all: Arc<SentRequests>,
    owner: Option<String>,
}

impl SentRequests {
    /// Another request to a run of this owner; `None` if there are too many.
    pub fn begin(self: &Arc<Self>, owner: Option<String>) -> Option<SentRequest> {
        let mut by_owner = self.lock();
        let count = by_owner.entry(owner.clone()).or_default();
        if *count == MAX_REQUESTS {
            return None;
        }
        *count += 1;
        drop(by_owner);
        let all = Arc::clone(self);
        Some(SentRequest { all, owner })
    }

    pub fn poll_interval(&self) -> Duration {
        let requests: usize = self.lock().values().sum();
        let seconds = requests.div_ceil(REQUESTS_PER_SECOND);
        Duration::from_secs(seconds.clamp(MIN_POLL_SECONDS, MAX_POLL_SECONDS) as u64)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Option<String>, usize>> {
        self.by_owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SentRequest {
    fn drop(&mut self) {
        let mut by_owner = self.all.lock();
        if let Some(count) = by_owner.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                by_owner.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_owner_has_a_bound() {
        let all = Arc::new(SentRequests::default());
        let owner = || Some("one".to_owned());
        let mut sent: Vec<_> = (0..MAX_REQUESTS).map(|_| all.begin(owner())).collect();
        assert!(sent.iter().all(Option::is_some));
        assert!(all.begin(owner()).is_none());
        assert!(all.begin(None).is_some());
        assert_eq!(all.poll_interval(), Duration::from_secs(3));
        sent.pop();
        assert!(all.begin(owner()).is_some());
        sent.clear();
        assert!(all.lock().is_empty());
    }
}
