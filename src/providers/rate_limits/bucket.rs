//! The bucket of one rate limit: refills evenly, gives to requests, and learns what the service allows. Pure; the time is passed in.

use std::time::{Duration, Instant};

use crate::domain::node::NodeId;
use crate::domain::rate_limit::{
    INPUT_TOKENS, Limits, OUTPUT_TOKENS, PerUnit, REQUESTS, RateReport, TOKENS, UNITS,
};
use crate::domain::usage::TokenUsage;
use crate::providers::rate_limits::headers::ReportedLimits;

/// The part of a minute's limit that may be used at once.
const BURST: f64 = 0.1;
const MINUTE: f64 = 60.0;
/// The output that a request reserves before this many replies are known.
const DEFAULT_OUTPUT: u32 = 4096;
const MIN_REPLIES: usize = 20;
/// The last replies whose output is kept.
const KEPT_REPLIES: usize = 64;
/// Refusals within this time change the guessed limit once.
const GUESS_INTERVAL: Duration = Duration::from_secs(1);
/// With fewer requests in the last seconds, it is not their number that was refused.
const MIN_REFUSED_RATE: f64 = 5.0;
/// Requests a minute that are always tried.
const MIN_GUESS: f64 = 6.0;
/// What a guess grows by in a second, and how long after the last refusal it is given up.
const GROWTH: f64 = 1.02;
const GUESS_LIFETIME: Duration = Duration::from_secs(600);
/// Refusals in a row, each of a request that was sent after the one before, without a pause of ours.
const FREE_REFUSALS: u32 = 2;
/// The shortest pause after more of them. It doubles each time.
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// The most often that it doubles, to 25 seconds.
const MAX_DOUBLINGS: u32 = 9;
/// A service that accepts nothing for so long may be down.
const MAX_SILENCE: Duration = Duration::from_secs(60);
/// The part of a minute's limit that is left free of each minute, and what a request is at most that heeds it: larger ones would leave
/// free much more.
const MARGIN: f64 = 0.01;
const SMALL: f64 = 0.01;
/// Bounds of what the input of a reply is, in thousandths of its estimate.
const MIN_SHARE: u32 = 250;
const MAX_SHARE: u32 = 4_000;
/// For how long a node that reported something uses the limit too, and the most nodes that count.
const PEER_LIFETIME: Duration = Duration::from_secs(5);
const MAX_PEERS: usize = 64;
/// Amounts that differ by less are equal.
const EPSILON: f64 = 1e-6;

#[derive(Debug)]
pub struct Bucket {
    configured: Limits,
    /// As headers said last.
    reported: Limits,
    /// Where neither is known.
    guess: Option<Guess>,
    /// Whether input from the service's cache does not count.
    skips_cached_input: bool,
    /// What may be used now, of units with a limit. Negative: a debt.
    levels: PerUnit<f64>,
    refilled_at: Instant,
    paused_until: Option<Instant>,
    /// Everything that was used since the start, less what was given back.
    taken: PerUnit<f64>,
    /// `taken` at the last report to other nodes.
    reported_use: PerUnit<f64>,
    window: Window,
    /// The output in tokens.
    outputs: LastReplies,
    /// The input, in thousandths of what was estimated.
    inputs: LastReplies,
    /// The other nodes that use the limit now, and when each reported that.
    peers: Vec<(NodeId, Instant)>,
    last_refusal: Option<Instant>,
    /// In a row, see [`FREE_REFUSALS`].
    refusals: u32,
    last_accepted: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Guess {
    requests_per_minute: f64,
    refused_at: Instant,
}

/// What was known when a request was sent.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    sent_at: Instant,
    taken: PerUnit<f64>,
}

/// What a request uses of each unit.
pub type Cost = PerUnit<f64>;

impl Bucket {
    pub fn new(configured: Limits, skips_cached_input: bool, now: Instant) -> Self {
        let mut bucket = Self {
            configured,
            reported: Limits::default(),
            guess: None,
            skips_cached_input,
            levels: [0.0; UNITS.len()],
            refilled_at: now,
            paused_until: None,
            taken: [0.0; UNITS.len()],
            reported_use: [0.0; UNITS.len()],
            window: Window::new(now),
            outputs: LastReplies::default(),
            inputs: LastReplies::default(),
            peers: Vec::new(),
            last_refusal: None,
            refusals: 0,
            last_accepted: None,
        };
        for unit in 0..UNITS.len() {
            bucket.levels[unit] = bucket.capacity(unit).unwrap_or(0.0);
        }
        bucket
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        for (unit, limit) in limits.iter_mut().enumerate() {
            *limit = match (self.configured[unit], self.reported[unit]) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
        if let (Some(guess), true) = (self.guess, limits == Limits::default()) {
            limits[REQUESTS] = Some(guess.requests_per_minute as u64);
        }
        limits
    }

    fn limit(&self, unit: usize) -> Option<f64> {
        self.limits()[unit].map(|limit| limit as f64)
    }

    /// The nodes that use the limit now, with this one.
    fn nodes(&self) -> f64 {
        1.0 + self.peers.len() as f64
    }

    /// The most that this node gives at once; at least one request.
    fn capacity(&self, unit: usize) -> Option<f64> {
        let limit = self.limit(unit)?;
        Some((limit * BURST / self.nodes()).max(1.0))
    }

    /// Whether requests may have to wait.
    pub fn is_limited(&self, now: Instant) -> bool {
        self.limits() != Limits::default() || self.pause(now).is_some()
    }

    /// For how long the service wants no requests.
    pub fn pause(&self, now: Instant) -> Option<Duration> {
        let left = self.paused_until?.checked_duration_since(now)?;
        Some(left).filter(|left| !left.is_zero())
    }

    /// What a request may use. `max_output` is the limit that it sets.
    pub fn cost(&self, input: u64, max_output: Option<u32>) -> Cost {
        let output = max_output.or_else(|| self.outputs.percentile());
        let share = self
            .inputs
            .percentile()
            .map_or(1.0, |it| f64::from(it) / 1e3);
        amounts(
            input as f64 * share,
            f64::from(output.unwrap_or(DEFAULT_OUTPUT)),
        )
    }

    /// The share of a minute's limit that this is, of the unit with the greatest share.
    pub fn weight(&self, cost: &Cost) -> f64 {
        let limits = self.limits();
        let units = limits.into_iter().zip(cost);
        let shares = units.filter_map(|(limit, amount)| Some(amount / limit? as f64));
        shares.fold(0.0, f64::max)
    }

    /// How long a request has to wait if no other one is sent before it. What is more than the bucket holds waits for a full bucket.
    pub fn wait(&mut self, cost: &Cost, now: Instant) -> Duration {
        self.refill(now);
        self.window.advance(now);
        let limits = self.limits();
        let mut wait = self.pause(now).unwrap_or_default();
        for (unit, limit) in limits.into_iter().enumerate() {
            let (Some(limit), Some(capacity)) = (limit, self.capacity(unit)) else {
                continue;
            };
            let missing = cost[unit].min(capacity) - self.levels[unit];
            if missing > EPSILON {
                let seconds = missing * MINUTE / limit as f64;
                let seconds = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
                // Timers are late by up to a millisecond, never early.
                wait = wait.max(seconds + Duration::from_micros(100));
            }
            // Some services count minutes instead: what was used at once is not added to a minute's limit.
            if cost[unit] <= limit as f64 * SMALL {
                // Each other node may use as much before it knows of this.
                let unreported = (self.taken[unit] - self.reported_use[unit]).max(0.0);
                let others = unreported * (self.nodes() - 1.0) + cost[unit] * self.nodes();
                let most = limit as f64 * (1.0 - MARGIN) - others;
                wait = wait.max(self.window.wait(unit, most, now));
            }
        }
        wait
    }

    /// Uses this much, even beyond what there is.
    pub fn take(&mut self, cost: &Cost, now: Instant) {
        self.refill(now);
        for (unit, amount) in cost.iter().enumerate() {
            self.levels[unit] -= amount;
            self.taken[unit] += amount;
        }
        self.window.add(cost, now, now);
    }

    /// A request is sent next, which has taken its part.
    pub fn mark(&self, now: Instant) -> Mark {
        Mark {
            sent_at: now,
            taken: self.taken,
        }
    }

    /// Replaces what a request has taken by what it has used.
    pub fn settle(&mut self, mark: &Mark, reserved: &Cost, used: &Cost, now: Instant) {
        self.refill(now);
        let mut difference = *used;
        for unit in 0..UNITS.len() {
            difference[unit] -= reserved[unit];
            self.taken[unit] += difference[unit];
            self.levels[unit] -= difference[unit];
            if let Some(capacity) = self.capacity(unit) {
                self.levels[unit] = self.levels[unit].min(capacity);
            }
        }
        self.window.add(&difference, mark.sent_at, now);
    }

    /// As [`Bucket::settle`], of a request that reserved nothing because no limit was known.
    pub fn count(&mut self, mark: &Mark, reserved: &Cost, used: &Cost, now: Instant) {
        let mut difference = *used;
        for (amount, reserved) in difference.iter_mut().zip(reserved) {
            *amount -= reserved;
        }
        self.window.add(&difference, mark.sent_at, now);
    }

    /// What a reply has used; `estimated` is the estimate of its input. A reply that reports nothing has used what was reserved.
    pub fn used(&mut self, reserved: &Cost, estimated: u64, usage: Option<TokenUsage>) -> Cost {
        let Some(usage) = usage else {
            return *reserved;
        };
        self.outputs
            .add(u32::try_from(usage.output).unwrap_or(u32::MAX));
        let cached = match self.skips_cached_input {
            true => usage.cache_read,
            false => 0,
        };
        let input = usage.input.saturating_sub(cached);
        if let Some(share) = input.saturating_mul(1000).checked_div(estimated) {
            let share = u32::try_from(share).unwrap_or(MAX_SHARE);
            self.inputs.add(share.clamp(MIN_SHARE, MAX_SHARE));
        }
        amounts(input as f64, usage.output as f64)
    }

    /// The service has accepted a request.
    pub fn accept(&mut self, now: Instant) {
        self.last_accepted = Some(now);
        self.refusals = 0;
    }

    /// Learns what the response to a request says of the limits.
    pub fn learn(&mut self, mark: &Mark, reported: &ReportedLimits, now: Instant) {
        self.refill(now);
        let since = now.saturating_duration_since(mark.sent_at).as_secs_f64();
        for unit in 0..UNITS.len() {
            if let Some(limit) = reported.limits[unit] {
                self.set_reported(unit, limit);
            }
            if let (Some(remaining), Some(limit)) = (reported.remaining[unit], self.limit(unit)) {
                // As of the time when it was sent: since then the bucket refilled, and other requests have used it.
                let refilled = since * limit / MINUTE;
                let used = self.taken[unit] - mark.taken[unit];
                let level = remaining as f64 + refilled - used;
                self.levels[unit] = self.levels[unit].min(level);
            }
        }
    }

    fn set_reported(&mut self, unit: usize, limit: u64) {
        if self.reported[unit] == Some(limit) {
            return;
        }
        let is_new = self.limit(unit).is_none();
        self.reported[unit] = Some(limit);
        if let Some(capacity) = self.capacity(unit) {
            self.levels[unit] = match is_new {
                true => capacity,
                false => self.levels[unit].min(capacity),
            };
        }
        self.guess = None;
    }

    /// The service has refused a request because of its limit. Returns how long all have to wait; `None` if the service has accepted
    /// nothing for a while and names no time: it may be down.
    pub fn refuse(
        &mut self,
        mark: &Mark,
        retry_after: Option<Duration>,
        now: Instant,
    ) -> Option<Duration> {
        self.refill(now);
        // Others that were sent at the same time say nothing new.
        if self.last_refusal.is_none_or(|last| mark.sent_at > last) {
            self.refusals = self.refusals.saturating_add(1);
        }
        self.last_refusal = Some(now);
        let excess = self.refusals.checked_sub(FREE_REFUSALS + 1);
        let own_pause = excess.map(|excess| MIN_PAUSE * (1 << excess.min(MAX_DOUBLINGS)));
        for (unit, limit) in self.limits().into_iter().enumerate() {
            if limit.is_some() {
                self.levels[unit] = self.levels[unit].min(0.0);
            }
        }
        if self.configured == Limits::default() && self.reported == Limits::default() {
            self.lower_guess(now);
        }
        let is_alive = self
            .last_accepted
            .is_some_and(|last| now.saturating_duration_since(last) < MAX_SILENCE);
        let pause = match retry_after {
            Some(retry_after) => retry_after.max(own_pause.unwrap_or_default()),
            None if is_alive => own_pause.unwrap_or(MIN_PAUSE),
            None => return None,
        };
        self.pause_until(now + pause);
        Some(pause)
    }

    fn pause_until(&mut self, until: Instant) {
        self.paused_until = Some(self.paused_until.map_or(until, |other| other.max(until)));
    }

    fn lower_guess(&mut self, now: Instant) {
        let (count, rate) = self.window.recent_requests(now);
        let requests_per_minute = match self.guess {
            Some(guess) if now.saturating_duration_since(guess.refused_at) < GUESS_INTERVAL => {
                return;
            }
            Some(guess) => guess.requests_per_minute.min(rate) / 2.0,
            None if count < MIN_REFUSED_RATE => return,
            None => rate / 2.0,
        };
        self.guess = Some(Guess {
            requests_per_minute: requests_per_minute.max(MIN_GUESS),
            refused_at: now,
        });
        self.levels[REQUESTS] = 0.0;
    }

    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.refilled_at);
        if elapsed.is_zero() {
            return;
        }
        self.refilled_at = now;
        let seconds = elapsed.as_secs_f64();
        let is_recent = |at: Instant| now.saturating_duration_since(at) < PEER_LIFETIME;
        self.peers.retain(|(_, at)| is_recent(*at));
        for (unit, limit) in self.limits().into_iter().enumerate() {
            if let (Some(limit), Some(capacity)) = (limit, self.capacity(unit)) {
                let refilled = self.levels[unit] + limit as f64 * seconds / MINUTE;
                self.levels[unit] = refilled.min(capacity);
            }
        }
        if let Some(guess) = &mut self.guess {
            guess.requests_per_minute *= GROWTH.powf(seconds);
            if now.saturating_duration_since(guess.refused_at) > GUESS_LIFETIME {
                self.guess = None;
            }
        }
    }

    /// What was used in the last minute, by all nodes as far as it is known.
    pub fn used_in_minute(&mut self, now: Instant) -> PerUnit<u64> {
        self.window.advance(now);
        std::array::from_fn(|unit| self.window.sum(unit).max(0.0).round() as u64)
    }

    /// What was used since the last report; `None` if nothing was, or nothing is limited.
    pub fn take_report(&mut self, now: Instant) -> Option<RateReport> {
        let mut used = self.taken;
        for (unit, amount) in used.iter_mut().enumerate() {
            *amount -= self.reported_use[unit];
        }
        self.reported_use = self.taken;
        let is_used = used.iter().any(|amount| amount.abs() > EPSILON);
        (is_used && self.is_limited(now)).then(|| RateReport {
            provider: String::new(),
            key: 0,
            model: String::new(),
            used,
            limits: self.reported,
            guess: self.guess.map(|guess| guess.requests_per_minute),
            paused_ms: self
                .pause(now)
                .and_then(|pause| u64::try_from(pause.as_millis()).ok())
                .unwrap_or(0),
        })
    }

    /// Counts what another node has used, and takes over what it has learned.
    pub fn add_report(&mut self, node: NodeId, report: &RateReport, now: Instant) {
        self.refill(now);
        self.peers.retain(|(peer, _)| *peer != node);
        if self.peers.len() < MAX_PEERS {
            self.peers.push((node, now));
        }
        for (unit, limit) in report.limits.into_iter().enumerate() {
            if let (Some(limit), None) = (limit, self.reported[unit]) {
                self.set_reported(unit, limit);
            }
        }
        let is_guess_new = self.guess.is_none() && self.limits() == Limits::default();
        if let (Some(requests_per_minute), true) = (report.guess, is_guess_new) {
            self.guess = Some(Guess {
                requests_per_minute: requests_per_minute.max(MIN_GUESS),
                refused_at: now,
            });
        }
        let used = report.used.map(|it| if it.is_finite() { it } else { 0.0 });
        self.window.add(&used, now, now);
        for (unit, amount) in used.iter().enumerate() {
            self.levels[unit] -= amount;
            if let Some(capacity) = self.capacity(unit) {
                self.levels[unit] = self.levels[unit].min(capacity);
            }
        }
        if report.paused_ms > 0 {
            self.pause_until(now + Duration::from_millis(report.paused_ms));
        }
    }
}

fn amounts(input: f64, output: f64) -> Cost {
    let mut cost = [0.0; UNITS.len()];
    cost[REQUESTS] = 1.0;
    cost[INPUT_TOKENS] = input;
    cost[OUTPUT_TOKENS] = output;
    cost[TOKENS] = input + output;
    cost
}

/// What was used in each of the last seconds.
#[derive(Debug)]
struct Window {
    start: Instant,
    seconds: [Cost; Self::SECONDS],
    /// The second since the start that is not over.
    current: u64,
}

impl Window {
    /// A minute, and the second that is not over.
    const SECONDS: usize = 61;
    /// How many of them say how many requests are sent now.
    const RECENT: u64 = 5;

    fn new(now: Instant) -> Self {
        Self {
            start: now,
            seconds: [[0.0; UNITS.len()]; Self::SECONDS],
            current: 0,
        }
    }

    /// Adds what was used at a time of the last minute, or gives it back.
    fn add(&mut self, amounts: &Cost, at: Instant, now: Instant) {
        self.advance(now);
        let second = at.saturating_duration_since(self.start).as_secs();
        if second + Self::SECONDS as u64 > self.current {
            let sums = &mut self.seconds[Self::index(second)];
            for (sum, amount) in sums.iter_mut().zip(amounts) {
                *sum += amount;
            }
        }
    }

    fn sum(&self, unit: usize) -> f64 {
        self.seconds.iter().map(|second| second[unit]).sum()
    }

    /// How long it takes until no more than this was used in the minute before.
    fn wait(&self, unit: usize, most: f64, now: Instant) -> Duration {
        let mut sum = self.sum(unit);
        let oldest = (self.current + 1).saturating_sub(Self::SECONDS as u64);
        for second in oldest..=self.current {
            if sum <= most {
                let is_now = second == oldest;
                let gone = Duration::from_secs(second + Self::SECONDS as u64 - 1);
                let wait = (self.start + gone).saturating_duration_since(now);
                return if is_now { Duration::ZERO } else { wait };
            }
            sum -= self.seconds[Self::index(second)][unit];
        }
        Duration::from_secs(Self::SECONDS as u64)
    }

    /// The requests of the last seconds, and how many that are in a minute.
    fn recent_requests(&mut self, now: Instant) -> (f64, f64) {
        self.advance(now);
        let oldest = (self.current + 1).saturating_sub(Self::RECENT);
        let seconds = oldest..=self.current;
        let count: f64 = seconds
            .map(|second| self.seconds[Self::index(second)][REQUESTS])
            .sum();
        let age = now.saturating_duration_since(self.start).as_secs_f64();
        let seconds = (age - oldest as f64).max(1.0);
        (count, count * MINUTE / seconds)
    }

    fn advance(&mut self, now: Instant) {
        let current = now.saturating_duration_since(self.start).as_secs();
        let passed = current.saturating_sub(self.current);
        for second in 1..=passed.min(Self::SECONDS as u64) {
            self.seconds[Self::index(self.current + second)] = [0.0; UNITS.len()];
        }
        self.current = self.current.max(current);
    }

    fn index(second: u64) -> usize {
        (second % Self::SECONDS as u64) as usize
    }
}

/// A number of each of the last replies.
#[derive(Debug)]
struct LastReplies {
    numbers: [u32; KEPT_REPLIES],
    count: usize,
}

impl Default for LastReplies {
    fn default() -> Self {
        Self {
            numbers: [0; KEPT_REPLIES],
            count: 0,
        }
    }
}

impl LastReplies {
    fn add(&mut self, number: u32) {
        self.numbers[self.count % KEPT_REPLIES] = number;
        self.count += 1;
    }

    /// The 95th percentile; `None` before enough replies.
    fn percentile(&self) -> Option<u32> {
        if self.count < MIN_REPLIES {
            return None;
        }
        let mut numbers = self.numbers;
        let known = &mut numbers[..self.count.min(KEPT_REPLIES)];
        known.sort_unstable();
        known.get((known.len() * 95).div_ceil(100) - 1).copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn input_limit(tokens: u64) -> Limits {
        [None, Some(tokens), None, None]
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Whether two durations are equal up to the milliseconds that timers are late.
    fn is_about(wait: Duration, expected: f64) -> bool {
        (wait.as_secs_f64() - expected).abs() < 0.01
    }

    #[test]
    fn a_bucket_refills_evenly_and_holds_a_tenth() {
        let start = Instant::now();
        let mut bucket = Bucket::new(input_limit(60_000), false, start);
        let cost = bucket.cost(3_000, None);
        let later = start + seconds(600.0);
        for _ in 0..2 {
            assert_eq!(bucket.wait(&cost, later), Duration::ZERO);
            bucket.take(&cost, later);
        }
        assert!(is_about(bucket.wait(&cost, later), 3.0));
        assert!(is_about(bucket.wait(&cost, later + seconds(2.0)), 1.0));
        assert_eq!(bucket.wait(&cost, later + seconds(3.01)), Duration::ZERO);
    }

    #[test]
    fn what_was_not_used_is_given_back() {
        let start = Instant::now();
        let mut bucket = Bucket::new([None, None, Some(60_000), None], false, start);
        let reserved = bucket.cost(10, Some(6_000));
        bucket.take(&reserved, start);
        assert!(is_about(bucket.wait(&reserved, start), 6.0));
        let usage = TokenUsage {
            input: 10,
            output: 1_000,
            ..TokenUsage::default()
        };
        let mark = bucket.mark(start);
        let used = bucket.used(&reserved, 10, Some(usage));
        bucket.settle(&mark, &reserved, &used, start);
        assert!(is_about(bucket.wait(&reserved, start), 1.0));
        assert_eq!(bucket.used_in_minute(start), [1, 10, 1_000, 1_010]);
    }

    #[test]
    fn a_request_above_the_limit_waits_for_a_full_bucket_and_leaves_a_debt() {
        let start = Instant::now();
        let mut bucket = Bucket::new(input_limit(600), false, start);
        let (large, small) = (bucket.cost(1_200, None), bucket.cost(1, None));
        bucket.take(&small, start);
        assert!(is_about(bucket.wait(&large, start), 0.1));
        let full = start + seconds(1.0);
        assert_eq!(bucket.wait(&large, full), Duration::ZERO);
        bucket.take(&large, full);
        // 60 were there of 1,200, and 10 come in a second.
        assert!(is_about(bucket.wait(&small, full), 114.1));
    }

    #[test]
    fn the_output_of_replies_is_learned() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Limits::default(), false, start);
        let none = [0.0; UNITS.len()];
        let add = |bucket: &mut Bucket, output| {
            let usage = TokenUsage {
                output,
                ..TokenUsage::default()
            };
            bucket.used(&none, 0, Some(usage));
        };
        for output in 1..20 {
            add(&mut bucket, output * 10);
        }
        assert_eq!(bucket.cost(0, None)[OUTPUT_TOKENS], 4096.0);
        add(&mut bucket, 200);
        assert_eq!(bucket.cost(0, None)[OUTPUT_TOKENS], 190.0);
        assert_eq!(bucket.cost(0, Some(7))[OUTPUT_TOKENS], 7.0);
        for _ in 0..64 {
            add(&mut bucket, 5);
        }
        assert_eq!(bucket.cost(0, None)[OUTPUT_TOKENS], 5.0);
    }

    #[test]
    fn cached_input_counts_where_the_service_counts_it() {
        let start = Instant::now();
        let usage = TokenUsage {
            input: 1_000,
            cache_read: 900,
            output: 5,
            ..TokenUsage::default()
        };
        let none = [0.0; UNITS.len()];
        for (skips_cached_input, input) in [(true, 100.0), (false, 1_000.0)] {
            let mut bucket = Bucket::new(Limits::default(), skips_cached_input, start);
            assert_eq!(bucket.used(&none, 0, Some(usage))[INPUT_TOKENS], input);
        }
    }

    #[test]
    fn the_tighter_of_headers_and_configuration_holds() {
        let start = Instant::now();
        let mut bucket = Bucket::new([Some(100), Some(1_000), None, None], false, start);
        let mark = bucket.mark(start);
        let reported = ReportedLimits {
            limits: [Some(50), Some(2_000), None, Some(3_000)],
            remaining: [Some(2), None, None, Some(150)],
        };
        bucket.learn(&mark, &reported, start);
        assert_eq!(bucket.limits(), [Some(50), Some(1_000), None, Some(3_000)]);
        // Two of five requests, and 150 of 300 tokens.
        assert_eq!(bucket.levels[REQUESTS], 2.0);
        assert_eq!(bucket.levels[TOKENS], 150.0);
        // What was used since the request was sent is no longer free, and what was refilled is.
        let cost = amounts(10.0, 0.0);
        let mark = bucket.mark(start);
        bucket.take(&cost, start);
        let remaining = [None, None, None, Some(20)];
        let reported = ReportedLimits {
            remaining,
            ..reported
        };
        bucket.learn(&mark, &reported, start + seconds(1.0));
        assert_eq!(bucket.levels[TOKENS], 20.0 + 50.0 - 10.0);
    }

    #[test]
    fn a_refusal_pauses_all_requests() {
        let start = Instant::now();
        let mut bucket = Bucket::new(input_limit(60_000), false, start);
        let cost = bucket.cost(1, None);
        let mark = bucket.mark(start);
        let wait = bucket.refuse(&mark, Some(seconds(7.0)), start);
        assert_eq!(wait, Some(seconds(7.0)));
        assert!(is_about(bucket.wait(&cost, start), 7.0));
        assert_eq!(bucket.pause(start + seconds(7.0)), None);
        // A service that is down has nothing to wait for.
        let mark = bucket.mark(start + seconds(8.0));
        assert_eq!(bucket.refuse(&mark, None, start + seconds(8.0)), None);
        bucket.accept(start + seconds(8.0));
        let wait = bucket.refuse(&mark, None, start + seconds(9.0));
        assert_eq!(wait, Some(MIN_PAUSE));
        let later = start + seconds(100.0);
        assert_eq!(bucket.refuse(&mark, None, later), None);
    }

    #[test]
    fn refusals_without_an_end_have_longer_pauses() {
        let mut now = Instant::now();
        let mut bucket = Bucket::new(Limits::default(), false, now);
        let mut pauses = Vec::new();
        for _ in 0..20 {
            let mark = bucket.mark(now);
            // Those that were sent at the same time count once.
            for _ in 0..3 {
                bucket.refuse(&mark, Some(Duration::ZERO), now);
            }
            pauses.push(bucket.pause(now).unwrap_or_default());
            now += seconds(60.0);
        }
        assert_eq!(pauses[..3], [Duration::ZERO, Duration::ZERO, MIN_PAUSE]);
        assert_eq!(pauses[19], MIN_PAUSE * 512);
    }

    #[test]
    fn a_limit_that_nothing_reports_is_guessed_from_refusals() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Limits::default(), false, start);
        let cost = bucket.cost(1, None);
        for _ in 0..100 {
            bucket.take(&cost, start);
        }
        let mark = bucket.mark(start);
        let now = start + seconds(2.0);
        bucket.refuse(&mark, None, now);
        // 100 requests in two seconds, and half of that.
        assert_eq!(bucket.limits(), [Some(1_500), None, None, None]);
        bucket.refuse(&mark, None, now + seconds(0.5));
        assert!(bucket.limits()[REQUESTS] >= Some(1_500));
        bucket.refuse(&mark, None, now + seconds(1.0));
        assert!(bucket.limits()[REQUESTS] < Some(1_100));
        let before = bucket.limits()[REQUESTS];
        let later = now + seconds(60.0);
        bucket.wait(&cost, later);
        assert!(bucket.limits()[REQUESTS] > before);
        bucket.wait(&cost, later + GUESS_LIFETIME);
        assert_eq!(bucket.limits(), Limits::default());
        // One request that is refused is not one too many.
        let mut lone = Bucket::new(Limits::default(), false, start);
        lone.take(&cost, start);
        lone.refuse(&lone.mark(start), None, start);
        assert!(!lone.is_limited(start));
    }

    #[test]
    fn nodes_count_what_the_others_use() {
        let start = Instant::now();
        let limits = input_limit(60_000);
        let mut nodes = [(); 2].map(|()| Bucket::new(limits, false, start));
        let cost = nodes[0].cost(6_000, None);
        nodes[0].take(&cost, start);
        let report = nodes[0].take_report(start).expect("a report");
        assert_eq!(nodes[0].take_report(start), None);
        let first = NodeId(uuid::Uuid::from_u128(1));
        nodes[1].add_report(first, &report, start);
        // Two nodes may use half of a tenth each at once.
        assert!(is_about(nodes[1].wait(&cost, start), 3.0));
        assert_eq!(nodes[1].take_report(start), None);
        nodes[0].refuse(&nodes[0].mark(start), Some(seconds(9.0)), start);
        let mark = nodes[0].mark(start);
        nodes[0].settle(&mark, &cost, &[0.0; UNITS.len()], start);
        let report = nodes[0].take_report(start).expect("a report");
        nodes[1].add_report(first, &report, start);
        assert!(is_about(nodes[1].wait(&cost, start), 9.0));
    }

    #[test]
    fn the_window_is_a_minute_long() {
        let start = Instant::now();
        let mut window = Window::new(start);
        for second in 0..300 {
            let now = start + seconds(f64::from(second));
            window.add(&amounts(1.0, 0.0), now, now);
        }
        let now = start + seconds(299.5);
        assert_eq!(window.sum(INPUT_TOKENS), 61.0);
        assert_eq!(window.recent_requests(now), (5.0, 5.0 * 60.0 / 4.5));
        assert_eq!(window.wait(INPUT_TOKENS, 61.0, now), Duration::ZERO);
        assert!(is_about(window.wait(INPUT_TOKENS, 60.0, now), 0.5));
        assert!(is_about(window.wait(INPUT_TOKENS, 50.0, now), 10.5));
        // What is given back is free at once, and after a minute it makes no difference.
        window.add(&amounts(-1.0, 0.0), start + seconds(250.0), now);
        window.add(&amounts(-1.0, 0.0), start + seconds(200.0), now);
        assert_eq!(window.sum(INPUT_TOKENS), 60.0);
        window.advance(start + seconds(1e6));
        assert_eq!(window.sum(INPUT_TOKENS), 0.0);
    }

    #[test]
    fn small_requests_stay_within_the_limit_of_every_minute() {
        const LIMIT: u64 = 100_000;
        let start = Instant::now();
        let mut now = start;
        let mut bucket = Bucket::new(input_limit(LIMIT), false, start);
        let cost = bucket.cost(900, None);
        let mut sent = Vec::new();
        while now - start < seconds(600.0) {
            now += bucket.wait(&cost, now);
            bucket.take(&cost, now);
            sent.push(now);
        }
        for (index, first) in sent.iter().enumerate() {
            let minute = sent[index..].iter();
            let count = minute
                .take_while(|at| **at - *first < seconds(60.0))
                .count();
            assert!(count * 900 <= LIMIT as usize, "{count}");
        }
        assert!(sent.len() * 900 > 955_000, "{}", sent.len());
    }

    #[test]
    fn the_input_is_estimated_by_earlier_replies() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Limits::default(), false, start);
        let none = [0.0; UNITS.len()];
        for _ in 0..30 {
            let usage = TokenUsage {
                input: 130,
                ..TokenUsage::default()
            };
            bucket.used(&none, 100, Some(usage));
        }
        assert_eq!(bucket.cost(1_000, None)[INPUT_TOKENS], 1_300.0);
    }

    proptest! {
        #[test]
        fn a_service_with_the_same_limit_refuses_nothing(
            requests in prop::collection::vec((1..30_000u64, 0.0..5.0), 1..300)
        ) {
            const LIMIT: u64 = 60_000;
            let start = Instant::now();
            let mut now = start;
            let mut bucket = Bucket::new(input_limit(LIMIT), false, start);
            // Of a service that allows a minute's limit at once.
            let (mut free, mut refilled_at) = (LIMIT as f64, start);
            for (tokens, pause) in requests {
                now += seconds(pause);
                let cost = bucket.cost(tokens, None);
                now += bucket.wait(&cost, now);
                prop_assert_eq!(bucket.wait(&cost, now), Duration::ZERO);
                bucket.take(&cost, now);
                let elapsed = (now - refilled_at).as_secs_f64();
                free = (free + elapsed * LIMIT as f64 / MINUTE).min(LIMIT as f64);
                refilled_at = now;
                free -= tokens as f64;
                prop_assert!(free > -1.0, "{free}");
            }
        }

        #[test]
        fn a_bucket_with_waiting_requests_is_used_whole(tokens in 200..20_000u64, unused in 0.0..0.9) {
            const LIMIT: u64 = 60_000;
            let start = Instant::now();
            let mut now = start;
            let mut bucket = Bucket::new(input_limit(LIMIT), false, start);
            let mut sum = 0.0;
            while now - start < seconds(300.0) {
                let cost = bucket.cost(tokens, None);
                now += bucket.wait(&cost, now);
                bucket.take(&cost, now);
                let mark = bucket.mark(now);
                let mut used = cost;
                used[INPUT_TOKENS] *= 1.0 - unused;
                bucket.settle(&mark, &cost, &used, now);
                sum += used[INPUT_TOKENS];
            }
            let whole = (now - start).as_secs_f64() * LIMIT as f64 / MINUTE;
            prop_assert!(sum > whole * 0.95, "{sum} of {whole}");
        }
    }
}
