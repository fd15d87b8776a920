//! Lets the calls go on whose waits an event has ended.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use tracing::debug;

use crate::domain::input::InputKind;
use crate::engine::approval::decision;
use crate::engine::context::Engine;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::StoreError;
use crate::store::world_events::EndedWait;

/// How soon events are found that another node has recorded.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// When a wait is looked at again that could not be ended, for example because its run is not resumed yet.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Waits that are ended at the same time.
const MAX_ENDING: usize = 64;

/// Goes on until the daemon drains.
pub async fn run(engine: Arc<Engine>) {
    let mut delay = Duration::ZERO;
    loop {
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = engine.waits_ended.notified() => {}
            () = engine.draining.cancelled() => return,
        }
        let is_shared = engine.journal.store().cluster().is_some();
        let idle = if is_shared {
            POLL_INTERVAL
        } else {
            Duration::MAX
        };
        delay = match end_waits(&engine).await {
            Ok(true) => idle,
            Ok(false) => RETRY_INTERVAL.min(idle),
            Err(StoreError::Closed) => return,
            Err(error) => {
                debug!(error = %error, "Waits that events have ended cannot be read now: {error}");
                RETRY_INTERVAL
            }
        };
    }
}

/// Whether none is left.
async fn end_waits(engine: &Arc<Engine>) -> Result<bool, StoreError> {
    let waits = engine.journal.store().ended_waits().await?;
    if waits.is_empty() {
        return Ok(true);
    }
    let end = |wait: EndedWait| async move {
        let answer = InputAnswer::to_wait(InputKind::Event, Some(wait.data));
        let decided = decision::decide(engine, wait.run, &wait.call, answer).await;
        if let Err(error) = &decided {
            debug!(run.id = %wait.run, error = %error, "A wait cannot be ended now: {error}");
        }
        decided.is_ok()
    };
    let ended = stream::iter(waits).map(end).buffer_unordered(MAX_ENDING);
    let has_ended: Vec<bool> = ended.collect().await;
    if has_ended.iter().any(|has_ended| *has_ended) {
        // There may be more than one page.
        engine.waits_ended.notify_one();
    }
    Ok(has_ended.into_iter().all(|has_ended| has_ended))
}
