//! The subsets of JSON Schema that services accept for a reply. A service rejects a request whose schema it does not accept,
//! while the run checks its final text against the whole schema. Pure.

use std::collections::HashSet;

use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use crate::providers::strict_limits;

type Object = Map<String, Value>;

/// The most parts of a schema, and the most of them within each other: a client's schema may be hostile. OpenAI accepts at most
/// 5,000 properties.
const MAX_PARTS: usize = 5_000;
const MAX_DEPTH: usize = 64;
/// Anthropic's limits of properties that are not required, and of parts that may have several types.
const MAX_OPTIONAL: usize = 24;
const MAX_UNIONS: usize = 16;

/// Keywords that say nothing about a value.
const ANNOTATIONS: [&str; 6] = [
    "$comment",
    "examples",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
];
/// Keywords of bounds, which OpenAI accepts in strict mode.
const STRICT_BOUNDS: [&str; 8] = [
    "pattern",
    "multipleOf",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
];
/// Keywords of bounds that no service accepts.
const OTHER_BOUNDS: [&str; 5] = [
    "minLength",
    "maxLength",
    "uniqueItems",
    "minProperties",
    "maxProperties",
];
/// The values of `format` that both services accept. Anthropic also accepts `uri`.
const FORMATS: [&str; 9] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
];

/// Whether OpenAI accepts the schema in strict mode: each object lists all of its properties as required and forbids others.
pub fn is_strict(schema: &RawValue) -> bool {
    let Ok(Value::Object(root)) = serde_json::from_str(schema.get()) else {
        return false;
    };
    root.get("type") == Some(&json!("object"))
        && !root.contains_key("anyOf")
        && Walk::new(&root, Api::OpenAi).accept_object(&root)
        && strict_limits::are_met(&root)
}

/// Whether the schema is of an object, the only root of what a service's JSON mode writes.
pub fn is_of_object(schema: &RawValue) -> bool {
    let Ok(Value::Object(root)) = serde_json::from_str(schema.get()) else {
        return false;
    };
    root.get("type")
        .map_or(root.contains_key("properties"), |it| it == "object")
}

/// The schema as Anthropic accepts it: objects forbid other properties, and bounds are part of descriptions. `None` if the
/// service cannot express it, for example if an object may have any property or a definition refers to itself.
pub fn for_anthropic(schema: &RawValue) -> Option<Box<RawValue>> {
    let Ok(Value::Object(mut root)) = serde_json::from_str(schema.get()) else {
        return None;
    };
    if !Walk::new(&root, Api::Anthropic).accept_object(&root) {
        return None;
    }
    restrict(&mut root);
    to_raw_value(&root).ok()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Api {
    Anthropic,
    OpenAi,
}

/// A walk through the parts of a schema. Each definition is looked at once.
struct Walk<'a> {
    root: &'a Object,
    api: Api,
    /// How many parts, optional properties and unions there were.
    parts: usize,
    optional: usize,
    unions: usize,
    /// How many parts the current one is in.
    depth: usize,
    /// The definitions that contain the current part, by address.
    inside: Vec<*const Value>,
    /// Definitions that are accepted.
    accepted: HashSet<*const Value>,
}

impl<'a> Walk<'a> {
    fn new(root: &'a Object, api: Api) -> Self {
        Self {
            root,
            api,
            parts: 0,
            optional: 0,
            unions: 0,
            depth: 0,
            inside: Vec::new(),
            accepted: HashSet::new(),
        }
    }

    fn accept(&mut self, part: &'a Value) -> bool {
        part.as_object()
            .is_some_and(|part| self.accept_object(part))
    }

    fn accept_object(&mut self, part: &'a Object) -> bool {
        self.parts += 1;
        self.depth += 1;
        let is_accepted = self.depth <= MAX_DEPTH
            && self.is_well_formed(part)
            && part
                .iter()
                .all(|(key, value)| self.accept_keyword(part, key, value))
            && self.is_within_limits();
        self.depth -= 1;
        is_accepted
    }

    fn is_within_limits(&self) -> bool {
        let is_within = match self.api {
            Api::Anthropic => self.optional <= MAX_OPTIONAL && self.unions <= MAX_UNIONS,
            Api::OpenAi => true,
        };
        is_within && self.parts <= MAX_PARTS
    }

    /// Whether the part says what its values consist of, and its keywords may stand beside each other.
    fn is_well_formed(&mut self, part: &Object) -> bool {
        let is_openai = self.api == Api::OpenAi;
        if part.contains_key("$ref") {
            let is_beside = |key: &str| {
                [
                    "$ref",
                    "$defs",
                    "definitions",
                    "$schema",
                    "title",
                    "description",
                ]
                .contains(&key)
                    || is_annotation_or_bound(key)
            };
            return match is_openai {
                true => part.len() == 1,
                false => part.keys().all(|key| is_beside(key)),
            };
        }
        let choices = ["anyOf", "oneOf"].map(|key| usize::from(part.contains_key(key)));
        let choices: usize = choices.iter().sum();
        self.unions += usize::from(choices > 0 || part.get("type").is_some_and(Value::is_array));
        if is_object(part) && !(choices == 0 && self.is_closed_object(part)) {
            return false;
        }
        if has_type(part, "array") && !part.contains_key("items") {
            return false;
        }
        let is_typed = part.contains_key("type") || !is_openai && is_object(part);
        let has_values = part.contains_key("enum") || part.contains_key("const");
        choices <= 1 && (is_typed || choices == 1 || has_values && !is_openai)
    }

    /// Whether the object lists its properties, as the service requires it.
    fn is_closed_object(&mut self, part: &Object) -> bool {
        let Some(properties) = part.get("properties").and_then(Value::as_object) else {
            return false;
        };
        let required = part.get("required").and_then(Value::as_array);
        let required: HashSet<&str> = (required.into_iter().flatten())
            .filter_map(Value::as_str)
            .collect();
        let listed = |name: &&String| required.contains(name.as_str());
        let optional = properties.len() - properties.keys().filter(listed).count();
        self.optional += optional;
        let is_closed = part.get("additionalProperties") == Some(&Value::Bool(false));
        match self.api {
            Api::OpenAi => is_closed && optional == 0,
            // Without properties it is an object of any kind.
            Api::Anthropic => {
                let may_be_closed =
                    !part.contains_key("additionalProperties") && !properties.is_empty();
                (is_closed || may_be_closed)
                    && required.iter().all(|name| properties.contains_key(*name))
            }
        }
    }

    fn accept_keyword(&mut self, part: &Object, key: &str, value: &'a Value) -> bool {
        let is_anthropic = self.api == Api::Anthropic;
        match key {
            "properties" => {
                let parts = value.as_object();
                parts.is_some_and(|parts| parts.values().all(|part| self.accept(part)))
            }
            "$defs" | "definitions" => {
                let parts = value.as_object();
                parts.is_some_and(|parts| parts.values().all(|it| self.accept_definition(it)))
            }
            "anyOf" => self.accept_all(value),
            "oneOf" => is_anthropic && self.accept_all(value),
            "items" => self.accept(value),
            "$ref" => value.as_str().is_some_and(|to| self.accept_reference(to)),
            "enum" => {
                let values = value.as_array();
                values.is_some_and(|values| !values.iter().any(is_composed))
            }
            "const" => !is_composed(value),
            "additionalProperties" | "required" => is_object(part),
            "format" => is_anthropic || is_in(&FORMATS, value),
            "type" | "title" | "description" | "$schema" => true,
            key => STRICT_BOUNDS.contains(&key) || is_anthropic && is_annotation_or_bound(key),
        }
    }

    fn accept_all(&mut self, parts: &'a Value) -> bool {
        let parts = parts.as_array();
        parts.is_some_and(|parts| parts.iter().all(|part| self.accept(part)))
    }

    fn accept_reference(&mut self, to: &'a str) -> bool {
        strict_limits::definition(self.root, to)
            .is_some_and(|definition| self.accept_definition(definition))
    }

    /// OpenAI accepts a definition that refers to itself.
    fn accept_definition(&mut self, definition: &'a Value) -> bool {
        let address = std::ptr::from_ref(definition);
        if self.accepted.contains(&address) {
            return true;
        }
        if self.inside.contains(&address) {
            return self.api == Api::OpenAi;
        }
        self.inside.push(address);
        let is_accepted = self.accept(definition);
        self.inside.pop();
        if is_accepted {
            self.accepted.insert(address);
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

fn is_in(names: &[&str], value: &Value) -> bool {
    value.as_str().is_some_and(|value| names.contains(&value))
}

fn is_annotation_or_bound(key: &str) -> bool {
    key == "format"
        || [&ANNOTATIONS[..], &STRICT_BOUNDS, &OTHER_BOUNDS]
            .iter()
            .any(|keys| keys.contains(&key))
}

/// Rewrites an accepted schema for Anthropic.
fn restrict(part: &mut Object) {
    if part.contains_key("$ref") {
        part.retain(|key, _| ["$ref", "$defs", "definitions"].contains(&key.as_str()));
    }
    let bounds = take_bounds(part);
    if !bounds.is_empty() {
        let description = part.get("description").and_then(Value::as_str);
        let bounds = Value::Object(bounds).to_string();
        let description = [description.unwrap_or_default(), &bounds].join(" ");
        part.insert("description".to_owned(), json!(description.trim_start()));
    }
    if let Some(choices) = part.shift_remove("oneOf") {
        part.insert("anyOf".to_owned(), choices);
    }
    if is_object(part) {
        part.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    for (key, value) in part.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(parts)) => {
                let parts = parts.values_mut().filter_map(Value::as_object_mut);
                parts.for_each(restrict);
            }
            ("anyOf", Value::Array(parts)) => {
                let parts = parts.iter_mut().filter_map(Value::as_object_mut);
                parts.for_each(restrict);
            }
            ("items", Value::Object(part)) => restrict(part),
            _ => {}
        }
    }
}

/// Removes annotations and what the service rejects, and returns the bounds among these.
fn take_bounds(part: &mut Object) -> Object {
    let mut bounds = Object::new();
    let keys: Vec<String> = part.keys().cloned().collect();
    for key in keys {
        let is_kept = match (key.as_str(), &part[&key]) {
            ("format", format) => is_in(&FORMATS, format) || *format == json!("uri"),
            ("minItems", Value::Number(least)) => matches!(least.as_u64(), Some(0 | 1)),
            ("$schema", _) => false,
            (key, _) => !is_annotation_or_bound(key),
        };
        if is_kept {
            continue;
        }
        if let Some(value) = part.shift_remove(&key)
            && key != "$schema"
            && !ANNOTATIONS.contains(&key.as_str())
        {
            bounds.insert(key, value);
        }
    }
    bounds
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
        let doubling: serde_json::Map<String, Value> = (0..25)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                let properties = json!({"a": next, "b": next});
                let part =
                    json!({"type": "object", "properties": properties, "required": ["a", "b"]});
                (format!("d{n}"), part)
            })
            .chain([("d25".to_owned(), json!({"type": "string"}))])
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
            of(json!({"type": "object", "properties": {}})),
            of(json!({"allOf": [of(json!({"type": "null"})), {"type": "object"}]})),
            json!({"properties": {"a": {"type": "null"}}, "anyOf": [of(json!({"type": "null"}))]}),
            json!({"$ref": "#/$defs/a", "properties": {}, "$defs": {"a": of(json!({"type": "null"}))}}),
            of(json!({"anyOf": [{"type": "null"}], "oneOf": [{"type": "string"}]})),
            of(json!({"type": "string", "additionalProperties": {}})),
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

    /// Anthropic's limits.
    #[test]
    fn a_schema_with_many_choices_is_left_out() {
        let with = |count: usize, part: Value| {
            let properties = (0..count).map(|n| (format!("p{n}"), part.clone()));
            let properties: serde_json::Map<String, Value> = properties.collect();
            let required: Vec<_> = properties.keys().cloned().collect();
            json!({"type": "object", "properties": properties, "required": required})
        };
        let optional = |count| {
            let mut schema = with(count, json!({"type": "string"}));
            schema["required"] = json!([]);
            adapted(&schema)
        };
        assert!(optional(24).is_some() && optional(25).is_none());
        let mut defined = with(1, json!({"$ref": "#/$defs/d"}));
        defined["$defs"] = json!({"d": with(13, json!({"type": "string"}))});
        defined["$defs"]["d"]["required"] = json!([]);
        assert!(adapted(&defined).is_some(), "a definition counts once");
        let unions = |count| adapted(&with(count, json!({"type": ["string", "null"]})));
        assert!(unions(16).is_some() && unions(17).is_none());
    }

    /// A chain of references whose parts are within each other does not fill the stack.
    #[test]
    fn a_deep_schema_is_left_out() {
        let definition = |n: usize| {
            let mut part = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            for _ in 0..45 {
                part = json!({"type": "array", "items": part});
            }
            (format!("d{n}"), part)
        };
        let definitions: serde_json::Map<String, Value> = (0..200)
            .map(definition)
            .chain([("d200".to_owned(), json!({"type": "string"}))])
            .collect();
        let deep = json!({
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/d0"}},
            "required": ["a"],
            "additionalProperties": false,
            "$defs": definitions
        });
        assert_eq!(adapted(&deep), None);
        assert!(!is_strict(&to_raw_value(&deep).expect("JSON")));
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
            object(
                json!({"a": {"type": "string", "format": "uri"}}),
                json!(["a"]),
            ),
            object(json!({"a": {"enum": ["b"]}}), json!(["a"])),
            object(
                json!({"a": {"type": "string", "enum": vec!["b"; 1_001]}}),
                json!(["a"]),
            ),
            json!({"properties": {}, "required": [], "additionalProperties": false}),
            object(
                json!({"a": {"properties": {}, "required": [], "additionalProperties": false}}),
                json!(["a"]),
            ),
            json!({
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/a", "description": "x"}},
                "required": ["a"],
                "additionalProperties": false,
                "$defs": {"a": {"type": "string"}}
            }),
        ] {
            assert!(!is_strict(&schema), "{schema}");
        }
    }
}
