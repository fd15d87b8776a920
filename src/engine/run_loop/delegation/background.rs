//! Children in the background: their tasks, the waits for them, and the delivery of their ends, once each. What is recorded decides:
//! `agent.returned` is the delivery, in one write with the message that has the end, or before the result that has it.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::domain::agent::OnEnd;
use crate::domain::counted::counted;
use crate::domain::run::{Run, RunId};
use crate::domain::waiting_for::WaitingFor;
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::approval::pause;
use crate::engine::context::RunContext;
use crate::engine::control::cancel;
use crate::engine::history::run_log::ReturnedIn;
use crate::engine::run_loop::delegation::child_result;
use crate::engine::run_loop::ending::{Ending, LoopOutcome, error_ending};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::background::{ChildProgress, EndedChild, not_in_background};
use crate::engine::state::failures;
use crate::engine::state::pause::{BackgroundEvent, PauseEvent, PauseReason};
use crate::engine::state::turn_error::TurnError;
use crate::record::entry::Entry;
use crate::store::{Change, Progress, StoreError};
use crate::tools::subagent;
use crate::tools::{AgentEnd, AwaitRequest, StartedAgent};

/// Aborts the children in the background when the run is dropped: another process drives them with it.
pub struct AbortOnDrop<'a>(pub &'a ActiveRun);

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(background) = self.0.background.get() {
            drop(background.take_tasks());
        }
    }
}

/// Starts a task that drives a child of `parent`, which this call started. `work` returns its record at its end; `None` if that is not
/// recorded.
pub fn spawn(
    parent: &RunContext,
    call: &str,
    child: RunId,
    work: impl Future<Output = Option<Arc<Run>>> + Send + 'static,
) {
    let background = parent.run.background();
    background.add(child, call, ChildProgress::Working);
    let started = PauseEvent::Background(BackgroundEvent::Started);
    parent.run.clock().apply(started);
    let parent = parent.clone();
    background.spawn(async move {
        let ended = work.await;
        let ends_wait = parent.run.background().end(child, ended);
        if !ends_wait {
            // If it cannot be recorded, the tree is suspended.
            let _ = pause::finish_in_background(&parent).await;
        }
    });
}

/// Waits until fewer children than the limit work in the background.
pub async fn acquire(
    context: &RunContext,
    permits: Arc<Semaphore>,
) -> Result<OwnedSemaphorePermit, TurnError> {
    loop {
        // Before looking, so that no end is missed.
        let working = context.run.background().working();
        if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
            return Ok(permit);
        }
        let reason = PauseReason::Call(WaitingFor::Agents);
        wait(context, reason, working, true, pending()).await?;
    }
}

/// Waits for the end of all of these children, or of any, or until `is_needed`. Meanwhile the run is paused.
async fn wait(
    context: &RunContext,
    reason: PauseReason,
    runs: Vec<RunId>,
    any: bool,
    is_needed: impl Future<Output = ()>,
) -> Result<(), TurnError> {
    let background = context.run.background();
    let id = background.begin_wait(runs, any);
    let mut outcome = Ok(());
    if !background.is_over(id) {
        pause::pause(context, reason, None).await?;
        let ended = async {
            tokio::select! {
                () = background.wait_until_over(id) => {}
                () = is_needed => {}
            }
        };
        outcome = pause::within_deadline(&context.run, ended).await;
        pause::unpause(context, reason).await?;
    }
    if background.end_wait(id) {
        pause::finish_in_background(context).await?;
    }
    outcome
}

/// What a call gets that has started this child.
pub fn started(run: &Run) -> String {
    let started = StartedAgent {
        run: run.id,
        agent: name(run),
    };
    started.to_json()
}

/// The agent, or the label of an ad-hoc sub-agent, by which its caller knows it.
fn name(run: &Run) -> &str {
    run.label.as_deref().unwrap_or(&run.agent)
}

fn outcome(parent: &ActiveRun, run: &Run) -> Result<String, String> {
    match run.label {
        None => child_result::result(run),
        Some(_) => {
            let max = parent.agent.subagent_settings().output_max_size;
            child_result::ad_hoc_result(run).map(|text| subagent::truncate(text, max))
        }
    }
}

fn returned(parent: &ActiveRun, child: &EndedChild, returned_in: ReturnedIn) -> Entry {
    let outcome = outcome(parent, &child.run);
    child_result::returned_event(&child.call, &child.run, &outcome, returned_in).into()
}

/// Waits for the children of a call of `await_agents`. Returns the ends that are part of its result; the inner error says why there
/// are none.
pub async fn await_ends(
    context: &RunContext,
    request: AwaitRequest<'_>,
) -> Result<Result<Vec<AgentEnd>, String>, StoreError> {
    let AwaitRequest { call, runs, any } = request;
    let run = &context.run;
    let background = run.background();
    let mut ended = background.claimed(call);
    if ended.is_empty() {
        let runs = match runs {
            Some(runs) => runs,
            None => background.undelivered(),
        };
        if runs.is_empty() {
            return Ok(Err(
                "there is no agent in the background whose result you do not have".to_owned(),
            ));
        }
        if let Err(why) = background.check_undelivered(&runs) {
            return Ok(Err(why));
        }
        let reason = PauseReason::Call(WaitingFor::Agents);
        match wait(context, reason, runs.clone(), any, pending()).await {
            Ok(()) => {}
            Err(TurnError::Store(error)) => return Err(error),
            Err(error) => return Ok(Err(failures::interruption_message(run, &error))),
        }
        ended = background.claim(&runs, call);
        if ended.is_empty() {
            let why = "another call of await_agents has got their results";
            return Ok(Err(why.to_owned()));
        }
        let returned_in = ReturnedIn {
            awaited_by: Some(call.to_owned()),
            message: None,
        };
        let entries = ended
            .iter()
            .map(|child| returned(run, child, returned_in.clone()));
        let entries = entries.collect();
        let journal = &context.engine.journal;
        // The result of the call is recorded after it.
        journal.enqueue(run, Change::Unchanged, entries).await?;
    }
    let ends = ended.iter().map(|child| {
        let (text, error) = match outcome(run, &child.run) {
            Ok(text) => (Some(text), None),
            Err(error) => (None, Some(error)),
        };
        AgentEnd {
            run: child.run.id,
            agent: name(&child.run).to_owned(),
            status: child.run.status,
            text,
            error,
        }
    });
    Ok(Ok(ends.collect()))
}

/// Cancels a child for its caller; the inner error says why not.
pub async fn cancel(context: &RunContext, child: RunId) -> Result<Result<(), String>, StoreError> {
    if !context.run.has_in_background(child) {
        return Ok(Err(not_in_background(child)));
    }
    if !context.run.background().working().contains(&child) {
        return Ok(Err(format!("{child} has ended already")));
    }
    let cancelled = cancel::cancel(&context.engine, child, "cancelled by its caller");
    cancelled.await.map(Ok)
}

/// The ends that the next message has, in one text; `None` without any.
pub fn take_ends(context: &RunContext) -> Option<(Vec<EndedChild>, String)> {
    // The messages of a test are those of its recording.
    if context.model_playback().is_some() {
        return None;
    }
    let ended = context.run.background.get()?.take_ended();
    let texts = ended.iter().map(|child| {
        let (name, id) = (name(&child.run), child.run.id);
        let text = match outcome(&context.run, &child.run) {
            Ok(text) => text,
            Err(error) => format!("Error: {error}"),
        };
        format!("Background agent {name} ({id}) ended:\n{text}")
    });
    let texts: Vec<String> = texts.collect();
    (!texts.is_empty()).then(|| (ended, texts.join("\n\n")))
}

/// The record that the message with this number delivers these ends.
pub fn returned_in_message(run: &ActiveRun, ended: &[EndedChild], message: u32) -> Vec<Entry> {
    let returned_in = ReturnedIn {
        awaited_by: None,
        message: Some(message),
    };
    let entries = ended
        .iter()
        .map(|child| returned(run, child, returned_in.clone()));
    entries.collect()
}

fn cancels_at_end(run: &ActiveRun) -> bool {
    run.agent.delegation.on_end == Some(OnEnd::Cancel)
}

/// Whether the run, which has a final text, takes another turn once its children in the background have ended.
pub fn has_undelivered(context: &RunContext) -> bool {
    let run = &context.run;
    let background = run.background.get();
    let has_undelivered = background.is_some_and(|it| !it.undelivered().is_empty());
    has_undelivered && !cancels_at_end(run) && context.model_playback().is_none()
}

/// Waits until all children in the background have ended, or a client has sent the run a message.
pub async fn wait_for_all(context: &RunContext) -> Result<(), TurnError> {
    let Some(background) = context.run.background.get() else {
        return Ok(());
    };
    let run = &context.run;
    let has_message = async {
        loop {
            // Subscribe before looking, so that no message is missed.
            let mut changed = pin!(run.tree.root_permit.changed.notified());
            changed.as_mut().enable();
            if run.inbox.lock().await.has_unread() {
                return;
            }
            changed.await;
        }
    };
    let reason = PauseReason::Turn(WaitingFor::Agents);
    wait(context, reason, background.working(), false, has_message).await
}

/// Ends the children in the background of a run that ends: it waits for them, or cancels them.
pub async fn settle(context: &RunContext, progress: &Progress, ending: &mut Ending) {
    let run = &context.run;
    let Some(background) = run.background.get() else {
        return;
    };
    if !run.is_suspended() {
        let is_played = context.model_playback().is_some();
        let has_text = matches!(ending.outcome, Ok(LoopOutcome::Completed { .. }));
        let is_read = has_text && !cancels_at_end(run);
        if (is_played || is_read)
            && let Err(error) = wait_for_rest(context, progress, ending).await
        {
            *ending = error_ending(run, error);
        }
        let unread = background.undelivered().len();
        if is_read && !is_played && unread > 0 {
            let results = counted(unread, "result");
            let text = format!(
                "{results} of agents in the background: the run had no turn left to read them"
            );
            let turn = (progress.turns > 0).then_some(progress.turns);
            run.warn(Warning::new(WarningCode::MessageUnread, &text), turn);
        }
        if !run.cancel_token.is_cancelled() {
            for child in background.working() {
                cancel::stop(&context.engine, child, "its caller has ended");
            }
        }
    }
    let mut tasks = background.take_tasks();
    while tasks.join_next().await.is_some() {}
}

async fn wait_for_rest(
    context: &RunContext,
    progress: &Progress,
    ending: &mut Ending,
) -> Result<(), TurnError> {
    let run = &context.run;
    let working = run.background().working();
    if working.is_empty() {
        return Ok(());
    }
    if matches!(ending.outcome, Ok(LoopOutcome::Completed { .. })) && !ending.entries.is_empty() {
        // So that a process that resumes the run meanwhile does not request the text again.
        let entries = std::mem::take(&mut ending.entries);
        let change = Change::Progress(progress.clone());
        let journal = &context.engine.journal;
        journal.append(run, change, entries).await?;
    }
    let reason = PauseReason::Turn(WaitingFor::Agents);
    wait(context, reason, working, false, pending()).await
}
