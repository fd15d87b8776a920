//! Accepts the final text of a run, or has the model correct it: checks it against the requested response format. A check
//! that runs on a thread of its own starts only after the reply is recorded: a process that resumes the run then does not
//! request another reply, and gives up after too many interrupted checks.

use crate::domain::structured::{self, FinalText};
use crate::engine::run_loop::ending::{Ending, LoopOutcome, error_ending};
use crate::engine::run_loop::limits;
use crate::engine::run_loop::new_messages;
use crate::engine::run_loop::summary;
use crate::engine::run_loop::turn_loop::{NewReply, TurnLoop};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::failures;
use crate::record::entry::Entry;
use crate::store::StoreError;
use crate::validation;

/// After so many restarts during one check, the check is given up.
pub const MAX_RESUMED_CHECKS: u32 = 3;

/// The result of a check of a final text.
pub enum OutputCheck {
    Valid(FinalText),
    /// The reasons.
    Invalid(Vec<String>),
}

impl From<Result<FinalText, Vec<String>>> for OutputCheck {
    fn from(checked: Result<FinalText, Vec<String>>) -> Self {
        match checked {
            Ok(text) => Self::Valid(text),
            Err(errors) => Self::Invalid(errors),
        }
    }
}

/// Returns if the model has to correct its reply in another turn, or to read messages: those that were added to the run, and the ends of
/// its children in the background, for which it waits.
///
/// # Errors
/// The run's ending, a successful one too.
pub async fn accept(turn_loop: &mut TurnLoop<'_>, reply: NewReply) -> Result<(), Ending> {
    if new_messages::needs_turn(turn_loop).await? {
        record_unfinished(turn_loop, reply).await?;
        return new_messages::await_next(turn_loop).await;
    }
    if let Some(summary_prompt) = summary::summary_prompt(&turn_loop.context.run) {
        return Err(summarize_task(turn_loop, reply, summary_prompt).await);
    }
    let (turn, message) = (reply.turn, reply.message.clone());
    let mut unrecorded = UnrecordedReply(vec![reply.into()]);
    match check_output(turn_loop, &message.content, &mut unrecorded).await? {
        OutputCheck::Valid(_) if !new_messages::close(turn_loop).await? => {
            unrecorded.record(turn_loop).await?;
            turn_loop.conversation.restore_reply(turn, message);
            Ok(())
        }
        OutputCheck::Valid(text) => {
            Err(complete(turn_loop, message.content, text, unrecorded).await)
        }
        OutputCheck::Invalid(errors) if !turn_loop.conversation.may_repair() => {
            Err(Ending::failed(failures::output_invalid(&errors)).with_entries(unrecorded.0))
        }
        OutputCheck::Invalid(errors) => {
            let repair_prompt = structured::repair_prompt(&errors);
            unrecorded.0.push(Entry::Followup {
                content: repair_prompt.clone(),
            });
            unrecorded.record(turn_loop).await?;
            let conversation = &mut turn_loop.conversation;
            conversation.push_followup(turn, message, repair_prompt);
            Ok(())
        }
    }
}

/// Records a text that the run does not end with, because it has messages to read.
async fn record_unfinished(
    turn_loop: &mut TurnLoop<'_>,
    reply: NewReply,
) -> Result<(), StoreError> {
    let (turn, message) = (reply.turn, reply.message.clone());
    turn_loop.record(vec![reply.into()]).await?;
    turn_loop.conversation.restore_reply(turn, message);
    Ok(())
}

/// Records the final text of an ad-hoc sub-agent's task and requests its summary.
async fn summarize_task(
    turn_loop: &mut TurnLoop<'_>,
    reply: NewReply,
    summary_prompt: &str,
) -> Ending {
    let (turn, message) = (reply.turn, reply.message.clone());
    let followup = Entry::Followup {
        content: summary_prompt.to_owned(),
    };
    if let Err(error) = turn_loop.record(vec![reply.into(), followup]).await {
        return error.into();
    }
    let task_text = message.content.clone();
    let conversation = &mut turn_loop.conversation;
    conversation.push_followup(turn, message, summary_prompt.to_owned());
    Box::pin(summary::request_summary(turn_loop, task_text)).await
}

async fn complete(
    turn_loop: &TurnLoop<'_>,
    reply: String,
    text: FinalText,
    mut unrecorded: UnrecordedReply,
) -> Ending {
    let context = turn_loop.context;
    let has_memory = context.run.adds_memory();
    let memory_time = has_memory.then(|| context.engine.memories.next_time());
    let ending = Ending::new(LoopOutcome::Completed {
        structured: text.is_structured(),
        content: text.into_content(reply),
        task: turn_loop.conversation.task().into_owned(),
        memory_time,
    });
    let Some(at) = memory_time else {
        return ending.with_entries(unrecorded.0);
    };
    // The memory entry is written between the reply and the end. A process that resumes in between has to find the reply,
    // so that it does not request another one, and the time that identifies the entry.
    unrecorded.0.push(Entry::Remembers { at });
    match unrecorded.record(turn_loop).await {
        Ok(()) => ending,
        Err(error) => error.into(),
    }
}

/// What is still to be recorded of a reply; empty afterwards.
struct UnrecordedReply(Vec<Entry>);

impl UnrecordedReply {
    /// Does nothing if the reply is already recorded.
    async fn record(&mut self, turn_loop: &TurnLoop<'_>) -> Result<(), StoreError> {
        match std::mem::take(&mut self.0) {
            entries if entries.is_empty() => Ok(()),
            entries => turn_loop.record(entries).await,
        }
    }
}

/// # Errors
/// The run's ending, if it was cancelled, its deadline passed, or the reply could not be recorded.
async fn check_output(
    turn_loop: &TurnLoop<'_>,
    content: &str,
    reply: &mut UnrecordedReply,
) -> Result<OutputCheck, Ending> {
    let run = &turn_loop.context.run;
    let format = &run.agent.params.response_format;
    if let Some(checked) = validation::check_output_inline(format, content) {
        return Ok(checked.into());
    }
    Box::pin(reply.record(turn_loop)).await?;
    check_on_thread(run, content).await
}

/// Checks a reply that an earlier process recorded. `resume_count` is how often the run was resumed since.
///
/// # Errors
/// The run's ending, if it was cancelled or its deadline passed.
pub async fn check_recorded_output(
    run: &ActiveRun,
    content: &str,
    resume_count: u32,
) -> Result<OutputCheck, Ending> {
    let format = &run.agent.params.response_format;
    if let Some(checked) = validation::check_output_inline(format, content) {
        return Ok(checked.into());
    }
    if resume_count >= MAX_RESUMED_CHECKS {
        let message = format!(
            "the daemon stopped {} times during the check",
            resume_count + 1
        );
        return Ok(OutputCheck::Invalid(vec![message]));
    }
    check_on_thread(run, content).await
}

async fn check_on_thread(run: &ActiveRun, content: &str) -> Result<OutputCheck, Ending> {
    let format = &run.agent.params.response_format;
    let owner = run.tree.owner.as_deref();
    let checked = Box::pin(validation::check_output(format, content, owner));
    let checked = limits::within_deadline(run, checked).await;
    checked
        .map(OutputCheck::from)
        .map_err(|error| error_ending(run, error))
}
