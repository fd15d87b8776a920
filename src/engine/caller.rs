//! The way up that a run lends to its tools: makes children, has them driven, and tells of their calls and ends. Knows no
//! loop; it is handed in.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::domain::event::EventKind;
use crate::domain::message::shorten;
use crate::domain::run::{Run, RunId};
use crate::engine::children::{self, Child};
use crate::engine::entry::Entry;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::quotas::AtWork;
use crate::engine::remains::{self, Begun};
use crate::engine::resolve::Input;
use crate::engine::sessions::Held;
use crate::engine::waiting::{self, Call};
use crate::engine::{ad_hoc, close, endings, recall, recovery};
use crate::store::{Change, StoreError};
use crate::tools::{AdHocAsk, ChildAsk, Delegate};

/// The loop, as children are driven by it.
pub type Drive = for<'a> fn(
    &'a Arc<Engine>,
    &'a Arc<LiveRun>,
    Arc<Run>,
    Input,
    Entry,
) -> BoxFuture<'a, Option<Arc<Run>>>;

/// The way up that a run lends to its tools.
pub struct Caller {
    engine: Arc<Engine>,
    live: Arc<LiveRun>,
    at_once: Option<Arc<Semaphore>>,
    begun: Arc<Begun>,
    /// The turns of children that an earlier process began, by call: nobody new comes before them.
    kept: Mutex<HashMap<String, OwnedSemaphorePermit>>,
    drive: Drive,
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
            let tree = &self.live.tree;
            let read = ad_hoc::read_quotas(&self.engine, &self.live).await;
            read.map_err(|error| ad_hoc::failed(&self.unwritten(error)))?;
            if self.begun.children.contains_key(call) {
                // It was let in by an earlier process.
                return Ok(());
            }
            let bounds = ad_hoc::bounds(&self.live);
            tree.quotas.check(&bounds, &tree.budgets)
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
                    let tree = &self.live.tree;
                    let bounds = ad_hoc::bounds(&self.live);
                    // Several that were checked at once may come here; the quota lets in as many as it has room for.
                    tree.quotas.take(&bounds, &tree.budgets)?;
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

    fn recall<'a>(&'a self, query: &'a str, limit: usize) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let found = recall::search(&self.engine, self.live.scope.run, query, limit).await;
            found.map_err(|error| format!("the record could not be read: {error}"))
        })
    }
}

impl Caller {
    /// For the calls of one reply of this run. `drive` is the loop, which the children are driven by.
    pub fn new(
        engine: &Arc<Engine>,
        live: &Arc<LiveRun>,
        begun: &Arc<Begun>,
        drive: Drive,
    ) -> Self {
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
            drive,
        }
    }

    /// Lets the time of an unnamed child run; that of one below another is in that one's.
    fn time_of(&self, child: RunId) -> Option<AtWork<'_>> {
        let mut runs = self.live.upwards();
        let is_below = runs.any(|run| run.agent.ad_hoc.is_some());
        (!is_below).then(|| self.live.tree.quotas.time(child))
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
        let slot = &self.live.tree.slot;
        let at_work = match told {
            Some(_) => Some(slot.child_again()),
            None => slot.child(),
        };
        let _at_work = at_work.ok_or_else(|| {
            let most = engine.settings.runs.max_live;
            match self.live.tree.owner {
                Some(_) => format!(
                    "the runs of its key at work are the most that the server allows it now, of {most} in all"
                ),
                None => format!("the server has {most} runs at work, the most that it allows"),
            }
        })?;
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
        (self.drive)(engine, &child, run, Input::from(message), entry)
            .await
            .ok_or_else(unrecorded)
    }

    /// Waits until fewer than `max_concurrent` children are there. Where all of those wait for a person, so does this run.
    async fn turn_of<'s>(&self, at_once: &'s Semaphore) -> Result<SemaphorePermit<'s>, String> {
        let Self { engine, live, .. } = self;
        if let Ok(turn) = at_once.try_acquire() {
            return Ok(turn);
        }
        let rested = waiting::rest(engine, live, Call::Queues, None).await;
        rested.map_err(|error| self.unwritten(error))?;
        let turn = waiting::until(live, at_once.acquire()).await;
        let going = waiting::go(engine, live, Call::Queues).await;
        going.map_err(|error| self.unwritten(error))?;
        let turn = turn.map_err(|error| endings::broken_off(live, &error))?;
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
        let _at_work = live.tree.slot.child_again();
        let callers = match child.label {
            Some(_) => ad_hoc::accounts(live),
            None => live.accounts.clone(),
        };
        let unwritten = |error| self.unwritten(error);
        let remains = remains::load(engine, child).await;
        // From here on it is driven to its end, which takes it off the list again.
        let Some((child, run)) = engine.left.hand_over(engine, child.id, live, &callers) else {
            let interrupted = recovery::interrupt(engine, child.id, &[]).await;
            interrupted.map_err(unwritten)?;
            let ended = engine.journal.store().run(child.id).await;
            let ended = ended.map_err(unwritten)?;
            return ended.map(Arc::new).ok_or_else(unrecorded);
        };
        let remains = match remains {
            Ok(remains) => remains,
            Err(error) => {
                let (run, held) = (Arc::new(run), Held::default());
                let ended = close::without_loop(engine, &child, run, error.into(), held).await;
                return ended.ok_or_else(unrecorded);
            }
        };
        let input = Input::from(run.input.clone());
        let entry = Entry::Resumed(Box::new(remains));
        (self.drive)(engine, &child, Arc::new(run), input, entry)
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
        told.map_err(|error| self.unwritten(error))
    }

    /// Suspends the tree of a run whose record cannot be written or read; the text is then not recorded. Where it never can
    /// be read, the text is the call's result.
    fn unwritten(&self, error: StoreError) -> String {
        if self.live.is_unreadable(&error) {
            return error.to_string();
        }
        self.live.suspend(&error);
        unrecorded()
    }
}

fn unrecorded() -> String {
    "its run could not be recorded".to_owned()
}
