//! One tool of an MCP server, as a run calls it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rmcp::model::{CallToolRequestParams, JsonObject, RequestMetaObject};
use serde_json::Value;

use crate::domain::json_schema::Schema;
use crate::domain::mcp::McpServer;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::server_question::ServerQuestion;
use crate::tools::mcp::connection::Connection;
use crate::tools::mcp::content;
use crate::tools::mcp::elicitation::{self, Asker};
use crate::tools::mcp::failure::{RequestError, RetrySafety};
use crate::tools::mcp::in_flight::{InFlightCall, Progress};
use crate::tools::mcp::list::ToolDefinition;
use crate::tools::mcp::message::CALL_KEY;
use crate::tools::mcp::open_questions::OpenQuestion;
use crate::tools::mcp::session::McpSession;
use crate::tools::{
    AnswerToQuestion, AnsweredQuestions, AskingCall, CallContext, CallStep, Effect, OpenCall, Tool,
    ToolOutput,
};

/// Questions that are refused, after which a call is given up.
const MAX_REFUSED: u32 = 64;

#[derive(Clone)]
pub struct McpTool {
    definition: Arc<ToolDefinition>,
    connection: Arc<Connection>,
    timeout: Duration,
    open_timeout: Duration,
}

impl McpTool {
    /// A tool of this server, which was listed on this connection.
    pub fn new(
        connection: Arc<Connection>,
        definition: Arc<ToolDefinition>,
        server: &McpServer,
    ) -> Self {
        Self {
            definition,
            connection,
            timeout: server.timeout,
            open_timeout: server.open_timeout,
        }
    }

    /// Calls the tool. Repeats the call once if the server lost the session or gave no proper answer, and the call was
    /// certainly not executed or may be repeated.
    async fn call_with_retry(
        &self,
        call: &ToolCall,
        context: CallContext<'_>,
        answered: Option<&AnsweredQuestions>,
    ) -> Result<CallStep, RequestError> {
        let arguments = match serde_json::from_str(call.arguments.get()) {
            Ok(arguments) => arguments,
            Err(_) => {
                let why = format!("The arguments of {} must be a JSON object", call.name);
                return Ok(CallStep::Ended(Err(why)));
            }
        };
        let key = context.call_key(call);
        let params = self.params(arguments, &key, answered);
        let step = self.call_once(&params, &key, context.key).await;
        match step {
            Err(RequestError::Failed(failure))
                if failure.retry.allows_retry(self.definition.effect) =>
            {
                self.call_once(&params, &key, context.key).await
            }
            step => step,
        }
    }

    fn params(
        &self,
        arguments: JsonObject,
        key: &str,
        answered: Option<&AnsweredQuestions>,
    ) -> CallToolRequestParams {
        let name = self.definition.original_name.clone();
        let mut params = CallToolRequestParams::new(name).with_arguments(arguments);
        let mut meta = RequestMetaObject::default();
        meta.insert(CALL_KEY.to_owned(), key.into());
        params.meta = Some(meta);
        if let Some(AnsweredQuestions { required, answers }) = answered {
            let responses = required.questions.iter().zip(answers);
            let responses = responses.filter_map(|(question, answer)| {
                let key = question.key.clone()?;
                Some((key, elicitation::response(question, answer)))
            });
            let responses: BTreeMap<_, _> = responses.collect();
            params.input_responses = (!responses.is_empty()).then_some(responses);
            params.request_state = required.state.clone();
        }
        params
    }

    async fn call_once(
        &self,
        params: &CallToolRequestParams,
        key: &str,
        owner: Option<&str>,
    ) -> Result<CallStep, RequestError> {
        loop {
            let session = self.connection.session(self.open_timeout).await?;
            let alone = self.connection.separates_calls();
            let begun = InFlightCall::begin(&session, params, key, self.timeout, alone);
            match begun? {
                Some(call) => return self.advance(call, owner).await,
                None => session.retire(),
            }
        }
    }

    /// Waits for the result, or for what the server asks.
    async fn advance(
        &self,
        mut call: InFlightCall,
        owner: Option<&str>,
    ) -> Result<CallStep, RequestError> {
        let session = Arc::clone(&call.session);
        let asker = Asker {
            server: &self.connection.name,
            session: &session,
            owner,
        };
        let mut refused = 0;
        loop {
            let result = match call.advance().await {
                Progress::Ended(result) => result?,
                Progress::Question(request) => match asker.question(None, &request.params).await {
                    Ok(question) => {
                        let open = OpenMcpCall {
                            tool: self.clone(),
                            call,
                            request,
                            question: question.clone(),
                            owner: owner.map(str::to_owned),
                        };
                        return Ok(CallStep::Asks(AskingCall::Open(question, Box::new(open))));
                    }
                    Err(why) if refused < MAX_REFUSED => {
                        request.refuse(why);
                        refused += 1;
                        continue;
                    }
                    Err(why) => {
                        let why = session.redact_result(why);
                        return Ok(CallStep::Ended(Err(self.no_result(&why))));
                    }
                },
            };
            return Ok(match asker.required(&result).await {
                Ok(Some(questions)) => CallStep::Asks(AskingCall::Ended(questions)),
                Ok(None) => CallStep::Ended(read_result(&session, &result)),
                Err(why) => CallStep::Ended(Err(self.no_result(&session.redact_result(why)))),
            });
        }
    }

    fn no_result(&self, why: &str) -> String {
        let server = &self.connection.name;
        format!("MCP server \"{server}\" gave no result for the call: {why}")
    }

    /// The step of an attempt, which is counted if it ended the call. `was_repeated` if a call that only reads was.
    fn finish(&self, step: Result<CallStep, RequestError>, was_repeated: bool) -> CallStep {
        let result = match step {
            Ok(CallStep::Asks(asking)) => return CallStep::Asks(asking),
            Ok(CallStep::Ended(result)) => {
                self.connection.reset_failures();
                result
            }
            Err(RequestError::Unavailable(error)) => Err(error.to_string()),
            Err(RequestError::Failed(failure)) => {
                let why = self.no_result(&failure.reason);
                let has_failed = was_repeated && self.definition.effect == Effect::ReadOnly;
                match failure.retry == RetrySafety::EndUnknown && !has_failed {
                    true => Ok(ToolOutput::end_unknown(why)),
                    false => Err(why),
                }
            }
        };
        let has_failed = result.as_ref().map_or(true, |it| it.is_end_unknown);
        self.connection.count_call(has_failed);
        CallStep::Ended(result)
    }
}

/// The result without the server's secrets, which is an error if the server says so.
fn read_result(session: &McpSession, result: &Value) -> Result<ToolOutput, String> {
    match content::tool_output(result) {
        Ok(mut output) => {
            output.text = session.redact_result(output.text);
            for attachment in &mut output.attachments {
                let name = attachment.name.take();
                attachment.name = name.map(|name| session.redact_result(name));
            }
            Ok(output)
        }
        Err(text) => Err(session.redact_result(text)),
    }
}

/// A call whose server waits for the answer to a question on the open connection.
struct OpenMcpCall {
    tool: McpTool,
    call: InFlightCall,
    request: OpenQuestion,
    question: ServerQuestion,
    /// The API key of the run.
    owner: Option<String>,
}

impl OpenCall for OpenMcpCall {
    fn lapsed(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            tokio::select! {
                () = self.request.withdrawn.cancelled() => {}
                () = self.call.wait_ended() => {}
            }
        })
    }

    fn resume(self: Box<Self>, answer: Option<AnswerToQuestion>) -> BoxFuture<'static, CallStep> {
        Box::pin(async move {
            let Self {
                tool,
                call,
                request,
                question,
                owner,
            } = *self;
            match answer {
                Some(answer) => request.answer(elicitation::response(&question, &answer)),
                None => drop(request),
            }
            let step = tool.advance(call, owner.as_deref()).await;
            tool.finish(step, false)
        })
    }
}

impl Tool for McpTool {
    fn spec(&self) -> ToolSpec {
        self.definition.spec.clone()
    }

    fn effect(&self) -> Effect {
        self.definition.effect
    }

    fn schema(&self) -> Option<&Schema> {
        self.definition.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            match self.attempt(call, context, None).await {
                CallStep::Ended(result) => result,
                CallStep::Asks(_) => Err(self.no_result("it asks a person")),
            }
        })
    }

    fn attempt<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
        answered: Option<&'a AnsweredQuestions>,
    ) -> BoxFuture<'a, CallStep> {
        Box::pin(async move {
            let step = self.call_with_retry(call, context, answered).await;
            self.finish(step, true)
        })
    }
}
