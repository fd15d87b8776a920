//! How an agent's settings are listed: each section names its keys once, with their kinds, bounds and fields. The reader of agent
//! files, the views of the API and of `axed agents show`, and the JSON Schema are visitors of these lists.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::http_tool::HttpTool;
use crate::domain::mcp::McpServer;
use crate::domain::schedule::Schedule;
use crate::domain::text_template::TextTemplate;
use crate::domain::trigger::Trigger;
use crate::domain::usage::Cost;

/// The highest number of seconds, milliseconds or bytes that a setting may have.
pub const MAX_COUNT: u64 = u32::MAX as u64;

/// A table of an agent file. Its default holds the defaults of its settings.
pub trait Section: Clone + Default {
    /// The name of its schema in the OpenAPI document.
    const SCHEMA: &'static str;
    /// Whether views omit the settings that are unset. Other sections show them as 0 or null.
    const OMITS_UNSET: bool = false;

    /// Passes every setting to the visitor, in the order in which views show them.
    fn visit<V: Visitor>(&mut self, visitor: &mut V);
}

/// Reads, shows or describes settings.
pub trait Visitor {
    fn setting(&mut self, key: &'static str, setting: Setting<'_>);

    fn section<S: Section>(&mut self, key: &'static str, section: &mut S);

    fn optional_section<S: Section>(
        &mut self,
        key: &'static str,
        presence: Presence,
        section: &mut Option<S>,
    );

    /// A key that belongs at the top of the file, although a request has it in this section.
    fn top_level_key(&mut self, _key: &'static str) {}
}

/// What makes an optional section present.
#[derive(Clone, Copy, Debug)]
pub enum Presence {
    /// Its key `enabled` is true.
    Enabled,
    /// It has this key, which it must have if it has any other.
    Key(&'static str),
}

/// The kind and the bounds of a setting, with the field that holds it.
pub enum Setting<'a> {
    Text(&'a mut String),
    /// A blank text means unset.
    OptionalText(&'a mut Option<String>),
    /// A path that may begin with `~`; a blank text means unset.
    Path(&'a mut Option<PathBuf>),
    Flag(&'a mut bool),
    Texts(ListRule, &'a mut Vec<String>),
    /// A model that every agent must name.
    Model(&'a mut ModelRef),
    OptionalModel(&'a mut Option<ModelRef>),
    Models(&'a mut Vec<ModelRef>),
    Choice(&'a mut dyn ChoiceSetting),
    Whole(RangeInclusive<u64>, &'a mut dyn WholeNumber),
    Number(RangeInclusive<f64>, &'a mut f64),
    OptionalNumber(RangeInclusive<f64>, &'a mut Option<f64>),
    /// US dollars up to this many; 0 means unset.
    Usd(f64, &'a mut Option<Cost>),
    /// Whole seconds; 0 means unset.
    Seconds(&'a mut Option<Duration>),
    Milliseconds(&'a mut Duration),
    /// The name of an environment variable.
    VariableName(&'a mut Option<String>),
    /// An `http` or `https` URL, whose query may hold a secret.
    Url(&'a mut String),
    ResponseFormat(&'a mut ResponseFormat),
    /// A JSON Schema of objects.
    Schema(&'a mut Option<Arc<RawValue>>),
    /// A text with places for values.
    Template(&'a mut Option<TextTemplate>),
    /// Keys of provider requests.
    Extra(&'a mut Map<String, Value>),
    McpServers(&'a mut Vec<McpServer>),
    HttpTools(&'a mut Vec<HttpTool>),
    Schedules(&'a mut Vec<Schedule>),
    Triggers(&'a mut Vec<Trigger>),
}

/// What a list of texts holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListRule {
    /// Any texts, duplicates included.
    Any,
    /// Any texts, each once.
    Unique,
    /// Names, addresses and wildcards of hosts, each once.
    Hosts,
    /// Keys of `params.extra`, each once.
    ExtraKeys,
    /// Names of stored events, each once.
    Events,
    /// Labels of nodes, each once.
    NodeLabels,
}

/// An enum whose values have names.
pub trait Choice: Copy + PartialEq + JsonSchema + 'static {
    /// Every value with its name.
    const NAMES: &'static [(&'static str, Self)];

    fn name(self) -> Option<&'static str> {
        let mut names = Self::NAMES.iter();
        names
            .find(|(_, value)| *value == self)
            .map(|(name, _)| *name)
    }

    fn named(text: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<&str> = Self::NAMES.iter().map(|(name, _)| *name).collect();
            format!("must be one of: {}", names.join(", "))
        })
    }
}

/// A field that holds a [`Choice`] or none.
pub trait ChoiceSetting {
    fn name(&self) -> Option<&'static str>;
    /// The error follows the key: `must be one of: a, b`.
    fn set(&mut self, name: &str) -> Result<(), String>;
    fn schema(&self, generator: &mut SchemaGenerator) -> Schema;
}

impl<T: Choice> ChoiceSetting for T {
    fn name(&self) -> Option<&'static str> {
        Choice::name(*self)
    }

    fn set(&mut self, name: &str) -> Result<(), String> {
        *self = T::named(name)?;
        Ok(())
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<T>()
    }
}

impl<T: Choice> ChoiceSetting for Option<T> {
    fn name(&self) -> Option<&'static str> {
        self.and_then(Choice::name)
    }

    fn set(&mut self, name: &str) -> Result<(), String> {
        *self = Some(T::named(name)?);
        Ok(())
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<Self>()
    }
}

/// A field that holds a whole number. An optional one is unset by 0.
pub trait WholeNumber {
    fn get(&self) -> Option<u64>;
    /// A number that does not fit changes nothing: the bounds of the setting keep it out.
    fn set(&mut self, number: u64);
}

macro_rules! whole_numbers {
    ($($number:ty),*) => {$(
        impl WholeNumber for $number {
            fn get(&self) -> Option<u64> {
                u64::try_from(*self).ok()
            }

            fn set(&mut self, number: u64) {
                *self = Self::try_from(number).unwrap_or(*self);
            }
        }

        impl WholeNumber for Option<$number> {
            fn get(&self) -> Option<u64> {
                u64::try_from((*self)?).ok()
            }

            fn set(&mut self, number: u64) {
                *self = <$number>::try_from(number).ok().filter(|number| *number > 0);
            }
        }
    )*};
}

whole_numbers!(u8, u32, u64, usize);
