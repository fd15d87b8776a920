//! `POST /mcp`: reads one message, checks what it says about its version, and calls the method.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header::HeaderName;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use rmcp::model::{CancelledNotificationParam, ErrorCode, JsonObject, RequestId};
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;

use crate::config::KeyScope;
use crate::domain::run::RunId;
use crate::web::auth::Principal;
use crate::web::body::request_body::{self, RequestBody, parse_large, unsupported_media_type};
use crate::web::clients::mcp::call::{CallOutcome, call};
use crate::web::clients::mcp::call_stream::CallStream;
use crate::web::clients::mcp::open_calls::{CallKey, OpenCalls, SESSION_HEADER};
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{Message, RpcError, RpcRequest};
use crate::web::clients::mcp::server_info::{self, complete};
use crate::web::clients::mcp::subscription::TaskSubscription;
use crate::web::clients::mcp::{resources, tasks, tools};
use crate::web::error::{Problem, quote};
use crate::web::extract::accept::{prefers_stream, takes_stream};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::response::json::json_response;
use crate::web::response::sse;
use crate::web::response::stream_driver::StreamDriver;
use crate::web::state::AppState;

const RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

pub async fn post(
    State(state): State<AppState>,
    Extension(open_calls): Extension<Arc<OpenCalls>>,
    principal: Principal,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let limits = state.settings.body_limits();
    let body = match request_body::read(&parts, body, limits).await? {
        RequestBody::Json(bytes) => bytes,
        RequestBody::Empty => Bytes::new(),
        RequestBody::Text(_) => return Err(unsupported_media_type("text/plain")),
        RequestBody::Form(_) => {
            return Err(unsupported_media_type(request_body::FORM_CONTENT_TYPE));
        }
    };
    let message = match parse_large(body.len(), move || Message::parse(&body)).await {
        Ok(message) => message,
        Err(error) => return Ok(json_response(error.status, &error.response(None))),
    };
    match message {
        Message::Request(request) => {
            let id = request.id.clone();
            // The run may take long: nothing of the request is kept but its id.
            let headers = &parts.headers;
            let replied = respond(&state, &open_calls, &principal, &links, headers, request);
            Ok(match replied.await {
                Ok(Reply::Response(response)) => response,
                Ok(Reply::Call(outcome)) => call_response(headers, &id, outcome).await,
                Err(error) => json_response(error.status, &error.response(Some(&id))),
            })
        }
        Message::Notification { method, params } => {
            if method == "notifications/cancelled" {
                cancel_call(&open_calls, &principal, &parts.headers, &params);
            }
            Ok(StatusCode::ACCEPTED.into_response())
        }
        Message::Response => Ok(StatusCode::ACCEPTED.into_response()),
    }
}

/// Cancels a call of a client of an earlier version.
fn cancel_call(
    open_calls: &OpenCalls,
    principal: &Principal,
    headers: &HeaderMap,
    params: &RawValue,
) {
    let params = serde_json::from_str::<CancelledNotificationParam>(params.get()).ok();
    let request = params.and_then(|params| params.request_id);
    let key = request.and_then(|id| CallKey::new(principal, headers, id));
    if let Some(key) = key {
        open_calls.cancel(&key);
    }
}

/// What a request gets.
enum Reply {
    Response(Response),
    Call(CallOutcome),
}

async fn respond(
    state: &AppState,
    open_calls: &Arc<OpenCalls>,
    principal: &Principal,
    links: &str,
    headers: &HeaderMap,
    mut request: RpcRequest,
) -> Result<Reply, RpcError> {
    let caller = Caller::read(&mut request, headers)?;
    let request = &request;
    let response = match request.method.as_str() {
        "initialize" if !caller.is_modern => {
            let mut response = success(request, &caller, server_info::initialize(request).await?)?;
            let session = RunId::new().0.to_string();
            if let Ok(session) = HeaderValue::try_from(session) {
                response.headers_mut().insert(SESSION_HEADER, session);
            }
            Ok(response)
        }
        "ping" if !caller.is_modern => success(request, &caller, JsonObject::new()),
        "server/discover" => success(request, &caller, server_info::discover()),
        "tools/list" => {
            principal.require_any_scope(&[KeyScope::Run, KeyScope::Read])?;
            success(request, &caller, tools::list(state, principal))
        }
        "tools/call" => {
            let outcome = call(state, open_calls, principal, headers, &caller, request).await?;
            return Ok(Reply::Call(outcome));
        }
        "subscriptions/listen" if caller.is_modern => {
            if !takes_stream(headers) {
                let message = "the response is a stream: accept text/event-stream";
                let error = RpcError::new(ErrorCode::INVALID_REQUEST, message);
                return Err(error.with_status(StatusCode::NOT_ACCEPTABLE));
            }
            let subscription = TaskSubscription::new(state, principal, &caller, request).await?;
            Ok(subscription_response(subscription))
        }
        "resources/list" => {
            let list = resources::list(state, principal, request).await?;
            success(request, &caller, list)
        }
        "resources/templates/list" => success(request, &caller, resources::templates()),
        "resources/read" => {
            let read = resources::read(state, principal, links, &caller, request).await?;
            success(request, &caller, read)
        }
        "tasks/get" if caller.is_modern => {
            let task = tasks::get(state, principal, &caller, request).await?;
            success(request, &caller, task)
        }
        "tasks/update" if caller.is_modern => {
            let updated = tasks::update(state, principal, &caller, request).await?;
            success(request, &caller, updated)
        }
        "tasks/cancel" if caller.is_modern => {
            let cancelled = tasks::cancel(state, principal, &caller, request).await?;
            success(request, &caller, cancelled)
        }
        method => Err(unknown_method(method, &caller)),
    };
    response.map(Reply::Response)
}

fn unknown_method(method: &str, caller: &Caller) -> RpcError {
    let message = format!("there is no method {}", quote(method));
    let error = RpcError::new(ErrorCode::METHOD_NOT_FOUND, message);
    match caller.is_modern {
        true => error.with_status(StatusCode::NOT_FOUND),
        // Clients of earlier versions take 404 for the end of their session.
        false => error,
    }
}

fn success(
    request: &RpcRequest,
    caller: &Caller,
    result: impl Serialize,
) -> Result<Response, RpcError> {
    let result = complete(result, caller.is_modern)?;
    let response = json!({ "jsonrpc": "2.0", "id": request.id, "result": result });
    Ok(json_response(StatusCode::OK, &response))
}

/// The result, or a stream that ends with it. A client that takes no stream waits for the result alone.
async fn call_response(headers: &HeaderMap, id: &RequestId, outcome: CallOutcome) -> Response {
    let (run, mut response) = match outcome {
        CallOutcome::Result { result, run } => {
            let response = json!({ "jsonrpc": "2.0", "id": id, "result": result });
            (run, json_response(StatusCode::OK, &response))
        }
        CallOutcome::Waiting { run, stream } if prefers_stream(headers) => {
            (Some(run), stream.into_response())
        }
        CallOutcome::Waiting { run, stream } => (Some(run), last_response(stream).await),
    };
    if let Some(run) = run
        && let Ok(run) = HeaderValue::try_from(run.to_string())
    {
        response.headers_mut().insert(RUN_ID, run);
    }
    response
}

fn subscription_response(subscription: TaskSubscription) -> Response {
    let stream = Box::new(subscription);
    sse::response(stream::unfold(stream, |mut stream| async move {
        let frames = stream.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(frames)), stream))
    }))
}

async fn last_response(mut stream: Box<StreamDriver<CallStream>>) -> Response {
    while stream.next().await.is_some() {}
    match stream.projection.response {
        Some(message) => json_response(StatusCode::OK, &message),
        // The client has cancelled the call.
        None => StatusCode::ACCEPTED.into_response(),
    }
}
