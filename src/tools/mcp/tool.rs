//! One tool of a server, as a run calls it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rmcp::model::{CallToolResult, JsonObject};

use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::schema::Schema;
use crate::tools::mcp::connection::Connection;
use crate::tools::mcp::contents;
use crate::tools::mcp::failure::Failure;
use crate::tools::mcp::list::Described;
use crate::tools::{Context, Effect, Output, Tool};

/// A tool with the connection that its calls take.
pub struct McpTool {
    described: Arc<Described>,
    connection: Arc<Connection>,
    timeout: Duration,
}

impl McpTool {
    /// A tool that was listed on this connection, and how long a call of it may take.
    pub fn new(connection: Arc<Connection>, described: Arc<Described>, timeout: Duration) -> Self {
        Self {
            described,
            connection,
            timeout,
        }
    }

    /// Calls the tool; once more where the first call was surely not performed, or may be repeated, because the server
    /// lost the session or gave no proper answer.
    async fn call(&self, call: &ToolCall) -> Result<Output, String> {
        let arguments = serde_json::from_str(call.arguments.get());
        let arguments: JsonObject = arguments
            .map_err(|_| format!("The arguments of {} must be a JSON object", call.name))?;
        let mut answer = self.call_once(arguments.clone()).await?;
        if let Err(failure) = &answer
            && failure.repeat.allows(self.described.effect)
        {
            answer = self.call_once(arguments).await?;
        }
        match answer {
            Ok(result) => {
                self.connection.is_well();
                contents::output(result)
            }
            Err(failure) => Err(format!(
                "MCP server \"{}\" did not perform the call: {}",
                self.connection.name, failure.why
            )),
        }
    }

    /// One attempt.
    ///
    /// # Errors
    /// There is no connection.
    async fn call_once(
        &self,
        arguments: JsonObject,
    ) -> Result<Result<CallToolResult, Failure>, String> {
        let link = self.connection.link().await?;
        let call = link.call(&self.described.own_name, arguments, self.timeout);
        Ok(call.await)
    }
}

impl Tool for McpTool {
    fn spec(&self) -> ToolSpec {
        self.described.spec.clone()
    }

    fn effect(&self) -> Effect {
        self.described.effect
    }

    fn schema(&self) -> Option<&Schema> {
        self.described.schema.as_ref()
    }

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        _: Context<'a>,
    ) -> BoxFuture<'a, Result<Output, String>> {
        Box::pin(self.call(call))
    }
}
