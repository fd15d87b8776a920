//! What the stories stand on: a daemon of one's own, a provider that says what it is told, and readers for answers.

pub mod app;
pub mod client;
pub mod crashing;
pub mod daemon;
pub mod events;
pub mod gate;
pub mod hanging;
pub mod hostile;
pub mod picture;
pub mod provider;
pub mod receiver;
pub mod replay;
pub mod run;

use std::future::Future;
use std::time::Duration;

/// The longest that any story waits for one thing. Only a broken build ever gets here.
pub const PATIENCE: Duration = Duration::from_secs(45);

/// Waits for `what`, and fails the story with its name when it never comes.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {PATIENCE:?} in vain for {what}"),
    }
}
