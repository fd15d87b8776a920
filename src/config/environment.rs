//! Reads the environment of this process; no other file does. Also checks the names of variables, and of sections
//! that variables can name.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::settings::kinds::expand_home;

pub type Environment = BTreeMap<String, String>;

/// Skips variables that are not UTF-8.
pub fn process_environment() -> Environment {
    std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .collect()
}

/// The daemon that commands use: `AXED_SERVER`.
pub fn client_server() -> Option<String> {
    env_value(&process_environment(), "AXED_SERVER").map(|server| server.trim().to_owned())
}

/// The user's editor with its arguments: `VISUAL` or `EDITOR`.
pub fn editor() -> Option<String> {
    let environment = process_environment();
    let editor = env_value(&environment, "VISUAL").or_else(|| env_value(&environment, "EDITOR"));
    editor.map(str::to_owned)
}

/// The user's home directory, for paths in agent files that start with `~`.
pub fn home_dir() -> Option<PathBuf> {
    std::env::home_dir().filter(|home| !home.as_os_str().is_empty())
}

/// The directory of the skills that are named without a path.
pub fn skills_dir(config_dir: &Path) -> PathBuf {
    config_dir.join("skills")
}

/// The directory of a skill in an agent's file: absolute, below `~`, relative to the config directory, or
/// `skills/<name>` there for a bare name.
pub fn skill_dir(entry: &str, config_dir: &Path) -> PathBuf {
    match entry.contains('/') {
        true => config_dir.join(expand_home(entry, home_dir().as_deref())),
        false => skills_dir(config_dir).join(entry),
    }
}

/// Where the system searches programs if PATH is not set.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Whether this is a program that a process with this environment can start: searched in PATH if it has no slash.
pub fn is_program(environment: &Environment, command: &str) -> bool {
    let is_executable = |path: PathBuf| {
        let meta = fs::metadata(path);
        meta.is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if command.contains('/') {
        return is_executable(PathBuf::from(command));
    }
    let path = environment.get("PATH");
    let mut dirs = path.map_or(DEFAULT_PATH, String::as_str).split(':');
    dirs.any(|dir| is_executable(Path::new(dir).join(command)))
}

/// The variable's value; `None` if it is unset or blank.
pub fn env_value<'e>(environment: &'e Environment, name: &str) -> Option<&'e str> {
    let value = environment.get(name)?;
    (!value.trim().is_empty()).then_some(value.as_str())
}

/// The name as part of a variable's name: upper case, with `_` for everything but letters and digits.
pub fn variable_name(name: &str) -> String {
    let upper = name.chars().map(|c| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_uppercase(),
        false => '_',
    });
    upper.collect()
}

/// Whether the user may give a section this name. It must not contain `__`, which separates the parts of a variable's
/// name.
pub fn is_valid_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_plain)
        && !name.contains("__")
}
