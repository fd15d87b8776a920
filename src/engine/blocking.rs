//! Work that waits for a disk, off the runtime's threads.

/// Runs work that waits for the disk off the runtime's threads. Panics if the work panics.
pub async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
