//! `[expect]` of a recording: what must hold for the run of a test.

use serde::Deserialize;
use serde_json::{Map, Value};

/// Every assertion is optional.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expect {
    /// Whether the run completes.
    pub completed: Option<bool>,
    /// Texts that the final text contains.
    pub contains: OneOrMany,
    /// Regular expressions that the final text matches.
    pub matches: OneOrMany,
    /// A JSON Schema that the final text, as JSON, matches: a table, or JSON as a text.
    pub schema: Option<Value>,
    /// Calls that the tree makes, others between them.
    pub calls: Vec<ExpectedCall>,
    /// Whether the calls come in this order.
    pub order: Order,
    /// Calls that the tree does not make.
    pub no_call: Vec<ExpectedCall>,
    /// The most tokens of the tree, input and output.
    pub max_tokens: Option<u64>,
    /// The highest cost of the tree.
    pub max_cost_usd: Option<f64>,
    /// The most turns of the root run.
    pub max_turns: Option<u32>,
    /// Questions to an agent about the final text; only with live models.
    pub judge: Vec<Judge>,
}

/// A text or a list of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OneOrMany(pub Vec<String>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a text or a list of texts")]
        enum Repr {
            One(String),
            Many(Vec<String>),
        }
        Ok(Self(match Repr::deserialize(deserializer)? {
            Repr::One(text) => vec![text],
            Repr::Many(texts) => texts,
        }))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    #[default]
    AsListed,
    Any,
}

/// A call: the name of its tool, or a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpectedCall {
    pub tool: String,
    /// Arguments that the call has; others may be there too.
    pub arguments: Map<String, Value>,
    /// The agent of the calling run.
    pub agent: Option<String>,
}

impl<'de> Deserialize<'de> for ExpectedCall {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            tool: String,
            #[serde(default)]
            arguments: Map<String, Value>,
            #[serde(default)]
            agent: Option<String>,
        }
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "the name of a tool, or a table with tool, arguments and agent"
        )]
        enum Repr {
            Name(String),
            Table(Table),
        }
        Ok(match Repr::deserialize(deserializer)? {
            Repr::Name(tool) => Self {
                tool,
                ..Self::default()
            },
            Repr::Table(table) => Self {
                tool: table.tool,
                arguments: table.arguments,
                agent: table.agent,
            },
        })
    }
}

/// A question that an agent answers with yes or no.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judge {
    pub agent: String,
    pub question: String,
}
