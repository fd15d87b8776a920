//! OpenAI's limits of a schema in strict mode. Pure.

use std::collections::HashMap;

use serde_json::{Map, Value};

type Object = Map<String, Value>;

/// Objects within each other.
const MAX_LEVELS: usize = 10;
/// Values in all `enum`s.
const MAX_VALUES: usize = 1_000;
/// Characters of all names of properties and definitions, and of all values of `enum` and `const`.
const MAX_CHARACTERS: usize = 120_000;
/// Characters of one `enum` of more than [`LONG_ENUM`] strings.
const MAX_LONG_ENUM_CHARACTERS: usize = 15_000;
const LONG_ENUM: usize = 250;

/// The most parts that the levels are counted in, and the most of them within each other. Definitions that refer to each other
/// may take any number of steps.
const MAX_STEPS: usize = 50_000;
const MAX_DEPTH: usize = 64;

/// Whether a schema that has the form of strict mode is within its limits. If the levels are uncertain, it is not.
pub fn are_met(root: &Object) -> bool {
    let mut sizes = Sizes::default();
    sizes.add(root);
    sizes.are_met()
        && Levels::new(root)
            .of_part(root)
            .is_some_and(|it| it.count <= MAX_LEVELS)
}

/// The definition that a `$ref` names.
pub fn definition<'a>(root: &'a Object, reference: &str) -> Option<&'a Value> {
    let (table, name) = reference.strip_prefix("#/")?.split_once('/')?;
    match table {
        "$defs" | "definitions" => root.get(table)?.get(name),
        _ => None,
    }
}

/// The parts of which a part consists, and the definitions that it has.
fn inner_parts(part: &Object) -> impl Iterator<Item = &Value> {
    part.iter().flat_map(|(key, value)| -> Vec<&Value> {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(parts)) => {
                parts.values().collect()
            }
            ("anyOf", Value::Array(parts)) => parts.iter().collect(),
            ("items", part) => vec![part],
            _ => Vec::new(),
        }
    })
}

/// What a schema has as it is written: each definition counts once.
#[derive(Default)]
struct Sizes {
    values: usize,
    characters: usize,
    has_too_long_enum: bool,
}

impl Sizes {
    fn add(&mut self, part: &Object) {
        for (key, value) in part {
            match (key.as_str(), value) {
                ("properties" | "$defs" | "definitions", Value::Object(parts)) => {
                    self.characters += parts.keys().map(|name| name.chars().count()).sum::<usize>();
                }
                ("enum", Value::Array(values)) => self.add_enum(values),
                ("const", value) => self.characters += length(value),
                _ => {}
            }
        }
        for inner in inner_parts(part).filter_map(Value::as_object) {
            self.add(inner);
        }
    }

    fn add_enum(&mut self, values: &[Value]) {
        let strings = values.iter().filter(|value| value.is_string()).count();
        let characters = values.iter().map(length).sum::<usize>();
        self.values += values.len();
        self.characters += characters;
        self.has_too_long_enum |= strings > LONG_ENUM && characters > MAX_LONG_ENUM_CHARACTERS;
    }

    fn are_met(&self) -> bool {
        self.values <= MAX_VALUES && self.characters <= MAX_CHARACTERS && !self.has_too_long_enum
    }
}

fn length(value: &Value) -> usize {
    match value {
        Value::String(text) => text.chars().count(),
        other => other.to_string().len(),
    }
}

/// Counts how many objects are within each other, with each definition where it is deepest. A definition within itself does not
/// count again.
struct Levels<'a> {
    root: &'a Object,
    steps: usize,
    /// The parts that contain the current one, also by a reference, by address, outermost first.
    inside: Vec<*const Value>,
    /// The levels of parts, at the most.
    known: HashMap<*const Value, usize>,
}

#[derive(Clone, Copy)]
struct PartLevels {
    count: usize,
    /// The outermost part around this one that it refers to, by its position in `inside`; `usize::MAX` if there is none.
    outermost: usize,
}

impl<'a> Levels<'a> {
    fn new(root: &'a Object) -> Self {
        Self {
            root,
            steps: 0,
            inside: Vec::new(),
            known: HashMap::new(),
        }
    }

    /// `None` if counting would take too long.
    fn of_part(&mut self, part: &'a Object) -> Option<PartLevels> {
        self.steps += 1;
        if self.steps > MAX_STEPS || self.inside.len() > MAX_DEPTH {
            return None;
        }
        let mut levels = PartLevels {
            count: 0,
            outermost: usize::MAX,
        };
        let reference = part.get("$ref").and_then(Value::as_str);
        let referenced = reference.and_then(|to| definition(self.root, to));
        for inner in inner_parts(part).chain(referenced) {
            let inner = self.of_inner(inner)?;
            levels.count = levels.count.max(inner.count);
            levels.outermost = levels.outermost.min(inner.outermost);
        }
        levels.count += usize::from(part.contains_key("properties"));
        Some(levels)
    }

    fn of_inner(&mut self, part: &'a Value) -> Option<PartLevels> {
        let address = std::ptr::from_ref(part);
        if let Some(count) = self.known.get(&address) {
            return Some(PartLevels {
                count: *count,
                outermost: usize::MAX,
            });
        }
        if let Some(position) = self.inside.iter().position(|around| *around == address) {
            return Some(PartLevels {
                count: 0,
                outermost: position,
            });
        }
        let position = self.inside.len();
        self.inside.push(address);
        let levels = self.of_part(part.as_object()?);
        self.inside.pop();
        let mut levels = levels?;
        // Otherwise there are more of them where the parts around this one are not.
        if levels.outermost >= position {
            levels.outermost = usize::MAX;
            self.known.insert(address, levels.count);
        }
        Some(levels)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::are_met;

    fn object(part: Value) -> Value {
        json!({"type": "object", "properties": {"it": part}})
    }

    /// Objects within each other around a part.
    fn nested(levels: usize, part: Value) -> Value {
        (0..levels).fold(part, |part, _| object(part))
    }

    fn is_met(schema: &Value) -> bool {
        are_met(schema.as_object().expect("an object"))
    }

    #[test]
    fn a_definition_counts_where_it_is_deepest() {
        let text = json!({"type": "string"});
        assert!(is_met(&nested(10, text.clone())) && !is_met(&nested(11, text.clone())));
        let defined = |levels: usize| {
            let five = json!({"$ref": "#/$defs/five"});
            json!({
                "type": "object",
                "properties": {"first": five, "deepest": nested(levels - 1, five.clone())},
                "$defs": {"five": nested(5, text.clone())}
            })
        };
        assert!(is_met(&defined(5)) && !is_met(&defined(6)));
    }

    #[test]
    fn a_definition_within_itself_counts_once() {
        let reference = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
        let defined = |levels: usize, definitions: Value| {
            let mut schema = nested(levels, reference("a"));
            schema["$defs"] = definitions;
            is_met(&schema)
        };
        let list = json!({"a": object(reference("a"))});
        assert!(defined(9, list.clone()) && !defined(10, list));
        // The longest way leads through each of them.
        let pair = json!({"a": object(reference("b")), "b": nested(3, reference("a"))});
        assert!(defined(6, pair.clone()) && !defined(7, pair));
    }

    #[test]
    fn definitions_with_countless_ways_are_declined() {
        let names: Vec<String> = (0..40).map(|n| format!("d{n}")).collect();
        let references = names
            .iter()
            .map(|name| json!({"$ref": format!("#/$defs/{name}")}));
        let any = json!({"anyOf": references.collect::<Vec<_>>()});
        let mut schema = object(any.clone());
        schema["$defs"] = names
            .iter()
            .map(|name| (name.clone(), any.clone()))
            .collect();
        assert!(!is_met(&schema));
    }

    /// A chain of definitions whose parts are within each other does not fill the stack, whatever their order.
    #[test]
    fn a_deep_chain_is_declined() {
        let definition = |n: usize| {
            let array = |part: Value, _: usize| json!({"type": "array", "items": part});
            let part = (0..45).fold(json!({"$ref": format!("#/$defs/d{}", n + 1)}), array);
            (format!("d{n}"), part)
        };
        let last = ("d200".to_owned(), json!({"type": "string"}));
        let mut schema = object(json!({"$ref": "#/$defs/d0"}));
        schema["$defs"] = (0..200).map(definition).chain([last]).collect();
        assert!(!is_met(&schema));
    }

    #[test]
    fn names_and_values_are_limited() {
        let names = |length: usize| {
            let mut schema = object(json!({"const": "x".repeat(60_000 - 2)}));
            schema["$defs"] = json!({"d".repeat(length): {"type": "string"}});
            is_met(&schema)
        };
        assert!(names(60_000) && !names(60_001));
        let values = |count: usize, length: usize| {
            let value = |n: usize| json!(format!("{n:0length$}"));
            is_met(&object(
                json!({"enum": (0..count).map(value).collect::<Vec<_>>()}),
            ))
        };
        assert!(values(1_000, 15) && !values(1_001, 4));
        assert!(values(250, 100) && values(300, 50) && !values(300, 51));
    }
}
