//! Cores for what is measured and for what stands beside it. A process inherits the core of the thread that starts it.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// One core for the measured process, and another one for clients and provider.
pub struct Cores {
    all: CpuSet,
    measured: CpuSet,
    beside: CpuSet,
}

impl Cores {
    /// The first two cores of this process; with a single core nothing is separated.
    pub fn split() -> Self {
        let all = sched_getaffinity(None).expect("the cores of this process");
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core));
        let first = cores.next().expect("a core");
        let second = cores.next().unwrap_or(first);
        Self {
            all,
            measured: single(first),
            beside: single(second),
        }
    }

    /// Starts what is measured.
    pub fn measured<T>(&self, start: impl FnOnce() -> T) -> T {
        pin(&self.measured);
        let started = start();
        pin(&self.beside);
        started
    }

    /// Starts what is not measured. From now on this process, with its clients, is beside it.
    pub fn beside<T>(&self, start: impl FnOnce() -> T) -> T {
        pin(&self.beside);
        start()
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        pin(&self.all);
    }
}

fn single(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

fn pin(cores: &CpuSet) {
    sched_setaffinity(None, cores).expect("pin this thread");
}
