//! Schemas of a document as one JSON Schema: what it refers to becomes `$defs`, so that cycles stay finite.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::domain::openapi::document::Document;

/// The deepest nesting of one schema.
const MAX_DEPTH: usize = 64;
/// The most values of all schemas of one operation.
const MAX_VALUES: usize = 20_000;
/// The most schemas that those of one operation refer to.
const MAX_DEFINITIONS: usize = 300;

/// Keywords that say nothing about values, or change how references are read.
const DROPPED: [&str; 16] = [
    "$anchor",
    "$comment",
    "$dynamicAnchor",
    "$id",
    "$schema",
    "$vocabulary",
    "deprecated",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];
/// Keywords with one schema.
const SCHEMAS: [&str; 11] = [
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Keywords with a list of schemas.
const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords with schemas by name.
const MAPS: [&str; 4] = [
    "dependentSchemas",
    "patternProperties",
    "properties",
    "definitions",
];

pub struct Translator<'d> {
    document: &'d Document,
    /// Patterns that no linear matcher knows are left to the service.
    keeps_patterns: bool,
    /// The names of definitions by their references.
    names: BTreeMap<String, String>,
    taken: BTreeSet<String>,
    pending: Vec<String>,
    values: usize,
}

impl<'d> Translator<'d> {
    pub fn new(document: &'d Document, keeps_patterns: bool) -> Self {
        Self {
            document,
            keeps_patterns,
            names: BTreeMap::new(),
            taken: BTreeSet::new(),
            pending: Vec::new(),
            values: 0,
        }
    }

    /// # Errors
    /// A reference that leads nowhere, or a limit.
    pub fn translate(&mut self, schema: &Value) -> Result<Value, String> {
        self.schema(schema, 0)
    }

    /// The definitions that the translated schemas refer to.
    ///
    /// # Errors
    /// As [`Translator::translate`].
    pub fn definitions(mut self) -> Result<Map<String, Value>, String> {
        let mut definitions = Map::new();
        while let Some(reference) = self.pending.pop() {
            let target = self.document.find(&reference)?;
            let schema = self.schema(target, 0)?;
            let name = self.names.get(&reference).cloned().unwrap_or_default();
            definitions.insert(name, schema);
        }
        Ok(definitions)
    }

    fn schema(&mut self, schema: &Value, depth: usize) -> Result<Value, String> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(format!("its schemas have over {MAX_VALUES} values"));
        }
        if depth > MAX_DEPTH {
            return Err(format!(
                "its schemas are nested deeper than {MAX_DEPTH} levels"
            ));
        }
        let Some(fields) = schema.as_object() else {
            return match schema.is_boolean() {
                true => Ok(schema.clone()),
                false => Err("it has a schema that is no object".to_owned()),
            };
        };
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            let mut translated = Map::new();
            translated.insert("$ref".to_owned(), self.refer_to(reference)?);
            let text = fields.get("description").filter(|it| it.is_string());
            translated.extend(text.map(|it| ("description".to_owned(), it.clone())));
            return Ok(Value::Object(translated));
        }
        if fields.contains_key("$dynamicRef") {
            return Err("its schemas have a $dynamicRef, which is not read".to_owned());
        }
        let mut translated = Map::new();
        for (key, value) in fields {
            let key = key.as_str();
            if DROPPED.contains(&key) || key.starts_with("x-") {
                continue;
            }
            if let Some(value) = self.keyword(key, value, depth)? {
                translated.insert(key.to_owned(), value);
            }
        }
        drop_read_only(fields, &mut translated);
        if self.document.is_version_3_0 {
            modernize(fields, &mut translated);
        }
        Ok(Value::Object(translated))
    }

    /// `None` if the keyword is left out.
    fn keyword(&mut self, key: &str, value: &Value, depth: usize) -> Result<Option<Value>, String> {
        if matches!(key, "pattern" | "patternProperties") && !self.keeps_patterns {
            return Ok(None);
        }
        if SCHEMAS.contains(&key) {
            return self.schema(value, depth + 1).map(Some);
        }
        if LISTS.contains(&key) {
            let items = value
                .as_array()
                .ok_or_else(|| format!("{key} is no list"))?;
            let items = items.iter().map(|item| self.schema(item, depth + 1));
            return Ok(Some(Value::Array(items.collect::<Result<_, _>>()?)));
        }
        if MAPS.contains(&key) {
            let fields = value.as_object();
            let fields = fields.ok_or_else(|| format!("{key} is no object"))?;
            let fields = fields.iter().map(|(name, schema)| {
                let schema = self.schema(schema, depth + 1)?;
                Ok::<_, String>((name.clone(), schema))
            });
            return Ok(Some(Value::Object(fields.collect::<Result<_, _>>()?)));
        }
        self.values += count(value, MAX_VALUES);
        Ok(Some(value.clone()))
    }

    /// The reference to a definition, which is translated later.
    fn refer_to(&mut self, reference: &str) -> Result<Value, String> {
        // Checked at once, so that nothing is kept for a wrong one.
        self.document.find(reference)?;
        if !self.names.contains_key(reference) {
            if self.names.len() >= MAX_DEFINITIONS {
                return Err(format!(
                    "its schemas refer to over {MAX_DEFINITIONS} others"
                ));
            }
            let last = reference.rsplit('/').next().unwrap_or_default();
            let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
            let base: String = last.chars().take(60).map(plain).collect();
            let mut name = base.clone();
            let mut number = 2;
            while !self.taken.insert(name.clone()) {
                name = format!("{base}{number}");
                number += 1;
            }
            self.names.insert(reference.to_owned(), name);
            self.pending.push(reference.to_owned());
        }
        let name = self.names.get(reference).map_or("", String::as_str);
        Ok(json!(format!("#/$defs/{name}")))
    }
}

/// The number of values, up to a limit.
fn count(value: &Value, max: usize) -> usize {
    let mut pending = vec![value];
    let mut found = 0;
    while let Some(value) = pending.pop() {
        found += 1;
        if found > max {
            break;
        }
        match value {
            Value::Array(items) => pending.extend(items),
            Value::Object(fields) => pending.extend(fields.values()),
            _ => {}
        }
    }
    found
}

/// Fields that only responses have are no arguments.
fn drop_read_only(original: &Map<String, Value>, translated: &mut Map<String, Value>) {
    let fields = original.get("properties").and_then(Value::as_object);
    let is_read_only = |schema: &Value| schema.get("readOnly") == Some(&Value::Bool(true));
    let read_only = fields
        .into_iter()
        .flatten()
        .filter(|(_, it)| is_read_only(it));
    let read_only: BTreeSet<&str> = read_only.map(|(name, _)| name.as_str()).collect();
    if read_only.is_empty() {
        return;
    }
    if let Some(Value::Object(properties)) = translated.get_mut("properties") {
        properties.retain(|name, _| !read_only.contains(name.as_str()));
    }
    if let Some(Value::Array(required)) = translated.get_mut("required") {
        required.retain(|name| name.as_str().is_none_or(|name| !read_only.contains(name)));
    }
}

/// Writes what OpenAPI 3.0 says otherwise as JSON Schema does.
fn modernize(original: &Map<String, Value>, schema: &mut Map<String, Value>) {
    for (exclusive, bound) in [
        ("exclusiveMinimum", "minimum"),
        ("exclusiveMaximum", "maximum"),
    ] {
        match schema.get(exclusive) {
            Some(Value::Bool(true)) => {
                let value = schema.shift_remove(bound);
                schema.shift_remove(exclusive);
                schema.extend(value.map(|value| (exclusive.to_owned(), value)));
            }
            Some(Value::Bool(false)) => drop(schema.shift_remove(exclusive)),
            _ => {}
        }
    }
    if original.get("nullable") != Some(&Value::Bool(true)) {
        return;
    }
    if let Some(Value::Array(values)) = schema.get_mut("enum")
        && !values.contains(&Value::Null)
    {
        values.push(Value::Null);
    }
    if let Some(kind @ Value::String(_)) = schema.get_mut("type") {
        *kind = json!([kind.clone(), "null"]);
    }
}
