//! Reads turns with their requests.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::attachment::Blobs;
use crate::domain::request_head::RequestHead;
use crate::domain::run::RunId;
use crate::record::entry::RecordedEntry;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::turn_requests::{self, CopyEncoder, RequestDecoder};
use crate::store::encoding::turns::parse;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::params;
use crate::store::turn_record::{TurnEntry, TurnRecord};
use crate::store::turns::{RecordedTurn, TurnRecords, TurnRequest};
use crate::store::{StoreError, request_delta, run_queries};

impl<E: Engine> TurnRecords for E {
    fn turns(&self, run: RunId) -> BoxFuture<'_, Result<Vec<TurnRecord>, StoreError>> {
        self.read(ReadMode::Statement, move |db| Box::pin(turns(db, run)))
    }

    fn turn(
        &self,
        run: RunId,
        turn: u32,
    ) -> BoxFuture<'_, Result<Option<RecordedTurn>, StoreError>> {
        self.read(ReadMode::Snapshot, move |db| {
            Box::pin(recorded_turn(db, run, turn))
        })
    }

    fn copied_turns(
        &self,
        source: RunId,
        last: u32,
        entries: Vec<RecordedEntry>,
    ) -> BoxFuture<'_, Result<Vec<TurnEntry>, StoreError>> {
        self.read(ReadMode::Snapshot, move |db| {
            Box::pin(async move { copied_turns(db, source, last, &entries).await })
        })
    }
}

const TURNS: &str = "SELECT e.turns FROM runs r {CROSS |}JOIN entries e ON e.root = r.root \
     WHERE r.id = :id AND e.run = :id AND e.turns IS NOT NULL \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root) ORDER BY e.last_seq, e.id";

/// The turns of a run, in order.
async fn turns(db: &Reader, run: RunId) -> StoreResult<Vec<TurnRecord>> {
    let entries = turn_entries(db, run).await?;
    Ok(entries.into_iter().map(|entry| entry.record).collect())
}

/// One turn with its request and its reply.
async fn recorded_turn(db: &Reader, run: RunId, turn: u32) -> StoreResult<Option<RecordedTurn>> {
    let mut found = turn_entries(db, run).await?;
    let Some(last) = found.iter().position(|entry| entry.record.turn == turn) else {
        return Ok(None);
    };
    found.truncate(last + 1);
    let entries = run_queries::entries(db, run).await?;
    let mut requests = Requests::read(db, run, &entries, &found).await?;
    let mut head = None;
    for entry in &found {
        head = requests.next(entry)?;
    }
    let record = found.pop().map(|entry| entry.record);
    Ok(record.map(|record| RecordedTurn {
        request: head.map(|head| TurnRequest {
            head,
            body: requests.decoder.body,
        }),
        reply: turn_requests::reply(entries, turn),
        record,
    }))
}

/// The turns up to `last`, encoded for a run whose record begins with `entries`.
async fn copied_turns(
    db: &Reader,
    source: RunId,
    last: u32,
    entries: &[RecordedEntry],
) -> StoreResult<Vec<TurnEntry>> {
    let mut found = turn_entries(db, source).await?;
    let end = found.iter().position(|entry| entry.record.turn > last);
    found.truncate(end.unwrap_or(found.len()));
    let source_entries = run_queries::entries(db, source).await?;
    let mut requests = Requests::read(db, source, &source_entries, &found).await?;
    let mut encoder = CopyEncoder::new(entries, &blobs(db, entries).await?);
    let mut copied = Vec::with_capacity(found.len());
    for entry in found {
        let head = requests.next(&entry)?;
        copied.push(encoder.copy(entry, head, &requests.decoder));
    }
    Ok(copied)
}

async fn turn_entries(db: &Reader, run: RunId) -> StoreResult<Vec<TurnEntry>> {
    let mut found = Vec::new();
    let add = |row: &Row<'_>| {
        let turns = row.get("turns").ok().and_then(parse);
        found.extend(turns.ok_or_else(|| turn_requests::damaged(run))?);
        Ok(())
    };
    db.query(TURNS, params! {":id": run}, add).await?;
    Ok(found)
}

/// Decodes the requests of a run, whose texts are all read at once.
struct Requests {
    decoder: RequestDecoder,
    shared: HashMap<Hash, Arc<str>>,
}

impl Requests {
    async fn read(
        db: &Reader,
        run: RunId,
        entries: &[RecordedEntry],
        turns: &[TurnEntry],
    ) -> StoreResult<Self> {
        let decoder = RequestDecoder::new(run, entries, &blobs(db, entries).await?);
        let mut hashes: Vec<Hash> = Vec::new();
        for entry in turns {
            let missing = decoder.missing_texts(entry)?;
            hashes.extend(missing.iter().map(|digest| digest.0));
        }
        let shared = run_queries::definitions(db, hashes).await?;
        Ok(Self { decoder, shared })
    }

    /// Decodes the turn's request, if it has one, and returns its head.
    fn next(&mut self, entry: &TurnEntry) -> StoreResult<Option<Arc<RequestHead>>> {
        for digest in self.decoder.missing_texts(entry)? {
            let text = self.shared.get(&digest.0).cloned();
            self.decoder.add_shared(digest, text)?;
        }
        self.decoder.next(entry)
    }
}

/// The pictures and files of entries.
async fn blobs(db: &Reader, entries: &[RecordedEntry]) -> StoreResult<Blobs> {
    run_queries::blobs(db, &request_delta::digests(entries)).await
}
