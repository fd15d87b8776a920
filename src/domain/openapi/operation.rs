//! One operation of a document as a tool.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::domain::http_placement::{HeaderArgument, Placement, QueryArgument, QueryStyle};
use crate::domain::http_tool::{BodyFormat, HttpMethod};
use crate::domain::message::shorten;
use crate::domain::openapi::document::{Document, Entry};
use crate::domain::openapi::schema::Translator;

/// The longest description of a tool.
const MAX_DESCRIPTION: usize = 1024;
/// The longest name of an argument.
const MAX_NAME: usize = 64;
/// The most parameters of one operation.
const MAX_PARAMETERS: usize = 200;
/// Header parameters that OpenAPI defines otherwise, or that the client sets itself.
const OTHER_HEADERS: [&str; 11] = [
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "cookie",
    "host",
    "te",
    "transfer-encoding",
    "upgrade",
];

pub struct Operation {
    /// Letters, digits, `-` and `_`.
    pub name: String,
    pub description: String,
    pub method: HttpMethod,
    /// A template of the path, with the names of arguments.
    pub path: String,
    /// The schema of the arguments.
    pub parameters: Value,
    /// As `parameters`, without patterns, which may be none of ours.
    pub parameters_without_patterns: Value,
    pub placement: Placement,
    pub body_format: BodyFormat,
    /// The address of the first server; `None` if there is none.
    pub server: Option<String>,
}

/// A part of the request with its argument.
struct Argument<'d> {
    name: String,
    schema: &'d Value,
    description: Option<&'d str>,
    is_required: bool,
}

pub(super) fn build(
    document: &Document,
    entry: &Entry<'_>,
    set_headers: &[&str],
) -> Result<Operation, String> {
    let mut parts = Parts {
        document,
        arguments: Vec::new(),
        taken: BTreeSet::new(),
        placement: Placement::default(),
        path: entry.path.replace('{', "{{").replace('}', "}}"),
        body_format: BodyFormat::Json,
    };
    for parameter in parameters(document, entry)? {
        parts.add_parameter(parameter, set_headers)?;
    }
    if let Some((_, rest)) = parts.path.split_once("{{") {
        let name = rest.split_once("}}").map_or(rest, |(name, _)| name);
        return Err(format!(
            "its path has {{{name}}}, which no parameter describes"
        ));
    }
    if !entry.path.starts_with('/') || entry.path.contains(['?', '#']) {
        return Err("its path must begin with / and have no query".to_owned());
    }
    if let Some(body) = entry.operation.get("requestBody") {
        let body = document.resolve(body)?;
        if entry.method != HttpMethod::Get {
            parts.add_body(body)?;
        }
    }
    Ok(Operation {
        name: name_of(entry),
        description: describe(entry),
        method: entry.method,
        parameters: parts.schema(true)?,
        parameters_without_patterns: parts.schema(false)?,
        placement: parts.placement,
        body_format: parts.body_format,
        server: server(document, entry)?,
        path: parts.path,
    })
}

/// The parameters of the path and of the operation, which replace those of the path.
fn parameters<'d>(document: &'d Document, entry: &Entry<'d>) -> Result<Vec<&'d Value>, String> {
    let mut parameters: Vec<&Value> = Vec::new();
    let key = |it: &Value| (it.get("name").cloned(), it.get("in").cloned());
    for owner in [entry.item, entry.operation] {
        let listed = owner.get("parameters").and_then(Value::as_array);
        for parameter in listed.into_iter().flatten() {
            let parameter = document.resolve(parameter)?;
            parameters.retain(|known| key(known) != key(parameter));
            parameters.push(parameter);
            if parameters.len() > MAX_PARAMETERS {
                return Err(format!("it has over {MAX_PARAMETERS} parameters"));
            }
        }
    }
    Ok(parameters)
}

/// What an operation's parameters and its body become.
struct Parts<'d> {
    document: &'d Document,
    arguments: Vec<Argument<'d>>,
    taken: BTreeSet<String>,
    placement: Placement,
    /// The template; places without a parameter still have two braces.
    path: String,
    body_format: BodyFormat,
}

impl<'d> Parts<'d> {
    fn add_parameter(&mut self, parameter: &'d Value, set_headers: &[&str]) -> Result<(), String> {
        let text = |key: &str| parameter.get(key).and_then(Value::as_str);
        let name = text("name").filter(|name| !name.is_empty());
        let name = name.ok_or("it has a parameter without a name")?;
        let place = text("in").unwrap_or_default();
        let mut is_required = parameter.get("required") == Some(&Value::Bool(true));
        match place {
            "query" => {}
            "path" => is_required = true,
            "header" => {
                let lowercase = name.to_ascii_lowercase();
                let mut set = set_headers.iter();
                if OTHER_HEADERS.contains(&lowercase.as_str())
                    || set.any(|header| header.eq_ignore_ascii_case(name))
                    || http::HeaderName::from_bytes(name.as_bytes()).is_err()
                {
                    return Ok(());
                }
            }
            "cookie" if !is_required => return Ok(()),
            "cookie" => return Err(format!("it needs the cookie {name}, and axed sends none")),
            _ => return Err(format!("its parameter {name} is in no place that is known")),
        }
        let content = parameter.get("content").and_then(Value::as_object);
        let content = content.and_then(|it| it.values().next());
        let schema = content.unwrap_or(parameter).get("schema");
        let argument = self.add(name, place, schema, text("description"), is_required);
        match place {
            "query" => self.placement.query.push(QueryArgument {
                style: query_style(parameter, content.is_some()),
                name: name.to_owned(),
                argument,
            }),
            "header" => self.placement.headers.push(HeaderArgument {
                name: name.to_owned(),
                argument,
            }),
            _ => {
                let place = format!("{{{{{name}}}}}");
                if !self.path.contains(&place) {
                    return Err(format!("its path has no {{{name}}}, which is a parameter"));
                }
                self.path = self.path.replace(&place, &format!("{{{argument}}}"));
            }
        }
        Ok(())
    }

    fn add_body(&mut self, body: &'d Value) -> Result<(), String> {
        let is_required = body.get("required") == Some(&Value::Bool(true));
        let content = body.get("content").and_then(Value::as_object);
        let mut known = None;
        for (name, media) in content.into_iter().flatten() {
            let Ok(mime) = name.parse::<mime::Mime>() else {
                continue;
            };
            let is_json = mime.subtype() == mime::JSON || mime.suffix() == Some(mime::JSON);
            let format = match (mime.type_(), mime.subtype()) {
                _ if is_json || name == "*/*" => BodyFormat::Json,
                (_, mime::WWW_FORM_URLENCODED) => BodyFormat::Form,
                (mime::TEXT, mime::PLAIN) => BodyFormat::Text,
                _ => continue,
            };
            if known.is_none_or(|(_, found)| found != BodyFormat::Json)
                || format == BodyFormat::Json
            {
                known = Some((media, format));
            }
            if format == BodyFormat::Json {
                break;
            }
        }
        let Some((media, format)) = known else {
            if !is_required {
                return Ok(());
            }
            let names = content.into_iter().flatten().map(|(name, _)| name.as_str());
            let names: Vec<&str> = names.take(5).collect();
            return Err(format!(
                "its body is {}; JSON, forms and plain text can be sent",
                names.join(", ")
            ));
        };
        let description = body.get("description").and_then(Value::as_str);
        let argument = self.add(
            "body",
            "request",
            media.get("schema"),
            description,
            is_required,
        );
        self.placement.body = Some(argument);
        self.body_format = format;
        Ok(())
    }

    /// Adds an argument, and returns its name: one that all providers accept.
    fn add(
        &mut self,
        name: &str,
        place: &str,
        schema: Option<&'d Value>,
        description: Option<&'d str>,
        is_required: bool,
    ) -> String {
        let base = plain(name, MAX_NAME - 12);
        let base = if base.is_empty() { place } else { &base };
        let mut unique = base.to_owned();
        let mut number = 2;
        while !self.taken.insert(unique.clone()) {
            unique = format!("{base}_{place}");
            if self.taken.contains(&unique) {
                unique = format!("{base}_{number}");
                number += 1;
            }
        }
        self.arguments.push(Argument {
            name: unique.clone(),
            schema: schema.unwrap_or(&Value::Bool(true)),
            description,
            is_required,
        });
        unique
    }

    fn schema(&self, keeps_patterns: bool) -> Result<Value, String> {
        let mut translator = Translator::new(self.document, keeps_patterns);
        let mut properties = Map::new();
        for argument in &self.arguments {
            let mut schema = translator.translate(argument.schema)?;
            if schema == Value::Bool(true) {
                schema = json!({});
            }
            if let (Some(text), Some(fields)) = (argument.description, schema.as_object_mut()) {
                let text = shorten(text.trim(), MAX_DESCRIPTION);
                fields.insert("description".to_owned(), json!(text));
            }
            properties.insert(argument.name.clone(), schema);
        }
        let required = self.arguments.iter().filter(|it| it.is_required);
        let required: Vec<&str> = required.map(|it| it.name.as_str()).collect();
        let mut schema = json!({
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        });
        let definitions = translator.definitions()?;
        if !definitions.is_empty() {
            schema["$defs"] = Value::Object(definitions);
        }
        Ok(schema)
    }
}

fn query_style(parameter: &Value, has_content: bool) -> QueryStyle {
    let style = parameter.get("style").and_then(Value::as_str);
    let explode = parameter.get("explode").and_then(Value::as_bool);
    match (style, explode) {
        _ if has_content => QueryStyle::Json,
        (Some("deepObject"), _) => QueryStyle::Deep,
        (Some("spaceDelimited"), Some(false) | None) => QueryStyle::Spaces,
        (Some("pipeDelimited"), Some(false) | None) => QueryStyle::Pipes,
        (_, Some(false)) => QueryStyle::Commas,
        _ => QueryStyle::Exploded,
    }
}

/// The operation's id, or its method and path, as a tool's name.
fn name_of(entry: &Entry<'_>) -> String {
    let name = entry.id().map_or_else(
        || {
            let method = entry.method.name().to_ascii_lowercase();
            plain(&format!("{method} {}", entry.path), MAX_NAME)
        },
        |id| plain(id, MAX_NAME),
    );
    // Two underscores separate the names of MCP servers and their tools.
    let parts = name.split('_').filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("_")
}

fn plain(text: &str, max: usize) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '-' {
            c
        } else {
            '_'
        }
    };
    text.chars().take(max).map(plain).collect()
}

fn describe(entry: &Entry<'_>) -> String {
    let text = |key: &str| {
        let text = entry.operation.get(key).and_then(Value::as_str);
        text.map(str::trim).filter(|text| !text.is_empty())
    };
    let description = match (text("summary"), text("description")) {
        (Some(summary), Some(description)) if !description.starts_with(summary) => {
            format!("{summary}\n\n{description}")
        }
        (summary, description) => description
            .or(summary)
            .map_or_else(|| entry.address(), str::to_owned),
    };
    shorten(&description, MAX_DESCRIPTION)
}

/// The first server of the operation, of the path or of the document, with the defaults of its variables.
fn server(document: &Document, entry: &Entry<'_>) -> Result<Option<String>, String> {
    let owners = [entry.operation, entry.item, &document.root];
    let mut servers = owners
        .iter()
        .filter_map(|owner| owner.get("servers")?.get(0));
    let Some(server) = servers.next() else {
        return Ok(None);
    };
    let url = server.get("url").and_then(Value::as_str);
    let mut url = url.ok_or("its server has no url")?.to_owned();
    let variables = server.get("variables").and_then(Value::as_object);
    for (name, variable) in variables.into_iter().flatten() {
        let default = variable.get("default").and_then(Value::as_str);
        url = url.replace(&format!("{{{name}}}"), default.unwrap_or_default());
        if url.len() > 2048 {
            return Err("its server's url is too long".to_owned());
        }
    }
    Ok(Some(url))
}
