//! `axed agents`: lists, shows, writes and checks agent files, and rolls candidates of a daemon out. Reads files as a daemon would;
//! starts none.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};

use crate::catalog::agent_toml;
use crate::catalog::reload::Catalog;
use crate::catalog::template::{default_model, script_template, template};
use crate::catalog::{Entry, LoadError, Rules};
use crate::cli::check::{Report, RequestedPath, check_agents};
use crate::cli::exit::InvalidInput;
use crate::cli::output;
use crate::cli::output::FormatArgs;
use crate::cli::rollouts;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::style::Color;
use crate::cli::table::{Cell, Column, Table};
use crate::cli::whole_file;
use crate::config::{Config, DEFAULT_SCRIPTS, ProviderKind};
use crate::domain::agent::is_agent_name;
use crate::domain::agent::model_ref::ModelRef;
use crate::providers::registry::{ProviderRegistry, ProviderUnavailable};
use crate::settings::document::Problem;
use crate::settings::section::{Audience, show_section};
use crate::settings::suggestion;

/// The provider whose models are scripts.
const SCRIPTED: &str = "scripted";

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
        next_line_help = true,
        after_help = "Without a key for a model's service, use a model of your own Ollama, or a script.

Examples:
  axed agents init helper
  axed agents init helper --model ollama/qwen3:4b
  axed agents init helper --scripted && axed run helper \"Say hello\""
    )]
    Init {
        /// Name of the new agent
        name: String,
        /// Model of the new agent
        #[arg(long, value_name = "PROVIDER/MODEL", conflicts_with = "scripted")]
        model: Option<ModelRef>,
        /// Let the agent reply from a script, which is written, too
        #[arg(long)]
        scripted: bool,
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
    /// Set the share of the runs that the candidate of an agent gets
    Rollout(rollouts::Rollout),
    /// Make the candidate of an agent its current version, after the evaluation of its gate
    Promote(rollouts::Promote),
}

pub async fn agents(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Rollout(args) => rollouts::rollout(args).await,
        Command::Promote(args) => rollouts::promote(args).await,
        Command::List { format, sources } => list(format, sources),
        Command::Show {
            name,
            format,
            sources,
        } => show(&name, format, sources),
        Command::Init {
            name,
            model,
            scripted,
            sources,
        } => init(&name, model, scripted, sources),
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
    let agent = agents.get(name).map_err(|error| {
        let known = agents.entries.keys().map(String::as_str);
        let hint = match error {
            LoadError::NotFound(_) => suggestion::did_you_mean(name, known),
            _ => None,
        };
        InvalidInput(format!("{error}{}", suggestion::clause(hint)))
    })?;
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

fn init(
    name: &str,
    model: Option<ModelRef>,
    is_scripted: bool,
    sources: Sources,
) -> anyhow::Result<ExitCode> {
    if !is_agent_name(name) {
        return Err(InvalidInput(format!(
            "\"{name}\" is no agent's name: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"
        ))
        .into());
    }
    let flags = sources.to_arguments();
    let config = load_quiet_config(&sources.clone().flags())?;
    let dir = config.agents.dirs.first();
    let path = dir.map_or(Path::new("agents"), PathBuf::as_path);
    let path = path.join(format!("{name}.toml"));
    let mut written = vec![path.clone()];
    let model = match is_scripted {
        true => {
            let script = script_dir(&config)?.join(format!("{name}.toml"));
            write_new(&script, &script_template(name))?;
            written.push(script);
            Some(ModelRef {
                provider: SCRIPTED.to_owned(),
                model: name.to_owned(),
            })
        }
        false => model,
    };
    let model = model.unwrap_or_else(default_model);
    if let Err(error) = write_new(&path, &template(name, &model)) {
        if is_scripted {
            // The script is of no use without its agent.
            let _ = std::fs::remove_file(&written[1]);
        }
        return Err(error);
    }
    for path in &written {
        output::print_line(format_args!("{}", path.display()))?;
    }
    print_next_steps(name, &path, &model, &flags, sources)?;
    Ok(ExitCode::SUCCESS)
}

/// Where the scripts of the provider `scripted` are.
fn script_dir(config: &Config) -> anyhow::Result<PathBuf> {
    let configured = config.providers.get(SCRIPTED);
    let configured = configured.map_or(&[][..], |provider| &provider.scripts);
    match configured.iter().find(|path| !path.is_file()) {
        Some(dir) => Ok(dir.clone()),
        None if configured.is_empty() => Ok(config.config_dir.join(DEFAULT_SCRIPTS)),
        None => Err(InvalidInput(format!(
            "[providers.{SCRIPTED}] scripts of {} names no directory for the new script; add one",
            config.config_file.display()
        ))
        .into()),
    }
}

/// Writes a file that must not exist, with its directory.
fn write_new(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        let made = std::fs::create_dir_all(dir);
        made.with_context(|| format!("could not make {}", dir.display()))?;
    }
    match whole_file::create(path, text) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(InvalidInput(format!(
            "{} is there already; choose another name or remove it",
            path.display()
        ))
        .into()),
        written => written.with_context(|| format!("could not write {}", path.display())),
    }
}

/// What to do with the new agent, on stderr.
fn print_next_steps(
    name: &str,
    path: &Path,
    model: &ModelRef,
    flags: &str,
    sources: Sources,
) -> anyhow::Result<()> {
    // As a daemon that starts now: a script was written.
    let config = load_quiet_config(&sources.flags())?;
    let registry = ProviderRegistry::build(&config.providers)?;
    if let Err(unavailable) = registry.get(&model.provider) {
        output::eprint_line(format_args!("axed: before the first run: {unavailable}"));
        if matches!(unavailable, ProviderUnavailable::MissingKey { .. }) {
            output::eprint_line(format_args!(
                "axed: without a key: axed agents init OTHER --model ollama/qwen3:4b, or --scripted"
            ));
        }
    }
    if config.providers.get(&model.provider).map(|it| it.kind) == Some(ProviderKind::Ollama) {
        let model = &model.model;
        output::eprint_line(format_args!(
            "axed: before the first run: ollama pull {model}"
        ));
    }
    output::eprint_line(format_args!(
        "axed: to check and run it:\n  axed agents check {}{flags}\n  axed run {name} \"Say hello\"{flags}",
        path.display()
    ));
    Ok(())
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
