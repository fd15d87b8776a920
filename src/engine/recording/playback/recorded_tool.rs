//! The tools of MCP servers as a recording has them: a test offers them without the servers.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::value::RawValue;

use crate::domain::mcp::{McpServer, TOOL_NAME_SEPARATOR};
use crate::domain::message::{ToolCall, ToolSpec, empty_arguments};
use crate::domain::recording::ToolRecording;
use crate::tools::mcp::McpToolset;
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

struct RecordedTool(ToolSpec);

impl RecordedTool {
    fn new(tool: &ToolRecording) -> Self {
        let parameters = RawValue::from_string(tool.parameters.clone());
        let parameters = parameters.map_or_else(|_| empty_arguments(), Arc::from);
        Self(ToolSpec::new(tool.name(), &tool.description, &parameters))
    }
}

impl Tool for RecordedTool {
    fn spec(&self) -> ToolSpec {
        self.0.clone()
    }

    fn effect(&self) -> Effect {
        Effect::ReadOnly
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        _: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        let text = format!("{} is a recorded tool and cannot be called", call.name);
        Box::pin(async move { Err(text) })
    }
}

/// The recorded tools of these servers, and those that find others.
pub fn toolset<'t>(
    recorded: impl IntoIterator<Item = &'t ToolRecording> + Clone,
    servers: &[McpServer],
) -> McpToolset {
    let mut toolset = McpToolset::default();
    let mut add = |tool: &ToolRecording| {
        let name = tool.name().to_owned();
        toolset
            .tools
            .push((name, Arc::new(RecordedTool::new(tool))));
    };
    for server in servers {
        let prefix = format!("{}{TOOL_NAME_SEPARATOR}", server.name);
        for tool in recorded.clone() {
            let own_name = tool.name().strip_prefix(&prefix);
            let is_selected = |name: &str| {
                server.tools.is_empty() || server.tools.iter().any(|selected| selected == name)
            };
            if own_name.is_some_and(is_selected) {
                add(tool);
            }
        }
    }
    let finders = recorded.into_iter();
    let finders = finders.filter(|tool| !tool.name().contains(TOOL_NAME_SEPARATOR));
    finders.for_each(&mut add);
    toolset
}
