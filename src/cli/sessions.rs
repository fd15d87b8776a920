//! `axed sessions`: lists, shows and deletes the sessions of a daemon.

use std::process::ExitCode;

use anyhow::Context;
use jiff::Timestamp;
use serde::Deserialize;

use crate::cli::age::{ago, seconds};
use crate::cli::output::{self, FormatArgs};
use crate::cli::runs::conversation;
use crate::cli::runs::view::{UNKNOWN_RUN_FORMAT, parse_run};
use crate::cli::server::DaemonArgs;
use crate::cli::style::status_color;
use crate::cli::table::{Cell, Column, Table};
use crate::domain::run::RunId;
use crate::domain::terminal_text::sanitize_line;

/// Most sessions of one page, as in the API.
const MAX_PAGE: usize = 200;

const COLUMNS: [Column; 6] = [
    Column::text("session"),
    Column::number("runs"),
    Column::number("messages"),
    Column::flexible("agent"),
    Column::number("age"),
    Column::text("last run"),
];
const RUN_COLUMNS: [Column; 5] = [
    Column::text("run"),
    Column::flexible("agent"),
    Column::text("status"),
    Column::number("age"),
    Column::number("time"),
];

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  axed sessions list
  axed sessions messages ada-7
  axed runs list --session ada-7

A session belongs to the key that uses it; an admin may name another key with
--owner. AXED_SERVER and AXED_KEY name the daemon and the key.

Exit codes:
  0  done
  1  invalid response
  2  session not found, busy, or invalid argument
  3  daemon not reachable, or key missing or not permitted")]
pub enum Command {
    /// List sessions, sorted by name
    List(List),
    /// Print a session and its newest runs
    Show(Show),
    /// Print the conversation that the next run of a session continues
    Messages(Show),
    /// Delete a session with its conversation; its runs stay
    Delete(Delete),
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct List {
    #[command(flatten)]
    owner: Owner,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Show {
    /// Name of the session
    name: String,
    /// Only the runs and the conversation of this agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    #[command(flatten)]
    owner: Owner,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Delete {
    /// Name of the session
    name: String,
    #[command(flatten)]
    owner: Owner,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
struct Owner {
    /// Name of the key that owns the session; needs the scope admin
    #[arg(long, value_name = "KEY_NAME")]
    owner: Option<String>,
}

#[derive(Deserialize)]
struct SessionBrief {
    name: String,
    runs: u64,
    messages: u64,
    last_run: RunId,
    agent: String,
    updated_at: Timestamp,
}

#[derive(Deserialize)]
struct SessionDetails {
    name: String,
    agent: Option<String>,
    run: Option<RunId>,
    messages: u64,
    data: Vec<serde_json::Value>,
    next_cursor: Option<String>,
}

pub async fn sessions(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List(args) => list(&args).await?,
        Command::Show(args) => show(&args).await?,
        Command::Messages(args) => messages(&args).await?,
        Command::Delete(args) => delete(&args).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(args: &List) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let mut table = Table::new(COLUMNS);
    let now = Timestamp::now();
    let mut is_empty = true;
    let mut cursor: Option<String> = None;
    loop {
        let owner = args.owner.owner.as_deref();
        let page = client.list_sessions(owner, MAX_PAGE, cursor.as_deref());
        let page = page.await?;
        is_empty &= page.data.is_empty();
        for session in page.data {
            if args.format.is_json() {
                output::print_json_line(&session)?;
                continue;
            }
            let session: SessionBrief =
                serde_json::from_value(session).context(UNKNOWN_RUN_FORMAT)?;
            table.row([
                Cell::new(&session.name),
                Cell::new(session.runs),
                Cell::new(session.messages),
                Cell::new(&session.agent),
                Cell::new(ago(session.updated_at, now)),
                Cell::run(session.last_run),
            ]);
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    if args.format.is_json() {
        return Ok(());
    }
    if is_empty {
        output::eprint_line(format_args!("axed: no sessions at {}", client.base()));
        return Ok(());
    }
    table.print()
}

async fn show(args: &Show) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let owner = args.owner.owner.as_deref();
    let session = client.get_session(&args.name, args.agent.as_deref(), owner);
    let session = session.await?;
    if args.format.is_json() {
        return output::print_json(&session);
    }
    let session: SessionDetails = serde_json::from_value(session).context(UNKNOWN_RUN_FORMAT)?;
    let line = |key: &str, value: &str| {
        output::print_line(format_args!("{key:<11}{}", sanitize_line(value)))
    };
    line("session", &session.name)?;
    line(
        "agent",
        session.agent.as_deref().unwrap_or("(none completed)"),
    )?;
    if let Some(run) = session.run {
        line("run", &run.to_string())?;
    }
    line("messages", &session.messages.to_string())?;
    output::print_line(format_args!(""))?;
    let mut table = Table::new(RUN_COLUMNS);
    let now = Timestamp::now();
    let runs: anyhow::Result<Vec<_>> = session.data.into_iter().map(parse_run).collect();
    let runs = runs?;
    for run in runs {
        table.row([
            Cell::run(run.id),
            Cell::new(&run.agent),
            Cell::new(run.status.as_str()).colored(status_color(run.status)),
            Cell::new(ago(run.created_at, now)),
            Cell::new(seconds(run.duration_ms)),
        ]);
    }
    table.print()?;
    if session.next_cursor.is_some() {
        output::eprint_line(format_args!(
            "axed: there are more runs: axed runs list --session {}",
            args.name
        ));
    }
    Ok(())
}

async fn messages(args: &Show) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let (agent, owner) = (args.agent.as_deref(), args.owner.owner.as_deref());
    let pages = conversation::collect(async |after| {
        client
            .get_session_messages(&args.name, agent, owner, after)
            .await
    });
    conversation::print(pages.await?, args.format)
}

async fn delete(args: &Delete) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let owner = args.owner.owner.as_deref();
    client.delete_session(&args.name, owner).await?;
    output::print_line(format_args!(
        "session {} is deleted; its runs stay",
        sanitize_line(&args.name)
    ))
}
