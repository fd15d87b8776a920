//! Lists a server's tools and adapts their names, schemas and sizes to what models accept.

use std::collections::BTreeSet;
use std::sync::Arc;

use rmcp::model::{PaginatedRequestParams, Tool};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::json_schema::Schema;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::message::{ToolSpec, shorten};
use crate::tools::Effect;
use crate::tools::mcp::failure::RequestFailure;
use crate::tools::mcp::session::McpSession;
use crate::validation;

const MAX_PAGES: usize = 64;
/// Most tools of one server: far more than any model can choose from.
const MAX_TOOLS: usize = 512;
const MAX_SCHEMA_BYTES: usize = 128 << 10;
const MAX_DESCRIPTION_CHARS: usize = 16 << 10;
/// Most bytes of all schemas and descriptions of one server. Every request of a run contains them.
const MAX_TOTAL_BYTES: usize = 1 << 20;
/// The limit of model providers.
const MAX_NAME_CHARS: usize = 64;
/// Most warnings about skipped tools.
const MAX_SKIPPED_NAMED: usize = 10;

#[derive(Default)]
pub struct ToolList {
    /// In the server's order.
    pub tools: Vec<Arc<ToolDefinition>>,
    /// Warnings about tools that are not offered.
    pub skipped: Vec<String>,
}

pub struct ToolDefinition {
    /// The server's own name for the tool.
    pub original_name: String,
    /// As models are offered the tool.
    pub spec: ToolSpec,
    /// The schema that arguments are checked against; `None` if it is invalid.
    pub schema: Option<Schema>,
    /// Derived from the server's hints.
    pub effect: Effect,
}

/// Lists all tools of a server.
///
/// # Errors
/// The server did not answer, or answered with an error.
pub async fn list_tools(server: &str, session: &McpSession) -> Result<ToolList, RequestFailure> {
    let _guard = session.begin_request()?;
    let mut tools = Vec::new();
    let mut cursor = None;
    for _ in 0..MAX_PAGES {
        let mut params = PaginatedRequestParams::default();
        params.cursor = cursor;
        let page = session.peer.list_tools(Some(params)).await;
        let page = page.map_err(|error| session.classify_error(&error))?;
        session.mark_answered();
        tools.extend(page.tools);
        cursor = page.next_cursor;
        if cursor.is_none() || tools.len() > MAX_TOOLS {
            break;
        }
    }
    let is_truncated = cursor.is_some() || tools.len() > MAX_TOOLS;
    tools.truncate(MAX_TOOLS);
    let mut tool_list = build_tool_list(server, tools).await;
    if is_truncated {
        let warning = format!(
            "MCP server \"{server}\" lists more than {MAX_TOOLS} tools or {MAX_PAGES} pages; the rest is left out"
        );
        tool_list.skipped.push(warning);
    }
    Ok(tool_list)
}

async fn build_tool_list(server: &str, tools: Vec<Tool>) -> ToolList {
    let mut tool_list = ToolList::default();
    let mut names = BTreeSet::new();
    let mut bytes = 0;
    for tool in tools {
        let original_name = tool.name.to_string();
        let definition = define_tool(server, tool).await.and_then(|tool| {
            let spec = &tool.spec;
            let size = spec.description.len() + spec.parameters.get().len();
            if bytes + size > MAX_TOTAL_BYTES {
                return Err(format!(
                    "with it the server's tools would have more than {MAX_TOTAL_BYTES} bytes"
                ));
            }
            if !names.insert(spec.name.clone()) {
                return Err(format!("another one is named {} already", spec.name));
            }
            bytes += size;
            Ok(tool)
        });
        match definition {
            Ok(tool) => tool_list.tools.push(Arc::new(tool)),
            Err(why) if tool_list.skipped.len() < MAX_SKIPPED_NAMED => {
                let original_name = shorten(&original_name, 100);
                tool_list.skipped.push(format!(
                    "tool \"{original_name}\" of MCP server \"{server}\" is left out: {why}"
                ));
            }
            Err(_) => {}
        }
    }
    tool_list
}

async fn define_tool(server: &str, tool: Tool) -> Result<ToolDefinition, String> {
    // Providers accept letters, digits, `_` and `-`. MCP also allows dots and slashes.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let sanitized_name = tool.name.replace(|c| !is_plain(c), "_");
    let name = format!("{server}{TOOL_NAME_SEPARATOR}{sanitized_name}");
    if sanitized_name.is_empty() || name.len() > MAX_NAME_CHARS {
        return Err(format!(
            "its name would be {}, and names have at most {MAX_NAME_CHARS} characters",
            shorten(&name, 100)
        ));
    }
    let mut schema = tool.input_schema.as_ref().clone();
    // Providers require it.
    schema
        .entry("type")
        .or_insert_with(|| Value::from("object"));
    let parameters: Arc<RawValue> = to_raw_value(&schema)
        .map_err(|error| error.to_string())?
        .into();
    if parameters.get().len() > MAX_SCHEMA_BYTES {
        return Err(format!("its schema has more than {MAX_SCHEMA_BYTES} bytes"));
    }
    let title = tool.title.unwrap_or_default();
    let description = tool.description.map_or(title, |text| text.into_owned());
    let is_repeatable = tool.annotations.is_some_and(|hints| {
        hints.read_only_hint == Some(true) || hints.idempotent_hint == Some(true)
    });
    Ok(ToolDefinition {
        original_name: tool.name.into_owned(),
        spec: ToolSpec {
            name,
            description: shorten(&description, MAX_DESCRIPTION_CHARS),
            parameters: Arc::clone(&parameters),
        },
        schema: validation::compile_schema(parameters, None).await.ok(),
        effect: match is_repeatable {
            true => Effect::ReadOnly,
            false => Effect::Mutating,
        },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::build_tool_list;
    use crate::tools::Effect;

    async fn tools(tools: Value) -> super::ToolList {
        build_tool_list("s", serde_json::from_value(tools).expect("tools")).await
    }

    #[tokio::test]
    async fn names_fit_providers_and_never_collide() {
        let long = "x".repeat(62);
        let tool_list = tools(json!([
            {"name": "a.b", "inputSchema": {}},
            {"name": "a/b", "inputSchema": {}},
            {"name": long, "inputSchema": {}},
            {"name": "a.b", "inputSchema": {}},
        ]))
        .await;
        let names: Vec<&str> = tool_list
            .tools
            .iter()
            .map(|tool| tool.spec.name.as_str())
            .collect();
        assert_eq!(names, ["s__a_b"]);
        assert_eq!(tool_list.skipped.len(), 3);
        assert_eq!(
            tool_list.skipped[0],
            "tool \"a/b\" of MCP server \"s\" is left out: another one is named s__a_b already"
        );
        assert_eq!(
            tool_list.tools[0].spec.parameters.get(),
            r#"{"type":"object"}"#
        );
    }

    #[tokio::test]
    async fn the_total_size_of_a_servers_tools_is_bounded() {
        let large = "x".repeat(15 << 10);
        let many: Vec<Value> = (0..200)
            .map(|n| json!({"name": format!("t{n}"), "description": large, "inputSchema": {}}))
            .collect();
        let tool_list = tools(Value::from(many)).await;
        let bytes: usize = tool_list
            .tools
            .iter()
            .map(|tool| tool.spec.description.len())
            .sum();
        assert!(tool_list.tools.len() > 50 && bytes <= 1 << 20, "{bytes}");
        assert!(tool_list.skipped[0].contains("more than 1048576 bytes"));
    }

    #[tokio::test]
    async fn hints_set_the_effect() {
        let tool_list = tools(json!([
            {"name": "a", "inputSchema": {}, "annotations": {"readOnlyHint": true}},
            {"name": "b", "inputSchema": {}, "annotations": {"idempotentHint": true}},
            {"name": "c", "inputSchema": {}, "annotations": {"readOnlyHint": false}},
            {"name": "d", "inputSchema": {"type": 7}},
        ]))
        .await;
        let effects: Vec<Effect> = tool_list.tools.iter().map(|tool| tool.effect).collect();
        assert_eq!(
            effects,
            [
                Effect::ReadOnly,
                Effect::ReadOnly,
                Effect::Mutating,
                Effect::Mutating
            ]
        );
        assert!(tool_list.tools[0].schema.is_some() && tool_list.tools[3].schema.is_none());
    }
}
