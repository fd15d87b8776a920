//! A JSON Schema, compiled once: tells what in a JSON value does not fit, in words that a model can act on. Fetches
//! nothing: a reference to another document is an error. Schema and value may be hostile: reading one and checking against it
//! end within bounds. Knows no tool and no run.

use std::fmt;
use std::sync::{Arc, OnceLock};

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, PatternOptions, ValidationError, Validator};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::counted::{self, Counted};
use crate::domain::message::shorten;

/// Most errors that are told at once: the first ones say enough.
const MOST_ERRORS: usize = 10;
/// Most characters of one error: it may quote the value.
const MOST_CHARACTERS: usize = 300;
/// Most texts that are read from other values in one value.
const MOST_READINGS: usize = 64;

/// Most bytes of a schema.
const MOST_BYTES: usize = 256 << 10;
/// Most patterns of a schema, and the most bytes that one takes when it is compiled.
const MOST_PATTERNS: usize = 100;
const MOST_COMPILED: usize = 256 << 10;
/// Most readings of a value that tell whether it fits: less than a second, and many times what an honest schema needs.
const MOST_READ: u64 = 10_000_000;
/// Most that tell what does not fit: each may leave an error behind.
const MOST_READ_FOR_ERRORS: u64 = 1_000_000;

/// A schema, with what checks values against it.
pub struct Schema {
    raw: Arc<RawValue>,
    /// Compiled when a value is first checked, where nobody has to know before whether it is a schema.
    validator: OnceLock<Result<Validator<Counted>, String>>,
}

impl Schema {
    /// The schema in this JSON.
    ///
    /// # Errors
    /// Why it is none: not JSON, not a schema, or it refers to what is not in it.
    pub fn read(raw: Arc<RawValue>) -> Result<Self, String> {
        let validator = OnceLock::from(Ok(compiled(&raw)?));
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
        let raw = to_raw_value(&schema).map_err(|error| error.to_string())?;
        Ok(Self {
            raw: raw.into(),
            validator: OnceLock::new(),
        })
    }

    fn validator(&self) -> Result<&Validator<Counted>, String> {
        let validator = self.validator.get_or_init(|| compiled(&self.raw));
        validator.as_ref().map_err(String::clone)
    }

    /// As it was written.
    pub fn raw(&self) -> &Arc<RawValue> {
        &self.raw
    }

    /// What does not fit, one sentence each with the place as a JSON pointer; empty where all fits.
    pub fn errors(&self, value: &Value) -> Vec<String> {
        let validator = match self.validator() {
            Ok(validator) => validator,
            Err(why) => return vec![why],
        };
        match counted::within(MOST_READ, || validator.is_valid(value)) {
            Some(true) => return Vec::new(),
            Some(false) => {}
            None => return vec!["it takes too long to check against the schema".to_owned()],
        }
        let told = counted::within(MOST_READ_FOR_ERRORS, || {
            let errors = validator.iter_errors(value).take(MOST_ERRORS);
            errors.map(|error| told(&error)).collect()
        });
        told.unwrap_or_else(|| vec!["it does not fit; why takes too long to find out".to_owned()])
    }

    /// The value, where it fits. A number, a truth value, a list or an object where the schema wants a text is read as
    /// its compact JSON first: models write such things.
    ///
    /// # Errors
    /// As [`Schema::errors`].
    pub fn fit(&self, mut value: Value) -> Result<Value, Vec<String>> {
        let errors = self.errors(&value);
        if errors.is_empty() {
            return Ok(value);
        }
        let readings = (0..MOST_READINGS).take_while(|_| self.read_as_text(&mut value));
        match readings.count() {
            0 => Err(errors),
            _ => match self.errors(&value) {
                errors if errors.is_empty() => Ok(value),
                errors => Err(errors),
            },
        }
    }

    /// Makes a text of the first value that should be one; false where there is none.
    fn read_as_text(&self, value: &mut Value) -> bool {
        let Ok(validator) = self.validator() else {
            return false;
        };
        let wanted = counted::within(MOST_READ_FOR_ERRORS, || {
            validator.iter_errors(value).find_map(|error| {
                let is_text = matches!(
                    error.kind(),
                    ValidationErrorKind::Type {
                        kind: TypeKind::Single(JsonType::String)
                    }
                );
                (is_text && !error.instance().is_null()).then(|| error.instance_path().to_string())
            })
        });
        let Some(place) = wanted.flatten().and_then(|at| value.pointer_mut(&at)) else {
            return false;
        };
        *place = Value::String(place.to_string());
        true
    }
}

/// What checks values against the schema in this JSON.
fn compiled(raw: &RawValue) -> Result<Validator<Counted>, String> {
    if raw.get().len() > MOST_BYTES {
        return Err(format!("it has more than {MOST_BYTES} bytes"));
    }
    let schema: Value = serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
    if patterns(&schema) > MOST_PATTERNS {
        return Err(format!("it has more than {MOST_PATTERNS} patterns"));
    }
    // Linear in time whatever the pattern: it may come from anybody.
    let patterns = PatternOptions::regex()
        .size_limit(MOST_COMPILED)
        .dfa_size_limit(MOST_COMPILED);
    jsonschema::options_for::<Counted>()
        .with_pattern_options(patterns)
        .build(&schema)
        .map_err(|error| shorten(&error.to_string(), MOST_CHARACTERS))
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schema").field(&self.raw.get()).finish()
    }
}

/// How many patterns there are; a property of that name counts, too.
fn patterns(schema: &Value) -> usize {
    match schema {
        Value::Array(items) => items.iter().map(patterns).sum(),
        Value::Object(members) => members
            .iter()
            .map(|(key, value)| {
                let own = match (key.as_str(), value) {
                    ("pattern", Value::String(_)) => 1,
                    ("patternProperties", Value::Object(patterns)) => patterns.len(),
                    _ => 0,
                };
                own + patterns(value)
            })
            .sum(),
        _ => 0,
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
    fn references_that_double_the_work_at_each_step_end_within_bounds() {
        let mut steps = serde_json::Map::new();
        for step in 0..64 {
            let next = json!({"$ref": format!("#/$defs/{}", step + 1)});
            let twice = json!({"anyOf": [
                {"allOf": [next, {"minProperties": 1}]},
                {"allOf": [next, {"minProperties": 2}]},
            ]});
            steps.insert(step.to_string(), twice);
        }
        steps.insert("64".to_owned(), json!({"maxProperties": 0}));
        let schema = schema(json!({"$defs": steps, "$ref": "#/$defs/0"}));
        let told = ["it takes too long to check against the schema"];
        assert_eq!(schema.errors(&json!({"a": 1})), told);
        assert_eq!(
            schema.fit(json!({"a": 1})),
            Err(told.map(str::to_owned).to_vec())
        );
    }

    #[test]
    fn a_schema_that_calls_itself_is_followed_as_deep_as_the_value_is() {
        let schema = schema(json!({
            "type": "object",
            "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["name"],
        }));
        let tree = json!({"name": "a", "below": [{"name": "b", "below": []}, {"below": []}]});
        assert_eq!(
            schema.errors(&tree),
            ["/below/1: \"name\" is a required property"]
        );
        // No turn of a call that has no ground to stand on.
        for endless in [json!({"$ref": "#"}), json!({"allOf": [{"$ref": "#"}]})] {
            self::schema(endless).errors(&tree);
        }
    }

    #[test]
    fn many_errors_are_told_as_a_few() {
        let schema = schema(json!({"type": "array", "items": {"type": "string"}}));
        let many = Value::from(vec![1; 100_000]);
        assert_eq!(schema.errors(&many).len(), 10);
        let more = Value::from(vec![1; 2_000_000]);
        assert_eq!(
            schema.errors(&more),
            ["it does not fit; why takes too long to find out"]
        );
    }

    #[test]
    fn a_schema_has_bounds_of_its_own() {
        let read = |schema: Value| {
            let raw = serde_json::value::to_raw_value(&schema).expect("JSON");
            Schema::read(raw.into()).map(drop)
        };
        let patterns: serde_json::Map<_, _> =
            (0..101).map(|at| (format!("^{at}"), json!({}))).collect();
        let why = read(json!({"patternProperties": patterns})).expect_err("too many");
        assert_eq!(why, "it has more than 100 patterns");
        let why = read(json!({"description": "x".repeat(300_000)})).expect_err("too long");
        assert_eq!(why, "it has more than 262144 bytes");
        assert!(read(json!({"pattern": "(\\w{1000}){1000}"})).is_err());
    }

    #[test]
    fn nothing_outside_is_fetched() {
        let raw = serde_json::value::to_raw_value(&json!({"$ref": "http://127.0.0.1:1/schema"}));
        assert!(Schema::read(raw.expect("JSON").into()).is_err());
    }
}
