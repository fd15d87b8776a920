//! Memories of agents as files. The format is documented in `agents.md`, Memory.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::domain::memory_entry::{MemoryEntry, parse};
use crate::store::memories::{MEMORY_DIR, MemoryId, NewMemoryEntry};

/// A larger memory file is not read: something else wrote it.
const MAX_FILE: u64 = 64 << 20;
const FILE_SUFFIX: &str = ".md";

/// Writes to the same file are serialised.
pub struct MemoryFiles {
    directory: PathBuf,
    file_locks: Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>,
}

impl MemoryFiles {
    pub fn new(data_dir: &Path) -> Self {
        Self {
            directory: data_dir.join(MEMORY_DIR),
            file_locks: Mutex::default(),
        }
    }

    pub fn entries(&self, memory: &MemoryId) -> io::Result<Vec<MemoryEntry>> {
        read(&memory.file(&self.directory)).map(|text| parse(&text))
    }

    /// Returns the number of entries once the new one is on disk.
    pub fn add(&self, memory: &MemoryId, entry: &NewMemoryEntry) -> io::Result<usize> {
        let path = memory.file(&self.directory);
        let file_lock = self.file_lock(&path);
        let _guard = file_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if entry.may_exist {
            let entries = parse(&read(&path)?);
            if (entries.iter().rev()).any(|existing| existing.text == entry.text) {
                return Ok(entries.len());
            }
        }
        append(&path, &entry.text)
    }

    /// Replaces the file atomically, and returns the number of entries.
    pub fn trim(&self, memory: &MemoryId, keep: usize) -> io::Result<usize> {
        let path = memory.file(&self.directory);
        let file_lock = self.file_lock(&path);
        let _guard = file_lock.lock().unwrap_or_else(PoisonError::into_inner);
        trim(&path, keep)
    }

    fn file_lock(&self, path: &Path) -> Arc<Mutex<()>> {
        let mut file_locks = self
            .file_locks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Arc::clone(file_locks.entry(path.to_owned()).or_default())
    }
}

/// The memories of a data directory, without those whose files agents name themselves.
pub fn list(data_dir: &Path) -> io::Result<Vec<MemoryId>> {
    let directory = data_dir.join(MEMORY_DIR);
    let mut memories = Vec::new();
    for (name, path) in read_directory(&directory)? {
        if !path.is_dir() {
            memories.extend(
                name.strip_suffix(FILE_SUFFIX)
                    .map(|agent| (agent.to_owned(), None)),
            );
            continue;
        }
        for (file, _) in read_directory(&path)? {
            let owner = file.strip_suffix(FILE_SUFFIX);
            memories.extend(owner.map(|owner| (name.clone(), Some(owner.to_owned()))));
        }
    }
    memories.sort();
    let memory = |(agent, owner)| MemoryId {
        agent,
        owner,
        path: None,
    };
    Ok(memories.into_iter().map(memory).collect())
}

/// Names and paths; nothing if there is no such directory.
fn read_directory(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let found = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.map_err(|error| with_path(directory, &error))?,
    };
    let mut files = Vec::new();
    for file in found {
        let file = file?;
        let name = file.file_name().into_string();
        files.extend(name.ok().map(|name| (name, file.path())));
    }
    Ok(files)
}

/// Writes the memories of a data directory that has none: all of them, or none.
pub fn create(
    data_dir: &Path,
    memories: impl IntoIterator<Item = (MemoryId, String)>,
) -> io::Result<()> {
    let new = data_dir.join(format!("{MEMORY_DIR}.new"));
    unless_missing(&new, fs::remove_dir_all(&new))?;
    for (memory, text) in memories {
        append(&memory.file(&new), &text)?;
    }
    if new.exists() {
        let directory = data_dir.join(MEMORY_DIR);
        unless_missing(&directory, fs::remove_dir(&directory))?;
        fs::rename(&new, &directory).map_err(|error| with_path(&directory, &error))?;
    }
    Ok(())
}

fn unless_missing(path: &Path, removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(with_path(path, &error)),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(with_path(path, &error)),
    };
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > MAX_FILE {
        return Err(io::Error::other(format!(
            "{} is no memory file of at most {MAX_FILE} bytes",
            path.display()
        )));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)
        .map_err(|error| with_path(path, &error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn append(path: &Path, entry: &str) -> io::Result<usize> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(|error| with_path(directory, &error))?;
    }
    let mut file = open_locked(path)?;
    let before = read(path)?;
    let length = file.metadata()?.len();
    // An entry without its blank line, after a crash or an edit, must not run into the new one.
    let gap = match () {
        () if before.is_empty() || before.ends_with("\n\n") => "",
        () if before.ends_with('\n') => "\n",
        () => "\n\n",
    };
    let result = file
        .write_all(format!("{gap}{entry}").as_bytes())
        .and_then(|()| file.sync_data());
    if let Err(error) = result {
        // The disk may be full: a partial entry is removed if possible.
        if let Err(error) = file.set_len(length) {
            tracing::warn!(error = %error, "{} ends with a part of an entry: {error}", path.display());
        }
        return Err(with_path(path, &error));
    }
    Ok(parse(&before).len() + 1)
}

fn trim(path: &Path, keep: usize) -> io::Result<usize> {
    if !path.exists() {
        return Ok(0);
    }
    let _lock = open_locked(path)?;
    let entries = parse(&read(path)?);
    if entries.len() <= keep {
        return Ok(entries.len());
    }
    let newest: String = entries[entries.len() - keep..]
        .iter()
        .map(|entry| entry.text.as_str())
        .collect();
    let temp_path = path.with_extension("md.new");
    let mut file = fs::File::create(&temp_path).map_err(|error| with_path(&temp_path, &error))?;
    file.write_all(newest.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temp_path, path).map_err(|error| with_path(path, &error))?;
    Ok(keep)
}

/// Opens the file for appending and locks it against other processes: `axed run` may write beside a daemon.
fn open_locked(path: &Path) -> io::Result<fs::File> {
    loop {
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|error| with_path(path, &error))?;
        match file.lock() {
            // Some network disks have no locks; only one process may write there.
            Err(error) if error.kind() != io::ErrorKind::Unsupported => {
                return Err(with_path(path, &error));
            }
            _ => {}
        }
        // The previous holder of the lock may have replaced the file.
        let is_same = |other: fs::Metadata| {
            let own = file.metadata()?;
            io::Result::Ok((own.dev(), own.ino()) == (other.dev(), other.ino()))
        };
        if fs::metadata(path).and_then(is_same).unwrap_or(false) {
            return Ok(file);
        }
    }
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::{append, read, trim};
    use crate::domain::memory_entry::{parse, render};

    fn timestamp(second: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn appending_counts_mends_a_torn_end_and_trimming_keeps_the_newest() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("deep/a.md");
        for n in 0..3 {
            assert_eq!(
                append(&path, &render(timestamp(n), &format!("task {n}"), "ok")).expect("written"),
                n as usize + 1
            );
        }
        let torn = format!(
            "{}## 1970-01-01T00:00:09Z\n**Task:** torn",
            read(&path).expect("read")
        );
        std::fs::write(&path, torn).expect("written");
        assert_eq!(
            append(&path, &render(timestamp(10), "after", "ok")).expect("written"),
            5
        );
        let entries = parse(&read(&path).expect("read"));
        assert_eq!(entries[4].task, "after");
        assert_eq!(trim(&path, 2).expect("trimmed"), 2);
        let entries = parse(&read(&path).expect("read"));
        assert_eq!(
            entries
                .iter()
                .map(|entry| entry.task.as_str())
                .collect::<Vec<_>>(),
            ["torn", "after"]
        );
    }
}
