//! Looks at the record after a commit whose answer was lost, so that a run does what the record says.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::context::Engine;
use crate::engine::state::active_run::ActiveRun;
use crate::store::StoreError;

/// The time between two looks, and how many have to succeed: a server may commit after the connection has broken.
const INTERVAL: Duration = Duration::from_secs(1);
const COUNT: u32 = 5;

/// Looks some times, until `look` returns true, the run ends or the daemon stops. A look that fails does not count, so that an outage
/// is outlasted. `run` is `None` if this process does not drive
/// it.
pub fn spawn<F>(
    engine: &Engine,
    run: Option<Arc<ActiveRun>>,
    look: impl Fn() -> F + Send + Sync + 'static,
) where
    F: Future<Output = Result<bool, StoreError>> + Send,
{
    let shutdown = engine.shutdown.clone();
    let ended = async move {
        match run {
            Some(run) => drop(run.wait_for_end().await),
            None => std::future::pending().await,
        }
    };
    engine.tasks.spawn(async move {
        tokio::select! {
            () = repeat(look) => {}
            () = ended => {}
            () = shutdown.cancelled() => {}
        }
    });
}

async fn repeat<F>(look: impl Fn() -> F)
where
    F: Future<Output = Result<bool, StoreError>>,
{
    let mut looks = 0;
    while looks < COUNT {
        match look().await {
            Ok(true) => return,
            Ok(false) => looks += 1,
            Err(_) => {}
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
