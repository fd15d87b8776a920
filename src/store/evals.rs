//! Evaluations, their cases, and the runs of these. An evaluation exists once [`EvalRecords::accept_eval`] has committed it; cases
//! without one are those of a request that ended early, and are removed later. All that a driver knows is here: another one goes on.

use std::ops::Range;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use uuid::Uuid;

use crate::domain::evaluation::{
    CaseEnd, EvalCase, EvalDefinition, EvalId, EvalResult, EvalRun, EvalSlot, EvalState, Evaluation,
};
use crate::domain::run::RunId;
use crate::domain::usage::Cost;
use crate::settings::choice::Choice;
use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::encoding::clock_skew::first_id;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::late_events::{
    LateEvent, LateReport, insert_late_delivery, insert_late_entry, is_ended, set_last_event,
};
use crate::store::reader::ReadMode;
use crate::store::sql::row::{Row, StoreResult, damaged};
use crate::store::sql::value::{NamedValue, free_text, params, values};

pub trait EvalRecords: Send + Sync + 'static {
    /// Adds cases to an evaluation that is not accepted yet.
    fn add_eval_cases(
        &self,
        eval: EvalId,
        cases: Vec<EvalCase>,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Makes an evaluation of the cases that were added; there are as many as `cases`. `definitions` are those of its versions.
    fn accept_eval(
        &self,
        eval: Evaluation,
        definitions: Vec<EvalDefinition>,
        cases: u32,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    fn eval(&self, id: EvalId) -> BoxFuture<'_, Result<Option<Evaluation>, StoreError>>;

    fn eval_definitions(
        &self,
        id: EvalId,
    ) -> BoxFuture<'_, Result<Vec<EvalDefinition>, StoreError>>;

    /// A page of evaluations without their results, newest first.
    fn evals(&self, query: EvalQuery) -> BoxFuture<'_, Result<Vec<Evaluation>, StoreError>>;

    /// The evaluations that have not ended, oldest first.
    fn unfinished_evals(&self) -> BoxFuture<'_, Result<Vec<Evaluation>, StoreError>>;

    /// The cases with these numbers.
    fn eval_cases(
        &self,
        id: EvalId,
        numbers: Range<u32>,
    ) -> BoxFuture<'_, Result<Vec<EvalCase>, StoreError>>;

    /// The ids of all cases, by number.
    fn eval_case_ids(&self, id: EvalId) -> BoxFuture<'_, Result<Vec<String>, StoreError>>;

    /// The runs of the cases with these numbers that have started, in order.
    fn eval_runs(
        &self,
        id: EvalId,
        numbers: Range<u32>,
    ) -> BoxFuture<'_, Result<Vec<EvalRun>, StoreError>>;

    fn change_eval(&self, id: EvalId, change: EvalChange) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The newest root runs of an agent in this version.
    fn runs_of_version(
        &self,
        agent: String,
        version: String,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>>;

    /// Removes a part of the evaluations that ended before this time, and of the cases without one that are as old. Returns true if
    /// there may be more.
    fn trim_evals(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>>;
}

#[derive(Clone, Debug)]
pub struct EvalQuery {
    /// Only evaluations of this key.
    pub owner: Option<String>,
    /// Only evaluations of this agent.
    pub agent: Option<String>,
    /// Only evaluations that were created before this one (the cursor).
    pub before: Option<EvalId>,
    pub limit: usize,
}

#[derive(Clone, Debug)]
pub enum EvalChange {
    /// Its runs start.
    Begin,
    /// A run has started.
    Started { slot: EvalSlot, run: RunId },
    /// A run has ended, or cannot start. It is counted once.
    Ended { slot: EvalSlot, end: Box<CaseEnd> },
    /// No more runs start. The first reason stays.
    Cancel { reason: String },
    /// The first end stays.
    Finish {
        state: EvalState,
        reason: Option<String>,
        result: Box<EvalResult>,
        at: Timestamp,
        /// An event that is added to one of its runs.
        report: Option<LateReport>,
    },
}

/// Rows that [`EvalRecords::trim_evals`] removes at once.
const TRIM_ROWS: u32 = 1_000;

/// Selects evaluations for [`evaluation`].
macro_rules! select {
    ($result:literal, $rest:literal) => {
        concat!(
            "SELECT id, owner, agent, request, state, planned, ended, spent, created_at, finished_at, reason, ",
            $result, " FROM evals ", $rest
        )
    };
}

const FIND: &str = select!("result", "WHERE id = :id");
const LIST: &str = select!(
    "NULL AS result",
    "WHERE (:owner::text IS NULL OR owner = :owner) AND (:agent::text IS NULL OR agent = :agent) \
     AND (:before::uuid IS NULL OR id < :before) ORDER BY id DESC LIMIT :limit"
);
const UNFINISHED: &str = select!("NULL AS result", "WHERE finished_at IS NULL ORDER BY id");
const DEFINITIONS: &str = "SELECT definitions FROM evals WHERE id = :id";
const CASES: &str = "SELECT number, id, request, expected, source FROM eval_cases \
     WHERE eval = :id AND number >= :start AND number < :until ORDER BY number";
const CASE_IDS: &str = "SELECT id FROM eval_cases WHERE eval = :id ORDER BY number";
const RUNS: &str = "SELECT number, repetition, version, run, ending FROM eval_runs \
     WHERE eval = :id AND number >= :start AND number < :until ORDER BY number, repetition, version";
const OF_VERSION: &str = "SELECT id FROM runs WHERE agent = :agent AND agent_version = :version AND parent IS NULL \
     ORDER BY id DESC LIMIT :limit";

const INSERT_CASE: &str = "INSERT INTO eval_cases (eval, number, id, request, expected, source) \
     VALUES (:eval, :number, :id, :request, :expected, :source) \
     ON CONFLICT (eval, number) DO UPDATE SET id = excluded.id, request = excluded.request, expected = excluded.expected, \
     source = excluded.source";
/// Of an attempt to accept an evaluation of the same id that a crash has ended.
const DELETE_MORE_CASES: &str = "DELETE FROM eval_cases WHERE eval = :id AND number >= :cases";
const INSERT: &str = "INSERT INTO evals (id, owner, agent, request, definitions, state, planned, ended, spent, created_at) \
     VALUES (:id, :owner, :agent, :request, :definitions, :state, :planned, 0, 0, :created_at)";
const BEGIN: &str = "UPDATE evals SET state = :state WHERE id = :id AND finished_at IS NULL";
const START_RUN: &str = "INSERT INTO eval_runs (eval, number, repetition, version, run) \
     VALUES (:id, :number, :repetition, :version, :run) ON CONFLICT (eval, number, repetition, version) DO NOTHING";
/// Of a run that could not start there is no row.
const ENSURE_RUN: &str = "INSERT INTO eval_runs (eval, number, repetition, version) \
     VALUES (:id, :number, :repetition, :version) ON CONFLICT (eval, number, repetition, version) DO NOTHING";
const COUNT_END: &str = "UPDATE evals SET ended = ended + 1, spent = spent + :spent WHERE id = :id \
     AND EXISTS (SELECT 1 FROM eval_runs r WHERE r.eval = :id AND r.number = :number AND r.repetition = :repetition \
     AND r.version = :version AND r.ending IS NULL)";
const END_RUN: &str = "UPDATE eval_runs SET ending = :ending WHERE eval = :id AND number = :number \
     AND repetition = :repetition AND version = :version AND ending IS NULL";
const CANCEL: &str =
    "UPDATE evals SET reason = coalesce(reason, :reason) WHERE id = :id AND finished_at IS NULL";
const FINISH: &str = "UPDATE evals SET state = :state, reason = :reason, result = :result, finished_at = :at \
     WHERE id = :id AND finished_at IS NULL";
/// Whether the end of the evaluation is not recorded yet.
macro_rules! is_finishing {
    () => {
        concat!(
            "EXISTS (SELECT 1 FROM evals v WHERE v.id = :id AND v.finished_at IS NULL) AND ",
            is_ended!()
        )
    };
}

const REPORTED: LateEvent = LateEvent {
    insert_entry: insert_late_entry!("WHERE ", is_finishing!()),
    set_last_event: set_last_event!(is_finishing!()),
    insert_delivery: insert_late_delivery!(is_finishing!()),
};
const TRIM_RUNS: &str = "DELETE FROM eval_runs WHERE (eval, number, repetition, version) IN \
     (SELECT r.eval, r.number, r.repetition, r.version FROM eval_runs r JOIN evals e ON e.id = r.eval \
     WHERE e.finished_at < :before LIMIT :rows)";
const TRIM_CASES: &str = "DELETE FROM eval_cases WHERE (eval, number) IN \
     (SELECT c.eval, c.number FROM eval_cases c LEFT JOIN evals e ON e.id = c.eval \
     WHERE e.finished_at < :before OR (e.id IS NULL AND c.eval < :before_id) LIMIT :rows)";
const TRIM: &str = "DELETE FROM evals WHERE finished_at < :before \
     AND NOT EXISTS (SELECT 1 FROM eval_runs r WHERE r.eval = evals.id) \
     AND NOT EXISTS (SELECT 1 FROM eval_cases c WHERE c.eval = evals.id)";

impl<E: Engine> EvalRecords for E {
    fn add_eval_cases(
        &self,
        eval: EvalId,
        cases: Vec<EvalCase>,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let add = |changes: Changes, case: EvalCase| {
            let case = values! {
                ":eval": eval.0, ":number": case.number, ":id": free_text(case.id), ":request": free_text(case.request),
                ":expected": case.expected.map(|it| free_text(it.to_string())), ":source": case.source,
            };
            changes.and(INSERT_CASE, case)
        };
        self.apply(cases.into_iter().fold(Changes::default(), add))
    }

    fn accept_eval(
        &self,
        eval: Evaluation,
        definitions: Vec<EvalDefinition>,
        cases: u32,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let more = values! {":id": eval.id.0, ":cases": cases};
            let insert = values! {
                ":id": eval.id.0,
                ":owner": eval.owner,
                ":agent": eval.agent,
                ":request": free_text(to_json(&eval.request)?),
                ":definitions": free_text(to_json(&definitions)?),
                ":state": eval.state.as_str(),
                ":planned": signed(eval.planned),
                ":created_at": eval.created_at.as_millisecond(),
            };
            self.apply(Changes::one(INSERT, insert).and(DELETE_MORE_CASES, more))
                .await
        })
    }

    fn eval(&self, id: EvalId) -> BoxFuture<'_, Result<Option<Evaluation>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { db.first(FIND, params! {":id": id.0}, evaluation).await })
        })
    }

    fn eval_definitions(
        &self,
        id: EvalId,
    ) -> BoxFuture<'_, Result<Vec<EvalDefinition>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let definitions = |row: &Row<'_>| row.json("definitions");
                let found = db
                    .first(DEFINITIONS, params! {":id": id.0}, definitions)
                    .await?;
                Ok(found.flatten().unwrap_or_default())
            })
        })
    }

    fn evals(&self, query: EvalQuery) -> BoxFuture<'_, Result<Vec<Evaluation>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {
                    ":owner": query.owner.as_ref(), ":agent": query.agent.as_ref(),
                    ":before": query.before.map(|id| id.0), ":limit": signed(query.limit as u64),
                };
                db.query(LIST, params, evaluation).await
            })
        })
    }

    fn unfinished_evals(&self) -> BoxFuture<'_, Result<Vec<Evaluation>, StoreError>> {
        self.read(ReadMode::Statement, |db| {
            Box::pin(db.query(UNFINISHED, &[], evaluation))
        })
    }

    fn eval_cases(
        &self,
        id: EvalId,
        numbers: Range<u32>,
    ) -> BoxFuture<'_, Result<Vec<EvalCase>, StoreError>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let range = params! {":id": id.0, ":start": numbers.start, ":until": numbers.end};
                db.query(CASES, range, case).await
            })
        })
    }

    fn eval_case_ids(&self, id: EvalId) -> BoxFuture<'_, Result<Vec<String>, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move {
                let id_of = |row: &Row<'_>| row.get("id");
                db.query(CASE_IDS, params! {":id": id.0}, id_of).await
            })
        })
    }

    fn eval_runs(
        &self,
        id: EvalId,
        numbers: Range<u32>,
    ) -> BoxFuture<'_, Result<Vec<EvalRun>, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move {
                let range = params! {":id": id.0, ":start": numbers.start, ":until": numbers.end};
                db.query(RUNS, range, run).await
            })
        })
    }

    fn change_eval(&self, id: EvalId, change: EvalChange) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.apply(changes(id, change)?).await })
    }

    fn runs_of_version(
        &self,
        agent: String,
        version: String,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move {
                let params = params! {
                    ":agent": &agent, ":version": &version, ":limit": signed(limit as u64),
                };
                db.query(OF_VERSION, params, |row: &Row<'_>| row.get("id"))
                    .await
            })
        })
    }

    fn trim_evals(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        let old = values! {
            ":before": before.as_millisecond(), ":before_id": first_id(before), ":rows": TRIM_ROWS,
        };
        let trim = Changes::one(TRIM_RUNS, old.clone())
            .and(TRIM_CASES, old.clone())
            .and(TRIM, old)
            .freeing_space();
        Box::pin(async move {
            let removed = self.commit(trim).await?;
            let limit = u64::from(TRIM_ROWS);
            Ok(removed.iter().take(2).any(|rows| *rows >= limit))
        })
    }
}

fn changes(id: EvalId, change: EvalChange) -> StoreResult<Changes> {
    let id = id.0;
    Ok(match change {
        EvalChange::Begin => Changes::one(
            BEGIN,
            values! {":id": id, ":state": EvalState::Running.as_str()},
        ),
        EvalChange::Started { slot, run } => {
            let mut started = slot_values(id, slot).to_vec();
            started.extend(values! {":run": run});
            Changes::default().and_vec(START_RUN, started)
        }
        EvalChange::Ended { slot, end } => {
            let of_slot = slot_values(id, slot).to_vec();
            let (mut counted, mut ended) = (of_slot.clone(), of_slot.clone());
            counted.extend(values! {":spent": signed(end.spent().0)});
            ended.extend(values! {":ending": free_text(to_json(&end)?)});
            Changes::default()
                .and_vec(ENSURE_RUN, of_slot)
                .and_vec(COUNT_END, counted)
                .and_vec(END_RUN, ended)
        }
        EvalChange::Cancel { reason } => {
            Changes::one(CANCEL, values! {":id": id, ":reason": free_text(reason)})
        }
        EvalChange::Finish {
            state,
            reason,
            result,
            at,
            report,
        } => {
            let finish = values! {
                ":id": id, ":state": state.as_str(), ":reason": reason.map(free_text),
                ":result": free_text(to_json(&result)?), ":at": at.as_millisecond(),
            };
            let report = report.map(|report| REPORTED.changes(report, values! {":id": id}.into()));
            report.unwrap_or_default().and(FINISH, finish)
        }
    })
}

fn slot_values(eval: Uuid, slot: EvalSlot) -> [NamedValue<'static>; 4] {
    values! {
        ":id": eval, ":number": slot.case, ":repetition": slot.repeat, ":version": slot.version,
    }
}

fn to_json(value: &impl serde::Serialize) -> StoreResult<String> {
    serde_json::to_string(value)
        .map_err(|error| StoreError::Backend(format!("an evaluation cannot be written: {error}")))
}

fn evaluation(row: &Row<'_>) -> StoreResult<Evaluation> {
    let request = row.json("request")?;
    let state: &str = row.get("state")?;
    let state = EvalState::named(state);
    Ok(Evaluation {
        id: EvalId(row.get("id")?),
        owner: row.get("owner")?,
        agent: row.get("agent")?,
        request: request.ok_or_else(|| damaged("an evaluation has no request"))?,
        state: state.ok_or_else(|| damaged("an evaluation has no state"))?,
        planned: row.get("planned")?,
        ended: row.get("ended")?,
        spent: Cost(row.get("spent")?),
        created_at: row.get("created_at")?,
        finished_at: row.get("finished_at")?,
        reason: row.get("reason")?,
        result: row.json("result")?,
    })
}

fn case(row: &Row<'_>) -> StoreResult<EvalCase> {
    Ok(EvalCase {
        number: row.get("number")?,
        id: row.get("id")?,
        request: row.get("request")?,
        expected: row.json("expected")?,
        source: row.get("source")?,
    })
}

fn run(row: &Row<'_>) -> StoreResult<EvalRun> {
    Ok(EvalRun {
        slot: EvalSlot {
            case: row.get("number")?,
            repeat: row.get("repetition")?,
            version: row.get("version")?,
        },
        run: row.get("run")?,
        end: row.json("ending")?,
    })
}
