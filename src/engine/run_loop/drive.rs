//! The loop: drives one run, root or child, from its prompt to its end.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, LazyLock};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};

use crate::domain::event::EventKind;
use crate::domain::run::{Failure, Run};
use crate::domain::structured;
use crate::engine::admission::run_permits::RunPermits;
use crate::engine::approval::pause;
use crate::engine::context::RunContext;
use crate::engine::prepare::{self, Prompt, RunInput};
use crate::engine::record::links;
use crate::engine::replay::history::{self, SessionHistory};
use crate::engine::replay::run_log::RecordedRun;
use crate::engine::run_loop::batch;
use crate::engine::run_loop::compaction::{self, RequestBounds};
use crate::engine::run_loop::conversation::{Conversation, ReplyAction};
use crate::engine::run_loop::ending::{Ending, LoopOutcome, LoopState, error_ending};
use crate::engine::run_loop::final_text::{self, UnrecordedReply};
use crate::engine::run_loop::finish;
use crate::engine::run_loop::limits::{self, check_conversation_size, check_limits};
use crate::engine::run_loop::resume;
use crate::engine::run_loop::start::{PendingWrite, RunStart, start_run};
use crate::engine::run_loop::summary;
use crate::engine::run_loop::tool_results::{CallBatch, ToolContext, execute_calls};
use crate::engine::run_loop::turn;
use crate::engine::run_loop::turn_request::{StreamedReply, TurnReply, TurnRequest};
use crate::engine::state::failures;
use crate::engine::state::pending_batch::PendingBatch;
use crate::engine::state::turn_error::TurnError;
use crate::engine::workdir;
use crate::providers::echo;
use crate::store::{Change, Progress, Step, StoreError};
use crate::tools::mcp::McpToolset;

/// Drives a run, whose clock is already started, to its end. Returns its final record, or `None` if the record could
/// not be written; then the whole tree is suspended and the run stays as it was last committed. A root releases its
/// permit and its session before its end is published, so that a client that starts the next run at once finds both
/// free.
pub async fn drive(
    context: &RunContext,
    mut run: Arc<Run>,
    input: RunInput,
    start: RunStart,
    mut permits: RunPermits<'_>,
) -> Option<Arc<Run>> {
    if let Some(permit) = permits.run_permit.take() {
        context.run.tree.root_permit.set(permit);
    }
    let mut state = LoopState::new(&run);
    let work = attempt(context, &mut run, &mut state, input, start);
    let ending = match AssertUnwindSafe(work).catch_unwind().await {
        Ok(ending) => ending,
        Err(_) => Ending::failed(failures::internal("panicked")),
    };
    if !context.run.is_suspended() {
        batch::abandon(context).await;
    }
    let end_result = Box::pin(finish::commit_end(context, run, state, ending)).await;
    permits.release(&context.run, end_result.is_ok());
    finish::finish(context, end_result)
}

async fn attempt(
    context: &RunContext,
    run: &mut Arc<Run>,
    state: &mut LoopState,
    mut input: RunInput,
    mut start: RunStart,
) -> Ending {
    if workdir::is_used(&context.engine, &context.run.agent)
        && let Err(error) = Box::pin(workdir::open(context)).await
    {
        let pending_write = start_run(context, run, start);
        let failure = failures::config(&error.to_string());
        return Box::pin(fail_before_prompt(context, pending_write, failure)).await;
    }
    let mut recorded_run = match &mut start {
        RunStart::Resumed(recorded) => Some(std::mem::take(recorded)),
        RunStart::Queued | RunStart::New { .. } => None,
    };
    if let Some(recorded_run) = &recorded_run {
        context.run.pending_batch.set(recorded_run.pending_batch());
    }
    let recorded_prompt = recorded_run
        .as_mut()
        .and_then(|recorded_run| recorded_run.prompt.take());
    let (prompt, pending_write) = match recorded_prompt {
        // A recorded prompt is used unchanged, even if the files have changed since.
        Some(prompt) => (prompt, Box::new(start_run(context, run, start))),
        None => {
            if run.session.is_some() {
                match Box::pin(history::session_history(&context.engine, run)).await {
                    Ok(SessionHistory {
                        messages,
                        compaction,
                    }) => (input.earlier, input.compaction) = (messages, compaction),
                    Err(error) if context.run.is_unreadable(&error) => {
                        let pending_write = start_run(context, run, start);
                        let failure = failures::internal(&error.to_string());
                        return Box::pin(fail_before_prompt(context, pending_write, failure)).await;
                    }
                    Err(error) => return error.into(),
                }
            }
            let assembled = Box::pin(prepare::assemble_prompt(
                &context.engine,
                &context.run.agent,
                context.run.workdir.dir(),
                context.run.tree.owner.as_deref(),
                input,
            ))
            .await;
            let mut pending_write = Box::new(start_run(context, run, start));
            let prompt = match assembled {
                Ok(prompt) => prompt,
                Err(error) => {
                    let failure = failures::config(&error.to_string());
                    return Box::pin(fail_before_prompt(context, *pending_write, failure)).await;
                }
            };
            pending_write.steps.extend(prompt_steps(&prompt));
            if let Some(message) = prompt.memory_warning.clone() {
                pending_write
                    .events
                    .push(EventKind::MemoryWarning { message });
            }
            (prompt, pending_write)
        }
    };
    Box::pin(run_turns(
        context,
        state,
        prompt,
        pending_write,
        recorded_run,
    ))
    .await
}

/// Ends a run whose prompt or working directory is unavailable: it is accepted, or resumed, and fails.
async fn fail_before_prompt(
    context: &RunContext,
    pending_write: PendingWrite,
    failure: Failure,
) -> Ending {
    match pending_write.write(context).await {
        Ok(()) => Ending::failed(failure),
        Err(error) => error.into(),
    }
}

async fn run_turns(
    context: &RunContext,
    state: &mut LoopState,
    prompt: Prompt,
    mut pending_write: Box<PendingWrite>,
    recorded_run: Option<Box<RecordedRun>>,
) -> Ending {
    let mut prompt = prompt;
    if links::has_links(&prompt.input) {
        let start_write = std::mem::replace(
            &mut pending_write,
            Box::new(PendingWrite::new(Change::Unchanged)),
        );
        if let Err(ending) = Box::pin(fetch_links(context, *start_write, &mut prompt)).await {
            return ending;
        }
    }
    let limits = &context.engine.settings;
    let max_turns = context.run.agent.max_turns;
    let mut offer = McpToolset::default();
    if !context.run.agent.mcp_servers.is_empty() {
        let is_new = recorded_run.is_none();
        offer = match Box::pin(list_mcp_tools(context, &mut pending_write, is_new)).await {
            Ok(offer) => offer,
            Err(error) => return error.into(),
        };
        if let Some(reason) = offer.required_failure.take() {
            return match Box::pin(pending_write.write(context)).await {
                Ok(()) => Ending::failed(failures::config(&reason)),
                Err(error) => error.into(),
            };
        }
    }
    let tool_context = ToolContext {
        toolbox: Arc::new(prepare::build_toolbox(
            &context.engine,
            &context.run.agent,
            &context.run.scope,
            context.run.workdir.dir(),
            offer,
        )),
        drive: drive_child,
    };
    let toolbox = &tool_context.toolbox;
    let has_tools = !toolbox.offered_specs().is_empty();
    let Prompt { system, input, .. } = prompt;
    let mut conversation = Conversation::new(
        input.earlier,
        input.message,
        max_turns,
        limits.runs.max_calls,
        limits.loop_warn,
        limits.loop_stop,
    );
    let recorded_compaction = recorded_run.as_ref().and_then(|run| run.compaction.clone());
    if let Some(compaction) = input.compaction.or(recorded_compaction) {
        conversation.compact(compaction);
    }
    let bounds = RequestBounds::new(context, &system, toolbox.offered_specs());
    if let Some(recorded_run) = recorded_run {
        // Written now, because the next step may take long.
        let start_write = std::mem::replace(
            &mut pending_write,
            Box::new(PendingWrite::new(Change::Unchanged)),
        );
        let replayed = Box::pin(resume::resume(
            context,
            state,
            &tool_context,
            *recorded_run,
            *start_write,
            &mut conversation,
        ));
        match replayed.await {
            Ok(None) => {}
            Ok(Some(fallback)) => {
                return Box::pin(summary::request_summary(
                    context,
                    state,
                    &system,
                    &mut conversation,
                    fallback,
                ))
                .await;
            }
            Err(ending) => return ending,
        }
    }
    // Computed only if a reply has thinking.
    let prefix = LazyLock::new(|| echo::prefix_hash(&system, toolbox.offered_specs()));
    conversation.drop_foreign_thinking(|| *prefix);
    let mut pending_write = Some(pending_write);
    loop {
        // A run that still waits for its batch needs no permit.
        if !matches!(context.run.pending_batch.get(), PendingBatch::Submitted(_))
            && let Err(error) = pause::ensure_running(context).await
        {
            return error.into();
        }
        if let Some(bounds) = bounds.filter(|bounds| bounds.is_exceeded(&conversation)) {
            let compacting = compaction::compact(
                context,
                state,
                &bounds,
                &mut conversation,
                &mut pending_write,
            );
            if let Err(ending) = Box::pin(compacting).await {
                return ending;
            }
        }
        let limits_check = check_limits(&context.run).and_then(|()| {
            check_conversation_size(conversation.messages(), limits.max_conversation_bytes)
        });
        let mut turn_write = pending_write
            .take()
            .unwrap_or_else(|| Box::new(PendingWrite::new(Change::Unchanged)));
        let turn = match &limits_check {
            Ok(()) => conversation.next_turn(),
            Err(_) => 0,
        };
        if limits_check.is_ok() {
            turn_write.events.push(EventKind::TurnStarted {
                turn,
                messages: conversation.messages().len(),
                results: conversation.results_pending(),
            });
        }
        let must_commit_first = turn_write.must_commit_first(&context.run);
        // Boxed, like the next two: a future has space for every future that it awaits, and thousands of runs wait
        // here.
        let commit = Box::pin(turn_write.write(context));
        if let Err(error) = limits_check {
            return match commit.await {
                Ok(()) => error_ending(&context.run, error),
                Err(error) => error.into(),
            };
        }
        let turn_request = TurnRequest {
            turn,
            system: &system,
            messages: conversation.messages(),
            tools: toolbox.offered_specs(),
            params: &context.run.agent.params,
            is_turn: true,
        };
        let mut streamed = StreamedReply::default();
        let request = Box::pin(turn::request(context, turn_request, &mut streamed));
        let result = match must_commit_first {
            true => sequentially(commit, request).await,
            false => concurrently(commit, request).await,
        };
        let TurnReply {
            mut reply,
            requested_model,
        } = match result {
            Ok(turn_reply) => turn_reply,
            Err(error) => {
                if !streamed.text.is_empty() {
                    state.partial = Some(streamed.text);
                }
                return error_ending(&context.run, error);
            }
        };
        let tokens = reply.usage.unwrap_or_default();
        state.progress = Progress {
            turns: turn,
            model: reply.model.clone().unwrap_or(requested_model.model),
            stop_reason: reply.stop_reason.clone(),
            usage: context.run.usage().0,
        };
        let end = reply.outcome;
        conversation.set_echo_prefix(&mut reply, || *prefix);
        let action = conversation.push_reply(reply, has_tools);
        let (ReplyAction::Final(message)
        | ReplyAction::Calls(message)
        | ReplyAction::OutOfTurns(message)) = &action;
        if !message.content.is_empty() {
            state.partial = Some(message.content.clone());
        }
        let completed = EventKind::TurnCompleted {
            turn,
            model: state.progress.model.clone(),
            stop_reason: state.progress.stop_reason.clone(),
            input_tokens: tokens.input,
            output_tokens: tokens.output,
            cache_read_tokens: tokens.cache_read,
            cache_write_tokens: tokens.cache_write,
            reasoning_tokens: (tokens.reasoning > 0).then_some(tokens.reasoning),
            tool_calls: message
                .tool_calls
                .iter()
                .map(|call| toolbox.called_tool(call))
                .collect(),
        };
        if let Some(failure) = failures::reply_failure(end, &message.content) {
            let message = message.clone();
            return Ending::failed(failure)
                .with_records(vec![Step::Reply { turn, message }], vec![completed]);
        }
        let message = match action {
            ReplyAction::Final(message) => {
                if let Some(summary_prompt) = summary::summary_prompt(&context.run) {
                    let fallback = message.content.clone();
                    let steps = vec![
                        Step::Reply {
                            turn,
                            message: message.clone(),
                        },
                        Step::Said {
                            content: summary_prompt.to_owned(),
                        },
                    ];
                    let change = Change::Progress(state.progress.clone());
                    let journal = &context.engine.journal;
                    if let Err(error) = journal
                        .append(&context.run, change, steps, vec![completed])
                        .await
                    {
                        return error.into();
                    }
                    conversation.push_followup(turn, message, summary_prompt.to_owned());
                    return Box::pin(summary::request_summary(
                        context,
                        state,
                        &system,
                        &mut conversation,
                        fallback,
                    ))
                    .await;
                }
                let mut unrecorded = UnrecordedReply {
                    steps: vec![Step::Reply {
                        turn,
                        message: message.clone(),
                    }],
                    events: vec![completed],
                };
                let checked =
                    final_text::check_output(context, state, &message.content, &mut unrecorded);
                let structured = match Box::pin(checked).await {
                    Ok(Ok(structured)) => structured,
                    Ok(Err(errors)) => {
                        let UnrecordedReply { steps, events } = &mut unrecorded;
                        if !conversation.may_repair() {
                            return Ending::failed(failures::output_invalid(&errors))
                                .with_records(std::mem::take(steps), std::mem::take(events));
                        }
                        let repair_prompt = structured::repair_prompt(&errors);
                        steps.push(Step::Said {
                            content: repair_prompt.clone(),
                        });
                        if let Err(ending) = unrecorded.record(context, state).await {
                            return ending;
                        }
                        conversation.push_followup(turn, message, repair_prompt);
                        continue;
                    }
                    Err(ending) => return ending,
                };
                let has_memory = context.run.agent.memory.enabled;
                let memory_time = has_memory.then(|| context.engine.memories.next_time());
                let outcome = LoopOutcome::Completed {
                    content: message.content.clone(),
                    structured,
                    task: conversation.task().into_owned(),
                    memory_time,
                };
                if let Some(at) = memory_time {
                    // The memory entry is written between the reply and the end. A process that resumes in between has
                    // to find the reply, so that it does not request another one, and the time that identifies the
                    // entry.
                    unrecorded.steps.push(Step::Remembers { at });
                    return match unrecorded.record(context, state).await {
                        Ok(()) => Ending::new(outcome),
                        Err(ending) => ending,
                    };
                }
                return Ending::new(outcome).with_records(unrecorded.steps, unrecorded.events);
            }
            ReplyAction::OutOfTurns(message) => {
                let ending = match context.run.agent.ad_hoc {
                    Some(_) => Ending::new(LoopOutcome::Incomplete),
                    None => Ending::failed(failures::max_turns(max_turns)),
                };
                return ending.with_records(vec![Step::Reply { turn, message }], vec![completed]);
            }
            ReplyAction::Calls(message) => message,
        };
        let calls = message.tool_calls.clone();
        let steps = vec![Step::Reply { turn, message }];
        let change = Change::Progress(state.progress.clone());
        if let Err(error) = context
            .engine
            .journal
            .append(&context.run, change, steps, vec![completed])
            .await
        {
            return error.into();
        }
        if let Err(error) = check_limits(&context.run) {
            return error_ending(&context.run, error);
        }
        let results = calls.iter().map(|_| None).collect();
        let call_batch = CallBatch {
            turn,
            calls,
            results,
            recorded_calls: Arc::default(),
        };
        if let Err(ending) = Box::pin(execute_calls(
            context,
            &tool_context,
            call_batch,
            &mut conversation,
        ))
        .await
        {
            return ending;
        }
    }
}

/// Commits the start of the run, fetches the URLs of the prompt and records the prompt with their content, so that a
/// later process does not fetch them again.
async fn fetch_links(
    context: &RunContext,
    start_write: PendingWrite,
    prompt: &mut Prompt,
) -> Result<(), Ending> {
    start_write.write(context).await?;
    let owner = context.run.tree.owner.as_deref();
    let fetched = limits::within_deadline(
        &context.run,
        links::fetch(&context.engine, owner, &mut prompt.input),
    )
    .await;
    let fetched = fetched.map_err(|error| error_ending(&context.run, error))?;
    fetched.map_err(|reason| Ending::failed(failures::config(&reason)))?;
    let steps = prompt_steps(prompt).collect();
    let recorded =
        context
            .engine
            .journal
            .append(&context.run, Change::Unchanged, steps, Vec::new());
    recorded.await?;
    prompt.input.drop_data();
    Ok(())
}

fn prompt_steps(prompt: &Prompt) -> impl Iterator<Item = Step> {
    let RunInput {
        earlier,
        message,
        compaction,
    } = prompt.input.clone();
    let system = prompt.system.clone();
    let step = Step::Prompt {
        system,
        message,
        earlier,
    };
    let compacted = compaction.map(|compaction| Step::Compacted { compaction });
    std::iter::once(step).chain(compacted)
}

/// The tools of the agent's MCP servers. This list holds for the whole run.
async fn list_mcp_tools(
    context: &RunContext,
    pending_write: &mut Box<PendingWrite>,
    is_new: bool,
) -> Result<McpToolset, StoreError> {
    if is_new {
        // A server may take long to reply; the caller learns before that that the run was accepted.
        let start_write = std::mem::replace(
            pending_write,
            Box::new(PendingWrite::new(Change::Unchanged)),
        );
        start_write.write(context).await?;
    }
    // On a cancel or a passed deadline the run ends before its next turn.
    let offer = limits::within_deadline(
        &context.run,
        context
            .engine
            .mcp
            .list_tools(&context.run.agent.mcp_servers),
    )
    .await;
    let mut offer = offer.unwrap_or_default();
    let warnings = std::mem::take(&mut offer.warnings);
    for warning in &warnings {
        tracing::warn!(
            run.id = %context.run.scope.run, run.root = %context.run.scope.root, agent = %context.run.agent.name,
            depth = context.run.scope.depth.0, "{warning}"
        );
    }
    let warnings = warnings.into_iter();
    pending_write
        .events
        .extend(warnings.map(|message| EventKind::ToolsWarning { message }));
    Ok(offer)
}

/// Sends the request while the commit is under way: the request depends on nothing in it, and a failed commit drops the
/// request. The reply is returned only after the commit.
async fn concurrently(
    commit: impl Future<Output = Result<(), StoreError>> + Unpin,
    request: impl Future<Output = Result<TurnReply, TurnError>> + Unpin,
) -> Result<TurnReply, TurnError> {
    match select(commit, request).await {
        Either::Left((committed, request)) => {
            committed?;
            request.await
        }
        Either::Right((reply, commit)) => {
            commit.await?;
            reply
        }
    }
}

async fn sequentially(
    commit: impl Future<Output = Result<(), StoreError>>,
    request: impl Future<Output = Result<TurnReply, TurnError>>,
) -> Result<TurnReply, TurnError> {
    commit.await?;
    request.await
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
