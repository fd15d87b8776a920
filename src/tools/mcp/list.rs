//! A server's tools as it lists them, made fit for models: names, schemas, sizes. Knows no call.

use std::collections::BTreeSet;
use std::sync::Arc;

use rmcp::model::{PaginatedRequestParams, Tool};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::mcp::SEPARATOR;
use crate::domain::message::{ToolSpec, shorten};
use crate::domain::schema::Schema;
use crate::tools::Effect;
use crate::tools::mcp::failure::Failure;
use crate::tools::mcp::link::Link;
use crate::validation;

/// Most pages that are asked for.
const MOST_PAGES: usize = 64;
/// Most tools of one server: far more than any model can choose from.
const MOST_TOOLS: usize = 512;
/// Most bytes of one tool's schema.
const MOST_SCHEMA: usize = 128 << 10;
/// Most characters of one tool's description.
const MOST_DESCRIPTION: usize = 16 << 10;
/// Most bytes of all schemas and descriptions of one server together: every request of a run carries them.
const MOST_BYTES: usize = 1 << 20;
/// What providers take for a tool's name.
const MOST_NAME: usize = 64;
/// Most tools that are named when they are left out.
const MOST_LEFT_OUT: usize = 10;

/// What a server offers.
#[derive(Default)]
pub struct Listed {
    /// In its order.
    pub tools: Vec<Arc<Described>>,
    /// What is not offered, and why.
    pub left_out: Vec<String>,
}

/// One tool.
pub struct Described {
    /// The server's name for it.
    pub own_name: String,
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
pub async fn all(server: &str, link: &Link) -> Result<Listed, Failure> {
    let _work = link.begin()?;
    let mut tools = Vec::new();
    let mut cursor = None;
    for _ in 0..MOST_PAGES {
        let mut params = PaginatedRequestParams::default();
        params.cursor = cursor;
        let page = link.peer.list_tools(Some(params)).await;
        let page = page.map_err(|error| link.failure(&error))?;
        link.is_well();
        tools.extend(page.tools);
        cursor = page.next_cursor;
        if cursor.is_none() || tools.len() > MOST_TOOLS {
            break;
        }
    }
    let is_cut = cursor.is_some() || tools.len() > MOST_TOOLS;
    tools.truncate(MOST_TOOLS);
    let mut listed = described(server, tools).await;
    if is_cut {
        let told = format!(
            "MCP server \"{server}\" lists more than {MOST_TOOLS} tools or {MOST_PAGES} pages; the rest is left out"
        );
        listed.left_out.push(told);
    }
    Ok(listed)
}

async fn described(server: &str, tools: Vec<Tool>) -> Listed {
    let mut listed = Listed::default();
    let mut names = BTreeSet::new();
    let mut bytes = 0;
    for tool in tools {
        let own_name = tool.name.to_string();
        let fit = fit(server, tool).await.and_then(|tool| {
            let spec = &tool.spec;
            let size = spec.description.len() + spec.parameters.get().len();
            if bytes + size > MOST_BYTES {
                return Err(format!(
                    "with it the server's tools would have more than {MOST_BYTES} bytes"
                ));
            }
            if !names.insert(spec.name.clone()) {
                return Err(format!("another one is named {} already", spec.name));
            }
            bytes += size;
            Ok(tool)
        });
        match fit {
            Ok(tool) => listed.tools.push(Arc::new(tool)),
            Err(why) if listed.left_out.len() < MOST_LEFT_OUT => {
                let own_name = shorten(&own_name, 100);
                listed.left_out.push(format!(
                    "tool \"{own_name}\" of MCP server \"{server}\" is left out: {why}"
                ));
            }
            Err(_) => {}
        }
    }
    listed
}

async fn fit(server: &str, tool: Tool) -> Result<Described, String> {
    // Providers take letters, digits, _ and -; MCP knows dots and slashes, too.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let plain = tool.name.replace(|c| !is_plain(c), "_");
    let name = format!("{server}{SEPARATOR}{plain}");
    if plain.is_empty() || name.len() > MOST_NAME {
        return Err(format!(
            "its name would be {}, and names have at most {MOST_NAME} characters",
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
    if parameters.get().len() > MOST_SCHEMA {
        return Err(format!("its schema has more than {MOST_SCHEMA} bytes"));
    }
    let title = tool.title.unwrap_or_default();
    let description = tool.description.map_or(title, |text| text.into_owned());
    let is_safe = tool.annotations.is_some_and(|hints| {
        hints.read_only_hint == Some(true) || hints.idempotent_hint == Some(true)
    });
    Ok(Described {
        own_name: tool.name.into_owned(),
        spec: ToolSpec {
            name,
            description: shorten(&description, MOST_DESCRIPTION),
            parameters: Arc::clone(&parameters),
        },
        schema: validation::schema(parameters, None).await.ok(),
        effect: match is_safe {
            true => Effect::Reads,
            false => Effect::Changes,
        },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::described;
    use crate::tools::Effect;

    async fn tools(tools: Value) -> super::Listed {
        described("s", serde_json::from_value(tools).expect("tools")).await
    }

    #[tokio::test]
    async fn names_fit_providers_and_never_collide() {
        let long = "x".repeat(62);
        let listed = tools(json!([
            {"name": "a.b", "inputSchema": {}},
            {"name": "a/b", "inputSchema": {}},
            {"name": long, "inputSchema": {}},
            {"name": "a.b", "inputSchema": {}},
        ]))
        .await;
        let names: Vec<&str> = listed
            .tools
            .iter()
            .map(|tool| tool.spec.name.as_str())
            .collect();
        assert_eq!(names, ["s__a_b"]);
        assert_eq!(listed.left_out.len(), 3);
        assert_eq!(
            listed.left_out[0],
            "tool \"a/b\" of MCP server \"s\" is left out: another one is named s__a_b already"
        );
        assert_eq!(
            listed.tools[0].spec.parameters.get(),
            r#"{"type":"object"}"#
        );
    }

    #[tokio::test]
    async fn a_servers_tools_are_bounded_in_sum() {
        let large = "x".repeat(15 << 10);
        let many: Vec<Value> = (0..200)
            .map(|n| json!({"name": format!("t{n}"), "description": large, "inputSchema": {}}))
            .collect();
        let listed = tools(Value::from(many)).await;
        let bytes: usize = listed
            .tools
            .iter()
            .map(|tool| tool.spec.description.len())
            .sum();
        assert!(listed.tools.len() > 50 && bytes <= 1 << 20, "{bytes}");
        assert!(listed.left_out[0].contains("more than 1048576 bytes"));
    }

    #[tokio::test]
    async fn hints_say_what_may_be_repeated_and_a_bad_schema_only_goes_unchecked() {
        let listed = tools(json!([
            {"name": "a", "inputSchema": {}, "annotations": {"readOnlyHint": true}},
            {"name": "b", "inputSchema": {}, "annotations": {"idempotentHint": true}},
            {"name": "c", "inputSchema": {}, "annotations": {"readOnlyHint": false}},
            {"name": "d", "inputSchema": {"type": 7}},
        ]))
        .await;
        let effects: Vec<Effect> = listed.tools.iter().map(|tool| tool.effect).collect();
        assert_eq!(
            effects,
            [
                Effect::Reads,
                Effect::Reads,
                Effect::Changes,
                Effect::Changes
            ]
        );
        assert!(listed.tools[0].schema.is_some() && listed.tools[3].schema.is_none());
    }
}
