//! JSON values whose every reading by a validator is counted, so that a hostile schema cannot make it work for ever: a few
//! references that call each other double the work at each step. Comparing and matching cost what they really read. Knows
//! no schema.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use jsonschema::JsonType;
use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, SerdeJson};
use serde_json::{Map, Number, Value};

/// Bytes that are read, compared or hashed for the price of one reading.
const BYTES_PER_READING: usize = 64;
/// Readings between two looks at the clock.
const CLOCK_INTERVAL: u64 = 1_000;

/// What a validation may use up.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Readings of the value.
    pub readings: u64,
    /// Bytes of stack.
    pub stack: usize,
    /// When it must have ended; none where `readings` are few.
    pub deadline: Option<Instant>,
    /// What patterns cost.
    pub patterns: PatternCost,
}

/// What patterns cost that are matched against the value. A match cannot be broken off.
#[derive(Clone, Copy, Debug, Default)]
pub struct PatternCost {
    /// Readings per byte of a text; 0 if only the clock decides.
    pub per_byte: u64,
    /// Most bytes of a text; 0 for no bound.
    pub max_text: usize,
    /// Patterns that each member's name may be matched against.
    pub per_name: usize,
}

/// What the validation on this thread has left. A validator takes no context of ours along, and works without a pause on
/// one thread.
struct Meter {
    left: Cell<u64>,
    until_clock: Cell<u64>,
    deadline: Cell<Option<Instant>>,
    stack_base: Cell<usize>,
    stack: Cell<usize>,
    patterns: Cell<PatternCost>,
}

thread_local! {
    static METER: Meter = const {
        Meter {
            left: Cell::new(0),
            until_clock: Cell::new(0),
            deadline: Cell::new(None),
            stack_base: Cell::new(0),
            stack: Cell::new(0),
            patterns: Cell::new(PatternCost { per_byte: 0, max_text: 0, per_name: 0 }),
        }
    };
}

/// What ends a validation that has used up one of its bounds.
struct Spent;

/// Lets `work` validate within these bounds; none if it needs more.
pub fn within<T>(bounds: Bounds, work: impl FnOnce() -> T) -> Option<T> {
    METER.with(|meter| {
        meter.left.set(bounds.readings);
        meter.until_clock.set(0);
        meter.deadline.set(bounds.deadline);
        meter.stack_base.set(stack_pointer());
        meter.stack.set(bounds.stack);
        meter.patterns.set(bounds.patterns);
    });
    // A validator asks nobody whether to go on, so it is ended from below; this is no panic, and no hook hears of it.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Some(done),
        Err(why) if why.is::<Spent>() => None,
        Err(why) => resume_unwind(why),
    }
}

/// About where the stack ends now.
#[inline(always)]
fn stack_pointer() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(&here).addr()
}

fn end() -> ! {
    resume_unwind(Box::new(Spent))
}

fn take(readings: u64) {
    METER.with(|meter| {
        match meter.left.get().checked_sub(readings) {
            Some(left) => meter.left.set(left),
            None => end(),
        }
        if meter.stack_base.get().abs_diff(stack_pointer()) > meter.stack.get() {
            end();
        }
        match meter.until_clock.get().checked_sub(readings) {
            Some(until) => meter.until_clock.set(until),
            None => {
                meter.until_clock.set(CLOCK_INTERVAL);
                look_at_the_clock(meter);
            }
        }
    });
}

#[cold]
fn look_at_the_clock(meter: &Meter) {
    if meter.deadline.get().is_some_and(|it| it <= Instant::now()) {
        end();
    }
}

/// The price of so many bytes that are read once.
fn readings(bytes: usize) -> u64 {
    1 + (bytes / BYTES_PER_READING) as u64
}

/// Takes what it costs to match a text of so many bytes against `patterns` patterns, beside reading it.
fn take_matching(bytes: usize, patterns: usize) {
    METER.with(|meter| {
        let cost = meter.patterns.get();
        if cost.max_text > 0 && bytes.saturating_mul(patterns) > cost.max_text {
            end();
        }
        take(cost.per_byte.saturating_mul((bytes * patterns) as u64));
        if cost.max_text > 0 && bytes > BYTES_PER_READING {
            look_at_the_clock(meter);
        }
    });
}

/// Whether two values are equal as JSON Schema has it: numbers by their value, objects whatever their order.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Array(left), Value::Array(right)) => {
            take(1);
            left.len() == right.len() && left.iter().zip(right).all(|(l, r)| equal(l, r))
        }
        (Value::Object(left), Value::Object(right)) => {
            take(1);
            let is_equal = |(key, value): (&String, &Value)| {
                take(readings(key.len()));
                right.get(key).is_some_and(|other| equal(value, other))
            };
            left.len() == right.len() && left.iter().all(is_equal)
        }
        (Value::String(left), Value::String(right)) => {
            let is_candidate = left.len() == right.len();
            take(if is_candidate {
                readings(left.len())
            } else {
                1
            });
            is_candidate && left == right
        }
        (left, right) => {
            take(1);
            Node::<SerdeJson>::equals_value(&left, right)
        }
    }
}

/// An element with a hash in which all its parts take part: one that leaves the shape out has as many equal ones as
/// somebody likes, and each costs a comparison.
struct Hashed<'a> {
    hash: u64,
    value: &'a Value,
}

impl Hash for Hashed<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialEq for Hashed<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && equal(self.value, other.value)
    }
}

impl Eq for Hashed<'_> {}

/// The same for equal values.
fn hash(value: &Value, keys: &RandomState) -> u64 {
    let of = |kind: u8, content: &dyn Fn(&mut dyn Hasher)| {
        let mut hasher = keys.build_hasher();
        hasher.write_u8(kind);
        content(&mut hasher);
        hasher.finish()
    };
    match value {
        Value::String(text) => {
            take(readings(text.len()));
            of(0, &|hasher| hasher.write(text.as_bytes()))
        }
        Value::Array(items) => {
            take(1);
            of(1, &|hasher| {
                items.iter().for_each(|it| hasher.write_u64(hash(it, keys)));
            })
        }
        Value::Object(members) => {
            take(1);
            let member = |(key, value): (&String, &Value)| {
                take(readings(key.len()));
                let value = hash(value, keys);
                of(2, &|hasher| {
                    hasher.write_u64(value);
                    hasher.write(key.as_bytes());
                })
            };
            let sum = members.iter().map(member).fold(0, u64::wrapping_add);
            of(3, &|hasher| hasher.write_u64(sum))
        }
        Value::Number(number) => {
            take(1);
            match whole(number) {
                Some(whole) => of(4, &|hasher| hasher.write_i128(whole)),
                None => {
                    let bits = number.as_f64().unwrap_or_default().to_bits();
                    of(5, &|hasher| hasher.write_u64(bits))
                }
            }
        }
        Value::Bool(_) | Value::Null => {
            take(1);
            of(6, &|hasher| {
                hasher.write_i8(value.as_bool().map_or(-1, i8::from))
            })
        }
    }
}

/// The number's value, if it is a whole one of a size that integers have, too.
fn whole(number: &Number) -> Option<i128> {
    if let Some(whole) = number.as_i128() {
        return Some(whole);
    }
    let float = number.as_f64()?;
    // Where a cast loses nothing.
    (float.fract() == 0.0 && float.abs() < 1e30).then_some(float as i128)
}

/// serde_json's values, counted.
pub struct Counted;

impl Json for Counted {
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

impl<'a> Node<'a, Counted> for &'a Value {
    type Object = &'a Map<String, Value>;
    type Array = &'a [Value];
    type Number = &'a Number;

    fn as_object(&self) -> Option<&'a Map<String, Value>> {
        take(1);
        (*self).as_object()
    }

    fn as_array(&self) -> Option<&'a [Value]> {
        take(1);
        (*self).as_array().map(Vec::as_slice)
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        let text = (*self).as_str();
        let bytes = text.map_or(0, str::len);
        take(readings(bytes));
        take_matching(bytes, 1);
        text.map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        take(1);
        Node::<SerdeJson>::as_number(self)
    }

    fn as_boolean(&self) -> Option<bool> {
        take(1);
        (*self).as_bool()
    }

    fn is_null(&self) -> bool {
        take(1);
        Value::is_null(self)
    }

    fn json_type(&self) -> JsonType {
        take(1);
        Node::<SerdeJson>::json_type(self)
    }

    fn string_length(&self) -> Option<u64> {
        take(readings((*self).as_str().map_or(0, str::len)));
        Node::<SerdeJson>::string_length(self)
    }

    fn equals_value(&self, expected: &Value) -> bool {
        equal(self, expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        take(1);
        Cow::Borrowed(self)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        take(1);
        Node::<SerdeJson>::identity(self)
    }
}

impl<'a> Object<'a, Counted> for &'a Map<String, Value> {
    type Node = &'a Value;
    type MemberName = &'a str;
    type MembersIter = Members<'a>;

    fn len(&self) -> usize {
        take(1);
        Map::len(self)
    }

    fn get(&self, key: &String) -> Option<&'a Value> {
        take(readings(key.len()));
        (*self).get(key.as_str())
    }

    fn members(&self) -> Members<'a> {
        Members((*self).iter())
    }
}

/// An object's members, each counted.
pub struct Members<'a>(serde_json::map::Iter<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (&'a str, &'a Value);

    fn next(&mut self) -> Option<Self::Item> {
        let Some((key, value)) = self.0.next() else {
            take(1);
            return None;
        };
        take(readings(key.len()));
        take_matching(key.len(), METER.with(|meter| meter.patterns.get().per_name));
        Some((key.as_str(), value))
    }
}

impl<'a> Array<'a, Counted> for &'a [Value] {
    type Node = &'a Value;
    type ElementsIter = Elements<'a>;

    fn len(&self) -> usize {
        take(1);
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
            seen.insert(Hashed { hash, value })
        })
    }
}

/// A list's elements, each counted.
pub struct Elements<'a>(std::slice::Iter<'a, Value>);

impl<'a> Iterator for Elements<'a> {
    type Item = &'a Value;

    fn next(&mut self) -> Option<Self::Item> {
        take(1);
        self.0.next()
    }
}
