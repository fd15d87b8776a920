//! The response to a call that waits for its run: progress on the way, then the result. A client that closes the request
//! cancels the run.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{ProgressToken, RequestId};
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use crate::domain::run::{Run, RunId};
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::web::auth::Principal;
use crate::web::clients::mcp::approvals::Forms;
use crate::web::clients::mcp::open_calls::OpenCall;
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{RpcError, closing};
use crate::web::clients::mcp::server_info::complete;
use crate::web::clients::mcp::{approvals, call_result, progress};
use crate::web::clients::run_wait::{CancelOnDrop, wait_for_stop};
use crate::web::state::AppState;

/// A comment is sent after this time without a message, because proxies close idle connections.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// What the client gets next.
pub enum Frame {
    KeepAlive,
    Notification(Value),
    /// The last one.
    Response(Value),
}

/// A call whose run is at work.
pub struct CallStream {
    state: AppState,
    request: RequestId,
    is_modern: bool,
    progress_token: Option<ProgressToken>,
    events: Option<Subscription>,
    changed: Pin<Box<dyn Future<Output = Arc<Run>> + Send>>,
    heartbeat_at: Instant,
    guard: CancelOnDrop,
    open_call: Option<OpenCall>,
    /// `None` if the call waits for decisions of others.
    forms: Option<Forms>,
    has_ended: bool,
}

impl CallStream {
    /// `run` is the run as it was when the call was read; if it waits for approvals, those are not shown again.
    pub fn new(
        state: &AppState,
        principal: &Principal,
        caller: &Caller,
        request: RequestId,
        run: Arc<Run>,
        events: Option<Subscription>,
    ) -> Self {
        let id = run.id;
        let forms = Forms::new(caller, principal);
        Self {
            state: state.clone(),
            request,
            is_modern: caller.is_modern,
            progress_token: caller.progress_token.clone(),
            events,
            changed: Box::pin(wait_for_stop(state.runner.clone(), run, forms.is_some())),
            heartbeat_at: Instant::now() + HEARTBEAT_INTERVAL,
            guard: CancelOnDrop::new(state, id),
            open_call: None,
            forms,
            has_ended: false,
        }
    }

    /// Ends when the client cancels the call by a notification.
    pub fn with_open_call(self, open_call: Option<OpenCall>) -> Self {
        Self { open_call, ..self }
    }

    pub fn run(&self) -> RunId {
        self.guard.run()
    }

    /// `None` at the end. Not cancel-safe.
    pub async fn next(&mut self) -> Option<Frame> {
        if self.has_ended {
            return None;
        }
        loop {
            let cancelled = async {
                match &self.open_call {
                    Some(call) => call.cancelled.cancelled().await,
                    None => std::future::pending().await,
                }
            };
            let frame = tokio::select! {
                biased;
                () = self.state.closing.cancelled() => Some(self.on_closing()),
                () = cancelled => {
                    // The client expects no response. Dropping the guard cancels the run.
                    self.has_ended = true;
                    return None;
                }
                event = next_event(&mut self.events) => self.on_event(event),
                run = &mut self.changed => Some(self.on_changed(&run).await),
                () = tokio::time::sleep_until(self.heartbeat_at) => Some(Frame::KeepAlive),
            };
            if let Some(frame) = frame {
                self.heartbeat_at = Instant::now() + HEARTBEAT_INTERVAL;
                self.has_ended = matches!(frame, Frame::Response(_));
                return Some(frame);
            }
        }
    }

    fn on_event(&mut self, event: Result<StreamEvent, RecvError>) -> Option<Frame> {
        match event {
            Ok(StreamEvent::Stored(event)) => {
                let token = self.progress_token.as_ref()?;
                progress::notification(token, &event).map(Frame::Notification)
            }
            // Progress may have gaps.
            Ok(StreamEvent::Ephemeral { .. }) | Err(RecvError::Lagged(_)) => None,
            Err(RecvError::Closed) => {
                self.events = None;
                None
            }
        }
    }

    async fn on_changed(&mut self, run: &Run) -> Frame {
        self.guard.disarm();
        let result = match self.forms.filter(|_| !run.status.is_terminal()) {
            None => complete(call_result::from_run(run, self.is_modern), self.is_modern),
            Some(forms) => {
                let required = approvals::input_required(&self.state, run, forms).await;
                required.and_then(|it| complete(it, self.is_modern))
            }
        };
        self.respond(result.map_err(RpcError::from))
    }

    fn on_closing(&mut self) -> Frame {
        self.guard.disarm();
        let run = self.run();
        let detail = format!("the daemon is stopping; {run} continues after its restart");
        let error = RpcError::from(closing(detail));
        self.respond(Err(error))
    }

    fn respond(&self, result: Result<Value, RpcError>) -> Frame {
        Frame::Response(match result {
            Ok(result) => json!({ "jsonrpc": "2.0", "id": self.request, "result": result }),
            Err(error) => error.response(Some(&self.request)),
        })
    }
}

async fn next_event(events: &mut Option<Subscription>) -> Result<StreamEvent, RecvError> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}
