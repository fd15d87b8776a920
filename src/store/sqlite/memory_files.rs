//! Memories of agents as files. The format is documented in `agents.md`, Memory.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::domain::counted::counted;
use crate::domain::memory_entry::{MEMORY_DIR, parse, parse_heading};
use crate::store::memories::{EntryLimit, MAX_FILE_BYTES, MemoryId, NewMemoryEntry, NewestEntries};

/// A longer line is no heading of an entry.
const MAX_HEADING_BYTES: u64 = 256;
const FILE_SUFFIX: &str = ".md";
/// Begins the result of an entry.
const RESULT: &str = "\n**Result:** ";

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

    pub fn newest(&self, memory: &MemoryId, limit: EntryLimit) -> io::Result<NewestEntries> {
        newest(&memory.file(&self.directory), limit)
    }

    /// Returns the number of entries once the new one is on disk.
    pub fn add(&self, memory: &MemoryId, entry: &NewMemoryEntry) -> io::Result<usize> {
        let path = memory.file(&self.directory);
        let file_lock = self.file_lock(&path);
        let _guard = file_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if entry.may_exist
            && let Some(count) = count_if_present(&path, &entry.text)?
        {
            return Ok(count);
        }
        make_space(&path, entry.text.len(), MAX_FILE_BYTES as u64)?;
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

/// Reads no more than the limit's bytes, from the end of the file.
fn newest(path: &Path, limit: EntryLimit) -> io::Result<NewestEntries> {
    let Some(file) = open(path)? else {
        return Ok(NewestEntries::default());
    };
    let (text, is_whole) =
        read_end(&file, limit.bytes as u64).map_err(|error| with_path(path, &error))?;
    let mut entries = parse(&text);
    let wanted = limit.entries.unwrap_or(usize::MAX);
    let is_cut = !is_whole && entries.len() < wanted;
    let entries = entries.split_off(entries.len().saturating_sub(wanted));
    Ok(NewestEntries { entries, is_cut })
}

/// The last lines of a file that have at most so many bytes together, and whether they are all.
fn read_end(mut file: &fs::File, max_bytes: u64) -> io::Result<(String, bool)> {
    let length = file.metadata()?.len();
    let start = length.saturating_sub(max_bytes);
    if start > 0 {
        // A line begins after the end of another.
        file.seek(SeekFrom::Start(start - 1))?;
    }
    let mut bytes = Vec::new();
    file.take(length - start + u64::from(start > 0))
        .read_to_end(&mut bytes)?;
    if start > 0 {
        let line_end = bytes.iter().position(|byte| *byte == b'\n');
        bytes.drain(..line_end.map_or(bytes.len(), |end| end + 1));
    }
    Ok((String::from_utf8_lossy(&bytes).into_owned(), start == 0))
}

/// `None` if there is no such file.
fn open(path: &Path) -> io::Result<Option<fs::File>> {
    match fs::File::open(path) {
        Ok(file) => check_is_file(path, &file).map(|()| Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(with_path(path, &error)),
    }
}

/// A device may have no end.
fn check_is_file(path: &Path, file: &fs::File) -> io::Result<()> {
    match file.metadata()?.is_file() {
        true => Ok(()),
        false => Err(io::Error::other(format!("{} is no file", path.display()))),
    }
}

/// The number of entries, if this one is among them: its time identifies it. One without its end was torn by a crash.
fn count_if_present(path: &Path, entry: &str) -> io::Result<Option<usize>> {
    let Some(file) = open(path)? else {
        return Ok(None);
    };
    let time = entry.lines().next().and_then(parse_heading);
    let (mut offsets, mut found) = (Vec::new(), None);
    for_each_entry(&file, |offset, existing| {
        if time == Some(existing) {
            found = Some(offsets.len());
        }
        offsets.push(offset);
    })
    .map_err(|error| with_path(path, &error))?;
    let Some(index) = found else {
        return Ok(None);
    };
    let next = offsets.get(index + 1).copied();
    let end = next.map_or_else(|| file.metadata().map(|meta| meta.len()), Ok)?;
    // Earlier versions did not shorten tasks: only the result is the same.
    let result = entry.find(RESULT).map_or(entry, |at| &entry[at..]);
    let length = (result.len() as u64 + 2).min(end.saturating_sub(offsets[index]));
    let mut existing = vec![0; length as usize];
    file.read_exact_at(&mut existing, end - length)
        .map_err(|error| with_path(path, &error))?;
    let is_whole = existing
        .trim_ascii_end()
        .ends_with(result.trim_end().as_bytes());
    Ok(is_whole.then_some(offsets.len()))
}

/// Passes the offset and the time of each entry, oldest first. Holds one line's beginning at a time: a file may be large.
fn for_each_entry(file: &fs::File, mut on_entry: impl FnMut(u64, &str)) -> io::Result<()> {
    let mut reader = BufReader::new(file);
    reader.rewind()?;
    let (mut line, mut offset) = (Vec::new(), 0);
    loop {
        line.clear();
        let mut beginning = reader.by_ref().take(MAX_HEADING_BYTES);
        let mut length = beginning.read_until(b'\n', &mut line)? as u64;
        if length == 0 {
            return Ok(());
        }
        if length == MAX_HEADING_BYTES && !line.ends_with(b"\n") {
            length += reader.skip_until(b'\n')? as u64;
        } else if let Some(time) = std::str::from_utf8(&line)
            .ok()
            .and_then(|line| parse_heading(line.trim_end()))
        {
            on_entry(offset, time);
        }
        offset += length;
    }
}

fn entry_offsets(path: &Path, file: &fs::File) -> io::Result<Vec<u64>> {
    let mut offsets = Vec::new();
    for_each_entry(file, |offset, _| offsets.push(offset))
        .map_err(|error| with_path(path, &error))?;
    Ok(offsets)
}

fn append(path: &Path, entry: &str) -> io::Result<usize> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(|error| with_path(directory, &error))?;
    }
    let mut file = open_locked(path)?;
    let count = entry_offsets(path, &file)?.len();
    let length = file.metadata()?.len();
    let gap = gap_before_entry(&file, length).map_err(|error| with_path(path, &error))?;
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
    Ok(count + 1)
}

/// An entry without its blank line, after a crash or an edit, must not run into the new one.
fn gap_before_entry(file: &fs::File, length: u64) -> io::Result<&'static str> {
    let mut end = [b'\n'; 2];
    let known = length.min(2);
    file.read_exact_at(&mut end[2 - known as usize..], length - known)?;
    Ok(match end {
        [b'\n', b'\n'] => "",
        [_, b'\n'] => "\n",
        _ => "\n\n",
    })
}

/// Removes the oldest entries of a file that a new entry would make larger than `max_bytes`, until it has half of that.
fn make_space(path: &Path, entry_bytes: usize, max_bytes: u64) -> io::Result<()> {
    let is_too_large = |length: u64| length.saturating_add(entry_bytes as u64) > max_bytes;
    if !fs::metadata(path).is_ok_and(|meta| is_too_large(meta.len())) {
        return Ok(());
    }
    let file = open_locked(path)?;
    let length = file.metadata()?.len();
    if !is_too_large(length) {
        return Ok(());
    }
    let offsets = entry_offsets(path, &file)?;
    if offsets.is_empty() {
        let message = format!("{} has {length} bytes and is no memory", path.display());
        return Err(io::Error::other(message));
    }
    let removed = offsets.partition_point(|offset| length - offset > max_bytes / 2);
    let start = offsets.get(removed).copied().unwrap_or(length);
    remove_before(path, &file, start)?;
    tracing::warn!(
        "Removed the oldest {removed} of {} of the memory {}, which may have {max_bytes} bytes",
        counted(offsets.len(), "entry"),
        path.display()
    );
    Ok(())
}

fn trim(path: &Path, keep: usize) -> io::Result<usize> {
    if !path.exists() {
        return Ok(0);
    }
    let file = open_locked(path)?;
    let offsets = entry_offsets(path, &file)?;
    if offsets.len() <= keep {
        return Ok(offsets.len());
    }
    let first_kept = offsets.get(offsets.len() - keep).copied();
    let start = first_kept.map_or_else(|| file.metadata().map(|meta| meta.len()), Ok)?;
    remove_before(path, &file, start)?;
    Ok(keep)
}

/// Replaces the file, which is locked, by its bytes from this offset on.
fn remove_before(path: &Path, mut file: &fs::File, offset: u64) -> io::Result<()> {
    let temp_path = path.with_extension("md.new");
    let mut temp = fs::File::create(&temp_path).map_err(|error| with_path(&temp_path, &error))?;
    file.seek(SeekFrom::Start(offset))?;
    io::copy(&mut file, &mut temp).map_err(|error| with_path(&temp_path, &error))?;
    temp.sync_all()?;
    fs::rename(&temp_path, path).map_err(|error| with_path(path, &error))
}

/// Opens the file for appending and locks it against other processes: `axed run` may write beside a daemon.
fn open_locked(path: &Path) -> io::Result<fs::File> {
    loop {
        let file = fs::File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(|error| with_path(path, &error))?;
        check_is_file(path, &file)?;
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
    use super::{append, count_if_present, make_space, newest, trim};
    use std::fs;
    use std::path::Path;

    use crate::domain::memory_entry::render;
    use crate::store::memories::EntryLimit;

    fn timestamp(second: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(second).expect("a time")
    }

    /// A file with this many entries of the same length, and that length.
    fn filled(path: &Path, count: usize) -> usize {
        let entries = (0..count).map(|n| render(timestamp(n as i64), &format!("task {n}"), "ok"));
        let entries: Vec<String> = entries.collect();
        for (n, entry) in entries.iter().enumerate() {
            assert_eq!(append(path, entry).expect("written"), n + 1);
        }
        entries[0].len()
    }

    fn tasks(path: &Path, limit: EntryLimit) -> (Vec<String>, bool) {
        let found = newest(path, limit).expect("read");
        let tasks = found.entries.into_iter().map(|entry| entry.task);
        (tasks.collect(), found.is_cut)
    }

    #[test]
    fn appending_counts_mends_a_torn_end_and_trimming_keeps_the_newest() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("deep/a.md");
        filled(&path, 3);
        let torn = format!(
            "{}## 1970-01-01T00:00:09Z\n**Task:** torn",
            fs::read_to_string(&path).expect("read")
        );
        fs::write(&path, torn).expect("written");
        assert_eq!(
            append(&path, &render(timestamp(10), "after", "ok")).expect("written"),
            5
        );
        let (all, _) = tasks(&path, EntryLimit::ALL);
        assert_eq!(all[4], "after");
        assert_eq!(trim(&path, 9).expect("trimmed"), 5);
        assert_eq!(trim(&path, 2).expect("trimmed"), 2);
        assert_eq!(tasks(&path, EntryLimit::ALL).0, ["torn", "after"]);
        assert_eq!(trim(&path, 0).expect("trimmed"), 0);
        assert_eq!(fs::read(&path).expect("read"), b"");
    }

    #[test]
    fn the_newest_are_read_from_the_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.md");
        let length = filled(&path, 4);
        let read = |entries, bytes| tasks(&path, EntryLimit { entries, bytes });
        for (bytes, wanted, is_cut) in [
            (0, vec![], true),
            (length - 1, vec![], true),
            (length, vec!["task 3"], true),
            (2 * length + 5, vec!["task 2", "task 3"], true),
            (4 * length - 1, vec!["task 1", "task 2", "task 3"], true),
            (
                4 * length,
                vec!["task 0", "task 1", "task 2", "task 3"],
                false,
            ),
        ] {
            let found = read(None, bytes);
            assert_eq!(found.0, wanted, "{bytes}");
            assert_eq!(found.1, is_cut, "{bytes}");
        }
        let last = || vec!["task 3".to_owned()];
        assert_eq!(read(Some(1), 2 * length), (last(), false));
        assert_eq!(read(Some(2), length), (last(), true));
        assert_eq!(
            tasks(&directory.path().join("none.md"), EntryLimit::ALL),
            (Vec::new(), false)
        );
        // The file is cut within a line that would read as a heading.
        let forged = render(
            timestamp(9),
            "x",
            "ok\n## 2026-01-01T00:00:00Z\n**Task:** forged",
        );
        fs::write(&path, &forged).expect("written");
        let inside = forged.len() - forged.find("## 2026").expect("a line");
        assert_eq!(read(None, inside), (Vec::new(), true));
    }

    #[test]
    fn a_file_does_not_grow_above_its_bound() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.md");
        let length = filled(&path, 10);
        let max_bytes = 11 * length as u64;
        make_space(&path, length, max_bytes).expect("space");
        assert_eq!(tasks(&path, EntryLimit::ALL).0.len(), 10);
        make_space(&path, length + 1, max_bytes).expect("space");
        let (kept, _) = tasks(&path, EntryLimit::ALL);
        assert_eq!(kept, ["task 5", "task 6", "task 7", "task 8", "task 9"]);
        // Something else wrote this.
        fs::write(&path, "no entry\n").expect("written");
        make_space(&path, 1, 9).expect_err("no memory");
        assert_eq!(fs::read(&path).expect("read"), b"no entry\n");
    }

    #[test]
    fn an_entry_is_found_by_its_time() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.md");
        let found =
            |second| count_if_present(&path, &render(timestamp(second), "t", "r")).expect("read");
        assert_eq!(found(0), None);
        filled(&path, 3);
        // Its task was longer when an earlier version wrote it.
        let task = "long ".repeat(100_000);
        let long = format!("## {}\n**Task:** {task}\n**Result:** r\n\n", timestamp(7));
        append(&path, &long).expect("written");
        let torn = format!("## {}\n**Task:** t\n**Resu", timestamp(8));
        append(&path, &torn).expect("written");
        assert_eq!((found(7), found(8), found(9)), (Some(5), None, None));
        append(&path, &render(timestamp(8), "t", "r")).expect("written");
        assert_eq!((found(7), found(8)), (Some(6), Some(6)));
    }
}
