//! The record of a new run, the state that another process needs to resume it, and the log's line about its end.

use std::sync::Arc;

use jiff::Timestamp;

use crate::domain::run::{Run, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::deadline::Deadline;
use crate::store::ResumeState;

/// The record of a run that has just been accepted. Fields that only a root or only a child has are empty.
pub fn new_run(run: &ActiveRun) -> Run {
    Run {
        owner: run.tree.owner.as_deref().map(str::to_owned),
        agent_version: run.agent.version.clone(),
        model: run.agent.model.model.clone(),
        tree: TreeUsage {
            runs: 1,
            usage: Usage::default(),
        },
        ..Run::queued(&run.scope, run.agent.name.clone())
    }
}

/// What another process needs to resume the run.
pub fn continuation(run: &ActiveRun) -> ResumeState {
    let deadline = wall_clock_deadline(run);
    ResumeState {
        definition: Arc::clone(&run.agent_json),
        deadline,
        timeout: deadline.map_or(0, |(_, seconds)| seconds),
        stream: run.tree.is_streaming,
        webhooks: match run.parent {
            None => run.tree.webhooks.to_vec(),
            Some(_) => Vec::new(),
        },
        waiting_since: None,
        is_held: false,
        workdir: run.workdir.id(),
    }
}

/// The definitions that the definition of a root names.
pub fn pinned_agents(run: &ActiveRun) -> Option<Arc<str>> {
    let pinned = run.tree.pinned_agents.get()?;
    let is_root = run.parent.is_none();
    is_root.then(|| Arc::clone(&pinned.text))
}

/// The deadline in calendar time, which outlives the process, with the limit in seconds that set it.
pub fn wall_clock_deadline(run: &ActiveRun) -> Option<(Timestamp, u64)> {
    run.deadline().map(Deadline::to_wall_clock)
}

/// The log's line about the end of a run, without any text of a client or a model.
pub fn log_end(run: &Run) {
    let status = run.status.as_str();
    let usage = &run.usage;
    let duration_ms = run.duration_ms(now());
    tracing::info!(
        run.id = %run.id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0, status,
        error = run.error.as_ref().map(|error| error.code.to_string()),
        duration_ms, turns = run.turns, input_tokens = usage.tokens.input, output_tokens = usage.tokens.output,
        tool_calls = usage.tool_calls, cost_usd = usage.cost.map(|cost| cost.to_usd()),
        "{} of agent {} is {status} after {duration_ms} ms", run.id, run.agent
    );
}
