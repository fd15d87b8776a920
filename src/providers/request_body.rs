//! Writes a request's body, with `extra` merged into it. Knows no service's JSON.

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::providers::{ChatRequest, ErrorCategory, ProviderError, wire_json};

/// The body as JSON, with what the configuration and the request merge into it last.
///
/// # Errors
/// A body that cannot be JSON, or that `extra` cannot be merged into.
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

/// Merges objects key by key. What `extra` does not name keeps its bytes and its place, so that prefixes stay equal.
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
    fn objects_merge_key_by_key_and_the_rest_keeps_its_bytes() {
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
