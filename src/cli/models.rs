//! `axed models`: prints the facts about models, with those of the configuration. Needs no daemon and no network.

use std::process::ExitCode;

use jiff::civil::Date;
use serde::Serialize;
use serde_json::json;

use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::table::{Cell, Column, Table};
use crate::config::models::{ModelFacts, PriceChange, lookup};
use crate::domain::agent::params::Effort;
use crate::domain::counted::counted;
use crate::domain::usage::{LongPrice, Price};

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Prices are USD per million tokens; -o json prints every fact.

Examples:
  axed models claude
  axed models openai/ -o json | jq '.data[] | {model, input, output}'"
)]
pub struct Args {
    /// Only models whose provider/model contains this text
    filter: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    sources: Sources,
}

/// One model as JSON. Unknown facts are null.
#[derive(Serialize)]
struct ModelRow<'a> {
    provider: &'a str,
    model: &'a str,
    checked: Option<&'a str>,
    retires: Option<Date>,
    successor: Option<&'a str>,
    input: Option<f64>,
    output: Option<f64>,
    cache_read: Option<f64>,
    cache_write: Option<f64>,
    cache_write_1h: Option<f64>,
    long: Option<LongPrice>,
    /// The prices from later days on.
    prices: Vec<LaterPrice>,
    batch: Option<f64>,
    flex: Option<f64>,
    priority: Option<f64>,
    ultrafast: Option<f64>,
    regional: Option<f64>,
    context_window: Option<u64>,
    max_input: Option<u64>,
    max_output: Option<u32>,
    images: Option<bool>,
    pdf: Option<bool>,
    reasoning: Option<bool>,
    effort: Option<&'a [Effort]>,
    sampling: &'static str,
    adaptive_thinking: Option<bool>,
    structured_output: Option<bool>,
    forced_tools: Option<bool>,
    responses: bool,
}

#[derive(Serialize)]
struct LaterPrice {
    from: Date,
    #[serde(flatten)]
    price: Price,
}

impl<'a> ModelRow<'a> {
    fn new(provider: &'a str, model: &'a str, facts: &'a ModelFacts, today: Date) -> Self {
        let price = facts.price_on(today);
        let price = price.as_ref();
        let later = |change: &&PriceChange| change.from > today;
        let shares = facts.shares;
        Self {
            provider,
            model,
            checked: facts.checked_on.as_deref(),
            retires: facts.retires,
            successor: facts.successor.as_deref(),
            input: price.map(|price| price.input),
            output: price.map(|price| price.output),
            cache_read: price.and_then(|price| price.cache_read),
            cache_write: price.and_then(|price| price.cache_write),
            cache_write_1h: price.and_then(|price| price.cache_write_1h),
            long: price.and_then(|price| price.long),
            prices: (facts.price_changes.iter().filter(later))
                .map(|&PriceChange { from, price }| LaterPrice { from, price })
                .collect(),
            batch: shares.batch,
            flex: shares.flex,
            priority: shares.priority,
            ultrafast: shares.ultrafast,
            regional: shares.regional,
            context_window: facts.context_window,
            max_input: facts.max_input,
            max_output: facts.max_output,
            images: facts.images,
            pdf: facts.pdf,
            reasoning: facts.reasoning,
            effort: facts.effort.as_deref(),
            sampling: facts.sampling.as_str(),
            adaptive_thinking: facts.adaptive_thinking,
            structured_output: facts.structured_output,
            forced_tools: facts.forced_tools,
            responses: facts.responses,
        }
    }
}

pub fn models(args: Args) -> anyhow::Result<ExitCode> {
    let models = load_quiet_config(&args.sources.flags())?.models;
    let (all, today) = (models.all(), lookup::today());
    let is_wanted = |provider: &str, model: &str| match &args.filter {
        Some(filter) => format!("{provider}/{model}").contains(filter.as_str()),
        None => true,
    };
    let rows: Vec<ModelRow<'_>> = all
        .iter()
        .filter(|(provider, model, _)| is_wanted(provider, model))
        .map(|(provider, model, facts)| ModelRow::new(provider, model, facts, today))
        .collect();
    if args.format.is_json() {
        output::print_json(&json!({ "as_of": models.as_of(), "data": rows }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new([
        Column::flexible("model"),
        Column::number("input"),
        Column::number("output"),
        Column::number("window"),
        Column::number("reply"),
        Column::text("takes"),
        Column::text("effort"),
        Column::text("ends"),
    ]);
    for row in &rows {
        let usd = |price: Option<f64>| price.map(|usd| usd.to_string()).unwrap_or_default();
        let max_output = row.max_output.map(|max| tokens(max.into()));
        table.row([
            Cell::new(format!("{}/{}", row.provider, row.model)),
            Cell::new(usd(row.input)),
            Cell::new(usd(row.output)),
            Cell::new(
                (row.context_window.or(row.max_input))
                    .map(tokens)
                    .unwrap_or_default(),
            ),
            Cell::new(max_output.unwrap_or_default()),
            Cell::new(input_kinds(row)),
            Cell::new(effort_range(row)),
            Cell::new(end(row)),
        ]);
    }
    table.print()?;
    output::eprint_line(format_args!(
        "{}; prices are USD per million tokens; axed models -o json prints everything",
        counted(rows.len(), "model")
    ));
    if let Some(day) = models.stale_since(today) {
        let advice = lookup::stale_advice(day);
        output::eprint_line(format_args!("warning: this table {advice}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// A short form: 200K, 1M, 1.05M.
fn tokens(count: u64) -> String {
    match count {
        1_000_000.. => format!("{}M", (count as f64 / 10_000.0).round() / 100.0),
        1_000.. => format!("{}K", count / 1000),
        _ => count.to_string(),
    }
}

fn input_kinds(row: &ModelRow<'_>) -> String {
    let abilities = [("img", row.images), ("pdf", row.pdf)];
    let supported = abilities.into_iter().filter(|(_, can)| *can == Some(true));
    supported
        .map(|(name, _)| name)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The last day, and what replaces the model.
fn end(row: &ModelRow<'_>) -> String {
    match (row.retires, row.successor) {
        (Some(day), Some(successor)) => format!("{day}, then {successor}"),
        (Some(day), None) => day.to_string(),
        (None, _) => String::new(),
    }
}

fn effort_range(row: &ModelRow<'_>) -> String {
    match row.effort {
        Some([first, .., last]) => format!("{}..{}", first.as_str(), last.as_str()),
        Some([only]) => only.as_str().to_owned(),
        Some([]) | None => String::new(),
    }
}
