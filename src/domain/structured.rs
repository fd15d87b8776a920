//! A final text that shall be JSON: finds the JSON in it, checks it, and words what a model is told of its errors. Pure.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::agent::ResponseFormat;
use crate::domain::message::shorten;
use crate::domain::schema::Schema;

/// The JSON that a text is: whole, or within the one fence that models like to put around it.
pub fn json(text: &str) -> Option<&RawValue> {
    let text = text.trim();
    let fenced = text
        .strip_prefix("```json")
        .or_else(|| text.strip_prefix("```"))
        .and_then(|rest| rest.strip_suffix("```"));
    serde_json::from_str(fenced.unwrap_or(text)).ok()
}

/// Whether a final text has the shape that was requested: true if that is JSON, false if any text will do. On a thread of
/// its own; see [`Schema`].
///
/// # Errors
/// What does not fit, a sentence each.
pub fn check(format: &ResponseFormat, text: &str) -> Result<bool, Vec<String>> {
    let value = match format {
        ResponseFormat::Text => return Ok(false),
        _ => value(text)?,
    };
    fits(match schema(format)? {
        Some(schema) => schema.errors(&value),
        None => object(&value),
    })
}

/// As [`check`]; none if finding out takes a thread of its own.
pub fn check_inline(format: &ResponseFormat, text: &str) -> Option<Result<bool, Vec<String>>> {
    if matches!(format, ResponseFormat::Text) {
        return Some(Ok(false));
    }
    let checked = value(text).and_then(|value| Ok((schema(format)?, value)));
    Some(match checked {
        Ok((Some(schema), value)) => fits(schema.errors_inline(&value)?),
        Ok((None, value)) => fits(object(&value)),
        Err(errors) => Err(errors),
    })
}

/// The value that a text is, if no object in it has a key twice.
fn value(text: &str) -> Result<Value, Vec<String>> {
    let no_json = || vec!["it is not one JSON value".to_owned()];
    let json = json(text).ok_or_else(no_json)?;
    // The text is handed on as it is: a reader for whom the first of two equal keys counts must not see another value
    // than the one that was checked.
    serde_json::from_str::<Once>(json.get())
        .map_err(|error| vec![shorten(&error.to_string(), 300)])?;
    serde_json::from_str(json.get()).map_err(|error| vec![shorten(&error.to_string(), 300)])
}

/// The schema that was requested, if one was.
fn schema(format: &ResponseFormat) -> Result<Option<Schema>, Vec<String>> {
    match format {
        ResponseFormat::JsonSchema(schema) => Schema::read(Arc::clone(schema))
            .map(Some)
            .map_err(|error| vec![format!("the schema asked for is none: {error}")]),
        ResponseFormat::Text | ResponseFormat::JsonObject => Ok(None),
    }
}

fn object(value: &Value) -> Vec<String> {
    if value.is_object() {
        Vec::new()
    } else {
        vec!["it is not a JSON object".to_owned()]
    }
}

fn fits(errors: Vec<String>) -> Result<bool, Vec<String>> {
    if errors.is_empty() {
        Ok(true)
    } else {
        Err(errors)
    }
}

/// JSON in which no object has a key twice.
struct Once;

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Once;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_unit<E>(self) -> Result<Once, E> {
                Ok(Once)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Once, E> {
                Ok(Once)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Once, E> {
                Ok(Once)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Once, E> {
                Ok(Once)
            }

            fn visit_f64<E>(self, _: f64) -> Result<Once, E> {
                Ok(Once)
            }

            fn visit_str<E>(self, _: &str) -> Result<Once, E> {
                Ok(Once)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Once, A::Error> {
                while items.next_element::<Once>()?.is_some() {}
                Ok(Once)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Once, A::Error> {
                let mut keys = HashSet::new();
                while let Some(key) = members.next_key::<String>()? {
                    let shown = shorten(&key, 100);
                    if !keys.insert(key) {
                        let why = format!("an object has the key {shown:?} twice");
                        return Err(A::Error::custom(why));
                    }
                    members.next_value::<Once>()?;
                }
                Ok(Once)
            }
        }
        deserializer.deserialize_any(Reads)
    }
}

/// What the model is told, once, of a text that does not fit.
pub fn repair(errors: &[String]) -> String {
    format!(
        "Your answer does not have the required shape:\n- {}\nAnswer again with nothing but the corrected JSON.",
        errors.join("\n- ")
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::{check, json, repair};
    use crate::domain::agent::ResponseFormat;

    #[test]
    fn json_is_found_whole_or_in_a_fence() {
        for text in [
            "{\"a\": 1}",
            " {\"a\": 1}\n",
            "```json\n{\"a\": 1}\n```",
            "```\n{\"a\": 1}```",
        ] {
            assert_eq!(
                json(text).map(|json| json.get()),
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
            assert!(json(text).is_none(), "{text}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_told() {
        for text in [
            "{\"n\": \"x\", \"n\": 1}",
            "[{\"a\": {\"n\": 1, \"\\u006e\": 2}}]",
        ] {
            let why = check(&ResponseFormat::JsonObject, text).expect_err(text);
            let told = "an object has the key \"n\" twice";
            assert!(why[0].starts_with(told), "{why:?}");
        }
        let fits = "{\"a\": [null, true, -1, 1, 0.5, \"x\"], \"b\": {\"a\": 1}}";
        assert_eq!(check(&ResponseFormat::JsonObject, fits), Ok(true));
    }

    #[test]
    fn a_text_is_held_against_what_was_asked_for() {
        let schema =
            json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
        let schema = serde_json::value::to_raw_value(&schema).expect("JSON");
        let schema = ResponseFormat::JsonSchema(Arc::from(schema));
        assert_eq!(check(&ResponseFormat::Text, "{}"), Ok(false));
        assert_eq!(check(&ResponseFormat::JsonObject, "{}"), Ok(true));
        assert_eq!(check(&schema, "{\"n\": 1}"), Ok(true));
        let why = |format, text: &str| repair(&check(format, text).expect_err("errors"));
        assert!(why(&ResponseFormat::JsonObject, "[]").contains("- it is not a JSON object\n"));
        assert!(why(&schema, "yes").contains("- it is not one JSON value\n"));
        assert!(
            why(&schema, "{\"n\": \"1\"}").contains("- /n: \"1\" is not of type \"integer\"\n")
        );
    }
}
