//! Waits for a run on behalf of a client's request that ends with it, and cancels the run if the client goes away.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::domain::run::{Run, RunId};
use crate::engine::request::RunRequest;
use crate::engine::runner::Runner;
use crate::web::clients::start::{self, StartedRun};
use crate::web::error::Problem;
use crate::web::state::AppState;

/// How long one look at the run waits, and the pause after one that found nothing new.
const WAIT: Duration = Duration::from_secs(3600);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The reason of a cancellation by a client that goes away.
const CLOSED: &str = "the client closed its request";

/// The run once it has ended or, if `stops_for_client`, once it waits for approvals or results of its client that `run` does
/// not wait for.
pub async fn wait_for_stop(runner: Runner, mut run: Arc<Run>, stops_for_client: bool) -> Arc<Run> {
    loop {
        let found = match stops_for_client {
            true => {
                let seen = run.waits_for_person().then_some(&*run);
                runner.wait_for_end_or_person(run.id, seen, WAIT).await
            }
            false => runner.wait(run.id, WAIT).await,
        };
        match found {
            Ok(Some(found)) => {
                if found.status.is_terminal() || stops_for_client && is_waiting(&found) {
                    return found;
                }
                if *found != *run {
                    run = found;
                    continue;
                }
            }
            // Deleted: only a run that has ended can be.
            Ok(None) => return run,
            Err(error) => {
                warn!(run.id = %run.id, "Cannot wait for {}, trying again: {error}", run.id);
            }
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Whether the run does nothing more before its client decides or has given results.
pub fn is_waiting(run: &Run) -> bool {
    let needs_client = !run.pending_inputs.is_empty() || run.waits_for_client();
    needs_client && run.waits_for_person()
}

/// Starts the run of a request that ends with it. A client that goes away during the start cancels the run as well, once it has
/// started.
pub async fn start(
    state: &AppState,
    request: RunRequest,
    subscribes: bool,
) -> Result<StartedRun, Problem> {
    let owned = state.clone();
    // In a task of its own, whose result is dropped with its guard if nobody takes it.
    let start = state.runner.perform(async move {
        let started = start::start_once(&owned, request, subscribes).await?;
        let guard = CancelOnDrop::new(&owned, started.run.id);
        Ok::<_, Problem>((started, guard))
    });
    let started = start.await;
    let (started, mut guard) =
        started.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    guard.disarm();
    Ok(started)
}

/// Cancels the run when it is dropped before its end: the client has closed the request.
pub struct CancelOnDrop {
    runner: Runner,
    closing: CancellationToken,
    run: RunId,
    is_armed: bool,
}

impl CancelOnDrop {
    pub fn new(state: &AppState, run: RunId) -> Self {
        Self {
            runner: state.runner.clone(),
            closing: state.closing.clone(),
            run,
            is_armed: true,
        }
    }

    pub fn disarm(&mut self) {
        self.is_armed = false;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        // A daemon that stops drops all requests; their runs continue after its restart.
        if self.is_armed && !self.closing.is_cancelled() {
            self.runner.cancel_later(self.run, CLOSED);
        }
    }
}
