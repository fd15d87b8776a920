//! Facts about models: prices, context windows, abilities. They come from the table that ships with axed
//! (`models.toml`), overridden by the configuration.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use jiff::civil::Date;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Effort, Params};
use crate::domain::service::Service;
use crate::domain::usage::{LongPrice, Price};

/// By provider and model, as in `models.toml`.
type Table = BTreeMap<String, BTreeMap<String, Entry>>;

static SHIPPED: LazyLock<BTreeMap<String, BTreeMap<String, ModelFacts>>> = LazyLock::new(|| {
    let table: Table = toml::from_str(include_str!("models.toml")).unwrap_or_default();
    let facts = |models: BTreeMap<String, Entry>| {
        let facts = |(name, entry): (String, Entry)| (name, ModelFacts::from(entry));
        models.into_iter().map(facts).collect()
    };
    table
        .into_iter()
        .map(|(provider, models)| (provider, facts(models)))
        .collect()
});

/// Facts about one model. `None` means unknown: requests are then sent unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    /// The day on which the entry was compared with its source (`2026-11-22`); `None` if the configuration is the
    /// only source.
    pub checked_on: Option<String>,
    /// USD per million tokens.
    pub price: Option<Price>,
    /// Share of the price that a request in a batch costs.
    pub batch: Option<f64>,
    /// Share of the price that a request of the flexible tier costs.
    pub flex: Option<f64>,
    /// Tokens of a request and its reply together.
    pub context_window: Option<u64>,
    /// Tokens of the longest reply.
    pub max_output: Option<u32>,
    /// Whether it accepts images.
    pub images: Option<bool>,
    /// Whether it accepts PDF files.
    pub pdf: Option<bool>,
    pub reasoning: Option<bool>,
    /// The supported levels of effort, lowest first; empty if it supports none.
    pub effort: Option<Vec<Effort>>,
    /// Whether it accepts `temperature` and `top_p`.
    pub sampling: Sampling,
    /// Anthropic only: whether it accepts `thinking: {"type": "adaptive"}`.
    pub adaptive_thinking: Option<bool>,
    /// Anthropic only: whether it accepts a schema for its final text.
    pub structured_output: Option<bool>,
    /// Anthropic only: whether a request may make it call a tool.
    pub forced_tools: Option<bool>,
    /// OpenAI only: whether it requires the Responses API, because it rejects function tools on the other one.
    pub responses: bool,
    /// Merged into the body of each request.
    pub extra: Map<String, Value>,
}

/// When a model accepts `temperature` and `top_p`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// Also if nothing is known.
    #[default]
    Always,
    /// If the request sets no effort.
    WithoutEffort,
    /// It rejects such requests.
    Never,
}

/// Share of the price on a cheaper tier if the model's own share is unknown.
const DEFAULT_TIER_SHARE: f64 = 0.5;

impl ModelFacts {
    /// `true` if unknown.
    pub fn is_sold_on(&self, service: Service) -> bool {
        match service {
            Service::Default => true,
            Service::Flex => self.flex.is_some() || self.checked_on.is_none(),
            Service::Batch => self.batch.is_some() || self.checked_on.is_none(),
        }
    }

    /// Whether a request with these parameters may set `temperature` and `top_p`.
    pub fn allows_sampling(&self, params: &Params) -> bool {
        let has_summary = params.reasoning_summary.is_some();
        let summarized =
            (has_summary && self.adaptive_thinking == Some(true)).then_some(Effort::Low);
        self.sampling.allows(params.effort.or(summarized))
    }

    /// `None` if the price is unknown.
    pub fn price_for(&self, service: Service) -> Option<Price> {
        let price = self.price?;
        let share = match service {
            Service::Default => return Some(price),
            Service::Flex => self.flex,
            Service::Batch => self.batch,
        };
        Some(price.scaled(share.unwrap_or(DEFAULT_TIER_SHARE)))
    }
}

impl Sampling {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::WithoutEffort => "without_effort",
            Self::Never => "never",
        }
    }

    /// Whether a request with this effort may set `temperature` and `top_p`.
    fn allows(self, effort: Option<Effort>) -> bool {
        match self {
            Self::Always => true,
            Self::WithoutEffort => effort.is_none_or(|effort| effort == Effort::None),
            Self::Never => false,
        }
    }
}

/// One entry of `models.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    checked: String,
    input: f64,
    output: f64,
    cache_read: Option<f64>,
    cache_write: Option<f64>,
    cache_write_1h: Option<f64>,
    long: Option<LongPrice>,
    batch: Option<f64>,
    flex: Option<f64>,
    context_window: Option<u64>,
    max_output: Option<u32>,
    images: bool,
    pdf: bool,
    reasoning: bool,
    effort: Option<Vec<Effort>>,
    #[serde(default)]
    sampling: Sampling,
    adaptive_thinking: Option<bool>,
    structured_output: Option<bool>,
    forced_tools: Option<bool>,
    #[serde(default)]
    responses: bool,
}

impl From<Entry> for ModelFacts {
    fn from(entry: Entry) -> Self {
        Self {
            checked_on: Some(entry.checked),
            price: Some(Price {
                input: entry.input,
                output: entry.output,
                cache_read: entry.cache_read,
                cache_write: entry.cache_write,
                cache_write_1h: entry.cache_write_1h,
                long: entry.long,
            }),
            batch: entry.batch,
            flex: entry.flex,
            context_window: entry.context_window,
            max_output: entry.max_output,
            images: Some(entry.images),
            pdf: Some(entry.pdf),
            reasoning: Some(entry.reasoning),
            effort: entry.effort,
            sampling: entry.sampling,
            adaptive_thinking: entry.adaptive_thinking,
            structured_output: entry.structured_output,
            forced_tools: entry.forced_tools,
            responses: entry.responses,
            extra: Map::new(),
        }
    }
}

/// The price in one table of `[prices]` or `[providers.<name>.models]`. Unset fields keep the known price.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ConfiguredPrice {
    pub input: Option<f64>,
    pub output: Option<f64>,
    pub cache_read: Option<f64>,
    pub cache_write: Option<f64>,
    pub cache_write_1h: Option<f64>,
    pub batch: Option<f64>,
    pub flex: Option<f64>,
}

impl ConfiguredPrice {
    fn apply_to(&self, facts: ModelFacts) -> ModelFacts {
        let is_changed = self.input.or(self.output).is_some();
        let known = facts.price.or(is_changed.then(Price::default));
        // Cached tokens of free input are free, and reading them costs no more than input.
        let is_free = self.input.is_some_and(|price| price <= 0.0);
        let unless_free = |known: Option<f64>| known.filter(|_| !is_free);
        let read_at_most = |price: f64| price.min(self.input.unwrap_or(price));
        let price = known.map(|known| Price {
            input: self.input.unwrap_or(known.input),
            output: self.output.unwrap_or(known.output),
            cache_read: self
                .cache_read
                .or(unless_free(known.cache_read).map(read_at_most)),
            cache_write: self.cache_write.or(unless_free(known.cache_write)),
            cache_write_1h: self.cache_write_1h.or(unless_free(known.cache_write_1h)),
            // A configured price applies to requests of every length.
            long: known.long.filter(|_| !is_changed),
        });
        ModelFacts {
            price,
            batch: self.batch.or(facts.batch),
            flex: self.flex.or(facts.flex),
            ..facts
        }
    }
}

/// `[providers.<name>.models.<model>]`. Unset fields keep the table's values.
#[derive(Clone, Debug, Default)]
pub struct ModelOverride {
    pub price: ConfiguredPrice,
    pub context_window: Option<u64>,
    pub max_output: Option<u32>,
    pub images: Option<bool>,
    pub pdf: Option<bool>,
    pub reasoning: Option<bool>,
    pub effort: Option<Vec<Effort>>,
    pub sampling: Option<Sampling>,
    pub responses: Option<bool>,
    pub extra: Map<String, Value>,
}

impl ModelOverride {
    fn apply_to(&self, facts: ModelFacts) -> ModelFacts {
        let facts = self.price.apply_to(facts);
        ModelFacts {
            context_window: self.context_window.or(facts.context_window),
            max_output: self.max_output.or(facts.max_output),
            images: self.images.or(facts.images),
            pdf: self.pdf.or(facts.pdf),
            reasoning: self.reasoning.or(facts.reasoning),
            effort: self.effort.clone().or(facts.effort),
            sampling: self.sampling.unwrap_or(facts.sampling),
            responses: self.responses.unwrap_or(facts.responses),
            extra: self.extra.clone(),
            ..facts
        }
    }
}

/// A configured provider, as far as its models depend on it.
#[derive(Clone, Copy, Debug)]
pub struct ProviderModels<'a> {
    /// The well-known service whose models it serves; `None` if it has models of its own.
    pub service: Option<&'static str>,
    pub overrides: &'a BTreeMap<String, ModelOverride>,
}

/// Models by provider and name.
#[derive(Clone, Debug, Default)]
pub struct Models {
    /// Models that the configuration names, with the shipped facts as defaults.
    configured: BTreeMap<String, BTreeMap<String, ModelFacts>>,
    /// Configured providers that are a well-known service under another name.
    aliases: BTreeMap<String, &'static str>,
}

impl Models {
    /// Merges the shipped table with `[providers.<name>.models]`.
    pub fn new<'a>(providers: impl Iterator<Item = (&'a str, ProviderModels<'a>)> + Clone) -> Self {
        let mut models = Self::default();
        for (name, provider) in providers.clone() {
            if let (Some(service), false) = (provider.service, SHIPPED.contains_key(name)) {
                models.aliases.insert(name.to_owned(), service);
            }
        }
        for (name, provider) in providers {
            for (model, configured) in provider.overrides {
                let facts =
                    configured.apply_to(models.get(name, model).cloned().unwrap_or_default());
                models.insert(name, model, facts);
            }
        }
        models
    }

    /// Adds `[prices]`, which wins over all others.
    pub fn add_prices(&mut self, prices: &BTreeMap<String, ConfiguredPrice>) {
        for (model, priced) in prices {
            let Ok(model) = model.parse::<ModelRef>() else {
                continue;
            };
            let existing = self.get(&model.provider, &model.model);
            let facts = priced.apply_to(existing.cloned().unwrap_or_default());
            self.insert(&model.provider, &model.model, facts);
        }
    }

    fn insert(&mut self, provider: &str, model: &str, facts: ModelFacts) {
        let models = self.configured.entry(provider.to_owned()).or_default();
        models.insert(model.to_owned(), facts);
    }

    /// Looks the model up by its name, then by its name without a date or `-latest` at the end.
    pub fn get(&self, provider: &str, model: &str) -> Option<&ModelFacts> {
        let service = self.aliases.get(provider).copied().unwrap_or(provider);
        let tables = [self.configured.get(provider), SHIPPED.get(service)];
        find(&tables, model)
    }

    /// `None` if unknown: local models and scripts then cost nothing.
    pub fn price(&self, model: &ModelRef) -> Option<&Price> {
        self.get(&model.provider, &model.model)?.price.as_ref()
    }

    /// All models with known facts, sorted by name.
    pub fn all(&self) -> Vec<(Cow<'_, str>, &str, &ModelFacts)> {
        let mut all: BTreeMap<(Cow<'_, str>, &str), &ModelFacts> = BTreeMap::new();
        for (provider, models) in &*SHIPPED {
            for (model, facts) in models {
                all.insert((Cow::Borrowed(provider), model), facts);
            }
        }
        for (provider, models) in &self.configured {
            for (model, facts) in models {
                all.insert((Cow::Borrowed(provider), model), facts);
            }
        }
        all.into_iter()
            .map(|((provider, model), facts)| (provider, model, facts))
            .collect()
    }
}

/// Whether the shipped table has a price for a provider's model. `service` is as in [`ProviderModels`].
pub fn is_price_shipped(provider: &str, service: Option<&str>, model: &str) -> bool {
    let table = SHIPPED.get(provider).or_else(|| SHIPPED.get(service?));
    find(&[table], model).is_some_and(|facts| facts.price.is_some())
}

fn find<'a>(
    tables: &[Option<&'a BTreeMap<String, ModelFacts>>],
    model: &str,
) -> Option<&'a ModelFacts> {
    let find = |name: &str| tables.iter().flatten().find_map(|table| table.get(name));
    find(model).or_else(|| find(strip_date_suffix(model)?))
}

/// Above every price of a real model, in USD per million tokens.
pub const MAX_PRICE: f64 = 1e6;
/// Days after which facts about models are outdated.
const MAX_AGE_DAYS: i32 = 90;

/// The day on which the oldest shipped entry was checked, if that is more than 90 days before `today`.
pub fn stale_since(today: Date) -> Option<Date> {
    let entries = SHIPPED.values().flat_map(BTreeMap::values);
    let days = entries.filter_map(|facts| facts.checked_on.as_deref()?.parse::<Date>().ok());
    days.min()
        .filter(|oldest| (today - *oldest).get_days() > MAX_AGE_DAYS)
}

/// The name without `-20250929`, `-2025-04-14` or `-latest` at the end.
fn strip_date_suffix(model: &str) -> Option<&str> {
    let is_date = |end: &str, pattern: &str| {
        let is_match = |(c, expected): (char, char)| match expected {
            '9' => c.is_ascii_digit(),
            other => c == other,
        };
        end.len() == pattern.len() && end.chars().zip(pattern.chars()).all(is_match)
    };
    let dated = ["-99999999", "-9999-99-99"]
        .into_iter()
        .find_map(|pattern| {
            let (name, end) = model.split_at_checked(model.len().checked_sub(pattern.len())?)?;
            is_date(end, pattern).then_some(name)
        });
    dated.or_else(|| model.strip_suffix("-latest"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::civil::date;

    use super::{
        ConfiguredPrice, ModelOverride, Models, ProviderModels, SHIPPED, Sampling,
        is_price_shipped, stale_since,
    };
    use crate::domain::agent::params::Effort;
    use crate::domain::usage::Price;

    #[test]
    fn the_shipped_table_is_complete() {
        let models: usize = SHIPPED.values().map(BTreeMap::len).sum();
        assert!(models >= 40, "{models}");
        for (name, facts) in SHIPPED.values().flatten() {
            let price = facts.price.expect("a price");
            assert!(price.input > 0.0 && price.output >= price.input, "{name}");
            assert!(
                price.cache_read.is_none_or(|read| read <= price.input),
                "{name}"
            );
            assert!(
                facts.context_window.is_some_and(|window| window > 1000),
                "{name}"
            );
            let levels = facts.effort.as_deref().unwrap_or_default();
            assert!(levels.is_sorted(), "{name}");
        }
    }

    #[test]
    fn a_table_is_stale_after_ninety_days() {
        assert_eq!(stale_since(date(2026, 11, 30)), None);
        assert!(stale_since(date(2030, 1, 1)).is_some());
    }

    #[test]
    fn a_configured_price_wins_and_a_date_is_left_off() {
        let own = Price {
            input: 1.0,
            ..Price::default()
        };
        let shipped = SHIPPED["openai"]["gpt-5"].price.expect("a price");
        let priced = ConfiguredPrice {
            input: Some(1.0),
            output: Some(0.0),
            ..ConfiguredPrice::default()
        };
        let mut models = Models::new(std::iter::empty());
        models.add_prices(&BTreeMap::from([
            ("openai/gpt-5".to_owned(), priced),
            ("vllm/some".to_owned(), priced),
        ]));
        let price = |provider: &str, model: &str| models.get(provider, model)?.price;
        let known = Price {
            input: 1.0,
            output: 0.0,
            long: None,
            ..shipped
        };
        assert_eq!(price("openai", "gpt-5"), Some(known));
        for (input, cache_read) in [(0.0, None), (0.01, Some(0.01))] {
            let priced = ConfiguredPrice {
                input: Some(input),
                ..priced
            };
            let facts = priced.apply_to(SHIPPED["openai"]["gpt-5"].clone());
            assert_eq!(facts.price.and_then(|it| it.cache_read), cache_read);
        }
        assert_eq!(price("vllm", "some"), Some(own));
        let gpt = models.get("openai", "gpt-5").expect("known");
        assert_eq!(gpt.sampling, Sampling::Never, "the other facts stay");
        let opus = price("anthropic", "claude-opus-5-5");
        assert_eq!(opus.map(|price| price.output), Some(20.0));
        for dated in ["claude-opus-5-5-20261001", "claude-opus-5-5-latest"] {
            assert_eq!(price("anthropic", dated), opus);
        }
        assert!(price("openai", "gpt-4.1-2025-04-14").is_some());
        for (provider, unknown) in [
            ("openai", "gpt-4.1-turbo"),
            ("vllm", "gpt-5"),
            ("openai", "-20250929"),
            ("openai", "é-2025"),
        ] {
            assert_eq!(price(provider, unknown), None, "{provider}/{unknown}");
        }
    }

    #[test]
    fn a_price_of_the_table_can_be_configured_in_part() {
        let shipped = SHIPPED["openai"]["gpt-5.5"].price.expect("a price");
        let price = |priced: ConfiguredPrice| {
            let mut models = Models::new(std::iter::empty());
            models.add_prices(&BTreeMap::from([("openai/gpt-5.5".to_owned(), priced)]));
            let facts = models.get("openai", "gpt-5.5").expect("known");
            let overrides = BTreeMap::from([(
                "gpt-5.5".to_owned(),
                ModelOverride {
                    price: priced,
                    ..ModelOverride::default()
                },
            )]);
            let provider = ProviderModels {
                service: Some("openai"),
                overrides: &overrides,
            };
            let models = Models::new(std::iter::once(("openai", provider)));
            let same = models.get("openai", "gpt-5.5").expect("known");
            assert_eq!(same.price, facts.price, "one rule for both sections");
            facts.price.expect("a price")
        };
        let none = ConfiguredPrice::default();
        assert_eq!(price(none), shipped);
        let input = price(ConfiguredPrice {
            input: Some(9.0),
            ..none
        });
        assert_eq!((input.input, input.output), (9.0, shipped.output));
        assert_eq!((input.cache_read, input.long), (shipped.cache_read, None));
        assert!(shipped.cache_read.is_some());
        let output = price(ConfiguredPrice {
            output: Some(9.0),
            ..none
        });
        assert_eq!((output.input, output.output), (shipped.input, 9.0));
        assert_eq!(output.cache_read, shipped.cache_read);
    }

    #[test]
    fn a_price_is_shipped_under_the_name_of_the_provider_or_its_service() {
        assert!(is_price_shipped("openai", None, "gpt-5"));
        assert!(is_price_shipped("ours", Some("openai"), "gpt-5"));
        assert!(is_price_shipped("openai", None, "gpt-4.1-2025-04-14"));
        assert!(!is_price_shipped("ours", None, "gpt-5"));
        assert!(!is_price_shipped("openai", None, "mine"));
    }

    #[test]
    fn the_configuration_overrides_key_by_key() {
        let shipped = SHIPPED["openai"]["gpt-5.5"].clone();
        let configured = ModelOverride {
            context_window: Some(8000),
            effort: Some(vec![Effort::Low]),
            price: ConfiguredPrice {
                cache_read: Some(0.1),
                ..ConfiguredPrice::default()
            },
            ..ModelOverride::default()
        };
        let facts = configured.apply_to(shipped.clone());
        assert_eq!(facts.context_window, Some(8000));
        assert_eq!(facts.max_output, shipped.max_output);
        assert_eq!(facts.effort, Some(vec![Effort::Low]));
        let (price, before) = (
            facts.price.expect("a price"),
            shipped.price.expect("a price"),
        );
        assert_eq!((price.input, price.cache_read), (before.input, Some(0.1)));
        assert!(price.long.is_some());
    }
}
