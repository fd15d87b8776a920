//! One rate limit with the requests that wait for it. The first one waits for the bucket, the others for their turn; without a limit,
//! nothing waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::HeaderMap;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::node::NodeId;
use crate::domain::rate_limit::{Limits, Priority, RateReport, RateStatus, UNITS};
use crate::domain::usage::TokenUsage;
use crate::fair::weighted_queue::{Ticket, WeightedQueue};
use crate::providers::Delta;
use crate::providers::rate_limits::bucket::{Bucket, Cost, Mark};
use crate::providers::rate_limits::headers::ReportedLimits;

#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
    /// As of the last change of the bucket.
    is_limited: AtomicBool,
}

#[derive(Debug)]
struct State {
    bucket: Bucket,
    queue: WeightedQueue<Arc<Notify>>,
}

/// What a request is estimated to use.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    pub input: u64,
    /// The limit that it sets.
    pub max_output: Option<u32>,
}

/// What became of a request.
pub enum RequestEnd {
    /// It has a reply, or a part of one. `None`: its usage is not known.
    Used(Option<TokenUsage>),
    /// The service refused it because of a limit, and named this wait.
    Refused(Option<Duration>),
    /// It counts for no limit.
    Failed,
}

impl Limiter {
    pub fn new(bucket: Bucket) -> Self {
        Self {
            is_limited: AtomicBool::new(bucket.is_limited(Instant::now())),
            state: Mutex::new(State {
                bucket,
                queue: WeightedQueue::default(),
            }),
        }
    }

    /// Whether requests may have to wait.
    pub fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// A request that does not wait: nothing is limited, as far as it is known.
    pub fn begin(self: &Arc<Self>) -> Slot {
        let now = Instant::now();
        let mut cost = [0.0; UNITS.len()];
        cost[0] = 1.0;
        let mark = self.change(|state| {
            state.bucket.take(&cost, now);
            state.bucket.mark(now)
        });
        Slot::new(self, cost, mark, None)
    }

    /// Enters the queue. `owner` is the name of the client's key.
    pub fn enter(
        self: &Arc<Self>,
        demand: Demand,
        owner: Option<&str>,
        priority: Priority,
    ) -> WaitingRequest {
        let turn = Arc::new(Notify::new());
        let ticket = self.change(|state| {
            let cost = state.cost(demand);
            let weight = state.bucket.weight(&cost);
            let is_urgent = priority == Priority::Interactive;
            let waiter = Arc::clone(&turn);
            let owner = owner.unwrap_or_default();
            state.queue.push(is_urgent, owner, weight, waiter)
        });
        WaitingRequest {
            limiter: Arc::clone(self),
            demand,
            ticket: Some(ticket),
            turn,
        }
    }

    /// `None` if nothing is limited.
    pub fn status(&self, provider: &str, model: &str) -> Option<RateStatus> {
        let now = Instant::now();
        self.change(|state| {
            let (limits, waiting) = (state.bucket.limits(), state.queue.len());
            let pause = state.bucket.pause(now);
            let is_shown = limits != Limits::default() || waiting > 0 || pause.is_some();
            is_shown.then(|| RateStatus {
                provider: provider.to_owned(),
                model: model.to_owned(),
                limits,
                used: state.bucket.used_in_minute(now),
                waiting,
                paused_ms: pause.map_or(0, |pause| {
                    u64::try_from(pause.as_millis()).unwrap_or(u64::MAX)
                }),
            })
        })
    }

    pub fn take_report(&self) -> Option<RateReport> {
        self.change(|state| {
            let report = state.bucket.take_report(Instant::now());
            state.wake_first();
            report
        })
    }

    pub fn add_report(&self, node: NodeId, report: &RateReport) {
        self.change(|state| {
            state.bucket.add_report(node, report, Instant::now());
            state.wake_all_if_paused();
        });
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let changed = change(&mut state);
        let is_limited = state.bucket.is_limited(Instant::now());
        self.is_limited
            .store(is_limited || !state.queue.is_empty(), Ordering::Relaxed);
        changed
    }
}

impl State {
    fn cost(&self, demand: Demand) -> Cost {
        self.bucket.cost(demand.input, demand.max_output)
    }

    /// The request that is first looks again when it may go.
    fn wake_first(&self) {
        if let Some((_, turn)) = self.queue.first() {
            turn.notify_one();
        }
    }

    fn is_first(&self, ticket: Option<&Ticket>) -> bool {
        self.queue.first().map(|(first, _)| first).as_ref() == ticket
    }

    /// Those whose deadline is before the end of the pause wait no longer.
    fn wake_all_if_paused(&self) {
        if self.bucket.pause(Instant::now()).is_some() {
            self.queue.iter().for_each(|turn| turn.notify_one());
        }
    }
}

/// A request in the queue. Dropping it leaves the queue.
pub struct WaitingRequest {
    limiter: Arc<Limiter>,
    demand: Demand,
    /// `None` once it has left the queue.
    ticket: Option<Ticket>,
    turn: Arc<Notify>,
}

/// The wait ends after the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTooLong {
    pub wait: Duration,
}

enum Turn {
    Now(Slot),
    /// It is first, and may go at this time.
    At(Instant),
    /// Others come first.
    Later,
}

impl WaitingRequest {
    /// Waits until the request may be sent. Nothing is lost if the future is dropped and made again.
    ///
    /// # Errors
    /// It is known that this would be after the deadline.
    pub async fn slot(&mut self, deadline: Option<Instant>) -> Result<Slot, WaitTooLong> {
        loop {
            match self.take_turn(deadline)? {
                Turn::Now(slot) => return Ok(slot),
                Turn::At(time) => {
                    let time = tokio::time::Instant::from_std(time);
                    let _ = tokio::time::timeout_at(time, self.turn.notified()).await;
                }
                Turn::Later => self.turn.notified().await,
            }
        }
    }

    /// When it may be sent, if that is known.
    pub fn until(&self) -> Option<Instant> {
        let now = Instant::now();
        self.limiter.change(|state| {
            let is_first = state.is_first(self.ticket.as_ref());
            match is_first {
                true => Some(now + state.bucket.wait(&state.cost(self.demand), now)),
                false => state.bucket.pause(now).map(|pause| now + pause),
            }
        })
    }

    fn take_turn(&mut self, deadline: Option<Instant>) -> Result<Turn, WaitTooLong> {
        let now = Instant::now();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
        let is_too_long = |wait: Duration| left.is_some_and(|left| wait >= left);
        let (demand, ticket) = (self.demand, &mut self.ticket);
        let limiter = &self.limiter;
        limiter.change(|state| {
            let pause = state.bucket.pause(now).unwrap_or_default();
            if is_too_long(pause) {
                return Err(WaitTooLong { wait: pause });
            }
            if !state.is_first(ticket.as_ref()) {
                return Ok(Turn::Later);
            }
            // By what is known now: it may have waited since before the first replies.
            let cost = state.cost(demand);
            let wait = state.bucket.wait(&cost, now);
            if is_too_long(wait) && !wait.is_zero() {
                return Err(WaitTooLong { wait });
            }
            if !wait.is_zero() {
                return Ok(Turn::At(now + wait));
            }
            state.queue.pop();
            *ticket = None;
            state.bucket.take(&cost, now);
            state.wake_first();
            let mark = state.bucket.mark(now);
            Ok(Turn::Now(Slot::new(
                limiter,
                cost,
                mark,
                Some(demand.input),
            )))
        })
    }
}

impl Drop for WaitingRequest {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.limiter.change(|state| {
                state.queue.remove(&ticket);
                state.wake_first();
            });
        }
    }
}

/// A request that may be sent, and what it has reserved. Dropping it before it is sent gives all of that back.
pub struct Slot {
    limiter: Arc<Limiter>,
    reserved: Cost,
    mark: Mark,
    /// The estimate of its input, if it has reserved its tokens. If not, what the service says first of its limit has them.
    estimated: Option<u64>,
    is_sent: bool,
    is_settled: bool,
}

impl Slot {
    fn new(limiter: &Arc<Limiter>, reserved: Cost, mark: Mark, estimated: Option<u64>) -> Self {
        Self {
            limiter: Arc::clone(limiter),
            reserved,
            mark,
            estimated,
            is_sent: false,
            is_settled: false,
        }
    }

    /// Learns from what arrives of the reply.
    pub fn observe(&mut self, delta: &Delta<'_>) {
        match delta {
            Delta::Sending(_) => self.is_sent = true,
            Delta::ResponseStarted { status, headers } => self.responded(*status, headers),
            _ => {}
        }
    }

    fn responded(&self, status: u16, headers: &HeaderMap) {
        let (reported, now) = (ReportedLimits::read(headers), Instant::now());
        self.limiter.change(|state| {
            if (200..300).contains(&status) {
                state.bucket.accept(now);
            }
            if let Some(reported) = reported {
                state.bucket.learn(&self.mark, &reported, now);
            }
        });
    }

    /// Gives back what the request did not use. If it was refused, returns how long it has to wait; see [`Bucket::refuse`].
    pub fn settle(mut self, end: &RequestEnd) -> Option<Duration> {
        self.is_settled = true;
        let (reserved, mark) = (self.reserved, self.mark);
        let now = Instant::now();
        let none = [0.0; UNITS.len()];
        self.limiter.change(|state| {
            let bucket = &mut state.bucket;
            let mut wait = None;
            if let RequestEnd::Refused(retry_after) = end {
                wait = bucket.refuse(&mark, *retry_after, now);
            }
            let used = match end {
                RequestEnd::Used(usage) => {
                    let estimated = self.estimated.unwrap_or(0);
                    bucket.used(&reserved, estimated, *usage)
                }
                RequestEnd::Refused(_) | RequestEnd::Failed => none,
            };
            match self.estimated {
                Some(_) => bucket.settle(&mark, &reserved, &used, now),
                None => bucket.count(&mark, &reserved, &used, now),
            }
            state.wake_first();
            if wait.is_some() {
                state.wake_all_if_paused();
            }
            wait
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Of a request that was interrupted, the service may go on with the reply.
        if !self.is_settled && !self.is_sent {
            let none = [0.0; UNITS.len()];
            self.limiter.change(|state| {
                let bucket = &mut state.bucket;
                bucket.settle(&self.mark, &self.reserved, &none, Instant::now());
                state.wake_first();
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn limiter(input_tokens: u64) -> Arc<Limiter> {
        let limits = [None, Some(input_tokens), None, None];
        Arc::new(Limiter::new(Bucket::new(limits, false, Instant::now())))
    }

    fn enter(limiter: &Arc<Limiter>, owner: &str, priority: Priority) -> WaitingRequest {
        let demand = Demand {
            input: 60,
            max_output: None,
        };
        limiter.enter(demand, Some(owner), priority)
    }

    #[tokio::test]
    async fn interactive_requests_come_first_and_cancelled_ones_leave() {
        // One request of 60 tokens a tenth of a second, and one at once.
        let limiter = limiter(36_000);
        let mut slots = Vec::new();
        for _ in 0..60 {
            let mut request = enter(&limiter, "a", Priority::Interactive);
            slots.push(request.slot(None).now_or_never().expect("free"));
        }
        let mut background = enter(&limiter, "a", Priority::Background);
        let mut gone = enter(&limiter, "a", Priority::Interactive);
        let mut urgent = enter(&limiter, "b", Priority::Interactive);
        assert!(background.slot(None).now_or_never().is_none());
        assert!(gone.slot(None).now_or_never().is_none());
        assert_eq!(urgent.until(), None);
        drop(gone);
        assert!(urgent.until().is_some());
        let (first, second) = tokio::join!(
            async {
                let slot = urgent.slot(None).await.expect("a slot");
                (slot, Instant::now())
            },
            async {
                let slot = background.slot(None).await.expect("a slot");
                (slot, Instant::now())
            }
        );
        assert!(first.1 < second.1);
        let status = limiter.status("p", "m").expect("limited");
        assert_eq!((status.waiting, status.used[1]), (0, 62 * 60));
    }

    #[tokio::test]
    async fn a_wait_beyond_the_deadline_ends_at_once() {
        let limiter = limiter(600);
        let mut request = enter(&limiter, "a", Priority::Interactive);
        let slot = request.slot(None).await.expect("free");
        let mut waiting = enter(&limiter, "a", Priority::Interactive);
        let deadline = Some(Instant::now() + Duration::from_secs(60));
        assert!(waiting.slot(deadline).now_or_never().is_none());
        let minutes = Duration::from_secs(600);
        slot.settle(&RequestEnd::Refused(Some(minutes)));
        let refused = waiting.slot(deadline).await;
        assert!(refused.is_err_and(|error| error.wait > minutes / 2));
    }

    #[tokio::test]
    async fn what_was_not_sent_is_free_again() {
        let limiter = limiter(600);
        let mut request = enter(&limiter, "a", Priority::Interactive);
        let slot = request.slot(None).await.expect("free");
        let mut next = enter(&limiter, "a", Priority::Interactive);
        assert!(next.slot(None).now_or_never().is_none());
        drop(slot);
        let slot = next.slot(None).now_or_never().expect("free");
        slot.expect("a slot").settle(&RequestEnd::Failed);
        assert_eq!(limiter.status("p", "m").expect("limited").used[1], 0);
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let bucket = Bucket::new(Limits::default(), false, Instant::now());
        let limiter = Arc::new(Limiter::new(bucket));
        assert!(!limiter.is_limited());
        let mut slot = limiter.begin();
        let mut headers = HeaderMap::new();
        headers.insert("x-ratelimit-limit-tokens", 1000.into());
        let delta = Delta::ResponseStarted {
            status: 200,
            headers: &headers,
        };
        slot.observe(&delta);
        assert!(limiter.is_limited());
        assert_eq!(
            limiter.status("p", "m").expect("limited").limits[3],
            Some(1000)
        );
    }
}
