//! The OpenAPI document of a daemon, to check responses, and the document itself, against it.

use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp};

/// Headers that HTTP itself defines for any response.
const COMMON_HEADERS: [&str; 9] = [
    "allow",
    "cache-control",
    "connection",
    "content-length",
    "content-type",
    "date",
    "transfer-encoding",
    "vary",
    "x-accel-buffering",
];

/// The document of a daemon.
pub struct Document(pub Value);

impl Document {
    pub async fn fetch(app: &TestApp) -> Self {
        let response = app.get("/openapi.json").await;
        assert_eq!(response.status, 200, "{}", response.text);
        assert_eq!(response.header("content-type"), "application/json");
        Self(response.json())
    }

    /// Path, method and description of every operation.
    pub fn operations(&self) -> Vec<(&str, &str, &Value)> {
        let paths = self.0["paths"].as_object().expect("paths");
        paths
            .iter()
            .flat_map(|(path, item)| {
                let item = item.as_object().expect("operations");
                item.iter()
                    .map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
            })
            .collect()
    }

    /// The value that a reference leads to, or the value itself.
    pub fn resolve<'d>(&'d self, value: &'d Value) -> &'d Value {
        let Some(reference) = value["$ref"].as_str() else {
            return value;
        };
        let pointer = reference.strip_prefix('#').expect(reference);
        self.0.pointer(pointer).expect(reference)
    }

    /// Checks a response against its schema and its headers. Fields and headers that the document does not name are errors.
    pub fn check(&self, method: &str, path: &str, response: &ApiResponse) {
        let responses = &self.0["paths"][path][method]["responses"];
        let status = response.status.to_string();
        let described = responses.get(&status).unwrap_or(&responses["default"]);
        let described = self.resolve(described);
        let content_type = response.header("content-type");
        let schema = &described["content"][content_type]["schema"];
        assert!(
            schema.is_object(),
            "{method} {path}: {status} with {content_type} is not in {described}"
        );
        let value = response.json();
        let errors = self.errors(schema, &value);
        assert!(errors.is_empty(), "{method} {path}: {errors:#?}\n{value:#}");
        for name in response
            .headers
            .keys()
            .map(reqwest::header::HeaderName::as_str)
        {
            let headers = described["headers"].as_object().expect("headers");
            let is_described = headers.keys().any(|known| known.eq_ignore_ascii_case(name));
            assert!(
                is_described || COMMON_HEADERS.contains(&name),
                "{method} {path}: the header {name} of {status} is not in the document"
            );
        }
    }

    /// Why a value does not match a schema of the document, whose objects are taken to have no other fields.
    pub fn errors(&self, schema: &Value, value: &Value) -> Vec<String> {
        let mut schema = closed(schema.clone());
        let mut schemas = self.0["components"]["schemas"].clone();
        for component in schemas.as_object_mut().expect("schemas").values_mut() {
            *component = closed(component.take());
        }
        schema["components"] = json!({"schemas": schemas});
        let validator = jsonschema::options().build(&schema).expect("a schema");
        validator
            .iter_errors(value)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect()
    }
}

/// The schema of an object without fields that it does not name.
fn closed(mut schema: Value) -> Value {
    if schema["properties"].is_object() {
        schema["unevaluatedProperties"] = false.into();
    }
    schema
}
