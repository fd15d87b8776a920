//! Lists a server's tools and adapts their names, schemas and sizes to what models accept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rmcp::model::{PaginatedRequestParams, Tool};
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::json_schema::Schema;
use crate::domain::json_schema::arguments::repair_arguments;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::message::{ToolSpec, shorten};
use crate::tools::Effect;
use crate::tools::mcp::failure::RequestFailure;
use crate::tools::mcp::listed_tool::{LeftOut, left_out};
use crate::tools::mcp::session::McpSession;
use crate::validation;

const MAX_PAGES: usize = 64;
/// Most tools of one server: far more than any model can choose from.
const MAX_TOOLS: usize = 512;
const MAX_SCHEMA_BYTES: usize = 128 << 10;
const MAX_DESCRIPTION_CHARS: usize = 16 << 10;
/// Most bytes of all schemas and descriptions of one server. Every request of a run contains them.
const MAX_TOTAL_BYTES: usize = 1 << 20;
/// Listing ends here, also if less of it is offered: tools that are too large are left out, and long descriptions are cut.
const MAX_LISTED_BYTES: usize = 8 * MAX_TOTAL_BYTES;
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
pub async fn list_tools(
    server: &str,
    session: &Arc<McpSession>,
) -> Result<ToolList, RequestFailure> {
    let _guard = session.begin_request()?;
    let mut builder = ToolListBuilder::new(server);
    let mut cursors = BTreeSet::new();
    let mut cursor: Option<String> = None;
    for _ in 0..MAX_PAGES {
        let mut params = PaginatedRequestParams::default();
        params.cursor = cursor;
        let page = session.peer.list_tools(Some(params)).await;
        let page = page.map_err(|error| session.classify_error(&error))?;
        session.mark_answered();
        for tool in left_out(&page) {
            builder.leave_out(tool);
        }
        // A page may be large, so only what is offered of it is kept.
        let has_listed_all = builder.add_page(page.tools).await == PageContent::Repeated;
        cursor = page.next_cursor.filter(|cursor| !cursor.is_empty());
        // Some servers name the same page again and again.
        cursor = cursor.filter(|cursor| !has_listed_all && cursors.insert(cursor.clone()));
        if cursor.is_none() || builder.is_full() {
            break;
        }
    }
    Ok(builder.finish(cursor.is_some()))
}

/// Whether a page lists anything new.
#[derive(PartialEq, Eq)]
enum PageContent {
    New,
    /// It has tools, each of which an earlier page lists too.
    Repeated,
}

/// Collects the tools of a server page by page.
struct ToolListBuilder<'s> {
    server: &'s str,
    tool_list: ToolList,
    /// The position in the list of each offered name.
    names: BTreeMap<String, usize>,
    /// Bytes of the schemas and descriptions that are offered.
    bytes: usize,
    /// Tools that the server listed, and the bytes of their schemas and descriptions.
    listed: usize,
    listed_bytes: usize,
}

impl<'s> ToolListBuilder<'s> {
    fn new(server: &'s str) -> Self {
        Self {
            server,
            tool_list: ToolList::default(),
            names: BTreeMap::new(),
            bytes: 0,
            listed: 0,
            listed_bytes: 0,
        }
    }

    /// Whether no further page is needed.
    fn is_full(&self) -> bool {
        self.listed > MAX_TOOLS
            || self.bytes >= MAX_TOTAL_BYTES
            || self.listed_bytes >= MAX_LISTED_BYTES
    }

    async fn add_page(&mut self, tools: Vec<Tool>) -> PageContent {
        let mut content = match tools.is_empty() {
            true => PageContent::New,
            false => PageContent::Repeated,
        };
        for tool in tools {
            if self.listed >= MAX_TOOLS {
                self.listed += 1;
                return PageContent::New;
            }
            let what = format!("tool \"{}\"", shorten(&tool.name, 100));
            match self.add(tool).await {
                Ok(Added::New) => content = PageContent::New,
                Ok(Added::Repeated) => continue,
                Err(why) => {
                    content = PageContent::New;
                    self.leave_out(LeftOut { what, why });
                }
            }
            self.listed += 1;
        }
        content
    }

    /// Records why something that the server listed is not offered.
    fn leave_out(&mut self, LeftOut { what, why }: LeftOut) {
        if self.tool_list.skipped.len() < MAX_SKIPPED_NAMED {
            let server = self.server;
            let warning = format!("{what} of MCP server \"{server}\" is left out: {why}");
            self.tool_list.skipped.push(warning);
        }
    }

    /// # Errors
    /// Why the tool is not offered.
    async fn add(&mut self, tool: Tool) -> Result<Added, String> {
        let parameters = parameters(&tool)?;
        let title = tool.title.as_ref().map_or(0, |text| text.len());
        let description = tool.description.as_ref().map_or(0, |text| text.len());
        self.listed_bytes += title + description + parameters.get().len();
        let tool = define_tool(self.server, tool, parameters).await?;
        let spec = &tool.spec;
        if let Some(at) = self.names.get(&spec.name) {
            return match self.tool_list.tools[*at].is_same(&tool) {
                true => Ok(Added::Repeated),
                false => Err(format!("another one is named {} already", spec.name)),
            };
        }
        let size = spec.description.len() + spec.parameters.get().len();
        if self.bytes + size > MAX_TOTAL_BYTES {
            return Err(format!(
                "with it the server's tools would have more than {MAX_TOTAL_BYTES} bytes"
            ));
        }
        self.names
            .insert(spec.name.clone(), self.tool_list.tools.len());
        self.bytes += size;
        self.tool_list.tools.push(Arc::new(tool));
        Ok(Added::New)
    }

    /// The list. The server `has_more` tools if it named another page.
    fn finish(self, has_more: bool) -> ToolList {
        let mut tool_list = self.tool_list;
        if has_more || self.listed > MAX_TOOLS {
            let server = self.server;
            tool_list.skipped.push(format!(
                "MCP server \"{server}\" lists more than {MAX_TOOLS} tools, {MAX_TOTAL_BYTES} bytes or {MAX_PAGES} \
                 pages; the rest is left out"
            ));
        }
        tool_list
    }
}

/// What became of a tool of a page.
enum Added {
    New,
    /// The list has it already.
    Repeated,
}

impl ToolDefinition {
    fn is_same(&self, other: &Self) -> bool {
        self.original_name == other.original_name
            && self.spec.description == other.spec.description
            && self.spec.parameters.get() == other.spec.parameters.get()
    }
}

/// The schema of a tool's arguments, as providers accept it.
fn parameters(tool: &Tool) -> Result<Arc<RawValue>, String> {
    let mut schema = tool.input_schema.as_ref().clone();
    repair_arguments(&mut schema)?;
    let parameters = to_raw_value(&schema).map_err(|error| error.to_string())?;
    Ok(parameters.into())
}

async fn define_tool(
    server: &str,
    tool: Tool,
    parameters: Arc<RawValue>,
) -> Result<ToolDefinition, String> {
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

    use super::{PageContent, ToolList, ToolListBuilder};
    use crate::tools::Effect;

    async fn tools(tools: Value) -> ToolList {
        let mut builder = ToolListBuilder::new("s");
        let page = serde_json::from_value(tools).expect("tools");
        builder.add_page(page).await;
        builder.finish(false)
    }

    #[tokio::test]
    async fn names_fit_providers_and_never_collide() {
        let long = "x".repeat(62);
        let tool_list = tools(json!([
            {"name": "a.b", "inputSchema": {}},
            {"name": "a/b", "inputSchema": {}},
            {"name": long, "inputSchema": {}},
            {"name": "a.b", "inputSchema": {}, "description": "another"},
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
            r#"{"type":"object","properties":{}}"#
        );
    }

    #[tokio::test]
    async fn schemas_fit_providers() {
        let tool_list = tools(json!([
            {"name": "bare", "inputSchema": {"type": "object"}},
            {"name": "full", "inputSchema": {"properties": {"a": {}}, "type": "object"}},
            {"name": "list", "inputSchema": {"type": "array"}},
        ]))
        .await;
        let schemas: Vec<&str> = tool_list
            .tools
            .iter()
            .map(|tool| tool.spec.parameters.get())
            .collect();
        assert_eq!(
            schemas,
            [
                r#"{"type":"object","properties":{}}"#,
                r#"{"properties":{"a":{}},"type":"object"}"#
            ]
        );
        assert_eq!(
            tool_list.skipped,
            [
                "tool \"list\" of MCP server \"s\" is left out: its schema has the type \"array\", and models send \
                 objects only"
            ]
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
    async fn a_page_that_only_repeats_others_ends_the_list() {
        let mut builder = ToolListBuilder::new("s");
        let page = json!([{"name": "a", "inputSchema": {}}, {"name": "b", "inputSchema": {}}]);
        let page = |at: usize| serde_json::from_value(json!([page[at]])).expect("a tool");
        for (at, content) in [
            (0, PageContent::New),
            (1, PageContent::New),
            (0, PageContent::Repeated),
        ] {
            assert!(builder.add_page(page(at)).await == content);
        }
        assert!(builder.add_page(Vec::new()).await == PageContent::New);
        let list = builder.finish(false);
        assert_eq!((list.tools.len(), list.skipped), (2, Vec::new()));
    }

    #[tokio::test]
    async fn hints_set_the_effect() {
        let tool_list = tools(json!([
            {"name": "a", "inputSchema": {}, "annotations": {"readOnlyHint": true}},
            {"name": "b", "inputSchema": {}, "annotations": {"idempotentHint": true}},
            {"name": "c", "inputSchema": {}, "annotations": {"readOnlyHint": false}},
            {"name": "d", "inputSchema": {"properties": {"a": {"pattern": "("}}}},
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
