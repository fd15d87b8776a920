//! `[[scorers]]` of an agent's file: what scores its live runs.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::domain::run::{RunId, Status};

/// Most scorers of one agent.
pub const MAX_SCORERS: usize = 16;

/// Scores a share of an agent's root runs after their end.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "AgentScorer")]
pub struct Scorer {
    /// The name of its scores, unique within the agent.
    pub name: String,
    #[serde(flatten)]
    pub kind: ScorerKind,
    /// The share of the runs, from 0 to 1.
    pub sample: f64,
    /// What its runs of a day (UTC) may cost in US dollars; null means any amount.
    pub per_day_usd: Option<f64>,
}

/// Who scores.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "AgentScorerKind")]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ScorerKind {
    /// An agent.
    Judge {
        /// Its name.
        agent: String,
    },
    /// Assertions, as a test has them: 1 if all hold, 0 if not.
    Assert {
        /// The assertions.
        expect: Map<String, Value>,
    },
    /// A service.
    Http {
        /// Gets a signed request for each run.
        #[serde(skip)]
        #[schemars(skip)]
        url: String,
        /// The environment variable with the secret that signs requests; null means the server's.
        secret_env: Option<String>,
    },
}

/// Why a scorer does not score a run that it was to score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// The runs of the scorer have cost what they may in a day.
    Budget,
    /// The agent has no such scorer any more.
    Removed,
    /// The run did not end so that the scorer can score it.
    NotScorable,
}

impl Skip {
    pub const ALL: [Self; 3] = [Self::Budget, Self::Removed, Self::NotScorable];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Budget => "budget",
            Self::Removed => "removed",
            Self::NotScorable => "not_scorable",
        }
    }
}

impl Scorer {
    /// Whether the run is in its sample. Each sample contains the smaller ones.
    pub fn takes(&self, run: RunId) -> bool {
        let digest = Sha256::digest(run.0.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        (u64::from_be_bytes(first) as f64) < self.sample * u64::MAX as f64
    }

    /// Whether it can score a run that ended so: assertions look at failed ones too.
    pub fn scores(&self, status: Status) -> bool {
        matches!(
            (status, &self.kind),
            (Status::Completed, _) | (Status::Failed, ScorerKind::Assert { .. })
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::{Scorer, ScorerKind};
    use crate::domain::run::RunId;
    use crate::domain::variant::is_candidates;

    #[test]
    fn samples_are_shares_and_contain_the_smaller_ones() {
        let scorer = |sample| Scorer {
            name: "s".to_owned(),
            kind: ScorerKind::Assert { expect: Map::new() },
            sample,
            per_day_usd: None,
        };
        let runs: Vec<RunId> = (0..10_000).map(|_| RunId::new()).collect();
        let taken = |sample| -> Vec<RunId> {
            let scorer = scorer(sample);
            let runs = runs.iter().copied();
            runs.filter(|run| scorer.takes(*run)).collect()
        };
        let (tenth, fifth) = (taken(0.1), taken(0.2));
        assert!((800..1_200).contains(&tenth.len()), "{}", tenth.len());
        assert!(tenth.iter().all(|run| fifth.contains(run)));
        assert_eq!((taken(0.0).len(), taken(1.0).len()), (0, runs.len()));
    }

    #[test]
    fn both_versions_of_a_rollout_are_sampled_alike() {
        let scorer = Scorer {
            name: "s".to_owned(),
            kind: ScorerKind::Assert { expect: Map::new() },
            sample: 0.1,
            per_day_usd: None,
        };
        let runs = (0..10_000).map(|_| RunId::new());
        let of_candidate = |run: &RunId| is_candidates(run.0.as_bytes(), 10.0);
        let runs: Vec<RunId> = runs.filter(of_candidate).collect();
        let scored = runs.iter().filter(|run| scorer.takes(**run)).count();
        assert!(scored * 5 < runs.len(), "{scored} of {}", runs.len());
    }
}
