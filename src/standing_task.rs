//! Loops that go on for the whole life of the daemon: one that panics is started again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

/// The wait before a loop is started again.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Runs a loop until it returns. If it panics, it is started again, unless `stop` is cancelled. What it owns has to be
/// made again by `start`, and what it does has to be safe to repeat. The name is the subject of a log line.
pub async fn run<F: Future<Output = ()>>(
    name: &str,
    stop: &CancellationToken,
    mut start: impl FnMut(CancellationToken) -> F,
) {
    loop {
        let task = AssertUnwindSafe(start(stop.clone()));
        if task.catch_unwind().await.is_ok() {
            return;
        }
        log_panic(name);
        tokio::select! {
            () = tokio::time::sleep(RESTART_DELAY) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// As [`run`], for the loop of a thread.
pub fn run_thread(name: &str, mut work: impl FnMut()) {
    while catch_unwind(AssertUnwindSafe(&mut work)).is_err() {
        log_panic(name);
        std::thread::sleep(RESTART_DELAY);
    }
}

/// The panic hook has written the message to standard error.
fn log_panic(name: &str) {
    tracing::error!("{name} panicked, which is a bug: starting again in {RESTART_DELAY:?}");
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio_util::sync::CancellationToken;

    use super::{run, run_thread};

    #[tokio::test]
    async fn a_task_that_panics_is_started_again() {
        let (stop, starts) = (CancellationToken::new(), AtomicUsize::new(0));
        run("A test", &stop, |_| {
            let before = starts.fetch_add(1, Ordering::Relaxed);
            async move { assert_ne!(before, 0, "the first start panics") }
        })
        .await;
        assert_eq!(starts.into_inner(), 2);
    }

    #[tokio::test]
    async fn a_task_that_panics_while_the_daemon_stops_is_not_started_again() {
        let (stop, starts) = (CancellationToken::new(), AtomicUsize::new(0));
        run("A test", &stop, |stop| {
            let before = starts.fetch_add(1, Ordering::Relaxed);
            async move {
                stop.cancel();
                assert_ne!(before, 0, "the first start panics");
            }
        })
        .await;
        assert_eq!(starts.into_inner(), 1);
    }

    #[test]
    fn the_loop_of_a_thread_that_panics_is_started_again() {
        let mut starts = 0;
        run_thread("A test", || {
            starts += 1;
            assert_ne!(starts, 1, "the first start panics");
        });
        assert_eq!(starts, 2);
    }
}
