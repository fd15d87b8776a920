//! `call_agent`: delegates a task to another agent. Checks the call in the contract's order, then starts the child run.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::{ToolCall, ToolSpec, shorten};
use crate::tools::{CallContext, ChildRequest, Effect, Tool, ToolOutput, background};

pub const NAME: &str = "call_agent";
/// The most characters of a schema in the description.
const MAX_SCHEMA_CHARS: usize = 8000;

/// The tool as one agent has it.
pub struct CallAgent {
    agents: Vec<CallableAgent>,
    /// Whether a call may start a child in the background.
    background: bool,
}

/// An agent that another one may call.
#[derive(Clone, Debug, Default)]
pub struct CallableAgent {
    pub name: String,
    pub description: Option<String>,
    /// The schema of its input; `None` if its task is a text.
    pub input_schema: Option<Arc<RawValue>>,
}

impl CallAgent {
    pub fn new(agents: Vec<CallableAgent>, background: bool) -> Self {
        Self { agents, background }
    }

    fn agent_names(&self) -> String {
        self.agents
            .iter()
            .map(|agent| agent.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The names of the agents whose input is an object.
    fn structured_names(&self) -> Vec<&str> {
        let structured = self.agents.iter().filter(|it| it.input_schema.is_some());
        structured.map(|agent| agent.name.as_str()).collect()
    }
}

/// The line about an agent; empty if there is nothing to say.
fn describe(agent: &CallableAgent) -> String {
    let mut line = String::new();
    let about = agent.description.as_deref().unwrap_or_default();
    let about: Vec<&str> = about.split_whitespace().collect();
    if !about.is_empty() {
        line = format!("\n- {}: {}", agent.name, about.join(" "));
    }
    if let Some(schema) = &agent.input_schema {
        let schema = shorten(schema.get(), MAX_SCHEMA_CHARS);
        line.push_str(&format!(
            "\n- {} takes no task, but arguments that fit this JSON Schema: {schema}",
            agent.name
        ));
    }
    line
}

impl Tool for CallAgent {
    fn spec(&self) -> ToolSpec {
        let names = self.agent_names();
        let mut description = format!(
            "Delegate a task to a sub-agent. The sub-agent runs independently with its own context and returns only \
             its final result. Available agents: {names}"
        );
        description.extend(self.agents.iter().map(describe));
        let allowed: Vec<&str> = self.agents.iter().map(|it| it.name.as_str()).collect();
        let mut parameters = serde_json::json!({
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
        let structured = self.structured_names();
        if !structured.is_empty() {
            parameters["properties"]["arguments"] = serde_json::json!({
                "type": "object",
                "description": format!("The input of {}, instead of a task", structured.join(", ")),
            });
            parameters["required"] = serde_json::json!(["agent"]);
        }
        if self.background {
            let argument =
                serde_json::json!({"type": "boolean", "description": background::ARGUMENT});
            parameters["properties"]["background"] = argument;
        }
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
            let called = self.agents.iter().find(|it| it.name == agent);
            let task = match called.is_some_and(|it| it.input_schema.is_some()) {
                true if !arguments.arguments.is_empty() => &arguments.arguments,
                true if arguments.task.trim().is_empty() => "{}",
                _ => arguments.task.as_str(),
            };
            if task.trim().is_empty() {
                return Err("call_agent error: \"task\" argument is required".to_owned());
            }
            if called.is_none() {
                let display_name = shorten(agent, 200);
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
                task,
                context: child_context,
                background: self.background && arguments.background == "true",
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
    arguments: String,
    background: String,
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
            #[serde(default)]
            arguments: serde_json::Value,
            #[serde(default)]
            background: serde_json::Value,
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
                arguments: text(parsed.arguments),
                background: text(parsed.background),
            },
            Err(_) => Self::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::{Arguments, CallAgent, CallableAgent};
    use crate::tools::Tool;

    #[test]
    fn spec_names_the_sub_agents() {
        let agent = |name: &str, description: Option<&str>| CallableAgent {
            name: name.to_owned(),
            description: description.map(str::to_owned),
            input_schema: None,
        };
        let tool = CallAgent::new(
            vec![agent("a", None), agent("b", Some("Checks\nthings."))],
            false,
        )
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
