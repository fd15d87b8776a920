//! One tool of an MCP server, as a run calls it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rmcp::model::JsonObject;

use crate::domain::json_schema::Schema;
use crate::domain::mcp::McpServer;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::tools::mcp::connection::Connection;
use crate::tools::mcp::content;
use crate::tools::mcp::failure::{RequestError, RetrySafety};
use crate::tools::mcp::list::ToolDefinition;
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

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
    async fn call_with_retry(&self, call: &ToolCall, key: &str) -> Result<ToolOutput, String> {
        let arguments = serde_json::from_str(call.arguments.get());
        let arguments: JsonObject = arguments
            .map_err(|_| format!("The arguments of {} must be a JSON object", call.name))?;
        let mut response = self.call_once(arguments.clone(), key).await;
        if let Err(RequestError::Failed(failure)) = &response
            && failure.retry.allows_retry(self.definition.effect)
        {
            response = self.call_once(arguments, key).await;
        }
        match response {
            Ok(output) => {
                self.connection.reset_failures();
                output
            }
            Err(RequestError::Unavailable(error)) => Err(error.to_string()),
            Err(RequestError::Failed(failure)) => {
                let why = format!(
                    "MCP server \"{}\" gave no result for the call: {}",
                    self.connection.name, failure.reason
                );
                let may_be_repeated = self.definition.effect == Effect::ReadOnly;
                match failure.retry == RetrySafety::EndUnknown && !may_be_repeated {
                    true => Ok(ToolOutput::end_unknown(why)),
                    false => Err(why),
                }
            }
        }
    }

    /// The result, which is an error if the server says so.
    async fn call_once(
        &self,
        arguments: JsonObject,
        key: &str,
    ) -> Result<Result<ToolOutput, String>, RequestError> {
        let session = self.connection.session(self.open_timeout).await?;
        let response = session.call(&self.definition.original_name, arguments, key, self.timeout);
        Ok(match content::tool_output(&response.await?) {
            Ok(mut output) => {
                output.text = session.redact_result(output.text);
                for attachment in &mut output.attachments {
                    let name = attachment.name.take();
                    attachment.name = name.map(|name| session.redact_result(name));
                }
                Ok(output)
            }
            Err(text) => Err(session.redact_result(text)),
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
            let result = self.call_with_retry(call, &context.call_key(call)).await;
            let has_failed = result.as_ref().map_or(true, |it| it.is_end_unknown);
            self.connection.count_call(has_failed);
            result
        })
    }
}
