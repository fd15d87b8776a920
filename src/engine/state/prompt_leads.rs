//! Which prompts of a tree its services have in their caches. A service has a prompt only when it begins to reply to the first
//! request with it, so of equal runs that start at the same time, the first goes ahead and the others wait for that.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// The longest wait for the run that goes ahead. By then, the service usually has the prompt, whatever becomes of the reply.
pub const MAX_LEAD: Duration = Duration::from_secs(5);
/// How long a service surely keeps a prompt after its last use; all keep it for five minutes.
const WARM_FOR: Duration = Duration::from_secs(240);

/// By the hash of the prompt and its model; at most one for each run of the tree.
#[derive(Debug, Default)]
pub struct PromptLeads {
    prompts: Mutex<HashMap<u64, PromptState>>,
}

#[derive(Debug)]
enum PromptState {
    /// The first request is on its way. The channel closes when the service replies, or the request fails.
    Leading(watch::Receiver<()>),
    Cached {
        used_at: Instant,
    },
}

/// What a request does.
pub enum Start<'a> {
    /// Goes ahead.
    First(Lead<'a>),
    /// Waits until the channel closes, then looks again.
    After(watch::Receiver<()>),
    /// Finds the prompt in the cache.
    Cached,
}

/// The request that goes ahead. If it is dropped before the service replies, another one goes ahead.
pub struct Lead<'a> {
    leads: &'a PromptLeads,
    prompt: u64,
    /// Dropped with it, which closes the channel.
    _sender: watch::Sender<()>,
}

impl PromptLeads {
    pub fn start(&self, prompt: u64) -> Start<'_> {
        let mut prompts = self.lock();
        match prompts.get_mut(&prompt) {
            Some(PromptState::Cached { used_at }) if used_at.elapsed() < WARM_FOR => {
                *used_at = Instant::now();
                Start::Cached
            }
            Some(PromptState::Leading(receiver)) => Start::After(receiver.clone()),
            Some(PromptState::Cached { .. }) | None => {
                let (sender, receiver) = watch::channel(());
                prompts.insert(prompt, PromptState::Leading(receiver));
                Start::First(Lead {
                    leads: self,
                    prompt,
                    _sender: sender,
                })
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, PromptState>> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lead<'_> {
    /// The service began to reply, and has the prompt in its cache.
    pub fn reply_began(self) {
        let used_at = Instant::now();
        let state = PromptState::Cached { used_at };
        self.leads.lock().insert(self.prompt, state);
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut prompts = self.leads.lock();
        if let Some(PromptState::Leading(_)) = prompts.get(&self.prompt) {
            prompts.remove(&self.prompt);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::{PromptLeads, PromptState, Start, WARM_FOR};

    #[tokio::test]
    async fn one_request_goes_ahead_and_another_takes_over_if_it_fails() {
        let leads = PromptLeads::default();
        let Start::First(first) = leads.start(1) else {
            panic!("nothing is on its way");
        };
        let Start::After(mut waiting) = leads.start(1) else {
            panic!("the first one is on its way");
        };
        assert!(matches!(leads.start(2), Start::First(_)), "another prompt");
        drop(first);
        assert!(waiting.changed().await.is_err(), "the channel is closed");
        let Start::First(second) = leads.start(1) else {
            panic!("the first one failed");
        };
        let Start::After(mut waiting) = leads.start(1) else {
            panic!("the second one is on its way");
        };
        second.reply_began();
        assert!(waiting.changed().await.is_err(), "the channel is closed");
        assert!(matches!(leads.start(1), Start::Cached));
        let long_ago = Instant::now().checked_sub(WARM_FOR).expect("a time");
        let cold = PromptState::Cached { used_at: long_ago };
        leads.lock().insert(1, cold);
        assert!(matches!(leads.start(1), Start::First(_)), "it is cold");
    }
}
