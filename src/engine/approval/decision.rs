//! Decisions on tool calls that need human approval, and answers to questions. The request and the answer are recorded before
//! anyone acts on them, so that a restarted daemon neither requests anything twice nor forgets an answer.

use std::future::ready;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::domain::event::{Decision, EventKind};
use crate::domain::excerpt::ArgumentsExcerpt;
use crate::domain::input::{ArgumentsHash, InputKind};
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, shorten};
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::waiting_for::WaitingFor;
use crate::engine::approval::pause;
use crate::engine::context::{Engine, RunContext};
use crate::engine::history::held_time;
use crate::engine::history::run_log::{self, RecordedCalls, RecordedInput, RecordedInputKind};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::deadline;
use crate::engine::state::failures;
use crate::engine::state::input_answer::InputAnswer;
use crate::engine::state::pause::PauseReason;
use crate::engine::state::pending_inputs::{DeliveryResult, InputWait, WaitingTool};
use crate::engine::state::turn_error::TurnError;
use crate::record::event::MAX_CONTENT_BYTES;
use crate::store::StoreError;
use crate::tools::toolbox::Toolbox;
use crate::validation;

/// How long other arguments for a call wait until its run has reached the call again, after a restart or its sleep.
const REACH_TIMEOUT: Duration = Duration::from_secs(10);

/// By how much the deadline of an input may differ from the one that is recorded in a tree that sleeps.
const MAX_MOVED: Duration = Duration::from_secs(1);

/// Why a decision was not accepted.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecideError {
    #[error("there is no run {0}")]
    RunNotFound(RunId),
    /// The call does not wait for a decision.
    #[error("nothing waits for a decision on, or an answer to, \"{call}\" of {run}: {reason}")]
    NotPending {
        run: RunId,
        /// The call's id, shortened.
        call: String,
        reason: String,
    },
    /// The run has not begun such a call.
    #[error("{run} has begun no call \"{call}\"")]
    CallNotFound {
        run: RunId,
        /// The call's id, shortened.
        call: String,
    },
    /// The decision is about other arguments than the call has.
    #[error(
        "the tool call \"{call}\" of {run} has other arguments than those that were decided on: look at it again"
    )]
    OtherArguments {
        run: RunId,
        /// The call's id, shortened.
        call: String,
    },
    /// The answer does not fit the question's schema.
    #[error("{}", .0.join("; "))]
    InvalidAnswer(Vec<String>),
    /// The arguments do not fit the tool's schema.
    #[error("{}", .0.join("; "))]
    InvalidArguments(Vec<String>),
    #[error("{0} has not reached this call yet; try again")]
    NotReached(RunId),
    #[error("the daemon is stopping; look at the run and try again")]
    Draining,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether a tool call may be executed.
pub enum Permission {
    /// With these arguments instead of the model's, if a person changed them.
    Granted(Option<Arc<RawValue>>),
    /// The model receives this text as the call's result.
    Refused(String),
}

/// What a call needs of a person.
pub struct NeededInput<'a> {
    /// The id of the call, or of the question.
    pub id: &'a str,
    /// How long it waits; `None` for ever.
    pub limit: Option<Duration>,
    /// What is recorded if nobody answers within the limit.
    pub timed_out: InputAnswer,
    pub kind: InputKind,
    /// What the run waits for meanwhile.
    pub waiting_for: WaitingFor,
    /// Of a call that waits for approval; `None` for others.
    pub tool: Option<WaitingTool>,
    /// Cancelled when nobody waits for the answer any more.
    pub withdrawn: Option<CancellationToken>,
}

/// Waits for the decision on a call. `recorded_calls` holds what an earlier process requested and received.
pub async fn await_decision(
    context: &RunContext,
    recorded_calls: &RecordedCalls,
    turn: u32,
    toolbox: &Arc<Toolbox>,
    call: &ToolCall,
) -> Result<Permission, StoreError> {
    let name = shorten(&call.name, 200);
    let limit = context.run.agent.approve_timeout;
    let input = NeededInput {
        id: &call.id,
        limit,
        timed_out: InputAnswer::timed_out(),
        kind: InputKind::Approval,
        waiting_for: WaitingFor::Approval,
        tool: Some(WaitingTool {
            toolbox: Arc::clone(toolbox),
            call: call.clone(),
            owner: context.run.tree.owner.as_deref().map(str::to_owned),
        }),
        withdrawn: None,
    };
    let event = |deadline| requested_event(turn, call, &name, deadline);
    let decision = match await_answer(context, recorded_calls, input, event, ready(Ok(()))).await? {
        Ok(decision) => decision,
        Err(error) => {
            let reason = failures::interruption_message(&context.run, &error);
            return Ok(Permission::Refused(reason));
        }
    };
    Ok(Permission::Refused(
        match (decision.decision, decision.reason) {
            (Decision::Approved, _) => {
                let recorded = recorded_calls.changed_arguments.get(&call.id).cloned();
                return Ok(Permission::Granted(decision.arguments.or(recorded)));
            }
            (Decision::Denied, Some(reason)) => format!("The call of {name} was denied: {reason}"),
            (Decision::Denied, None) => format!("The call of {name} was denied"),
            (Decision::TimedOut, _) => format!(
                "The call of {name} was not approved: no decision within {}s",
                limit.map_or(0, |it| it.as_secs())
            ),
        },
    ))
}

/// Waits for a person's answer; the inner error if the run ends before. `event` requests the input, and has its deadline.
/// `begun` is done once that is recorded.
pub async fn await_answer(
    context: &RunContext,
    recorded_calls: &RecordedCalls,
    input: NeededInput<'_>,
    event: impl FnOnce(Option<Timestamp>) -> EventKind,
    begun: impl Future<Output = Result<(), StoreError>>,
) -> Result<Result<InputAnswer, TurnError>, StoreError> {
    let requested = recorded_calls.inputs_requested.get(input.id);
    let requested_at = requested.map(|requested| requested.time);
    let pending = match look_up(context, recorded_calls, &input).await? {
        AnswerLookup::Answered(answer) => {
            if !context.run.is_held() {
                pause::ensure_running(context).await?;
            }
            return Ok(Ok(answer));
        }
        AnswerLookup::Pending(pending) => pending,
    };
    let difference = requested_at.map_or(SignedDuration::ZERO, |_| {
        let requests = recorded_calls.inputs_requested.values();
        // Without other nodes, and in a tree that has slept here, the clocks are the same one.
        let may_differ = context.engine.journal.store().cluster().is_some();
        let waiting_since = match may_differ && !context.run.tree.has_slept_here {
            true => context.run.clock().waiting_since,
            false => None,
        };
        clock_difference(waiting_since, requests.map(|it| it.time))
    });
    let deadline = match requested {
        Some(requested) => requested.deadline,
        None => input.limit.map(|limit| saturating_add(now(), limit)),
    };
    let mut deadline = deadline.map(|at| at.checked_add(difference).unwrap_or(at));
    let event = requested_at.is_none().then(|| event(deadline));
    // The world does not wait for a run that a client has paused.
    if let (Some(requested_at), Some(deadline), true) = (
        requested_at,
        deadline.as_mut(),
        input.waiting_for.is_input(),
    ) {
        let held = held_time::since(context, requested_at).await?;
        *deadline = deadline.checked_add(held).unwrap_or(Timestamp::MAX);
    }
    // A tree that sleeps wakes at the deadline that is recorded.
    let is_moved = requested.is_some_and(|it| match (it.deadline, deadline) {
        (Some(recorded), Some(at)) => recorded.duration_until(at).unsigned_abs() > MAX_MOVED,
        (recorded, at) => recorded != at,
    });
    // Nor does it wake when the input is withdrawn.
    let needs_memory = is_moved || input.withdrawn.is_some();
    let awake = needs_memory.then(|| context.run.tree.suspension.keep_awake());
    let waiting_for = input.waiting_for;
    pause::pause(context, PauseReason::Call(waiting_for), event).await?;
    begun.await?;
    let received = match receive_answer(context, pending, input, deadline).await {
        Ok(answer) => {
            pause::end_call_wait(context, waiting_for).await?;
            Ok(answer)
        }
        Err(TurnError::Store(error)) => return Err(error),
        Err(error) => {
            pause::unpause(context, PauseReason::Call(waiting_for)).await?;
            Err(error)
        }
    };
    if let Some(awake) = awake {
        drop(awake);
        let trees = &context.engine.sleeping_trees;
        trees.add_candidate(context.run.scope.root);
    }
    Ok(received)
}

enum AnswerLookup<'a> {
    Answered(InputAnswer),
    Pending(InputWait<'a>),
}

/// The answer if it is recorded; else registers the input as pending.
async fn look_up<'a>(
    context: &'a RunContext,
    recorded_calls: &RecordedCalls,
    input: &NeededInput<'_>,
) -> Result<AnswerLookup<'a>, StoreError> {
    if let Some(answer) = recorded_calls.decisions.get(input.id) {
        return Ok(AnswerLookup::Answered(answer.clone()));
    }
    let inputs = &context.engine.pending_inputs;
    let run = context.run.scope.run;
    let requested = recorded_calls.inputs_requested.get(input.id);
    let _guard;
    if requested.is_some() {
        _guard = inputs.early_decision_lock(run).lock().await;
        // An answer may have arrived since this run's record was read.
        let recorded_calls = run_log::load_calls(&context.engine, run).await?;
        if let Some(answer) = recorded_calls.decisions.get(input.id) {
            return Ok(AnswerLookup::Answered(answer.clone()));
        }
    }
    let requested_at = requested.map_or_else(now, |requested| requested.time);
    let key = (run, input.id.to_owned());
    let pending = InputWait::register(inputs, key, (input.kind, input.tool.clone()), requested_at);
    Ok(AnswerLookup::Pending(pending))
}

/// Waits for the answer or the timeout, and commits it.
async fn receive_answer(
    context: &RunContext,
    mut pending: InputWait<'_>,
    input: NeededInput<'_>,
    deadline: Option<Timestamp>,
) -> Result<InputAnswer, TurnError> {
    let timeout = async {
        match deadline {
            Some(deadline) if input.waiting_for.is_input() => {
                time_out(&context.run, deadline, input.limit).await;
            }
            Some(deadline) => {
                let remaining = now().duration_until(deadline);
                tokio::time::sleep(remaining.try_into().unwrap_or_default()).await;
            }
            None => std::future::pending().await,
        }
    };
    let withdrawn = async {
        match &input.withdrawn {
            Some(token) => token.cancelled().await,
            None => std::future::pending().await,
        }
    };
    let (mut timeout, mut withdrawn) = (pin!(timeout), pin!(withdrawn));
    loop {
        let received = async {
            tokio::select! {
                biased;
                message = &mut pending.receiver => match message {
                    Ok(message) => (message.answer, Some(message.ack)),
                    Err(_) => (input.timed_out.clone(), None),
                },
                () = &mut withdrawn => (InputAnswer::withdrawn(input.kind), None),
                () = &mut timeout => (input.timed_out.clone(), None),
            }
        };
        let (answer, ack) = pause::within_deadline(&context.run, received).await?;
        let entries = vec![answer.to_entry(input.id)];
        let journal = &context.engine.journal;
        // So that the tree does not fall asleep meanwhile.
        let awake = match input.waiting_for.is_input() {
            true => Some(context.run.tree.root_permit.update_lock.lock().await),
            false => None,
        };
        let committed = journal.append(&context.run, answer.to_change(), entries);
        let committed = committed.await.map(drop);
        drop(awake);
        context.run.tree.root_permit.changed.notify_waiters();
        let is_repeated = matches!(committed, Err(StoreError::AlreadyClaimed(_)));
        if is_repeated {
            pending.renew();
        }
        let is_asleep = context.run.tree.suspension.is_asleep();
        if is_asleep && committed.is_ok() {
            let trees = &context.engine.sleeping_trees;
            trees.wake(context.run.scope.root);
        }
        // A tree that sleeps gets its answers otherwise.
        if let Some(ack) = ack
            && !(is_asleep && matches!(committed, Err(StoreError::Suspended)))
        {
            // The answer counts even if its client has disconnected.
            let _ = ack.send(committed.clone());
        }
        if !is_repeated {
            committed?;
            return Ok(answer);
        }
    }
}

/// How much later it is by this node's clock than by that of the node that recorded the requests: the run waits since one of them, and
/// its record has that time by the database's clock. The smallest difference counts: most clocks are right.
fn clock_difference(
    waiting_since: Option<Timestamp>,
    requests: impl Iterator<Item = Timestamp>,
) -> SignedDuration {
    let differences = requests.filter_map(|at| Some(at.duration_until(waiting_since?)));
    differences.min_by_key(|it| it.abs()).unwrap_or_default()
}

/// Resolves at the deadline, which moves by the time that a client has paused the run.
async fn time_out(run: &ActiveRun, deadline: Timestamp, limit: Option<Duration>) {
    let limit = limit.unwrap_or_default();
    let remaining = deadline::remaining_time(now().duration_until(deadline), limit.as_secs());
    pause::sleep_unless_held(run, remaining).await;
}

/// Decides on a call, or answers a question, and returns once that is committed. What an earlier process requested can be
/// answered before its run reaches it again.
pub async fn decide(
    engine: &Arc<Engine>,
    id: RunId,
    call: &str,
    decision: InputAnswer,
) -> Result<(), DecideError> {
    if let Some(hash) = &decision.arguments_hash {
        check_hash(engine, id, call, hash).await?;
    }
    // Its arguments can be checked only while the call waits.
    let arguments = decision.arguments.as_ref();
    let new_arguments = arguments.filter(|_| decision.kind == InputKind::Approval);
    if let (InputKind::Question, Some(answer)) = (decision.kind, arguments) {
        check_answer(engine, id, call, answer).await?;
    }
    loop {
        if let Some(arguments) = new_arguments {
            check_arguments(engine, id, call, arguments).await?;
        }
        match engine.pending_inputs.deliver(id, call, &decision) {
            DeliveryResult::Delivered(committed) => match committed.await {
                Ok(committed) => return Ok(committed?),
                // The run was suspended: it is not known whether the decision was written.
                Err(_) if engine.draining.is_cancelled() => return Err(DecideError::Draining),
                // The call's timeout, or the run's end, came first.
                Err(_) => {}
            },
            // If the other decision cannot be recorded, nothing is decided.
            DeliveryResult::AlreadyDecided(settled) => tokio::select! {
                () = settled.cancelled() => continue,
                () = engine.shutdown.cancelled() => return Err(DecideError::Draining),
            },
            DeliveryResult::NotWaiting if new_arguments.is_some() => continue,
            DeliveryResult::NotWaiting => {}
        }
        // In a task of its own: a client that disconnects must not interrupt the write.
        let (sender, receiver) = oneshot::channel();
        let (task_engine, call, decision) = (Arc::clone(engine), call.to_owned(), decision.clone());
        engine.tasks.spawn(async move {
            let _ = sender.send(decide_early(&task_engine, id, &call, decision).await);
        });
        if receiver.await.unwrap_or(Err(StoreError::Closed.into()))? {
            return Ok(());
        }
    }
}

/// Checks that a decision is about the arguments that the call has.
async fn check_hash(
    engine: &Engine,
    id: RunId,
    call: &str,
    hash: &ArgumentsHash,
) -> Result<(), DecideError> {
    let run = engine.journal.store().run(id).await?;
    run.ok_or(DecideError::RunNotFound(id))?;
    let recorded_calls = run_log::load_calls(engine, id).await?;
    let requested = recorded_calls.inputs_requested.get(call);
    match requested.map(|it| &it.kind) {
        Some(RecordedInputKind::Approval(recorded)) if recorded != hash => {
            Err(DecideError::OtherArguments {
                run: id,
                call: shorten(call, 80),
            })
        }
        _ => Ok(()),
    }
}

/// Checks an answer against the schema of its question.
async fn check_answer(
    engine: &Engine,
    id: RunId,
    question: &str,
    answer: &RawValue,
) -> Result<(), DecideError> {
    let run = engine.journal.store().run(id).await?;
    let run = run.ok_or(DecideError::RunNotFound(id))?;
    let recorded_calls = run_log::load_calls(engine, id).await?;
    let requested = recorded_calls.inputs_requested.get(question);
    let Some(RecordedInputKind::Question(Some(schema))) = requested.map(|it| &it.kind) else {
        return Ok(());
    };
    let schema =
        Schema::parse(Arc::clone(schema)).map_err(|why| DecideError::InvalidAnswer(vec![why]))?;
    let checked = validation::check_raw_value(&schema, answer, run.owner.as_deref()).await;
    checked.map_err(|errors| {
        DecideError::InvalidAnswer(errors.iter().map(ToString::to_string).collect())
    })
}

/// Checks arguments that a person gives for a call, once the call waits: only its run knows the tool's schema.
async fn check_arguments(
    engine: &Engine,
    id: RunId,
    call: &str,
    arguments: &Arc<RawValue>,
) -> Result<(), DecideError> {
    let approvals = &engine.pending_inputs;
    let waiting_tool = async {
        loop {
            // Subscribe before looking, so that no call is missed.
            let mut registered = pin!(approvals.registered.notified());
            registered.as_mut().enable();
            if let Some(tool) = approvals.tool(id, call) {
                return Ok(tool);
            }
            let (run, _) = find_unanswered(engine, id, call, InputKind::Approval).await?;
            engine.sleeping_trees.wake(run.root_id);
            tokio::select! {
                () = registered => {}
                () = engine.draining.cancelled() => return Err(DecideError::Draining),
            }
        }
    };
    let tool = match tokio::time::timeout(REACH_TIMEOUT, waiting_tool).await {
        Ok(tool) => tool?,
        Err(_) => return Err(DecideError::NotReached(id)),
    };
    let call = ToolCall {
        arguments: Arc::clone(arguments),
        ..tool.call
    };
    let checked = tool.toolbox.check_arguments(&call, tool.owner.as_deref());
    checked.await.map_err(DecideError::InvalidArguments)
}

/// Records an answer that nobody waits for yet; false if somebody waits now.
async fn decide_early(
    engine: &Engine,
    id: RunId,
    call: &str,
    decision: InputAnswer,
) -> Result<bool, DecideError> {
    let _guard = engine.pending_inputs.early_decision_lock(id).lock().await;
    let _gate = engine.suspension.resume_lock.read().await;
    if engine.pending_inputs.is_waiting(id, call, decision.kind) {
        return Ok(false);
    }
    let unanswered = find_unanswered(engine, id, call, decision.kind);
    let (run, active_run) = unanswered.await?;
    let entry = decision.to_entry(call);
    match active_run {
        Some(active_run) => {
            let journal = &engine.journal;
            let change = decision.to_change();
            let commit = journal.append_request(&active_run, change, vec![entry]);
            commit.await?;
            active_run.tree.root_permit.changed.notify_waiters();
        }
        None => {
            let journal = &engine.journal;
            let commit = journal.append_inactive(&run, decision.to_change(), entry);
            let committed = commit.await;
            let error = committed.as_ref().err();
            if error.is_none_or(StoreError::may_be_recorded) {
                engine.sleeping_trees.wake(run.root_id);
            }
            committed?;
        }
    }
    Ok(true)
}

/// The run in which an earlier process requested this input, which is not answered.
async fn find_unanswered(
    engine: &Engine,
    id: RunId,
    call: &str,
    kind: InputKind,
) -> Result<(Run, Option<Arc<ActiveRun>>), DecideError> {
    let run = engine.journal.store().run(id).await?;
    let run: Run = run.ok_or(DecideError::RunNotFound(id))?;
    if !matches!(run.status, Status::Waiting | Status::Running) {
        let why = format!("the run is {}", run.status.as_str());
        return Err(not_pending(id, call, &why));
    }
    let recorded_calls = run_log::load_calls(engine, id).await?;
    let requested = recorded_calls.inputs_requested.get(call);
    let is_of_kind = |it: &RecordedInput| it.kind.kind() == kind;
    if !requested.is_some_and(is_of_kind) {
        return Err(not_pending(id, call, "it did not ask for one"));
    }
    if recorded_calls.decisions.contains_key(call) {
        // If the answer to that write was lost, the tree still sleeps.
        engine.sleeping_trees.wake(run.root_id);
        let why = match kind {
            InputKind::Approval => "it is decided",
            InputKind::Question => "it is answered",
            InputKind::Sleep | InputKind::Event => "its wait has ended",
        };
        return Err(not_pending(id, call, why));
    }
    let active_run = engine.active_runs.get(id);
    if active_run
        .as_ref()
        .is_some_and(|active_run| active_run.is_suspended())
    {
        return Err(StoreError::Suspended.into());
    }
    // A call of this process that no longer waits has given up, and its result says why.
    let is_over = active_run.as_ref().is_some_and(|active_run| {
        let is_ours = !active_run.tree.is_recovered && !engine.draining.is_cancelled();
        is_ours || active_run.cancel_token.is_cancelled()
    });
    if is_over || recorded_calls.completed.contains(call) {
        return Err(not_pending(id, call, "it waits no more"));
    }
    Ok((run, active_run))
}

fn not_pending(run: RunId, call: &str, reason: &str) -> DecideError {
    DecideError::NotPending {
        run,
        call: shorten(call, 80),
        reason: reason.to_owned(),
    }
}

fn requested_event(
    turn: u32,
    call: &ToolCall,
    name: &str,
    deadline: Option<Timestamp>,
) -> EventKind {
    let arguments = ArgumentsExcerpt::new(&call.arguments, MAX_CONTENT_BYTES);
    EventKind::ApprovalRequested {
        turn,
        tool_call_id: call.id.clone(),
        tool: name.to_owned(),
        arguments: arguments.json,
        arguments_hash: ArgumentsHash::compute(&call.arguments),
        truncated: arguments.truncated,
        deadline,
    }
}

fn saturating_add(start: Timestamp, time: Duration) -> Timestamp {
    let time = SignedDuration::try_from(time).unwrap_or(SignedDuration::MAX);
    start.checked_add(time).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};
    use serde_json::json;

    use super::{clock_difference, requested_event};
    use crate::domain::message::ToolCall;

    #[test]
    fn a_request_shows_arguments_and_cuts_what_is_too_long() {
        let shown = |arguments: serde_json::Value| {
            let raw = serde_json::value::to_raw_value(&arguments).expect("JSON");
            let call = ToolCall {
                id: "c".to_owned(),
                provider_id: String::new(),
                name: "write_file".to_owned(),
                arguments: raw.into(),
                invalid_arguments: None,
            };
            let event = requested_event(1, &call, "write_file", None);
            serde_json::to_value(event).expect("JSON")["approval.requested"].take()
        };
        let small = shown(json!({"path": "a"}));
        assert_eq!(small["arguments"], json!({"path": "a"}));
        assert_eq!(small.get("truncated"), None);
        let large = shown(json!({"content": "ä".repeat(20_000)}));
        let text = large["arguments"].as_str().expect("text");
        assert!(text.starts_with("{\"content\":\"ä") && text.len() <= super::MAX_CONTENT_BYTES);
        assert_eq!(large["truncated"], true);
    }

    #[test]
    fn the_clock_of_a_request_is_compared_with_that_of_the_wait() {
        let at = |seconds| Timestamp::from_second(seconds).expect("a time");
        let difference = |since, requests: &[i64]| {
            clock_difference(since, requests.iter().copied().map(at)).as_secs()
        };
        assert_eq!(difference(None, &[1000]), 0);
        assert_eq!(difference(Some(at(1000)), &[]), 0);
        assert_eq!(difference(Some(at(1000)), &[700, 1000, 1002]), 0);
        assert_eq!(difference(Some(at(4600)), &[1000]), 3600);
        assert_eq!(
            difference(Some(at(1000)), &[4600]),
            -SignedDuration::from_hours(1).as_secs()
        );
    }
}
