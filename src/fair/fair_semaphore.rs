//! A semaphore that calls of tools and requests to providers share. Waiters are served fairly by key, however many there are.

use crate::fair::Limits;
use crate::fair::admission::{AdmissionQueue, RunPermit};

#[derive(Debug)]
pub struct FairSemaphore {
    queue: AdmissionQueue,
    permits: usize,
}

/// A permit of the semaphore. It is released when dropped.
pub type Permit = RunPermit;

impl FairSemaphore {
    /// Divides half of the permits between these keys: no other key may take a key's share.
    pub fn new(permits: usize, keys: &[String]) -> Self {
        let limits = Limits::with_shared_permits(permits, keys);
        Self {
            queue: AdmissionQueue::new(limits),
            permits,
        }
    }

    /// Waits for a permit for `key`.
    pub async fn acquire(&self, key: Option<&str>) -> Permit {
        self.queue.enter_accepted(key, "").permit().await
    }

    pub fn available_permits(&self) -> usize {
        let (taken, _) = self.queue.load();
        self.permits.saturating_sub(taken)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::FairSemaphore;

    #[test]
    fn a_keys_backlog_leaves_the_others_their_share() {
        let keys = ["ada", "bob"].map(str::to_owned);
        let semaphore = FairSemaphore::new(4, &keys);
        let mut of_ada: Vec<_> = (0..9)
            .map(|_| Box::pin(semaphore.acquire(Some("ada"))))
            .collect();
        let acquired = of_ada.iter_mut().map(|permit| permit.now_or_never());
        let mut acquired: Vec<_> = acquired.flatten().collect();
        assert_eq!(acquired.len(), 3);
        let bob = semaphore
            .acquire(Some("bob"))
            .now_or_never()
            .expect("his share");
        let mut next = Box::pin(semaphore.acquire(Some("bob")));
        assert!(next.as_mut().now_or_never().is_none());
        // Bob was served last, so the next permit is Ada's and the one after it his, although more of hers came first.
        drop(acquired.pop());
        assert!(next.as_mut().now_or_never().is_none());
        drop(acquired.pop());
        assert!(next.now_or_never().is_some());
        drop(bob);
    }
}
