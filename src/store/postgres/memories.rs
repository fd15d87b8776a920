//! Memories of agents, as rows of a table.

use futures_util::future::BoxFuture;

use crate::domain::memory_entry;
use crate::store::changes::Changes;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::memories::{
    EntryLimit, MemoryId, MemoryRecordError, MemoryRecords, NewMemoryEntry, NewestEntries,
};
use crate::store::postgres::PostgresStore;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::StoreResult;
use crate::store::sql::value::{NamedValue, free_text, params, values};

/// The first entry that does not fit comes without its text.
const NEWEST: &str = "SELECT CASE WHEN bytes <= :max_bytes THEN entry END AS entry FROM (SELECT id, entry, \
     octet_length(entry) AS length, sum(octet_length(entry)) OVER (ORDER BY id DESC) AS bytes FROM memory \
     WHERE agent = :agent AND owner = :owner ORDER BY id DESC LIMIT :newest) AS newest \
     WHERE bytes - length <= :max_bytes ORDER BY id DESC";

/// One entry for each run. One that was copied from a file is known by its text.
const INSERT: &str = "INSERT INTO memory (agent, owner, run, entry) SELECT :agent, :owner, :run, :entry \
     WHERE NOT (:may_exist AND EXISTS (SELECT 1 FROM memory \
     WHERE agent = :agent AND owner = :owner AND run IS NULL AND entry = :entry)) ON CONFLICT (run) DO NOTHING";
/// Leaves the newest entries.
const TRIM: &str = "DELETE FROM memory WHERE agent = :agent AND owner = :owner AND id <= (SELECT id FROM memory \
     WHERE agent = :agent AND owner = :owner ORDER BY id DESC LIMIT 1 OFFSET :keep)";
const COUNT: &str = "SELECT count(*) AS count FROM memory WHERE agent = :agent AND owner = :owner";

impl MemoryRecords for PostgresStore {
    fn memory(
        &self,
        memory: MemoryId,
        limit: EntryLimit,
    ) -> BoxFuture<'_, Result<NewestEntries, MemoryRecordError>> {
        let read = self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { newest(db, &memory, limit).await })
        });
        Box::pin(async { Ok(read.await?) })
    }

    fn add_to_memory(
        &self,
        memory: MemoryId,
        entry: NewMemoryEntry,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        let entry = values! {
            ":run": entry.run, ":entry": free_text(entry.text), ":may_exist": entry.may_exist,
        };
        self.count_after(Changes::one(INSERT, entry), memory)
    }

    fn trim_memory(
        &self,
        memory: MemoryId,
        keep: usize,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        let keep = values! {":keep": signed(keep as u64)};
        self.count_after(Changes::one(TRIM, keep), memory)
    }
}

impl PostgresStore {
    /// Changes a memory, and returns the number of its entries.
    fn count_after(
        &self,
        mut changes: Changes,
        memory: MemoryId,
    ) -> BoxFuture<'_, Result<usize, MemoryRecordError>> {
        changes.statements[0].params.extend(of_memory(&memory));
        Box::pin(async move {
            self.apply(changes).await?;
            let read = self.read(ReadMode::Statement, move |db| {
                Box::pin(async move {
                    db.first(COUNT, &of_memory(&memory), |row| row.get("count"))
                        .await
                })
            });
            Ok(read.await?.unwrap_or_default())
        })
    }
}

fn of_memory(memory: &MemoryId) -> [NamedValue<'static>; 2] {
    values! {":agent": memory.agent.clone(), ":owner": memory.owner.clone().unwrap_or_default()}
}

async fn newest(db: &Reader, memory: &MemoryId, limit: EntryLimit) -> StoreResult<NewestEntries> {
    let params = params! {
        ":agent": &memory.agent,
        ":owner": memory.owner.as_deref().unwrap_or_default(),
        ":newest": limit.entries.map(|newest| signed(newest as u64)),
        ":max_bytes": signed(limit.bytes as u64),
    };
    let found: Vec<Option<String>> = db.query(NEWEST, params, |row| row.get("entry")).await?;
    let mut newest = NewestEntries::default();
    for entry in found.into_iter().rev() {
        match entry {
            Some(entry) => newest.entries.extend(memory_entry::parse(&entry)),
            None => newest.is_cut = true,
        }
    }
    Ok(newest)
}
