//! A JSON Schema: describes what in a JSON value does not fit, in words that a model can act on. Fetches nothing: a
//! reference to another document is an error. Schema and value may be hostile: compiling one and checking against it end
//! within bounds. Small ones are checked where they are ("inline"); the others want a thread of their own with
//! [`STACK`] bytes of stack. Knows no tool and no run.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, PatternOptions, ValidationError, Validator};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::shorten;
use crate::domain::metered_json::{self, MeteredJson, PatternCost, ValidationLimits};

/// Most errors that are listed at once: the first ones are enough.
const MAX_ERRORS: usize = 10;
/// Most characters of one error: it may quote the value.
const MAX_ERROR_CHARS: usize = 300;
/// Most texts that are read from other values in one value.
const MAX_TEXT_COERCIONS: usize = 64;

/// Most bytes of a schema.
const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// Most patterns of a schema.
const MAX_PATTERNS: usize = 100;
/// Most bytes of all its patterns together: reading one costs up to 25 µs a byte, however small it then becomes.
const MAX_PATTERN_BYTES: usize = 16 << 10;
/// Most references of a schema times its levels of nesting: so deep may the stack become.
const MAX_LEVELS: usize = 10_000;
/// Most bytes that a pattern takes when it is compiled. The smallest that all patterns of a schema fit in decides how
/// long a text may be: a match takes time for each byte of both, and cannot be broken off.
const PATTERN_SIZES: [usize; 3] = [16 << 10, 64 << 10, 256 << 10];
/// Bytes of a pattern times bytes of a text in one match: about a second.
const MAX_MATCH_COST: usize = 10 << 30;

/// Most readings of a value for the decision whether it fits: less than a second, and many times what an honest schema
/// needs.
const MAX_READS: u64 = 10_000_000;
/// Most that find out what does not fit: each may leave an error behind.
const MAX_READS_FOR_ERRORS: u64 = 1_000_000;
/// How long one check may take altogether.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Stack that compiling or checking needs at most.
pub const STACK_BYTES: usize = 256 << 20;
/// Part of it that a check may use.
const CHECK_STACK_BYTES: usize = STACK_BYTES / 2;

/// Bounds of what is done inline: a millisecond or so, and a part of the stack that a runtime's thread has.
const MAX_INLINE_BYTES: usize = 16 << 10;
const MAX_INLINE_LEVELS: usize = 256;
const MAX_INLINE_PATTERNS: usize = 16;
const MAX_INLINE_PATTERN_BYTES: usize = 256;
const MAX_INLINE_READS: u64 = 10_000;
const MAX_INLINE_STACK: usize = 256 << 10;
/// Readings that matching one byte against the largest pattern costs inline.
const INLINE_READS_PER_BYTE: u64 = 50;

/// A schema, with what checks values against it.
pub struct Schema {
    raw: Arc<RawValue>,
    complexity: Complexity,
    /// Compiled when a value is first checked; none if that takes a thread of its own.
    inline_compiled: OnceLock<Option<CompiledSchema>>,
}

/// What decides how much work a schema is.
#[derive(Clone, Copy, Debug, Default)]
struct Complexity {
    depth: usize,
    references: usize,
    patterns: usize,
    pattern_bytes: usize,
    /// Of these, those that names of members are matched against.
    name_patterns: usize,
}

struct CompiledSchema {
    validator: Result<Validator<MeteredJson>, String>,
    pattern_cost: PatternCost,
}

/// How much a check may cost.
#[derive(Clone, Copy, Debug)]
enum CheckMode {
    Inline,
    WithDeadline(Instant),
}

/// A check that its bounds broke off.
struct LimitExceeded;

impl Schema {
    /// The schema in this JSON, not yet compiled.
    ///
    /// # Errors
    /// Why it is none: not JSON, or larger than a schema may be.
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

    /// The schema of a Rust type, as models are shown it: without a title and a dialect.
    ///
    /// # Errors
    /// None for a type whose schema is one.
    pub fn for_type<T: schemars::JsonSchema>() -> Result<Self, String> {
        let settings = schemars::generate::SchemaSettings::draft2020_12()
            .with(|settings| settings.inline_subschemas = true);
        let mut schema = settings.into_generator().into_root_schema_for::<T>();
        schema.remove("$schema");
        schema.remove("title");
        let raw = to_raw_value(&schema).map_err(|error| error.to_string())?;
        Self::parse(raw.into())
    }

    /// As it was written.
    pub fn raw(&self) -> &Arc<RawValue> {
        &self.raw
    }

    /// Whether it is a schema at all; none if finding out takes a thread of its own.
    pub fn compile_inline(&self) -> Option<Result<(), String>> {
        let compiled = self.inline_compiled()?;
        Some(compiled.validator.as_ref().map(drop).map_err(String::clone))
    }

    /// What does not fit, one sentence each with the place as a JSON pointer; empty if all fits, none if finding out
    /// takes a thread of its own.
    pub fn validation_errors_inline(&self, value: &Value) -> Option<Vec<String>> {
        self.inline_compiled()?
            .validation_errors(value, CheckMode::Inline)
            .ok()
    }

    /// As [`Schema::fit`]; gives the value back if finding out takes a thread of its own.
    ///
    /// # Errors
    /// The value.
    pub fn coerce_inline(&self, value: Value) -> Result<Result<Value, Vec<String>>, Value> {
        match self.inline_compiled() {
            Some(compiled) => compiled.coerce(value, CheckMode::Inline),
            None => Err(value),
        }
    }

    /// Whether it is a schema at all. On a thread of its own.
    ///
    /// # Errors
    /// Why it is none.
    pub fn compile(&self) -> Result<(), String> {
        self.compile_with_sizes(&PATTERN_SIZES).validator.map(drop)
    }

    /// What does not fit. On a thread of its own.
    pub fn validation_errors(&self, value: &Value) -> Vec<String> {
        let mode = CheckMode::WithDeadline(Instant::now() + TIMEOUT);
        let checked = self
            .compile_with_sizes(&PATTERN_SIZES)
            .validation_errors(value, mode);
        checked.unwrap_or_else(|LimitExceeded| vec![timeout_message()])
    }

    /// The value, if it fits. A number, a truth value, a list or an object where the schema wants a text is read as
    /// its compact JSON first: models write such things. On a thread of its own.
    ///
    /// # Errors
    /// As [`Schema::errors`].
    pub fn coerce(&self, value: Value) -> Result<Value, Vec<String>> {
        let mode = CheckMode::WithDeadline(Instant::now() + TIMEOUT);
        let checked = self.compile_with_sizes(&PATTERN_SIZES).coerce(value, mode);
        checked.unwrap_or_else(|_| Err(vec![timeout_message()]))
    }

    fn inline_compiled(&self) -> Option<&CompiledSchema> {
        let is_small = self.raw.get().len() <= MAX_INLINE_BYTES
            && self.complexity.reference_levels() <= MAX_INLINE_LEVELS
            && self.complexity.patterns <= MAX_INLINE_PATTERNS
            && self.complexity.pattern_bytes <= MAX_INLINE_PATTERN_BYTES;
        let compile = || {
            let compiled = self.compile_with_sizes(&PATTERN_SIZES[..1]);
            // A pattern may only be too large for this.
            let is_final = compiled.validator.is_ok() || self.complexity.patterns == 0;
            is_final.then_some(compiled)
        };
        is_small
            .then(|| self.inline_compiled.get_or_init(compile).as_ref())
            .flatten()
    }

    /// What checks values against it, with patterns of the smallest of these sizes that is enough.
    fn compile_with_sizes(&self, sizes: &[usize]) -> CompiledSchema {
        let schema: Value = serde_json::from_str(self.raw.get()).unwrap_or_default();
        let mut validator = Err("it has no size".to_owned());
        let mut pattern_cost = PatternCost::default();
        for size in sizes {
            // Linear in time whatever the pattern: it may come from anybody.
            let options = PatternOptions::regex()
                .size_limit(*size)
                .dfa_size_limit(*size);
            validator = jsonschema::options_for::<MeteredJson>()
                .with_pattern_options(options)
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
        CompiledSchema {
            validator,
            pattern_cost,
        }
    }
}

impl CompiledSchema {
    fn validation_errors(
        &self,
        value: &Value,
        mode: CheckMode,
    ) -> Result<Vec<String>, LimitExceeded> {
        let validator = match &self.validator {
            Ok(validator) => validator,
            Err(why) => return Ok(vec![why.clone()]),
        };
        let validity =
            metered_json::with_limits(self.limits(mode, MAX_READS), || validator.is_valid(value));
        match validity {
            Some(true) => return Ok(Vec::new()),
            Some(false) => {}
            None => return Err(LimitExceeded),
        }
        let errors = metered_json::with_limits(self.limits(mode, MAX_READS_FOR_ERRORS), || {
            let errors = validator.iter_errors(value).take(MAX_ERRORS);
            errors.map(|error| describe_error(&error)).collect()
        });
        match (errors, mode) {
            (Some(errors), _) => Ok(errors),
            (None, CheckMode::Inline) => Err(LimitExceeded),
            (None, CheckMode::WithDeadline(_)) => Ok(vec![
                "it does not fit; why takes too long to find out".to_owned(),
            ]),
        }
    }

    /// The value as it came, if the check was broken off.
    fn coerce(&self, value: Value, mode: CheckMode) -> Result<Result<Value, Vec<String>>, Value> {
        let Ok(errors) = self.validation_errors(&value, mode) else {
            return Err(value);
        };
        if errors.is_empty() {
            return Ok(Ok(value));
        }
        let mut coerced = value.clone();
        let mut is_coerced = false;
        for _ in 0..MAX_TEXT_COERCIONS {
            match self.coerce_first_to_text(&mut coerced, mode) {
                Ok(true) => is_coerced = true,
                Ok(false) => break,
                Err(LimitExceeded) => return Err(value),
            }
        }
        if !is_coerced {
            return Ok(Err(errors));
        }
        match self.validation_errors(&coerced, mode) {
            Ok(errors) if errors.is_empty() => Ok(Ok(coerced)),
            Ok(errors) => Ok(Err(errors)),
            Err(LimitExceeded) => Err(value),
        }
    }

    /// Makes a text of the first value that should be one; false if there is none.
    fn coerce_first_to_text(
        &self,
        value: &mut Value,
        mode: CheckMode,
    ) -> Result<bool, LimitExceeded> {
        let Ok(validator) = &self.validator else {
            return Ok(false);
        };
        let pointer = metered_json::with_limits(self.limits(mode, MAX_READS_FOR_ERRORS), || {
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
        let pointer = match (pointer, mode) {
            (None, CheckMode::Inline) => return Err(LimitExceeded),
            (pointer, _) => pointer.flatten(),
        };
        let Some(target) = pointer.and_then(|at| value.pointer_mut(&at)) else {
            return Ok(false);
        };
        *target = Value::String(target.to_string());
        Ok(true)
    }

    fn limits(&self, mode: CheckMode, max_reads: u64) -> ValidationLimits {
        match mode {
            CheckMode::Inline => ValidationLimits {
                max_reads: MAX_INLINE_READS,
                max_stack: MAX_INLINE_STACK,
                deadline: None,
                pattern_cost: PatternCost {
                    max_text_bytes: 0,
                    ..self.pattern_cost
                },
            },
            // How long a match takes is rarely what it may take at most: the clock decides.
            CheckMode::WithDeadline(deadline) => ValidationLimits {
                max_reads,
                max_stack: CHECK_STACK_BYTES,
                deadline: Some(deadline),
                pattern_cost: PatternCost {
                    reads_per_byte: 0,
                    ..self.pattern_cost
                },
            },
        }
    }
}

impl Complexity {
    fn measure(schema: &Value) -> Self {
        let mut complexity = Self::default();
        complexity.visit(schema, 1);
        complexity
    }

    fn reference_levels(&self) -> usize {
        self.references * self.depth
    }

    /// A property with the name of a keyword counts, too.
    fn visit(&mut self, schema: &Value, depth: usize) {
        self.depth = self.depth.max(depth);
        match schema {
            Value::Array(items) => items.iter().for_each(|item| self.visit(item, depth + 1)),
            Value::Object(members) => {
                for (key, value) in members {
                    match (key.as_str(), value) {
                        ("pattern", Value::String(pattern)) => {
                            self.patterns += 1;
                            self.pattern_bytes += pattern.len();
                        }
                        ("patternProperties", Value::Object(patterns)) => {
                            self.patterns += patterns.len();
                            self.name_patterns += patterns.len();
                            let bytes = patterns.keys().map(String::len);
                            self.pattern_bytes += bytes.sum::<usize>();
                        }
                        ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(_)) => {
                            self.references += 1;
                        }
                        _ => {}
                    }
                    self.visit(value, depth + 1);
                }
            }
            _ => {}
        }
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schema").field(&self.raw.get()).finish()
    }
}

fn timeout_message() -> String {
    "it takes too long to check against the schema".to_owned()
}

fn describe_error(error: &ValidationError<'_>) -> String {
    let path = shorten(&error.instance_path().to_string(), MAX_ERROR_CHARS);
    let why = bounded_message(error);
    match path.as_str() {
        "" => why,
        path => format!("{path}: {why}"),
    }
}

/// An error's text as far as it is shown: it may quote a value of many megabytes.
fn bounded_message(error: &ValidationError<'_>) -> String {
    struct BoundedText(String);

    impl fmt::Write for BoundedText {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.push_str(text);
            match self.0.chars().nth(MAX_ERROR_CHARS) {
                Some(_) => Err(fmt::Error),
                None => Ok(()),
            }
        }
    }

    let mut text = BoundedText(String::new());
    // An error says that this is enough.
    let _ = fmt::write(&mut text, format_args!("{error}"));
    shorten(&text.0, MAX_ERROR_CHARS)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Schema;

    fn schema(schema: Value) -> Schema {
        let raw = serde_json::value::to_raw_value(&schema).expect("JSON");
        Schema::parse(raw.into()).expect("a schema")
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
    fn another_value_is_read_as_text_where_text_is_wanted() {
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

    /// The same subschema, tried twice as often with each of `steps` references.
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

    #[test]
    fn items_are_unique_as_json_has_it() {
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
        // Many that differ in their shape alone.
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
        let thread = std::thread::Builder::new().stack_size(super::STACK_BYTES);
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
    fn a_schema_that_calls_itself_is_followed_as_deep_as_the_value_is() {
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
        // These never end by themselves.
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
