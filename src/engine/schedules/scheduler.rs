//! Waits for the times of schedules and starts their runs, or has their evaluations started.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::{Mutex as AsyncMutex, Notify, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::catalog::Agents;
use crate::domain::content::Content;
use crate::domain::evaluation::EvalId;
use crate::domain::run::{Run, RunId, now};
use crate::domain::schedule::{Overlap, Schedule, ScheduleInput, ScheduledEval, Started};
use crate::engine::request::{RunRequest, StartError};
use crate::engine::run_owners::{OwnerError, RunOwners};
use crate::engine::runner::Runner;
use crate::engine::schedules::plan::{self, Due};
use crate::store::schedules::{ScheduleChange, ScheduleId, ScheduleRecord};
use crate::store::{IdempotencyClaim, StoreError};

/// The longest sleep while there are schedules: the clock may be set, and another node may resume a paused schedule.
const MAX_SLEEP: Duration = Duration::from_secs(10);
/// How long a schedule has to be in no file before it counts as taken out: files are also replaced.
const REMOVAL_DELAY: Duration = Duration::from_secs(5);
/// When a start is tried again that the store or a full queue prevented.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

pub struct Scheduler {
    runner: Runner,
    owners: RunOwners,
    changed: Notify,
    /// Since when schedules with a record are in no agent's file.
    absent_since: Mutex<HashMap<ScheduleId, Instant>>,
    /// The last start of a schedule that failed and was to be tried again.
    failed_starts: Mutex<HashMap<ScheduleId, FailedStart>>,
    due_evals: (mpsc::Sender<DueEval>, AsyncMutex<mpsc::Receiver<DueEval>>),
}

/// An evaluation that is to be accepted, unless one with this id is.
pub struct DueEval {
    pub id: EvalId,
    pub agent: String,
    pub schedule: String,
    pub eval: ScheduledEval,
    pub owner: Option<String>,
    pub accepted: oneshot::Sender<Result<(), EvalRefusal>>,
}

/// Why an evaluation is not accepted.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub struct EvalRefusal {
    pub why: String,
    /// Whether it may be accepted a moment later.
    pub is_temporary: bool,
}

/// Why no run could start at a time.
#[derive(Clone)]
struct FailedStart {
    at: Timestamp,
    error: String,
}

/// A schedule as it is now.
#[derive(Clone, Debug)]
pub struct ScheduleState {
    pub agent: String,
    pub schedule: Schedule,
    /// `None` if the scheduler has never seen it.
    pub record: Option<ScheduleRecord>,
    /// When it starts a run; `None` while it is paused.
    pub next: Option<Timestamp>,
}

/// What a client has triggered.
pub enum Triggered {
    Run(Arc<Run>),
    Eval(EvalId),
}

impl Triggered {
    fn started(&self) -> Started {
        match self {
            Self::Run(run) => Started::Run(run.id),
            Self::Eval(eval) => Started::Eval(*eval),
        }
    }
}

/// Why a schedule could not start anything.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TriggerError {
    #[error("no run can start: {0}")]
    Owner(#[from] OwnerError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("no evaluation can start: {0}")]
    Eval(#[from] EvalRefusal),
}

impl From<StoreError> for TriggerError {
    fn from(error: StoreError) -> Self {
        Self::Start(StartError::Store(error))
    }
}

impl TriggerError {
    fn is_temporary(&self) -> bool {
        match self {
            Self::Owner(_) => false,
            Self::Start(error) => matches!(
                error,
                StartError::Store(_) | StartError::Draining | StartError::QueueFull(_)
            ),
            Self::Eval(refusal) => refusal.is_temporary,
        }
    }
}

/// Ends of runs that schedules wait for.
type Waits = FuturesUnordered<BoxFuture<'static, RunId>>;

/// What a pass leaves to the next.
#[derive(Default)]
struct Pass {
    next: Option<Duration>,
    /// Runs that a held time waits for.
    awaited: Vec<RunId>,
}

impl Pass {
    fn wake_in(&mut self, sleep: Duration) {
        self.next = Some(self.next.map_or(sleep, |next| next.min(sleep)));
    }

    /// The end of an evaluation is found by the next pass.
    fn wait_for(&mut self, last: Started) {
        match last {
            Started::Run(run) => self.awaited.push(run),
            Started::Eval(_) => self.wake_in(MAX_SLEEP),
        }
    }
}

impl Scheduler {
    pub fn new(runner: Runner, owners: RunOwners) -> Self {
        let (sender, receiver) = mpsc::channel(1);
        Self {
            runner,
            owners,
            changed: Notify::new(),
            absent_since: Mutex::default(),
            failed_starts: Mutex::default(),
            due_evals: (sender, AsyncMutex::new(receiver)),
        }
    }

    /// The next evaluation that is to be accepted.
    pub async fn due_eval(&self) -> Option<DueEval> {
        self.due_evals.1.lock().await.recv().await
    }

    pub fn owners(&self) -> &RunOwners {
        &self.owners
    }

    /// Starts runs at their times until `stop` is cancelled, while this process is the leader. Without schedules it only waits
    /// for some.
    pub async fn run(&self, stop: CancellationToken) {
        let mut reloads = self.runner.catalog().subscribe();
        let mut waits = Waits::new();
        let mut awaited = HashSet::new();
        let leadership = self.runner.leadership();
        loop {
            reloads.mark_unchanged();
            let pass = async {
                leadership.gained().await;
                self.pass().await
            };
            let pass = tokio::select! {
                pass = pass => pass,
                () = stop.cancelled() => return,
            };
            for run in pass.awaited.into_iter().filter(|run| awaited.insert(*run)) {
                waits.push(Box::pin(wait_for_end(self.runner.clone(), run)));
            }
            let sleep = async {
                match pass.next {
                    Some(next) => tokio::time::sleep(next.min(MAX_SLEEP)).await,
                    // Another node may resume a paused schedule.
                    None => leadership.poll().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep => {}
                () = self.changed.notified() => {}
                Ok(()) = reloads.changed() => {}
                Some(run) = waits.next() => drop(awaited.remove(&run)),
            }
        }
    }

    /// Starts what is due.
    async fn pass(&self) -> Pass {
        let mut pass = Pass::default();
        let agents = self.runner.catalog().current();
        let records = match self.records().await {
            Ok(records) => records,
            Err(error) => {
                if !matches!(error, StoreError::Closed) {
                    warn!(error = %error, "The schedules could not be read, trying again: {error}");
                }
                pass.wake_in(RETRY_INTERVAL);
                return pass;
            }
        };
        for record in records.values() {
            if let Err(error) = self.check_removed(&agents, record, &mut pass).await {
                let id = &record.id;
                warn!(agent = %id.agent, error = %error, "It could not be recorded that agent {} has no schedule {}, trying again: {error}", id.agent, id.name);
                pass.wake_in(RETRY_INTERVAL);
            }
        }
        for (id, schedule) in schedules_of(&agents) {
            let record = records.get(&id);
            if let Err(error) = self.advance(&id, &schedule, record, &mut pass).await {
                warn!(agent = %id.agent, error = %error, "Schedule {} of agent {} is tried again: {error}", id.name, id.agent);
                pass.wake_in(RETRY_INTERVAL);
            }
        }
        pass
    }

    /// Records that no agent has a schedule any more, so that it is new if it comes back.
    async fn check_removed(
        &self,
        agents: &Agents,
        record: &ScheduleRecord,
        pass: &mut Pass,
    ) -> Result<(), StoreError> {
        if record.times.is_empty() || may_exist(agents, &record.id) {
            self.absent_since().remove(&record.id);
            return Ok(());
        }
        let elapsed = {
            let mut absent = self.absent_since();
            let since = absent.entry(record.id.clone()).or_insert_with(Instant::now);
            if since.elapsed() > REMOVAL_DELAY + MAX_SLEEP {
                // Another node was the leader meanwhile.
                *since = Instant::now();
            }
            since.elapsed()
        };
        let remaining = REMOVAL_DELAY.saturating_sub(elapsed);
        if !remaining.is_zero() {
            pass.wake_in(remaining);
            return Ok(());
        }
        self.failed_starts().remove(&record.id);
        self.change(&record.id, ScheduleChange::Removed).await
    }

    fn absent_since(&self) -> MutexGuard<'_, HashMap<ScheduleId, Instant>> {
        let absent = self.absent_since.lock();
        absent.unwrap_or_else(PoisonError::into_inner)
    }

    fn failed_starts(&self) -> MutexGuard<'_, HashMap<ScheduleId, FailedStart>> {
        let failed = self.failed_starts.lock();
        failed.unwrap_or_else(PoisonError::into_inner)
    }

    fn failed_start(&self, id: &ScheduleId) -> Option<FailedStart> {
        self.failed_starts().get(id).cloned()
    }

    /// Starts what is due of one schedule.
    async fn advance(
        &self,
        id: &ScheduleId,
        schedule: &Schedule,
        record: Option<&ScheduleRecord>,
        pass: &mut Pass,
    ) -> Result<(), TriggerError> {
        let now = now();
        let times = schedule.times();
        let Some(record) = record.filter(|record| record.times == times) else {
            self.change(id, ScheduleChange::Seen { times, at: now })
                .await?;
            pass.wake_in(Duration::ZERO);
            return Ok(());
        };
        if record.is_paused {
            return Ok(());
        }
        let running = match schedule.overlap {
            Overlap::Allow => None,
            Overlap::Skip | Overlap::Queue => self.unfinished(record).await?,
        };
        if let Some(held) = record.held_at {
            match running {
                Some(last) => pass.wait_for(last),
                None => {
                    self.start(id, schedule, record, held).await?;
                    // Then the run that started now is the last one.
                    pass.wake_in(Duration::ZERO);
                    return Ok(());
                }
            }
        }
        let due = plan::due(schedule, record, now);
        if let Some(failed) = self.failed_start(id)
            && plan::is_given_up(failed.at, due, record, now)
        {
            self.miss(record, failed.at).await?;
            self.failed_starts().remove(id);
            // Its run may have started nevertheless: then that is the last one.
            pass.wake_in(Duration::ZERO);
            return Ok(());
        }
        match (due, running) {
            (None, _) => {}
            (Some(Due::Missed(at)), _) => self.miss(record, at).await?,
            (Some(Due::Start(at)), None) => {
                let started = self.start(id, schedule, record, at).await;
                self.remember(id, at, started.as_ref().err());
                started?;
            }
            (Some(Due::Start(at)), Some(last)) => {
                self.overlap(id, schedule, record, at, last).await?;
                if schedule.overlap == Overlap::Queue {
                    pass.wait_for(last);
                }
            }
        }
        if let Some(next) = schedule.cron.next(&schedule.zone, now) {
            let sleep = next.duration_since(now);
            pass.wake_in(sleep.try_into().unwrap_or_default());
        }
        Ok(())
    }

    /// Remembers why the start of a time failed, until it or another one succeeds.
    fn remember(&self, id: &ScheduleId, at: Timestamp, error: Option<&TriggerError>) {
        let mut failed_starts = self.failed_starts();
        match error.map(ToString::to_string) {
            Some(error) => drop(failed_starts.insert(id.clone(), FailedStart { at, error })),
            None => drop(failed_starts.remove(id)),
        }
    }

    /// What a schedule has started last, if it has not ended.
    async fn unfinished(&self, record: &ScheduleRecord) -> Result<Option<Started>, StoreError> {
        let Some((_, last)) = record.last else {
            return Ok(None);
        };
        let store = self.runner.store();
        let is_unfinished = match last {
            Started::Run(id) => store
                .run(id)
                .await?
                .is_some_and(|it| !it.status.is_terminal()),
            Started::Eval(id) => store
                .eval(id)
                .await?
                .is_some_and(|it| it.finished_at.is_none()),
        };
        Ok(is_unfinished.then_some(last))
    }

    /// Skips or holds a time at which the last run has not ended. One time is held at most.
    async fn overlap(
        &self,
        id: &ScheduleId,
        schedule: &Schedule,
        record: &ScheduleRecord,
        at: Timestamp,
        last: Started,
    ) -> Result<(), StoreError> {
        let is_held = schedule.overlap == Overlap::Queue && record.held_at.is_none();
        let held_at = if is_held { Some(at) } else { record.held_at };
        let why = || format!("{last} had not ended");
        let error = (!is_held).then(why);
        let change = ScheduleChange::Skipped { at, held_at, error };
        self.change(id, change).await
    }

    /// Records that a time has passed, unless a process that was killed then had started its run. A held time still waits.
    async fn miss(&self, record: &ScheduleRecord, at: Timestamp) -> Result<(), StoreError> {
        let store = self.runner.store();
        let claimed = store.claimed_run(claim(&record.id, at).key).await?;
        let mut started = claimed.map(|claimed| Started::Run(claimed.run));
        if started.is_none() {
            let eval = store.eval(eval_id(&record.id, at)).await?;
            started = eval.map(|eval| Started::Eval(eval.id));
        }
        let change = match started {
            Some(started) => ScheduleChange::Started {
                at,
                handled_at: at,
                started,
            },
            None => ScheduleChange::Skipped {
                at,
                held_at: record.held_at,
                error: Some(self.missed_because(&record.id, at)),
            },
        };
        self.change(&record.id, change).await
    }

    fn missed_because(&self, id: &ScheduleId, at: Timestamp) -> String {
        match self.failed_start(id).filter(|failed| failed.at == at) {
            Some(FailedStart { error, .. }) => {
                warn!(agent = %id.agent, error = %error, "Schedule {} of agent {} starts no run at {at}: {error}", id.name, id.agent);
                error
            }
            None => "the daemon did not run at that time".to_owned(),
        }
    }

    /// Starts the run or the evaluation of a time. An error is one after which the start is to be tried again.
    async fn start(
        &self,
        id: &ScheduleId,
        schedule: &Schedule,
        record: &ScheduleRecord,
        at: Timestamp,
    ) -> Result<(), TriggerError> {
        let handled_at = plan::handled_at(record, at, now());
        let started = match &schedule.eval {
            None => self.start_run(id, schedule, Some(claim(id, at))).await,
            Some(eval) => {
                let eval = self.start_eval(id, schedule, eval, eval_id(id, at)).await;
                eval.map(Triggered::Eval)
            }
        };
        let change = match started {
            Ok(triggered) => {
                let started = triggered.started();
                info!(agent = %id.agent, "Schedule {} of agent {} has started {started}", id.name, id.agent);
                ScheduleChange::Started {
                    at,
                    handled_at,
                    started,
                }
            }
            Err(TriggerError::Start(StartError::Store(StoreError::AlreadyClaimed(claimed)))) => {
                ScheduleChange::Started {
                    at,
                    handled_at,
                    started: Started::Run(claimed.run),
                }
            }
            Err(error) if error.is_temporary() => return Err(error),
            Err(error) => {
                warn!(agent = %id.agent, error = %error, "Schedule {} of agent {} starts no run at {at}: {error}", id.name, id.agent);
                ScheduleChange::Skipped {
                    at: handled_at,
                    held_at: None,
                    error: Some(error.to_string()),
                }
            }
        };
        Ok(self.change(id, change).await?)
    }

    async fn start_run(
        &self,
        id: &ScheduleId,
        schedule: &Schedule,
        claim: Option<IdempotencyClaim>,
    ) -> Result<Triggered, TriggerError> {
        let is_object_input = matches!(schedule.input, Some(ScheduleInput::Object(_)));
        let input = schedule.input.as_ref().map(|input| match input {
            ScheduleInput::Text(text) => Content::from(text.clone()),
            ScheduleInput::Object(object) => {
                Content::from(Value::Object(object.clone()).to_string())
            }
        });
        let request = RunRequest {
            agent: id.agent.clone(),
            input,
            is_object_input,
            labels: schedule.labels.clone(),
            owner: self.owners.owner(&id.agent, schedule.key.as_deref())?,
            claim,
            ..RunRequest::default()
        };
        let started = Box::pin(self.runner.start(request.in_background())).await;
        Ok(Triggered::Run(started?))
    }

    /// Has an evaluation accepted under this id.
    async fn start_eval(
        &self,
        id: &ScheduleId,
        schedule: &Schedule,
        eval: &ScheduledEval,
        eval_id: EvalId,
    ) -> Result<EvalId, TriggerError> {
        let (accepted, answer) = oneshot::channel();
        let due = DueEval {
            id: eval_id,
            agent: id.agent.clone(),
            schedule: id.name.clone(),
            eval: eval.clone(),
            owner: self.owners.owner(&id.agent, schedule.key.as_deref())?,
            accepted,
        };
        // The receiver stays as long as this scheduler.
        let _ = self.due_evals.0.send(due).await;
        let answer = answer.await.map_err(|_| StartError::Draining)?;
        Ok(answer.map(|()| eval_id)?)
    }

    /// All schedules of agents with a definition, by agent and in the order of the file.
    pub async fn list(&self) -> Result<Vec<ScheduleState>, StoreError> {
        let schedules = schedules_of(&self.runner.catalog().current());
        if schedules.is_empty() {
            return Ok(Vec::new());
        }
        let mut records = self.records().await?;
        let now = now();
        let states = schedules.into_iter().map(|(id, schedule)| {
            let record = records.remove(&id);
            let is_paused = record.as_ref().is_some_and(|record| record.is_paused);
            let next = schedule.cron.next(&schedule.zone, now);
            ScheduleState {
                agent: id.agent,
                schedule,
                record,
                next: next.filter(|_| !is_paused),
            }
        });
        Ok(states.collect())
    }

    /// One schedule as it is now.
    pub async fn find(&self, id: &ScheduleId) -> Result<Option<ScheduleState>, StoreError> {
        let mut states = self.list().await?.into_iter();
        Ok(states.find(|state| state.agent == id.agent && state.schedule.name == id.name))
    }

    /// Starts a run, or an evaluation, of a schedule now, whatever its times, even if it is paused.
    pub async fn trigger(
        &self,
        state: &ScheduleState,
        claim: Option<IdempotencyClaim>,
    ) -> Result<Triggered, TriggerError> {
        let (id, schedule) = (state.id(), &state.schedule);
        let triggered = match &schedule.eval {
            None => self.start_run(&id, schedule, claim).await?,
            Some(eval) => {
                let eval = self.start_eval(&id, schedule, eval, EvalId::new()).await?;
                Triggered::Eval(eval)
            }
        };
        let started = triggered.started();
        let change = ScheduleChange::Triggered { at: now(), started };
        for change in seen_first(state).into_iter().chain([change]) {
            // It is in the record: that it is not shown as the last one is no reason to say that it did not start.
            if let Err(error) = self.change(&id, change).await {
                warn!(error = %error, "{started} is not recorded as the last start of schedule {}: {error}", id.name);
            }
        }
        Ok(triggered)
    }

    /// Pauses or resumes a schedule. Times in between are not missed.
    pub async fn set_paused(
        &self,
        state: &ScheduleState,
        is_paused: bool,
    ) -> Result<(), StoreError> {
        let (id, now) = (state.id(), now());
        if let Some(seen) = seen_first(state) {
            self.change(&id, seen).await?;
        }
        let was_paused = state.record.as_ref().is_some_and(|it| it.is_paused);
        if was_paused != is_paused {
            let change = ScheduleChange::Paused { is_paused, at: now };
            self.change(&id, change).await?;
        }
        self.changed.notify_one();
        Ok(())
    }

    async fn change(&self, id: &ScheduleId, change: ScheduleChange) -> Result<(), StoreError> {
        self.runner
            .store()
            .change_schedule(id.clone(), change)
            .await
    }

    async fn records(&self) -> Result<BTreeMap<ScheduleId, ScheduleRecord>, StoreError> {
        let records = self.runner.store().schedules().await?;
        let records = records.into_iter();
        Ok(records.map(|record| (record.id.clone(), record)).collect())
    }
}

impl ScheduleState {
    pub fn id(&self) -> ScheduleId {
        ScheduleId {
            agent: self.agent.clone(),
            name: self.schedule.name.clone(),
        }
    }
}

/// The schedules of agents with a definition, by agent and in the order of the file.
fn schedules_of(agents: &Agents) -> Vec<(ScheduleId, Schedule)> {
    let agents = agents.entries.values().filter_map(|it| it.agent.as_ref());
    let schedules = agents.flat_map(|agent| {
        agent.schedules.iter().map(|schedule| {
            let id = ScheduleId {
                agent: agent.name.clone(),
                name: schedule.name.clone(),
            };
            (id, schedule.clone())
        })
    });
    schedules.collect()
}

/// Whether an agent has the schedule. What an agent has whose file is invalid since the start is not known.
fn may_exist(agents: &Agents, id: &ScheduleId) -> bool {
    let Some(entry) = agents.entries.get(&id.agent) else {
        return false;
    };
    entry.agent.as_ref().is_none_or(|agent| {
        let mut schedules = agent.schedules.iter();
        schedules.any(|it| it.name == id.name)
    })
}

/// The id of the evaluation that a time starts.
fn eval_id(id: &ScheduleId, at: Timestamp) -> EvalId {
    EvalId::derived(at, &format!("{} {}", id.agent, id.name))
}

/// The idempotency key of a time. It does not depend on the owner, who may change.
fn claim(id: &ScheduleId, at: Timestamp) -> IdempotencyClaim {
    let route = format!("SCHEDULE {}/{}", id.agent, id.name);
    IdempotencyClaim::own(route, at.to_string(), now())
}

async fn wait_for_end(runner: Runner, id: RunId) -> RunId {
    loop {
        match runner.wait_until_ended(id).await {
            Ok(_) => return id,
            Err(StoreError::Closed) => return std::future::pending().await,
            Err(_) => {}
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Makes a record of a schedule that has none. One that is there has the times that the leader knows: the files of this node may be
/// older.
fn seen_first(state: &ScheduleState) -> Option<ScheduleChange> {
    state.record.is_none().then(|| ScheduleChange::Seen {
        times: state.schedule.times(),
        at: now(),
    })
}
