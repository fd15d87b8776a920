//! JSON values that count each read by a validator, so that a hostile schema cannot keep it busy without end: a few
//! references that call each other double the work at each step. Comparing and matching cost as much as they read.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use jsonschema::JsonType;
use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, SerdeJson};
use serde_json::{Map, Number, Value};

use crate::domain::json_schema::limits::MAX_ERROR_BYTES;
use crate::domain::stack;

/// Bytes that are read, compared or hashed at the cost of one read.
const BYTES_PER_READ: usize = 64;
/// Memory of a copied value besides its text, and of an error besides what it copies.
const VALUE_BYTES: usize = 100;
const ERROR_BYTES: usize = 512;
/// Reads between two checks of the deadline.
const DEADLINE_CHECK_INTERVAL: u64 = 1_000;

/// The limits of a validation.
#[derive(Clone, Copy, Debug)]
pub struct ValidationLimits {
    /// Reads of the value.
    pub max_reads: u64,
    /// Bytes of stack.
    pub max_stack: usize,
    /// The deadline; `None` if `max_reads` is low.
    pub deadline: Option<Instant>,
    pub pattern_cost: PatternCost,
    /// Bytes that each error copies besides the value that does not fit.
    pub bytes_per_error: usize,
}

/// The cost of matching patterns. A match cannot be interrupted.
#[derive(Clone, Copy, Debug, Default)]
pub struct PatternCost {
    /// Reads per byte of a string; 0 if only the deadline applies.
    pub reads_per_byte: u64,
    /// The most bytes of a string; 0 means no limit.
    pub max_text_bytes: usize,
    /// The number of patterns that each member's name may be matched against.
    pub patterns_per_name: usize,
}

/// What remains for the validation on this thread. Thread-local, because a validator passes no context on; it runs on one
/// thread without a pause.
struct Meter {
    remaining: Cell<u64>,
    until_deadline_check: Cell<u64>,
    deadline: Cell<Option<Instant>>,
    stack_base: Cell<usize>,
    max_stack: Cell<usize>,
    pattern_cost: Cell<PatternCost>,
    bytes_per_error: Cell<usize>,
    remaining_error_bytes: Cell<usize>,
}

thread_local! {
    static METER: Meter = const {
        Meter {
            remaining: Cell::new(0),
            until_deadline_check: Cell::new(0),
            deadline: Cell::new(None),
            stack_base: Cell::new(0),
            max_stack: Cell::new(0),
            pattern_cost: Cell::new(PatternCost { reads_per_byte: 0, max_text_bytes: 0, patterns_per_name: 0 }),
            bytes_per_error: Cell::new(0),
            remaining_error_bytes: Cell::new(0),
        }
    };
}

/// The panic payload that ends a validation at one of its limits.
struct LimitExceeded;

/// Runs a validation within these limits; `None` if it exceeds them.
pub fn with_limits<T>(limits: ValidationLimits, work: impl FnOnce() -> T) -> Option<T> {
    METER.with(|meter| {
        meter.remaining.set(limits.max_reads);
        meter.until_deadline_check.set(0);
        meter.deadline.set(limits.deadline);
        meter.stack_base.set(stack::pointer());
        meter.max_stack.set(limits.max_stack);
        meter.pattern_cost.set(limits.pattern_cost);
        meter.bytes_per_error.set(limits.bytes_per_error);
        meter.remaining_error_bytes.set(MAX_ERROR_BYTES);
    });
    // A validator cannot be cancelled, so an unwind from a read ends it. The panic hook does not run.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(why) if why.is::<LimitExceeded>() => None,
        Err(why) => resume_unwind(why),
    }
}

fn abort() -> ! {
    resume_unwind(Box::new(LimitExceeded))
}

fn charge(reads: u64) {
    METER.with(|meter| {
        match meter.remaining.get().checked_sub(reads) {
            Some(remaining) => meter.remaining.set(remaining),
            None => abort(),
        }
        if meter.stack_base.get().abs_diff(stack::pointer()) > meter.max_stack.get() {
            abort();
        }
        match meter.until_deadline_check.get().checked_sub(reads) {
            Some(remaining) => meter.until_deadline_check.set(remaining),
            None => {
                meter.until_deadline_check.set(DEADLINE_CHECK_INTERVAL);
                check_deadline(meter);
            }
        }
    });
}

#[cold]
fn check_deadline(meter: &Meter) {
    if meter.deadline.get().is_some_and(|it| it <= Instant::now()) {
        abort();
    }
}

/// The cost of reading so many bytes once.
fn reads_for_bytes(bytes: usize) -> u64 {
    1 + (bytes / BYTES_PER_READ) as u64
}

/// Charges for matching a string of so many bytes against `patterns` patterns, in addition to reading it.
fn charge_matching(bytes: usize, patterns: usize) {
    METER.with(|meter| {
        let cost = meter.pattern_cost.get();
        if cost.max_text_bytes > 0 && bytes.saturating_mul(patterns) > cost.max_text_bytes {
            abort();
        }
        charge(
            cost.reads_per_byte
                .saturating_mul((bytes * patterns) as u64),
        );
        if cost.max_text_bytes > 0 && bytes > BYTES_PER_READ {
            check_deadline(meter);
        }
    });
}

/// Charges for an error: it copies the value if it becomes a part of another error, as those of `anyOf` do.
fn charge_error(value: &Value) {
    METER.with(|meter| {
        let bytes = ERROR_BYTES + meter.bytes_per_error.get();
        let remaining = meter.remaining_error_bytes.get().checked_sub(bytes);
        match remaining
            .and_then(|remaining| remaining.checked_sub(copied_bytes_up_to(value, remaining)))
        {
            Some(remaining) => meter.remaining_error_bytes.set(remaining),
            None => abort(),
        }
    });
}

/// The memory of a copy of this value, approximately.
pub fn copied_bytes(value: &Value) -> usize {
    copied_bytes_up_to(value, usize::MAX)
}

/// As [`copied_bytes`]; for a value that exceeds `max_bytes` any larger number.
fn copied_bytes_up_to(value: &Value, max_bytes: usize) -> usize {
    let parts: &mut dyn Iterator<Item = (usize, &Value)> = match value {
        Value::String(text) => return VALUE_BYTES + text.len(),
        Value::Array(items) => &mut items.iter().map(|item| (0, item)),
        Value::Object(members) => &mut members.iter().map(|(name, value)| (name.len(), value)),
        _ => return VALUE_BYTES,
    };
    let mut bytes = VALUE_BYTES;
    for (name_bytes, part) in parts {
        if bytes > max_bytes {
            break;
        }
        bytes += name_bytes + copied_bytes_up_to(part, max_bytes - bytes);
    }
    bytes
}

/// Equality as JSON Schema defines it: numbers by value, objects in any order.
fn json_equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Array(left), Value::Array(right)) => {
            charge(1);
            left.len() == right.len() && left.iter().zip(right).all(|(l, r)| json_equal(l, r))
        }
        (Value::Object(left), Value::Object(right)) => {
            charge(1);
            let is_equal = |(key, value): (&String, &Value)| {
                charge(reads_for_bytes(key.len()));
                right.get(key).is_some_and(|other| json_equal(value, other))
            };
            left.len() == right.len() && left.iter().all(is_equal)
        }
        (Value::String(left), Value::String(right)) => {
            let is_candidate = left.len() == right.len();
            charge(if is_candidate {
                reads_for_bytes(left.len())
            } else {
                1
            });
            is_candidate && left == right
        }
        (left, right) => {
            charge(1);
            Node::<SerdeJson>::equals_value(&left, right)
        }
    }
}

/// An element with a hash over all its parts. With a hash over fewer parts a client could provoke collisions, each of
/// which costs a comparison.
struct HashedValue<'a> {
    hash: u64,
    value: &'a Value,
}

impl Hash for HashedValue<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialEq for HashedValue<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && json_equal(self.value, other.value)
    }
}

impl Eq for HashedValue<'_> {}

/// Equal values have equal hashes.
fn hash(value: &Value, keys: &RandomState) -> u64 {
    let hash_content = |kind: u8, content: &dyn Fn(&mut dyn Hasher)| {
        let mut hasher = keys.build_hasher();
        hasher.write_u8(kind);
        content(&mut hasher);
        hasher.finish()
    };
    match value {
        Value::String(text) => {
            charge(reads_for_bytes(text.len()));
            hash_content(0, &|hasher| hasher.write(text.as_bytes()))
        }
        Value::Array(items) => {
            charge(1);
            hash_content(1, &|hasher| {
                items.iter().for_each(|it| hasher.write_u64(hash(it, keys)));
            })
        }
        Value::Object(members) => {
            charge(1);
            let member = |(key, value): (&String, &Value)| {
                charge(reads_for_bytes(key.len()));
                let value = hash(value, keys);
                hash_content(2, &|hasher| {
                    hasher.write_u64(value);
                    hasher.write(key.as_bytes());
                })
            };
            let sum = members.iter().map(member).fold(0, u64::wrapping_add);
            hash_content(3, &|hasher| hasher.write_u64(sum))
        }
        Value::Number(number) => {
            charge(1);
            match as_integer(number) {
                Some(integer) => hash_content(4, &|hasher| hasher.write_i128(integer)),
                None => {
                    let bits = number.as_f64().unwrap_or_default().to_bits();
                    hash_content(5, &|hasher| hasher.write_u64(bits))
                }
            }
        }
        Value::Bool(_) | Value::Null => {
            charge(1);
            hash_content(6, &|hasher| {
                hasher.write_i8(value.as_bool().map_or(-1, i8::from))
            })
        }
    }
}

/// The number's value, if it is whole and in the range of integers.
fn as_integer(number: &Number) -> Option<i128> {
    if let Some(integer) = number.as_i128() {
        return Some(integer);
    }
    let float = number.as_f64()?;
    // The cast is exact.
    (float.fract() == 0.0 && float.abs() < 1e30).then_some(float as i128)
}

/// serde_json values with counted reads.
pub struct MeteredJson;

impl Json for MeteredJson {
    type Node<'a> = &'a Value;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, string: &str, f: impl FnOnce(&Value) -> T) -> T {
        <SerdeJson as Json>::with_string_node(buffer, string, f)
    }
}

impl<'a> Node<'a, MeteredJson> for &'a Value {
    type Object = &'a Map<String, Value>;
    type Array = &'a [Value];
    type Number = &'a Number;

    fn as_object(&self) -> Option<&'a Map<String, Value>> {
        charge(1);
        (*self).as_object()
    }

    fn as_array(&self) -> Option<&'a [Value]> {
        charge(1);
        (*self).as_array().map(Vec::as_slice)
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        let text = (*self).as_str();
        let bytes = text.map_or(0, str::len);
        charge(reads_for_bytes(bytes));
        charge_matching(bytes, 1);
        text.map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        charge(1);
        Node::<SerdeJson>::as_number(self)
    }

    fn as_boolean(&self) -> Option<bool> {
        charge(1);
        (*self).as_bool()
    }

    fn is_null(&self) -> bool {
        charge(1);
        Value::is_null(self)
    }

    fn json_type(&self) -> JsonType {
        charge(1);
        Node::<SerdeJson>::json_type(self)
    }

    fn string_length(&self) -> Option<u64> {
        charge(reads_for_bytes((*self).as_str().map_or(0, str::len)));
        Node::<SerdeJson>::string_length(self)
    }

    fn equals_value(&self, expected: &Value) -> bool {
        json_equal(self, expected)
    }

    /// Called for each error.
    fn to_value(&self) -> Cow<'a, Value> {
        charge(1);
        charge_error(self);
        Cow::Borrowed(self)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        charge(1);
        Node::<SerdeJson>::identity(self)
    }
}

impl<'a> Object<'a, MeteredJson> for &'a Map<String, Value> {
    type Node = &'a Value;
    type MemberName = &'a str;
    type MembersIter = Members<'a>;

    fn len(&self) -> usize {
        charge(1);
        Map::len(self)
    }

    fn get(&self, key: &String) -> Option<&'a Value> {
        charge(reads_for_bytes(key.len()));
        (*self).get(key.as_str())
    }

    fn members(&self) -> Members<'a> {
        Members((*self).iter())
    }
}

/// The members of an object; each counts as a read.
pub struct Members<'a>(serde_json::map::Iter<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (&'a str, &'a Value);

    fn next(&mut self) -> Option<Self::Item> {
        let Some((key, value)) = self.0.next() else {
            charge(1);
            return None;
        };
        charge(reads_for_bytes(key.len()));
        charge_matching(
            key.len(),
            METER.with(|meter| meter.pattern_cost.get().patterns_per_name),
        );
        Some((key.as_str(), value))
    }
}

impl<'a> Array<'a, MeteredJson> for &'a [Value] {
    type Node = &'a Value;
    type ElementsIter = Elements<'a>;

    fn len(&self) -> usize {
        charge(1);
        <[Value]>::len(self)
    }

    fn elements(&self) -> Elements<'a> {
        Elements((*self).iter())
    }

    fn is_unique(&self) -> bool {
        let keys = RandomState::new();
        let mut seen = HashSet::new();
        self.iter().all(|value| {
            let hash = hash(value, &keys);
            seen.insert(HashedValue { hash, value })
        })
    }
}

/// The elements of an array; each counts as a read.
pub struct Elements<'a>(std::slice::Iter<'a, Value>);

impl<'a> Iterator for Elements<'a> {
    type Item = &'a Value;

    fn next(&mut self) -> Option<Self::Item> {
        charge(1);
        self.0.next()
    }
}
