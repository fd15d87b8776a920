//! The loop: drives one run, root or child, from its prompt to its end, and lends its tools the way to start children.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, LazyLock};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};

use crate::domain::event::EventKind;
use crate::domain::message::Message;
use crate::domain::run::{Failure, Run};
use crate::domain::structured;
use crate::engine::answers::{Asked, Hands, answer, check, failed_turn};
use crate::engine::close::{self, Ending, How, State};
use crate::engine::compaction::{self, RequestBounds};
use crate::engine::conversation::{Conversation, Heard};
use crate::engine::entry::{Draft, Entry, begin};
use crate::engine::final_text::{self, Unrecorded};
use crate::engine::history::Earlier;
use crate::engine::left_batch::LeftBatch;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::remains::Remains;
use crate::engine::resolve::{self, Input, Prompt};
use crate::engine::sessions::Held;
use crate::engine::turn::{self, Answer, Question, Streamed};
use crate::engine::turn_error::TurnError;
use crate::engine::{batch, budget, endings, history, links, replay, summary, waiting, workdir};
use crate::providers::echo;
use crate::store::{Change, Progress, Step, StoreError};
use crate::tools::mcp::Offer;

/// Drives a run whose clock has been set to its end. Returns its final record; none where the record could not be
/// written, and then the whole tree is suspended and the run stays as it was last committed. A root's slot and its session are free before anybody
/// hears of its end, so that a caller who comes back at once finds them.
pub async fn drive(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    mut run: Arc<Run>,
    input: Input,
    entry: Entry,
    mut held: Held<'_>,
) -> Option<Arc<Run>> {
    if let Some(slot) = held.slot.take() {
        live.tree.slot.put(slot);
    }
    let mut state = State {
        progress: Progress {
            turns: run.turns,
            model: run.model.clone(),
            stop_reason: run.stop_reason.clone(),
            usage: run.usage,
        },
        partial: None,
    };
    let work = attempt(engine, live, &mut run, &mut state, input, entry);
    let ending = match AssertUnwindSafe(work).catch_unwind().await {
        Ok(ending) => ending,
        Err(_) => Ending::failed(endings::internal("panicked")),
    };
    if !live.is_suspended() {
        batch::give_up(engine, live).await;
    }
    let closed = Box::pin(close::close(engine, live, run, state, ending)).await;
    held.release(live, closed.is_ok());
    close::leave(engine, live, closed)
}

async fn attempt(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    run: &mut Arc<Run>,
    state: &mut State,
    mut input: Input,
    mut entry: Entry,
) -> Ending {
    if workdir::is_used(engine, &live.agent)
        && let Err(error) = Box::pin(workdir::open(engine, live)).await
    {
        let draft = begin(engine, live, run, entry);
        let failure = endings::config(&error.to_string());
        return Box::pin(unprompted(engine, live, draft, failure)).await;
    }
    let mut left = match &mut entry {
        Entry::Resumed(remains) => Some(std::mem::take(remains)),
        Entry::Queued | Entry::New { .. } => None,
    };
    if let Some(left) = &left {
        live.left_batch.set(left.left_batch());
    }
    let recorded = left.as_mut().and_then(|left| left.prompt.take());
    let (prompt, draft) = match recorded {
        // A recorded prompt stays as it was, whatever the files say now.
        Some(prompt) => (prompt, Box::new(begin(engine, live, run, entry))),
        None => {
            if run.session.is_some() {
                match Box::pin(history::earlier(engine, run)).await {
                    Ok(Earlier {
                        messages,
                        compaction,
                    }) => (input.earlier, input.compaction) = (messages, compaction),
                    Err(error) if live.is_unreadable(&error) => {
                        let draft = begin(engine, live, run, entry);
                        let failure = endings::internal(&error.to_string());
                        return Box::pin(unprompted(engine, live, draft, failure)).await;
                    }
                    Err(error) => return error.into(),
                }
            }
            let assembled = Box::pin(resolve::assemble(
                engine,
                &live.agent,
                live.workdir.dir(),
                live.tree.owner.as_deref(),
                input,
            ))
            .await;
            let mut draft = Box::new(begin(engine, live, run, entry));
            let prompt = match assembled {
                Ok(prompt) => prompt,
                Err(error) => {
                    let failure = endings::config(&error.to_string());
                    return Box::pin(unprompted(engine, live, *draft, failure)).await;
                }
            };
            draft.steps.extend(prompt_steps(&prompt));
            if let Some(message) = prompt.memory_warning.clone() {
                draft.events.push(EventKind::MemoryWarning { message });
            }
            (prompt, draft)
        }
    };
    Box::pin(turns(engine, live, state, prompt, draft, left)).await
}

/// The end of a run whose prompt or directory cannot be had: it is accepted, or goes on, and fails.
async fn unprompted(engine: &Engine, live: &LiveRun, draft: Draft, failure: Failure) -> Ending {
    match draft.write(engine, live).await {
        Ok(()) => Ending::failed(failure),
        Err(error) => error.into(),
    }
}

async fn turns(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    prompt: Prompt,
    mut draft: Box<Draft>,
    left: Option<Box<Remains>>,
) -> Ending {
    let mut prompt = prompt;
    if links::has_links(&prompt.input) {
        let told = std::mem::replace(&mut draft, Box::new(Draft::of(Change::Nothing)));
        if let Err(ending) = Box::pin(fetch_links(engine, live, *told, &mut prompt)).await {
            return ending;
        }
    }
    let limits = &engine.settings;
    let max_turns = live.agent.max_turns;
    let mut offer = Offer::default();
    if !live.agent.mcp_servers.is_empty() {
        let is_new = left.is_none();
        offer = match Box::pin(ask_mcp(engine, live, &mut draft, is_new)).await {
            Ok(offer) => offer,
            Err(error) => return error.into(),
        };
        if let Some(why) = offer.required.take() {
            return match Box::pin(draft.write(engine, live)).await {
                Ok(()) => Ending::failed(endings::config(&why)),
                Err(error) => error.into(),
            };
        }
    }
    let hands = Hands {
        toolbox: Arc::new(resolve::toolbox(
            engine,
            &live.agent,
            &live.scope,
            live.workdir.dir(),
            offer,
        )),
        drive: drive_child,
    };
    let toolbox = &hands.toolbox;
    let offered = !toolbox.offered().is_empty();
    let Prompt { system, input, .. } = prompt;
    let mut talk = Conversation::new(
        input.earlier,
        input.message,
        max_turns,
        limits.runs.max_calls,
        limits.loop_warn,
        limits.loop_stop,
    );
    let recorded = left.as_ref().and_then(|left| left.compaction.clone());
    if let Some(compaction) = input.compaction.or(recorded) {
        talk.compact(compaction);
    }
    let bounds = RequestBounds::of(engine, live, &system, toolbox.offered());
    if let Some(left) = left {
        // Told at once: what comes next may take long.
        let told = std::mem::replace(&mut draft, Box::new(Draft::of(Change::Nothing)));
        let replayed = Box::pin(replay::replay(
            engine, live, state, &hands, *left, *told, &mut talk,
        ));
        match replayed.await {
            Ok(None) => {}
            Ok(Some(task)) => {
                return Box::pin(summary::ask(engine, live, state, &system, &mut talk, task)).await;
            }
            Err(ending) => return ending,
        }
    }
    // Only who thinks needs it.
    let prefix = LazyLock::new(|| echo::prefix(&system, toolbox.offered()));
    talk.drop_foreign_thinking(|| *prefix);
    let mut draft = Some(draft);
    loop {
        // One that waits for its batch still needs no slot.
        if !matches!(live.left_batch.get(), LeftBatch::Known(_))
            && let Err(error) = waiting::resume(engine, live).await
        {
            return error.into();
        }
        if let Some(bounds) = bounds.filter(|bounds| bounds.are_passed(&talk)) {
            let shortened =
                compaction::shorten(engine, live, state, &bounds, &mut talk, &mut draft);
            if let Err(ending) = Box::pin(shortened).await {
                return ending;
            }
        }
        let may_go_on = check(live).and_then(|()| fits(talk.messages(), limits.conversation_bytes));
        let mut entry = draft
            .take()
            .unwrap_or_else(|| Box::new(Draft::of(Change::Nothing)));
        let turn = match &may_go_on {
            Ok(()) => talk.next_turn(),
            Err(_) => 0,
        };
        if may_go_on.is_ok() {
            entry.events.push(EventKind::TurnStarted {
                turn,
                messages: talk.messages().len(),
                results: talk.results_pending(),
            });
        }
        let comes_first = entry.comes_first(live);
        // Boxed, as the next two are: a future keeps a place for each that it hands on, and thousands of runs wait here.
        let written = Box::pin(entry.write(engine, live));
        if let Err(error) = may_go_on {
            return match written.await {
                Ok(()) => failed_turn(live, error),
                Err(error) => error.into(),
            };
        }
        let question = Question {
            turn,
            system: &system,
            messages: talk.messages(),
            tools: toolbox.offered(),
            params: &live.agent.params,
            is_turn: true,
        };
        let mut streamed = Streamed::default();
        let asked = Box::pin(turn::take(engine, live, question, &mut streamed));
        let answered = match comes_first {
            true => first(written, asked).await,
            false => beside(written, asked).await,
        };
        let Answer { mut reply, asked } = match answered {
            Ok(answer) => answer,
            Err(error) => {
                if !streamed.text.is_empty() {
                    state.partial = Some(streamed.text);
                }
                return failed_turn(live, error);
            }
        };
        let tokens = reply.usage.unwrap_or_default();
        state.progress = Progress {
            turns: turn,
            model: reply.model.clone().unwrap_or(asked.model),
            stop_reason: reply.stop_reason.clone(),
            usage: live.usage().0,
        };
        let end = reply.end;
        talk.sign(&mut reply, || *prefix);
        let heard = talk.hear(reply, offered);
        let (Heard::Final(said) | Heard::Calls(said) | Heard::OutOfTurns(said)) = &heard;
        if !said.content.is_empty() {
            state.partial = Some(said.content.clone());
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
            tool_calls: said
                .tool_calls
                .iter()
                .map(|call| toolbox.called(call))
                .collect(),
        };
        if let Some(failure) = endings::no_answer(end, &said.content) {
            let message = said.clone();
            return Ending::failed(failure)
                .with(vec![Step::Reply { turn, message }], vec![completed]);
        }
        let said = match heard {
            Heard::Final(said) => {
                if let Some(wish) = summary::prompt(live) {
                    let task = said.content.clone();
                    let steps = vec![
                        Step::Reply {
                            turn,
                            message: said.clone(),
                        },
                        Step::Said {
                            content: wish.to_owned(),
                        },
                    ];
                    let change = Change::Progress(state.progress.clone());
                    let journal = &engine.journal;
                    if let Err(error) = journal.record(live, change, steps, vec![completed]).await {
                        return error.into();
                    }
                    talk.say_more(turn, said, wish.to_owned());
                    return Box::pin(summary::ask(engine, live, state, &system, &mut talk, task))
                        .await;
                }
                let mut unrecorded = Unrecorded {
                    steps: vec![Step::Reply {
                        turn,
                        message: said.clone(),
                    }],
                    events: vec![completed],
                };
                let checked =
                    final_text::check(engine, live, state, &said.content, &mut unrecorded);
                let structured = match Box::pin(checked).await {
                    Ok(Ok(structured)) => structured,
                    Ok(Err(errors)) => {
                        let Unrecorded { steps, events } = &mut unrecorded;
                        if !talk.may_repair() {
                            return Ending::failed(endings::output_invalid(&errors))
                                .with(std::mem::take(steps), std::mem::take(events));
                        }
                        let told = structured::repair(&errors);
                        steps.push(Step::Said {
                            content: told.clone(),
                        });
                        if let Err(ending) = unrecorded.record(engine, live, state).await {
                            return ending;
                        }
                        talk.say_more(turn, said, told);
                        continue;
                    }
                    Err(ending) => return ending,
                };
                let remembers = live.agent.memory.enabled;
                let remembers = remembers.then(|| engine.memories.next_time());
                let how = How::Completed {
                    content: said.content.clone(),
                    structured,
                    task: talk.task().into_owned(),
                    remembers,
                };
                if let Some(at) = remembers {
                    // Its memory is written between the reply and the end: a process that goes on there must find the
                    // reply, and not ask for another one, and know the entry by its time.
                    unrecorded.steps.push(Step::Remembers { at });
                    return match unrecorded.record(engine, live, state).await {
                        Ok(()) => Ending::of(how),
                        Err(ending) => ending,
                    };
                }
                return Ending::of(how).with(unrecorded.steps, unrecorded.events);
            }
            Heard::OutOfTurns(said) => {
                let ending = match live.agent.ad_hoc {
                    Some(_) => Ending::of(How::Incomplete),
                    None => Ending::failed(endings::max_turns(max_turns)),
                };
                return ending.with(
                    vec![Step::Reply {
                        turn,
                        message: said,
                    }],
                    vec![completed],
                );
            }
            Heard::Calls(said) => said,
        };
        let calls = said.tool_calls.clone();
        let reply = vec![Step::Reply {
            turn,
            message: said,
        }];
        let change = Change::Progress(state.progress.clone());
        if let Err(error) = engine
            .journal
            .record(live, change, reply, vec![completed])
            .await
        {
            return error.into();
        }
        if let Err(error) = check(live) {
            return failed_turn(live, error);
        }
        let results = calls.iter().map(|_| None).collect();
        let asked = Asked {
            turn,
            calls,
            results,
            begun: Arc::default(),
        };
        if let Err(ending) = Box::pin(answer(engine, live, &hands, asked, &mut talk)).await {
            return ending;
        }
    }
}

/// Fetches what the prompt names by URL, once the run's entry stands, and records the prompt with it: another process does
/// not fetch it again.
async fn fetch_links(
    engine: &Arc<Engine>,
    live: &LiveRun,
    told: Draft,
    prompt: &mut Prompt,
) -> Result<(), Ending> {
    told.write(engine, live).await?;
    let key = live.tree.owner.as_deref();
    let fetched = turn::bounded(live, links::fetch(engine, key, &mut prompt.input)).await;
    let fetched = fetched.map_err(|error| failed_turn(live, error))?;
    fetched.map_err(|why| Ending::failed(endings::config(&why)))?;
    let steps = prompt_steps(prompt).collect();
    let recorded = engine
        .journal
        .record(live, Change::Nothing, steps, Vec::new());
    recorded.await?;
    prompt.input.drop_data();
    Ok(())
}

fn prompt_steps(prompt: &Prompt) -> impl Iterator<Item = Step> {
    let Input {
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

/// Whether the conversation may be sent: it lies in memory, in the record and in every request.
fn fits(messages: &[Message], most: usize) -> Result<(), TurnError> {
    let bytes: usize = messages
        .iter()
        .map(|message| history::size(message) + history::attached(message))
        .sum();
    if bytes <= most {
        return Ok(());
    }
    let unit = "bytes of conversation (limits.conversation_bytes)";
    Err(TurnError::Budget(budget::exceeded(bytes, most, unit)))
}

/// The tools of the agent's MCP servers: those that they list now hold for the whole run.
async fn ask_mcp(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    draft: &mut Box<Draft>,
    is_new: bool,
) -> Result<Offer, StoreError> {
    if is_new {
        // A server may take long to answer: nobody waits that long to hear that the run was accepted.
        let told = std::mem::replace(draft, Box::new(Draft::of(Change::Nothing)));
        told.write(engine, live).await?;
    }
    // A run that is stopped meanwhile, or overdue, ends before its next turn.
    let offer = turn::bounded(live, engine.mcp.offer(&live.agent.mcp_servers)).await;
    let mut offer = offer.unwrap_or_default();
    let warnings = std::mem::take(&mut offer.warnings);
    for warning in &warnings {
        tracing::warn!(
            run.id = %live.scope.run, run.root = %live.scope.root, agent = %live.agent.name,
            depth = live.scope.depth.0, "{warning}"
        );
    }
    let warnings = warnings.into_iter();
    draft
        .events
        .extend(warnings.map(|message| EventKind::ToolsWarning { message }));
    Ok(offer)
}

/// Asks the model while the entry before it is being committed: what is asked for depends on nothing in it, and a
/// failed commit drops the request. The reply is not heard before the entry stands.
async fn beside(
    written: impl Future<Output = Result<(), StoreError>> + Unpin,
    asked: impl Future<Output = Result<Answer, TurnError>> + Unpin,
) -> Result<Answer, TurnError> {
    match select(written, asked).await {
        Either::Left((written, asked)) => {
            written?;
            asked.await
        }
        Either::Right((answer, written)) => {
            written.await?;
            answer
        }
    }
}

/// Asks the model when the entry before it stands.
async fn first(
    written: impl Future<Output = Result<(), StoreError>>,
    asked: impl Future<Output = Result<Answer, TurnError>>,
) -> Result<Answer, TurnError> {
    written.await?;
    asked.await
}

/// Drives a child, which has neither a slot nor a seat of its own.
fn drive_child<'a>(
    engine: &'a Arc<Engine>,
    live: &'a Arc<LiveRun>,
    run: Arc<Run>,
    input: Input,
    entry: Entry,
) -> BoxFuture<'a, Option<Arc<Run>>> {
    Box::pin(drive(engine, live, run, input, entry, Held::default()))
}
