//! What a run lends to its tools so that they can start children: creates child runs, drives them through a function
//! that it is given, and records their calls and ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::domain::event::EventKind;
use crate::domain::message::shorten;
use crate::domain::run::{Run, RunId};
use crate::engine::admission::acceptance::Acceptance;
use crate::engine::admission::run_permits::RunPermits;
use crate::engine::approval::{pause, question, world_wait};
use crate::engine::cluster::connection;
use crate::engine::context::RunContext;
use crate::engine::history::run_log::{self, RecordedCalls, ReturnedIn};
use crate::engine::recovery;
use crate::engine::recovery::interrupted_runs;
use crate::engine::run_loop::delegation::ad_hoc;
use crate::engine::run_loop::delegation::background;
use crate::engine::run_loop::delegation::child_result;
use crate::engine::run_loop::delegation::child_run::{self, ChildRun};
use crate::engine::run_loop::finish;
use crate::engine::run_loop::recall;
use crate::engine::run_loop::start::RunStart;
use crate::engine::state::ad_hoc_quotas::ChildTimer;
use crate::engine::state::background::ChildProgress;
use crate::engine::state::failures;
use crate::engine::state::pause::PauseReason;
use crate::engine::state::prompt::RunInput;
use crate::engine::state::root_permit::ChildPermit;
use crate::engine::state::turn_error::TurnError;
use crate::store::{Change, StoreError};
use crate::tools::{
    AdHocRequest, AgentEnd, AnswerToQuestion, AskRequest, AwaitRequest, ChildRequest, Delegate,
    WaitRequest,
};

/// The loop, as a function that drives a child.
pub type DriveFn =
    for<'a> fn(&'a RunContext, Arc<Run>, RunInput, RunStart) -> BoxFuture<'a, Option<Arc<Run>>>;

pub struct RunDelegate {
    context: RunContext,
    /// The turn whose reply made the calls.
    turn: u32,
    child_permits: Option<Arc<Semaphore>>,
    recorded_calls: Arc<RecordedCalls>,
    /// Permits of children that an earlier process started, by call. New children wait behind them.
    reserved_permits: Mutex<HashMap<String, OwnedSemaphorePermit>>,
    drive: DriveFn,
}

impl Delegate for RunDelegate {
    fn wait_until_connected(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if connection::wait_until_connected(&self.context)
                .await
                .is_err()
            {
                // The run is suspended, which ends the call.
                std::future::pending().await
            }
        })
    }

    fn run_child<'a>(&'a self, request: ChildRequest<'a>) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let call = request.tool_call_id;
            let run = match self.recorded_calls.children.get(call) {
                Some(child) if request.background => return Ok(background::started(child)),
                Some(child) if child.status.is_terminal() => Arc::new(child.clone()),
                Some(child) => self.resume(child).await?,
                None => {
                    let checked = child_run::check_task(&self.context, self.turn, &request);
                    let checked = checked.await?;
                    let task = checked.task.clone();
                    let prepare =
                        |id| child_run::prepare(&self.context, self.turn, &request, checked, id);
                    if request.background {
                        return self.start_in_background(call, &task, prepare).await;
                    }
                    self.start_child(call, &task, prepare).await?
                }
            };
            let outcome = child_result::result(&run);
            self.record_returned(call, &run, &outcome).await?;
            outcome
        })
    }

    fn check_quota<'a>(&'a self, call: &'a str) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let tree = &self.context.run.tree;
            let restored = ad_hoc::restore_quotas(&self.context).await;
            restored.map_err(|error| {
                child_result::failure_message(&handle_store_error(&self.context, error))
            })?;
            if self.recorded_calls.children.contains_key(call) {
                // An earlier process has admitted this call.
                return Ok(());
            }
            let quota_settings = ad_hoc::quota_settings(&self.context.run);
            tree.ad_hoc_quotas.check(&quota_settings, &tree.budgets)
        })
    }

    fn run_ad_hoc<'a>(
        &'a self,
        request: AdHocRequest<'a>,
    ) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let call = request.tool_call_id;
            let run = match self.recorded_calls.children.get(call) {
                Some(child) if request.background => return Ok(background::started(child)),
                Some(child) if child.status.is_terminal() => Arc::new(child.clone()),
                Some(child) => {
                    let _time_guard = track_time(&self.context, child.id);
                    self.resume(child)
                        .await
                        .map_err(|reason| child_result::failure_message(&reason))?
                }
                None => {
                    let tree = &self.context.run.tree;
                    let quota_settings = ad_hoc::quota_settings(&self.context.run);
                    // Several calls that passed `check_quota` may arrive here at once; the quota admits only as many as
                    // it allows.
                    tree.ad_hoc_quotas
                        .try_add_child(&quota_settings, &tree.budgets)?;
                    let mut time_guard = None;
                    let mut is_refused = true;
                    let prepare = |id| {
                        if !request.background {
                            time_guard = track_time(&self.context, id);
                        }
                        let prepared = child_run::prepare_ad_hoc(&self.context, &request, id);
                        is_refused = prepared.is_err();
                        prepared
                    };
                    let result = match request.background {
                        true => {
                            let started = self.start_in_background(call, request.task, prepare);
                            started.await.map(AdHocStart::InBackground)
                        }
                        false => {
                            let ended = self.start_child(call, request.task, prepare);
                            ended.await.map(AdHocStart::Ended)
                        }
                    };
                    if is_refused {
                        tree.ad_hoc_quotas.uncount_child();
                    }
                    match result.map_err(|reason| child_result::failure_message(&reason))? {
                        AdHocStart::Ended(run) => run,
                        AdHocStart::InBackground(started) => return Ok(started),
                    }
                }
            };
            let outcome = child_result::ad_hoc_result(&run);
            self.record_returned(call, &run, &outcome).await?;
            outcome
        })
    }

    fn await_agents<'a>(
        &'a self,
        request: AwaitRequest<'a>,
    ) -> BoxFuture<'a, Result<Vec<AgentEnd>, String>> {
        Box::pin(async move {
            let ends = background::await_ends(&self.context, request).await;
            ends.map_err(|error| handle_store_error(&self.context, error))?
        })
    }

    fn cancel_agent(&self, run: RunId) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let cancelled = background::cancel(&self.context, run).await;
            // A cancel is a request: the run goes on without it.
            cancelled.map_err(|error| error.to_string())?
        })
    }

    fn wait(&self, request: WaitRequest) -> BoxFuture<'_, Result<Option<Arc<RawValue>>, String>> {
        Box::pin(async move {
            let waited = world_wait::wait(&self.context, &self.recorded_calls, self.turn, request);
            let end = waited.await;
            end.map_err(|error| handle_store_error(&self.context, error))?
        })
    }

    fn wait_began(&self, call: &str) -> Option<Timestamp> {
        let requested = self.recorded_calls.inputs_requested.get(call);
        requested.map(|requested| requested.time)
    }

    fn ask(&self, request: AskRequest) -> BoxFuture<'_, Result<AnswerToQuestion, String>> {
        Box::pin(async move {
            let answer = question::ask(&self.context, &self.recorded_calls, self.turn, request);
            let answer = answer.await;
            answer.map_err(|error| handle_store_error(&self.context, error))?
        })
    }

    fn recall<'a>(&'a self, query: &'a str, limit: usize) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let result = recall::search(
                &self.context.engine,
                self.context.run.scope.run,
                query,
                limit,
            )
            .await;
            result.map_err(|error| format!("the record could not be read: {error}"))
        })
    }
}

impl RunDelegate {
    /// For the calls of one reply of this run. `drive` drives the children.
    pub fn new(
        context: &RunContext,
        turn: u32,
        recorded_calls: &Arc<RecordedCalls>,
        drive: DriveFn,
    ) -> Self {
        let max_concurrent = context.run.agent.delegation.max_concurrent;
        let child_permits = max_concurrent.map(|max| Arc::new(Semaphore::new(max)));
        let unfinished = recorded_calls.children.iter().filter(|(call, child)| {
            !child.status.is_terminal() && !recorded_calls.background.contains(*call)
        });
        let permits = unfinished.filter_map(|(call, _)| {
            let permit = Arc::clone(child_permits.as_ref()?)
                .try_acquire_owned()
                .ok()?;
            Some((call.clone(), permit))
        });
        let reserved_permits = Mutex::new(permits.collect());
        Self {
            context: context.clone(),
            turn,
            child_permits,
            recorded_calls: Arc::clone(recorded_calls),
            reserved_permits,
            drive,
        }
    }

    /// Creates a child under the id that `prepare` is given, and drives it to its end.
    async fn start_child(
        &self,
        call: &str,
        task: &str,
        prepare: impl FnOnce(RunId) -> Result<ChildRun, String>,
    ) -> Result<Arc<Run>, String> {
        let _permit = match &self.child_permits {
            Some(child_permits) => Some(self.acquire_child_permit(child_permits).await?),
            None => None,
        };
        let begun = self.begin_child(call, task, prepare, None).await?;
        begun.drive(self.drive).await.ok_or_else(unrecorded_message)
    }

    /// As [`RunDelegate::start_child`], but returns once the child is recorded. It is driven in a task of its own.
    async fn start_in_background(
        &self,
        call: &str,
        task: &str,
        prepare: impl FnOnce(RunId) -> Result<ChildRun, String>,
    ) -> Result<String, String> {
        let Self { context, drive, .. } = self;
        let permit = match &context.run.background().permits {
            Some(permits) => {
                let acquired = background::acquire(context, Arc::clone(permits)).await;
                Some(acquired.map_err(|error| match error {
                    TurnError::Store(error) => handle_store_error(context, error),
                    error => failures::interruption_message(&context.run, &error),
                })?)
            }
            None => None,
        };
        let (acceptance, accepted) = Acceptance::new(None, None);
        let begun = self
            .begin_child(call, task, prepare, Some(acceptance))
            .await?;
        let run = Arc::clone(&begun.run);
        let (parent, drive) = (context.clone(), *drive);
        background::spawn(context, call, run.id, async move {
            let _permit = permit;
            let is_ad_hoc = begun.run.label.is_some();
            let _time_guard = is_ad_hoc.then(|| track_time(&parent, begun.run.id));
            begun.drive(drive).await
        });
        match accepted.await {
            Ok(Ok(_)) => Ok(background::started(&run)),
            Ok(Err(error)) => Err(handle_store_error(context, error)),
            Err(_) => Err(unrecorded_message()),
        }
    }

    /// Creates a child under the id that `prepare` is given, and records the call. The child's first commit answers `acceptance`.
    async fn begin_child(
        &self,
        call: &str,
        task: &str,
        prepare: impl FnOnce(RunId) -> Result<ChildRun, String>,
        acceptance: Option<Acceptance>,
    ) -> Result<BegunChild, String> {
        let Self {
            context,
            recorded_calls,
            ..
        } = self;
        let engine = &context.engine;
        // An earlier process may have recorded the call and stopped before it created the child.
        let recorded_id = recorded_calls.delegated.get(call).copied();
        let root_permit = &self.context.run.tree.root_permit;
        let child_permit = match recorded_id {
            Some(_) => Some(root_permit.restore_child()),
            None => root_permit.add_child(),
        };
        let child_permit = child_permit.ok_or_else(|| {
            let max_live = engine.settings.runs.max_live;
            match self.context.run.tree.owner {
                Some(_) => format!(
                    "this task's API key is at its current limit of active runs, of {max_live} in total"
                ),
                None => format!("the server has {max_live} active runs, the maximum that it allows"),
            }
        })?;
        let ChildRun {
            active_run: child,
            run,
            message,
        } = prepare(recorded_id.unwrap_or_default())?;
        if let Some(playback) = context.playback() {
            let (parent, child) = (context.run.scope.run, &child);
            playback.start_child(parent, call, child.scope.run, &child.agent.name);
        }
        let called_event = EventKind::AgentCalled {
            tool_call_id: call.to_owned(),
            child_id: child.scope.run,
            child_agent: child.agent.name.clone(),
            child_depth: child.scope.depth.0,
            task: shorten(task, 80),
            background: acceptance.is_some(),
        };
        if recorded_id.is_none() {
            self.record_event(called_event).await?;
        }
        engine.active_runs.add(&child);
        engine.metrics.child_started(child.scope.depth.0);
        Ok(BegunChild {
            context: RunContext::new(engine, &child),
            run,
            input: RunInput::from(message),
            acceptance,
            _permit: child_permit,
        })
    }

    /// Waits until fewer than `max_concurrent` children are running. Meanwhile this run does not count as running, so
    /// that it pauses if all those children pause.
    async fn acquire_child_permit<'s>(
        &self,
        child_permits: &'s Semaphore,
    ) -> Result<SemaphorePermit<'s>, String> {
        let Self { context, .. } = self;
        if let Ok(permit) = child_permits.try_acquire() {
            return Ok(permit);
        }
        let paused = pause::pause(context, PauseReason::Queue, None).await;
        paused.map_err(|error| handle_store_error(&self.context, error))?;
        let permit = pause::within_deadline(&context.run, child_permits.acquire()).await;
        let unpaused = pause::unpause(context, PauseReason::Queue).await;
        unpaused.map_err(|error| handle_store_error(&self.context, error))?;
        let permit =
            permit.map_err(|error| failures::interruption_message(&context.run, &error))?;
        permit.map_err(|error| error.to_string())
    }

    /// Resumes a child that an earlier process left unfinished, and for which a call waits.
    async fn resume(&self, child: &Run) -> Result<Arc<Run>, String> {
        let call = child.tool_call_id.as_deref().unwrap_or_default();
        let _permit = self
            .reserved_permits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(call);
        resume_child(&self.context, child, self.drive).await
    }

    /// Records a child's end, unless an earlier process has.
    async fn record_returned(
        &self,
        call: &str,
        run: &Run,
        outcome: &Result<String, String>,
    ) -> Result<(), String> {
        match self.recorded_calls.returned.contains_key(call) {
            true => Ok(()),
            false => {
                let returned_in = ReturnedIn::default();
                let returned = child_result::returned_event(call, run, outcome, returned_in);
                self.record_event(returned).await
            }
        }
    }

    async fn record_event(&self, kind: EventKind) -> Result<(), String> {
        let result = self
            .context
            .engine
            .journal
            .enqueue(&self.context.run, Change::Unchanged, vec![kind.into()])
            .await;
        result.map_err(|error| handle_store_error(&self.context, error))
    }
}

/// A child that is recorded with its first commit.
struct BegunChild {
    context: RunContext,
    run: Arc<Run>,
    input: RunInput,
    acceptance: Option<Acceptance>,
    _permit: ChildPermit,
}

impl BegunChild {
    async fn drive(self, drive: DriveFn) -> Option<Arc<Run>> {
        let start = RunStart::New {
            acceptance: self.acceptance,
            claim: None,
            request: None,
        };
        drive(&self.context, self.run, self.input, start).await
    }
}

enum AdHocStart {
    Ended(Arc<Run>),
    InBackground(String),
}

/// Starts the timer of an ad-hoc child, unless an ad-hoc ancestor's timer already covers it.
fn track_time(context: &RunContext, child: RunId) -> Option<ChildTimer<'_>> {
    let mut runs = context.run.self_and_ancestors();
    let is_within_ad_hoc = runs.any(|run| run.agent.ad_hoc.is_some());
    (!is_within_ad_hoc).then(|| context.run.tree.ad_hoc_quotas.start_timer(child))
}

/// Resumes the children that an earlier process left in the background, and restores which of their ends are delivered.
pub async fn recover_background(
    context: &RunContext,
    recorded_calls: &RecordedCalls,
    drive: DriveFn,
) -> Result<(), StoreError> {
    let children = recorded_calls.background.iter();
    let children = children.filter_map(|call| recorded_calls.children.get_key_value(call));
    let mut children: Vec<(&String, &Run)> = children.collect();
    children.sort_by_key(|(_, child)| (child.finished_at, child.id));
    if children.iter().any(|(_, child)| child.label.is_some()) {
        ad_hoc::restore_quotas(context).await?;
    }
    for (call, child) in children {
        let run = &context.run;
        let progress = match recorded_calls.returned.get(call) {
            Some(returned_in) => match &returned_in.awaited_by {
                Some(by) if !recorded_calls.completed.contains(by) => ChildProgress::Claimed {
                    run: Arc::new(child.clone()),
                    by: by.clone(),
                },
                _ => ChildProgress::Delivered,
            },
            None if child.status.is_terminal() => ChildProgress::Ended(Arc::new(child.clone())),
            None => {
                let permits = run.background().permits.as_ref();
                let permit = permits.and_then(|it| Arc::clone(it).try_acquire_owned().ok());
                let (context, child) = (context.clone(), child.clone());
                background::spawn(&context.clone(), call, child.id, async move {
                    let _permit = permit;
                    let is_ad_hoc = child.label.is_some();
                    let _time_guard = is_ad_hoc.then(|| track_time(&context, child.id));
                    resume_child(&context, &child, drive).await.ok()
                });
                continue;
            }
        };
        run.background().add(child.id, call, progress);
    }
    Ok(())
}

/// Drives a child to its end that an earlier process left unfinished.
async fn resume_child(
    context: &RunContext,
    child: &Run,
    drive: DriveFn,
) -> Result<Arc<Run>, String> {
    let engine = &context.engine;
    let _child_permit = context.run.tree.root_permit.restore_child();
    let account_ids = match child.label {
        Some(_) => ad_hoc::account_ids(&context.run),
        None => context.run.accounts.clone(),
    };
    let handle_store_error = |error| handle_store_error(context, error);
    // From here on the child is driven to its end, which also unregisters it.
    let Some((child, run)) = recovery::recover_child(context, child.id, &account_ids) else {
        let interrupted = interrupted_runs::interrupt(engine, child.id).await;
        interrupted.map_err(handle_store_error)?;
        let stored_run = engine.journal.store().run(child.id).await;
        let stored_run = stored_run.map_err(handle_store_error)?;
        return stored_run.map(Arc::new).ok_or_else(unrecorded_message);
    };
    // A message to the child is in its record from here on, or reaches the active run.
    drop(engine.inactive_inbox_lock.lock().await);
    let child_context = RunContext::new(engine, &child);
    let recorded_run = match run_log::load(engine, &run).await {
        Ok(recorded_run) => recorded_run,
        Err(error) => {
            let (run, permits) = (Arc::new(run), RunPermits::default());
            let finished_run =
                finish::finish_without_loop(&child_context, run, error.into(), permits).await;
            return finished_run.ok_or_else(unrecorded_message);
        }
    };
    let messages = &recorded_run.messages;
    let mut inbox = child.inbox.lock().await;
    inbox.restore(&messages.contents, messages.read);
    drop(inbox);
    let input = recorded_run.input(&run);
    let entry = match run.started_at {
        Some(_) => RunStart::Resumed(Box::new(recorded_run)),
        None => {
            // A copy of another tree's run: its time starts now.
            if let Some(deadline) = child_run::deadline(&context.run, &child.agent) {
                child.set_deadline(deadline);
            }
            RunStart::Forked(Box::new(recorded_run.without_prompt_of_fork(&run)))
        }
    };
    drive(&child_context, Arc::new(run), input, entry)
        .await
        .ok_or_else(unrecorded_message)
}

/// Suspends the tree if its record cannot be written or read; the returned text is then not recorded. If the record
/// can never be read, the text is the call's result.
fn handle_store_error(context: &RunContext, error: StoreError) -> String {
    if context.run.is_unreadable(&error) {
        return error.to_string();
    }
    context.run.suspend(&error);
    unrecorded_message()
}

fn unrecorded_message() -> String {
    "its run could not be recorded".to_owned()
}
