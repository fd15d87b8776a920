//! Facts about models: prices, context windows, abilities. They come from the table that ships with axed
//! (`models.toml`), changed by the file of `[models]` and by the configuration.

use jiff::civil::Date;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::domain::agent::params::{Effort, Params};
use crate::domain::service::{Billing, Service, Tier};
use crate::domain::usage::Price;

pub mod lookup;
pub mod names;
pub mod row;
pub mod table;

/// Facts about one model. `None` means unknown: requests are then sent unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    /// The day on which the entry was compared with its source (`2026-11-22`); `None` if the configuration is the
    /// only source.
    pub checked_on: Option<String>,
    /// The day on which its maker stops serving it.
    pub retires: Option<Date>,
    /// The model that its maker recommends instead, without a provider.
    pub successor: Option<String>,
    /// Whether another service than its maker's serves it: the price is that service's, and so is the last day.
    pub is_served_elsewhere: bool,
    /// USD per million tokens.
    pub price: Option<Price>,
    /// The prices from later days on, earliest first.
    pub price_changes: Vec<PriceChange>,
    /// What the tiers of a service cost, as shares of the price.
    pub shares: TierShares,
    /// Tokens of a request and its reply together.
    pub context_window: Option<u64>,
    /// Tokens of a request, where they have a limit of their own.
    pub max_input: Option<u64>,
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

/// A price that replaces the earlier one on a day.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PriceChange {
    /// In UTC.
    pub from: Date,
    pub price: Price,
}

/// What service tiers cost, as shares of the standard price. `None` means unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierShares {
    /// A request in a batch.
    pub batch: Option<f64>,
    /// The flexible tier.
    pub flex: Option<f64>,
    /// The fast tier: OpenAI's `priority`, Anthropic's fast mode.
    pub priority: Option<f64>,
    pub ultrafast: Option<f64>,
    /// A request that stays within a region.
    pub regional: Option<f64>,
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
/// How many days before a model's last one warnings begin.
const WARNING_DAYS: i32 = 60;

impl ModelFacts {
    /// `true` if unknown.
    pub fn is_sold_on(&self, service: Service) -> bool {
        let is_known = self.checked_on.is_some() && self.price.is_some();
        match service {
            Service::Default => true,
            Service::Flex => self.shares.flex.is_some() || !is_known,
            Service::Batch => self.shares.batch.is_some() || !is_known,
        }
    }

    /// Whether a request with these parameters may set `temperature` and `top_p`.
    pub fn allows_sampling(&self, params: &Params) -> bool {
        let has_summary = params.reasoning_summary.is_some();
        let summarized =
            (has_summary && self.adaptive_thinking == Some(true)).then_some(Effort::Low);
        self.sampling.allows(params.effort.or(summarized))
    }

    /// The standard price on a day; `None` if it is unknown.
    pub fn price_on(&self, day: Date) -> Option<Price> {
        let changes = self.price_changes.iter();
        let in_force = changes.rev().find(|change| change.from <= day);
        in_force.map(|change| change.price).or(self.price)
    }

    /// The price on a day of a request that is billed like this; `None` if it is unknown.
    pub fn price_for(&self, billing: Billing, day: Date) -> Option<Price> {
        let price = self.price_on(day)?;
        let share = match billing.tier {
            Tier::Standard => 1.0,
            Tier::Flex => self.shares.flex.unwrap_or(DEFAULT_TIER_SHARE),
            Tier::Batch => self.shares.batch.unwrap_or(DEFAULT_TIER_SHARE),
            Tier::Priority => self.shares.priority?,
            Tier::Ultrafast => self.shares.ultrafast?,
            Tier::Unknown => return None,
        };
        let regional = match billing.is_regional {
            true => self.shares.regional?,
            false => 1.0,
        };
        match share * regional {
            1.0 => Some(price),
            factor => Some(price.scaled(factor)),
        }
    }

    /// As a request with these parameters is billed if its reply does not say otherwise.
    pub fn billing(&self, params: &Params) -> Billing {
        Billing::requested(params.service, [&params.extra, &self.extra])
    }

    /// As another service than its maker's serves it.
    pub fn served_elsewhere(self) -> Self {
        Self {
            is_served_elsewhere: true,
            price: None,
            price_changes: Vec::new(),
            shares: TierShares::default(),
            ..self
        }
    }

    /// What a user must know of the last day of `provider/model`, from 60 days before it on.
    pub fn end_warning(&self, provider: &str, model: &str, today: Date) -> Option<String> {
        let last_day = self.retires?;
        if (last_day - today).get_days() > WARNING_DAYS {
            return None;
        }
        let verb = match last_day < today {
            true => "ended",
            false => "ends",
        };
        let mut text = match self.is_served_elsewhere {
            false => format!("{provider}/{model} {verb} on {last_day}"),
            true => format!(
                "{provider}/{model} {verb} on {last_day} at its maker; another service may choose another day"
            ),
        };
        if let Some(successor) = &self.successor {
            let successor = match self.is_served_elsewhere {
                false => format!("{provider}/{successor}"),
                true => successor.clone(),
            };
            text.push_str(&format!(": use {successor}"));
        }
        Some(text)
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

#[cfg(test)]
mod tests {
    use jiff::civil::date;

    use super::{ModelFacts, PriceChange, TierShares};
    use crate::domain::service::{Billing, Tier};
    use crate::domain::usage::Price;

    fn price(input: f64) -> Price {
        Price {
            input,
            ..Price::default()
        }
    }

    #[test]
    fn the_price_is_that_of_the_day_the_tier_and_the_region() {
        let facts = ModelFacts {
            price: Some(price(1.0)),
            price_changes: vec![
                PriceChange {
                    from: date(2026, 12, 1),
                    price: price(2.0),
                },
                PriceChange {
                    from: date(2027, 1, 1),
                    price: price(3.0),
                },
            ],
            shares: TierShares {
                batch: Some(0.25),
                priority: Some(2.0),
                regional: Some(1.5),
                ..TierShares::default()
            },
            ..ModelFacts::default()
        };
        let input = |tier, is_regional, day| {
            let billing = Billing { tier, is_regional };
            Some(facts.price_for(billing, day)?.input)
        };
        let november = date(2026, 11, 30);
        for (tier, is_regional, day, expected) in [
            (Tier::Standard, false, november, Some(1.0)),
            (Tier::Standard, false, date(2026, 12, 1), Some(2.0)),
            (Tier::Standard, false, date(2028, 1, 1), Some(3.0)),
            (Tier::Batch, false, date(2027, 1, 1), Some(0.75)),
            (Tier::Flex, false, november, Some(0.5)),
            (Tier::Priority, true, november, Some(3.0)),
            (Tier::Ultrafast, false, november, None),
            (Tier::Unknown, false, november, None),
        ] {
            assert_eq!(input(tier, is_regional, day), expected, "{tier:?} {day}");
        }
        let unknown = ModelFacts {
            shares: TierShares::default(),
            ..facts.clone()
        };
        let regional = Billing {
            tier: Tier::Standard,
            is_regional: true,
        };
        assert_eq!(unknown.price_for(regional, november), None);
    }

    #[test]
    fn warnings_of_a_models_end_begin_sixty_days_before() {
        let facts = ModelFacts {
            retires: Some(date(2026, 11, 30)),
            successor: Some("new".to_owned()),
            ..ModelFacts::default()
        };
        let warning = |today| facts.end_warning("p", "old", today);
        assert_eq!(warning(date(2026, 9, 30)), None);
        let soon = "p/old ends on 2026-11-30: use p/new";
        assert_eq!(warning(date(2026, 10, 1)).as_deref(), Some(soon));
        assert_eq!(warning(date(2026, 11, 30)).as_deref(), Some(soon));
        let late = "p/old ended on 2026-11-30: use p/new";
        assert_eq!(warning(date(2026, 12, 1)).as_deref(), Some(late));
        let elsewhere = facts.clone().served_elsewhere();
        let text = elsewhere.end_warning("q", "old", date(2026, 11, 1));
        let text = text.expect("a warning");
        assert!(text.ends_with("may choose another day: use new"), "{text}");
    }
}
