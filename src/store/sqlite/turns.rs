//! Reads turns, and what their requests refer to.

use std::collections::HashMap;
use std::sync::Arc;

use rusqlite::{Connection, named_params};

use crate::domain::attachment::Blobs;
use crate::domain::request_head::RequestHead;
use crate::domain::run::RunId;
use crate::store::encoding::turn_requests::{self, CopyEncoder, RequestDecoder};
use crate::store::encoding::turns;
use crate::store::request_delta;
use crate::store::sqlite::attachments;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::queries;
use crate::store::sqlite::rows;
use crate::store::sqlite::sql_parts::NOT_DELETED;
use crate::store::turn_record::{TurnEntry, TurnRecord};
use crate::store::turns::{RecordedTurn, TurnRequest};
use crate::store::{Step, StoreError};

type StoreResult<T> = Result<T, StoreError>;

/// The turns of a run, in order.
pub fn turns(db: &Connection, run: RunId) -> StoreResult<Vec<TurnRecord>> {
    let mut turns = Vec::new();
    for_each(db, run, |entry| {
        turns.push(entry.record);
        Ok(true)
    })?;
    Ok(turns)
}

/// One turn with its request and its reply.
pub fn turn(db: &Connection, run: RunId, turn: u32) -> StoreResult<Option<RecordedTurn>> {
    let steps = queries::steps(db, run)?;
    let mut requests = requests(db, run, &steps)?;
    let mut found = None;
    for_each(db, run, |entry| {
        let is_found = entry.record.turn == turn;
        let request = next_request(db, &mut requests, &entry)?;
        if is_found {
            found = Some((entry.record, request));
        }
        Ok(!is_found)
    })?;
    Ok(found.map(|(record, request)| RecordedTurn {
        request: request.map(|head| TurnRequest {
            head,
            body: requests.body,
        }),
        reply: turn_requests::reply(steps, record.turn),
        record,
    }))
}

/// The turns up to `last`, encoded for a run whose record begins with `steps`.
pub fn copied_turns(
    db: &Connection,
    source: RunId,
    last: u32,
    steps: &[Step],
) -> StoreResult<Vec<TurnEntry>> {
    let source_steps = queries::steps(db, source)?;
    let mut requests = requests(db, source, &source_steps)?;
    let mut encoder = CopyEncoder::new(steps, &blobs(db, steps)?);
    let mut copied = Vec::new();
    for_each(db, source, |entry| {
        if entry.record.turn > last {
            return Ok(false);
        }
        let head = next_request(db, &mut requests, &entry)?;
        copied.push(encoder.copy(entry, head, &requests));
        Ok(true)
    })?;
    Ok(copied)
}

/// Calls `on_turn` with the turns in order, until it returns false.
fn for_each(
    db: &Connection,
    run: RunId,
    mut on_turn: impl FnMut(TurnEntry) -> StoreResult<bool>,
) -> StoreResult<()> {
    let mut sql = db
        .prepare_cached(&format!(
            "SELECT e.turns AS turns FROM runs r CROSS JOIN entries e ON e.root = r.root \
             WHERE r.id = :id AND e.run = :id AND e.turns IS NOT NULL AND {NOT_DELETED} ORDER BY e.last_seq, e.id",
        ))
        .map_err(store_error)?;
    let mut found = sql
        .query(named_params! {":id": rows::id_bytes(&run)})
        .map_err(store_error)?;
    while let Some(row) = found.next().map_err(store_error)? {
        let value = row.get_ref("turns").map_err(store_error)?;
        let turns = value.as_blob().ok().and_then(turns::parse);
        for turn in turns.ok_or_else(|| turn_requests::damaged(run))? {
            if !on_turn(turn)? {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn requests(db: &Connection, run: RunId, steps: &[Step]) -> StoreResult<RequestDecoder> {
    Ok(RequestDecoder::new(run, steps, &blobs(db, steps)?))
}

/// Decodes the turn's request, if it has one, and returns its head.
fn next_request(
    db: &Connection,
    requests: &mut RequestDecoder,
    entry: &TurnEntry,
) -> StoreResult<Option<Arc<RequestHead>>> {
    for digest in requests.missing_texts(entry)? {
        let text = queries::load_definition(db, digest.0, &mut HashMap::new())?;
        requests.add_shared(digest, text)?;
    }
    requests.next(entry)
}

/// The pictures and files of steps.
fn blobs(db: &Connection, steps: &[Step]) -> StoreResult<Blobs> {
    match request_delta::digests(steps) {
        none if none.is_empty() => Ok(Blobs::new()),
        digests => attachments::read(db, &digests),
    }
}
