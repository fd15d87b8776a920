//! What a request may override of an agent's settings.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::domain::agent::Budget;
use crate::domain::agent::params::{Effort, Params, check_extra};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::service::Service;
use crate::domain::usage::Cost;

// `F` is the response format: as the request writes it, or checked.
/// Parameters of a request. Each one that is set replaces the agent's.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    default,
    bound(deserialize = "F: Deserialize<'de>")
)]
#[schemars(rename = "ParamsInput")]
pub struct ParamsOverride<F> {
    /// How random replies are.
    #[schemars(range(min = 0.0))]
    pub temperature: Option<f64>,
    /// The most tokens of one reply.
    #[schemars(range(min = 1))]
    pub max_tokens: Option<u32>,
    /// The share of likely tokens that replies are sampled from (nucleus sampling).
    #[schemars(range(min = 0.0, max = 1.0))]
    pub top_p: Option<f64>,
    /// Texts that end a reply.
    pub stop: Option<Vec<String>>,
    /// The same as the request's own `response_format`; only one of them may be set.
    pub response_format: Option<F>,
    /// How much the model thinks before it answers.
    pub effort: Option<Effort>,
    /// The provider's service tier, if it has any.
    pub service: Option<Service>,
    /// Merged into the body of each provider request. Only keys that the agent's `allow_extra` lists.
    pub extra: Option<Map<String, Value>>,
}

/// Limits of a request's whole tree. 0 sets no limit, as in an agent's file.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "BudgetInput")]
#[serde(deny_unknown_fields, default)]
pub struct BudgetOverride {
    /// The most input and output tokens together.
    pub max_tokens: Option<u64>,
    /// The highest cost in US dollars, at the configured prices.
    #[schemars(range(min = 0.0))]
    pub max_cost_usd: Option<f64>,
    /// The most executed tool calls.
    pub max_tool_calls: Option<u64>,
    /// The most runs, the root included.
    pub max_runs: Option<u64>,
}

/// An override that no agent can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} {reason}")]
pub struct InvalidOverride {
    pub key: &'static str,
    /// Follows the key: `must be non-negative`.
    pub reason: String,
}

impl InvalidOverride {
    fn new(key: &'static str, reason: &str) -> Self {
        let reason = reason.to_owned();
        Self { key, reason }
    }
}

impl<F> Default for ParamsOverride<F> {
    fn default() -> Self {
        Self {
            temperature: None,
            max_tokens: None,
            top_p: None,
            stop: None,
            response_format: None,
            effort: None,
            service: None,
            extra: None,
        }
    }
}

impl<F> ParamsOverride<F> {
    pub fn check(&self) -> Result<(), InvalidOverride> {
        if self.temperature.is_some_and(|t| t < 0.0) {
            return Err(InvalidOverride::new("temperature", "must be non-negative"));
        }
        if self.top_p.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
            return Err(InvalidOverride::new("top_p", "must be between 0 and 1"));
        }
        if let Err(reason) = self.extra.as_ref().map_or(Ok(()), check_extra) {
            return Err(InvalidOverride {
                key: "extra",
                reason,
            });
        }
        match self.max_tokens {
            Some(0) => Err(InvalidOverride::new("max_tokens", "must be at least 1")),
            _ => Ok(()),
        }
    }

    pub fn is_empty(&self) -> bool {
        let Self {
            temperature,
            max_tokens,
            top_p,
            stop,
            response_format,
            effort,
            service,
            extra,
        } = self;
        temperature.is_none()
            && max_tokens.is_none()
            && top_p.is_none()
            && stop.is_none()
            && response_format.is_none()
            && effort.is_none()
            && service.is_none()
            && extra.as_ref().is_none_or(Map::is_empty)
    }

    /// The same parameters with another response format.
    pub fn with_response_format<G>(self, response_format: Option<G>) -> ParamsOverride<G> {
        ParamsOverride {
            temperature: self.temperature,
            max_tokens: self.max_tokens,
            top_p: self.top_p,
            stop: self.stop,
            response_format,
            effort: self.effort,
            service: self.service,
            extra: self.extra,
        }
    }
}

impl ParamsOverride<ResponseFormat> {
    /// Replaces the parameters that are set here. Each key of `extra` replaces the agent's.
    pub fn apply_to(&self, params: &mut Params) {
        params.temperature = self.temperature.or(params.temperature);
        params.max_tokens = self.max_tokens.or(params.max_tokens);
        params.top_p = self.top_p.or(params.top_p);
        if let Some(stop) = &self.stop {
            params.stop.clone_from(stop);
        }
        if let Some(format) = &self.response_format {
            params.response_format = format.clone();
        }
        params.effort = self.effort.or(params.effort);
        params.service = self.service.or(params.service);
        let extra = self.extra.iter().flatten();
        let extra = extra.map(|(key, value)| (key.clone(), value.clone()));
        params.extra.extend(extra);
    }
}

impl BudgetOverride {
    pub fn into_budget(self) -> Result<Budget, InvalidOverride> {
        if self.max_cost_usd.is_some_and(|usd| usd < 0.0) {
            return Err(InvalidOverride::new("max_cost_usd", "must be non-negative"));
        }
        let positive = |limit: Option<u64>| limit.filter(|limit| *limit > 0);
        let cost = self.max_cost_usd.filter(|usd| *usd > 0.0);
        Ok(Budget {
            max_tokens: positive(self.max_tokens),
            max_cost: cost.map(Cost::from_usd),
            max_tool_calls: positive(self.max_tool_calls),
            max_runs: positive(self.max_runs),
        })
    }
}
