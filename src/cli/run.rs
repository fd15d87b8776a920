//! `axed run`: runs one agent, in process or on a daemon, and prints its final text on stdout.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::cli::age::parse_seconds;
use crate::cli::approval_prompt::ApprovalPrompt;
use crate::cli::client::{Client, ReceivedEvent, RunView};
use crate::cli::exit::{self, InvalidInput};
use crate::cli::output::FormatArgs;
use crate::cli::progress::{Progress, Totals};
use crate::cli::reconnects::Reconnects;
use crate::cli::server::OptionalDaemonArgs;
use crate::cli::signals::Signals;
use crate::cli::sources::Sources;
use crate::cli::{dry_run, in_process, output, run_input};
use crate::config::Config;
use crate::domain::run::Status;

/// How long the daemon keeps a request for a run that has not ended.
const MAX_WAIT_SECONDS: u64 = 30;
/// How long the progress of a run that has ended is waited for.
pub const LAST_EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Without --server or AXED_SERVER the agent runs in this process, with a private
store that is removed at the end; --data DIR keeps the record and the memory.

Examples:
  axed run planner \"Prepare the release of version 2.0\"
  git diff | axed run reviewer --timeout 5m
  axed run reader \"Which colours?\" --file photo.png -o json | jq -r .content
  axed run planner --dry-run
  AXED_SERVER=http://127.0.0.1:8080 axed run planner \"Plan it\" -v

Exit codes:
  0  completed
  1  out of turns, loop, invalid output, bad request, cancelled, interrupted
  2  not found, invalid input, invalid configuration
  3  other provider failures, missing key, timeout
  4  budget exceeded"
)]
pub struct Args {
    /// Name of the agent; axed agents list shows them
    agent: String,
    /// Input of the run; "-", or nothing if stdin is piped, reads stdin
    input: Option<String>,
    /// Text to append to the input as context
    #[arg(long, value_name = "TEXT")]
    context: Option<String>,
    /// Image (PNG, JPEG, WebP, GIF) or PDF to add to the input; repeatable
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Use this model instead of the agent's own
    #[arg(long, value_name = "PROVIDER/MODEL")]
    model: Option<String>,
    /// Directory that the agent's file tools use
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Deadline of the run, such as 90, 90s, 2m or 1h30m
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    timeout: Option<u64>,
    /// Label of the run; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    labels: Vec<(String, String)>,
    /// Print the prompt, tools and limits; send no request to a model
    #[arg(long)]
    dry_run: bool,
    /// Print turns, tool calls and child runs on stderr as they happen
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: OptionalDaemonArgs,
    #[command(flatten)]
    sources: Sources,
    /// Keep the run and the agents' memory in this directory [default: keep
    /// neither]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let has_local_flags = args.data.is_some() || args.sources.are_given();
    if let Some(client) = args.daemon.client(has_local_flags)? {
        let body = request_body(&args, true)?;
        return run_on(&client, &args, &body).await;
    }
    let body = request_body(&args, false)?;
    let (config, temp_dir) = in_process_config(&args)?;
    in_process::with_daemon(config, async |client| {
        if temp_dir.is_some() && !args.dry_run {
            in_process::warn_of_lost_memory(client, &args.agent).await;
        }
        run_on(client, &args, &body).await
    })
    .await
}

/// The configuration of a daemon for this run only. The `TempDir` holds its data if they are private.
fn in_process_config(args: &Args) -> anyhow::Result<(Config, Option<TempDir>)> {
    let (mut config, temp_dir) =
        in_process::private_config(args.sources.clone(), args.data.clone())?;
    // The roots protect a daemon from its clients. Here the user is both, and named the directory.
    config
        .tools
        .roots
        .extend(workdir_text(args, false)?.map(PathBuf::from));
    config.server.max_body = run_input::MAX_BODY_BYTES;
    Ok((config, temp_dir))
}

async fn run_on(client: &Client, args: &Args, body: &Value) -> anyhow::Result<ExitCode> {
    if args.dry_run {
        let report = client.dry_run(&args.agent, body).await?;
        match args.format.is_json() {
            true => output::print_json(&report)?,
            false => dry_run::print(&report)?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut progress = if args.verbose {
        Progress::Lines(Box::default())
    } else if std::io::stderr().is_terminal() {
        Progress::Line(Totals::default())
    } else {
        Progress::Silent
    };
    // Signals are handled before the run exists: an interrupt must not leave a run behind.
    let mut signals = Signals::new()?;
    let accepted = client.create_run(&args.agent, body).await?;
    let id = accepted["id"].as_str().unwrap_or_default().to_owned();
    let finished = tokio::select! {
        finished = follow_run(client, &id, &mut progress) => finished,
        () = signals.wait_for_stop() => tokio::select! {
            finished = cancel_run(client, &id) => finished,
            () = signals.wait_for_stop() => Err(anyhow::anyhow!("stopped without waiting for run {id} to end")),
        },
    };
    progress.clear();
    let run = finished?;
    if let Some(data) = &args.data {
        output::eprint_line(format_args!(
            "axed: run {id} is kept in {dir}; to see it: axed serve --data {dir}",
            dir = data.display()
        ));
    }
    print_run(&run, args.format.is_json())
}

/// Shows the run's progress, has its pending calls decided, and returns its final record.
async fn follow_run(client: &Client, id: &str, progress: &mut Progress) -> anyhow::Result<Value> {
    let is_asking = Cell::new(false);
    let mut prompt = ApprovalPrompt::new(client, &is_asking);
    let finished = prompt.wait_until_finished(id);
    if matches!(progress, Progress::Silent) {
        return finished.await;
    }
    // Progress is optional: without its events the run is waited for all the same, and its daemon's absence is reported.
    let mut reconnects = Reconnects::silent();
    let on_event = |received: &ReceivedEvent| {
        if let Some(event) = &received.event {
            progress.on_event(event, is_asking.get());
        }
    };
    let followed = reconnects.follow(client, id, 0, on_event);
    tokio::pin!(finished, followed);
    tokio::select! {
        run = &mut finished => {
            if run.is_ok() {
                // The last events are shown before the end.
                let _ = tokio::time::timeout(LAST_EVENTS_TIMEOUT, followed).await;
            }
            run
        }
        _ = &mut followed => finished.await,
    }
}

async fn cancel_run(client: &Client, id: &str) -> anyhow::Result<Value> {
    client.cancel(id, "interrupted at the command line").await?;
    wait_until_finished(client, id).await
}

/// Returns the final record of a run at a daemon that has answered before.
pub async fn wait_until_finished(client: &Client, id: &str) -> anyhow::Result<Value> {
    let mut reconnects = Reconnects::to_known_daemon();
    loop {
        let run = reconnects.get_run(client, id, MAX_WAIT_SECONDS).await?;
        if is_finished(&run) {
            return Ok(run);
        }
    }
}

/// Whether a run, as the API describes it, has ended.
pub fn is_finished(run: &Value) -> bool {
    let status = run["status"].as_str().unwrap_or_default();
    status.parse().is_ok_and(Status::is_terminal)
}

/// Prints the final text of a run that has ended, and on stderr why it did not complete. Returns its exit code.
pub fn print_run(run: &Value, json: bool) -> anyhow::Result<ExitCode> {
    let view: RunView = serde_json::from_value(run.clone())?;
    if json {
        output::print_json(run)?;
    } else if let Some(content) = &view.content {
        output::print_document(&format!("{content}\n"))?;
    }
    for warning in &view.warnings {
        output::eprint_line(format_args!("warning: {}", warning.message));
    }
    if view.status != Status::Completed {
        output::eprint_line(format_args!("axed: {}", view.outcome()));
        if let (Some(partial), false) = (&view.partial_content, json)
            && !partial.is_empty()
        {
            output::eprint_line(format_args!("Last text of the model:\n{partial}"));
        }
    }
    Ok(exit_code(&view))
}

/// The exit code for a run that has ended.
pub fn exit_code(run: &RunView) -> ExitCode {
    let failure = run.error.as_ref().map(|failure| failure.code);
    ExitCode::from(exit::code_for_run(run.status, failure))
}

fn request_body(args: &Args, is_remote: bool) -> anyhow::Result<Value> {
    let mut body = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(key.to_owned(), value);
        }
    };
    let input = run_input::read(args.input.as_deref(), !args.files.is_empty())?;
    let input = match args.files.is_empty() {
        true => input.map(Value::from),
        false => Some(run_input::with_files(input, &args.files)?),
    };
    set("input", input);
    set("context", args.context.clone().map(Value::from));
    set("model", args.model.clone().map(Value::from));
    set("timeout", args.timeout.map(Value::from));
    set("workdir", workdir_text(args, is_remote)?.map(Value::from));
    if !args.labels.is_empty() {
        let labels: Map<_, _> = args
            .labels
            .iter()
            .map(|(key, value)| (key.clone(), json!(value)))
            .collect();
        set("labels", Some(labels.into()));
    }
    Ok(body.into())
}

/// In process, a relative path is relative to the current directory; a remote daemon gets it unchanged.
fn workdir_text(args: &Args, is_remote: bool) -> anyhow::Result<Option<String>> {
    let Some(dir) = &args.workdir else {
        return Ok(None);
    };
    let dir = match is_remote {
        true => dir.clone(),
        false => std::path::absolute(dir).context("--workdir is empty")?,
    };
    match dir.into_os_string().into_string() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(InvalidInput("--workdir must be UTF-8".to_owned()).into()),
    }
}

pub fn parse_label(text: &str) -> Result<(String, String), String> {
    parse_pair(text).ok_or_else(|| "a label must be KEY=VALUE".to_owned())
}

/// A name that is not empty, `=`, and any text.
pub fn parse_pair(text: &str) -> Option<(String, String)> {
    let (name, value) = text.split_once('=')?;
    (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
}
