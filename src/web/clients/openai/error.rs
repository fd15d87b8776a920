//! Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}`.

use axum::http::StatusCode;
use axum::http::header::{HeaderName, HeaderValue, RETRY_AFTER};
use axum::response::Response;
use serde::Serialize;

use crate::domain::run::Run;
use crate::web::clients::stop::{self, RunFailure};
use crate::web::error::{ErrorShape, Problem, RESTART_INTERVAL_SECS, ShapedError};
use crate::web::response::json::json_response;

/// Official clients repeat requests that failed with certain statuses, unless this is `false`.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

pub const ERRORS: ErrorShape = ErrorShape(shape);

/// The body of a response to a request that fails, and an event of a stream that does.
#[derive(Serialize)]
pub struct ErrorBody<'a> {
    pub error: ErrorDetails<'a>,
}

#[derive(Serialize)]
pub struct ErrorDetails<'a> {
    pub message: &'a str,
    pub r#type: &'static str,
    /// The wrong field, in the notation of JavaScript.
    pub param: Option<String>,
    /// The code of the problem, or of the run's error.
    pub code: &'a str,
}

fn shape(problem: &Problem) -> ShapedError {
    // OpenAI has no 422.
    let status = match problem.status() {
        StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
        status => status,
    };
    let body = ErrorBody {
        error: ErrorDetails {
            message: problem.detail(),
            r#type: error_type(status),
            param: problem.pointer().and_then(to_param),
            code: problem.code(),
        },
    };
    ShapedError {
        status,
        body: serde_json::to_vec(&body).unwrap_or_default(),
    }
}

/// The error that a run without a result is.
pub fn failure_body(failure: &RunFailure) -> ErrorBody<'_> {
    ErrorBody {
        error: ErrorDetails {
            message: &failure.message,
            r#type: error_type(failure.status),
            param: None,
            code: &failure.code,
        },
    }
}

/// A header says that clients should not repeat the request, because that would start another run. If the run continues and the
/// request has an idempotency key, they should: they get the end of the same run.
pub fn failure_response(failure: &RunFailure, run: &Run, has_key: bool) -> Response {
    let mut response = json_response(failure.status, &failure_body(failure));
    let headers = response.headers_mut();
    if has_key && !run.status.is_terminal() {
        headers.insert(RETRY_AFTER, HeaderValue::from(RESTART_INTERVAL_SECS));
    } else {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    stop::add_run_id(&mut response, run);
    response
}

fn error_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    }
}

/// `messages[0].content` for `/messages/0/content`; `None` for the whole body.
fn to_param(pointer: &str) -> Option<String> {
    let mut param = String::new();
    for segment in pointer.split('/').skip(1) {
        if segment.bytes().all(|byte| byte.is_ascii_digit()) {
            param.push_str(&format!("[{segment}]"));
        } else {
            if !param.is_empty() {
                param.push('.');
            }
            param.push_str(&segment.replace("~1", "/").replace("~0", "~"));
        }
    }
    (!param.is_empty()).then_some(param)
}

#[cfg(test)]
mod tests {
    use super::{shape, to_param};
    use crate::web::error::Problem;

    #[test]
    fn a_problem_becomes_an_error_of_the_protocol() {
        let error = shape(&Problem::invalid_field("/messages/0/content", "is empty"));
        assert_eq!(error.status, 400);
        insta::assert_snapshot!(String::from_utf8_lossy(&error.body), @r#"{"error":{"message":"/messages/0/content: is empty","type":"invalid_request_error","param":"messages[0].content","code":"invalid_field"}}"#);
    }

    #[test]
    fn a_problem_names_the_fields_of_the_request() {
        let names = [
            ("/max_tokens", "/max_output_tokens"),
            ("/labels", "/metadata"),
        ];
        let problem = Problem::invalid_field("/labels/team", "is too long");
        let problem = problem.with_field_names(&names);
        assert_eq!(problem.detail(), "/metadata/team: is too long");
        assert_eq!(problem.pointer(), Some("/metadata/team"));
        let problem = Problem::invalid_field("/labels_of", "is unknown");
        let problem = problem.with_field_names(&names);
        assert_eq!(problem.detail(), "/labels_of: is unknown");
    }

    #[test]
    fn params_name_fields_as_code_does() {
        assert_eq!(to_param(""), None);
        assert_eq!(to_param("/a~1b/2").as_deref(), Some("a/b[2]"));
    }
}
