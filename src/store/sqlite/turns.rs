//! Turns in the column `turns` of an entry: one record after the other, each a length, the length of its header, the header
//! as JSON, and the pieces of its request's body.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::{Connection, named_params};
use serde::{Deserialize, Serialize};

use crate::domain::agent::params::Effort;
use crate::domain::attachment::Digest;
use crate::domain::request_head::RequestHead;
use crate::domain::run::RunId;
use crate::domain::usage::{Cost, TokenUsage};
use crate::store::body_pieces::{PieceReader, TextKey, push_number};
use crate::store::request_delta::{self, RecordedText};
use crate::store::sqlite::attachments;
use crate::store::sqlite::error::store_error;
use crate::store::sqlite::queries;
use crate::store::sqlite::rows;
use crate::store::sqlite::sql_parts::NOT_DELETED;
use crate::store::turn_record::{
    BodyDelta, SharedText, StoredRequest, TurnAttempt, TurnEntry, TurnRecord, TurnStatus,
};
use crate::store::turns::{MAX_DIFFERENCES, RecordedTurn, TurnRequest};
use crate::store::{Step, StoreError};

type StoreResult<T> = Result<T, StoreError>;

/// The HTTP status of an attempt that is stored without one.
const USUAL_STATUS: u16 = 200;

/// A turn's header. What is usual is left out, because every turn has one.
#[derive(Default, Serialize, Deserialize)]
struct Header {
    #[serde(rename = "t")]
    turn: u32,
    #[serde(rename = "p")]
    provider: String,
    #[serde(rename = "m")]
    model: String,
    #[serde(rename = "e", default, skip_serializing_if = "Option::is_none")]
    effort: Option<Effort>,
    #[serde(rename = "s", default, skip_serializing_if = "is_default")]
    status: TurnStatus,
    #[serde(rename = "k", default, skip_serializing_if = "is_default")]
    is_copied: bool,
    #[serde(rename = "x", default, skip_serializing_if = "is_default")]
    is_redacted: bool,
    #[serde(rename = "b", default, skip_serializing_if = "Option::is_none")]
    request_bytes: Option<u64>,
    #[serde(rename = "f", default, skip_serializing_if = "Option::is_none")]
    first_token_ms: Option<u64>,
    /// When the first attempt began, in milliseconds.
    #[serde(rename = "a")]
    started_at: i64,
    /// The duration of the only attempt, if it succeeded.
    #[serde(rename = "d", default, skip_serializing_if = "Option::is_none")]
    duration_ms: Option<u64>,
    /// The attempts, unless there is one that succeeded.
    #[serde(rename = "n", default, skip_serializing_if = "Vec::is_empty")]
    attempts: Vec<AttemptRow>,
    /// Input, output, cache reads, cache writes, reasoning; without zeros at the end.
    #[serde(rename = "u", default, skip_serializing_if = "Option::is_none")]
    usage: Option<Vec<u64>>,
    #[serde(rename = "c", default, skip_serializing_if = "Option::is_none")]
    cost: Option<Cost>,
    #[serde(rename = "r", default, skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
    #[serde(rename = "l", default, skip_serializing_if = "is_default")]
    tool_calls: u32,
    /// Whether the turn has a request.
    #[serde(rename = "q", default, skip_serializing_if = "is_default")]
    has_request: bool,
    #[serde(rename = "h", default, skip_serializing_if = "Option::is_none")]
    head: Option<Arc<RequestHead>>,
    #[serde(rename = "z", default, skip_serializing_if = "Option::is_none")]
    common: Option<(u64, u64)>,
}

/// Provider, model, status, error, the time of its start in milliseconds, and its duration.
type AttemptRow = (String, String, Option<u16>, Option<String>, i64, u64);

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The value of the column; `None` without turns.
pub fn turns_value(turns: Vec<TurnEntry>) -> StoreResult<Option<Vec<u8>>> {
    if turns.is_empty() {
        return Ok(None);
    }
    let mut value = Vec::new();
    for TurnEntry { record, request } in turns {
        let has_request = request.is_some();
        let (head, body) = request.map(|it| (it.head, it.body)).unwrap_or_default();
        let header = Header {
            has_request,
            head,
            common: body.common,
            ..header(record)
        };
        let header =
            serde_json::to_vec(&header).map_err(|error| StoreError::Backend(error.to_string()))?;
        let mut row = Vec::with_capacity(header.len() + body.pieces.len() + 8);
        push_number(&mut row, header.len() as u64);
        row.extend(header);
        row.extend(body.pieces);
        push_number(&mut value, row.len() as u64);
        value.extend(row);
    }
    Ok(Some(value))
}

fn header(record: TurnRecord) -> Header {
    let is_usual = |it: &TurnAttempt| it.error.is_none() && it.status == Some(USUAL_STATUS);
    let only = match record.attempts.as_slice() {
        [only] if is_usual(only) => Some(only.duration_ms),
        _ => None,
    };
    let first = record.attempts.first();
    Header {
        started_at: first.map_or(0, |first| first.started_at.as_millisecond()),
        duration_ms: only,
        attempts: match only {
            Some(_) => Vec::new(),
            None => record.attempts.into_iter().map(attempt_row).collect(),
        },
        turn: record.turn,
        provider: record.provider,
        model: record.model,
        effort: record.effort,
        status: record.status,
        is_copied: record.is_copied,
        is_redacted: record.is_redacted,
        request_bytes: record.request_bytes,
        first_token_ms: record.first_token_ms,
        usage: record.usage.map(usage_row),
        cost: record.cost,
        stop_reason: record.stop_reason,
        tool_calls: record.tool_calls,
        ..Header::default()
    }
}

fn attempt_row(attempt: TurnAttempt) -> AttemptRow {
    (
        attempt.provider,
        attempt.model,
        attempt.status,
        attempt.error,
        attempt.started_at.as_millisecond(),
        attempt.duration_ms,
    )
}

fn usage_row(usage: TokenUsage) -> Vec<u64> {
    let mut row = vec![
        usage.input,
        usage.output,
        usage.cache_read,
        usage.cache_write,
        usage.reasoning,
    ];
    row.truncate(
        row.iter()
            .rposition(|count| *count > 0)
            .map_or(0, |at| at + 1),
    );
    row
}

/// Reads a value of the column; `None` if it is damaged.
fn parse(value: &[u8]) -> Option<Vec<TurnEntry>> {
    let mut reader = PieceReader(value);
    let mut turns = Vec::new();
    while !reader.0.is_empty() {
        let len = usize::try_from(reader.number()?).ok()?;
        let mut row = PieceReader(reader.bytes(len)?);
        let len = usize::try_from(row.number()?).ok()?;
        let header: Header = serde_json::from_slice(row.bytes(len)?).ok()?;
        turns.push(entry(header, row.0)?);
    }
    Some(turns)
}

fn entry(header: Header, pieces: &[u8]) -> Option<TurnEntry> {
    let time = |millisecond| Timestamp::from_millisecond(millisecond).ok();
    let attempts = match header.duration_ms {
        Some(duration_ms) => vec![TurnAttempt {
            provider: header.provider.clone(),
            model: header.model.clone(),
            status: Some(USUAL_STATUS),
            error: None,
            started_at: time(header.started_at)?,
            duration_ms,
        }],
        None => {
            let rows = header.attempts.into_iter();
            rows.map(
                |(provider, model, status, error, started_at, duration_ms)| {
                    Some(TurnAttempt {
                        provider,
                        model,
                        status,
                        error,
                        started_at: time(started_at)?,
                        duration_ms,
                    })
                },
            )
            .collect::<Option<_>>()?
        }
    };
    let (head, common) = (header.head, header.common);
    let request = header.has_request.then(|| StoredRequest {
        head,
        body: BodyDelta {
            common,
            pieces: pieces.to_vec(),
        },
        shared_text: None,
    });
    let record = TurnRecord {
        turn: header.turn,
        provider: header.provider,
        model: header.model,
        effort: header.effort,
        status: header.status,
        is_copied: header.is_copied,
        is_redacted: header.is_redacted,
        request_bytes: header.request_bytes,
        first_token_ms: header.first_token_ms,
        attempts,
        usage: header.usage.map(usage),
        cost: header.cost,
        stop_reason: header.stop_reason,
        tool_calls: header.tool_calls,
    };
    Some(TurnEntry { record, request })
}

fn usage(row: Vec<u64>) -> TokenUsage {
    let count = |index: usize| row.get(index).copied().unwrap_or(0);
    TokenUsage {
        input: count(0),
        output: count(1),
        cache_read: count(2),
        cache_write: count(3),
        reasoning: count(4),
    }
}

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
    let mut requests = Requests::new(db, run, &steps)?;
    let mut found = None;
    for_each(db, run, |entry| {
        let is_found = entry.record.turn == turn;
        let request = requests.next(&entry)?;
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
        reply: steps.into_iter().find_map(|step| match step {
            Step::Reply { turn, message } if turn == record.turn => Some(message),
            _ => None,
        }),
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
    let mut requests = Requests::new(db, source, &source_steps)?;
    let mut encoder = CopyEncoder::new(db, steps)?;
    let mut copied = Vec::new();
    for_each(db, source, |mut entry| {
        if entry.record.turn > last {
            return Ok(false);
        }
        if let Some(head) = requests.next(&entry)? {
            let shared = requests.shared_text.as_ref();
            let turn = entry.record.turn;
            entry.request = Some(encoder.encode(turn, &head, &requests.body, shared));
        }
        entry.record.is_copied = true;
        copied.push(entry);
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
        let turns = value.as_blob().ok().and_then(parse);
        for turn in turns.ok_or_else(|| damaged(run))? {
            if !on_turn(turn)? {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn damaged(run: RunId) -> StoreError {
    StoreError::Corrupt(format!("a turn of {run} cannot be read"))
}

/// Whether a value of the column can be read.
pub fn is_readable(value: &[u8]) -> bool {
    parse(value).is_some()
}

/// Decodes the requests of a run, one after the other.
struct Requests<'a> {
    db: &'a Connection,
    run: RunId,
    texts: HashMap<TextKey, String>,
    head: Option<Arc<RequestHead>>,
    /// The body of the last request.
    body: Vec<u8>,
    /// The last shared text that a body referred to.
    shared_text: Option<Arc<SharedText>>,
}

impl<'a> Requests<'a> {
    fn new(db: &'a Connection, run: RunId, steps: &[Step]) -> StoreResult<Self> {
        let mut texts = request_delta::texts_by_key(steps);
        let digests = request_delta::digests(steps);
        if !digests.is_empty() {
            let blobs = attachments::read(db, &digests)?;
            let attachments = request_delta::attachment_texts(&blobs);
            texts.extend(attachments.map(|it| (it.key, it.text)));
        }
        Ok(Self {
            db,
            run,
            texts,
            head: None,
            body: Vec::new(),
            shared_text: None,
        })
    }

    /// Decodes the turn's request, if it has one, and returns its head.
    fn next(&mut self, entry: &TurnEntry) -> StoreResult<Option<Arc<RequestHead>>> {
        let Some(request) = &entry.request else {
            return Ok(None);
        };
        let digests = request_delta::shared_digests(&request.body);
        for digest in digests.ok_or_else(|| damaged(self.run))? {
            self.read_shared(digest)?;
        }
        let body = request_delta::decode(&request.body, Some(&self.body), &self.texts)
            .filter(|body| {
                entry.record.is_redacted || entry.record.request_bytes == Some(body.len() as u64)
            })
            .ok_or_else(|| damaged(self.run))?;
        self.body = body;
        self.head = request.head.clone().or_else(|| self.head.take());
        let head = self.head.clone().ok_or_else(|| damaged(self.run))?;
        Ok(Some(head))
    }

    fn read_shared(&mut self, digest: Digest) -> StoreResult<()> {
        if !self.texts.contains_key(&TextKey::Shared(digest)) {
            let text = queries::load_definition(self.db, digest.0, &mut HashMap::new())?;
            let text = text.ok_or_else(|| damaged(self.run))?;
            let key = TextKey::Shared(digest);
            self.texts.insert(key, text.to_string());
            self.shared_text = Some(Arc::new(SharedText { digest, text }));
        }
        Ok(())
    }
}

/// Encodes requests for another run.
struct CopyEncoder {
    texts: Vec<RecordedText>,
    previous: Option<(Arc<RequestHead>, Vec<u8>)>,
    differences: u32,
}

impl CopyEncoder {
    fn new(db: &Connection, steps: &[Step]) -> StoreResult<Self> {
        let mut texts: Vec<_> = steps.iter().flat_map(request_delta::step_texts).collect();
        let digests = request_delta::digests(steps);
        if !digests.is_empty() {
            let blobs = attachments::read(db, &digests)?;
            texts.extend(request_delta::attachment_texts(&blobs));
        }
        Ok(Self {
            texts,
            previous: None,
            differences: 0,
        })
    }

    fn encode(
        &mut self,
        turn: u32,
        head: &Arc<RequestHead>,
        body: &[u8],
        shared_text: Option<&Arc<SharedText>>,
    ) -> StoredRequest {
        let is_whole = self.differences >= MAX_DIFFERENCES;
        let previous = self.previous.take();
        let is_same_head = previous
            .as_ref()
            .is_some_and(|(previous, _)| previous == head);
        let previous = previous.filter(|_| !is_whole).map(|(_, body)| body);
        self.differences = previous.as_ref().map_or(0, |_| self.differences + 1);
        // The others are in the previous request already.
        let texts = self.texts.iter().filter(|text| match text.key.turn() {
            Some(of) => previous.is_none() || of + 2 >= turn,
            None => true,
        });
        let shared_text = shared_text.filter(|_| previous.is_none());
        let shared: Option<RecordedText> = shared_text.map(|it| (&**it).into());
        let texts = shared.iter().chain(texts);
        let delta = request_delta::encode(previous.as_deref(), body, texts);
        self.previous = Some((Arc::clone(head), body.to_vec()));
        StoredRequest {
            head: (!is_same_head).then(|| Arc::clone(head)),
            body: delta,
            shared_text: shared_text.cloned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;

    use super::{parse, turns_value};
    use crate::domain::agent::params::Effort;
    use crate::domain::request_head::RequestHead;
    use crate::domain::usage::{Cost, TokenUsage};
    use crate::store::turn_record::{
        BodyDelta, StoredRequest, TurnAttempt, TurnEntry, TurnRecord, TurnStatus,
    };

    fn attempt(status: Option<u16>, error: Option<&str>) -> TurnAttempt {
        TurnAttempt {
            provider: "anthropic".to_owned(),
            model: "claude".to_owned(),
            status,
            error: error.map(str::to_owned),
            started_at: Timestamp::from_millisecond(1_763_846_400_123).expect("a time"),
            duration_ms: 900,
        }
    }

    fn usual(turn: u32) -> TurnEntry {
        let record = TurnRecord {
            turn,
            provider: "anthropic".to_owned(),
            model: "claude".to_owned(),
            effort: None,
            status: TurnStatus::Completed,
            is_copied: false,
            is_redacted: false,
            request_bytes: Some(20_000),
            first_token_ms: Some(120),
            attempts: vec![attempt(Some(200), None)],
            usage: Some(TokenUsage {
                input: 1200,
                output: 30,
                ..TokenUsage::default()
            }),
            cost: Some(Cost(12_000_000_000)),
            stop_reason: Some("tool_use".to_owned()),
            tool_calls: 1,
        };
        let body = BodyDelta {
            common: Some((19_000, 12)),
            pieces: b"between".to_vec(),
        };
        let request = Some(StoredRequest {
            head: None,
            body,
            shared_text: None,
        });
        TurnEntry { record, request }
    }

    #[test]
    fn turns_are_read_as_they_were_written() {
        let mut retried = usual(2);
        retried.record.attempts = vec![
            attempt(Some(429), Some("rate_limit: slow down")),
            attempt(None, None),
        ];
        retried.record.effort = Some(Effort::High);
        retried.record.status = TurnStatus::Failed;
        retried.record.is_redacted = true;
        retried.request = Some(StoredRequest {
            head: Some(Arc::new(RequestHead {
                method: Some("POST".to_owned()),
                ..RequestHead::default()
            })),
            body: BodyDelta::default(),
            shared_text: None,
        });
        let mut unsent = usual(3);
        unsent.request = None;
        let turns = vec![usual(1), retried, unsent];
        let value = turns_value(turns.clone()).expect("encoded").expect("turns");
        assert_eq!(parse(&value), Some(turns));
        for len in 1..value.len() {
            let cut = parse(&value[..len]).map_or(0, |turns| turns.len());
            assert!(cut < 3, "{len} bytes");
        }
        assert_eq!(turns_value(Vec::new()).expect("encoded"), None);
    }

    #[test]
    fn the_header_of_a_usual_turn_is_short() {
        let value = turns_value(vec![usual(3)])
            .expect("encoded")
            .expect("turns");
        assert!(value.len() < 190, "{} bytes", value.len());
    }
}
