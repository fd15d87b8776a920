//! Stores the body of a request as what is new in it: the lengths of what it has in common with the run's previous request
//! at its beginning and its end, and what is between. Texts that the run's entries or other runs have are stored as
//! references. Pure.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::RangeInclusive;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::domain::attachment::{Attachment, Blobs, Digest};
use crate::domain::content::{Content, Part};
use crate::domain::message::{AssistantMessage, Message};
use crate::record::entry::{Entry, RecordedEntry};
use crate::store::body_pieces::{Piece, PieceReader, PieceWriter, TextKey};
use crate::store::turn_record::{BodyDelta, SharedText};

/// A shorter text is stored again: a reference would not be much shorter.
const MIN_TEXT_BYTES: usize = 24;
/// How many bytes a search for texts may read. Afterwards the rest is stored as it is.
const MAX_SEARCHED_BYTES: usize = 256 << 20;

const SEARCHED_BEGINNING: usize = 32;
const MAX_BEGINNINGS: usize = 4;

/// A shorter text is not worth a row of its own, and a longer one is not held in memory.
const SHARED_BYTES: RangeInclusive<usize> = 256..=1 << 20;

/// A text that a request may contain.
#[derive(Clone, Debug)]
pub struct RecordedText {
    pub key: TextKey,
    pub text: String,
    /// Whether a request may contain it as JSON, not only as a JSON string.
    pub is_json: bool,
}

/// The texts of an entry that are long enough for a reference.
pub fn entry_texts(entry: &Entry) -> Vec<RecordedText> {
    let mut texts = all_texts(entry);
    texts.retain(|text| text.text.len() >= MIN_TEXT_BYTES);
    texts
}

/// The texts of all entries by their key, for [`decode`].
pub fn texts_by_key(entries: &[RecordedEntry]) -> HashMap<TextKey, String> {
    let texts = entries.iter().flat_map(|it| entry_texts(&it.entry));
    texts.map(|text| (text.key, text.text)).collect()
}

/// The images and files in base64, as requests contain them.
pub fn attachment_texts(blobs: &Blobs) -> impl Iterator<Item = RecordedText> {
    blobs.iter().map(|(digest, data)| RecordedText {
        key: TextKey::Attachment(*digest),
        text: STANDARD.encode(data),
        is_json: true,
    })
}

impl From<&SharedText> for RecordedText {
    fn from(shared: &SharedText) -> Self {
        Self {
            key: TextKey::Shared(shared.digest),
            text: shared.text.to_string(),
            is_json: true,
        }
    }
}

/// The definitions of the tools, which are the same in the first requests of all runs of an agent; `None` if the body has
/// none, or if they are short.
pub fn tools_text(body: &[u8]) -> Option<SharedText> {
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow)]
        tools: &'a RawValue,
    }
    let body: Body<'_> = serde_json::from_slice(body).ok()?;
    let tools = body.tools.get();
    SHARED_BYTES
        .contains(&tools.len())
        .then(|| SharedText::new(tools))
}

/// Whether the body refers to the text if it is stored whole.
pub fn contains(body: &[u8], shared: &SharedText) -> bool {
    find(body, shared.text.as_bytes()).is_some()
}

/// The shared texts that a body refers to; `None` if it is damaged.
pub fn shared_digests(delta: &BodyDelta) -> Option<Vec<Digest>> {
    let mut digests = Vec::new();
    let mut pieces = PieceReader(&delta.pieces);
    while !pieces.0.is_empty() {
        if let Piece::Text {
            key: TextKey::Shared(digest),
            ..
        } = pieces.piece()?
        {
            digests.push(digest);
        }
    }
    Some(digests)
}

/// The images and files that entries refer to.
pub fn digests(entries: &[RecordedEntry]) -> Vec<Digest> {
    let all = entries.iter().flat_map(|it| it.entry.attachments());
    all.map(|attachment: &Attachment| attachment.sha256)
        .collect()
}

fn all_texts(entry: &Entry) -> Vec<RecordedText> {
    let mut texts = Texts::default();
    match entry {
        Entry::Prompted {
            system,
            message,
            earlier,
            ..
        } => {
            texts.push(system);
            texts.push_content(message);
            earlier
                .iter()
                .for_each(|message| texts.push_message(message));
            texts.with_keys(TextKey::Prompt)
        }
        Entry::Replied { turn, message, .. } => {
            texts.push_reply(message);
            texts.with_keys(|index| TextKey::Reply(*turn, index))
        }
        Entry::CallCompleted {
            turn,
            position,
            result,
            ..
        } => {
            texts.push(&result.content);
            texts.with_keys(|_| TextKey::Result(*turn, *position))
        }
        _ => Vec::new(),
    }
}

#[derive(Default)]
struct Texts(Vec<(String, bool)>);

impl Texts {
    fn push(&mut self, text: &str) {
        self.0.push((text.to_owned(), false));
    }

    fn push_json(&mut self, text: &str) {
        self.0.push((text.to_owned(), true));
    }

    fn push_content(&mut self, content: &Content) {
        match content {
            Content::Text(text) => self.push(text),
            Content::Parts(parts) => parts.iter().for_each(|part| {
                if let Part::Text { text } = part {
                    self.push(text);
                }
            }),
        }
    }

    fn push_reply(&mut self, reply: &AssistantMessage) {
        if let Some(echo) = &reply.echo {
            self.push_json(echo.body.get());
        }
        self.push(&reply.content);
        for call in &reply.tool_calls {
            self.push_json(call.arguments.get());
        }
    }

    fn push_message(&mut self, message: &Message) {
        match message {
            Message::User { content } => self.push_content(content),
            Message::Assistant(reply) => self.push_reply(reply),
            Message::Tool { tool_results } => {
                tool_results.iter().for_each(|it| self.push(&it.content));
            }
        }
    }

    fn with_keys(self, key: impl Fn(u32) -> TextKey) -> Vec<RecordedText> {
        let texts = (0..).zip(self.0);
        texts
            .map(|(index, (text, is_json))| RecordedText {
                key: key(index),
                text,
                is_json,
            })
            .collect()
    }
}

/// Encodes a body against the run's previous one, if there is one.
pub fn encode<'a>(
    previous: Option<&[u8]>,
    body: &[u8],
    texts: impl IntoIterator<Item = &'a RecordedText>,
) -> BodyDelta {
    let (prefix, mut suffix) = previous.map_or((0, 0), |previous| {
        let prefix = common_prefix(previous, body);
        (prefix, common_suffix(&previous[prefix..], &body[prefix..]))
    });
    let mut end = body.len() - suffix;
    let mut matches = Vec::new();
    for found in find_texts(&body[prefix..], texts) {
        if prefix + found.start >= end {
            break;
        }
        // A text that begins before the common end is referred to as a whole.
        end = end.max(prefix + found.end);
        matches.push(found);
    }
    suffix = body.len() - end;
    let between = &body[prefix..end];
    let mut pieces = PieceWriter::new(previous.map(|previous| &previous[..prefix]));
    let mut at = 0;
    for found in matches {
        pieces.push_bytes(&between[at..found.start]);
        pieces.push_reference(found.key, found.is_raw);
        at = found.end;
    }
    pieces.push_bytes(&between[at..]);
    BodyDelta {
        common: previous.map(|_| (prefix as u64, suffix as u64)),
        pieces: pieces.bytes,
    }
}

/// The body; `None` if it does not fit the previous body or the texts.
pub fn decode(
    delta: &BodyDelta,
    previous: Option<&[u8]>,
    texts: &HashMap<TextKey, String>,
) -> Option<Vec<u8>> {
    let (before, after) = match delta.common {
        None => (&[][..], &[][..]),
        Some((prefix, suffix)) => {
            let previous = previous?;
            let prefix = previous.get(..usize::try_from(prefix).ok()?)?;
            let start = previous.len().checked_sub(usize::try_from(suffix).ok()?)?;
            (prefix, previous.get(start..)?)
        }
    };
    let mut body = before.to_vec();
    let mut pieces = PieceReader(&delta.pieces);
    while !pieces.0.is_empty() {
        match pieces.piece()? {
            Piece::Literal(bytes) => body.extend_from_slice(bytes),
            Piece::Copy { start, len } => {
                let copied = previous?.get(start..start.checked_add(len)?)?;
                body.extend_from_slice(copied);
            }
            Piece::Text { key, is_raw: true } => {
                body.extend_from_slice(texts.get(&key)?.as_bytes());
            }
            Piece::Text { key, is_raw: false } => body.extend(json_string(texts.get(&key)?)?),
        }
    }
    body.extend_from_slice(after);
    Some(body)
}

fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    const BLOCK: usize = 256;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK));
    let start = BLOCK * blocks.take_while(|(a, b)| a == b).count();
    let rest = a[start..].iter().zip(&b[start..]);
    start + rest.take_while(|(a, b)| a == b).count()
}

fn common_suffix(a: &[u8], b: &[u8]) -> usize {
    const BLOCK: usize = 256;
    let blocks = a.rchunks_exact(BLOCK).zip(b.rchunks_exact(BLOCK));
    let end = BLOCK * blocks.take_while(|(a, b)| a == b).count();
    let rest = a[..a.len() - end]
        .iter()
        .rev()
        .zip(b[..b.len() - end].iter().rev());
    end + rest.take_while(|(a, b)| a == b).count()
}

struct FoundText {
    start: usize,
    end: usize,
    key: TextKey,
    is_raw: bool,
}

/// Where the body has the texts, without overlaps, in the order of the body.
fn find_texts<'a>(
    body: &[u8],
    texts: impl IntoIterator<Item = &'a RecordedText>,
) -> Vec<FoundText> {
    let mut found: Vec<FoundText> = Vec::new();
    let mut remaining = MAX_SEARCHED_BYTES;
    // Texts mostly come in the order of the entries.
    let mut cursor = 0;
    for text in texts {
        if text.text.len() > body.len() {
            continue;
        }
        let forms = [true, false].into_iter().skip(usize::from(!text.is_json));
        for is_raw in forms {
            let needle = match is_raw {
                true => Cow::Borrowed(text.text.as_bytes()),
                false => Cow::Owned(json_string(&text.text).unwrap_or_default()),
            };
            if needle.len() < MIN_TEXT_BYTES || needle.len() > body.len() {
                continue;
            }
            let mut search = |from: usize| {
                remaining = remaining.checked_sub(body.len() - from)?;
                find(&body[from..], &needle).map(|at| from + at)
            };
            let Some(start) = search(cursor).or_else(|| search(0)) else {
                continue;
            };
            let end = start + needle.len();
            let index = found.partition_point(|it| it.start < start);
            let overlaps = found.get(index).is_some_and(|next| next.start < end)
                || index > 0 && found[index - 1].end > start;
            if !overlaps {
                let key = text.key;
                found.insert(
                    index,
                    FoundText {
                        start,
                        end,
                        key,
                        is_raw,
                    },
                );
                cursor = end;
                break;
            }
        }
    }
    found
}

/// Where the haystack has the needle. To prepare the search of a long needle takes as long as to compare it, so its beginning is
/// searched; where that occurs too often the whole needle is searched, so that nobody's text makes the search slow.
fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let Some(beginning) = needle.get(..SEARCHED_BEGINNING) else {
        return memmem::find(haystack, needle);
    };
    let finder = memmem::Finder::new(beginning);
    let mut from = 0;
    for _ in 0..MAX_BEGINNINGS {
        let at = from + finder.find(&haystack[from..])?;
        if haystack[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
    memmem::find(&haystack[from..], needle).map(|at| from + at)
}

/// The text within a JSON string, as requests and steps are written.
fn json_string(text: &str) -> Option<Vec<u8>> {
    let mut json = serde_json::to_vec(text).ok()?;
    json.pop();
    json.drain(..1);
    Some(json)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::{RecordedText, contains, decode, encode, shared_digests, tools_text};
    use crate::store::body_pieces::{TextKey, push_number};

    fn texts(texts: &[(u32, &str, bool)]) -> Vec<RecordedText> {
        let text = |(turn, text, is_json): &(u32, &str, bool)| RecordedText {
            key: TextKey::Result(*turn, 0),
            text: (*text).to_owned(),
            is_json: *is_json,
        };
        texts.iter().map(text).collect()
    }

    fn by_key(texts: &[RecordedText]) -> HashMap<TextKey, String> {
        let pairs = texts.iter().map(|it| (it.key, it.text.clone()));
        pairs.collect()
    }

    proptest! {
        #[test]
        fn a_needle_is_found_as_by_the_library(
            haystack in "[ab]{0,200}",
            (start, len) in (0_usize..200, 0_usize..80),
            other in "[ab]{0,40}",
        ) {
            let part: String = haystack.chars().skip(start).take(len).collect();
            for needle in [part.clone(), format!("{part}{other}"), "a".repeat(len)] {
                let (haystack, needle) = (haystack.as_bytes(), needle.as_bytes());
                prop_assert_eq!(super::find(haystack, needle), memchr::memmem::find(haystack, needle));
            }
        }
    }

    #[test]
    fn a_text_of_a_step_is_stored_as_a_reference() {
        let long = "a line\nand \"another\" ".repeat(50);
        let escaped = serde_json::to_string(&long).expect("JSON");
        let previous = br#"{"messages":[1],"tools":[]}"#;
        let body = format!(r#"{{"messages":[1,{{"content":{escaped}}}],"tools":[]}}"#);
        let texts = texts(&[(1, &long, false)]);
        let delta = encode(Some(previous), body.as_bytes(), &texts);
        assert_eq!(delta.common, Some((14, 13)));
        assert!(delta.pieces.len() < 40, "{} bytes", delta.pieces.len());
        let decoded = decode(&delta, Some(previous), &by_key(&texts));
        assert_eq!(decoded.as_deref(), Some(body.as_bytes()));
        assert_eq!(decode(&delta, Some(previous), &HashMap::new()), None);
        assert_eq!(decode(&delta, Some(b"{}"), &by_key(&texts)), None);
    }

    #[test]
    fn a_text_that_ends_like_the_one_before_is_stored_as_a_reference() {
        let ending = "the same ending of two results ".repeat(20);
        let (first, second) = (format!("first {ending}"), format!("second {ending}"));
        let previous = format!(r#"[{{"c":"{first}"}}]"#);
        let body = format!(r#"[{{"c":"{first}"}},{{"c":"{second}"}}]"#);
        let texts = texts(&[(2, &second, false)]);
        let delta = encode(Some(previous.as_bytes()), body.as_bytes(), &texts);
        assert!(delta.pieces.len() < 30, "{} bytes", delta.pieces.len());
        let decoded = decode(&delta, Some(previous.as_bytes()), &by_key(&texts));
        assert_eq!(decoded.as_deref(), Some(body.as_bytes()));
    }

    #[test]
    fn the_definitions_of_tools_are_stored_as_a_reference() {
        let tools = format!("[{{\"name\":\"{}\"}}]", "x".repeat(300));
        let body = format!(r#"{{"messages":["short"],"tools":{tools},"model":"m"}}"#);
        let shared = tools_text(body.as_bytes()).expect("tools");
        assert_eq!(*shared.text, tools);
        assert!(contains(body.as_bytes(), &shared));
        let texts = [RecordedText::from(&shared)];
        let delta = encode(None, body.as_bytes(), &texts);
        assert!(delta.pieces.len() < 100, "{} bytes", delta.pieces.len());
        assert_eq!(shared_digests(&delta), Some(vec![shared.digest]));
        let decoded = decode(&delta, None, &by_key(&texts));
        assert_eq!(decoded.as_deref(), Some(body.as_bytes()));
        for body in [r#"{"tools":[]}"#, r#"{"messages":[]}"#, "no JSON"] {
            assert_eq!(tools_text(body.as_bytes()), None);
        }
    }

    #[test]
    fn what_repeats_the_message_before_is_stored_as_a_reference() {
        let message = |turn: u32| {
            format!(
                r#"{{"role":"assistant","tool_calls":[{{"id":"call_{turn}","type":"function","function":{{"name":"read_file"}}}}]}}"#
            )
        };
        let previous = format!(r#"{{"messages":[{}]}}"#, message(1));
        let body = format!(r#"{{"messages":[{},{}]}}"#, message(1), message(2));
        let delta = encode(Some(previous.as_bytes()), body.as_bytes(), &[]);
        assert!(delta.pieces.len() < 20, "{} bytes", delta.pieces.len());
        let decoded = decode(&delta, Some(previous.as_bytes()), &HashMap::new());
        assert_eq!(decoded.as_deref(), Some(body.as_bytes()));
        assert_eq!(decode(&delta, None, &HashMap::new()), None);
    }

    #[test]
    fn damaged_pieces_are_no_body() {
        let body = b"0123456789".repeat(4);
        let whole = encode(None, &body, &[]);
        for len in 1..whole.pieces.len() {
            let mut cut = whole.clone();
            cut.pieces.truncate(len);
            assert_eq!(decode(&cut, None, &HashMap::new()), None, "{len} bytes");
        }
        let mut huge = whole;
        huge.pieces = vec![0];
        push_number(&mut huge.pieces, u64::MAX);
        assert_eq!(decode(&huge, None, &HashMap::new()), None);
    }

    proptest! {
        #[test]
        fn a_decoded_body_is_the_encoded_one(
            previous in proptest::option::of("[ab\"\\\\\n]{0,600}"),
            body in "[ab\"\\\\\n]{0,600}",
            results in proptest::collection::vec(("[ab\"\\\\\n]{0,60}", any::<bool>()), 0..6),
            places in proptest::collection::vec((0..600_usize, 0..6_usize, any::<bool>()), 0..6),
        ) {
            let numbered: Vec<_> = (0..).zip(&results).map(|(turn, (text, is_json))| (turn, text.as_str(), *is_json)).collect();
            let texts = texts(&numbered);
            let mut body = body;
            for (at, text, is_raw) in places {
                let Some((text, _)) = results.get(text) else { continue };
                let escaped = serde_json::to_string(text).expect("JSON");
                body.insert_str(at.min(body.len()), if is_raw { text } else { &escaped });
            }
            let previous = previous.as_deref().map(str::as_bytes);
            let delta = encode(previous, body.as_bytes(), &texts);
            let decoded = decode(&delta, previous, &by_key(&texts));
            prop_assert_eq!(decoded.as_deref(), Some(body.as_bytes()));
        }
    }
}
