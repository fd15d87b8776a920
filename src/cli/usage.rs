//! `axed usage`: what ended runs have used, in groups.

use std::process::ExitCode;

use anyhow::Context;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::cli::age::{absolute_time, seconds};
use crate::cli::output::{self, FormatArgs};
use crate::cli::run;
use crate::cli::server::DaemonArgs;
use crate::cli::style::Color;
use crate::cli::table::{Cell, Column, Table};
use crate::domain::counted::counted;

const COLUMNS: [Column; 7] = [
    Column::number("runs"),
    Column::number("failed"),
    Column::number("in"),
    Column::number("out"),
    Column::number("usd"),
    Column::number("p50"),
    Column::number("p95"),
];
/// With `-o wide`.
const WIDE_COLUMNS: [Column; 7] = [
    Column::number("roots"),
    Column::number("cancelled"),
    Column::number("cache read"),
    Column::number("cache write"),
    Column::number("reasoning"),
    Column::number("calls"),
    Column::number("tools"),
];

const BUDGET_COLUMNS: [Column; 6] = [
    Column::flexible("budget"),
    Column::number("used"),
    Column::number("of"),
    Column::number("share"),
    Column::text("per"),
    Column::text("starts again"),
];

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed usage --since 7d
  axed usage --by label.team,model --since 2026-01-01 --tz Europe/Berlin
  axed usage --by day --agent planner -o json | jq .totals.cost_usd

Sums are over runs that have ended, child runs included. A run counts under its
own agent, its tokens under the model that replied, and both at the time and
under the key, session and labels of their root run. IN and OUT are tokens, P50
and P95 the durations that half and 95 % of the runs do not exceed. Groups are
sorted by cost, and by time with --by day. Below them are the budgets over time
that you may see, in their current periods. On a pipe, columns are separated by
tabs."
)]
pub struct Args {
    /// What to group by: agent, model, label.NAME, session, key, day; separated by commas
    #[arg(long, value_name = "LIST", default_value = "agent")]
    by: String,
    /// From when on: an age such as 7d or 12h, a date, or a time
    #[arg(long, value_name = "WHEN")]
    since: Option<String>,
    /// Until when: an age, a date, or a time
    #[arg(long, value_name = "WHEN")]
    until: Option<String>,
    /// Only runs of this agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Only runs whose root has this label; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = run::parse_label)]
    labels: Vec<(String, String)>,
    /// Time zone of days and dates [default: UTC]
    #[arg(long, value_name = "ZONE")]
    tz: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Deserialize)]
struct Report {
    data: Vec<Group>,
    totals: Group,
    #[serde(default)]
    budgets: Vec<Budget>,
}

/// A budget over time, in its current period.
#[derive(Deserialize)]
struct Budget {
    name: String,
    per: String,
    limit_usd: Option<f64>,
    limit_tokens: Option<u64>,
    used_usd: f64,
    used_tokens: u64,
    used_thousandths: u64,
    resets_at: Timestamp,
}

/// A group's numbers, with its values.
#[derive(Deserialize)]
struct Group {
    runs: u64,
    roots: u64,
    failed: u64,
    cancelled: u64,
    input_tokens: u64,
    output_tokens: u64,
    cache_read_tokens: u64,
    cache_write_tokens: u64,
    reasoning_tokens: u64,
    model_calls: u64,
    tool_calls: u64,
    cost_usd: Option<f64>,
    complete: bool,
    duration_p50_ms: Option<u64>,
    duration_p95_ms: Option<u64>,
    #[serde(flatten)]
    values: Map<String, Value>,
}

pub async fn usage(args: &Args) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let response = client.get_usage(&parameters(args)).await?;
    if args.format.is_json() {
        output::print_json(&response)?;
        return Ok(ExitCode::SUCCESS);
    }
    let unknown = "the daemon sent usage in an unknown format; its version is another one";
    let report: Report = serde_json::from_value(response).context(unknown)?;
    let budgets = budget_table(&report.budgets);
    match report.data.is_empty() {
        true => output::eprint_line(format_args!(
            "axed: no ended runs of that time at {}",
            client.base()
        )),
        false => print_groups(args, report)?,
    }
    if let Some(budgets) = budgets {
        output::print_line(format_args!(""))?;
        budgets.print()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The budgets in their current periods; `None` if there are none.
fn budget_table(budgets: &[Budget]) -> Option<Table> {
    let mut table = Table::new(BUDGET_COLUMNS);
    for budget in budgets {
        let (used, limit) = match (budget.limit_usd, budget.limit_tokens) {
            (Some(limit), _) => (
                format!("{:.4} USD", budget.used_usd),
                format!("{limit} USD"),
            ),
            (None, limit) => {
                let tokens = |number| counted(number, "token");
                (
                    tokens(budget.used_tokens),
                    tokens(limit.unwrap_or_default()),
                )
            }
        };
        let color = match budget.used_thousandths {
            1000.. => Some(Color::Red),
            800.. => Some(Color::Yellow),
            _ => None,
        };
        let percent = format!("{}%", budget.used_thousandths / 10);
        table.row([
            Cell::new(&budget.name),
            Cell::new(used),
            Cell::new(limit),
            Cell::new(percent).colored(color),
            Cell::new(&budget.per),
            Cell::new(format!("{:.0}", budget.resets_at)),
        ]);
    }
    (!budgets.is_empty()).then_some(table)
}

fn print_groups(args: &Args, report: Report) -> anyhow::Result<()> {
    let by = dimensions(&args.by);
    let wide = args.format.is_wide();
    let Report {
        mut data, totals, ..
    } = report;
    if !by.contains(&"day") {
        let tokens = |group: &Group| group.input_tokens.saturating_add(group.output_tokens);
        let cost = |group: &Group| group.cost_usd.unwrap_or_default();
        data.sort_by(|a, b| cost(b).total_cmp(&cost(a)).then(tokens(b).cmp(&tokens(a))));
    }
    let more = WIDE_COLUMNS.iter().filter(|_| wide);
    let values = by.iter().map(|_| Column::flexible(""));
    let mut table = Table::new(values.chain(COLUMNS).chain(more.copied()));
    for (index, name) in by.iter().enumerate() {
        table.rename(index, name);
    }
    for group in &data {
        table.row(cells(group, by.iter().map(|name| value(group, name)), wide));
    }
    if data.len() > 1 && !by.is_empty() {
        let mut labels = by.iter().map(|_| String::new()).collect::<Vec<_>>();
        labels[0] = "total".to_owned();
        table.row(cells(&totals, labels, wide));
    }
    table.print()?;
    if !totals.complete {
        output::eprint_line(format_args!(
            "axed: providers did not report the usage of some requests, which is not in these sums"
        ));
    }
    Ok(())
}

fn dimensions(by: &str) -> Vec<&str> {
    let names = by.split(',').map(str::trim);
    names.filter(|name| !name.is_empty()).collect()
}

/// The value of a group; a dash if its runs have none.
fn value(group: &Group, name: &str) -> String {
    let value = group.values.get(name).and_then(Value::as_str);
    value.unwrap_or("-").to_owned()
}

fn cells(group: &Group, values: impl IntoIterator<Item = String>, wide: bool) -> Vec<Cell> {
    let duration = |milliseconds: Option<u64>| milliseconds.map(seconds).unwrap_or_default();
    let mut cells: Vec<Cell> = values.into_iter().map(Cell::new).collect();
    let cost = group.cost_usd.map(|usd| format!("{usd:.4}"));
    cells.extend([
        Cell::new(group.runs),
        Cell::new(group.failed),
        Cell::new(group.input_tokens),
        Cell::new(group.output_tokens),
        Cell::new(cost.unwrap_or_default()),
        Cell::new(duration(group.duration_p50_ms)),
        Cell::new(duration(group.duration_p95_ms)),
    ]);
    if wide {
        let more = [
            group.roots,
            group.cancelled,
            group.cache_read_tokens,
            group.cache_write_tokens,
            group.reasoning_tokens,
            group.model_calls,
            group.tool_calls,
        ];
        cells.extend(more.map(Cell::new));
    }
    cells
}

fn parameters(args: &Args) -> Vec<(String, String)> {
    let mut parameters = vec![("by".to_owned(), args.by.clone())];
    let mut add = |name: &str, value: &Option<String>| {
        let value = value.as_ref().map(|value| (name.to_owned(), value.clone()));
        parameters.extend(value);
    };
    add("since", &args.since.as_deref().map(absolute_time));
    add("until", &args.until.as_deref().map(absolute_time));
    add("agent", &args.agent);
    add("tz", &args.tz);
    let labels = args.labels.iter();
    parameters.extend(labels.map(|(key, value)| (format!("label.{key}"), value.clone())));
    parameters
}
