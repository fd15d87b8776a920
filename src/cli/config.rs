//! `axed config`: checks the configuration, and shows what is in force.

use std::collections::BTreeMap;
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::app;
use crate::catalog::Rules;
use crate::catalog::agent_toml::inline_value;
use crate::catalog::reload::Catalog;
use crate::cli::check::{Report, check_agents};
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::Sources;
use crate::config::Config;
use crate::config::environment::process_environment;
use crate::config::in_force::SettingInForce;
use crate::config::lint;
use crate::config::load::{self, LoadedConfig};
use crate::settings::document::{self, Origin, Problem, ProblemKind};
use crate::settings::known_keys::quote_key;
use crate::settings::positions::Positions;
use crate::settings::suggestion;
use crate::store::open;
use crate::telemetry;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check the configuration and the agents; exit code 2 if there is an error
    Check {
        /// Exit with code 2 on warnings, too
        #[arg(long)]
        strict: bool,
        #[command(flatten)]
        format: FormatArgs,
        #[command(flatten)]
        sources: Sources,
    },
    /// Print the settings in force, each with its source: a flag, a variable, a line of the file, or the default
    Show {
        #[command(flatten)]
        format: FormatArgs,
        #[command(flatten)]
        sources: Sources,
    },
}

pub fn config(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Check {
            strict,
            format,
            sources,
        } => check(strict, format, sources),
        Command::Show { format, sources } => show(format, sources),
    }
}

fn check(strict: bool, format: FormatArgs, sources: Sources) -> anyhow::Result<ExitCode> {
    let loaded = load::load_with_sources(&sources.flags(), &process_environment())?;
    let LoadedConfig {
        file,
        file_exists,
        config,
        mut problems,
        positions,
        ..
    } = loaded;
    let mut report = Report::new(format);
    let Some(config) = config else {
        report.add_file(&file, &problems)?;
        return report.finish(strict);
    };
    // The problems are printed; the parts that are built for the check would log some of them again.
    let mut log = config.telemetry.clone();
    log.log = Some("off".to_owned());
    telemetry::init(&log).map_err(InvalidInput)?;
    if let Err(why) = telemetry::check(&config.telemetry) {
        let kind = ProblemKind::RuleViolation;
        problems.push(positions.problem("telemetry.log", why, kind));
    }
    for (key, why) in open::check_urls(&config.data) {
        let text = format!("{key} {why}");
        problems.push(positions.problem(key, text, ProblemKind::RuleViolation));
    }
    problems.extend(lint::lint(&config, &positions));
    problems.extend(app::config_problems(&config, &positions));
    problems.extend(budgets_of_missing_agents(&config, &positions));
    problems.sort_by(|a, b| a.origin.cmp(&b.origin));
    if file_exists || !problems.is_empty() {
        report.add_file(&file, &problems)?;
    } else {
        output::eprint_line(format_args!(
            "axed: there is no {file}, so the defaults are in force"
        ));
    }
    if !problems.iter().any(Problem::is_error) {
        check_agents(&mut report, &config, &[])?;
    }
    report.finish(strict)
}

/// Budgets that hold for no run, because there is no such agent.
fn budgets_of_missing_agents(config: &Config, positions: &Positions) -> Vec<Problem> {
    if config.budgets.iter().all(|budget| budget.agent.is_none()) {
        return Vec::new();
    }
    let dirs = config.agents.dirs.clone();
    let agents = Catalog::open(dirs, Rules::from_config(config)).current();
    let names = || agents.entries.keys().map(String::as_str);
    let mut problems = Vec::new();
    for budget in &config.budgets {
        let Some(agent) = budget.agent.as_deref() else {
            continue;
        };
        if names().all(|name| name != agent) {
            let path = format!("budgets.{}", quote_key(&budget.name));
            let hint = suggestion::did_you_mean(agent, names());
            let text = format!("{path}.match names the agent {agent}, but there is no such agent");
            problems.push(positions.warning(&path, text).with_hint(hint));
        }
    }
    problems
}

fn show(format: FormatArgs, sources: Sources) -> anyhow::Result<ExitCode> {
    let loaded = load::load_with_sources(&sources.flags(), &process_environment())?;
    let LoadedConfig {
        file,
        problems,
        settings,
        ..
    } = loaded;
    if !problems.is_empty() {
        let text = document::format_problems(&problems, &file, "\n");
        return Err(InvalidInput(text).into());
    }
    if format.is_json() {
        let settings = settings.iter().map(|it| setting_json(it, &file));
        output::print_json(&json!({"data": settings.collect::<Value>()}))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::print_line(format_args!(
        "{}",
        settings_text(&settings, &file).trim_end()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn setting_json(setting: &SettingInForce, file: &str) -> Value {
    let source = match &setting.origin {
        None => json!({"kind": "default"}),
        Some(Origin::Whole) => json!({"kind": "file", "file": file}),
        Some(Origin::File { line, .. }) => json!({"kind": "file", "file": file, "line": line}),
        Some(Origin::External(name)) => match name.starts_with("--") {
            true => json!({"kind": "flag", "name": name}),
            false => json!({"kind": "environment", "name": name}),
        },
    };
    let key = format!("{}.{}", setting.table, setting.key);
    json!({"key": key, "value": setting.value, "source": source})
}

/// The settings as a configuration file with the sources as comments.
fn settings_text(settings: &[SettingInForce], file: &str) -> String {
    let mut tables: BTreeMap<&str, Vec<(String, String)>> = BTreeMap::new();
    for setting in settings {
        let line = match setting.value.as_ref().and_then(inline_value) {
            Some(value) => format!("{} = {value}", setting.key),
            None => format!("# {}", setting.key),
        };
        let source = match &setting.origin {
            None if setting.value.is_none() => "not set".to_owned(),
            None => "default".to_owned(),
            Some(Origin::Whole) => file.to_owned(),
            Some(Origin::File { line, .. }) => format!("{file}:{line}"),
            Some(Origin::External(name)) => name.clone(),
        };
        let lines = tables.entry(&setting.table).or_default();
        lines.push((line, source));
    }
    let mut text = String::new();
    for (table, lines) in tables {
        let widths = lines.iter().map(|(line, _)| line.chars().count());
        // A long value does not move the comments of all others.
        let width = widths.filter(|width| *width <= 40).max().unwrap_or(0);
        let gap = if text.is_empty() { "" } else { "\n" };
        text.push_str(&format!("{gap}[{table}]\n"));
        for (line, source) in lines {
            text.push_str(&format!("{line:width$}  # {source}\n"));
        }
    }
    text
}
