//! Scores a run of an evaluation with the scorers of its agent.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::domain::evaluation::{self, EvalCase, EvalId, EvalSlot};
use crate::domain::message::shorten;
use crate::domain::run::{Run, now};
use crate::domain::score::ScoreValue;
use crate::domain::scorer::{Scorer, ScorerKind};
use crate::domain::usage::Cost;
use crate::engine::evals::plan;
use crate::engine::runner::Runner;
use crate::engine::scoring::perform::{Scored, ScorerError, Scorers};
use crate::store::IdempotencyClaim;

/// How often a scorer that is not available is tried, and the first wait, which doubles.
const MAX_ATTEMPTS: u32 = 5;
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Most characters of the reason why there is no score.
const MAX_REASON: usize = 200;

/// What scorers say of a run.
#[derive(Clone, Debug, Default)]
pub struct CaseScores {
    /// By scorer.
    pub scores: BTreeMap<String, ScoreValue>,
    /// Why a scorer gave no score.
    pub unscored: BTreeMap<String, String>,
    /// What the runs of judges cost.
    pub cost: Cost,
}

/// A run that completed, and what it was for.
pub struct CaseRun<'s> {
    pub eval: EvalId,
    pub slot: EvalSlot,
    pub case: &'s EvalCase,
    pub run: &'s Run,
}

/// Has each of these scorers look at the run. `known` are those that the agent has.
pub async fn score(
    runner: &Runner,
    scorers: &Scorers,
    known: &[Scorer],
    names: &[String],
    case: &CaseRun<'_>,
) -> CaseScores {
    let mut scores = CaseScores::default();
    for name in names {
        let Some(scorer) = known.iter().find(|it| it.name == *name) else {
            let why = format!("agent {} has no such scorer any more", case.run.agent);
            scores.unscored.insert(name.clone(), why);
            continue;
        };
        let claim = claim(case, name);
        match perform(scorers, scorer, case, &claim).await {
            Ok(value) => drop(scores.scores.insert(name.clone(), value)),
            Err(why) => drop(
                scores
                    .unscored
                    .insert(name.clone(), shorten(&why, MAX_REASON)),
            ),
        }
        if matches!(scorer.kind, ScorerKind::Judge { .. }) {
            let cost = judge_cost(runner, claim).await.unwrap_or_default();
            scores.cost = Cost(scores.cost.0.saturating_add(cost.0));
        }
    }
    scores
}

async fn perform(
    scorers: &Scorers,
    scorer: &Scorer,
    case: &CaseRun<'_>,
    claim: &IdempotencyClaim,
) -> Result<ScoreValue, String> {
    let mut attempt = 1;
    loop {
        let scored = Scored {
            run: case.run,
            expected: case.case.expected.as_ref(),
            labels: BTreeMap::from([(evaluation::LABEL.to_owned(), case.eval.to_string())]),
            claim: Some(claim.clone()),
        };
        match scorers.perform(scorer, scored).await {
            Ok(verdict) => return Ok(verdict.value),
            Err(ScorerError::Failed(why)) => return Err(why),
            Err(ScorerError::Unavailable(why)) if attempt >= MAX_ATTEMPTS => return Err(why),
            Err(ScorerError::Unavailable(_)) => {
                tokio::time::sleep(FIRST_RETRY * 2_u32.pow(attempt - 1)).await;
                attempt += 1;
            }
        }
    }
}

/// What the judge's run with this claim cost.
async fn judge_cost(runner: &Runner, claim: IdempotencyClaim) -> Option<Cost> {
    let claimed = runner.store().claimed_run(claim.key).await.ok()??;
    let judge = runner.store().run(claimed.run).await.ok()??;
    judge.tree.usage.cost
}

/// So that a judge's run starts once.
fn claim(case: &CaseRun<'_>, scorer: &str) -> IdempotencyClaim {
    let mut claim = plan::claim(case.eval, case.slot, now());
    claim.key.key = format!("{}/score/{scorer}", claim.key.key);
    claim
}
