//! Evaluations as clients see them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::domain::agent::tool_use::ToolUse;
use crate::domain::evaluation::{
    CaseEnd, CaseOutcome, Divergence, EvalId, EvalResult, EvalRun, EvalState, EvalVersion,
    Evaluation,
};
use crate::domain::run::RunId;
use crate::domain::score::ScoreValue;
use crate::domain::timestamp_text;
use crate::domain::usage::Cost;

/// An evaluation.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Eval")]
pub struct EvalView {
    /// The id of the evaluation.
    pub id: EvalId,
    /// The agent of the new version.
    pub agent: String,
    /// What it is doing.
    pub state: EvalState,
    /// The new version, then the old one if there is one.
    pub versions: Vec<EvalVersion>,
    /// The evaluation whose runs are the old version; null if it is compared with another one, or with nothing.
    pub against_eval: Option<EvalId>,
    /// The name of its dataset; null if the cases are from elsewhere.
    pub dataset: Option<String>,
    /// Its cases are recorded runs since then; null if they are from elsewhere.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    pub since: Option<Timestamp>,
    /// The names of its scorers.
    pub scorers: Vec<String>,
    /// What happens to calls of tools.
    pub tools: ToolUse,
    /// What happens to calls that have no recorded result: `stop`, `safe` or `agent:NAME`.
    pub unknown: String,
    /// Regular expressions of what makes no difference in the arguments of calls.
    pub ignore: Vec<String>,
    /// How often each case runs.
    pub repeat: u32,
    /// The conditions for its result.
    pub gates: Vec<String>,
    /// The number of its runs: cases, times versions, times repetitions.
    pub planned: u64,
    /// The number of its runs that have ended.
    pub ended: u64,
    /// What the runs will cost, by the mean of the newest runs of their agents; null if no cost is recorded.
    pub estimate_usd: Option<f64>,
    /// The most that it may cost; null without a budget.
    pub cap_usd: Option<f64>,
    /// What its runs that have ended, and their scores, cost.
    pub spent_usd: f64,
    /// When it was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub created_at: Timestamp,
    /// When it ended; null until then.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    pub finished_at: Option<Timestamp>,
    /// Why it was stopped or cancelled, or has failed.
    pub reason: Option<String>,
    /// What it has measured; null until it has ended, and in lists.
    pub result: Option<EvalResult>,
    /// Routes of the evaluation.
    pub links: EvalLinks,
}

/// Routes of an evaluation.
#[derive(Serialize, JsonSchema)]
pub struct EvalLinks {
    /// The evaluation.
    #[serde(rename = "self")]
    pub itself: String,
    /// Its cases.
    pub cases: String,
    /// POST cancels it.
    pub cancel: String,
}

impl EvalView {
    pub fn new(eval: Evaluation, links: &str) -> Self {
        let itself = format!("{links}/evals/{}", eval.id);
        let request = eval.request;
        let mut result = eval.result;
        for flipped in result.iter_mut().flat_map(|result| &mut result.flipped) {
            flipped.compare.insert_str(0, links);
        }
        Self {
            id: eval.id,
            agent: eval.agent,
            state: eval.state,
            versions: request.versions,
            against_eval: request.against_eval,
            dataset: request.dataset,
            since: request.since,
            scorers: request.scorers,
            tools: request.tools,
            unknown: request.unknown.to_string(),
            ignore: request.ignore,
            repeat: request.repeat,
            gates: request.gates,
            planned: eval.planned,
            ended: eval.ended,
            estimate_usd: request.estimate.map(Cost::to_usd),
            cap_usd: request.budget.map(Cost::to_usd),
            spent_usd: eval.spent.to_usd(),
            created_at: eval.created_at,
            finished_at: eval.finished_at,
            reason: eval.reason,
            result,
            links: EvalLinks {
                cases: format!("{itself}/cases"),
                cancel: format!("{itself}/cancel"),
                itself,
            },
        }
    }
}

/// A page of evaluations, newest first.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EvalPage")]
pub struct EvalsPage {
    /// The evaluations.
    pub data: Vec<EvalView>,
    /// The `cursor` of the next page; null on the last page.
    pub next_cursor: Option<EvalId>,
}

/// A page of cases.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EvalCasePage")]
pub struct CasesPage {
    /// The cases, in the order of the dataset.
    pub data: Vec<CaseView>,
    /// The `cursor` of the next page; null on the last page.
    pub next_cursor: Option<String>,
}

/// A case of an evaluation.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EvalCase")]
pub struct CaseView {
    /// Its id in the dataset.
    pub case: String,
    /// The answer that is expected.
    pub expected: Option<Value>,
    /// The recorded run that it comes from.
    pub run: Option<RunId>,
    /// Its runs that have started.
    pub runs: Vec<CaseRunView>,
}

/// A run of a case.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EvalRun")]
pub struct CaseRunView {
    /// 0 for the new version, 1 for the old one.
    pub version: u8,
    /// From 0.
    pub repeat: u32,
    /// Null if no run could start. Of the version `recorded` the run that the case comes from.
    pub run_id: Option<RunId>,
    /// How it ended; null until it has ended and is scored.
    pub outcome: Option<CaseOutcome>,
    /// Why it failed: the code of its error, `cancelled`, `deleted`, `rejected` if no run could start, or `source_not_found` if the
    /// recorded run of the case is not there.
    pub error: Option<String>,
    /// Its scores by scorer.
    pub scores: BTreeMap<String, ScoreValue>,
    /// Why scorers gave no score.
    pub unscored: BTreeMap<String, String>,
    /// The cost of its tree; null if no price is known.
    pub cost_usd: Option<f64>,
    /// Input and output tokens of its tree.
    pub tokens: Option<u64>,
    /// Its turns.
    pub turns: Option<u64>,
    /// The tool calls of its tree.
    pub tool_calls: Option<u64>,
    /// Milliseconds from its start to its end.
    pub duration_ms: Option<u64>,
    /// The call at which it diverged.
    pub diverged: Option<Divergence>,
}

impl From<EvalRun> for CaseRunView {
    fn from(run: EvalRun) -> Self {
        let number = |number: fn(&CaseEnd) -> u64| run.end.as_ref().map(number);
        let (tokens, turns) = (number(|end| end.tokens), number(|end| end.turns));
        let (tool_calls, duration_ms) =
            (number(|end| end.tool_calls), number(|end| end.duration_ms));
        let end = run.end;
        let cost = end.as_ref().and_then(|end| end.cost);
        let outcome = end.as_ref().map(|end| end.outcome);
        let (error, scores, unscored, diverged) = match end {
            Some(end) => (end.error, end.scores, end.unscored, end.diverged),
            None => Default::default(),
        };
        Self {
            version: run.slot.version,
            repeat: run.slot.repeat,
            run_id: run.run,
            outcome,
            error,
            scores,
            unscored,
            cost_usd: cost.map(Cost::to_usd),
            tokens,
            turns,
            tool_calls,
            duration_ms,
            diverged,
        }
    }
}
