//! Counters, histograms, and families of them by one label, and their encoding in Prometheus' text format (version 0.0.4,
//! prometheus.io/docs/instrumenting/exposition_formats).
//!
//! We do not use the `metrics` crates. Their recorder belongs to the process, and one process may run several daemons. Their
//! histograms keep every sample until a scrape. They do not bound the number of label values, which names that clients choose
//! require.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Write};
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
}

/// Instruments by the value of one label. When there are `max_series` of them, new values share [`OTHER_LABEL`].
#[derive(Debug)]
pub struct Family<T> {
    max_series: usize,
    series: RwLock<HashMap<Box<str>, T>>,
}

impl<T: Default> Family<T> {
    pub fn new(max_series: usize) -> Self {
        Self {
            max_series,
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
        update(series.entry(value.into()).or_default());
    }
}

/// Encodes metrics one after another in Prometheus' text format.
#[derive(Debug, Default)]
pub struct TextEncoder(String);

impl TextEncoder {
    pub fn finish(self) -> String {
        self.0
    }

    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.header(name, help, "counter");
        self.sample(name, &[], value);
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.header(name, help, "gauge");
        self.sample(name, &[], value);
    }

    /// A counter with labels; `write` writes the samples.
    pub fn counters(&mut self, name: &str, help: &str, write: impl FnOnce(&mut SampleWriter<'_>)) {
        self.header(name, help, "counter");
        write(&mut SampleWriter {
            encoder: self,
            name,
        });
    }

    pub fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.header(name, help, "histogram");
        let bucket = format!("{name}_bucket");
        let mut count = 0;
        for (index, bucket_count) in histogram.buckets.iter().enumerate() {
            count += bucket_count.load(Relaxed);
            match histogram.bounds.get(index) {
                Some(bound) => self.sample(&bucket, &[("le", &bound.to_string())], count),
                None => self.sample(&bucket, &[("le", "+Inf")], count),
            }
        }
        let sum = FixedPoint::millionths(histogram.sum.get());
        self.sample(&format!("{name}_sum"), &[], sum);
        self.sample(&format!("{name}_count"), &[], count);
    }

    fn header(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl fmt::Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            self.0.push(if index == 0 { '{' } else { ',' });
            self.0.push_str(label);
            self.0.push_str("=\"");
            for c in text.chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }
}

/// Writes the samples of one metric with labels.
pub struct SampleWriter<'p> {
    encoder: &'p mut TextEncoder,
    name: &'p str,
}

impl SampleWriter<'_> {
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl fmt::Display) {
        self.encoder.sample(self.name, labels, value);
    }

    /// Writes the samples of a family, sorted by label value.
    pub fn family<T>(&mut self, family: &Family<T>, mut write: impl FnMut(&mut Self, &str, &T)) {
        let series = family.series.read();
        for (value, instrument) in series.iter().collect::<BTreeMap<_, _>>() {
            write(self, value, instrument);
        }
    }
}

/// A decimal number with a fixed number of digits, written exactly.
pub struct FixedPoint {
    count: u64,
    digits: usize,
}

impl FixedPoint {
    pub fn millionths(count: u64) -> Self {
        Self { count, digits: 6 }
    }

    pub fn trillionths(count: u64) -> Self {
        Self { count, digits: 12 }
    }
}

impl fmt::Display for FixedPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = 10_u64.pow(self.digits as u32);
        let (whole, rest) = (self.count / parts, self.count % parts);
        match rest {
            0 => write!(f, "{whole}"),
            _ => {
                let rest = format!("{rest:0digits$}", digits = self.digits);
                write!(f, "{whole}.{}", rest.trim_end_matches('0'))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Counter, Family, FixedPoint, Histogram, TextEncoder};

    #[test]
    fn a_duration_on_a_bound_counts_in_its_bucket() {
        let histogram = Histogram::new(&[0.5, 1.0]);
        for millis in [500, 501, 1_000, 7_000] {
            histogram.observe(Duration::from_millis(millis));
        }
        let mut encoder = TextEncoder::default();
        encoder.histogram("took_seconds", "How long.", &histogram);
        let expected = "# HELP took_seconds How long.\n# TYPE took_seconds histogram\n\
                        took_seconds_bucket{le=\"0.5\"} 1\ntook_seconds_bucket{le=\"1\"} 3\n\
                        took_seconds_bucket{le=\"+Inf\"} 4\ntook_seconds_sum 9.001\ntook_seconds_count 4\n";
        assert_eq!(encoder.finish(), expected);
    }

    #[test]
    fn label_values_are_bounded_and_escaped() {
        let family = Family::<Counter>::new(2);
        let long = "x".repeat(1_000);
        for value in ["b", "a\"\\\n", "c", "d", "b", &long] {
            family.with(value, Counter::increment);
        }
        let mut encoder = TextEncoder::default();
        encoder.counters("seen_total", "Seen.", |samples| {
            samples.family(&family, |samples, value, count| {
                samples.sample(&[("of", value)], count.get());
            });
        });
        let expected = "# HELP seen_total Seen.\n# TYPE seen_total counter\nseen_total{of=\"(other)\"} 3\n\
                        seen_total{of=\"a\\\"\\\\\\n\"} 1\nseen_total{of=\"b\"} 2\n";
        assert_eq!(encoder.finish(), expected);
    }

    #[test]
    fn sums_do_not_wrap_and_are_written_exactly() {
        let counter = Counter::default();
        counter.add(u64::MAX);
        counter.increment();
        assert_eq!(counter.get(), u64::MAX);
        assert_eq!(
            FixedPoint::trillionths(3_000_000_000_050).to_string(),
            "3.00000000005"
        );
        assert_eq!(FixedPoint::millionths(12_000_000).to_string(), "12");
    }
}
