//! Errors as A2A's bindings have them. HTTP+JSON: `google.rpc.Status`; JSON-RPC: a code. Both have the kind of error in an
//! `ErrorInfo`.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::web::error::{ErrorShape, Problem, ShapedError};
use crate::web::problem_code::ProblemCode;

pub const ERRORS: ErrorShape = ErrorShape(shape);

const ERROR_INFO_TYPE: &str = "type.googleapis.com/google.rpc.ErrorInfo";
const BAD_REQUEST_TYPE: &str = "type.googleapis.com/google.rpc.BadRequest";
/// The domain of reasons that A2A defines.
const PROTOCOL_DOMAIN: &str = "a2a-protocol.org";
/// The domain of reasons that A2A does not define: the codes of problems, in upper case.
const OWN_DOMAIN: &str = "axed";

/// The protocol's own errors, by the codes of problems, with their status and their code in JSON-RPC.
const REASONS: &[(ProblemCode, &str, StatusCode, i32)] = &[
    (
        ProblemCode::RunNotFound,
        "TASK_NOT_FOUND",
        StatusCode::NOT_FOUND,
        -32001,
    ),
    (
        ProblemCode::RunTerminal,
        "TASK_NOT_CANCELABLE",
        StatusCode::BAD_REQUEST,
        -32002,
    ),
    (
        ProblemCode::RunEnded,
        "UNSUPPORTED_OPERATION",
        StatusCode::BAD_REQUEST,
        -32004,
    ),
    (
        ProblemCode::UnsupportedMediaType,
        "CONTENT_TYPE_NOT_SUPPORTED",
        StatusCode::BAD_REQUEST,
        -32005,
    ),
    (
        ProblemCode::UnsupportedVersion,
        "VERSION_NOT_SUPPORTED",
        StatusCode::BAD_REQUEST,
        -32009,
    ),
];

/// What a message to a task, or a subscription, gets that comes too late.
pub fn task_ended(id: &str, state: &str) -> Problem {
    let detail = format!(
        "the task {id} has ended ({state}): send a message without taskId, in its contextId"
    );
    Problem::new(ProblemCode::RunEnded, detail)
}

fn shape(problem: &Problem) -> ShapedError {
    let (status, name) = match reason_of(problem) {
        Some((_, _, StatusCode::NOT_FOUND, _)) => (StatusCode::NOT_FOUND, "NOT_FOUND"),
        Some((ProblemCode::UnsupportedMediaType, _, status, _)) => (*status, "INVALID_ARGUMENT"),
        Some((_, _, status, _)) => (*status, "FAILED_PRECONDITION"),
        None => status_of(problem.status()),
    };
    let body: Value = json!({
        "error": {
            "code": status.as_u16(),
            "status": name,
            "message": problem.detail(),
            "details": details(problem),
        },
    });
    ShapedError {
        status,
        body: body.to_string().into_bytes(),
    }
}

fn reason_of(problem: &Problem) -> Option<&'static (ProblemCode, &'static str, StatusCode, i32)> {
    REASONS
        .iter()
        .find(|(code, ..)| code.as_str() == problem.code())
}

/// The code of a problem in JSON-RPC.
pub fn rpc_code(problem: &Problem) -> i32 {
    if let Some((.., code)) = reason_of(problem) {
        return *code;
    }
    let has_code = |code: ProblemCode| code.as_str() == problem.code();
    match problem.status() {
        _ if has_code(ProblemCode::InvalidJson) => -32700,
        _ if has_code(ProblemCode::MalformedBody) => -32600,
        StatusCode::METHOD_NOT_ALLOWED => -32601,
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => -32602,
        status if status.is_server_error() => -32603,
        _ => -32000,
    }
}

/// What is wrong, for programs.
pub fn details(problem: &Problem) -> Vec<Value> {
    let (reason, domain) = match reason_of(problem) {
        Some((_, reason, ..)) => ((*reason).to_owned(), PROTOCOL_DOMAIN),
        None => (problem.code().to_ascii_uppercase(), OWN_DOMAIN),
    };
    let mut details = vec![json!({
        "@type": ERROR_INFO_TYPE,
        "reason": reason,
        "domain": domain,
        "metadata": { "code": problem.code() },
    })];
    if let Some(pointer) = problem.pointer() {
        details.push(json!({
            "@type": BAD_REQUEST_TYPE,
            "fieldViolations": [{ "field": field_name(pointer), "description": problem.detail() }],
        }));
    }
    details
}

/// The status with its name in `google.rpc.Code`.
fn status_of(status: StatusCode) -> (StatusCode, &'static str) {
    let name = match status {
        // The protocol has no 422.
        StatusCode::UNPROCESSABLE_ENTITY => return (StatusCode::BAD_REQUEST, "INVALID_ARGUMENT"),
        StatusCode::UNAUTHORIZED => "UNAUTHENTICATED",
        StatusCode::FORBIDDEN => "PERMISSION_DENIED",
        StatusCode::NOT_FOUND => "NOT_FOUND",
        StatusCode::CONFLICT => "ABORTED",
        StatusCode::TOO_MANY_REQUESTS => "RESOURCE_EXHAUSTED",
        StatusCode::METHOD_NOT_ALLOWED => "UNIMPLEMENTED",
        StatusCode::SERVICE_UNAVAILABLE => "UNAVAILABLE",
        status if status.is_server_error() => "INTERNAL",
        _ => "INVALID_ARGUMENT",
    };
    (status, name)
}

/// `message.parts[0].text` for `/message/parts/0/text`.
fn field_name(pointer: &str) -> String {
    let mut name = String::new();
    for segment in pointer.split('/').skip(1) {
        if segment.bytes().all(|byte| byte.is_ascii_digit()) {
            name.push_str(&format!("[{segment}]"));
        } else {
            if !name.is_empty() {
                name.push('.');
            }
            name.push_str(&segment.replace("~1", "/").replace("~0", "~"));
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::shape;
    use crate::web::error::Problem;

    fn body(problem: &Problem) -> (u16, String) {
        let error = shape(problem);
        (
            error.status.as_u16(),
            String::from_utf8_lossy(&error.body).into_owned(),
        )
    }

    #[test]
    fn a_task_that_is_not_found_has_the_protocols_reason() {
        let (status, body) = body(&Problem::run_not_found("run_x"));
        assert_eq!(status, 404);
        insta::assert_snapshot!(body);
    }

    #[test]
    fn an_invalid_field_is_named() {
        let (status, body) = body(&Problem::invalid_field("/message/parts/0/text", "is empty"));
        assert_eq!(status, 400);
        insta::assert_snapshot!(body);
    }
}
