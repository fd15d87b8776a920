//! Evaluations: one or two versions of an agent over the same cases.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

use crate::domain::agent::tool_use::{ToolUse, UnknownCalls};
use crate::domain::comparison::{Comparison, Summary};
use crate::domain::gate::GateOutcome;
use crate::domain::run::RunId;
use crate::domain::score::ScoreValue;
use crate::domain::usage::Cost;
use crate::settings::choice::choice;

/// Most runs of an evaluation: cases, times versions, times repetitions.
pub const MAX_RUNS: u64 = 200_000;
/// Most repetitions of a case.
pub const MAX_REPEAT: u32 = 100;
/// Most scorers, and most gates, of an evaluation.
pub const MAX_SCORERS: usize = 32;
/// The label of the runs of an evaluation.
pub const LABEL: &str = "evaluation";
/// The label of those that play a recorded run again, with its id.
pub const SOURCE_LABEL: &str = "evaluation.source";
/// What the version of recorded runs is called.
pub const RECORDED: &str = "recorded";
/// What an evaluation names that is compared with the last one.
pub const LAST: &str = "last";
/// Most cases that are made of recorded runs.
pub const MAX_RECORDED_CASES: u32 = 1_000;
/// The index of the version that is evaluated; the one that it is compared with comes after it.
pub const NEW: u8 = 0;
pub const OLD: u8 = 1;

/// `eval_` and a UUIDv7.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(transparent)]
pub struct EvalId(#[schemars(with = "String", regex(pattern = "^eval_[0-9a-f-]{36}$"))] pub Uuid);

impl EvalId {
    pub fn new() -> Self {
        Self(RunId::new().0)
    }
}

impl EvalId {
    /// The same for the same time and seed.
    pub fn derived(at: Timestamp, seed: &str) -> Self {
        let digest: [u8; 32] = Sha256::digest(seed).into();
        let mut random = [0; 10];
        random.copy_from_slice(&digest[..10]);
        let millis = u64::try_from(at.as_millisecond()).unwrap_or_default();
        Self(Builder::from_unix_timestamp_millis(millis, &random).into_uuid())
    }
}

impl Default for EvalId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for EvalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "eval_{}", self.0.as_hyphenated())
    }
}

impl fmt::Debug for EvalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for EvalId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let uuid = text.strip_prefix("eval_").filter(|rest| rest.len() == 36);
        Uuid::try_parse(uuid.ok_or(())?).map(Self).map_err(|_| ())
    }
}

impl<'de> Deserialize<'de> for EvalId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|()| D::Error::custom("is no id of an evaluation"))
    }
}

impl Serialize for EvalId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

choice! {
    /// What an evaluation is doing.
    pub enum EvalState {
        /// No run has started.
        Queued = "queued",
        /// Runs of its cases are at work, or are scored.
        Running = "running",
        /// Each run of its cases has ended and is scored.
        Completed = "completed",
        /// It has stopped before its last case: its budget is spent, or a provider failed.
        Stopped = "stopped",
        /// A client has cancelled it.
        Cancelled = "cancelled",
        /// It cannot run any more.
        Failed = "failed",
    }
}

impl EvalState {
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Queued | Self::Running)
    }
}

choice! {
    /// How a run of a case ended.
    pub enum CaseOutcome {
        /// It has an output, and is scored.
        Completed = "completed",
        Failed = "failed",
        /// It called a tool that the evaluation does not execute.
        Diverged = "diverged",
    }
}

/// An evaluation as it is recorded, without its cases.
#[derive(Clone, Debug)]
pub struct Evaluation {
    pub id: EvalId,
    /// The key that has requested it; `None` without keys.
    pub owner: Option<String>,
    /// The agent of the new version.
    pub agent: String,
    pub request: EvalRequest,
    pub state: EvalState,
    /// The runs of its cases.
    pub planned: u64,
    /// The runs that have ended.
    pub ended: u64,
    /// The cost of these runs and of their scores.
    pub spent: Cost,
    pub created_at: Timestamp,
    pub finished_at: Option<Timestamp>,
    /// Why it was stopped or cancelled, or has failed; before that, why it is to be cancelled.
    pub reason: Option<String>,
    /// `None` until it has ended.
    pub result: Option<EvalResult>,
}

/// What an evaluation does. The definitions of its versions are recorded beside it: files that change later make no difference.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvalRequest {
    /// The new version, and the old one if there is one.
    pub versions: Vec<EvalVersion>,
    /// The name of its dataset; `None` if the cases are from elsewhere.
    pub dataset: Option<String>,
    /// Its cases are recorded runs since then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    pub scorers: Vec<String>,
    pub tools: ToolUse,
    #[serde(default)]
    pub unknown: UnknownCalls,
    /// Regular expressions of what makes no difference in the arguments of calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<String>,
    /// Whether the old version is the recorded run of each case, for which nothing runs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_against_recorded: bool,
    /// The evaluation whose runs are the old version, for which nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against_eval: Option<EvalId>,
    /// The name of the agent's schedule that has started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// Only recorded runs of this key are read; `None` if it may read all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_owner: Option<String>,
    pub repeat: u32,
    pub budget: Option<Cost>,
    pub gates: Vec<String>,
    /// What its runs will cost, by what those of the agents have; `None` if none is recorded.
    pub estimate: Option<Cost>,
}

/// A version of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EvalVersion {
    /// The name of the agent.
    pub agent: String,
    /// `sha256:` and the hex digest of the file's bytes, or `recorded` for recorded runs.
    pub version: String,
}

/// The definition that the runs of a version have.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EvalDefinition {
    /// The agent as the record of a run has it.
    pub definition: Box<RawValue>,
    /// The agents that it may call, in the same form.
    pub called: Vec<Box<RawValue>>,
    /// The text of the file, if the request had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A case of an evaluation.
#[derive(Clone, Debug)]
pub struct EvalCase {
    /// Counts from 0.
    pub number: u32,
    /// As the dataset has it.
    pub id: String,
    /// The body of the request for its runs.
    pub request: String,
    pub expected: Option<Value>,
    /// The recorded run that it comes from.
    pub source: Option<RunId>,
}

/// Which run of an evaluation: a case, for the nth time, in one version. They start in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EvalSlot {
    pub case: u32,
    /// From 0.
    pub repeat: u32,
    /// [`NEW`] or [`OLD`].
    pub version: u8,
}

/// A run of an evaluation.
#[derive(Clone, Debug)]
pub struct EvalRun {
    pub slot: EvalSlot,
    /// `None` until it has started.
    pub run: Option<RunId>,
    /// `None` until it has ended and is scored.
    pub end: Option<CaseEnd>,
}

/// What is kept of a run of an evaluation: it may be deleted before the evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseEnd {
    pub outcome: CaseOutcome,
    /// Of a run that failed: its error's code, or else `cancelled`, `deleted`, `rejected` or `source_not_found`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// By scorer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scores: BTreeMap<String, ScoreValue>,
    /// Why scorers gave no score.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unscored: BTreeMap<String, String>,
    /// Of its tree, without its scores; `None` if no price is known.
    pub cost: Option<Cost>,
    /// The cost of its scores.
    #[serde(default)]
    pub scoring_cost: Cost,
    pub tokens: u64,
    pub turns: u64,
    pub tool_calls: u64,
    pub duration_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diverged: Option<Divergence>,
    /// Whether the run is from the record: the evaluation has not paid for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_recorded: bool,
}

impl CaseEnd {
    /// The end of a run that has no numbers.
    pub fn failed(error: &str) -> Self {
        Self {
            outcome: CaseOutcome::Failed,
            error: Some(error.to_owned()),
            scores: BTreeMap::new(),
            unscored: BTreeMap::new(),
            cost: None,
            scoring_cost: Cost::default(),
            tokens: 0,
            turns: 0,
            tool_calls: 0,
            duration_ms: 0,
            diverged: None,
            is_recorded: false,
        }
    }

    pub fn spent(&self) -> Cost {
        let cost = self.cost.filter(|_| !self.is_recorded);
        let cost = cost.unwrap_or_default();
        Cost(cost.0.saturating_add(self.scoring_cost.0))
    }
}

/// The first call that an evaluation neither executes nor has a recorded result of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Divergence {
    /// The run in its tree, such as `planner/2.1:reader`: the agents, and the turn and the position of each call that leads to it.
    pub path: String,
    /// The turn whose reply makes the call.
    pub turn: u32,
    /// The name of the tool.
    pub tool: String,
    /// The arguments as JSON; cut if they are long.
    pub arguments: String,
}

/// What an evaluation has measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EvalResult {
    /// By scorer.
    pub scorers: BTreeMap<String, ScorerResult>,
    /// The numbers of the new version.
    #[serde(flatten)]
    pub totals: VersionTotals,
    /// Those of the old version; null without one.
    pub against: Option<VersionTotals>,
    /// Cases that pass in one version only, or have another label, at most 1,000.
    pub flipped: Vec<FlippedCase>,
    /// What became of the gates.
    pub gates: Vec<GateOutcome>,
}

/// The values of one scorer. A difference is the new version's value minus that of the old one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScorerResult {
    /// The values of the new version, then those of the old one.
    pub versions: Vec<Summary>,
    #[serde(flatten)]
    pub comparison: Comparison,
    /// How often each label was given: for each label the number in the new version, then that in the old one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Vec<u64>>,
    /// Why the scorer gave no score, with how often, at most 10.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub errors: BTreeMap<String, u64>,
}

/// The numbers of one version. Cost, tokens, turns, tool calls and durations are those of the cases that ended well in each version:
/// for each case the mean of its repetitions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VersionTotals {
    /// The cases that count.
    pub cases: u64,
    /// In USD; null if no price is known.
    pub cost: Option<f64>,
    /// Input and output tokens.
    pub tokens: f64,
    /// Turns of the root runs.
    pub turns: f64,
    /// Tool calls of the trees.
    pub tool_calls: f64,
    /// How long the runs took.
    pub duration: DurationSummary,
    /// Runs that failed, by the code of their error.
    pub errors: BTreeMap<String, u64>,
    /// Runs that diverged.
    pub diverged: u64,
}

/// Milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DurationSummary {
    /// Half of the runs took at most this long; null without runs.
    pub p50: Option<u64>,
    /// Nineteen of twenty runs took at most this long.
    pub p95: Option<u64>,
}

/// A case whose result differs between the versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlippedCase {
    /// The id of the case.
    pub case: String,
    /// The scorers whose result differs.
    pub scorers: Vec<String>,
    /// A run of the old version.
    pub a: RunId,
    /// A run of the new version.
    pub b: RunId,
    /// The path that compares them.
    pub compare: String,
}

#[cfg(test)]
mod tests {
    use super::EvalId;

    #[test]
    fn an_id_is_read_as_it_is_written() {
        let id = EvalId::new();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("eval_".parse::<EvalId>().is_err());
        let batch = id.to_string().replace("eval_", "batch_");
        assert!(batch.parse::<EvalId>().is_err());
    }
}
