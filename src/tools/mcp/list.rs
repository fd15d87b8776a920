//! A server's tools as it lists them, made fit for models: names, schemas, sizes. Knows no call.

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

/// Most pages that are asked for.
const MAX_PAGES: usize = 64;
/// Most tools of one server: far more than any model can choose from.
const MAX_TOOLS: usize = 512;
/// Most bytes of one tool's schema.
const MAX_SCHEMA_BYTES: usize = 128 << 10;
/// Most characters of one tool's description.
const MAX_DESCRIPTION_CHARS: usize = 16 << 10;
/// Most bytes of all schemas and descriptions of one server together: every request of a run carries them.
const MAX_TOTAL_BYTES: usize = 1 << 20;
/// What providers take for a tool's name.
const MAX_NAME_CHARS: usize = 64;
/// Most tools that are named when they are left out.
const MAX_SKIPPED_NAMED: usize = 10;

/// What a server offers.
#[derive(Default)]
pub struct ToolList {
    /// In its order.
    pub tools: Vec<Arc<ToolDefinition>>,
    /// What is not offered, and why.
    pub skipped: Vec<String>,
}

/// One tool.
pub struct ToolDefinition {
    /// The server's name for it.
    pub original_name: String,
    /// As models are offered it.
    pub spec: ToolSpec,
    /// What arguments are checked against; none where it is no schema that we can read.
    pub schema: Option<Schema>,
    /// By the server's hints.
    pub effect: Effect,
}

/// All tools of a server.
///
/// # Errors
/// Why they cannot be listed.
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
    // Providers take letters, digits, _ and -; MCP knows dots and slashes, too.
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
    // Providers want it said.
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
    async fn a_servers_tools_are_bounded_in_sum() {
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
