//! The contract for memories, by files.

use std::error::Error;
use std::io;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::store::memories::{
    EntryLimit, MemoryId, MemoryRecordError, MemoryRecords, NewMemoryEntry, NewestEntries,
};
use crate::store::sqlite::SqliteStore;
use crate::store::sqlite::memory_files::MemoryFiles;

impl MemoryRecords for SqliteStore {
    fn memory(
        &self,
        memory: MemoryId,
        limit: EntryLimit,
    ) -> BoxFuture<'_, Result<NewestEntries, MemoryRecordError>> {
        self.with_memory_files(move |files| files.newest(&memory, limit))
    }

    fn add_to_memory(
        &self,
        memory: MemoryId,
        entry: NewMemoryEntry,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        self.with_memory_files(move |files| files.add(&memory, &entry))
    }

    fn trim_memory(
        &self,
        memory: MemoryId,
        keep: usize,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        self.with_memory_files(move |files| files.trim(&memory, keep))
    }
}

impl SqliteStore {
    /// Calls `work` off the runtime's threads.
    fn with_memory_files<T: Send + 'static>(
        &self,
        work: impl FnOnce(&MemoryFiles) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, MemoryRecordError>> {
        let files = Arc::clone(&self.memory_files);
        Box::pin(async move {
            let done = tokio::task::spawn_blocking(move || work(&files)).await;
            let failed = |error: &dyn Error| MemoryRecordError::File(error.to_string());
            done.map_err(|panic| failed(&panic))?
                .map_err(|error| failed(&error))
        })
    }
}
