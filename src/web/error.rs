//! The response to a request that fails: problem details (RFC 9457). This is the only place that maps errors to
//! codes, whose statuses are in `problem_code`. `server::middleware` renders a problem, because it knows `instance` and `request_id`.

use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use tracing::{error, warn};

use crate::catalog::LoadError;
use crate::domain::json_schema::compiled::Mismatch;
use crate::domain::run::{RunId, now};
use crate::engine::admission::delete_session::DeleteSessionError;
use crate::engine::fork::request::ForkError;
use crate::engine::memories::MemoryError;
use crate::engine::request::StartError;
use crate::engine::state::period_budgets::BudgetExhausted;
use crate::fair::admission::QueueFull;
use crate::settings::suggestion;
use crate::store::StoreError;
use crate::web::problem_code::ProblemCode;
use crate::web::tickets::TicketError;

/// `Retry-After` in seconds, if the time of recovery is unknown.
pub const RETRY_INTERVAL_SECS: u64 = 1;
/// `Retry-After` in seconds of a daemon that is shutting down: its successor has to start first.
pub const RESTART_INTERVAL_SECS: u64 = 5;
/// Maximum characters of a detail. Details quote what clients send.
const MAX_DETAIL: usize = 2000;
/// Maximum characters of one quotation.
const MAX_QUOTE: usize = 80;

/// A request that failed. Handlers return it; [`Problem::render`] makes the body of the response.
#[derive(Clone, Debug)]
pub struct Problem(Box<ProblemDetails>);

#[derive(Clone, Debug)]
struct ProblemDetails {
    status: StatusCode,
    code: ProblemCode,
    detail: String,
    errors: Vec<FieldError>,
    retry_after: Option<u64>,
    queue_load: Option<QueueFull>,
    cause: Option<String>,
}

/// An invalid field of a body.
#[derive(Clone, Debug, Serialize, JsonSchema)]
struct FieldError {
    /// The field, as a JSON Pointer (RFC 6901); empty for the body itself.
    pointer: String,
    /// What is wrong with the field.
    detail: String,
}

/// Why a request failed: problem details (RFC 9457), extended by `code`, `request_id` and `errors`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Problem")]
pub struct ProblemBody<'a> {
    /// Always `about:blank`: `code` identifies the kind of problem.
    r#type: &'static str,
    /// The name of the HTTP status.
    title: &'static str,
    /// The HTTP status.
    #[schemars(range(min = 400, max = 599))]
    status: u16,
    /// What is wrong with this request, and what to do; for people.
    detail: &'a str,
    /// The path of the request.
    instance: &'a str,
    /// Identifies the kind of problem; for programs.
    code: ProblemCode,
    /// The value of the `x-request-id` header; the daemon's log has it too.
    request_id: &'a str,
    /// The invalid fields of the body; absent if the body is not the cause.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    errors: &'a [FieldError],
    /// If the queue is full: the number of running root runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    running: Option<usize>,
    /// If the queue is full: the number of queued root runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    queued: Option<usize>,
}

impl Problem {
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Self(Box::new(ProblemDetails {
            status: code.status(),
            code,
            detail: truncate(detail.into(), MAX_DETAIL),
            errors: Vec::new(),
            retry_after: None,
            queue_load: None,
            cause: None,
        }))
    }

    /// One field of the body is wrong.
    pub fn field(code: ProblemCode, pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        let (pointer, detail) = (truncate(pointer.into(), MAX_DETAIL), detail.into());
        let mut problem = Self::new(
            code,
            match pointer.as_str() {
                "" => detail.clone(),
                pointer => format!("{pointer}: {detail}"),
            },
        );
        problem.0.errors.push(FieldError {
            pointer,
            detail: truncate(detail, MAX_DETAIL),
        });
        problem
    }

    /// 422: the value of one field is wrong.
    pub fn invalid_field(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::field(ProblemCode::InvalidField, pointer, detail)
    }

    /// 422: the input does not fit the agent.
    fn input_mismatches(mismatches: Vec<Mismatch>) -> Self {
        let mut problems = mismatches.into_iter().map(|mismatch| {
            let pointer = format!("/input{}", mismatch.pointer);
            Self::invalid_field(pointer, mismatch.reason)
        });
        let first = problems.next();
        let mut problem = first.unwrap_or_else(|| Self::invalid_field("/input", "does not fit"));
        let others = problems.flat_map(|other| other.0.errors);
        problem.0.errors.extend(others);
        problem
    }

    /// 413: the images and files of a body are too many or too large.
    pub fn attachments_too_large(pointer: &str, detail: String) -> Self {
        Self::field(ProblemCode::AttachmentsTooLarge, pointer, detail)
    }

    /// 400: a query parameter or a header is wrong.
    pub fn parameter(name: &str, detail: impl std::fmt::Display) -> Self {
        Self::new(
            ProblemCode::InvalidParameter,
            format!("{}: {detail}", quote(name)),
        )
    }

    /// 404: the run does not exist, or the text is not a run id.
    pub fn run_not_found(id: impl std::fmt::Display) -> Self {
        Self::run_not_found_but(id, None)
    }

    /// The same, with the run that the client may have meant.
    pub fn run_not_found_but(id: impl std::fmt::Display, similar: Option<RunId>) -> Self {
        let mut detail = format!("there is no run {}", quote(&id.to_string()));
        if let Some(similar) = similar {
            detail.push_str(&format!("; did you mean \"{similar}\"?"));
        }
        Self::new(ProblemCode::RunNotFound, detail)
    }

    /// 404: the agent has no file. `known` are those that the client may have meant.
    pub fn agent_not_found<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Self {
        // The contract fixes this text with the unquoted name, so control characters are escaped.
        let quoted = truncate(name.escape_debug().to_string(), MAX_QUOTE);
        let hint = did_you_mean(name, known);
        let detail = format!("agent config not found: {quoted}{hint}");
        Self::new(ProblemCode::AgentNotFound, detail)
    }

    /// 404: the principal has no such session.
    pub fn session_not_found(name: &str) -> Self {
        let detail = format!("there is no session {}", quote(name));
        Self::new(ProblemCode::SessionNotFound, detail)
    }

    /// 500: an error of the daemon. The client gets no details; the cause is logged.
    pub fn internal(cause: impl Into<String>) -> Self {
        Self::new(
            ProblemCode::Internal,
            "the daemon failed to answer; its log has the cause under this request_id",
        )
        .with_cause(cause)
    }

    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.0.status = status;
        self
    }

    #[must_use]
    pub fn with_retry_after(mut self, seconds: u64) -> Self {
        self.0.retry_after = Some(seconds);
        self
    }

    #[must_use]
    fn with_queue_load(mut self, queue_load: QueueFull) -> Self {
        self.0.queue_load = Some(queue_load);
        self
    }

    /// The same problem, with other names of its fields: JSON pointers, each with the one that replaces it.
    #[must_use]
    pub fn with_field_names(mut self, names: &[(&str, &str)]) -> Self {
        let details = &mut *self.0;
        for error in &mut details.errors {
            let renamed = names.iter().find_map(|(from, to)| {
                let rest = error.pointer.strip_prefix(from)?;
                (rest.is_empty() || rest.starts_with('/')).then(|| format!("{to}{rest}"))
            });
            let Some(renamed) = renamed else {
                continue;
            };
            if let Some(rest) = details.detail.strip_prefix(&error.pointer) {
                details.detail = format!("{renamed}{rest}");
            }
            error.pointer = renamed;
        }
        self
    }

    /// The cause is logged and not sent to the client.
    #[must_use]
    fn with_cause(mut self, cause: impl Into<String>) -> Self {
        self.0.cause = Some(cause.into());
        self
    }

    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    pub fn code(&self) -> &'static str {
        self.0.code.as_str()
    }

    /// What is wrong and what to do, for people.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// The JSON Pointer of the first wrong field of the body.
    pub fn pointer(&self) -> Option<&str> {
        self.0.errors.first().map(|error| error.pointer.as_str())
    }

    /// The text for the log, if the log gets more than the client.
    pub fn cause(&self) -> Option<&str> {
        self.0.cause.as_deref()
    }

    /// What the log gets of a problem that the middleware does not see. `what` was refused.
    pub fn log(&self, what: &str) {
        let (status, code) = (self.status().as_u16(), self.code());
        match self.cause() {
            Some(cause) if status == 500 => {
                error!(http.status = status, code, "{what} failed: {cause}");
            }
            Some(cause) => {
                warn!(http.status = status, code, "{what} was refused: {cause}");
            }
            None => {}
        }
    }

    /// The body of the response.
    pub fn render(&self, instance: &str, request_id: &str) -> Vec<u8> {
        let envelope = ProblemBody {
            r#type: "about:blank",
            title: self.0.status.canonical_reason().unwrap_or("Error"),
            status: self.0.status.as_u16(),
            detail: &self.0.detail,
            instance,
            code: self.0.code,
            request_id,
            errors: &self.0.errors,
            running: self.0.queue_load.map(|load| load.running),
            queued: self.0.queue_load.map(|load| load.queued),
        };
        serde_json::to_vec(&envelope).unwrap_or_default()
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.0.status.into_response();
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if let Some(seconds) = self.0.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.0.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// 404 for a path without a route.
pub async fn route_not_found(uri: Uri) -> Problem {
    let path = uri.path();
    let hint = match path.strip_suffix('/') {
        None | Some("") => "",
        Some(_) => "; leave out the slash at its end",
    };
    let detail = format!("there is no route {}{hint}", quote(path));
    Problem::new(ProblemCode::RouteNotFound, detail)
}

/// 405 for a method that the route does not have; axum adds `Allow`.
pub fn method_not_allowed(method: &Method, uri: &Uri) -> Problem {
    let detail = format!(
        "{} does not take {}; the Allow header names what it takes",
        quote(uri.path()),
        quote(method.as_str())
    );
    Problem::new(ProblemCode::MethodNotAllowed, detail)
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::RunNotFound(id) | StoreError::SourceDeleted(id) => Self::run_not_found(id),
            StoreError::AlreadyTerminal(_) => {
                Self::new(ProblemCode::RunTerminal, error.to_string())
            }
            StoreError::AlreadyClaimed(_) => Self::new(ProblemCode::IdempotencyConflict,
                error.to_string(),
            ),
            StoreError::NotTaken(_)
            | StoreError::TooManyRequests(_)
            | StoreError::Unanswered(_) => Self::new(ProblemCode::StoreUnavailable,
                error.to_string(),
            )
            .with_retry_after(RETRY_INTERVAL_SECS),
            StoreError::Corrupt(_) => Self::new(ProblemCode::StoreDamaged,
                "what the store has of this is damaged, and trying again does not help; the log has the cause, \
                 axed data check shows what else is damaged, and a root run that cannot be read can be deleted",
            )
            .with_cause(error.to_string()),
            StoreError::Malformed(_) => Self::new(ProblemCode::StoreDamaged,
                "what the store has of this is damaged, or its disk fails; the log has the cause, axed data check shows what \
                 is damaged, and a root run that cannot be read can be deleted",
            )
            .with_cause(error.to_string()),
            StoreError::DiskFull => Self::new(ProblemCode::StoreFull,
                "the disk is full: runs can be read and deleted, and nothing else",
            )
            .with_retry_after(RETRY_INTERVAL_SECS)
            .with_cause(error.to_string()),
            StoreError::Closed
            | StoreError::Suspended
            | StoreError::Fenced
            | StoreError::MessagesChanged(_)
            | StoreError::SessionChanged
            | StoreError::Locked { .. }
            | StoreError::NoDatabase(_)
            | StoreError::Unusable(_)
            | StoreError::Refused(_)
            | StoreError::Backend(_) => Self::new(ProblemCode::StoreUnavailable,
                "the store cannot be read or written now; try again",
            )
            .with_retry_after(RETRY_INTERVAL_SECS)
            .with_cause(error.to_string()),
        }
    }
}

impl From<LoadError> for Problem {
    fn from(error: LoadError) -> Self {
        match &error {
            LoadError::NotFound(name) => Self::agent_not_found(name, []),
            LoadError::Model(_) | LoadError::Invalid(_) => {
                Self::new(ProblemCode::AgentInvalid, error.to_string())
            }
        }
    }
}

impl From<StartError> for Problem {
    fn from(error: StartError) -> Self {
        let text = error.to_string();
        match error {
            StartError::Load(error) => error.into(),
            StartError::Model(_) => Self::field(ProblemCode::InvalidModel, "/model", text),
            StartError::Unpriced(_) => Self::field(ProblemCode::UnpricedModel, "/model", text),
            StartError::ProviderKey(why) => Self::new(
                ProblemCode::ProviderKeyRefused,
                format!("X-Provider-Key: {why}"),
            ),
            StartError::Provider(_) => Self::new(ProblemCode::ProviderUnavailable, text),
            StartError::NoNode { .. } => Self::new(ProblemCode::NoNode, text),
            StartError::Override { field, reason: why } => {
                Self::field(ProblemCode::InvalidOverride, format!("/{field}"), why)
            }
            StartError::Param { field, reason: why } => {
                Self::field(ProblemCode::InvalidBody, format!("/params/{field}"), why)
            }
            StartError::Input(mismatches) => Self::input_mismatches(mismatches),
            StartError::QueueFull(load) => Self::new(ProblemCode::QueueFull, text)
                .with_retry_after(RETRY_INTERVAL_SECS)
                .with_queue_load(load),
            StartError::BudgetExhausted(BudgetExhausted { resets_at, .. }) => {
                let seconds = resets_at.duration_since(now()).as_secs();
                Self::new(ProblemCode::BudgetExhausted, text)
                    .with_retry_after(u64::try_from(seconds).unwrap_or(0) + 1)
            }
            StartError::SessionBusy { .. } => Self::new(ProblemCode::SessionBusy, text),
            StartError::Draining => {
                Self::new(ProblemCode::Draining, text).with_retry_after(RESTART_INTERVAL_SECS)
            }
            StartError::Store(error) => error.into(),
            StartError::Prompt(_) => Self::new(ProblemCode::PromptInvalid, text),
            StartError::Memory(_) => Self::new(ProblemCode::MemoryUnreadable, text),
        }
    }
}

impl From<ForkError> for Problem {
    fn from(error: ForkError) -> Self {
        let text = error.to_string();
        match error {
            ForkError::Start(error) => error.into(),
            ForkError::EditedModel(error) => {
                let code = match error {
                    StartError::Unpriced(_) => ProblemCode::UnpricedModel,
                    _ => ProblemCode::InvalidModel,
                };
                Self::field(code, "/edit/model", text)
            }
            ForkError::NotFound(id) => Self::run_not_found(id),
            ForkError::Field { pointer, reason } => Self::invalid_field(pointer, reason),
            ForkError::NotForkable { .. } | ForkError::Incomplete { .. } => {
                Self::new(ProblemCode::NotForkable, text)
            }
        }
    }
}

impl From<DeleteSessionError> for Problem {
    fn from(error: DeleteSessionError) -> Self {
        let text = error.to_string();
        match error {
            DeleteSessionError::NotFound(name) => Self::session_not_found(&name),
            DeleteSessionError::Busy { .. } => Self::new(ProblemCode::SessionBusy, text),
            DeleteSessionError::Store(error) => error.into(),
        }
    }
}

impl From<MemoryError> for Problem {
    fn from(error: MemoryError) -> Self {
        let text = error.to_string();
        match error {
            MemoryError::Start(error) => error.into(),
            MemoryError::Disabled(_) => Self::new(ProblemCode::MemoryDisabled, text),
            MemoryError::Provider(_) => Self::new(ProblemCode::ProviderFailed, text),
            MemoryError::Store { error, .. } => error.into(),
            MemoryError::File { .. } => Self::new(ProblemCode::MemoryUnreadable, text),
        }
    }
}

impl From<TicketError> for Problem {
    fn from(error: TicketError) -> Self {
        match error {
            TicketError::Store(error) => error.into(),
            TicketError::NoRandomness(_) => Self::internal(error.to_string()),
        }
    }
}

/// A text that a client sent, quoted, with control characters escaped, and truncated.
pub fn quote(text: &str) -> String {
    format!("{:?}", truncate(text.to_owned(), MAX_QUOTE))
}

/// The known name that is closest to a mistyped one, as the end of a sentence; empty if none is close.
pub fn did_you_mean<'a>(typed: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    suggestion::clause(suggestion::did_you_mean(typed, known))
}

fn truncate(mut text: String, max_chars: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max_chars) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// The shape of errors on routes of another protocol: renders a problem as that protocol does, with its code. Also used for
/// problems that occur before the handler runs, such as an unknown key.
#[derive(Clone, Copy)]
pub struct ErrorShape(pub fn(&Problem) -> ShapedError);

/// The response to a request that fails, as JSON.
pub struct ShapedError {
    pub status: StatusCode,
    pub body: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::{Problem, did_you_mean, quote};
    use crate::engine::request::StartError;
    use crate::fair::admission::QueueFull;
    use crate::web::problem_code::ProblemCode;

    #[test]
    fn the_envelope_is_rfc_9457() {
        let problem = Problem::field(ProblemCode::UnknownField, "/inptu", "unknown field");
        let body = problem.render("/agents/a/runs", "req_1");
        insta::assert_snapshot!(String::from_utf8_lossy(&body), @r#"{"type":"about:blank","title":"Unprocessable Entity","status":422,"detail":"/inptu: unknown field","instance":"/agents/a/runs","code":"unknown_field","request_id":"req_1","errors":[{"pointer":"/inptu","detail":"unknown field"}]}"#);
    }

    #[test]
    fn a_full_queue_has_retry_after() {
        let full = StartError::QueueFull(QueueFull {
            running: 1,
            queued: 2,
        });
        let problem = Problem::from(full);
        let body = problem.render("/agents/a/runs", "req_1");
        insta::assert_snapshot!(String::from_utf8_lossy(&body), @r#"{"type":"about:blank","title":"Too Many Requests","status":429,"detail":"the queue is full: 1 running, 2 queued; try again later","instance":"/agents/a/runs","code":"queue_full","request_id":"req_1","running":1,"queued":2}"#);
        let response = problem.into_response();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()["retry-after"], "1");
    }

    #[test]
    fn quotations_are_truncated_and_escaped() {
        assert!(quote(&"ä".repeat(100_000)).chars().count() < 100);
        assert_eq!(quote("a\u{1b}[0m"), r#""a\u{1b}[0m""#);
    }

    #[test]
    fn the_closest_name_is_suggested() {
        let known = ["input", "labels", "model"];
        assert_eq!(did_you_mean("inptu", known), "; did you mean \"input\"?");
        assert_eq!(did_you_mean("temperature", known), "");
    }
}
