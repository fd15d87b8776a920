//! How runs, steps and events lie in their tables: values to columns and back. Knows no transaction and no thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::Row;
use rusqlite::types::{ToSqlOutput, Type, ValueRef};
use serde::Deserialize;

use crate::domain::content::Content;
use crate::domain::event::{self, Event, StoredEvent};
use crate::domain::run::{Depth, Run, RunId, now};
use crate::domain::usage::{Cost, TokenUsage, TreeUsage, Usage};
use crate::store::{ClaimedRun, ResumeState, Step, StoreError};
use crate::workdirs::file_id::FileId;

/// Inputs up to so many bytes (a child's task included) lie in the run's own row.
pub const MAX_INLINE_INPUT_BYTES: usize = 1024;

/// About the bytes of a part, besides its text.
const PART_BYTES: usize = 160;

/// The columns that [`run`] reads, in its order, from `runs AS r`.
// A root's row is written with its own events only; what its tree's last is, the log itself knows.
macro_rules! run_columns {
    ($input:literal, $task:literal, $texts:literal) => {
        concat!(
            "r.id, r.root, r.parent, r.depth, r.tool_call_id, r.agent, r.agent_version, r.status, ",
            $input,
            ", ",
            $task,
            ", r.label, r.completion_status, r.labels, ",
            $texts,
            ", r.model, r.stop_reason, r.turns, r.error, r.cancel_reason, r.attempt, r.created_at, r.started_at, \
             r.finished_at, \
             CASE WHEN r.child THEN r.last_event ELSE max(r.last_event, coalesce((SELECT e.last_seq FROM entries e \
             WHERE e.root = r.id ORDER BY e.last_seq DESC LIMIT 1), 0)) END, \
             r.input_tokens, r.output_tokens, r.cache_read_tokens, r.cache_write_tokens, r.model_calls, r.tool_calls, \
             r.cost, r.unreported, \
             r.tree_runs, r.tree_input_tokens, r.tree_output_tokens, r.tree_cache_read_tokens, \
             r.tree_cache_write_tokens, r.tree_model_calls, r.tree_tool_calls, r.tree_cost, r.tree_unreported, \
             r.owner, r.structured, r.session, r.waited, r.waiting_since, r.waiting_for"
        )
    };
}

/// A run with its texts.
pub const RUN_COLUMNS: &str = run_columns!(
    "CASE WHEN r.input IS NULL THEN (SELECT t.input FROM texts t WHERE t.run = r.id) ELSE r.input END",
    "CASE WHEN r.input IS NULL THEN (SELECT t.task FROM texts t WHERE t.run = r.id) ELSE r.task END",
    "r.content, r.partial_content"
);

/// A run without its texts, but for the beginning of its task: see [`crate::store::TASK_CHARS`].
pub const SUMMARY_COLUMNS: &str = run_columns!(
    "''",
    "substr(CASE WHEN r.input IS NULL THEN (SELECT t.task FROM texts t WHERE t.run = r.id) ELSE r.task END, 1, 2049)",
    "NULL, NULL"
);

/// Where a run's own usage begins in [`RUN_COLUMNS`].
const USAGE_COLUMN: usize = 25;
/// Where the count of its tree's runs stands; the tree's usage follows.
const TREE_RUNS_COLUMN: usize = 33;
/// Where its owner stands.
const OWNER_COLUMN: usize = 42;
/// Where it says whether its content is JSON that was asked for.
const STRUCTURED_COLUMN: usize = 43;
/// Where its session stands.
const SESSION_COLUMN: usize = 44;
/// Where the time that it waited stands; since when it waits, and for what, follow, the last of them.
const WAITED_COLUMN: usize = 45;

/// What [`definition`] and [`continuation`] read, in their order, from `runs AS r` behind [`RUN_COLUMNS`].
pub const RESUME_COLUMNS: &str = "r.definition, r.deadline_at, r.deadline_seconds, r.timeout, r.stream, r.webhook, r.waiting_since, \
     r.workdir_device, r.workdir_inode";
const RESUME_COLUMN: usize = WAITED_COLUMN + 3;

/// What a definition is known by in the tables: the SHA-256 of its text.
pub type Hash = [u8; 32];

/// What [`usage`] reads, in its order, from `runs AS r`.
pub const USAGE_COLUMNS: &str = "r.input_tokens, r.output_tokens, r.cache_read_tokens, r.cache_write_tokens, \
     r.model_calls, r.tool_calls, r.cost, r.unreported";

/// Reads a run from [`RUN_COLUMNS`]. `tree` of one that has not ended is empty: it is summed over its descendants.
pub fn run(row: &Row<'_>) -> rusqlite::Result<Run> {
    let tree = match row.get::<_, Option<i64>>(TREE_RUNS_COLUMN)? {
        Some(runs) => TreeUsage {
            runs: unsigned(runs),
            usage: usage(row, TREE_RUNS_COLUMN + 1)?,
        },
        None => TreeUsage::default(),
    };
    Ok(Run {
        id: id(row, 0)?,
        root_id: id(row, 1)?,
        parent_id: row.get::<_, Option<[u8; 16]>>(2)?.map(from_bytes),
        owner: row.get(OWNER_COLUMN)?,
        session: row.get(SESSION_COLUMN)?,
        depth: Depth(row.get(3)?),
        tool_call_id: row.get(4)?,
        agent: row.get(5)?,
        agent_version: row.get(6)?,
        status: row
            .get_ref(7)?
            .as_str()?
            .parse()
            .map_err(|()| conversion_error(7, "unknown status"))?,
        input: input(row, 8)?,
        task: row.get(9)?,
        label: row.get(10)?,
        completion_status: row.get(11)?,
        labels: json(row, 12)?.unwrap_or_default(),
        content: row.get(13)?,
        structured: row
            .get::<_, Option<bool>>(STRUCTURED_COLUMN)?
            .unwrap_or(false),
        partial_content: row.get(14)?,
        model: row.get(15)?,
        stop_reason: row.get(16)?,
        turns: row.get(17)?,
        usage: usage(row, USAGE_COLUMN)?,
        tree,
        error: json(row, 18)?,
        cancel_reason: row.get(19)?,
        attempt: row.get(20)?,
        created_at: time(row, 21)?.unwrap_or_default(),
        started_at: time(row, 22)?,
        finished_at: time(row, 23)?,
        waited_ms: waited_ms(row)?,
        last_event: unsigned(row.get(24)?),
        waiting_for: json(row, WAITED_COLUMN + 2)?,
    })
}

/// Reads an input: a text, or the JSON of its parts as a blob.
fn input(row: &Row<'_>, column: usize) -> rusqlite::Result<Content> {
    match row.get_ref(column)? {
        ValueRef::Blob(parts) => serde_json::from_slice(parts).map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(column, Type::Blob, Box::new(error))
        }),
        text => Ok(Content::from(text.as_str()?)),
    }
}

/// Whether an input, with the task that it is for, lies in the run's own row.
pub fn is_inline_input(run: &Run) -> bool {
    let parts = run
        .input
        .parts()
        .map_or(0, |parts| parts.len() * PART_BYTES);
    let task = run.task.as_ref().map_or(0, String::len);
    run.input.text_bytes() + parts + task <= MAX_INLINE_INPUT_BYTES
}

/// An input as a column.
pub fn input_value(input: &Content) -> ToSqlOutput<'_> {
    match input {
        Content::Text(text) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
        parts @ Content::Parts(_) => {
            let json = serde_json::to_vec(parts).unwrap_or_default();
            ToSqlOutput::Owned(rusqlite::types::Value::Blob(json))
        }
    }
}

/// How long the run's time stood still, the wait that it is in included.
fn waited_ms(row: &Row<'_>) -> rusqlite::Result<u64> {
    let before = row.get::<_, Option<i64>>(WAITED_COLUMN)?.unwrap_or(0);
    let Some(since) = row.get::<_, Option<i64>>(WAITED_COLUMN + 1)? else {
        return Ok(unsigned(before));
    };
    let end = row.get::<_, Option<i64>>(23)?;
    let end = end.unwrap_or_else(|| now().as_millisecond());
    Ok(unsigned(before + (end - since).max(0)))
}

/// Reads what the run's definition is known by; none where the run was accepted without.
pub fn definition_hash(row: &Row<'_>) -> rusqlite::Result<Option<Hash>> {
    row.get(RESUME_COLUMN)
}

/// Reads what else the continuation of a run needs.
pub fn resume_state(row: &Row<'_>, definition: Arc<str>) -> rusqlite::Result<ResumeState> {
    let count = |offset: usize| {
        let count = row.get::<_, Option<i64>>(RESUME_COLUMN + offset)?;
        Ok::<_, rusqlite::Error>(count.map_or(0, unsigned))
    };
    let seconds = count(2)?;
    Ok(ResumeState {
        definition,
        deadline: time(row, RESUME_COLUMN + 1)?.map(|at| (at, seconds)),
        timeout: count(3)?,
        stream: count(4)? != 0,
        webhooks: json(row, RESUME_COLUMN + 5)?.unwrap_or_default(),
        waiting_since: time(row, RESUME_COLUMN + 6)?,
        workdir: workdir(row)?,
    })
}

fn workdir(row: &Row<'_>) -> rusqlite::Result<Option<FileId>> {
    let number = |offset: usize| row.get::<_, Option<i64>>(RESUME_COLUMN + offset);
    let (device, inode) = (number(7)?, number(8)?);
    Ok(device.zip(inode).map(|(device, inode)| FileId {
        device: device.cast_unsigned(),
        inode: inode.cast_unsigned(),
    }))
}

/// Reads what an idempotency key has accepted.
pub fn claimed_run(row: &Row<'_>) -> rusqlite::Result<ClaimedRun> {
    Ok(ClaimedRun {
        run: id(row, 0)?,
        body_hash: row.get(1)?,
    })
}

/// Reads usage from eight columns.
pub fn usage(row: &Row<'_>, first: usize) -> rusqlite::Result<Usage> {
    let count = |offset: usize| row.get::<_, i64>(first + offset).map(unsigned);
    Ok(Usage {
        tokens: TokenUsage {
            input: count(0)?,
            output: count(1)?,
            cache_read: count(2)?,
            cache_write: count(3)?,
            reasoning: 0,
        },
        model_calls: count(4)?,
        tool_calls: count(5)?,
        cost: row
            .get::<_, Option<i64>>(first + 6)?
            .map(|cost| Cost(unsigned(cost))),
        unreported: count(7)?,
    })
}

/// Usage as eight columns.
pub fn usage_values(usage: &Usage) -> [Option<i64>; 8] {
    let tokens = &usage.tokens;
    [
        Some(signed(tokens.input)),
        Some(signed(tokens.output)),
        Some(signed(tokens.cache_read)),
        Some(signed(tokens.cache_write)),
        Some(signed(usage.model_calls)),
        Some(signed(usage.tool_calls)),
        usage.cost.map(|cost| signed(cost.0)),
        Some(signed(usage.unreported)),
    ]
}

/// Labels as they stand in a run's row; nothing where there are none.
pub fn labels_value(labels: &BTreeMap<String, String>) -> Option<String> {
    (!labels.is_empty()).then(|| serde_json::to_string(labels).unwrap_or_default())
}

/// Labels from a run's row.
pub fn labels(text: Option<&str>) -> BTreeMap<String, String> {
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// An id as a column.
pub fn id_bytes(id: &RunId) -> &[u8; 16] {
    id.0.as_bytes()
}

/// An id from a column.
pub fn id(row: &Row<'_>, column: usize) -> rusqlite::Result<RunId> {
    row.get(column).map(from_bytes)
}

/// A count as a column. SQLite's integers have a sign: what is beyond them is clamped.
pub fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A count from a column.
pub fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

/// Steps as they stand in an entry.
pub fn steps_value(steps: &[Step]) -> Result<Option<String>, StoreError> {
    if steps.is_empty() {
        return Ok(None);
    }
    serde_json::to_string(steps)
        .map(Some)
        .map_err(|error| StoreError::Backend(format!("a step could not be written: {error}")))
}

/// Steps from an entry.
pub fn steps(text: &str) -> Result<Vec<Step>, StoreError> {
    serde_json::from_str(text)
        .map_err(|error| StoreError::Corrupt(format!("a stored step could not be read: {error}")))
}

/// Events as they stand in an entry: a line each, its name, a space, its JSON without a number.
// JSON as serde_json writes it has no line breaks, and no event's name has a space.
pub fn events_value(events: &[Event]) -> Result<Option<String>, StoreError> {
    if events.is_empty() {
        return Ok(None);
    }
    let mut lines = Vec::with_capacity(events.len() * 320);
    for event in events {
        lines.extend_from_slice(event.kind.name().as_bytes());
        lines.push(b' ');
        serde_json::to_writer(&mut lines, event).map_err(|error| {
            StoreError::Backend(format!("an event could not be written: {error}"))
        })?;
        lines.push(b'\n');
    }
    String::from_utf8(lines)
        .map(Some)
        .map_err(|error| StoreError::Backend(format!("an event could not be written: {error}")))
}

/// The agent and the depth of the run that these events are about.
pub fn event_agent(lines: &str) -> Option<(String, u8)> {
    #[derive(Deserialize)]
    struct EventAgent {
        agent: String,
        depth: u8,
    }
    let (_, json) = lines.lines().next()?.split_once(' ')?;
    let event: EventAgent = serde_json::from_str(json).ok()?;
    Some((event.agent, event.depth))
}

/// An entry's events with their numbers, of which `last_seq` is the last one's.
pub fn events(
    run_id: RunId,
    last_seq: u64,
    count: u64,
    lines: &str,
) -> impl Iterator<Item = StoredEvent> {
    let first = last_seq.saturating_sub(count) + 1;
    lines.lines().zip(first..).map(move |(line, seq)| {
        let (name, json) = line.split_once(' ').unwrap_or((line, "{}"));
        StoredEvent {
            seq,
            run_id,
            name: name.to_owned(),
            data: event::with_seq(seq, json),
        }
    })
}

fn from_bytes(bytes: [u8; 16]) -> RunId {
    RunId(uuid::Uuid::from_bytes(bytes))
}

/// A time from a column.
pub fn time(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Timestamp>> {
    row.get::<_, Option<i64>>(column)?
        .map(Timestamp::from_millisecond)
        .transpose()
        .map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(column, Type::Integer, Box::new(error))
        })
}

fn json<T: serde::de::DeserializeOwned>(
    row: &Row<'_>,
    column: usize,
) -> rusqlite::Result<Option<T>> {
    row.get_ref(column)?
        .as_str_or_null()?
        .map(serde_json::from_str)
        .transpose()
        .map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
        })
}

fn conversion_error(column: usize, reason: &'static str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, reason.into())
}

#[cfg(test)]
mod tests {
    use crate::domain::event::{Event, EventKind};
    use crate::domain::run::{RunId, now};

    #[test]
    fn a_summary_has_one_character_more_than_is_shown_of_a_task() {
        let cut = format!("1, {})", crate::store::TASK_CHARS + 1);
        assert!(super::SUMMARY_COLUMNS.contains(&cut));
    }

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
        let lines = super::events_value(&[event]).expect("lines");
        let event_agent = lines.as_deref().and_then(super::event_agent);
        assert_eq!(event_agent, Some(("reader of \"files\"".to_owned(), 2)));
    }
}
