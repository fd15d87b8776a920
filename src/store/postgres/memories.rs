//! Memories of agents, as rows of a table.

use futures_util::future::BoxFuture;

use crate::domain::memory_entry;
use crate::store::encoding::integers::signed;
use crate::store::memories::{
    EntryLimit, MemoryId, MemoryRecordError, MemoryRecords, NewMemoryEntry, NewestEntries,
};
use crate::store::postgres::PostgresStore;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::reader::Reader;
use crate::store::sql::value::params;
use crate::store::write_queue::job::Task;

impl MemoryRecords for PostgresStore {
    fn memory(
        &self,
        memory: MemoryId,
        limit: EntryLimit,
    ) -> BoxFuture<'_, Result<NewestEntries, MemoryRecordError>> {
        let read = self
            .readers
            .read(move |db| Box::pin(async move { newest(db, &memory, limit).await }));
        Box::pin(async { Ok(read.await?) })
    }

    fn add_to_memory(
        &self,
        memory: MemoryId,
        entry: NewMemoryEntry,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        self.count_after(Task::AddToMemory(memory, entry))
    }

    fn trim_memory(
        &self,
        memory: MemoryId,
        keep: usize,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        self.count_after(Task::TrimMemory(memory, keep))
    }
}

impl PostgresStore {
    fn count_after(&self, task: Task) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        Box::pin(async {
            let count = self.queue.request(task).await?;
            Ok(usize::try_from(count).unwrap_or(usize::MAX))
        })
    }
}

/// The first entry that does not fit comes without its text.
const NEWEST: &str = "SELECT CASE WHEN bytes <= :max_bytes THEN entry END AS entry FROM (SELECT id, entry, \
     octet_length(entry) AS length, sum(octet_length(entry)) OVER (ORDER BY id DESC) AS bytes FROM memory \
     WHERE agent = :agent AND owner = :owner ORDER BY id DESC LIMIT :newest) AS newest \
     WHERE bytes - length <= :max_bytes ORDER BY id DESC";

async fn newest(db: &Reader, memory: &MemoryId, limit: EntryLimit) -> StoreResult<NewestEntries> {
    let params = params! {
        ":agent": &memory.agent,
        ":owner": memory.owner.as_deref().unwrap_or_default(),
        ":newest": limit.entries.map(|newest| signed(newest as u64)),
        ":max_bytes": signed(limit.bytes as u64),
    };
    let mut newest = NewestEntries::default();
    for row in db.rows(NEWEST, params).await?.iter().rev() {
        match rows::text(row, "entry")? {
            Some(entry) => newest.entries.extend(memory_entry::parse(&entry)),
            None => newest.is_cut = true,
        }
    }
    Ok(newest)
}
