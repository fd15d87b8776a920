//! An open connection to a server, as calls use it. A request without a proper answer fails at once and retires the
//! connection: the next call opens a new one.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rmcp::model::{ClientRequest, PingRequest};
use rmcp::{Peer, RoleClient, ServiceError};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::tools::mcp::close_state::CloseState;
use crate::tools::mcp::failure::{RequestFailure, RetrySafety, is_connection_error};
use crate::tools::mcp::http;
use crate::tools::mcp::http_response::HttpError;
use crate::tools::mcp::open_questions::OpenQuestions;

/// Concurrent calls of one connection.
const MAX_CALLS: usize = 1024;
/// After a timed-out call, how long the server may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// An open connection, as calls use it.
pub struct McpSession {
    pub peer: Peer<RoleClient>,
    /// Whether the server announces changes of its tools.
    has_change_notifications: bool,
    list_changes: Arc<AtomicU64>,
    in_flight: AtomicUsize,
    /// Notified when no call is in flight any more.
    idle: Notify,
    last_used: Mutex<Instant>,
    has_answered: AtomicBool,
    close_state: CloseState,
    /// What the server asks while calls are in flight.
    pub questions: Arc<OpenQuestions>,
}

impl McpSession {
    /// A session without calls so far. `list_changes` counts the server's announcements that its tools changed; it is
    /// complete if `has_change_notifications`.
    pub fn new(
        peer: Peer<RoleClient>,
        has_change_notifications: bool,
        list_changes: Arc<AtomicU64>,
        close_state: CloseState,
        questions: Arc<OpenQuestions>,
    ) -> Self {
        Self {
            peer,
            has_change_notifications,
            list_changes,
            in_flight: AtomicUsize::new(0),
            idle: Notify::new(),
            last_used: Mutex::new(Instant::now()),
            has_answered: AtomicBool::new(false),
            close_state,
            questions,
        }
    }

    /// Whether the connection takes no more calls.
    pub fn is_closed(&self) -> bool {
        let end = &self.close_state;
        end.stop.is_cancelled()
            || end.retired.is_cancelled()
            || end.lost.is_cancelled()
            || self.peer.is_transport_closed()
    }

    /// Resolves when the server failed and the next call needs a new connection.
    pub async fn wait_retired(&self) {
        self.close_state.retired.cancelled().await;
    }

    /// Takes no more calls; those in flight may finish.
    pub fn retire(&self) {
        self.close_state.retired.cancel();
    }

    /// Resolves when no call is in flight.
    pub async fn wait_idle(&self) {
        while self.in_flight.load(Ordering::Acquire) > 0 {
            self.idle.notified().await;
        }
    }

    /// Whether [`McpSession::list_changes`] counts every change.
    pub fn has_change_notifications(&self) -> bool {
        self.has_change_notifications
    }

    /// How often the list of tools has changed.
    pub fn list_changes(&self) -> u64 {
        self.list_changes.load(Ordering::Acquire)
    }

    /// Whether any request was answered.
    pub fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    pub fn close(&self, reason: &str) {
        let _ = self.close_state.reason.set(reason.to_owned());
        self.close_state.stop.cancel();
    }

    /// Restarts the idle timeout.
    pub fn touch(&self) {
        *self
            .last_used
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Resolves when there was no call for `time`.
    pub async fn wait_unused_for(&self, time: Duration) {
        loop {
            let last_used = *self
                .last_used
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let mut deadline = last_used + time;
            if self.in_flight.load(Ordering::Relaxed) > 0 {
                deadline = Instant::now() + time;
            }
            if deadline <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(deadline).await;
        }
    }

    /// The text of a result without the secrets that the server was given.
    pub fn redact_result(&self, text: String) -> String {
        self.close_state.redact_result(text)
    }

    pub fn mark_answered(&self) {
        self.has_answered.store(true, Ordering::Relaxed);
    }

    /// Counts a request as in flight until the guard is dropped.
    ///
    /// # Errors
    /// There are too many requests, or the connection takes no more of them.
    pub fn begin_request(self: &Arc<Self>) -> Result<InFlightGuard, RequestFailure> {
        let guard = InFlightGuard(Arc::clone(self));
        let in_flight = self.in_flight.fetch_add(1, Ordering::AcqRel);
        if self.is_closed() {
            return Err(RequestFailure {
                reason: self.close_reason(),
                retry: RetrySafety::Always,
            });
        }
        if in_flight >= MAX_CALLS {
            let reason =
                format!("{MAX_CALLS} calls are in progress there already; try again later");
            return Err(RequestFailure {
                reason,
                retry: RetrySafety::Never,
            });
        }
        Ok(guard)
    }

    /// The failure of a call without an answer in this time. A server that answers nothing at all retires the connection.
    pub async fn time_out(&self, time_limit: Duration) -> RequestFailure {
        if !self.is_responsive().await {
            self.close_state.retired.cancel();
        }
        RequestFailure {
            reason: format!("it did not answer within {} s", time_limit.as_secs()),
            retry: RetrySafety::Never,
        }
    }

    /// Whether the server answers a ping.
    async fn is_responsive(&self) -> bool {
        let ping = ClientRequest::PingRequest(PingRequest::default());
        match timeout(PING_TIMEOUT, self.peer.send_request(ping)).await {
            Ok(Ok(_)) => true,
            // Not every server supports it. An error is an answer, too.
            Ok(Err(ServiceError::McpError(error))) => !is_connection_error(&error),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Converts an error. If the server gave no proper answer, the connection takes no more calls.
    pub fn classify_error(&self, error: &ServiceError) -> RequestFailure {
        let (reason, retry) = match error {
            ServiceError::McpError(error) if is_connection_error(error) => (
                self.close_state.redact(&error.message),
                RetrySafety::EndUnknown,
            ),
            ServiceError::McpError(error) => {
                self.mark_answered();
                (self.close_state.redact(&error.message), RetrySafety::Never)
            }
            ServiceError::UnexpectedResponse => {
                let reason = "it answered with something that is not a tool result".to_owned();
                (reason, RetrySafety::Never)
            }
            ServiceError::TransportSend(error) => {
                let error = error.error.as_ref();
                let retry = http::find_http_error(error)
                    .map_or(RetrySafety::EndUnknown, HttpError::retry_safety);
                (self.close_state.redact(&http::error_reason(error)), retry)
            }
            ServiceError::TransportClosed => (self.close_reason(), RetrySafety::EndUnknown),
            other => (
                self.close_state.redact(&other.to_string()),
                RetrySafety::EndUnknown,
            ),
        };
        let is_answered = matches!(
            error,
            ServiceError::McpError(error) if !is_connection_error(error)
        );
        if !is_answered {
            self.close_state.retired.cancel();
        }
        RequestFailure { reason, retry }
    }

    fn close_reason(&self) -> String {
        match self.close_state.reason.get() {
            Some(reason) => self.close_state.redact(reason),
            None => "the connection ended before it answered".to_owned(),
        }
    }
}

/// A request in flight.
pub struct InFlightGuard(Arc<McpSession>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.touch();
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_one();
        }
    }
}
