//! The loop: drives one run, root or child, from its prompt to its end, and lends its tools the way to start children.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::domain::event::{CalledTool, EventKind};
use crate::domain::message::{ToolCall, ToolResult, shorten};
use crate::domain::run::{Run, RunId};
use crate::domain::structured;
use crate::domain::usage::Usage;
use crate::engine::ad_hoc;
use crate::engine::calls::{self, Batch, Unanswered};
use crate::engine::children::{self, Child};
use crate::engine::close::{self, Ending, How, State};
use crate::engine::conversation::{Conversation, Heard, Repeats};
use crate::engine::endings;
use crate::engine::entry::{Draft, Entry, begin};
use crate::engine::history;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::quotas::AtWork;
use crate::engine::recovery;
use crate::engine::remains::{self, Begun, Remains, Replied};
use crate::engine::resolve::{self, Input, Prompt};
use crate::engine::sessions::Held;
use crate::engine::turn::{self, Answer, Question, TurnError};
use crate::engine::waiting::{self, Call};
use crate::store::{Change, Progress, Step, StoreError};
use crate::tools::mcp::Offer;
use crate::tools::toolbox::Toolbox;
use crate::tools::{AdHocAsk, ChildAsk, Delegate};

/// Drives a run whose clock has been set to its end. Returns its final record; none where the record could not be
/// written, and then the run stays as it was last committed. A root's slot and its session are free before anybody
/// hears of its end, so that a caller who comes back at once finds them.
pub async fn drive(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    mut run: Arc<Run>,
    input: Input,
    entry: Entry,
    held: Held,
) -> Option<Arc<Run>> {
    let Held { slot, seat } = held;
    if let Some(slot) = slot {
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
    let closed = Box::pin(close::close(engine, live, run, state, ending)).await;
    if live.parent.is_none() {
        drop(live.tree.slot.take());
    }
    drop(seat);
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
    let mut left = match &mut entry {
        Entry::Resumed(remains) => Some(std::mem::take(remains)),
        Entry::Queued | Entry::New { .. } => None,
    };
    let recorded = left.as_mut().and_then(|left| left.prompt.take());
    let (prompt, draft) = match recorded {
        // A recorded prompt stays as it was, whatever the files say now.
        Some(prompt) => (prompt, Box::new(begin(engine, live, run, entry))),
        None => {
            if run.session.is_some() {
                input.earlier = match Box::pin(history::earlier(engine, run)).await {
                    Ok(earlier) => earlier,
                    Err(error) => return error.into(),
                };
            }
            let assembled = Box::pin(resolve::assemble(engine, &live.agent, input)).await;
            let mut draft = Box::new(begin(engine, live, run, entry));
            let prompt = match assembled {
                Ok(prompt) => prompt,
                Err(error) => {
                    return match Box::pin(draft.write(engine, live)).await {
                        Ok(()) => Ending::failed(endings::config(&error.to_string())),
                        Err(error) => error.into(),
                    };
                }
            };
            draft.steps.push(Step::Prompt {
                system: prompt.system.clone(),
                message: prompt.input.message.clone(),
                earlier: prompt.input.earlier.clone(),
            });
            if let Some(message) = prompt.memory_warning.clone() {
                draft.events.push(EventKind::MemoryWarning { message });
            }
            (prompt, draft)
        }
    };
    Box::pin(turns(engine, live, state, prompt, draft, left)).await
}

async fn turns(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    prompt: Prompt,
    mut draft: Box<Draft>,
    left: Option<Box<Remains>>,
) -> Ending {
    let limits = &engine.settings;
    let max_turns = live.agent.max_turns;
    let mut offer = Offer::default();
    if !live.agent.mcp_servers.is_empty() {
        let is_new = left.is_none();
        offer = match Box::pin(ask_mcp(engine, live, &mut draft, is_new)).await {
            Ok(offer) => offer,
            Err(error) => return error.into(),
        };
    }
    let toolbox = Arc::new(resolve::toolbox(engine, &live.agent, &live.scope, offer));
    let offered = !toolbox.offered().is_empty();
    let Prompt { system, input, .. } = prompt;
    let mut talk = Conversation::new(
        input.earlier,
        input.message,
        max_turns,
        limits.loop_warn,
        limits.loop_stop,
    );
    if let Some(left) = left {
        // Told at once: what comes next may take long.
        let told = std::mem::replace(&mut draft, Box::new(Draft::of(Change::Nothing)));
        let replayed = Box::pin(replay(
            engine, live, state, &toolbox, *left, *told, &mut talk,
        ));
        match replayed.await {
            Ok(None) => {}
            Ok(Some(task)) => {
                return Box::pin(sum_up(engine, live, state, &system, &talk, task)).await;
            }
            Err(ending) => return ending,
        }
    }
    let mut draft = Some(draft);
    loop {
        if let Err(error) = waiting::resume(engine, live).await {
            return error.into();
        }
        let may_go_on = check(live);
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
        };
        let asked = Box::pin(turn::take(engine, live, question));
        let answered = match comes_first {
            true => first(written, asked).await,
            false => beside(written, asked).await,
        };
        let Answer { reply, asked } = match answered {
            Ok(answer) => answer,
            Err(error) => return failed_turn(live, error),
        };
        let tokens = reply.usage.unwrap_or_default();
        state.progress = Progress {
            turns: turn,
            model: reply.model.clone().unwrap_or(asked.model),
            stop_reason: reply.stop_reason.clone(),
            usage: live.usage().0,
        };
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
            tool_calls: said.tool_calls.iter().map(CalledTool::from).collect(),
        };
        let said = match heard {
            Heard::Final(said) => {
                if let Some(wish) = summary_prompt(live) {
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
                    return Box::pin(sum_up(engine, live, state, &system, &talk, task)).await;
                }
                let format = &live.agent.params.response_format;
                let structured = match structured::check(format, &said.content) {
                    Ok(structured) => structured,
                    Err(errors) => {
                        let mut steps = vec![Step::Reply {
                            turn,
                            message: said.clone(),
                        }];
                        if !talk.may_repair() {
                            return Ending::failed(endings::output_invalid(&errors))
                                .with(steps, vec![completed]);
                        }
                        let told = structured::repair(&errors);
                        steps.push(Step::Said {
                            content: told.clone(),
                        });
                        let change = Change::Progress(state.progress.clone());
                        let journal = &engine.journal;
                        if let Err(error) =
                            journal.record(live, change, steps, vec![completed]).await
                        {
                            return error.into();
                        }
                        talk.say_more(turn, said, told);
                        continue;
                    }
                };
                let how = How::Completed {
                    content: said.content.clone(),
                    structured,
                    task: talk.task().to_owned(),
                };
                if live.agent.memory.enabled {
                    // Its memory is written between the reply and the end: a process that goes on there must find the
                    // reply, and not ask for another one.
                    let reply = vec![Step::Reply {
                        turn,
                        message: said,
                    }];
                    let change = Change::Progress(state.progress.clone());
                    return match engine
                        .journal
                        .record(live, change, reply, vec![completed])
                        .await
                    {
                        Ok(_) => Ending::of(how),
                        Err(error) => error.into(),
                    };
                }
                return Ending::of(how).with(
                    vec![Step::Reply {
                        turn,
                        message: said,
                    }],
                    vec![completed],
                );
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
        if let Err(ending) = Box::pin(answer(
            engine,
            live,
            &toolbox,
            asked,
            &mut talk,
            &state.progress,
        ))
        .await
        {
            return ending;
        }
    }
}

/// What an unnamed agent is asked when its task is done.
fn summary_prompt(live: &LiveRun) -> Option<&str> {
    live.agent.ad_hoc.as_ref()?.summary_prompt.as_deref()
}

/// Asks an unnamed agent to sum up: a turn without tools, which is not counted. Where it fails, the task's own text is
/// the result.
async fn sum_up(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    system: &str,
    talk: &Conversation,
    task: String,
) -> Ending {
    let done = |content| How::Completed {
        content,
        structured: false,
        task: talk.task().to_owned(),
    };
    let turn = talk.turn() + 1;
    let begun = EventKind::TurnStarted {
        turn,
        messages: talk.messages().len(),
        results: 0,
    };
    let question = Question {
        turn,
        system,
        messages: talk.messages(),
        tools: &[],
    };
    let answered = async {
        check(live)?;
        let journal = &engine.journal;
        let told = journal.record(live, Change::Nothing, Vec::new(), vec![begun]);
        told.await?;
        turn::take(engine, live, question).await
    };
    let Answer { reply, asked } = match answered.await {
        Ok(answer) => answer,
        Err(error @ (TurnError::Stopped | TurnError::Store(_))) => return failed_turn(live, error),
        Err(_) => return Ending::of(done(task)),
    };
    let tokens = reply.usage.unwrap_or_default();
    state.progress.model = reply.model.unwrap_or(asked.model);
    state.progress.stop_reason = reply.stop_reason;
    state.progress.usage = live.usage().0;
    let completed = EventKind::TurnCompleted {
        turn,
        model: state.progress.model.clone(),
        stop_reason: state.progress.stop_reason.clone(),
        input_tokens: tokens.input,
        output_tokens: tokens.output,
        cache_read_tokens: tokens.cache_read,
        cache_write_tokens: tokens.cache_write,
        tool_calls: Vec::new(),
    };
    let mut message = reply.message;
    message.tool_calls.clear();
    let content = match message.content.trim().is_empty() {
        true => task,
        false => message.content.clone(),
    };
    Ending::of(done(content)).with(vec![Step::Reply { turn, message }], vec![completed])
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
    let warnings = std::mem::take(&mut offer.warnings).into_iter();
    draft
        .events
        .extend(warnings.map(|message| EventKind::ToolsWarning { message }));
    Ok(offer)
}

/// Takes in what an earlier process recorded, and finishes what it had begun. Children that it began are driven to
/// their end even where this run is not to go on: it ends after them. Returns the task's text where only a summary is
/// still to be asked for.
async fn replay(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    toolbox: &Arc<Toolbox>,
    left: Remains,
    told: Draft,
    talk: &mut Conversation,
) -> Result<Option<String>, Ending> {
    let Remains {
        replies,
        calls: begun,
        ..
    } = left;
    if begun.last_turn > replies.last().map_or(0, |reply| reply.turn) {
        // The request that was under way is asked again; what the first one cost nobody will tell.
        live.spend(&Usage {
            unreported: 1,
            ..Usage::default()
        });
    }
    told.write(engine, live).await?;
    let begun = Arc::new(begun);
    let mut summed_up = None;
    for Replied {
        turn,
        message,
        results,
        told,
    } in replies
    {
        if !message.content.is_empty() {
            state.partial = Some(message.content.clone());
        }
        if message.tool_calls.is_empty() {
            let format = &live.agent.params.response_format;
            if let Some(told) = told {
                summed_up = summary_prompt(live).map(|_| message.content.clone());
                talk.say_more(turn, message, told);
                continue;
            }
            let content = match summed_up {
                Some(task) if message.content.trim().is_empty() => task,
                _ => message.content,
            };
            return Err(match structured::check(format, &content) {
                Ok(structured) => Ending::of(How::Completed {
                    content,
                    structured,
                    task: talk.task().to_owned(),
                }),
                Err(errors) => Ending::failed(endings::output_invalid(&errors)),
            });
        }
        let is_missing = results.iter().any(Option::is_none);
        let is_begun = |call: &ToolCall| {
            begun.started.contains(&call.id) || begun.requested.contains_key(&call.id)
        };
        if is_missing && !message.tool_calls.iter().any(is_begun) {
            // The other process had not come to look whether it may perform them.
            if let Err(error) = check(live) {
                return Err(failed_turn(live, error));
            }
        }
        let calls = message.tool_calls.clone();
        talk.hear_again(turn, message);
        let asked = Asked {
            turn,
            calls,
            results,
            begun: Arc::clone(&begun),
        };
        answer(engine, live, toolbox, asked, talk, &state.progress).await?;
    }
    Ok(summed_up)
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

/// The calls of one reply.
struct Asked {
    turn: u32,
    calls: Vec<ToolCall>,
    /// What an earlier process recorded.
    results: Vec<Option<ToolResult>>,
    /// What it had begun.
    begun: Arc<Begun>,
}

/// Performs the calls that have no result yet, and takes all results in.
async fn answer(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    toolbox: &Arc<Toolbox>,
    asked: Asked,
    talk: &mut Conversation,
    progress: &Progress,
) -> Result<(), Ending> {
    let Asked {
        turn,
        calls,
        results,
        begun,
    } = asked;
    let is_new = results.iter().any(Option::is_none);
    let is_old = begun.last_turn >= turn;
    let delegate = Arc::new(Caller::new(engine, live, &begun));
    let batch = Batch {
        engine: Arc::clone(engine),
        live: Arc::clone(live),
        toolbox: Arc::clone(toolbox),
        delegate,
        turn,
        progress: progress.clone(),
        begun,
    };
    let results = match calls::perform(batch, calls, results).await {
        Ok(results) => results,
        Err(Unanswered::Lost(error)) => return Err(error.into()),
        Err(Unanswered::Interrupted(tool)) => {
            let message = format!(
                "the daemon stopped while tool \"{tool}\" was at work; whether it did its work is not known, and it is \
                 not safe to repeat"
            );
            return Err(Ending::failed(endings::interrupted(&message)));
        }
    };
    if is_old {
        // What was refused before ends the run now as it would have then.
        for result in results.iter().filter(|result| result.is_error) {
            live.refuse_again(&result.content);
        }
    }
    match talk.answer(results) {
        Repeats::Fine => Ok(()),
        // Told by the process that took the last of the results in.
        Repeats::Hinted(_) if !is_new => Ok(()),
        Repeats::Hinted(repeats) => {
            let message =
                format!("the same tool calls gave the same results {repeats} times in a row");
            let warning = EventKind::LoopWarning {
                turn,
                repeats,
                message,
            };
            engine
                .journal
                .note(live, Change::Nothing, Vec::new(), vec![warning])
                .await?;
            Ok(())
        }
        Repeats::TooMany(repeats) => Err(Ending::failed(endings::looped(repeats))),
    }
}

/// Whether the run may go on: not cancelled, not overdue, its budget not spent.
fn check(live: &LiveRun) -> Result<(), TurnError> {
    if live.stop.is_cancelled() {
        return Err(TurnError::Stopped);
    }
    if live
        .deadline()
        .is_some_and(|deadline| deadline.at <= Instant::now())
    {
        return Err(TurnError::Overdue);
    }
    live.check_budgets().map_err(TurnError::Budget)
}

fn failed_turn(live: &LiveRun, error: TurnError) -> Ending {
    Ending::of(match error {
        TurnError::Stopped => How::Stopped,
        TurnError::Store(error) => How::Lost(error),
        TurnError::Overdue => How::Failed(endings::overdue(live.deadline())),
        TurnError::Budget(exceeded) => How::Failed(endings::budget(&exceeded)),
        TurnError::Provider(error) => How::Failed(endings::provider(&error)),
        TurnError::Unavailable(unavailable) => How::Failed(endings::unavailable(&unavailable)),
    })
}

/// The way up that a run lends to its tools.
struct Caller {
    engine: Arc<Engine>,
    live: Arc<LiveRun>,
    at_once: Option<Arc<Semaphore>>,
    begun: Arc<Begun>,
    /// The turns of children that an earlier process began, by call: nobody new comes before them.
    kept: Mutex<HashMap<String, OwnedSemaphorePermit>>,
}

impl Delegate for Caller {
    fn run_child<'a>(&'a self, ask: ChildAsk<'a>) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let call = ask.tool_call_id;
            let ended = match self.begun.children.get(call) {
                Some(child) if child.status.is_terminal() => Arc::new(child.clone()),
                Some(child) => self.go_on(child).await?,
                None => {
                    let make = |id| children::prepare(&self.engine, &self.live, &ask, id);
                    self.start(call, ask.task, make).await?
                }
            };
            let outcome = children::result(&ended);
            self.tell_returned(call, &ended, &outcome).await?;
            outcome
        })
    }

    fn check_quota<'a>(&'a self, call: &'a str) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let (agent, tree) = (&self.live.agent, &self.live.tree);
            let read = ad_hoc::read_quotas(&self.engine, &self.live).await;
            read.map_err(|error| ad_hoc::failed(&error.to_string()))?;
            if self.begun.children.contains_key(call) {
                // It was let in by an earlier process.
                return Ok(());
            }
            let settings = ad_hoc::settings(agent);
            tree.quotas.check(&agent.name, &settings, &tree.budgets)
        })
    }

    fn run_ad_hoc<'a>(&'a self, ask: AdHocAsk<'a>) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let call = ask.tool_call_id;
            let ended = match self.begun.children.get(call) {
                Some(child) if child.status.is_terminal() => Arc::new(child.clone()),
                Some(child) => {
                    let _time = self.time_of(child.id);
                    self.go_on(child)
                        .await
                        .map_err(|why| ad_hoc::failed(&why))?
                }
                None => {
                    let (agent, tree) = (&self.live.agent, &self.live.tree);
                    let settings = ad_hoc::settings(agent);
                    // Several that were checked at once may come here; the quota lets in as many as it has room for.
                    tree.quotas.take(&agent.name, &settings, &tree.budgets)?;
                    let mut time = None;
                    let make = |id| {
                        time = self.time_of(id);
                        children::prepare_ad_hoc(&self.engine, &self.live, &ask, id)
                    };
                    let ended = self.start(call, ask.task, make).await;
                    ended.map_err(|why| ad_hoc::failed(&why))?
                }
            };
            let outcome = ad_hoc::result(&ended);
            self.tell_returned(call, &ended, &outcome).await?;
            outcome
        })
    }
}

impl Caller {
    fn new(engine: &Arc<Engine>, live: &Arc<LiveRun>, begun: &Arc<Begun>) -> Self {
        let at_once = live.agent.delegation.max_concurrent;
        let at_once = at_once.map(|most| Arc::new(Semaphore::new(most)));
        let under_way = begun
            .children
            .iter()
            .filter(|(_, child)| !child.status.is_terminal());
        let kept = under_way.filter_map(|(call, _)| {
            let permit = Arc::clone(at_once.as_ref()?).try_acquire_owned().ok()?;
            Some((call.clone(), permit))
        });
        let kept = Mutex::new(kept.collect());
        Self {
            engine: Arc::clone(engine),
            live: Arc::clone(live),
            at_once,
            begun: Arc::clone(begun),
            kept,
        }
    }

    /// Lets the time of an unnamed child run; that of one below another is in that one's.
    fn time_of(&self, child: RunId) -> Option<AtWork<'_>> {
        let agent = &self.live.agent;
        let is_outermost = agent.ad_hoc.is_none();
        is_outermost.then(|| self.live.tree.quotas.time(&agent.name, child))
    }

    /// Makes a child under the id it is given, and drives it to its end.
    async fn start(
        &self,
        call: &str,
        task: &str,
        make: impl FnOnce(RunId) -> Result<Child, String>,
    ) -> Result<Arc<Run>, String> {
        let Self {
            engine,
            at_once,
            begun,
            ..
        } = self;
        let _turn = match at_once {
            Some(at_once) => Some(self.turn_of(at_once).await?),
            None => None,
        };
        // An earlier process may have told of the child and ended before it opened it.
        let told = begun.called.get(call).copied();
        let Child {
            live: child,
            run,
            message,
        } = make(told.unwrap_or_default())?;
        let called = EventKind::AgentCalled {
            tool_call_id: call.to_owned(),
            child_id: child.scope.run,
            child_agent: child.agent.name.clone(),
            child_depth: child.scope.depth.0,
            task: shorten(task, 80),
        };
        if told.is_none() {
            self.tell(called).await?;
        }
        engine.live.add(&child);
        engine.metrics.child_started(child.scope.depth.0);
        let entry = Entry::New {
            accepted: None,
            claim: None,
        };
        drive(
            engine,
            &child,
            run,
            Input::from(message),
            entry,
            Held::default(),
        )
        .await
        .ok_or_else(unrecorded)
    }

    /// Waits until fewer than `max_concurrent` children are there. Where all of those wait for a person, so does this run.
    async fn turn_of<'s>(&self, at_once: &'s Semaphore) -> Result<SemaphorePermit<'s>, String> {
        let Self { engine, live, .. } = self;
        if let Ok(turn) = at_once.try_acquire() {
            return Ok(turn);
        }
        let unwritten = |error: StoreError| error.to_string();
        let rested = waiting::rest(engine, live, Call::Queues, None).await;
        rested.map_err(unwritten)?;
        let turn = waiting::until(live, at_once.acquire()).await;
        let going = waiting::go(engine, live, Call::Queues).await;
        going.map_err(unwritten)?;
        let turn = turn.map_err(|error| children::why_not_started(live, &error))?;
        turn.map_err(|error| error.to_string())
    }

    /// Goes on with a child that an earlier process left unfinished.
    async fn go_on(&self, child: &Run) -> Result<Arc<Run>, String> {
        let Self { engine, live, .. } = self;
        let call = child.tool_call_id.as_deref().unwrap_or_default();
        let _turn = self
            .kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(call);
        let callers = match child.label {
            Some(_) => ad_hoc::accounts(live),
            None => live.accounts.clone(),
        };
        let remains = remains::load(engine, child)
            .await
            .map_err(|error| error.to_string())?;
        // From here on it is driven to its end, which takes it off the list again.
        let Some((child, run)) = engine.left.hand_over(engine, child.id, live, &callers) else {
            recovery::interrupt(engine, child.id, None)
                .await
                .map_err(|error| error.to_string())?;
            let ended = engine
                .journal
                .store()
                .run(child.id)
                .await
                .map_err(|error| error.to_string())?;
            return ended.map(Arc::new).ok_or_else(unrecorded);
        };
        let input = Input::from(run.input.clone());
        let entry = Entry::Resumed(Box::new(remains));
        drive(engine, &child, Arc::new(run), input, entry, Held::default())
            .await
            .ok_or_else(unrecorded)
    }

    /// Tells of a child's end, unless an earlier process has.
    async fn tell_returned(
        &self,
        call: &str,
        ended: &Run,
        outcome: &Result<String, String>,
    ) -> Result<(), String> {
        match self.begun.returned.contains(call) {
            true => Ok(()),
            false => self.tell(children::returned(call, ended, outcome)).await,
        }
    }

    async fn tell(&self, kind: EventKind) -> Result<(), String> {
        let told = self
            .engine
            .journal
            .note(&self.live, Change::Nothing, Vec::new(), vec![kind])
            .await;
        told.map_err(|error| format!("its run could not be recorded: {error}"))
    }
}

fn unrecorded() -> String {
    "its run could not be recorded".to_owned()
}
