//! `axed data`: checks and copies the database.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use secrecy::ExposeSecret;
use serde_json::json;

use crate::catalog::Rules;
use crate::catalog::reload::Catalog;
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::{Sources, load_quiet_config};
use crate::config::Data;
use crate::config::load::Flags;
use crate::domain::agent::Agent;
use crate::store::StoreError;
use crate::store::migrate::{self, Direction};
use crate::store::open;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check the database for damage: exit code 0 if it has none, else 1
    Check(Check),
    /// Copy the database to a file, also while a daemon uses it
    Backup(Backup),
    /// Copy all that is stored from SQLite to PostgreSQL, or back, while no daemon runs
    Migrate(Migrate),
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed data check --data /var/lib/axed"
)]
pub struct Check {
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    data_dir: DataDir,
}

#[derive(Debug, clap::Args)]
pub struct DataDir {
    /// Configuration file [default: $AXED_CONFIG, config/axed.toml or /etc/axed/axed.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Data directory [default: as configured]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed data backup /backup/axed-$(date +%F).db --data /var/lib/axed"
)]
pub struct Backup {
    /// The copy
    file: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    data_dir: DataDir,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The database of PostgreSQL is that of data.url, the one of SQLite is in
data.dir. The target must be empty; the source stays as it is.

Examples:
  AXED_DATA__URL=postgres://axed@db/axed axed data migrate --to postgres
  axed data migrate --to sqlite --config /etc/axed/axed.toml"
)]
pub struct Migrate {
    /// Where the copy goes
    #[arg(long)]
    to: Engine,
    #[command(flatten)]
    sources: Sources,
    /// Data directory [default: as configured]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Engine {
    Postgres,
    Sqlite,
}

impl DataDir {
    /// The directory, and what the error of a missing database says if the configured one is on PostgreSQL. `server_tool` does the same
    /// for that.
    fn resolve(self, server_tool: &str) -> anyhow::Result<(PathBuf, Option<String>)> {
        let is_named = self.data.is_some();
        let data = self.load()?;
        let elsewhere = data.url.map(|_| {
            format!(
                "data.url names a PostgreSQL database: use {server_tool}; --data names a data directory"
            )
        });
        match elsewhere {
            Some(elsewhere) if !is_named => anyhow::bail!(elsewhere),
            elsewhere => Ok((data.dir, elsewhere)),
        }
    }

    fn load(self) -> anyhow::Result<Data> {
        let sources = Sources {
            config: self.config,
            ..Sources::default()
        };
        let flags = Flags {
            data: self.data,
            ..sources.flags()
        };
        Ok(load_quiet_config(&flags)?.data)
    }
}

pub fn data(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Check(args) => {
            let (dir, elsewhere) = args.data_dir.resolve("pg_amcheck")?;
            let findings = open::check(&dir);
            report(
                &dir,
                findings.map_err(|it| describe_missing(it, elsewhere))?,
                args.format,
            )
        }
        Command::Backup(args) => {
            let (dir, elsewhere) = args.data_dir.resolve("pg_dump")?;
            let bytes = open::backup(&dir, &args.file, args.force)
                .map_err(|error| describe_missing(error, elsewhere))?;
            output::print_line(format_args!(
                "Copied the database to {} ({bytes} bytes)",
                args.file.display()
            ))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Migrate(args) => migrate(args),
    }
}

/// As [`describe`]; `elsewhere` says where the database is, if not in the directory.
fn describe_missing(error: StoreError, elsewhere: Option<String>) -> anyhow::Error {
    match (error, elsewhere) {
        (StoreError::NoDatabase(_), Some(elsewhere)) => anyhow::anyhow!(elsewhere),
        (error, _) => describe(error),
    }
}

/// The error of a command that has no other task than what failed.
pub fn describe(error: StoreError) -> anyhow::Error {
    match error {
        StoreError::Backend(why) | StoreError::Refused(why) => anyhow::anyhow!(why),
        StoreError::Corrupt(why) | StoreError::Malformed(why) => {
            anyhow::anyhow!(
                "the database is damaged: {why}; a backup mends it, or for SQLite .recover of sqlite3"
            )
        }
        error @ StoreError::NoDatabase(_) => InvalidInput(error.to_string()).into(),
        other => other.into(),
    }
}

fn migrate(Migrate { to, sources, data }: Migrate) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&Flags {
        data,
        ..sources.flags()
    })?;
    // What unfinished runs may call has the labels of today.
    let agents = Catalog::open(config.agents.dirs.clone(), Rules::from_config(&config)).current();
    let direction = match to {
        Engine::Postgres => Direction::ToPostgres,
        Engine::Sqlite => Direction::ToSqlite,
    };
    let url = config.data.url.as_ref().ok_or_else(|| {
        InvalidInput(
            "data.url is not set; set it, or AXED_DATA__URL, to the PostgreSQL database".to_owned(),
        )
    })?;
    let node_labels = |agent: &Agent| agents.node_labels(agent);
    let copied = migrate::migrate(
        &config.data.dir,
        url.expose_secret(),
        direction,
        &node_labels,
    )
    .map_err(describe)?;
    for table in copied.iter().filter(|table| table.rows > 0) {
        output::print_line(format_args!("{:>12} {}", table.rows, table.name))?;
    }
    let rows: u64 = copied.iter().map(|table| table.rows).sum();
    let next = match to {
        Engine::Postgres => "start axed with data.url",
        Engine::Sqlite => "start axed without data.url",
    };
    output::print_line(format_args!("{rows:>12} rows copied; {next}"))?;
    Ok(ExitCode::SUCCESS)
}

fn report(dir: &Path, findings: Vec<String>, format: FormatArgs) -> anyhow::Result<ExitCode> {
    if format.is_json() {
        output::print_json(&json!({"dir": dir.to_string_lossy(), "data": findings}))?;
        return Ok(match findings.is_empty() {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        });
    }
    if findings.is_empty() {
        output::print_line(format_args!(
            "The database in {} has no damage",
            dir.display()
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    for finding in &findings {
        output::print_line(format_args!("{finding}"))?;
    }
    Ok(ExitCode::FAILURE)
}
