//! Copies memories, which are files beside a SQLite database, and rows of a table in PostgreSQL. Files that agents name
//! themselves are not copied.

use std::collections::BTreeMap;
use std::path::Path;

use tokio_postgres::Transaction;

use crate::domain::memory_entry;
use crate::store::StoreError;
use crate::store::memories::{EntryLimit, MemoryId};
use crate::store::migrate::{CopiedTable, check_count, damaged, not_empty};
use crate::store::postgres::error::{DatabaseName, store_error};
use crate::store::sqlite::memory_files::{self, MemoryFiles};

const TABLE: &str = "memory";

pub async fn to_postgres(
    dir: &Path,
    target: &Transaction<'_>,
    name: &DatabaseName,
) -> Result<CopiedTable, StoreError> {
    let error = |error| name.error(&error);
    let found = target
        .query_opt("SELECT 1 FROM memory LIMIT 1", &[])
        .await
        .map_err(error)?;
    if found.is_some() {
        return Err(not_empty(name, TABLE));
    }
    let insert = "INSERT INTO memory (agent, owner, entry) VALUES ($1, $2, $3)";
    let files = MemoryFiles::new(dir);
    let mut rows = 0;
    for memory in memory_files::list(dir).map_err(file_error)? {
        let owner = memory.owner.as_deref().unwrap_or_default();
        let all = files.newest(&memory, EntryLimit::ALL);
        for entry in all.map_err(file_error)?.entries {
            let text = entry.text.as_bytes();
            rows += target
                .execute(insert, &[&memory.agent, &owner, &text])
                .await
                .map_err(error)?;
        }
    }
    Ok(CopiedTable { name: TABLE, rows })
}

/// The memories of a database, as files have them.
pub struct Memories {
    /// The number of entries.
    rows: u64,
    /// In their order.
    texts: Vec<(MemoryId, String)>,
}

impl Memories {
    pub async fn read(source: &Transaction<'_>) -> Result<Self, StoreError> {
        let sql = "SELECT agent, owner, entry FROM memory ORDER BY agent, owner, id";
        let found = source.query(sql, &[]).await;
        let found = found.map_err(|error| store_error(&error))?;
        let mut texts: BTreeMap<(String, String), String> = BTreeMap::new();
        for row in &found {
            let error = |error: tokio_postgres::Error| damaged(TABLE, "entry", &error);
            let memory = (
                row.try_get("agent").map_err(error)?,
                row.try_get("owner").map_err(error)?,
            );
            let bytes = row.try_get("entry").map_err(error)?;
            let text = String::from_utf8(bytes).map_err(|why| damaged(TABLE, "entry", &why))?;
            texts.entry(memory).or_default().push_str(&text);
        }
        let written = texts
            .values()
            .map(|text| memory_entry::parse(text).len() as u64);
        let rows = found.len() as u64;
        check_count(TABLE, rows, written.sum())?;
        let texts = texts.into_iter().map(|((agent, owner), text)| {
            let memory = MemoryId {
                agent,
                owner: Some(owner).filter(|owner| !owner.is_empty()),
                path: None,
            };
            (memory, text)
        });
        Ok(Self {
            rows,
            texts: texts.collect(),
        })
    }

    /// Fails if the data directory has other memories. It may have these: a copy that was killed before its commit has left them.
    pub fn check_files(&self, dir: &Path) -> Result<(), StoreError> {
        let existing = memory_files::list(dir).map_err(file_error)?;
        if existing.is_empty() || self.are_in(dir, &existing).map_err(file_error)? {
            return Ok(());
        }
        let place = format_args!("the data directory {}", dir.display());
        Err(not_empty(&place, TABLE))
    }

    fn are_in(&self, dir: &Path, existing: &[MemoryId]) -> std::io::Result<bool> {
        let files = MemoryFiles::new(dir);
        for (memory, text) in &self.texts {
            let existing = files.newest(memory, EntryLimit::ALL)?;
            if existing.entries != memory_entry::parse(text) {
                return Ok(false);
            }
        }
        Ok(existing
            .iter()
            .eq(self.texts.iter().map(|(memory, _)| memory)))
    }

    /// Writes them to a data directory that has none, or has these.
    pub fn write(self, dir: &Path) -> Result<CopiedTable, StoreError> {
        if memory_files::list(dir).map_err(file_error)?.is_empty() {
            memory_files::create(dir, self.texts).map_err(file_error)?;
        }
        Ok(CopiedTable {
            name: TABLE,
            rows: self.rows,
        })
    }
}

fn file_error(error: std::io::Error) -> StoreError {
    StoreError::Backend(error.to_string())
}
