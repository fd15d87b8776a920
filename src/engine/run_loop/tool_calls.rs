//! Executes the tool calls of one reply, concurrently or one after another, and commits each result as it comes.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::task::JoinSet;

use crate::domain::event::EventKind;
use crate::domain::message::{ToolCall, ToolResult, shorten};
use crate::domain::usage::Usage;
use crate::engine::approval::decision::{self, Permission};
use crate::engine::approval::pause;
use crate::engine::context::RunContext;
use crate::engine::replay::run_log::RecordedCalls;
use crate::engine::run_loop::final_text::MAX_RESUMED_CHECKS;
use crate::engine::run_loop::limits;
use crate::engine::run_spans;
use crate::engine::state::failures;
use crate::engine::state::pause::PauseEvent;
use crate::store::{Change, Step, StoreError};
use crate::tools::toolbox::Toolbox;
use crate::tools::{Delegate, Effect, ToolOutput};

/// What all calls of one reply share.
pub struct BatchContext {
    pub context: RunContext,
    pub toolbox: Arc<Toolbox>,
    pub delegate: Arc<dyn Delegate>,
    /// The turn whose reply made the calls.
    pub turn: u32,
    /// What an earlier process recorded of them.
    pub recorded_calls: Arc<RecordedCalls>,
}

#[derive(Debug)]
pub enum CallsError {
    Store(StoreError),
    /// An earlier process had started this tool, and it is unknown whether it may be executed again.
    Interrupted(String),
}

impl From<StoreError> for CallsError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Returns the results in the order of the calls. `results` has those that an earlier process recorded; `results.len()
/// == calls.len()`. A call that fails does not affect the others.
pub async fn execute(
    batch: BatchContext,
    calls: Vec<ToolCall>,
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<ToolResult>, CallsError> {
    for (position, call) in calls.iter().enumerate() {
        // The result arrived while the record could not be written.
        if let Some(result) = batch.context.run.take_stashed_result(&call.id)
            && results[position].is_none()
        {
            let events = Vec::new();
            record_result(&batch, position, call, &result, Duration::ZERO, events).await?;
            results[position] = Some(result);
        }
    }
    reject_excess(&batch, &calls, &mut results).await?;
    let has_started = |call: &ToolCall| batch.recorded_calls.started.contains(&call.id);
    let effect = |call: &ToolCall| batch.toolbox.effect(&call.name);
    let mut pending = calls.iter().zip(&results).filter(|it| it.1.is_none());
    let interrupted = pending
        .find(|(call, _)| has_started(call) && effect(call) == Some(Effect::Mutating))
        .map(|(call, _)| shorten(&call.name, 200));
    if interrupted.is_some() {
        // The run fails. Children that had started end in order first; no other call is started, and nothing reads the
        // results that are filled in here.
        batch.context.run.cancel_token.cancel();
        for (call, result) in calls.iter().zip(&mut results) {
            if !has_started(call) || effect(call) != Some(Effect::Delegating) {
                result.get_or_insert_with(|| ToolResult::text(&call.id, "", true));
            }
        }
    }
    let results = execute_pending(batch, calls, results).await?;
    match interrupted {
        Some(tool) => Err(CallsError::Interrupted(tool)),
        None => Ok(results),
    }
}

/// Gives every call above the server's limits for one reply an error as its result, all in one commit.
async fn reject_excess(
    batch: &BatchContext,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let runs = &batch.context.engine.settings.runs;
    let (mut delegations, mut steps, mut events) = (0, Vec::new(), Vec::new());
    for (position, call) in calls.iter().enumerate() {
        let is_delegation = batch.toolbox.effect(&call.name) == Some(Effect::Delegating);
        delegations += usize::from(is_delegation);
        let (max, kind) = match position < runs.max_calls {
            false => (runs.max_calls, "tool calls"),
            true if is_delegation && delegations > runs.max_delegations => {
                (runs.max_delegations, "calls that start sub-agents")
            }
            true => continue,
        };
        if results[position].is_some() {
            continue;
        }
        let message = format!(
            "Error: a reply may make at most {max} {kind}. This call exceeds the limit and was not executed. Make \
             fewer calls per reply, and the rest in later replies."
        );
        let result = ToolResult::text(&call.id, message, true);
        let tool = shorten(&call.name, 200);
        events.push(EventKind::ToolStarted {
            turn: batch.turn,
            tool_call_id: call.id.clone(),
            tool,
        });
        let (step, event) = completion_records(batch, position, call, &result, Duration::ZERO);
        steps.push(step);
        events.push(event);
        results[position] = Some(result);
    }
    if steps.is_empty() {
        return Ok(());
    }
    let journal = &batch.context.engine.journal;
    let recorded = journal.append(&batch.context.run, Change::Unchanged, steps, events);
    recorded.await.map(drop)
}

async fn execute_pending(
    batch: BatchContext,
    calls: Vec<ToolCall>,
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<ToolResult>, StoreError> {
    let batch = Arc::new(batch);
    let pending_count = results.iter().filter(|result| result.is_none()).count();
    if pending_count <= 1 || !batch.context.run.agent.delegation.parallel {
        for (position, call) in calls.iter().enumerate() {
            if results[position].is_none() {
                batch.context.run.clock().apply(PauseEvent::CallsStarted(1));
                results[position] = Some(execute_one(&batch, position, call).await?);
            }
        }
        return Ok(results.into_iter().flatten().collect());
    }
    // Counted before the first call starts, so that the run never looks as if it only waits.
    let started = PauseEvent::CallsStarted(pending_count);
    batch.context.run.clock().apply(started);
    // Dropping the set aborts the tasks, so that a dropped run leaves nothing behind.
    let mut tasks = JoinSet::new();
    let cancel_token = batch.context.run.cancel_token.clone();
    for (position, call) in calls
        .into_iter()
        .enumerate()
        .filter(|(index, _)| results[*index].is_none())
    {
        let batch = Arc::clone(&batch);
        tasks.spawn(async move { (position, execute_one(&batch, position, &call).await) });
    }
    let mut store_error = None;
    while let Some(joined) = tasks.join_next().await {
        match joined {
            Ok((position, Ok(result))) => results[position] = Some(result),
            Ok((_, Err(error))) => {
                // The run is over and nothing reads the other results. The other calls end in order, with their record.
                cancel_token.cancel();
                store_error = Some(error);
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(StoreError::Closed),
        }
    }
    match store_error {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

async fn execute_one(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
) -> Result<ToolResult, StoreError> {
    let result = execute_when_approved(batch, position, call).await;
    let pause_result = pause::finish_call(&batch.context).await;
    let result = result.and_then(|result| pause_result.map(|()| result));
    if let Err(error) = &result {
        // Before the other calls are cancelled and record that as their result.
        batch.context.run.suspend(error);
    }
    result
}

/// Executes a call, after approval if the agent's settings require it.
async fn execute_when_approved(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
) -> Result<ToolResult, StoreError> {
    let BatchContext {
        context,
        turn,
        recorded_calls,
        ..
    } = batch;
    let needs_approval = context.run.agent.approve.contains(&call.name)
        && !recorded_calls.started.contains(&call.id)
        // A call that would be rejected anyway needs no approval.
        && Box::pin(batch.toolbox.can_call(call, context.run.tree.owner.as_deref())).await;
    if !needs_approval {
        return execute_call(batch, position, call).await;
    }
    let permission = Box::pin(decision::await_decision(
        context,
        recorded_calls,
        *turn,
        call,
    ))
    .await?;
    let Permission::Refused(reason) = permission else {
        return execute_call(batch, position, call).await;
    };
    // The call never started: it does not count, and it took no time.
    let result = ToolResult::text(&call.id, reason, true);
    record_result(batch, position, call, &result, Duration::ZERO, Vec::new()).await?;
    Ok(result)
}

async fn execute_call(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
) -> Result<ToolResult, StoreError> {
    let BatchContext { context, turn, .. } = batch;
    let tool = shorten(&call.name, 200);
    let started = EventKind::ToolStarted {
        turn: *turn,
        tool_call_id: call.id.clone(),
        tool: tool.clone(),
    };
    let start_time = Instant::now();
    // A call that an earlier process started is already counted and recorded.
    let has_started = batch.recorded_calls.started.contains(&call.id);
    let budget_check = match has_started {
        true => Ok(()),
        false => context
            .run
            .tree
            .budgets
            .count_tool_call(&context.run.accounts),
    };
    match &budget_check {
        // Counted when it starts: a running call is part of the tree's usage.
        Ok(()) if !has_started => context.run.add_usage(&Usage {
            tool_calls: 1,
            ..Usage::default()
        }),
        Ok(()) => {}
        Err(refusal) => context.run.record_refusal(refusal),
    }
    let is_within_budget = budget_check.is_ok();
    let effect = batch.toolbox.effect(&call.name);
    let mut has_finished = false;
    let mut events = Vec::new();
    match has_started {
        true => {}
        false if is_within_budget => {
            let (journal, started) = (&context.engine.journal, vec![started]);
            match effect {
                // Recorded before the tool changes anything, so that no later process executes it again.
                Some(Effect::Mutating) => {
                    let recorded =
                        journal.append(&context.run, Change::CountToolCall, Vec::new(), started);
                    recorded.await.map(drop)?;
                }
                _ => {
                    let enqueued =
                        journal.enqueue(&context.run, Change::CountToolCall, Vec::new(), started);
                    enqueued.await?;
                }
            }
        }
        // In one commit with the result: a process that resumed in between would execute the call.
        false => events.push(started),
    }
    let outcome = match budget_check {
        Ok(()) if has_exhausted_checks(batch, call) => Err(format!(
            "The arguments of {tool} could not be checked: the daemon stopped too often during the check"
        )),
        Ok(()) => {
            let owner = context.run.tree.owner.as_deref();
            let work = batch
                .toolbox
                .call(call, &context.run.scope, owner, batch.delegate.as_ref());
            let work = AssertUnwindSafe(work).catch_unwind();
            let finished = match effect {
                // A delegating call ends when its child has ended.
                Some(Effect::Delegating) => Ok(work.await),
                _ => limits::within_deadline(&context.run, work).await,
            };
            has_finished = finished.is_ok();
            match finished {
                Ok(output) => output.unwrap_or_else(|_| Err(format!("tool \"{tool}\" panicked"))),
                Err(error) => Err(failures::interruption_message(&context.run, &error)),
            }
        }
        Err(refusal) => Err(refusal.exceeded.to_string()),
    };
    let duration = start_time.elapsed();
    if is_within_budget {
        context.engine.metrics.tool_call_completed(duration);
    }
    let is_error = outcome.is_err();
    let output = outcome.unwrap_or_else(ToolOutput::from);
    let result = ToolResult {
        attachments: output.attachments,
        ..ToolResult::text(&call.id, output.text, is_error)
    };
    if is_within_budget {
        run_spans::end_tool_call(&context.run, *turn, call, &result, duration);
    }
    let recorded = record_result(batch, position, call, &result, duration, events).await;
    match recorded {
        Ok(()) => Ok(result),
        Err(error) => {
            if has_finished && effect == Some(Effect::Mutating) {
                context.run.stash_result(result);
            }
            Err(error)
        }
    }
}

/// Whether the check of a call's arguments was interrupted too often to start it again.
fn has_exhausted_checks(batch: &BatchContext, call: &ToolCall) -> bool {
    let RecordedCalls {
        started,
        resume_count,
        ..
    } = &*batch.recorded_calls;
    *resume_count >= MAX_RESUMED_CHECKS
        && started.contains(&call.id)
        && !batch.toolbox.is_checked_inline(call)
}

async fn record_result(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
    result: &ToolResult,
    duration: Duration,
    mut events: Vec<EventKind>,
) -> Result<(), StoreError> {
    let (step, event) = completion_records(batch, position, call, result, duration);
    events.push(event);
    batch
        .context
        .engine
        .journal
        .append(&batch.context.run, Change::Unchanged, vec![step], events)
        .await
        .map(drop)
}

fn completion_records(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
    result: &ToolResult,
    duration: Duration,
) -> (Step, EventKind) {
    let step = Step::Result {
        turn: batch.turn,
        position: u32::try_from(position).unwrap_or(u32::MAX),
        result: result.clone(),
    };
    let event = EventKind::ToolCompleted {
        turn: batch.turn,
        tool_call_id: call.id.clone(),
        tool: shorten(&call.name, 200),
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        is_error: result.is_error,
    };
    (step, event)
}
