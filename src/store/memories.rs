//! The contract for what agents remember of their runs.

use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;

use crate::domain::memory_entry::MemoryEntry;
use crate::domain::run::RunId;
use crate::store::StoreError;

/// A memory's file does not become larger: its oldest entries are removed.
pub const MAX_FILE_BYTES: usize = 64 << 20;

pub trait MemoryRecords: Send + Sync + 'static {
    /// The newest entries within the limit; none if nothing was remembered yet.
    fn memory(
        &self,
        memory: MemoryId,
        limit: EntryLimit,
    ) -> BoxFuture<'_, Result<NewestEntries, MemoryRecordError>>;

    /// Appends an entry, and returns the number of entries once it is safe. Callers at once do not disturb each other.
    fn add_to_memory(
        &self,
        memory: MemoryId,
        entry: NewMemoryEntry,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>>;

    /// Removes all but the newest `keep` entries, and returns the number of entries.
    fn trim_memory(
        &self,
        memory: MemoryId,
        keep: usize,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>>;
}

/// Which memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryId {
    pub agent: String,
    /// The key that it belongs to; `None` without keys, and if all keys share it.
    pub owner: Option<String>,
    /// The file that the agent's settings name; only for memories that are files.
    pub path: Option<PathBuf>,
}

impl MemoryId {
    /// Its file, if memories are files below this directory.
    pub fn file(&self, directory: &Path) -> PathBuf {
        match (&self.owner, &self.path) {
            (Some(owner), _) => directory.join(&self.agent).join(format!("{owner}.md")),
            (None, Some(path)) => path.clone(),
            (None, None) => directory.join(format!("{}.md", self.agent)),
        }
    }
}

/// How much of a memory is read.
#[derive(Clone, Copy, Debug)]
pub struct EntryLimit {
    /// The number of entries; `None` means all.
    pub entries: Option<usize>,
    /// Their length together.
    pub bytes: usize,
}

impl EntryLimit {
    pub const ALL: Self = Self {
        entries: None,
        bytes: usize::MAX,
    };
}

/// The newest entries of a memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewestEntries {
    /// Oldest first.
    pub entries: Vec<MemoryEntry>,
    /// Whether older ones are missing because of [`EntryLimit::bytes`].
    pub is_cut: bool,
}

#[derive(Clone, Debug)]
pub struct NewMemoryEntry {
    /// The run that it is about, which has one entry.
    pub run: RunId,
    /// As [`render`](crate::domain::memory_entry::render) makes it, with a time that no other entry of this process has.
    pub text: String,
    /// Whether an earlier attempt may have written the entry; it is not written twice.
    pub may_exist: bool,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum MemoryRecordError {
    /// A memory's own file; others, and the store, may work.
    #[error("{0}")]
    File(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}
