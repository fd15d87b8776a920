//! The loop: drives one run, root or child, from its prompt to its end.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};

use crate::domain::event::EventKind;
use crate::domain::message::AssistantMessage;
use crate::domain::run::Run;
use crate::domain::waiting_for::WaitingFor;
use crate::engine::admission::run_permits::RunPermits;
use crate::engine::approval::pause;
use crate::engine::context::RunContext;
use crate::engine::conversation::ReplyAction;
use crate::engine::run_loop::batch;
use crate::engine::run_loop::compaction;
use crate::engine::run_loop::delegation::background::{self, AbortOnDrop};
use crate::engine::run_loop::ending::{Ending, LoopOutcome, LoopState, error_ending};
use crate::engine::run_loop::exchange::Exchange;
use crate::engine::run_loop::final_text;
use crate::engine::run_loop::finish;
use crate::engine::run_loop::limits::{check_conversation_size, check_limits};
use crate::engine::run_loop::new_messages;
use crate::engine::run_loop::record_turn;
use crate::engine::run_loop::resume;
use crate::engine::run_loop::setup::{self, Setup};
use crate::engine::run_loop::start::{PendingWrite, RunStart};
use crate::engine::run_loop::summary;
use crate::engine::run_loop::tool_results::{self, CallBatch};
use crate::engine::run_loop::turn;
use crate::engine::run_loop::turn_loop::{NewReply, TurnLoop};
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply};
use crate::engine::state::budget::Amount;
use crate::engine::state::failures;
use crate::engine::state::kept_reply::KeptReply;
use crate::engine::state::pause::PauseReason;
use crate::engine::state::pending_batch::PendingBatch;
use crate::engine::state::prompt::RunInput;
use crate::engine::state::turn_error::TurnError;
use crate::record::entry::ReplyReport;
use crate::store::{Progress, StoreError};

/// Counts as long as it exists.
struct LiveRoot<'e>(&'e AtomicUsize);

impl<'e> LiveRoot<'e> {
    fn count(live_roots: &'e AtomicUsize) -> Self {
        live_roots.fetch_add(1, Ordering::Relaxed);
        Self(live_roots)
    }
}

impl Drop for LiveRoot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Drives a run, whose clock is already started, to its end. Returns its final record, or `None` if the record could not
/// be written; then the whole tree is suspended and the run stays as it was last committed. A root releases its permit
/// and its session before its end is published, so that a client that starts the next run at once finds both free.
pub async fn drive(
    context: &RunContext,
    mut run: Arc<Run>,
    input: RunInput,
    start: RunStart,
    mut permits: RunPermits<'_>,
) -> Option<Arc<Run>> {
    let tree = &context.run.tree;
    let is_live = context.run.parent.is_none() && !tree.keeps_memory && tree.evaluation.is_none();
    let _live_root = is_live.then(|| LiveRoot::count(&context.engine.live_roots));
    if let Some(permit) = permits.run_permit.take() {
        context.run.tree.root_permit.set(permit);
    }
    if !context.engine.settings.requests.is_off {
        context.run.turn_log.turn_on();
    }
    let mut state = LoopState::new(&run);
    let setup = Box::pin(setup::set_up(context, &mut run, input, start));
    let turns = Box::pin(run_turns(context, &mut state, setup));
    let _background_tasks = AbortOnDrop(&context.run);
    let mut ending = match AssertUnwindSafe(turns).catch_unwind().await {
        Ok(Err(ending)) => ending,
        Err(_) => Ending::failed(failures::internal("panicked")),
    };
    if context.run.background.get().is_some() {
        Box::pin(background::settle(context, &state.progress, &mut ending)).await;
    }
    if !context.run.is_suspended() {
        Box::pin(batch::abandon(context)).await;
    }
    let reply = state.unrecorded_reply.take();
    context.run.set_conversation_bytes(0);
    let end_result = Box::pin(finish::commit_end(context, run, state, ending)).await;
    if let (Err(_), true, Some(reply)) = (&end_result, context.run.is_suspended(), reply) {
        let space = &context.engine.active_runs.reply_space;
        space
            .keep(*reply)
            .into_iter()
            .for_each(|it| context.run.keep_reply(it));
    }
    permits.release(&context.run, end_result.is_ok());
    finish::finish(context, end_result)
}

/// Takes turns until a step ends the run: every step returns the run's ending, also a successful one, as its error.
async fn run_turns(
    context: &RunContext,
    state: &mut LoopState,
    setup: Pin<Box<impl Future<Output = Result<Setup, Ending>>>>,
) -> Result<Infallible, Ending> {
    let mut setup = setup.await?;
    let recorded_run = setup.recorded_run.take();
    let mut turn_loop = TurnLoop::new(context, state, setup, drive_child);
    if let Some(recorded_run) = recorded_run
        && let Some(task_text) = Box::pin(resume::resume(&mut turn_loop, *recorded_run)).await?
    {
        return Err(Box::pin(summary::request_summary(&mut turn_loop, task_text)).await);
    }
    turn_loop.drop_foreign_thinking();
    loop {
        let Turn {
            number: turn,
            action,
            report,
        } = Box::pin(take_turn(&mut turn_loop)).await?;
        let new_reply = |message| NewReply {
            turn,
            message,
            report,
        };
        match action {
            ReplyAction::Calls(message) if is_output(&turn_loop, turn, &message) => {
                return Err(complete_with_calls(&turn_loop, new_reply(message)));
            }
            ReplyAction::Calls(message) => {
                Box::pin(execute_calls(&mut turn_loop, new_reply(message))).await?;
            }
            ReplyAction::Final(message) => {
                Box::pin(final_text::accept(&mut turn_loop, new_reply(message))).await?;
            }
            ReplyAction::OutOfTurns(message) => {
                return Err(out_of_turns(context, new_reply(message)));
            }
        }
    }
}

/// A turn whose reply the conversation has taken.
struct Turn {
    number: u32,
    action: ReplyAction,
    report: ReplyReport,
}

async fn take_turn(turn_loop: &mut TurnLoop<'_>) -> Result<Turn, Ending> {
    let context = turn_loop.context;
    // A run that still waits for its batch needs no permit.
    if !matches!(context.run.pending_batch.get(), PendingBatch::Submitted(_)) {
        wait_while_held(turn_loop).await?;
        pause::ensure_running(context).await?;
    }
    new_messages::read_new(turn_loop).await?;
    if let Some(bounds) = turn_loop.bounds
        && bounds.is_exceeded(&turn_loop.conversation)
    {
        Box::pin(compaction::compact(turn_loop, &bounds)).await?;
    }
    let (turn, turn_write) = start_turn(turn_loop).await?;
    let turn_reply = request_reply(turn_loop, turn, turn_write).await?;
    push_reply(turn_loop, turn, turn_reply)
}

/// Does not begin a turn while a client has paused the run.
async fn wait_while_held(turn_loop: &mut TurnLoop<'_>) -> Result<(), Ending> {
    let context = turn_loop.context;
    if !context.run.is_held() {
        return Ok(());
    }
    // The pause is recorded of a run that has started.
    Box::pin(turn_loop.write_pending()).await?;
    // A process that resumes a waiting run takes it that nothing was sent since.
    Box::pin(turn_loop.record_usage()).await?;
    let released = Box::pin(pause::wait_while_held(
        context,
        PauseReason::Turn(WaitingFor::Resume),
    ))
    .await;
    released.map_err(|error| error_ending(&context.run, error))
}

/// Checks the limits and starts the next turn. Returns its number and what has to be committed with its start.
async fn start_turn(turn_loop: &mut TurnLoop<'_>) -> Result<(u32, Box<PendingWrite>), Ending> {
    let context = turn_loop.context;
    let max_bytes = context.engine.settings.max_conversation_bytes;
    let conversation = &mut turn_loop.conversation;
    let checked = check_limits(&context.run)
        .and_then(|()| check_conversation_size(conversation.messages(), max_bytes));
    let mut turn_write = turn_loop.pending_write.take().unwrap_or_default();
    match checked {
        Ok(bytes) => context.run.set_conversation_bytes(bytes),
        Err(error) => {
            Box::pin(turn_write.write(context)).await?;
            return Err(error_ending(&context.run, error));
        }
    }
    let turn = conversation.next_turn();
    let started = EventKind::TurnStarted {
        turn,
        messages: conversation.messages().len(),
        results: conversation.results_pending(),
    };
    turn_write.entries.push(started.into());
    Ok((turn, turn_write))
}

/// Commits the start of the turn and sends its request, at the same time if possible.
async fn request_reply(
    turn_loop: &mut TurnLoop<'_>,
    turn: u32,
    turn_write: Box<PendingWrite>,
) -> Result<TurnReply, Ending> {
    let context = turn_loop.context;
    let messages = turn_loop.conversation.messages().len();
    if let Some(kept) = context.run.take_kept_reply(turn) {
        count_kept(context, &kept);
        if kept.messages == messages {
            return Box::pin(repeat_kept(turn_loop, kept, turn_write)).await;
        }
    }
    let must_commit_first = turn_write.must_commit_first(&context.run);
    let mut streamed = StreamedReply::default();
    // Both boxed: a future has space for every future that it awaits, and thousands of runs wait here.
    let commit = Box::pin(turn_write.write(context));
    let turn_request = turn_loop.turn_request(turn);
    let mut exchange = Exchange::default();
    let request = turn::request(context, turn_request, &mut streamed, &mut exchange);
    let request = Box::pin(request);
    let (mut result, committed) = match must_commit_first {
        true => sequentially(commit, request).await,
        false => concurrently(commit, request).await,
    };
    if let Err(TurnError::Provider(error)) = &result
        && error.is_too_long
        && streamed.is_empty()
        && committed.is_ok()
    {
        turn_loop.conversation.retract_turn();
        Box::pin(compaction::compact_refused(turn_loop, error.clone())).await?;
        turn_loop.conversation.next_turn();
        let turn_request = turn_loop.turn_request(turn);
        let request = turn::request(context, turn_request, &mut streamed, &mut exchange);
        result = Box::pin(request).await;
    }
    context.run.live_text.clear();
    let billed = exchange.billed.take();
    // Boxed because it is done soon, and thousands of runs wait for the request.
    Box::pin(record_turn::record(context, turn, exchange, &result)).await;
    if let Ok(turn_reply) = &result
        && !streamed.has_recorded_batch
    {
        turn_loop.state.unrecorded_reply = Some(Box::new(KeptReply {
            turn,
            reply: turn_reply.reply.clone(),
            requested_model: turn_reply.requested_model.clone(),
            billed,
            entry: context.run.turn_log.last_unrecorded(),
            messages,
        }));
    }
    committed?;
    result.map_err(|error| {
        if !streamed.text.is_empty() {
            turn_loop.state.partial = Some(streamed.text);
        }
        error_ending(&context.run, error)
    })
}

/// Counts what the request of a kept reply has used, which is not recorded either.
fn count_kept(context: &RunContext, kept: &KeptReply) {
    let Some((model, usage)) = &kept.billed else {
        return;
    };
    let run = &context.run;
    run.add_model_usage(model, usage);
    let used = Amount {
        tokens: usage.tokens.total(),
        cost: usage.cost.unwrap_or_default(),
    };
    run.tree
        .budgets
        .count_used(run.accounts.iter().copied(), used);
}

/// Takes a reply again that could not be recorded.
async fn repeat_kept(
    turn_loop: &mut TurnLoop<'_>,
    kept: KeptReply,
    turn_write: Box<PendingWrite>,
) -> Result<TurnReply, Ending> {
    let context = turn_loop.context;
    turn_loop.state.unrecorded_reply = Some(Box::new(kept.clone()));
    turn_write.write(context).await?;
    kept.entry
        .into_iter()
        .for_each(|entry| context.run.turn_log.add(entry));
    Ok(TurnReply {
        reply: kept.reply,
        requested_model: kept.requested_model,
    })
}

/// Adds a reply to the conversation. An unusable reply ends the run.
fn push_reply(
    turn_loop: &mut TurnLoop<'_>,
    turn: u32,
    turn_reply: TurnReply,
) -> Result<Turn, Ending> {
    let TurnReply {
        mut reply,
        requested_model,
    } = turn_reply;
    let (tokens, reply_outcome) = (reply.usage.unwrap_or_default(), reply.outcome);
    let refusal = reply.refusal.take();
    turn_loop.state.progress = Progress {
        turns: turn,
        model: reply.model.clone().unwrap_or(requested_model.model),
        stop_reason: reply.stop_reason.clone(),
        ..Progress::default()
    };
    let run = &turn_loop.context.run;
    run.update_progress(&mut turn_loop.state.progress);
    let (preamble, conversation) = (&turn_loop.preamble, &mut turn_loop.conversation);
    conversation.set_echo_prefix(&mut reply, || preamble.hash());
    let has_tools = !preamble.toolbox.offered_specs().is_empty();
    let action = conversation.push_reply(reply, has_tools);
    let message = action.message();
    if !message.content.is_empty() {
        turn_loop.state.partial = Some(message.content.clone());
    }
    let report = turn_loop.reply_report(tokens, &message.tool_calls);
    let failure = failures::reply_failure(reply_outcome, &message.content, refusal.as_deref());
    if let Some(failure) = failure {
        let message = message.clone();
        let reply = NewReply {
            turn,
            message,
            report,
        };
        return Err(Ending::failed(failure).with_entries(vec![reply.into()]));
    }
    Ok(Turn {
        number: turn,
        action,
        report,
    })
}

/// Records a reply, executes its calls and adds their results to the conversation.
async fn execute_calls(turn_loop: &mut TurnLoop<'_>, reply: NewReply) -> Result<(), Ending> {
    let call_batch = CallBatch::new(reply.turn, reply.message.tool_calls.clone());
    Box::pin(turn_loop.record(vec![reply.into()])).await?;
    turn_loop.state.unrecorded_reply = None;
    let run = &turn_loop.context.run;
    check_limits(run).map_err(|error| error_ending(run, error))?;
    tool_results::execute_calls(turn_loop, call_batch).await
}

/// Whether the calls of a reply are what the client wants of the run. One that sends results begins another run with them.
fn is_output(turn_loop: &TurnLoop<'_>, turn: u32, message: &AssistantMessage) -> bool {
    let client = turn_loop.context.run.agent.client.as_ref();
    let toolbox = &turn_loop.preamble.toolbox;
    let mut calls = message.tool_calls.iter();
    turn == 1
        && client.is_some_and(|client| client.ends_with_calls)
        && calls.all(|call| toolbox.is_client_tool(&call.name))
}

fn complete_with_calls(turn_loop: &TurnLoop<'_>, reply: NewReply) -> Ending {
    let outcome = LoopOutcome::Completed {
        content: reply.message.content.clone(),
        structured: false,
        task: turn_loop.conversation.task().into_owned(),
        memory_time: None,
    };
    Ending::new(outcome).with_entries(vec![reply.into()])
}

/// An ad-hoc sub-agent returns its last text as an incomplete result; any other run fails.
fn out_of_turns(context: &RunContext, reply: NewReply) -> Ending {
    let agent = &context.run.agent;
    let ending = match agent.ad_hoc {
        Some(_) => Ending::new(LoopOutcome::Incomplete),
        None => Ending::failed(failures::max_turns(agent.limits.max_turns)),
    };
    ending.with_entries(vec![reply.into()])
}

/// The result of a request, and that of the commit of its turn's start.
type Requested = (Result<TurnReply, TurnError>, Result<(), StoreError>);

/// Sends the request while the commit is under way: the request depends on nothing in it, and a failed commit drops the
/// request. The reply is returned only after the commit.
async fn concurrently(
    commit: impl Future<Output = Result<(), StoreError>> + Unpin,
    request: impl Future<Output = Result<TurnReply, TurnError>> + Unpin,
) -> Requested {
    match select(commit, request).await {
        Either::Left((Ok(()), request)) => (request.await, Ok(())),
        Either::Left((Err(error), _)) => (Err(TurnError::Store(error)), Ok(())),
        Either::Right((reply, commit)) => (reply, commit.await),
    }
}

async fn sequentially(
    commit: impl Future<Output = Result<(), StoreError>>,
    request: impl Future<Output = Result<TurnReply, TurnError>>,
) -> Requested {
    match commit.await {
        Ok(()) => (request.await, Ok(())),
        Err(error) => (Err(TurnError::Store(error)), Ok(())),
    }
}

/// Drives a child, which holds neither a permit nor a session.
fn drive_child<'a>(
    context: &'a RunContext,
    run: Arc<Run>,
    input: RunInput,
    start: RunStart,
) -> BoxFuture<'a, Option<Arc<Run>>> {
    Box::pin(drive(context, run, input, start, RunPermits::default()))
}
