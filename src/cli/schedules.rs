//! `axed schedules`: lists, triggers, pauses and resumes the schedules of a daemon.

use std::process::ExitCode;

use anyhow::Context;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cli::age::ago;
use crate::cli::output::{self, FormatArgs};
use crate::cli::runs::view::{UNKNOWN_RUN_FORMAT, parse_run};
use crate::cli::server::DaemonArgs;
use crate::cli::style::Color;
use crate::cli::table::{Cell, Column, Table};
use crate::domain::evaluation::EvalId;
use crate::domain::run::RunId;
use crate::domain::terminal_text::sanitize_line;

const COLUMNS: [Column; 6] = [
    Column::flexible("agent"),
    Column::flexible("schedule"),
    Column::flexible("cron"),
    Column::text("next"),
    Column::number("last"),
    Column::text("last start"),
];

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  axed schedules list
  axed schedules trigger planner morning
  axed schedules pause planner morning

[[schedules]] of an agent's file define them. AXED_SERVER and AXED_KEY name the
daemon and the key.

Exit codes:
  0  done
  1  invalid response
  2  schedule not found, or invalid argument
  3  daemon not reachable, or key missing or not permitted")]
pub enum Command {
    /// List schedules with their next time and their last run
    List(List),
    /// Start a run, or the evaluation, of a schedule now
    Trigger(Change),
    /// Let a schedule start no runs until it is resumed
    Pause(Change),
    /// Resume a paused schedule; times during the pause are not missed
    Resume(Change),
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct List {
    /// Only schedules of this agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Change {
    /// Name of the agent
    agent: String,
    /// Name of the schedule
    schedule: String,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Deserialize)]
struct SchedulePage {
    data: Vec<Value>,
}

#[derive(Deserialize)]
struct ScheduleView {
    agent: String,
    name: String,
    cron: String,
    timezone: String,
    paused: bool,
    next: Option<Timestamp>,
    last: Option<LastRun>,
}

#[derive(Deserialize)]
struct LastRun {
    at: Timestamp,
    run: Option<RunId>,
    eval: Option<EvalId>,
}

pub async fn schedules(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List(args) => list(&args).await?,
        Command::Trigger(args) => trigger(&args).await?,
        Command::Pause(args) => set_paused(&args, "pause", "paused").await?,
        Command::Resume(args) => set_paused(&args, "resume", "active").await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(args: &List) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let mut page: SchedulePage = client.read(client.get(&["schedules"])).await?;
    page.data.retain(|it| {
        args.agent
            .as_ref()
            .is_none_or(|agent| it["agent"] == **agent)
    });
    if args.format.is_json() {
        return page.data.iter().try_for_each(output::print_json_line);
    }
    if page.data.is_empty() {
        output::eprint_line(format_args!("axed: no schedules at {}", client.base()));
        return Ok(());
    }
    let mut table = Table::new(COLUMNS);
    let now = Timestamp::now();
    for schedule in page.data {
        let schedule: ScheduleView =
            serde_json::from_value(schedule).context(UNKNOWN_RUN_FORMAT)?;
        let last = schedule.last.as_ref();
        table.row([
            Cell::new(&schedule.agent),
            Cell::new(&schedule.name),
            Cell::new(&schedule.cron),
            next_cell(&schedule),
            Cell::new(
                schedule
                    .last
                    .as_ref()
                    .map_or("-".to_owned(), |last| ago(last.at, now)),
            ),
            match last.map(|last| (last.run, last.eval)) {
                Some((Some(run), _)) => Cell::run(run),
                Some((None, Some(eval))) => Cell::new(eval.to_string()),
                _ => Cell::new("-"),
            },
        ]);
    }
    table.print()
}

/// The next time, as clocks in the schedule's zone show it.
fn next_cell(schedule: &ScheduleView) -> Cell {
    match schedule.next {
        _ if schedule.paused => Cell::new("paused").colored(Color::Yellow),
        None => Cell::new("-"),
        Some(next) => {
            let zone = TimeZone::get(&schedule.timezone).unwrap_or(TimeZone::UTC);
            let next = next.to_zoned(zone);
            Cell::new(next.strftime("%Y-%m-%d %H:%M %Z")).or_short(next.strftime("%m-%d %H:%M"))
        }
    }
}

async fn trigger(args: &Change) -> anyhow::Result<()> {
    let run = args.send("trigger").await?;
    if args.format.is_json() {
        return output::print_json(&run);
    }
    if let Some(eval) = run["id"].as_str().filter(|id| id.starts_with("eval_")) {
        return output::print_line(format_args!("{} is accepted", sanitize_line(eval)));
    }
    let run = parse_run(run)?;
    output::print_line(format_args!("{} is {}", run.id, run.status.as_str()))
}

async fn set_paused(args: &Change, action: &str, state: &str) -> anyhow::Result<()> {
    let schedule = args.send(action).await?;
    if args.format.is_json() {
        return output::print_json(&schedule);
    }
    let (agent, name) = (sanitize_line(&args.agent), sanitize_line(&args.schedule));
    output::print_line(format_args!("schedule {name} of {agent} is {state}"))
}

impl Change {
    async fn send(&self, action: &str) -> anyhow::Result<Value> {
        let client = self.daemon.client()?;
        let path = ["schedules", &self.agent, &self.schedule, action];
        let request = client.post(&path).json(&json!({}));
        Ok(client.read(request).await?)
    }
}
