//! The tools that a recorded run was offered. The record has no list of them: they follow from the run's definition, and
//! MCP servers list theirs again.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::domain::agent::Agent;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::message::ToolSpec;
use crate::domain::recording::{McpRecording, ToolRecording};
use crate::domain::run::Scope;
use crate::engine::context::Engine;
use crate::engine::prepare;
use crate::engine::recording::neutral::tool_recording;
use crate::engine::state::pinned_agents::SubAgents;
use crate::engine::workdir;
use crate::tools::mcp::McpToolset;

/// What a run was offered.
pub struct Offer {
    offered: Vec<ToolSpec>,
    /// All tools of the agent's MCP servers, also those that are found by search.
    mcp: Vec<(String, Vec<ToolSpec>)>,
}

pub async fn offered_tools(
    engine: &Arc<Engine>,
    agent: &Arc<Agent>,
    scope: &Scope,
    sub_agents: &SubAgents,
) -> Offer {
    let mut dir = None;
    if workdir::is_used(engine, agent) {
        dir = workdir::open_dir(engine, agent, None).await.ok();
    }
    let toolset = match agent.mcp_servers.is_empty() {
        true => McpToolset::default(),
        false => Box::pin(engine.mcp.list_tools(&agent.mcp_servers)).await,
    };
    let servers = agent.mcp_servers.iter().map(|server| {
        let prefix = format!("{}{TOOL_NAME_SEPARATOR}", server.name);
        let tools = toolset.tools.iter();
        let own = tools.filter(|(name, _)| name.starts_with(&prefix));
        (server.name.clone(), own.map(|it| it.1.spec()).collect())
    });
    let mcp = servers.collect();
    let toolbox = prepare::build_toolbox(engine, agent, scope, dir.as_ref(), toolset, sub_agents);
    Offer {
        offered: toolbox.offered_specs().to_vec(),
        mcp,
    }
}

/// The tools of a recording, each once.
#[derive(Default)]
pub struct ToolTable {
    tools: Vec<ToolRecording>,
    mcp: BTreeMap<String, Vec<ToolRecording>>,
}

impl ToolTable {
    /// Adds the tools of a run. Returns their ids.
    pub fn add(&mut self, offer: &Offer) -> Vec<String> {
        for (server, specs) in &offer.mcp {
            let known = self.mcp.entry(server.clone()).or_default();
            for spec in specs {
                if !known.iter().any(|tool| tool.id == spec.name) {
                    known.push(tool_recording(spec));
                }
            }
        }
        let ids = offer.offered.iter().map(|spec| self.id(spec));
        ids.collect()
    }

    /// The id of this tool, which is added if it is new.
    pub fn id(&mut self, spec: &ToolSpec) -> String {
        let tool = tool_recording(spec);
        let of_servers = self.mcp.values().flatten();
        if of_servers.into_iter().any(|known| *known == tool) {
            return tool.id;
        }
        let is_same = |known: &&ToolRecording| {
            known.name() == tool.id
                && known.description == tool.description
                && known.parameters == tool.parameters
        };
        if let Some(known) = self.tools.iter().find(is_same) {
            return known.id.clone();
        }
        let same_name = self.tools.iter().filter(|known| known.name() == tool.id);
        let id = match same_name.count() {
            0 => tool.id.clone(),
            count => format!("{}#{}", tool.id, count + 1),
        };
        self.tools.push(ToolRecording {
            id: id.clone(),
            ..tool
        });
        id
    }

    /// The tools that are no server's, and those of servers.
    pub fn into_recordings(self) -> (Vec<ToolRecording>, Vec<McpRecording>) {
        let servers = self.mcp.into_iter();
        let servers = servers.map(|(server, tools)| McpRecording { server, tools });
        (self.tools, servers.collect())
    }
}
