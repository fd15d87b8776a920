//! The store: records, lists, retention.

/// Runs stories of the contract with an engine. Another engine joins by another line in each file.
macro_rules! shared_stories {
    ($engine:ident: $($story:ident),+ $(,)?) => {
        mod $engine {$(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                super::$story(&crate::store::fixtures::$engine()).await;
            }
        )+}
    };
}

mod data_directory;
mod deletion;
mod event_log;
pub mod fixtures;
mod idempotency_keys;
mod lists;
mod migrations;
mod outbox;
mod retention;
mod run_lists;
mod run_records;
mod turns;
mod usage;
