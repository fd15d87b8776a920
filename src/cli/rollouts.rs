//! `axed agents rollout` and `axed agents promote`: the candidate of an agent of a daemon.

use std::process::ExitCode;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::cli::client::ClientError;
use crate::cli::output::{self, FormatArgs};
use crate::cli::server::DaemonArgs;
use crate::domain::terminal_text::sanitize_line;

/// Seconds that one request waits for the evaluation of a gate.
const WAIT: u64 = 25;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed agents rollout editor --percent 50
  axed agents rollout editor --percent 0"
)]
pub struct Rollout {
    /// Name of the agent
    name: String,
    /// Share of the runs that the candidate gets, from 0 to 100
    #[arg(long, value_name = "N")]
    percent: f64,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "If the daemon cannot write the agent's file, its new text is printed on stdout, to
be committed. The candidate is the current version in any case.

Exit codes:
  0  the candidate is the current version
  1  the gate does not hold
  2  agent not found, no candidate, or invalid argument
  3  daemon not reachable, or key missing or not permitted

Example:
  axed agents promote editor"
)]
pub struct Promote {
    /// Name of the agent
    name: String,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Deserialize)]
struct Promotion {
    version: String,
    file: String,
    reason: Option<String>,
    commit: Option<String>,
}

pub async fn rollout(args: Rollout) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let request = client.post(&["agents", &args.name, "rollout"]);
    let request = request.json(&json!({"percent": args.percent}));
    let rollout: Value = client.read(request).await?;
    if args.format.is_json() {
        output::print_json(&rollout)?;
    } else {
        let name = sanitize_line(&args.name);
        output::print_line(format_args!(
            "the candidate of {name} gets {} % of the runs",
            rollout["percent"].as_f64().unwrap_or_default()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn promote(args: Promote) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let mut body = json!({});
    let promotion = loop {
        let answer = match client.promote(&args.name, &body, WAIT).await {
            Err(ClientError::ErrorResponse { code, detail, .. }) if code == "gate_failed" => {
                output::eprint_line(format_args!("axed: {detail}"));
                return Ok(ExitCode::FAILURE);
            }
            answer => answer?,
        };
        // While the evaluation of the gate runs, the answer is the evaluation.
        let Some(eval) = answer["id"].as_str() else {
            break answer;
        };
        output::eprint_line(format_args!(
            "axed: {} of {} runs of {} have ended",
            answer["ended"],
            answer["planned"],
            sanitize_line(eval)
        ));
        body = json!({ "eval": eval });
    };
    if args.format.is_json() {
        output::print_json(&promotion)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Promotion {
        version,
        file,
        reason,
        commit,
    } = serde_json::from_value(promotion)?;
    let (name, file) = (sanitize_line(&args.name), sanitize_line(&file));
    output::eprint_line(format_args!(
        "axed: {name} is {} now",
        sanitize_line(&version)
    ));
    match commit {
        None => output::eprint_line(format_args!("axed: {file} is written")),
        Some(text) => {
            let reason = reason.unwrap_or_default();
            output::eprint_line(format_args!(
                "axed: {file} could not be written ({}); commit this text",
                sanitize_line(&reason)
            ));
            output::print_safe(&text)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
