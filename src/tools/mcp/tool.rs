//! One tool of a server, as a run calls it.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::schema::Schema;
use crate::tools::mcp::connection::Connection;
use crate::tools::mcp::contents;
use crate::tools::mcp::list::Described;
use crate::tools::{Context, Effect, Tool};

/// A tool with the connection that its calls take.
pub struct McpTool {
    described: Arc<Described>,
    connection: Arc<Connection>,
}

impl McpTool {
    /// A tool that was listed on this connection.
    pub fn new(connection: Arc<Connection>, described: Arc<Described>) -> Self {
        Self {
            described,
            connection,
        }
    }

    async fn call(&self, call: &ToolCall) -> Result<String, String> {
        let connection = &self.connection;
        let arguments = serde_json::from_str(call.arguments.get());
        let arguments = arguments
            .map_err(|_| format!("The arguments of {} must be a JSON object", call.name))?;
        let link = connection.link().await?;
        let failed = |why: String| {
            format!(
                "MCP server \"{}\" did not perform the call: {why}",
                connection.name
            )
        };
        let result = link
            .call(&self.described.own_name, arguments)
            .await
            .map_err(failed)?;
        connection.is_well();
        contents::text(result)
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
    ) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(self.call(call))
    }
}
