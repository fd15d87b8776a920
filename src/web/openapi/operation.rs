//! One operation of the OpenAPI document.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use crate::config::KeyScope;
use crate::domain::batch::BatchId;
use crate::domain::run::RunId;
use crate::domain::webhook::DeliveryId;
use crate::web::openapi::schemas::Schemas;

const JSON: &str = "application/json";
const INVALID_REQUEST: &str = "`invalid_parameter`, `unknown_parameter`, `malformed_query`, `malformed_body`, `invalid_json`, \
                               `not_utf8`, `invalid_host`: a parameter, a header or the body is invalid; nothing was done.";

/// Describes one route. Problems that follow from a path parameter, a query, a body or a scope are added automatically, and so
/// are headers that belong to a status.
pub struct Operation<'s> {
    schemas: &'s mut Schemas,
    scopes: &'s [KeyScope],
    tag: String,
    id: String,
    summary: String,
    details: String,
    parameters: Vec<Value>,
    body: Option<Value>,
    responses: BTreeMap<String, Value>,
}

fn scope_names(scopes: &[KeyScope]) -> String {
    let names = scopes.iter().map(|scope| format!("`{}`", scope.as_str()));
    names.collect::<Vec<_>>().join(" or ")
}

impl<'s> Operation<'s> {
    pub fn new(path: &str, scopes: &'s [KeyScope], schemas: &'s mut Schemas) -> Self {
        let first = path.split('/').nth(1).unwrap_or_default();
        let tag = match scopes {
            [] | [KeyScope::Metrics] => "daemon",
            _ => first,
        };
        let mut operation = Self {
            schemas,
            scopes,
            tag: tag.to_owned(),
            id: String::new(),
            summary: String::new(),
            details: String::new(),
            parameters: Vec::new(),
            body: None,
            responses: BTreeMap::new(),
        };
        operation.add_problem(
            400,
            "`invalid_host`: the request names no host, or several.",
        );
        if !scopes.is_empty() {
            operation.add_problem(401, "`unauthorized`: the key is missing or unknown.");
            let why = format!(
                "`insufficient_scope`: the key does not have the scope {}.",
                scope_names(scopes)
            );
            operation.add_problem(403, &why);
            operation.add_problem(
                503,
                "`store_unavailable`, `store_full`: the store cannot be used now; `Retry-After` tells when to retry.",
            );
        }
        let names = path.split('/').filter_map(|segment| {
            let name = segment.strip_prefix('{')?;
            name.strip_suffix('}')
        });
        for name in names {
            operation.add_path_parameter(first, name);
        }
        operation
    }

    fn add_path_parameter(&mut self, first: &str, name: &str) {
        let text = || json!({"type": "string"});
        let (schema, description, codes) = match (first, name) {
            ("agents", "name") => (text(), "The agent's name.", "`agent_not_found`"),
            ("schedules", "agent") => (text(), "The agent's name.", "`schedule_not_found`"),
            ("schedules", "name") => (text(), "The schedule's name.", "`schedule_not_found`"),
            ("triggers", "agent") => (text(), "The agent's name.", "`trigger_not_found`"),
            ("triggers", "name") => (text(), "The trigger's name.", "`trigger_not_found`"),
            ("sessions", "name") => (text(), "The session's name.", "`session_not_found`"),
            ("batches", "id") => {
                let schema = self.schemas.response_schema::<BatchId>();
                (schema, "The batch's id.", "`batch_not_found`")
            }
            (_, "id") => {
                let schema = self.schemas.response_schema::<RunId>();
                (schema, "The run's id.", "`run_not_found`")
            }
            (_, "other") => {
                let schema = self.schemas.response_schema::<RunId>();
                (schema, "The id of the other run.", "`run_not_found`")
            }
            (_, "delivery") => {
                let schema = self.schemas.response_schema::<DeliveryId>();
                let codes = "`run_not_found`, `delivery_not_found`";
                (schema, "The id of the webhook delivery.", codes)
            }
            (_, "turn") => {
                let codes = "`run_not_found`, `turn_not_found`";
                (
                    json!({"type": "integer", "minimum": 1}),
                    "The number of the turn, from 1.",
                    codes,
                )
            }
            (_, "tool_call_id") => (text(), "The id of the tool call.", "`run_not_found`"),
            _ => (text(), "", "`route_not_found`"),
        };
        self.parameters.push(json!({
            "name": name, "in": "path", "required": true, "schema": schema, "description": description,
        }));
        self.add_problem(
            404,
            &format!("{codes}: not found, or not visible to this key."),
        );
    }

    /// `id` is the operation's name in generated clients.
    pub fn describe(mut self, id: &str, summary: &str) -> Self {
        id.clone_into(&mut self.id);
        summary.clone_into(&mut self.summary);
        self
    }

    /// What the operation does beyond its summary, in Markdown.
    pub fn details(mut self, details: &str) -> Self {
        details.clone_into(&mut self.details);
        self
    }

    /// Replaces the tag, which is the first segment of the path. Each tag has an entry in the document's list.
    pub fn tag(mut self, tag: &str) -> Self {
        tag.clone_into(&mut self.tag);
        self
    }

    /// Adds a query parameter.
    pub fn query(mut self, name: &str, schema: Value, description: &str) -> Self {
        self.parameters.push(
            json!({"name": name, "in": "query", "schema": schema, "description": description}),
        );
        self.add_problem(400, INVALID_REQUEST);
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
            (400, INVALID_REQUEST),
            (408, "`request_timeout`: the body did not arrive in time."),
            (413, "`body_too_large`: above `server.max_body`."),
            (
                415,
                "`unsupported_media_type`, `unsupported_charset`, `unsupported_encoding`: the body's type, charset or \
                 encoding is not supported.",
            ),
            (
                422,
                "`unknown_field`, `invalid_field`: the body has an invalid field; `errors` points to it.",
            ),
        ] {
            self.add_problem(status, why);
        }
        self
    }

    /// Adds a required body of JSON lines.
    pub fn lines_body(mut self, description: &str, example: &str) -> Self {
        let schema = json!({"type": "string", "description": description});
        let content = json!({"schema": schema, "example": example});
        self.body = Some(json!({"required": true, "content": {"application/jsonl": content}}));
        for (status, why) in [
            (400, INVALID_REQUEST),
            (408, "`request_timeout`: the body did not arrive in time."),
            (413, "`body_too_large`: above four times `server.max_body`."),
            (
                415,
                "`unsupported_encoding`: the body's encoding is not supported.",
            ),
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

    /// Adds an example of the JSON body. `name` identifies it within the operation.
    pub fn request_example(mut self, name: &str, summary: &str, value: Value) -> Self {
        if let Some(body) = &mut self.body {
            body["content"][JSON]["examples"][name] = json!({"summary": summary, "value": value});
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
            let input = json!({
                "type": "array",
                "items": {"type": "string", "format": "binary"},
                "description": "Texts and files, in order.",
            });
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

    /// Adds an example of a JSON response that was added before.
    pub fn example(mut self, status: u16, value: Value) -> Self {
        if let Some(response) = self.responses.get_mut(&status.to_string()) {
            response["content"][JSON]["example"] = value;
        }
        self
    }

    /// Adds a text response of this type, beside a JSON response of the same status.
    pub fn text_response(self, status: u16, content_type: &str, description: &str) -> Self {
        let schema = json!({"type": "string", "description": description});
        self.add_response(status, description, content_type, schema)
    }

    /// Adds an example of a text response that was added before.
    pub fn text_example(mut self, status: u16, content_type: &str, text: &str) -> Self {
        if let Some(response) = self.responses.get_mut(&status.to_string()) {
            response["content"][content_type]["example"] = text.into();
        }
        self
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

    /// Adds a problem; the description begins with its codes, in backticks.
    pub fn problem(mut self, status: u16, description: &str) -> Self {
        self.add_problem(status, description);
        self
    }

    fn add_problem(&mut self, status: u16, description: &str) {
        let component = match status {
            401 => "Unauthorized",
            429 | 503 => "RetryLater",
            _ => "Problem",
        };
        let component = format!("#/components/responses/{component}");
        let problem = json!({"$ref": component, "description": description});
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
        let is_problem = |response: &Value| response.get("$ref").is_some();
        let response = response
            .and_modify(|response| {
                if is_problem(response) {
                    *response = json!({"description": description});
                }
            })
            .or_insert_with(|| json!({"description": description}));
        response["content"][content_type] = json!({"schema": schema});
        self
    }

    pub fn into_json(self) -> Value {
        let access = match self.scopes {
            [] => "Needs no key.".to_owned(),
            scopes => format!("Scope: {}.", scope_names(scopes)),
        };
        let security = self.scopes.iter();
        let security: Vec<Value> = security
            .map(|scope| json!({"key": [scope.as_str()]}))
            .collect();
        let mut operation = json!({
            "tags": [self.tag],
            "operationId": self.id,
            "summary": self.summary,
            "description": format!("{}\n\n{access}", self.details).trim_start(),
            "security": security,
        });
        if !self.parameters.is_empty() {
            operation["parameters"] = self.parameters.into();
        }
        if let Some(body) = self.body {
            operation["requestBody"] = body;
        }
        let mut responses: Map<String, Value> = self.responses.into_iter().collect();
        for response in responses.values_mut() {
            if response.get("$ref").is_none() {
                response["headers"]["x-request-id"] =
                    json!({"$ref": "#/components/headers/RequestId"});
            }
        }
        let other = json!({"$ref": "#/components/responses/Problem"});
        responses.insert("default".to_owned(), other);
        operation["responses"] = responses.into();
        operation
    }
}
