//! The encoding of instruments in Prometheus' text format (version 0.0.4, prometheus.io/docs/instrumenting/exposition_formats).

use std::fmt::{self, Write};

use crate::instruments::{Family, Histogram};

/// Encodes metrics one after another in Prometheus' text format.
#[derive(Debug, Default)]
pub struct TextEncoder(String);

impl TextEncoder {
    pub fn finish(self) -> String {
        self.0
    }

    pub fn counter(&mut self, name: &str, help: &str, value: impl fmt::Display) {
        self.header(name, help, "counter");
        self.sample(name, &[], value);
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: impl fmt::Display) {
        self.header(name, help, "gauge");
        self.sample(name, &[], value);
    }

    /// A counter with labels; `write` writes the samples.
    pub fn counters(&mut self, name: &str, help: &str, write: impl FnOnce(&mut SampleWriter<'_>)) {
        self.samples(name, help, "counter", write);
    }

    /// A gauge with labels; `write` writes the samples.
    pub fn gauges(&mut self, name: &str, help: &str, write: impl FnOnce(&mut SampleWriter<'_>)) {
        self.samples(name, help, "gauge", write);
    }

    pub fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.header(name, help, "histogram");
        self.distribution(name, None, histogram);
    }

    /// A histogram for each value of one label.
    pub fn histograms(&mut self, name: &str, help: &str, label: &str, family: &Family<Histogram>) {
        self.header(name, help, "histogram");
        family.for_each(|value, histogram| {
            self.distribution(name, Some((label, value)), histogram);
        });
    }

    fn distribution(&mut self, name: &str, label: Option<(&str, &str)>, histogram: &Histogram) {
        let bucket = format!("{name}_bucket");
        let labels: Vec<_> = label.into_iter().collect();
        let mut count = 0;
        for (bound, up_to) in histogram.cumulative() {
            let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| bound.to_string());
            let mut labels = labels.clone();
            labels.push(("le", &bound));
            self.sample(&bucket, &labels, up_to);
            count = up_to;
        }
        let sum = FixedPoint::millionths(histogram.sum_micros());
        self.sample(&format!("{name}_sum"), &labels, sum);
        self.sample(&format!("{name}_count"), &labels, count);
    }

    fn samples(
        &mut self,
        name: &str,
        help: &str,
        kind: &str,
        write: impl FnOnce(&mut SampleWriter<'_>),
    ) {
        self.header(name, help, kind);
        write(&mut SampleWriter {
            encoder: self,
            name,
        });
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
        family.for_each(|value, instrument| write(self, value, instrument));
    }
}

/// A decimal number with a fixed number of digits, written exactly.
pub struct FixedPoint {
    count: u64,
    digits: usize,
}

impl FixedPoint {
    pub fn whole(count: u64) -> Self {
        Self { count, digits: 0 }
    }

    pub fn hundredths(count: u64) -> Self {
        Self { count, digits: 2 }
    }

    pub fn thousandths(count: u64) -> Self {
        Self { count, digits: 3 }
    }

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

    use super::{FixedPoint, TextEncoder};
    use crate::instruments::{Counter, Family, Histogram};

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
