//! How much of its model's context window a run's requests may fill. Pure.

use crate::config::models::ModelFacts;
use crate::config::models::lookup::Models;
use crate::domain::agent::Agent;
use crate::domain::failure::Failure;
use crate::engine::conversation::request_size;
use crate::engine::state::failures;

/// The context window of a run's model, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextWindow {
    /// Of a request and its reply together, or of a request where that has a lower limit of its own.
    pub tokens: u64,
    /// The model cannot answer a larger request.
    pub max_request_tokens: u64,
    /// A request that is estimated to be larger than this is compacted first.
    pub compact_threshold: u64,
}

/// The maximum length of a requested summary, in tokens.
const MAX_SUMMARY_TOKENS: u64 = 8_000;
/// The part of the window that a request for a summary may fill, in percent. Less than 100, because its size is an
/// estimate.
const MAX_SUMMARY_REQUEST_PERCENT: u64 = 80;

impl ContextWindow {
    /// The smallest known window of the agent's model and its fallbacks; `None` if none is known.
    pub fn for_agent(models: &Models, agent: &Agent) -> Option<Self> {
        let all = std::iter::once(&agent.model).chain(&agent.fallback_models);
        let max_tokens = agent.params.max_tokens.map_or(0, u64::from);
        let windows = all.filter_map(|model| {
            let facts = models.get(&model.provider, &model.model)?;
            Self::new(&facts, max_tokens, agent.context.compact_at)
        });
        windows.min_by_key(|window| window.max_request_tokens)
    }

    /// `compact_at` is the share of the largest request that a request may fill. `None` if no limit is known.
    fn new(facts: &ModelFacts, max_tokens: u64, compact_at: f64) -> Option<Self> {
        // A `max_tokens` that fills the window is a mistake: half of the window stays reserved for the conversation.
        let beside_reply = |window: u64| window - max_tokens.min(window / 2);
        let of_window = facts
            .context_window
            .map(|window| (beside_reply(window), window));
        let of_input = facts.max_input.map(|max_input| (max_input, max_input));
        let (max_request_tokens, tokens) = of_window.into_iter().chain(of_input).min()?;
        Some(Self::of_requests(tokens, max_request_tokens, compact_at))
    }

    /// What is assumed of a window that a request with this estimate did not fit into.
    pub fn smaller_than(refused_tokens: u64, compact_at: f64) -> Self {
        let tokens = refused_tokens / 4 * 3;
        Self::of_requests(tokens, tokens, compact_at)
    }

    fn of_requests(tokens: u64, max_request_tokens: u64, compact_at: f64) -> Self {
        Self {
            tokens,
            max_request_tokens,
            compact_threshold: (max_request_tokens as f64 * compact_at) as u64,
        }
    }

    /// How many bytes of messages may stay beside a summary, given the bytes of the system prompt and the tools.
    pub fn max_kept_bytes(&self, preamble: usize) -> usize {
        let half = request_size::bytes_from_tokens(self.compact_threshold / 2);
        half.saturating_sub(preamble + self.max_summary_bytes())
    }

    pub fn max_summary_bytes(&self) -> usize {
        request_size::bytes_from_tokens((self.compact_threshold / 8).min(MAX_SUMMARY_TOKENS))
    }

    /// How many bytes of a memory's entries a prompt may have.
    pub fn max_memory_bytes(&self) -> usize {
        request_size::bytes_from_tokens(self.compact_threshold / 2)
    }

    pub fn max_summary_request_bytes(&self) -> usize {
        let share = self
            .max_request_tokens
            .saturating_mul(MAX_SUMMARY_REQUEST_PERCENT)
            / 100;
        request_size::bytes_from_tokens(share.min(self.compact_threshold))
    }

    /// The failure of a run whose next request does not fit, if nothing more can be compacted. `largest` names the largest
    /// message.
    pub fn request_too_long(&self, tokens: u64, largest: &str) -> Failure {
        failures::config(&format!(
            "the next request has about {tokens} tokens, and {} tokens of the model's context window of {} are for \
             requests: nothing more can be taken out of the conversation{largest}; use a model with a larger window, \
             lower params.max_tokens, or let tools return less at once ([tools] max_result)",
            self.max_request_tokens, self.tokens
        ))
    }

    /// The failure of a run whose next request must be compacted, if its agent's settings forbid that.
    pub fn compaction_disabled(&self, tokens: u64, compact_at: f64) -> Failure {
        failures::config(&format!(
            "the next request has about {tokens} tokens, more than the {} that context.compact_at = {compact_at} allows \
             of the model's context window of {}, and context.strategy is \"fail\": set it to \"compact\" or \
             \"drop_tool_results\", or use a model with a larger window",
            self.compact_threshold, self.tokens
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::ContextWindow;
    use crate::config::models::ModelFacts;

    fn window(tokens: u64, max_tokens: u64, compact_at: f64) -> ContextWindow {
        let facts = ModelFacts {
            context_window: Some(tokens),
            ..ModelFacts::default()
        };
        ContextWindow::new(&facts, max_tokens, compact_at).expect("a window")
    }

    #[test]
    fn the_reply_is_part_of_the_window() {
        for (max_tokens, max_request_tokens, compact_threshold) in
            [(0, 8000, 6400), (2000, 6000, 4800), (100_000, 4000, 3200)]
        {
            let window = window(8000, max_tokens, 0.8);
            assert_eq!(window.max_request_tokens, max_request_tokens);
            assert_eq!(window.compact_threshold, compact_threshold);
        }
    }

    #[test]
    fn a_limit_of_requests_is_not_that_of_the_window() {
        let facts = |context_window, max_input| ModelFacts {
            context_window,
            max_input,
            ..ModelFacts::default()
        };
        for (facts, max_tokens, max_request_tokens) in [
            // The reply has its own part of the window.
            (facts(Some(400), Some(272)), 100, 272),
            (facts(Some(400), Some(272)), 180, 220),
            (facts(None, Some(272)), 100, 272),
        ] {
            let window = ContextWindow::new(&facts, max_tokens, 1.0).expect("a window");
            assert_eq!(window.max_request_tokens, max_request_tokens);
        }
        assert_eq!(ContextWindow::new(&facts(None, None), 0, 0.8), None);
    }

    #[test]
    fn a_summary_and_kept_messages_fill_half_the_window() {
        let plain = window(8000, 0, 0.8);
        assert_eq!(plain.max_summary_bytes(), 3200);
        assert_eq!(plain.max_kept_bytes(600), 9000);
        assert_eq!(plain.max_kept_bytes(100_000), 0);
        assert_eq!(plain.max_summary_request_bytes(), 25_600);
        let all = window(8000, 0, 1.0);
        assert_eq!(all.max_summary_request_bytes(), 25_600);
        assert_eq!(window(1_000_000, 0, 0.8).max_summary_bytes(), 32_000);
    }
}
