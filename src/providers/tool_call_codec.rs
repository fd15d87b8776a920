//! Normalizes tool calls for the wires: arguments that may be a string, an object or neither, missing ids, and names that a
//! service would reject in later requests.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde_json::value::RawValue;

use crate::domain::message::{ToolCall, ToolResult, encoded_object};
use crate::providers::{ErrorCategory, ProviderError};

/// Maximum number of tool calls (or other blocks) in one reply.
pub const MAX_CALLS: usize = 1000;

/// What a text of arguments contains.
pub enum Arguments {
    Object(Arc<RawValue>),
    /// The beginning of an object.
    Incomplete,
    Other,
}

/// Reads a text of arguments. Several objects are placeholders or repeats: the last one that is not empty counts. An object may be
/// written as the text of a JSON string.
pub fn read_arguments(text: &str) -> Arguments {
    let mut found: Option<Cow<'_, RawValue>> = None;
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    loop {
        match values.next() {
            None => break,
            Some(Ok(value)) => {
                let object = match value.get().starts_with('{') {
                    true => Some(Cow::Borrowed(value)),
                    false => encoded_object(value.get(), 1).map(Cow::Owned),
                };
                if found.is_none() || value.get().len() > 2 {
                    found = object.or(found);
                }
            }
            Some(Err(error)) if error.is_eof() => match &found {
                Some(value) if value.get().len() > 2 => break,
                _ => return Arguments::Incomplete,
            },
            Some(Err(_)) => return Arguments::Other,
        }
    }
    match found {
        Some(object) => Arguments::Object(Arc::from(object.into_owned())),
        None => Arguments::Other,
    }
}

/// Gives an id to each call without one, and returns whether there was any. Duplicate ids stay: the conversation makes its
/// own ids unique, and sends the provider's ids back unchanged.
pub fn fill_missing_ids(calls: &mut [ToolCall]) -> bool {
    let existing: HashSet<String> = calls.iter().map(|call| call.id.clone()).collect();
    let mut has_filled = false;
    for (index, call) in calls
        .iter_mut()
        .enumerate()
        .filter(|(_, call)| call.id.is_empty())
    {
        call.id = format!("call_{index}");
        while existing.contains(&call.id) {
            call.id.push('_');
        }
        has_filled = true;
    }
    has_filled
}

/// Replaces the characters that OpenAI and Anthropic reject in a name (they accept `[A-Za-z0-9_-]{1,64}`). A model may invent
/// a name; it gets an error result, but later requests of the conversation must not fail because of it.
pub fn sanitize_name(name: &str) -> Cow<'_, str> {
    match sanitize(name) {
        Cow::Borrowed(name) if name.len() <= 64 => Cow::Borrowed(name),
        name => Cow::Owned(name[..name.len().min(64)].to_owned()),
    }
}

/// Replaces the characters that a service may reject in an id: before a fallback, another service may have chosen the id.
pub fn sanitize_id(id: &str) -> Cow<'_, str> {
    sanitize(id)
}

/// Maximum length of an id that OpenAI accepts, even of ids that it chose itself.
const MAX_ID_LEN: usize = 64;

/// Sanitizes and shortens an id for OpenAI's Responses API. Different long ids stay different.
pub fn short_id(id: &str) -> Cow<'_, str> {
    let sanitized = sanitize(id);
    if sanitized.len() <= MAX_ID_LEN {
        return sanitized;
    }
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    Cow::Owned(format!(
        "{}_{:016x}",
        &sanitized[..MAX_ID_LEN - 17],
        hasher.finish()
    ))
}

/// The ids that Mistral accepts: nine letters and digits.
const MISTRAL_ID_LEN: usize = 9;
const MISTRAL_ID_CHARACTERS: &[u8; 62] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// The id if Mistral accepts it, else a hash. Different ids are all but certain to stay different.
pub fn mistral_id(id: &str) -> Cow<'_, str> {
    if id.len() == MISTRAL_ID_LEN && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Cow::Borrowed(id);
    }
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    let mut hash = hasher.finish();
    let characters = (0..MISTRAL_ID_LEN).map(|_| {
        let index = (hash % 62) as usize;
        hash /= 62;
        char::from(MISTRAL_ID_CHARACTERS[index])
    });
    Cow::Owned(characters.collect())
}

fn sanitize(text: &str) -> Cow<'_, str> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if text.is_empty() {
        Cow::Borrowed("_")
    } else if text.chars().all(is_allowed) {
        Cow::Borrowed(text)
    } else {
        let replaced = text.chars().map(|c| if is_allowed(c) { c } else { '_' });
        Cow::Owned(replaced.collect())
    }
}

/// The call of the result at `index` of its turn. Results are normally in the order of their calls.
pub fn find_call<'a>(
    calls: &'a [ToolCall],
    index: usize,
    result: &ToolResult,
) -> Option<&'a ToolCall> {
    let is_match = |call: &&ToolCall| call.id == result.call_id;
    calls
        .get(index)
        .filter(is_match)
        .or_else(|| calls.iter().find(is_match))
}

/// Rejects a reply with too many calls or blocks.
pub fn check_call_count(count: usize) -> Result<(), ProviderError> {
    match count > MAX_CALLS {
        true => Err(ProviderError::new(
            ErrorCategory::Server,
            format!("response has more than {MAX_CALLS} tool calls"),
        )),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Arguments, fill_missing_ids, mistral_id, read_arguments, sanitize_name, short_id};
    use crate::domain::message::{ToolCall, empty_arguments};

    #[test]
    fn arguments_must_be_an_object() {
        let read = |text: &str| match read_arguments(text) {
            Arguments::Object(object) => object.get().to_owned(),
            Arguments::Incomplete => "incomplete".to_owned(),
            Arguments::Other => "other".to_owned(),
        };
        for object in ["{}", "{\"a\": 1.0,  \"a\":2}", "{\"ä\":[]}"] {
            assert_eq!(read(object), object);
        }
        for other in [
            "",
            " ",
            "null",
            "[1]",
            "7",
            "\"{\"",
            "{\"a\": 1} x",
            "{'a':1}",
        ] {
            assert_eq!(read(other), "other", "{other}");
        }
        for written in ["\"{}\"", "\"{\\\"a\\\":1}\"", "{} \"{\\\"a\\\":1}\""] {
            let object: &str = if written.contains('a') {
                "{\"a\":1}"
            } else {
                "{}"
            };
            assert_eq!(read(written), object, "{written}");
        }
        for incomplete in ["{", "{\"a\": 1", "{}{\"a\"", "{\"a\": \"\\u00"] {
            assert_eq!(read(incomplete), "incomplete", "{incomplete}");
        }
        for repeated in [
            "{}{\"a\":1}",
            "{\"a\":1} {}",
            "{\"b\":2}{\"a\":1}",
            "{\"a\":1}{\"a",
        ] {
            assert_eq!(read(repeated), "{\"a\":1}", "{repeated}");
        }
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(read(&deep), deep);
    }

    #[test]
    fn only_calls_without_an_id_get_one() {
        let mut calls = ["a", "", "a", "call_1", ""].map(|id| ToolCall {
            id: id.to_owned(),
            provider_id: String::new(),
            name: "t".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        });
        assert!(fill_missing_ids(&mut calls));
        let ids: Vec<_> = calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["a", "call_1_", "a", "call_1", "call_4"]);
        assert!(!fill_missing_ids(&mut calls));
    }

    #[test]
    fn long_ids_are_shortened_and_stay_different() {
        assert_eq!(short_id("functions.add:0"), "functions_add_0");
        let [one, other] = ["1", "2"].map(|end| format!("{}{end}", "a".repeat(100)));
        assert_eq!(short_id(&one).len(), 64);
        assert_ne!(short_id(&one), short_id(&other));
        assert_eq!(short_id(&short_id(&one)), short_id(&one));
    }

    #[test]
    fn ids_for_mistral_have_nine_letters_and_digits() {
        assert_eq!(mistral_id("aB3xK9mP2"), "aB3xK9mP2");
        let others = [
            "",
            "call_1",
            "call_2",
            "aB3xK9m-2",
            "aB3xK9mP2_1_0",
            "äöü12",
        ];
        let ids: HashSet<_> = others.iter().map(|id| mistral_id(id)).collect();
        assert_eq!(ids.len(), others.len());
        for id in ids {
            assert_eq!(mistral_id(&id), id);
        }
    }

    #[test]
    fn names_that_services_reject_are_sanitized() {
        assert_eq!(sanitize_name("call_agent"), "call_agent");
        assert_eq!(
            sanitize_name("functions.call agent"),
            "functions_call_agent"
        );
        assert_eq!(sanitize_name(""), "_");
        assert_eq!(sanitize_name(&"ä".repeat(10_000)).len(), 64);
    }
}
