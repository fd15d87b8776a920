//! The loop: drives one run, root or child, from its prompt to its end, and lends its tools the way to start children.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, select};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use crate::domain::event::{CalledTool, EventKind};
use crate::domain::message::{AssistantMessage, Message, shorten};
use crate::domain::run::{Run, Status, now};
use crate::engine::calls::{self, Batch};
use crate::engine::children::{self, Child};
use crate::engine::close::{self, Ending, How, State};
use crate::engine::conversation::{Conversation, Heard, Repeats};
use crate::engine::endings;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::resolve::{self, Prompt};
use crate::engine::turn::{self, Answer, Question, TurnError};
use crate::store::{Change, Progress, Step, StoreError};
use crate::tools::{ChildAsk, Delegate};

/// Who is told that a root run has been committed.
pub type Accepted = oneshot::Sender<Result<Arc<Run>, StoreError>>;

/// How a run enters the record.
pub enum Entry {
    /// It stands there already, queued.
    Queued,
    /// Accepted and started in one transaction; a root's caller waits for it.
    New(Option<Accepted>),
}

/// Drives a run whose clock has been set to its end. Returns its final record; none where the record could not be
/// written, and then the run stays as it was last committed.
pub async fn drive(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    mut run: Arc<Run>,
    message: String,
    entry: Entry,
) -> Option<Arc<Run>> {
    let mut state = State {
        progress: Progress {
            model: run.model.clone(),
            ..Progress::default()
        },
        partial: None,
    };
    let work = attempt(engine, live, &mut run, &mut state, message, entry);
    let ending = match AssertUnwindSafe(work).catch_unwind().await {
        Ok(ending) => ending,
        Err(_) => Ending::failed(endings::internal("panicked")),
    };
    let closed = close::close(engine, live, run, state, ending).await;
    close::leave(engine, live, closed)
}

/// What waits to be written with the next entry.
struct Draft {
    change: Change,
    steps: Vec<Step>,
    events: Vec<EventKind>,
    accepted: Option<(Accepted, Arc<Run>)>,
}

impl Draft {
    fn of(change: Change) -> Self {
        Self {
            change,
            steps: Vec::new(),
            events: Vec::new(),
            accepted: None,
        }
    }

    async fn write(self, engine: &Engine, live: &LiveRun) -> Result<(), StoreError> {
        let Self {
            change,
            steps,
            events,
            accepted,
        } = self;
        match accepted {
            None => engine.journal.note(live, change, steps, events).await,
            Some((accepted, run)) => {
                let committed = engine
                    .journal
                    .record(live, change, steps, events)
                    .await
                    .map(drop);
                // A caller that went away does not stop the run.
                let _ = accepted.send(committed.clone().map(|()| run));
                committed
            }
        }
    }
}

async fn attempt(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    run: &mut Arc<Run>,
    state: &mut State,
    message: String,
    entry: Entry,
) -> Ending {
    let assembled = resolve::assemble(engine, &live.agent, message).await;
    let mut draft = begin(live, run, entry);
    let prompt = match assembled {
        Ok(prompt) => prompt,
        Err(error) => {
            return match draft.write(engine, live).await {
                Ok(()) => Ending::failed(endings::config(&error.to_string())),
                Err(error) => error.into(),
            };
        }
    };
    draft.steps.push(Step::Prompt {
        system: prompt.system.clone(),
        message: prompt.message.clone(),
    });
    if let Some(message) = prompt.memory_warning.clone() {
        draft.events.push(EventKind::MemoryWarning { message });
    }
    turns(engine, live, state, prompt, draft).await
}

/// The entry that starts the run.
fn begin(live: &LiveRun, run: &mut Arc<Run>, entry: Entry) -> Draft {
    let at = now();
    let record = Arc::make_mut(run);
    record.status = Status::Running;
    record.started_at = Some(at);
    let started = EventKind::RunStarted {
        model: live.agent.model.to_string(),
        agent_version: live.agent.version.clone(),
    };
    match entry {
        Entry::Queued => Draft {
            events: vec![started],
            ..Draft::of(Change::Start { at })
        },
        Entry::New(accepted) => {
            let queued = EventKind::RunQueued {
                parent_id: run.parent_id,
                tool_call_id: run.tool_call_id.clone(),
            };
            Draft {
                events: vec![queued, started],
                accepted: accepted.map(|accepted| (accepted, Arc::clone(run))),
                ..Draft::of(Change::Open(Arc::clone(run)))
            }
        }
    }
}

async fn turns(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    state: &mut State,
    prompt: Prompt,
    draft: Draft,
) -> Ending {
    let limits = &engine.settings;
    let max_turns = live.agent.max_turns;
    let toolbox = Arc::new(resolve::toolbox(engine, &live.agent, &live.scope));
    let offered = !toolbox.offered().is_empty();
    let Prompt {
        system, message, ..
    } = prompt;
    let mut talk = Conversation::new(message, max_turns, limits.loop_warn, limits.loop_stop);
    let mut draft = Some(draft);
    loop {
        let may_go_on = check(live);
        let mut entry = draft.take().unwrap_or_else(|| Draft::of(Change::Nothing));
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
        let written = entry.write(engine, live);
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
        let Answer { reply, asked } =
            match beside(written, turn::take(engine, live, question)).await {
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
                let how = How::Completed {
                    content: said.content.clone(),
                    task: first_message(&talk),
                };
                return Ending::of(how).with(
                    vec![Step::Reply {
                        turn,
                        message: said,
                    }],
                    vec![completed],
                );
            }
            Heard::OutOfTurns(said) => {
                return Ending::failed(endings::max_turns(max_turns)).with(
                    vec![Step::Reply {
                        turn,
                        message: said,
                    }],
                    vec![completed],
                );
            }
            Heard::Calls(said) => said,
        };
        match perform(
            engine,
            live,
            &toolbox,
            turn,
            said,
            completed,
            &mut talk,
            &state.progress,
        )
        .await
        {
            Ok(()) => {}
            Err(ending) => return ending,
        }
    }
}

/// Asks the model while the entry before it is being committed: what is asked for depends on nothing in it, and a
/// failed commit drops the request. The reply is not heard before the entry stands.
async fn beside(
    written: impl Future<Output = Result<(), StoreError>>,
    asked: impl Future<Output = Result<Answer, TurnError>>,
) -> Result<Answer, TurnError> {
    let (written, asked) = (pin!(written), pin!(asked));
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

/// Records a reply that asks for tools, performs its calls and takes their results in.
#[expect(
    clippy::too_many_arguments,
    reason = "one turn's whole context, used once"
)]
async fn perform(
    engine: &Arc<Engine>,
    live: &Arc<LiveRun>,
    toolbox: &Arc<crate::tools::toolbox::Toolbox>,
    turn: u32,
    said: AssistantMessage,
    completed: EventKind,
    talk: &mut Conversation,
    progress: &Progress,
) -> Result<(), Ending> {
    let calls = said.tool_calls.clone();
    let reply = vec![Step::Reply {
        turn,
        message: said,
    }];
    engine
        .journal
        .record(
            live,
            Change::Progress(progress.clone()),
            reply,
            vec![completed],
        )
        .await?;
    check(live).map_err(|error| failed_turn(live, error))?;
    let at_once = live.agent.delegation.max_concurrent.map(Semaphore::new);
    let delegate = Arc::new(Caller {
        engine: Arc::clone(engine),
        live: Arc::clone(live),
        at_once,
    });
    let batch = Batch {
        engine: Arc::clone(engine),
        live: Arc::clone(live),
        toolbox: Arc::clone(toolbox),
        delegate,
        turn,
        progress: progress.clone(),
    };
    let results = calls::perform(batch, calls).await?;
    match talk.answer(results) {
        Repeats::Fine => Ok(()),
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

fn first_message(talk: &Conversation) -> String {
    match talk.messages().first() {
        Some(Message::User { content }) => content.clone(),
        _ => String::new(),
    }
}

/// The way up that a run lends to its tools.
struct Caller {
    engine: Arc<Engine>,
    live: Arc<LiveRun>,
    at_once: Option<Semaphore>,
}

impl Delegate for Caller {
    fn run_child<'a>(&'a self, ask: ChildAsk<'a>) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let Self {
                engine,
                live,
                at_once,
            } = self;
            let _turn = match at_once {
                Some(at_once) => {
                    let waited = turn::bounded(live, at_once.acquire()).await;
                    waited
                        .map_err(|error| children::why_not_started(live, &error))?
                        .ok()
                }
                None => None,
            };
            let Child {
                live: child,
                run,
                message,
            } = children::prepare(engine, live, &ask)?;
            let called = EventKind::AgentCalled {
                tool_call_id: ask.tool_call_id.to_owned(),
                child_id: child.scope.run,
                child_agent: child.agent.name.clone(),
                child_depth: child.scope.depth.0,
                task: shorten(ask.task, 80),
            };
            let unrecorded = |error: StoreError| format!("its run could not be recorded: {error}");
            engine
                .journal
                .note(live, Change::Nothing, Vec::new(), vec![called])
                .await
                .map_err(unrecorded)?;
            engine.live.add(&child);
            let ended = drive(engine, &child, run, message, Entry::New(None)).await;
            let ended = ended.ok_or_else(|| "its run could not be recorded".to_owned())?;
            let outcome = children::result(&ended);
            let returned = children::returned(ask.tool_call_id, &ended, &outcome);
            engine
                .journal
                .note(live, Change::Nothing, Vec::new(), vec![returned])
                .await
                .map_err(unrecorded)?;
            outcome
        })
    }
}
