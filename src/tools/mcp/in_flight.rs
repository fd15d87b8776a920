//! One call in flight: its result, and the questions that its server asks meanwhile.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rmcp::ServiceError;
use rmcp::model::{CallToolRequestParams, CallToolResponse, ErrorData};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};

use crate::tools::mcp::failure::{RequestFailure, RetrySafety};
use crate::tools::mcp::message::raw_call_result;
use crate::tools::mcp::open_questions::{OpenQuestion, Registration};
use crate::tools::mcp::session::{InFlightGuard, McpSession};

/// The error of a server that needs a person to open pages first (MCP 2025-11-25).
const PAGES_REQUIRED: i32 = -32042;

/// A call in flight. If it is dropped, the call is cancelled at the server.
pub struct InFlightCall {
    pub session: Arc<McpSession>,
    response: BoxFuture<'static, Result<CallToolResponse, ServiceError>>,
    /// The result, if it came while a question was open.
    ended: Option<Result<Value, RequestFailure>>,
    questions: Registration,
    time_limit: Duration,
    /// Stands still while a question is open.
    time_left: Duration,
    _guard: InFlightGuard,
}

/// What comes next of a call.
pub enum Progress {
    /// The result as the server sent it, or why there is no result.
    Ended(Result<Value, RequestFailure>),
    Question(OpenQuestion),
}

impl InFlightCall {
    /// Sends a call with this key; `None` if it has to be `alone` on the connection and is not.
    ///
    /// # Errors
    /// The connection takes no more calls.
    pub fn begin(
        session: &Arc<McpSession>,
        params: &CallToolRequestParams,
        key: &str,
        time_limit: Duration,
        alone: bool,
    ) -> Result<Option<Self>, RequestFailure> {
        let guard = session.begin_request()?;
        let Some(questions) = session.questions.register(key, alone) else {
            return Ok(None);
        };
        let (peer, params) = (session.peer.clone(), params.clone());
        Ok(Some(Self {
            questions,
            response: Box::pin(async move { peer.call_tool_once(params).await }),
            session: Arc::clone(session),
            ended: None,
            time_limit,
            time_left: time_limit,
            _guard: guard,
        }))
    }

    /// Waits for the result or a question.
    pub async fn advance(&mut self) -> Progress {
        if let Some(ended) = self.ended.take() {
            return Progress::Ended(ended);
        }
        let started = Instant::now();
        let progress = tokio::select! {
            biased;
            response = &mut self.response => Progress::Ended(self.read(response)),
            question = self.questions.next() => Progress::Question(question),
            () = sleep(self.time_left) => {
                Progress::Ended(Err(self.session.time_out(self.time_limit).await))
            }
        };
        self.time_left = self.time_left.saturating_sub(started.elapsed());
        progress
    }

    /// Resolves with the result, which the next [`InFlightCall::advance`] returns. Cancel safe.
    pub async fn wait_ended(&mut self) {
        if self.ended.is_none() {
            let response = (&mut self.response).await;
            self.ended = Some(self.read(response));
        }
    }

    fn read(
        &self,
        response: Result<CallToolResponse, ServiceError>,
    ) -> Result<Value, RequestFailure> {
        match response {
            Ok(CallToolResponse::Complete(result)) => {
                self.session.mark_answered();
                Ok(raw_call_result(result))
            }
            Ok(_) => Err(RequestFailure {
                reason: "it made a task of the call, which a run does not support".to_owned(),
                retry: RetrySafety::Never,
            }),
            Err(ServiceError::McpError(error)) if error.code.0 == PAGES_REQUIRED => {
                self.session.mark_answered();
                Ok(required_pages(&error))
            }
            Err(error) => Err(self.session.classify_error(&error)),
        }
    }
}

/// The pages that an error names, as later versions of the protocol ask for input.
fn required_pages(error: &ErrorData) -> Value {
    let data = error.data.as_ref();
    let pages = data.and_then(|it| it.get("elicitations")?.as_array());
    let pages = pages.into_iter().flatten().enumerate();
    let pages = pages.map(|(number, params)| {
        let request = json!({"method": "elicitation/create", "params": params, "unanswered": true});
        (number.to_string(), request)
    });
    let pages: Map<String, Value> = pages.collect();
    json!({"resultType": "input_required", "inputRequests": pages})
}
