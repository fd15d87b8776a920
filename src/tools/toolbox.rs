//! Which tools a run may use: what is offered to the model, and who answers a call. Knows no loop.

use crate::domain::agent::Agent;
use crate::domain::message::{ToolCall, ToolSpec, shorten};
use crate::domain::run::Scope;
use crate::tools::call_agent::{self, CallAgent};
use crate::tools::{Context, Tool};

/// The tools of one run.
pub struct Toolbox {
    offered: Vec<ToolSpec>,
    call_agent: Option<CallAgent>,
}

impl Toolbox {
    /// For a run of `agent` in that place. `about` gives the description of a sub-agent.
    pub fn new(agent: &Agent, scope: &Scope, about: impl Fn(&str) -> Option<String>) -> Self {
        let names = &agent.sub_agents;
        let call_agent = (!names.is_empty()).then(|| {
            CallAgent::new(
                names
                    .iter()
                    .map(|name| (name.clone(), about(name)))
                    .collect(),
            )
        });
        // At its limit an agent is not offered the tool, but keeps the answer to a call of it.
        let offered = call_agent
            .iter()
            .filter(|_| scope.may_delegate())
            .map(Tool::spec)
            .collect();
        Self {
            offered,
            call_agent,
        }
    }

    /// What the model is told of.
    pub fn offered(&self) -> &[ToolSpec] {
        &self.offered
    }

    /// Performs a call, or says that there is no such tool.
    pub async fn perform(&self, call: &ToolCall, context: Context<'_>) -> Result<String, String> {
        match &self.call_agent {
            Some(tool) if call.name == call_agent::NAME => tool.perform(call, context).await,
            _ => Err(format!("Unknown tool: \"{}\"", shorten(&call.name, 200))),
        }
    }
}
