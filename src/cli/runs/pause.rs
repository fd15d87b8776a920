//! `axed runs pause` and `resume`.

use crate::cli::output::{self, FormatArgs};
use crate::cli::runs::view::parse_run;
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Requests to models and tool calls that have begun end first; the run is
waiting after that. It stays paused until axed runs resume, also over a restart
of the daemon.

Example:
  axed runs pause run_019a2b3c"
)]
pub struct Pause {
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed runs resume run_019a2b3c"
)]
pub struct Resume {
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Id of the run, or its first or last digits; also of a child run
    #[arg(value_name = "RUN")]
    id: RunRef,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn pause(args: &Pause) -> anyhow::Result<()> {
    set_paused(&args.run, true).await
}

pub async fn resume(args: &Resume) -> anyhow::Result<()> {
    set_paused(&args.run, false).await
}

async fn set_paused(args: &RunArgs, is_paused: bool) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let run = client.set_paused(&id, is_paused).await?;
    if args.format.is_json() {
        return output::print_json(&run);
    }
    let run = parse_run(run)?;
    let action = if is_paused { "paused" } else { "resumed" };
    output::print_line(format_args!(
        "{} is {action}; it is {} now",
        run.id,
        run.status.as_str()
    ))
}
