//! `axed dataset`: lists, checks and fills the files of datasets.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::catalog::datasets;
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::table::{Cell, Column, Table};
use crate::config::{Config, Limits};
use crate::domain::counted::counted;
use crate::domain::dataset::{Case, DatasetError};
use crate::web::extract::run_request;

mod add;
mod source;

#[derive(Debug, clap::Subcommand)]
#[command(
    after_help = "A dataset is a file of JSON lines in the directory of datasets:
[agents] datasets, or else datasets beside the agents."
)]
pub enum Command {
    /// List the datasets
    List(List),
    /// Check datasets: exit code 0 if every line is a case, else 1
    Check(Check),
    /// Add recorded runs to a dataset
    Add(Box<add::Add>),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  axed dataset list
  axed dataset list -o json | jq -r '.data[].name'")]
pub struct List {
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    sources: Sources,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed dataset check
  axed dataset check release tickets.jsonl"
)]
pub struct Check {
    /// Names of datasets, or files [default: all datasets]
    #[arg(value_name = "NAME|FILE")]
    datasets: Vec<String>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    sources: Sources,
}

pub async fn dataset(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List(args) => list(args),
        Command::Check(args) => check(args),
        Command::Add(args) => add::add(*args).await,
    }
}

fn list(args: List) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&args.sources.flags())?;
    let found = read_all(&config)?;
    if args.format.is_json() {
        let data: Value = found.iter().map(Found::to_json).collect();
        output::print_json(&json!({ "data": data }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if found.is_empty() {
        warn_of_none(&config);
        return Ok(ExitCode::SUCCESS);
    }
    let numbers = ["cases", "expected", "runs"].map(Column::number);
    let columns = [Column::text("dataset")].into_iter().chain(numbers);
    let mut table = Table::new(columns.chain([Column::flexible("error")]));
    for dataset in &found {
        let counts = dataset.counts().map_or_else(Default::default, |counts| {
            [counts.cases, counts.expected, counts.runs].map(Cell::new)
        });
        let errors = dataset.errors();
        let error = errors.first().map(ToString::to_string).unwrap_or_default();
        let cells = [Cell::new(&dataset.name)].into_iter().chain(counts);
        table.row(cells.chain([Cell::new(error)]));
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: Check) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&args.sources.flags())?;
    let found = match args.datasets.is_empty() {
        true => read_all(&config)?,
        false => {
            let named = args.datasets.iter();
            let named = named.map(|dataset| read_named(dataset, &config));
            named.collect::<Result<_, InvalidInput>>()?
        }
    };
    if args.format.is_json() {
        let data: Value = found.iter().map(Found::to_json).collect();
        output::print_json(&json!({ "data": data }))?;
    } else if found.is_empty() {
        warn_of_none(&config);
    } else {
        for dataset in &found {
            dataset.print()?;
        }
    }
    Ok(match found.iter().all(|it| it.cases.is_ok()) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn warn_of_none(config: &Config) {
    output::eprint_line(format_args!(
        "axed: no datasets in {}; axed dataset add NAME --agent AGENT makes one of recorded runs",
        config.agents.datasets_dir().display()
    ));
}

/// A dataset that was read.
struct Found {
    name: String,
    path: PathBuf,
    cases: Result<Vec<Case>, Vec<DatasetError>>,
}

/// Numbers of cases.
struct Counts {
    cases: usize,
    /// Those with an expected answer.
    expected: usize,
    /// Those of a recorded run.
    runs: usize,
}

impl Found {
    fn counts(&self) -> Option<Counts> {
        let cases = self.cases.as_ref().ok()?;
        Some(Counts {
            cases: cases.len(),
            expected: cases.iter().filter(|it| it.expected.is_some()).count(),
            runs: cases.iter().filter(|it| it.run.is_some()).count(),
        })
    }

    fn errors(&self) -> &[DatasetError] {
        self.cases.as_ref().err().map_or(&[], Vec::as_slice)
    }

    fn print(&self) -> anyhow::Result<()> {
        let Self { name, path, .. } = self;
        if let Some(counts) = self.counts() {
            return output::print_line(format_args!(
                "{name}: {}, {} with expected, {} with run",
                counted(counts.cases, "case"),
                counts.expected,
                counts.runs
            ));
        }
        for error in self.errors() {
            output::print_line(format_args!("{}", error_line(path, error)))?;
        }
        Ok(())
    }

    fn to_json(&self) -> Value {
        let counts = self.counts();
        let errors = self.errors().iter();
        let errors = errors.map(|it| json!({"line": it.line, "message": it.message}));
        json!({
            "name": self.name,
            "file": self.path.to_string_lossy(),
            "cases": counts.as_ref().map(|it| it.cases),
            "expected": counts.as_ref().map(|it| it.expected),
            "runs": counts.as_ref().map(|it| it.runs),
            "problems": errors.collect::<Value>(),
        })
    }
}

/// `<file>:<line>: error: …`, as for other files.
fn error_line(path: &Path, error: &DatasetError) -> String {
    let line = error.line.map_or_else(String::new, |it| format!(":{it}"));
    format!("{}{line}: error: {}", path.display(), error.message)
}

fn read_all(config: &Config) -> anyhow::Result<Vec<Found>> {
    let dir = config.agents.datasets_dir();
    let names = datasets::names(&dir).map_err(|error| InvalidInput::unreadable(&dir, &error))?;
    let found = names.iter().map(|name| read_named(name, config));
    Ok(found.collect::<Result<_, InvalidInput>>()?)
}

/// Reads the dataset of this name; what has a `/` or ends in `.jsonl` is a file.
fn read_named(dataset: &str, config: &Config) -> Result<Found, InvalidInput> {
    let file = Path::new(dataset);
    let path = match dataset.contains('/') || dataset.ends_with(".jsonl") {
        true => {
            file.metadata()
                .map_err(|error| InvalidInput::unreadable(file, &error))?;
            file.to_owned()
        }
        false => datasets::find(&config.agents.datasets_dir(), dataset)
            .map_err(|error| InvalidInput(error.to_string()))?,
    };
    Ok(Found {
        name: dataset.to_owned(),
        cases: datasets::read(&path, &request_check(&config.limits)),
        path,
    })
}

/// Checks the requests of cases as the API would.
fn request_check(limits: &Limits) -> impl Fn(&str) -> Result<(), String> {
    |request| {
        let checked = run_request::check_case(request, limits.labels, limits.attachment_limits());
        checked.map_err(|problem| problem.detail().to_owned())
    }
}
