//! JSON Schema validation with errors that a model can act on. Fetches nothing: a reference to another document is an
//! error. Schemas and values may be hostile, so compiling and validating are bounded. Small schemas and values are
//! validated inline; others need a separate thread with `STACK_BYTES` bytes of stack.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use jsonschema::PatternOptions;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::json_schema::compiled::{
    CheckMode, CompiledSchema, ErrorCost, LimitExceeded, Mismatch, bounded_message,
};
use crate::domain::json_schema::complexity::Complexity;
use crate::domain::json_schema::integers::{contains_whole_float, write_integers};
use crate::domain::json_schema::limits::{
    INLINE_READS_PER_BYTE, MAX_INLINE_BYTES, MAX_INLINE_LEVELS, MAX_INLINE_PATTERN_BYTES,
    MAX_INLINE_PATTERNS, MAX_LEVELS, MAX_MATCH_COST, MAX_PATTERN_BYTES, MAX_PATTERNS,
    MAX_SCHEMA_BYTES, PATTERN_SIZES, TIMEOUT,
};
use crate::domain::json_schema::metered_json::{MeteredJson, PatternCost};

pub mod arguments;
pub mod compiled;
mod complexity;
mod integers;
pub mod keywords;
pub mod limits;
mod metered_json;

/// A schema with its validator.
pub struct Schema {
    raw: Arc<RawValue>,
    complexity: Complexity,
    /// Compiled at the first validation; `None` if that needs a separate thread.
    inline_compiled: OnceLock<Option<CompiledSchema>>,
}

impl Schema {
    /// Parses a schema without compiling it.
    ///
    /// # Errors
    /// If the schema exceeds a size limit or is not JSON.
    pub fn parse(raw: Arc<RawValue>) -> Result<Self, String> {
        if raw.get().len() > MAX_SCHEMA_BYTES {
            return Err(format!("it has more than {MAX_SCHEMA_BYTES} bytes"));
        }
        let schema: Value = serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
        let complexity = Complexity::measure(&schema);
        if complexity.patterns > MAX_PATTERNS {
            return Err(format!("it has more than {MAX_PATTERNS} patterns"));
        }
        if complexity.pattern_bytes > MAX_PATTERN_BYTES {
            return Err(format!(
                "its patterns have more than {MAX_PATTERN_BYTES} bytes together"
            ));
        }
        if complexity.reference_levels() > MAX_LEVELS {
            return Err(format!(
                "its {} references times its {} levels of nesting are more than {MAX_LEVELS}",
                complexity.references, complexity.depth
            ));
        }
        Ok(Self {
            raw,
            complexity,
            inline_compiled: OnceLock::new(),
        })
    }

    /// The schema of a Rust type for models: without a title and a dialect.
    pub fn for_type<T: schemars::JsonSchema>() -> Result<Self, String> {
        let settings = schemars::generate::SchemaSettings::draft2020_12()
            .with(|settings| settings.inline_subschemas = true);
        let mut schema = settings.into_generator().into_root_schema_for::<T>();
        schema.remove("$schema");
        schema.remove("title");
        let raw = to_raw_value(&schema).map_err(|error| error.to_string())?;
        Self::parse(raw.into())
    }

    /// The schema as it was written.
    pub fn raw(&self) -> &Arc<RawValue> {
        &self.raw
    }

    /// Whether the schema is valid; `None` if the check needs a separate thread.
    pub fn compile_inline(&self) -> Option<Result<(), String>> {
        let compiled = self.inline_compiled()?;
        Some(compiled.validator.as_ref().map(drop).map_err(String::clone))
    }

    /// The validation errors, each with a JSON pointer; empty if the value is valid, `None` if the check needs a separate
    /// thread.
    pub fn validation_errors_inline(&self, value: &Value) -> Option<Vec<String>> {
        self.inline_compiled()?
            .validation_errors(value, CheckMode::Inline)
            .ok()
    }

    /// As [`Schema::validation_errors_inline`], with the pointers apart.
    pub fn mismatches_inline(&self, value: &Value) -> Option<Vec<Mismatch>> {
        self.inline_compiled()?
            .mismatches(value, CheckMode::Inline)
            .ok()
    }

    /// As [`Schema::coerce`]; returns the value as the outer error if the check needs a separate thread.
    pub fn coerce_inline(&self, value: Value) -> Result<Result<Value, Vec<String>>, Value> {
        match self.inline_compiled() {
            Some(compiled) => {
                let coerced = compiled.coerce(value, CheckMode::Inline)?;
                Ok(coerced.map(|value| self.write_integers(value)))
            }
            None => Err(value),
        }
    }

    /// The valid value with integers where the schema requires them.
    fn write_integers(&self, mut value: Value) -> Value {
        if self.raw.get().contains("integer") && contains_whole_float(&value) {
            let schema: Value = serde_json::from_str(self.raw.get()).unwrap_or_default();
            write_integers(&schema, &mut value);
        }
        value
    }

    /// Whether the schema is valid. Call it on a separate thread.
    ///
    /// # Errors
    /// Why the schema is invalid.
    pub fn compile(&self) -> Result<(), String> {
        self.compile_with_sizes(&PATTERN_SIZES).validator.map(drop)
    }

    /// The validation errors. Call it on a separate thread.
    pub fn validation_errors(&self, value: &Value) -> Vec<String> {
        let mismatches = self.mismatches(value);
        mismatches.iter().map(Mismatch::to_string).collect()
    }

    /// As [`Schema::validation_errors`], with the pointers apart.
    pub fn mismatches(&self, value: &Value) -> Vec<Mismatch> {
        let mode = CheckMode::WithDeadline(Instant::now() + TIMEOUT);
        let checked = self
            .compile_with_sizes(&PATTERN_SIZES)
            .mismatches(value, mode);
        checked.unwrap_or_else(|LimitExceeded| vec![Mismatch::of_whole(timeout_message())])
    }

    /// Returns the value if it is valid. Where the schema requires a string, any other value but null is first replaced
    /// by its compact JSON, and where it requires an integer, a number such as `1.0` is replaced by `1`, because models
    /// write such values. Call it on a separate thread.
    ///
    /// # Errors
    /// As [`Schema::validation_errors`].
    pub fn coerce(&self, value: Value) -> Result<Value, Vec<String>> {
        let mode = CheckMode::WithDeadline(Instant::now() + TIMEOUT);
        let checked = self.compile_with_sizes(&PATTERN_SIZES).coerce(value, mode);
        let checked = checked.unwrap_or_else(|_| Err(vec![timeout_message()]));
        checked.map(|value| self.write_integers(value))
    }

    fn inline_compiled(&self) -> Option<&CompiledSchema> {
        let is_small = self.raw.get().len() <= MAX_INLINE_BYTES
            && self.complexity.reference_levels() <= MAX_INLINE_LEVELS
            && self.complexity.patterns <= MAX_INLINE_PATTERNS
            && self.complexity.pattern_bytes <= MAX_INLINE_PATTERN_BYTES;
        let compile = || {
            let compiled = self.compile_with_sizes(&PATTERN_SIZES[..1]);
            // With a larger size limit the patterns may still compile.
            let is_final = compiled.validator.is_ok() || self.complexity.patterns == 0;
            is_final.then_some(compiled)
        };
        is_small
            .then(|| self.inline_compiled.get_or_init(compile).as_ref())
            .flatten()
    }

    /// Compiles the schema with the smallest of these pattern sizes that suffices.
    fn compile_with_sizes(&self, sizes: &[usize]) -> CompiledSchema {
        let schema: Value = serde_json::from_str(self.raw.get()).unwrap_or_default();
        let mut validator = Err("it has no size".to_owned());
        let mut pattern_cost = PatternCost::default();
        for size in sizes {
            // The time is linear for every pattern, which may be hostile.
            let options = PatternOptions::regex()
                .size_limit(*size)
                .dfa_size_limit(*size);
            validator = jsonschema::options_for::<MeteredJson>()
                .with_pattern_options(options)
                // The check that a text is a pattern takes time that is not linear in its length.
                .with_format("regex", |_| true)
                .build(&schema)
                .map_err(|error| bounded_message(&error));
            if self.complexity.patterns > 0 {
                pattern_cost = PatternCost {
                    reads_per_byte: INLINE_READS_PER_BYTE,
                    max_text_bytes: MAX_MATCH_COST / size,
                    patterns_per_name: self.complexity.name_patterns,
                };
            }
            if validator.is_ok() || self.complexity.patterns == 0 {
                break;
            }
        }
        let references = match self.complexity.references {
            0 => 0,
            // Between two levels of the value, a path passes each part of the schema at most once.
            _ => self.raw.get().len(),
        };
        CompiledSchema {
            validator,
            pattern_cost,
            error_cost: ErrorCost {
                keyword: self.complexity.copied_bytes,
                references,
            },
        }
    }
}

fn timeout_message() -> String {
    "it takes too long to check against the schema".to_owned()
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schema").field(&self.raw.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Schema;

    fn schema(schema: Value) -> Schema {
        let raw = serde_json::value::to_raw_value(&schema).expect("JSON");
        Schema::parse(raw.into()).expect("a schema")
    }

    /// The check of a pattern with many named groups takes time that grows with the square of their number.
    #[test]
    fn texts_are_not_checked_to_be_patterns() {
        let schema = schema(json!({
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"a": {"format": "regex"}, "b": {"format": "date"}},
        }));
        assert!(schema.validation_errors(&json!({"a": "("})).is_empty());
        assert_eq!(schema.validation_errors(&json!({"b": "("})).len(), 1);
    }

    #[test]
    fn an_error_names_the_pointer() {
        let schema = schema(json!({
            "type": "object",
            "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["path"],
            "additionalProperties": false,
        }));
        assert_eq!(
            schema.validation_errors(&json!({"path": "a"})),
            Vec::<String>::new()
        );
        assert_eq!(
            schema.validation_errors(&json!({"limit": "many", "x": 1})),
            [
                "/limit: \"many\" is not of type \"integer\"",
                "Additional properties are not allowed ('x' was unexpected)",
                "\"path\" is a required property",
            ]
        );
    }

    #[test]
    fn other_json_is_accepted_as_text_if_a_string_is_expected() {
        let schema = schema(json!({
            "type": "object",
            "properties": {"content": {"type": "string"}, "all": {"type": "array", "items": {"type": "string"}}},
        }));
        let coerced = schema.coerce(json!({"content": {"a": [1, 2]}, "all": [1, true]}));
        assert_eq!(
            coerced,
            Ok(json!({"content": "{\"a\":[1,2]}", "all": ["1", "true"]}))
        );
        let null = schema.coerce(json!({"content": null}));
        assert_eq!(
            null,
            Err(vec!["/content: null is not of type \"string\"".to_owned()])
        );
    }

    /// A subschema that is tried twice as often with each of `steps` references.
    fn doubling_schema(inner: Value, steps: usize) -> Schema {
        let mut definitions = serde_json::Map::new();
        for step in 0..steps {
            let next = json!({"$ref": format!("#/$defs/{}", step + 1)});
            let never = |n: u32| json!({"minProperties": n, "minItems": n, "minLength": n});
            let twice = json!({"anyOf": [
                {"allOf": [next, never(1_000_000)]},
                {"allOf": [next, never(2_000_000)]},
            ]});
            definitions.insert(step.to_string(), twice);
        }
        definitions.insert(steps.to_string(), inner);
        schema(json!({"$defs": definitions, "$ref": "#/$defs/0"}))
    }

    const TOO_LONG: &str = "it takes too long to check against the schema";

    #[test]
    fn references_that_double_the_work_at_each_step_end_within_bounds() {
        let schema = doubling_schema(json!({"maxProperties": 0}), 64);
        assert_eq!(schema.validation_errors(&json!({"a": 1})), [TOO_LONG]);
        assert_eq!(
            schema.coerce(json!({"a": 1})),
            Err(vec![TOO_LONG.to_owned()])
        );
        assert!(schema.validation_errors_inline(&json!({"a": 1})).is_none());
    }

    #[test]
    fn comparing_and_matching_cost_what_they_read() {
        let numbers: Value = (0..3_000).collect();
        let deep = json!([[numbers]]);
        let objects: Vec<Value> = (0..500)
            .map(|n| json!([{"n": n, "x": "x".repeat(99)}]))
            .collect();
        for (inner, value) in [
            (json!({"uniqueItems": true}), numbers.clone()),
            (json!({"const": deep}), deep.clone()),
            (json!({"enum": objects}), json!([{"n": 1, "x": 2}])),
            (
                json!({"pattern": "^(a|b)*c[ab]{60}d"}),
                json!("abc".repeat(20_000)),
            ),
            (
                json!({"propertyNames": {"maxLength": 9_999}}),
                json!({"ab".repeat(9_999): 1}),
            ),
        ] {
            let schema = doubling_schema(inner, 24);
            let started = std::time::Instant::now();
            assert_eq!(schema.validation_errors(&value).len(), 1);
            let took = started.elapsed();
            assert!(took.as_secs() < 30, "{took:?}");
            assert!(schema.validation_errors_inline(&value).is_none());
        }
    }

    /// The most memory that this process has had, in bytes.
    #[cfg(target_os = "linux")]
    fn peak_memory() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").expect("a status");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|peak| peak.split_whitespace().next()?.parse::<usize>().ok());
        peak.expect("a number of kB") * 1024
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn errors_copy_within_bounds() {
        let long = "ab".repeat(1_000);
        let names: serde_json::Map<_, _> =
            (0..500).map(|n| (format!("{long}{n}"), json!(1))).collect();
        let leaves: Value = (0..1_000).collect();
        let both = |inner: Value| {
            let mut schema = inner;
            for _ in 0..9 {
                schema = json!({"anyOf": [schema, {"allOf": [schema]}]});
            }
            schema
        };
        let refused = json!({"const": long.repeat(40)});
        for (schema, value) in [
            // Each error copies the object of a megabyte.
            (
                doubling_schema(json!({"propertyNames": {"maxLength": 1}}), 10),
                Value::Object(names.clone()),
            ),
            (
                doubling_schema(json!({"required": ["x", "y"]}), 10),
                Value::Object(names.clone()),
            ),
            // Each error copies the path to a leaf.
            (
                schema(both(json!({"items": {"items": {"type": "null"}}}))),
                json!([leaves]),
            ),
            (
                schema(json!({"additionalProperties": {"items": {"anyOf": [{"type": "null"}]}}})),
                json!({long.repeat(500): leaves}),
            ),
            // Each error copies a part of the schema.
            (
                schema(json!({"items": {"not": {"anyOf": [{}, refused]}}})),
                leaves.clone(),
            ),
            (
                schema(json!({"items": {"not": {"anyOf": [{}, refused]}}})),
                (0..100_000).collect(),
            ),
        ] {
            assert!(!schema.validation_errors(&value).is_empty());
        }
        let peak = peak_memory();
        assert!(peak < 1 << 30, "{peak} bytes");
    }

    #[test]
    fn items_are_unique_by_json_equality() {
        let schema = schema(json!({"uniqueItems": true}));
        let is_unique = |value: Value| schema.validation_errors(&value).is_empty();
        assert!(is_unique(
            json!([1, true, "1", null, [1], [[1]], {"a": 1}, {"a": 2}, {"b": 1}, 0, -1, 0.5, 1e40])
        ));
        assert!(is_unique(json!([
            u64::MAX,
            u64::MAX - 1,
            i64::MIN,
            1.8446744073709552e19
        ])));
        for twice in [
            json!([1, 2, 1.0]),
            json!([0, -0.0]),
            json!(["a", "b", "a"]),
            json!([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]),
            json!([[[], [[]]], [[], [[]]]]),
            json!([9_223_372_036_854_775_808_u64, 9.223_372_036_854_776e18]),
        ] {
            assert!(!is_unique(twice.clone()), "{twice}");
        }
        // Many values that differ only in their structure.
        let shape = |n: u32| {
            (0..15).fold(json!([]), |inner, bit| match n >> bit & 1 {
                0 => json!([inner]),
                _ => json!([inner, []]),
            })
        };
        assert!(is_unique((0..20_000).map(shape).collect()));
    }

    #[test]
    fn references_do_not_use_up_the_stack() {
        let chain = |length: usize| {
            let mut definitions = serde_json::Map::new();
            for step in 0..length {
                let next = json!({"$ref": format!("#/$defs/{}", step + 1)});
                definitions.insert(step.to_string(), next);
            }
            definitions.insert(length.to_string(), json!({"items": {"$ref": "#/$defs/0"}}));
            let schema = json!({"$defs": definitions, "$ref": "#/$defs/0"});
            Schema::parse(
                serde_json::value::to_raw_value(&schema)
                    .expect("JSON")
                    .into(),
            )
        };
        let mut value = json!([]);
        for _ in 0..100 {
            value = json!([value]);
        }
        let schema = chain(1_500).expect("within bounds");
        assert!(
            schema.compile_inline().is_none() && schema.validation_errors_inline(&value).is_none()
        );
        let thread = std::thread::Builder::new().stack_size(super::limits::STACK_BYTES);
        let errors = thread
            .spawn(move || schema.validation_errors(&value))
            .expect("a thread");
        drop(errors.join().expect("no overflow"));
        let why = chain(3_000).expect_err("too deep");
        assert_eq!(
            why,
            "its 3002 references times its 5 levels of nesting are more than 10000"
        );
    }

    #[test]
    fn a_recursive_schema_is_followed_to_the_depth_of_the_value() {
        let schema = schema(json!({
            "type": "object",
            "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["name"],
        }));
        let tree = json!({"name": "a", "below": [{"name": "b", "below": []}, {"below": []}]});
        assert_eq!(
            schema.validation_errors(&tree),
            ["/below/1: \"name\" is a required property"]
        );
        // These recursions do not end on their own.
        for endless in [json!({"$ref": "#"}), json!({"allOf": [{"$ref": "#"}]})] {
            self::schema(endless).validation_errors(&tree);
        }
    }

    #[test]
    fn many_errors_are_truncated() {
        let schema = schema(json!({"type": "array", "items": {"type": "string"}}));
        let many = Value::from(vec![1; 100_000]);
        assert_eq!(schema.validation_errors(&many).len(), 10);
        let more = Value::from(vec![1; 2_000_000]);
        assert_eq!(
            schema.validation_errors(&more),
            ["it does not fit; why takes too long to find out"]
        );
    }

    #[test]
    fn a_schema_has_bounds_of_its_own() {
        let read = |schema: Value| {
            let raw = serde_json::value::to_raw_value(&schema).expect("JSON");
            Schema::parse(raw.into())?.compile()
        };
        let patterns: serde_json::Map<_, _> =
            (0..101).map(|at| (format!("^{at}"), json!({}))).collect();
        let why = read(json!({"patternProperties": patterns})).expect_err("too many");
        assert_eq!(why, "it has more than 100 patterns");
        let why = read(json!({"pattern": "(\\w{50}){9}".repeat(2_000)})).expect_err("too long");
        assert_eq!(why, "its patterns have more than 16384 bytes together");
        let why = read(json!({"description": "x".repeat(300_000)})).expect_err("too long");
        assert_eq!(why, "it has more than 262144 bytes");
        assert!(read(json!({"pattern": "(\\w{1000}){1000}"})).is_err());
    }

    #[test]
    fn nothing_outside_is_fetched() {
        let raw = serde_json::value::to_raw_value(&json!({"$ref": "http://127.0.0.1:1/schema"}));
        let schema = Schema::parse(raw.expect("JSON").into()).expect("a small one");
        assert!(schema.compile().is_err());
    }
}
