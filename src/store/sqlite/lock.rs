//! The data directory: made where it is missing, and held by one process at a time. Knows no SQL.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use crate::store::StoreError;

/// Enough for a pid and a name; whatever else is in the file is not ours.
const MAX_HOLDER_BYTES: u64 = 300;

/// The lock on a data directory, held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Makes the directory, for its owner only, and locks it.
pub fn acquire(dir: &Path) -> Result<Lock, StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| io_error("make the data directory", dir, &error))?;
    let path = dir.join("lock");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(|error| io_error("open", &path, &error))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(StoreError::Locked {
                dir: dir.display().to_string(),
                holder: read_holder(&file),
            });
        }
        Err(TryLockError::Error(error)) => return Err(io_error("lock", &path, &error)),
    }
    write_holder(&mut file).map_err(|error| io_error("write", &path, &error))?;
    Ok(Lock { _file: file })
}

/// Makes an empty file that only its owner may read, where there is none. SQLite gives its log the same mode.
pub fn create_private_file(path: &Path) -> Result<(), StoreError> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
        .map(drop)
        .map_err(|error| io_error("write", path, &error))
}

fn write_holder(file: &mut File) -> std::io::Result<()> {
    let name = std::env::current_exe()
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .unwrap_or_else(|| "axed".to_owned());
    file.set_len(0)?;
    writeln!(file, "{name} (process {})", std::process::id())
}

fn read_holder(file: &File) -> String {
    let mut text = String::new();
    let result = file.take(MAX_HOLDER_BYTES).read_to_string(&mut text);
    let name = text.trim();
    // Between locking and signing the file is empty, or still has the name of a holder before.
    if result.is_err() || name.is_empty() || name.contains(char::is_control) {
        return "another process".to_owned();
    }
    name.to_owned()
}

fn io_error(action: &str, path: &Path, error: &std::io::Error) -> StoreError {
    StoreError::Backend(format!(
        "could not {action} {}: {error}; make it writable, or choose another directory with --data",
        path.display()
    ))
}
