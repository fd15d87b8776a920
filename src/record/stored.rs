//! Entries as they are stored: a JSON array in which long texts are only their beginnings, and beside it these texts, which
//! readers of events do not need.

use std::fmt::Display;

use serde_json::value::RawValue;

use crate::domain::event::Event;
use crate::domain::json_buffer::JsonBuffer;
use crate::domain::message::truncate_to_bytes;
use crate::record::entry::RecordedEntry;
use crate::record::event::Origin;

/// A shorter text is never stored beside its entry. At least the length of the longest id of a call, which events show.
const MAX_INLINE_BYTES: usize = 8 << 10;

/// The entries of one write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEntries {
    /// A JSON array of [`RecordedEntry`].
    pub entries: String,
    /// The long texts: a JSON array of the number of each among the strings of `entries`, and its JSON. `None` if all are short.
    pub texts: Option<String>,
}

/// The entries are not what was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stored entry could not be read: {0}")]
pub struct Unreadable(String);

impl Unreadable {
    fn new(why: impl Display) -> Self {
        Self(why.to_string())
    }
}

/// `None` without entries.
pub fn encode(entries: &[RecordedEntry]) -> serde_json::Result<Option<StoredEntries>> {
    if entries.is_empty() {
        return Ok(None);
    }
    let mut json = JsonBuffer::with_capacity(entries.len() * 320);
    let mut texts = Texts::default();
    for (index, entry) in entries.iter().enumerate() {
        json.0.push(if index == 0 { b'[' } else { b',' });
        let start = json.0.len();
        serde_json::to_writer(&mut json, entry)?;
        texts.move_from(&mut json.0, start, entry.entry.shown_bytes())?;
    }
    json.0.push(b']');
    Ok(Some(StoredEntries {
        entries: String::from_utf8(json.0).unwrap_or_default(),
        texts: (!texts.moved.is_empty()).then(|| format!("[{}]", texts.moved.join(","))),
    }))
}

/// Reads the entries with their whole texts.
///
/// # Errors
/// They have more or fewer events than `count`.
pub fn decode(
    entries: &str,
    texts: Option<&str>,
    count: u64,
) -> Result<Vec<RecordedEntry>, Unreadable> {
    let entries = match texts {
        None => parse(entries)?,
        Some(texts) => parse(&restore(entries, texts)?)?,
    };
    check_count(event_count(&entries), count)?;
    Ok(entries)
}

/// Reads only the events.
///
/// # Errors
/// There are more or fewer of them than `count`.
pub fn read_events(origin: &Origin, entries: &str, count: u64) -> Result<Vec<Event>, Unreadable> {
    let entries = parse(entries)?;
    let events: Vec<Event> = origin.events(&entries).collect();
    check_count(events.len() as u64, count)?;
    Ok(events)
}

fn event_count(entries: &[RecordedEntry]) -> u64 {
    let own = entries.iter().filter(|it| !it.is_copied);
    own.filter(|it| it.entry.has_event()).count() as u64
}

fn check_count(found: u64, count: u64) -> Result<(), Unreadable> {
    match found == count {
        true => Ok(()),
        false => Err(Unreadable(format!("{found} events instead of {count}"))),
    }
}

fn parse(json: &str) -> Result<Vec<RecordedEntry>, Unreadable> {
    serde_json::from_str(json).map_err(Unreadable::new)
}

/// The long texts of entries.
#[derive(Default)]
struct Texts {
    /// The strings of the entries so far.
    strings: usize,
    moved: Vec<String>,
}

impl Texts {
    /// Shortens the long texts of the entry that begins there, so that its event still needs no more.
    fn move_from(
        &mut self,
        json: &mut Vec<u8>,
        start: usize,
        shown_bytes: Option<usize>,
    ) -> serde_json::Result<()> {
        let Some(shown_bytes) = shown_bytes.filter(|_| json.len() - start > MAX_INLINE_BYTES)
        else {
            self.strings += Strings::new(&json[start..]).count();
            return Ok(());
        };
        let entry = json.split_off(start);
        let mut copied = 0;
        for (from, to) in Strings::new(&entry) {
            let string = &entry[from..to];
            if string.len() > MAX_INLINE_BYTES.max(shown_bytes) {
                let text: String = serde_json::from_slice(string)?;
                // Longer than what the event shows, so that it is seen to be cut.
                let beginning = truncate_to_bytes(&text, shown_bytes + char::MAX.len_utf8());
                if beginning.len() < text.len() {
                    json.extend_from_slice(&entry[copied..from]);
                    serde_json::to_writer(&mut *json, beginning)?;
                    copied = to;
                    let string = String::from_utf8_lossy(string);
                    self.moved.push(format!("[{},{string}]", self.strings));
                }
            }
            self.strings += 1;
        }
        json.extend_from_slice(&entry[copied..]);
        Ok(())
    }
}

/// Puts the long texts back.
fn restore(entries: &str, texts: &str) -> Result<String, Unreadable> {
    let texts: Vec<(usize, &RawValue)> = serde_json::from_str(texts).map_err(Unreadable::new)?;
    let bytes = texts.iter().map(|(_, text)| text.get().len());
    let mut restored = String::with_capacity(entries.len() + bytes.sum::<usize>());
    let mut texts = texts.into_iter().peekable();
    let mut copied = 0;
    for (index, (from, to)) in Strings::new(entries.as_bytes()).enumerate() {
        if let Some((_, text)) = texts.next_if(|(number, _)| *number == index) {
            restored.push_str(&entries[copied..from]);
            restored.push_str(text.get());
            copied = to;
        }
    }
    restored.push_str(&entries[copied..]);
    match texts.next() {
        None => Ok(restored),
        Some((number, _)) => Err(Unreadable::new(format_args!("there is no text {number}"))),
    }
}

/// Where the strings of a JSON are, with their quotes.
struct Strings<'a> {
    json: &'a [u8],
    at: usize,
}

impl<'a> Strings<'a> {
    fn new(json: &'a [u8]) -> Self {
        Self { json, at: 0 }
    }
}

impl Iterator for Strings<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let from = self.at + memchr::memchr(b'"', &self.json[self.at..])?;
        let mut to = from + 1;
        loop {
            to += memchr::memchr2(b'"', b'\\', self.json.get(to..)?)?;
            match self.json[to] {
                b'"' => break,
                // What is escaped is no end.
                _ => to += 2,
            }
        }
        self.at = to + 1;
        Some((from, self.at))
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::{decode, encode, event_count, read_events};
    use crate::domain::event::EventKind;
    use crate::domain::message::{AssistantMessage, ToolCall, ToolResult, empty_arguments};
    use crate::domain::run::RunId;
    use crate::record::entry::{Entry, RecordedEntry, ReplyReport};
    use crate::record::event::Origin;

    fn recorded(entry: Entry) -> RecordedEntry {
        RecordedEntry {
            time: Timestamp::UNIX_EPOCH,
            is_copied: false,
            entry,
        }
    }

    fn origin() -> Origin {
        let id = RunId::new();
        Origin {
            run_id: id,
            root_id: id,
            depth: 0,
            agent: "writer".into(),
        }
    }

    fn result(text: String) -> Entry {
        Entry::CallCompleted {
            turn: 1,
            position: 0,
            tool: "read".to_owned(),
            result: ToolResult::text("c1", text, false),
            duration_ms: 3,
            refused_by: Vec::new(),
        }
    }

    /// Arguments of a model, as it wrote them.
    fn reply(arguments: &str) -> Entry {
        let arguments = serde_json::value::RawValue::from_string(arguments.to_owned());
        let call = ToolCall {
            id: "c1".to_owned(),
            provider_id: String::new(),
            name: "write".to_owned(),
            arguments: arguments.map_or_else(|_| empty_arguments(), Into::into),
            invalid_arguments: None,
        };
        Entry::Replied {
            turn: 1,
            message: AssistantMessage {
                content: "\u{1}\"".repeat(30_000),
                tool_calls: vec![call],
                echo: None,
            },
            report: ReplyReport::default(),
        }
    }

    fn check(entries: &[RecordedEntry]) -> super::StoredEntries {
        let stored = encode(entries).expect("JSON").expect("entries");
        let count = event_count(entries);
        let read = decode(&stored.entries, stored.texts.as_deref(), count);
        assert_eq!(
            format!("{:?}", read.expect("entries")),
            format!("{entries:?}")
        );
        let origin = origin();
        let json = |it: crate::domain::event::Event| it.to_json();
        let events = read_events(&origin, &stored.entries, count).expect("events");
        let events: Vec<_> = events.into_iter().map(json).collect();
        let expected: Vec<_> = origin.events(entries).map(json).collect();
        assert_eq!(events, expected);
        stored
    }

    #[test]
    fn long_texts_are_beside_their_entries() {
        let spaced = format!("{{\"a\":\n  [1, \"{}\\n\\\\\"]}}", "é".repeat(9_000));
        let entries = [
            recorded(EventKind::RunPaused { by: None }.into()),
            recorded(result("short".to_owned())),
            recorded(reply(&spaced)),
            recorded(Entry::Followup {
                content: "x".repeat(20_000),
            }),
            recorded(result("ä".repeat(1 << 20))),
        ];
        let stored = check(&entries);
        assert_eq!(event_count(&entries), 4);
        assert!(stored.entries.len() < 16_000, "{}", stored.entries.len());
        let error = decode(&stored.entries, Some("[]"), 3).expect_err("another count");
        assert!(
            error.to_string().contains("4 events instead of 3"),
            "{error}"
        );
        assert!(decode(&stored.entries, Some("[[99,\"x\"]]"), 4).is_err());
        assert!(decode("[", None, 0).is_err());
    }

    #[test]
    fn a_copied_entry_has_no_event() {
        let mut copied = recorded(result("found".to_owned()));
        copied.is_copied = true;
        check(std::slice::from_ref(&copied));
        assert_eq!(event_count(&[copied]), 0);
    }

    proptest::proptest! {
        #[test]
        fn texts_of_any_length_are_read_back(
            texts in proptest::collection::vec(("[a-z\"\\\\\n\u{1}é]{0,40}", 0..900_usize), 1..5),
        ) {
            let entries: Vec<_> = texts
                .iter()
                .map(|(text, times)| recorded(result(text.repeat(*times))))
                .collect();
            check(&entries);
        }
    }
}
