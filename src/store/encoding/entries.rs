//! The entries of a row: what one write adds to the record.

use std::fmt::Display;

use crate::domain::event::{self, Event, StoredEvent};
use crate::domain::run::RunId;
use crate::record::entry::RecordedEntry;
use crate::record::event::Origin;
use crate::record::stored;
use crate::store::StoreError;

/// The entries of the row of a run that ends with this event, and has so many.
///
/// # Errors
/// [`StoreError::Corrupt`] if they are not what was written.
pub fn entries(
    run: RunId,
    (last_seq, count): (u64, u64),
    (entries, texts): (&str, Option<&str>),
) -> Result<Vec<RecordedEntry>, StoreError> {
    stored::decode(entries, texts, count).map_err(|error| damaged(run, last_seq, error))
}

/// The error of a row that is not what was written.
pub fn damaged(run: RunId, last_seq: u64, why: impl Display) -> StoreError {
    StoreError::Corrupt(format!(
        "the entry of {run} that ends with event {last_seq}: {why}"
    ))
}

/// The events of a row of which `last_seq` is the last one.
pub fn numbered(last_seq: u64, events: &[Event]) -> Vec<StoredEvent> {
    let first = last_seq.saturating_sub(events.len() as u64) + 1;
    let numbered = (first..).zip(events).map(|(seq, event)| StoredEvent {
        seq,
        run_id: event.run_id,
        name: event.kind.name(),
        data: event::with_seq(seq, &event.to_json()),
    });
    numbered.collect()
}

/// As [`numbered`], of a row that was read.
///
/// # Errors
/// [`StoreError::Corrupt`] if they are not what was written.
pub fn read_events(
    origin: &Origin,
    last_seq: u64,
    count: u64,
    entries: &str,
) -> Result<Vec<StoredEvent>, StoreError> {
    let events = stored::read_events(origin, entries, count);
    let events = events.map_err(|error| damaged(origin.run_id, last_seq, error))?;
    Ok(numbered(last_seq, &events))
}
