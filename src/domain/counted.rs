//! JSON values whose every reading by a validator is counted, so that a hostile schema cannot make it work for ever: a few
//! references that call each other double the work at each step. Knows no schema.

use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use jsonschema::JsonType;
use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, SerdeJson};
use serde_json::{Map, Number, Value};

thread_local! {
    /// Readings that the validation on this thread has left. A validator takes no context of ours along, and works
    /// without a pause on one thread.
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// What ends a validation that has no reading left.
struct Spent;

/// Lets `work` validate with at most so many readings; none where it would need more.
pub fn within<T>(readings: u64, work: impl FnOnce() -> T) -> Option<T> {
    LEFT.set(readings);
    // A validator asks nobody whether to go on, so it is ended from below; this is no panic, and no hook hears of it.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Some(done),
        Err(why) if why.is::<Spent>() => None,
        Err(why) => resume_unwind(why),
    }
}

fn take(readings: usize) {
    match LEFT.get().checked_sub(readings as u64) {
        Some(left) => LEFT.set(left),
        None => resume_unwind(Box::new(Spent)),
    }
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
        take(1 + text.map_or(0, |text| text.len() / 64));
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
        take(1 + (*self).as_str().map_or(0, |text| text.len() / 64));
        Node::<SerdeJson>::string_length(self)
    }

    fn equals_value(&self, expected: &Value) -> bool {
        take(match self {
            Value::Array(items) => 1 + items.len(),
            Value::Object(members) => 1 + members.len(),
            Value::String(text) => 1 + text.len() / 64,
            _ => 1,
        });
        Node::<SerdeJson>::equals_value(self, expected)
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
        take(1);
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
        take(1);
        self.0.next().map(|(key, value)| (key.as_str(), value))
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
        take(<[Value]>::len(self));
        Array::<SerdeJson>::is_unique(self)
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
