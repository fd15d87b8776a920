//! The lines of the log on their way to stderr: a thread of its own writes them, so that nobody waits for who reads them.

use std::io::{Write, stderr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Lines that wait to be written, in bytes; further ones are dropped.
const MAX_WAITING_BYTES: usize = 1 << 20;
/// Lines that are written at once, in bytes: a pipe takes so many without lines of other processes between them.
const MAX_WRITTEN_BYTES: usize = 4096;
/// How long [`flush`] waits for a line to be read.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);

static QUEUE: LogQueue = LogQueue {
    waiting: Mutex::new(Waiting {
        lines: Vec::new(),
        dropped: 0,
        is_writing: false,
    }),
    changed: Condvar::new(),
    dropped: AtomicU64::new(0),
};

struct LogQueue {
    waiting: Mutex<Waiting>,
    /// Notified when there are lines to write, and when some were written.
    changed: Condvar,
    /// All lines that were dropped.
    dropped: AtomicU64,
}

struct Waiting {
    lines: Vec<u8>,
    /// The lines that were dropped since the last one that was not.
    dropped: u64,
    is_writing: bool,
}

/// Starts the thread.
///
/// # Errors
/// There is no thread for it.
pub fn start() -> std::io::Result<()> {
    let thread = thread::Builder::new().name("log".to_owned());
    thread.spawn(|| QUEUE.write_lines()).map(drop)
}

/// Adds a line. If it does not fit, it is dropped; `describe` makes the line about dropped ones before the next.
pub fn push(line: &[u8], describe: impl Fn(u64) -> String) {
    let mut waiting = QUEUE.lock();
    if waiting.lines.len() + line.len() > MAX_WAITING_BYTES {
        waiting.dropped += 1;
        QUEUE.dropped.fetch_add(1, Relaxed);
        return;
    }
    let dropped = std::mem::take(&mut waiting.dropped);
    if dropped > 0 {
        waiting
            .lines
            .extend_from_slice(describe(dropped).as_bytes());
    }
    waiting.lines.extend_from_slice(line);
    drop(waiting);
    QUEUE.changed.notify_all();
}

/// How many lines were dropped.
pub fn dropped_lines() -> u64 {
    QUEUE.dropped.load(Relaxed)
}

/// Waits until all lines are written, as long as somebody reads them.
pub fn flush() {
    let mut waiting = QUEUE.lock();
    while waiting.is_writing || !waiting.lines.is_empty() {
        let woken = QUEUE.changed.wait_timeout(waiting, FLUSH_PATIENCE);
        let (still_waiting, timeout) = woken.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return;
        }
        waiting = still_waiting;
    }
}

impl LogQueue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lines(&self) {
        let mut waiting = self.lock();
        loop {
            if waiting.lines.is_empty() {
                waiting = self
                    .changed
                    .wait(waiting)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            waiting.is_writing = true;
            let lines = std::mem::take(&mut waiting.lines);
            drop(waiting);
            let mut rest = lines.as_slice();
            while !rest.is_empty() {
                let (next, later) = rest.split_at(whole_lines(rest));
                // A closed stderr must not stop the daemon: lines that cannot be written are lost.
                let _ = stderr().write_all(next);
                self.changed.notify_all();
                rest = later;
            }
            waiting = self.lock();
            waiting.is_writing = false;
            self.changed.notify_all();
        }
    }
}

/// The length of the first lines that are written at once.
fn whole_lines(lines: &[u8]) -> usize {
    let end = |line: usize| line + 1;
    let fits = &lines[..lines.len().min(MAX_WRITTEN_BYTES)];
    let last = fits.iter().rposition(|byte| *byte == b'\n');
    let first = || lines.iter().position(|byte| *byte == b'\n');
    last.or_else(first).map_or(lines.len(), end)
}

#[cfg(test)]
mod tests {
    use super::{MAX_WRITTEN_BYTES, whole_lines};

    #[test]
    fn lines_are_written_whole() {
        assert_eq!(whole_lines(b"a\nb\n"), 4);
        assert_eq!(whole_lines(b"a\nb"), 2);
        let long = format!("{}\nb\n", "a".repeat(MAX_WRITTEN_BYTES));
        assert_eq!(whole_lines(long.as_bytes()), MAX_WRITTEN_BYTES + 1);
        let many = "ab\n".repeat(2000);
        assert_eq!(whole_lines(many.as_bytes()), MAX_WRITTEN_BYTES / 3 * 3);
        assert_eq!(whole_lines(b"a"), 1);
    }
}
