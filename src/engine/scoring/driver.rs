//! Performs what scorers have to do, behind live work.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use jiff::tz::TimeZone;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::domain::run::{Run, now};
use crate::domain::score::SCORER_PREFIX;
use crate::domain::scorer::{Scorer, ScorerKind, Skip};
use crate::engine::record::scores::{self, ScoreRequest};
use crate::engine::runner::Runner;
use crate::engine::scoring::perform::{Scored, ScorerError, Scorers, Verdict};
use crate::store::scores::{ScoreChange, Scoring};
use crate::store::usage::UsageQuery;
use crate::store::{IdempotencyClaim, StoreError};

/// Scorings at once.
const MAX_CONCURRENT: usize = 8;
/// Scorings that one look at the store finds.
const PAGE: usize = 64;
/// The time between two looks while there is something to score, or may be.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often a scorer that is not available is tried, and the first wait, which doubles.
const MAX_ATTEMPTS: u32 = 6;
const FIRST_RETRY: Duration = Duration::from_secs(5);

enum Outcome {
    Scored,
    Skipped,
    Failed(String),
    Retry(String),
}

pub struct ScoringDriver {
    runner: Runner,
    scorers: Scorers,
}

#[derive(Default)]
struct Work<'d> {
    running: FuturesUnordered<BoxFuture<'d, (Scoring, Outcome)>>,
    busy: HashSet<Scoring>,
    /// Attempts that failed, and when the next one is due.
    retries: HashMap<Scoring, (u32, Instant)>,
    /// The last scoring of the last page.
    after: Option<Scoring>,
}

impl ScoringDriver {
    pub fn new(runner: Runner, scorers: Scorers) -> Self {
        Self { runner, scorers }
    }

    /// Scores until `stop` is cancelled, while this process is the leader. Another process, or leader, continues what this one leaves.
    pub async fn run(&self, stop: CancellationToken) {
        let leadership = self.runner.leadership();
        let mut reloads = self.runner.catalog().subscribe();
        let mut work = Work::default();
        loop {
            let next = async {
                leadership.gained().await;
                self.start_due(&mut work).await
            };
            let may_have_more = tokio::select! {
                may_have_more = next => may_have_more,
                () = stop.cancelled() => return,
            };
            let sleep = async {
                match may_have_more {
                    true => tokio::time::sleep(POLL_INTERVAL).await,
                    false => leadership.poll().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                Some((scoring, outcome)) = work.running.next() => self.finish(&mut work, scoring, outcome).await,
                () = sleep => {}
                Ok(()) = reloads.changed() => reloads.mark_unchanged(),
            }
        }
    }

    /// Starts what is due, and returns whether there may be more to do without a change of the agents.
    async fn start_due<'d>(&'d self, work: &mut Work<'d>) -> bool {
        let agents = self.runner.catalog().current();
        let mut defined = agents.entries.values().filter_map(|it| it.agent.as_ref());
        let has_scorers = defined.any(|agent| !agent.scorers.is_empty());
        let found = match self.runner.store().scorings(work.after.take(), PAGE).await {
            Ok(found) => found,
            Err(error) => {
                if !matches!(error, StoreError::Closed) {
                    warn!(error = %error, "What scorers have to do could not be read, trying again: {error}");
                }
                return true;
            }
        };
        let has_more = !found.is_empty();
        work.after = found.last().filter(|_| found.len() == PAGE).cloned();
        for scoring in found {
            // Live runs go first.
            if work.busy.len() >= MAX_CONCURRENT || self.runner.queue_load().1 > 0 {
                break;
            }
            let retry = work.retries.get(&scoring);
            if retry.is_none_or(|(_, at)| *at <= Instant::now())
                && work.busy.insert(scoring.clone())
            {
                work.running.push(Box::pin(async move {
                    let outcome = self.score(&scoring).await;
                    (scoring, outcome)
                }));
            }
        }
        has_scorers || has_more
    }

    async fn finish(&self, work: &mut Work<'_>, scoring: Scoring, outcome: Outcome) {
        work.busy.remove(&scoring);
        let mut outcome = outcome;
        if let Outcome::Retry(why) = outcome {
            let attempts = work
                .retries
                .get(&scoring)
                .map_or(0, |(attempts, _)| *attempts)
                + 1;
            if attempts < MAX_ATTEMPTS {
                let wait = FIRST_RETRY * 2_u32.pow(attempts - 1);
                work.retries
                    .insert(scoring, (attempts, Instant::now() + wait));
                return;
            }
            outcome = Outcome::Failed(why);
        }
        work.retries.remove(&scoring);
        let store = self.runner.store().as_ref();
        let root = scoring.run;
        let ended = match &outcome {
            Outcome::Scored | Outcome::Retry(_) => return,
            Outcome::Skipped => store.end_scoring(scoring.clone(), root, None).await,
            Outcome::Failed(why) => scores::fail(store, scoring.clone(), why.clone()).await,
        };
        match (ended, outcome) {
            (Err(error), _) => {
                warn!(run.id = %root, error = %error, "The scoring of {root} by {} is tried again: {error}", scoring.scorer);
            }
            (Ok(true), Outcome::Failed(why)) => {
                warn!(run.id = %root, error = %why, "{} could not score {root}: {why}", scoring.scorer);
            }
            _ => {}
        }
    }

    async fn score(&self, scoring: &Scoring) -> Outcome {
        match self.try_score(scoring).await {
            Ok(outcome) => outcome,
            Err(ScorerError::Failed(why)) => Outcome::Failed(why),
            Err(ScorerError::Unavailable(why)) => Outcome::Retry(why),
        }
    }

    async fn try_score(&self, scoring: &Scoring) -> Result<Outcome, ScorerError> {
        let metrics = self.runner.metrics();
        let Some(run) = self.runner.run(scoring.run).await? else {
            return Ok(Outcome::Skipped);
        };
        let agents = self.runner.catalog().current();
        let agent = agents
            .entries
            .get(&run.agent)
            .and_then(|it| it.agent.as_ref());
        let scorer = agent.and_then(|it| it.scorers.iter().find(|it| it.name == scoring.scorer));
        let skip = |skip: Skip| {
            metrics.score_skipped(&run.agent, &scoring.scorer, skip);
            Ok(Outcome::Skipped)
        };
        let Some(scorer) = scorer else {
            return skip(Skip::Removed);
        };
        if !scorer.scores(run.status) {
            return skip(Skip::NotScorable);
        }
        let mark = format!("{}/{}", run.agent, scorer.name);
        if self.is_used_up(scorer, &mark).await? {
            return skip(Skip::Budget);
        }
        let scored = Scored {
            run: &run,
            expected: None,
            labels: BTreeMap::from([("scorer".to_owned(), mark)]),
            claim: Some(claim(scoring)),
        };
        let verdict = match self.scorers.perform(scorer, scored).await {
            Ok(verdict) => verdict,
            Err(error) => {
                metrics.score_failed(&run.agent, &scorer.name);
                return Err(error);
            }
        };
        match self.add(&run, scoring, verdict).await? {
            ScoreChange::Added | ScoreChange::Replaced => {}
            ScoreChange::TooMany => {
                let why = format!("{} has as many scores as it may have", run.id);
                return Err(ScorerError::Failed(why));
            }
            ScoreChange::NotScorable => {
                let why = format!("the tree of {} has not ended", run.id);
                return Err(ScorerError::Unavailable(why));
            }
        }
        metrics.scored(&run.agent, &scorer.name);
        Ok(Outcome::Scored)
    }

    async fn add(
        &self,
        run: &Run,
        scoring: &Scoring,
        verdict: Verdict,
    ) -> Result<ScoreChange, StoreError> {
        let request = ScoreRequest {
            name: scoring.scorer.clone(),
            value: verdict.value,
            comment: verdict.comment,
            turn: None,
            author: Some(format!("{SCORER_PREFIX}{}", scoring.scorer)),
            scorer: Some(scoring.scorer.clone()),
        };
        scores::add(self.runner.store().as_ref(), run, request).await
    }

    /// Whether the scorer's runs of today (UTC) have cost what they may.
    async fn is_used_up(&self, scorer: &Scorer, mark: &str) -> Result<bool, StoreError> {
        let (Some(limit), ScorerKind::Judge { .. }) = (scorer.per_day_usd, &scorer.kind) else {
            return Ok(false);
        };
        let today = now().to_zoned(TimeZone::UTC).date();
        let midnight = today.to_zoned(TimeZone::UTC).map(|it| it.timestamp());
        let query = UsageQuery {
            by: Vec::new(),
            time_zone: TimeZone::UTC,
            since: midnight.ok(),
            until: None,
            owner: None,
            agent: None,
            visible_agents: None,
            labels: vec![("scorer".to_owned(), mark.to_owned())],
            max_rows: 1,
        };
        let used = self.runner.store().usage(query).await?.totals.cost;
        Ok(used as f64 / 1e12 >= limit)
    }
}

fn claim(scoring: &Scoring) -> IdempotencyClaim {
    let route = format!("SCORER {}", scoring.scorer);
    IdempotencyClaim::own(route, scoring.run.to_string(), now())
}
