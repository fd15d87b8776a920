//! Counters, histograms, and families of them by one label. Cheap to update: an atomic addition or two, and with a label a look-up
//! under a read lock. The store and the tools count with them too; `telemetry` writes them for Prometheus.
//!
//! We do not use the `metrics` crates. Their recorder belongs to the process, and one process may run several daemons. Their
//! histograms keep every sample until a scrape. They do not bound the number of label values, which names that clients choose
//! require.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::RwLock;

/// The label value for values that are too many or too long.
pub const OTHER_LABEL: &str = "(other)";
/// Longest label value, in bytes.
const MAX_LABEL_BYTES: usize = 200;

/// A sum that only grows. It saturates: providers may report any number, and a sum that wraps would look like a restart.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn increment(&self) {
        self.add(1);
    }

    pub fn add(&self, amount: u64) {
        // The closure always returns a value, so this cannot fail.
        let _ = self
            .0
            .fetch_update(Relaxed, Relaxed, |sum| Some(sum.saturating_add(amount)));
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Calls, and how many of them failed.
#[derive(Debug, Default)]
pub struct CallCounters {
    pub calls: Counter,
    pub errors: Counter,
}

/// Counts durations by upper bounds in seconds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and one for longer durations.
    buckets: Box<[AtomicU64]>,
    /// In microseconds: in nanoseconds, ten thousand concurrent runs would fill the range within weeks.
    sum: Counter,
}

impl Histogram {
    /// The bounds are upper bounds in seconds, ascending.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            buckets: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: Counter::default(),
        }
    }

    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let index = self.bounds.partition_point(|bound| *bound < seconds);
        self.buckets[index].fetch_add(1, Relaxed);
        self.sum
            .add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// The sum of all durations, in microseconds.
    pub fn sum_micros(&self) -> u64 {
        self.sum.get()
    }

    /// The upper bounds with the number of durations up to each; the last one has none.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<f64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(&self.buckets).scan(0, |total, (bound, count)| {
            *total += count.load(Relaxed);
            Some((bound, *total))
        })
    }
}

/// Instruments by the value of one label. When there are `max_series` of them, new values share [`OTHER_LABEL`].
#[derive(Debug)]
pub struct Family<T> {
    max_series: usize,
    create: fn() -> T,
    series: RwLock<HashMap<Box<str>, T>>,
}

impl<T: Default> Family<T> {
    pub fn new(max_series: usize) -> Self {
        Self::of(max_series, T::default)
    }
}

impl<T> Family<T> {
    /// A family whose instruments `create` makes.
    pub fn of(max_series: usize, create: fn() -> T) -> Self {
        Self {
            max_series,
            create,
            series: RwLock::default(),
        }
    }

    /// Reads the instrument of this value; `None` if it was never updated.
    pub fn get<R>(&self, value: &str, read: impl FnOnce(&T) -> R) -> Option<R> {
        self.series.read().get(value).map(read)
    }

    /// Updates the instrument of this value.
    pub fn with(&self, value: &str, update: impl FnOnce(&T)) {
        let value = match value.len() > MAX_LABEL_BYTES {
            true => OTHER_LABEL,
            false => value,
        };
        {
            let series = self.series.read();
            // More than `max_series` means that the shared instrument exists.
            let overflow = || {
                series
                    .get(OTHER_LABEL)
                    .filter(|_| series.len() > self.max_series)
            };
            if let Some(found) = series.get(value).or_else(overflow) {
                return update(found);
            }
        }
        let mut series = self.series.write();
        let value = match series.len() < self.max_series || series.contains_key(value) {
            true => value,
            false => OTHER_LABEL,
        };
        update(series.entry(value.into()).or_insert_with(self.create));
    }

    /// Reads all instruments, sorted by label value.
    pub fn for_each(&self, mut read: impl FnMut(&str, &T)) {
        let series = self.series.read();
        for (value, instrument) in series.iter().collect::<BTreeMap<_, _>>() {
            read(value, instrument);
        }
    }
}
