//! Rate limits: requests wait here before they are sent, so that services have none to refuse. One limiter for each provider key and
//! model, or group of models that the service limits together.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLock;
use secrecy::{ExposeSecret, SecretString};

use crate::config::{self, ProviderKind};
use crate::domain::attachment::Digest;
use crate::domain::node::NodeId;
use crate::domain::rate_limit::{Limits, RateReport, RateStatus};
use crate::instruments::OTHER_LABEL;
use crate::providers::rate_limits::bucket::Bucket;
use crate::providers::rate_limits::limiter::Limiter;

pub mod bucket;
pub mod headers;
pub mod limiter;
#[cfg(test)]
mod simulation;

/// Limiters of one provider: clients may name any model and bring any key. The others share one.
const MAX_LIMITERS: usize = 1_000;

/// By the provider key, then by model or group.
type ByKey = HashMap<u64, HashMap<Box<str>, Arc<Limiter>>>;

/// The limiters of one provider.
pub struct RateLimits {
    /// By a model's name, the beginning of names before `*`, or `*` for each other model.
    configured: BTreeMap<String, Limits>,
    /// Of the configured key.
    own_key: u64,
    /// Whether the service does not count input that it reads from its cache.
    skips_cached_input: bool,
    limiters: RwLock<ByKey>,
}

impl RateLimits {
    pub fn new(config: &config::Provider) -> Self {
        Self {
            configured: config.limits.clone(),
            own_key: key_id(config.api_key.as_ref()),
            skips_cached_input: config.kind == ProviderKind::Anthropic,
            limiters: RwLock::default(),
        }
    }

    /// The limiter of requests to this model. `key` is the request's own provider key.
    pub fn limiter(&self, key: Option<&SecretString>, model: &str) -> Arc<Limiter> {
        let key = key.map_or(self.own_key, |key| key_id(Some(key)));
        let (name, _) = self.group_of(model);
        self.find(key, name)
    }

    /// The name of the limiter of a model, and its configured limits.
    fn group_of<'m>(&'m self, model: &'m str) -> (&'m str, Limits) {
        if let Some(limits) = self.configured.get(model) {
            return (model, *limits);
        }
        let groups = self.configured.iter().filter(|(pattern, _)| {
            let beginning = pattern.strip_suffix('*');
            beginning.is_some_and(|beginning| model.starts_with(beginning))
        });
        // The longest beginning.
        match groups.max_by_key(|(pattern, _)| pattern.len()) {
            Some((pattern, limits)) if pattern == "*" => (model, *limits),
            Some((pattern, limits)) => (pattern, *limits),
            None => (model, Limits::default()),
        }
    }

    fn find(&self, key: u64, name: &str) -> Arc<Limiter> {
        let existing = |limiters: &ByKey, name| limiters.get(&key)?.get(name).map(Arc::clone);
        if let Some(limiter) = existing(&self.limiters.read(), name) {
            return limiter;
        }
        let mut limiters = self.limiters.write();
        let mut count: usize = limiters.values().map(HashMap::len).sum();
        if count >= MAX_LIMITERS {
            for named in limiters.values_mut() {
                named.retain(|_, limiter| Arc::strong_count(limiter) > 1 || limiter.is_limited());
            }
            limiters.retain(|_, named| !named.is_empty());
            count = limiters.values().map(HashMap::len).sum();
        }
        let (key, name) = match count < MAX_LIMITERS {
            true => (key, name),
            false => (0, OTHER_LABEL),
        };
        let (_, limits) = self.group_of(name);
        let named = limiters.entry(key).or_default();
        let limiter = named.entry(name.into()).or_insert_with(|| {
            let bucket = Bucket::new(limits, self.skips_cached_input, Instant::now());
            Arc::new(Limiter::new(bucket))
        });
        Arc::clone(limiter)
    }

    fn all(&self) -> Vec<(u64, Box<str>, Arc<Limiter>)> {
        let limiters = self.limiters.read();
        let named = limiters.iter().flat_map(|(key, named)| {
            let named = named.iter();
            named.map(|(name, limiter)| (*key, name.clone(), Arc::clone(limiter)))
        });
        named.collect()
    }

    /// The limits that are known, of each key and model.
    pub fn statuses(&self, provider: &str) -> Vec<RateStatus> {
        let limiters = self.all().into_iter();
        let statuses = limiters.filter_map(|(_, model, limiter)| limiter.status(provider, &model));
        statuses.collect()
    }

    /// What this node has used since the last call, for the other nodes.
    pub fn take_reports(&self, provider: &str) -> Vec<RateReport> {
        let reports = self.all().into_iter().filter_map(|(key, model, limiter)| {
            let mut report = limiter.take_report()?;
            report.provider = provider.to_owned();
            (report.key, report.model) = (key, model.into_string());
            Some(report)
        });
        reports.collect()
    }

    /// Counts what another node has used.
    pub fn add_report(&self, node: NodeId, report: &RateReport) {
        self.find(report.key, &report.model)
            .add_report(node, report);
    }
}

/// Identifies a provider key on every node without repeating it; 0 without a key.
fn key_id(key: Option<&SecretString>) -> u64 {
    key.map_or(0, |key| {
        let Digest(digest) = Digest::compute(key.expose_secret().as_bytes());
        let mut id = [0; 8];
        id.copy_from_slice(&digest[..8]);
        u64::from_le_bytes(id)
    })
}
