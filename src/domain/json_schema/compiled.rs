//! A compiled schema: validates values within bounds, and converts values to strings if the schema requires strings.

use std::fmt;
use std::time::Instant;

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, ValidationError, Validator};
use serde_json::Value;

use crate::domain::json_schema::limits::{
    CHECK_STACK_BYTES, MAX_INLINE_READS, MAX_INLINE_STACK, MAX_READS, MAX_READS_FOR_ERRORS,
};
use crate::domain::json_schema::metered_json::{self, MeteredJson, PatternCost, ValidationLimits};
use crate::domain::message::shorten;

/// The most errors of one list.
const MAX_ERRORS: usize = 10;
/// The most characters of one error, which may quote the value.
const MAX_ERROR_CHARS: usize = 300;
/// The most conversions to strings in one value.
const MAX_TEXT_COERCIONS: usize = 64;

pub struct CompiledSchema {
    pub validator: Result<Validator<MeteredJson>, String>,
    pub pattern_cost: PatternCost,
    pub error_cost: ErrorCost,
}

/// Bytes of the schema that each error copies.
#[derive(Clone, Copy, Debug, Default)]
pub struct ErrorCost {
    pub keyword: usize,
    /// The path through the schema's references, for each level of the value.
    pub references: usize,
}

/// The longest path to a part of a value.
#[derive(Clone, Copy, Debug, Default)]
struct LongestPath {
    levels: usize,
    /// Bytes of the names of members.
    name_bytes: usize,
}

impl LongestPath {
    /// Fails if the value has more parts than `remaining_parts`.
    fn measure(value: &Value, remaining_parts: &mut u64) -> Result<Self, LimitExceeded> {
        *remaining_parts = remaining_parts.checked_sub(1).ok_or(LimitExceeded)?;
        let mut longest = Self::default();
        let mut include = |name: &str, part: &Value| {
            let path = Self::measure(part, remaining_parts)?;
            longest.levels = longest.levels.max(path.levels + 1);
            longest.name_bytes = longest.name_bytes.max(path.name_bytes + name.len());
            Ok(())
        };
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| include("", item))?,
            Value::Object(members) => members
                .iter()
                .try_for_each(|(name, value)| include(name, value))?,
            _ => {}
        }
        Ok(longest)
    }
}

/// A value that does not fit its schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Where the value is, as a JSON Pointer (RFC 6901); empty for the whole.
    pub pointer: String,
    pub reason: String,
}

impl Mismatch {
    pub fn of_whole(reason: impl Into<String>) -> Self {
        Self {
            pointer: String::new(),
            reason: reason.into(),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pointer.as_str() {
            "" => f.write_str(&self.reason),
            pointer => write!(f, "{pointer}: {}", self.reason),
        }
    }
}

/// How much a validation may cost.
#[derive(Clone, Copy, Debug)]
pub enum CheckMode {
    Inline,
    WithDeadline(Instant),
}

/// A validation exceeded its bounds.
pub struct LimitExceeded;

impl CompiledSchema {
    pub fn validation_errors(
        &self,
        value: &Value,
        mode: CheckMode,
    ) -> Result<Vec<String>, LimitExceeded> {
        let mismatches = self.mismatches(value, mode)?;
        Ok(mismatches.iter().map(Mismatch::to_string).collect())
    }

    pub fn mismatches(
        &self,
        value: &Value,
        mode: CheckMode,
    ) -> Result<Vec<Mismatch>, LimitExceeded> {
        let validator = match &self.validator {
            Ok(validator) => validator,
            Err(why) => return Ok(vec![Mismatch::of_whole(why)]),
        };
        let validity =
            metered_json::with_limits(self.limits(mode, MAX_READS), || validator.is_valid(value));
        match validity {
            Some(true) => return Ok(Vec::new()),
            Some(false) => {}
            None => return Err(LimitExceeded),
        }
        let errors = metered_json::with_limits(self.error_limits(mode, value)?, || {
            let errors = validator.iter_errors(value).take(MAX_ERRORS);
            errors
                .map(|error| describe_error(&error))
                .collect::<Vec<_>>()
        });
        match (errors, mode) {
            (Some(errors), _) => Ok(errors),
            (None, CheckMode::Inline) => Err(LimitExceeded),
            (None, CheckMode::WithDeadline(_)) => Ok(vec![Mismatch::of_whole(
                "it does not fit; why takes too long to find out",
            )]),
        }
    }

    /// Returns the value unchanged if the validation exceeds its bounds.
    pub fn coerce(
        &self,
        value: Value,
        mode: CheckMode,
    ) -> Result<Result<Value, Vec<String>>, Value> {
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

    /// Converts the first value that should be a string; returns false if there is none.
    fn coerce_first_to_text(
        &self,
        value: &mut Value,
        mode: CheckMode,
    ) -> Result<bool, LimitExceeded> {
        let Ok(validator) = &self.validator else {
            return Ok(false);
        };
        let pointer = metered_json::with_limits(self.error_limits(mode, value)?, || {
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

    /// The limits for collecting the errors of this value.
    fn error_limits(
        &self,
        mode: CheckMode,
        value: &Value,
    ) -> Result<ValidationLimits, LimitExceeded> {
        let mut max_parts = match mode {
            CheckMode::Inline => MAX_INLINE_READS,
            CheckMode::WithDeadline(_) => MAX_READS,
        };
        let longest = LongestPath::measure(value, &mut max_parts)?;
        let references = self.error_cost.references * (1 + longest.levels);
        Ok(ValidationLimits {
            bytes_per_error: self.error_cost.keyword + longest.name_bytes + references,
            ..self.limits(mode, MAX_READS_FOR_ERRORS)
        })
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
                bytes_per_error: 0,
            },
            // A match rarely takes its longest possible time, so the deadline decides.
            CheckMode::WithDeadline(deadline) => ValidationLimits {
                max_reads,
                max_stack: CHECK_STACK_BYTES,
                deadline: Some(deadline),
                pattern_cost: PatternCost {
                    reads_per_byte: 0,
                    ..self.pattern_cost
                },
                bytes_per_error: 0,
            },
        }
    }
}

fn describe_error(error: &ValidationError<'_>) -> Mismatch {
    Mismatch {
        pointer: shorten(&error.instance_path().to_string(), MAX_ERROR_CHARS),
        reason: bounded_message(error),
    }
}

/// The beginning of an error's text, which may quote a value of many megabytes.
pub fn bounded_message(error: &ValidationError<'_>) -> String {
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
    // An error means that the text has its maximum length.
    let _ = fmt::write(&mut text, format_args!("{error}"));
    shorten(&text.0, MAX_ERROR_CHARS)
}
