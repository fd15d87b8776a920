//! `[params.response_format]`: the format of a run's final text.

use std::borrow::Cow;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// `[params.response_format]`: the format of the final text, in files and requests:
/// `{"type": "json_schema", "schema": {…}}`.
#[derive(Clone, Debug, Default)]
pub enum ResponseFormat {
    /// Free text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that matches this JSON Schema.
    JsonSchema(Arc<RawValue>),
}

/// The format of a run's final text.
#[derive(Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseFormat")]
struct ResponseFormatRepr {
    /// The kind of format.
    r#type: FormatKind,
    /// The JSON Schema of the final text, for `json_schema` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    schema: Option<Arc<RawValue>>,
}

/// The kind of a format.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseFormatType")]
#[serde(rename_all = "snake_case")]
pub enum FormatKind {
    /// Free text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that matches a JSON Schema.
    JsonSchema,
}

impl Serialize for ResponseFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (r#type, schema) = match self {
            Self::Text => (FormatKind::Text, None),
            Self::JsonObject => (FormatKind::JsonObject, None),
            Self::JsonSchema(schema) => (FormatKind::JsonSchema, Some(Arc::clone(schema))),
        };
        ResponseFormatRepr { r#type, schema }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ResponseFormat {
    /// Definitions of older releases have `"text"`, `"json_object"` or `{"json_schema": {…}}`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum LegacyFormat {
            Text,
            JsonObject,
            JsonSchema(Arc<RawValue>),
        }
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        if let Ok(repr) = serde_json::from_str::<ResponseFormatRepr>(raw.get()) {
            return match (repr.r#type, repr.schema) {
                (FormatKind::Text, _) => Ok(Self::Text),
                (FormatKind::JsonObject, _) => Ok(Self::JsonObject),
                (FormatKind::JsonSchema, Some(schema)) => Ok(Self::JsonSchema(schema)),
                (FormatKind::JsonSchema, None) => Err(D::Error::missing_field("schema")),
            };
        }
        match serde_json::from_str(raw.get()).map_err(D::Error::custom)? {
            LegacyFormat::Text => Ok(Self::Text),
            LegacyFormat::JsonObject => Ok(Self::JsonObject),
            LegacyFormat::JsonSchema(schema) => Ok(Self::JsonSchema(schema)),
        }
    }
}

impl JsonSchema for ResponseFormat {
    fn schema_name() -> Cow<'static, str> {
        ResponseFormatRepr::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        ResponseFormatRepr::json_schema(generator)
    }
}

#[cfg(test)]
mod tests {
    use super::ResponseFormat;

    #[test]
    fn a_response_format_reads_as_it_is_written() {
        let schema = r#"{"type":"json_schema","schema":{"b":1.50,"a":{}}}"#;
        for (text, written) in [
            (r#"{"type":"text"}"#, r#"{"type":"text"}"#),
            (r#""text""#, r#"{"type":"text"}"#),
            (r#""json_object""#, r#"{"type":"json_object"}"#),
            (schema, schema),
            (r#"{"json_schema":{"b":1.50,"a":{}}}"#, schema),
        ] {
            let format: ResponseFormat = serde_json::from_str(text).expect("a format");
            assert_eq!(serde_json::to_string(&format).expect("JSON"), written);
        }
        assert!(serde_json::from_str::<ResponseFormat>(r#"{"type":"json_schema"}"#).is_err());
    }
}
