//! The files of datasets: `<name>.jsonl` in one directory. Clients name them, never a path.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::catalog::reload;
use crate::domain::agent::is_agent_name;
use crate::domain::dataset::{self, Case, CheckRequest, DatasetError};
use crate::settings::suggestion;

const SUFFIX: &str = ".jsonl";

/// Why no file has this name.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    #[error(
        "{name:?} is no name of a dataset: 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"
    )]
    Invalid { name: String },
    #[error("there is no dataset {name} in {}{hint}", .dir.display())]
    NotFound {
        name: String,
        dir: PathBuf,
        /// Names the one that was perhaps meant.
        hint: String,
    },
}

/// The names of the datasets in the directory, sorted; none if there is no directory.
pub fn names(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let file_name = entry?.file_name();
        let name = file_name.to_str().and_then(|it| it.strip_suffix(SUFFIX));
        names.extend(name.filter(|it| is_agent_name(it)).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Where a dataset of this name is, or would be.
pub fn path(dir: &Path, name: &str) -> Result<PathBuf, NameError> {
    match is_agent_name(name) {
        true => Ok(dir.join(format!("{name}{SUFFIX}"))),
        false => Err(NameError::Invalid {
            name: name.to_owned(),
        }),
    }
}

/// The file of a dataset that exists.
pub fn find(dir: &Path, name: &str) -> Result<PathBuf, NameError> {
    let path = path(dir, name)?;
    if path.exists() {
        return Ok(path);
    }
    let known = names(dir).unwrap_or_default();
    let hint = suggestion::did_you_mean(name, known.iter().map(String::as_str));
    Err(NameError::NotFound {
        name: name.to_owned(),
        dir: dir.to_owned(),
        hint: suggestion::clause(hint),
    })
}

/// Reads the file of a dataset.
///
/// # Errors
/// Everything that is wrong with it.
pub fn read(path: &Path, check: &CheckRequest<'_>) -> Result<Vec<Case>, Vec<DatasetError>> {
    dataset::parse(&read_bytes(path)?, check)
}

/// The bytes of the file; one more than allowed if it is too large.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, Vec<DatasetError>> {
    let bytes = reload::read_file(path, dataset::MAX_BYTES);
    let bytes = bytes.unwrap_or_else(|| Err("is no file".to_owned()));
    bytes.map_err(|why| vec![DatasetError::of_file(why)])
}
