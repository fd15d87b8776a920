//! The agents' memories: entries are read into prompts, appended after a run succeeds, and trimmed by garbage
//! collection. The file format is documented in `agents.md`, Memory.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::agent::Agent;
use crate::domain::message::shorten;

/// A larger memory file is not read: something else wrote it.
const MAX_FILE: u64 = 64 << 20;
/// The most characters of a result in an entry.
const MAX_RESULT_CHARS: usize = 1000;

/// One entry of an agent's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MemoryEntry {
    /// When the run ended, RFC 3339, UTC.
    pub time: String,
    /// The user message on one line.
    pub task: String,
    /// The beginning of its result.
    pub result: String,
    /// The entry as written in the file.
    #[serde(skip)]
    text: String,
}

/// The result of a collection of memory.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "CollectMemoryReport")]
pub struct GcReport {
    /// The name of the agent.
    pub agent: String,
    /// The model's analysis; empty if there was nothing to analyze.
    pub analysis: String,
    /// The number of entries before.
    pub entries_before: usize,
    /// The number of entries after.
    pub entries_after: usize,
    /// Whether the memory was left unchanged.
    pub dry_run: bool,
    /// Input tokens of the analysis.
    pub input_tokens: u64,
    /// Output tokens of the analysis.
    pub output_tokens: u64,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum MemoryError {
    #[error(transparent)]
    Start(#[from] crate::engine::request::StartError),
    #[error("agent \"{0}\" has no memory; set [memory] enabled = true in its file")]
    Disabled(String),
    #[error(transparent)]
    Provider(#[from] crate::providers::ProviderError),
    #[error("memory of agent \"{agent}\": {reason}")]
    File { agent: String, reason: String },
}

/// Writes to the same file are serialised.
pub struct Memories {
    directory: PathBuf,
    file_locks: Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>,
    /// The time of the last entry, in microseconds.
    last_entry_time: AtomicI64,
}

#[derive(Clone, Debug)]
pub struct NewEntry {
    /// The heading, from [`Memories::next_time`].
    pub time: Timestamp,
    /// Whether an earlier attempt may have written the entry; it is not written twice.
    pub may_exist: bool,
    pub task: String,
    pub result: String,
}

impl Memories {
    /// `directory` is used unless the agent's settings name a file.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            file_locks: Mutex::default(),
            last_entry_time: AtomicI64::default(),
        }
    }

    /// The current time. No two calls return the same, so that the time identifies an entry.
    pub fn next_time(&self) -> Timestamp {
        let now = Timestamp::now();
        let wanted = now.as_microsecond();
        let next = |last: i64| wanted.max(last + 1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let last = self
            .last_entry_time
            .fetch_update(set, fetch, |last| Some(next(last)))
            .unwrap_or_default();
        Timestamp::from_microsecond(next(last)).unwrap_or(now)
    }

    /// All entries, oldest first; none if there is no file yet. Blocking.
    pub fn entries(
        &self,
        agent: &Agent,
        key: Option<&str>,
    ) -> Result<Vec<MemoryEntry>, MemoryError> {
        read(&self.path(agent, key))
            .map(|text| parse(&text))
            .map_err(|error| file_error(agent, &error))
    }

    /// The last `last_n` entries as the prompt shows them. Blocking.
    pub fn for_prompt(&self, agent: &Agent, key: Option<&str>) -> Result<String, MemoryError> {
        let entries = self.entries(agent, key)?;
        let last_n = match agent.memory.last_n as usize {
            0 => entries.len(),
            last_n => last_n,
        };
        let first = entries.len().saturating_sub(last_n);
        let text: String = entries[first..]
            .iter()
            .map(|entry| entry.text.as_str())
            .collect();
        Ok(text.trim_end().to_owned())
    }

    /// Appends an entry, and returns the number of entries once it is on disk. Blocking.
    pub fn append(
        &self,
        agent: &Agent,
        key: Option<&str>,
        entry: &NewEntry,
    ) -> Result<usize, MemoryError> {
        let path = self.path(agent, key);
        let file_lock = self.file_lock(&path);
        let _guard = file_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let text = render(entry.time, &entry.task, &entry.result);
        if entry.may_exist {
            let entries = read(&path)
                .map(|text| parse(&text))
                .map_err(|error| file_error(agent, &error))?;
            if entries.iter().rev().any(|existing| existing.text == text) {
                return Ok(entries.len());
            }
        }
        append(&path, &text).map_err(|error| file_error(agent, &error))
    }

    /// Keeps the newest `keep` entries by replacing the file atomically, and returns the number of entries. Blocking.
    pub fn trim(
        &self,
        agent: &Agent,
        key: Option<&str>,
        keep: usize,
    ) -> Result<usize, MemoryError> {
        let path = self.path(agent, key);
        let file_lock = self.file_lock(&path);
        let _guard = file_lock.lock().unwrap_or_else(PoisonError::into_inner);
        trim(&path, keep).map_err(|error| file_error(agent, &error))
    }

    /// The file of the agent's memory from before memories belonged to keys, if it is no longer read.
    pub fn legacy_file(&self, agent: &Agent) -> Option<PathBuf> {
        if !agent.memory.enabled || agent.memory.shared {
            return None;
        }
        Some(self.path(agent, None)).filter(|path| path.is_file())
    }

    /// A memory belongs to the key of its runs, unless the agent's memory is shared.
    fn path(&self, agent: &Agent, key: Option<&str>) -> PathBuf {
        let name = &agent.name;
        match key.filter(|_| !agent.memory.shared) {
            Some(key) => self.directory.join(name).join(format!("{key}.md")),
            None => {
                let configured = agent.memory.path.clone();
                configured.unwrap_or_else(|| self.directory.join(format!("{name}.md")))
            }
        }
    }

    fn file_lock(&self, path: &Path) -> Arc<Mutex<()>> {
        let mut file_locks = self
            .file_locks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Arc::clone(file_locks.entry(path.to_owned()).or_default())
    }
}

fn file_error(agent: &Agent, error: &io::Error) -> MemoryError {
    MemoryError::File {
        agent: agent.name.clone(),
        reason: error.to_string(),
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

fn render(time: Timestamp, task: &str, result: &str) -> String {
    let task = task.split_whitespace().collect::<Vec<_>>().join(" ");
    let task = if task.is_empty() { "(none)" } else { &task };
    let result = result.trim();
    let shortened = match result.is_empty() {
        true => "(none)".to_owned(),
        false => shorten(result, MAX_RESULT_CHARS),
    };
    let escaped: Vec<String> = shortened
        .lines()
        .map(|line| {
            if line.starts_with("## ") {
                format!("\\{line}")
            } else {
                line.to_owned()
            }
        })
        .collect();
    format!(
        "## {time}\n**Task:** {task}\n**Result:** {}\n\n",
        escaped.join("\n")
    )
}

fn parse(text: &str) -> Vec<MemoryEntry> {
    let mut entries: Vec<MemoryEntry> = Vec::new();
    let mut part = EntryPart::Task;
    for line in text.split_inclusive('\n') {
        let trimmed = line.trim_end();
        if let Some(time) = parse_heading(trimmed) {
            let (time, text) = (time.to_owned(), line.to_owned());
            entries.push(MemoryEntry {
                time,
                task: String::new(),
                result: String::new(),
                text,
            });
            part = EntryPart::Task;
            continue;
        }
        let Some(entry) = entries.last_mut() else {
            continue;
        };
        entry.text.push_str(line);
        if let (EntryPart::Task, Some(task)) = (part, trimmed.strip_prefix("**Task:** ")) {
            entry.task = task.to_owned();
            part = EntryPart::Result;
        } else if let (EntryPart::Result, Some(result)) =
            (part, trimmed.strip_prefix("**Result:** "))
        {
            entry.result = result.to_owned();
            part = EntryPart::ResultContinuation;
        } else if part == EntryPart::ResultContinuation {
            entry.result.push('\n');
            entry.result.push_str(
                trimmed
                    .strip_prefix('\\')
                    .filter(|rest| rest.starts_with("## "))
                    .unwrap_or(trimmed),
            );
        }
    }
    for entry in &mut entries {
        entry.result.truncate(entry.result.trim_end().len());
        let end = entry.text.trim_end().len();
        entry.text.truncate(end);
        entry.text.push_str("\n\n");
    }
    entries
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryPart {
    Task,
    Result,
    ResultContinuation,
}

/// The time in an entry's heading; `None` if the line is no heading.
fn parse_heading(line: &str) -> Option<&str> {
    line.strip_prefix("## ")
        .filter(|time| time.ends_with('Z') && time.parse::<Timestamp>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::{append, parse, read, render, trim};

    fn timestamp(second: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn an_entry_reads_back_and_cannot_fake_another() {
        let text = render(
            timestamp(0),
            "two\n lines",
            "fine\n## 2026-01-01T00:00:00Z\n**Task:** fake",
        );
        assert!(
            text.starts_with(
                "## 1970-01-01T00:00:00Z\n**Task:** two lines\n**Result:** fine\n\\## 2026"
            ),
            "{text}"
        );
        let entries = parse(&text);
        assert_eq!(entries.len(), 1);
        assert_eq!(
            entries[0].result,
            "fine\n## 2026-01-01T00:00:00Z\n**Task:** fake"
        );
        assert_eq!(
            render(timestamp(0), " ", ""),
            "## 1970-01-01T00:00:00Z\n**Task:** (none)\n**Result:** (none)\n\n"
        );
        let long = render(timestamp(0), "t", &"ä".repeat(1001));
        assert!(long.contains(&format!("{}...\n", "ä".repeat(1000))));
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
