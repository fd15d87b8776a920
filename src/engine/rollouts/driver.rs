//! Looks at the runs of rollouts again and again, and takes a candidate off that is worse.

use std::time::Duration;

use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::catalog::Entry;
use crate::domain::event::{EventKind, EventName};
use crate::domain::rollout::Loss;
use crate::domain::run::{RunId, now};
use crate::engine::record::{scores, webhook_message};
use crate::engine::rollouts::comparison::{Versions, score_sums};
use crate::engine::runner::Runner;
use crate::engine::state::rollouts;
use crate::engine::variants;
use crate::store::StoreError;
use crate::store::late_events::LateReport;
use crate::store::rollouts::{RolloutChange, RolloutId};

/// The time between two looks.
const INTERVAL: Duration = Duration::from_secs(2);

pub struct RolloutDriver {
    runner: Runner,
}

impl RolloutDriver {
    pub fn new(runner: Runner) -> Self {
        Self { runner }
    }

    /// Goes on until `stop` is cancelled, while this process is the leader.
    pub async fn run(&self, stop: CancellationToken) {
        let mut reloads = self.runner.catalog().subscribe();
        loop {
            let look = async {
                self.runner.leadership().gained().await;
                self.look_at_all().await
            };
            let has_rollouts = tokio::select! {
                has_rollouts = look => has_rollouts,
                () = stop.cancelled() => return,
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL), if has_rollouts => {}
                Ok(()) = reloads.changed() => reloads.mark_unchanged(),
            }
        }
    }

    /// Returns whether an agent has a rollout.
    async fn look_at_all(&self) -> bool {
        let agents = self.runner.catalog().current();
        let mut has_rollouts = false;
        for (name, entry) in variants::rolled_out(&agents) {
            has_rollouts = true;
            match Box::pin(self.look(name, entry)).await {
                Ok(()) | Err(StoreError::Closed) => {}
                Err(error) => {
                    warn!(agent.name = %name, error = %error, "The rollout of agent {name} could not be looked at, trying again: {error}");
                }
            }
        }
        has_rollouts
    }

    async fn look(&self, name: &str, entry: &Entry) -> Result<(), StoreError> {
        let (Some(current), Some(candidate)) = (&entry.agent, &entry.candidate) else {
            return Ok(());
        };
        let Some(rollout) = &current.rollout else {
            return Ok(());
        };
        let store = self.runner.store().as_ref();
        let records = store.rollouts(name.to_owned()).await?;
        let id = RolloutId {
            agent: name.to_owned(),
            candidate: candidate.version.clone(),
        };
        let Some(record) = rollouts::of_candidate(&records, &candidate.version) else {
            let at = now();
            let baseline = score_sums(store, name, at).await?;
            let started = store.change_rollout(id, RolloutChange::Start { at, baseline });
            if started.await? {
                info!(
                    agent.name = %name,
                    "Agent {name} has the candidate {} for {} % of its runs", candidate.version, rollout.percent
                );
            }
            return Ok(());
        };
        if record.stopped.is_some() || record.promotion.is_some() {
            return Ok(());
        }
        let versions = Versions { current, candidate };
        let Some(loss) = versions.find_loss(store, rollout, record).await? else {
            return Ok(());
        };
        let Some(run) = store.newest_candidate(id.clone()).await? else {
            return Ok(());
        };
        let at = now();
        let event = EventKind::RolloutStopped {
            candidate: candidate.version.clone(),
            current: current.version.clone(),
            loss: loss.clone(),
        };
        let stopped = Stopped {
            agent: name,
            candidate: &candidate.version,
            current: &current.version,
            run,
            loss: &loss,
        };
        let change = RolloutChange::Stop {
            at,
            loss: loss.clone(),
            report: LateReport {
                run,
                entries: scores::encode(at, event)?,
                deliveries: webhook_message::of_agent(
                    current.webhook.as_ref(),
                    EventName::RolloutStopped,
                    at,
                    stopped,
                ),
            },
        };
        let is_stopped = store.change_rollout(id, change).await?;
        // Before it is reported: no run gets the candidate afterwards.
        let read = self.runner.read_rollouts().await;
        if is_stopped {
            self.runner.metrics().rollout_stopped(name);
            let of = match &loss.scorer {
                Some(scorer) => format!("its scores of {scorer} are"),
                None => "its share of runs that do not fail is".to_owned(),
            };
            warn!(
                agent.name = %name, run.id = %run,
                "The candidate {} of agent {name} is taken off: {of} {:.3} lower, and {:.3} may be lost",
                candidate.version, -loss.difference, loss.max_loss
            );
        }
        read
    }
}

#[derive(Serialize)]
struct Stopped<'a> {
    agent: &'a str,
    candidate: &'a str,
    current: &'a str,
    /// The newest run of the candidate.
    run: RunId,
    loss: &'a Loss,
}
