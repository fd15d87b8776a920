//! Secrets of environment variables. A variable holds the secret itself, or its name with `_FILE` holds the path of a
//! file with the secret, as Docker, Kubernetes and systemd provide them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use secrecy::{ExposeSecret, SecretString};

use crate::config::environment::{Environment, env_value, process_environment};

const FILE_SUFFIX: &str = "_FILE";
/// Maximum size of a file with a secret.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// A secret that cannot be read. Never contains the secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {reason}")]
pub struct SecretError {
    /// The variable to correct.
    pub variable: String,
    pub reason: String,
}

/// The secret in the variable or in its file; `None` if neither is set. Blocks to read the file.
///
/// # Errors
/// Both are set, or the file cannot be used.
pub fn read_secret(
    environment: &Environment,
    name: &str,
) -> Result<Option<SecretString>, SecretError> {
    let value = env_value(environment, name);
    let Some((variable, path)) = file_variable(environment, name) else {
        return Ok(value.map(SecretString::from));
    };
    let result = match value {
        Some(_) => Err(format!("{name} is set too; unset one of the two")),
        None => read_file(path).map_err(|error| format!("the file {} {error}", path.display())),
    };
    match result {
        Ok(secret) => Ok(Some(SecretString::from(secret))),
        Err(reason) => Err(SecretError { variable, reason }),
    }
}

/// Whether the variable, or the one that names its file, is set.
pub fn is_secret_set(environment: &Environment, name: &str) -> bool {
    env_value(environment, name).is_some() || secret_file(environment, name).is_some()
}

/// The file with the variable's secret, if the environment names one.
pub fn secret_file<'e>(environment: &'e Environment, name: &str) -> Option<&'e Path> {
    file_variable(environment, name).map(|(_, path)| path)
}

/// The variable that the secret comes from, for messages about its text.
pub fn source_variable(environment: &Environment, name: &str) -> String {
    match file_variable(environment, name) {
        Some((variable, _)) => variable,
        None => name.to_owned(),
    }
}

/// The name of the secret, if this variable names its file.
pub fn without_file_suffix(variable: &str) -> Option<&str> {
    variable.strip_suffix(FILE_SUFFIX)
}

/// The key that commands send to a daemon: `AXED_KEY`.
///
/// # Errors
/// Those of [`read_secret`].
pub fn client_key() -> Result<Option<SecretString>, SecretError> {
    read_secret(&process_environment(), "AXED_KEY")
}

/// The trimmed secret from this process's environment. Blocks to read a file, which may have changed since the start.
///
/// # Errors
/// Those of [`read_secret`].
pub fn process_secret(name: &str) -> Result<Option<SecretString>, SecretError> {
    let secret = read_secret(&process_environment(), name)?;
    Ok(secret.map(|secret| SecretString::from(secret.expose_secret().trim())))
}

/// Whether this process's environment has the secret or names its file.
pub fn is_process_secret_set(name: &str) -> bool {
    is_secret_set(&process_environment(), name)
}

fn file_variable<'e>(environment: &'e Environment, name: &str) -> Option<(String, &'e Path)> {
    let variable = format!("{name}{FILE_SUFFIX}");
    let path = env_value(environment, &variable)?;
    Some((variable, Path::new(path)))
}

#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    // Opening a pipe could block for ever.
    #[error("is not a regular file")]
    NotRegular,
    #[error("is larger than {MAX_FILE_BYTES} bytes, which no secret is")]
    TooLarge,
    #[error("is not UTF-8 text")]
    NotText,
    #[error("is empty")]
    Empty,
}

/// The file's text without the newline at its end, which editors and `echo` add.
fn read_file(path: &Path) -> Result<String, FileError> {
    if !fs::metadata(path)?.is_file() {
        return Err(FileError::NotRegular);
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(FileError::TooLarge);
    }
    let text = String::from_utf8(bytes).map_err(|_| FileError::NotText)?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    let line = line.strip_suffix('\r').unwrap_or(line);
    match line.trim().is_empty() {
        true => Err(FileError::Empty),
        false => Ok(line.to_owned()),
    }
}
