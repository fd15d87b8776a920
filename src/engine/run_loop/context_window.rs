//! How much of its model's context window a run's requests may fill. Pure.

use crate::config::models::Models;
use crate::domain::agent::Agent;
use crate::engine::run_loop::request_size;

/// The window of a run's model, and where its requests have to become smaller. In tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextWindow {
    /// The whole window.
    pub tokens: u64,
    /// Of it, what is kept for the reply.
    pub reply_tokens: u64,
    /// A request that is estimated to be larger is made smaller first.
    pub compact_threshold: u64,
}

/// The longest summary that is requested, in tokens.
const MAX_SUMMARY_TOKENS: u64 = 8_000;
/// A request for a summary never fills more of the window than this, in percent: it is estimated, too.
const MAX_SUMMARY_REQUEST_PERCENT: u64 = 80;

impl ContextWindow {
    /// The smallest known window of the agent's model and its fallbacks; `None` if none is known.
    pub fn for_agent(models: &Models, agent: &Agent) -> Option<Self> {
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
        let reply_tokens = max_tokens.min(tokens / 2);
        Self {
            tokens,
            reply_tokens,
            compact_threshold: ((tokens - reply_tokens) as f64 * compact_at) as u64,
        }
    }

    /// A request that is larger cannot be answered.
    pub fn max_request_tokens(&self) -> u64 {
        self.tokens - self.reply_tokens
    }

    /// The bytes of messages that stay as they are beside a summary, with so many bytes of system prompt and tools.
    pub fn max_kept_bytes(&self, preamble: usize) -> usize {
        let half = request_size::bytes_from_tokens(self.compact_threshold / 2);
        half.saturating_sub(preamble + self.max_summary_bytes())
    }

    /// The most bytes of a summary.
    pub fn max_summary_bytes(&self) -> usize {
        request_size::bytes_from_tokens((self.compact_threshold / 8).min(MAX_SUMMARY_TOKENS))
    }

    /// The most bytes of a request for a summary.
    pub fn max_summary_request_bytes(&self) -> usize {
        let share = self
            .max_request_tokens()
            .saturating_mul(MAX_SUMMARY_REQUEST_PERCENT)
            / 100;
        request_size::bytes_from_tokens(share.min(self.compact_threshold))
    }
}

#[cfg(test)]
mod tests {
    use super::ContextWindow;

    #[test]
    fn the_reply_is_part_of_the_window() {
        let plain = ContextWindow::new(8000, 0, 0.8);
        assert_eq!(
            (plain.compact_threshold, plain.max_request_tokens()),
            (6400, 8000)
        );
        let long = ContextWindow::new(8000, 2000, 0.8);
        assert_eq!(
            (long.compact_threshold, long.max_request_tokens()),
            (4800, 6000)
        );
        let absurd = ContextWindow::new(8000, 100_000, 0.8);
        assert_eq!(
            (absurd.reply_tokens, absurd.compact_threshold),
            (4000, 3200)
        );
    }

    #[test]
    fn a_summary_and_what_stays_fill_half_of_what_may_be_sent() {
        let window = ContextWindow::new(8000, 0, 0.8);
        assert_eq!(window.max_summary_bytes(), 3200);
        assert_eq!(window.max_kept_bytes(600), 9000);
        assert_eq!(window.max_kept_bytes(100_000), 0);
        assert_eq!(window.max_summary_request_bytes(), 25_600);
        let all = ContextWindow::new(8000, 0, 1.0);
        assert_eq!(all.max_summary_request_bytes(), 25_600);
        assert_eq!(
            ContextWindow::new(1_000_000, 0, 0.8).max_summary_bytes(),
            32_000
        );
    }
}
