//! Performs the tool calls of one reply: at once or one after another, each result committed as it comes. Knows no
//! provider.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::task::JoinSet;

use crate::domain::event::EventKind;
use crate::domain::message::{ToolCall, ToolResult, shorten};
use crate::domain::usage::Usage;
use crate::engine::approval;
use crate::engine::endings;
use crate::engine::final_text::MAX_RESUMED_CHECKS;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::remains::Begun;
use crate::engine::spans;
use crate::engine::turn;
use crate::engine::waiting;
use crate::store::{Change, Step, StoreError};
use crate::tools::toolbox::Toolbox;
use crate::tools::{Delegate, Effect, Output};

/// What all calls of one reply share.
pub struct Batch {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The calling run.
    pub live: Arc<LiveRun>,
    /// Its tools.
    pub toolbox: Arc<Toolbox>,
    /// Its way to start children.
    pub delegate: Arc<dyn Delegate>,
    /// The turn whose reply made the calls.
    pub turn: u32,
    /// Those of them that an earlier process had begun.
    pub begun: Arc<Begun>,
}

/// Why a reply's calls have no results.
#[derive(Debug)]
pub enum Unanswered {
    /// The record could not be written.
    Lost(StoreError),
    /// An earlier process began this tool, and nobody can say whether it may be performed again.
    Interrupted(String),
}

impl From<StoreError> for Unanswered {
    fn from(error: StoreError) -> Self {
        Self::Lost(error)
    }
}

/// The results in the order of the calls; `results` has those that an earlier process recorded, and is as long as the
/// calls are many. One failure never touches the others.
pub async fn perform(
    batch: Batch,
    calls: Vec<ToolCall>,
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<ToolResult>, Unanswered> {
    for (position, call) in calls.iter().enumerate() {
        // It came when the record could not be written.
        if let Some(result) = batch.live.kept_result(&call.id)
            && results[position].is_none()
        {
            let events = Vec::new();
            record(&batch, position, call, &result, Duration::ZERO, events).await?;
            results[position] = Some(result);
        }
    }
    refuse(&batch, &calls, &mut results).await?;
    let is_begun = |call: &ToolCall| batch.begun.started.contains(&call.id);
    let effect = |call: &ToolCall| batch.toolbox.effect(&call.name);
    let mut open = calls.iter().zip(&results).filter(|it| it.1.is_none());
    let interrupted = open
        .find(|(call, _)| is_begun(call) && effect(call) == Some(Effect::Changes))
        .map(|(call, _)| shorten(&call.name, 200));
    if interrupted.is_some() {
        // The run is over. Children that were begun end in order before it; nothing else is begun, and nobody will
        // read what stands in its place.
        batch.live.stop.cancel();
        for (call, result) in calls.iter().zip(&mut results) {
            if !is_begun(call) || effect(call) != Some(Effect::Delegates) {
                result.get_or_insert_with(|| ToolResult::text(&call.id, "", true));
            }
        }
    }
    let results = perform_all(batch, calls, results).await?;
    match interrupted {
        Some(tool) => Err(Unanswered::Interrupted(tool)),
        None => Ok(results),
    }
}

/// Gives the calls that are past the server's bounds of one reply their results, in one entry: nothing else is done for
/// them, however many there are.
async fn refuse(
    batch: &Batch,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let runs = &batch.engine.settings.runs;
    let (mut delegations, mut steps, mut events) = (0, Vec::new(), Vec::new());
    for (position, call) in calls.iter().enumerate() {
        let delegates = batch.toolbox.effect(&call.name) == Some(Effect::Delegates);
        delegations += usize::from(delegates);
        let (most, of) = match position < runs.max_calls {
            false => (runs.max_calls, "tool calls"),
            true if delegates && delegations > runs.max_delegations => {
                (runs.max_delegations, "calls that start sub-agents")
            }
            true => continue,
        };
        if results[position].is_some() {
            continue;
        }
        let why = format!(
            "Error: a reply may make at most {most} {of}, and this is one more: it was not performed. Make fewer \
             calls at once, and the rest in later replies."
        );
        let result = ToolResult::text(&call.id, why, true);
        let tool = shorten(&call.name, 200);
        events.push(EventKind::ToolStarted {
            turn: batch.turn,
            tool_call_id: call.id.clone(),
            tool,
        });
        let (step, event) = completed(batch, position, call, &result, Duration::ZERO);
        steps.push(step);
        events.push(event);
        results[position] = Some(result);
    }
    if steps.is_empty() {
        return Ok(());
    }
    let journal = &batch.engine.journal;
    let recorded = journal.record(&batch.live, Change::Nothing, steps, events);
    recorded.await.map(drop)
}

async fn perform_all(
    batch: Batch,
    calls: Vec<ToolCall>,
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<ToolResult>, StoreError> {
    let batch = Arc::new(batch);
    let missing = results.iter().filter(|result| result.is_none()).count();
    if missing <= 1 || !batch.live.agent.delegation.parallel {
        for (position, call) in calls.iter().enumerate() {
            if results[position].is_none() {
                batch.live.clock().at_work += 1;
                results[position] = Some(one(&batch, position, call).await?);
            }
        }
        return Ok(results.into_iter().flatten().collect());
    }
    // All before the first begins, so that a run with work to do never seems to wait.
    batch.live.clock().at_work += missing;
    // Dropping the set aborts what is still at work, so that a run that is dropped leaves nothing behind.
    let mut at_work = JoinSet::new();
    let stop = batch.live.stop.clone();
    for (position, call) in calls
        .into_iter()
        .enumerate()
        .filter(|(at, _)| results[*at].is_none())
    {
        let batch = Arc::clone(&batch);
        at_work.spawn(async move { (position, one(&batch, position, &call).await) });
    }
    let mut unrecorded = None;
    while let Some(joined) = at_work.join_next().await {
        match joined {
            Ok((position, Ok(result))) => results[position] = Some(result),
            Ok((_, Err(error))) => {
                // The run is over, and nobody will read what the others find: they end in order, with their record.
                stop.cancel();
                unrecorded = Some(error);
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(StoreError::Closed),
        }
    }
    match unrecorded {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

async fn one(batch: &Batch, position: usize, call: &ToolCall) -> Result<ToolResult, StoreError> {
    let result = decided(batch, position, call).await;
    let done = waiting::done(&batch.engine, &batch.live).await;
    let result = result.and_then(|result| done.map(|()| result));
    if let Err(error) = &result {
        // Before any other call is stopped, and takes that for its result.
        batch.live.suspend(error);
    }
    result
}

/// Performs a call, once a person has let it where the agent's file asks for that.
async fn decided(
    batch: &Batch,
    position: usize,
    call: &ToolCall,
) -> Result<ToolResult, StoreError> {
    let Batch {
        engine,
        live,
        turn,
        begun,
        ..
    } = batch;
    let asks = live.agent.approve.contains(&call.name)
        && !begun.started.contains(&call.id)
        // Nobody is asked about what would only be refused.
        && Box::pin(batch.toolbox.accepts(call, live.tree.owner.as_deref())).await;
    if !asks {
        return performed(batch, position, call).await;
    }
    let word = Box::pin(approval::word(engine, live, begun, *turn, call)).await?;
    let Err(why) = word else {
        return performed(batch, position, call).await;
    };
    // It was not begun: it neither counts nor took any time.
    let result = ToolResult::text(&call.id, why, true);
    record(batch, position, call, &result, Duration::ZERO, Vec::new()).await?;
    Ok(result)
}

async fn performed(
    batch: &Batch,
    position: usize,
    call: &ToolCall,
) -> Result<ToolResult, StoreError> {
    let Batch {
        engine, live, turn, ..
    } = batch;
    let tool = shorten(&call.name, 200);
    let started = EventKind::ToolStarted {
        turn: *turn,
        tool_call_id: call.id.clone(),
        tool: tool.clone(),
    };
    let clock = Instant::now();
    // What an earlier process began is counted and told already.
    let is_begun = batch.begun.started.contains(&call.id);
    let taken = match is_begun {
        true => Ok(()),
        false => live.tree.budgets.take_tool_call(&live.accounts),
    };
    match &taken {
        // Counted when it starts: a call at work is part of what the tree uses.
        Ok(()) if !is_begun => live.spend(&Usage {
            tool_calls: 1,
            ..Usage::default()
        }),
        Ok(()) => {}
        Err(refused) => live.refuse(refused),
    }
    let is_performed = taken.is_ok();
    let effect = batch.toolbox.effect(&call.name);
    let mut has_answered = false;
    let mut events = Vec::new();
    match is_begun {
        true => {}
        false if is_performed => {
            let (journal, started) = (&engine.journal, vec![started]);
            match effect {
                // On the record before it changes anything: nobody performs it twice.
                Some(Effect::Changes) => {
                    let recorded = journal.record(live, Change::Call, Vec::new(), started);
                    recorded.await.map(drop)?;
                }
                _ => {
                    let noted = journal.note(live, Change::Call, Vec::new(), started);
                    noted.await?;
                }
            }
        }
        // One entry with its result: a process that went on between the two would perform it.
        false => events.push(started),
    }
    let performed = match taken {
        Ok(()) if is_given_up(batch, call) => Err(format!(
            "The arguments of {tool} could not be checked: the daemon stopped too often meanwhile"
        )),
        Ok(()) => {
            let key = live.tree.owner.as_deref();
            let work = batch
                .toolbox
                .perform(call, &live.scope, key, batch.delegate.as_ref());
            let work = AssertUnwindSafe(work).catch_unwind();
            let done = match effect {
                // It ends when its child has.
                Some(Effect::Delegates) => Ok(work.await),
                _ => turn::bounded(live, work).await,
            };
            has_answered = done.is_ok();
            match done {
                Ok(done) => done.unwrap_or_else(|_| Err(format!("tool \"{tool}\" panicked"))),
                Err(error) => Err(endings::broken_off(live, &error)),
            }
        }
        Err(refused) => Err(refused.exceeded.to_string()),
    };
    let took = clock.elapsed();
    if is_performed {
        engine.metrics.tool_performed(took);
    }
    let is_error = performed.is_err();
    let output = performed.unwrap_or_else(Output::from);
    let result = ToolResult {
        attachments: output.attachments,
        ..ToolResult::text(&call.id, output.text, is_error)
    };
    if is_performed {
        spans::tool_ended(live, *turn, call, &result, took);
    }
    let recorded = record(batch, position, call, &result, took, events).await;
    match recorded {
        Ok(()) => Ok(result),
        Err(error) => {
            if has_answered && effect == Some(Effect::Changes) {
                live.keep_result(result);
            }
            Err(error)
        }
    }
}

/// Whether the check of a call's arguments has been broken off so often that it is not begun again.
fn is_given_up(batch: &Batch, call: &ToolCall) -> bool {
    let Begun {
        started, resumed, ..
    } = &*batch.begun;
    *resumed >= MAX_RESUMED_CHECKS
        && started.contains(&call.id)
        && !batch.toolbox.is_checked_inline(call)
}

/// Commits a result.
async fn record(
    batch: &Batch,
    position: usize,
    call: &ToolCall,
    result: &ToolResult,
    took: Duration,
    mut events: Vec<EventKind>,
) -> Result<(), StoreError> {
    let (step, event) = completed(batch, position, call, result, took);
    events.push(event);
    batch
        .engine
        .journal
        .record(&batch.live, Change::Nothing, vec![step], events)
        .await
        .map(drop)
}

/// A result as the record keeps it, and the event of it.
fn completed(
    batch: &Batch,
    position: usize,
    call: &ToolCall,
    result: &ToolResult,
    took: Duration,
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
        duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        is_error: result.is_error,
    };
    (step, event)
}
