//! `call_agent`: delegates a task to another agent. Checks the call in the contract's order, then starts the child run.

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{ToolCall, ToolSpec};
use crate::tools::{CallContext, ChildRequest, Effect, Tool, ToolOutput};

pub const NAME: &str = "call_agent";

/// The tool as one agent has it.
pub struct CallAgent {
    /// The agents that it may call, with their descriptions if they have one.
    agents: Vec<(String, Option<String>)>,
}

impl CallAgent {
    pub fn new(agents: Vec<(String, Option<String>)>) -> Self {
        Self { agents }
    }

    fn agent_names(&self) -> String {
        self.agents
            .iter()
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl Tool for CallAgent {
    fn spec(&self) -> ToolSpec {
        let names = self.agent_names();
        let mut description = format!(
            "Delegate a task to a sub-agent. The sub-agent runs independently with its own context and returns only \
             its final result. Available agents: {names}"
        );
        for (name, about) in &self.agents {
            if let Some(about) = about
                .as_deref()
                .map(str::trim)
                .filter(|about| !about.is_empty())
            {
                description.push_str(&format!(
                    "\n- {name}: {}",
                    about.split_whitespace().collect::<Vec<_>>().join(" ")
                ));
            }
        }
        let allowed: Vec<&str> = self.agents.iter().map(|(name, _)| name.as_str()).collect();
        let parameters = serde_json::json!({
            "type": "object",
            "properties": {
                "agent": {
                    "type": "string",
                    "description": format!("Name of the sub-agent to invoke (must be one of: {names})"),
                    "enum": allowed,
                },
                "task": { "type": "string", "description": "What you need the sub-agent to do" },
                "context": {
                    "type": "string",
                    "description": "Additional context from your conversation to pass along",
                },
            },
            "required": ["agent", "task"],
        });
        let parameters = to_raw_value(&parameters).unwrap_or_default();
        ToolSpec {
            name: NAME.to_owned(),
            description,
            parameters: parameters.into(),
        }
    }

    fn effect(&self) -> Effect {
        Effect::Delegating
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments = Arguments::parse(&call.arguments);
            let agent = arguments.agent.trim();
            if agent.is_empty() {
                return Err("call_agent error: \"agent\" argument is required".to_owned());
            }
            if arguments.task.trim().is_empty() {
                return Err("call_agent error: \"task\" argument is required".to_owned());
            }
            if !self.agents.iter().any(|(name, _)| name == agent) {
                let display_name = crate::domain::message::shorten(agent, 200);
                return Err(format!(
                    "call_agent error: agent \"{display_name}\" is not in this agent's sub_agents list"
                ));
            }
            if !context.scope.can_delegate() {
                let max = context.scope.max_depth;
                return Err(format!(
                    "call_agent error: maximum sub-agent depth ({max}) reached"
                ));
            }
            let child_context =
                Some(arguments.context.as_str()).filter(|text| !text.trim().is_empty());
            let request = ChildRequest {
                tool_call_id: &call.id,
                agent,
                task: &arguments.task,
                context: child_context,
            };
            let result = context.delegate.run_child(request).await;
            result.map(ToolOutput::from).map_err(|why| {
                format!(
                    "Error: sub-agent \"{agent}\" failed - {why}. You may retry or proceed without this result."
                )
            })
        })
    }
}

/// The arguments as texts. Any other JSON value becomes its compact text; a missing one or `null` becomes empty.
#[derive(Debug, Default, PartialEq, Eq)]
struct Arguments {
    agent: String,
    task: String,
    context: String,
}

impl Arguments {
    fn parse(json: &RawValue) -> Self {
        #[derive(Deserialize)]
        struct LooseArguments {
            #[serde(default)]
            agent: serde_json::Value,
            #[serde(default)]
            task: serde_json::Value,
            #[serde(default)]
            context: serde_json::Value,
        }
        let text = |value: serde_json::Value| match value {
            serde_json::Value::Null => String::new(),
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        match serde_json::from_str::<LooseArguments>(json.get()) {
            Ok(parsed) => Self {
                agent: text(parsed.agent),
                task: text(parsed.task),
                context: text(parsed.context),
            },
            Err(_) => Self::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::{Arguments, CallAgent};
    use crate::tools::Tool;

    #[test]
    fn spec_names_the_sub_agents() {
        let tool = CallAgent::new(vec![
            ("a".into(), None),
            ("b".into(), Some("Checks\nthings.".into())),
        ])
        .spec();
        assert_eq!(
            tool.description,
            "Delegate a task to a sub-agent. The sub-agent runs independently with its own context and returns only \
             its final result. Available agents: a, b\n- b: Checks things."
        );
        let schema: serde_json::Value = serde_json::from_str(tool.parameters.get()).expect("JSON");
        assert_eq!(
            schema["properties"]["agent"]["enum"],
            serde_json::json!(["a", "b"])
        );
        assert_eq!(
            schema["properties"]["agent"]["description"],
            "Name of the sub-agent to invoke (must be one of: a, b)"
        );
        assert_eq!(schema["required"], serde_json::json!(["agent", "task"]));
    }

    #[test]
    fn other_values_are_read_as_their_compact_text() {
        let raw = RawValue::from_string(
            r#"{"agent": "a", "task": {"n": [1, 2]}, "context": null}"#.into(),
        )
        .expect("JSON");
        let arguments = Arguments::parse(&raw);
        assert_eq!(arguments.task, r#"{"n":[1,2]}"#);
        assert_eq!(arguments.context, "");
    }
}
