//! `axed runs cancel` and `delete`.

use crate::cli::output::{self, FormatArgs};
use crate::cli::run;
use crate::cli::runs::view::parse_run;
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed runs cancel run_019a2b3c --reason \"wrong input\" --wait"
)]
pub struct Cancel {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Reason for the run's record
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "cancelled at the command line"
    )]
    reason: String,
    /// Wait until the run has ended
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed runs delete run_019a2b3c"
)]
pub struct Delete {
    /// Ids of root runs that have ended, or their first or last digits
    #[arg(value_name = "RUN", required = true)]
    ids: Vec<RunRef>,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn cancel(args: &Cancel) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let mut run = client.cancel(&id, &args.reason).await?;
    if args.wait {
        run = run::wait_until_finished(&client, &id).await?;
    }
    if args.format.is_json() {
        return output::print_json(&run);
    }
    let run = parse_run(run)?;
    output::print_line(format_args!("{} is {}", run.id, run.status.as_str()))
}

/// Deletes none if one of the arguments names no run.
pub async fn delete(args: &Delete) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let mut ids = Vec::new();
    for id in &args.ids {
        ids.push(client.find_run(id).await?);
    }
    for id in ids {
        client.delete_run(&id).await?;
        output::print_line(format_args!("{id} is deleted"))?;
    }
    Ok(())
}
