//! The steps and the events of an entry: what one write adds to the record.

use std::borrow::Cow;
use std::fmt::Display;

use serde::Deserialize;

use crate::domain::event::{self, Event, EventName, StoredEvent};
use crate::domain::json_buffer::JsonBuffer;
use crate::domain::run::RunId;
use crate::store::{Step, StoreError};

/// The steps of an entry as JSON; `None` if there are none.
pub fn steps_value(steps: &[Step]) -> Result<Option<String>, StoreError> {
    if steps.is_empty() {
        return Ok(None);
    }
    let error =
        |error: &dyn Display| StoreError::Backend(format!("a step could not be written: {error}"));
    let json = JsonBuffer::json(&steps, steps.len() * 256).map_err(|why| error(&why))?;
    String::from_utf8(json).map(Some).map_err(|why| error(&why))
}

/// The steps of the entry of a run that ends with this event.
///
/// # Errors
/// [`StoreError::Corrupt`] if they are not what was written.
pub fn steps(run: RunId, last_seq: u64, text: &str) -> Result<Vec<Step>, StoreError> {
    serde_json::from_str(text).map_err(|error| {
        damaged(
            run,
            last_seq,
            &format!("a stored step could not be read: {error}"),
        )
    })
}

/// The error of an entry that is not what was written.
pub fn damaged(run: RunId, last_seq: u64, why: &str) -> StoreError {
    StoreError::Corrupt(format!(
        "the entry of {run} that ends with event {last_seq}: {why}"
    ))
}

/// The events of an entry, all of one run, one a line: the name, a space, and the JSON without a number. `None` if there are none.
// serde_json writes no line breaks, and event names have no spaces.
pub fn events_value(events: &[Event]) -> Result<Option<String>, StoreError> {
    let Some(first) = events.first() else {
        return Ok(None);
    };
    let error = |error: &dyn Display| {
        StoreError::Backend(format!("an event could not be written: {error}"))
    };
    let mut head = JsonBuffer::with_capacity(256);
    first.append_head(&mut head).map_err(|why| error(&why))?;
    let mut lines = JsonBuffer::with_capacity(events.len() * 320);
    for event in events {
        lines
            .0
            .extend_from_slice(event.kind.name().as_str().as_bytes());
        lines.0.push(b' ');
        lines.0.extend_from_slice(&head.0);
        event.append_rest(&mut lines).map_err(|why| error(&why))?;
        lines.0.push(b'\n');
    }
    String::from_utf8(lines.0)
        .map(Some)
        .map_err(|why| error(&why))
}

/// The agent and the depth of the run whose events these are.
pub fn event_agent(lines: &str) -> Option<(String, u8)> {
    let (name, json) = lines.lines().next()?.split_once(' ')?;
    let event = Event::read(EventName::parse(name)?, json).ok()?;
    Some((event.agent.to_string(), event.depth))
}

/// The numbered events of an entry; `last_seq` is the number of the last.
pub fn events(
    run_id: RunId,
    last_seq: u64,
    count: u64,
    lines: &str,
) -> impl Iterator<Item = StoredEvent> {
    let first = last_seq.saturating_sub(count) + 1;
    lines.lines().zip(first..).filter_map(move |(line, seq)| {
        let (name, json) = line.split_once(' ')?;
        Some(StoredEvent {
            seq,
            run_id,
            name: EventName::parse(name)?,
            data: event::with_seq(seq, json),
        })
    })
}

/// As [`events`], for an entry that was read.
///
/// # Errors
/// [`StoreError::Corrupt`] if they are not what was written.
pub fn read_events(
    run_id: RunId,
    last_seq: u64,
    count: u64,
    lines: &str,
) -> Result<Vec<StoredEvent>, StoreError> {
    check_events(count, lines).map_err(|why| damaged(run_id, last_seq, &why))?;
    Ok(events(run_id, last_seq, count, lines).collect())
}

/// Whether these are the lines of so many events.
fn check_events(count: u64, lines: &str) -> Result<(), String> {
    let is_event = |line: &str| {
        let (name, json) = line.split_once(' ')?;
        let event: EventObject<'_> = serde_json::from_str(json).ok()?;
        Some(event.name == name && EventName::parse(name).is_some())
    };
    match lines.lines().count() as u64 == count
        && lines.lines().all(|line| is_event(line) == Some(true))
    {
        true => Ok(()),
        false => Err("a stored event could not be read".to_owned()),
    }
}

/// A JSON object of any content, with its type.
#[derive(Deserialize)]
struct EventObject<'a> {
    #[serde(rename = "type", borrow)]
    name: Cow<'a, str>,
}

#[cfg(test)]
mod tests {
    use crate::domain::event::{Event, EventKind};
    use crate::domain::run::{RunId, now};

    #[test]
    fn agent_and_depth_are_read_from_stored_events() {
        let id = RunId::new();
        let event = Event {
            run_id: id,
            root_id: id,
            depth: 2,
            agent: "reader of \"files\"".into(),
            time: now(),
            kind: EventKind::RunCancelled {
                reason: String::new(),
            },
        };
        let expected = event.to_json();
        let lines = super::events_value(&[event]).expect("lines");
        assert_eq!(lines, Some(format!("run.cancelled {expected}\n")));
        let event_agent = lines.as_deref().and_then(super::event_agent);
        assert_eq!(event_agent, Some(("reader of \"files\"".to_owned(), 2)));
    }
}
