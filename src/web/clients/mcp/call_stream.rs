//! The response to a call that waits for its run: progress on the way, then the result. A client that closes the request
//! cancels the run.

use std::fmt::Write;
use std::sync::Arc;

use rmcp::model::{ProgressToken, RequestId};
use serde_json::{Value, json};

use crate::domain::event::{LiveEvent, StoredEvent};
use crate::domain::run::{Run, RunId};
use crate::engine::state::broadcaster::Subscription;
use crate::web::auth::Principal;
use crate::web::clients::mcp::approvals::Forms;
use crate::web::clients::mcp::open_calls::OpenCall;
use crate::web::clients::mcp::protocol::Caller;
use crate::web::clients::mcp::rpc::{RpcError, closing};
use crate::web::clients::mcp::server_info::complete;
use crate::web::clients::mcp::{approvals, call_result, progress};
use crate::web::clients::run_wait::{CancelOnDrop, wait_for_stop};
use crate::web::response::stream_driver::{Nothing, Projection, StreamDriver};
use crate::web::state::AppState;

/// A call whose run is at work.
pub struct CallStream {
    request: RequestId,
    progress_token: Option<ProgressToken>,
    frames: String,
    /// What ends the stream.
    pub response: Option<Value>,
    run: RunId,
}

/// How a call ends.
pub enum CallEnd {
    Result(Result<Value, RpcError>),
    Closing,
    /// By the client, which expects no response.
    Cancelled,
}

impl CallStream {
    /// `run` is the run as it was when the call was read; if it waits for approvals, those are not shown again. The client may cancel
    /// `open_call` by a notification.
    pub fn drive(
        state: &AppState,
        principal: &Principal,
        caller: &Caller,
        request: RequestId,
        run: Arc<Run>,
        events: Option<Subscription>,
        open_call: Option<OpenCall>,
    ) -> StreamDriver<Self> {
        let stream = Self {
            request,
            progress_token: caller.progress_token.clone(),
            frames: String::new(),
            response: None,
            run: run.id,
        };
        // None if the call waits for decisions of others.
        let forms = Forms::new(caller, principal);
        let (is_modern, end_state) = (caller.is_modern, state.clone());
        let mut guard = CancelOnDrop::new(state, run.id);
        let end = async move {
            let cancelled = async {
                match &open_call {
                    Some(call) => call.cancelled.cancelled().await,
                    None => std::future::pending().await,
                }
            };
            let runner = end_state.runner.clone();
            let run = tokio::select! {
                biased;
                () = end_state.closing.cancelled() => return CallEnd::Closing,
                // Dropping the guard cancels the run.
                () = cancelled => return CallEnd::Cancelled,
                run = wait_for_stop(runner, run, forms.is_some()) => run,
            };
            guard.disarm();
            let result = match forms.filter(|_| !run.status.is_terminal()) {
                None => complete(call_result::from_run(&run, is_modern), is_modern),
                Some(forms) => {
                    let required = approvals::input_required(&end_state, &run, forms).await;
                    required.and_then(|it| complete(it, is_modern))
                }
            };
            CallEnd::Result(result.map_err(RpcError::from))
        };
        StreamDriver::new(state, stream, events, end)
    }
}

impl Projection for CallStream {
    type End = CallEnd;
    type Read = Nothing;

    fn frames(&mut self) -> &mut String {
        &mut self.frames
    }

    fn on_event(&mut self, event: &StoredEvent) -> serde_json::Result<()> {
        // Progress may have gaps.
        if let Some(token) = &self.progress_token
            && let Some(message) = progress::notification(token, event.seq, &event.read()?)
        {
            push_message(&mut self.frames, &message);
        }
        Ok(())
    }

    fn on_live(&mut self, _: &LiveEvent) {}

    fn on_end(&mut self, end: CallEnd) {
        let result = match end {
            CallEnd::Result(result) => result,
            CallEnd::Closing => {
                let run = self.run;
                let detail = format!("the daemon is stopping; {run} continues after its restart");
                Err(RpcError::from(closing(detail)))
            }
            CallEnd::Cancelled => return,
        };
        let response = match result {
            Ok(result) => json!({ "jsonrpc": "2.0", "id": self.request, "result": result }),
            Err(error) => error.response(Some(&self.request)),
        };
        push_message(&mut self.frames, &response);
        self.response = Some(response);
    }
}

pub fn push_message(frames: &mut String, message: &Value) {
    let _ = write!(frames, "event: message\ndata: {message}\n\n");
}
