//! Structured output: finds the JSON in a final text, validates it, and writes the prompt that asks for a correction.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::de::StrRead;
use serde_json::value::RawValue;
use serde_json::{StreamDeserializer, Value};

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::json_schema::Schema;
use crate::domain::message::shorten;

/// How models mark their thinking, where the server does not take it out of the text. In lower case.
const THINKING: [(&str, &str); 9] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[think]", "[/think]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis", "<|channel|>final"),
    ("<|channel>thought", "<channel|>"),
];
/// A text with more values, or with more brackets that begin none, is not searched.
const MAX_CANDIDATES: usize = 64;

/// A final text that fits its format.
#[derive(Debug, PartialEq, Eq)]
pub enum FinalText {
    /// Any text was requested.
    Free,
    /// The whole text is the requested JSON.
    Json,
    /// The requested JSON is this part of the text.
    JsonWithin(Range<usize>),
}

impl FinalText {
    pub fn is_structured(&self) -> bool {
        *self != Self::Free
    }

    /// The text, or the JSON in it.
    pub fn into_content(self, text: String) -> String {
        match self {
            Self::Free | Self::Json => text,
            Self::JsonWithin(range) => text[range].to_owned(),
        }
    }
}

/// Checks a final text against the requested format. JSON may have thinking, sentences or a code fence around it, if only
/// one value in the text fits. Call it on a separate thread; see [`Schema`].
///
/// # Errors
/// The validation errors.
pub fn check(format: &ResponseFormat, text: &str) -> Result<FinalText, Vec<String>> {
    let validate = |schema: &Schema, value: &Value| Some(schema.validation_errors(value));
    check_with(format, text, validate).unwrap_or_else(|| Err(not_one_value()))
}

/// As [`check`]; `None` if the check needs a separate thread.
pub fn check_inline(format: &ResponseFormat, text: &str) -> Option<Result<FinalText, Vec<String>>> {
    check_with(format, text, Schema::validation_errors_inline)
}

fn check_with(
    format: &ResponseFormat,
    text: &str,
    validate: impl Fn(&Schema, &Value) -> Option<Vec<String>>,
) -> Option<Result<FinalText, Vec<String>>> {
    if matches!(format, ResponseFormat::Text) {
        return Some(Ok(FinalText::Free));
    }
    let schema = match requested_schema(format) {
        Ok(schema) => schema,
        Err(errors) => return Some(Err(errors)),
    };
    let candidates = find_candidates(text);
    let mut found: Option<(Value, Range<usize>)> = None;
    let mut errors = not_one_value();
    for range in &candidates {
        let value = match parse_value(&text[range.clone()]) {
            Ok(value) => value,
            Err(why) => {
                errors = why;
                continue;
            }
        };
        let mismatches = match &schema {
            Some(schema) => validate(schema, &value)?,
            None => object_errors(&value),
        };
        match &found {
            _ if !mismatches.is_empty() => errors = mismatches,
            Some((other, _)) if value != *other => return Some(Err(not_one_value())),
            Some(_) => {}
            None => found = Some((value, range.clone())),
        }
    }
    Some(match found {
        Some((_, range)) if range.len() == text.trim().len() => Ok(FinalText::Json),
        Some((_, range)) => Ok(FinalText::JsonWithin(range)),
        None if candidates.len() == 1 => Err(errors),
        None => Err(not_one_value()),
    })
}

fn not_one_value() -> Vec<String> {
    vec!["it is not one JSON value".to_owned()]
}

/// The whole text if it is JSON, otherwise the objects and lists of the answer in it, or the one value in its code fence.
/// Nothing if the answer has broken JSON, since a part of that is no answer.
fn find_candidates(text: &str) -> Vec<Range<usize>> {
    let whole = trim(text, 0..text.len());
    if is_json(&text[whole.clone()]) {
        return vec![whole];
    }
    let answer = without_thinking(text);
    let mut candidates = Vec::new();
    let (mut at, mut passed) = (answer.start, 0);
    while let Some(found) = text[at..answer.end].find(['{', '[']) {
        at += found;
        let rest = &text[at..answer.end];
        passed += 1;
        match StreamDeserializer::<_, &RawValue>::new(StrRead::new(rest)).next() {
            _ if passed > MAX_CANDIDATES => return Vec::new(),
            Some(Ok(value)) => {
                let end = at + value.get().len();
                candidates.push(at..end);
                at = end;
            }
            Some(Err(error)) if error.is_eof() || looks_like_json(rest) => return Vec::new(),
            _ => at += 1,
        }
    }
    if candidates.is_empty() {
        let value = without_fence(text, trim(text, answer));
        candidates.extend(Some(value).filter(|it| is_json(&text[it.clone()])));
    }
    candidates
}

/// What comes after thinking, whose beginning may be a part of the prompt, and before more of it.
fn without_thinking(text: &str) -> Range<usize> {
    let lower = text.to_ascii_lowercase();
    let ends = THINKING
        .iter()
        .filter_map(|(_, end)| Some(lower.rfind(end)? + end.len()));
    let start = ends.max().unwrap_or(0);
    let begins = THINKING
        .iter()
        .filter_map(|(begin, _)| lower[start..].find(begin));
    let end = begins.min().map_or(text.len(), |at| start + at);
    start..end
}

/// Whether a text that begins with a bracket is rather broken JSON than a bracket of a sentence.
fn looks_like_json(text: &str) -> bool {
    let rest = text[1..].trim_start();
    match text.starts_with('{') {
        true => rest.starts_with(['"', '\'']),
        false => rest.starts_with(['{', '"', '\'']),
    }
}

/// The content of the code fence, with any label, that is all of this part of the text; else the part itself.
fn without_fence(text: &str, part: Range<usize>) -> Range<usize> {
    let fenced = ["```", "~~~"].iter().find_map(|fence| {
        let inner = text[part.clone()]
            .strip_prefix(fence)?
            .strip_suffix(fence)?;
        let label = inner.find('\n').map_or(0, |end| end + 1);
        let start = part.start + fence.len() + label;
        Some(start..start + inner.len() - label)
    });
    trim(text, fenced.unwrap_or(part))
}

/// Without white space and byte order marks around it.
fn trim(text: &str, range: Range<usize>) -> Range<usize> {
    let is_blank = |c: char| c.is_whitespace() || c == '\u{feff}';
    let part = text[range.clone()].trim_start_matches(is_blank);
    let start = range.end - part.len();
    start..start + part.trim_end_matches(is_blank).len()
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<&RawValue>(text).is_ok()
}

/// Parses JSON; rejects objects with duplicate keys.
fn parse_value(json: &str) -> Result<Value, Vec<String>> {
    // A client whose parser takes the first of two equal keys would see another value than the one that was validated.
    serde_json::from_str::<UniqueKeys>(json)
        .map_err(|error| vec![shorten(&error.to_string(), 300)])?;
    serde_json::from_str(json).map_err(|error| vec![shorten(&error.to_string(), 300)])
}

fn requested_schema(format: &ResponseFormat) -> Result<Option<Schema>, Vec<String>> {
    match format {
        ResponseFormat::JsonSchema(schema) => Schema::parse(Arc::clone(schema))
            .map(Some)
            .map_err(|error| vec![format!("the requested schema is invalid: {error}")]),
        ResponseFormat::Text | ResponseFormat::JsonObject => Ok(None),
    }
}

fn object_errors(value: &Value) -> Vec<String> {
    if value.is_object() {
        Vec::new()
    } else {
        vec!["it is not a JSON object".to_owned()]
    }
}

/// JSON without duplicate keys.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct UniqueKeysVisitor;
        impl<'de> Visitor<'de> for UniqueKeysVisitor {
            type Value = UniqueKeys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys)
            }

            fn visit_bool<E>(self, _: bool) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys)
            }

            fn visit_i64<E>(self, _: i64) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys)
            }

            fn visit_u64<E>(self, _: u64) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys)
            }

            fn visit_f64<E>(self, _: f64) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys)
            }

            fn visit_str<E>(self, _: &str) -> Result<UniqueKeys, E> {
                Ok(UniqueKeys)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<UniqueKeys, A::Error> {
                while items.next_element::<UniqueKeys>()?.is_some() {}
                Ok(UniqueKeys)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<UniqueKeys, A::Error> {
                let mut keys = HashSet::new();
                while let Some(key) = members.next_key::<String>()? {
                    let quoted_key = shorten(&key, 100);
                    if !keys.insert(key) {
                        let why = format!("an object has the key {quoted_key:?} twice");
                        return Err(A::Error::custom(why));
                    }
                    members.next_value::<UniqueKeys>()?;
                }
                Ok(UniqueKeys)
            }
        }
        deserializer.deserialize_any(UniqueKeysVisitor)
    }
}

/// The message that is sent once to the model if its text does not fit.
pub fn repair_prompt(errors: &[String]) -> String {
    format!(
        "Your answer does not have the required shape:\n- {}\nAnswer again with nothing but the corrected JSON.",
        errors.join("\n- ")
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::{FinalText, check, repair_prompt};
    use crate::domain::agent::response_format::ResponseFormat;

    /// The JSON that is found in a text.
    fn found<'t>(format: &ResponseFormat, text: &'t str) -> Option<&'t str> {
        match check(format, text).ok()? {
            FinalText::Free => None,
            FinalText::Json => Some(text.trim()),
            FinalText::JsonWithin(range) => text.get(range),
        }
    }

    #[test]
    fn json_is_found_with_whatever_is_around_it() {
        for text in [
            "{\"a\": 1}",
            " {\"a\": 1}\n",
            "\u{feff}{\"a\": 1}",
            "```json\n{\"a\": 1}\n```",
            "```\n{\"a\": 1}```",
            "```JSON5 {\"a\": 1}```",
            "~~~javascript\r\n{\"a\": 1}\r\n~~~\nDone.",
            "Here is {the} answer [see 1], [[2]:\n\n{\"a\": 1}",
            "{\"a\": 1}\n\nI hope this helps :-}",
            "{\"a\": 1}\n{\"a\":1}",
            "<think>\nmaybe {\"a\": 2}\n</think>\n\n{\"a\": 1}",
            "So {\"a\": 2}, or {\"a\": </think>```json\n{\"a\": 1}\n```",
            "Well. <Thinking>{</Thinking> and <think>2</think> {\"a\": 1}",
            "[THINK]{\"a\": 2}[/THINK]{\"a\": 1}",
            "◁think▷{\"a\": 2}◁/think▷{\"a\": 1}",
            "<|channel|>analysis<|message|>{\"a\": 2}<|end|><|start|>assistant<|channel|>final<|message|>{\"a\": 1}",
            "<answer>{\"a\": 1}</answer>",
            "\\boxed{{\"a\": 1}}",
        ] {
            let found = found(&ResponseFormat::JsonObject, text);
            assert_eq!(found, Some("{\"a\": 1}"), "{text}");
        }
        let tagged = "{\"a\": \"<think>{</think>\"}";
        assert_eq!(found(&ResponseFormat::JsonObject, tagged), Some(tagged));
    }

    #[test]
    fn json_that_is_ambiguous_broken_or_thought_is_no_answer() {
        for text in [
            "",
            "nothing",
            "{\"a\": 1} {}",
            "First {\"a\": 2}? No: {\"a\": 1}",
            "Here: {\"items\": {\"a\": 1}, \"b\":",
            "Here: {\"items\": {\"a\": 1}, b}",
            "Here: [{\"a\": 1}, oops]",
            "```json\n{\"a\": 1",
            "<think>maybe {\"a\": 1}",
            "<think>maybe {\"a\": 1}</think>",
            "[1]",
            "```\n\"a\"\n```",
            &"[".repeat(1000),
            &"[1 ".repeat(1000),
        ] {
            assert_eq!(found(&ResponseFormat::JsonObject, text), None, "{text}");
        }
    }

    #[test]
    fn a_schema_chooses_among_values() {
        let schema = |schema: serde_json::Value| {
            let schema = serde_json::value::to_raw_value(&schema).expect("JSON");
            ResponseFormat::JsonSchema(Arc::from(schema))
        };
        let object = schema(json!({"type": "object", "required": ["n"]}));
        let text = "From {\"m\": 1} and [2] follows:\n{\"n\": 1}";
        assert_eq!(found(&object, text), Some("{\"n\": 1}"));
        assert_eq!(found(&object, "{\"n\": 1} or {\"n\": 2}"), None);
        let errors = check(&object, "Well: {\"m\": 1}").expect_err("errors");
        assert!(
            errors[0].contains("\"n\" is a required property"),
            "{errors:?}"
        );
        let word = schema(json!({"type": "string"}));
        for text in [
            "\"yes\"",
            "```\n\"yes\"```",
            "<think>no</think> ```text\n\"yes\"\n```",
        ] {
            assert_eq!(found(&word, text), Some("\"yes\""), "{text}");
        }
    }

    #[test]
    fn a_duplicate_key_is_reported() {
        for text in [
            "{\"n\": \"x\", \"n\": 1}",
            "[{\"a\": {\"n\": 1, \"\\u006e\": 2}}]",
        ] {
            let why = check(&ResponseFormat::JsonObject, text).expect_err(text);
            let expected = "an object has the key \"n\" twice";
            assert!(why[0].starts_with(expected), "{why:?}");
        }
        let valid = "{\"a\": [null, true, -1, 1, 0.5, \"x\"], \"b\": {\"a\": 1}}";
        assert_eq!(
            check(&ResponseFormat::JsonObject, valid),
            Ok(FinalText::Json)
        );
    }

    #[test]
    fn output_is_checked_against_its_format() {
        let schema =
            json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
        let schema = serde_json::value::to_raw_value(&schema).expect("JSON");
        let schema = ResponseFormat::JsonSchema(Arc::from(schema));
        assert_eq!(check(&ResponseFormat::Text, "{}"), Ok(FinalText::Free));
        assert_eq!(
            check(&ResponseFormat::JsonObject, "{}"),
            Ok(FinalText::Json)
        );
        assert_eq!(check(&schema, "{\"n\": 1}"), Ok(FinalText::Json));
        let why = |format, text: &str| repair_prompt(&check(format, text).expect_err("errors"));
        assert!(why(&ResponseFormat::JsonObject, "[]").contains("- it is not a JSON object\n"));
        assert!(why(&schema, "yes").contains("- it is not one JSON value\n"));
        assert!(
            why(&schema, "{\"n\": \"1\"}").contains("- /n: \"1\" is not of type \"integer\"\n")
        );
    }
}
