//! `/openapi.json`: the OpenAPI 3.1 document of what is answered here, put together from the route table, from what
//! [`operations`] says of each route, and from the types that bodies are read into and written from.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::config::KeyScope;
use crate::domain::run::RunId;
use crate::web::error::Envelope;
use crate::web::router::{self, Route};
use crate::web::state::AppState;

pub mod operations;

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";
const ABOUT: &str = "\
    Serves LLM agents: an agent is a TOML file, a POST starts a run of it, agents call one another.\n\n\
    `HEAD` works where `GET` does. Every answer has `x-request-id`. An unknown or repeated parameter of a query and an \
    unknown field of a body are refused. Answers may get more fields, and events more types, in later versions.";
const BEARER: &str = "\
    A key of the daemon's configuration. Each operation names the scope that the key must have; `admin` opens all. A \
    daemon without configured keys asks nobody.";

/// `GET /openapi.json`
pub async fn get(State(state): State<AppState>) -> Response {
    let settings = &state.settings;
    let document = state
        .openapi
        .get_or_init(|| document(&settings.path_prefix, settings.metrics).into());
    ([(CONTENT_TYPE, JSON)], Bytes::clone(document)).into_response()
}

/// The document, for people to read too. `prefix` is the server's path prefix; `metrics` says whether it answers
/// `/metrics`.
pub fn document(prefix: &str, metrics: bool) -> String {
    let mut schemas = Schemas::new();
    let mut paths = Map::new();
    for route in router::table(metrics) {
        let operation = Operation::of(&route, &mut schemas);
        let told = (route.told)(operation).told();
        let operations = paths.entry(route.path).or_insert_with(|| json!({}));
        operations[route.method] = told;
    }
    let problem = json!({
        "description": "Refused (RFC 9457); `code` is stable, `detail` is for people.",
        "content": {PROBLEM: {"schema": schemas.shown::<Envelope<'static>>()}},
    });
    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "axed",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": if prefix.is_empty() { "/" } else { prefix }}],
        "paths": paths,
        "components": {
            "schemas": schemas.all(),
            "responses": {"Problem": problem},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": BEARER},
            },
        },
    });
    format!("{document:#}\n")
}

/// The schemas of all bodies. What is read and what is shown of one type may differ, so requests stand on their own.
struct Schemas {
    read: SchemaGenerator,
    shown: SchemaGenerator,
    requests: Map<String, Value>,
}

impl Schemas {
    fn new() -> Self {
        let settings = || {
            SchemaSettings::draft2020_12().with(|settings| {
                settings.meta_schema = None;
                settings.definitions_path = "/components/schemas".into();
            })
        };
        let read = settings().with(|settings| settings.inline_subschemas = true);
        Self {
            read: read.for_deserialize().into_generator(),
            shown: settings().for_serialize().into_generator(),
            requests: Map::new(),
        }
    }

    fn read<T: JsonSchema>(&mut self) -> Value {
        let name = T::schema_name();
        debug_assert!(name.ends_with("Request"), "{name} may be an answer's too");
        let mut schema = self.read.root_schema_for::<T>();
        schema.remove("title");
        self.requests.insert(name.to_string(), schema.to_value());
        json!({"$ref": format!("#/components/schemas/{name}")})
    }

    fn shown<T: JsonSchema>(&mut self) -> Value {
        self.shown.subschema_for::<T>().to_value()
    }

    /// Sorted by name.
    fn all(mut self) -> BTreeMap<String, Value> {
        let shown = self.shown.take_definitions(true);
        shown.into_iter().chain(self.requests).collect()
    }
}

/// What the document says of one route. Where a path, a query, a body and a key are, the refusals that belong to them
/// are said by themselves.
pub struct Operation<'s> {
    schemas: &'s mut Schemas,
    about: Map<String, Value>,
    parameters: Vec<Value>,
    body: Option<Value>,
    answers: BTreeMap<String, Value>,
}

impl<'s> Operation<'s> {
    fn of(route: &Route, schemas: &'s mut Schemas) -> Self {
        let mut about = Map::new();
        let first = route.path.split('/').nth(1).unwrap_or_default();
        let tag = match route.scope {
            None | Some(KeyScope::Metrics) => "daemon",
            Some(_) => first,
        };
        about.insert("tags".to_owned(), json!([tag]));
        let mut operation = Self {
            schemas,
            about,
            parameters: Vec::new(),
            body: None,
            answers: BTreeMap::new(),
        };
        let names = route.path.split('/').filter_map(|segment| {
            let name = segment.strip_prefix('{')?;
            name.strip_suffix('}')
        });
        for name in names {
            let schema = match name {
                "id" => operation.schemas.shown::<RunId>(),
                _ => json!({"type": "string"}),
            };
            operation
                .parameters
                .push(json!({"name": name, "in": "path", "required": true, "schema": schema}));
            operation.refuse(404, "It does not exist, or not for this key.");
        }
        operation.refuse(400, "`invalid_host`: no host, or several, are named.");
        let mut security = Vec::new();
        if let Some(scope) = route.scope {
            security.push(json!({"key": [scope.as_str()]}));
            operation.refuse(401, "`unauthorized`: without a key that is known.");
            operation.refuse(403, "`insufficient_scope`: the key's scopes are others.");
        }
        operation
            .about
            .insert("security".to_owned(), Value::Array(security));
        operation
    }

    /// Its name in generated clients, and what it does.
    pub fn named(mut self, id: &str, summary: &str) -> Self {
        self.about.insert("operationId".to_owned(), id.into());
        self.about.insert("summary".to_owned(), summary.into());
        self
    }

    /// A query parameter.
    pub fn query(mut self, name: &str, schema: Value, description: &str) -> Self {
        self.parameters.push(
            json!({"name": name, "in": "query", "schema": schema, "description": description}),
        );
        self.refuse(
            400,
            "A parameter, a header (such as `Host`) or the body is not in order; nothing was done.",
        );
        self
    }

    /// A request header.
    pub fn header(mut self, name: &str, schema: Value, description: &str) -> Self {
        self.parameters.push(
            json!({"name": name, "in": "header", "schema": schema, "description": description}),
        );
        self
    }

    /// A JSON body, which may be left out.
    pub fn reads<T: JsonSchema>(mut self) -> Self {
        let schema = self.schemas.read::<T>();
        self.body = Some(json!({"content": {JSON: {"schema": schema}}}));
        for (status, why) in [
            (
                400,
                "A parameter, a header (such as `Host`) or the body is not in order; nothing was done.",
            ),
            (408, "`request_timeout`: the body did not arrive in time."),
            (413, "`body_too_large`: above `server.max_body`."),
            (
                415,
                "The body's type, charset or encoding is not read here.",
            ),
            (
                422,
                "What the body says cannot be done; `errors` points at the field.",
            ),
        ] {
            self.refuse(status, why);
        }
        self
    }

    /// The body is not left out.
    pub fn always(mut self) -> Self {
        if let Some(body) = &mut self.body {
            body["required"] = true.into();
        }
        self
    }

    /// A body of plain text, instead of the JSON one.
    pub fn or_text(mut self, description: &str) -> Self {
        if let Some(body) = &mut self.body {
            body["content"]["text/plain"] =
                json!({"schema": {"type": "string", "description": description}});
        }
        self
    }

    /// A body that is a form, instead of the JSON one.
    pub fn or_form(mut self, description: &str) -> Self {
        if let Some(body) = &mut self.body {
            let input = json!({"type": "array", "items": {"type": "string", "format": "binary"}});
            body["content"]["multipart/form-data"] = json!({"schema": {
                "type": "object",
                "properties": {"input": input},
                "additionalProperties": {"type": "string"},
                "description": description,
            }});
        }
        self
    }

    /// An answer in JSON.
    pub fn answers<T: JsonSchema>(self, status: u16, description: &str) -> Self {
        let schema = self.schemas.shown::<T>();
        self.content(status, description, JSON, schema)
    }

    /// An answer in text of this type; beside JSON where that is said before.
    pub fn answers_text(self, status: u16, kind: &str, description: &str) -> Self {
        let schema = json!({"type": "string", "description": description});
        self.content(status, description, kind, schema)
    }

    /// An answer without a body.
    pub fn answers_nothing(mut self, status: u16, description: &str) -> Self {
        self.answers
            .insert(status.to_string(), json!({"description": description}));
        self
    }

    /// A header of an answer that was said before.
    pub fn with_header(mut self, status: u16, name: &str, description: &str) -> Self {
        if let Some(answer) = self.answers.get_mut(&status.to_string()) {
            answer["headers"][name] =
                json!({"schema": {"type": "string"}, "description": description});
        }
        self
    }

    /// A refusal of its own, with its codes.
    pub fn refuses(mut self, status: u16, description: &str) -> Self {
        self.refuse(status, description);
        self
    }

    fn refuse(&mut self, status: u16, description: &str) {
        let problem = json!({"$ref": "#/components/responses/Problem", "description": description});
        self.answers.insert(status.to_string(), problem);
    }

    fn content(mut self, status: u16, description: &str, kind: &str, schema: Value) -> Self {
        let answer = self.answers.entry(status.to_string());
        let answer = answer.or_insert_with(|| json!({"description": description}));
        answer["content"][kind] = json!({"schema": schema});
        self
    }

    fn told(self) -> Value {
        let mut told = self.about;
        if !self.parameters.is_empty() {
            told.insert("parameters".to_owned(), self.parameters.into());
        }
        if let Some(body) = self.body {
            told.insert("requestBody".to_owned(), body);
        }
        let mut answers: Map<String, Value> = self.answers.into_iter().collect();
        let other = json!({"$ref": "#/components/responses/Problem"});
        answers.insert("default".to_owned(), other);
        told.insert("responses".to_owned(), answers.into());
        told.into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::document;

    /// A line for each operation and for each component.
    #[test]
    fn the_document_is_pinned() {
        let document: Value = serde_json::from_str(&document("", true)).expect("JSON");
        let mut lines = Vec::new();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            for (method, told) in operations.as_object().expect("operations") {
                lines.push(format!("{method} {path} {told}"));
            }
        }
        for (kind, components) in document["components"].as_object().expect("components") {
            for (name, told) in components.as_object().expect("components") {
                lines.push(format!("{kind} {name} {told}"));
            }
        }
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_prefix_and_the_metrics_are_the_servers() {
        let below: Value = serde_json::from_str(&document("/axed", false)).expect("JSON");
        assert_eq!(below["servers"][0]["url"], "/axed");
        assert!(below["paths"]["/runs"].is_object() && below["paths"]["/metrics"].is_null());
    }
}
