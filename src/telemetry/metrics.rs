//! The daemon's metrics, with their names and help texts.
//!
//! Each daemon has its own. An update costs an atomic addition or two, and with a label a look-up under a read lock. A run's
//! id is never a label. Agents and models are, so the number of their values is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use jiff::Timestamp;

use crate::domain::failure::FailureCode;
use crate::domain::rate_limit::{RateStatus, UNITS};
use crate::domain::run::{HARD_MAX_DEPTH, Outcome, Status, now};
use crate::domain::scorer::Skip;
use crate::domain::usage::{Cost, TokenUsage};
use crate::instruments::{CallCounters, Counter, Family, Histogram, OTHER_LABEL};
use crate::telemetry::log_queue;
use crate::telemetry::process::ProcessStats;
use crate::telemetry::prometheus::{FixedPoint, TextEncoder};

/// Agents with series of their own: the catalog names them, but its files change.
const MAX_AGENTS: usize = 5_000;
/// Models with series of their own: requests may name any model.
const MAX_MODELS: usize = 500;
/// Providers with series of their own: the configuration names them.
const MAX_PROVIDERS: usize = 500;
/// Agents, models and tools with durations of their own: each has as many series as there are buckets.
const MAX_DURATIONS: usize = 100;

/// Upper bounds for the durations of models and tools, in seconds.
const WORK_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0, 1800.0, 3600.0,
];
/// Upper bounds for the duration of a cancel, in seconds.
const CANCEL_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0,
];

/// The terminal states, in the order of their counters.
const TERMINAL_STATUSES: [Status; 3] = [Status::Completed, Status::Failed, Status::Cancelled];

/// The categories of errors of providers, in the order of their counters.
const ERROR_CATEGORIES: [&str; 6] = [
    "auth",
    "bad_request",
    "rate_limit",
    "overloaded",
    "server",
    "timeout",
];

/// The outcomes of an attempt to deliver to a webhook, in the order of their counters.
const DELIVERY_OUTCOMES: [&str; 3] = ["delivered", "retried", "failed"];

#[derive(Debug)]
pub struct Metrics {
    /// By agent, in the order of [`TERMINAL_STATUSES`].
    finished_runs: Family<[Counter; TERMINAL_STATUSES.len()]>,
    /// By agent, in the order of [`FailureCode::ALL`].
    failed_runs: Family<[Counter; FailureCode::ALL.len()]>,
    /// By depth, from 1.
    child_runs: [Counter; HARD_MAX_DEPTH as usize],
    queue_wait: Histogram,
    /// By agent.
    run_duration: Family<Histogram>,
    /// By model.
    turn_duration: Family<Histogram>,
    /// By tool.
    tool_duration: Family<Histogram>,
    cancel_duration: Histogram,
    tokens: Family<TokenCounters>,
    /// In picodollars.
    cost: Family<Counter>,
    retries: Family<Counter>,
    provider_requests: Family<RequestCounters>,
    /// By agent and scorer, with a space between them.
    scores: Family<ScoreCounters>,
    /// By agent.
    stopped_rollouts: Family<Counter>,
    sse_clients: AtomicU64,
    /// In the order of [`DELIVERY_OUTCOMES`].
    deliveries: [Counter; DELIVERY_OUTCOMES.len()],
}

type ScoreCounter = fn(&ScoreCounters) -> &Counter;

#[derive(Debug, Default)]
struct ScoreCounters {
    added: Counter,
    failed: Counter,
    /// In the order of [`Skip::ALL`].
    skipped: [Counter; Skip::ALL.len()],
}

#[derive(Debug, Default)]
struct RequestCounters {
    completed: Counter,
    /// In the order of [`ERROR_CATEGORIES`].
    errors: [Counter; ERROR_CATEGORIES.len()],
    /// Of completed requests, in microseconds.
    duration: Counter,
}

/// A provider's requests since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProviderRequests {
    pub completed: u64,
    pub failed: u64,
    /// `None` without a completed request.
    pub mean_duration: Option<Duration>,
}

#[derive(Debug, Default)]
struct TokenCounters {
    input: Counter,
    output: Counter,
    cache_read: Counter,
    cache_write: Counter,
    reasoning: Counter,
}

/// Things that wait for somebody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waiting {
    pub count: usize,
    /// Since when the first of them waits.
    pub oldest: Option<Timestamp>,
}

impl Waiting {
    /// Things that wait since these times.
    pub fn since(times: impl Iterator<Item = Timestamp>) -> Self {
        times.fold(Self::default(), |waiting, at| Self {
            count: waiting.count + 1,
            oldest: Some(waiting.oldest.map_or(at, |oldest| oldest.min(at))),
        })
    }

    /// The age of the oldest in milliseconds; 0 without any.
    fn age(self) -> u64 {
        let age = self.oldest.map(|at| now().duration_since(at).as_millis());
        age.and_then(|age| u64::try_from(age).ok()).unwrap_or(0)
    }
}

/// A configured budget over time, in its current period.
#[derive(Clone, Debug)]
pub struct BudgetGauge {
    pub name: String,
    pub amounts: BudgetAmounts,
}

#[derive(Clone, Copy, Debug)]
pub enum BudgetAmounts {
    Usd { used: Cost, limit: Cost },
    Tokens { used: u64, limit: u64 },
}

/// Numbers that other modules know, at the time of rendering.
#[derive(Clone, Debug, Default)]
pub struct GaugeSnapshot {
    /// Active runs, roots and children.
    pub running: usize,
    /// Root runs that wait for a permit.
    pub queued: usize,
    /// Root runs that are suspended with their trees.
    pub suspended: usize,
    /// Trees that sleep.
    pub asleep: usize,
    /// Bytes that queued and waiting runs keep in memory.
    pub queued_bytes: usize,
    /// Bytes of request bodies that are being read.
    pub body_bytes: usize,
    /// Tool calls that wait for approval.
    pub approvals: Waiting,
    /// Questions that wait for a person's answer.
    pub questions: Waiting,
    /// Runs that wait for the results of their clients' tools.
    pub inputs: Waiting,
    /// Writes that wait for a transaction of the store.
    pub queued_writes: usize,
    pub budgets: Vec<BudgetGauge>,
    pub rate_limits: Vec<RateStatus>,
    /// Whether each MCP server that was needed so far could be connected to, by name.
    pub mcp_servers: BTreeMap<String, bool>,
}

/// The rest of what is rendered: what lies beside the metrics, and what is read for a scrape.
pub struct ScrapedState<'a> {
    pub gauges: GaugeSnapshot,
    pub is_ready: bool,
    pub is_store_writable: bool,
    /// Webhook deliveries that are due now or later, at the node that sends them.
    pub pending_deliveries: u64,
    /// The store's transactions.
    pub commits: &'a Histogram,
    /// Calls of tools by MCP server.
    pub mcp_calls: &'a Family<CallCounters>,
    pub process: ProcessStats,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            finished_runs: Family::new(MAX_AGENTS),
            failed_runs: Family::new(MAX_AGENTS),
            child_runs: Default::default(),
            queue_wait: Histogram::new(WORK_BUCKETS),
            run_duration: durations(),
            turn_duration: durations(),
            tool_duration: durations(),
            cancel_duration: Histogram::new(CANCEL_BUCKETS),
            tokens: Family::new(MAX_MODELS),
            cost: Family::new(MAX_MODELS),
            retries: Family::new(MAX_PROVIDERS),
            provider_requests: Family::new(MAX_PROVIDERS),
            scores: Family::new(MAX_AGENTS),
            stopped_rollouts: Family::new(MAX_AGENTS),
            sse_clients: AtomicU64::new(0),
            deliveries: Default::default(),
        }
    }
}

impl Metrics {
    /// A root run was started; `waited` is the time since it was accepted.
    pub fn run_started(&self, waited: Duration) {
        self.queue_wait.observe(waited);
    }

    /// A run's end was recorded. `duration` is `None` if it was never started, or ended with its process.
    pub fn run_finished(&self, agent: &str, outcome: &Outcome, duration: Option<Duration>) {
        let status = outcome.status();
        if let Some(index) = TERMINAL_STATUSES.iter().position(|end| *end == status) {
            self.finished_runs
                .with(agent, |counters| counters[index].increment());
        }
        if let Outcome::Failed { failure, .. } = outcome {
            self.failed_runs.with(agent, |counters| {
                let of_codes = FailureCode::ALL.iter().zip(counters);
                let of_code = of_codes.filter(|(code, _)| **code == failure.code);
                of_code.for_each(|(_, counter)| counter.increment());
            });
        }
        if let Some(duration) = duration {
            self.run_duration.with(agent, |it| it.observe(duration));
        }
    }

    /// A scorer has scored a run.
    pub fn scored(&self, agent: &str, scorer: &str) {
        self.score_counters(agent, scorer, |counters| counters.added.increment());
    }

    pub fn score_failed(&self, agent: &str, scorer: &str) {
        self.score_counters(agent, scorer, |counters| counters.failed.increment());
    }

    pub fn score_skipped(&self, agent: &str, scorer: &str, skip: Skip) {
        self.score_counters(agent, scorer, |counters| {
            counters.skipped[skip as usize].increment();
        });
    }

    fn score_counters(&self, agent: &str, scorer: &str, change: impl FnOnce(&ScoreCounters)) {
        self.scores.with(&format!("{agent} {scorer}"), change);
    }

    /// The candidate of an agent was taken off.
    pub fn rollout_stopped(&self, agent: &str) {
        self.stopped_rollouts.with(agent, Counter::increment);
    }

    pub fn child_started(&self, depth: u8) {
        let index = usize::from(depth).checked_sub(1);
        if let Some(count) = index.and_then(|place| self.child_runs.get(place)) {
            count.increment();
        }
    }

    /// A turn had a reply of this model (`provider/model` as requested) after this time, retries included.
    pub fn turn_completed(&self, model: &str, duration: Duration) {
        self.turn_duration.with(model, |it| it.observe(duration));
    }

    /// `tool` is `None` if the model has made its name up.
    pub fn tool_call_completed(&self, tool: Option<&str>, duration: Duration) {
        let tool = tool.unwrap_or(OTHER_LABEL);
        self.tool_duration.with(tool, |it| it.observe(duration));
    }

    /// Adds the usage of a reply. `model` is `provider/model` as requested.
    pub fn record_usage(&self, model: &str, tokens: &TokenUsage, cost: Option<Cost>) {
        self.tokens.with(model, |counters| {
            counters.input.add(tokens.input);
            counters.output.add(tokens.output);
            counters.cache_read.add(tokens.cache_read);
            counters.cache_write.add(tokens.cache_write);
            counters.reasoning.add(tokens.reasoning);
        });
        if let Some(cost) = cost {
            self.cost.with(model, |counter| counter.add(cost.0));
        }
    }

    /// A request failed and will be sent again to the same model.
    pub fn request_retried(&self, provider: &str) {
        self.retries.with(provider, Counter::increment);
    }

    /// A request to a provider had a reply, or failed with an error of this category. Batches are not counted.
    pub fn provider_responded(&self, provider: &str, duration: Duration, error: Option<&str>) {
        self.provider_requests.with(provider, |counters| {
            if let Some(category) = error {
                let known = ERROR_CATEGORIES.iter().zip(&counters.errors);
                let of_category = known.filter(|(known, _)| **known == category);
                return of_category.for_each(|(_, counter)| counter.increment());
            }
            counters.completed.increment();
            let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
            counters.duration.add(microseconds);
        });
    }

    pub fn provider_requests(&self, provider: &str) -> ProviderRequests {
        let counters = self.provider_requests.get(provider, |counters| {
            let completed = counters.completed.get();
            let mean = counters.duration.get().checked_div(completed);
            ProviderRequests {
                completed,
                failed: counters.failed(),
                mean_duration: mean.map(Duration::from_micros),
            }
        });
        counters.unwrap_or_default()
    }

    /// A cancelled run's end was recorded, this time after the request to cancel.
    pub fn cancel_completed(&self, duration: Duration) {
        self.cancel_duration.observe(duration);
    }

    /// `outcome` is `delivered`, `retried` (there will be another attempt) or `failed` (given up).
    pub fn delivery_attempted(&self, outcome: &str) {
        if let Some(index) = DELIVERY_OUTCOMES.iter().position(|known| *known == outcome) {
            self.deliveries[index].increment();
        }
    }

    /// Counts a client of an event stream until the guard is dropped.
    pub fn track_sse_client(self: &Arc<Self>) -> SseClientGuard {
        self.sse_clients.fetch_add(1, Relaxed);
        SseClientGuard(Arc::clone(self))
    }

    /// Renders all metrics in Prometheus' text format.
    pub fn render(&self, state: &ScrapedState<'_>) -> String {
        let mut encoder = TextEncoder::default();
        self.render_runs(&mut encoder, &state.gauges);
        self.render_durations(&mut encoder);
        self.render_models(&mut encoder);
        self.render_providers_and_children(&mut encoder);
        self.render_clients_and_deliveries(&mut encoder, state.pending_deliveries);
        render_waits(&mut encoder, &state.gauges);
        render_budgets(&mut encoder, &state.gauges.budgets);
        render_rate_limits(&mut encoder, &state.gauges.rate_limits);
        render_mcp(&mut encoder, &state.gauges.mcp_servers, state.mcp_calls);
        render_store(&mut encoder, state);
        render_daemon(&mut encoder, state);
        state.process.render(&mut encoder);
        encoder.finish()
    }

    fn render_runs(&self, encoder: &mut TextEncoder, gauges: &GaugeSnapshot) {
        encoder.counters(
            "axed_runs_total",
            "Runs that have ended, roots and children, by agent and terminal status.",
            |samples| {
                samples.family(&self.finished_runs, |samples, agent, counts| {
                    for (status, count) in TERMINAL_STATUSES.iter().zip(counts) {
                        let labels = [("agent", agent), ("status", status.as_str())];
                        samples.sample(&labels, count.get());
                    }
                });
            },
        );
        encoder.counters(
            "axed_runs_failed_total",
            "Runs that have failed, roots and children, by agent and error code.",
            |samples| {
                samples.family(&self.failed_runs, |samples, agent, counts| {
                    let codes = FailureCode::ALL.iter().zip(counts);
                    for (code, count) in codes.filter(|(_, count)| count.get() > 0) {
                        let labels = [("agent", agent), ("code", &code.to_string())];
                        samples.sample(&labels, count.get());
                    }
                });
            },
        );
        self.render_scores(encoder);
        encoder.gauge(
            "axed_runs_running",
            "Runs at work, roots and children.",
            gauges.running,
        );
        encoder.gauge(
            "axed_runs_queued",
            "Root runs waiting for a slot.",
            gauges.queued,
        );
        encoder.gauge(
            "axed_runs_suspended",
            "Root runs that are suspended with their trees, because their record could not be written or read.",
            gauges.suspended,
        );
        encoder.gauge(
            "axed_runs_asleep",
            "Root runs that wait, with their trees, for people, times and events only, and keep nothing in memory.",
            gauges.asleep,
        );
        encoder.gauge(
            "axed_runs_queued_bytes",
            "Bytes that queued and waiting runs keep in memory.",
            gauges.queued_bytes,
        );
        encoder.gauge(
            "axed_request_body_bytes",
            "Bytes of request bodies that are being read.",
            gauges.body_bytes,
        );
    }

    fn render_durations(&self, encoder: &mut TextEncoder) {
        encoder.histogram(
            "axed_queue_wait_seconds",
            "How long root runs waited from their acceptance to their start.",
            &self.queue_wait,
        );
        encoder.histograms(
            "axed_run_duration_seconds",
            "How long runs took from their start to their end, by agent.",
            "agent",
            &self.run_duration,
        );
        encoder.histograms(
            "axed_turn_duration_seconds",
            "How long turns took to bring a reply, retries included, by model.",
            "model",
            &self.turn_duration,
        );
        encoder.histograms(
            "axed_tool_duration_seconds",
            "How long tool calls took, delegations included, by tool.",
            "tool",
            &self.tool_duration,
        );
    }

    fn render_models(&self, encoder: &mut TextEncoder) {
        encoder.counters(
            "axed_tokens_total",
            "Tokens that providers reported, by requested model and kind; input includes the cached ones, output the reasoning.",
            |samples| {
                samples.family(&self.tokens, |samples, model, counters| {
                    for (kind, count) in [
                        ("input", &counters.input),
                        ("output", &counters.output),
                        ("cache_read", &counters.cache_read),
                        ("cache_write", &counters.cache_write),
                        ("reasoning", &counters.reasoning),
                    ] {
                        samples.sample(&[("model", model), ("kind", kind)], count.get());
                    }
                });
            },
        );
        encoder.counters(
            "axed_cost_usd_total",
            "Cost of replies in US dollars, by requested model, if its price is known.",
            |samples| {
                samples.family(&self.cost, |samples, model, cost| {
                    samples.sample(&[("model", model)], FixedPoint::trillionths(cost.get()));
                });
            },
        );
    }

    fn render_providers_and_children(&self, encoder: &mut TextEncoder) {
        encoder.counters(
            "axed_provider_requests_total",
            "Requests to providers that had a reply or failed, by provider.",
            |samples| {
                samples.family(&self.provider_requests, |samples, provider, counters| {
                    samples.sample(&[("provider", provider)], counters.total());
                });
            },
        );
        encoder.counters(
            "axed_provider_errors_total",
            "Requests to providers that failed, retried or not, by provider and category of the error.",
            |samples| {
                samples.family(&self.provider_requests, |samples, provider, counters| {
                    for (category, count) in ERROR_CATEGORIES.iter().zip(&counters.errors) {
                        let labels = [("provider", provider), ("category", *category)];
                        samples.sample(&labels, count.get());
                    }
                });
            },
        );
        encoder.counters(
            "axed_retries_total",
            "Requests that failed and were to be sent to the same model again, by provider.",
            |samples| {
                samples.family(&self.retries, |samples, provider, count| {
                    samples.sample(&[("provider", provider)], count.get());
                });
            },
        );
        encoder.counters(
            "axed_child_runs_total",
            "Child runs that were started, by depth.",
            |samples| {
                for (index, count) in self.child_runs.iter().enumerate() {
                    samples.sample(&[("depth", &(index + 1).to_string())], count.get());
                }
            },
        );
    }

    fn render_scores(&self, encoder: &mut TextEncoder) {
        let names = |key: &str| {
            let (agent, scorer) = key.split_once(' ').unwrap_or((key, key));
            (agent.to_owned(), scorer.to_owned())
        };
        let totals: [(&str, &str, ScoreCounter); 2] = [
            (
                "axed_scores_total",
                "Scores by scorers, by agent and scorer.",
                |counters| &counters.added,
            ),
            (
                "axed_scores_failed_total",
                "Attempts of scorers that gave no score, by agent and scorer.",
                |counters| &counters.failed,
            ),
        ];
        for (name, help, counter) in totals {
            encoder.counters(name, help, |samples| {
                samples.family(&self.scores, |samples, key, counters| {
                    let (agent, scorer) = names(key);
                    let labels = [("agent", &*agent), ("scorer", &*scorer)];
                    samples.sample(&labels, counter(counters).get());
                });
            });
        }
        encoder.counters(
            "axed_rollouts_stopped_total",
            "Candidates of rollouts that were taken off because they were worse, by agent.",
            |samples| {
                samples.family(&self.stopped_rollouts, |samples, agent, count| {
                    samples.sample(&[("agent", agent)], count.get());
                });
            },
        );
        encoder.counters(
            "axed_scores_skipped_total",
            "Runs that a scorer was to score and did not, by agent, scorer and reason.",
            |samples| {
                samples.family(&self.scores, |samples, key, counters| {
                    let (agent, scorer) = names(key);
                    let reasons = Skip::ALL.iter().zip(&counters.skipped);
                    for (reason, count) in reasons.filter(|(_, count)| count.get() > 0) {
                        let labels = [
                            ("agent", &*agent),
                            ("scorer", &*scorer),
                            ("reason", reason.as_str()),
                        ];
                        samples.sample(&labels, count.get());
                    }
                });
            },
        );
    }

    fn render_clients_and_deliveries(&self, encoder: &mut TextEncoder, pending: u64) {
        encoder.histogram(
            "axed_cancel_seconds",
            "How long cancels took from the request to the run's recorded end.",
            &self.cancel_duration,
        );
        encoder.gauge(
            "axed_sse_clients",
            "Clients that follow a stream of events.",
            self.sse_clients.load(Relaxed),
        );
        encoder.counters(
            "axed_webhook_deliveries_total",
            "Tries to deliver to webhooks, by outcome: delivered, retried later, failed for good.",
            |samples| {
                for (outcome, count) in DELIVERY_OUTCOMES.iter().zip(&self.deliveries) {
                    samples.sample(&[("outcome", outcome)], count.get());
                }
            },
        );
        encoder.gauge(
            "axed_webhook_deliveries_pending",
            "Webhook deliveries that are due now or later, at the node that sends them.",
            pending,
        );
    }
}

impl RequestCounters {
    fn failed(&self) -> u64 {
        self.errors.iter().map(Counter::get).sum()
    }

    fn total(&self) -> u64 {
        self.completed.get() + self.failed()
    }
}

fn durations() -> Family<Histogram> {
    Family::of(MAX_DURATIONS, || Histogram::new(WORK_BUCKETS))
}

fn render_waits(encoder: &mut TextEncoder, gauges: &GaugeSnapshot) {
    encoder.gauge(
        "axed_approvals_pending",
        "Tool calls that wait for approval.",
        gauges.approvals.count,
    );
    encoder.gauge(
        "axed_approvals_oldest_age_seconds",
        "How long the oldest of the calls has waited for approval; 0 without any.",
        FixedPoint::thousandths(gauges.approvals.age()),
    );
    encoder.gauge(
        "axed_questions_pending",
        "Questions that wait for a person's answer.",
        gauges.questions.count,
    );
    encoder.gauge(
        "axed_questions_oldest_age_seconds",
        "How long the oldest of the questions has waited; 0 without any.",
        FixedPoint::thousandths(gauges.questions.age()),
    );
    encoder.gauge(
        "axed_inputs_pending",
        "Runs that wait for the results of tools that their clients execute.",
        gauges.inputs.count,
    );
    encoder.gauge(
        "axed_inputs_oldest_age_seconds",
        "How long the oldest of these runs has waited for its client; 0 without any.",
        FixedPoint::thousandths(gauges.inputs.age()),
    );
}

fn render_budgets(encoder: &mut TextEncoder, budgets: &[BudgetGauge]) {
    let mut render =
        |name: &str, help: &str, amount: fn(BudgetAmounts) -> (&'static str, FixedPoint)| {
            encoder.gauges(name, help, |samples| {
                for budget in budgets {
                    let (unit, amount) = amount(budget.amounts);
                    samples.sample(&[("budget", &budget.name), ("unit", unit)], amount);
                }
            });
        };
    render(
        "axed_budget_used",
        "How much of a budget is used in its current period, in US dollars or tokens.",
        |amounts| match amounts {
            BudgetAmounts::Usd { used, .. } => ("usd", FixedPoint::trillionths(used.0)),
            BudgetAmounts::Tokens { used, .. } => ("tokens", FixedPoint::whole(used)),
        },
    );
    render(
        "axed_budget_limit",
        "The limit of a budget, in US dollars or tokens.",
        |amounts| match amounts {
            BudgetAmounts::Usd { limit, .. } => ("usd", FixedPoint::trillionths(limit.0)),
            BudgetAmounts::Tokens { limit, .. } => ("tokens", FixedPoint::whole(limit)),
        },
    );
}

fn render_rate_limits(encoder: &mut TextEncoder, limits: &[RateStatus]) {
    let mut render = |name: &str, help: &str, amount: fn(&RateStatus, usize) -> Option<u64>| {
        encoder.gauges(name, help, |samples| {
            for limit in limits {
                for (index, unit) in UNITS.iter().enumerate() {
                    let Some(amount) = amount(limit, index) else {
                        continue;
                    };
                    let labels = [
                        ("provider", &*limit.provider),
                        ("model", &*limit.model),
                        ("unit", *unit),
                    ];
                    samples.sample(&labels, amount);
                }
            }
        });
    };
    render(
        "axed_rate_limit_limit",
        "What a provider allows in a minute, as far as it is known, by provider, model and unit.",
        |limit, unit| limit.limits[unit],
    );
    render(
        "axed_rate_limit_used",
        "What all nodes used of a provider's limit in the last minute, as far as this one knows, by provider, model and unit.",
        |limit, unit| limit.limits[unit].map(|_| limit.used[unit]),
    );
    encoder.gauges(
        "axed_rate_limit_waiting",
        "Requests that wait for a provider's limit, by provider and model.",
        |samples| {
            for limit in limits {
                let labels = [("provider", &*limit.provider), ("model", &*limit.model)];
                samples.sample(&labels, limit.waiting);
            }
        },
    );
}

fn render_mcp(
    encoder: &mut TextEncoder,
    servers: &BTreeMap<String, bool>,
    calls: &Family<CallCounters>,
) {
    encoder.gauges(
        "axed_mcp_server_up",
        "Whether an MCP server could be connected to when that was last tried.",
        |samples| {
            for (server, is_up) in servers {
                samples.sample(&[("server", server)], u8::from(*is_up));
            }
        },
    );
    encoder.counters(
        "axed_mcp_calls_total",
        "Calls of tools of MCP servers, by server.",
        |samples| {
            samples.family(calls, |samples, server, counters| {
                samples.sample(&[("server", server)], counters.calls.get());
            });
        },
    );
    encoder.counters(
        "axed_mcp_call_errors_total",
        "Calls of tools of MCP servers whose result was an error, or that had none, by server.",
        |samples| {
            samples.family(calls, |samples, server, counters| {
                samples.sample(&[("server", server)], counters.errors.get());
            });
        },
    );
}

fn render_store(encoder: &mut TextEncoder, state: &ScrapedState<'_>) {
    encoder.gauge(
        "axed_store_writable",
        "Whether the store could be written and read a few seconds ago.",
        u8::from(state.is_store_writable),
    );
    encoder.counter(
        "axed_store_commits_total",
        "Transactions that the store has committed.",
        state.commits.count(),
    );
    encoder.histogram(
        "axed_store_commit_seconds",
        "How long transactions of the store took, from their beginning to their commit.",
        state.commits,
    );
    encoder.gauge(
        "axed_store_queue",
        "Writes that wait for a transaction of the store.",
        state.gauges.queued_writes,
    );
}

fn render_daemon(encoder: &mut TextEncoder, state: &ScrapedState<'_>) {
    encoder.gauge(
        "axed_ready",
        "Whether the daemon accepts new runs, as in /readyz.",
        u8::from(state.is_ready),
    );
    encoder.counter(
        "axed_log_lines_dropped_total",
        "Log lines that were dropped because nobody read them in time.",
        log_queue::dropped_lines(),
    );
    encoder.gauges("axed_build_info", "The version of the daemon.", |samples| {
        samples.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    });
}

#[derive(Debug)]
pub struct SseClientGuard(Arc<Metrics>);

impl Drop for SseClientGuard {
    fn drop(&mut self) {
        self.0.sse_clients.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Metrics, ScrapedState};
    use crate::instruments::{Family, Histogram};

    #[test]
    fn sse_clients_are_counted_until_dropped() {
        let metrics = Arc::new(Metrics::default());
        let (commits, mcp_calls) = (Histogram::new(&[]), Family::new(1));
        let clients = || {
            let text = metrics.render(&ScrapedState {
                gauges: Default::default(),
                is_ready: true,
                is_store_writable: true,
                pending_deliveries: 0,
                commits: &commits,
                mcp_calls: &mcp_calls,
                process: Default::default(),
            });
            let line = text
                .lines()
                .find(|line| line.starts_with("axed_sse_clients "));
            line.map(str::to_owned)
        };
        let first = metrics.track_sse_client();
        let second = metrics.track_sse_client();
        assert_eq!(clients().as_deref(), Some("axed_sse_clients 2"));
        drop(first);
        assert_eq!(clients().as_deref(), Some("axed_sse_clients 1"));
        drop(second);
        assert_eq!(clients().as_deref(), Some("axed_sse_clients 0"));
    }
}
