//! What `/metrics` shows of the engine's state and of its store.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::domain::input::InputKind;
use crate::domain::period_budget::PeriodLimit;
use crate::domain::rate_limit::RateStatus;
use crate::domain::run::now;
use crate::engine::context::Engine;
use crate::engine::runner::Runner;
use crate::engine::state::period_budgets::BudgetStatus;
use crate::telemetry::metrics::{BudgetAmounts, BudgetGauge, GaugeSnapshot, Waiting};

/// How long a scrape waits for the store, each time that it reads.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long what was read of the store is shown.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Pending deliveries that are counted.
const MAX_DELIVERIES: usize = 10_000;
/// Limits of providers that are shown: clients may name any model.
const MAX_RATE_LIMITS: usize = 500;
/// MCP servers that are shown.
const MAX_MCP_SERVERS: usize = 500;

/// What the store says of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreGauges {
    pub is_writable: bool,
    /// Webhook deliveries that this node has to send, now or later.
    pub pending_deliveries: u64,
}

/// What was last read of the store. Scrapes that come at the same time read it once.
#[derive(Debug, Default)]
pub struct StoreGaugeCache(tokio::sync::Mutex<Option<(Instant, StoreGauges)>>);

impl StoreGaugeCache {
    pub async fn read(&self, runner: &Runner) -> StoreGauges {
        let mut last = self.0.lock().await;
        if let Some((at, gauges)) = &*last
            && at.elapsed() < MAX_AGE
        {
            return *gauges;
        }
        let gauges = read_store(runner).await;
        *last = Some((Instant::now(), gauges));
        gauges
    }
}

async fn read_store(runner: &Runner) -> StoreGauges {
    let store = runner.store();
    let checked = timeout(STORE_TIMEOUT, store.check()).await;
    if !matches!(checked, Ok(Ok(()))) {
        return StoreGauges::default();
    }
    let pending_deliveries = match runner.leadership().is_leader() {
        true => timeout(STORE_TIMEOUT, store.count_pending(MAX_DELIVERIES)).await,
        false => Ok(Ok(0)),
    };
    StoreGauges {
        is_writable: true,
        pending_deliveries: pending_deliveries.ok().and_then(Result::ok).unwrap_or(0),
    }
}

impl Runner {
    /// What this process knows without its store.
    pub fn gauges(&self) -> GaugeSnapshot {
        let engine = &self.engine;
        let queued = self.queue_load().1 + engine.cluster_permits.waiting_count();
        let active_runs = &engine.active_runs;
        let budgets = self.period_budgets().statuses(now());
        let waiting = |kind| {
            let awake = engine.pending_inputs.requested_at(kind);
            let asleep = engine.sleeping_trees.requested_at(kind);
            Waiting::since(awake.into_iter().chain(asleep))
        };
        GaugeSnapshot {
            queued_bytes: engine.queued_bytes.used(),
            body_bytes: 0,
            // The active runs include those that are queued and those that are idle.
            running: active_runs
                .count()
                .saturating_sub(queued + active_runs.idle_count()),
            queued,
            suspended: active_runs.suspended_count(),
            asleep: engine.sleeping_trees.count(),
            approvals: waiting(InputKind::Approval),
            questions: waiting(InputKind::Question),
            inputs: engine.client_calls.waiting(),
            queued_writes: self.store().queued_writes(),
            budgets: budgets.into_iter().map(budget).collect(),
            rate_limits: rate_limits(engine),
            mcp_servers: self.mcp_servers(),
        }
    }

    /// Whether each MCP server could be connected to. Agents may name different servers alike: then whether all of them could.
    fn mcp_servers(&self) -> BTreeMap<String, bool> {
        let agents = self.catalog().current();
        let definitions = agents.entries.values().filter_map(|it| it.agent.as_deref());
        let mut servers = BTreeMap::new();
        for server in definitions.flat_map(|agent| &agent.mcp_servers) {
            let Some(is_up) = self.engine.mcp.is_up(server) else {
                continue;
            };
            if servers.len() < MAX_MCP_SERVERS || servers.contains_key(&server.name) {
                *servers.entry(server.name.clone()).or_insert(true) &= is_up;
            }
        }
        servers
    }
}

/// The limits of providers that are known, those that most requests wait for first.
pub fn rate_limits(engine: &Engine) -> Vec<RateStatus> {
    let clients = engine.providers.clients();
    let statuses = clients.flat_map(|(name, client)| client.rate_limits.statuses(name));
    let mut statuses: Vec<RateStatus> = statuses.collect();
    statuses.sort_by_key(|status| Reverse(status.waiting));
    statuses.truncate(MAX_RATE_LIMITS);
    statuses.sort_by(|a, b| (&a.provider, &a.model).cmp(&(&b.provider, &b.model)));
    // Of several keys, what they have together.
    statuses.dedup_by(|later, first| {
        let is_same = (&later.provider, &later.model) == (&first.provider, &first.model);
        if is_same {
            first.add(later);
        }
        is_same
    });
    statuses
}

fn budget(status: BudgetStatus) -> BudgetGauge {
    let used = status.used;
    BudgetGauge {
        name: status.settings.name,
        amounts: match status.settings.limit {
            PeriodLimit::Usd(limit) => BudgetAmounts::Usd {
                used: used.cost,
                limit,
            },
            PeriodLimit::Tokens(limit) => BudgetAmounts::Tokens {
                used: used.tokens,
                limit,
            },
        },
    }
}
