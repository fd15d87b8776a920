//! What a row of a table of models, or of the configuration, says about one model. What it leaves out stays as it is known.

use jiff::civil::Date;
use serde_json::{Map, Value};

use crate::config::models::{ModelFacts, PriceChange, Sampling, TierShares};
use crate::domain::agent::params::{Effort, check_extra};
use crate::domain::usage::{LongPrice, Price};
use crate::settings::choice::Choice;
use crate::settings::table_reader::{MAX_COUNT, TableReader};

/// Above every price of a real model, in USD per million tokens.
const MAX_PRICE: f64 = 1e6;
/// Above every factor of a real tier.
const MAX_SHARE: f64 = 1e3;
/// Most later prices of one model.
const MAX_CHANGES: usize = 100;

/// One row. Unset keys keep the known values.
#[derive(Clone, Debug, Default)]
pub struct ModelRow {
    pub price: PriceRow,
    pub checked: Option<Date>,
    pub retires: Option<Date>,
    pub successor: Option<String>,
    pub context_window: Option<u64>,
    pub max_input: Option<u64>,
    pub max_output: Option<u32>,
    pub images: Option<bool>,
    pub pdf: Option<bool>,
    pub reasoning: Option<bool>,
    pub effort: Option<Vec<Effort>>,
    pub sampling: Option<Sampling>,
    pub adaptive_thinking: Option<bool>,
    pub structured_output: Option<bool>,
    pub forced_tools: Option<bool>,
    pub responses: Option<bool>,
    pub extra: Option<Map<String, Value>>,
}

/// The prices of a row, which `[prices]` also has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PriceRow {
    pub input: Option<f64>,
    pub output: Option<f64>,
    pub cache_read: Option<f64>,
    pub cache_write: Option<f64>,
    pub cache_write_1h: Option<f64>,
    pub long: Option<LongPrice>,
    pub changes: Option<Vec<PriceChange>>,
    pub shares: TierShares,
}

impl ModelRow {
    /// `needs_price` if no price of the model is known: then one without its other half is an error.
    pub fn read(s: &mut TableReader<'_>, needs_price: bool) -> Self {
        let has_price = s.peek("input").or_else(|| s.peek("output")).is_some();
        if has_price && needs_price {
            require_whole_price(s);
        }
        let sampling = [
            ("always", Sampling::Always),
            ("without_effort", Sampling::WithoutEffort),
            ("never", Sampling::Never),
        ];
        let max_output = s.integer("max_output", 1..=MAX_COUNT);
        Self {
            price: PriceRow::read(s),
            checked: s.date("checked"),
            retires: s.date("retires"),
            successor: s.text("successor"),
            context_window: s.integer("context_window", 1..=MAX_COUNT),
            max_input: s.integer("max_input", 1..=MAX_COUNT),
            max_output: max_output.and_then(|tokens| u32::try_from(tokens).ok()),
            images: s.flag("images"),
            pdf: s.flag("pdf"),
            reasoning: s.flag("reasoning"),
            effort: read_efforts(s),
            sampling: s.one_of("sampling", &sampling),
            adaptive_thinking: s.flag("adaptive_thinking"),
            structured_output: s.flag("structured_output"),
            forced_tools: s.flag("forced_tools"),
            responses: s.flag("responses"),
            extra: s.json_table("extra", check_extra),
        }
    }

    pub fn apply_to(&self, facts: ModelFacts) -> ModelFacts {
        let facts = self.price.apply_to(facts);
        ModelFacts {
            checked_on: self.checked.map(|day| day.to_string()).or(facts.checked_on),
            retires: self.retires.or(facts.retires),
            successor: self.successor.clone().or(facts.successor),
            context_window: self.context_window.or(facts.context_window),
            max_input: self.max_input.or(facts.max_input),
            max_output: self.max_output.or(facts.max_output),
            images: self.images.or(facts.images),
            pdf: self.pdf.or(facts.pdf),
            reasoning: self.reasoning.or(facts.reasoning),
            effort: self.effort.clone().or(facts.effort),
            sampling: self.sampling.unwrap_or(facts.sampling),
            adaptive_thinking: self.adaptive_thinking.or(facts.adaptive_thinking),
            structured_output: self.structured_output.or(facts.structured_output),
            forced_tools: self.forced_tools.or(facts.forced_tools),
            responses: self.responses.unwrap_or(facts.responses),
            extra: self.extra.clone().unwrap_or(facts.extra),
            ..facts
        }
    }
}

impl PriceRow {
    pub fn read(s: &mut TableReader<'_>) -> Self {
        let share = |s: &mut TableReader<'_>, key| s.number(key, 0.0..=MAX_SHARE);
        Self {
            changes: read_changes(s),
            shares: TierShares {
                batch: s.number("batch", 0.0..=1.0),
                flex: s.number("flex", 0.0..=1.0),
                priority: share(s, "priority"),
                ultrafast: share(s, "ultrafast"),
                regional: share(s, "regional"),
            },
            ..Self::read_amounts(s)
        }
    }

    /// What tokens cost, without other days and tiers.
    fn read_amounts(s: &mut TableReader<'_>) -> Self {
        let has_long = s.peek("long").is_some();
        let long = s.nested("long", |s| {
            if has_long {
                require(s, &["above", "input", "output"]);
            }
            LongPrice {
                above: s.integer("above", 1..=MAX_COUNT).unwrap_or_default(),
                input: price(s, "input").unwrap_or_default(),
                output: price(s, "output").unwrap_or_default(),
                cache_read: price(s, "cache_read"),
                cache_write: price(s, "cache_write"),
                cache_write_1h: price(s, "cache_write_1h"),
            }
        });
        Self {
            input: price(s, "input"),
            output: price(s, "output"),
            cache_read: price(s, "cache_read"),
            cache_write: price(s, "cache_write"),
            cache_write_1h: price(s, "cache_write_1h"),
            long: Some(long).filter(|_| has_long),
            ..Self::default()
        }
    }

    pub fn apply_to(&self, facts: ModelFacts) -> ModelFacts {
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
            // A configured price applies to requests of every length, and of every day.
            long: self.long.or(known.long.filter(|_| !is_changed)),
        });
        let mut known_changes = facts.price_changes;
        if is_changed {
            known_changes.clear();
        }
        let (own, known) = (self.shares, facts.shares);
        ModelFacts {
            price,
            price_changes: self.changes.clone().unwrap_or(known_changes),
            shares: TierShares {
                batch: own.batch.or(known.batch),
                flex: own.flex.or(known.flex),
                priority: own.priority.or(known.priority),
                ultrafast: own.ultrafast.or(known.ultrafast),
                regional: own.regional.or(known.regional),
            },
            ..facts
        }
    }
}

/// The prices from later days on: `prices = [{ from = "2027-01-01", input = 2, output = 10 }]`.
fn read_changes(s: &mut TableReader<'_>) -> Option<Vec<PriceChange>> {
    let node = s.peek("prices")?;
    let mut changes = s.table_list("prices", |s| {
        require(s, &["from", "input", "output"]);
        let from = s.date("from")?;
        let facts = PriceRow::read_amounts(s).apply_to(ModelFacts::default());
        let price = facts.price?;
        Some(PriceChange { from, price })
    });
    if changes.len() > MAX_CHANGES {
        let why = format!("has more than {MAX_CHANGES} prices");
        s.push_invalid(&node, "prices", &why);
        changes.clear();
    }
    let mut changes: Vec<PriceChange> = changes.into_iter().flatten().collect();
    changes.sort_by_key(|change| change.from);
    Some(changes)
}

fn price(s: &mut TableReader<'_>, key: &'static str) -> Option<f64> {
    s.number(key, 0.0..=MAX_PRICE)
}

/// Records an error for each of these keys that is absent: without it, the table means nothing.
fn require(s: &mut TableReader<'_>, keys: &[&'static str]) {
    for key in keys {
        if s.peek(key).is_none() {
            s.push_missing(key, "is required");
        }
    }
}

/// Records an error if a model without a known price has only a part of one: the rest would be free.
pub fn require_whole_price(s: &mut TableReader<'_>) {
    for key in ["input", "output"] {
        if s.peek(key).is_none() {
            let message = format!(
                "is required: axed knows no price of this model; set {key} = 0 if it costs nothing"
            );
            s.push_missing(key, &message);
        }
    }
}

/// Sorted, lowest first.
fn read_efforts(s: &mut TableReader<'_>) -> Option<Vec<Effort>> {
    let node = s.peek("effort")?;
    let names = s.text_list("effort")?;
    let mut levels = Vec::with_capacity(names.len());
    for name in &names {
        match Effort::named(name) {
            Some(level) => levels.push(level),
            None => {
                let message = format!(
                    "contains {name:?}, which is not one of: {}",
                    Effort::list_names()
                );
                s.push_invalid(&node, "effort", &message);
            }
        }
    }
    levels.sort_unstable();
    levels.dedup();
    Some(levels)
}
