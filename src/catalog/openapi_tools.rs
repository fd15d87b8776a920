//! Reads a table of `[[http_tools]]` with `openapi`: each operation that it lists becomes a tool.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value as Json;
use serde_json::value::{RawValue, to_raw_value};
use url::Url;

use crate::catalog::documents::{AgentDocuments, Loaded};
use crate::catalog::http_tool_fields::{
    DEFAULT_TIMEOUT_SECS, MAX_TIMEOUT_SECS, Repetition, parse_header, parse_name, parse_url,
    read_repetition,
};
use crate::domain::http_tool::{HttpTool, Repeat};
use crate::domain::mcp::Template;
use crate::domain::openapi::{self, operation::Operation};
use crate::settings::document::{Node, Value};
use crate::settings::table_reader::TableReader;
use crate::ssrf;
use crate::validation;

/// What all operations of the table share.
struct Shared {
    base_url: Option<Url>,
    prefix: String,
    headers: BTreeMap<String, Template>,
    repetition: Repetition,
    timeout: Duration,
}

/// Returns the tools in the order of the list; what is wrong is reported as problems.
pub fn read(t: &mut TableReader<'_>, documents: &AgentDocuments<'_>) -> Vec<HttpTool> {
    let base_url = t.parsed_text("base_url", parse_base_url);
    let prefix = t.text("prefix").unwrap_or_default();
    let headers = t.texts_by_name("headers", parse_header);
    let repetition = read_repetition(t);
    let timeout = t.integer("timeout", 1..=MAX_TIMEOUT_SECS);
    let shared = Shared {
        base_url,
        prefix,
        headers,
        repetition,
        timeout: Duration::from_secs(timeout.unwrap_or(DEFAULT_TIMEOUT_SECS)),
    };
    let operations = t.take_node("operations");
    let load = |source: &str| {
        let loaded = documents.load(source)?;
        let shown = match loaded.url {
            Some(_) => ssrf::redact_query(source),
            None => source.to_owned(),
        };
        Ok((loaded, shown))
    };
    let Some((loaded, source)) = t.parsed_text("openapi", load) else {
        return Vec::new();
    };
    let Some(operations) = operations else {
        let names = openapi::describe_operations(&loaded.document);
        t.push_missing(
            "operations",
            &format!("is required: the operations of the document that become tools; {names}"),
        );
        return Vec::new();
    };
    let mut tools = Vec::new();
    for (node, name) in names(t, &operations) {
        match tool(&loaded, &name, &shared) {
            Ok(tool) => tools.push(HttpTool {
                openapi: Some(source.clone()),
                ..tool
            }),
            Err(why) => t.push_invalid(&node, "operations", &why),
        }
    }
    tools
}

fn names(t: &mut TableReader<'_>, operations: &Node) -> Vec<(Node, String)> {
    let wrong = "must be a list of operationIds, or of methods and paths such as \"GET /pets\"";
    let Value::Array(items) = &operations.value else {
        t.push_invalid(operations, "operations", wrong);
        return Vec::new();
    };
    if items.is_empty() {
        t.push_invalid(operations, "operations", "must name an operation");
    }
    let mut names = Vec::new();
    for item in items {
        match &item.value {
            Value::String(name) => names.push((item.clone(), name.clone())),
            _ => t.push_invalid(item, "operations", wrong),
        }
    }
    names
}

/// The error is the second half of a sentence that begins with the key.
fn tool(loaded: &Loaded, name: &str, shared: &Shared) -> Result<HttpTool, String> {
    let repetition = &shared.repetition;
    let set_headers = shared.headers.keys().chain(&repetition.idempotency_header);
    let set_headers: Vec<&str> = set_headers.map(String::as_str).collect();
    let operation = openapi::operation(&loaded.document, name, &set_headers)
        .map_err(|why| format!("names \"{name}\", but the document {why}"))?;
    let failed = |why: String| format!("names \"{name}\", which cannot become a tool: {why}");
    let tool_name = format!("{}{}", shared.prefix, operation.name);
    let tool_name = parse_name(&tool_name).map_err(|why| {
        failed(format!(
            "its name would be \"{tool_name}\", which {why}; set prefix"
        ))
    })?;
    let base = base_of(loaded, &operation, shared).map_err(failed)?;
    let parameters = compile(&operation).map_err(failed)?;
    let schema: Json = serde_json::from_str(parameters.get()).unwrap_or_default();
    // The base has no places for arguments.
    let base = base
        .trim_end_matches('/')
        .replace('{', "{{")
        .replace('}', "}}");
    let url = parse_url(&format!("{base}{}", operation.path), &schema);
    let url = url.map_err(|why| failed(format!("its address {why}")))?;
    Ok(HttpTool {
        name: tool_name,
        description: operation.description,
        method: operation.method,
        url,
        headers: shared.headers.clone(),
        body: None,
        body_format: operation.body_format,
        parameters,
        placement: Some(operation.placement),
        repeat: repetition
            .repeat
            .unwrap_or(Repeat::default_for(operation.method)),
        idempotency_header: repetition.idempotency_header.clone(),
        probe: None,
        timeout: shared.timeout,
        openapi: None,
        table: 0,
    })
}

fn parse_base_url(text: &str) -> Result<Url, String> {
    let url = ssrf::parse_url(text).map_err(|why| why.to_string())?;
    match url.query() {
        None => Ok(url),
        Some(_) => Err("must have no query".to_owned()),
    }
}

/// The address that paths are appended to. Only the operator chooses its host: by `base_url`, by a file, or by the URL of
/// the document.
fn base_of(loaded: &Loaded, operation: &Operation, shared: &Shared) -> Result<String, String> {
    if let Some(base_url) = &shared.base_url {
        return Ok(base_url.to_string());
    }
    let server = operation.server.as_deref();
    let url = match (&loaded.url, server) {
        (Some(url), server) => {
            let joined = url.join(server.unwrap_or("/"));
            let joined = joined.map_err(|why| format!("its server is no URL ({why})"))?;
            if joined.origin() != url.origin() {
                return Err(format!(
                    "its server is {}, which is not the host of the document; if that is right, set base_url",
                    joined.origin().ascii_serialization()
                ));
            }
            joined
        }
        (None, Some(server)) => ssrf::parse_url(server)
            .map_err(|why| format!("its server \"{server}\" {why}; set base_url"))?,
        (None, None) => return Err("the document has no server; set base_url".to_owned()),
    };
    parse_base_url(url.as_str())
        .map(String::from)
        .map_err(|why| format!("its server {why}; set base_url"))
}

/// The schema of the arguments, without its patterns if they are none of ours.
fn compile(operation: &Operation) -> Result<Arc<RawValue>, String> {
    let mut last = String::new();
    for schema in [
        &operation.parameters,
        &operation.parameters_without_patterns,
    ] {
        let raw = to_raw_value(schema).map_err(|error| error.to_string())?;
        match validation::compile_schema_blocking(Arc::from(raw)) {
            Ok(schema) => return Ok(Arc::clone(schema.raw())),
            Err(why) => last = why.to_string(),
        }
    }
    Err(format!("its schema cannot be checked: {last}"))
}
