//! `axed runs list`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use jiff::Timestamp;

use crate::cli::age::{absolute_time, ago, seconds};
use crate::cli::client::Client;
use crate::cli::output::{self, FormatArgs};
use crate::cli::run;
use crate::cli::runs::view::{RunDetails, parse_run};
use crate::cli::server::DaemonArgs;
use crate::cli::style::{Color, status_color};
use crate::cli::table::{Cell, Column, Table};
use crate::domain::counted::counted;
use crate::domain::message::shorten;
use crate::domain::run::Status;
use crate::settings::suggestion;

/// Maximum number of runs of one page, as in the API.
pub const MAX_PAGE_RUNS: usize = 200;

const COLUMNS: [Column; 7] = [
    Column::text("run"),
    Column::flexible("agent"),
    Column::text("status"),
    Column::number("age"),
    Column::number("tokens"),
    Column::number("usd"),
    Column::number("time"),
];
/// With `-o wide`.
const WIDE_COLUMNS: [Column; 7] = [
    Column::text("created"),
    Column::number("in"),
    Column::number("out"),
    Column::number("runs"),
    Column::number("turns"),
    Column::flexible("model"),
    Column::flexible("scores"),
];
const LAST_COLUMN: Column = Column::flexible("error");
/// Characters of an error on a terminal.
const ERROR_CHARS: usize = 60;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed runs list --agent planner --limit 10
  axed runs list --status failed --since 2h
  axed runs list --label team=search -o json | jq -r .id
  axed runs list --q 'invoice 4711' --since 7d
  axed runs list --score 'thumbs=<1' -o wide

TOKENS and USD are those of the run and its descendants. ERROR is why a run
failed or was cancelled, or what it waits for. With -o json each run is one
line. On a pipe, columns are separated by tabs."
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
    /// Search inputs and final texts, without regard to case; also the beginning or end of an id
    #[arg(long, value_name = "TEXT")]
    q: Option<String>,
    /// Filter by the code of the error, such as timeout
    #[arg(long, value_name = "CODE")]
    error_code: Option<String>,
    /// Filter by the version of an agent with a rollout: current or candidate
    #[arg(long, value_name = "VARIANT", value_parser = ["current", "candidate"], hide_possible_values = true)]
    variant: Option<String>,
    /// Filter by the scores of one name: by their mean, a label (=LABEL), or none; repeatable
    #[arg(long = "score", value_name = "NAME=CONDITION", value_parser = run::parse_label)]
    scores: Vec<(String, String)>,
    /// Only runs accepted since then: an age such as 7d or 12h, a date, or a time
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<String>,
    /// Accepted before then: an age, or a time
    #[arg(long, value_name = "WHEN")]
    until: Option<String>,
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

pub fn parse_limit(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("use a number from 1 on".to_owned()),
        Ok(limit) => Ok(limit),
    }
}

/// A date is its beginning in UTC.
pub fn parse_since(text: &str) -> Result<String, String> {
    let time = absolute_time(text);
    let midnight = format!("{time}T00:00:00Z");
    let times = [time, midnight];
    let valid = times
        .into_iter()
        .find(|time| time.parse::<Timestamp>().is_ok());
    valid.ok_or_else(|| "use an age such as 7d or 12h, a date, or a time".to_owned())
}

pub async fn list(args: &List) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let filters = filters(args);
    let wide = args.format.is_wide();
    let more = WIDE_COLUMNS.iter().filter(|_| wide);
    let columns = COLUMNS.iter().chain(more).chain([&LAST_COLUMN]);
    let mut table = Table::new(columns.copied());
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
        let hint = similar_agent(args, &client).await;
        output::eprint_line(format_args!(
            "axed: no matching runs at {}{hint}",
            client.base()
        ));
        return Ok(());
    }
    let now = Timestamp::now();
    for run in &runs {
        table.row(row(run, now, wide));
    }
    table.print()?;
    if cursor.is_some() {
        output::eprint_line(format_args!(
            "axed: there are more than {}; --limit N lists more",
            counted(args.limit, "run")
        ));
    }
    Ok(())
}

/// The agent that was perhaps meant, if there is none of this name.
async fn similar_agent(args: &List, client: &Client) -> String {
    let Some(agent) = &args.agent else {
        return String::new();
    };
    // A hint is not worth an error.
    let known = client.valid_agents().await.unwrap_or_default();
    let known = known.iter().map(String::as_str);
    suggestion::clause(suggestion::did_you_mean(agent, known))
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
    if let Some(text) = &args.q {
        filter("q", text);
    }
    if let Some(code) = &args.error_code {
        filter("error_code", code);
    }
    if let Some(variant) = &args.variant {
        filter("variant", variant);
    }
    if let Some(since) = &args.since {
        filter("since", since);
    }
    if let Some(until) = &args.until {
        filter("until", &absolute_time(until));
    }
    if args.all {
        filter("all", "true");
    }
    for (key, value) in &args.labels {
        filter(&format!("label.{key}"), value);
    }
    for (name, condition) in &args.scores {
        filter(&format!("score.{name}"), condition);
    }
    filters
}

fn row(run: &RunDetails, now: Timestamp, wide: bool) -> Vec<Cell> {
    let cost = run.tree.cost_usd.map(|usd| format!("{usd:.4}"));
    let mut cells = vec![
        match wide {
            true => Cell::new(run.id),
            false => Cell::run(run.id),
        },
        Cell::new(&run.agent),
        Cell::new(run.status.as_str()).colored(status_color(run.status)),
        Cell::new(ago(run.created_at, now)),
        Cell::new(run.tree.input_tokens + run.tree.output_tokens),
        Cell::new(cost.unwrap_or_default()),
        Cell::new(seconds(run.duration_ms)),
    ];
    if wide {
        cells.extend([
            Cell::new(format!("{:.0}", run.created_at)),
            Cell::new(run.tree.input_tokens),
            Cell::new(run.tree.output_tokens),
            Cell::new(run.tree.runs),
            Cell::new(run.turns),
            Cell::new(&run.model),
            Cell::new(run.scores_text()),
        ]);
    }
    let reason = run.reason();
    let color = run.error.is_some().then_some(Color::Red);
    let short = shorten(&reason, ERROR_CHARS);
    cells.push(Cell::new(&reason).or_short(short).colored(color));
    cells
}

/// Knows the statuses, for completions.
pub fn status_parser() -> impl TypedValueParser<Value = Status> {
    PossibleValuesParser::new(Status::ALL.map(Status::as_str))
        .try_map(|name| name.parse::<Status>().map_err(|()| "unknown status"))
}
