//! A fresh run's record. Pure.

use std::collections::BTreeMap;

use crate::domain::run::{Run, Status, now};
use crate::domain::usage::{TreeUsage, Usage};
use crate::engine::live::LiveRun;

/// The record of a run that has just been accepted; what only a root or only a child has is left empty.
pub fn new(live: &LiveRun) -> Run {
    let scope = &live.scope;
    Run {
        id: scope.run,
        root_id: scope.root,
        parent_id: scope.parent,
        depth: scope.depth,
        tool_call_id: None,
        agent: live.agent.name.clone(),
        agent_version: live.agent.version.clone(),
        status: Status::Queued,
        input: String::new(),
        task: None,
        label: None,
        completion_status: None,
        labels: BTreeMap::new(),
        content: None,
        partial_content: None,
        model: live.agent.model.model.clone(),
        stop_reason: None,
        turns: 0,
        usage: Usage::default(),
        tree: TreeUsage {
            runs: 1,
            usage: Usage::default(),
        },
        error: None,
        cancel_reason: None,
        attempt: 1,
        created_at: now(),
        started_at: None,
        finished_at: None,
        last_event: 0,
    }
}
