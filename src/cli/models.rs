//! `axed models`: prints the facts about models, with those of the configuration. Needs no daemon and no network.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::json;

use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::table::{Cell, Column, Table};
use crate::config::models::ModelFacts;
use crate::domain::agent::params::Effort;
use crate::domain::usage::LongPrice;

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
    input: Option<f64>,
    output: Option<f64>,
    cache_read: Option<f64>,
    cache_write: Option<f64>,
    cache_write_1h: Option<f64>,
    long: Option<LongPrice>,
    batch: Option<f64>,
    flex: Option<f64>,
    context_window: Option<u64>,
    max_output: Option<u32>,
    images: Option<bool>,
    pdf: Option<bool>,
    reasoning: Option<bool>,
    effort: Option<&'a [Effort]>,
    sampling: &'static str,
}

impl<'a> ModelRow<'a> {
    fn new(provider: &'a str, model: &'a str, facts: &'a ModelFacts) -> Self {
        let price = facts.price.as_ref();
        Self {
            provider,
            model,
            checked: facts.checked_on.as_deref(),
            input: price.map(|price| price.input),
            output: price.map(|price| price.output),
            cache_read: price.and_then(|price| price.cache_read),
            cache_write: price.and_then(|price| price.cache_write),
            cache_write_1h: price.and_then(|price| price.cache_write_1h),
            long: price.and_then(|price| price.long),
            batch: facts.batch,
            flex: facts.flex,
            context_window: facts.context_window,
            max_output: facts.max_output,
            images: facts.images,
            pdf: facts.pdf,
            reasoning: facts.reasoning,
            effort: facts.effort.as_deref(),
            sampling: facts.sampling.as_str(),
        }
    }
}

pub fn models(args: Args) -> anyhow::Result<ExitCode> {
    let models = load_quiet_config(&args.sources.flags())?.models;
    let all = models.all();
    let is_wanted = |provider: &str, model: &str| match &args.filter {
        Some(filter) => format!("{provider}/{model}").contains(filter.as_str()),
        None => true,
    };
    let rows: Vec<ModelRow<'_>> = all
        .iter()
        .filter(|(provider, model, _)| is_wanted(provider, model))
        .map(|(provider, model, facts)| ModelRow::new(provider, model, facts))
        .collect();
    if args.format.is_json() {
        output::print_json(&json!({ "data": rows }))?;
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
    ]);
    for row in &rows {
        let usd = |price: Option<f64>| price.map(|usd| usd.to_string()).unwrap_or_default();
        let max_output = row.max_output.map(|max| tokens(max.into()));
        table.row([
            Cell::new(format!("{}/{}", row.provider, row.model)),
            Cell::new(usd(row.input)),
            Cell::new(usd(row.output)),
            Cell::new(row.context_window.map(tokens).unwrap_or_default()),
            Cell::new(max_output.unwrap_or_default()),
            Cell::new(input_kinds(row)),
            Cell::new(effort_range(row)),
        ]);
    }
    table.print()?;
    output::eprint_line(format_args!(
        "{} models; prices are USD per million tokens; axed models -o json prints everything",
        rows.len()
    ));
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

fn effort_range(row: &ModelRow<'_>) -> String {
    match row.effort {
        Some([first, .., last]) => format!("{}..{}", first.as_str(), last.as_str()),
        Some([only]) => only.as_str().to_owned(),
        Some([]) | None => String::new(),
    }
}
