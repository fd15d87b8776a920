//! `axed run`: one run, in process or on a daemon, and its final text on stdout.

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
use crate::cli::exit::{self, Invalid};
use crate::cli::keys::Key;
use crate::cli::progress::{Progress, Totals};
use crate::cli::scratch::Scratch;
use crate::cli::signals::Signals;
use crate::cli::{Sources, local, output, quiet_config};
use crate::config::Config;
use crate::config::load::Flags;
use crate::domain::attachment::{FILES, IMAGES, MediaType};
use crate::domain::run::Status;
use crate::domain::terminal_text;

/// Exit codes: 0 completed; 1 out of turns, loop, bad request, cancelled; 2 not found, invalid, configuration; 3 provider,
/// missing key, timeout; 4 budget.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 completed; 1 out of turns, loop, invalid output, bad request, cancelled, interrupted;\n\
    2 not found, invalid, configuration; 3 other provider failures, missing key, timeout; 4 budget exceeded."
)]
pub struct Args {
    /// The agent
    agent: String,
    /// What it is given; "-", or nothing where stdin is not a terminal, reads stdin
    input: Option<String>,
    /// Text that is appended to the input as its context
    #[arg(long, value_name = "TEXT")]
    context: Option<String>,
    /// A picture (PNG, JPEG, WebP, GIF) or a PDF file that is shown with the input; may be given several times
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Ask this model instead of the agent's own
    #[arg(long, value_name = "PROVIDER/MODEL")]
    model: Option<String>,
    /// The directory of the agent's files
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// The run's deadline
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// A label of the run; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// Print the run as JSON, as the HTTP API shows it
    #[arg(long)]
    json: bool,
    /// Show the prompt, the tools and the limits, and ask no model
    #[arg(long)]
    dry_run: bool,
    /// Tell turns and child runs on stderr as they happen
    #[arg(long, short)]
    verbose: bool,
    /// Run on this daemon instead of in this process
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "agents", "data"])]
    server: Option<String>,
    #[command(flatten)]
    key: Key,
    #[command(flatten)]
    sources: Sources,
    /// Keep the run and its memory in this directory [default: the run in a private one that is removed at the end, the
    /// memory in the configured data directory]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

/// Runs an agent to its end.
pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let body = body(&args)?;
    if let Some(server) = &args.server {
        return on(&args.key.client(server)?, &args, &body).await;
    }
    let (config, _scratch) = in_process(&args)?;
    local::with_daemon(config, async |client| on(client, &args, &body).await).await
}

/// The configuration of a daemon that lives for this run only, and its data where they are private.
fn in_process(args: &Args) -> anyhow::Result<(Config, Option<Scratch>)> {
    let flags = Flags {
        data: args.data.clone(),
        ..args.sources.clone().flags()
    };
    let mut config = quiet_config(&flags)?;
    // The roots guard a daemon from its clients. Here both are the same person, who named the directory.
    config.tools.roots.extend(workdir(args)?.map(PathBuf::from));
    config.server.max_body = MAX_BODY;
    if args.data.is_some() {
        return Ok((config, None));
    }
    let scratch = Scratch::new()?;
    // Memories stay where a daemon of this configuration keeps them: what was removed with the run is no memory.
    config.data.dir = scratch.path().join("data");
    Ok((config, Some(scratch)))
}

async fn on(client: &Client, args: &Args, body: &Value) -> anyhow::Result<ExitCode> {
    if args.dry_run {
        let dry = client.dry_run(&args.agent, body).await?;
        print_dry_run(&dry, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut progress = if args.verbose {
        Progress::Lines
    } else if std::io::stderr().is_terminal() {
        Progress::Line(Totals::default())
    } else {
        Progress::Silent
    };
    // Heard from before the run exists: an interrupt never leaves a run behind that nobody waits for.
    let mut signals = Signals::new()?;
    let accepted = client.create(&args.agent, body).await?;
    let id = accepted["id"].as_str().unwrap_or_default().to_owned();
    let settled = tokio::select! {
        settled = wait(client, &id, &mut progress) => settled,
        () = signals.stop() => tokio::select! {
            settled = stop(client, &id) => settled,
            () = signals.stop() => Err(anyhow::anyhow!("stopped without waiting for run {id} to end")),
        },
    };
    progress.done();
    let run = settled?;
    let view: RunView = serde_json::from_value(run.clone())?;
    print(&run, &view, args.json)?;
    let failure = view.error.map(|failure| failure.code);
    Ok(ExitCode::from(exit::of_run(view.status, failure)))
}

/// Follows the run to its end and returns it.
async fn wait(client: &Client, id: &str, progress: &mut Progress) -> anyhow::Result<Value> {
    if !matches!(progress, Progress::Silent) {
        // Progress is a courtesy: where it breaks off, the run is still waited for below.
        let server = client.address();
        let _ = client
            .follow(id, |event| progress.hear(event, &server))
            .await;
    }
    settle(client, id).await
}

async fn stop(client: &Client, id: &str) -> anyhow::Result<Value> {
    client.cancel(id, "interrupted at the command line").await?;
    settle(client, id).await
}

/// Waits for the run's end and returns its record.
pub async fn settle(client: &Client, id: &str) -> anyhow::Result<Value> {
    loop {
        let run = client.run(id, 30).await?;
        let status = run["status"].as_str().unwrap_or_default();
        if status.parse().is_ok_and(Status::is_terminal) {
            return Ok(run);
        }
    }
}

fn print(run: &Value, view: &RunView, json: bool) -> anyhow::Result<()> {
    if json {
        output::json(run)?;
    } else if let Some(content) = &view.content {
        output::document(&format!("{content}\n"))?;
    }
    if view.status != Status::Completed {
        let why = match (&view.error, &view.cancel_reason) {
            (Some(failure), _) => failure.message.as_str(),
            (None, Some(reason)) => reason.as_str(),
            (None, None) => "no reason was given",
        };
        output::note(format_args!(
            "axed: run {} {}: {why}",
            view.id,
            view.status.as_str()
        ));
        if let (Some(partial), false) = (&view.partial_content, json)
            && !partial.is_empty()
        {
            output::note(format_args!("The last that it said:\n{partial}"));
        }
    }
    Ok(())
}

fn print_dry_run(dry: &Value, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(dry);
    }
    for (key, value) in dry.as_object().into_iter().flatten() {
        match value {
            Value::String(text) if text.contains('\n') || key == "message" => {
                output::line(format_args!("{key}:\n{}\n", text.trim_end()))?;
            }
            Value::String(text) => output::line(format_args!("{key}: {text}"))?,
            other => {
                let json = terminal_text::json(&other.to_string());
                output::line(format_args!("{key}: {json}"))?;
            }
        }
    }
    Ok(())
}

fn body(args: &Args) -> anyhow::Result<Value> {
    let mut body = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(key.to_owned(), value);
        }
    };
    let input = input(args)?;
    let input = match args.files.is_empty() {
        true => input.map(Value::from),
        false => Some(with_files(input, &args.files)?),
    };
    set("input", input);
    set("context", args.context.clone().map(Value::from));
    set("model", args.model.clone().map(Value::from));
    set("timeout", args.timeout.map(Value::from));
    set("workdir", workdir(args)?.map(Value::from));
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

fn input(args: &Args) -> anyhow::Result<Option<String>> {
    let stdin = std::io::stdin();
    match args.input.as_deref() {
        Some("-") => {}
        None if !stdin.is_terminal() => {}
        given => return Ok(given.map(str::to_owned)),
    }
    let mut bytes = Vec::new();
    stdin
        .take(MAX_STDIN as u64 + 1)
        .read_to_end(&mut bytes)
        .context("could not read the input from stdin")?;
    if bytes.len() > MAX_STDIN {
        let why = format!(
            "the input on stdin is larger than {} MiB, which is the most that a run takes",
            MAX_STDIN >> 20
        );
        return Err(Invalid(why).into());
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| Invalid(format!("the input on stdin is not UTF-8: {error}")))?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// The input as parts: its text, then the files.
fn with_files(text: Option<String>, files: &[PathBuf]) -> anyhow::Result<Value> {
    let text = text.map(|text| json!({"type": "text", "text": text}));
    let files = files.iter().map(|file| part(file));
    let parts: anyhow::Result<Vec<Value>> = text.map(Ok).into_iter().chain(files).collect();
    Ok(parts?.into())
}

fn part(file: &Path) -> anyhow::Result<Value> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|opened| opened.take(MAX_STDIN as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| Invalid(format!("could not read {}: {error}", file.display())))?;
    let is_large = bytes.len() > MAX_STDIN;
    let kind = MediaType::of(&bytes).filter(|_| !is_large);
    let Some(media_type) = kind else {
        let why = match is_large {
            true => format!("larger than {} MiB", MAX_STDIN >> 20),
            false => format!("none of the kinds that are taken: {IMAGES}, {FILES}"),
        };
        return Err(Invalid(format!("{} is {why}", file.display())).into());
    };
    let mut part = json!({
        "type": media_type.kind(), "media_type": media_type, "data": STANDARD.encode(&bytes),
    });
    let name = file.file_name().and_then(OsStr::to_str);
    if let Some(name) = name.filter(|_| !media_type.is_image()) {
        part["name"] = name.into();
    }
    Ok(part)
}

/// Most bytes of stdin. A daemon elsewhere refuses what is above its `server.max_body` in its own words.
const MAX_STDIN: usize = 64 << 20;
/// Above every body that such an input makes: in JSON one byte takes six at most.
const MAX_BODY: usize = 8 * MAX_STDIN;

/// In process a relative directory is this process's; a daemon elsewhere is told what was written.
fn workdir(args: &Args) -> anyhow::Result<Option<String>> {
    let Some(dir) = &args.workdir else {
        return Ok(None);
    };
    let dir = match args.server {
        Some(_) => dir.clone(),
        None => std::path::absolute(dir)?,
    };
    match dir.into_os_string().into_string() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(Invalid("--workdir must be UTF-8".to_owned()).into()),
    }
}

/// Reads `KEY=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("a label is KEY=VALUE".to_owned()),
    }
}
