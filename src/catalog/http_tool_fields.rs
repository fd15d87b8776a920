//! What the tables of `[[http_tools]]` have in common: names, addresses, headers.

use serde_json::{Value, json};

use crate::domain::agent::BUILT_IN_TOOLS;
use crate::domain::http_tool::{HttpMethod, PROBE_KEY, Probe, Repeat, is_tool_name};
use crate::domain::mcp::Template;
use crate::domain::skill::READ_SKILL;
use crate::domain::text_template::{TemplatePart, TextTemplate};
use crate::settings::table_reader::TableReader;
use crate::ssrf;

/// The default time limit of one call, in seconds.
pub const DEFAULT_TIMEOUT_SECS: u64 = 30;
/// The highest time limit of one call, in seconds.
pub const MAX_TIMEOUT_SECS: u64 = 600;
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

/// The name of a tool for models.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn parse_name(text: &str) -> Result<String, String> {
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
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn parse_url(text: &str, schema: &Value) -> Result<TextTemplate, String> {
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

/// A header that requests have.
///
/// # Errors
/// The second half of a sentence that begins with the key.
pub fn parse_header(name: &str, value: &str) -> Result<Template, String> {
    if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
        return Err("is no header's name".to_owned());
    }
    if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        return Err("cannot be set: axed sets it".to_owned());
    }
    Template::parse(value)
}

/// What a table says of calls whose end is not known.
#[derive(Default)]
pub struct Repetition {
    /// `None` if the table does not say.
    pub repeat: Option<Repeat>,
    pub idempotency_header: Option<String>,
}

pub fn read_repetition(t: &mut TableReader<'_>) -> Repetition {
    let node = t.peek("repeat");
    let repeat = t.choice("repeat");
    let has_header = t.peek("idempotency_header").is_some();
    let idempotency_header = t.parsed_text("idempotency_header", |name| {
        parse_header(name, "")?;
        Ok(name.to_owned())
    });
    if let (Some(node), Some(Repeat::WithKey), false) = (&node, repeat, has_header) {
        let why = "is \"with_key\", which needs idempotency_header: the header that has the key of a call";
        t.push_invalid(node, "repeat", why);
    }
    Repetition {
        repeat,
        idempotency_header,
    }
}

const NO_KEY: &str =
    "has {key}, which the service gets only with idempotency_header: set that, or use arguments";

/// Reads `probe = { method, url }`; its address may have arguments by this schema, and the key of the call if that is sent.
pub fn read_probe(t: &mut TableReader<'_>, schema: &Value, sends_key: bool) -> Option<Probe> {
    let mut schema = schema.clone();
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.insert(PROBE_KEY.to_owned(), json!({}));
    }
    t.peek("probe")?;
    t.nested("probe", |t| {
        if t.peek("url").is_none() {
            t.push_missing(
                "url",
                "is required: an address that knows what became of a call",
            );
        }
        let method = t.one_of("method", &HttpMethod::NAMES);
        let url = t.parsed_text("url", |text| {
            let url = parse_url(text, &schema)?;
            match text.contains(&format!("{{{PROBE_KEY}}}")) && !sends_key {
                true => Err(NO_KEY.to_owned()),
                false => Ok(url),
            }
        });
        Some(Probe {
            method: method.unwrap_or(HttpMethod::Get),
            url: url?,
        })
    })
}
