//! A route, declared once: its method and path, the scopes that it needs, its handler, and its entry in the OpenAPI document.
//! What the handler takes describes itself; see [`Input`].

use std::collections::BTreeMap;

use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::{HeaderMap, Uri};
use axum::routing::{self, MethodRouter};
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use crate::config::KeyScope;
use crate::web::error::ErrorShape;
use crate::web::openapi::schemas::Schemas;
use crate::web::problem_code::ProblemCode::{
    self, BodyTooLarge, InsufficientScope, InvalidField, InvalidHost, InvalidJson,
    InvalidParameter, MalformedBody, MalformedQuery, NotUtf8, RequestTimeout, StoreFull,
    StoreUnavailable, Unauthorized, UnknownField, UnknownParameter, UnsupportedCharset,
    UnsupportedEncoding, UnsupportedMediaType,
};
use crate::web::state::AppState;

const JSON: &str = "application/json";

pub struct Route {
    /// In lower case.
    pub method: &'static str,
    /// Without the path prefix.
    pub path: &'static str,
    /// The scopes of which a key needs one, if keys are configured. Without any, the route is open to everybody, or its
    /// handler checks the scope.
    pub scopes: Vec<KeyScope>,
    /// Whether any key is accepted, because the handler checks its scope.
    pub accepts_any_key: bool,
    /// Whether a ticket for the run is accepted in place of a key.
    pub accepts_ticket: bool,
    /// Of a route of another protocol; `None` for problem details.
    pub error_shape: Option<ErrorShape>,
    pub handler: MethodRouter<AppState>,
    /// The operation's name in generated clients; empty for a route that the document does not have.
    id: &'static str,
    summary: &'static str,
    details: &'static str,
    tag: &'static str,
    parameters: Vec<Parameter>,
    body: Option<Body>,
    responses: BTreeMap<u16, Response>,
    /// The status of the response that was added last.
    last_response: u16,
    /// Headers of all responses with these statuses.
    response_headers: Vec<(&'static [u16], &'static str, &'static str)>,
}

/// Adds a type to the schemas of the document, and refers to it.
type SchemaOf = fn(&mut Schemas) -> Value;

enum Parameter {
    /// The fields of a struct.
    Query(fn(&mut Schemas) -> Map<String, Value>),
    Path(&'static str, SchemaOf, &'static str),
    Header(&'static str, Value, &'static str),
}

struct Body {
    is_required: bool,
    /// By type; the schema of JSON is `json`.
    content: Map<String, Value>,
    json: Option<SchemaOf>,
}

enum Response {
    Problem(Vec<ProblemCode>),
    /// The description, and what each type of content is.
    Content(&'static str, Vec<Content>),
}

struct Content {
    content_type: &'static str,
    schema: SchemaOf,
    /// Of a text, beside JSON.
    description: Option<&'static str>,
    example: Value,
}

/// A parameter of a handler: adds path parameters, query parameters, headers or the body to the route, and the problems that
/// follow from them.
pub trait Input {
    fn describe(route: Route) -> Route {
        route
    }
}

impl Input for State<AppState> {}
impl Input for HeaderMap {}
impl Input for Request {}
impl Input for Uri {}

impl<A: Input, B: Input> Input for (A, B) {
    fn describe(route: Route) -> Route {
        route.input::<A>().input::<B>()
    }
}

/// All parameters of a handler, as axum's `Handler` lists them: after a type of axum's own.
pub trait Inputs {
    fn describe_all(route: Route) -> Route;
}

impl Inputs for ((),) {
    fn describe_all(route: Route) -> Route {
        route
    }
}

macro_rules! inputs {
    ($($input:ident)+) => {
        impl<M, $($input: Input),+> Inputs for (M, $($input,)+) {
            fn describe_all(route: Route) -> Route {
                route$(.input::<$input>())+
            }
        }
    };
}

inputs!(A);
inputs!(A B);
inputs!(A B C);
inputs!(A B C D);
inputs!(A B C D E);
inputs!(A B C D E F);
inputs!(A B C D E F G);

pub fn get<T: Inputs + 'static, const N: usize>(
    path: &'static str,
    scopes: [KeyScope; N],
    handler: impl Handler<T, AppState>,
) -> Route {
    described::<T>("get", path, scopes.to_vec(), routing::get(handler))
}

pub fn post<T: Inputs + 'static, const N: usize>(
    path: &'static str,
    scopes: [KeyScope; N],
    handler: impl Handler<T, AppState>,
) -> Route {
    described::<T>("post", path, scopes.to_vec(), routing::post(handler))
}

pub fn delete<T: Inputs + 'static, const N: usize>(
    path: &'static str,
    scopes: [KeyScope; N],
    handler: impl Handler<T, AppState>,
) -> Route {
    described::<T>("delete", path, scopes.to_vec(), routing::delete(handler))
}

fn described<T: Inputs>(
    method: &'static str,
    path: &'static str,
    scopes: Vec<KeyScope>,
    handler: MethodRouter<AppState>,
) -> Route {
    let route = Route::new(method, path, scopes, handler);
    let problems: &[ProblemCode] = match route.scopes.is_empty() {
        true => &[InvalidHost],
        false => &[
            InvalidHost,
            Unauthorized,
            InsufficientScope,
            StoreUnavailable,
            StoreFull,
        ],
    };
    T::describe_all(route.problems(problems))
}

/// A route of another protocol, which has its own shape of errors and is described elsewhere.
pub fn of_protocol(
    method: &'static str,
    path: &'static str,
    handler: MethodRouter<AppState>,
    error_shape: ErrorShape,
) -> Route {
    Route {
        error_shape: Some(error_shape),
        ..Route::new(method, path, Vec::new(), handler)
    }
}

/// A page for people: it checks keys itself, renders its own errors, and is not described in the OpenAPI document.
pub fn page<T: 'static>(path: &'static str, handler: impl Handler<T, AppState>) -> Route {
    Route::new("get", path, Vec::new(), routing::get(handler))
}

fn scope_names(scopes: &[KeyScope]) -> String {
    let names = scopes.iter().map(|scope| format!("`{}`", scope.as_str()));
    names.collect::<Vec<_>>().join(" or ")
}

impl Route {
    fn new(
        method: &'static str,
        path: &'static str,
        scopes: Vec<KeyScope>,
        handler: MethodRouter<AppState>,
    ) -> Self {
        let tag = match scopes.as_slice() {
            [] | [KeyScope::Metrics] => "daemon",
            _ => path.split('/').nth(1).unwrap_or_default(),
        };
        Self {
            method,
            path,
            scopes,
            accepts_any_key: false,
            accepts_ticket: false,
            error_shape: None,
            handler,
            id: "",
            summary: "",
            details: "",
            tag,
            parameters: Vec::new(),
            body: None,
            responses: BTreeMap::new(),
            last_response: 0,
            response_headers: Vec::new(),
        }
    }

    /// Another call adds a scope that is enough as well.
    pub fn with_scope(mut self, scope: KeyScope) -> Self {
        self.scopes.push(scope);
        self
    }

    pub fn with_any_key(mut self) -> Self {
        self.accepts_any_key = true;
        self
    }

    pub fn or_ticket(mut self) -> Self {
        self.accepts_ticket = true;
        self
    }

    /// `id` is the operation's name in generated clients.
    pub fn describe(mut self, id: &'static str, summary: &'static str) -> Self {
        (self.id, self.summary) = (id, summary);
        self
    }

    /// What the operation does beyond its summary, in Markdown.
    pub fn details(mut self, details: &'static str) -> Self {
        self.details = details;
        self
    }

    /// Replaces the tag, which is the first segment of the path. Each tag has an entry in the document's list.
    pub fn tag(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// Adds what several routes have in common.
    pub fn with(self, describe: fn(Self) -> Self) -> Self {
        describe(self)
    }

    /// Describes what the handler reads from the request itself.
    pub fn input<I: Input>(self) -> Self {
        I::describe(self)
    }

    /// Adds the query parameters that are the fields of `T`; their doc comments describe them.
    pub fn query<T: JsonSchema>(mut self) -> Self {
        let schemas = |schemas: &mut Schemas| schemas.query_schemas::<T>();
        self.parameters.push(Parameter::Query(schemas));
        self.problems(&[InvalidParameter, UnknownParameter, MalformedQuery])
    }

    /// Adds a variable part of the path; `code` is that of the problem if there is nothing of that name.
    pub fn path<T: JsonSchema>(
        mut self,
        name: &'static str,
        description: &'static str,
        code: ProblemCode,
    ) -> Self {
        let schema = |schemas: &mut Schemas| schemas.response_schema::<T>();
        self.parameters
            .push(Parameter::Path(name, schema, description));
        self.problems(&[code])
    }

    /// Adds a request header.
    pub fn header(mut self, name: &'static str, schema: Value, description: &'static str) -> Self {
        self.parameters
            .push(Parameter::Header(name, schema, description));
        self
    }

    /// Adds an optional JSON body.
    pub fn request_body<T: JsonSchema>(mut self) -> Self {
        self.body = Some(Body {
            is_required: false,
            content: Map::new(),
            json: Some(|schemas| schemas.request_schema::<T>()),
        });
        self.body_problems().problems(&[
            InvalidJson,
            NotUtf8,
            UnsupportedMediaType,
            UnsupportedCharset,
            UnknownField,
            InvalidField,
        ])
    }

    /// Adds a required body of JSON lines.
    pub fn lines_body(mut self, description: &str, example: &str) -> Self {
        let schema = json!({"type": "string", "description": description});
        let content = json!({"schema": schema, "example": example});
        self.body = Some(Body {
            is_required: true,
            content: Map::from_iter([("application/jsonl".to_owned(), content)]),
            json: None,
        });
        self.body_problems().problems(&[NotUtf8])
    }

    fn body_problems(self) -> Self {
        self.problems(&[
            MalformedBody,
            RequestTimeout,
            BodyTooLarge,
            UnsupportedEncoding,
        ])
    }

    /// Makes the body required.
    pub fn body_required(mut self) -> Self {
        if let Some(body) = &mut self.body {
            body.is_required = true;
        }
        self
    }

    /// Adds an example of the JSON body. `name` identifies it within the operation.
    pub fn request_example(self, name: &str, summary: &str, value: Value) -> Self {
        self.content(JSON, |json| {
            json["examples"][name] = json!({"summary": summary, "value": value});
        })
    }

    /// Adds plain text as an alternative to the JSON body.
    pub fn or_text(self, description: &str) -> Self {
        self.content("text/plain", |text| {
            text["schema"] = json!({"type": "string", "description": description});
        })
    }

    /// Adds a form as an alternative to the JSON body.
    pub fn or_form(self, description: &str) -> Self {
        let input = json!({
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": "Texts and files, in order.",
        });
        self.content("multipart/form-data", |form| {
            form["schema"] = json!({
                "type": "object",
                "properties": {"input": input},
                "additionalProperties": {"type": "string"},
                "description": description,
            });
        })
    }

    /// Changes the description of one type of the body.
    fn content(mut self, content_type: &str, change: impl FnOnce(&mut Value)) -> Self {
        if let Some(body) = &mut self.body {
            change(
                body.content
                    .entry(content_type)
                    .or_insert_with(|| json!({})),
            );
        }
        self
    }

    /// Adds a JSON response.
    pub fn response<T: JsonSchema>(self, status: u16, description: &'static str) -> Self {
        let content = Content {
            content_type: JSON,
            schema: |schemas| schemas.response_schema::<T>(),
            description: None,
            example: Value::Null,
        };
        self.add_response(status, description, content)
    }

    /// Adds a response of text of this type, beside a JSON response of the same status.
    pub fn text_response(
        self,
        status: u16,
        content_type: &'static str,
        description: &'static str,
    ) -> Self {
        let content = Content {
            content_type,
            schema: |schemas| schemas.response_schema::<String>(),
            description: Some(description),
            example: Value::Null,
        };
        self.add_response(status, description, content)
    }

    /// Adds an example of the response that was added last.
    pub fn example(mut self, example: impl Into<Value>) -> Self {
        if let Some(Response::Content(_, all)) = self.responses.get_mut(&self.last_response)
            && let Some(last) = all.last_mut()
        {
            last.example = example.into();
        }
        self
    }

    /// Adds a response without a body.
    pub fn empty_response(mut self, status: u16, description: &'static str) -> Self {
        let response = Response::Content(description, Vec::new());
        self.responses.insert(status, response);
        self
    }

    fn add_response(mut self, status: u16, description: &'static str, content: Content) -> Self {
        self.last_response = status;
        match self.responses.get_mut(&status) {
            Some(Response::Content(_, all)) => all.push(content),
            Some(Response::Problem(_)) | None => {
                let response = Response::Content(description, vec![content]);
                self.responses.insert(status, response);
            }
        }
        self
    }

    /// Adds a header to the responses with these statuses.
    pub fn response_header(
        mut self,
        statuses: &'static [u16],
        name: &'static str,
        description: &'static str,
    ) -> Self {
        self.response_headers.push((statuses, name, description));
        self
    }

    /// Adds problems with the statuses of their codes.
    pub fn problems(self, codes: &[ProblemCode]) -> Self {
        codes.iter().fold(self, |route, code| {
            route.problems_with(code.status().as_u16(), &[*code])
        })
    }

    /// Adds problems with another status than that of their codes.
    pub fn problems_with(mut self, status: u16, codes: &[ProblemCode]) -> Self {
        let none = || Response::Problem(Vec::new());
        if let Response::Problem(all) = self.responses.entry(status).or_insert_with(none) {
            let new = codes.iter().filter(|code| !all.contains(code));
            let new: Vec<ProblemCode> = new.copied().collect();
            all.extend(new);
        }
        self
    }

    /// The entry in the OpenAPI document; `None` for a page, and for a route of a protocol that has a description of its own.
    pub fn operation(&self, schemas: &mut Schemas) -> Option<Value> {
        if self.id.is_empty() {
            return None;
        }
        let access = match self.scopes.as_slice() {
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
        let parameters = self.parameters.iter();
        let parameters: Vec<Value> = parameters.flat_map(|it| it.describe(schemas)).collect();
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(body) = &self.body {
            let mut content = body.content.clone();
            if let Some(json) = body.json {
                let entry = content.entry(JSON).or_insert_with(|| json!({}));
                entry["schema"] = json(schemas);
            }
            operation["requestBody"] = json!({"content": content});
            if body.is_required {
                operation["requestBody"]["required"] = true.into();
            }
        }
        let mut responses = Map::new();
        for (status, response) in &self.responses {
            let response = match response {
                Response::Problem(codes) => problem_response(*status, codes),
                Response::Content(description, content) => {
                    self.content_response(*status, description, content, schemas)
                }
            };
            responses.insert(status.to_string(), response);
        }
        let other = json!({"$ref": "#/components/responses/Problem"});
        responses.insert("default".to_owned(), other);
        operation["responses"] = responses.into();
        Some(operation)
    }

    fn content_response(
        &self,
        status: u16,
        description: &str,
        content: &[Content],
        schemas: &mut Schemas,
    ) -> Value {
        let mut response = json!({"description": description});
        for content in content {
            let mut schema = (content.schema)(schemas);
            if let Some(description) = content.description {
                schema["description"] = description.into();
            }
            response["content"][content.content_type] =
                json!({"schema": schema, "example": content.example});
        }
        let headers = self.response_headers.iter();
        for (_, name, description) in headers.filter(|(all, ..)| all.contains(&status)) {
            response["headers"][name] =
                json!({"schema": {"type": "string"}, "description": description});
        }
        response["headers"]["x-request-id"] = json!({"$ref": "#/components/headers/RequestId"});
        response
    }
}

fn problem_response(status: u16, codes: &[ProblemCode]) -> Value {
    let component = match status {
        401 => "Unauthorized",
        429 | 503 => "RetryLater",
        _ => "Problem",
    };
    let component = format!("#/components/responses/{component}");
    let meanings = codes.iter();
    let meanings = meanings.map(|code| format!("`{}`: {}", code.as_str(), code.meaning()));
    json!({"$ref": component, "description": meanings.collect::<Vec<_>>().join(" ")})
}

impl Parameter {
    fn describe(&self, schemas: &mut Schemas) -> Vec<Value> {
        let parameter = |place: &str, name: &str, schema: Value, description: Value| json!({"name": name, "in": place, "schema": schema, "description": description});
        match self {
            Self::Query(fields) => {
                let fields = fields(schemas).into_iter();
                let fields = fields.map(|(name, mut schema)| {
                    let keywords = schema.as_object_mut();
                    let description = keywords.and_then(|it| it.shift_remove("description"));
                    parameter("query", &name, schema, description.unwrap_or_default())
                });
                fields.collect()
            }
            Self::Path(name, schema, description) => {
                let mut path = parameter("path", name, schema(schemas), (*description).into());
                path["required"] = true.into();
                vec![path]
            }
            Self::Header(name, schema, description) => {
                vec![parameter(
                    "header",
                    name,
                    schema.clone(),
                    (*description).into(),
                )]
            }
        }
    }
}
