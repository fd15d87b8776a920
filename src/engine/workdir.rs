//! Opens the directory of a run's files. A directory that was opened before is recognised by its device and inode; by its inode if
//! another node may have opened it.

use std::sync::Arc;

use crate::catalog::prompt::PromptError;
use crate::domain::agent::Agent;
use crate::domain::run::RunId;
use crate::engine::blocking::run_blocking;
use crate::engine::context::{Engine, RunContext};
use crate::engine::record::agent_snapshots;
use crate::workdirs::file_id::KnownDir;
use crate::workdirs::workdir::Workdir;

/// Whether runs of this agent use files.
pub fn is_used(engine: &Engine, agent: &Agent) -> bool {
    let mut tools = agent.tools.iter();
    !agent.files.is_empty() || tools.any(|name| engine.tool_registry.uses_workdir(name))
}

/// Opens the run's directory, if it uses one.
pub async fn open(context: &RunContext) -> Result<(), PromptError> {
    if context.run.workdir.dir().is_some() || !is_used(&context.engine, &context.run.agent) {
        return Ok(());
    }
    // An ad-hoc sub-agent uses its caller's directory.
    let caller = context
        .run
        .parent
        .as_ref()
        .filter(|_| context.run.agent.ad_hoc.is_some());
    let shared = caller.and_then(|caller| caller.workdir.dir());
    let known = known_dir(context);
    let dir = match shared.filter(|dir| known.is_none_or(|known| known.is(dir.id()))) {
        Some(dir) => Arc::clone(dir),
        None => open_dir(&context.engine, &context.run.agent, known).await?,
    };
    context.run.workdir.set(dir);
    Ok(())
}

/// The directory that the run has used, or will use, as far as that is known.
fn known_dir(context: &RunContext) -> Option<KnownDir> {
    let has_nodes = context.engine.journal.store().cluster().is_some();
    let id = context.run.workdir.id()?;
    Some(KnownDir {
        id,
        is_elsewhere: has_nodes && context.run.tree.is_recovered,
    })
}

/// Records which directory a queued run will use, without holding it open. An error is reported when the run starts.
pub async fn record_id(context: &RunContext) {
    if !is_used(&context.engine, &context.run.agent) {
        return;
    }
    if let Ok(dir) = open_dir(&context.engine, &context.run.agent, None).await {
        context.run.workdir.set_id(dir.id());
    }
}

/// The directory of a run that this process does not drive; `None` if the run has opened none, or is over.
pub async fn open_recorded(engine: &Arc<Engine>, id: RunId) -> Option<Arc<Workdir>> {
    let store = engine.journal.store();
    let unfinished = store.unfinished_trees(vec![id]).await.ok()?;
    let run = unfinished.into_iter().find(|it| it.run.id == id)?;
    let state = run.resume_state?;
    let agent = agent_snapshots::parse(&state.definition)?;
    let known = KnownDir {
        id: state.workdir?,
        is_elsewhere: store.cluster().is_some(),
    };
    open_dir(engine, &agent, Some(known)).await.ok()
}

/// Opens the directory of this agent's runs, which must be `expected` if that is given.
pub async fn open_dir(
    engine: &Arc<Engine>,
    agent: &Arc<Agent>,
    expected: Option<KnownDir>,
) -> Result<Arc<Workdir>, PromptError> {
    let (engine, agent) = (Arc::clone(engine), Arc::clone(agent));
    run_blocking(move || {
        update_agent_workdirs(&engine);
        let path = agent.workdir.as_deref();
        let opened = match path.filter(|_| agent.requested_root.is_some() && expected.is_none()) {
            Some(path) => engine.workdirs.open_requested(path),
            None => engine.workdirs.open(path, expected),
        };
        opened.map_err(|error| {
            let shown_path = path.unwrap_or(std::path::Path::new("."));
            PromptError::Workdir {
                agent: agent.name.clone(),
                why: format!("{} {error}", shown_path.display()),
            }
        })
    })
    .await
}

/// Updates the registry if the agent has skills, which may lie in workdirs of other agents.
pub async fn prepare_skills(engine: &Arc<Engine>, agent: &Agent) {
    if agent.skill.is_some() || !agent.skills.is_empty() {
        let engine = Arc::clone(engine);
        run_blocking(move || update_agent_workdirs(&engine)).await;
    }
}

/// Updates the registry with the directories of the current agents.
pub fn update_agent_workdirs(engine: &Engine) {
    let agents = engine.catalog.current();
    engine
        .workdirs
        .update_agent_workdirs(agents.generation, || {
            let agents = agents.entries.values().filter_map(|it| it.agent.as_deref());
            let used = agents.filter(|agent| is_used(engine, agent));
            used.map(|agent| agent.workdir.as_deref()).collect()
        });
}
