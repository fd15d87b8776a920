//! Requests JSON in the prompt, for services without a parameter for it or that require the word there too. Pure.

use std::borrow::Cow;

use serde_json::value::RawValue;

pub const JSON_PROMPT: &str = "Your final answer is one JSON object alone, without a code fence.";

/// Precedes a schema that is not sent as a parameter.
const SCHEMA_PROMPT: &str =
    "Your final answer is JSON alone, without a code fence, and matches this JSON Schema:";

/// The system prompt, with a schema for a service or a model that takes none as a parameter.
pub fn with_schema_prompt(system: &str, schema: &RawValue) -> String {
    let prompt = [system, SCHEMA_PROMPT].join("\n\n");
    format!("{}\n{}", prompt.trim_start(), schema.get())
}

/// The system prompt, with [`JSON_PROMPT`] if it does not mention JSON. Messages do not count: the result must be the same in
/// every turn.
pub fn with_json_prompt(system: &str) -> Cow<'_, str> {
    let mentions_json = || {
        let mut words = system.as_bytes().windows(4);
        words.any(|word| word.eq_ignore_ascii_case(b"json"))
    };
    if system.is_empty() {
        Cow::Borrowed(JSON_PROMPT)
    } else if mentions_json() {
        Cow::Borrowed(system)
    } else {
        Cow::Owned([system, JSON_PROMPT].join("\n\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::{JSON_PROMPT, with_json_prompt};

    #[test]
    fn a_system_prompt_that_mentions_json_is_unchanged() {
        for system in ["Reply in JSON.", "json", "Write a Json object"] {
            assert_eq!(with_json_prompt(system), system);
        }
        assert_eq!(with_json_prompt(""), JSON_PROMPT);
        for system in ["Be good.", "Jason", "jso", "é"] {
            assert_eq!(
                with_json_prompt(system),
                format!("{system}\n\n{JSON_PROMPT}")
            );
        }
    }
}
