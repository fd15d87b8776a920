//! Delivers what the store's outbox holds: every delivery at least once, within a day, whatever becomes of the process.
//! Knows no run; what a message says was written when its event was.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config;
use crate::config::load::secret;
use crate::domain::run::now;
use crate::domain::webhook::DeliveryId;
use crate::fair::Limits;
use crate::fair::line::{Line, Seat};
use crate::net::Guard;
use crate::store::RunStore;
use crate::store::outbox::{Attempt, DueDelivery, DueQuery, Then, Tried};
use crate::telemetry::metrics::Metrics;
use crate::webhooks::post::{Answer, Post};
use crate::webhooks::signature::Secret;

mod post;
mod signature;

/// Deliveries under way at once. Keys take turns.
const AT_ONCE: usize = 64;
/// Of those, of one key to one host: one that hangs must not hold the others'.
const AT_ONCE_TO_A_HOST: usize = 8;
/// How long a delivery is tried.
const DAY: SignedDuration = SignedDuration::from_hours(24);
/// No wait between two tries is longer, but for its jitter.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// The part of a wait that chance may add, so that what failed together does not come again together.
const JITTER: f64 = 0.2;
/// How long tries under way have when the daemon stops.
const STOPPING: Duration = Duration::from_secs(2);
/// How long a store that failed is left alone.
const STORE_PAUSE: Duration = Duration::from_secs(5);
/// The longest sleep: the calendar's clock, which deliveries are due by, may be set.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// The configuration's key that names the hosts which are exempt from the rules.
const LIST: &str = "[webhooks] allow_hosts";

/// Which addresses webhooks may have.
pub fn guard(settings: &config::Webhooks) -> Guard {
    Guard::new(settings.allow_hosts.iter().cloned(), LIST)
}

/// Sends what is due.
pub struct Sender {
    store: Arc<dyn RunStore>,
    metrics: Arc<Metrics>,
    post: Post,
    secret_env: Option<String>,
    first_retry: Duration,
    /// The configured keys.
    keys: Vec<String>,
}

/// A key, empty for none, and a host.
type Target = (String, String);

/// Tries under way; each ends with the delivery, and the key and the host that it is done with.
struct AtWork<'s> {
    tries: FuturesUnordered<BoxFuture<'s, (DeliveryId, Target)>>,
    ids: HashSet<DeliveryId>,
    targets: HashMap<Target, usize>,
    /// Whose turn it is. Nobody waits in it longer than it takes to hand the free slots out: the rest is in the store.
    line: Line<DueDelivery>,
}

impl Sender {
    /// Over this outbox.
    pub fn new(
        settings: &config::Webhooks,
        keys: Vec<String>,
        store: Arc<dyn RunStore>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            store,
            metrics,
            post: Post::new(guard(settings)),
            secret_env: settings.secret_env.clone(),
            first_retry: settings.first_retry,
            keys,
        }
    }

    /// Sends until it is stopped; tries that are then under way have a moment to end. What is not written down as
    /// delivered by then is sent again by the next process.
    pub async fn run(&self, stop: CancellationToken) {
        let bell = self.store.outbox();
        let mut at_work = AtWork::new(&self.keys);
        while !stop.is_cancelled() {
            let next = tokio::select! {
                next = self.take_up(&mut at_work) => next,
                () = stop.cancelled() => break,
            };
            tokio::select! {
                Some(done) = at_work.tries.next() => at_work.leave(done),
                () = bell.notified() => {}
                () = tokio::time::sleep(sleep_until(next)) => {}
                () = stop.cancelled() => break,
            }
        }
        // The ends of the last runs may have come with the word to stop.
        let ending = async {
            self.take_up(&mut at_work).await;
            while at_work.tries.next().await.is_some() {}
        };
        if tokio::time::timeout(STOPPING, ending).await.is_err() {
            info!("Webhook deliveries under way are broken off; the next start sends them again");
        }
    }

    /// Begins as many due deliveries as may be under way, and returns when there will be more to do, as far as time
    /// decides that.
    async fn take_up<'s>(&'s self, at_work: &mut AtWork<'s>) -> Option<Timestamp> {
        loop {
            let room = AT_ONCE - at_work.ids.len();
            if room == 0 {
                return None;
            }
            let is_full = |(target, count): (&Target, &usize)| {
                (*count >= AT_ONCE_TO_A_HOST).then(|| target.clone())
            };
            let query = DueQuery {
                by: now(),
                not: at_work.ids.iter().copied().collect(),
                not_to: at_work.targets.iter().filter_map(is_full).collect(),
                limit: room,
            };
            let due = match self.store.due(query).await {
                Ok(due) => due,
                Err(error) => {
                    warn!(error = %error, "Webhook deliveries cannot be read: {error}");
                    return now().checked_add(STORE_PAUSE).ok();
                }
            };
            let (begun, passed_over) = at_work.choose(due.deliveries);
            // Where a host's deliveries were passed over, those to others may stand behind them.
            let is_done = begun.is_empty() || !passed_over;
            let tries = begun.into_iter().map(|delivery| self.deliver(delivery));
            at_work
                .tries
                .extend(tries.map(|attempt| Box::pin(attempt) as BoxFuture<'_, _>));
            if is_done {
                return due.next;
            }
        }
    }

    /// One try, and what comes of it.
    async fn deliver(&self, delivery: DueDelivery) -> (DeliveryId, Target) {
        let begun = now();
        let answer = self.try_once(&delivery, begun).await;
        let then = match &answer {
            Answer { error: None, .. } => Then::Delivered,
            Answer {
                status: Some(410), ..
            } => Then::GivenUp,
            _ => self.again(&delivery),
        };
        self.metrics.delivery_tried(match then {
            Then::Delivered => "delivered",
            Then::Again(_) => "retried",
            Then::GivenUp => "failed",
        });
        self.tell(&delivery, &answer, then);
        let tried = Tried {
            id: delivery.id,
            since: delivery.since,
            attempt: Attempt {
                time: begun,
                status: answer.status,
                error: answer.error,
            },
            then,
        };
        if let Err(error) = self.store.tried(tried).await {
            warn!(run.id = %delivery.run, run.root = %delivery.run, agent = %delivery.agent, depth = 0, error = %error, "What came of webhook delivery {} of {} was not recorded, it will be sent again: {error}", delivery.id, delivery.run);
            // It is due still, and must not be sent in a circle.
            tokio::time::sleep(STORE_PAUSE).await;
        }
        (delivery.id, (delivery.owner, delivery.host))
    }

    async fn try_once(&self, delivery: &DueDelivery, at: Timestamp) -> Answer {
        let name = delivery.secret_env.as_ref().or(self.secret_env.as_ref());
        let Some(name) = name else {
            return Answer::none(
                "there is no secret to sign it with: set [webhook] secret_env in the agent's file, or [webhooks] \
                 secret_env in the server's configuration"
                    .to_owned(),
            );
        };
        let Some(secret) = secret(name) else {
            let why = format!("the environment variable {name}, whose secret signs it, is not set");
            return Answer::none(why);
        };
        let secret = match Secret::read(&secret) {
            Ok(secret) => secret,
            Err(why) => return Answer::none(format!("the environment variable {name} {why}")),
        };
        let (id, at) = (delivery.id.to_string(), at.as_second());
        let signature = secret.sign(&id, at, &delivery.body);
        self.post
            .send(&delivery.url, &id, at, &signature, delivery.body.clone())
            .await
    }

    /// When a delivery that has failed once more is tried again; given up where its day would be over by then.
    fn again(&self, delivery: &DueDelivery) -> Then {
        let wait = wait(self.first_retry, delivery.tries, random());
        let last = delivery.since.checked_add(DAY).unwrap_or(Timestamp::MAX);
        match now().checked_add(wait) {
            Ok(at) if at <= last => Then::Again(at),
            _ => Then::GivenUp,
        }
    }

    /// A delivery that has failed tells so once a try.
    fn tell(&self, delivery: &DueDelivery, answer: &Answer, then: Then) {
        let (id, run, host) = (delivery.id, delivery.run, &delivery.host);
        let agent = &delivery.agent;
        let why = answer.error.as_deref().unwrap_or_default();
        match then {
            Then::Delivered => {}
            Then::Again(at) => {
                info!(run.id = %run, run.root = %run, agent, depth = 0, "Webhook delivery {id} of {run} to {host} failed, trying again at {at}: {why}");
            }
            Then::GivenUp => {
                warn!(run.id = %run, run.root = %run, agent, depth = 0, "Webhook delivery {id} of {run} to {host} is given up: {why}");
            }
        }
    }
}

impl AtWork<'_> {
    fn new(keys: &[String]) -> Self {
        Self {
            tries: FuturesUnordered::new(),
            ids: HashSet::new(),
            targets: HashMap::new(),
            line: Line::new(Limits::shared(AT_ONCE, keys)),
        }
    }

    fn seat(&mut self, owner: &str) -> Seat {
        self.line
            .seat(Some(owner).filter(|key| !key.is_empty()), "")
    }

    /// Those of them that are begun now, which have their slots, and whether any was passed over for its host.
    fn choose(&mut self, due: Vec<DueDelivery>) -> (Vec<DueDelivery>, bool) {
        let mut waiting = Vec::with_capacity(due.len());
        for delivery in due {
            let seat = self.seat(&delivery.owner);
            waiting.push(self.line.join(seat, delivery));
        }
        let (mut begun, mut passed_over) = (Vec::new(), false);
        while let Some(delivery) = self.line.admit() {
            let target = (delivery.owner.clone(), delivery.host.clone());
            let to_host = self.targets.entry(target).or_default();
            if *to_host >= AT_ONCE_TO_A_HOST {
                passed_over = true;
                let seat = self.seat(&delivery.owner);
                self.line.release(seat);
                continue;
            }
            *to_host += 1;
            self.ids.insert(delivery.id);
            begun.push(delivery);
        }
        for ticket in waiting {
            drop(self.line.leave(ticket));
        }
        (begun, passed_over)
    }

    fn leave(&mut self, (id, target): (DeliveryId, Target)) {
        self.ids.remove(&id);
        let seat = self.seat(&target.0);
        self.line.release(seat);
        if let Some(count) = self.targets.get_mut(&target) {
            *count -= 1;
            if *count == 0 {
                self.targets.remove(&target);
            }
        }
    }
}

/// The wait before the next try after so many: doubled each time up to an hour, and a little more by chance.
fn wait(first: Duration, tries: u32, random: f64) -> Duration {
    let doubled = first.saturating_mul(2_u32.saturating_pow(tries));
    doubled.min(LONGEST_WAIT).mul_f64(1.0 + JITTER * random)
}

fn sleep_until(next: Option<Timestamp>) -> Duration {
    let Some(next) = next else {
        return LONGEST_SLEEP;
    };
    // A millisecond is the record's grain: what is due within this one is due in the next.
    let left = Duration::try_from(now().duration_until(next)).unwrap_or_default();
    left.max(Duration::from_millis(1)).min(LONGEST_SLEEP)
}

/// A number in 0..1. Without randomness the waits are merely equal.
fn random() -> f64 {
    f64::from(getrandom::u32().unwrap_or_default()) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{DAY, LONGEST_WAIT, wait};

    #[test]
    fn waits_double_up_to_an_hour_and_fill_a_day() {
        let first = Duration::from_secs(5);
        let seconds = |tries| wait(first, tries, 0.0).as_secs();
        assert_eq!(
            [0, 1, 2, 9, 10, 99].map(seconds),
            [5, 10, 20, 2560, 3600, 3600]
        );
        assert_eq!(wait(first, 0, 1.0), Duration::from_secs(6));
        assert_eq!(wait(first, u32::MAX, 0.0), LONGEST_WAIT);
        let day = Duration::try_from(DAY).expect("a day");
        let in_a_day = (0..).scan(Duration::ZERO, |sum, tries| {
            *sum += wait(first, tries, 0.0);
            (*sum <= day).then_some(())
        });
        assert_eq!(in_a_day.count(), 32);
    }
}
