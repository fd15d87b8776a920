//! Creates the data directory and locks it against other processes.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::store::StoreError;

/// Enough for a process id and a name; a longer file was not written by axed.
const MAX_HOLDER_BYTES: u64 = 300;

/// Attempts to lock, and the pause between two.
const MAX_ATTEMPTS: u32 = 20;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(25);

/// A lock on a data directory, released when it is dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Drop for Lock {
    /// Closing the file is not enough: a child process that was forked just now has it open, too, until it executes its
    /// program.
    fn drop(&mut self) {
        // An error leaves the lock until the file is closed.
        let _ = self.file.unlock();
    }
}

/// Creates the directory with access for its owner only, and locks it.
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
    let mut attempts = MAX_ATTEMPTS;
    while let Err(error) = file.try_lock() {
        attempts -= 1;
        match error {
            // A process that was just killed has it until it is gone.
            TryLockError::WouldBlock if attempts > 0 => thread::sleep(ATTEMPT_INTERVAL),
            TryLockError::WouldBlock => {
                return Err(StoreError::Locked {
                    dir: dir.display().to_string(),
                    holder: read_holder(&file),
                });
            }
            TryLockError::Error(error) => return Err(io_error("lock", &path, &error)),
        }
    }
    write_holder(&mut file).map_err(|error| io_error("write", &path, &error))?;
    Ok(Lock { file })
}

/// Creates an empty file with access for its owner only, unless it exists. SQLite gives its log the same mode.
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
    // Between locking and writing the file is empty, or has the name of the previous holder.
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
