//! Which version a request speaks and what its client can do. A request of 2026-07-28 says both in `_meta`, and repeats parts
//! of its body in headers, which have to match. Requests of earlier versions say neither.

use axum::http::{HeaderMap, StatusCode};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rmcp::model::{
    ClientCapabilities, ElicitationCapability, ErrorCode, JsonObject, ProgressToken,
    ProtocolVersion, RequestMetaObject, TASKS_EXTENSION_ID,
};
use serde_json::{Value, json};

use crate::web::clients::mcp::rpc::{RpcError, RpcRequest};
use crate::web::error::quote;

/// The newest first.
pub const SUPPORTED_VERSIONS: [ProtocolVersion; 4] = [
    ProtocolVersion::V_2026_07_28,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_03_26,
];

const VERSION_HEADER: &str = "mcp-protocol-version";
const METHOD_HEADER: &str = "mcp-method";
const NAME_HEADER: &str = "mcp-name";

/// What one request says about its client.
pub struct Caller {
    /// Whether the request is of 2026-07-28, which has no handshake.
    pub is_modern: bool,
    /// None for a request of an earlier version, which declared them in its handshake.
    pub capabilities: ClientCapabilities,
    /// Where progress may be reported.
    pub progress_token: Option<ProgressToken>,
    pub traceparent: Option<String>,
}

impl Caller {
    /// Checks the version, the required metadata and the headers.
    pub fn read(request: &mut RpcRequest, headers: &HeaderMap) -> Result<Self, RpcError> {
        let meta = match request.head.meta.take() {
            Some(Value::Object(meta)) => RequestMetaObject::from(meta),
            _ => RequestMetaObject::from(JsonObject::new()),
        };
        let header = header_text(headers, VERSION_HEADER)?;
        let requested = meta.protocol_version();
        let is_modern = requested.is_some()
            || request.method == "server/discover"
            || header.is_some_and(|version| version >= ProtocolVersion::NO_INITIALIZE.as_str());
        if is_modern {
            check_modern(request, headers, &meta, header)?;
        } else if let Some(version) = header {
            check_supported(version)?;
        }
        Ok(Self {
            is_modern,
            capabilities: meta.client_capabilities().unwrap_or_default(),
            progress_token: meta.get_progress_token(),
            traceparent: meta.get_traceparent().map(str::to_owned),
        })
    }

    pub fn supports_tasks(&self) -> bool {
        self.is_modern && self.capabilities.supports_tasks()
    }

    /// Whether the client can show a form to its user.
    pub fn supports_forms(&self) -> bool {
        let elicitation = self.capabilities.elicitation.as_ref();
        // No mode at all means forms.
        let has_forms = |it: &ElicitationCapability| it.form.is_some() || it.url.is_none();
        self.is_modern && elicitation.is_some_and(has_forms)
    }

    /// 400 if the client does not declare the tasks extension.
    pub fn require_tasks(&self) -> Result<(), RpcError> {
        if self.supports_tasks() {
            return Ok(());
        }
        let missing = json!({ "extensions": { TASKS_EXTENSION_ID: {} } });
        let message = "this needs the client to declare the tasks extension";
        Err(
            RpcError::new(ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY, message)
                .with_data(json!({ "requiredCapabilities": missing }))
                .with_status(StatusCode::BAD_REQUEST),
        )
    }
}

fn check_modern(
    request: &RpcRequest,
    headers: &HeaderMap,
    meta: &RequestMetaObject,
    version_header: Option<&str>,
) -> Result<(), RpcError> {
    let version = meta.protocol_version();
    if let (Some(version), Some(header)) = (&version, version_header)
        && header != version.as_str()
    {
        return Err(mismatch(VERSION_HEADER, header, version.as_str()));
    }
    if let Some(version) = version
        .as_ref()
        .map(ProtocolVersion::as_str)
        .or(version_header)
    {
        check_supported(version)?;
    }
    let missing = meta.missing_required_keys(&ProtocolVersion::V_2026_07_28);
    if !missing.is_empty() {
        let message = format!("params._meta lacks {}", missing.join(", "));
        return Err(
            RpcError::new(ErrorCode::INVALID_PARAMS, message).with_status(StatusCode::BAD_REQUEST)
        );
    }
    if version_header.is_none() {
        return Err(missing_header(VERSION_HEADER));
    }
    check_header(headers, METHOD_HEADER, &request.method)?;
    match named_thing(request) {
        Some(name) => check_header(headers, NAME_HEADER, name),
        None => Ok(()),
    }
}

/// 400 with the supported versions.
fn check_supported(version: &str) -> Result<(), RpcError> {
    if SUPPORTED_VERSIONS.iter().any(|it| it.as_str() == version) {
        return Ok(());
    }
    let message = format!("unsupported protocol version {}", quote(version));
    Err(
        RpcError::new(ErrorCode::UNSUPPORTED_PROTOCOL_VERSION, message)
            .with_data(json!({ "supported": SUPPORTED_VERSIONS, "requested": version }))
            .with_status(StatusCode::BAD_REQUEST),
    )
}

/// What the header `Mcp-Name` repeats; `None` for a method without such a header.
fn named_thing(request: &RpcRequest) -> Option<&str> {
    let member = match request.method.as_str() {
        "tools/call" | "prompts/get" => &request.head.name,
        "resources/read" => &request.head.uri,
        "tasks/get" | "tasks/update" | "tasks/cancel" => &request.head.task_id,
        _ => return None,
    };
    // A missing member is reported as such when the parameters are read.
    member.as_ref().and_then(Value::as_str)
}

fn check_header(headers: &HeaderMap, name: &str, wanted: &str) -> Result<(), RpcError> {
    let value = header_text(headers, name)?.ok_or_else(|| missing_header(name))?;
    let decoded = decode(value).ok_or_else(|| mismatch(name, value, wanted))?;
    match decoded == wanted {
        true => Ok(()),
        false => Err(mismatch(name, &decoded, wanted)),
    }
}

/// The value of a header; `None` if the header is missing.
fn header_text<'h>(headers: &'h HeaderMap, name: &str) -> Result<Option<&'h str>, RpcError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    match (value.to_str(), values.next()) {
        (Ok(text), None) => Ok(Some(text.trim())),
        _ => Err(header_error(format!(
            "the header {name} is repeated or contains invalid characters"
        ))),
    }
}

/// The text of a value that may be encoded as `=?base64?…?=`.
fn decode(value: &str) -> Option<String> {
    let encoded = value
        .strip_prefix("=?base64?")
        .and_then(|rest| rest.strip_suffix("?="));
    match encoded {
        Some(encoded) => String::from_utf8(BASE64_STANDARD.decode(encoded).ok()?).ok(),
        None => Some(value.to_owned()),
    }
}

fn missing_header(name: &str) -> RpcError {
    header_error(format!("the header {name} is missing"))
}

fn mismatch(name: &str, header: &str, body: &str) -> RpcError {
    let (header, body) = (quote(header), quote(body));
    header_error(format!(
        "the header {name} is {header}, but the body says {body}"
    ))
}

fn header_error(message: String) -> RpcError {
    RpcError::new(ErrorCode::HEADER_MISMATCH, message).with_status(StatusCode::BAD_REQUEST)
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn names_that_are_no_header_values_are_decoded() {
        assert_eq!(decode("planner").as_deref(), Some("planner"));
        assert_eq!(decode("=?base64?SGVsbG8=?=").as_deref(), Some("Hello"));
        assert_eq!(decode("=?base64?%%%?="), None);
    }
}
