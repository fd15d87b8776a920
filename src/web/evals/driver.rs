//! Starts the runs of evaluations, a few at a time and behind live work, has them scored, and records what they show.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::domain::agent::tool_use::{EvalTools, ToolUse};
use crate::domain::comparison::Comparison;
use crate::domain::counted::counted;
use crate::domain::evaluation::{
    self, CaseEnd, CaseOutcome, EvalCase, EvalId, EvalResult, EvalRun, EvalSlot, EvalState,
    Evaluation,
};
use crate::domain::event::{EventKind, EventName};
use crate::domain::failure::FailureCode;
use crate::domain::gate::Gate;
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::scorer::Scorer;
use crate::domain::usage::Cost;
use crate::engine::blocking::run_blocking;
use crate::engine::evals::definitions;
use crate::engine::evals::divergence;
use crate::engine::evals::plan::{self, Spending};
use crate::engine::evals::result::{self, Measured};
use crate::engine::evals::scoring::{self, CaseRun};
use crate::engine::record::{scores, webhook_message};
use crate::engine::request::{RunRequest, StartError};
use crate::engine::runner::Runner;
use crate::engine::scoring::perform::Scorers;
use crate::engine::state::pinned_agents::PinnedRoot;
use crate::standing_task;
use crate::store::StoreError;
use crate::store::evals::EvalChange;
use crate::store::late_events::LateReport;
use crate::web::batches::feeder::{retried, wait_for_end};
use crate::web::batches::line;
use crate::web::evals::queue::{Pending, Queue};
use crate::web::state::driver_handle::DriverHandle;
use crate::web::state::{AppState, Settings};

/// Evaluations whose runs start at the same time; the others wait for their end.
const MAX_EVALS: usize = 4;
/// Runs of evaluations at work while live ones are, or were a moment ago.
const MAX_BESIDE_LIVE: usize = 8;
const LIVE_INTERVAL: Duration = Duration::from_secs(1);
/// When the queue is looked at again, or a step is tried again that the store prevented.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// So many runs in a row that fail for their provider stop an evaluation.
const MAX_PROVIDER_FAILURES: u32 = 5;

pub struct EvalDriver {
    runner: Runner,
    settings: Arc<Settings>,
    handle: Arc<DriverHandle<EvalId>>,
    scorers: Scorers,
    /// For the runs of all evaluations.
    permits: Arc<Semaphore>,
    /// When live runs were last at work.
    live_at: Mutex<Option<Instant>>,
}

/// An evaluation, with what all of its runs share.
struct Drive {
    eval: Evaluation,
    /// The root of each version.
    roots: Vec<PinnedRoot>,
    scorers: Vec<Scorer>,
    /// The ended runs of the evaluation that it is compared with, by case and repetition.
    earlier: HashMap<(String, u32), EvalRun>,
    token: CancellationToken,
}

/// What became of a run.
enum Settled {
    Ended(CaseEnd),
    /// It did not start, and the evaluation stops for this reason.
    Stopped(String),
    /// It did not start, because the evaluation was cancelled.
    Cancelled,
}

/// Why a run did not start.
enum Refusal {
    /// The queue is full, or the store does not work.
    Busy,
    /// None can start.
    Stop(String),
    /// This one cannot.
    Rejected(String),
    /// The recorded run of the case, which is needed, is not there.
    NoSource(String),
}

/// The error of a case whose recorded run is not there.
const SOURCE_NOT_FOUND: &str = "source_not_found";

impl EvalDriver {
    pub fn new(state: &AppState, scorers: Scorers) -> Self {
        let permits = state.runner.max_background_runs();
        Self {
            runner: state.runner.clone(),
            settings: Arc::clone(&state.settings),
            handle: Arc::clone(&state.evals),
            scorers,
            permits: Arc::new(Semaphore::new(permits)),
            live_at: Mutex::new(None),
        }
    }

    /// Drives all evaluations until `stop` is cancelled, while this process is the leader. The next start, or leader, goes on.
    pub async fn run(&self, stop: CancellationToken) {
        standing_task::run("Evaluating", &stop, |stop| self.run_until(stop)).await;
    }

    async fn run_until(&self, stop: CancellationToken) {
        let leadership = self.runner.leadership();
        let drive = async {
            loop {
                leadership.gained().await;
                tokio::select! {
                    () = self.drive_all() => return,
                    () = leadership.lost() => {}
                }
            }
        };
        tokio::select! {
            () = drive => {}
            () = stop.cancelled() => {}
        }
    }

    async fn drive_all(&self) {
        // Those that were driven before the leadership was lost.
        self.handle.leave_all();
        let mut drives: FuturesUnordered<BoxFuture<'_, EvalId>> = FuturesUnordered::new();
        let mut driven: HashSet<EvalId> = HashSet::new();
        loop {
            let mut is_complete = true;
            match self.runner.store().unfinished_evals().await {
                Ok(evals) => {
                    for eval in evals {
                        if driven.contains(&eval.id) {
                            if eval.reason.is_some() {
                                // Another node may have accepted the cancel.
                                self.handle.cancel(eval.id);
                            }
                        } else if driven.len() < MAX_EVALS || eval.reason.is_some() {
                            driven.insert(eval.id);
                            drives.push(Box::pin(self.drive(eval.id)));
                        }
                    }
                }
                Err(StoreError::Closed) => return,
                Err(_) => is_complete = false,
            }
            tokio::select! {
                Some(ended) = drives.next() => drop(driven.remove(&ended)),
                () = self.handle.changed() => {}
                () = self.runner.leadership().poll() => {}
                () = tokio::time::sleep(RETRY_INTERVAL), if !is_complete => {}
            }
        }
    }

    /// Drives one evaluation to its end.
    async fn drive(&self, id: EvalId) -> EvalId {
        let token = self.handle.enter(id);
        // Read after the token is there: a cancel in between is seen in one of both.
        let eval = retried(|| self.runner.store().eval(id)).await;
        if let Some(eval) = eval.filter(|eval| eval.finished_at.is_none()) {
            if eval.reason.is_some() {
                token.cancel();
            }
            let begin = EvalChange::Begin;
            retried(|| self.runner.store().change_eval(id, begin.clone())).await;
            let (agent, planned) = (eval.agent.clone(), eval.planned);
            let (state, reason) = match self.prepare(eval, token).await {
                Ok(drive) => Box::pin(self.run_cases(&drive)).await,
                Err(why) => (EvalState::Failed, Some(why)),
            };
            self.finish(id, state, reason).await;
            info!(agent = %agent, "{id} is {}: {}", state.as_str(), counted(planned, "planned run"));
        }
        self.handle.leave(id);
        id
    }

    async fn prepare(&self, eval: Evaluation, token: CancellationToken) -> Result<Drive, String> {
        let id = eval.id;
        let found = retried(|| self.runner.store().eval_definitions(id)).await;
        let tools = EvalTools {
            tools: eval.request.tools,
            unknown: eval.request.unknown.clone(),
            ignore: eval.request.ignore.clone(),
        };
        let roots = found
            .iter()
            .map(|it| definitions::pinned_root(&self.runner, it, &tools));
        let roots: Result<Vec<PinnedRoot>, _> = roots.collect();
        let roots = roots.map_err(|error| error.to_string())?;
        let first = found.first().ok_or("it has no definition")?;
        let scorers = match eval.request.scorers.is_empty() {
            true => Vec::new(),
            false => definitions::scorers(&self.runner, &eval.agent, first)
                .await
                .map_err(|error| error.to_string())?,
        };
        let earlier = match eval.request.against_eval {
            Some(earlier) => self.ended_runs(earlier).await,
            None => HashMap::new(),
        };
        Ok(Drive {
            eval,
            roots,
            scorers,
            earlier,
            token,
        })
    }

    async fn ended_runs(&self, id: EvalId) -> HashMap<(String, u32), EvalRun> {
        let store = self.runner.store();
        let case_ids = retried(|| store.eval_case_ids(id)).await;
        let runs = retried(|| store.eval_runs(id, 0..u32::MAX)).await;
        let runs = runs
            .into_iter()
            .filter(|run| run.slot.version == evaluation::NEW);
        let named = runs.filter_map(|run| {
            let case = case_ids.get(run.slot.case as usize)?;
            Some(((case.clone(), run.slot.repeat), run))
        });
        named.collect()
    }

    /// Has each run start and end, until the last one, the budget's end or the cancel. Returns how the evaluation ends.
    async fn run_cases(&self, drive: &Drive) -> (EvalState, Option<String>) {
        let request = &drive.eval.request;
        let mut queue = Queue::new(self.runner.store().as_ref(), &drive.eval).await;
        let mut spending = Spending {
            budget: request.budget,
            expected: request
                .estimate
                .map(|estimate| Cost(estimate.0 / drive.eval.planned.max(1))),
            spent: drive.eval.spent,
            ended: drive.eval.ended,
            running: 0,
        };
        let mut stop_reason = None;
        let mut provider_failures = 0;
        let mut running = FuturesUnordered::new();
        let mut admission: Option<BoxFuture<'_, OwnedSemaphorePermit>> = None;
        loop {
            let may_start = stop_reason.is_none() && !drive.token.is_cancelled();
            let next = match may_start {
                true => queue.peek().await,
                false => None,
            };
            // What an earlier driver has started is paid for already.
            let is_affordable =
                next.is_some_and(|next| next.run.is_some()) || spending.affords_another();
            if next.is_none() || !is_affordable {
                admission = None;
            } else if admission.is_none() {
                admission = Some(Box::pin(self.admit()));
            }
            if running.is_empty() && admission.is_none() {
                if next.is_some() && !is_affordable {
                    stop_reason = Some("its budget is spent".to_owned());
                }
                break;
            }
            tokio::select! {
                Some(settled) = running.next() => {
                    spending.running -= 1;
                    match settled {
                        Settled::Ended(end) => {
                            spending.ended += 1;
                            spending.spent = Cost(spending.spent.0.saturating_add(end.spent().0));
                            // A recorded run says nothing of the provider of today.
                            if !end.is_recorded {
                                provider_failures = match is_provider_failure(&end) {
                                    true => provider_failures + 1,
                                    false => 0,
                                };
                            }
                            if provider_failures >= MAX_PROVIDER_FAILURES {
                                let code = end.error.unwrap_or_default();
                                let why = format!("{provider_failures} runs in a row failed with {code}");
                                stop_reason.get_or_insert(why);
                            }
                        }
                        Settled::Stopped(why) => drop(stop_reason.get_or_insert(why)),
                        Settled::Cancelled => {}
                    }
                }
                permit = admitted(&mut admission) => {
                    admission = None;
                    if let Some(pending) = queue.pop() {
                        spending.running += 1;
                        running.push(self.settle(drive, pending, permit));
                    }
                }
                () = drive.token.cancelled(), if may_start => {}
            }
        }
        if drive.token.is_cancelled() {
            let eval = retried(|| self.runner.store().eval(drive.eval.id)).await;
            return (EvalState::Cancelled, eval.and_then(|eval| eval.reason));
        }
        match stop_reason {
            Some(why) => (EvalState::Stopped, Some(why)),
            None => (EvalState::Completed, None),
        }
    }

    /// Waits for one of the permits of all evaluations, and until live runs leave it a place.
    async fn admit(&self) -> OwnedSemaphorePermit {
        let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
            return std::future::pending().await;
        };
        while self.is_behind_live_work() {
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
        permit
    }

    fn is_behind_live_work(&self) -> bool {
        let mut live_at = self.live_at.lock().unwrap_or_else(PoisonError::into_inner);
        if self.runner.live_runs() > 0 {
            *live_at = Some(Instant::now());
        }
        let is_beside_live = live_at.is_some_and(|at| at.elapsed() < LIVE_INTERVAL);
        let admitted = self.runner.max_background_runs() - self.permits.available_permits();
        self.runner.queue_load().1 > 0 || (is_beside_live && admitted > MAX_BESIDE_LIVE)
    }

    /// Starts a run, unless an earlier driver has, waits for its end, has it scored and records that.
    async fn settle(
        &self,
        drive: &Drive,
        pending: Pending,
        _permit: OwnedSemaphorePermit,
    ) -> Settled {
        let Pending { slot, case, run } = pending;
        let request = &drive.eval.request;
        if slot.version == evaluation::OLD
            && (request.is_against_recorded || request.against_eval.is_some())
        {
            let end = match request.is_against_recorded {
                true => self.recorded_end(drive, slot, &case).await,
                false => self.earlier_end(drive, slot, &case).await,
            };
            return self.record_end(drive, slot, end).await;
        }
        let started = match run {
            Some(run) => Ok(Some(run)),
            None => self.start(drive, slot, &case).await,
        };
        let end = match started {
            Ok(Some(run)) => self.end_of(drive, slot, &case, run).await,
            Ok(None) => return Settled::Cancelled,
            Err(Refusal::Rejected(why)) => {
                warn!(agent = %drive.eval.agent, error = %why, "{} has no run of case {}: {why}", drive.eval.id, case.id);
                CaseEnd::failed("rejected")
            }
            Err(Refusal::NoSource(why)) => {
                warn!(agent = %drive.eval.agent, error = %why, "{} has no run of case {}: {why}", drive.eval.id, case.id);
                CaseEnd::failed(SOURCE_NOT_FOUND)
            }
            Err(Refusal::Busy) => return Settled::Cancelled,
            Err(Refusal::Stop(why)) => return Settled::Stopped(why),
        };
        self.record_end(drive, slot, end).await
    }

    async fn record_end(&self, drive: &Drive, slot: EvalSlot, end: CaseEnd) -> Settled {
        let change = EvalChange::Ended {
            slot,
            end: Box::new(end.clone()),
        };
        retried(|| {
            self.runner
                .store()
                .change_eval(drive.eval.id, change.clone())
        })
        .await;
        Settled::Ended(end)
    }

    /// Starts the run of a slot; `None` if the evaluation was cancelled before.
    async fn start(
        &self,
        drive: &Drive,
        slot: EvalSlot,
        case: &EvalCase,
    ) -> Result<Option<RunId>, Refusal> {
        let refusal = loop {
            if drive.token.is_cancelled() {
                break None;
            }
            match self.try_start(drive, slot, case).await {
                Ok(run) => return Ok(Some(self.record_start(drive.eval.id, slot, run).await)),
                Err(Refusal::Busy) => {
                    tokio::select! {
                        () = tokio::time::sleep(RETRY_INTERVAL) => {}
                        () = drive.token.cancelled() => {}
                    }
                }
                Err(refusal) => break Some(refusal),
            }
        };
        // A process that died before it recorded the start has perhaps started the run that is refused now.
        let key = plan::claim(drive.eval.id, slot, now()).key;
        let claimed = retried(|| self.runner.store().claimed_run(key.clone())).await;
        if let Some(claimed) = claimed {
            let run = self.record_start(drive.eval.id, slot, claimed.run).await;
            return Ok(Some(run));
        }
        refusal.map_or(Ok(None), Err)
    }

    async fn try_start(
        &self,
        drive: &Drive,
        slot: EvalSlot,
        case: &EvalCase,
    ) -> Result<RunId, Refusal> {
        let root = drive.roots.get(usize::from(slot.version));
        let root = root.ok_or_else(|| Refusal::Rejected("it has no such version".to_owned()))?;
        let owner = drive.eval.owner.as_deref();
        let agent = root.agent.name.clone();
        let request = line::run_request(&case.request, &agent, owner, &self.settings);
        let request = Box::pin(request).await;
        let request = request.map_err(|problem| Refusal::Rejected(line::problem_json(&problem)))?;
        let mut marks = vec![(evaluation::LABEL.to_owned(), drive.eval.id.to_string())];
        if drive.eval.request.tools == ToolUse::Recorded && case.source.is_some() {
            let source = self.source(drive, case).await.map_err(Refusal::NoSource)?;
            marks.push((evaluation::SOURCE_LABEL.to_owned(), source.id.to_string()));
        }
        let request = RunRequest {
            labels: request.labels.into_iter().chain(marks).collect(),
            definition: Some(Box::new(root.clone())),
            claim: Some(plan::claim(drive.eval.id, slot, now())),
            ..request
        };
        match Box::pin(self.runner.start(request)).await {
            Ok(run) => Ok(run.id),
            Err(StartError::Store(StoreError::AlreadyClaimed(claimed))) => Ok(claimed.run),
            Err(StartError::QueueFull(_) | StartError::Store(_) | StartError::Draining) => {
                Err(Refusal::Busy)
            }
            Err(
                error @ (StartError::BudgetExhausted(_)
                | StartError::Provider(_)
                | StartError::Unpriced(_)
                | StartError::NoNode { .. }),
            ) => Err(Refusal::Stop(error.to_string())),
            Err(error) => Err(Refusal::Rejected(error.to_string())),
        }
    }

    /// The recorded run that the case comes from.
    async fn source(&self, drive: &Drive, case: &EvalCase) -> Result<Run, String> {
        let id = case.source.ok_or("it does not come from a recorded run")?;
        let found = retried(|| self.runner.store().run(id)).await;
        let owner = drive.eval.request.source_owner.as_ref();
        let is_readable = |run: &Run| owner.is_none() || run.owner.as_ref() == owner;
        match found.filter(is_readable) {
            None => Err(format!("the recorded run {id} is gone")),
            Some(run) if run.parent_id.is_some() => Err(format!("{id} is not a root run")),
            Some(run) if !run.status.is_terminal() => Err(format!("{id} has not ended")),
            Some(run) => Ok(run),
        }
    }

    /// What the recorded run of a case shows: it is the old version.
    async fn recorded_end(&self, drive: &Drive, slot: EvalSlot, case: &EvalCase) -> CaseEnd {
        match self.source(drive, case).await {
            Ok(run) => {
                self.record_start(drive.eval.id, slot, run.id).await;
                let end = self.measure(&run).await;
                CaseEnd {
                    is_recorded: true,
                    ..self.scored(drive, slot, case, &run, end).await
                }
            }
            Err(why) => {
                warn!(agent = %drive.eval.agent, error = %why, "{} has no recorded run of case {}: {why}", drive.eval.id, case.id);
                CaseEnd::failed(SOURCE_NOT_FOUND)
            }
        }
    }

    /// How the run of the case ended in the evaluation that this one is compared with. It is paid for.
    async fn earlier_end(&self, drive: &Drive, slot: EvalSlot, case: &EvalCase) -> CaseEnd {
        let earlier = drive.earlier.get(&(case.id.clone(), slot.repeat));
        let Some(earlier) = earlier else {
            return CaseEnd::failed(SOURCE_NOT_FOUND);
        };
        if let Some(run) = earlier.run {
            self.record_start(drive.eval.id, slot, run).await;
        }
        let end = earlier.end.clone();
        CaseEnd {
            is_recorded: true,
            scoring_cost: Cost::default(),
            ..end.unwrap_or_else(|| CaseEnd::failed(SOURCE_NOT_FOUND))
        }
    }

    async fn record_start(&self, eval: EvalId, slot: EvalSlot, run: RunId) -> RunId {
        let change = EvalChange::Started { slot, run };
        retried(|| self.runner.store().change_eval(eval, change.clone())).await;
        run
    }

    /// Waits for the end of a run, or cancels it with the evaluation, and returns what is kept of it.
    async fn end_of(&self, drive: &Drive, slot: EvalSlot, case: &EvalCase, id: RunId) -> CaseEnd {
        tokio::select! {
            () = wait_for_end(&self.runner, id) => {}
            () = drive.token.cancelled() => {
                let reason = Some(format!("{} was cancelled", drive.eval.id));
                retried(|| Box::pin(self.runner.cancel(id, reason.clone()))).await;
                wait_for_end(&self.runner, id).await;
            }
        }
        let Some(run) = retried(|| self.runner.store().run(id)).await else {
            return CaseEnd::failed("deleted");
        };
        let end = self.measure(&run).await;
        self.scored(drive, slot, case, &run, end).await
    }

    /// The end with what the scorers say of the run, if it completed.
    async fn scored(
        &self,
        drive: &Drive,
        slot: EvalSlot,
        case: &EvalCase,
        run: &Run,
        mut end: CaseEnd,
    ) -> CaseEnd {
        if end.outcome == CaseOutcome::Completed {
            let names = &drive.eval.request.scorers;
            let case_run = CaseRun {
                eval: drive.eval.id,
                slot,
                case,
                run,
            };
            let known = &drive.scorers;
            let scored = scoring::score(&self.runner, &self.scorers, known, names, &case_run);
            let scored = Box::pin(scored).await;
            end.scores = scored.scores;
            end.unscored = scored.unscored;
            end.scoring_cost = scored.cost;
        }
        end
    }

    /// The end of a run, before it is scored.
    async fn measure(&self, run: &Run) -> CaseEnd {
        let store = self.runner.store().as_ref();
        let diverged = match run.status {
            Status::Completed => None,
            _ => retried(|| Box::pin(divergence::find(store, run.id))).await,
        };
        let code = run.error.as_ref().map(|error| error.code.to_string());
        let (outcome, error) = match (run.status, &diverged) {
            (Status::Completed, _) => (CaseOutcome::Completed, None),
            (_, Some(_)) => (CaseOutcome::Diverged, None),
            (_, None) => {
                let code = code.unwrap_or_else(|| Status::Cancelled.as_str().to_owned());
                (CaseOutcome::Failed, Some(code))
            }
        };
        let usage = &run.tree.usage;
        CaseEnd {
            outcome,
            error,
            scores: BTreeMap::new(),
            unscored: BTreeMap::new(),
            cost: usage.cost,
            scoring_cost: Cost::default(),
            tokens: usage.tokens.total(),
            turns: u64::from(run.turns),
            tool_calls: usage.tool_calls,
            duration_ms: run.duration_ms(now()),
            diverged,
            is_recorded: false,
        }
    }

    /// Records the end of an evaluation with what it has measured until then.
    async fn finish(&self, id: EvalId, state: EvalState, reason: Option<String>) {
        let store = self.runner.store();
        let Some(eval) = retried(|| store.eval(id)).await else {
            return;
        };
        let runs = retried(|| store.eval_runs(id, 0..u32::MAX)).await;
        let case_ids = retried(|| store.eval_case_ids(id)).await;
        let at = now();
        let newest = newest_completed(&runs);
        let request = eval.request.clone();
        let measured = run_blocking(move || {
            let gates = request
                .gates
                .iter()
                .filter_map(|gate| Gate::parse(gate).ok());
            let gates: Vec<Gate> = gates.collect();
            result::result(&Measured {
                runs: &runs,
                case_ids: &case_ids,
                has_old: request.versions.len() > 1,
                scorers: &request.scorers,
                gates: &gates,
            })
        });
        let result = measured.await;
        let report = match newest {
            Some(run) if state == EvalState::Completed => self.regression(&eval, &result, run, at),
            _ => None,
        };
        let change = EvalChange::Finish {
            state,
            reason,
            result: Box::new(result),
            at,
            report,
        };
        retried(|| store.change_eval(id, change.clone())).await;
    }

    /// What is reported of a scheduled evaluation that is worse than the one before.
    fn regression(
        &self,
        eval: &Evaluation,
        result: &EvalResult,
        run: RunId,
        at: Timestamp,
    ) -> Option<LateReport> {
        let (schedule, against) = (eval.request.schedule.as_ref()?, eval.request.against_eval?);
        let scorers = result.scorers.iter();
        let worse = scorers.filter(|(_, it)| it.comparison.high.is_some_and(|high| high < 0.0));
        let scorers: BTreeMap<String, Comparison> = worse
            .map(|(name, it)| (name.clone(), it.comparison.clone()))
            .collect();
        if scorers.is_empty() {
            return None;
        }
        let names: Vec<&str> = scorers.keys().map(String::as_str).collect();
        warn!(
            agent = %eval.agent,
            "{}, of schedule {schedule} of agent {}, is worse than {against}: {}", eval.id, eval.agent, names.join(", ")
        );
        let data = Regressed {
            agent: &eval.agent,
            schedule,
            eval: eval.id,
            against,
            run,
            scorers: &scorers,
        };
        let agents = self.runner.catalog().current();
        let webhook = agents
            .get(&eval.agent)
            .ok()
            .and_then(|it| it.webhook.as_ref());
        let deliveries = webhook_message::of_agent(webhook, EventName::EvalRegressed, at, data);
        let event = EventKind::EvalRegressed {
            eval: eval.id,
            against,
            scorers: scorers.clone(),
        };
        Some(LateReport {
            run,
            entries: scores::encode(at, event).ok()?,
            deliveries,
        })
    }
}

#[derive(Serialize)]
struct Regressed<'e> {
    agent: &'e str,
    schedule: &'e str,
    eval: EvalId,
    against: EvalId,
    /// The newest run of the evaluation.
    run: RunId,
    scorers: &'e BTreeMap<String, Comparison>,
}

fn newest_completed(runs: &[EvalRun]) -> Option<RunId> {
    let new = runs
        .iter()
        .filter(|run| run.slot.version == evaluation::NEW);
    let is_completed = |end: &CaseEnd| end.outcome == CaseOutcome::Completed;
    let completed = new.filter(|run| run.end.as_ref().is_some_and(is_completed));
    completed.filter_map(|run| run.run).max()
}

/// Never resolves while nothing is to be admitted.
async fn admitted(
    admission: &mut Option<BoxFuture<'_, OwnedSemaphorePermit>>,
) -> OwnedSemaphorePermit {
    match admission {
        Some(admission) => admission.await,
        None => std::future::pending().await,
    }
}

/// Whether the run failed for its provider, which may fail all others too.
fn is_provider_failure(end: &CaseEnd) -> bool {
    let codes = [
        FailureCode::ProviderAuth,
        FailureCode::ProviderBadRequest,
        FailureCode::ProviderRateLimit,
        FailureCode::ProviderOverloaded,
        FailureCode::ProviderServer,
    ];
    let code = end.error.as_deref();
    code.is_some_and(|code| codes.iter().any(|it| it.to_string() == code))
}
