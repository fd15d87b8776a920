//! Writes whole numbers as integers where a schema requires integers: models write `1.0`, which is an integer for JSON
//! Schema, but not for what reads the value.

use serde_json::{Map, Number, Value};

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

/// Replaces floats without a fraction in a valid value by integers where the schema requires integers. A number that does
/// not fit 64 bits stays as it is.
pub fn write_integers(schema: &Value, value: &mut Value) {
    let mut writer = IntegerWriter {
        root: schema,
        remaining_steps: MAX_STEPS,
    };
    writer.visit(schema, value, 0);
}

struct IntegerWriter<'s> {
    root: &'s Value,
    remaining_steps: usize,
}

impl<'s> IntegerWriter<'s> {
    fn visit(&mut self, schema: &'s Value, value: &mut Value, depth: usize) {
        let Value::Object(keywords) = schema else {
            return;
        };
        if !self.take_step() || depth == MAX_DEPTH {
            return;
        }
        let depth = depth + 1;
        if let Some(schema) = self.referenced(keywords) {
            self.visit(schema, value, depth);
        }
        for schema in subschemas(keywords, "allOf") {
            self.visit(schema, value, depth);
        }
        for key in ["anyOf", "oneOf"] {
            if value.is_number() && self.any_accepts_fractions(keywords, key, depth) {
                continue;
            }
            for schema in subschemas(keywords, key) {
                self.visit(schema, value, depth);
            }
        }
        match value {
            Value::Number(number) if requires_integer(keywords) => write_integer(number),
            Value::Array(items) => self.visit_items(keywords, items, depth),
            Value::Object(members) => self.visit_members(keywords, members, depth),
            _ => {}
        }
    }

    fn visit_items(&mut self, keywords: &'s Map<String, Value>, items: &mut [Value], depth: usize) {
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
                self.visit(schema, item, depth);
            }
        }
    }

    fn visit_members(
        &mut self,
        keywords: &'s Map<String, Value>,
        members: &mut Map<String, Value>,
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
                self.visit(schema, member, depth);
            }
        }
    }

    fn any_accepts_fractions(
        &mut self,
        keywords: &'s Map<String, Value>,
        key: &str,
        depth: usize,
    ) -> bool {
        subschemas(keywords, key).any(|schema| self.accepts_fractions(schema, depth))
    }

    /// Whether a number with a fraction may fit the schema.
    fn accepts_fractions(&mut self, schema: &'s Value, depth: usize) -> bool {
        let Value::Object(keywords) = schema else {
            return *schema == Value::Bool(true);
        };
        if !self.take_step() || depth == MAX_DEPTH {
            return true;
        }
        if let Some(kind) = keywords.get("type") {
            return contains_kind(kind, "number");
        }
        let values = keywords.get("enum").and_then(Value::as_array);
        if values.is_some_and(|all| !all.iter().any(Value::is_number))
            || keywords.get("const").is_some_and(|it| !it.is_number())
        {
            return false;
        }
        let depth = depth + 1;
        if let Some(schema) = self.referenced(keywords)
            && !self.accepts_fractions(schema, depth)
        {
            return false;
        }
        subschemas(keywords, "allOf").all(|schema| self.accepts_fractions(schema, depth))
            && ["anyOf", "oneOf"].iter().all(|key| {
                !keywords.contains_key(*key) || self.any_accepts_fractions(keywords, key, depth)
            })
    }

    /// The schema that `$ref` names.
    fn referenced(&self, keywords: &Map<String, Value>) -> Option<&'s Value> {
        let reference = keywords.get("$ref")?.as_str()?;
        self.root.pointer(reference.strip_prefix('#')?)
    }

    fn take_step(&mut self) -> bool {
        let remaining = self.remaining_steps.checked_sub(1);
        self.remaining_steps = remaining.unwrap_or_default();
        remaining.is_some()
    }
}

fn subschemas<'s>(
    keywords: &'s Map<String, Value>,
    key: &str,
) -> impl Iterator<Item = &'s Value> + use<'s> {
    let schemas = keywords.get(key).and_then(Value::as_array);
    schemas.into_iter().flatten()
}

fn write_integer(number: &mut Number) {
    let Some(float) = whole_float(number) else {
        return;
    };
    let digits = format!("{float:.0}");
    if let Ok(integer) = digits.parse::<i64>() {
        *number = integer.into();
    } else if let Ok(integer) = digits.parse::<u64>() {
        *number = integer.into();
    }
}

/// The number if it is written as a float and has no fraction.
fn whole_float(number: &Number) -> Option<f64> {
    let float = number.as_f64().filter(|_| number.is_f64())?;
    (float.fract() == 0.0).then_some(float)
}

/// Whether numbers that fit the schema are integers.
fn requires_integer(keywords: &Map<String, Value>) -> bool {
    let kind = keywords.get("type");
    kind.is_some_and(|kind| contains_kind(kind, "integer") && !contains_kind(kind, "number"))
}

/// Whether the value of `type` is or contains this type.
fn contains_kind(kind: &Value, wanted: &str) -> bool {
    match kind {
        Value::Array(kinds) => kinds.iter().any(|kind| *kind == wanted),
        kind => *kind == wanted,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{contains_whole_float, write_integers};

    /// The value as JSON text, in which `1` and `1.0` differ.
    fn written(schema: &Value, mut value: Value) -> String {
        assert!(contains_whole_float(&value), "{value}");
        write_integers(schema, &mut value);
        value.to_string()
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
        assert_eq!(written(&schema, value), expected);
        assert!(!contains_whole_float(&json!({"a": 1, "c": [1.5, "1.0"]})));
    }

    #[test]
    fn a_number_beyond_64_bits_stays() {
        let schema = json!({"items": {"type": "integer"}});
        let value: Value =
            serde_json::from_str("[-9223372036854775808.0, 1e19, 1e20]").expect("JSON");
        let expected = format!(
            "[-9223372036854775808,10000000000000000000,{}]",
            json!(1e20)
        );
        assert_eq!(written(&schema, value), expected);
    }

    #[test]
    fn a_number_stays_if_an_alternative_accepts_fractions() {
        for alternative in [
            json!({"type": "number"}),
            json!({"type": ["null", "number"]}),
            json!({"minimum": 0}),
            json!(true),
            json!({"$ref": "#/$defs/ratio"}),
            json!({"oneOf": [{"type": "string"}, {"type": "number"}]}),
        ] {
            for key in ["anyOf", "oneOf"] {
                let schema = json!({
                    key: [{"type": "integer"}, alternative],
                    "$defs": {"ratio": {"allOf": [{"type": "number"}]}},
                });
                assert_eq!(written(&schema, json!(3.0)), "3.0", "{schema}");
            }
        }
        for alternative in [
            json!({"type": "null"}),
            json!(false),
            json!({"$ref": "#/$defs/name"}),
            json!({"anyOf": [{"type": "string"}, {"type": "array"}]}),
            json!({"allOf": [{}, {"type": "integer"}]}),
            json!({"enum": ["auto"]}),
            json!({"const": null}),
        ] {
            let schema = json!({
                "anyOf": [{"type": "integer"}, alternative],
                "$defs": {"name": {"type": "string"}},
            });
            assert_eq!(written(&schema, json!(3.0)), "3", "{schema}");
        }
    }

    #[test]
    fn hostile_schemas_end_the_search() {
        let mut schema = json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]});
        assert_eq!(written(&schema, json!([1.0])), "[1.0]");
        assert_eq!(written(&schema, json!(1.0)), "1.0");
        schema = json!({"items": {"$ref": "#"}, "type": ["integer", "array"]});
        let many = vec![1.0; 100_000];
        assert!(written(&schema, json!(many)).starts_with("[1,1,"));
    }
}
