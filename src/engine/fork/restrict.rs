//! Cuts a recorded definition to what the agent's file of today allows: a fork is no way around it.

use crate::domain::agent::{Agent, Budget, Delegation, Limits, Memory, SubagentSettings};
use crate::domain::mcp::McpServer;
use crate::engine::prepare::{tighten_budget, tighten_limit};

/// The recorded definition with at most the tools, servers, sub-agents and limits of today's, and with the approvals of both.
pub fn restrict(recorded: &Agent, current: &Agent) -> Agent {
    let mut agent = recorded.clone();
    agent.tools.retain(|name| current.tools.contains(name));
    agent.skills.retain(|skill| current.skills.contains(skill));
    agent.files.retain(|glob| current.files.contains(glob));
    if !agent.has_requested_skill {
        agent.skill.clone_from(&current.skill);
    }
    agent
        .sub_agents
        .retain(|name| current.sub_agents.contains(name));
    agent.mcp_servers = restrict_servers(&recorded.mcp_servers, &current.mcp_servers);
    // A tool of today's file may be another request of the same name.
    let http_tools = current.http_tools.iter();
    agent.http_tools = http_tools
        .filter(|tool| recorded.http_tools.iter().any(|it| it.name == tool.name))
        .cloned()
        .collect();
    agent.allowed_hosts.clone_from(&current.allowed_hosts);
    agent
        .allow_extra
        .retain(|key| current.allow_extra.contains(key));
    agent.allow_provider_keys &= current.allow_provider_keys;
    agent.memory = current.memory.clone();
    let added = current.approve.iter();
    let added = added.filter(|name| !recorded.approve.contains(name));
    agent.approve.extend(added.cloned());
    tighten_limit(&mut agent.approve_timeout, current.approve_timeout);
    agent.ask = agent.ask.take().filter(|_| current.ask.is_some());
    agent.wait = agent
        .wait
        .take()
        .zip(current.wait.as_ref())
        .map(|(mut wait, current)| {
            wait.max = wait.max.min(current.max);
            wait
        });
    agent.limits.max_turns = agent.limits.max_turns.min(current.limits.max_turns);
    tighten_limit(&mut agent.timeout, current.timeout);
    tighten_budget(&mut agent.budget, &current.budget);
    restrict_delegation(&mut agent.delegation, &current.delegation);
    agent.subagent = match (agent.subagent.take(), &current.subagent) {
        (Some(mut own), Some(current)) => {
            restrict_subagent(&mut own, current);
            Some(own)
        }
        _ => None,
    };
    agent
}

/// The definition of an ad-hoc child, cut to what its caller has.
pub fn restrict_ad_hoc(recorded: &Agent, caller: &Agent) -> Agent {
    // What a caller has for its own task only.
    let mut allowed = caller.clone();
    allowed.memory = Memory::default();
    allowed.timeout = None;
    allowed.limits = Limits::default();
    allowed.budget = Budget::default();
    allowed.delegation.max_depth = None;
    restrict(recorded, &allowed)
}

/// The servers of today that the record has too, with the tools that both allow.
fn restrict_servers(recorded: &[McpServer], current: &[McpServer]) -> Vec<McpServer> {
    let both = current.iter().filter_map(|server| {
        let own = recorded.iter().find(|own| own.name == server.name)?;
        let mut server = server.clone();
        match (own.tools.is_empty(), server.tools.is_empty()) {
            (true, _) => {}
            (false, true) => server.tools.clone_from(&own.tools),
            (false, false) => {
                server.tools.retain(|tool| own.tools.contains(tool));
                // No tools would mean all.
                if server.tools.is_empty() {
                    return None;
                }
            }
        }
        Some(server)
    });
    both.collect()
}

fn restrict_delegation(own: &mut Delegation, current: &Delegation) {
    tighten_limit(&mut own.max_depth, current.max_depth);
    own.parallel &= current.parallel;
    tighten_limit(&mut own.timeout, current.timeout);
    tighten_limit(&mut own.max_concurrent, current.max_concurrent);
    own.background &= current.background;
}

fn restrict_subagent(own: &mut SubagentSettings, current: &SubagentSettings) {
    own.max_depth = own.max_depth.min(current.max_depth);
    own.default_max_turns = own.default_max_turns.min(current.default_max_turns);
    own.output_max_size = own.output_max_size.min(current.output_max_size);
    tighten_limit(&mut own.max_executions, current.max_executions);
    tighten_limit(&mut own.max_total_tokens, current.max_total_tokens);
    tighten_limit(&mut own.max_total_time, current.max_total_time);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{restrict, restrict_ad_hoc};
    use crate::domain::agent::{Agent, AgentSettings, SubagentSettings};

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn agent(tools: &[&str], approve: &[&str]) -> Agent {
        let settings = AgentSettings {
            tools: texts(tools),
            approve: texts(approve),
            ..AgentSettings::default()
        };
        Agent {
            settings,
            ..Agent::default()
        }
    }

    #[test]
    fn a_definition_keeps_what_both_files_allow_and_the_approvals_of_both() {
        let mut recorded = agent(&["read_file", "write_file"], &["write_file"]);
        recorded.sub_agents = texts(&["reader", "writer"]);
        recorded.limits.max_turns = 20;
        recorded.timeout = Some(Duration::from_secs(60));
        recorded.budget.max_tokens = Some(1000);
        recorded.subagent = Some(SubagentSettings::default());
        let mut current = agent(&["read_file", "list_files"], &["read_file"]);
        current.sub_agents = texts(&["writer", "editor"]);
        current.limits.max_turns = 5;
        current.budget.max_tokens = Some(2000);
        current.budget.max_tool_calls = Some(3);
        let cut = restrict(&recorded, &current);
        assert_eq!(cut.tools, ["read_file"]);
        assert_eq!(cut.sub_agents, ["writer"]);
        assert_eq!(cut.approve, ["write_file", "read_file"]);
        assert_eq!((cut.limits.max_turns, cut.timeout), (5, recorded.timeout));
        let budget = (cut.budget.max_tokens, cut.budget.max_tool_calls);
        assert_eq!(budget, (Some(1000), Some(3)));
        assert!(cut.subagent.is_none());
    }

    #[test]
    fn an_ad_hoc_child_keeps_its_own_limits_and_no_tool_that_its_caller_lacks() {
        let mut child = agent(&["read_file", "write_file"], &[]);
        child.limits.max_turns = 10;
        let mut caller = agent(&["read_file"], &["read_file"]);
        caller.limits.max_turns = 2;
        let cut = restrict_ad_hoc(&child, &caller);
        assert_eq!(cut.tools, ["read_file"]);
        assert_eq!(cut.limits.max_turns, 10);
        assert_eq!(cut.approve, ["read_file"]);
    }
}
