//! `axed eval`: evaluates an agent over cases, on a daemon or in this process, and reports what that shows.

use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::catalog::datasets;
use crate::cli::client::Client;
use crate::cli::eval::report::EvalReport;
use crate::cli::exit::InvalidInput;
use crate::cli::in_process;
use crate::cli::output;
use crate::cli::reconnects::Reconnects;
use crate::cli::runs::list::parse_since;
use crate::cli::server::OptionalDaemonArgs;
use crate::cli::sources::Sources;
use crate::config::Config;
use crate::domain::counted::counted;
use crate::domain::dataset::{self, DatasetError};
use crate::domain::evaluation::{self, EvalState};

mod html;
mod junit;
mod report;
mod table;

/// Seconds that one look at the evaluation waits for its end.
const POLL_SECONDS: u64 = 1;
/// Bytes of a dataset's file that is sent to a daemon; the daemon may take fewer.
const MAX_FILE: usize = dataset::MAX_BYTES;
/// Cases of one page.
const PAGE_CASES: usize = 100;
/// Cases that a report lists.
const MAX_LISTED_CASES: usize = 2_000;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "AGENT is the new version: an agent, or a file with one. A difference is the new
version's value minus that of --against. Without --server the evaluation runs in
this process, with the record in --data. With --tools none a call of a tool ends
its case as diverged. With --tools recorded, the default of cases that come from
runs, it gets the result that the record of the run has. Other agents are called.

Examples:
  axed eval planner --dataset release
  axed eval agents/planner.toml --against planner --dataset release \\
      --gate 'grounded >= -0.02' --gate 'cost <= 1.1x' --html report.html
  axed eval agents/planner.toml --since 30d --against recorded --server URL

Exit codes:
  0  completed, and every gate held
  1  a gate fell
  2  agent, dataset, scorer or gate not found or invalid
  3  stopped by its budget or a provider, or cancelled"
)]
pub struct Args {
    /// The agent in its new version, or its file
    #[arg(value_name = "AGENT|FILE")]
    agent: String,
    /// Name of a dataset, or its file
    #[arg(long, value_name = "DATASET|FILE", required_unless_present = "since")]
    dataset: Option<String>,
    /// Take the agent's runs since then as cases: an age such as 30d, a date, or a time
    #[arg(long, value_name = "WHEN", value_parser = parse_since, conflicts_with = "dataset")]
    since: Option<String>,
    /// With --since, at most so many of the newest runs [default: 1000]
    #[arg(long, value_name = "N", requires = "since", value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: Option<u32>,
    /// What it is compared with: an agent, a file, sha256:... of the record, or recorded
    #[arg(long, value_name = "AGENT|FILE|VERSION")]
    against: Option<String>,
    /// Use this scorer; repeatable [default: all of the agent's]
    #[arg(long = "scorer", value_name = "NAME")]
    scorers: Vec<String>,
    /// Calls of tools: none, recorded or live
    #[arg(long, value_name = "USE")]
    tools: Option<String>,
    /// Calls that are not recorded: stop, safe or agent:NAME [default: stop]
    #[arg(long, value_name = "USE")]
    unknown: Option<String>,
    /// A regular expression of what makes no difference in the arguments of calls; repeatable
    #[arg(long = "ignore", value_name = "REGEX", allow_hyphen_values = true)]
    ignore: Vec<String>,
    /// Run each case this often
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,
    /// Stop when this much is spent
    #[arg(long, value_name = "USD")]
    budget: Option<f64>,
    /// A condition for the result; repeatable
    #[arg(long = "gate", value_name = "EXPR", allow_hyphen_values = true)]
    gates: Vec<String>,
    /// Print the evaluation as JSON
    #[arg(long)]
    json: bool,
    /// Write the gates as JUnit XML to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write a report for a browser to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Keep the runs in this data directory
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    daemon: OptionalDaemonArgs,
}

/// The body of the request.
#[derive(Serialize)]
struct Request<'r> {
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'r str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    definition: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dataset: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cases: Option<Vec<Box<RawValue>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<&'r str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scorers: Option<&'r [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'r str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<&'r str>,
    ignore: &'r [String],
    repeat: u32,
    budget: Option<f64>,
    gates: &'r [String],
}

pub async fn eval(args: Args) -> anyhow::Result<ExitCode> {
    let has_local_flags = args.sources.are_given() || args.data.is_some();
    let dataset = args.dataset.as_deref();
    let dataset_file = dataset.and_then(|dataset| file_of(dataset, ".jsonl"));
    match args.daemon.client(has_local_flags)? {
        Some(client) => {
            let mut request = request(&args)?;
            match dataset_file {
                Some(file) => request.cases = Some(read_cases(file)?),
                None => request.dataset = args.dataset.clone(),
            }
            run(&args, &client, &request).await
        }
        None => {
            require_record(&args)?;
            let data = args.data.clone();
            let (mut config, _temp_dir) = in_process::private_config(args.sources.clone(), data)?;
            let mut request = request(&args)?;
            request.dataset = match dataset_file {
                Some(file) => Some(local_dataset(&mut config, file)?),
                None => args.dataset.clone(),
            };
            let action = async |client: &Client| run(&args, client, &request).await;
            in_process::with_daemon(config, action).await
        }
    }
}

/// Without a data directory there are no recorded runs in this process.
fn require_record(args: &Args) -> Result<(), InvalidInput> {
    let is_recorded = |value: &Option<String>| value.as_deref() == Some(evaluation::RECORDED);
    let needing = [
        (args.since.is_some(), "--since"),
        (is_recorded(&args.against), "--against recorded"),
        (is_recorded(&args.tools), "--tools recorded"),
    ];
    match needing.iter().find(|(is_given, _)| *is_given) {
        Some((_, flag)) if args.data.is_none() => Err(InvalidInput(format!(
            "{flag} reads the record: name a daemon with --server, or a data directory with --data"
        ))),
        _ => Ok(()),
    }
}

fn request(args: &Args) -> anyhow::Result<Request<'_>> {
    let definition = file_of(&args.agent, ".toml").map(read_text).transpose()?;
    let against = args.against.as_deref();
    let against = against.map(|against| match file_of(against, ".toml") {
        Some(file) => read_text(file).map(|text| serde_json::json!({ "definition": text })),
        None => Ok(against.into()),
    });
    Ok(Request {
        agent: definition.is_none().then_some(&*args.agent),
        definition,
        dataset: None,
        cases: None,
        since: args.since.as_deref(),
        limit: args.limit,
        against: against.transpose()?,
        scorers: (!args.scorers.is_empty()).then_some(&*args.scorers),
        tools: args.tools.as_deref(),
        unknown: args.unknown.as_deref(),
        ignore: &args.ignore,
        repeat: args.repeat,
        budget: args.budget,
        gates: &args.gates,
    })
}

/// The file that the user named instead of a name.
fn file_of<'a>(named: &'a str, suffix: &str) -> Option<&'a Path> {
    (named.contains('/') || named.ends_with(suffix)).then_some(Path::new(named))
}

fn read_text(file: &Path) -> Result<String, InvalidInput> {
    std::fs::read_to_string(file).map_err(|error| InvalidInput::unreadable(file, &error))
}

/// Has the daemon in this process read the file as one of its datasets, which may be larger than a request.
fn local_dataset(config: &mut Config, file: &Path) -> Result<String, InvalidInput> {
    file.metadata()
        .map_err(|error| InvalidInput::unreadable(file, &error))?;
    let name = file.file_stem().and_then(|stem| stem.to_str());
    let name = name.filter(|_| file.extension().is_some_and(|it| it == "jsonl"));
    let invalid = || InvalidInput(format!("{} is no file NAME.jsonl", file.display()));
    let name = name.ok_or_else(invalid)?.to_owned();
    let dir = file.parent().unwrap_or(Path::new(""));
    let dir = match dir.as_os_str().is_empty() {
        true => Path::new("."),
        false => dir,
    };
    datasets::path(dir, &name).map_err(|error| InvalidInput(error.to_string()))?;
    config.agents.datasets = Some(dir.to_owned());
    Ok(name)
}

/// The lines of a dataset's file, for a daemon that does not have it.
fn read_cases(file: &Path) -> Result<Vec<Box<RawValue>>, InvalidInput> {
    let text = read_text(file)?;
    let invalid = |error: DatasetError| InvalidInput(format!("{}: {error}", file.display()));
    if text.len() > MAX_FILE {
        return Err(invalid(DatasetError::of_file("is too large")));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines = (1..).zip(text.lines());
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let cases = lines.map(|(number, line)| {
        serde_json::from_str(line.trim()).map_err(|error| {
            invalid(DatasetError {
                line: Some(number),
                message: format!("is not JSON: {error}"),
            })
        })
    });
    cases.collect()
}

async fn run(args: &Args, client: &Client, request: &Request<'_>) -> anyhow::Result<ExitCode> {
    let accepted = client.create_eval(request).await?;
    output::eprint_line(format_args!("axed: {}", describe_plan(&accepted)));
    let id = accepted["id"].as_str().unwrap_or_default();
    let eval = wait(client, id).await?;
    let mut report = EvalReport::new(eval)?;
    if let Some(path) = &args.junit {
        write_file(path, &junit::to_xml(&report))?;
    }
    if let Some(path) = &args.html {
        report.cases = cases(client, id).await?;
        write_file(path, &html::to_html(&report))?;
    }
    match args.json {
        true => output::print_json(&report.eval)?,
        false => table::print(&report)?,
    }
    Ok(ExitCode::from(exit_code(&report)))
}

fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
}

/// `eval_…: 200 runs, estimate 1.84 USD, cap 5 USD`.
fn describe_plan(eval: &Value) -> String {
    let usd = |field: &str, missing: &str| match eval[field].as_f64() {
        Some(usd) => format!("{} USD", report::short(usd)),
        None => missing.to_owned(),
    };
    format!(
        "{}: {}, estimate {}, cap {}",
        eval["id"].as_str().unwrap_or_default(),
        counted(eval["planned"].as_u64().unwrap_or_default(), "run"),
        usd("estimate_usd", "unknown"),
        usd("cap_usd", "none")
    )
}

/// Waits for the end; the progress is on stderr. A daemon that is restarted goes on.
async fn wait(client: &Client, id: &str) -> anyhow::Result<Value> {
    let mut reconnects = Reconnects::to_known_daemon();
    let is_terminal = stderr().is_terminal();
    let mut shown = None;
    loop {
        let eval = match client.get_eval(id, POLL_SECONDS).await {
            Ok(eval) => eval,
            Err(error) => {
                reconnects.pause_after(error).await?;
                continue;
            }
        };
        reconnects.on_success();
        let number = |field: &str| eval[field].as_u64().unwrap_or_default();
        let (ended, planned) = (number("ended"), number("planned"));
        let spent = report::short(eval["spent_usd"].as_f64().unwrap_or_default());
        let tenth = (ended * 10).checked_div(planned);
        if is_terminal {
            output::eprint_status(format_args!(
                "axed: {ended} of {} ended, {spent} USD",
                counted(planned, "run")
            ));
        } else if tenth != shown {
            shown = tenth;
            output::eprint_line(format_args!(
                "axed: {ended} of {} ended, {spent} USD",
                counted(planned, "run")
            ));
        }
        if !eval["finished_at"].is_null() {
            if is_terminal {
                output::eprint_status(format_args!(""));
            }
            return Ok(eval);
        }
    }
}

/// The first cases of the evaluation.
async fn cases(client: &Client, id: &str) -> anyhow::Result<Vec<Value>> {
    let (mut cases, mut cursor) = (Vec::new(), None::<String>);
    loop {
        let page = client.get_eval_cases(id, PAGE_CASES, cursor.as_deref());
        let mut page = page.await?;
        if let Value::Array(data) = page["data"].take() {
            cases.extend(data);
        }
        cursor = page["next_cursor"].as_str().map(str::to_owned);
        if cursor.is_none() || cases.len() >= MAX_LISTED_CASES {
            return Ok(cases);
        }
    }
}

fn exit_code(report: &EvalReport) -> u8 {
    match report.state {
        EvalState::Completed => u8::from(report.result.gates.iter().any(|gate| !gate.held)),
        _ => 3,
    }
}
