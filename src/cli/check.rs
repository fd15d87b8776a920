//! Checks files and prints their problems as lines that editors and scripts understand: `<file>:<line>:<column>: error: …`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::app;
use crate::catalog::reload::{self, Catalog, Inspector};
use crate::catalog::{Agents, Rules};
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::config::Config;
use crate::domain::agent::is_agent_name;
use crate::domain::counted::counted;
use crate::settings::document::{Origin, Problem, ProblemKind};

/// Prints problems on stdout, and counts them.
pub struct Report {
    format: FormatArgs,
    /// For JSON, which is printed at the end.
    files: Vec<Value>,
    errors: usize,
    warnings: usize,
}

impl Report {
    pub fn new(format: FormatArgs) -> Self {
        Self {
            format,
            files: Vec::new(),
            errors: 0,
            warnings: 0,
        }
    }

    /// Prints the file's problems, or that it has none.
    pub fn add_file<'p>(
        &mut self,
        file: &str,
        problems: impl IntoIterator<Item = &'p Problem>,
    ) -> anyhow::Result<()> {
        let problems: Vec<&Problem> = problems.into_iter().collect();
        let errors = problems.iter().filter(|problem| problem.is_error()).count();
        self.errors += errors;
        self.warnings += problems.len() - errors;
        let entries: Value = problems.iter().map(|it| problem_json(it)).collect();
        self.files.push(json!({"file": file, "problems": entries}));
        if self.format.is_json() {
            return Ok(());
        }
        if problems.is_empty() {
            output::print_line(format_args!("{file}: ok"))?;
        }
        for problem in problems {
            output::print_line(format_args!("{}", problem.format_with_severity(file)))?;
        }
        Ok(())
    }

    /// Prints a warning about a directory of agents that does not exist.
    pub fn add_missing_dir(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.warnings += 1;
        if self.format.is_json() {
            return Ok(());
        }
        let dir = dir.display();
        output::print_line(format_args!(
            "{dir}: warning: there is no agents directory {dir}"
        ))
    }

    /// Prints the sum on stderr. The exit code is 2 if there are errors, or, if `strict`, warnings.
    pub fn finish(self, strict: bool) -> anyhow::Result<ExitCode> {
        let Self {
            format,
            files,
            errors,
            warnings,
        } = self;
        output::eprint_line(format_args!(
            "axed: {} checked: {}, {}",
            counted(files.len(), "file"),
            counted(errors, "error"),
            counted(warnings, "warning")
        ));
        if format.is_json() {
            output::print_json(&json!({"data": files, "errors": errors, "warnings": warnings}))?;
        }
        match errors > 0 || (strict && warnings > 0) {
            true => Ok(ExitCode::from(2)),
            false => Ok(ExitCode::SUCCESS),
        }
    }
}

fn problem_json(problem: &Problem) -> Value {
    let severity = if problem.is_error() {
        "error"
    } else {
        "warning"
    };
    let mut entry = json!({"severity": severity, "message": problem.message()});
    match &problem.origin {
        Origin::Whole => {}
        Origin::File { line, column } => {
            entry["line"] = json!(line);
            entry["column"] = json!(column);
        }
        Origin::External(name) => entry["source"] = json!(name),
    }
    entry
}

/// Checks agent files against the configuration, and against each other.
pub fn check_agents(
    report: &mut Report,
    config: &Config,
    requested: &[RequestedPath],
) -> anyhow::Result<()> {
    let mut dirs: Vec<PathBuf> = requested.iter().map(|it| it.dir.clone()).collect();
    dirs.extend(config.agents.dirs.iter().cloned());
    remove_duplicates(&mut dirs);
    let inspector: Box<Inspector> = match app::agent_check(config) {
        Ok(check) => Box::new(move |agents: &Agents| check.check(agents)),
        Err(error) => {
            let file = config.config_file.display().to_string();
            let problem = Problem::of_file(ProblemKind::RuleViolation, error.to_string());
            report.add_file(&file, [&problem])?;
            Box::new(|_| BTreeMap::new())
        }
    };
    let rules = Rules::from_config(config);
    let agents = Catalog::open_with_inspector(dirs.clone(), rules, inspector).current();
    let mut files: BTreeMap<&Path, Vec<&Problem>> = BTreeMap::new();
    for entry in agents.entries.values() {
        let problems = entry.problems.iter().chain(&entry.warnings);
        files.insert(&entry.path, problems.collect());
    }
    for (path, problem) in &agents.ignored_files {
        files.insert(path, vec![problem]);
    }
    let is_requested =
        |path: &Path| requested.is_empty() || requested.iter().any(|it| it.has(path));
    files.retain(|path, _| is_requested(path));
    for (path, problems) in &mut files {
        problems.sort_by(|a, b| a.origin.cmp(&b.origin));
        let path = path.strip_prefix(".").unwrap_or(path);
        report.add_file(&path.display().to_string(), problems.iter().copied())?;
    }
    if files.is_empty() {
        let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        output::eprint_line(format_args!("axed: no agent files in {}", dirs.join(", ")));
    }
    Ok(())
}

/// A file or directory that the user named.
pub struct RequestedPath {
    dir: PathBuf,
    /// `None`: all files of the directory.
    file: Option<PathBuf>,
}

impl RequestedPath {
    /// # Errors
    /// The path cannot be read, or is a file that no agent can have.
    pub fn new(path: &Path) -> anyhow::Result<Self> {
        let unreadable = |error: io::Error| {
            let InvalidInput(message) = InvalidInput::unreadable(path, &error);
            let hint = match path.to_str() {
                Some(name) if is_agent_name(name) && !reload::is_toml(path) => {
                    format!("; name the agent's file, such as agents/{name}.toml")
                }
                _ => String::new(),
            };
            InvalidInput(format!("{message}{hint}"))
        };
        if fs::metadata(path).map_err(unreadable)?.is_dir() {
            reload::list_agent_files(path).map_err(unreadable)?;
            let dir = path.to_owned();
            return Ok(Self { dir, file: None });
        }
        fs::File::open(path).map_err(unreadable)?;
        if !reload::is_toml(path) {
            let path = path.display();
            let text = format!("{path} is no agent file: the file of an agent is <name>.toml");
            return Err(InvalidInput(text).into());
        }
        let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        Ok(Self {
            dir: parent.unwrap_or(Path::new(".")).to_owned(),
            file: path.file_name().map(PathBuf::from),
        })
    }

    fn has(&self, path: &Path) -> bool {
        let name = path.file_name().map(Path::new);
        path.parent() == Some(&self.dir)
            && self.file.as_deref().is_none_or(|file| name == Some(file))
    }
}

/// Keeps the first of several paths of one directory, which would otherwise hide its own files.
fn remove_duplicates(dirs: &mut Vec<PathBuf>) {
    let mut seen = Vec::new();
    dirs.retain(|dir| {
        let resolved = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
        let is_new = !seen.contains(&resolved);
        seen.push(resolved);
        is_new
    });
}
