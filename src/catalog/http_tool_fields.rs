//! What the tables of `[[http_tools]]` have in common: names, addresses, headers.

use serde_json::Value;

use crate::domain::agent::BUILT_IN_TOOLS;
use crate::domain::http_tool::is_tool_name;
use crate::domain::mcp::Template;
use crate::domain::skill::READ_SKILL;
use crate::domain::text_template::{TemplatePart, TextTemplate};
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
