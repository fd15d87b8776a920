//! `axed batch`: sends many requests for runs to a daemon, waits for their end, and prints the results.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;

use crate::cli::client::Client;
use crate::cli::exit::InvalidInput;
use crate::cli::output;
use crate::cli::reconnects::Reconnects;
use crate::cli::server::DaemonArgs;
use crate::domain::counted::counted;

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Most bytes of a result.
const MAX_RESULT: usize = 256 << 20;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Each line of the file is the JSON body of a request for a run, such as
  {\"input\": \"Sum up ticket 1\"}

The results are lines of JSON on stdout, in the order of the file: index, from 0
and without blank lines, status, run, problem. The progress is on stderr. If this
command is interrupted, the batch continues: axed batch --results BATCH prints
its results.

Examples:
  axed batch planner tickets.jsonl > results.jsonl
  axed batch --results batch_019a1f3c-c000-7e43-8f88-6c419d0e1f2a

Exit codes:
  0  every run has completed
  1  a run has failed, or a line was rejected
  2  agent or batch not found, or invalid argument
  3  daemon not reachable, or key missing or not permitted"
)]
pub struct Args {
    /// Name of the agent
    #[arg(required_unless_present = "results")]
    agent: Option<String>,
    /// File with a request on each line; - is stdin
    #[arg(required_unless_present = "results")]
    file: Option<PathBuf>,
    /// Wait for this batch instead, and print its results
    #[arg(long, value_name = "BATCH", conflicts_with_all = ["agent", "file", "no_wait"])]
    results: Option<String>,
    /// Print the batch once it is accepted, and do not wait for its end
    #[arg(long)]
    no_wait: bool,
    /// Idempotency key: repeating the command with it makes no second batch
    #[arg(long, value_name = "KEY", conflicts_with = "results")]
    idempotency_key: Option<String>,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Deserialize)]
struct BatchView {
    lines: u64,
    counts: Counts,
    finished_at: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
struct Counts {
    completed: u64,
    failed: u64,
    cancelled: u64,
    rejected: u64,
    deleted: u64,
}

pub async fn batch(args: Args) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let id = match (&args.results, &args.agent, &args.file) {
        (Some(id), _, _) => id.clone(),
        (None, Some(agent), Some(file)) => {
            let mut request = client
                .post(&["agents", agent, "runs:batch"])
                .header(CONTENT_TYPE, "application/jsonl")
                .body(read(file)?);
            if let Some(key) = &args.idempotency_key {
                request = request.header("idempotency-key", key);
            }
            let accepted: serde_json::Value = client.read(request).await?;
            if args.no_wait {
                output::print_json(&accepted)?;
                return Ok(ExitCode::SUCCESS);
            }
            let id = accepted["id"].as_str().unwrap_or_default().to_owned();
            output::eprint_line(format_args!("axed: accepted {id}"));
            id
        }
        _ => anyhow::bail!("an agent and a file are needed"),
    };
    let counts = wait(&client, &id).await?;
    print_results(&client, &id).await?;
    let is_complete = counts.failed + counts.cancelled + counts.rejected + counts.deleted == 0;
    Ok(match is_complete {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn read(file: &PathBuf) -> anyhow::Result<Vec<u8>> {
    if file.as_os_str() == "-" {
        let mut bytes = Vec::new();
        std::io::stdin()
            .read_to_end(&mut bytes)
            .context("stdin cannot be read")?;
        return Ok(bytes);
    }
    Ok(std::fs::read(file).map_err(|error| InvalidInput::unreadable(file, &error))?)
}

/// Waits for the end of the batch; a line on stderr for each change.
async fn wait(client: &Client, id: &str) -> anyhow::Result<Counts> {
    let mut shown = None;
    let mut reconnects = Reconnects::default();
    loop {
        let batch: BatchView = match client.read(client.get(&["batches", id])).await {
            Ok(batch) => batch,
            Err(error) => {
                reconnects.pause_after(error).await?;
                continue;
            }
        };
        reconnects.on_success();
        let counts = batch.counts;
        let ended =
            counts.completed + counts.failed + counts.cancelled + counts.rejected + counts.deleted;
        if shown != Some(counts) {
            shown = Some(counts);
            output::eprint_line(format_args!(
                "axed: {ended} of {} ended; {} failed, {} rejected",
                counted(batch.lines, "line"),
                counts.failed,
                counts.rejected
            ));
        }
        if batch.finished_at.is_some() {
            return Ok(counts);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Prints each result once, also if the daemon is restarted meanwhile.
async fn print_results(client: &Client, id: &str) -> anyhow::Result<()> {
    let mut reconnects = Reconnects::to_known_daemon();
    let mut printed = 0;
    loop {
        let before = printed;
        let (mut line_number, mut outcome) = (0, Ok(()));
        let on_line = |line: &[u8]| {
            line_number += 1;
            if line_number > printed {
                outcome = print_result(line);
                printed = line_number;
            }
            outcome.is_ok()
        };
        let request = client.get(&["batches", id, "results"]);
        let read = client.read_lines(request, MAX_RESULT, on_line).await;
        outcome?;
        let Err(error) = read else {
            return Ok(());
        };
        if printed > before {
            reconnects.on_success();
        }
        reconnects.pause_after(error).await?;
    }
}

fn print_result(line: &[u8]) -> anyhow::Result<()> {
    let result: serde_json::Value = serde_json::from_slice(line)?;
    output::print_json_line(&result)
}
