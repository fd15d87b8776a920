//! `axed agents`: lists, shows, writes and checks agent files. Reads them as a daemon would; starts none.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use comfy_table::{Table, presets};

use crate::catalog::reload::{self, Catalog};
use crate::catalog::template::template;
use crate::catalog::{Entry, Rules, read};
use crate::cli::exit::InvalidInput;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::{agent_toml, output};
use crate::domain::agent::is_agent_name;
use crate::domain::terminal_text;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the agents, with the errors of invalid ones
    List {
        #[command(flatten)]
        sources: Sources,
    },
    /// Print an agent's settings, with defaults filled in
    Show {
        /// Name of the agent
        name: String,
        #[command(flatten)]
        sources: Sources,
    },
    /// Write a new agent file that explains every key
    Init {
        /// Name of the new agent
        name: String,
        #[command(flatten)]
        sources: Sources,
    },
    /// Check agent files; exit code 2 if any is invalid
    Check {
        /// Files and directories [default: the configured directories]
        paths: Vec<PathBuf>,
        #[command(flatten)]
        sources: Sources,
    },
}

pub fn agents(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { sources } => list(sources),
        Command::Show { name, sources } => show(&name, sources),
        Command::Init { name, sources } => init(&name, sources),
        Command::Check { paths, sources } => check(paths, sources),
    }
}

fn list(sources: Sources) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&sources.flags())?;
    let dirs = &config.agents.dirs;
    let agents = Catalog::open(dirs.clone(), Rules::from_config(&config)).current();
    if agents.entries.is_empty() {
        output::eprint_line(format_args!("axed: no agents in {}", join_paths(dirs)));
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["agent", "model", "description"]);
    for entry in agents.entries.values() {
        let (model, description) = match (&entry.agent, &entry.error) {
            (Some(agent), None) => (
                agent.model.to_string(),
                agent.description.clone().unwrap_or_default(),
            ),
            (Some(agent), Some(error)) => (
                agent.model.to_string(),
                format!("the last good definition is in force; the file is invalid: {error}"),
            ),
            (None, Some(error)) => (String::new(), format!("invalid: {error}")),
            (None, None) => continue,
        };
        let description = terminal_text::sanitize_lines(&description);
        table.add_row([entry.name.clone(), model, description]);
    }
    output::print_line(format_args!("{table}"))?;
    Ok(ExitCode::SUCCESS)
}

fn show(name: &str, sources: Sources) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&sources.flags())?;
    let rules = Rules::from_config(&config);
    let agents = Catalog::open(config.agents.dirs, rules).current();
    let agent = agents
        .get(name)
        .map_err(|error| InvalidInput(error.to_string()))?;
    if let Some(Entry { path, .. }) = agents.entries.get(name) {
        output::print_line(format_args!(
            "# {}\n# version {}",
            path.display(),
            agent.version
        ))?;
    }
    output::print_document(&agent_toml::to_toml(agent))?;
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
    let mut file = match std::fs::File::create_new(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            return Err(InvalidInput(format!(
                "{} is there already; choose another name or remove it",
                path.display()
            ))
            .into());
        }
        Err(error) => {
            return Err(error).with_context(|| format!("could not write {}", path.display()));
        }
    };
    file.write_all(template(name).as_bytes())
        .with_context(|| format!("could not write {}", path.display()))?;
    output::print_line(format_args!("{}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn check(paths: Vec<PathBuf>, sources: Sources) -> anyhow::Result<ExitCode> {
    let (paths, rules) = if paths.is_empty() {
        let config = load_quiet_config(&sources.flags())?;
        let rules = Rules::from_config(&config);
        (config.agents.dirs, rules)
    } else {
        (paths, Rules::default())
    };
    let mut invalid = 0;
    let mut checked = 0;
    for path in &paths {
        for (file, result) in check_files(path, rules)? {
            checked += 1;
            match result {
                Ok(warnings) => {
                    output::print_line(format_args!("{}: ok", file.display()))?;
                    for warning in warnings {
                        output::print_line(format_args!("{}: warning: {warning}", file.display()))?;
                    }
                }
                Err(error) => {
                    invalid += 1;
                    output::print_line(format_args!("{}: error: {error}", file.display()))?;
                }
            }
        }
    }
    if checked == 0 {
        output::eprint_line(format_args!(
            "axed: no agent files in {}",
            join_paths(&paths)
        ));
    }
    Ok(ExitCode::from(if invalid > 0 { 2 } else { 0 }))
}

const INVALID_FILE_NAME: &str = "the file's name is no agent's name: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a \
                       letter or a digit";

type FileCheck = (PathBuf, Result<Vec<String>, String>);

fn check_files(path: &Path, rules: Rules) -> anyhow::Result<Vec<FileCheck>> {
    if path.is_dir() {
        let agents = Catalog::open(vec![path.to_owned()], rules).current();
        let entries = agents.entries.values().map(|entry| {
            let result = match &entry.error {
                Some(error) => Err(error.to_string()),
                None => Ok(entry.warnings.clone()),
            };
            (entry.path.clone(), result)
        });
        // The catalogue skips these, but the check reports why an agent is missing.
        let files = reload::list_agent_files(path)
            .map_err(|error| InvalidInput(format!("could not read {}: {error}", path.display())))?;
        let misnamed = files.into_iter().filter(|file| agent_name(file).is_none());
        let misnamed = misnamed.map(|file| (file, Err(INVALID_FILE_NAME.to_owned())));
        return Ok(entries.chain(misnamed).collect());
    }
    let bytes = std::fs::read(path)
        .map_err(|error| InvalidInput(format!("could not read {}: {error}", path.display())))?;
    let result = match agent_name(path) {
        Some(name) => read::read(name, path, &bytes)
            .map(|(_, warnings)| warnings)
            .map_err(|error| error.to_string()),
        None => Err(INVALID_FILE_NAME.to_owned()),
    };
    Ok(vec![(path.to_owned(), result)])
}

/// The agent name that a file name stands for, if it is valid.
fn agent_name(file: &Path) -> Option<&str> {
    let stem = file.file_stem()?.to_str()?;
    is_agent_name(stem).then_some(stem)
}

fn join_paths(dirs: &[PathBuf]) -> String {
    let names: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    names.join(", ")
}
