//! Finds the recordings that a test runs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cli::exit::InvalidInput;
use crate::domain::recording::MAX_BYTES;
use crate::engine::recording::read;

/// Where recordings are by default.
const DEFAULT_DIR: &str = "tests";
const MAX_FILES: usize = 10_000;
const MAX_DEPTH: usize = 32;

pub struct FoundFile {
    pub path: PathBuf,
    pub text: String,
}

/// The recordings at these paths, sorted within each directory. A directory's other TOML files are left out.
pub fn find(paths: &[PathBuf]) -> anyhow::Result<Vec<FoundFile>> {
    let default = [PathBuf::from(DEFAULT_DIR)];
    let paths = if paths.is_empty() { &default } else { paths };
    let mut found = Vec::new();
    for path in paths {
        let metadata = fs::metadata(path).map_err(|error| {
            let InvalidInput(message) = InvalidInput::unreadable(path, &error);
            invalid(format!(
                "{message}; axed runs save RUN {DEFAULT_DIR}/name.toml makes a recording"
            ))
        })?;
        let before = found.len();
        if metadata.is_dir() {
            find_in(path, 0, &mut found)?;
        } else {
            found.push(read(path.clone())?);
        }
        if found.len() == before {
            return Err(invalid(format!(
                "{} has no recordings; axed runs save RUN {DEFAULT_DIR}/name.toml makes one",
                path.display()
            )));
        }
    }
    Ok(found)
}

fn find_in(dir: &Path, depth: usize, found: &mut Vec<FoundFile>) -> anyhow::Result<()> {
    let failed = |error| invalid(format!("{}: {error}", dir.display()));
    let entries = fs::read_dir(dir).map_err(failed)?;
    let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        // Links are not followed, so that there is no circle.
        let kind = entry.file_type().map_err(failed)?;
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if kind.is_dir() && !is_hidden && depth < MAX_DEPTH {
            find_in(&path, depth + 1, found)?;
        } else if kind.is_file() && path.extension().is_some_and(|it| it == "toml") {
            let file = read(path)?;
            if read::may_be_recording(&file.text) {
                found.push(file);
            }
        }
        if found.len() > MAX_FILES {
            return Err(invalid(format!(
                "{} has more than {MAX_FILES} recordings",
                dir.display()
            )));
        }
    }
    Ok(())
}

fn read(path: PathBuf) -> anyhow::Result<FoundFile> {
    let failed = |why: String| invalid(format!("{}: {why}", path.display()));
    let bytes = fs::metadata(&path).map_err(|error| failed(error.to_string()))?;
    if bytes.len() > MAX_BYTES as u64 {
        return Err(failed(format!(
            "has {} bytes; a recording has at most {MAX_BYTES}",
            bytes.len()
        )));
    }
    let text = fs::read_to_string(&path).map_err(|error| failed(error.to_string()))?;
    Ok(FoundFile { path, text })
}

fn invalid(message: String) -> anyhow::Error {
    InvalidInput(message).into()
}
