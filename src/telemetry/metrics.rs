//! The daemon's metrics: what is counted, under which name, with which help. Knows neither who counts nor who reads.
//!
//! One set for each daemon. Counting costs an atomic addition or two, and for what has a label a look-up under a read
//! lock. A run's id is never a label. Agents and models are, so the number of their values is bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::domain::agent::HARD_MAX_DEPTH;
use crate::domain::run::Status;
use crate::domain::usage::{Cost, TokenUsage};
use crate::telemetry::instruments::{Counter, Family, Fraction, Histogram, Page};

/// Agents that are counted one by one: the catalogue names them, but its files come and go.
const MOST_AGENTS: usize = 5_000;
/// Models that are counted one by one: requests may name any.
const MOST_MODELS: usize = 500;
/// Providers that are counted one by one: the configuration names them.
const MOST_PROVIDERS: usize = 500;

/// Upper bounds for what models and tools take, in seconds.
const WORK: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0, 1800.0, 3600.0,
];
/// Upper bounds for what a cancel takes, in seconds.
const CANCEL: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0,
];

/// The terminal states, in the order of their counters.
const ENDS: [Status; 3] = [Status::Completed, Status::Failed, Status::Cancelled];

/// What can come of a try to deliver to a webhook, in the order of their counters.
const DELIVERIES: [&str; 3] = ["delivered", "retried", "failed"];

/// What one daemon counts.
#[derive(Debug)]
pub struct Metrics {
    /// By agent; in the order of [`ENDS`].
    runs: Family<[Counter; ENDS.len()]>,
    /// By depth, from 1.
    children: [Counter; HARD_MAX_DEPTH as usize],
    queue_wait: Histogram,
    run: Histogram,
    turn: Histogram,
    tool: Histogram,
    cancel: Histogram,
    tokens: Family<Tokens>,
    /// In picodollars.
    cost: Family<Counter>,
    retries: Family<Counter>,
    sse_clients: AtomicU64,
    /// In the order of [`DELIVERIES`].
    deliveries: [Counter; DELIVERIES.len()],
}

#[derive(Debug, Default)]
struct Tokens {
    input: Counter,
    output: Counter,
    cache_read: Counter,
    cache_write: Counter,
    reasoning: Counter,
}

/// What others count, at the moment of a reading.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Runs at work, roots and children.
    pub running: usize,
    /// Root runs waiting for a slot.
    pub queued: usize,
    /// Transactions that the store has committed.
    pub commits: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            runs: Family::new(MOST_AGENTS),
            children: Default::default(),
            queue_wait: Histogram::new(WORK),
            run: Histogram::new(WORK),
            turn: Histogram::new(WORK),
            tool: Histogram::new(WORK),
            cancel: Histogram::new(CANCEL),
            tokens: Family::new(MOST_MODELS),
            cost: Family::new(MOST_MODELS),
            retries: Family::new(MOST_PROVIDERS),
            sse_clients: AtomicU64::new(0),
            deliveries: Default::default(),
        }
    }
}

impl Metrics {
    /// A root run's time started, so long after it was accepted.
    pub fn run_started(&self, waited: Duration) {
        self.queue_wait.observe(waited);
    }

    /// A run's end was recorded; `took` is none for one whose time never started, or that ended with its process.
    pub fn run_ended(&self, agent: &str, status: Status, took: Option<Duration>) {
        if let Some(end) = ENDS.iter().position(|end| *end == status) {
            self.runs.with(agent, |ends| ends[end].increment());
        }
        if let Some(took) = took {
            self.run.observe(took);
        }
    }

    /// A child run was started at this depth.
    pub fn child_started(&self, depth: u8) {
        let place = usize::from(depth).checked_sub(1);
        if let Some(count) = place.and_then(|place| self.children.get(place)) {
            count.increment();
        }
    }

    /// A turn brought a reply after so long, its retries included.
    pub fn turn_taken(&self, took: Duration) {
        self.turn.observe(took);
    }

    /// A tool call was performed.
    pub fn tool_performed(&self, took: Duration) {
        self.tool.observe(took);
    }

    /// A reply of `model` (`provider/model` as it was asked for) was paid for.
    pub fn spent(&self, model: &str, tokens: &TokenUsage, cost: Option<Cost>) {
        self.tokens.with(model, |of| {
            of.input.add(tokens.input);
            of.output.add(tokens.output);
            of.cache_read.add(tokens.cache_read);
            of.cache_write.add(tokens.cache_write);
            of.reasoning.add(tokens.reasoning);
        });
        if let Some(cost) = cost {
            self.cost.with(model, |of| of.add(cost.0));
        }
    }

    /// A request failed and will be sent again, to the same model.
    pub fn retried(&self, provider: &str) {
        self.retries.with(provider, Counter::increment);
    }

    /// A cancelled run's end was recorded, so long after the wish.
    pub fn cancel_settled(&self, took: Duration) {
        self.cancel.observe(took);
    }

    /// A try to deliver to a webhook ended so: `delivered`, `retried` (it is to be tried again) or `failed` (given up).
    pub fn delivery_tried(&self, outcome: &str) {
        if let Some(place) = DELIVERIES.iter().position(|known| *known == outcome) {
            self.deliveries[place].increment();
        }
    }

    /// A client follows a stream of events, as long as what is returned lives.
    pub fn sse_client(self: &Arc<Self>) -> SseClient {
        self.sse_clients.fetch_add(1, Relaxed);
        SseClient(Arc::clone(self))
    }

    /// All of it in Prometheus' text format.
    pub fn render(&self, now: &Now) -> String {
        let mut page = Page::default();
        page.counters(
            "axed_runs_total",
            "Runs that have ended, roots and children, by agent and terminal status.",
            |samples| {
                samples.family(&self.runs, |samples, agent, counts| {
                    for (status, count) in ENDS.iter().zip(counts) {
                        let labels = [("agent", agent), ("status", status.as_str())];
                        samples.sample(&labels, count.get());
                    }
                });
            },
        );
        page.gauge(
            "axed_runs_running",
            "Runs at work, roots and children.",
            now.running as u64,
        );
        page.gauge(
            "axed_runs_queued",
            "Root runs waiting for a slot.",
            now.queued as u64,
        );
        page.histogram(
            "axed_queue_wait_seconds",
            "How long root runs waited from their acceptance to their start.",
            &self.queue_wait,
        );
        page.histogram(
            "axed_run_duration_seconds",
            "How long runs took from their start to their end.",
            &self.run,
        );
        page.histogram(
            "axed_turn_duration_seconds",
            "How long turns took to bring a reply, retries included.",
            &self.turn,
        );
        page.histogram(
            "axed_tool_duration_seconds",
            "How long tool calls took, delegations included.",
            &self.tool,
        );
        page.counters(
            "axed_tokens_total",
            "Tokens that providers reported, by model asked and kind; input includes the cached ones, output the reasoning.",
            |samples| {
                samples.family(&self.tokens, |samples, model, of| {
                    for (kind, count) in [
                        ("input", &of.input),
                        ("output", &of.output),
                        ("cache_read", &of.cache_read),
                        ("cache_write", &of.cache_write),
                        ("reasoning", &of.reasoning),
                    ] {
                        samples.sample(&[("model", model), ("kind", kind)], count.get());
                    }
                });
            },
        );
        page.counters(
            "axed_cost_usd_total",
            "Cost of replies in US dollars, by model asked, where its price is known.",
            |samples| {
                samples.family(&self.cost, |samples, model, cost| {
                    samples.sample(&[("model", model)], Fraction::trillionths(cost.get()));
                });
            },
        );
        page.counters(
            "axed_retries_total",
            "Requests that failed and were to be sent to the same model again, by provider.",
            |samples| {
                samples.family(&self.retries, |samples, provider, count| {
                    samples.sample(&[("provider", provider)], count.get());
                });
            },
        );
        page.counters(
            "axed_child_runs_total",
            "Child runs that were started, by depth.",
            |samples| {
                for (above, count) in self.children.iter().enumerate() {
                    samples.sample(&[("depth", &(above + 1).to_string())], count.get());
                }
            },
        );
        page.histogram(
            "axed_cancel_seconds",
            "How long cancels took from the request to the run's recorded end.",
            &self.cancel,
        );
        page.gauge(
            "axed_sse_clients",
            "Clients that follow a stream of events.",
            self.sse_clients.load(Relaxed),
        );
        page.counters(
            "axed_webhook_deliveries_total",
            "Tries to deliver to webhooks, by outcome: delivered, retried later, failed for good.",
            |samples| {
                for (outcome, count) in DELIVERIES.iter().zip(&self.deliveries) {
                    samples.sample(&[("outcome", outcome)], count.get());
                }
            },
        );
        page.counter(
            "axed_store_commits_total",
            "Transactions that the store has committed.",
            now.commits,
        );
        page.finish()
    }
}

/// A client that follows a stream of events; counted until it is dropped.
#[derive(Debug)]
pub struct SseClient(Arc<Metrics>);

impl Drop for SseClient {
    fn drop(&mut self) {
        self.0.sse_clients.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Metrics, Now};

    const NOW: Now = Now {
        running: 0,
        queued: 0,
        commits: 0,
    };

    #[test]
    fn a_client_counts_as_long_as_it_is_there() {
        let metrics = Arc::new(Metrics::default());
        let clients = || {
            let text = metrics.render(&NOW);
            let line = text
                .lines()
                .find(|line| line.starts_with("axed_sse_clients "));
            line.map(str::to_owned)
        };
        let first = metrics.sse_client();
        let second = metrics.sse_client();
        assert_eq!(clients().as_deref(), Some("axed_sse_clients 2"));
        drop(first);
        assert_eq!(clients().as_deref(), Some("axed_sse_clients 1"));
        drop(second);
        assert_eq!(clients().as_deref(), Some("axed_sse_clients 0"));
    }
}
