//! Executes the tool calls of one reply, concurrently or one after another, and commits each result as it comes.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use jiff::Timestamp;
use serde_json::value::RawValue;
use tokio::task::JoinSet;

use crate::config::Reconcile;
use crate::domain::event::Decision;
use crate::domain::excerpt::ArgumentsExcerpt;
use crate::domain::message::{InvalidArguments, ReplyLimit, ToolCall, ToolResult, shorten};
use crate::domain::run::now;
use crate::domain::usage::Usage;
use crate::domain::waiting_for::{BegunCall, WaitingFor};
use crate::domain::warning::{Warning, WarningCode};
use crate::engine::approval::decision::{self, Permission};
use crate::engine::approval::pause;
use crate::engine::approval::reconcile::{self, CallOutcome, UncertainCall};
use crate::engine::backtest::recorded_calls;
use crate::engine::backtest::unknown_calls;
use crate::engine::cluster::connection;
use crate::engine::context::RunContext;
use crate::engine::history::run_log::RecordedCalls;
use crate::engine::recording::playback::Playback;
use crate::engine::run_loop::call_questions::{CallQuestions, begin_again};
use crate::engine::run_loop::call_records::{CompletedCall, is_start_of, started};
use crate::engine::run_loop::final_text::MAX_RESUMED_CHECKS;
use crate::engine::run_loop::limits;
use crate::engine::run_loop::run_spans;
use crate::engine::state::budget::BudgetRefusal;
use crate::engine::state::evaluated_tree::EvaluatedTree;
use crate::engine::state::failures;
use crate::engine::state::pause::{PauseEvent, PauseReason};
use crate::engine::state::turn_error::TurnError;
use crate::record::entry::Entry;
use crate::record::event::MAX_CALL_BYTES;
use crate::store::{Change, StoreError};
use crate::tools::background::AWAIT_AGENTS;
use crate::tools::toolbox::Toolbox;
use crate::tools::{
    self, AnsweredQuestions, AskingCall, CallStep, ChildRequest, Delegate, Effect, Probed,
    ToolOutput,
};

/// After so many restarts during a call that may be repeated, it is given up. Deploys during a long call are fewer.
const MAX_RESUMED_CALLS: u32 = 7;
/// As [`MAX_RESUMED_CALLS`], of a call that a service performs once for its key: most likely, something else stops the daemon.
const MAX_RESUMED_KEYED_CALLS: u32 = 63;
/// How often a call is sent again after its connection broke.
const MAX_RESENT: u32 = 3;
/// The pause before a call is sent again; longer by as much each time.
const RESEND_PAUSE: Duration = Duration::from_millis(500);

/// What all calls of one reply share.
pub struct BatchContext {
    pub context: RunContext,
    pub toolbox: Arc<Toolbox>,
    pub delegate: Arc<dyn Delegate>,
    /// The turn whose reply made the calls.
    pub turn: u32,
    /// What an earlier process recorded of them.
    pub recorded_calls: Arc<RecordedCalls>,
    /// When this process began with them.
    pub started_at: Timestamp,
    /// The tool of a call that must not be repeated, if nobody can say whether it was performed: the run fails.
    pub interrupted: OnceLock<String>,
}

impl BatchContext {
    /// Whether an earlier process started this call.
    pub fn has_started(&self, call: &ToolCall) -> bool {
        self.recorded_calls.started.contains_key(&call.id)
    }

    /// Whether an earlier process may have executed a part of this call whose end is not known. If the start in the record is one whose
    /// answer this process did not get, the call has not begun; a later start is that of another node.
    fn may_have_begun(&self, call: &ToolCall) -> bool {
        if self.recorded_calls.is_suspended(call) {
            return false;
        }
        let Some(started_at) = self.recorded_calls.started.get(&call.id) else {
            return false;
        };
        let unrecorded = self.context.run.unrecorded_start(&call.id);
        unrecorded.is_none_or(|at| !is_start_of(at, *started_at))
    }

    /// The agent that makes up the result of this call, in a backtest whose record does not have it.
    fn simulator(&self, call: &ToolCall) -> Option<&str> {
        let run = &self.context.run;
        let settings = &run.tree.played()?.settings;
        let simulator = unknown_calls::simulator(settings, &run.agent);
        simulator.filter(|_| !tools::is_pure(&call.name, &[]))
    }

    /// Whether a backtest, in which the call has no recorded result, does not execute it.
    fn is_withheld(&self, call: &ToolCall) -> bool {
        let run = &self.context.run;
        let is_executed = |settings| {
            unknown_calls::has_result(settings, &run.agent, call)
                || recorded_calls::is_delegation(call)
        };
        let played = run.tree.played();
        played.is_some_and(|it| !is_executed(&it.settings))
    }

    /// What the call does beside its result; `None` if there is no such tool.
    pub fn effect(&self, call: &ToolCall) -> Option<Effect> {
        match self.simulator(call) {
            Some(_) => Some(Effect::Delegating),
            None => self.toolbox.effect(&call.name),
        }
    }

    /// Whether the client of the run executes this call. In a test, the recording has the result.
    fn is_client_call(&self, call: &ToolCall) -> bool {
        self.toolbox.is_client_tool(&call.name) && self.context.playback().is_none()
    }
}

#[derive(Debug)]
pub enum CallsError {
    Store(StoreError),
    /// This tool had been started, it must not be executed again, and nobody can say whether it was.
    Interrupted(String),
    /// The run, or a descendant, has called this tool, which its evaluation does not execute.
    Diverged(String),
    /// Why the recorded results that the run is to get cannot be loaded.
    Unplayable(String),
}

impl From<StoreError> for CallsError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Returns the results in the order of the calls, without those of calls that the client executes. `results` has those that
/// an earlier process recorded; `results.len() == calls.len()`. A call that fails does not affect the others.
pub async fn execute(
    batch: &Arc<BatchContext>,
    calls: &[ToolCall],
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<Option<ToolResult>>, CallsError> {
    for (position, call) in calls.iter().enumerate() {
        // The result arrived while the record could not be written.
        if let Some(result) = batch.context.run.take_stashed_result(&call.id)
            && results[position].is_none()
        {
            let completed = CompletedCall::new(position, call, &result, Duration::ZERO);
            if let Err(error) = record_result(batch, completed, Vec::new()).await {
                batch.context.run.stash_result(result);
                return Err(error.into());
            }
            results[position] = Some(result);
        }
    }
    reject_calls(batch, calls, &mut results).await?;
    if batch.context.engine.settings.runs.reconcile == Reconcile::Fail {
        interrupt_begun(batch, calls, &mut results).await;
    }
    let results = execute_pending(batch, calls, results).await?;
    match (batch.interrupted.get(), calls.first()) {
        (Some(tool), _) => Err(CallsError::Interrupted(tool.clone())),
        // A child has: its callers end, too.
        (None, Some(call)) if has_diverged(batch) => {
            Err(CallsError::Diverged(shorten(&call.name, 200)))
        }
        (None, _) => Ok(results),
    }
}

/// Interrupts the run if an earlier process had begun a call that must not be repeated: no other call is started.
async fn interrupt_begun(
    batch: &BatchContext,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) {
    let effect = |call: &ToolCall| batch.effect(call);
    let pending = calls.iter().zip(&*results).filter(|it| it.1.is_none());
    for (call, _) in pending {
        if batch.may_have_begun(call)
            && effect(call) == Some(Effect::Mutating)
            && matches!(probe(batch, call).await, Probed::Unknown)
        {
            interrupt(batch, call);
        }
    }
    if batch.interrupted.get().is_none() {
        return;
    }
    // Children that had started end in order first; nothing reads the results that are filled in here.
    for (call, result) in calls.iter().zip(results) {
        if !batch.has_started(call) || effect(call) != Some(Effect::Delegating) {
            result.get_or_insert_with(|| ToolResult::text(&call.id, "", true));
        }
    }
}

/// Ends the run as interrupted: nobody can say whether the call was performed.
fn interrupt(batch: &BatchContext, call: &ToolCall) {
    let _ = batch.interrupted.set(shorten(&call.name, 200));
    batch.context.run.cancel_token.cancel();
}

/// Whether a run of the tree has made a call that its evaluation does not execute.
fn has_diverged(batch: &BatchContext) -> bool {
    let played = batch.context.run.tree.played();
    played.is_some_and(EvaluatedTree::has_diverged)
}

/// Gives every call that is not performed an error as its result, all in one commit: calls above the server's limits for one
/// reply, and calls whose arguments were cut off or, except for a client's tool, are not JSON.
async fn reject_calls(
    batch: &BatchContext,
    calls: &[ToolCall],
    results: &mut [Option<ToolResult>],
) -> Result<(), StoreError> {
    let run = &batch.context.run;
    let limits = &batch.context.engine.settings.runs;
    let (mut delegations, mut entries) = (0, Vec::new());
    for (position, call) in calls.iter().enumerate() {
        let is_delegation = batch.effect(call) == Some(Effect::Delegating);
        delegations += usize::from(is_delegation);
        let excess = match position < limits.max_calls {
            false => Some((limits.max_calls, "tool calls")),
            true if is_delegation && delegations > limits.max_delegations => {
                Some((limits.max_delegations, "calls that start sub-agents"))
            }
            true => None,
        };
        if results[position].is_some() {
            continue;
        }
        let message = match (excess, &call.invalid_arguments) {
            (Some((max, kind)), _) => format!(
                "Error: a reply may make at most {max} {kind}. This call exceeds the limit and was not executed. Make \
                 fewer calls per reply, and the rest in later replies."
            ),
            (None, Some(InvalidArguments::CutBy(limit))) => {
                let cause = cut_arguments(*limit, run.agent.params.max_tokens);
                let tool = shorten(&call.name, 200);
                let warning = format!("a call of {tool} was not performed: {cause}");
                let warning = Warning::new(WarningCode::CallCut, &warning);
                run.warn(warning, Some(batch.turn));
                format!(
                    "Error: this call was not performed: {cause}. Make the call again with shorter arguments, or divide \
                     it into several calls."
                )
            }
            (None, Some(InvalidArguments::Text(text)))
                if !batch.toolbox.is_client_tool(&call.name) =>
            {
                let Err(error) = serde_json::from_str::<&RawValue>(text) else {
                    continue;
                };
                format!(
                    "Error: this call was not performed: its arguments are not valid JSON ({error}). Make the call again with \
                     a JSON object as arguments."
                )
            }
            (None, _) => continue,
        };
        let result = ToolResult::text(&call.id, message, true);
        entries.push(started(batch.turn, call).into());
        let completed = CompletedCall::new(position, call, &result, Duration::ZERO);
        entries.push(completed.entry(batch.turn, Vec::new()));
        results[position] = Some(result);
    }
    if entries.is_empty() {
        return Ok(());
    }
    let journal = &batch.context.engine.journal;
    let recorded = journal.append(run, Change::Unchanged, entries);
    recorded.await.map(drop)
}

/// Why the arguments of a call are not complete.
fn cut_arguments(limit: ReplyLimit, max_tokens: Option<u32>) -> String {
    let limit = match (limit, max_tokens) {
        (ReplyLimit::ContextWindow, _) => "the model's context window was full".to_owned(),
        (ReplyLimit::Tokens, Some(max)) => {
            format!("the reply reached its limit of {max} tokens (params.max_tokens)")
        }
        (ReplyLimit::Tokens, None) => {
            "the reply reached the token limit of the model (params.max_tokens is not set)"
                .to_owned()
        }
    };
    format!("{limit} before the arguments were complete")
}

async fn execute_pending(
    batch: &Arc<BatchContext>,
    calls: &[ToolCall],
    mut results: Vec<Option<ToolResult>>,
) -> Result<Vec<Option<ToolResult>>, StoreError> {
    let pending = calls.iter().enumerate().zip(&results);
    let pending =
        pending.filter(|((_, call), result)| result.is_none() && !batch.is_client_call(call));
    let pending: Vec<(usize, &ToolCall)> = pending.map(|(pending, _)| pending).collect();
    if pending.len() <= 1 || !batch.context.run.agent.delegation.parallel {
        for (position, call) in pending {
            batch.context.run.clock().apply(PauseEvent::CallsStarted(1));
            results[position] = Some(execute_one(batch, position, call).await?);
        }
        return Ok(results);
    }
    // Counted before the first call starts, so that the run never looks as if it only waits.
    let started = PauseEvent::CallsStarted(pending.len());
    batch.context.run.clock().apply(started);
    // Dropping the set aborts the tasks, so that a dropped run leaves nothing behind.
    let mut tasks = JoinSet::new();
    let cancel_token = batch.context.run.cancel_token.clone();
    for (position, call) in pending {
        let (batch, call) = (Arc::clone(batch), call.clone());
        tasks.spawn(async move { (position, execute_one(&batch, position, &call).await) });
    }
    let mut store_error = None;
    while let Some(joined) = tasks.join_next().await {
        match joined {
            Ok((position, Ok(result))) => {
                results[position] = Some(result);
                if has_diverged(batch) {
                    // What the other children do is of no use.
                    cancel_token.cancel();
                }
            }
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
        None => Ok(results),
    }
}

/// Records that a call is given to the client; returns its result if it has one at once, because a budget refuses it.
pub async fn start_client_call(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
) -> Result<Option<ToolResult>, StoreError> {
    if let Err(refusal) = count_call(batch, call) {
        let result = ToolResult::text(&call.id, refusal.exceeded.to_string(), true);
        let entries = vec![started(batch.turn, call).into()];
        let completed = CompletedCall::new(position, call, &result, Duration::ZERO);
        record_result(batch, completed, entries).await?;
        return Ok(Some(result));
    }
    record_start(batch, call, Some(Effect::ReadOnly)).await?;
    Ok(None)
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
    let playback = context.playback();
    if let Some(playback) = &playback {
        playback.begin_call(context.run.scope.run, *turn, position + 1, call);
    }
    // What an earlier process began once it was approved is not decided again. Otherwise that process had rejected the call: only
    // forks have delegations that began elsewhere.
    let is_approved = || {
        let decision = recorded_calls.decisions.get(&call.id);
        decision.is_some_and(|it| it.decision == Decision::Approved)
            || batch.effect(call) == Some(Effect::Delegating)
    };
    // In a backtest, the record has the decisions.
    let mut needs_approval = context.run.agent.approve.contains(&call.name)
        && context.run.tree.played().is_none()
        && !(batch.has_started(call) && is_approved());
    let mut rejection = None;
    if needs_approval && !recorded_calls.inputs_requested.contains_key(&call.id) {
        let owner = context.run.tree.owner.as_deref();
        // A call that is rejected needs no approval. It is not checked again: the check could end otherwise then.
        rejection = Box::pin(batch.toolbox.check_call(call, owner)).await.err();
        needs_approval = rejection.is_none();
    }
    let permission = match (playback, needs_approval) {
        (Some(playback), _) => {
            let permitted = playback.permit(context.run.scope.run, call, needs_approval);
            permitted.map_or_else(Permission::Refused, Permission::Granted)
        }
        (None, true) => {
            let decided =
                decision::await_decision(context, recorded_calls, *turn, &batch.toolbox, call);
            Box::pin(decided).await?
        }
        // What an earlier process began has the arguments that it began with.
        (None, false) => {
            Permission::Granted(recorded_calls.changed_arguments.get(&call.id).cloned())
        }
    };
    let reason = match permission {
        Permission::Granted(changed) => match wait_while_held(batch, call).await {
            Ok(()) => {
                let execution = Execution::new(rejection);
                return execute_permitted(batch, position, call, changed, execution).await;
            }
            Err(TurnError::Store(error)) => return Err(error),
            Err(error) => failures::interruption_message(&context.run, &error),
        },
        Permission::Refused(reason) => reason,
    };
    record_refusal(batch, position, call, reason).await
}

/// Records the result of a call that never started: it does not count, and it took no time.
async fn record_refusal(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
    reason: String,
) -> Result<ToolResult, StoreError> {
    let result = ToolResult::text(&call.id, reason, true);
    let completed = CompletedCall::new(position, call, &result, Duration::ZERO);
    record_result(batch, completed, Vec::new()).await?;
    Ok(result)
}

/// Executes a call, with the arguments of a person if they were changed. The model is informed of these.
async fn execute_permitted(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
    changed: Option<Arc<RawValue>>,
    execution: Execution,
) -> Result<ToolResult, StoreError> {
    let Some(arguments) = changed else {
        return execute_call(batch, position, call, execution).await;
    };
    let note = match result_playback(batch, call) {
        // The recorded result begins with it.
        Some(_) => String::new(),
        None => format!("Note: a person changed the arguments of this call to {arguments}.\n"),
    };
    let call = ToolCall {
        arguments,
        invalid_arguments: None,
        ..call.clone()
    };
    let execution = Execution { note, ..execution };
    Box::pin(execute_call(batch, position, &call, execution)).await
}

/// How a call is executed.
#[derive(Default)]
struct Execution {
    /// What comes before the result.
    note: String,
    /// Why its tool does not get the call.
    rejection: Option<String>,
}

impl Execution {
    fn new(rejection: Option<String>) -> Self {
        Self {
            rejection,
            ..Self::default()
        }
    }
}

/// Does not begin a call while a client has paused the run. What an earlier process began is not held: it ends first.
async fn wait_while_held(batch: &BatchContext, call: &ToolCall) -> Result<(), TurnError> {
    match batch.may_have_begun(call) {
        true => Ok(()),
        false => {
            pause::wait_while_held(&batch.context, PauseReason::Call(WaitingFor::Resume)).await
        }
    }
}

async fn execute_call(
    batch: &BatchContext,
    position: usize,
    call: &ToolCall,
    execution: Execution,
) -> Result<ToolResult, StoreError> {
    let run = &batch.context.run;
    let start_time = Instant::now();
    if let Err(refusal) = count_call(batch, call) {
        let result = ToolResult::text(&call.id, refusal.exceeded.to_string(), true);
        let duration = start_time.elapsed();
        // In one commit with the result: a process that resumed in between would execute the call.
        let entries = vec![started(batch.turn, call).into()];
        let completed = CompletedCall::new(position, call, &result, duration);
        record_result(batch, completed, entries).await?;
        return Ok(result);
    }
    let effect = batch.effect(call);
    // Before the start is in the record for certain.
    let may_have_begun = batch.may_have_begun(call);
    begin_call(batch, call, effect).await?;
    let Some(outcome) = perform(batch, call, effect, may_have_begun, execution.rejection).await?
    else {
        // The run fails, and nothing reads this.
        return Ok(ToolResult::text(&call.id, "", true));
    };
    let duration = start_time.elapsed();
    let known = effect.map(|_| call.name.as_str());
    let metrics = &batch.context.engine.metrics;
    metrics.tool_call_completed(known, duration);
    let must_stash =
        matches!(outcome, ToolOutcome::Finished(_)) && effect == Some(Effect::Mutating);
    let mut result = outcome.into_result(call);
    result.content.insert_str(0, &execution.note);
    if effect == Some(Effect::Delegating)
        && let Some(playback) = batch.context.playback()
    {
        playback.delegated(run.scope.run, call, &result);
    }
    run_spans::end_tool_call(run, batch.turn, call, &result, duration);
    let completed = CompletedCall::new(position, call, &result, duration);
    match record_result(batch, completed, Vec::new()).await {
        Ok(()) => Ok(result),
        Err(error) => {
            if must_stash {
                run.stash_result(result);
            }
            Err(error)
        }
    }
}

/// Counts the call against the budgets and in the usage. A call that an earlier process started is already counted.
pub fn count_call(batch: &BatchContext, call: &ToolCall) -> Result<(), BudgetRefusal> {
    if batch.has_started(call) {
        return Ok(());
    }
    let run = &batch.context.run;
    let counted = run.tree.budgets.count_tool_call(&run.accounts);
    match &counted {
        // Counted when it starts: a running call is part of the tree's usage.
        Ok(()) => run.add_usage(&Usage {
            tool_calls: 1,
            ..Usage::default()
        }),
        Err(refusal) => run.record_refusal(refusal),
    }
    counted
}

/// Records the start of a call, which is executed next. If that fails, this process knows that the call has not begun.
async fn begin_call(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
) -> Result<(), StoreError> {
    let run = &batch.context.run;
    let started_at = now();
    let recorded = async {
        record_start(batch, call, effect).await?;
        connection::wait_until_connected(&batch.context).await
    };
    let recorded = recorded.await;
    match &recorded {
        Ok(()) => run.forget_unrecorded_start(&call.id),
        Err(_) if effect == Some(Effect::Mutating) && !batch.has_started(call) => {
            run.keep_unrecorded_start(&call.id, started_at);
        }
        Err(_) => {}
    }
    recorded
}

/// Records the start of a call, unless an earlier process has.
async fn record_start(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
) -> Result<(), StoreError> {
    if batch.has_started(call) {
        return Ok(());
    }
    let RunContext { engine, run } = &batch.context;
    let (change, entries) = (
        Change::CountToolCall,
        vec![started(batch.turn, call).into()],
    );
    if effect == Some(Effect::Mutating) {
        // Recorded before the tool changes anything, so that no later process executes it again.
        engine.journal.append(run, change, entries).await.map(drop)
    } else {
        engine.journal.enqueue(run, change, entries).await
    }
}

/// Performs a call until its end is known. `None` if the run is interrupted, because nobody can say.
async fn perform(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
    may_have_begun: bool,
    rejection: Option<String>,
) -> Result<Option<ToolOutcome>, StoreError> {
    let is_performed = result_playback(batch, call).is_none() && !batch.is_withheld(call);
    let recorded = batch.recorded_calls.starts.get(&call.id);
    let mut attempts = Attempts {
        starts: recorded.copied().unwrap_or(1),
        resent: 0,
        is_of_earlier_process: true,
    };
    let BatchContext {
        context,
        recorded_calls,
        ..
    } = batch;
    let mut questions = CallQuestions::new(context, recorded_calls, batch.turn, call);
    if is_performed && may_have_begun {
        questions.withdraw().await?;
    }
    let has_begun = is_performed && may_have_begun && effect.is_some_and(Effect::is_own);
    let mut unknown = has_begun.then(|| "the daemon stopped during the call".to_owned());
    if !has_begun
        && !recorded_calls.is_suspended(call)
        && let Some(why) = exhausted_attempts(batch, call, effect)
    {
        return Ok(Some(ToolOutcome::Interrupted(why)));
    }
    loop {
        if let Some(why) = unknown.take() {
            match settle(batch, call, effect, &mut attempts, why).await? {
                Settled::Again => {}
                Settled::Ended(outcome) => return Ok(outcome),
            }
        }
        let (answered, begins_again) = match questions.answer().await? {
            Ok(answered) => answered,
            Err(why) => return Ok(Some(ToolOutcome::Interrupted(why))),
        };
        if begins_again {
            attempts = attempts.again();
        }
        let mut outcome = run_tool(batch, call, effect, rejection.clone(), answered).await;
        attempts.is_of_earlier_process = false;
        while let ToolOutcome::Asks(AskingCall::Open(question, mut open)) = outcome {
            outcome = match questions.ask_open(&question, open.as_mut()).await? {
                Ok(answer) => {
                    let resumed = batch.toolbox.resume(open, answer);
                    await_step(batch, call, effect, resumed).await
                }
                Err(why) => ToolOutcome::Interrupted(why),
            };
        }
        match outcome {
            ToolOutcome::Asks(AskingCall::Ended(required)) => {
                if let Err(why) = questions.suspend(required).await? {
                    return Ok(Some(ToolOutcome::Finished(Err(why))));
                }
            }
            ToolOutcome::Finished(Ok(output)) if output.is_end_unknown => {
                unknown = Some(output.text);
            }
            outcome => return Ok(Some(outcome)),
        }
    }
}

/// How often a call was begun.
struct Attempts {
    /// As in the record.
    starts: u32,
    /// By this process, after its connection broke.
    resent: u32,
    /// Whether this process has not begun it yet.
    is_of_earlier_process: bool,
}

impl Attempts {
    /// After the start of the call was recorded again.
    fn again(&self) -> Self {
        Self {
            starts: self.starts + 1,
            resent: 0,
            is_of_earlier_process: false,
        }
    }
}

enum Settled {
    /// The call is performed again.
    Again,
    /// `None` if the run is interrupted.
    Ended(Option<ToolOutcome>),
}

/// Decides what follows if a call had begun and its end is not known.
async fn settle(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
    attempts: &mut Attempts,
    why: String,
) -> Result<Settled, StoreError> {
    let run = &batch.context.run;
    let failed = |why| Ok(Settled::Ended(Some(ToolOutcome::Finished(Err(why)))));
    let interrupted = |why| Ok(Settled::Ended(Some(ToolOutcome::Interrupted(why))));
    // Then nothing is sent before the answer, however often the daemon is started again.
    let question = reconcile::question_id(&call.id, attempts.starts);
    let is_with_person = batch
        .recorded_calls
        .inputs_requested
        .contains_key(&question);
    let probed = match is_with_person {
        true => Probed::Unknown,
        false => match limits::within_deadline(run, probe(batch, call)).await {
            Ok(probed) => probed,
            Err(error) => return interrupted(failures::interruption_message(run, &error)),
        },
    };
    let may_be_sent = match probed {
        Probed::Done(output) => {
            return Ok(Settled::Ended(Some(ToolOutcome::Finished(Ok(output)))));
        }
        Probed::NotDone => true,
        Probed::Unknown => {
            !is_with_person && matches!(effect, Some(Effect::ReadOnly | Effect::Keyed))
        }
    };
    if may_be_sent && attempts.is_of_earlier_process {
        return match exhausted_attempts(batch, call, effect) {
            Some(why) => interrupted(why),
            None => Ok(Settled::Again),
        };
    }
    if may_be_sent && attempts.resent < MAX_RESENT {
        attempts.resent += 1;
        let pause = tokio::time::sleep(RESEND_PAUSE * attempts.resent);
        return match limits::within_deadline(run, pause).await {
            Ok(()) => Ok(Settled::Again),
            Err(error) => interrupted(failures::interruption_message(run, &error)),
        };
    }
    let is_known_not_done = matches!(probed, Probed::NotDone);
    // A test has no person.
    let is_test = batch.context.playback().is_some() || run.tree.played().is_some();
    if is_known_not_done || effect == Some(Effect::ReadOnly) || is_test {
        return failed(why);
    }
    if batch.context.engine.settings.runs.reconcile == Reconcile::Fail {
        return match attempts.is_of_earlier_process {
            true => {
                interrupt(batch, call);
                Ok(Settled::Ended(None))
            }
            false => failed(why),
        };
    }
    let arguments = ArgumentsExcerpt::new(&call.arguments, MAX_CALL_BYTES);
    let began_at = batch.recorded_calls.started.get(&call.id).copied();
    let uncertain = UncertainCall {
        turn: batch.turn,
        id: &call.id,
        begun: BegunCall {
            tool: shorten(&call.name, 200),
            arguments: arguments.json,
            truncated: arguments.truncated,
            began_at: began_at.unwrap_or(batch.started_at),
        },
        starts: attempts.starts,
        why: &why,
    };
    let answer = Box::pin(reconcile::ask(
        &batch.context,
        &batch.recorded_calls,
        uncertain,
    ));
    let reconciled = match answer.await? {
        Ok(Some(reconciled)) => reconciled,
        Ok(None) => {
            interrupt(batch, call);
            return Ok(Settled::Ended(None));
        }
        Err(why) => return interrupted(why),
    };
    match reconciled.outcome {
        CallOutcome::Done => {
            let output = batch
                .toolbox
                .limit_result(reconciled.result.unwrap_or_default());
            Ok(Settled::Ended(Some(ToolOutcome::Finished(Ok(
                output.into()
            )))))
        }
        CallOutcome::Unknown => failed(format!(
            "It is not known whether the call of {} was performed; a person could not find out. Check what became of it before \
             you repeat it.",
            shorten(&call.name, 200)
        )),
        CallOutcome::NotDone => match begin_again(&batch.context, batch.turn, call).await {
            Ok(()) => {
                *attempts = attempts.again();
                Ok(Settled::Again)
            }
            Err(TurnError::Store(error)) => Err(error),
            Err(error) => interrupted(failures::interruption_message(run, &error)),
        },
    }
}

async fn probe(batch: &BatchContext, call: &ToolCall) -> Probed {
    let run = &batch.context.run;
    let (owner, delegate) = (run.tree.owner.as_deref(), batch.delegate.as_ref());
    let probed = batch.toolbox.probe(call, &run.scope, owner, delegate);
    probed.await
}

enum ToolOutcome {
    /// The tool ran to its end, successfully or not.
    Finished(Result<ToolOutput, String>),
    /// The tool did not start, or was stopped before its end.
    Interrupted(String),
    /// Its service asks people first.
    Asks(AskingCall),
}

impl ToolOutcome {
    fn into_result(self, call: &ToolCall) -> ToolResult {
        let outcome = match self {
            Self::Finished(outcome) => outcome,
            Self::Interrupted(message) => Err(message),
            // They are answered before the call has a result.
            Self::Asks(_) => Err("the call has not ended".to_owned()),
        };
        let is_error = outcome.is_err();
        let output = outcome.unwrap_or_else(ToolOutput::from);
        ToolResult {
            attachments: output.attachments,
            ..ToolResult::text(&call.id, output.text, is_error)
        }
    }
}

/// The recording that has the result of the call, in a test that does not execute it.
fn result_playback(batch: &BatchContext, call: &ToolCall) -> Option<Arc<Playback>> {
    let playback = batch.context.playback()?;
    let is_played = match batch.toolbox.effect(&call.name) {
        // Whether an end came before the wait for it was a matter of time.
        Some(Effect::Delegating) if call.name == AWAIT_AGENTS => !playback.live.models,
        Some(Effect::Delegating) => playback.has_result_only(batch.context.run.scope.run, call),
        // A test has no person.
        Some(Effect::Asking) => true,
        // Nor a client.
        _ => !playback.live.tools || batch.toolbox.is_client_tool(&call.name),
    };
    is_played.then_some(playback)
}

async fn run_tool(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
    rejection: Option<String>,
    answered: Option<&AnsweredQuestions>,
) -> ToolOutcome {
    let run = &batch.context.run;
    if let Some(playback) = result_playback(batch, call) {
        return ToolOutcome::Finished(playback.result(run.scope.run, call));
    }
    if batch.is_withheld(call) {
        // The run has diverged, or ends.
        return ToolOutcome::Interrupted("the evaluation does not perform it".to_owned());
    }
    if let Some(simulator) = batch.simulator(call) {
        return ToolOutcome::Finished(make_up(batch, call, simulator).await);
    }
    if let Some(why) = rejection {
        return ToolOutcome::Finished(Err(why));
    }
    let (owner, delegate) = (run.tree.owner.as_deref(), batch.delegate.as_ref());
    let work = batch
        .toolbox
        .call(call, &run.scope, owner, delegate, answered);
    await_step(batch, call, effect, work).await
}

/// The outcome of an attempt of a call, or of a part of it.
async fn await_step(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
    work: impl Future<Output = CallStep>,
) -> ToolOutcome {
    let run = &batch.context.run;
    let work = AssertUnwindSafe(work).catch_unwind();
    let finished = match effect {
        // A delegating call ends when its child has ended, and one that asks with its wait.
        Some(Effect::Delegating | Effect::Asking) => Ok(work.await),
        _ => limits::within_deadline(run, work).await,
    };
    let background = run.background.get();
    if background.is_some_and(|it| it.has_call(&call.id))
        && let Some(playback) = batch.context.model_playback()
    {
        // With the id of the recorded run.
        return ToolOutcome::Finished(playback.result(run.scope.run, call));
    }
    match finished {
        Ok(Ok(CallStep::Ended(outcome))) => ToolOutcome::Finished(outcome),
        Ok(Ok(CallStep::Asks(asking))) => ToolOutcome::Asks(asking),
        Ok(Err(_)) => {
            let tool = shorten(&call.name, 200);
            ToolOutcome::Finished(Err(format!("tool \"{tool}\" panicked")))
        }
        Err(error) => ToolOutcome::Interrupted(failures::interruption_message(run, &error)),
    }
}

/// Has the agent make up the result of a call, in a run of its own.
async fn make_up(
    batch: &BatchContext,
    call: &ToolCall,
    simulator: &str,
) -> Result<ToolOutput, String> {
    let run = &batch.context.run;
    let specs = batch.toolbox.offered_specs().iter();
    let spec = specs.clone().find(|spec| spec.name == call.name);
    let tool = shorten(&call.name, 200);
    let message = format!("agent {simulator} made up the result of {tool}");
    let warning = Warning::new(WarningCode::ResultMadeUp, &message);
    run.warn(warning, Some(batch.turn));
    let task = serde_json::json!({
        "tool": tool,
        "arguments": call.arguments_json(),
        "description": spec.map_or("", |spec| &*spec.description),
    });
    let request = ChildRequest {
        tool_call_id: &call.id,
        agent: simulator,
        task: &task.to_string(),
        context: None,
        background: false,
    };
    batch
        .delegate
        .run_child(request)
        .await
        .map(ToolOutput::from)
}

/// Why a call is not started again, if the daemon has stopped too often during it: the call may be what stopped the daemon.
fn exhausted_attempts(
    batch: &BatchContext,
    call: &ToolCall,
    effect: Option<Effect>,
) -> Option<String> {
    if !batch.has_started(call) {
        return None;
    }
    let resume_count = batch.recorded_calls.resume_count;
    let tool = shorten(&call.name, 200);
    if resume_count >= MAX_RESUMED_CHECKS && !batch.toolbox.is_checked_inline(call) {
        return Some(format!(
            "The arguments of {tool} could not be checked: the daemon stopped too often during the check"
        ));
    }
    let max = match effect {
        Some(Effect::Delegating | Effect::Asking) => u32::MAX,
        Some(Effect::Keyed) => MAX_RESUMED_KEYED_CALLS,
        _ => MAX_RESUMED_CALLS,
    };
    let is_given_up = resume_count >= max;
    is_given_up.then(|| {
        format!(
            "{tool} was given up: the daemon or its store stopped {} times during the call",
            resume_count + 1
        )
    })
}

/// Commits a result, with these entries before its own.
async fn record_result(
    batch: &BatchContext,
    completed: CompletedCall<'_>,
    mut entries: Vec<Entry>,
) -> Result<(), StoreError> {
    let RunContext { engine, run } = &batch.context;
    entries.push(completed.entry(batch.turn, run.refused_by()));
    let committed = engine.journal.append(run, Change::Unchanged, entries);
    committed.await.map(drop)
}
