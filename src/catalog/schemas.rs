//! JSON Schemas in agent files: tables, or JSON text.

use std::sync::Arc;

use serde_json::value::RawValue;

use crate::config::document::{Node, Value};
use crate::validation;

/// A schema of objects.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn read_object_schema(node: &Node) -> Result<Arc<RawValue>, String> {
    let schema = read_schema(node)?;
    let parsed: serde_json::Value = serde_json::from_str(schema.get()).unwrap_or_default();
    match parsed.get("type").and_then(serde_json::Value::as_str) {
        Some("object") => Ok(schema),
        _ => Err("must have type = \"object\": its properties are the fields".to_owned()),
    }
}

/// A JSON Schema as a table or as JSON text.
pub fn read_schema(node: &Node) -> Result<Arc<RawValue>, String> {
    let schema = match &node.value {
        Value::Table(_) => node.to_json(),
        Value::String(text) => {
            serde_json::from_str(text).map_err(|error| format!("is text, but no JSON: {error}"))?
        }
        _ => return Err("must be a table, or JSON text".to_owned()),
    };
    if !schema.is_object() {
        return Err("must be a JSON object".to_owned());
    }
    let raw = serde_json::value::to_raw_value(&schema).map_err(|error| error.to_string())?;
    let schema = validation::compile_schema_blocking(Arc::from(raw))
        .map_err(|why| format!("is no JSON Schema: {why}"))?;
    Ok(Arc::clone(schema.raw()))
}
