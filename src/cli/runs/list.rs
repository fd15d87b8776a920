//! `axed runs list`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use jiff::Timestamp;

use crate::cli::age::{ago, seconds};
use crate::cli::output::{self, FormatArgs};
use crate::cli::run;
use crate::cli::runs::view::{RunDetails, parse_run};
use crate::cli::server::DaemonArgs;
use crate::cli::style::status_color;
use crate::cli::table::{Cell, Column, Table};
use crate::domain::run::Status;

/// Maximum number of runs of one page, as in the API.
const MAX_PAGE_RUNS: usize = 200;

const COLUMNS: [Column; 7] = [
    Column::text("run"),
    Column::flexible("agent"),
    Column::text("status"),
    Column::number("age"),
    Column::number("in"),
    Column::number("out"),
    Column::number("time"),
];
/// With `-o wide`.
const WIDE_COLUMNS: [Column; 6] = [
    Column::text("created"),
    Column::number("runs"),
    Column::number("turns"),
    Column::number("usd"),
    Column::flexible("model"),
    Column::flexible("error"),
];

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed runs list --agent planner --limit 10
  axed runs list --status failed -o wide
  axed runs list --label team=search -o json | jq -r .id

IN and OUT are tokens of the run and its descendants. With -o json each run is
one line. On a pipe, columns are separated by tabs."
)]
pub struct List {
    /// Filter by agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Filter by status: queued, running, waiting, cancelling, completed, failed or cancelled
    #[arg(long, value_name = "STATUS", value_parser = status_parser(), hide_possible_values = true)]
    status: Option<Status>,
    /// Filter by label; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = run::parse_label)]
    labels: Vec<(String, String)>,
    /// Filter by session
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    /// Include child runs
    #[arg(long)]
    all: bool,
    /// Maximum number of runs
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = parse_limit)]
    limit: usize,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

fn parse_limit(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("use a number from 1 on".to_owned()),
        Ok(limit) => Ok(limit),
    }
}

pub async fn list(args: &List) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let filters = filters(args);
    let wide = args.format.is_wide();
    let more = WIDE_COLUMNS.iter().filter(|_| wide);
    let mut table = Table::new(COLUMNS.iter().chain(more).copied());
    let mut runs = Vec::new();
    let mut cursor = None;
    let mut remaining = args.limit;
    while remaining > 0 {
        let page = client
            .list_runs(&filters, remaining.min(MAX_PAGE_RUNS), cursor.as_deref())
            .await?;
        remaining = remaining.saturating_sub(page.data.len());
        for run in page.data {
            match args.format.is_json() {
                true => output::print_json_line(&run)?,
                false => runs.push(parse_run(run)?),
            }
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    if args.format.is_json() {
        return Ok(());
    }
    if runs.is_empty() {
        output::eprint_line(format_args!("axed: no matching runs at {}", client.base()));
        return Ok(());
    }
    let now = Timestamp::now();
    for run in &runs {
        table.row(row(run, now, wide));
    }
    table.print()?;
    if cursor.is_some() {
        output::eprint_line(format_args!(
            "axed: there are more than {} runs; --limit N lists more",
            args.limit
        ));
    }
    Ok(())
}

fn filters(args: &List) -> Vec<(String, String)> {
    let mut filters = Vec::new();
    let mut filter = |name: &str, value: &str| filters.push((name.to_owned(), value.to_owned()));
    if let Some(agent) = &args.agent {
        filter("agent", agent);
    }
    if let Some(status) = args.status {
        filter("status", status.as_str());
    }
    if let Some(session) = &args.session {
        filter("session", session);
    }
    if args.all {
        filter("all", "true");
    }
    for (key, value) in &args.labels {
        filter(&format!("label.{key}"), value);
    }
    filters
}

fn row(run: &RunDetails, now: Timestamp, wide: bool) -> Vec<Cell> {
    let mut cells = vec![
        match wide {
            true => Cell::new(run.id),
            false => Cell::run(run.id),
        },
        Cell::new(&run.agent),
        Cell::new(run.status.as_str()).colored(status_color(run.status)),
        Cell::new(ago(run.created_at, now)),
        Cell::new(run.tree.input_tokens),
        Cell::new(run.tree.output_tokens),
        Cell::new(seconds(run.duration_ms)),
    ];
    if wide {
        let failure = run.error.as_ref().map(|failure| failure.message.as_str());
        let reason = failure.or(run.cancel_reason.as_deref());
        let cost = run.tree.cost_usd.map(|usd| usd.to_string());
        cells.extend([
            Cell::new(format!("{:.0}", run.created_at)),
            Cell::new(run.tree.runs),
            Cell::new(run.turns),
            Cell::new(cost.unwrap_or_default()),
            Cell::new(&run.model),
            Cell::new(reason.unwrap_or_default()),
        ]);
    }
    cells
}

/// Knows the statuses, for completions.
fn status_parser() -> impl TypedValueParser<Value = Status> {
    PossibleValuesParser::new(Status::ALL.map(Status::as_str))
        .try_map(|name| name.parse::<Status>().map_err(|()| "unknown status"))
}
