//! `axed agents`: lists, shows, writes and checks agent files. Reads them as a daemon would; starts none.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use comfy_table::{Table, presets};

use crate::catalog::reload::Catalog;
use crate::catalog::template::template;
use crate::catalog::{Entry, Rules};
use crate::cli::check::{Report, RequestedPath, check_agents};
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
    /// Check agent files against the configuration and each other; exit code 2 if any has an error
    Check {
        /// Files and directories [default: the configured directories]
        paths: Vec<PathBuf>,
        /// Exit with code 2 on warnings, too
        #[arg(long)]
        strict: bool,
        #[command(flatten)]
        sources: Sources,
    },
}

pub fn agents(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { sources } => list(sources),
        Command::Show { name, sources } => show(&name, sources),
        Command::Init { name, sources } => init(&name, sources),
        Command::Check {
            paths,
            strict,
            sources,
        } => check(&paths, strict, sources),
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

fn check(paths: &[PathBuf], strict: bool, sources: Sources) -> anyhow::Result<ExitCode> {
    let config = load_quiet_config(&sources.flags())?;
    let requested = paths.iter().map(|path| RequestedPath::new(path));
    let requested = requested.collect::<anyhow::Result<Vec<_>>>()?;
    let mut report = Report::default();
    check_agents(&mut report, &config, &requested)?;
    Ok(report.finish(strict))
}

fn join_paths(dirs: &[PathBuf]) -> String {
    let names: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    names.join(", ")
}
