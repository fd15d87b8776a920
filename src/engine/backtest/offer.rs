//! The tools of MCP servers that a recorded tree was offered, from the requests that its runs have sent: no server is started.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use crate::domain::mcp::{McpServer, TOOL_NAME_SEPARATOR};
use crate::domain::recording::ToolRecording;
use crate::domain::run::RunId;
use crate::engine::recording::playback::recorded_tool;
use crate::engine::state::evaluated_tree::EvaluatedTree;
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::tools::deferred::{TOOL_CALL, TOOL_SEARCH};
use crate::tools::mcp::McpToolset;

/// The most bytes of these tools; further ones are not offered.
const MAX_BYTES: usize = 4 << 20;

/// What the servers of an agent offered to the tree that this one plays; nothing if requests are not recorded.
pub async fn mcp_toolset(
    store: &dyn RunStore,
    evaluation: &EvaluatedTree,
    servers: &[McpServer],
) -> Result<McpToolset, StoreError> {
    let Some(source) = evaluation.source else {
        return Ok(McpToolset::default());
    };
    let read = || recorded_tools(store, source);
    let tools = evaluation.mcp_tools.get_or_try_init(read).await?;
    Ok(recorded_tool::toolset(tools, servers))
}

async fn recorded_tools(
    store: &dyn RunStore,
    source: RunId,
) -> Result<Vec<ToolRecording>, StoreError> {
    let (mut tools, mut bytes): (Vec<ToolRecording>, usize) = (Vec::new(), 0);
    let mut versions = BTreeSet::new();
    for run in store.tree(source).await? {
        // Runs of the same definition were offered the same.
        if !versions.insert((run.agent, run.agent_version, run.label.is_some())) {
            continue;
        }
        let first = store.turn(run.id, 1).await?;
        let Some(request) = first.and_then(|turn| turn.request) else {
            continue;
        };
        for tool in of_body(&request.body) {
            bytes += tool.description.len() + tool.parameters.len();
            if bytes <= MAX_BYTES && !tools.iter().any(|known| known.id == tool.id) {
                tools.push(tool);
            }
        }
    }
    Ok(tools)
}

/// The tools of servers in the body of a request, on whichever wire it was sent.
fn of_body(body: &[u8]) -> Vec<ToolRecording> {
    #[derive(Deserialize)]
    struct Body {
        #[serde(default)]
        tools: Vec<Value>,
    }
    let body: Option<Body> = serde_json::from_slice(body).ok();
    let tools = body.map_or(Vec::new(), |body| body.tools);
    let tools = tools.iter().filter_map(|tool| {
        let fields = tool.get("function").unwrap_or(tool);
        let name = fields.get("name")?.as_str()?;
        let is_of_server =
            name.contains(TOOL_NAME_SEPARATOR) || [TOOL_SEARCH, TOOL_CALL].contains(&name);
        let schema = fields.get("input_schema").or(fields.get("parameters"));
        is_of_server.then(|| ToolRecording {
            id: name.to_owned(),
            description: fields["description"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            parameters: schema.map_or_else(|| "{}".to_owned(), Value::to_string),
        })
    });
    tools.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::of_body;

    #[test]
    fn tools_of_servers_are_found_on_each_wire() {
        let schema = json!({"type": "object"});
        let named = |name: &str| json!({"name": name, "description": "d"});
        let (mut anthropic, mut openai) = (named("s__a"), named("s__b"));
        anthropic["input_schema"] = schema.clone();
        openai["parameters"] = schema.clone();
        let body = json!({"tools": [
            anthropic, {"type": "function", "function": openai.clone()}, openai, named("read_file"), {"type": "web_search"},
        ]});
        let found = of_body(body.to_string().as_bytes());
        let names: Vec<&str> = found.iter().map(|tool| tool.name()).collect();
        assert_eq!(names, ["s__a", "s__b", "s__b"]);
        assert!(
            found
                .iter()
                .all(|tool| tool.parameters == r#"{"type":"object"}"#)
        );
        assert!(of_body(b"no JSON").is_empty());
    }
}
