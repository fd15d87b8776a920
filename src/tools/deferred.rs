//! Tools that are too many to offer: `tool_search` finds them by words, `tool_call` calls one. Knows no server.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::mcp::SEPARATOR;
use crate::domain::message::{ToolCall, ToolSpec, no_arguments, shorten};
use crate::domain::schema::Schema;
use crate::tools::{Context, Effect, Output, Tool};

/// The tool that finds tools.
pub const SEARCH: &str = "tool_search";
/// The tool that calls tools.
pub const CALL: &str = "tool_call";
/// Most bytes of what a search finds, unless the first tool alone has more.
const MAX_FOUND: usize = 32 << 10;
/// Tools that a search finds if the model sets no limit.
const DEFAULT_LIMIT: usize = 10;
const MAX_LIMIT: usize = 50;
/// Most words of a query that count.
const MAX_WORDS: usize = 32;
/// Names that an error suggests.
const MAX_NEAR: usize = 5;

/// Whether, and from how many on, tools of MCP servers are found and called instead of offered.
pub struct Deferral {
    above: usize,
    search: Schema,
    call: Schema,
}

impl Deferral {
    /// For more than `above` tools; `None` if that is 0.
    pub fn new(above: usize) -> Option<Arc<Self>> {
        if above == 0 {
            return None;
        }
        Some(Arc::new(Self {
            above,
            search: Schema::of::<Search>().ok()?,
            call: Schema::of::<Call>().ok()?,
        }))
    }

    /// The two tools that stand for these, if there are too many of them.
    pub fn of(
        self: &Arc<Self>,
        tools: Vec<(String, Arc<dyn Tool>)>,
    ) -> Option<[(String, Arc<dyn Tool>); 2]> {
        if tools.len() <= self.above {
            return None;
        }
        let tools: Arc<[_]> = tools.into();
        let make = |kind| {
            let (deferral, tools) = (Arc::clone(self), Arc::clone(&tools));
            Arc::new(Deferred {
                kind,
                deferral,
                tools,
            })
        };
        Some([
            (SEARCH.to_owned(), make(Kind::Search)),
            (CALL.to_owned(), make(Kind::Call)),
        ])
    }
}

/// What a call of [`CALL`] calls, and with what; `None` if it is no such call or names nothing.
pub fn inner(call: &ToolCall) -> Option<(String, Arc<RawValue>)> {
    #[derive(Deserialize)]
    struct Inner<'a> {
        name: String,
        #[serde(borrow)]
        arguments: Option<&'a RawValue>,
    }
    if call.name != CALL {
        return None;
    }
    let inner: Inner<'_> = serde_json::from_str(call.arguments.get()).ok()?;
    let arguments = match inner.arguments {
        None => no_arguments(),
        // Some models write the object as a text.
        Some(json) => match serde_json::from_str::<String>(json.get()) {
            Ok(text) => RawValue::from_string(text).unwrap_or_else(|_| json.to_owned()),
            Err(_) => json.to_owned(),
        }
        .into(),
    };
    Some((inner.name, arguments))
}

/// One of the two tools.
struct Deferred {
    kind: Kind,
    deferral: Arc<Deferral>,
    tools: Arc<[(String, Arc<dyn Tool>)]>,
}

#[derive(Clone, Copy)]
enum Kind {
    Search,
    Call,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Search {
    /// Words that the tool's name or description may have
    query: String,
    /// Most tools to find; 10 if left out
    #[schemars(range(min = 1, max = 50))]
    limit: Option<usize>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema and its name are read")]
struct Call {
    /// The tool's name, as tool_search gives it
    name: String,
    /// The tool's own arguments, which fit the schema that tool_search gives
    #[serde(default)]
    arguments: Map<String, Value>,
}

#[derive(Serialize)]
struct Found {
    tools: Vec<ToolSpec>,
    /// Others that match and were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    more: Option<usize>,
}

impl Tool for Deferred {
    fn spec(&self) -> ToolSpec {
        let (name, about, schema) = match self.kind {
            Kind::Search => (
                SEARCH,
                format!(
                    "Finds tools by words in their names and descriptions, and answers with their names, descriptions and \
                     schemas. Call them with {CALL}. There are {}.",
                    self.servers()
                ),
                &self.deferral.search,
            ),
            Kind::Call => (
                CALL,
                format!("Calls a tool that {SEARCH} found, and answers with its result."),
                &self.deferral.call,
            ),
        };
        ToolSpec::new(name, &about, schema.raw())
    }

    fn effect(&self) -> Effect {
        // A call of a tool that is there is performed as that tool's own.
        Effect::Reads
    }

    fn schema(&self) -> Option<&Schema> {
        Some(match self.kind {
            Kind::Search => &self.deferral.search,
            Kind::Call => &self.deferral.call,
        })
    }

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        _: Context<'a>,
    ) -> BoxFuture<'a, Result<Output, String>> {
        Box::pin(async move {
            match self.kind {
                Kind::Search => self.search(&call.read()?).map(Output::from),
                Kind::Call => Err(self.unknown(&call.read::<Call>()?.name)),
            }
        })
    }
}

impl Deferred {
    /// How many tools each server has.
    fn servers(&self) -> String {
        let mut servers: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, _) in &*self.tools {
            let server = name.split(SEPARATOR).next().unwrap_or_default();
            *servers.entry(server).or_default() += 1;
        }
        let counts = servers.iter().map(|(server, count)| match count {
            1 => format!("1 tool of {server}"),
            _ => format!("{count} tools of {server}"),
        });
        counts.collect::<Vec<_>>().join(", ")
    }

    fn search(&self, search: &Search) -> Result<String, String> {
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
                self.servers()
            ));
        }
        // Stable: of equal ones the server's own order holds.
        matches.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
        let limit = search.limit.unwrap_or(DEFAULT_LIMIT).clamp(1, MAX_LIMIT);
        let (all, mut bytes) = (matches.len(), 0);
        let tools: Vec<ToolSpec> = matches
            .into_iter()
            .take(limit)
            .map(|(_, spec)| spec)
            .enumerate()
            .take_while(|(at, spec)| {
                bytes += spec.name.len() + spec.description.len() + spec.parameters.get().len();
                *at == 0 || bytes <= MAX_FOUND
            })
            .map(|(_, spec)| spec)
            .collect();
        let more = Some(all - tools.len()).filter(|more| *more > 0);
        serde_json::to_string(&Found { tools, more }).map_err(|error| error.to_string())
    }

    /// What a call of a tool that is not there is answered.
    fn unknown(&self, name: &str) -> String {
        let own = |name: &str| name.rsplit(SEPARATOR).next().unwrap_or_default().to_owned();
        let wanted = (shorten(name, 100), own(&shorten(name, 100)));
        let mut near: Vec<(f64, &str)> = self
            .tools
            .iter()
            .map(|(known, _)| {
                let whole = strsim::jaro_winkler(&wanted.0, known);
                (
                    whole.max(strsim::jaro_winkler(&wanted.1, &own(known))),
                    known.as_str(),
                )
            })
            .collect();
        near.sort_by(|a, b| b.0.total_cmp(&a.0));
        let near: Vec<&str> = near.iter().take(MAX_NEAR).map(|(_, name)| *name).collect();
        format!(
            "Unknown tool: \"{}\". Names that are near: {}. {CALL} calls only what {SEARCH} finds; call other tools directly.",
            shorten(name, 200),
            near.join(", ")
        )
    }
}

/// How well a tool fits: a word in its name counts more than one in the first line of its description.
fn score(spec: &ToolSpec, words: &[&str]) -> usize {
    let name = spec.name.to_lowercase();
    let line = spec.description.lines().next().unwrap_or_default();
    let line = line.to_lowercase();
    let of =
        |word: &&str| 3 * usize::from(name.contains(*word)) + usize::from(line.contains(*word));
    words.iter().map(of).sum()
}
