//! A final text that shall be JSON: finds the JSON in it, checks it, and words what a model is told of its errors. Pure.

use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::agent::ResponseFormat;
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

/// Whether a final text has the shape that was asked for: true where that is JSON, false where any text will do.
///
/// # Errors
/// What does not fit, a sentence each.
pub fn check(format: &ResponseFormat, text: &str) -> Result<bool, Vec<String>> {
    if matches!(format, ResponseFormat::Text) {
        return Ok(false);
    }
    let no_json = || vec!["it is not one JSON value".to_owned()];
    let value: Value = json(text)
        .and_then(|json| serde_json::from_str(json.get()).ok())
        .ok_or_else(no_json)?;
    let errors = match format {
        ResponseFormat::JsonSchema(schema) => Schema::read(Arc::clone(schema))
            .map_err(|error| vec![format!("the schema asked for is none: {error}")])?
            .errors(&value),
        _ if value.is_object() => Vec::new(),
        _ => vec!["it is not a JSON object".to_owned()],
    };
    match errors.is_empty() {
        true => Ok(true),
        false => Err(errors),
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
