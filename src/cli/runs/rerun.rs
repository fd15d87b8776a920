//! `axed runs rerun`: requests a recorded run again, as a fork at its start.

use std::process::ExitCode;

use serde_json::json;

use crate::cli::exit::InvalidInput;
use crate::cli::output::FormatArgs;
use crate::cli::runs::fork::ForkCommand;
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The new run has the recorded input, images, files, context, earlier messages,
labels, model, params, timeout and budget of RUN, and the agent's definition of
today. It is not in the session of RUN; webhooks of the request are not
repeated.

Examples:
  axed runs rerun run_019a2b3c
  axed runs rerun run_019a2b3c --model openai/gpt-6-sol --watch"
)]
pub struct Rerun {
    /// Id of a root run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Use this model instead
    #[arg(long, value_name = "PROVIDER/MODEL")]
    model: Option<String>,
    /// Print what the new run does until it ends, then its final text
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn rerun(args: &Rerun) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let run = client.get_run(&id, 0).await?;
    if let Some(parent) = run["parent_id"].as_str() {
        let root = run["root_id"].as_str().unwrap_or(parent);
        let why = format!(
            "could not repeat {id}: its parent {parent} started it; repeat the root run {root}"
        );
        return Err(InvalidInput(why).into());
    }
    let mut body = json!({"at": {"turn": 0}, "definition": "current", "memory": true});
    if let Some(model) = &args.model {
        body["edit"] = json!({ "model": model });
    }
    let command = ForkCommand {
        body,
        relation: "repeats",
        watch: args.watch,
        format: args.format,
    };
    command.send(&client, &id).await
}
