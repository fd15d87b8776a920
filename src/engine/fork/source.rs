//! The tree that is forked, as recorded.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::agent::Agent;
use crate::domain::agent::overrides::{BudgetOverride, ParamsOverride};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::event::EventKind;
use crate::domain::run::{Reused, ReusedRun, Run, RunId, Status};
use crate::engine::context::Engine;
use crate::engine::fork::cut::Cut;
use crate::engine::fork::request::ForkError;
use crate::engine::record::agent_snapshots;
use crate::record::entry::{self, Entry};
use crate::store::StoreError;
use crate::store::events::{self, EventQuery};

pub struct SourceTree {
    pub root: Run,
    /// Without their texts.
    runs: HashMap<RunId, Run>,
    children: HashMap<RunId, Vec<RunId>>,
    /// What the request of the root set.
    pub request: RecordedRequest,
}

/// A run with what a copy of it needs.
pub struct SourceRun {
    pub run: Run,
    pub steps: Vec<Entry>,
    pub agent: Arc<Agent>,
    /// The agent as recorded.
    pub agent_json: Arc<str>,
}

impl SourceTree {
    /// The tree of a run; `None` if there is no such run.
    pub async fn load(engine: &Engine, member: RunId) -> Result<Option<Self>, StoreError> {
        let store = engine.journal.store();
        let Some(member) = store.run(member).await? else {
            return Ok(None);
        };
        let root = match member.parent_id {
            None => member,
            Some(_) => match store.run(member.root_id).await? {
                Some(root) => root,
                None => return Ok(None),
            },
        };
        let mut children: HashMap<RunId, Vec<RunId>> = HashMap::new();
        let mut runs = HashMap::new();
        for run in store.tree(root.id).await? {
            if let Some(parent) = run.parent_id {
                children.entry(parent).or_default().push(run.id);
            }
            runs.insert(run.id, run);
        }
        let request = RecordedRequest::load(engine, root.id).await?;
        Ok(Some(Self {
            root,
            runs,
            children,
            request,
        }))
    }

    /// The runs from the root down to this one; `None` if it is not in the tree.
    pub fn path_to(&self, id: RunId) -> Option<Vec<RunId>> {
        let mut path = vec![id];
        let mut run = self.runs.get(&id)?;
        while let Some(parent) = run.parent_id {
            path.push(parent);
            run = self.runs.get(&parent)?;
        }
        path.reverse();
        Some(path)
    }

    pub fn call_of(&self, id: RunId) -> Option<&str> {
        self.runs.get(&id)?.tool_call_id.as_deref()
    }

    /// The child that this call of the run started.
    pub fn child(&self, run: RunId, call: &str) -> Option<RunId> {
        let mut children = self.children.get(&run)?.iter().copied();
        children.find(|child| self.call_of(*child) == Some(call))
    }

    /// Where the record of a run ends that continues after its last step.
    pub fn end_of(&self, id: RunId) -> Cut {
        let status = self.runs.get(&id).map(|run| run.status);
        Cut::AtEnd {
            is_failed: matches!(status, Some(Status::Failed | Status::Cancelled)),
        }
    }

    /// What a fork reuses of the children that gave the results of these calls: children of this tree, and those that
    /// the run has itself reused.
    pub fn reused(&self, run: &Run, is_reused: impl Fn(&str) -> bool) -> (Vec<ReusedRun>, Reused) {
        let (mut links, mut total) = (Vec::new(), Reused::default());
        for child in self.children.get(&run.id).into_iter().flatten() {
            let Some(child) = self.runs.get(child) else {
                continue;
            };
            let call = child.tool_call_id.as_deref().unwrap_or_default();
            if is_reused(call) {
                links.push(ReusedRun {
                    id: child.id,
                    agent: child.agent.clone(),
                    tool_call_id: call.to_owned(),
                });
                add(&mut total, self.subtree(child.id));
            }
        }
        let inherited = run.fork.iter().flat_map(|fork| &fork.reused_runs);
        for link in inherited.filter(|link| is_reused(&link.tool_call_id)) {
            links.push(link.clone());
            total.runs += 1;
        }
        (links, total)
    }

    /// The depth of a tree is limited, and so is this recursion.
    fn subtree(&self, id: RunId) -> Reused {
        let mut total = Reused {
            runs: 1,
            turns: self.runs.get(&id).map_or(0, |run| u64::from(run.turns)),
        };
        for child in self.children.get(&id).into_iter().flatten() {
            add(&mut total, self.subtree(*child));
        }
        total
    }

    pub async fn load_run(&self, engine: &Engine, id: RunId) -> Result<SourceRun, ForkError> {
        let incomplete = |reason| ForkError::Incomplete { run: id, reason };
        let store = engine.journal.store();
        let run = store.run(id).await?.ok_or(ForkError::NotFound(id))?;
        let agent_json = store.definition(id).await?;
        let agent_json = agent_json.ok_or_else(|| incomplete("its definition is not recorded"))?;
        let agent = agent_snapshots::parse(&agent_json)
            .ok_or_else(|| incomplete("its definition cannot be read"))?;
        let steps = entry::steps(store.entries(id).await?);
        if !steps
            .iter()
            .any(|step| matches!(step, Entry::Prompted { .. }))
        {
            return Err(incomplete("it ended before its prompt was recorded"));
        }
        Ok(SourceRun {
            run,
            steps,
            agent,
            agent_json,
        })
    }
}

/// What the request of a root set, as its first event has it.
#[derive(Debug, Default)]
pub struct RecordedRequest {
    pub fields: Map<String, Value>,
    pub settings: RequestSettings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RequestSettings {
    pub model: Option<String>,
    pub skill: Option<String>,
    pub workdir: Option<PathBuf>,
    pub params: ParamsOverride<ResponseFormat>,
    pub budget: BudgetOverride,
    /// In seconds.
    pub timeout: Option<u64>,
    pub stream: Option<bool>,
}

impl RecordedRequest {
    async fn load(engine: &Engine, root: RunId) -> Result<Self, StoreError> {
        let query = EventQuery {
            root,
            run: root,
            exclude_descendants: true,
            after: 0,
            limit: 1,
        };
        let events = engine.journal.store().events(query).await?;
        let queued = events.first().map(events::recorded).transpose()?;
        let request = match queued.map(|event| event.kind) {
            Some(EventKind::RunQueued { request, .. }) => request,
            _ => None,
        };
        let read = |json: &RawValue| {
            let fields = serde_json::from_str::<Map<String, Value>>(json.get())?;
            Ok((serde_json::from_value(fields.clone().into())?, fields))
        };
        let request = request.as_deref().map(read).transpose();
        let (settings, fields) = request
            .map_err(|error: serde_json::Error| {
                StoreError::Corrupt(format!("what the request of {root} set: {error}"))
            })?
            .unwrap_or_default();
        Ok(Self { settings, fields })
    }

    pub fn timeout(&self) -> Option<Duration> {
        self.settings.timeout.map(Duration::from_secs)
    }
}

pub fn add(total: &mut Reused, other: Reused) {
    total.runs += other.runs;
    total.turns += other.turns;
}
