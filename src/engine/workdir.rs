//! Opens the directory of a run's files. A directory that was opened before is recognised by its device and inode.

use std::sync::Arc;

use crate::catalog::prompt::PromptError;
use crate::domain::agent::Agent;
use crate::engine::blocking::run_blocking;
use crate::engine::context::{Engine, RunContext};
use crate::workdirs::file_id::FileId;
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
    let dir = match shared.filter(|dir| context.run.workdir.id().is_none_or(|id| id == dir.id())) {
        Some(dir) => Arc::clone(dir),
        None => {
            open_dir(
                &context.engine,
                &context.run.agent,
                context.run.workdir.id(),
            )
            .await?
        }
    };
    context.run.workdir.set(dir);
    Ok(())
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

/// Opens the directory of this agent's runs, which must be `expected` if that is given.
pub async fn open_dir(
    engine: &Arc<Engine>,
    agent: &Arc<Agent>,
    expected: Option<FileId>,
) -> Result<Arc<Workdir>, PromptError> {
    let (engine, agent) = (Arc::clone(engine), Arc::clone(agent));
    run_blocking(move || {
        update_agent_workdirs(&engine);
        let path = agent.workdir.as_deref();
        engine.workdirs.open(path, expected).map_err(|error| {
            let shown_path = path.unwrap_or(std::path::Path::new("."));
            PromptError::Workdir {
                agent: agent.name.clone(),
                why: format!("{} {error}", shown_path.display()),
            }
        })
    })
    .await
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
