//! Turns in the column `turns` of an entry: one record after the other, each a length, the length of its header, the header
//! as JSON, and the pieces of its request's body.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::domain::agent::params::Effort;
use crate::domain::json_buffer::JsonBuffer;
use crate::domain::request_head::RequestHead;
use crate::domain::usage::{Cost, TokenUsage};
use crate::store::StoreError;
use crate::store::body_pieces::{PieceReader, push_number};
use crate::store::turn_record::{
    BodyDelta, StoredRequest, TurnAttempt, TurnEntry, TurnRecord, TurnStatus,
};

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
        let header = JsonBuffer::json(&header, 256)
            .map_err(|error| StoreError::Backend(error.to_string()))?;
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
pub fn parse(value: &[u8]) -> Option<Vec<TurnEntry>> {
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

/// Whether a value of the column can be read.
pub fn is_readable(value: &[u8]) -> bool {
    parse(value).is_some()
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
