//! `[params.response_format]`: the format of a run's final text.

use std::borrow::Cow;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::settings::choice::choice;
use crate::settings::kinds::read_schema;
use crate::settings::section::{Audience, Kind};
use crate::settings::table_reader::TableReader;

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

choice! {
    /// The kind of a format.
    #[derive(Default)]
    #[schemars(rename = "ResponseFormatType")]
    pub enum FormatKind {
        /// Free text.
        #[default]
        Text = "text",
        /// Any JSON object.
        JsonObject = "json_object",
        /// JSON that matches a JSON Schema.
        JsonSchema = "json_schema",
    }
}

/// The table of a format.
pub struct Format;

impl Kind<ResponseFormat> for Format {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut ResponseFormat) {
        *value = table.nested(key, |table| {
            let kind = table.choice("type").unwrap_or_default();
            let schema = table.take_node("schema");
            match (kind, schema) {
                (FormatKind::Text, None) => ResponseFormat::Text,
                (FormatKind::JsonObject, None) => ResponseFormat::JsonObject,
                (FormatKind::JsonSchema, None) => {
                    table.push_missing("schema", "is required when type is json_schema");
                    ResponseFormat::Text
                }
                (FormatKind::JsonSchema, Some(node)) => match read_schema(&node) {
                    Ok(schema) => ResponseFormat::JsonSchema(schema),
                    Err(why) => {
                        table.push_invalid(&node, "schema", &why);
                        ResponseFormat::Text
                    }
                },
                (FormatKind::Text | FormatKind::JsonObject, Some(node)) => {
                    table.push_invalid(&node, "schema", "is only for type = \"json_schema\"");
                    ResponseFormat::Text
                }
            }
        });
    }

    /// Clients do not see the default.
    fn show(&self, value: &ResponseFormat, audience: Audience) -> Value {
        match (value, audience) {
            (ResponseFormat::Text, Audience::Client) => Value::Null,
            _ => json!(value),
        }
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        generator.subschema_for::<ResponseFormat>().to_value()
    }
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
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let repr = ResponseFormatRepr::deserialize(deserializer)?;
        match (repr.r#type, repr.schema) {
            (FormatKind::Text, _) => Ok(Self::Text),
            (FormatKind::JsonObject, _) => Ok(Self::JsonObject),
            (FormatKind::JsonSchema, Some(schema)) => Ok(Self::JsonSchema(schema)),
            (FormatKind::JsonSchema, None) => Err(D::Error::missing_field("schema")),
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
            (schema, schema),
        ] {
            let format: ResponseFormat = serde_json::from_str(text).expect("a format");
            assert_eq!(serde_json::to_string(&format).expect("JSON"), written);
        }
        assert!(serde_json::from_str::<ResponseFormat>(r#"{"type":"json_schema"}"#).is_err());
    }
}
