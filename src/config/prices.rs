//! What models cost: the configured prices, and beneath them those of well-known models that the program brings along.
//! Knows no run.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::domain::usage::Price;

/// By provider and model, as `prices.toml` beside this file has them.
type Table = BTreeMap<String, BTreeMap<String, Price>>;

static WELL_KNOWN: LazyLock<Table> =
    LazyLock::new(|| toml::from_str(include_str!("prices.toml")).unwrap_or_default());

/// Prices by `provider/model`.
#[derive(Clone, Debug, Default)]
pub struct Prices {
    configured: BTreeMap<String, Price>,
}

impl Prices {
    /// With these before the well-known ones.
    pub fn new(configured: BTreeMap<String, Price>) -> Self {
        Self { configured }
    }

    /// The price of `provider/model`; none where nobody said.
    pub fn get(&self, model: &str) -> Option<&Price> {
        self.configured.get(model).or_else(|| {
            let (provider, model) = model.split_once('/')?;
            let known = WELL_KNOWN.get(provider)?;
            known.get(model).or_else(|| known.get(undated(model)?))
        })
    }
}

/// The name without `-20250929`, `-2025-04-14` or `-latest` at its end.
fn undated(model: &str) -> Option<&str> {
    let is_date = |end: &str, shape: &str| {
        let fits = |(c, of): (char, char)| match of {
            '9' => c.is_ascii_digit(),
            other => c == other,
        };
        end.len() == shape.len() && end.chars().zip(shape.chars()).all(fits)
    };
    let dated = ["-99999999", "-9999-99-99"].into_iter().find_map(|shape| {
        let (name, end) = model.split_at_checked(model.len().checked_sub(shape.len())?)?;
        is_date(end, shape).then_some(name)
    });
    dated.or_else(|| model.strip_suffix("-latest"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Prices, WELL_KNOWN};
    use crate::domain::usage::Price;

    #[test]
    fn the_table_that_comes_along_is_whole() {
        let models: usize = WELL_KNOWN.values().map(BTreeMap::len).sum();
        assert!(models > 15, "{models}");
        for (model, price) in WELL_KNOWN.values().flatten() {
            assert!(price.input > 0.0 && price.output > price.input, "{model}");
            let read = price.cache_read.expect("a price of cached tokens");
            assert!(read < price.input, "{model}");
        }
    }

    #[test]
    fn a_configured_price_comes_first_and_a_date_is_left_off() {
        let own = Price {
            input: 1.0,
            ..Price::default()
        };
        let prices = Prices::new(BTreeMap::from([("openai/gpt-5".to_owned(), own)]));
        assert_eq!(prices.get("openai/gpt-5"), Some(&own));
        let sonnet = prices.get("anthropic/claude-sonnet-4-5").copied();
        assert_eq!(sonnet.map(|price| price.output), Some(15.0));
        for dated in ["claude-sonnet-4-5-20250929", "claude-sonnet-4-5-latest"] {
            assert_eq!(prices.get(&format!("anthropic/{dated}")).copied(), sonnet);
        }
        assert!(prices.get("openai/gpt-4.1-2025-04-14").is_some());
        for unknown in [
            "openai/gpt-4.1-turbo",
            "vllm/gpt-5",
            "openai/-20250929",
            "openai/é-2025",
        ] {
            assert_eq!(prices.get(unknown), None, "{unknown}");
        }
    }
}
