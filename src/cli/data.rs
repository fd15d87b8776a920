//! `axed data`: checks and copies the database, whether or not a daemon uses it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;

use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::{Sources, load_quiet_config};
use crate::config::load::Flags;
use crate::store::open;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check the database for damage: exit code 0 if it has none, else 1
    Check(Check),
    /// Copy the database to a file, also while a daemon uses it
    Backup(Backup),
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
    /// Configuration file [default: $AXED_CONFIG or config/axed.toml]
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

impl DataDir {
    fn resolve(self) -> anyhow::Result<PathBuf> {
        let sources = Sources {
            config: self.config,
            ..Sources::default()
        };
        let flags = Flags {
            data: self.data,
            ..sources.flags()
        };
        Ok(load_quiet_config(&flags)?.data.dir)
    }
}

pub fn data(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Check(args) => check(&args.data_dir.resolve()?, args.format),
        Command::Backup(args) => {
            let bytes = open::backup(&args.data_dir.resolve()?, &args.file, args.force)?;
            output::print_line(format_args!(
                "Copied the database to {} ({bytes} bytes)",
                args.file.display()
            ))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn check(dir: &Path, format: FormatArgs) -> anyhow::Result<ExitCode> {
    let findings = open::check(dir)?;
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
