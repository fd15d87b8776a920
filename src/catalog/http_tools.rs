//! Reads `[[http_tools]]` of an agent file; sends nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::catalog::documents::AgentDocuments;
use crate::catalog::http_tool_fields::{
    DEFAULT_TIMEOUT_SECS, MAX_TIMEOUT_SECS, Repetition, parse_header, parse_name, parse_url,
    read_probe, read_repetition,
};
use crate::catalog::openapi_tools;
use crate::catalog::schemas;
use crate::domain::http_tool::{
    BodyFormat, HttpMethod, HttpTool, MAX_HTTP_TOOLS, Repeat, render_body,
};
use crate::domain::json_schema::arguments::repair_arguments;
use crate::domain::mcp::Template;
use crate::domain::text_template::TextTemplate;
use crate::settings::kinds::read_object_schema;
use crate::settings::table_reader::TableReader;

/// Returns the tools in the file's order; invalid ones are reported as problems.
pub fn read(
    top: &mut TableReader<'_>,
    key: &'static str,
    documents: &AgentDocuments<'_>,
) -> Vec<HttpTool> {
    let node = top.peek(key);
    let tables = top.table_list(key, |t| match t.peek("openapi") {
        Some(_) => openapi_tools::read(t, documents),
        None => Vec::from_iter(parse_tool(t)),
    });
    let tables = tables.into_iter().enumerate();
    let tools = tables.flat_map(|(table, tools)| {
        let tools = tools.into_iter();
        tools.map(move |tool| HttpTool { table, ..tool })
    });
    let tools: Vec<HttpTool> = tools.collect();
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
        Some(node) => match read_object_schema(node)
            .and_then(schemas::compile)
            .and_then(repaired)
        {
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
    let Repetition {
        repeat,
        idempotency_header,
    } = read_repetition(t);
    let probe = read_probe(t, &properties, idempotency_header.is_some());
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
        placement: None,
        repeat: repeat.unwrap_or(Repeat::default_for(method)),
        idempotency_header,
        probe,
        timeout: Duration::from_secs(timeout.unwrap_or(DEFAULT_TIMEOUT_SECS)),
        openapi: None,
        table: 0,
    })
}

fn empty_schema() -> Option<Arc<RawValue>> {
    let schema = json!({ "type": "object", "properties": {} });
    let raw = serde_json::value::to_raw_value(&schema).ok()?;
    Some(Arc::from(raw))
}

/// The schema as providers accept it.
fn repaired(schema: Arc<RawValue>) -> Result<Arc<RawValue>, String> {
    let mut fields = serde_json::from_str(schema.get()).map_err(|error| error.to_string())?;
    repair_arguments(&mut fields)?;
    serde_json::value::to_raw_value(&fields).map_or(Ok(schema), |raw| Ok(raw.into()))
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::repaired;

    #[test]
    fn schemas_have_properties() {
        for (written, sent) in [
            (
                r#"{"type":"object"}"#,
                json!({"type": "object", "properties": {}}),
            ),
            (
                r#"{"type":"object","properties":{"a":{}}}"#,
                json!({"type": "object", "properties": {"a": {}}}),
            ),
        ] {
            let schema = serde_json::value::RawValue::from_string(written.to_owned());
            let schema = repaired(schema.expect("JSON").into()).expect("a schema");
            let schema: serde_json::Value = serde_json::from_str(schema.get()).expect("JSON");
            assert_eq!(schema, sent);
        }
    }
}
