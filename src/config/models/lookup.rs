//! Finds the facts about a model: by provider and name, or by its name alone where another service serves it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use crate::config::models::ModelFacts;
use crate::config::models::names::{self, Claude, strip_date_suffix};
use crate::config::models::row::{ModelRow, PriceRow};
use crate::config::models::table::{self, ModelTable, SHIPPED};
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::Params;
use crate::domain::run::now;
use crate::domain::usage::Price;

/// The services that make the models that they serve. Facts about these hold wherever a model is served, besides the price.
const MAKERS: [&str; 6] = [
    "anthropic",
    "openai",
    "gemini",
    "xai",
    "deepseek",
    "mistral",
];
/// Anthropic's families, the most capable first: of equal versions, the first counts as the newest.
const FAMILIES: [&str; 5] = ["fable", "mythos", "opus", "sonnet", "haiku"];
/// Days after which facts about models are outdated.
const MAX_AGE_DAYS: i32 = 90;

/// By provider and model.
type Rows = BTreeMap<String, BTreeMap<String, Arc<ModelFacts>>>;

/// The models that this process knows. Clones share one state, which a reload replaces whole.
#[derive(Clone, Debug, Default)]
pub struct Models {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    sources: Sources,
    current: ArcSwap<Snapshot>,
}

/// What the facts are made from, besides the table that ships with axed.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `[models] file`, with what it had at first.
    pub file: Option<(PathBuf, ModelTable)>,
    pub providers: BTreeMap<String, ProviderModels>,
    /// `[prices]`, by `provider/model`, which wins over all others.
    pub prices: BTreeMap<String, PriceRow>,
}

/// A configured provider, as far as its models depend on it.
#[derive(Clone, Debug, Default)]
pub struct ProviderModels {
    /// The well-known service whose models it sells; `None` if it has prices of its own.
    pub service: Option<&'static str>,
    /// Whether its requests stay within a region, at that price.
    pub is_regional: bool,
    /// Whether its models are its own whatever their names are, as those of scripts.
    pub has_own_models: bool,
    /// `[providers.<name>.models]`
    pub overrides: BTreeMap<String, ModelRow>,
}

/// All facts at one time.
#[derive(Debug, Default)]
struct Snapshot {
    as_of: Option<Date>,
    /// The shipped table, changed by the file.
    rows: Rows,
    /// The makers' models, by their canonical names, without prices.
    by_name: BTreeMap<String, Arc<ModelFacts>>,
    /// The models that the configuration names.
    configured: Rows,
}

impl Models {
    pub fn new(sources: Sources) -> Self {
        let file = sources.file.as_ref().map(|(_, table)| table);
        let current = ArcSwap::from_pointee(Snapshot::new(&sources, file));
        Self {
            shared: Arc::new(Shared { sources, current }),
        }
    }

    /// `[models] file`
    pub fn file(&self) -> Option<&Path> {
        let (path, _) = self.shared.sources.file.as_ref()?;
        Some(path)
    }

    /// Reads the file again. If it is broken, the last good facts stay. Blocking I/O.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn reload(&self) -> Result<(), String> {
        let Some(path) = self.file() else {
            return Ok(());
        };
        let table = read_file(path)?;
        let snapshot = Snapshot::new(&self.shared.sources, Some(&table));
        self.shared.current.store(Arc::new(snapshot));
        Ok(())
    }

    /// Looks the model up by its name at this provider, then by its name anywhere.
    pub fn get(&self, provider: &str, model: &str) -> Option<Arc<ModelFacts>> {
        let snapshot = self.shared.current.load();
        find(snapshot.configured.get(provider), model)
            .cloned()
            .or_else(|| snapshot.unconfigured(provider, &self.shared.sources, model))
    }

    /// The standard price today; `None` if unknown: local models and scripts then cost nothing.
    pub fn price(&self, model: &ModelRef) -> Option<Price> {
        self.get(&model.provider, &model.model)?.price_on(today())
    }

    /// Whether the price of the model's requests with these parameters is known.
    pub fn is_priced(&self, model: &ModelRef, params: &Params) -> bool {
        let facts = self.get(&model.provider, &model.model);
        facts.is_some_and(|it| it.price_for(it.billing(params), today()).is_some())
    }

    /// All models with known facts, sorted by provider and name.
    pub fn all(&self) -> Vec<(String, String, Arc<ModelFacts>)> {
        let snapshot = self.shared.current.load();
        let mut all = snapshot.rows.clone();
        for (provider, models) in &snapshot.configured {
            let known = all.entry(provider.clone()).or_default();
            known.extend(
                models
                    .iter()
                    .map(|(name, it)| (name.clone(), Arc::clone(it))),
            );
        }
        let rows = all.into_iter().flat_map(|(provider, models)| {
            let models = models.into_iter();
            models.map(move |(model, facts)| (provider.clone(), model, facts))
        });
        rows.collect()
    }

    /// The day of the table: of the file if it names one, otherwise of the table that ships with axed.
    pub fn as_of(&self) -> Option<Date> {
        self.shared.current.load().as_of
    }

    /// The day of the table, if that is more than 90 days before `today`.
    pub fn stale_since(&self, today: Date) -> Option<Date> {
        self.as_of()
            .filter(|day| (today - *day).get_days() > MAX_AGE_DAYS)
    }
}

/// The day in UTC.
pub fn today() -> Date {
    now().to_zoned(TimeZone::UTC).date()
}

/// What is wrong with a table of that day, and what helps. Follows the name of the table.
pub fn stale_advice(day: Date) -> String {
    format!(
        "was last checked on {day}: prices, windows and last days may have changed; a newer release of axed has a newer \
         table, and [models] file in the configuration names one of yours"
    )
}

/// Reads a `[models] file`.
///
/// # Errors
/// What is wrong with it.
pub fn read_file(path: &Path) -> Result<ModelTable, String> {
    table::read_file(path, &|provider, model| {
        let shipped = SHIPPED.rows.get(provider);
        shipped.is_some_and(|models| models.contains_key(model))
    })
}

impl Snapshot {
    fn new(sources: &Sources, file: Option<&ModelTable>) -> Self {
        let mut snapshot = Self {
            as_of: file.and_then(|table| table.as_of).or(SHIPPED.as_of),
            ..Self::default()
        };
        let shipped = SHIPPED.rows.iter().collect();
        let rows = file.into_iter().flat_map(|table| &table.rows);
        let (made, served): (Vec<_>, Vec<_>) = rows.partition(|(provider, _)| is_maker(provider));
        // The makers' come before the others', which begin with what is known by the name.
        for rows in [shipped, made, served] {
            for (provider, models) in rows {
                for (model, row) in models {
                    snapshot.add_row(sources, provider, model, row);
                }
            }
            snapshot.fill_by_name();
        }
        for (name, provider) in &sources.providers {
            for (model, row) in &provider.overrides {
                snapshot.configure(sources, name, model, |facts| row.apply_to(facts));
            }
        }
        for (model, row) in &sources.prices {
            if let Ok(ModelRef { provider, model }) = model.parse() {
                snapshot.configure(sources, &provider, &model, |facts| row.apply_to(facts));
            }
        }
        snapshot
    }

    /// What the row leaves out stays as it is known without it.
    fn add_row(&mut self, sources: &Sources, provider: &str, model: &str, row: &ModelRow) {
        let mut facts = row.apply_to(self.known(&self.rows, sources, provider, model));
        facts.is_served_elsewhere &= !is_maker(provider);
        insert(&mut self.rows, provider, model, facts);
    }

    fn fill_by_name(&mut self) {
        self.by_name.clear();
        let made = MAKERS.iter().filter_map(|maker| self.rows.get(*maker));
        for (model, facts) in made.flatten() {
            let facts = || Arc::new(ModelFacts::clone(facts).served_elsewhere());
            let name = names::canonical(model);
            self.by_name.entry(name).or_insert_with(facts);
        }
    }

    fn configure(
        &mut self,
        sources: &Sources,
        provider: &str,
        model: &str,
        change: impl FnOnce(ModelFacts) -> ModelFacts,
    ) {
        let facts = change(self.known(&self.configured, sources, provider, model));
        insert(&mut self.configured, provider, model, facts);
    }

    /// The facts that a new row of these changes.
    fn known(&self, rows: &Rows, sources: &Sources, provider: &str, model: &str) -> ModelFacts {
        let known = find(rows.get(provider), model)
            .cloned()
            .or_else(|| self.unconfigured(provider, sources, model));
        known.map(Arc::unwrap_or_clone).unwrap_or_default()
    }

    /// The facts without those of the configuration.
    fn unconfigured(
        &self,
        provider: &str,
        sources: &Sources,
        model: &str,
    ) -> Option<Arc<ModelFacts>> {
        let configured = sources.providers.get(provider);
        let sold = configured.and_then(|it| it.service).unwrap_or(provider);
        for service in [provider, sold] {
            let Some(facts) = find(self.rows.get(service), model) else {
                continue;
            };
            // A row of another name than the service's has the price of its region.
            let is_regional = service == sold && configured.is_some_and(|it| it.is_regional);
            return Some(match is_regional {
                true => Arc::new(regional(facts)),
                false => Arc::clone(facts),
            });
        }
        match configured.is_some_and(|it| it.has_own_models) {
            true => None,
            false => self.by_name(model),
        }
    }

    /// A model of its maker that another service serves, or that is newer than the table.
    fn by_name(&self, model: &str) -> Option<Arc<ModelFacts>> {
        let name = names::canonical(model);
        let known = self.by_name.get(&name).cloned();
        known.or_else(|| self.like_newest_claude(&name).map(Arc::new))
    }

    /// What is assumed of an unknown model of Anthropic: it is like the newest of its family, else like the newest of all, and
    /// does not end with it.
    fn like_newest_claude(&self, name: &str) -> Option<ModelFacts> {
        let wanted = Claude::parse(name)?;
        let known = self.by_name.iter().filter_map(|(name, facts)| {
            let claude = Claude::parse(name)?;
            let rank = FAMILIES.iter().rev().position(|it| *it == claude.family);
            Some((claude, rank, facts))
        });
        let is_relative = |claude: &Claude<'_>| claude.family == wanted.family;
        let newest = known
            .max_by_key(|(claude, rank, _)| (is_relative(claude), claude.version.clone(), *rank));
        let (_, _, facts) = newest?;
        Some(ModelFacts {
            checked_on: None,
            retires: None,
            successor: None,
            ..ModelFacts::clone(facts)
        })
    }
}

fn is_maker(provider: &str) -> bool {
    MAKERS.contains(&provider)
}

fn insert(rows: &mut Rows, provider: &str, model: &str, facts: ModelFacts) {
    let models = rows.entry(provider.to_owned()).or_default();
    models.insert(model.to_owned(), Arc::new(facts));
}

/// At the price of requests that stay within a region.
fn regional(facts: &ModelFacts) -> ModelFacts {
    let mut facts = facts.clone();
    // The price has it from now on.
    let Some(share) = facts.shares.regional.replace(1.0) else {
        return facts;
    };
    facts.price = facts.price.map(|price| price.scaled(share));
    for change in &mut facts.price_changes {
        change.price = change.price.scaled(share);
    }
    facts
}

/// By the name, then by the name without a date or `-latest` at the end.
fn find<'a>(
    models: Option<&'a BTreeMap<String, Arc<ModelFacts>>>,
    name: &str,
) -> Option<&'a Arc<ModelFacts>> {
    let models = models?;
    models
        .get(name)
        .or_else(|| models.get(strip_date_suffix(name)?))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::civil::date;

    use super::{Models, ProviderModels, Sources};
    use crate::config::models::row::{ModelRow, PriceRow};
    use crate::config::models::table::{self, SHIPPED};
    use crate::config::models::{ModelFacts, Sampling};
    use crate::domain::agent::params::Effort;
    use crate::domain::usage::{LongPrice, Price};

    fn shipped() -> Models {
        Models::new(Sources::default())
    }

    /// With an override in the section of a provider.
    fn overridden(provider: &str, model: &str, row: ModelRow) -> Models {
        let provider_models = ProviderModels {
            overrides: BTreeMap::from([(model.to_owned(), row)]),
            ..ProviderModels::default()
        };
        Models::new(Sources {
            providers: BTreeMap::from([(provider.to_owned(), provider_models)]),
            ..Sources::default()
        })
    }

    /// With a file, and with these providers.
    fn with_file<const N: usize>(text: &str, providers: [(&str, ProviderModels); N]) -> Models {
        let table = table::parse(text.as_bytes(), &|_, _| false).expect("a table");
        let providers = providers.map(|(name, it)| (name.to_owned(), it));
        Models::new(Sources {
            file: Some(("models.toml".into(), table)),
            providers: BTreeMap::from(providers),
            ..Sources::default()
        })
    }

    fn priced(prices: &[(&str, PriceRow)]) -> Models {
        let prices = prices.iter().cloned();
        Models::new(Sources {
            prices: prices.map(|(name, row)| (name.to_owned(), row)).collect(),
            ..Sources::default()
        })
    }

    #[test]
    fn the_shipped_table_is_complete() {
        assert!(SHIPPED.rows.values().map(BTreeMap::len).sum::<usize>() >= 40);
        assert!(SHIPPED.as_of.is_some());
        for (provider, name, facts) in shipped().all() {
            let price = facts.price.expect("a price");
            assert!(price.input > 0.0 && price.output >= price.input, "{name}");
            assert!(
                price.cache_read.is_none_or(|read| read <= price.input),
                "{name}"
            );
            let limit = facts.max_input.or(facts.context_window);
            assert!(limit.is_some_and(|limit| limit > 1000), "{name}");
            let window = facts.context_window.unwrap_or(u64::MAX);
            assert!(facts.max_input.is_none_or(|max| max < window), "{name}");
            assert!(facts.checked_on.is_some() && facts.pdf.is_some(), "{name}");
            let levels = facts.effort.as_deref();
            assert!(levels.is_none_or(|it| it.is_sorted()), "{name}");
            let has_levels = [
                "anthropic",
                "openai",
                "gemini",
                "xai",
                "groq",
                "deepseek",
                "cerebras",
            ];
            assert!(
                levels.is_some() || !has_levels.contains(&provider.as_str()),
                "{provider}/{name}: effort"
            );
        }
    }

    #[test]
    fn a_table_is_stale_after_ninety_days() {
        let models = shipped();
        assert_eq!(models.stale_since(date(2026, 11, 30)), None);
        assert!(models.stale_since(date(2030, 1, 1)).is_some());
    }

    #[test]
    fn facts_go_by_the_name_wherever_a_model_is_served_and_prices_by_the_provider() {
        let models = shipped();
        for (provider, model, like) in [
            ("azure", "gpt-6-sol", ("openai", "gpt-6-sol")),
            (
                "foundry",
                "claude-opus-5-5",
                ("anthropic", "claude-opus-5-5"),
            ),
            (
                "gateway",
                "anthropic/claude-opus-5.5",
                ("anthropic", "claude-opus-5-5"),
            ),
            (
                "openrouter",
                "openai/gpt-6.1-sol",
                ("openai", "gpt-6.1-sol"),
            ),
            (
                "openrouter",
                "google/gemini-4-hydrogen",
                ("gemini", "gemini-4-hydrogen"),
            ),
            (
                "bedrock",
                "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
                ("anthropic", "claude-sonnet-4-5"),
            ),
            ("bedrock", "us.openai.gpt-6-sol", ("openai", "gpt-6-sol")),
            (
                "anthropic",
                "claude-sonnet-5.5",
                ("anthropic", "claude-sonnet-5-5"),
            ),
            // Unknown ones count as the newest of their family, or as the newest of all.
            (
                "anthropic",
                "claude-haiku-7",
                ("anthropic", "claude-haiku-5-5"),
            ),
            (
                "anthropic",
                "claude-fable-5-3-20270101",
                ("anthropic", "claude-fable-5-2"),
            ),
            (
                "bedrock",
                "eu.anthropic.claude-opus-9-v1:0",
                ("anthropic", "claude-opus-5-5"),
            ),
            (
                "anthropic",
                "claude-saga-1",
                ("anthropic", "claude-opus-5-5"),
            ),
        ] {
            let abilities = |provider: &str, model: &str| {
                let facts = models.get(provider, model).expect("known");
                ModelFacts {
                    checked_on: None,
                    retires: None,
                    successor: None,
                    ..(*facts).clone().served_elsewhere()
                }
            };
            let same = abilities(like.0, like.1);
            assert_eq!(abilities(provider, model), same, "{provider}/{model}");
            let facts = models.get(provider, model).expect("known");
            assert_eq!((facts.price, facts.is_served_elsewhere), (None, true));
        }
        let own = models
            .get("anthropic", "claude-opus-5-5-latest")
            .expect("known");
        assert!(own.price.is_some() && !own.is_served_elsewhere);
        for (provider, model) in [
            ("openai", "gpt-4.1-turbo"),
            ("openai", "-20250929"),
            ("anthropic", "claude"),
            ("vllm", "claudette-1"),
            ("openai", "é-2025"),
        ] {
            assert_eq!(models.get(provider, model), None, "{provider}/{model}");
        }
    }

    #[test]
    fn models_of_scripts_and_local_ones_are_their_own() {
        let scripted = ProviderModels {
            has_own_models: true,
            ..ProviderModels::default()
        };
        let models = Models::new(Sources {
            providers: BTreeMap::from([("demo".to_owned(), scripted)]),
            ..Sources::default()
        });
        assert_eq!(models.get("demo", "gpt-6-sol"), None);
    }

    #[test]
    fn a_service_under_another_name_or_in_a_region_has_its_prices() {
        let provider = |is_regional| ProviderModels {
            service: Some("openai"),
            is_regional,
            ..ProviderModels::default()
        };
        let models = Models::new(Sources {
            providers: BTreeMap::from([
                ("ours".to_owned(), provider(false)),
                ("eu".to_owned(), provider(true)),
            ]),
            ..Sources::default()
        });
        let input = |name: &str| models.get(name, "gpt-6-sol")?.price.map(|it| it.input);
        assert_eq!((input("openai"), input("ours")), (Some(2.0), Some(2.0)));
        assert_eq!(input("eu"), Some(2.2));
    }

    #[test]
    fn rows_of_a_renamed_service_leave_its_other_prices() {
        let text = r#"
[eu."ft-x"]
input = 3
output = 12
[eu."gpt-6.1-sol"]
context_window = 5
[openai."gpt-9"]
input = 10
output = 20
"#;
        let regional = || ProviderModels {
            service: Some("openai"),
            is_regional: true,
            ..ProviderModels::default()
        };
        let models = with_file(text, [("eu", regional()), ("openai", regional())]);
        let price = |provider, model| models.get(provider, model)?.price;
        let input = |provider, model| price(provider, model).map(|it| it.input);
        assert_eq!(input("eu", "ft-x"), Some(3.0));
        assert_eq!(input("eu", "gpt-6-sol"), Some(2.2));
        assert_eq!(input("openai", "gpt-6-sol"), Some(2.2));
        assert_eq!(input("eu", "gpt-9"), input("openai", "gpt-9"));
        let changed = models.get("eu", "gpt-6.1-sol").expect("known");
        assert_eq!(changed.context_window, Some(5));
        assert!(changed.price.is_some());
        assert_eq!(changed.price, price("openai", "gpt-6.1-sol"));
        let by_name = models.get("eu", "claude-opus-5-5").expect("known");
        assert!(by_name.is_served_elsewhere);
    }

    #[test]
    fn a_configured_price_wins_and_other_facts_stay() {
        let row = |input| PriceRow {
            input: Some(input),
            output: Some(0.0),
            ..PriceRow::default()
        };
        let models = priced(&[("openai/gpt-5.5", row(1.0)), ("vllm/some", row(1.0))]);
        let shipped = shipped().get("openai", "gpt-5.5").expect("known");
        let known = Price {
            input: 1.0,
            output: 0.0,
            long: None,
            ..shipped.price.expect("a price")
        };
        let facts = models.get("openai", "gpt-5.5").expect("known");
        assert_eq!(facts.price, Some(known));
        assert_eq!(facts.sampling, shipped.sampling);
        let own = models.get("vllm", "some").expect("known").price;
        assert_eq!(own.map(|it| it.input), Some(1.0));
        for (input, cache_read) in [(0.0, None), (0.01, Some(0.01))] {
            let models = priced(&[("openai/gpt-5.5", row(input))]);
            let facts = models.get("openai", "gpt-5.5").expect("known");
            assert_eq!(facts.price.and_then(|it| it.cache_read), cache_read);
        }
    }

    #[test]
    fn a_price_of_the_table_can_be_configured_in_part() {
        let shipped = shipped().get("openai", "gpt-5.5").expect("known");
        let shipped = shipped.price.expect("a price");
        let price = |row: PriceRow| {
            let models = priced(&[("openai/gpt-5.5", row.clone())]);
            let facts = models.get("openai", "gpt-5.5").expect("known");
            let in_section = ModelRow {
                price: row,
                ..ModelRow::default()
            };
            let same = overridden("openai", "gpt-5.5", in_section);
            let same = same.get("openai", "gpt-5.5").expect("known");
            assert_eq!(same.price, facts.price, "one rule for both sections");
            facts.price.expect("a price")
        };
        assert_eq!(price(PriceRow::default()), shipped);
        let input = price(PriceRow {
            input: Some(9.0),
            ..PriceRow::default()
        });
        assert_eq!((input.input, input.output), (9.0, shipped.output));
        assert_eq!((input.cache_read, input.long), (shipped.cache_read, None));
        let long = LongPrice {
            above: 5,
            ..LongPrice::default()
        };
        let long = price(PriceRow {
            long: Some(long),
            ..PriceRow::default()
        });
        assert_eq!(long.long.map(|it| it.above), Some(5));
        assert_eq!(long.input, shipped.input);
    }

    #[test]
    fn the_configuration_overrides_key_by_key() {
        let row = ModelRow {
            context_window: Some(8000),
            effort: Some(vec![Effort::Low]),
            forced_tools: Some(true),
            sampling: Some(Sampling::Always),
            ..ModelRow::default()
        };
        let models = overridden("anthropic", "claude-opus-5-5", row);
        let facts = models.get("anthropic", "claude-opus-5-5").expect("known");
        let shipped = shipped()
            .get("anthropic", "claude-opus-5-5")
            .expect("known");
        assert_eq!(facts.context_window, Some(8000));
        assert_eq!(facts.max_output, shipped.max_output);
        assert_eq!(facts.effort, Some(vec![Effort::Low]));
        assert_eq!(
            (facts.forced_tools, shipped.forced_tools),
            (Some(true), Some(false))
        );
        assert_eq!(facts.sampling, Sampling::Always);
        assert_eq!(facts.price, shipped.price);
    }

    #[test]
    fn a_file_changes_and_adds_rows() {
        let text = r#"
as_of = "2030-01-01"
[openai."gpt-6-sol"]
input = 7
retires = 2030-02-01
successor = "gpt-9"
[openai."gpt-9"]
input = 1
output = 2
prices = [{ from = "2030-06-01", input = 3, output = 4 }]
[anthropic."claude-opus-9"]
context_window = 5
retires = 2030-03-01
"#;
        let table = table::parse(text.as_bytes(), &|_, model| model == "gpt-6-sol");
        let models = Models::new(Sources {
            file: Some(("models.toml".into(), table.expect("a table"))),
            ..Sources::default()
        });
        let sol = models.get("openai", "gpt-6-sol").expect("known");
        let price = sol.price.expect("a price");
        assert_eq!((price.input, price.output), (7.0, 10.0));
        assert_eq!(sol.retires, Some(date(2030, 2, 1)));
        assert_eq!(sol.max_input, Some(922_000));
        let new = models.get("openai", "gpt-9").expect("known");
        let on = |day| new.price_on(day).map(|it| it.input);
        assert_eq!(on(date(2030, 5, 31)), Some(1.0));
        assert_eq!(on(date(2030, 6, 1)), Some(3.0));
        let newest = models
            .get("bedrock", "anthropic.claude-opus-10")
            .expect("known");
        assert_eq!((newest.context_window, newest.retires), (Some(5), None));
        assert_eq!(models.as_of(), Some(date(2030, 1, 1)));
    }

    #[test]
    fn a_new_row_of_a_file_keeps_what_is_known_by_the_name() {
        let text = r#"
[anthropic."claude-opus-6"]
input = 4
output = 20
[azure."gpt-6-sol"]
input = 3
output = 12
[azure."gpt-9"]
input = 3
output = 12
[demo."gpt-6-sol"]
context_window = 5
[openai."gpt-9"]
input = 1
output = 2
cache_read = 0.1
max_output = 5
[openrouter."anthropic/claude-opus-5.5"]
input = 3
output = 12
[vertex."claude-opus-5-5"]
context_window = 5
"#;
        let scripted = ProviderModels {
            has_own_models: true,
            ..ProviderModels::default()
        };
        let models = with_file(text, [("demo", scripted)]);
        let opus = shipped().get("anthropic", "claude-opus-5-5");
        let opus = (*opus.expect("known")).clone();
        let abilities = |facts: &ModelFacts| ModelFacts {
            checked_on: None,
            retires: None,
            successor: None,
            ..facts.clone().served_elsewhere()
        };
        let own = models.get("anthropic", "claude-opus-6").expect("known");
        assert_eq!(abilities(&own), abilities(&opus));
        assert_eq!((own.retires, own.successor.as_deref()), (None, None));
        assert!(!own.is_served_elsewhere);
        let next = models.get("bedrock", "anthropic.claude-opus-7");
        assert_eq!(abilities(&next.expect("known")), abilities(&opus));
        for (provider, model, like) in [
            ("azure", "gpt-6-sol", ("openai", "gpt-6-sol")),
            ("azure", "gpt-9", ("openai", "gpt-9")),
            (
                "openrouter",
                "anthropic/claude-opus-5.5",
                ("anthropic", "claude-opus-5-5"),
            ),
        ] {
            let facts = models.get(provider, model).expect("known");
            let like = models.get(like.0, like.1).expect("known");
            assert_eq!(abilities(&facts), abilities(&like), "{provider}/{model}");
            assert!(facts.is_served_elsewhere);
            let price = facts.price.expect("a price");
            let found = (price.input, price.output, price.cache_read);
            assert_eq!(found, (3.0, 12.0, None), "{provider}/{model}");
        }
        let vertex = models.get("vertex", "claude-opus-5-5").expect("known");
        assert_eq!((vertex.price, vertex.context_window), (None, Some(5)));
        let demo = models.get("demo", "gpt-6-sol").expect("known");
        let alone = ModelFacts {
            context_window: Some(5),
            ..ModelFacts::default()
        };
        assert_eq!(*demo, alone);
    }

    #[test]
    fn errors_of_a_file_name_line_and_key() {
        for (text, expected) in [
            ("[openai.\"x\"]\ninput = 1\n", "openai.x.output is required"),
            (
                "[openai.\"x\"]\nwindow = 1\n",
                "unknown key \"openai.x.window\"",
            ),
            (
                "[openai.\"x.y\"]\nretires = \"soon\"\n",
                "openai.\"x.y\".retires must be a day",
            ),
            ("openai = 1\n", "openai must be a table"),
            (
                "[openai.\"x\"]\nprices = [{ from = \"2030-01-01\" }]\n",
                "openai.x.prices[0].input is required",
            ),
            (
                "[openai.\"x\"]\nlong = { above = 5 }\n",
                "openai.x.long.input is required",
            ),
        ] {
            let problems = table::parse(text.as_bytes(), &|_, _| false).expect_err("problems");
            let found = problems.iter().any(|it| it.message().contains(expected));
            assert!(found, "{text}: {problems:?}");
            let line = problems[0].format_in("models.toml");
            assert!(line.starts_with("models.toml:"), "{line}");
        }
    }
}
