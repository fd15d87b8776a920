//! Work that waits for a disk, off the runtime's threads.

/// Runs what waits for a disk off the runtime's threads. A panic in it is the caller's.
pub async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
