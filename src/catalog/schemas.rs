//! Compiles the JSON Schemas of agent files.

use std::sync::Arc;

use serde_json::value::RawValue;

use crate::validation;

/// Checks that it is a JSON Schema.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn compile(schema: Arc<RawValue>) -> Result<Arc<RawValue>, String> {
    let compiled = validation::compile_schema_blocking(schema);
    let schema = compiled.map_err(|why| format!("is no JSON Schema: {why}"))?;
    Ok(Arc::clone(schema.raw()))
}
