//! Reads the messages of servers, many of which differ from the protocol. Only what axed needs of an answer has to be
//! right; everything else is left out before the SDK reads it with its strict types.

use std::hash::{DefaultHasher, Hash, Hasher};

use rmcp::model::{
    CallToolResult, ClientRequest, CustomResult, ErrorCode, ErrorData, JsonRpcMessage,
    ProtocolVersion, RequestId, ServerJsonRpcMessage, ServerRequest, ServerResult,
};
use serde_json::{Map, Value, json};

use crate::domain::lenient_json::{is_true, text};
use crate::domain::message::shorten;
use crate::tools::mcp::listed_tool;

/// Where a call has its key, which is the same if the call is repeated.
pub const CALL_KEY: &str = "axed/idempotencyKey";
/// The method of a question to a person, as the SDK gets it: it reads that of the protocol with strict types.
pub const ELICITATION: &str = "axed/elicitation";
/// The parameter of such a question that has the key of the call, if the transport knows the call.
pub const ASKING_CALL: &str = "axed/call";
/// Most messages of one batch.
const MAX_BATCH: usize = 1024;
const MAX_ERROR_CHARS: usize = 4 << 10;

/// A message of a server.
pub enum Message {
    Answer(Answer),
    /// A request or a notification.
    Other(Box<ServerJsonRpcMessage>),
}

/// An answer to one of our requests.
pub struct Answer {
    id: Value,
    outcome: Result<Value, ErrorData>,
    /// Whether it says that it is JSON-RPC. Without that it may be a line of a log.
    pub is_marked: bool,
}

/// What a request is for, and so what its result has to contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Initialize,
    Discover,
    ListTools,
    CallTool,
    Other,
}

impl RequestKind {
    pub fn of(request: &ClientRequest) -> Self {
        match request {
            ClientRequest::InitializeRequest(_) => Self::Initialize,
            ClientRequest::DiscoverRequest(_) => Self::Discover,
            ClientRequest::ListToolsRequest(_) => Self::ListTools,
            ClientRequest::CallToolRequest(_) => Self::CallTool,
            _ => Self::Other,
        }
    }

    /// What this looks like the result of.
    fn guess(result: &Value) -> Self {
        let kinds = [
            ("supportedVersions", Self::Discover),
            ("protocolVersion", Self::Initialize),
            ("content", Self::CallTool),
            ("structuredContent", Self::CallTool),
            ("isError", Self::CallTool),
            ("inputRequests", Self::CallTool),
            ("tools", Self::ListTools),
        ];
        let mut kinds = kinds.into_iter();
        let kind = kinds.find(|(key, _)| result.get(*key).is_some());
        kind.map_or(Self::Other, |(_, kind)| kind)
    }
}

/// The messages in a JSON text: one, those of a batch, or none.
pub fn read(json: Value) -> Vec<Message> {
    match json {
        Value::Object(fields) => read_one(fields).into_iter().collect(),
        Value::Array(batch) => {
            let objects = batch.into_iter().take(MAX_BATCH);
            let objects = objects.filter_map(|message| match message {
                Value::Object(fields) => Some(fields),
                _ => None,
            });
            objects.filter_map(read_one).collect()
        }
        _ => Vec::new(),
    }
}

fn read_one(mut fields: Map<String, Value>) -> Option<Message> {
    let error = fields.remove("error").filter(|error| !error.is_null());
    let is_marked = fields.contains_key("jsonrpc");
    if error.is_some() || fields.contains_key("result") {
        let result = fields.remove("result").unwrap_or_default();
        return Some(Message::Answer(Answer {
            id: fields.remove("id").unwrap_or_default(),
            outcome: error.map_or(Ok(result), |error| Err(read_error(error))),
            is_marked,
        }));
    }
    if !fields.get("method").is_some_and(Value::is_string) || !is_marked {
        return None;
    }
    fields.insert("jsonrpc".to_owned(), json!("2.0"));
    if fields.get("method") == Some(&json!("elicitation/create")) {
        fields.insert("method".to_owned(), json!(ELICITATION));
    }
    if fields.get("id").is_some_and(Value::is_null) {
        fields.remove("id");
    }
    if !fields.get("params").is_some_and(Value::is_object) {
        fields.remove("params");
    }
    let message = serde_json::from_value(Value::Object(fields)).ok()?;
    Some(Message::Other(Box::new(message)))
}

fn read_error(error: Value) -> ErrorData {
    let code = error.get("code").and_then(whole_number);
    // The lowest code stands for a connection that broke.
    let code = code.and_then(|code| i32::try_from(code).ok());
    let code = code.filter(|code| *code != i32::MIN).map(ErrorCode);
    let message = match error.get("message").or_else(|| error.get("error")) {
        Some(Value::String(text)) => text.clone(),
        Some(other) if !other.is_null() => other.to_string(),
        _ => match &error {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        },
    };
    let data = error.get("data").filter(|data| !data.is_null());
    ErrorData::new(
        code.unwrap_or(ErrorCode::INTERNAL_ERROR),
        shorten(&message, MAX_ERROR_CHARS),
        data.cloned(),
    )
}

/// A whole number, also as a text.
fn whole_number(value: &Value) -> Option<i64> {
    match value {
        Value::Number(number) => number.as_i64().or_else(|| {
            let float = number.as_f64().filter(|it| it.fract() == 0.0)?;
            (float.abs() < 1e15).then_some(float as i64)
        }),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

impl Answer {
    /// The number of the request that it answers. Our ids are numbers; some servers return them as texts.
    pub fn request_number(&self) -> Option<i64> {
        whole_number(&self.id)
    }

    /// Equal for equal answers.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.id.to_string().hash(&mut hasher);
        match &self.outcome {
            Ok(result) => result.hash(&mut hasher),
            Err(error) => (error.code.0, error.message.as_ref()).hash(&mut hasher),
        }
        hasher.finish()
    }

    /// Why an answer that is not for `request` fails it; without one, that it is for no request.
    pub fn describe_mismatch(&self, request: Option<&RequestId>) -> String {
        let id = match &self.id {
            Value::String(text) => shorten(text, 50),
            other => shorten(&other.to_string(), 50),
        };
        let why = match request {
            Some(request) => format!("it answered with the id {id} instead of {request}"),
            None => format!("it answered with the id {id}, which no request has"),
        };
        match &self.outcome {
            Ok(_) => why,
            Err(error) => format!("{why}: {}", error.message),
        }
    }

    /// The answer to the request `id`, as the SDK accepts it.
    pub fn into_message(self, id: RequestId, kind: RequestKind) -> ServerJsonRpcMessage {
        match self.outcome {
            Ok(result) => ServerJsonRpcMessage::response(read_result(result, kind), id),
            Err(error) => ServerJsonRpcMessage::error(error, Some(id)),
        }
    }

    /// The answer of a stream that answers a request of unknown kind.
    pub fn into_guessed_message(self) -> Option<ServerJsonRpcMessage> {
        let id = RequestId::Number(self.request_number()?);
        let kind = self
            .outcome
            .as_ref()
            .map_or(RequestKind::Other, RequestKind::guess);
        Some(self.into_message(id, kind))
    }
}

fn read_result(result: Value, kind: RequestKind) -> ServerResult {
    let known = match kind {
        RequestKind::Initialize => typed(initialize_result(&result)),
        RequestKind::Discover => typed(discover_result(&result)),
        RequestKind::ListTools => typed(listed_tool::read_list(result)),
        RequestKind::CallTool if !is_task(&result) => {
            let mut carrier = CallToolResult::default();
            carrier.structured_content = Some(result);
            return ServerResult::CallToolResult(carrier);
        }
        RequestKind::CallTool | RequestKind::Other => typed(result),
    };
    known.unwrap_or_else(|value| ServerResult::CustomResult(CustomResult(value)))
}

fn typed(result: Value) -> Result<ServerResult, Value> {
    serde_json::from_value(result.clone()).map_err(|_| result)
}

/// The result of a call as the server sent it.
pub fn raw_call_result(carrier: CallToolResult) -> Value {
    carrier.structured_content.unwrap_or_default()
}

/// Whether a call became a task, which has its result later.
fn is_task(result: &Value) -> bool {
    let has_task = result.get("task").is_some_and(Value::is_object)
        && RequestKind::guess(result) != RequestKind::CallTool;
    has_task || result.get("resultType").and_then(Value::as_str) == Some("task")
}

/// The key of a call; `None` of other requests.
pub fn call_key(request: &ClientRequest) -> Option<String> {
    let ClientRequest::CallToolRequest(call) = request else {
        return None;
    };
    let key = call.params.meta.as_ref()?.get(CALL_KEY)?;
    key.as_str().map(str::to_owned)
}

/// Names the call on whose stream a question came.
pub fn mark_question(message: &mut ServerJsonRpcMessage, key: &str) {
    if let JsonRpcMessage::Request(request) = message
        && let ServerRequest::CustomRequest(request) = &mut request.request
        && request.method == ELICITATION
        && let Some(Value::Object(params)) = &mut request.params
    {
        params.insert(ASKING_CALL.to_owned(), key.into());
    }
}

fn initialize_result(result: &Value) -> Value {
    if !result.is_object() {
        return result.clone();
    }
    let version = text(result, "protocolVersion");
    json!({
        "protocolVersion": version.unwrap_or(ProtocolVersion::LATEST_WITH_INITIALIZE.as_str()),
        "capabilities": capabilities(result),
        "serverInfo": {"name": "server", "version": "0"},
    })
}

fn discover_result(result: &Value) -> Value {
    let versions = result.get("supportedVersions").and_then(Value::as_array);
    let Some(versions) = versions else {
        return result.clone();
    };
    let versions: Vec<&str> = versions.iter().filter_map(Value::as_str).collect();
    json!({
        "resultType": "complete",
        "supportedVersions": versions,
        "capabilities": capabilities(result),
        "ttlMs": 0,
        "cacheScope": "private",
    })
}

/// The only capability that is used: whether the server announces changes of its tools.
fn capabilities(result: &Value) -> Value {
    let tools = result.get("capabilities").and_then(|it| it.get("tools"));
    let list_changed = tools.and_then(|tools| tools.get("listChanged"));
    json!({"tools": {"listChanged": list_changed.is_some_and(is_true)}})
}
