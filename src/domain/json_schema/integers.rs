//! Writes whole numbers as integers where a schema requires integers: models write `1.0`, which is an integer for JSON
//! Schema, but not for what reads the value.

use serde_json::{Map, Number, Value};

use crate::domain::json_schema::compiled::Mismatch;

/// The most parts of a value that are compared with a part of the schema. Both may be hostile.
const MAX_STEPS: usize = 20_000;
const MAX_DEPTH: usize = 64;

/// Whether some part of the value is written as a float and has no fraction.
pub fn contains_whole_float(value: &Value) -> bool {
    match value {
        Value::Number(number) => whole_float(number).is_some(),
        Value::Array(items) => items.iter().any(contains_whole_float),
        Value::Object(members) => members.values().any(contains_whole_float),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// Replaces floats without a fraction in a valid value by integers where the schema requires integers.
///
/// # Errors
/// Such a number does not fit 64 bits.
pub fn write_integers(schema: &Value, value: &mut Value) -> Result<(), Mismatch> {
    let mut writer = IntegerWriter {
        root: schema,
        remaining_steps: MAX_STEPS,
        pointer: String::new(),
        too_large: None,
    };
    writer.visit(schema, value, false, 0);
    writer.too_large.map_or(Ok(()), Err)
}

struct IntegerWriter<'s> {
    root: &'s Value,
    remaining_steps: usize,
    /// Where the visited value is, as a JSON Pointer.
    pointer: String,
    too_large: Option<Mismatch>,
}

impl<'s> IntegerWriter<'s> {
    /// The value may fit another schema instead of this one if it `is_alternative`.
    fn visit(&mut self, schema: &'s Value, value: &mut Value, is_alternative: bool, depth: usize) {
        let Value::Object(keywords) = schema else {
            return;
        };
        if !self.take_step() || depth == MAX_DEPTH {
            return;
        }
        let depth = depth + 1;
        if let Some(Value::String(reference)) = keywords.get("$ref")
            && let Some(pointer) = reference.strip_prefix('#')
            && let Some(schema) = self.root.pointer(pointer)
        {
            self.visit(schema, value, is_alternative, depth);
        }
        for (key, is_choice) in [("allOf", false), ("anyOf", true), ("oneOf", true)] {
            let schemas = keywords.get(key).and_then(Value::as_array);
            for schema in schemas.into_iter().flatten() {
                self.visit(schema, value, is_alternative || is_choice, depth);
            }
        }
        match value {
            Value::Number(number) if requires_integer(keywords) => {
                self.write(number, is_alternative);
            }
            Value::Array(items) => self.visit_items(keywords, items, is_alternative, depth),
            Value::Object(members) => self.visit_members(keywords, members, is_alternative, depth),
            _ => {}
        }
    }

    fn visit_items(
        &mut self,
        keywords: &'s Map<String, Value>,
        items: &mut [Value],
        is_alternative: bool,
        depth: usize,
    ) {
        // Before the draft 2020-12, `items` could be what `prefixItems` is now.
        let rest = keywords.get("items");
        let first = keywords.get("prefixItems").or(rest);
        let first: &[Value] = match first.and_then(Value::as_array) {
            Some(schemas) => schemas,
            None => &[],
        };
        for (at, item) in items.iter_mut().enumerate() {
            if !self.take_step() {
                return;
            }
            if let Some(schema) = first.get(at).or(rest) {
                self.visit_part(&at.to_string(), schema, item, is_alternative, depth);
            }
        }
    }

    fn visit_members(
        &mut self,
        keywords: &'s Map<String, Value>,
        members: &mut Map<String, Value>,
        is_alternative: bool,
        depth: usize,
    ) {
        let properties = keywords.get("properties").and_then(Value::as_object);
        let others = match keywords.contains_key("patternProperties") {
            true => None,
            false => keywords.get("additionalProperties"),
        };
        for (name, member) in members {
            if !self.take_step() {
                return;
            }
            let schema = properties.and_then(|properties| properties.get(name));
            if let Some(schema) = schema.or(others) {
                self.visit_part(name, schema, member, is_alternative, depth);
            }
        }
    }

    fn visit_part(
        &mut self,
        name: &str,
        schema: &'s Value,
        part: &mut Value,
        is_alternative: bool,
        depth: usize,
    ) {
        let length = self.pointer.len();
        self.pointer.push('/');
        self.pointer
            .push_str(&name.replace('~', "~0").replace('/', "~1"));
        self.visit(schema, part, is_alternative, depth);
        self.pointer.truncate(length);
    }

    fn write(&mut self, number: &mut Number, is_alternative: bool) {
        let Some(float) = whole_float(number) else {
            return;
        };
        let digits = format!("{float:.0}");
        if let Ok(integer) = digits.parse::<i64>() {
            *number = integer.into();
        } else if let Ok(integer) = digits.parse::<u64>() {
            *number = integer.into();
        } else if !is_alternative {
            self.too_large.get_or_insert(Mismatch {
                pointer: self.pointer.clone(),
                reason: format!("{number} does not fit an integer of 64 bits"),
            });
        }
    }

    fn take_step(&mut self) -> bool {
        let remaining = self.remaining_steps.checked_sub(1);
        self.remaining_steps = remaining.unwrap_or_default();
        remaining.is_some()
    }
}

/// The number if it is written as a float and has no fraction.
fn whole_float(number: &Number) -> Option<f64> {
    let float = number.as_f64().filter(|_| number.is_f64())?;
    (float.fract() == 0.0).then_some(float)
}

/// Whether numbers that fit the schema are integers.
fn requires_integer(keywords: &Map<String, Value>) -> bool {
    match keywords.get("type") {
        Some(Value::String(kind)) => kind == "integer",
        Some(Value::Array(kinds)) => {
            let contains = |wanted: &str| kinds.iter().any(|kind| *kind == wanted);
            contains("integer") && !contains("number")
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{contains_whole_float, write_integers};

    /// The value as JSON text, in which `1` and `1.0` differ.
    fn written(schema: &Value, mut value: Value) -> Result<String, String> {
        assert!(contains_whole_float(&value), "{value}");
        write_integers(schema, &mut value).map_err(|mismatch| mismatch.to_string())?;
        Ok(value.to_string())
    }

    #[test]
    fn only_what_must_be_an_integer_is_rewritten() {
        let schema = json!({
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": ["integer", "null"]},
                "c": {"type": "number"},
                "d": {"type": ["integer", "number"]},
                "e": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "f": {"items": {"$ref": "#/$defs/n"}},
                "g": {"prefixItems": [{}, {"type": "integer"}]},
            },
            "additionalProperties": {"type": "integer"},
            "$defs": {"n": {"type": "integer"}},
        });
        let value = json!({
            "a": 1.0, "b": -2.0, "c": 3.0, "d": 4.0, "e": 5.0, "f": [6.0, 7], "g": [8.0, 9.0], "h": 1e3,
        });
        let expected = r#"{"a":1,"b":-2,"c":3.0,"d":4.0,"e":5,"f":[6,7],"g":[8.0,9],"h":1000}"#;
        assert_eq!(written(&schema, value).as_deref(), Ok(expected));
        assert!(!contains_whole_float(&json!({"a": 1, "c": [1.5, "1.0"]})));
    }

    #[test]
    fn a_number_beyond_64_bits_is_named() {
        let schema = json!({"properties": {"a/b": {"items": {"type": "integer"}}}});
        let largest: Value = serde_json::from_str("[-9223372036854775808.0, 1e19]").expect("JSON");
        assert_eq!(
            written(&schema, json!({"a/b": largest})).as_deref(),
            Ok(r#"{"a/b":[-9223372036854775808,10000000000000000000]}"#)
        );
        assert_eq!(
            written(&schema, json!({"a/b": [1, 1e20]})),
            Err(format!(
                "/a~1b/1: {} does not fit an integer of 64 bits",
                json!(1e20)
            ))
        );
        let either = json!({"anyOf": [{"type": "integer"}, {"type": "number"}]});
        assert_eq!(written(&either, json!(1e20)), Ok(json!(1e20).to_string()));
    }

    #[test]
    fn hostile_schemas_end_the_search() {
        let mut schema = json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]});
        assert_eq!(written(&schema, json!([1.0])).as_deref(), Ok("[1.0]"));
        schema = json!({"items": {"$ref": "#"}, "type": ["integer", "array"]});
        let many = vec![1.0; 100_000];
        assert!(written(&schema, json!(many)).is_ok());
    }
}
