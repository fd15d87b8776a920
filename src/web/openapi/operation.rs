//! One operation of the OpenAPI document, and the schemas that all operations share.

use std::collections::BTreeMap;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::config::KeyScope;
use crate::domain::run::RunId;

const JSON: &str = "application/json";

/// The schemas of all bodies. The request and the response schema of a type may differ, so they are generated separately.
pub struct Schemas {
    request_generator: SchemaGenerator,
    response_generator: SchemaGenerator,
    requests: Map<String, Value>,
}

impl Schemas {
    pub(in crate::web) fn new() -> Self {
        let settings = || {
            SchemaSettings::draft2020_12().with(|settings| {
                settings.meta_schema = None;
                settings.definitions_path = "/components/schemas".into();
            })
        };
        let request_settings = settings().with(|settings| settings.inline_subschemas = true);
        Self {
            request_generator: request_settings.for_deserialize().into_generator(),
            response_generator: settings().for_serialize().into_generator(),
            requests: Map::new(),
        }
    }

    fn request_schema<T: JsonSchema>(&mut self) -> Value {
        let name = T::schema_name();
        debug_assert!(
            name.ends_with("Request"),
            "{name} may also be the name of a response"
        );
        let mut schema = self.request_generator.root_schema_for::<T>();
        schema.remove("title");
        self.requests.insert(name.to_string(), schema.to_value());
        json!({"$ref": format!("#/components/schemas/{name}")})
    }

    pub fn response_schema<T: JsonSchema>(&mut self) -> Value {
        self.response_generator.subschema_for::<T>().to_value()
    }

    /// Sorted by name.
    pub fn into_components(mut self) -> BTreeMap<String, Value> {
        let response_schemas = self.response_generator.take_definitions(true);
        response_schemas.into_iter().chain(self.requests).collect()
    }
}

/// Describes one route. Problems that follow from a path parameter, a query, a body or a scope are added automatically.
pub struct Operation<'s> {
    schemas: &'s mut Schemas,
    properties: Map<String, Value>,
    parameters: Vec<Value>,
    body: Option<Value>,
    responses: BTreeMap<String, Value>,
}

impl<'s> Operation<'s> {
    pub fn new(path: &str, scope: Option<KeyScope>, schemas: &'s mut Schemas) -> Self {
        let mut properties = Map::new();
        let first = path.split('/').nth(1).unwrap_or_default();
        let tag = match scope {
            None | Some(KeyScope::Metrics) => "daemon",
            Some(_) => first,
        };
        properties.insert("tags".to_owned(), json!([tag]));
        let mut operation = Self {
            schemas,
            properties,
            parameters: Vec::new(),
            body: None,
            responses: BTreeMap::new(),
        };
        let names = path.split('/').filter_map(|segment| {
            let name = segment.strip_prefix('{')?;
            name.strip_suffix('}')
        });
        for name in names {
            let schema = match name {
                "id" => operation.schemas.response_schema::<RunId>(),
                _ => json!({"type": "string"}),
            };
            operation
                .parameters
                .push(json!({"name": name, "in": "path", "required": true, "schema": schema}));
            operation.add_problem(404, "Not found, or not visible to this key.");
        }
        operation.add_problem(
            400,
            "`invalid_host`: the request names no host, or several.",
        );
        let mut security = Vec::new();
        if let Some(scope) = scope {
            security.push(json!({"key": [scope.as_str()]}));
            operation.add_problem(401, "`unauthorized`: the key is missing or unknown.");
            operation.add_problem(
                403,
                "`insufficient_scope`: the key does not have the scope.",
            );
        }
        operation
            .properties
            .insert("security".to_owned(), Value::Array(security));
        operation
    }

    /// `id` is the operation's name in generated clients.
    pub fn describe(mut self, id: &str, summary: &str) -> Self {
        self.properties.insert("operationId".to_owned(), id.into());
        self.properties.insert("summary".to_owned(), summary.into());
        self
    }

    /// Adds a query parameter.
    pub fn query(mut self, name: &str, schema: Value, description: &str) -> Self {
        self.parameters.push(
            json!({"name": name, "in": "query", "schema": schema, "description": description}),
        );
        self.add_problem(
            400,
            "A parameter, a header (such as `Host`) or the body is invalid; nothing was done.",
        );
        self
    }

    /// Adds a request header.
    pub fn header(mut self, name: &str, schema: Value, description: &str) -> Self {
        self.parameters.push(
            json!({"name": name, "in": "header", "schema": schema, "description": description}),
        );
        self
    }

    /// Adds an optional JSON body.
    pub fn request_body<T: JsonSchema>(mut self) -> Self {
        let schema = self.schemas.request_schema::<T>();
        self.body = Some(json!({"content": {JSON: {"schema": schema}}}));
        for (status, why) in [
            (
                400,
                "A parameter, a header (such as `Host`) or the body is invalid; nothing was done.",
            ),
            (408, "`request_timeout`: the body did not arrive in time."),
            (413, "`body_too_large`: above `server.max_body`."),
            (
                415,
                "The body's type, charset or encoding is not supported.",
            ),
            (422, "The body has an invalid field; `errors` points to it."),
        ] {
            self.add_problem(status, why);
        }
        self
    }

    /// Makes the body required.
    pub fn body_required(mut self) -> Self {
        if let Some(body) = &mut self.body {
            body["required"] = true.into();
        }
        self
    }

    /// Adds plain text as an alternative to the JSON body.
    pub fn or_text(mut self, description: &str) -> Self {
        if let Some(body) = &mut self.body {
            body["content"]["text/plain"] =
                json!({"schema": {"type": "string", "description": description}});
        }
        self
    }

    /// Adds a form as an alternative to the JSON body.
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

    /// Adds a JSON response.
    pub fn response<T: JsonSchema>(self, status: u16, description: &str) -> Self {
        let schema = self.schemas.response_schema::<T>();
        self.add_response(status, description, JSON, schema)
    }

    /// Adds a text response of this type, beside a JSON response of the same status.
    pub fn text_response(self, status: u16, content_type: &str, description: &str) -> Self {
        let schema = json!({"type": "string", "description": description});
        self.add_response(status, description, content_type, schema)
    }

    /// Adds a response without a body.
    pub fn empty_response(mut self, status: u16, description: &str) -> Self {
        self.responses
            .insert(status.to_string(), json!({"description": description}));
        self
    }

    /// Adds a header to a response that was added before.
    pub fn response_header(mut self, status: u16, name: &str, description: &str) -> Self {
        if let Some(response) = self.responses.get_mut(&status.to_string()) {
            response["headers"][name] =
                json!({"schema": {"type": "string"}, "description": description});
        }
        self
    }

    /// Adds a problem; the description names its codes.
    pub fn problem(mut self, status: u16, description: &str) -> Self {
        self.add_problem(status, description);
        self
    }

    fn add_problem(&mut self, status: u16, description: &str) {
        let problem = json!({"$ref": "#/components/responses/Problem", "description": description});
        self.responses.insert(status.to_string(), problem);
    }

    fn add_response(
        mut self,
        status: u16,
        description: &str,
        content_type: &str,
        schema: Value,
    ) -> Self {
        let response = self.responses.entry(status.to_string());
        let response = response.or_insert_with(|| json!({"description": description}));
        response["content"][content_type] = json!({"schema": schema});
        self
    }

    pub fn into_json(self) -> Value {
        let mut operation = self.properties;
        if !self.parameters.is_empty() {
            operation.insert("parameters".to_owned(), self.parameters.into());
        }
        if let Some(body) = self.body {
            operation.insert("requestBody".to_owned(), body);
        }
        let mut responses: Map<String, Value> = self.responses.into_iter().collect();
        let other = json!({"$ref": "#/components/responses/Problem"});
        responses.insert("default".to_owned(), other);
        operation.insert("responses".to_owned(), responses.into());
        operation.into()
    }
}
