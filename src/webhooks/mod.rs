//! Delivers the webhooks in the store's outbox at least once each, with retries for a day, even if the process restarts.
//! The content of a message was written together with its event.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config;
use crate::domain::run::now;
use crate::domain::webhook::DeliveryId;
use crate::fair::Limits;
use crate::fair::fair_queue::{FairQueue, QuotaKey};
use crate::signed_http::SignedHttp;
use crate::signed_http::client::{Message, PostOutcome};
use crate::store::leadership::Leadership;
use crate::store::outbox::{
    AttemptOutcome, AttemptRecord, DeliveryAttempt, DueDelivery, DueQuery, Outbox,
};
use crate::telemetry::metrics::Metrics;

pub mod inbound;
mod push;

/// Maximum number of concurrent deliveries. API keys share them fairly.
const MAX_CONCURRENT: usize = 64;
/// Maximum number of concurrent deliveries of one key to one host, so that a host that hangs does not block the others.
const MAX_CONCURRENT_PER_HOST: usize = 8;
/// How long a delivery is retried: its waits add up to this time. They are counted, because clocks jump.
const RETRY_PERIOD: Duration = Duration::from_secs(24 * 3600);
/// The longest wait between two attempts, without jitter.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(3600);
/// The largest random addition to a wait, as a fraction of it, so that deliveries that failed together do not retry together.
const JITTER: f64 = 0.2;
/// The time between two searches for deliveries whose time is further ahead than their wait, because the clock was set back.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// How long attempts in progress may take when the daemon stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// The wait before the store is read again after it failed.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The wait before an attempt is recorded again after the store failed for the first time. It doubles up to [`MAX_SLEEP`].
const FIRST_RECORD_RETRY: Duration = Duration::from_secs(1);
/// The longest sleep. Deliveries are due by the wall clock, which may change during a sleep.
const MAX_SLEEP: Duration = Duration::from_secs(60);

pub struct WebhookSender {
    store: Arc<dyn Outbox>,
    metrics: Arc<Metrics>,
    client: SignedHttp,
    first_retry: Duration,
    max_retries: u32,
    /// The names of the configured API keys.
    keys: Vec<String>,
    leadership: Leadership,
}

/// The name of an API key, empty for none, and a host.
type Target = (String, String);

/// The attempts in progress. Each returns its delivery and target.
struct InFlight<'s> {
    attempts: FuturesUnordered<BoxFuture<'s, (DeliveryId, Target)>>,
    ids: HashSet<DeliveryId>,
    targets: HashMap<Target, usize>,
    next_clock_check: Instant,
    /// Chooses which keys get the free slots. It is empty between two choices: other deliveries stay in the store.
    queue: FairQueue<DueDelivery>,
}

impl WebhookSender {
    pub fn new(
        settings: &config::Webhooks,
        keys: Vec<String>,
        store: Arc<dyn Outbox>,
        metrics: Arc<Metrics>,
        leadership: Leadership,
    ) -> Self {
        Self {
            store,
            metrics,
            client: SignedHttp::new(settings.guard(), settings.secret_env.clone()),
            first_retry: settings.first_retry,
            max_retries: max_retries(settings.first_retry),
            keys,
            leadership,
        }
    }

    /// Sends deliveries until `stop` is cancelled, while this process is the leader, and then waits briefly for attempts in
    /// progress. The next process, or leader, sends every delivery again that is not recorded as delivered.
    pub async fn run(&self, stop: CancellationToken) {
        let outbox_notify = self.store.delivery_notify();
        let mut in_flight = InFlight::new(&self.keys);
        while !stop.is_cancelled() {
            if !self.leadership.is_leader() {
                tokio::select! {
                    Some(done) = in_flight.attempts.next() => in_flight.finish(done),
                    () = self.leadership.gained() => {}
                    () = stop.cancelled() => break,
                }
                continue;
            }
            let next_due = tokio::select! {
                next = self.start_due(&mut in_flight, &stop) => next,
                () = stop.cancelled() => break,
            };
            tokio::select! {
                Some(done) = in_flight.attempts.next() => in_flight.finish(done),
                () = outbox_notify.notified() => {}
                () = self.leadership.poll() => {}
                () = tokio::time::sleep(sleep_duration(next_due).min(CLOCK_CHECK_INTERVAL)) => {}
                () = stop.cancelled() => break,
            }
            // The store is read once for all that have ended.
            while let Some(Some(done)) = in_flight.attempts.next().now_or_never() {
                in_flight.finish(done);
            }
        }
        // The last runs may have ended during shutdown: start their deliveries too.
        let drain = async {
            if self.leadership.is_leader() {
                self.start_due(&mut in_flight, &stop).await;
            }
            while in_flight.attempts.next().await.is_some() {}
        };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, drain).await.is_err() {
            info!("Webhook deliveries in progress are aborted; the next start sends them again");
        }
    }

    /// Starts as many due deliveries as the limits allow. Returns the time when the next one is due, if known.
    async fn start_due<'s>(
        &'s self,
        in_flight: &mut InFlight<'s>,
        stop: &CancellationToken,
    ) -> Option<Timestamp> {
        loop {
            let capacity = MAX_CONCURRENT - in_flight.ids.len();
            if capacity == 0 {
                return None;
            }
            let full_target = |(target, count): (&Target, &usize)| {
                (*count >= MAX_CONCURRENT_PER_HOST).then(|| target.clone())
            };
            let is_clock_checked = in_flight.next_clock_check <= Instant::now();
            let query = DueQuery {
                first_retry: is_clock_checked.then_some(self.first_retry),
                due_by: now(),
                in_flight: in_flight.ids.iter().copied().collect(),
                excluded_hosts: in_flight.targets.iter().filter_map(full_target).collect(),
                limit: capacity,
            };
            let due = match self.store.due_deliveries(query).await {
                Ok(due) => due,
                Err(error) => {
                    warn!(error = %error, "Cannot read webhook deliveries: {error}");
                    return now().checked_add(STORE_RETRY_INTERVAL).ok();
                }
            };
            let (started, has_skipped) = in_flight.admit(due.deliveries);
            // If deliveries to one host were skipped, the store may have later ones to other hosts.
            if is_clock_checked && started.is_empty() {
                in_flight.next_clock_check = Instant::now() + CLOCK_CHECK_INTERVAL;
            }
            let is_done = started.is_empty() || !has_skipped;
            for delivery in started {
                let attempt = self.deliver(delivery, stop.clone());
                in_flight.attempts.push(Box::pin(attempt));
            }
            if is_done {
                return due.next_due_at;
            }
        }
    }

    /// Makes one attempt and records its outcome.
    async fn deliver(
        &self,
        delivery: DueDelivery,
        stop: CancellationToken,
    ) -> (DeliveryId, Target) {
        let started_at = now();
        let outcome = self.attempt(&delivery, started_at).await;
        let next_step = match &outcome {
            PostOutcome { error: None, .. } => AttemptOutcome::Delivered,
            PostOutcome {
                status: Some(410), ..
            } => AttemptOutcome::GivenUp,
            _ => self.retry_or_give_up(&delivery),
        };
        self.metrics.delivery_attempted(match next_step {
            AttemptOutcome::Delivered => "delivered",
            AttemptOutcome::RetryIn(_) => "retried",
            AttemptOutcome::GivenUp => "failed",
        });
        self.log_outcome(&delivery, &outcome, next_step);
        let record = AttemptRecord {
            id: delivery.id,
            since: delivery.since,
            attempt: DeliveryAttempt {
                time: started_at,
                status: outcome.status,
                error: outcome.error,
            },
            outcome: next_step,
        };
        self.record(record, &delivery, &stop).await;
        (delivery.id, (delivery.owner, delivery.host))
    }

    /// Records an attempt as soon as the store works. The delivery is in flight until then, because it would be sent again.
    async fn record(
        &self,
        record: AttemptRecord,
        delivery: &DueDelivery,
        stop: &CancellationToken,
    ) {
        let mut failures = 0;
        while let Err(error) = self.store.record_attempt(record.clone()).await {
            if failures == 0 {
                warn!(run.id = %delivery.run, run.root = %delivery.run, agent = %delivery.agent, depth = 0, error = %error, "Could not record the outcome of webhook delivery {} of run {}, trying again until the store works: {error}", delivery.id, delivery.run);
            }
            let wait = retry_delay(FIRST_RECORD_RETRY, failures, random()).min(MAX_SLEEP);
            failures += 1;
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                // The next process sends the delivery again.
                () = stop.cancelled() => return,
            }
        }
    }

    async fn attempt(&self, delivery: &DueDelivery, sent_at: Timestamp) -> PostOutcome {
        if let Some(target) = &delivery.push {
            let message = Message {
                content_type: push::CONTENT_TYPE,
                headers: push::headers(delivery, target, sent_at),
                body: push::body(delivery, target),
            };
            return self.client.send_unsigned(&delivery.url, message).await;
        }
        let secret = (delivery.secret_env.as_ref(), "[webhook]");
        let id = (delivery.id.to_string(), sent_at);
        let body = delivery.body.clone();
        self.client.send(&delivery.url, secret, id, body).await
    }

    /// The wait for the next attempt, or giving up if there were enough of them.
    fn retry_or_give_up(&self, delivery: &DueDelivery) -> AttemptOutcome {
        if delivery.attempt_count >= self.max_retries {
            return AttemptOutcome::GivenUp;
        }
        let delay = retry_delay(self.first_retry, delivery.attempt_count, random());
        AttemptOutcome::RetryIn(delay)
    }

    /// Logs each failed attempt once.
    fn log_outcome(
        &self,
        delivery: &DueDelivery,
        outcome: &PostOutcome,
        next_step: AttemptOutcome,
    ) {
        let (id, run, host) = (delivery.id, delivery.run, &delivery.host);
        let agent = &delivery.agent;
        let reason = outcome.error.as_deref().unwrap_or_default();
        match next_step {
            AttemptOutcome::Delivered => {}
            AttemptOutcome::RetryIn(delay) => {
                info!(run.id = %run, run.root = %run, agent, depth = 0, "Webhook delivery {id} of run {run} to {host} failed, trying again in {delay:.1?}: {reason}");
            }
            AttemptOutcome::GivenUp => {
                warn!(run.id = %run, run.root = %run, agent, depth = 0, "Webhook delivery {id} of run {run} to {host} failed for the last time: {reason}");
            }
        }
    }
}

impl InFlight<'_> {
    fn new(keys: &[String]) -> Self {
        Self {
            attempts: FuturesUnordered::new(),
            ids: HashSet::new(),
            targets: HashMap::new(),
            next_clock_check: Instant::now(),
            queue: FairQueue::new(Limits::with_shared_permits(MAX_CONCURRENT, keys)),
        }
    }

    fn quota_key(&mut self, owner: &str) -> QuotaKey {
        self.queue
            .quota_key(Some(owner).filter(|key| !key.is_empty()), "")
    }

    /// Returns the deliveries to start now, whose slots are taken, and whether any was skipped because of its host.
    fn admit(&mut self, due: Vec<DueDelivery>) -> (Vec<DueDelivery>, bool) {
        let mut tickets = Vec::with_capacity(due.len());
        for delivery in due {
            let quota_key = self.quota_key(&delivery.owner);
            tickets.push(self.queue.enqueue(quota_key, delivery));
        }
        let (mut started, mut has_skipped) = (Vec::new(), false);
        while let Some(delivery) = self.queue.admit() {
            let target = (delivery.owner.clone(), delivery.host.clone());
            let host_count = self.targets.entry(target).or_default();
            if *host_count >= MAX_CONCURRENT_PER_HOST {
                has_skipped = true;
                let quota_key = self.quota_key(&delivery.owner);
                self.queue.release(quota_key);
                continue;
            }
            *host_count += 1;
            self.ids.insert(delivery.id);
            started.push(delivery);
        }
        for ticket in tickets {
            drop(self.queue.remove(ticket));
        }
        (started, has_skipped)
    }

    fn finish(&mut self, (id, target): (DeliveryId, Target)) {
        self.ids.remove(&id);
        let quota_key = self.quota_key(&target.0);
        self.queue.release(quota_key);
        if let Some(count) = self.targets.get_mut(&target) {
            *count -= 1;
            if *count == 0 {
                self.targets.remove(&target);
            }
        }
    }
}

/// The wait after `attempts` failed attempts: doubles up to [`MAX_RETRY_DELAY`], plus jitter. `random` is in 0..1.
fn retry_delay(first: Duration, attempts: u32, random: f64) -> Duration {
    let doubled = first.saturating_mul(2_u32.saturating_pow(attempts));
    doubled.min(MAX_RETRY_DELAY).mul_f64(1.0 + JITTER * random)
}

/// How many waits, of average length, add up to [`RETRY_PERIOD`].
fn max_retries(first: Duration) -> u32 {
    let mut sum = Duration::ZERO;
    let waits = (0..).take_while(|attempts| {
        sum += retry_delay(first, *attempts, 0.5);
        sum <= RETRY_PERIOD
    });
    waits.count() as u32
}

fn sleep_duration(next: Option<Timestamp>) -> Duration {
    let Some(next) = next else {
        return MAX_SLEEP;
    };
    // The store rounds times to milliseconds, so a shorter sleep could wake too early.
    let remaining = Duration::try_from(now().duration_until(next)).unwrap_or_default();
    remaining.max(Duration::from_millis(1)).min(MAX_SLEEP)
}

/// A number in 0..1; 0 if the system has no randomness, which only disables the jitter.
fn random() -> f64 {
    f64::from(getrandom::u32().unwrap_or_default()) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{MAX_RETRY_DELAY, max_retries, retry_delay};

    #[test]
    fn waits_double_up_to_an_hour_within_a_day() {
        let first = Duration::from_secs(5);
        let seconds = |tries| retry_delay(first, tries, 0.0).as_secs();
        assert_eq!(
            [0, 1, 2, 9, 10, 99].map(seconds),
            [5, 10, 20, 2560, 3600, 3600]
        );
        assert_eq!(retry_delay(first, 0, 1.0), Duration::from_secs(6));
        assert_eq!(retry_delay(first, u32::MAX, 0.0), MAX_RETRY_DELAY);
        let hours = |random: f64| {
            let waits =
                (0..max_retries(first)).map(|attempts| retry_delay(first, attempts, random));
            waits.sum::<Duration>().as_secs() / 3600
        };
        assert_eq!([0.0, 0.5, 1.0].map(hours), [21, 23, 25]);
        let counts = [Duration::from_millis(1), first, MAX_RETRY_DELAY].map(max_retries);
        assert_eq!(counts, [42, 30, 21]);
    }
}
