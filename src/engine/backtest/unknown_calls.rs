//! Which calls a tree performs that plays a recorded one again. Pure.

use crate::domain::agent::Agent;
use crate::domain::agent::tool_use::{EvalTools, UnknownCalls};
use crate::domain::http_tool::HttpMethod;
use crate::domain::message::ToolCall;
use crate::tools;

/// The agent that makes up the results of calls that this agent makes and the record does not have.
pub fn simulator<'s>(settings: &'s EvalTools, agent: &Agent) -> Option<&'s str> {
    match &settings.unknown {
        // Nothing makes up what it calls itself.
        UnknownCalls::Agent(name) => Some(name.as_str()).filter(|name| *name != agent.name),
        UnknownCalls::Stop | UnknownCalls::Safe => None,
    }
}

/// Whether a call that the record does not have gets a result: it is performed, or an agent makes the result up.
pub fn has_result(settings: &EvalTools, agent: &Agent, call: &ToolCall) -> bool {
    let is_safe = || settings.unknown == UnknownCalls::Safe && only_reads(agent, &call.name);
    tools::is_pure(&call.name, &agent.approve) || simulator(settings, agent).is_some() || is_safe()
}

/// Whether a call of this tool only reads, by what is known of it without its server.
fn only_reads(agent: &Agent, tool: &str) -> bool {
    if agent.approve.iter().any(|name| name == tool) {
        return false;
    }
    let mut http_tools = agent.http_tools.iter();
    match http_tools.find(|it| it.name == tool) {
        Some(http_tool) => http_tool.method == HttpMethod::Get,
        None => tools::is_reader(tool),
    }
}
