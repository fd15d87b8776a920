//! The subsets of JSON Schema that services accept for a reply. A service rejects a request whose schema it does not accept,
//! while the run checks its final text against the whole schema. Pure.

use std::collections::HashSet;

use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

type Object = Map<String, Value>;

/// Parts of a schema that are looked at. A client's schema may refer to the same definition again and again.
const MAX_PARTS: usize = 10_000;

/// Keywords that both services accept, besides those that contain schemas.
const SHARED: [&str; 8] = [
    "$schema",
    "type",
    "required",
    "additionalProperties",
    "enum",
    "const",
    "title",
    "description",
];
/// Keywords that only describe a schema, and say nothing about a value.
const ANNOTATIONS: [&str; 7] = [
    "$id",
    "$comment",
    "examples",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
];
/// Keywords of bounds, which OpenAI accepts in strict mode.
const STRICT_BOUNDS: [&str; 9] = [
    "pattern",
    "format",
    "multipleOf",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
];
/// Keywords of bounds that Anthropic rejects, besides those of [`STRICT_BOUNDS`].
const OTHER_BOUNDS: [&str; 5] = [
    "minLength",
    "maxLength",
    "uniqueItems",
    "minProperties",
    "maxProperties",
];
/// The values of `format` that Anthropic accepts.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "uri",
    "ipv4",
    "ipv6",
    "uuid",
];

/// Whether OpenAI accepts the schema in strict mode: each object lists all of its properties as required and forbids others.
pub fn is_strict(schema: &RawValue) -> bool {
    let Ok(Value::Object(root)) = serde_json::from_str(schema.get()) else {
        return false;
    };
    let mut parts = Parts::new(&root, Service::OpenAi);
    is_object(&root) && parts.accept_object(&root)
}

/// The schema as Anthropic accepts it: objects forbid other properties, and bounds are part of descriptions. `None` if the
/// service cannot express it, for example if an object may have any property or a definition refers to itself.
pub fn for_anthropic(schema: &RawValue) -> Option<Box<RawValue>> {
    let Ok(Value::Object(mut root)) = serde_json::from_str(schema.get()) else {
        return None;
    };
    if !Parts::new(&root, Service::Anthropic).accept_object(&root) {
        return None;
    }
    restrict(&mut root);
    to_raw_value(&root).ok()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Service {
    Anthropic,
    OpenAi,
}

/// A walk through the parts of a schema.
struct Parts<'a> {
    root: &'a Object,
    service: Service,
    left: usize,
    /// The definitions that contain the current part, by their references.
    inside: Vec<&'a str>,
    /// References to definitions that are accepted.
    accepted: HashSet<&'a str>,
}

impl<'a> Parts<'a> {
    fn new(root: &'a Object, service: Service) -> Self {
        Self {
            root,
            service,
            left: MAX_PARTS,
            inside: Vec::new(),
            accepted: HashSet::new(),
        }
    }

    fn accept(&mut self, part: &'a Value) -> bool {
        part.as_object()
            .is_some_and(|part| self.accept_object(part))
    }

    fn accept_object(&mut self, part: &'a Object) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left > 0
            && self.is_closed(part)
            && part
                .iter()
                .all(|(key, value)| self.accept_keyword(key, value))
    }

    /// Whether the part says what its values consist of.
    fn is_closed(&self, part: &Object) -> bool {
        if is_object(part) {
            return self.is_closed_object(part);
        }
        if has_type(part, "array") {
            return part.contains_key("items");
        }
        ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"]
            .iter()
            .any(|key| part.contains_key(*key))
    }

    fn is_closed_object(&self, part: &Object) -> bool {
        let Some(properties) = part.get("properties").and_then(Value::as_object) else {
            return false;
        };
        let required = part.get("required").and_then(Value::as_array);
        let required: HashSet<&str> = (required.into_iter().flatten())
            .filter_map(Value::as_str)
            .collect();
        match self.service {
            Service::OpenAi => {
                part.get("additionalProperties") == Some(&Value::Bool(false))
                    && properties
                        .keys()
                        .all(|name| required.contains(name.as_str()))
            }
            Service::Anthropic => {
                matches!(
                    part.get("additionalProperties"),
                    None | Some(Value::Bool(false))
                ) && required.iter().all(|name| properties.contains_key(*name))
            }
        }
    }

    fn accept_keyword(&mut self, key: &str, value: &'a Value) -> bool {
        let is_anthropic = self.service == Service::Anthropic;
        match key {
            "properties" | "$defs" | "definitions" => {
                let parts = value.as_object();
                parts.is_some_and(|parts| parts.values().all(|part| self.accept(part)))
            }
            "anyOf" => self.accept_all(value),
            "oneOf" => is_anthropic && self.accept_all(value),
            // Not of references.
            "allOf" => {
                let parts = value.as_array().into_iter().flatten();
                let has_reference = parts.filter_map(|part| part.get("$ref")).next().is_some();
                is_anthropic && !has_reference && self.accept_all(value)
            }
            "items" => self.accept(value),
            "$ref" => value.as_str().is_some_and(|to| self.accept_reference(to)),
            "enum" => {
                let values = value.as_array();
                values.is_some_and(|values| !values.iter().any(is_composed))
            }
            "const" => !is_composed(value),
            key if SHARED.contains(&key) || STRICT_BOUNDS.contains(&key) => true,
            key => is_anthropic && (ANNOTATIONS.contains(&key) || OTHER_BOUNDS.contains(&key)),
        }
    }

    fn accept_all(&mut self, parts: &'a Value) -> bool {
        let parts = parts.as_array();
        parts.is_some_and(|parts| parts.iter().all(|part| self.accept(part)))
    }

    /// OpenAI accepts a definition that refers to itself.
    fn accept_reference(&mut self, to: &'a str) -> bool {
        if self.accepted.contains(to) {
            return true;
        }
        if self.inside.contains(&to) {
            return self.service == Service::OpenAi;
        }
        let name = to.strip_prefix("#/").and_then(|to| to.split_once('/'));
        let Some((place @ ("$defs" | "definitions"), name)) = name else {
            return false;
        };
        let Some(definition) = self.root.get(place).and_then(|all| all.get(name)) else {
            return false;
        };
        self.inside.push(to);
        let is_accepted = self.accept(definition);
        self.inside.pop();
        if is_accepted {
            self.accepted.insert(to);
        }
        is_accepted
    }
}

fn has_type(part: &Object, name: &str) -> bool {
    match part.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(names)) => names.iter().any(|it| it == name),
        _ => false,
    }
}

fn is_object(part: &Object) -> bool {
    has_type(part, "object") || part.contains_key("properties")
}

fn is_composed(value: &Value) -> bool {
    value.is_array() || value.is_object()
}

/// Rewrites an accepted schema for Anthropic.
fn restrict(part: &mut Object) {
    let mut bounds = Object::new();
    let keys: Vec<String> = part.keys().cloned().collect();
    for key in keys {
        let is_kept = match (key.as_str(), &part[&key]) {
            ("format", Value::String(format)) => FORMATS.contains(&format.as_str()),
            ("minItems", Value::Number(least)) => matches!(least.as_u64(), Some(0 | 1)),
            (key, _) if key == "$schema" || ANNOTATIONS.contains(&key) => {
                part.shift_remove(key);
                continue;
            }
            (key, _) => !STRICT_BOUNDS.contains(&key) && !OTHER_BOUNDS.contains(&key),
        };
        if !is_kept && let Some(bound) = part.shift_remove(&key) {
            bounds.insert(key, bound);
        }
    }
    if !bounds.is_empty() {
        let description = part.get("description").and_then(Value::as_str);
        let description = [
            description.unwrap_or_default(),
            &Value::Object(bounds).to_string(),
        ]
        .join(" ");
        part.insert("description".to_owned(), json!(description.trim_start()));
    }
    if let Some(either) = part.shift_remove("oneOf") {
        part.insert("anyOf".to_owned(), either);
    }
    if is_object(part) {
        part.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    for (key, value) in part.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(parts)) => {
                parts
                    .values_mut()
                    .filter_map(Value::as_object_mut)
                    .for_each(restrict);
            }
            ("anyOf" | "allOf", Value::Array(parts)) => {
                parts
                    .iter_mut()
                    .filter_map(Value::as_object_mut)
                    .for_each(restrict);
            }
            ("items", Value::Object(part)) => restrict(part),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::to_raw_value;
    use serde_json::{Value, json};

    use super::{for_anthropic, is_strict};

    fn adapted(schema: &Value) -> Option<Value> {
        let raw = to_raw_value(schema).expect("JSON");
        for_anthropic(&raw).map(|raw| serde_json::from_str(raw.get()).expect("JSON"))
    }

    #[test]
    fn a_schema_is_rewritten_for_anthropic() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "score": {"type": "integer", "description": "How good.", "minimum": 1, "maximum": 10},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 1, "maxItems": 3},
                "when": {"type": "string", "format": "date"},
                "host": {"type": "string", "format": "idn-hostname"},
                "place": {"oneOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}
            },
            "required": ["score"],
            "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}}}
        });
        let expected = json!({
            "type": "object",
            "properties": {
                "score": {"type": "integer", "description": "How good. {\"minimum\":1,\"maximum\":10}"},
                "tags": {
                    "type": "array",
                    "items": {"type": "string", "description": "{\"maxLength\":9}"},
                    "minItems": 1,
                    "description": "{\"maxItems\":3}"
                },
                "when": {"type": "string", "format": "date"},
                "host": {"type": "string", "description": "{\"format\":\"idn-hostname\"}"},
                "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}
            },
            "required": ["score"],
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "additionalProperties": false
                }
            },
            "additionalProperties": false
        });
        assert_eq!(adapted(&schema), Some(expected));
    }

    #[test]
    fn what_anthropic_cannot_express_is_left_out() {
        let of = |part: Value| json!({"type": "object", "properties": {"it": part}});
        let doubling: serde_json::Map<String, Value> = (0..40)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), json!({"anyOf": [next, next]}))
            })
            .chain([("d40".to_owned(), json!({"type": "string"}))])
            .collect();
        let doubled = json!({"$defs": doubling, "$ref": "#/$defs/d0"});
        assert!(
            adapted(&doubled).is_some(),
            "each definition is looked at once"
        );
        for schema in [
            json!(true),
            json!({}),
            json!({"type": "object"}),
            json!({"type": "object", "properties": {}, "additionalProperties": true}),
            json!({"type": "object", "properties": {}, "required": ["other"]}),
            of(json!({"type": "object", "additionalProperties": {"type": "string"}})),
            of(json!({"type": ["object", "null"]})),
            of(json!({"type": "array"})),
            of(json!({"type": "array", "items": true})),
            of(json!({"enum": [{"a": 1}]})),
            of(json!({"not": {"type": "string"}})),
            of(json!({"$ref": "other.json"})),
            of(json!({"$ref": "#/$defs/none"})),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
        ] {
            assert_eq!(adapted(&schema), None, "{schema}");
        }
    }

    #[test]
    fn strict_mode_needs_every_property_at_every_level() {
        let object = |properties: Value, required: Value| {
            json!({
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": false
            })
        };
        let is_strict = |schema: &Value| is_strict(&to_raw_value(schema).expect("JSON"));
        let inner = object(
            json!({"b": {"type": "integer", "minimum": 0}}),
            json!(["b"]),
        );
        for schema in [
            object(json!({}), json!([])),
            object(json!({"a": inner}), json!(["a"])),
            object(
                json!({"a": {"anyOf": [inner, {"type": "null"}]}}),
                json!(["a"]),
            ),
            json!({
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}},
                "required": ["next"],
                "additionalProperties": false,
                "$defs": {"node": object(json!({"next": {"$ref": "#/$defs/node"}}), json!(["next"]))}
            }),
        ] {
            assert!(is_strict(&schema), "{schema}");
        }
        for schema in [
            json!({"type": "object", "properties": {}}),
            json!({"type": "array", "items": inner}),
            object(json!({"a": inner, "b": {"type": "string"}}), json!(["a"])),
            object(
                json!({"a": {"type": "object", "properties": {}}}),
                json!(["a"]),
            ),
            object(
                json!({"a": {"type": "string", "minLength": 1}}),
                json!(["a"]),
            ),
            object(json!({"a": {"allOf": [inner]}}), json!(["a"])),
        ] {
            assert!(!is_strict(&schema), "{schema}");
        }
    }
}
