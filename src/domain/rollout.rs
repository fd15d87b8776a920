//! `[rollout]` of an agent's file: a candidate for its next version, which gets a share of the runs, and `[gate]`: what is
//! evaluated before the candidate becomes the current version.

use schemars::{JsonSchema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::domain::name::is_name;
use crate::domain::score::Moments;
use crate::domain::sequential::Sample;
use crate::settings::kinds::{Number, Unique, Whole};
use crate::settings::section::{Audience, Kind, section};
use crate::settings::table_reader::{MAX_COUNT, TableReader};

/// The end of a candidate's name.
const SUFFIX: &str = ".toml";
/// Scores have any scale.
const MAX_LOSS: f64 = 1e9;

section! {
    /// `[rollout]`: a candidate for the agent's next version, which gets a share of its root runs.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Rollout in "AgentRollout" {
        /// The candidate's file, beside this one; it is no agent of its own.
        pub candidate: String, Required(parse_candidate), example = "\"editor.next.toml\"";
        /// The share of the root runs that get the candidate, from 0 to 100.
        pub percent: f64 = 10.0, Number(0.0..=100.0);
        /// The scorers by which the candidate must not be worse; the share of failed runs counts in any case.
        pub scorers: Vec<String>, Unique(Ok);
        /// By how much a scorer's mean, or the share of runs that do not fail, may be below the current version's.
        pub max_loss: f64 = 0.05, Number(0.0..=MAX_LOSS);
        /// The number of runs of each version before the candidate can be taken off.
        pub min_runs: u64 = 200, Whole(1..=MAX_COUNT);
    }
}

section! {
    /// `[gate]`: the evaluation that has to hold before the candidate becomes the current version.
    #[derive(Clone, Debug, PartialEq)]
    pub struct PromotionGate in "AgentGate" {
        /// The name of the dataset whose cases run.
        pub dataset: String, Required(parse_dataset), example = "\"release\"";
        /// The conditions that have to hold, as those of an evaluation.
        pub gates: Vec<String>, Unique(Ok), example = "[\"grounded >= -0.02\", \"cost <= 1.1x\"]";
        /// The scorers of the candidate's file that score; empty means all of them.
        pub scorers: Vec<String>, Unique(Ok);
    }
}

/// A name without which the table may have no other key.
struct Required(fn(&str) -> Result<String, String>);

impl Kind<String> for Required {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut String) {
        if table.peek(key).is_none() && !table.is_empty() {
            table.push_missing(key, "is required");
        }
        if let Some(name) = table.parsed_text(key, self.0) {
            *value = name;
        }
    }

    fn show(&self, value: &String, _audience: Audience) -> Value {
        json!(value)
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Value {
        json!({"type": "string"})
    }
}

fn parse_candidate(text: &str) -> Result<String, String> {
    match text.strip_suffix(SUFFIX).is_some_and(is_name) {
        true => Ok(text.to_owned()),
        false => Err(
            "must be the name of a file beside this one, such as \"editor.next.toml\"".to_owned(),
        ),
    }
}

fn parse_dataset(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("is no name of a dataset".to_owned()),
    }
}

/// Why a candidate was taken off: an interval of a difference to the current version lay below what may be lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "RolloutStop")]
pub struct Loss {
    /// The scorer; null if the share of runs that did not fail was too low.
    pub scorer: Option<String>,
    /// By how much the candidate's mean, or its share, is above the current version's.
    pub difference: f64,
    /// The lower end of the interval that contains the true difference at all times with a probability of 95 %.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
    /// What the difference may be below 0.
    pub max_loss: f64,
    /// The candidate's runs that this is known from.
    pub candidate_runs: u64,
    /// The current version's.
    pub current_runs: u64,
}

/// What the scores of a version and a scorer are, as numbers; `None` if there are none.
pub fn sample(scores: &Moments) -> Option<Sample> {
    Some(Sample {
        n: scores.n,
        mean: scores.mean()?,
        variance: scores.variance().unwrap_or_default(),
    })
}
