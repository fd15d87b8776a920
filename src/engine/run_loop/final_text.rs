//! Checks the final text of a run against the requested response format. A check that runs on a thread of its own
//! starts only after the reply is recorded: a process that resumes the run then does not request another reply, and
//! gives up after too many interrupted checks.

use crate::domain::event::EventKind;
use crate::engine::context::RunContext;
use crate::engine::run_loop::ending::{Ending, LoopState, error_ending};
use crate::engine::run_loop::limits;
use crate::engine::state::active_run::ActiveRun;
use crate::store::{Change, Step};
use crate::validation;

/// After so many restarts during one check, the check is given up.
pub const MAX_RESUMED_CHECKS: u32 = 3;

/// What is still to be recorded of a reply; empty afterwards.
pub struct UnrecordedReply {
    pub steps: Vec<Step>,
    pub events: Vec<EventKind>,
}

impl UnrecordedReply {
    /// Does nothing if the reply is already recorded.
    /// # Errors
    /// The run's ending, if the record could not be written.
    pub async fn record(&mut self, context: &RunContext, state: &LoopState) -> Result<(), Ending> {
        if self.steps.is_empty() && self.events.is_empty() {
            return Ok(());
        }
        let (steps, events) = (
            std::mem::take(&mut self.steps),
            std::mem::take(&mut self.events),
        );
        let change = Change::Progress(state.progress.clone());
        context
            .engine
            .journal
            .append(&context.run, change, steps, events)
            .await?;
        Ok(())
    }
}

/// `Ok(true)` if the text is JSON of the requested format, `Ok(false)` if any text is accepted, `Err` with the reasons
/// if it is invalid.
/// # Errors
/// The run's ending, if it was cancelled, its deadline passed, or the reply could not be recorded.
pub async fn check_output(
    context: &RunContext,
    state: &LoopState,
    content: &str,
    reply: &mut UnrecordedReply,
) -> Result<Result<bool, Vec<String>>, Ending> {
    let format = &context.run.agent.params.response_format;
    if let Some(checked) = validation::check_output_inline(format, content) {
        return Ok(checked);
    }
    Box::pin(reply.record(context, state)).await?;
    let owner = context.run.tree.owner.as_deref();
    let checked = Box::pin(validation::check_output(format, content, owner));
    let checked = limits::within_deadline(&context.run, checked).await;
    checked.map_err(|error| error_ending(&context.run, error))
}

/// Like [`check_output`], for a reply that an earlier process recorded. `resume_count` is how often the run was resumed
/// since.
/// # Errors
/// The run's ending, if it was cancelled or its deadline passed.
pub async fn check_recorded_output(
    run: &ActiveRun,
    content: &str,
    resume_count: u32,
) -> Result<Result<bool, Vec<String>>, Ending> {
    let format = &run.agent.params.response_format;
    if let Some(checked) = validation::check_output_inline(format, content) {
        return Ok(checked);
    }
    if resume_count >= MAX_RESUMED_CHECKS {
        let message = format!(
            "the daemon stopped {} times during the check",
            resume_count + 1
        );
        return Ok(Err(vec![message]));
    }
    let owner = run.tree.owner.as_deref();
    let checked = Box::pin(validation::check_output(format, content, owner));
    let checked = limits::within_deadline(run, checked).await;
    checked.map_err(|error| error_ending(run, error))
}
