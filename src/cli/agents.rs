//! `axed agents`: lists, shows, writes and checks agent files. Reads them as a daemon would; starts none.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use comfy_table::{Table, presets};

use crate::catalog::reload::{self, Catalog};
use crate::catalog::template::template;
use crate::catalog::{Entry, Rules, read};
use crate::cli::exit::Invalid;
use crate::cli::{Sources, definition, output, quiet_config};
use crate::domain::agent::is_agent_name;
use crate::domain::terminal_text;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the agents, the invalid ones with what is wrong
    List {
        #[command(flatten)]
        sources: Sources,
    },
    /// Print what is in force for an agent, every default filled in
    Show {
        /// The agent
        name: String,
        #[command(flatten)]
        sources: Sources,
    },
    /// Write a new agent file that explains every key
    Init {
        /// The new agent's name
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

/// Does what is asked.
pub fn agents(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { sources } => list(sources),
        Command::Show { name, sources } => show(&name, sources),
        Command::Init { name, sources } => init(&name, sources),
        Command::Check { paths, sources } => check(paths, sources),
    }
}

fn list(sources: Sources) -> anyhow::Result<ExitCode> {
    let config = quiet_config(&sources.flags())?;
    let dirs = &config.agents.dirs;
    let agents = Catalog::open(dirs.clone(), Rules::of(&config)).current();
    if agents.entries.is_empty() {
        output::note(format_args!("axed: no agents in {}", listed(dirs)));
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
        let description = terminal_text::lines(&description);
        table.add_row([entry.name.clone(), model, description]);
    }
    output::line(format_args!("{table}"))?;
    Ok(ExitCode::SUCCESS)
}

fn show(name: &str, sources: Sources) -> anyhow::Result<ExitCode> {
    let config = quiet_config(&sources.flags())?;
    let rules = Rules::of(&config);
    let agents = Catalog::open(config.agents.dirs, rules).current();
    let agent = agents
        .get(name)
        .map_err(|error| Invalid(error.to_string()))?;
    if let Some(Entry { path, .. }) = agents.entries.get(name) {
        output::line(format_args!(
            "# {}\n# version {}",
            path.display(),
            agent.version
        ))?;
    }
    output::document(&definition::to_toml(agent))?;
    Ok(ExitCode::SUCCESS)
}

fn init(name: &str, sources: Sources) -> anyhow::Result<ExitCode> {
    if !is_agent_name(name) {
        return Err(Invalid(format!(
            "\"{name}\" is no agent's name: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"
        ))
        .into());
    }
    let dirs = quiet_config(&sources.flags())?.agents.dirs;
    let dir = dirs.first().map_or(Path::new("agents"), PathBuf::as_path);
    let path = dir.join(format!("{name}.toml"));
    std::fs::create_dir_all(dir).with_context(|| format!("could not make {}", dir.display()))?;
    let mut file = match std::fs::File::create_new(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            return Err(Invalid(format!(
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
    output::line(format_args!("{}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn check(paths: Vec<PathBuf>, sources: Sources) -> anyhow::Result<ExitCode> {
    let (paths, rules) = if paths.is_empty() {
        let config = quiet_config(&sources.flags())?;
        let rules = Rules::of(&config);
        (config.agents.dirs, rules)
    } else {
        (paths, Rules::default())
    };
    let mut invalid = 0;
    let mut checked = 0;
    for path in &paths {
        for (file, verdict) in verdicts(path, rules)? {
            checked += 1;
            match verdict {
                Ok(warnings) => {
                    output::line(format_args!("{}: ok", file.display()))?;
                    for warning in warnings {
                        output::line(format_args!("{}: warning: {warning}", file.display()))?;
                    }
                }
                Err(why) => {
                    invalid += 1;
                    output::line(format_args!("{}: error: {why}", file.display()))?;
                }
            }
        }
    }
    if checked == 0 {
        output::note(format_args!("axed: no agent files in {}", listed(&paths)));
    }
    Ok(ExitCode::from(if invalid > 0 { 2 } else { 0 }))
}

const NO_NAME: &str = "the file's name is no agent's name: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a \
                       letter or a digit";

type Verdict = (PathBuf, Result<Vec<String>, String>);

fn verdicts(path: &Path, rules: Rules) -> anyhow::Result<Vec<Verdict>> {
    if path.is_dir() {
        let agents = Catalog::open(vec![path.to_owned()], rules).current();
        let entries = agents.entries.values().map(|entry| {
            let verdict = match &entry.error {
                Some(error) => Err(error.to_string()),
                None => Ok(entry.warnings.clone()),
            };
            (entry.path.clone(), verdict)
        });
        // The catalogue passes over these; who checks wants to know why an agent is missing.
        let files = reload::list(path)
            .map_err(|error| Invalid(format!("could not read {}: {error}", path.display())))?;
        let nameless = files.into_iter().filter(|file| agent_name(file).is_none());
        let nameless = nameless.map(|file| (file, Err(NO_NAME.to_owned())));
        return Ok(entries.chain(nameless).collect());
    }
    let bytes = std::fs::read(path)
        .map_err(|error| Invalid(format!("could not read {}: {error}", path.display())))?;
    let verdict = match agent_name(path) {
        Some(name) => read::read(name, path, &bytes)
            .map(|(_, warnings)| warnings)
            .map_err(|error| error.to_string()),
        None => Err(NO_NAME.to_owned()),
    };
    Ok(vec![(path.to_owned(), verdict)])
}

/// The name that a file gives its agent, where it is one.
fn agent_name(file: &Path) -> Option<&str> {
    let stem = file.file_stem()?.to_str()?;
    is_agent_name(stem).then_some(stem)
}

fn listed(dirs: &[PathBuf]) -> String {
    let names: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    names.join(", ")
}
