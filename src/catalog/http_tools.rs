//! Reads `[[http_tools]]` of an agent file; sends nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::catalog::schemas::read_object_schema;
use crate::config::table_reader::TableReader;
use crate::domain::agent::BUILT_IN_TOOLS;
use crate::domain::http_tool::{
    BodyFormat, HttpMethod, HttpTool, MAX_HTTP_TOOLS, is_tool_name, render_body,
};
use crate::domain::mcp::Template;
use crate::domain::skill::READ_SKILL;
use crate::domain::text_template::{TemplatePart, TextTemplate};
use crate::ssrf;

/// The default time limit of one call, in seconds.
const DEFAULT_TIMEOUT_SECS: u64 = 30;
/// The highest time limit of one call, in seconds.
const MAX_TIMEOUT_SECS: u64 = 600;
/// Names of tools that other settings enable.
const OTHER_TOOLS: [&str; 6] = [
    "call_agent",
    READ_SKILL,
    "recall",
    "subagent",
    "tool_call",
    "tool_search",
];
/// Headers that the client sets itself.
const RESERVED_HEADERS: [&str; 7] = [
    "accept-encoding",
    "connection",
    "content-length",
    "host",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// Returns the tools in the file's order; invalid ones are reported as problems.
pub fn read(top: &mut TableReader<'_>, key: &'static str) -> Vec<HttpTool> {
    let node = top.peek(key);
    let tools: Vec<HttpTool> = top
        .table_list(key, parse_tool)
        .into_iter()
        .flatten()
        .collect();
    let mut names = BTreeSet::new();
    let mut errors = Vec::new();
    for tool in &tools {
        if !names.insert(tool.name.as_str()) {
            errors.push(format!(
                "has two tools named \"{}\"; name one otherwise",
                tool.name
            ));
        }
    }
    if tools.len() > MAX_HTTP_TOOLS {
        errors.push(format!("cannot have more than {MAX_HTTP_TOOLS} tools"));
    }
    if let Some(node) = node {
        for error in errors {
            top.push_invalid(&node, key, &error);
        }
    }
    tools
}

fn parse_tool(t: &mut TableReader<'_>) -> Option<HttpTool> {
    for (key, message) in [
        ("name", "is required: the tool's name for models"),
        ("description", "is required: models choose tools by it"),
        (
            "url",
            "is required: an address such as https://api.example.com/items/{id}",
        ),
    ] {
        if t.peek(key).is_none() {
            t.push_missing(key, message);
        }
    }
    let name = t.parsed_text("name", parse_name);
    let description = t.parsed_text("description", |text| match text.trim() {
        "" => Err("must not be blank: models choose tools by it".to_owned()),
        _ => Ok(text.to_owned()),
    });
    let method = t
        .one_of("method", &HttpMethod::NAMES)
        .unwrap_or(HttpMethod::Get);
    let schema_node = t.take_node("parameters");
    let schema = match &schema_node {
        None => empty_schema(),
        Some(node) => match read_object_schema(node) {
            Ok(schema) => Some(schema),
            Err(why) => {
                t.push_invalid(node, "parameters", &why);
                None
            }
        },
    };
    let properties: Value = schema
        .as_ref()
        .and_then(|schema| serde_json::from_str(schema.get()).ok())
        .unwrap_or_default();
    let url = t.parsed_text("url", |text| parse_url(text, &properties));
    let headers = t.texts_by_name("headers", parse_header);
    let body_format = body_format(&headers);
    let has_body = t.peek("body").is_some();
    let body = t.parsed_text("body", |text| parse_body(text, body_format, &properties));
    let safe_to_repeat = t
        .flag("safe_to_repeat")
        .unwrap_or(method == HttpMethod::Get);
    let timeout = t.integer("timeout", 1..=MAX_TIMEOUT_SECS);
    if has_body && body.is_none() {
        return None;
    }
    Some(HttpTool {
        name: name?,
        description: description?,
        method,
        url: url?,
        headers,
        body,
        body_format,
        parameters: schema?,
        safe_to_repeat,
        timeout: Duration::from_secs(timeout.unwrap_or(DEFAULT_TIMEOUT_SECS)),
    })
}

fn empty_schema() -> Option<Arc<RawValue>> {
    let schema = json!({ "type": "object", "properties": {} });
    let raw = serde_json::value::to_raw_value(&schema).ok()?;
    Some(Arc::from(raw))
}

fn parse_name(text: &str) -> Result<String, String> {
    if !is_tool_name(text) {
        return Err("must be 1 to 64 letters, digits, - and _, without __".to_owned());
    }
    if BUILT_IN_TOOLS.contains(&text) || OTHER_TOOLS.contains(&text) {
        return Err(format!(
            "is \"{text}\", which is a built-in tool; choose another name"
        ));
    }
    Ok(text.to_owned())
}

/// An address whose scheme and host are literal, so that a model cannot choose them.
fn parse_url(text: &str, schema: &Value) -> Result<TextTemplate, String> {
    let template = TextTemplate::parse(text)?;
    let literal = match template.parts().first() {
        Some(TemplatePart::Literal(literal)) => literal.as_str(),
        _ => "",
    };
    let after_scheme = literal.split_once("://").map(|(_, rest)| rest);
    let host_end = after_scheme.and_then(|rest| rest.find(['/', '?']));
    let has_arguments = template.paths().next().is_some();
    if after_scheme.is_none() || (host_end.is_none() && has_arguments) {
        return Err(
            "must begin with a scheme and a host and then a /, without arguments in them: a model may not choose the host"
                .to_owned(),
        );
    }
    if text.contains('#') {
        return Err("must have no fragment (#)".to_owned());
    }
    ssrf::parse_url(literal).map_err(|why| why.to_string())?;
    template.check_names(schema)?;
    Ok(template)
}

fn parse_header(name: &str, value: &str) -> Result<Template, String> {
    if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
        return Err("is no header's name".to_owned());
    }
    if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Err("cannot be set: axed sets it".to_owned());
    }
    Template::parse(value)
}

/// The format of a body of this content type; JSON without one.
fn body_format(headers: &BTreeMap<String, Template>) -> BodyFormat {
    let mut headers = headers.iter();
    let found = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    let Some((_, value)) = found else {
        return BodyFormat::Json;
    };
    let expanded = value.expand(|_| None).ok();
    let mime = expanded.and_then(|it| it.text.parse::<mime::Mime>().ok());
    match mime {
        Some(mime) if mime.subtype() == mime::JSON || mime.suffix() == Some(mime::JSON) => {
            BodyFormat::Json
        }
        Some(mime) if mime.subtype() == mime::WWW_FORM_URLENCODED => BodyFormat::Form,
        _ => BodyFormat::Text,
    }
}

fn parse_body(text: &str, format: BodyFormat, schema: &Value) -> Result<TextTemplate, String> {
    let template = TextTemplate::parse(text)?;
    template.check_names(schema)?;
    if format == BodyFormat::Json {
        // A text in each place shows whether the file has quotes around one.
        let mut samples = Map::new();
        for name in template.paths().filter_map(|path| path.first()) {
            samples.insert(name.clone(), "x".into());
        }
        let sample = render_body(&template, format, &Value::Object(samples));
        serde_json::from_str::<serde::de::IgnoredAny>(&sample).map_err(|error| {
            format!(
                "makes no JSON ({error}); write {{name}} without quotes, and {{{{ and }}}} for braces, or set a Content-Type"
            )
        })?;
    }
    Ok(template)
}
