//! A JSON Schema, compiled once: tells what in a JSON value does not fit, in words that a model can act on. Fetches
//! nothing: a reference to another document is an error. Knows no tool and no run.

use std::fmt;
use std::sync::Arc;

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, PatternOptions, ValidationError, Validator};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::shorten;

/// Most errors that are told at once: the first ones say enough.
const MOST_ERRORS: usize = 10;
/// Most characters of one error: it may quote the value.
const MOST_CHARACTERS: usize = 300;
/// Most texts that are read from other values in one value.
const MOST_READINGS: usize = 64;

/// A schema, with what checks values against it.
pub struct Schema {
    raw: Arc<RawValue>,
    validator: Validator,
}

impl Schema {
    /// The schema in this JSON.
    ///
    /// # Errors
    /// Why it is none: not JSON, not a schema, or it refers to what is not in it.
    pub fn read(raw: Arc<RawValue>) -> Result<Self, String> {
        let schema: Value = serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
        // Linear in time whatever the pattern: it may come from anybody.
        let validator = jsonschema::options()
            .with_pattern_options(PatternOptions::regex())
            .build(&schema)
            .map_err(|error| shorten(&error.to_string(), MOST_CHARACTERS))?;
        Ok(Self { raw, validator })
    }

    /// The schema of a Rust type, as models are shown it: without a title and a dialect.
    ///
    /// # Errors
    /// None for a type whose schema is one.
    pub fn of<T: schemars::JsonSchema>() -> Result<Self, String> {
        let settings = schemars::generate::SchemaSettings::draft2020_12()
            .with(|settings| settings.inline_subschemas = true);
        let mut schema = settings.into_generator().into_root_schema_for::<T>();
        schema.remove("$schema");
        schema.remove("title");
        Self::read(
            to_raw_value(&schema)
                .map_err(|error| error.to_string())?
                .into(),
        )
    }

    /// As it was written.
    pub fn raw(&self) -> &Arc<RawValue> {
        &self.raw
    }

    /// What does not fit, one sentence each with the place as a JSON pointer; empty where all fits.
    pub fn errors(&self, value: &Value) -> Vec<String> {
        let errors = self.validator.iter_errors(value).take(MOST_ERRORS);
        errors.map(|error| told(&error)).collect()
    }

    /// The value, where it fits. A number, a truth value, a list or an object where the schema wants a text is read as
    /// its compact JSON first: models write such things.
    ///
    /// # Errors
    /// As [`Schema::errors`].
    pub fn fit(&self, mut value: Value) -> Result<Value, Vec<String>> {
        for _ in 0..MOST_READINGS {
            let wanted = self.validator.iter_errors(&value).find_map(|error| {
                let is_text = matches!(
                    error.kind(),
                    ValidationErrorKind::Type {
                        kind: TypeKind::Single(JsonType::String)
                    }
                );
                (is_text && !error.instance().is_null()).then(|| error.instance_path().to_string())
            });
            let Some(place) = wanted.and_then(|at| value.pointer_mut(&at)) else {
                break;
            };
            *place = Value::String(place.to_string());
        }
        match self.errors(&value) {
            errors if errors.is_empty() => Ok(value),
            errors => Err(errors),
        }
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schema").field(&self.raw.get()).finish()
    }
}

fn told(error: &ValidationError<'_>) -> String {
    let place = error.instance_path().to_string();
    let why = shorten(&error.to_string(), MOST_CHARACTERS);
    match place.as_str() {
        "" => why,
        place => format!("{place}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Schema;

    fn schema(schema: Value) -> Schema {
        let raw = serde_json::value::to_raw_value(&schema).expect("JSON");
        Schema::read(raw.into()).expect("a schema")
    }

    #[test]
    fn an_error_names_the_place() {
        let schema = schema(json!({
            "type": "object",
            "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["path"],
            "additionalProperties": false,
        }));
        assert_eq!(schema.errors(&json!({"path": "a"})), Vec::<String>::new());
        assert_eq!(
            schema.errors(&json!({"limit": "many", "x": 1})),
            [
                "/limit: \"many\" is not of type \"integer\"",
                "Additional properties are not allowed ('x' was unexpected)",
                "\"path\" is a required property",
            ]
        );
    }

    #[test]
    fn another_value_is_read_as_text_where_text_is_wanted() {
        let schema = schema(json!({
            "type": "object",
            "properties": {"content": {"type": "string"}, "all": {"type": "array", "items": {"type": "string"}}},
        }));
        let fits = schema.fit(json!({"content": {"a": [1, 2]}, "all": [1, true]}));
        assert_eq!(
            fits,
            Ok(json!({"content": "{\"a\":[1,2]}", "all": ["1", "true"]}))
        );
        let null = schema.fit(json!({"content": null}));
        assert_eq!(
            null,
            Err(vec!["/content: null is not of type \"string\"".to_owned()])
        );
    }

    #[test]
    fn nothing_outside_is_fetched() {
        let raw = serde_json::value::to_raw_value(&json!({"$ref": "http://127.0.0.1:1/schema"}));
        assert!(Schema::read(raw.expect("JSON").into()).is_err());
    }
}
