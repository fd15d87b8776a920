//! Many runs at once against a service with a limit, on one node and on three, in simulated time.

use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::domain::node::NodeId;
use crate::domain::rate_limit::{INPUT_TOKENS, UNITS};
use crate::domain::usage::TokenUsage;
use crate::fair::weighted_queue::WeightedQueue;
use crate::providers::rate_limits::bucket::{Bucket, Cost, Mark};

const LIMIT: f64 = 100_000.0;
const ESTIMATE: u64 = 500;
const STEP: Duration = Duration::from_millis(20);
const STEPS_OF_REPORT: u32 = 10;
const KEYS: [&str; 2] = ["ada", "bob"];

/// How a service limits.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A bucket with a minute's limit, which refills evenly.
    Bucket,
    /// The sum of the last minute.
    Minute,
}

struct Service {
    kind: Kind,
    free: f64,
    refilled_at: Instant,
    /// The time, the tokens and the key of accepted requests.
    accepted: Vec<(Instant, f64, usize)>,
    refused: usize,
}

impl Service {
    fn accepts(&mut self, tokens: f64, key: usize, now: Instant) -> bool {
        let elapsed = (now - self.refilled_at).as_secs_f64();
        self.free = (self.free + elapsed * LIMIT / 60.0).min(LIMIT);
        self.refilled_at = now;
        let free = match self.kind {
            Kind::Bucket => self.free,
            Kind::Minute => {
                let minute = self.accepted.iter().rev();
                let minute = minute.take_while(|it| now - it.0 < Duration::from_secs(60));
                LIMIT - minute.map(|it| it.1).sum::<f64>()
            }
        };
        if free < tokens {
            self.refused += 1;
            return false;
        }
        self.free -= tokens;
        self.accepted.push((now, tokens, key));
        true
    }
}

struct Node {
    bucket: Bucket,
    /// The key, and the tokens that the service counts.
    queue: WeightedQueue<(usize, u64)>,
    /// What is under way, with the time of its response, and whether it was accepted.
    sent: Vec<(Instant, Mark, Cost, usize, u64, bool)>,
}

impl Node {
    fn enter(&mut self, key: usize, tokens: u64) {
        let weight = self.bucket.weight(&self.bucket.cost(ESTIMATE, None));
        self.queue.push(true, KEYS[key], weight, (key, tokens));
    }

    fn step(&mut self, service: &mut Service, now: Instant) {
        let (ended, sent) = std::mem::take(&mut self.sent)
            .into_iter()
            .partition::<Vec<_>, _>(|it| it.0 <= now);
        self.sent = sent;
        for (_, mark, reserved, key, tokens, is_accepted) in ended {
            let mut used = [0.0; UNITS.len()];
            if is_accepted {
                let usage = TokenUsage {
                    input: tokens,
                    ..TokenUsage::default()
                };
                self.bucket.accept(now);
                used = self.bucket.used(&reserved, ESTIMATE, Some(usage));
            } else {
                self.bucket.refuse(&mark, Some(Duration::from_secs(1)), now);
                self.enter(key, tokens);
            }
            self.bucket.settle(&mark, &reserved, &used, now);
        }
        loop {
            let cost = self.bucket.cost(ESTIMATE, None);
            if self.queue.is_empty() || !self.bucket.wait(&cost, now).is_zero() {
                return;
            }
            let Some((key, tokens)) = self.queue.pop() else {
                return;
            };
            self.bucket.take(&cost, now);
            let mark = self.bucket.mark(now);
            let is_accepted = service.accepts(tokens as f64, key, now);
            let seconds = if is_accepted { tokens % 7 + 1 } else { 0 };
            let ends_at = now + STEP + Duration::from_millis(400 * seconds);
            self.sent
                .push((ends_at, mark, cost, key, tokens, is_accepted));
        }
    }
}

fn simulate(kind: Kind, node_count: usize) {
    let start = Instant::now();
    let limits = [None, Some(LIMIT as u64), None, None];
    let mut service = Service {
        kind,
        free: LIMIT,
        refilled_at: start,
        accepted: Vec::new(),
        refused: 0,
    };
    let new_node = |_| Node {
        bucket: Bucket::new(limits, false, start),
        queue: WeightedQueue::default(),
        sent: Vec::new(),
    };
    let mut nodes: Vec<Node> = (0..node_count).map(new_node).collect();
    let mut runs = 0;
    // All runs of one key come before those of the other one. The estimate is wrong by up to a fifth.
    for key in 0..KEYS.len() {
        for number in 0..500 {
            let tokens = ESTIMATE * (80 + (number * 37) % 41) / 100;
            nodes[runs % node_count].enter(key, tokens);
            runs += 1;
        }
    }
    let mut now = start;
    for step in 0.. {
        now += STEP;
        nodes.iter_mut().for_each(|it| it.step(&mut service, now));
        if step % STEPS_OF_REPORT == 0 {
            for sender in 0..node_count {
                let Some(report) = nodes[sender].bucket.take_report(now) else {
                    continue;
                };
                let id = NodeId(Uuid::from_u128(sender as u128));
                for (receiver, node) in nodes.iter_mut().enumerate() {
                    if receiver != sender {
                        node.bucket.add_report(id, &report, now);
                    }
                }
            }
        }
        if nodes
            .iter()
            .all(|it| it.queue.is_empty() && it.sent.is_empty())
        {
            break;
        }
    }
    assert_eq!(service.accepted.len(), runs, "no run fails");
    let end = service.accepted.last().expect("requests").0;
    let minute = start + Duration::from_secs(60);
    let later = service.accepted.iter().filter(|it| it.0 >= minute);
    let used: f64 = later.map(|it| it.1).sum();
    let used = used / ((end - minute).as_secs_f64() * LIMIT / 60.0);
    let refused = service.refused as f64 / (runs + service.refused) as f64;
    // While both wait.
    let half = &service.accepted[..runs * 9 / 10];
    let of_ada: f64 = half.iter().filter(|it| it.2 == 0).map(|it| it.1).sum();
    let share = of_ada / half.iter().map(|it| it.1).sum::<f64>();
    let text = format!("{kind:?} {node_count}: used {used}, refused {refused}, share {share}");
    assert!(
        used > 0.95 && refused < 0.001 && (share - 0.5).abs() < 0.02,
        "{text}"
    );
    assert!(nodes[0].bucket.limits()[INPUT_TOKENS].is_some());
}

#[test]
fn the_limit_is_used_and_nothing_is_refused() {
    simulate(Kind::Bucket, 1);
    simulate(Kind::Minute, 1);
}

#[test]
fn three_nodes_use_the_limit_together() {
    simulate(Kind::Bucket, 3);
    simulate(Kind::Minute, 3);
}
