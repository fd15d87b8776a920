//! Compares the runs of a candidate with those of the current version.

use jiff::Timestamp;

use crate::domain::agent::Agent;
use crate::domain::rollout::{Loss, Rollout, sample};
use crate::domain::score::Moments;
use crate::domain::sequential::{Sample, interval};
use crate::domain::variant::Variant;
use crate::store::StoreError;
use crate::store::rollouts::{Baseline, RolloutRecord, VariantRuns};
use crate::store::run_store::RunStore;
use crate::store::score_sums::{ScoreDimension, ScoreQuery};

/// The sums of scores of an agent's runs that were rolled out, of those that were accepted since this time's day.
pub async fn score_sums(
    store: &dyn RunStore,
    agent: &str,
    since: Timestamp,
) -> Result<Baseline, StoreError> {
    let by = vec![
        ScoreDimension::Version,
        ScoreDimension::Variant,
        ScoreDimension::Name,
    ];
    let query = ScoreQuery {
        agent: Some(agent.to_owned()),
        since: Some(since),
        ..ScoreQuery::of(None, None, by)
    };
    let mut sums = Baseline::new();
    for row in store.score_report(query).await?.unwrap_or_default() {
        if let [Some(version), Some(variant), Some(name)] = &row.values[..] {
            let of_version = sums.entry(format!("{variant} {version}")).or_default();
            of_version.insert(name.clone(), row.scores.numbers);
        }
    }
    Ok(sums)
}

/// The two versions of a rollout.
pub struct Versions<'v> {
    pub current: &'v Agent,
    pub candidate: &'v Agent,
}

impl Versions<'_> {
    fn version(&self, variant: Variant) -> &str {
        match variant {
            Variant::Current => &self.current.version,
            Variant::Candidate => &self.candidate.version,
        }
    }

    /// Where the candidate certainly loses more than it may.
    pub async fn find_loss(
        &self,
        store: &dyn RunStore,
        rollout: &Rollout,
        record: &RolloutRecord,
    ) -> Result<Option<Loss>, StoreError> {
        let agent = &self.current.name;
        let runs = store.variant_runs(agent.clone(), record.started_at).await?;
        let without_failures = |variant| {
            let is_same =
                |it: &&VariantRuns| it.variant == variant && it.version == self.version(variant);
            let (mut completed, mut all) = (0, 0);
            for counted in runs.iter().filter(is_same) {
                completed += counted.completed;
                all += counted.completed + counted.failed;
            }
            Some(Sample::of_share(completed, all))
        };
        if let Some(loss) = loss(rollout, None, without_failures) {
            return Ok(Some(loss));
        }
        if rollout.scorers.is_empty() {
            return Ok(None);
        }
        let sums = score_sums(store, agent, record.started_at).await?;
        let since_start = |scorer: &str, variant: Variant| {
            let of = |sums: &Baseline| {
                let key = format!("{} {}", variant.as_str(), self.version(variant));
                sums.get(&key).and_then(|it| it.get(scorer)).copied()
            };
            let (now, before) = (of(&sums)?, of(&record.baseline).unwrap_or_default());
            sample(&Moments {
                n: now.n.saturating_sub(before.n),
                sum: now.sum.saturating_sub(before.sum),
                squares: now.squares.saturating_sub(before.squares),
            })
        };
        let mut scorers = rollout.scorers.iter();
        Ok(scorers.find_map(|scorer| {
            loss(rollout, Some(scorer), |variant| {
                since_start(scorer, variant)
            })
        }))
    }
}

fn loss(
    rollout: &Rollout,
    scorer: Option<&String>,
    sample: impl Fn(Variant) -> Option<Sample>,
) -> Option<Loss> {
    let candidate = sample(Variant::Candidate)?;
    let current = sample(Variant::Current)?;
    let found = interval(&candidate, &current, rollout.min_runs)?;
    found.shows_loss(rollout.max_loss).then(|| Loss {
        scorer: scorer.cloned(),
        difference: found.difference,
        low: found.low,
        high: found.high,
        max_loss: rollout.max_loss,
        candidate_runs: candidate.n,
        current_runs: current.n,
    })
}
