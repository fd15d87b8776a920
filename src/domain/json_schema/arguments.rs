//! Repairs the schema of a tool's arguments, which servers and clients write. Strict services refuse a whole request because of
//! one schema that is not a plain object's.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::domain::json_schema::keywords::{WITH_LIST, WITH_NAMES, WITH_SCHEMA};
use crate::domain::lenient_json;

/// Most alternatives of one schema, and most references and alternatives within each other, that are merged.
const MAX_ALTERNATIVES: usize = 64;
const MAX_LEVELS: usize = 8;
/// Most bytes of JSON that merging may copy.
const MAX_COPIED_BYTES: usize = 512 << 10;

const ALTERNATIVES: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// The schema of a tool's arguments as it was written; one that accepts every object if there is none. `None` if it is of another
/// type.
pub fn read_arguments(schema: Option<Value>) -> Option<Map<String, Value>> {
    match schema {
        None | Some(Value::Null | Value::Bool(true)) => Some(Map::new()),
        Some(Value::Object(schema)) => Some(schema),
        // Programs in PHP write empty objects as lists.
        Some(Value::Array(list)) if list.is_empty() => Some(Map::new()),
        Some(Value::String(json)) => lenient_json::from_slice(json.as_bytes()).ok(),
        Some(_) => None,
    }
}

/// Makes the schema one of a plain object, as every provider accepts it: with `type` and `properties`, and without
/// alternatives at the top, whose properties are merged. What is no schema at all is left out.
///
/// # Errors
/// Why it cannot describe an object.
pub fn repair_arguments(schema: &mut Map<String, Value>) -> Result<(), String> {
    let has_alternatives = ALTERNATIVES.iter().any(|key| schema.contains_key(*key));
    if has_alternatives || schema.contains_key("$ref") {
        let root = Value::Object(schema.clone());
        *schema = merge_alternatives(std::mem::take(schema), &root, 0, &mut 0)?;
    }
    check_type(schema)?;
    for key in ["enum", "const", "not"] {
        schema.shift_remove(key);
    }
    repair_schema(schema);
    schema.entry("type").or_insert_with(|| json!("object"));
    schema.entry("properties").or_insert_with(|| json!({}));
    Ok(())
}

/// Sets the type to that of an object, if it is missing or one of several.
fn check_type(schema: &mut Map<String, Value>) -> Result<(), String> {
    let Some(kind) = schema.get_mut("type") else {
        return Ok(());
    };
    let is_object = match &*kind {
        Value::Null => true,
        Value::String(kind) => kind.is_empty() || kind.eq_ignore_ascii_case("object"),
        Value::Array(kinds) => kinds.is_empty() || kinds.contains(&json!("object")),
        _ => false,
    };
    if !is_object {
        let kind: String = kind.to_string().chars().take(100).collect();
        return Err(format!(
            "its schema has the type {kind}, and models send objects only"
        ));
    }
    *kind = json!("object");
    Ok(())
}

/// The schema of one object that has the properties of all alternatives. Those of `allOf` and those that all others require are
/// required.
fn merge_alternatives(
    mut schema: Map<String, Value>,
    root: &Value,
    level: usize,
    copied_bytes: &mut usize,
) -> Result<Map<String, Value>, String> {
    let too_complex = || "its schema has too many alternatives".to_owned();
    if level > MAX_LEVELS {
        return Err(too_complex());
    }
    if let Some(reference) = schema.shift_remove("$ref") {
        let target = reference.as_str().and_then(|it| it.strip_prefix('#'));
        let target = target.and_then(|pointer| root.pointer(pointer));
        if let Some(Value::Object(target)) = target
            && level < MAX_LEVELS
        {
            *copied_bytes += serde_json::to_string(target).map_or(0, |json| json.len());
            if *copied_bytes > MAX_COPIED_BYTES {
                return Err(too_complex());
            }
            let target = merge_alternatives(target.clone(), root, level + 1, copied_bytes)?;
            for (key, value) in target {
                schema.entry(key).or_insert(value);
            }
        }
    }
    for keyword in ALTERNATIVES {
        let Some(Value::Array(branches)) = schema.shift_remove(keyword) else {
            continue;
        };
        if branches.len() > MAX_ALTERNATIVES {
            return Err(too_complex());
        }
        let is_any = !branches.is_empty();
        let mut merged = Vec::new();
        for branch in branches {
            let Value::Object(branch) = branch else {
                continue;
            };
            let mut branch = merge_alternatives(branch, root, level + 1, copied_bytes)?;
            if check_type(&mut branch).is_ok() {
                merged.push(branch);
            }
        }
        if merged.is_empty() && is_any && keyword != "allOf" {
            return Err("none of its schema's alternatives is an object".to_owned());
        }
        let mut required = required_names(&schema);
        required.extend(match keyword {
            "allOf" => merged.iter().flat_map(required_names).collect(),
            _ => common(merged.iter().map(required_names)),
        });
        let combined = if keyword == "allOf" { "allOf" } else { "anyOf" };
        for branch in merged {
            add_branch(&mut schema, branch, combined);
        }
        if !required.is_empty() {
            schema.insert("required".to_owned(), required.into_iter().collect());
        }
    }
    Ok(schema)
}

/// Adds what a branch describes. A property that both have has to be as one or as both of them say, as `combined` means.
fn add_branch(schema: &mut Map<String, Value>, mut branch: Map<String, Value>, combined: &str) {
    if let Some(Value::Object(added)) = branch.shift_remove("properties") {
        let mut properties = match schema.shift_remove("properties") {
            Some(Value::Object(properties)) => properties,
            _ => Map::new(),
        };
        for (name, value) in added {
            match properties.get_mut(&name) {
                None => drop(properties.insert(name, value)),
                Some(present) if *present == value => {}
                Some(present) => match present.get_mut(combined).and_then(Value::as_array_mut) {
                    Some(schemas) if schemas.contains(&value) => {}
                    Some(schemas) if schemas.len() < MAX_ALTERNATIVES => schemas.push(value),
                    Some(_) => {}
                    None => *present = json!({combined: [present.take(), value]}),
                },
            }
        }
        schema.insert("properties".to_owned(), Value::Object(properties));
    }
    for key in ["$defs", "definitions", "description"] {
        if let Some(value) = branch.shift_remove(key) {
            schema.entry(key).or_insert(value);
        }
    }
}

fn required_names(schema: &Map<String, Value>) -> BTreeSet<String> {
    let names = schema.get("required").and_then(Value::as_array);
    let names = names.into_iter().flatten();
    names.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The names that are in all sets.
fn common(sets: impl Iterator<Item = BTreeSet<String>>) -> BTreeSet<String> {
    sets.reduce(|common, names| &common & &names)
        .unwrap_or_default()
}

/// Removes from a schema what is no schema where one has to be, and moves what is misplaced.
fn repair_schema(schema: &mut Map<String, Value>) {
    let mut required = repair_properties(schema);
    match schema.get_mut("required").map(Value::take) {
        Some(Value::Array(names)) => {
            let names = names.into_iter().filter(Value::is_string);
            required.splice(0..0, names);
        }
        Some(Value::String(name)) => required.insert(0, name.into()),
        _ => {}
    }
    let mut seen = BTreeSet::new();
    required.retain(|name| seen.insert(name.to_string()));
    match required.is_empty() {
        true => drop(schema.shift_remove("required")),
        false => drop(schema.insert("required".to_owned(), required.into())),
    }
    repair_type(schema);
    for key in [
        "title",
        "description",
        "$schema",
        "format",
        "pattern",
        "$ref",
    ] {
        if schema.get(key).is_some_and(|it| !it.is_string()) {
            schema.shift_remove(key);
        }
    }
    let values = schema.get("enum").map(Value::as_array);
    if values.is_some_and(|values| values.is_none_or(Vec::is_empty)) {
        schema.shift_remove("enum");
    }
    for key in WITH_SCHEMA {
        match schema.get_mut(key) {
            Some(Value::Object(part)) => repair_schema(part),
            // A list of schemas, one for each item.
            Some(Value::Array(parts)) if key == "items" => repair_list(parts),
            None | Some(Value::Bool(_)) => {}
            Some(_) => drop(schema.shift_remove(key)),
        }
    }
    for key in WITH_LIST {
        match schema.get_mut(key) {
            Some(Value::Array(parts)) if !parts.is_empty() => repair_list(parts),
            None => {}
            Some(_) => drop(schema.shift_remove(key)),
        }
    }
    for key in WITH_NAMES.into_iter().chain(["$defs"]) {
        match schema.get_mut(key) {
            Some(Value::Object(parts)) => parts.values_mut().for_each(repair_part),
            None => {}
            Some(_) => drop(schema.shift_remove(key)),
        }
    }
    let is_list = schema.get("type").is_some_and(|kind| kind == "array");
    if is_list && !schema.contains_key("items") && !schema.contains_key("prefixItems") {
        schema.insert("items".to_owned(), json!({}));
    }
}

/// Makes the properties schemas by name. Returns the names that are required by what is misplaced: `required` within the
/// properties, or true within one of them.
fn repair_properties(schema: &mut Map<String, Value>) -> Vec<Value> {
    let mut required = Vec::new();
    let mut properties = match schema.get_mut("properties").map(Value::take) {
        None => return required,
        Some(Value::Object(properties)) => properties,
        Some(Value::Array(list)) => list.into_iter().filter_map(named_property).collect(),
        Some(_) => Map::new(),
    };
    if let Some(Value::Array(names)) = properties.get("required") {
        required.extend(names.iter().filter(|name| name.is_string()).cloned());
        properties.shift_remove("required");
    }
    for (name, property) in &mut properties {
        if property.get("required") == Some(&Value::Bool(true)) {
            required.push(name.clone().into());
        }
        repair_part(property);
    }
    schema.insert("properties".to_owned(), Value::Object(properties));
    required
}

/// A property of a list, which names each.
fn named_property(mut property: Value) -> Option<(String, Value)> {
    let name = property.as_object_mut()?.shift_remove("name")?;
    Some((name.as_str()?.to_owned(), property))
}

fn repair_list(parts: &mut [Value]) {
    parts.iter_mut().for_each(repair_part);
}

/// Repairs a schema within another one. A value that is no schema becomes one that accepts everything.
fn repair_part(part: &mut Value) {
    match part {
        Value::Object(schema) => repair_schema(schema),
        Value::Bool(_) => {}
        Value::String(text) => {
            *part = match type_name(text) {
                Some(kind) => json!({"type": kind}),
                None => json!({"description": text}),
            }
        }
        _ => *part = json!({}),
    }
}

/// Replaces names of types by those of JSON Schema, and removes what names none.
fn repair_type(schema: &mut Map<String, Value>) {
    let kind = match schema.get("type") {
        None => return,
        Some(Value::String(kind)) => type_name(kind).map(Value::from),
        Some(Value::Array(kinds)) => {
            let kinds = kinds.iter().filter_map(Value::as_str).filter_map(type_name);
            let kinds: Vec<Value> = kinds.map(Value::from).collect();
            (!kinds.is_empty()).then(|| kinds.into())
        }
        Some(_) => None,
    };
    match kind {
        Some(kind) => drop(schema.insert("type".to_owned(), kind)),
        None => drop(schema.shift_remove("type")),
    }
}

/// The name of a type in JSON Schema.
fn type_name(kind: &str) -> Option<&'static str> {
    Some(match kind.to_ascii_lowercase().as_str() {
        "string" | "str" | "text" => "string",
        "integer" | "int" => "integer",
        "number" | "float" | "double" => "number",
        "boolean" | "bool" => "boolean",
        "object" | "dict" | "map" => "object",
        "array" | "list" => "array",
        "null" | "none" => "null",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::repair_arguments;

    fn repaired(schema: Value) -> Result<Value, String> {
        let Value::Object(mut schema) = schema else {
            panic!("no object");
        };
        repair_arguments(&mut schema)?;
        Ok(Value::Object(schema))
    }

    #[test]
    fn schemas_become_those_of_plain_objects() {
        let text = json!({"type": "string"});
        let plain = json!({"type": "object", "properties": {"a": text}});
        let requires = json!({"type": "object", "properties": {"a": text}, "required": ["a"]});
        for (schema, expected) in [
            (json!({}), json!({"type": "object", "properties": {}})),
            (
                json!({"type": null, "properties": []}),
                json!({"type": "object", "properties": {}}),
            ),
            (
                json!({"type": ["object", "null"], "properties": null}),
                json!({"type": "object", "properties": {}}),
            ),
            (
                json!({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}),
                plain.clone(),
            ),
            (
                json!({"properties": {"a": "string"}, "required": null}),
                plain.clone(),
            ),
            (
                json!({"properties": {"a": text}, "required": true}),
                plain.clone(),
            ),
            (
                json!({"properties": {"a": text}, "required": {"a": true}}),
                plain.clone(),
            ),
            (
                json!({"properties": {"a": text}, "required": "a"}),
                requires.clone(),
            ),
            (
                json!({"properties": {"a": text}, "required": ["a", null, "a"]}),
                requires.clone(),
            ),
            (
                json!({"properties": {"a": text, "required": ["a"]}}),
                requires.clone(),
            ),
            (
                json!({"properties": {"a": {"type": "string", "required": true}}}),
                requires.clone(),
            ),
            (
                json!({"properties": [{"name": "a", "type": "str"}]}),
                plain.clone(),
            ),
            (
                json!({"properties": {"a": null}}),
                json!({"type": "object", "properties": {"a": {}}}),
            ),
            (
                json!({"properties": {"a": text}, "enum": [], "not": {}, "description": 5}),
                plain.clone(),
            ),
            (
                json!({"properties": {"a": {"type": "array"}}}),
                json!({"type": "object", "properties": {"a": {"type": "array", "items": {}}}}),
            ),
            (
                json!({"properties": {"a": {"items": {"properties": [], "required": false}}}}),
                json!({"type": "object", "properties": {"a": {"items": {"properties": {}}}}}),
            ),
        ] {
            assert_eq!(repaired(schema.clone()), Ok(expected), "{schema}");
        }
    }

    #[test]
    fn alternatives_at_the_top_are_merged() {
        let (text, number) = (json!({"type": "string"}), json!({"type": "number"}));
        let with = |name: &str, schema: &Value| json!({"type": "object", "properties": {name: schema}, "required": [name]});
        for (schema, expected) in [
            (
                json!({"anyOf": [with("a", &text), with("b", &number)]}),
                json!({"properties": {"a": text, "b": number}, "type": "object"}),
            ),
            (
                json!({"oneOf": [with("a", &text), {"type": "null"}]}),
                with("a", &text),
            ),
            (
                json!({"allOf": [with("a", &text), with("b", &number)]}),
                json!({"type": "object", "properties": {"a": text, "b": number}, "required": ["a", "b"]}),
            ),
            (
                json!({"type": "object", "properties": {"a": text}, "anyOf": [{"required": ["a"]}, {"required": ["b", "a"]}]}),
                with("a", &text),
            ),
            (
                json!({"oneOf": [with("a", &text), with("a", &number)]}),
                with("a", &json!({"anyOf": [text, number]})),
            ),
            (
                json!({"$ref": "#/$defs/A", "$defs": {"A": with("a", &text)}}),
                json!({"$defs": {"A": with("a", &text)}, "type": "object", "properties": {"a": text}, "required": ["a"]}),
            ),
            (
                json!({"anyOf": [{"$ref": "#/definitions/A"}], "definitions": {"A": with("a", &text)}}),
                json!({"definitions": {"A": with("a", &text)}, "type": "object", "properties": {"a": text}, "required": ["a"]}),
            ),
            (
                json!({"anyOf": [], "oneOf": null}),
                json!({"type": "object", "properties": {}}),
            ),
            (
                json!({"$ref": "#"}),
                json!({"type": "object", "properties": {}}),
            ),
        ] {
            assert_eq!(repaired(schema.clone()), Ok(expected), "{schema}");
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        let why = repaired(json!({"type": "array"}));
        let expected = "its schema has the type \"array\", and models send objects only";
        assert_eq!(why, Err(expected.to_owned()));
        let why = repaired(json!({"anyOf": [{"type": "string"}, {"type": "null"}]}));
        let expected = "none of its schema's alternatives is an object";
        assert_eq!(why, Err(expected.to_owned()));
        // Each level would double the work.
        let twice = |name: &str| json!({"anyOf": [{"$ref": format!("#/$defs/{name}")}, {"$ref": format!("#/$defs/{name}")}]});
        let many: serde_json::Map<String, Value> =
            (0..10_000).map(|at| (at.to_string(), json!({}))).collect();
        let schema = json!({"$ref": "#/$defs/a", "$defs": {
            "a": twice("b"), "b": twice("c"), "c": twice("d"), "d": {"properties": many},
        }});
        let why = repaired(schema).expect_err("too much work");
        assert_eq!(why, "its schema has too many alternatives");
    }

    #[test]
    fn good_schemas_stay_as_they_are() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "required": {"type": "boolean"},
                "kind": {"enum": ["a", null], "default": {"properties": []}},
                "one": {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
                "any": true,
                "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1},
            },
            "required": ["kind"],
            "additionalProperties": false,
            "$defs": {"item": {"type": "object", "additionalProperties": {"type": "string"}}},
        });
        let text = schema.to_string();
        assert_eq!(repaired(schema).expect("a schema").to_string(), text);
    }
}
