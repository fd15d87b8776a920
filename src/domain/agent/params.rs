//! `[params]` of an agent: parameters of its requests to providers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::settings::{Choice, ListRule, MAX_COUNT, Section, Setting, Visitor};
use crate::domain::service::Service;

/// The highest temperature of any provider is lower.
const MAX_TEMPERATURE: f64 = 100.0;

/// `[params]`: parameters of provider requests. Parameters that are unset are not sent.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "RunParams")]
pub struct Params {
    /// How random replies are; null means the provider's default. 0 is a value like any other.
    pub temperature: Option<f64>,
    /// The most tokens of one reply; null means no limit, or the provider's.
    pub max_tokens: Option<u32>,
    /// The share of likely tokens that replies are sampled from (nucleus sampling); null means the provider's default.
    pub top_p: Option<f64>,
    /// Texts that end a reply.
    pub stop: Vec<String>,
    /// The format of the final text.
    pub response_format: ResponseFormat,
    /// The reasoning effort; null means the provider's default.
    #[serde(default)]
    pub effort: Option<Effort>,
    /// The requested length of a summary of the model's reasoning; absent means no summary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_summary: Option<ReasoningSummary>,
    /// Merged into the body of each provider request.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub extra: Map<String, Value>,
    /// How long the provider caches the prompt for the run's next turns.
    #[serde(default)]
    pub cache: Cache,
    /// The service tier; null means the provider's default.
    #[serde(default)]
    pub service: Option<Service>,
}

impl Params {
    /// The parameters that an agent file has at its top, outside `[params]`.
    pub fn visit_top_level<V: Visitor>(&mut self, v: &mut V) {
        v.setting("effort", Setting::Choice(&mut self.effort));
        v.setting(
            "reasoning_summary",
            Setting::Choice(&mut self.reasoning_summary),
        );
        v.setting("cache", Setting::Choice(&mut self.cache));
        v.setting("service", Setting::Choice(&mut self.service));
    }
}

impl Section for Params {
    const SCHEMA: &'static str = "AgentParams";
    const OMITS_UNSET: bool = true;

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            temperature,
            max_tokens,
            top_p,
            stop,
            response_format,
            effort: _,
            reasoning_summary: _,
            extra,
            cache: _,
            service: _,
        } = self;
        for key in ["effort", "service", "cache", "reasoning_summary"] {
            v.top_level_key(key);
        }
        v.setting(
            "temperature",
            Setting::OptionalNumber(0.0..=MAX_TEMPERATURE, temperature),
        );
        v.setting("max_tokens", Setting::Whole(1..=MAX_COUNT, max_tokens));
        v.setting("top_p", Setting::OptionalNumber(0.0..=1.0, top_p));
        v.setting("stop", Setting::Texts(ListRule::Any, stop));
        v.setting("response_format", Setting::ResponseFormat(response_format));
        v.setting("extra", Setting::Extra(extra));
    }
}

/// The length of a summary of the model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReasoningSummary {
    /// The provider decides.
    Auto,
    /// Short.
    Concise,
    /// Long.
    Detailed,
}

impl Choice for ReasoningSummary {
    const NAMES: &'static [(&'static str, Self)] = &Self::ALL;
}

impl ReasoningSummary {
    pub const ALL: [(&'static str, Self); 3] = [
        ("auto", Self::Auto),
        ("concise", Self::Concise),
        ("detailed", Self::Detailed),
    ];

    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// How long a provider caches a prompt. Ignored for providers that cache on their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "PromptCache")]
pub enum Cache {
    /// For five minutes after its last use.
    #[default]
    #[serde(rename = "5m")]
    FiveMinutes,
    /// For an hour after its last use, at a higher price.
    #[serde(rename = "1h")]
    OneHour,
    /// Not at all.
    #[serde(rename = "off")]
    Off,
}

impl Choice for Cache {
    const NAMES: &'static [(&'static str, Self)] = &Self::ALL;
}

impl Cache {
    pub const ALL: [(&'static str, Self); 3] = [
        ("5m", Self::FiveMinutes),
        ("1h", Self::OneHour),
        ("off", Self::Off),
    ];
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

/// How much a model reasons before it answers, from not at all to its maximum.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "ReasoningEffort")]
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

impl Choice for Effort {
    const NAMES: &'static [(&'static str, Self)] = &Self::ALL;
}

impl Effort {
    /// All levels by name, the lowest first.
    pub const ALL: [(&'static str, Self); 7] = [
        ("none", Self::None),
        ("minimal", Self::Minimal),
        ("low", Self::Low),
        ("medium", Self::Medium),
        ("high", Self::High),
        ("xhigh", Self::Xhigh),
        ("max", Self::Max),
    ];

    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }

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
        for (name, level) in Effort::ALL {
            assert_eq!(level.as_str(), name);
        }
        assert_eq!(Max.nearest(&[Low, Medium, High]), Some(High));
        assert_eq!(Nothing.nearest(&[Low, Medium]), Some(Low));
        assert_eq!(Minimal.nearest(&[Nothing, Low]), Some(Low));
        assert_eq!(Xhigh.nearest(&[Xhigh, Max]), Some(Xhigh));
        assert_eq!(High.nearest(&[]), None);
    }
}
