//! What an operator changes of a rollout: the candidate's share, and that it becomes the current version.

use std::path::PathBuf;
use std::sync::Arc;

use tracing::{info, warn};

use crate::catalog::promotion;
use crate::catalog::{Entry, LoadError};
use crate::domain::agent::Agent;
use crate::domain::rollout::Rollout;
use crate::domain::run::now;
use crate::engine::blocking::run_blocking;
use crate::engine::rollouts::comparison::score_sums;
use crate::engine::runner::Runner;
use crate::engine::state::rollouts;
use crate::store::StoreError;
use crate::store::rollouts::{Promotion, RolloutChange, RolloutId, RolloutRecord};

#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("agent {0} has no rollout: its file has no [rollout]")]
    NoRollout(String),
    #[error(
        "the candidate of agent {0} has become its current version; change the candidate's file"
    )]
    Promoted(String),
    /// A file is broken, or the candidate's text does not fit.
    #[error("the candidate of agent {agent} cannot become its current version: {why}")]
    Unusable { agent: String, why: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A rollout as this process has it now.
pub struct CurrentRollout {
    pub entry: Entry,
    pub agent: Arc<Agent>,
    pub candidate: Arc<Agent>,
    pub rollout: Rollout,
    /// `None` until it is recorded.
    pub record: Option<RolloutRecord>,
}

impl CurrentRollout {
    pub fn id(&self) -> RolloutId {
        RolloutId {
            agent: self.agent.name.clone(),
            candidate: self.candidate.version.clone(),
        }
    }

    /// The share that is in force, from 0 to 100.
    pub fn percent(&self) -> f64 {
        rollouts::percent(&self.rollout, self.record.as_ref())
    }

    fn is_promoted(&self) -> bool {
        let record = self.record.as_ref();
        let promotion = record.and_then(|record| record.promotion.as_ref());
        promotion.is_some_and(|it| it.version == self.agent.version)
    }
}

/// The rollout of an agent; `None` if it has none.
pub async fn find(runner: &Runner, name: &str) -> Result<Option<CurrentRollout>, ChangeError> {
    let agents = runner.catalog().current();
    let agent = Arc::clone(agents.get(name)?);
    let (Some(entry), Some(rollout)) = (agents.entries.get(name), agent.rollout.clone()) else {
        return Ok(None);
    };
    let Some(candidate) = entry.candidate.clone() else {
        return Ok(None);
    };
    let records = runner.store().rollouts(name.to_owned()).await?;
    let record = rollouts::of_candidate(&records, &candidate.version).cloned();
    Ok(Some(CurrentRollout {
        entry: entry.clone(),
        agent,
        candidate,
        rollout,
        record,
    }))
}

async fn require(runner: &Runner, name: &str) -> Result<CurrentRollout, ChangeError> {
    let found = find(runner, name).await?;
    let found = found.ok_or_else(|| ChangeError::NoRollout(name.to_owned()))?;
    match found.is_promoted() {
        true => Err(ChangeError::Promoted(name.to_owned())),
        false => Ok(found),
    }
}

/// Sets the candidate's share until the file has another one. Starts a rollout anew that had ended, unless the share is 0.
pub async fn set_percent(
    runner: &Runner,
    name: &str,
    percent: f64,
) -> Result<CurrentRollout, ChangeError> {
    let found = require(runner, name).await?;
    let store = runner.store().as_ref();
    let has_ended = found
        .record
        .as_ref()
        .is_some_and(|it| it.stopped.is_some() || it.promotion.is_some());
    start(runner, &found, has_ended && percent > 0.0).await?;
    let change = RolloutChange::SetPercent(rollouts::set_percent(&found.rollout, percent));
    store.change_rollout(found.id(), change).await?;
    runner.read_rollouts().await?;
    info!(agent.name = %name, "The candidate {} of agent {name} gets {percent} % of the runs", found.candidate.version);
    require(runner, name).await
}

/// Records that there is the rollout.
async fn start(
    runner: &Runner,
    found: &CurrentRollout,
    is_restart: bool,
) -> Result<(), StoreError> {
    let (store, at) = (runner.store().as_ref(), now());
    let change = match (is_restart, &found.record) {
        (false, Some(_)) => return Ok(()),
        (false, None) => RolloutChange::Start {
            at,
            baseline: score_sums(store, &found.agent.name, at).await?,
        },
        (true, _) => RolloutChange::Restart {
            at,
            baseline: score_sums(store, &found.agent.name, at).await?,
        },
    };
    store.change_rollout(found.id(), change).await.map(drop)
}

/// A candidate that can become the current version.
pub struct Promotable {
    found: CurrentRollout,
    /// The text of the file that it becomes, and its version.
    pub text: String,
    pub version: String,
}

/// What a promotion did.
pub struct PromotedAgent {
    pub from: String,
    pub version: String,
    pub path: PathBuf,
    /// The text that the file must have, and why it was not written; `None` if it was.
    pub unwritten: Option<(String, String)>,
}

/// Checks that the candidate of an agent can become its current version.
pub async fn promotable(runner: &Runner, name: &str) -> Result<Promotable, ChangeError> {
    let found = require(runner, name).await?;
    let unusable = |why: String| ChangeError::Unusable {
        agent: name.to_owned(),
        why,
    };
    if let Some(error) = &found.entry.error {
        return Err(unusable(error.to_string()));
    }
    let (catalog, entry) = (Arc::clone(runner.catalog()), found.entry.clone());
    let merged = run_blocking(move || catalog.merged_candidate(&entry)).await;
    let (agent, text) = merged.map_err(unusable)?;
    Ok(Promotable {
        found,
        text,
        version: agent.version,
    })
}

impl Promotable {
    /// What its gate compares.
    pub fn agent(&self) -> &Agent {
        &self.found.agent
    }

    /// Makes the candidate the current version at all nodes, then writes the file if it can.
    pub async fn promote(self, runner: &Runner) -> Result<PromotedAgent, ChangeError> {
        let Self {
            found,
            text,
            version,
        } = self;
        let (name, id, store) = (&found.agent.name, found.id(), runner.store().as_ref());
        start(runner, &found, false).await?;
        let from = found.agent.version.clone();
        let promotion = Promotion {
            at: now(),
            from: from.clone(),
            version: version.clone(),
            text: text.clone(),
            fixed_at: None,
        };
        let change = RolloutChange::Promote(promotion);
        store.change_rollout(id.clone(), change).await?;
        runner.read_rollouts().await?;
        info!(agent.name = %name, "The candidate {} of agent {name} is its current version now", found.candidate.version);
        let path = found.entry.path.clone();
        let (file, whole) = (path.clone(), text.clone());
        let written = run_blocking(move || promotion::write(&file, &whole)).await;
        let unwritten = match written {
            Ok(()) => {
                store
                    .change_rollout(id, RolloutChange::Fix { at: now() })
                    .await?;
                let catalog = Arc::clone(runner.catalog());
                run_blocking(move || catalog.reload()).await;
                runner.read_rollouts().await?;
                None
            }
            Err(error) => {
                warn!(agent.name = %name, error = %error, "{} could not be written: {error}", path.display());
                Some((text, error.to_string()))
            }
        };
        Ok(PromotedAgent {
            from,
            version,
            path,
            unwritten,
        })
    }
}
