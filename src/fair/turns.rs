//! A pool of slots that calls of tools share: each waits for its turn, however many wait.

use crate::fair::Limits;
use crate::fair::queue::{Queue, Slot};

/// The pool.
#[derive(Debug)]
pub struct Turns(Queue);

/// The right to be at work. Gives itself back when it is dropped.
pub type Turn = Slot;

impl Turns {
    /// So many slots, of which each of these keys has a part that no other may take.
    pub fn new(slots: usize, keys: &[String]) -> Self {
        Self(Queue::new(Limits::shared(slots, keys)))
    }

    /// Waits for a slot for the key of this name.
    pub async fn take(&self, key: Option<&str>) -> Turn {
        self.0.enter_again(key, "").slot().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::Turns;

    #[test]
    fn a_keys_backlog_leaves_the_others_their_part() {
        let keys = ["ada", "bob"].map(str::to_owned);
        let turns = Turns::new(4, &keys);
        let mut of_ada: Vec<_> = (0..9).map(|_| Box::pin(turns.take(Some("ada")))).collect();
        let at_work = of_ada.iter_mut().map(|turn| turn.now_or_never());
        let mut at_work: Vec<_> = at_work.flatten().collect();
        assert_eq!(at_work.len(), 3);
        let bob = turns.take(Some("bob")).now_or_never().expect("his part");
        let mut next = Box::pin(turns.take(Some("bob")));
        assert!(next.as_mut().now_or_never().is_none());
        // Bob was served last, so the next slot is Ada's and the one after it his, though more of hers came first.
        drop(at_work.pop());
        assert!(next.as_mut().now_or_never().is_none());
        drop(at_work.pop());
        assert!(next.now_or_never().is_some());
        drop(bob);
    }
}
