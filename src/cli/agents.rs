//! `axed agents`: lists, shows, writes and checks agent files. Reads them as a daemon would; starts none.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};

use crate::catalog::agent_toml;
use crate::catalog::reload::Catalog;
use crate::catalog::template::template;
use crate::catalog::{Entry, Rules};
use crate::cli::check::{Report, RequestedPath, check_agents};
use crate::cli::exit::InvalidInput;
use crate::cli::output;
use crate::cli::output::FormatArgs;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::style::Color;
use crate::cli::table::{Cell, Column, Table};
use crate::cli::whole_file;
use crate::domain::agent::is_agent_name;
use crate::settings::document::Problem;
use crate::settings::section::{Audience, show_section};

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the agents, with the errors of invalid ones
    #[command(
        after_help = "Examples:\n  axed agents list\n  axed agents list -o json | jq -r '.data[].name'"
    )]
    List {
        #[command(flatten)]
        format: FormatArgs,
        #[command(flatten)]
        sources: Sources,
    },
    /// Print an agent's settings, with defaults filled in
    #[command(after_help = "Example:\n  axed agents show helper > agents/copy.toml")]
    Show {
        /// Name of the agent
        name: String,
        #[command(flatten)]
        format: FormatArgs,
        #[command(flatten)]
        sources: Sources,
    },
    /// Write a new agent file that explains every key
    #[command(
        after_help = "Example:\n  axed agents init helper && $EDITOR agents/helper.toml && axed run helper"
    )]
    Init {
        /// Name of the new agent
        name: String,
        #[command(flatten)]
        sources: Sources,
    },
    /// Check agent files against the configuration and each other; exit code 2 if any has an error
    #[command(
        after_help = "Examples:\n  axed agents check\n  axed agents check agents/helper.toml"
    )]
    Check {
        /// Files and directories [default: the configured directories]
        paths: Vec<PathBuf>,
        /// Exit with code 2 on warnings, too
        #[arg(long)]
        strict: bool,
        #[command(flatten)]
        format: FormatArgs,
        #[command(flatten)]
        sources: Sources,
    },
}

pub fn agents(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { format, sources } => list(format, sources),
        Command::Show {
            name,
            format,
            sources,
        } => show(&name, format, sources),
        Command::Init { name, sources } => init(&name, sources),
        Command::Check {
            paths,
            strict,
            format,
            sources,
        } => check(&paths, strict, format, sources),
    }
}

fn list(format: FormatArgs, sources: Sources) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&sources.flags())?;
    let dirs = &config.agents.dirs;
    let agents = Catalog::open(dirs.clone(), Rules::from_config(&config)).current();
    let entries = agents.entries.values();
    if format.is_json() {
        let agents: Vec<_> = entries.map(entry_json).collect();
        output::print_json(&json!({ "data": agents }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if agents.entries.is_empty() {
        output::eprint_line(format_args!(
            "axed: no agents in {}; axed agents init NAME writes one",
            join_paths(dirs)
        ));
        return Ok(ExitCode::SUCCESS);
    }
    let columns = ["agent", "model"].map(Column::text);
    let file = Column::flexible("file");
    let description = [Column::flexible("description")].into_iter();
    let mut table = Table::new(
        columns
            .into_iter()
            .chain(description)
            .chain(format.is_wide().then_some(file)),
    );
    for entry in entries {
        let model = entry.agent.as_ref().map(|agent| agent.model.to_string());
        let description = entry
            .agent
            .as_ref()
            .and_then(|agent| agent.description.clone());
        let description = match (&entry.agent, &entry.error) {
            (_, None) => Cell::new(description.unwrap_or_default()),
            (Some(_), Some(error)) => Cell::new(format!(
                "the last good definition is in force; the file is invalid: {error}"
            ))
            .colored(Color::Yellow),
            (None, Some(error)) => Cell::new(format!("invalid: {error}")).colored(Color::Red),
        };
        let file = format.is_wide().then(|| Cell::new(entry.path.display()));
        let cells = [
            Cell::new(&entry.name),
            Cell::new(model.unwrap_or_default()),
            description,
        ];
        table.row(cells.into_iter().chain(file));
    }
    table.print()?;
    Ok(ExitCode::SUCCESS)
}

fn entry_json(entry: &Entry) -> Value {
    let agent = entry.agent.as_ref();
    json!({
        "name": entry.name,
        "model": agent.map(|agent| agent.model.to_string()),
        "description": agent.and_then(|agent| agent.description.clone()),
        "file": entry.path.to_string_lossy(),
        "valid": entry.error.is_none(),
        "error": entry.error.as_ref().map(ToString::to_string),
        "warnings": entry.warnings.iter().map(Problem::message).collect::<Vec<_>>(),
    })
}

fn show(name: &str, format: FormatArgs, sources: Sources) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&sources.flags())?;
    let rules = Rules::from_config(&config);
    let agents = Catalog::open(config.agents.dirs, rules).current();
    let agent = agents
        .get(name)
        .map_err(|error| InvalidInput(error.to_string()))?;
    if format.is_json() {
        let mut settings = json!({"name": agent.name, "version": agent.version});
        if let Value::Object(settings) = &mut settings {
            settings.extend(show_section(&agent.settings, Audience::Operator));
        }
        output::print_json(&settings)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(Entry { path, .. }) = agents.entries.get(name) {
        output::print_line(format_args!(
            "# {}\n# version {}",
            path.display(),
            agent.version
        ))?;
    }
    output::print_document(&agent_toml::to_toml(agent, Audience::Operator))?;
    Ok(ExitCode::SUCCESS)
}

fn init(name: &str, sources: Sources) -> anyhow::Result<ExitCode> {
    if !is_agent_name(name) {
        return Err(InvalidInput(format!(
            "\"{name}\" is no agent's name: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"
        ))
        .into());
    }
    let dirs = load_quiet_config(&sources.flags())?.agents.dirs;
    let dir = dirs.first().map_or(Path::new("agents"), PathBuf::as_path);
    let path = dir.join(format!("{name}.toml"));
    std::fs::create_dir_all(dir).with_context(|| format!("could not make {}", dir.display()))?;
    match whole_file::create(&path, &template(name)) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(InvalidInput(format!(
                "{} is there already; choose another name or remove it",
                path.display()
            ))
            .into());
        }
        written => written.with_context(|| format!("could not write {}", path.display()))?,
    }
    output::print_line(format_args!("{}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn check(
    paths: &[PathBuf],
    strict: bool,
    format: FormatArgs,
    sources: Sources,
) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&sources.flags())?;
    let requested = paths.iter().map(|path| RequestedPath::new(path));
    let requested = requested.collect::<anyhow::Result<Vec<_>>>()?;
    let mut report = Report::new(format);
    if requested.is_empty() {
        for dir in config.agents.dirs.iter().filter(|dir| !dir.is_dir()) {
            report.add_missing_dir(dir)?;
        }
    }
    check_agents(&mut report, &config, &requested)?;
    report.finish(strict)
}

fn join_paths(dirs: &[PathBuf]) -> String {
    let names: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    names.join(", ")
}
