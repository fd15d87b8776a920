//! What Prometheus' clients report of every process (prometheus.io/docs/instrumenting/writing_clientlibs, "Process metrics"), read
//! from Linux's `/proc`. Other systems have none of it.

use std::fs;

use crate::telemetry::prometheus::{FixedPoint, TextEncoder};

/// Clock ticks a second in `/proc`, the same on every architecture that Rust runs on.
const TICKS: u64 = 100;

#[derive(Debug, Default)]
pub struct ProcessStats {
    /// In hundredths of a second.
    cpu: Option<u64>,
    /// In seconds since 1970.
    started_at: Option<u64>,
    resident_bytes: Option<u64>,
    virtual_bytes: Option<u64>,
    threads: Option<u64>,
    open_files: Option<u64>,
    max_open_files: Option<u64>,
}

impl ProcessStats {
    /// Reads a few small files, and lists the open ones.
    pub fn read() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let files = fs::read_dir("/proc/self/fd").ok();
        Self {
            // Without the one of the list itself.
            open_files: files.map(|files| (files.count() as u64).saturating_sub(1)),
            ..Self::parse(
                &read("/proc/self/stat"),
                &read("/proc/self/status"),
                &read("/proc/self/limits"),
                &read("/proc/stat"),
            )
        }
    }

    fn parse(stat: &str, status: &str, limits: &str, system: &str) -> Self {
        // The name of the program, in parentheses, may contain anything.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let fields: Vec<&str> = fields.split_whitespace().collect();
        // Numbered from 3 in proc_pid_stat(5).
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let value = |text: &str, name: &str| {
            let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
            rest.split_whitespace().next()?.parse::<u64>().ok()
        };
        let booted_at = value(system, "btime ");
        Self {
            cpu: field(14).zip(field(15)).map(|(user, system)| user + system),
            started_at: booted_at
                .zip(field(22))
                .map(|(at, ticks)| at + ticks / TICKS),
            resident_bytes: value(status, "VmRSS:").map(|kilobytes| kilobytes << 10),
            virtual_bytes: value(status, "VmSize:").map(|kilobytes| kilobytes << 10),
            threads: value(status, "Threads:"),
            open_files: None,
            max_open_files: value(limits, "Max open files"),
        }
    }

    pub fn render(&self, encoder: &mut TextEncoder) {
        if let Some(cpu) = self.cpu {
            encoder.counter(
                "process_cpu_seconds_total",
                "Processor time of the daemon, of user and system.",
                FixedPoint::hundredths(cpu),
            );
        }
        let gauges = [
            (
                "process_start_time_seconds",
                "When the daemon started, in seconds since 1970.",
                self.started_at,
            ),
            (
                "process_resident_memory_bytes",
                "Memory of the daemon that is in RAM.",
                self.resident_bytes,
            ),
            (
                "process_virtual_memory_bytes",
                "Address space of the daemon.",
                self.virtual_bytes,
            ),
            ("process_threads", "Threads of the daemon.", self.threads),
            (
                "process_open_fds",
                "Open file descriptors.",
                self.open_files,
            ),
            (
                "process_max_fds",
                "Largest number of open file descriptors.",
                self.max_open_files,
            ),
        ];
        for (name, help, value) in gauges {
            if let Some(value) = value {
                encoder.gauge(name, help, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessStats;
    use crate::telemetry::prometheus::TextEncoder;

    #[test]
    fn the_numbers_of_linux_are_read() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 9 0 1000 5000 60 18446744073709551615";
        let status = "Name:\ta\nVmSize:\t    2048 kB\nVmRSS:\t     512 kB\nThreads:\t9\n";
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096                 files\n";
        let stats = ProcessStats::parse(stat, status, limits, "cpu 1 2\nbtime 1700000000\n");
        let mut encoder = TextEncoder::default();
        stats.render(&mut encoder);
        let text = encoder.finish();
        for line in [
            "process_cpu_seconds_total 3",
            "process_start_time_seconds 1700000010",
            "process_resident_memory_bytes 524288",
            "process_virtual_memory_bytes 2097152",
            "process_threads 9",
            "process_max_fds 1024",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{text}");
        }
    }

    #[test]
    fn without_proc_there_are_no_numbers() {
        let mut encoder = TextEncoder::default();
        ProcessStats::parse("", "", "", "").render(&mut encoder);
        assert_eq!(encoder.finish(), "");
    }
}
