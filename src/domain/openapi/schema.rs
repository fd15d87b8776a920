//! Schemas of a document as one JSON Schema: what it refers to becomes `$defs`, so that cycles stay finite.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::domain::json_schema::keywords::{WITH_LIST, WITH_NAMES, WITH_SCHEMA};
use crate::domain::json_schema::limits::MAX_SCHEMA_BYTES;
use crate::domain::openapi::document::{Document, decode};

/// The deepest nesting of one schema.
const MAX_DEPTH: usize = 64;
/// The most values of all schemas of one operation.
const MAX_VALUES: usize = 20_000;
/// The most bytes of keys and texts in all schemas of one operation. Some are left out in the end, such as fields that are
/// only read, so this is more than one schema may have.
const MAX_BYTES: usize = 4 * MAX_SCHEMA_BYTES;
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

pub struct Translator<'d> {
    document: &'d Document,
    /// Patterns that no linear matcher knows are left to the service.
    keeps_patterns: bool,
    /// The names of definitions by their references, without percent-encoding.
    names: BTreeMap<String, String>,
    taken: BTreeSet<String>,
    /// Definitions that are not translated yet, with their names.
    pending: Vec<(String, &'d Value)>,
    values: usize,
    bytes: usize,
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
            bytes: 0,
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
        while let Some((name, target)) = self.pending.pop() {
            let schema = self.schema(target, 0)?;
            definitions.insert(name, schema);
        }
        Ok(definitions)
    }

    fn schema(&mut self, schema: &Value, depth: usize) -> Result<Value, String> {
        self.count(1, 0)?;
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
            if let Some(text) = fields.get("description").filter(|it| it.is_string()) {
                translated.insert("description".to_owned(), self.copy(text)?);
            }
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
                self.count(0, key.len())?;
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
        if WITH_SCHEMA.contains(&key) {
            return self.schema(value, depth + 1).map(Some);
        }
        if WITH_LIST.contains(&key) {
            let items = value
                .as_array()
                .ok_or_else(|| format!("{key} is no list"))?;
            let items = items.iter().map(|item| self.schema(item, depth + 1));
            return Ok(Some(Value::Array(items.collect::<Result<_, _>>()?)));
        }
        if key == "properties" || WITH_NAMES.contains(&key) {
            let fields = value.as_object();
            let fields = fields.ok_or_else(|| format!("{key} is no object"))?;
            let fields = fields.iter().map(|(name, schema)| {
                let schema = self.schema(schema, depth + 1)?;
                self.count(0, name.len())?;
                Ok::<_, String>((name.clone(), schema))
            });
            return Ok(Some(Value::Object(fields.collect::<Result<_, _>>()?)));
        }
        self.copy(value).map(Some)
    }

    fn copy(&mut self, value: &Value) -> Result<Value, String> {
        let (values, bytes) = measure(value);
        self.count(values, bytes)?;
        Ok(value.clone())
    }

    fn count(&mut self, values: usize, bytes: usize) -> Result<(), String> {
        self.values += values;
        if self.values > MAX_VALUES {
            return Err(format!("its schemas have over {MAX_VALUES} values"));
        }
        self.bytes += bytes;
        if self.bytes > MAX_BYTES {
            return Err(format!("its schemas have over {MAX_BYTES} bytes"));
        }
        Ok(())
    }

    /// The reference to a definition, which is translated later.
    fn refer_to(&mut self, reference: &str) -> Result<Value, String> {
        let document = self.document;
        // Checked at once, so that nothing is kept for a wrong one.
        let target = document.find(reference)?;
        let decoded = decode(reference);
        if !self.names.contains_key(&decoded) {
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
            self.count(0, decoded.len())?;
            self.names.insert(decoded.clone(), name.clone());
            self.pending.push((name, target));
        }
        let name = self.names.get(&decoded).cloned().unwrap_or_default();
        self.count(0, name.len())?;
        Ok(json!(format!("#/$defs/{name}")))
    }
}

/// The number of values, up to a limit, and the bytes of their keys and texts.
fn measure(value: &Value) -> (usize, usize) {
    let mut pending = vec![value];
    let (mut values, mut bytes) = (0, 0);
    while let Some(value) = pending.pop() {
        values += 1;
        if values > MAX_VALUES {
            break;
        }
        match value {
            Value::String(text) => bytes += text.len(),
            Value::Array(items) => pending.extend(items),
            Value::Object(fields) => {
                bytes += fields.keys().map(String::len).sum::<usize>();
                pending.extend(fields.values());
            }
            _ => {}
        }
    }
    (values, bytes)
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{MAX_BYTES, Translator};
    use crate::domain::openapi::document::Document;

    fn document(schemas: &Value) -> Document {
        let document = json!({"openapi": "3.1.0", "components": {"schemas": schemas}});
        Document::parse(&document.to_string()).expect("a document")
    }

    #[test]
    fn spellings_of_one_reference_are_one_definition() {
        let document = document(&json!({"Pet": {"type": "string"}}));
        let mut translator = Translator::new(&document, true);
        let references = json!({"anyOf": [
            {"$ref": "#/components/schemas/Pet"},
            {"$ref": "#/components/schemas/%50et"},
            {"$ref": "#/components/%73chemas/Pe%74"},
        ]});
        let translated = translator.translate(&references).expect("a schema");
        let reference = json!({"$ref": "#/$defs/Pet"});
        assert_eq!(
            translated,
            json!({"anyOf": [reference, reference, reference]})
        );
        let definitions = translator.definitions().expect("definitions");
        assert_eq!(
            Value::Object(definitions),
            json!({"Pet": {"type": "string"}})
        );
    }

    #[test]
    fn the_bytes_of_all_schemas_are_bounded() {
        let text = "x".repeat(MAX_BYTES / 4);
        let document = document(&json!({"Long": {"description": text}}));
        let long = json!({"$ref": "#/components/schemas/Long", "description": text});
        let mut values = json!({});
        values[text.as_str()] = json!(1);
        let mut properties = json!({});
        properties[text.as_str()] = json!({});
        for schema in [
            json!({"anyOf": [long, long, long, long]}),
            json!({"enum": [text, text, text, text, text]}),
            json!({"default": [values, values, values, values, values]}),
            json!({"allOf": (0..5).map(|_| json!({"properties": properties})).collect::<Vec<_>>()}),
        ] {
            let mut translator = Translator::new(&document, true);
            let translated = translator.translate(&schema);
            let error = translated
                .and_then(|_| translator.definitions())
                .expect_err("too many bytes");
            assert_eq!(error, "its schemas have over 1048576 bytes");
        }
        let mut translator = Translator::new(&document, true);
        translator.translate(&long).expect("a schema");
        assert_eq!(translator.definitions().expect("definitions").len(), 1);
    }
}
