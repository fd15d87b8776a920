//! `[params]` of an agent: parameters of its requests to providers.

use schemars::{JsonSchema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::domain::agent::response_format::{Format, ResponseFormat};
use crate::domain::service::Service;
use crate::settings::choice::choice;
use crate::settings::kinds::{Elsewhere, Number, Texts, Whole};
use crate::settings::section::{Audience, Kind, section};
use crate::settings::table_reader::{MAX_COUNT, TableReader};

/// The highest temperature of any provider is lower.
const MAX_TEMPERATURE: f64 = 100.0;
/// Where the keys of requests are that a file has outside of `[params]`.
const AT_TOP: Elsewhere = Elsewhere(Some("at the top of the file, above its first [table]"));

section! {
    /// `[params]`: parameters of provider requests. A parameter that is not set is absent and not sent.
    #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
    #[schemars(rename = "RunParams")]
    #[serde(default)]
    pub struct Params in "AgentParams", omits_unset = true {
        /// How random replies are; null means the provider's default. 0 is a value like any other.
        pub temperature: Option<f64>, Number(0.0..=MAX_TEMPERATURE), example = "0.2";
        /// The most tokens of one reply; null means no limit, or the provider's.
        pub max_tokens: Option<u32>, Whole(1..=MAX_COUNT), example = "4096";
        /// The share of likely tokens that replies are sampled from (nucleus sampling); null means the provider's default.
        pub top_p: Option<f64>, Number(0.0..=1.0), example = "0.95";
        /// Texts that end a reply.
        pub stop: Vec<String>, Texts, example = "[\"END\"]";
        /// The format of the final text: text, json_object, or json_schema with a schema, as a table or as JSON text.
        pub response_format: ResponseFormat, Format, example = r#"[params.response_format]
type = "json_schema"
schema = { type = "object", required = ["answer"], properties = { answer = { type = "string" } } }"#;
        /// The reasoning effort; null means the provider's default.
        pub effort: Option<Effort>, AT_TOP;
        /// The requested length of a summary of the model's reasoning; absent means no summary.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reasoning_summary: Option<ReasoningSummary>, AT_TOP;
        /// Merged into the body of each provider request, for what axed has no key for.
        #[serde(skip_serializing_if = "Map::is_empty")]
        pub extra: Map<String, Value>, Extra, example = "{ service_tier = \"priority\" }";
        /// How long the provider caches the prompt for the run's next turns.
        pub cache: Cache, AT_TOP;
        /// The service tier; null means the provider's default.
        pub service: Option<Service>, AT_TOP;
    }
}

/// Keys of provider requests.
struct Extra;

impl Kind<Map<String, Value>> for Extra {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Map<String, Value>) {
        if let Some(extra) = table.json_table(key, check_extra) {
            *value = extra;
        }
    }

    fn show(&self, value: &Map<String, Value>, _audience: Audience) -> Value {
        json!(value)
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Value {
        json!({"type": "object", "additionalProperties": {}})
    }
}

choice! {
    /// The length of a summary of the model's reasoning.
    pub enum ReasoningSummary {
        /// The provider decides.
        Auto = "auto",
        /// Short.
        Concise = "concise",
        /// Long.
        Detailed = "detailed",
    }
}

choice! {
    /// How long a provider caches a prompt. Ignored for providers that cache on their own.
    #[derive(Default)]
    #[schemars(rename = "PromptCache")]
    pub enum Cache {
        /// For five minutes after its last use.
        #[default]
        FiveMinutes = "5m",
        /// For an hour after its last use, at a higher price.
        OneHour = "1h",
        /// Not at all.
        Off = "off",
    }
}

/// Keys that axed sets in requests of at least one API; `extra` may not set them.
const RESERVED_KEYS: [&str; 15] = [
    "model",
    "messages",
    "input",
    "system",
    "instructions",
    "tools",
    "stream",
    "store",
    "previous_response_id",
    "conversation",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "background",
];

/// Rejects `extra` if it sets a key that axed sets. The error follows the key's name: `may not set "model"`.
pub fn check_extra(extra: &Map<String, Value>) -> Result<(), String> {
    let reserved = extra
        .keys()
        .find(|key| RESERVED_KEYS.contains(&key.as_str()));
    if let Some(key) = reserved {
        return Err(format!(
            "may not set \"{key}\": axed sets it, or an agent's own settings do"
        ));
    }
    let options = extra.get("options").and_then(Value::as_object);
    match options.is_some_and(|options| options.contains_key("num_predict")) {
        true => Err("may not set \"options.num_predict\": use max_tokens in [params]".to_owned()),
        false => Ok(()),
    }
}

/// Rejects keys that `extra` may not set.
pub fn check_extra_keys(keys: Vec<String>) -> Result<Vec<String>, String> {
    let extra = keys.iter().map(|key| (key.clone(), Value::Null));
    check_extra(&extra.collect())?;
    Ok(keys)
}

choice! {
    /// How much a model reasons before it answers, from not at all to its maximum.
    #[derive(PartialOrd, Ord, Hash)]
    #[schemars(rename = "ReasoningEffort")]
    pub enum Effort {
        None = "none",
        Minimal = "minimal",
        Low = "low",
        Medium = "medium",
        High = "high",
        Xhigh = "xhigh",
        Max = "max",
    }
}

impl Effort {
    /// The nearest of `levels`; of two equally near levels the higher. `None` if there are no levels.
    pub fn nearest(self, levels: &[Self]) -> Option<Self> {
        let distance = |level: &Self| (*level as i32 - self as i32).abs();
        levels
            .iter()
            .copied()
            .min_by_key(|level| (distance(level), std::cmp::Reverse(*level)))
    }
}

#[cfg(test)]
mod tests {
    use super::Effort;

    #[test]
    fn an_unknown_effort_becomes_the_nearest_level() {
        use Effort::{High, Low, Max, Medium, Minimal, None as Nothing, Xhigh};
        assert_eq!(Max.nearest(&[Low, Medium, High]), Some(High));
        assert_eq!(Nothing.nearest(&[Low, Medium]), Some(Low));
        assert_eq!(Minimal.nearest(&[Nothing, Low]), Some(Low));
        assert_eq!(Xhigh.nearest(&[Xhigh, Max]), Some(Xhigh));
        assert_eq!(High.nearest(&[]), None);
    }
}
