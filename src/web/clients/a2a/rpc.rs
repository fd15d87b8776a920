//! `POST /a2a/{agent}`: the JSON-RPC binding. A method is a request of the HTTP+JSON binding in an envelope, and so is its
//! response.

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use url::form_urlencoded;

use crate::config::KeyScope;
use crate::web::auth::Principal;
use crate::web::body::json_body::{self, decode_utf8};
use crate::web::body::request_body::{self, BodyLimits, RequestBody, parse_large};
use crate::web::clients::a2a::push::TaskConfigPath;
use crate::web::clients::a2a::tasks::TaskPath;
use crate::web::clients::a2a::version::Version1;
use crate::web::clients::a2a::{card, content, error, list, push, response, send, tasks};
use crate::web::error::{ErrorShape, Problem, ShapedError, quote};
use crate::web::extract::link_prefix::PublicUrl;
use crate::web::extract::path::{AgentPath, Params};
use crate::web::problem_code::ProblemCode;
use crate::web::response::sse;
use crate::web::routes::create_run::ParsedRequest;
use crate::web::state::AppState;

/// Errors that occur before the request's id is known, such as an unknown key.
pub const ERRORS: ErrorShape = ErrorShape(shape);

const MAX_ID_BYTES: usize = 256;

#[derive(Deserialize)]
struct Envelope<'a> {
    jsonrpc: Option<String>,
    id: Option<Box<RawValue>>,
    method: Option<String>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

struct Call {
    /// The JSON of the request's id: a text, or a number.
    id: String,
    method: String,
    /// The JSON of an object: a part of the body.
    params: Bytes,
}

pub async fn post(
    State(state): State<AppState>,
    AgentPath(agent): AgentPath,
    principal: Principal,
    url: PublicUrl,
    version: Result<Version1, Problem>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let limits = BodyLimits {
        data_fields: content::DATA_FIELDS,
        ..state.settings.body_limits_with_attachments()
    };
    let body = match request_body::read(&parts, body, limits).await? {
        RequestBody::Json(bytes) => bytes,
        _ => return Err(invalid_request("the body must be a JSON-RPC request")),
    };
    let call = parse_large(body.len(), move || parse(&body)).await?;
    let id = call.id.clone();
    let called = async {
        version?;
        perform(&state, &principal, agent, &url, call, parts.headers).await
    };
    let outcome = match called.await {
        Ok(response) => in_envelope(response, &id).await,
        Err(problem) => Err(problem),
    };
    Ok(outcome.unwrap_or_else(|problem| {
        problem.log("An A2A request");
        response_of(status_of(&problem), error_body(&problem, &id).into())
    }))
}

fn parse(body: &Bytes) -> Result<Call, Problem> {
    let text = decode_utf8(body)?;
    let envelope = serde_json::from_str::<Envelope<'_>>(text).map_err(|error| {
        match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => invalid_request(&format!(
                "not a JSON-RPC request: {}",
                json_body::describe(&error)
            )),
            Err(error) => Problem::new(
                ProblemCode::InvalidJson,
                format!("the body is not valid JSON: {error}"),
            ),
        }
    })?;
    if envelope.jsonrpc.as_deref() != Some("2.0") {
        return Err(invalid_request("\"jsonrpc\" must be \"2.0\""));
    }
    let id = envelope
        .id
        .map(|id| id.get().to_owned())
        .unwrap_or_default();
    let is_id = matches!(id.as_bytes().first(), Some(b'"' | b'-' | b'0'..=b'9'));
    if !is_id || id.len() > MAX_ID_BYTES {
        return Err(invalid_request("\"id\" must be a short text or a number"));
    }
    let method = envelope
        .method
        .ok_or_else(|| invalid_request("\"method\" is missing"))?;
    let params = match envelope.params {
        Some(params) if params.get().starts_with('{') => body.slice_ref(params.get().as_bytes()),
        Some(_) => return Err(invalid_request("\"params\" must be an object")),
        None => Bytes::from_static(b"{}"),
    };
    Ok(Call { id, method, params })
}

fn invalid_request(detail: &str) -> Problem {
    Problem::new(ProblemCode::MalformedBody, detail)
}

async fn perform(
    state: &AppState,
    principal: &Principal,
    agent: String,
    url: &PublicUrl,
    call: Call,
    mut headers: HeaderMap,
) -> Result<Response, Problem> {
    let params = call.params;
    // That of the parameters, also if the body's is spelled otherwise.
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let (app, caller) = (State(state.clone()), principal.clone());
    match call.method.as_str() {
        "SendMessage" => {
            principal.require_any_scope(&send::SCOPES)?;
            let request = ParsedRequest::of_part(&headers, params)?;
            send::respond(state, principal, agent, request).await
        }
        "SendStreamingMessage" => {
            principal.require_any_scope(&send::SCOPES)?;
            let request = ParsedRequest::of_part(&headers, params)?;
            send::respond_streaming(state, principal, agent, request).await
        }
        "GetTask" => {
            principal.require_scope(KeyScope::Read)?;
            let params = CallParams::read(&params)?;
            let history = params.history_length()?;
            tasks::read(state, principal, &agent, params.text("id")?, history).await
        }
        "ListTasks" => {
            principal.require_scope(KeyScope::Read)?;
            let uri = CallParams::read(&params)?.as_query()?;
            list::list(app, Version1, AgentPath(agent), caller, uri).await
        }
        "CancelTask" => {
            principal.require_scope(KeyScope::Cancel)?;
            let params = CallParams::read(&params)?;
            tasks::cancel(state, principal, &agent, params.text("id")?).await
        }
        "SubscribeToTask" => {
            principal.require_scope(KeyScope::Read)?;
            let params = CallParams::read(&params)?;
            tasks::subscribe(state, principal, &agent, params.text("id")?).await
        }
        "CreateTaskPushNotificationConfig" => {
            principal.require_scope(KeyScope::Run)?;
            let id = CallParams::read(&params)?.text("taskId")?.to_owned();
            let run = tasks::find(state, principal, &agent, &id).await?;
            push::respond_to_new(state, &run, &RequestBody::Json(params)).await
        }
        "GetTaskPushNotificationConfig" => {
            principal.require_scope(KeyScope::Read)?;
            let path = CallParams::read(&params)?.config_path(agent)?;
            push::get(app, Version1, caller, Params(path)).await
        }
        "ListTaskPushNotificationConfigs" => {
            principal.require_scope(KeyScope::Read)?;
            let id = CallParams::read(&params)?.text("taskId")?.to_owned();
            push::list(app, Version1, caller, Params(TaskPath { agent, id })).await
        }
        "DeleteTaskPushNotificationConfig" => {
            principal.require_scope(KeyScope::Run)?;
            let path = CallParams::read(&params)?.config_path(agent)?;
            push::delete(app, Version1, caller, Params(path)).await
        }
        "GetExtendedAgentCard" => {
            let card = card::of(state, principal, &agent, url)?;
            response::json(&card)
        }
        method => Err(Problem::new(
            ProblemCode::MethodNotAllowed,
            format!("there is no method {}", quote(method)),
        )),
    }
}

/// Parameters that are few and short.
struct CallParams(Map<String, Value>);

impl CallParams {
    fn read(params: &[u8]) -> Result<Self, Problem> {
        json_body::parse_raw(decode_utf8(params)?, "/params").map(Self)
    }

    fn text(&self, name: &str) -> Result<&str, Problem> {
        let text = self.0.get(name).and_then(Value::as_str);
        text.filter(|text| !text.is_empty()).ok_or_else(|| {
            Problem::invalid_field(format!("/params/{name}"), "must be a text, and is required")
        })
    }

    fn history_length(&self) -> Result<Option<usize>, Problem> {
        match self
            .0
            .get("historyLength")
            .filter(|length| !length.is_null())
        {
            None => Ok(None),
            Some(length) => match length.as_u64().and_then(|it| usize::try_from(it).ok()) {
                Some(length) => Ok(Some(length)),
                None => Err(Problem::invalid_field(
                    "/params/historyLength",
                    "must be a number, 0 or more",
                )),
            },
        }
    }

    fn config_path(&self, agent: String) -> Result<TaskConfigPath, Problem> {
        Ok(TaskConfigPath {
            agent,
            id: self.text("taskId")?.to_owned(),
            config: self.text("id")?.to_owned(),
        })
    }

    /// As the query of a request.
    fn as_query(&self) -> Result<Uri, Problem> {
        let mut query = form_urlencoded::Serializer::new("/?".to_owned());
        for (name, value) in &self.0 {
            match value {
                Value::Null => {}
                Value::String(text) => {
                    query.append_pair(name, text);
                }
                other => {
                    query.append_pair(name, &other.to_string());
                }
            }
        }
        let uri = query.finish().parse::<Uri>();
        uri.map_err(|_| invalid_request("\"params\" are too long"))
    }
}

/// The response of the HTTP+JSON binding as the result of a request, or of each event of a stream.
async fn in_envelope(response: Response, id: &str) -> Result<Response, Problem> {
    let (parts, body) = response.into_parts();
    let start = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":");
    let content_type = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if content_type == Some(sse::MEDIA_TYPE.as_bytes()) {
        let body = body
            .into_data_stream()
            .map(move |chunk| chunk.map(|chunk| Bytes::from(events_in_envelope(&chunk, &start))));
        return Ok(Response::from_parts(parts, Body::from_stream(body)));
    }
    let body = to_bytes(body, usize::MAX).await;
    let body = body.map_err(|error| Problem::internal(format!("a response is cut: {error}")))?;
    let enveloped = [start.as_bytes(), &body, b"}"].concat();
    let mut response = response_of(parts.status, enveloped);
    if let Some(run) = parts.headers.get(response::RUN_ID) {
        response.headers_mut().insert(response::RUN_ID, run.clone());
    }
    Ok(response)
}

/// `events` are whole ones: each has one line of data.
fn events_in_envelope(events: &[u8], start: &str) -> Vec<u8> {
    let mut enveloped = Vec::with_capacity(events.len() + start.len());
    for line in events.split_inclusive(|byte| *byte == b'\n') {
        match line.strip_prefix(b"data: ".as_slice()) {
            Some(data) => {
                enveloped.extend_from_slice(b"data: ");
                enveloped.extend_from_slice(start.as_bytes());
                enveloped.extend_from_slice(data.trim_ascii_end());
                enveloped.extend_from_slice(b"}\n");
            }
            None => enveloped.extend_from_slice(line),
        }
    }
    enveloped
}

fn response_of(status: StatusCode, body: Vec<u8>) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    (status, json, Body::from(body)).into_response()
}

fn shape(problem: &Problem) -> ShapedError {
    ShapedError {
        status: status_of(problem),
        body: error_body(problem, "null").into_bytes(),
    }
}

fn error_body(problem: &Problem, id: &str) -> String {
    let error = json!({
        "code": error::rpc_code(problem),
        "message": problem.detail(),
        "data": error::details(problem),
    });
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{error}}}")
}

/// Most errors are 200: clients read the body only then. What a proxy or an HTTP client acts on keeps its status.
fn status_of(problem: &Problem) -> StatusCode {
    match problem.status() {
        status @ (StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::TOO_MANY_REQUESTS
        | StatusCode::SERVICE_UNAVAILABLE) => status,
        _ => StatusCode::OK,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::{events_in_envelope, parse};

    #[test]
    fn each_event_is_a_result() {
        let events = b"data: {\"a\":1}\n\n:\n\ndata: {}\n\n";
        let enveloped = events_in_envelope(events, "{\"id\":1,\"result\":");
        let expected =
            "data: {\"id\":1,\"result\":{\"a\":1}}\n\n:\n\ndata: {\"id\":1,\"result\":{}}\n\n";
        assert_eq!(String::from_utf8_lossy(&enveloped), expected);
    }

    #[test]
    fn a_request_has_an_id_and_a_method() {
        let parse = |text: &str| parse(&Bytes::copy_from_slice(text.as_bytes()));
        let code = |text: &str| parse(text).err().map(|problem| problem.code());
        let call = r#"{"jsonrpc":"2.0","id":"a","method":"GetTask"}"#;
        assert_eq!(code(call), None);
        assert_eq!(code("{"), Some("invalid_json"));
        for text in [
            "[]",
            "1",
            r#"{"id":1,"method":"GetTask"}"#,
            r#"{"jsonrpc":"2.0","method":"GetTask"}"#,
            r#"{"jsonrpc":"2.0","id":null,"method":"GetTask"}"#,
            r#"{"jsonrpc":"2.0","id":{},"method":"GetTask"}"#,
            r#"{"jsonrpc":"2.0","id":1}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":[]}"#,
        ] {
            assert_eq!(code(text), Some("malformed_body"), "{text}");
        }
    }
}
