//! Watches what the processes of a command use together, where the kernel does not limit it.

use std::time::{Duration, Instant};

use crate::tools::shell::limits::Limits;
use crate::tools::shell::process_tree;

/// The longest time between two counts.
const COUNT_INTERVAL: Duration = Duration::from_millis(100);
/// Counting takes at most this part of the time.
const COUNT_SHARE: u32 = 50;

/// Counts the supervisor's descendants, at a cost that does not depend on what they do.
pub struct UsageWatch {
    limits: Limits,
    /// Threads of the machine, the fewest since the last count.
    threads_before: u16,
    next_count: Instant,
}

impl UsageWatch {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            threads_before: machine_threads(),
            next_count: Instant::now() + COUNT_INTERVAL,
        }
    }

    /// Whether the machine has so many more threads than at the last count that the command may exceed its limit.
    pub fn is_multiplying(&mut self) -> bool {
        let threads = machine_threads();
        self.threads_before = self.threads_before.min(threads);
        let new_threads = usize::from(threads - self.threads_before);
        new_threads > self.limits.processes / 2
    }

    pub fn is_due(&self) -> bool {
        Instant::now() >= self.next_count
    }

    /// Which limit is exceeded.
    pub fn count(&mut self) -> Option<String> {
        let began = Instant::now();
        let descendants = process_tree::descendants_of_self();
        let exceeded = self.exceeded_by(&descendants);
        self.threads_before = machine_threads();
        self.next_count = Instant::now() + COUNT_INTERVAL.max(began.elapsed() * COUNT_SHARE);
        exceeded
    }

    fn exceeded_by(&self, descendants: &[i32]) -> Option<String> {
        let Limits { processes, memory } = self.limits;
        let threads = descendants.iter().map(|pid| process_tree::threads_of(*pid));
        if threads.sum::<usize>() > processes {
            return Some(self.limits.exceeded_processes());
        }
        // The quick sum counts pages once for each process that shares them, so an excess is measured again.
        let sum =
            |measure: fn(i32) -> u64| descendants.iter().map(|pid| measure(*pid)).sum::<u64>();
        (sum(process_tree::resident_memory_of) > memory
            && sum(process_tree::proportional_memory_of) > memory)
            .then(|| {
                format!(
                    "its processes used more than {} MiB of memory together, which is the limit",
                    memory >> 20
                )
            })
    }
}

fn machine_threads() -> u16 {
    rustix::system::sysinfo().procs
}
