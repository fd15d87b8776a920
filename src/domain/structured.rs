//! Structured output: finds the JSON in a final text, validates it, and writes the prompt that asks for a correction.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::json_schema::Schema;
use crate::domain::message::shorten;

/// The JSON of a text: the whole text, or the content of the one code fence around it.
pub fn extract_json(text: &str) -> Option<&RawValue> {
    let text = text.trim();
    let fenced = text
        .strip_prefix("```json")
        .or_else(|| text.strip_prefix("```"))
        .and_then(|rest| rest.strip_suffix("```"));
    serde_json::from_str(fenced.unwrap_or(text)).ok()
}

/// Checks a final text against the requested format. Returns true for JSON, false for free text. Call it on a separate
/// thread; see [`Schema`].
///
/// # Errors
/// The validation errors.
pub fn check(format: &ResponseFormat, text: &str) -> Result<bool, Vec<String>> {
    let value = match format {
        ResponseFormat::Text => return Ok(false),
        _ => parse_value(text)?,
    };
    into_result(match requested_schema(format)? {
        Some(schema) => schema.validation_errors(&value),
        None => object_errors(&value),
    })
}

/// As [`check`]; `None` if the check needs a separate thread.
pub fn check_inline(format: &ResponseFormat, text: &str) -> Option<Result<bool, Vec<String>>> {
    if matches!(format, ResponseFormat::Text) {
        return Some(Ok(false));
    }
    let checked = parse_value(text).and_then(|value| Ok((requested_schema(format)?, value)));
    Some(match checked {
        Ok((Some(schema), value)) => into_result(schema.validation_errors_inline(&value)?),
        Ok((None, value)) => into_result(object_errors(&value)),
        Err(errors) => Err(errors),
    })
}

/// Parses a text as JSON; rejects objects with duplicate keys.
fn parse_value(text: &str) -> Result<Value, Vec<String>> {
    let no_json = || vec!["it is not one JSON value".to_owned()];
    let json = extract_json(text).ok_or_else(no_json)?;
    // Clients get the text unchanged. A client whose parser takes the first of two equal keys would see another value
    // than the one that was validated.
    serde_json::from_str::<UniqueKeys>(json.get())
        .map_err(|error| vec![shorten(&error.to_string(), 300)])?;
    serde_json::from_str(json.get()).map_err(|error| vec![shorten(&error.to_string(), 300)])
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

fn into_result(errors: Vec<String>) -> Result<bool, Vec<String>> {
    if errors.is_empty() {
        Ok(true)
    } else {
        Err(errors)
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

    use super::{check, extract_json, repair_prompt};
    use crate::domain::agent::response_format::ResponseFormat;

    #[test]
    fn json_is_found_whole_or_in_a_fence() {
        for text in [
            "{\"a\": 1}",
            " {\"a\": 1}\n",
            "```json\n{\"a\": 1}\n```",
            "```\n{\"a\": 1}```",
        ] {
            assert_eq!(
                extract_json(text).map(|json| json.get()),
                Some("{\"a\": 1}"),
                "{text}"
            );
        }
        for text in [
            "",
            "Here: {\"a\": 1}",
            "{\"a\": 1} {}",
            "```json\n{\"a\": 1}",
            &"[".repeat(1000),
        ] {
            assert!(extract_json(text).is_none(), "{text}");
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
        assert_eq!(check(&ResponseFormat::JsonObject, valid), Ok(true));
    }

    #[test]
    fn output_is_checked_against_its_format() {
        let schema =
            json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
        let schema = serde_json::value::to_raw_value(&schema).expect("JSON");
        let schema = ResponseFormat::JsonSchema(Arc::from(schema));
        assert_eq!(check(&ResponseFormat::Text, "{}"), Ok(false));
        assert_eq!(check(&ResponseFormat::JsonObject, "{}"), Ok(true));
        assert_eq!(check(&schema, "{\"n\": 1}"), Ok(true));
        let why = |format, text: &str| repair_prompt(&check(format, text).expect_err("errors"));
        assert!(why(&ResponseFormat::JsonObject, "[]").contains("- it is not a JSON object\n"));
        assert!(why(&schema, "yes").contains("- it is not one JSON value\n"));
        assert!(
            why(&schema, "{\"n\": \"1\"}").contains("- /n: \"1\" is not of type \"integer\"\n")
        );
    }
}
