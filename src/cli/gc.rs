//! `axed gc`: garbage collection of memories, in process or on a daemon.

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Deserialize;
use serde_json::Value;

use crate::cli::client::{Client, ClientError};
use crate::cli::output::FormatArgs;
use crate::cli::server::OptionalDaemonArgs;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::{in_process, output};
use crate::config::load::Flags;
use crate::domain::counted::counted;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    group = clap::ArgGroup::new("which").required(true).args(["agent", "all"]),
    after_help = "Without --server or AXED_SERVER, no daemon may use the data directory. With -o
json each report is one line.

Examples:
  axed gc notes --dry-run
  axed gc --all --server http://127.0.0.1:8080"
)]
pub struct Args {
    /// Agent whose memory is collected
    agent: Option<String>,
    /// Collect the memory of every agent that has one
    #[arg(long)]
    all: bool,
    /// Key whose memory is collected [default: the key of this request]
    #[arg(long, value_name = "NAME", conflicts_with = "all")]
    of: Option<String>,
    /// Analyse only; do not change the memory
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: OptionalDaemonArgs,
    #[command(flatten)]
    sources: Sources,
    /// Data directory with the memories [default: as configured]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Report {
    agent: String,
    analysis: String,
    entries_before: u64,
    entries_after: u64,
    input_tokens: u64,
    output_tokens: u64,
}

pub async fn gc(args: Args) -> anyhow::Result<ExitCode> {
    let has_local_flags = args.data.is_some() || args.sources.are_given();
    match args.daemon.client(has_local_flags)? {
        Some(client) => collect_garbage(&client, &args).await?,
        None => {
            let flags = Flags {
                data: args.data.clone(),
                ..args.sources.clone().flags()
            };
            let config = load_quiet_config(&flags)?;
            in_process::with_daemon(config, async |client| collect_garbage(client, &args).await)
                .await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn collect_garbage(client: &Client, args: &Args) -> anyhow::Result<()> {
    if let Some(agent) = &args.agent {
        let report = client.collect_memory_garbage(agent, args.of.as_deref(), args.dry_run);
        return print_report(report.await?, args.format.is_json());
    }
    let mut is_found = false;
    for agent in client.valid_agents().await? {
        match client
            .collect_memory_garbage(&agent, None, args.dry_run)
            .await
        {
            Ok(report) => {
                is_found = true;
                print_report(report, args.format.is_json())?;
            }
            Err(ClientError::ErrorResponse { code, .. }) if code == "memory_disabled" => {}
            Err(error) => return Err(error.into()),
        }
    }
    if !is_found {
        output::eprint_line(format_args!("axed: no agent has a memory"));
    }
    Ok(())
}

fn print_report(report: Value, json: bool) -> anyhow::Result<()> {
    if json {
        output::print_json_line(&report)?;
        return Ok(());
    }
    let report: Report = serde_json::from_value(report)?;
    output::print_line(format_args!(
        "{}: {} before, {} after ({} in, {} out)",
        report.agent,
        counted(report.entries_before, "entry"),
        report.entries_after,
        counted(report.input_tokens, "token"),
        report.output_tokens,
    ))?;
    if !report.analysis.is_empty() {
        output::print_line(format_args!("\n{}\n", report.analysis.trim_end()))?;
    }
    Ok(())
}
