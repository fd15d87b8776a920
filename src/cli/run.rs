//! `axed run`: runs one agent, in process or on a daemon, and prints its final text on stdout.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::cli::client::{Client, RunView};
use crate::cli::exit::{self, InvalidInput};
use crate::cli::keys::ClientKey;
use crate::cli::progress::{Progress, Totals};
use crate::cli::signals::Signals;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::temp_dir::TempDir;
use crate::cli::{in_process, output};
use crate::config::Config;
use crate::config::load::Flags;
use crate::domain::attachment::{FILE_TYPES, IMAGE_TYPES, MediaType};
use crate::domain::run::Status;
use crate::domain::terminal_text;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Exit codes:\n\
    0  completed\n\
    1  out of turns, loop, invalid output, bad request, cancelled, interrupted\n\
    2  not found, invalid input, invalid configuration\n\
    3  other provider failures, missing key, timeout\n\
    4  budget exceeded"
)]
pub struct Args {
    /// Name of the agent
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
    /// Deadline of the run
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Label of the run; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    labels: Vec<(String, String)>,
    /// Print the run as JSON, as in the HTTP API
    #[arg(long)]
    json: bool,
    /// Print the prompt, tools and limits; send no request to a model
    #[arg(long)]
    dry_run: bool,
    /// Print turns and child runs on stderr as they happen
    #[arg(long, short)]
    verbose: bool,
    /// Run on this daemon instead of in this process
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "agents", "data"])]
    server: Option<String>,
    #[command(flatten)]
    key: ClientKey,
    #[command(flatten)]
    sources: Sources,
    /// Directory to keep the run and its memory in [default: do not keep the
    /// run; the memory is in the configured data directory]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let body = request_body(&args)?;
    if let Some(server) = &args.server {
        return run_on(&args.key.client(server)?, &args, &body).await;
    }
    let (config, _temp_dir) = in_process_config(&args)?;
    in_process::with_daemon(config, async |client| run_on(client, &args, &body).await).await
}

/// The configuration of a daemon for this run only. The `TempDir` holds its data if they are private.
fn in_process_config(args: &Args) -> anyhow::Result<(Config, Option<TempDir>)> {
    let flags = Flags {
        data: args.data.clone(),
        ..args.sources.clone().flags()
    };
    let mut config = load_quiet_config(&flags)?;
    // The roots protect a daemon from its clients. Here the user is both, and named the directory.
    config
        .tools
        .roots
        .extend(workdir_text(args)?.map(PathBuf::from));
    config.server.max_body = MAX_BODY_BYTES;
    if args.data.is_some() {
        return Ok((config, None));
    }
    let temp_dir = TempDir::new()?;
    // Memories stay in the configured directory: a memory that is removed with the run would be useless.
    config.data.dir = temp_dir.path().join("data");
    Ok((config, Some(temp_dir)))
}

async fn run_on(client: &Client, args: &Args, body: &Value) -> anyhow::Result<ExitCode> {
    if args.dry_run {
        let report = client.dry_run(&args.agent, body).await?;
        print_dry_run(&report, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut progress = if args.verbose {
        Progress::Lines
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
    let view: RunView = serde_json::from_value(run.clone())?;
    print_run(&run, &view, args.json)?;
    let failure = view.error.map(|failure| failure.code);
    Ok(ExitCode::from(exit::code_for_run(view.status, failure)))
}

/// Shows the run's progress and returns its final record.
async fn follow_run(client: &Client, id: &str, progress: &mut Progress) -> anyhow::Result<Value> {
    if !matches!(progress, Progress::Silent) {
        // Progress is optional: if the stream breaks off, the code below still waits for the run.
        let server = client.base_without_slash();
        let _ = client
            .follow(id, |event| progress.on_event(event, &server))
            .await;
    }
    wait_until_finished(client, id).await
}

async fn cancel_run(client: &Client, id: &str) -> anyhow::Result<Value> {
    client.cancel(id, "interrupted at the command line").await?;
    wait_until_finished(client, id).await
}

/// Returns the run's final record.
pub async fn wait_until_finished(client: &Client, id: &str) -> anyhow::Result<Value> {
    loop {
        let run = client.get_run(id, 30).await?;
        let status = run["status"].as_str().unwrap_or_default();
        if status.parse().is_ok_and(Status::is_terminal) {
            return Ok(run);
        }
    }
}

fn print_run(run: &Value, view: &RunView, json: bool) -> anyhow::Result<()> {
    if json {
        output::print_json(run)?;
    } else if let Some(content) = &view.content {
        output::print_document(&format!("{content}\n"))?;
    }
    if view.status != Status::Completed {
        let reason = match (&view.error, &view.cancel_reason) {
            (Some(failure), _) => failure.message.as_str(),
            (None, Some(reason)) => reason.as_str(),
            (None, None) => "no reason was given",
        };
        output::eprint_line(format_args!(
            "axed: run {} {}: {reason}",
            view.id,
            view.status.as_str()
        ));
        if let (Some(partial), false) = (&view.partial_content, json)
            && !partial.is_empty()
        {
            output::eprint_line(format_args!("Last text of the model:\n{partial}"));
        }
    }
    Ok(())
}

fn print_dry_run(report: &Value, json: bool) -> anyhow::Result<()> {
    if json {
        return output::print_json(report);
    }
    for (key, value) in report.as_object().into_iter().flatten() {
        match value {
            Value::String(text) if text.contains('\n') || key == "message" => {
                output::print_line(format_args!("{key}:\n{}\n", text.trim_end()))?;
            }
            Value::String(text) => output::print_line(format_args!("{key}: {text}"))?,
            other => {
                let json = terminal_text::escape_json(&other.to_string());
                output::print_line(format_args!("{key}: {json}"))?;
            }
        }
    }
    Ok(())
}

fn request_body(args: &Args) -> anyhow::Result<Value> {
    let mut body = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(key.to_owned(), value);
        }
    };
    let input = read_input(args)?;
    let input = match args.files.is_empty() {
        true => input.map(Value::from),
        false => Some(input_parts(input, &args.files)?),
    };
    set("input", input);
    set("context", args.context.clone().map(Value::from));
    set("model", args.model.clone().map(Value::from));
    set("timeout", args.timeout.map(Value::from));
    set("workdir", workdir_text(args)?.map(Value::from));
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

fn read_input(args: &Args) -> anyhow::Result<Option<String>> {
    let stdin = std::io::stdin();
    match args.input.as_deref() {
        Some("-") => {}
        None if !stdin.is_terminal() => {}
        input => return Ok(input.map(str::to_owned)),
    }
    let mut bytes = Vec::new();
    stdin
        .take(MAX_INPUT_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .context("could not read the input from stdin")?;
    if bytes.len() > MAX_INPUT_BYTES {
        let message = format!(
            "the input on stdin is larger than {} MiB, the maximum for a run",
            MAX_INPUT_BYTES >> 20
        );
        return Err(InvalidInput(message).into());
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| InvalidInput(format!("the input on stdin is not UTF-8: {error}")))?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// The input as parts: the text, then the files.
fn input_parts(text: Option<String>, files: &[PathBuf]) -> anyhow::Result<Value> {
    let text = text.map(|text| json!({"type": "text", "text": text}));
    let files = files.iter().map(|file| file_part(file));
    let parts: anyhow::Result<Vec<Value>> = text.map(Ok).into_iter().chain(files).collect();
    Ok(parts?.into())
}

fn file_part(file: &Path) -> anyhow::Result<Value> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|opened| {
            opened
                .take(MAX_INPUT_BYTES as u64 + 1)
                .read_to_end(&mut bytes)
        })
        .map_err(|error| InvalidInput(format!("could not read {}: {error}", file.display())))?;
    let is_large = bytes.len() > MAX_INPUT_BYTES;
    let detected = MediaType::detect(&bytes).filter(|_| !is_large);
    let Some(media_type) = detected else {
        let reason = match is_large {
            true => format!("larger than {} MiB", MAX_INPUT_BYTES >> 20),
            false => format!("not of a supported type: {IMAGE_TYPES}, {FILE_TYPES}"),
        };
        return Err(InvalidInput(format!("{} is {reason}", file.display())).into());
    };
    let mut part = json!({
        "type": media_type.part_type(), "media_type": media_type, "data": STANDARD.encode(&bytes),
    });
    let name = file.file_name().and_then(OsStr::to_str);
    if let Some(name) = name.filter(|_| !media_type.is_image()) {
        part["name"] = name.into();
    }
    Ok(part)
}

/// Maximum size of stdin or a file in bytes. A remote daemon rejects what exceeds its `server.max_body`.
const MAX_INPUT_BYTES: usize = 64 << 20;
/// More than any body with such an input: JSON needs at most six bytes for one.
const MAX_BODY_BYTES: usize = 8 * MAX_INPUT_BYTES;

/// In process, a relative path is relative to the current directory; a remote daemon gets it unchanged.
fn workdir_text(args: &Args) -> anyhow::Result<Option<String>> {
    let Some(dir) = &args.workdir else {
        return Ok(None);
    };
    let dir = match args.server {
        Some(_) => dir.clone(),
        None => std::path::absolute(dir)?,
    };
    match dir.into_os_string().into_string() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(InvalidInput("--workdir must be UTF-8".to_owned()).into()),
    }
}

pub fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("a label must be KEY=VALUE".to_owned()),
    }
}
