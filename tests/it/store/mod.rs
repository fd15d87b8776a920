//! The store: records, lists, retention.

/// Runs stories of the contract with each engine; those with PostgreSQL only if there is a server.
macro_rules! shared_stories {
    ($($story:ident),+ $(,)?) => {
        mod sqlite {$(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                super::$story(&crate::store::fixtures::sqlite()).await;
            }
        )+}
        mod postgres {$(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                if let Some(opened) = crate::store::fixtures::postgres() {
                    super::$story(&opened).await;
                }
            }
        )+}
    };
}

mod batch_lines;
mod data_directory;
mod deletion;
mod event_log;
pub mod fixtures;
mod idempotency_keys;
mod lists;
mod migrate;
mod migrations;
mod nodes;
mod outbox;
mod retention;
mod run_lists;
mod run_records;
mod run_search;
mod turns;
mod usage;
