//! Writes the body of a request, with the `extra` settings merged into it.

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::providers::{ChatRequest, ErrorCategory, ProviderError, wire_json};

/// Writes the body as JSON and merges the model's `extra` and then the request's `extra` into it.
///
/// # Errors
/// The body cannot be written as JSON, or `extra` cannot be merged into it.
pub fn serialize_with_extra(
    body: &impl Serialize,
    request: &ChatRequest<'_>,
) -> Result<Vec<u8>, ProviderError> {
    let json = wire_json::serialize(body)?;
    let model_extra = request.facts.map(|facts| &facts.extra);
    let extras: Vec<_> = model_extra
        .into_iter()
        .chain([&request.params.extra])
        .filter(|extra| !extra.is_empty())
        .collect();
    if extras.is_empty() {
        return Ok(json);
    }
    let merge_error = |error: serde_json::Error| {
        let message = format!("extra cannot be merged into the request: {error}");
        ProviderError::new(ErrorCategory::BadRequest, message)
    };
    let mut body: Box<RawValue> = serde_json::from_slice(&json).map_err(merge_error)?;
    for extra in extras {
        body = merge(&body, extra).map_err(merge_error)?;
    }
    Ok(String::from(Box::<str>::from(body)).into_bytes())
}

/// Merges objects key by key. Keys that `extra` does not name keep their bytes and position, so that cached prefixes match.
fn merge(body: &RawValue, extra: &Map<String, Value>) -> Result<Box<RawValue>, serde_json::Error> {
    let mut fields: IndexMap<String, Box<RawValue>> = serde_json::from_str(body.get())?;
    for (key, value) in extra {
        let inner = fields.get(key).filter(|field| field.get().starts_with('{'));
        let merged = match (inner, value) {
            (Some(field), Value::Object(extra)) => merge(field, extra)?,
            _ => to_raw_value(value)?,
        };
        fields.insert(key.clone(), merged);
    }
    to_raw_value(&fields)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use serde_json::value::RawValue;

    use super::merge;

    #[test]
    fn objects_merge_key_by_key_and_other_keys_keep_their_bytes() {
        let body = r#"{"model":"m","options":{"top_k": 1.50,"seed":1},"tools":[ 1 ]}"#;
        let body = RawValue::from_string(body.to_owned()).expect("JSON");
        let extra = json!({"options": {"seed": 2, "min_p": 0.1}, "tools": {"a": 1}, "new": null});
        let merged = merge(&body, extra.as_object().expect("an object")).expect("JSON");
        assert_eq!(
            merged.get(),
            r#"{"model":"m","options":{"top_k":1.50,"seed":2,"min_p":0.1},"tools":{"a":1},"new":null}"#
        );
    }
}
