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
