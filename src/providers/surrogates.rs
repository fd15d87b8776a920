//! Repairs JSON in which a character is written as two escapes (`\ud83d\ude00`) of which one is missing: a service that cuts
//! texts between them sends the other half in its next message, or never. JSON parsers reject such a half. Pure.

use std::borrow::Cow;
use std::ops::RangeInclusive;

const HIGH: RangeInclusive<u16> = 0xd800..=0xdbff;
const LOW: RangeInclusive<u16> = 0xdc00..=0xdfff;
const REPLACEMENT: &str = "\\ufffd";
/// The length of an escape such as `\ud83d`.
const ESCAPE_LEN: usize = 6;

/// The JSON with a replacement character instead of each half that is alone.
pub fn repair(json: &str) -> Cow<'_, str> {
    let halves = lone_halves(json);
    if halves.is_empty() {
        return Cow::Borrowed(json);
    }
    let mut repaired = json.to_owned();
    for half in halves {
        repaired.replace_range(half.at..half.at + ESCAPE_LEN, REPLACEMENT);
    }
    Cow::Owned(repaired)
}

/// Joins halves over two messages of a stream.
#[derive(Default)]
pub struct HalfJoiner {
    /// A message with a text that ends in the first half of a character.
    held: Option<String>,
}

impl HalfJoiner {
    /// Returns the messages that are complete with this one, in order.
    pub fn push<'a>(&mut self, message: Cow<'a, str>) -> [Option<Cow<'a, str>>; 2] {
        if self.held.is_none() && !may_have_halves(&message) {
            return [None, Some(message)];
        }
        let mut message = message.into_owned();
        let mut held = self.held.take();
        if let Some(held) = &mut held {
            join(held, &mut message);
        }
        let held = held.map(|held| Cow::Owned(repair(&held).into_owned()));
        if lone_halves(&message)
            .iter()
            .any(|half| half.ends_text(&message))
        {
            self.held = Some(message);
            return [held, None];
        }
        [held, Some(Cow::Owned(repair(&message).into_owned()))]
    }

    /// The message that still waits for the other half at the end of the stream.
    pub fn finish(&mut self) -> Option<String> {
        Some(repair(&self.held.take()?).into_owned())
    }
}

/// Moves the half at the end of a text to the texts of the next message that begin with the other half.
fn join(held: &mut String, next: &mut String) {
    let mut seconds = lone_halves(next);
    seconds.retain(|half| half.begins_text(next));
    let mut firsts = lone_halves(held);
    firsts.retain(|half| half.ends_text(held));
    let Some(first) = firsts.first().filter(|_| !seconds.is_empty()) else {
        return;
    };
    let first = held[first.at..first.at + ESCAPE_LEN].to_owned();
    for half in seconds.iter().rev() {
        next.insert_str(half.at, &first);
    }
    for half in firsts.iter().rev() {
        held.replace_range(half.at..half.at + ESCAPE_LEN, "");
    }
}

struct Half {
    at: usize,
    is_first: bool,
}

impl Half {
    fn ends_text(&self, json: &str) -> bool {
        self.is_first && json[self.at + ESCAPE_LEN..].starts_with('"')
    }

    fn begins_text(&self, json: &str) -> bool {
        let before = &json[..self.at];
        !self.is_first && before.ends_with('"') && !before.ends_with("\\\"")
    }
}

fn may_have_halves(json: &str) -> bool {
    json.contains("\\ud") || json.contains("\\uD")
}

/// The halves whose other half does not follow or precede.
fn lone_halves(json: &str) -> Vec<Half> {
    let mut halves = Vec::new();
    if !may_have_halves(json) {
        return halves;
    }
    let mut at = 0;
    while let Some(found) = json[at..].find('\\') {
        at += found;
        match escaped_unit(json, at) {
            Some(unit) if HIGH.contains(&unit) => {
                let next = escaped_unit(json, at + ESCAPE_LEN);
                match next.is_some_and(|unit| LOW.contains(&unit)) {
                    true => at += ESCAPE_LEN,
                    false => halves.push(Half { at, is_first: true }),
                }
                at += ESCAPE_LEN;
            }
            Some(unit) => {
                if LOW.contains(&unit) {
                    halves.push(Half {
                        at,
                        is_first: false,
                    });
                }
                at += ESCAPE_LEN;
            }
            // The escaped character may be another backslash.
            None => at += 1 + json[at + 1..].chars().next().map_or(0, char::len_utf8),
        }
    }
    halves
}

/// The UTF-16 unit that the escape at this position stands for.
fn escaped_unit(json: &str, at: usize) -> Option<u16> {
    let digits = json.get(at..at + ESCAPE_LEN)?.strip_prefix("\\u")?;
    u16::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::{HalfJoiner, repair};

    fn joined(messages: &[&str]) -> Vec<String> {
        let mut joiner = HalfJoiner::default();
        let mut all = Vec::new();
        for message in messages {
            let complete = joiner.push(Cow::Borrowed(message));
            all.extend(complete.into_iter().flatten().map(Cow::into_owned));
        }
        all.extend(joiner.finish());
        all
    }

    #[test]
    fn a_lone_half_becomes_a_replacement_character() {
        for (json, repaired) in [
            (r#"{"a":"\ud83d"}"#, r#"{"a":"\ufffd"}"#),
            (r#"{"a":"\uDE00x\ud83dy"}"#, r#"{"a":"\ufffdx\ufffdy"}"#),
            (r#"["\ud83d\ud83d\ude00"]"#, r#"["\ufffd\ud83d\ude00"]"#),
            (r#"["\\ud83d"]"#, r#"["\\ud83d"]"#),
            (r#"["\\\ud83d"]"#, r#"["\\\ufffd"]"#),
            (r#"["\ud83d\n"]"#, r#"["\ufffd\n"]"#),
            (r#"["\ud8"#, r#"["\ud8"#),
            ("[\"\\ä\\ud83d", "[\"\\ä\\ufffd"),
            ("\\", "\\"),
        ] {
            assert_eq!(repair(json), repaired, "{json}");
        }
    }

    #[test]
    fn halves_in_two_messages_are_joined() {
        assert_eq!(
            joined(&[r#"{"a":"hi \ud83d"}"#, r#"{"a":"\ude00!"}"#, r#"{"b":1}"#]),
            [r#"{"a":"hi "}"#, r#"{"a":"\ud83d\ude00!"}"#, r#"{"b":1}"#]
        );
        // The second half may be followed by the first half of the next character.
        assert_eq!(
            joined(&[r#"["\ud83d"]"#, r#"["\ude00\ud83d"]"#, r#"["\ude01"]"#]),
            [r#"[""]"#, r#"["\ud83d\ude00"]"#, r#"["\ud83d\ude01"]"#]
        );
        assert_eq!(
            joined(&[r#"["\ud83d"]"#, r#"["x"]"#, r#"["\ud83d"]"#]),
            [r#"["\ufffd"]"#, r#"["x"]"#, r#"["\ufffd"]"#]
        );
        assert_eq!(joined(&[r#"["\ud83d\ude00"]"#]), [r#"["\ud83d\ude00"]"#]);
    }
}
