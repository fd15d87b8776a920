//! The environment of this process: the only file that reads it, and what names of variables and sections look like.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use secrecy::SecretString;

/// The process's environment, read once.
pub type Environment = BTreeMap<String, String>;

/// The environment of this process. The only place that reads it.
pub fn process_environment() -> Environment {
    std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .collect()
}

/// The key that commands bring to a daemon: `AXED_KEY`.
pub fn client_key() -> Option<SecretString> {
    let environment = process_environment();
    env_value(&environment, "AXED_KEY").map(SecretString::from)
}

/// The secret in this variable of the process's environment, where it is set.
pub fn secret_from_env(name: &str) -> Option<SecretString> {
    env_value(&process_environment(), name).map(|secret| SecretString::from(secret.trim()))
}

/// The home directory of this process's user, for paths that begin with `~` in agent files.
pub fn home_dir() -> Option<PathBuf> {
    std::env::home_dir().filter(|home| !home.as_os_str().is_empty())
}

/// `~` and `~/…` below `home`; anything else, and everything without a home, as it stands.
pub fn expand_home(path: &str, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(rest), Some(home)) if rest.starts_with('/') => {
            home.join(rest.trim_start_matches('/'))
        }
        _ => PathBuf::from(path),
    }
}

/// A variable that is set: an empty one counts as unset.
pub fn env_value<'e>(environment: &'e Environment, name: &str) -> Option<&'e str> {
    let value = environment.get(name)?;
    (!value.trim().is_empty()).then_some(value.as_str())
}

/// A name as variables spell it: upper case, everything but letters and digits as `_`.
pub fn variable_name(name: &str) -> String {
    let upper = name.chars().map(|c| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_uppercase(),
        false => '_',
    });
    upper.collect()
}

/// Whether a section may have this name of its writer's choice: two underscores part the steps of a variable's name.
pub fn is_valid_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_plain)
        && !name.contains("__")
}

/// The name of an environment variable.
pub fn check_variable_name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    match !text.is_empty() && text.chars().all(is_plain) {
        true => Ok(text.to_owned()),
        // The text may be the secret itself, put here by mistake.
        false => {
            Err("must be the name of an environment variable, and not the secret itself".to_owned())
        }
    }
}
