//! `axed dataset add`: appends recorded runs to a dataset.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::catalog::datasets;
use crate::cli::data;
use crate::cli::dataset::source::{Source, Wanted};
use crate::cli::dataset::{error_line, request_check};
use crate::cli::exit::InvalidInput;
use crate::cli::in_process::mention_server;
use crate::cli::output::{self, FormatArgs};
use crate::cli::runs::list::{MAX_PAGE_RUNS, parse_limit, parse_since, status_parser};
use crate::cli::server::DaemonArgs;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::whole_file;
use crate::config::Config;
use crate::config::load::Flags;
use crate::domain::agent::is_agent_name;
use crate::domain::counted::counted;
use crate::domain::dataset::{self, CheckRequest, DatasetError};
use crate::domain::run::{RunId, Status};
use crate::store::open;
use crate::web::evals::recorded_case::{self, Unsuitable, is_marked};

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "A case has the input of a run, with its context and earlier messages. Runs that
are in the dataset already, and runs with images or files, are skipped. The
file is on this machine; the runs are those of a daemon, or of a data directory
that no daemon uses.

Examples:
  axed dataset add release --agent planner --since 30d
  axed dataset add release --agent planner --expect --limit 50
  axed dataset add thumbs-down --agent planner --score 'thumbs=<1'
  axed dataset add release --run run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d
  axed dataset add release --agent planner --data /var/lib/axed"
)]
pub struct Add {
    /// Name of the dataset; its file is made if it is missing
    name: String,
    /// Agent whose runs are added
    #[arg(long, value_name = "AGENT", required_unless_present = "runs")]
    agent: Option<String>,
    /// Add this run, whatever its status; repeatable
    #[arg(long = "run", value_name = "RUN", conflicts_with_all = ["agent", "since", "status", "limit", "scores", "data"])]
    runs: Vec<String>,
    /// Only runs accepted since then: an age such as 30d or 12h, a date, or a time
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<String>,
    /// Only runs with this status
    #[arg(long, value_name = "STATUS", value_parser = status_parser(), default_value = "completed", hide_possible_values = true)]
    status: Status,
    /// At most so many of the newest of these runs
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = parse_limit)]
    limit: usize,
    /// Add the final text as the expected answer; JSON if the run had to answer in JSON
    #[arg(long)]
    expect: bool,
    /// Only runs with such a score, such as 'thumbs=<1'; repeatable
    #[arg(long = "score", value_name = "NAME=CONDITION", value_parser = parse_score, conflicts_with = "data")]
    scores: Vec<(String, String)>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Read the runs of this data directory instead of a daemon's
    #[arg(long, value_name = "DIR", conflicts_with_all = ["server", "key"])]
    data: Option<PathBuf>,
    #[command(flatten)]
    sources: Sources,
}

fn parse_score(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, condition)) if is_agent_name(name) && !condition.is_empty() => {
            Ok((name.to_owned(), condition.to_owned()))
        }
        _ => Err("use NAME=CONDITION, such as 'thumbs=<1'".to_owned()),
    }
}

pub async fn add(args: Add) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&Flags {
        data: args.data.clone(),
        ..args.sources.clone().flags()
    })?;
    let path = datasets::path(&config.agents.datasets_dir(), &args.name)
        .map_err(|error| InvalidInput(error.to_string()))?;
    let check = request_check(&config.limits);
    let file = DatasetFile::read(path, &check)?;
    let source = match &args.data {
        None => Source::Daemon(args.daemon.client()?),
        Some(_) => open_data(&config)?,
    };
    let collected = collect(&args, &source, &file.runs, &check).await;
    if let Source::Data(store) = &source {
        store.close().await;
    }
    let collected = collected?;
    file.append(&collected.lines, &check)?;
    report(&args, &file.path, &collected)?;
    Ok(ExitCode::SUCCESS)
}

fn open_data(config: &Config) -> anyhow::Result<Source> {
    let store = open::open_existing(&config.data.dir, config.data.durability);
    let store = store.map_err(|error| mention_server(data::describe(error)));
    Ok(Source::Data(store?))
}

/// The file of a dataset, which may not exist yet.
struct DatasetFile {
    path: PathBuf,
    text: String,
    /// The runs that are in it.
    runs: HashSet<RunId>,
}

impl DatasetFile {
    fn read(path: PathBuf, check: &CheckRequest<'_>) -> anyhow::Result<Self> {
        if !path.exists() {
            return Ok(Self {
                path,
                text: String::new(),
                runs: HashSet::new(),
            });
        }
        let bytes = datasets::read_bytes(&path).map_err(|errors| invalid(&path, &errors))?;
        let cases = dataset::parse(&bytes, check).map_err(|errors| invalid(&path, &errors))?;
        Ok(Self {
            text: String::from_utf8(bytes).context("a dataset is UTF-8")?,
            runs: cases.iter().filter_map(|case| case.run).collect(),
            path,
        })
    }

    /// Writes the file with these lines at its end.
    fn append(&self, lines: &[String], check: &CheckRequest<'_>) -> anyhow::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let mut text = self.text.clone();
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        for line in lines {
            text.push_str(line);
            text.push('\n');
        }
        dataset::parse(text.as_bytes(), check).map_err(|errors| invalid(&self.path, &errors))?;
        let context = || format!("could not write {}", self.path.display());
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir).with_context(context)?;
        }
        whole_file::replace(&self.path, &text).with_context(context)
    }
}

fn invalid(path: &Path, errors: &[DatasetError]) -> InvalidInput {
    let lines = errors.iter().map(|error| error_line(path, error));
    let lines: Vec<String> = lines.collect();
    InvalidInput(format!("nothing was added:\n{}", lines.join("\n")))
}

/// The lines of runs that are added, oldest first.
#[derive(Default)]
struct Collected {
    lines: Vec<String>,
    /// How many runs were skipped, by the reason.
    skipped: BTreeMap<Unsuitable, usize>,
}

impl Collected {
    fn add(&mut self, line: Result<String, Unsuitable>) {
        match line {
            Ok(line) => self.lines.push(line),
            Err(reason) => *self.skipped.entry(reason).or_default() += 1,
        }
    }
}

async fn collect(
    args: &Add,
    source: &Source,
    present: &HashSet<RunId>,
    check: &CheckRequest<'_>,
) -> anyhow::Result<Collected> {
    let mut collected = Collected::default();
    for id in &args.runs {
        let run = source.run(id).await?;
        let line = match unsuitable(&run) {
            Some(reason) => Err(reason),
            None => line_of(args, source, &run, present, check).await?,
        };
        collected.add(line);
    }
    let Some(agent) = &args.agent else {
        return Ok(collected);
    };
    let wanted = Wanted {
        agent,
        status: args.status,
        since: args
            .since
            .as_deref()
            .map(str::parse::<Timestamp>)
            .transpose()?,
        scores: &args.scores,
    };
    let (mut cursor, mut remaining) = (None, args.limit);
    while remaining > 0 {
        let page = source.runs(&wanted, remaining.min(MAX_PAGE_RUNS), cursor.as_deref());
        let page = page.await?;
        for run in page
            .data
            .iter()
            .filter(|run| !is_marked(run))
            .take(remaining)
        {
            remaining -= 1;
            collected.add(line_of(args, source, run, present, check).await?);
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    collected.lines.reverse();
    Ok(collected)
}

/// Why no list that is searched has the run.
fn unsuitable(run: &Value) -> Option<Unsuitable> {
    match run {
        run if is_marked(run) => Some("of scorers or evaluations"),
        run if !run["parent_id"].is_null() => Some("below other runs"),
        run if run["finished_at"].is_null() => Some("that have not ended"),
        _ => None,
    }
}

/// The line of a run, or why it is skipped.
async fn line_of(
    args: &Add,
    source: &Source,
    run: &Value,
    present: &HashSet<RunId>,
    check: &CheckRequest<'_>,
) -> anyhow::Result<Result<String, Unsuitable>> {
    let id: RunId = serde_json::from_value(run["id"].clone()).context("the id of a run")?;
    if present.contains(&id) {
        return Ok(Err("in it already"));
    }
    let recorded = source.recorded(id).await?;
    let case = match recorded_case::case(run, recorded, args.expect) {
        Ok(case) => case,
        Err(reason) => return Ok(Err(reason)),
    };
    let line = Value::Object(case).to_string();
    Ok(match dataset::parse(line.as_bytes(), check) {
        Ok(_) => Ok(line),
        Err(errors) => {
            for error in errors {
                output::eprint_line(format_args!(
                    "axed: {id} cannot be a case: {}",
                    error.message
                ));
            }
            Err("that the API would refuse")
        }
    })
}

fn report(args: &Add, path: &Path, collected: &Collected) -> anyhow::Result<()> {
    let Collected { lines, skipped } = collected;
    if args.format.is_json() {
        return output::print_json(&json!({
            "file": path.to_string_lossy(), "added": lines.len(), "skipped": skipped,
        }));
    }
    let total: usize = skipped.values().sum();
    let reasons = skipped
        .iter()
        .map(|(reason, count)| format!("{count} {reason}"));
    let reasons: Vec<String> = reasons.collect();
    let reasons = match reasons.is_empty() {
        true => String::new(),
        false => format!(": {}", reasons.join(", ")),
    };
    output::print_line(format_args!(
        "{}: {} added, {} skipped{reasons}",
        path.display(),
        counted(lines.len(), "case"),
        counted(total, "run"),
    ))
}
