//! JSON-RPC 2.0 as MCP uses it: one message a request, and errors with the code of the problem in `data`.

use std::sync::Arc;

use axum::http::StatusCode;
use rmcp::model::{ErrorCode, RequestId};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::web::body::json_body::{self, MAX_DEPTH, Object, decode_utf8};
use crate::web::body::request_body::parse_large;
use crate::web::error::{ErrorShape, Problem, ShapedError};
use crate::web::problem_code::ProblemCode;

/// Errors that occur before a message is read, such as an unknown key.
pub const ERRORS: ErrorShape = ErrorShape(shape);

/// A message of a client.
pub enum Message {
    Request(RpcRequest),
    Notification {
        method: String,
        params: Arc<RawValue>,
    },
    /// The response to a request of the server, which sends none.
    Response,
}

pub struct RpcRequest {
    pub id: RequestId,
    pub method: String,
    pub head: Box<ParamsHead>,
    /// As text: values take many times its memory.
    params: Arc<RawValue>,
}

/// The members of the parameters that are read for every method.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ParamsHead {
    #[serde(rename = "_meta")]
    pub meta: Option<Value>,
    pub name: Option<Value>,
    pub uri: Option<Value>,
    pub task_id: Option<Value>,
}

impl RpcRequest {
    /// The parameters as the type of the method.
    pub async fn params<T: DeserializeOwned + Send + 'static>(&self) -> Result<T, RpcError> {
        let params = Arc::clone(&self.params);
        let read = parse_large(params.get().len(), move || {
            serde_json::from_str::<T>(params.get())
        });
        read.await.map_err(|error| {
            let why = json_body::describe(&error);
            RpcError::new(
                ErrorCode::INVALID_PARAMS,
                format!("invalid params of {}: {why}", self.method),
            )
        })
    }
}

#[derive(Deserialize)]
struct Envelope {
    jsonrpc: Option<String>,
    #[serde(default)]
    id: Option<Value>,
    #[serde(default)]
    method: Option<String>,
    #[serde(default)]
    params: Option<Box<RawValue>>,
    #[serde(default)]
    result: Option<IgnoredAny>,
    #[serde(default)]
    error: Option<IgnoredAny>,
}

impl Message {
    pub fn parse(body: &[u8]) -> Result<Self, RpcError> {
        let text = decode_utf8(body)?;
        if json_body::nesting_depth(text) > MAX_DEPTH {
            return Err(parse_error(json_body::too_deep().detail()));
        }
        let envelope = match serde_json::from_str::<Object<Envelope>>(text) {
            Ok(Object(envelope)) => envelope,
            Err(error) => return Err(not_a_message(text, &error)),
        };
        if envelope.jsonrpc.as_deref() != Some("2.0") {
            return Err(invalid_request("\"jsonrpc\" must be \"2.0\""));
        }
        let params: Arc<RawValue> = match envelope.params {
            Some(params) => params.into(),
            None => Arc::from(RawValue::from_string("{}".to_owned()).unwrap_or_default()),
        };
        let head = serde_json::from_str::<Object<ParamsHead>>(params.get());
        let Object(head) = head.map_err(|error| not_a_message(text, &error))?;
        match (envelope.method, envelope.id) {
            (Some(method), None) => Ok(Self::Notification { method, params }),
            (Some(method), Some(id)) => {
                let id = RequestId::deserialize(&id)
                    .map_err(|_| invalid_request("\"id\" must be a string or a whole number"))?;
                Ok(Self::Request(RpcRequest {
                    id,
                    method,
                    head: Box::new(head),
                    params,
                }))
            }
            (None, _) if envelope.result.is_some() || envelope.error.is_some() => {
                Ok(Self::Response)
            }
            (None, _) => Err(invalid_request("\"method\" is missing")),
        }
    }
}

/// A text that is no JSON, or JSON of another shape.
fn not_a_message(text: &str, error: &serde_json::Error) -> RpcError {
    if let Err(error) = serde_json::from_str::<IgnoredAny>(text) {
        return parse_error(&format!("the body is not valid JSON: {error}"));
    }
    if text.trim_start().starts_with('[') {
        return invalid_request(
            "batches are not supported: send each message in a request of its own",
        );
    }
    let why = json_body::describe(error);
    invalid_request(&format!("not a JSON-RPC message: {why}"))
}

fn parse_error(message: &str) -> RpcError {
    RpcError::new(ErrorCode::PARSE_ERROR, message).with_status(StatusCode::BAD_REQUEST)
}

fn invalid_request(message: &str) -> RpcError {
    RpcError::new(ErrorCode::INVALID_REQUEST, message).with_status(StatusCode::BAD_REQUEST)
}

/// Why a request has no result.
#[derive(Debug)]
pub struct RpcError {
    /// Most errors are 200: clients read the body only then.
    pub status: StatusCode,
    code: ErrorCode,
    message: String,
    data: Option<Value>,
}

impl RpcError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::OK,
            code,
            message: message.into(),
            data: None,
        }
    }

    #[must_use]
    pub fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    #[must_use]
    pub fn with_data(self, data: Value) -> Self {
        Self {
            data: Some(data),
            ..self
        }
    }

    #[must_use]
    pub fn with_code(self, code: ErrorCode) -> Self {
        Self { code, ..self }
    }

    /// The response. `id` is missing if the request's could not be read.
    pub fn response(&self, id: Option<&RequestId>) -> Value {
        let mut response = json!({ "jsonrpc": "2.0" });
        if let Some(id) = id {
            response["id"] = json!(id);
        }
        response["error"] = json!({ "code": self.code.0, "message": self.message });
        if let Some(data) = &self.data {
            response["error"]["data"] = data.clone();
        }
        response
    }
}

impl From<Problem> for RpcError {
    fn from(problem: Problem) -> Self {
        let status = problem.status();
        problem.log("An MCP request");
        let code = match status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            true => ErrorCode::INTERNAL_ERROR,
            false => ErrorCode::INVALID_PARAMS,
        };
        let mut error = Self::new(code, problem.detail()).with_data(problem_data(&problem));
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            error.status = status;
        }
        error
    }
}

/// The problem as the `data` of an error: its code, its status, and the field that is wrong.
pub fn problem_data(problem: &Problem) -> Value {
    let mut data = Map::new();
    data.insert("code".to_owned(), problem.code().into());
    data.insert("status".to_owned(), problem.status().as_u16().into());
    if let Some(pointer) = problem.pointer() {
        data.insert("pointer".to_owned(), pointer.into());
    }
    Value::Object(data)
}

fn shape(problem: &Problem) -> ShapedError {
    let code = match problem.status().is_server_error() {
        true => ErrorCode::INTERNAL_ERROR,
        false => ErrorCode::INVALID_REQUEST,
    };
    let error = RpcError::new(code, problem.detail()).with_data(problem_data(problem));
    ShapedError {
        status: problem.status(),
        body: error.response(None).to_string().into_bytes(),
    }
}

/// A request that the daemon cannot finish because it stops.
pub fn closing(detail: String) -> Problem {
    Problem::new(ProblemCode::Draining, detail)
}

#[cfg(test)]
mod tests {
    use super::{Message, RpcError};
    use crate::web::error::Problem;

    #[test]
    fn messages_differ_by_their_members() {
        let parse = |text: &str| Message::parse(text.as_bytes());
        let request = parse(r#"{"jsonrpc":"2.0","id":"a","method":"ping"}"#);
        assert!(matches!(request, Ok(Message::Request(it)) if it.method == "ping"));
        let notification = parse(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
        assert!(matches!(notification, Ok(Message::Notification { .. })));
        let response = parse(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#);
        assert!(matches!(response, Ok(Message::Response)));
    }

    #[test]
    fn a_malformed_message_is_400() {
        for (text, code) in [
            ("{", -32700),
            ("[]", -32600),
            ("1", -32600),
            (r#"{"id":1,"method":"ping"}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1}"#, -32600),
            (r#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#, -32600),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"x","params":[]}"#,
                -32600,
            ),
        ] {
            let error = Message::parse(text.as_bytes()).err().expect(text);
            assert_eq!(error.status, 400, "{text}");
            assert_eq!(error.response(None)["error"]["code"], code, "{text}");
        }
    }

    #[test]
    fn deep_parameters_are_malformed() {
        let params = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"x","params":{params}}}"#);
        let error = Message::parse(body.as_bytes()).err().expect("an error");
        assert_eq!(error.response(None)["error"]["code"], -32700);
    }

    #[test]
    fn a_problem_keeps_its_code() {
        let error = RpcError::from(Problem::invalid_field("/input", "is empty"));
        insta::assert_snapshot!(error.response(None), @r#"{"jsonrpc":"2.0","error":{"code":-32602,"message":"/input: is empty","data":{"code":"invalid_field","status":422,"pointer":"/input"}}}"#);
    }
}
