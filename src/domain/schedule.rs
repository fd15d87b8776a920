//! `[[schedules]]` of an agent's file: runs that the daemon starts at times.

use std::collections::BTreeMap;
use std::fmt;

use jiff::tz::TimeZone;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::domain::cron::Cron;
use crate::domain::evaluation::EvalId;
use crate::domain::run::RunId;

/// Most schedules of one agent.
pub const MAX_SCHEDULES: usize = 32;

/// When an agent runs, or is evaluated, without a request.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "AgentSchedule")]
pub struct Schedule {
    /// The name of the schedule, unique within the agent.
    pub name: String,
    /// Minute, hour, day of the month, month, day of the week.
    #[serde(serialize_with = "serialize_cron")]
    #[schemars(with = "String")]
    pub cron: Cron,
    /// The IANA name of the time zone of `cron`.
    pub timezone: String,
    #[serde(skip)]
    #[schemars(skip)]
    pub zone: TimeZone,
    /// The input of the runs; null means that of a run without one.
    pub input: Option<ScheduleInput>,
    /// What is evaluated instead of a run; null for a run.
    pub eval: Option<ScheduledEval>,
    /// What happens at a time at which the last run has not ended.
    pub overlap: Overlap,
    /// What happens to times at which the daemon did not run.
    pub missed: Missed,
    /// The labels of the runs.
    pub labels: BTreeMap<String, String>,
    /// The name of the key that owns the runs; null means that only admins see them.
    pub key: Option<String>,
}

impl Schedule {
    /// Identifies its times: with another text, times of the past are not missed.
    pub fn times(&self) -> String {
        format!("{} {}", self.cron, self.timezone)
    }
}

/// The input of a schedule's runs.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum ScheduleInput {
    /// A text.
    Text(String),
    /// An object that fits the agent's `input_schema`.
    Object(Map<String, Value>),
}

/// An evaluation with all scorers of the agent.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ScheduledEval {
    /// The name of the dataset.
    pub dataset: String,
    /// What it is compared with; null for nothing.
    pub against: Option<EvalBaseline>,
}

/// What a scheduled evaluation is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EvalBaseline {
    /// The last evaluation of the same version of the agent over the dataset.
    Last,
}

/// What a schedule has started. It may be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    Run(RunId),
    Eval(EvalId),
}

impl Started {
    /// One of both.
    pub fn ids(self) -> (Option<RunId>, Option<EvalId>) {
        match self {
            Self::Run(run) => (Some(run), None),
            Self::Eval(eval) => (None, Some(eval)),
        }
    }
}

impl fmt::Display for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(run) => run.fmt(f),
            Self::Eval(eval) => eval.fmt(f),
        }
    }
}

/// What happens at a time at which the last run of the schedule has not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ScheduleOverlap")]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// No run starts.
    #[default]
    Skip,
    /// One run starts when the last one has ended.
    Queue,
    /// A run starts beside it.
    Allow,
}

/// What happens to times at which the daemon did not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ScheduleMissed")]
#[serde(rename_all = "lowercase")]
pub enum Missed {
    /// No run starts.
    #[default]
    Skip,
    /// One run starts, for the latest time of the last day.
    Once,
}

fn serialize_cron<S: Serializer>(cron: &Cron, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cron.as_str())
}
