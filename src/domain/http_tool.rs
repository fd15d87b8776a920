//! `[[http_tools]]` of an agent: tools that are HTTP requests. Only the settings, and how arguments become a request.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::http_placement::{Placement, form, push_encoded};
use crate::domain::mcp::Template;
use crate::domain::text_template::{TemplatePart, TextTemplate, find, push_value};
use crate::settings::choice::choice;

/// The most tools of one agent.
pub const MAX_HTTP_TOOLS: usize = 64;
/// The most bytes of a URL with its arguments.
const MAX_URL_BYTES: usize = 8 << 10;
/// The most bytes of a request's body.
const MAX_BODY_BYTES: usize = 1 << 20;

/// The value in a probe's address that is the key of the call.
pub const PROBE_KEY: &str = "key";

/// How often a server may decode a path.
const MAX_DECODINGS: usize = 8;

/// The settings of one tool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HttpTool {
    pub name: String,
    pub description: String,
    pub method: HttpMethod,
    /// The scheme and the host are literal.
    pub url: TextTemplate,
    /// Sent with every request.
    pub headers: BTreeMap<String, Template>,
    /// The body; unset means the arguments that the URL does not use, as JSON, if the method has a body.
    pub body: Option<TextTemplate>,
    pub body_format: BodyFormat,
    /// The schema of the arguments.
    pub parameters: Arc<RawValue>,
    /// Where arguments go that the URL does not use; unset: to the body, as JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// What follows if a call had begun and its end is not known.
    pub repeat: Repeat,
    /// The header that has the key of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_header: Option<String>,
    /// What is requested to find out whether a call was performed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probe>,
    pub timeout: Duration,
    /// The OpenAPI document of the operation that it is, as the agent's file names it, without a query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub openapi: Option<String>,
    /// The index of its table in the agent's file.
    #[serde(skip)]
    pub table: usize,
}

choice! {
    /// Whether a call whose end is not known is sent again.
    pub enum Repeat {
        /// It is not.
        Never = "never",
        /// It is: performing it twice does no harm.
        Safe = "safe",
        /// It is: the service performs it once for its key.
        WithKey = "with_key",
    }
}

impl Repeat {
    /// Of a tool whose file does not say.
    pub fn default_for(method: HttpMethod) -> Self {
        match method {
            HttpMethod::Get => Self::Safe,
            _ => Self::Never,
        }
    }
}

/// A request that a service answers with the result of an earlier call (200), or that there was none (404).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Probe {
    pub method: HttpMethod,
    /// The scheme and the host are literal; `{key}` is the key of the call.
    pub url: TextTemplate,
}

/// The method of a tool's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "AgentHttpToolMethod")]
#[serde(rename_all = "UPPERCASE")]
pub enum HttpMethod {
    /// Reads.
    Get,
    /// Creates or does something.
    Post,
    /// Replaces.
    Put,
    /// Changes.
    Patch,
    /// Deletes.
    Delete,
}

impl HttpMethod {
    pub const NAMES: [(&'static str, Self); 5] = [
        ("GET", Self::Get),
        ("POST", Self::Post),
        ("PUT", Self::Put),
        ("PATCH", Self::Patch),
        ("DELETE", Self::Delete),
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }

    pub fn has_body(self) -> bool {
        matches!(self, Self::Post | Self::Put | Self::Patch)
    }
}

/// How values are inserted into a body, by its content type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BodyFormat {
    /// As JSON values, texts with their quotes.
    Json,
    /// Percent-encoded.
    Form,
    /// Texts as they are.
    Text,
}

impl HttpTool {
    /// The address of a call.
    ///
    /// # Errors
    /// A sentence for the model.
    pub fn render_url(&self, arguments: &Value) -> Result<String, String> {
        render_address(&self.url, self.placement.as_ref(), arguments)
    }

    /// The address that knows whether the call with this key was performed; `None` without a probe.
    ///
    /// # Errors
    /// As of [`HttpTool::render_url`].
    pub fn render_probe(
        &self,
        arguments: &Value,
        key: &str,
    ) -> Option<Result<(HttpMethod, String), String>> {
        let probe = self.probe.as_ref()?;
        let mut values = arguments.as_object().cloned().unwrap_or_default();
        values.insert(PROBE_KEY.to_owned(), key.into());
        let url = render_address(&probe.url, None, &Value::Object(values));
        Some(url.map(|url| (probe.method, url)))
    }

    /// The body of a call; `None` if there is none.
    ///
    /// # Errors
    /// A sentence for the model.
    pub fn render_body(&self, arguments: &Value) -> Result<Option<String>, String> {
        let body = match (&self.body, &self.placement) {
            (Some(template), _) => render_body(template, self.body_format, arguments),
            (None, Some(placement)) => match self.argument_body(placement, arguments) {
                Some(body) => body,
                None => return Ok(None),
            },
            (None, None) if !self.method.has_body() => return Ok(None),
            (None, None) => self.remaining_arguments(arguments).to_string(),
        };
        match body.len() > MAX_BODY_BYTES {
            true => Err(format!("The request has over {MAX_BODY_BYTES} bytes")),
            false => Ok(Some(body)),
        }
    }

    /// The headers of a call that are arguments.
    pub fn render_headers(&self, arguments: &Value) -> Vec<(&str, String)> {
        let placement = self.placement.as_ref();
        placement
            .map(|it| it.headers(arguments))
            .unwrap_or_default()
    }

    /// The argument that is the body; `None` if the call has none.
    fn argument_body(&self, placement: &Placement, arguments: &Value) -> Option<String> {
        let value = arguments.get(placement.body.as_ref()?)?;
        Some(match self.body_format {
            BodyFormat::Json => value.to_string(),
            BodyFormat::Form => form(value),
            BodyFormat::Text => {
                let mut text = String::new();
                push_value(&mut text, Some(value));
                text
            }
        })
    }

    /// The arguments that the URL does not use.
    fn remaining_arguments(&self, arguments: &Value) -> Value {
        let is_used = |name: &str| {
            let mut paths = self.url.paths();
            paths.any(|path| path.first().is_some_and(|first| first == name))
        };
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        let remaining = arguments.into_iter().filter(|(name, _)| !is_used(name));
        Value::Object(remaining.collect::<Map<_, _>>())
    }
}

fn render_address(
    template: &TextTemplate,
    placement: Option<&Placement>,
    arguments: &Value,
) -> Result<String, String> {
    let mut url = String::new();
    let mut is_query = false;
    for part in template.parts() {
        match part {
            TemplatePart::Literal(literal) => {
                url.push_str(literal);
                is_query |= literal.contains('?');
            }
            TemplatePart::Path(path) => {
                let mut value = String::new();
                push_value(&mut value, find(arguments, path));
                if value.is_empty() && !is_query {
                    let name = path.join(".");
                    return Err(format!("The argument {name} is needed for the address"));
                }
                push_encoded(&mut url, &value);
            }
        }
    }
    if let Some(placement) = placement {
        placement.push_query(&mut url, arguments);
    }
    if url.len() > MAX_URL_BYTES {
        return Err(format!("The address has over {MAX_URL_BYTES} bytes"));
    }
    let path = url.split('?').next().unwrap_or_default();
    if has_dot_segment(path) {
        return Err("An argument makes \".\" or \"..\" in the address".to_owned());
    }
    Ok(url)
}

/// A body with these values. Beyond the limit it is not continued, since a template may repeat a long value.
pub fn render_body(template: &TextTemplate, format: BodyFormat, values: &Value) -> String {
    let mut body = String::new();
    for part in template.parts() {
        if body.len() > MAX_BODY_BYTES {
            break;
        }
        match part {
            TemplatePart::Literal(literal) => body.push_str(literal),
            TemplatePart::Path(path) => {
                let value = find(values, path);
                match format {
                    // Writing to a text cannot fail.
                    BodyFormat::Json => drop(write!(body, "{}", value.unwrap_or(&Value::Null))),
                    BodyFormat::Text => push_value(&mut body, value),
                    BodyFormat::Form => {
                        let mut text = String::new();
                        push_value(&mut text, value);
                        push_encoded(&mut body, &text);
                    }
                }
            }
        }
    }
    body
}

/// Whether a path has a segment that parsers of URLs or servers drop, and so would reach another path. Servers may decode a path
/// more than once, take a backslash for a slash, and pass over what follows a semicolon in a segment.
fn has_dot_segment(path: &str) -> bool {
    let mut path = path.as_bytes().to_vec();
    for _ in 0..MAX_DECODINGS {
        let mut segments = path.split(|byte| matches!(byte, b'/' | b'\\'));
        if segments.any(|segment| {
            let name = segment.split(|byte| *byte == b';').next();
            matches!(name, Some(b"." | b".."))
        }) {
            return true;
        }
        let decoded = percent_decoded(&path);
        if decoded.len() == path.len() {
            break;
        }
        path = decoded;
    }
    false
}

/// The bytes with each `%XX` replaced once.
fn percent_decoded(text: &[u8]) -> Vec<u8> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let byte = match (first, after) {
            (b'%', [high, low, ..]) => digit(high).zip(digit(low)),
            _ => None,
        };
        match byte {
            Some((high, low)) => {
                decoded.push(high << 4 | low);
                rest = &after[2..];
            }
            None => {
                decoded.push(*first);
                rest = after;
            }
        }
    }
    decoded
}

/// Whether this is a valid name of such a tool: providers accept it, and it is none of an MCP server.
pub fn is_tool_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    (1..=64).contains(&name.len()) && name.chars().all(is_plain) && !name.contains("__")
}

/// A tool, without headers and what else may hold secrets.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentHttpTool")]
pub struct HttpToolView<'a> {
    /// The name of the tool.
    name: &'a str,
    /// What the tool does, for models.
    description: &'a str,
    /// The method of its requests.
    method: HttpMethod,
    /// The address, with `{name}` for arguments and without the literal query.
    url: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    headers: Option<BTreeMap<&'a str, &'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    body: Option<&'a str>,
    /// The JSON Schema of the arguments.
    #[schemars(with = "Map<String, Value>")]
    parameters: &'a RawValue,
    /// Whether a call whose end is not known is sent again.
    repeat: Repeat,
    /// The header that has the key of the call; absent if it is not sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_header: Option<&'a str>,
    /// Whether a probe finds out if a call whose end is not known was performed.
    has_probe: bool,
    /// The longest time of one call, in seconds.
    timeout: u64,
    /// The OpenAPI document of the operation that the tool is; absent if the agent's file describes its request.
    #[serde(skip_serializing_if = "Option::is_none")]
    openapi: Option<&'a str>,
}

impl<'a> HttpToolView<'a> {
    /// Omits everything that may be a secret.
    pub fn for_client(tool: &'a HttpTool) -> Self {
        let view = Self::for_operator(tool);
        Self {
            url: view.url.split('?').next().unwrap_or_default(),
            headers: None,
            body: None,
            ..view
        }
    }

    /// Shows all keys of the file, but masks headers without variables, which may be secrets.
    pub fn for_operator(tool: &'a HttpTool) -> Self {
        let headers = tool.headers.iter();
        let headers = headers.map(|(name, value)| (name.as_str(), value.redacted()));
        Self {
            name: &tool.name,
            description: &tool.description,
            method: tool.method,
            url: tool.url.as_str(),
            headers: Some(headers.collect()),
            body: tool.body.as_ref().map(TextTemplate::as_str),
            parameters: &tool.parameters,
            repeat: tool.repeat,
            idempotency_header: tool.idempotency_header.as_deref(),
            has_probe: tool.probe.is_some(),
            timeout: tool.timeout.as_secs(),
            openapi: tool.openapi.as_deref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::{BodyFormat, HttpMethod, HttpTool, Repeat};
    use crate::domain::text_template::TextTemplate;

    fn tool(method: HttpMethod, url: &str, body: Option<(&str, BodyFormat)>) -> HttpTool {
        let template = |text| TextTemplate::parse(text).expect("a template");
        let parameters = serde_json::value::to_raw_value(&json!({})).expect("JSON");
        HttpTool {
            name: "t".to_owned(),
            description: String::new(),
            method,
            url: template(url),
            headers: std::collections::BTreeMap::new(),
            body: body.map(|(text, _)| template(text)),
            body_format: body.map_or(BodyFormat::Json, |(_, format)| format),
            parameters: parameters.into(),
            placement: None,
            repeat: Repeat::Never,
            idempotency_header: None,
            probe: None,
            timeout: Duration::from_secs(1),
            openapi: None,
            table: 0,
        }
    }

    #[test]
    fn arguments_cannot_leave_their_position() {
        let tool = tool(
            HttpMethod::Get,
            "https://h/a/{id}/b?q={q.text}&fixed=1",
            None,
        );
        let url = tool.render_url(&json!({"id": "..x/?y#z", "q": {"text": "a b&c=ä"}}));
        assert_eq!(
            url.as_deref(),
            Ok("https://h/a/..x%2F%3Fy%23z/b?q=a%20b%26c%3D%C3%A4&fixed=1")
        );
        assert_eq!(
            tool.render_url(&json!({"id": 7})).as_deref(),
            Ok("https://h/a/7/b?q=&fixed=1")
        );
        for id in [json!(""), json!(null)] {
            assert!(tool.render_url(&json!({ "id": id })).is_err(), "{id}");
        }
        for id in [
            "..",
            ".",
            "../x",
            "x/..",
            "x\\..\\y",
            "%2e%2e",
            "%2E.",
            "..%2fx",
            "%252e%252e",
            "x/..;y/z",
        ] {
            assert!(tool.render_url(&json!({ "id": id })).is_err(), "{id}");
        }
        for id in ["...", "a..b", "..a", "100%", "%zz", "a/b", "v1.2"] {
            assert!(tool.render_url(&json!({ "id": id })).is_ok(), "{id}");
        }
        assert_eq!(tool.render_body(&json!({"id": 7})), Ok(None));
    }

    #[test]
    fn values_cannot_leave_their_place_in_a_body() {
        let arguments = json!({"id": 7, "text": "a\"b&c", "list": [1]});
        for (body, expected) in [
            (None, r#"{"text":"a\"b&c","list":[1]}"#),
            (
                Some((r#"{{"t": {text}, "n": {none}}}"#, BodyFormat::Json)),
                r#"{"t": "a\"b&c", "n": null}"#,
            ),
            (Some(("t={text}", BodyFormat::Form)), "t=a%22b%26c"),
            (Some(("t={text}", BodyFormat::Text)), "t=a\"b&c"),
        ] {
            let tool = tool(HttpMethod::Post, "https://h/{id}", body);
            let rendered = tool.render_body(&arguments);
            assert_eq!(rendered, Ok(Some(expected.to_owned())));
        }
    }
}
