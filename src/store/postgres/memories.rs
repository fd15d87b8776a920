//! Memories of agents, as rows of a table.

use futures_util::future::BoxFuture;

use crate::domain::memory_entry::{self, MemoryEntry};
use crate::store::encoding::integers::signed;
use crate::store::memories::{MemoryId, MemoryRecordError, MemoryRecords, NewMemoryEntry};
use crate::store::postgres::PostgresStore;
use crate::store::postgres::reader_pool::Reader;
use crate::store::postgres::rows::{self, StoreResult};
use crate::store::postgres::sql::params;
use crate::store::write_queue::job::Task;

impl MemoryRecords for PostgresStore {
    fn memory(
        &self,
        memory: MemoryId,
        newest: Option<usize>,
    ) -> BoxFuture<'_, Result<Vec<MemoryEntry>, MemoryRecordError>> {
        let read = self
            .readers
            .read(move |db| Box::pin(async move { entries(db, &memory, newest).await }));
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

async fn entries(
    db: &Reader,
    memory: &MemoryId,
    newest: Option<usize>,
) -> StoreResult<Vec<MemoryEntry>> {
    let sql = "SELECT entry FROM memory WHERE agent = :agent AND owner = :owner ORDER BY id DESC LIMIT :newest";
    let params = params! {
        ":agent": &memory.agent,
        ":owner": memory.owner.as_deref().unwrap_or_default(),
        ":newest": newest.map(|newest| signed(newest as u64)),
    };
    let mut entries = Vec::new();
    for row in db.rows(sql, params).await?.iter().rev() {
        entries.extend(memory_entry::parse(&rows::required_text(row, "entry")?));
    }
    Ok(entries)
}
