//! The definitions that an evaluation runs: an agent of today, a text, or one of the record.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::catalog::{Agents, LoadError};
use crate::domain::agent::Agent;
use crate::domain::agent::tool_use::EvalTools;
use crate::domain::evaluation::{EvalDefinition, EvalVersion};
use crate::domain::event::EventKind;
use crate::domain::run::{Run, RunId, Status};
use crate::domain::scorer::Scorer;
use crate::domain::usage::Cost;
use crate::engine::blocking::run_blocking;
use crate::engine::record::agent_snapshots;
use crate::engine::runner::Runner;
use crate::engine::state::pinned_agents::PinnedRoot;
use crate::record::entry::Entry;
use crate::store::StoreError;
use crate::store::runs::RunFilter;

/// Recorded runs of a version that are looked at for one with the definition as it is in its file.
const MAX_SOURCES: usize = 20;
/// Recorded runs of which an estimate is the mean.
const ESTIMATE_RUNS: usize = 50;
/// What a request for a run may set that its recorded definition does not show.
const OUTSIDE_DEFINITION: [&str; 3] = ["context", "timeout", "stream"];

/// How a request names a version.
#[derive(Clone, Copy, Debug)]
pub enum VersionRef<'r> {
    Agent(&'r str),
    /// The text of an agent's file.
    Text(&'r str),
    /// `sha256:` and the hex digest of a file that this agent had.
    Recorded {
        agent: &'r str,
        version: &'r str,
    },
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum VersionError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(
        "the record has no run of agent {agent} in version {version} whose request left the definition as it is in its file"
    )]
    NotRecorded { agent: String, version: String },
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A version with the definitions that its runs have.
#[derive(Clone, Debug)]
pub struct ResolvedVersion {
    pub version: EvalVersion,
    pub definition: EvalDefinition,
    pub agent: Arc<Agent>,
}

/// `simulator` is the agent that makes up results of calls.
pub async fn resolve(
    runner: &Runner,
    version: VersionRef<'_>,
    simulator: Option<&str>,
) -> Result<ResolvedVersion, VersionError> {
    let agents = runner.catalog().current();
    let agent = match version {
        VersionRef::Agent(name) => Arc::clone(agents.get(name)?),
        VersionRef::Text(text) => Arc::new(read_text(runner, text).await?),
        VersionRef::Recorded { agent, version } => recorded(runner, agent, version).await?,
    };
    let mut called = agents.callable(&agent);
    if let Some(simulator) = simulator {
        let simulator = agents.get(simulator)?;
        called.insert(&*simulator.name, simulator);
        called.extend(agents.callable(simulator));
    }
    let called = called.into_values().map(|agent| to_json(agent));
    let definition = EvalDefinition {
        definition: to_json(&agent)?,
        called: called.collect::<Result<_, _>>()?,
        text: match version {
            VersionRef::Text(text) => Some(text.to_owned()),
            VersionRef::Agent(_) | VersionRef::Recorded { .. } => None,
        },
    };
    Ok(ResolvedVersion {
        version: EvalVersion {
            agent: agent.name.clone(),
            version: agent.version.clone(),
        },
        definition,
        agent,
    })
}

async fn read_text(runner: &Runner, text: &str) -> Result<Agent, LoadError> {
    let (catalog, text) = (Arc::clone(runner.catalog()), text.to_owned());
    run_blocking(move || catalog.read_text(&text)).await
}

/// The scorers of an evaluation: those of its new version's file. Those of an agent are those that it has now.
pub async fn scorers(
    runner: &Runner,
    agent: &str,
    definition: &EvalDefinition,
) -> Result<Vec<Scorer>, LoadError> {
    let mut agent = match &definition.text {
        Some(text) => read_text(runner, text).await?,
        None => Agent::clone(runner.catalog().current().get(agent)?),
    };
    Ok(std::mem::take(&mut agent.settings.scorers))
}

fn to_json(agent: &Agent) -> Result<Box<RawValue>, VersionError> {
    serde_json::value::to_raw_value(agent).map_err(|error| VersionError::Invalid(error.to_string()))
}

async fn recorded(runner: &Runner, agent: &str, version: &str) -> Result<Arc<Agent>, VersionError> {
    let agents: Arc<Agents> = runner.catalog().current();
    if let Ok(current) = agents.get(agent)
        && current.version == version
    {
        return Ok(Arc::clone(current));
    }
    let store = runner.store();
    let runs = store.runs_of_version(agent.to_owned(), version.to_owned(), MAX_SOURCES);
    for run in runs.await? {
        if !is_as_in_file(runner, run).await? {
            continue;
        }
        let json = store.definition(run).await?;
        let Some(found) = json.and_then(|json| agent_snapshots::parse(&json)) else {
            continue;
        };
        // Runs of evaluations and scorers have no memory.
        if found.keeps_memory
            || found.client.is_some()
            || found.has_requested_skill
            || found.requested_root.is_some()
        {
            continue;
        }
        return Ok(Arc::new(Agent {
            given_keys: Vec::new(),
            keeps_memory: false,
            evaluation: None,
            pinned_agents: None,
            ..Agent::clone(&found)
        }));
    }
    Err(VersionError::NotRecorded {
        agent: agent.to_owned(),
        version: version.to_owned(),
    })
}

/// Whether the request of the run changed nothing of the definition.
async fn is_as_in_file(runner: &Runner, run: RunId) -> Result<bool, StoreError> {
    for recorded in runner.store().entries(run).await? {
        if let Entry::Event(EventKind::RunQueued { request, .. }) = recorded.entry {
            let fields =
                request.map(|request| serde_json::from_str::<Map<String, Value>>(request.get()));
            return Ok(match fields {
                None => true,
                Some(Ok(fields)) => fields
                    .keys()
                    .all(|field| OUTSIDE_DEFINITION.contains(&field.as_str())),
                Some(Err(_)) => false,
            });
        }
    }
    Ok(false)
}

/// The root of the runs of a version. What it calls is what was current when the evaluation was accepted.
pub fn pinned_root(
    runner: &Runner,
    definition: &EvalDefinition,
    tools: &EvalTools,
) -> Result<PinnedRoot, VersionError> {
    let parse = |json: &RawValue| {
        let parsed = agent_snapshots::parse(json.get());
        parsed.ok_or_else(|| VersionError::Invalid("a recorded definition is damaged".to_owned()))
    };
    let agent = Agent {
        evaluation: Some(Box::new(tools.clone())),
        ..Agent::clone(&*parse(&definition.definition)?)
    };
    let mut called = BTreeMap::new();
    for json in &definition.called {
        let agent = parse(json)?;
        called.insert(agent.name.clone(), agent);
    }
    Ok(runner.pin(called, &agent))
}

/// What a run of the agent costs with the runs below it: the mean of the newest that completed; `None` if there is none with a price.
pub async fn mean_cost(runner: &Runner, agent: &str) -> Result<Option<Cost>, StoreError> {
    let filter = RunFilter {
        agent: Some(agent.to_owned()),
        status: Some(Status::Completed),
        limit: ESTIMATE_RUNS,
        cut_texts: true,
        ..RunFilter::default()
    };
    let page = runner.store().list(filter).await?;
    let costs = page.runs.iter().filter_map(|run: &Run| run.tree.usage.cost);
    let costs: Vec<u64> = costs.map(|cost| cost.0).collect();
    let sum: u64 = costs
        .iter()
        .fold(0, |sum: u64, cost| sum.saturating_add(*cost));
    let count = costs.len() as u64;
    Ok((count > 0).then(|| Cost(sum / count)))
}
