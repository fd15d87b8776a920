//! Checks the final text of a run against the shape that was requested. A check that takes a thread of its own is made
//! once the reply is recorded: a process that resumes the run does not request another reply, and gives up a check that
//! processes keep being stopped in.

use std::sync::Arc;

use crate::domain::event::EventKind;
use crate::engine::context::Engine;
use crate::engine::run_loop::finish::{Ending, LoopState};
use crate::engine::run_loop::tool_results::error_ending;
use crate::engine::run_loop::turn;
use crate::engine::state::active_run::ActiveRun;
use crate::store::{Change, Step};
use crate::validation;

/// How often a run is resumed within one check before the check is given up.
pub const MAX_RESUMED_CHECKS: u32 = 3;

/// What is to be recorded of a reply; empty once it is.
pub struct UnrecordedReply {
    /// The reply.
    pub steps: Vec<Step>,
    /// The end of its turn.
    pub events: Vec<EventKind>,
}

impl UnrecordedReply {
    /// Records it, if it is not yet.
    ///
    /// # Errors
    /// The run's end, if the record could not be written.
    pub async fn record(
        &mut self,
        engine: &Arc<Engine>,
        live: &Arc<ActiveRun>,
        state: &LoopState,
    ) -> Result<(), Ending> {
        if self.steps.is_empty() && self.events.is_empty() {
            return Ok(());
        }
        let (steps, events) = (
            std::mem::take(&mut self.steps),
            std::mem::take(&mut self.events),
        );
        let change = Change::Progress(state.progress.clone());
        engine.journal.append(live, change, steps, events).await?;
        Ok(())
    }
}

/// Whether the text of a reply fits: true if it is JSON, false if any text will do, or what does not fit.
///
/// # Errors
/// The run's end, if it was stopped meanwhile, is overdue, or could not be recorded.
pub async fn check_output(
    engine: &Arc<Engine>,
    live: &Arc<ActiveRun>,
    state: &LoopState,
    content: &str,
    reply: &mut UnrecordedReply,
) -> Result<Result<bool, Vec<String>>, Ending> {
    let format = &live.agent.params.response_format;
    if let Some(checked) = validation::check_output_inline(format, content) {
        return Ok(checked);
    }
    Box::pin(reply.record(engine, live, state)).await?;
    let owner = live.tree.owner.as_deref();
    let checked = Box::pin(validation::check_output(format, content, owner));
    let checked = turn::within_deadline(live, checked).await;
    checked.map_err(|error| error_ending(live, error))
}

/// As [`check`], for a reply that an earlier process recorded; the run was resumed that often since.
///
/// # Errors
/// As [`check`].
pub async fn check_recorded_output(
    live: &ActiveRun,
    content: &str,
    resume_count: u32,
) -> Result<Result<bool, Vec<String>>, Ending> {
    let format = &live.agent.params.response_format;
    if let Some(checked) = validation::check_output_inline(format, content) {
        return Ok(checked);
    }
    if resume_count >= MAX_RESUMED_CHECKS {
        let message = format!(
            "the daemon stopped {} times while it was checked",
            resume_count + 1
        );
        return Ok(Err(vec![message]));
    }
    let owner = live.tree.owner.as_deref();
    let checked = Box::pin(validation::check_output(format, content, owner));
    let checked = turn::within_deadline(live, checked).await;
    checked.map_err(|error| error_ending(live, error))
}
