//! How much of its model's context window a run's requests may fill. Pure.

use crate::config::models::Models;
use crate::domain::agent::Agent;
use crate::engine::request_size;

/// The window of a run's model, and where its requests have to become smaller. In tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The whole window.
    pub tokens: u64,
    /// Of it, what is kept for the reply.
    pub reply: u64,
    /// A request that is estimated to be larger is made smaller first.
    pub limit: u64,
}

/// The longest summary that is requested, in tokens.
const MAX_SUMMARY: u64 = 8_000;
/// A request for a summary never fills more of the window than this, in percent: it is estimated, too.
const SUMMARY_REQUEST: u64 = 80;

impl Window {
    /// The smallest known window of the agent's model and its fallbacks; `None` if none is known.
    pub fn of(models: &Models, agent: &Agent) -> Option<Self> {
        let all = std::iter::once(&agent.model).chain(&agent.fallback_models);
        let windows =
            all.filter_map(|model| models.get(&model.provider, &model.model)?.context_window);
        let max_tokens = agent.params.max_tokens.map_or(0, u64::from);
        Some(Self::new(
            windows.min()?,
            max_tokens,
            agent.context.compact_at,
        ))
    }

    /// A window of so many tokens, of which a request may fill this share once `max_tokens` are kept for the reply.
    fn new(tokens: u64, max_tokens: u64, compact_at: f64) -> Self {
        // A bound on replies that fills the window is a slip: half of it is for the conversation.
        let reply = max_tokens.min(tokens / 2);
        Self {
            tokens,
            reply,
            limit: ((tokens - reply) as f64 * compact_at) as u64,
        }
    }

    /// A request that is larger cannot be answered.
    pub fn most(&self) -> u64 {
        self.tokens - self.reply
    }

    /// The bytes of messages that stay as they are beside a summary, with so many bytes of system prompt and tools.
    pub fn room_beside_summary(&self, preamble: usize) -> usize {
        let half = request_size::bytes(self.limit / 2);
        half.saturating_sub(preamble + self.summary_bytes())
    }

    /// The most bytes of a summary.
    pub fn summary_bytes(&self) -> usize {
        request_size::bytes((self.limit / 8).min(MAX_SUMMARY))
    }

    /// The most bytes of a request for a summary.
    pub fn summary_request_bytes(&self) -> usize {
        let share = self.most().saturating_mul(SUMMARY_REQUEST) / 100;
        request_size::bytes(share.min(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::Window;

    #[test]
    fn the_reply_is_part_of_the_window() {
        let plain = Window::new(8000, 0, 0.8);
        assert_eq!((plain.limit, plain.most()), (6400, 8000));
        let long = Window::new(8000, 2000, 0.8);
        assert_eq!((long.limit, long.most()), (4800, 6000));
        let absurd = Window::new(8000, 100_000, 0.8);
        assert_eq!((absurd.reply, absurd.limit), (4000, 3200));
    }

    #[test]
    fn a_summary_and_what_stays_fill_half_of_what_may_be_sent() {
        let window = Window::new(8000, 0, 0.8);
        assert_eq!(window.summary_bytes(), 3200);
        assert_eq!(window.room_beside_summary(600), 9000);
        assert_eq!(window.room_beside_summary(100_000), 0);
        assert_eq!(window.summary_request_bytes(), 25_600);
        let all = Window::new(8000, 0, 1.0);
        assert_eq!(all.summary_request_bytes(), 25_600);
        assert_eq!(Window::new(1_000_000, 0, 0.8).summary_bytes(), 32_000);
    }
}
