//! Tools that are too many to offer to the model: `tool_search` finds them by words, `tool_call` calls one.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::json_schema::Schema;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::message::{ToolCall, ToolSpec, empty_arguments, shorten};
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

pub const TOOL_SEARCH: &str = "tool_search";
pub const TOOL_CALL: &str = "tool_call";
/// Limits the result of a search, except if the first tool alone is larger.
const MAX_RESULT_BYTES: usize = 32 << 10;
/// Tools that a search returns if the model sets no limit.
const DEFAULT_LIMIT: usize = 10;
const MAX_LIMIT: usize = 50;
/// Further words of a query are ignored.
const MAX_WORDS: usize = 32;
/// Names that an error message suggests.
const MAX_SUGGESTIONS: usize = 5;

/// Decides whether a run's MCP tools are offered directly or found by search.
pub struct ToolDeferral {
    threshold: usize,
    search_schema: Schema,
    call_schema: Schema,
}

impl ToolDeferral {
    /// Defers tools if there are more than `threshold`; `None` if that is 0.
    pub fn new(threshold: usize) -> Option<Arc<Self>> {
        if threshold == 0 {
            return None;
        }
        Some(Arc::new(Self {
            threshold,
            search_schema: Schema::for_type::<SearchArguments>().ok()?,
            call_schema: Schema::for_type::<CallArguments>().ok()?,
        }))
    }

    /// The two tools to offer instead of these, if there are more than the threshold.
    pub fn defer(
        self: &Arc<Self>,
        tools: Vec<(String, Arc<dyn Tool>)>,
    ) -> Option<[(String, Arc<dyn Tool>); 2]> {
        if tools.len() <= self.threshold {
            return None;
        }
        let tools: Arc<[_]> = tools.into();
        let build_tool = |kind| {
            let (deferral, tools) = (Arc::clone(self), Arc::clone(&tools));
            Arc::new(DeferredTool {
                kind,
                deferral,
                tools,
            })
        };
        Some([
            (TOOL_SEARCH.to_owned(), build_tool(DeferredKind::Search)),
            (TOOL_CALL.to_owned(), build_tool(DeferredKind::Call)),
        ])
    }
}

/// The name and arguments of the tool that a `tool_call` call names; `None` for any other call, or if it names no tool.
pub fn inner_call(call: &ToolCall) -> Option<(String, Arc<RawValue>)> {
    #[derive(Deserialize)]
    struct InnerCall<'a> {
        name: String,
        #[serde(borrow)]
        arguments: Option<&'a RawValue>,
    }
    if call.name != TOOL_CALL {
        return None;
    }
    let inner_call: InnerCall<'_> = serde_json::from_str(call.arguments.get()).ok()?;
    let arguments = match inner_call.arguments {
        None => empty_arguments(),
        // Some models write the object as a string.
        Some(json) => match serde_json::from_str::<String>(json.get()) {
            Ok(text) => RawValue::from_string(text).unwrap_or_else(|_| json.to_owned()),
            Err(_) => json.to_owned(),
        }
        .into(),
    };
    Some((inner_call.name, arguments))
}

/// One of the two tools.
struct DeferredTool {
    kind: DeferredKind,
    deferral: Arc<ToolDeferral>,
    tools: Arc<[(String, Arc<dyn Tool>)]>,
}

#[derive(Clone, Copy)]
enum DeferredKind {
    Search,
    Call,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SearchArguments {
    /// Words that the tool's name or description may have
    query: String,
    /// Most tools to find; 10 if left out
    #[schemars(range(min = 1, max = 50))]
    limit: Option<usize>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema and its name are read")]
struct CallArguments {
    /// The tool's name, as tool_search gives it
    name: String,
    /// The tool's own arguments, which fit the schema that tool_search gives
    #[serde(default)]
    arguments: Map<String, Value>,
}

#[derive(Serialize)]
struct SearchResult {
    tools: Vec<ToolSpec>,
    /// Matching tools that were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    more: Option<usize>,
}

impl Tool for DeferredTool {
    fn spec(&self) -> ToolSpec {
        let (name, description, schema) = match self.kind {
            DeferredKind::Search => (
                TOOL_SEARCH,
                format!(
                    "Finds tools by words in their names and descriptions, and answers with their names, descriptions and \
                     schemas. Call them with {TOOL_CALL}. There are {}.",
                    self.server_summary()
                ),
                &self.deferral.search_schema,
            ),
            DeferredKind::Call => (
                TOOL_CALL,
                format!("Calls a tool that {TOOL_SEARCH} found, and answers with its result."),
                &self.deferral.call_schema,
            ),
        };
        ToolSpec::new(name, &description, schema.raw())
    }

    fn effect(&self) -> Effect {
        // A call of a known tool was resolved to that tool before, so this one only reports an unknown name.
        Effect::ReadOnly
    }

    fn schema(&self) -> Option<&Schema> {
        Some(match self.kind {
            DeferredKind::Search => &self.deferral.search_schema,
            DeferredKind::Call => &self.deferral.call_schema,
        })
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        _: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            match self.kind {
                DeferredKind::Search => self.search(&call.parse_arguments()?).map(ToolOutput::from),
                DeferredKind::Call => {
                    Err(self.unknown_tool_message(&call.parse_arguments::<CallArguments>()?.name))
                }
            }
        })
    }
}

impl DeferredTool {
    /// How many tools each server has.
    fn server_summary(&self) -> String {
        let mut servers: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, _) in &*self.tools {
            let server = name.split(TOOL_NAME_SEPARATOR).next().unwrap_or_default();
            *servers.entry(server).or_default() += 1;
        }
        let counts = servers.iter().map(|(server, count)| match count {
            1 => format!("1 tool of {server}"),
            _ => format!("{count} tools of {server}"),
        });
        counts.collect::<Vec<_>>().join(", ")
    }

    fn search(&self, search: &SearchArguments) -> Result<String, String> {
        let query = search.query.to_lowercase();
        let words = query.split(|c: char| !c.is_alphanumeric());
        let words: Vec<&str> = words
            .filter(|word| !word.is_empty())
            .take(MAX_WORDS)
            .collect();
        let mut matches: Vec<(usize, ToolSpec)> = self
            .tools
            .iter()
            .map(|(_, tool)| tool.spec())
            .map(|spec| (score(&spec, &words), spec))
            .filter(|(score, _)| *score > 0)
            .collect();
        if matches.is_empty() {
            return Ok(format!(
                "No tool matches \"{}\". There are {}: try other words.",
                shorten(&search.query, 200),
                self.server_summary()
            ));
        }
        // The sort is stable: tools of equal score keep their server's order.
        matches.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
        let limit = search.limit.unwrap_or(DEFAULT_LIMIT).clamp(1, MAX_LIMIT);
        let (total, mut bytes) = (matches.len(), 0);
        let tools: Vec<ToolSpec> = matches
            .into_iter()
            .take(limit)
            .map(|(_, spec)| spec)
            .enumerate()
            .take_while(|(at, spec)| {
                bytes += spec.name.len() + spec.description.len() + spec.parameters.get().len();
                *at == 0 || bytes <= MAX_RESULT_BYTES
            })
            .map(|(_, spec)| spec)
            .collect();
        let more = Some(total - tools.len()).filter(|more| *more > 0);
        serde_json::to_string(&SearchResult { tools, more }).map_err(|error| error.to_string())
    }

    fn unknown_tool_message(&self, name: &str) -> String {
        let base_name = |name: &str| {
            name.rsplit(TOOL_NAME_SEPARATOR)
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        let wanted = (shorten(name, 100), base_name(&shorten(name, 100)));
        let mut candidates: Vec<(f64, &str)> = self
            .tools
            .iter()
            .map(|(tool_name, _)| {
                let similarity = strsim::jaro_winkler(&wanted.0, tool_name);
                (
                    similarity.max(strsim::jaro_winkler(&wanted.1, &base_name(tool_name))),
                    tool_name.as_str(),
                )
            })
            .collect();
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
        let suggestions: Vec<&str> = candidates
            .iter()
            .take(MAX_SUGGESTIONS)
            .map(|(_, name)| *name)
            .collect();
        format!(
            "Unknown tool: \"{}\". Similar names: {}. {TOOL_CALL} calls only what {TOOL_SEARCH} finds; call other tools directly.",
            shorten(name, 200),
            suggestions.join(", ")
        )
    }
}

/// A word in the tool's name counts more than one in the first line of its description.
fn score(spec: &ToolSpec, words: &[&str]) -> usize {
    let name = spec.name.to_lowercase();
    let first_line = spec.description.lines().next().unwrap_or_default();
    let first_line = first_line.to_lowercase();
    let word_score = |word: &&str| {
        3 * usize::from(name.contains(*word)) + usize::from(first_line.contains(*word))
    };
    words.iter().map(word_score).sum()
}
