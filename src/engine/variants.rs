//! Which version a root run of an agent with a rollout gets, and what the record says of rollouts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::catalog::promotion::{Promoted, Promotions};
use crate::catalog::{Agents, Entry};
use crate::domain::agent::Agent;
use crate::domain::run::{self, RunId, now};
use crate::domain::variant::{Variant, is_candidates};
use crate::engine::blocking::run_blocking;
use crate::engine::context::Engine;
use crate::engine::request::{RunRequest, StartError};
use crate::engine::state::rollouts::{self, AgentRollouts};
use crate::store::StoreError;
use crate::store::rollouts::{RolloutChange, RolloutId, RolloutRecord};

/// The catalog, the agent of a root run in the version that it gets, and that version; `None` if nothing is rolled out.
pub async fn choose(
    engine: &Arc<Engine>,
    request: &RunRequest,
    root: RunId,
) -> Result<(Arc<Agents>, Arc<Agent>, Option<Variant>), StartError> {
    let agents = engine.catalog.current();
    let agent = Arc::clone(agents.get(&request.agent)?);
    let is_rolled_out = request.playback.is_none() && !run::are_marks(&request.labels);
    if agent.rollout.is_none() || !is_rolled_out {
        return Ok((agents, agent, None));
    }
    let records = Box::pin(records(engine, &request.agent)).await?;
    // The records may have made a candidate the current version.
    let agents = engine.catalog.current();
    let agent = Arc::clone(agents.get(&request.agent)?);
    let candidate = agents.entries.get(&request.agent);
    let candidate = candidate.and_then(|entry| entry.candidate.as_ref());
    let (Some(rollout), Some(candidate)) = (&agent.rollout, candidate) else {
        return Ok((agents, agent, None));
    };
    let record = rollouts::of_candidate(&records, &candidate.version);
    if record.is_some_and(|record| record.promotion.is_some()) {
        return Ok((agents, agent, None));
    }
    let percent = rollouts::percent(rollout, record);
    let variant = match (&request.session, percent > 0.0) {
        (_, false) => Variant::Current,
        (None, true) => by_hash(root.0.as_bytes(), percent),
        (Some(session), true) => {
            let last = last_variant(engine, request, session, (candidate, record)).await?;
            last.unwrap_or_else(|| by_hash(session.as_bytes(), percent))
        }
    };
    let chosen = match variant {
        Variant::Current => agent,
        Variant::Candidate => Arc::clone(candidate),
    };
    Ok((agents, chosen, Some(variant)))
}

fn by_hash(key: &[u8], percent: f64) -> Variant {
    match is_candidates(key, percent) {
        true => Variant::Candidate,
        false => Variant::Current,
    }
}

/// What the last run of the session got in this rollout.
async fn last_variant(
    engine: &Engine,
    request: &RunRequest,
    session: &str,
    (candidate, record): (&Agent, Option<&RolloutRecord>),
) -> Result<Option<Variant>, StoreError> {
    let store = engine.journal.store();
    let last = store.session_variant(request.owner.clone(), session.to_owned());
    let Some(last) = last.await?.filter(|last| last.agent == request.agent) else {
        return Ok(None);
    };
    let is_of_this_rollout = match last.variant {
        Some(Variant::Candidate) => last.version == candidate.version,
        Some(Variant::Current) => record.is_some_and(|it| last.created_at >= it.started_at),
        None => false,
    };
    Ok(last.variant.filter(|_| is_of_this_rollout))
}

/// What the record says of an agent's candidates.
async fn records(engine: &Arc<Engine>, agent: &str) -> Result<AgentRollouts, StoreError> {
    if let Some(records) = engine.rollouts.fresh(agent) {
        return Ok(records);
    }
    let _reading = engine.rollouts.reading.lock().await;
    if let Some(records) = engine.rollouts.fresh(agent) {
        return Ok(records);
    }
    let known = read(engine).await?;
    Ok(known.get(agent).cloned().unwrap_or_default())
}

/// Reads the record, and makes what it says the state of this process.
pub async fn refresh(engine: &Arc<Engine>) -> Result<(), StoreError> {
    let _reading = engine.rollouts.reading.lock().await;
    read(engine).await.map(drop)
}

async fn read(engine: &Arc<Engine>) -> Result<BTreeMap<String, AgentRollouts>, StoreError> {
    let (store, read_at) = (engine.journal.store(), Instant::now());
    let (mut known, mut promotions) = (BTreeMap::new(), Promotions::new());
    let agents = engine.catalog.current();
    for (name, _) in rolled_out(&agents) {
        let records: AgentRollouts = store.rollouts(name.clone()).await?.into();
        let mut promoted: Vec<Promoted> = records.iter().filter_map(promoted).collect();
        promoted.sort_by_key(|it| it.at);
        if !promoted.is_empty() {
            promotions.insert(name.clone(), promoted);
        }
        known.insert(name.clone(), records);
    }
    let catalog = Arc::clone(&engine.catalog);
    run_blocking(move || catalog.set_promotions(promotions)).await;
    engine.rollouts.replace(read_at, known.clone());
    fix_promotions(engine, &known).await?;
    Ok(known)
}

/// The agents with a rollout.
pub fn rolled_out(agents: &Agents) -> impl Iterator<Item = (&String, &Entry)> {
    let has_rollout = |entry: &Entry| entry.agent.as_ref().is_some_and(|it| it.rollout.is_some());
    let entries = agents.entries.iter();
    entries.filter(move |(_, entry)| has_rollout(entry))
}

fn promoted(record: &RolloutRecord) -> Option<Promoted> {
    let promotion = record.promotion.as_ref()?;
    Some(Promoted {
        from: promotion.from.clone(),
        version: promotion.version.clone(),
        text: promotion.text.clone(),
        at: promotion.at,
        fixed_at: promotion.fixed_at,
    })
}

/// Records that the last promotion of an agent is not what is in force here, or is the file itself: files that change from now on
/// win, also one that becomes again what it was.
async fn fix_promotions(
    engine: &Engine,
    known: &BTreeMap<String, AgentRollouts>,
) -> Result<(), StoreError> {
    let agents = engine.catalog.current();
    for (name, records) in known {
        let promoted = records
            .iter()
            .filter_map(|it| Some((it, it.promotion.as_ref()?)));
        let Some((record, last)) = promoted.max_by_key(|(_, promotion)| promotion.at) else {
            continue;
        };
        let Some(entry) = agents.entries.get(name) else {
            continue;
        };
        let current = entry.agent.as_ref().map(|agent| &agent.version);
        let is_in_force = current == Some(&last.version) && entry.file_version.as_ref() != current;
        if last.fixed_at.is_none() && entry.error.is_none() && !is_in_force {
            let id = RolloutId {
                agent: name.clone(),
                candidate: record.candidate.clone(),
            };
            let change = RolloutChange::Fix { at: now() };
            engine.journal.store().change_rollout(id, change).await?;
        }
    }
    Ok(())
}
