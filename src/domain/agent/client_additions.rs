//! What a client of another protocol adds to an agent for one run.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::message::ToolSpec;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ClientAdditions {
    /// Appended to the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// Tools that the client executes. The run waits for their results.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ClientTool>,
    /// Tools of the client that are not offered, because no run can call them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools_left_out: Vec<String>,
    /// What the first reply has to call; `None` if the model decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_choice: Option<ToolChoice>,
    /// Whether the run ends with the first reply if it calls only tools of the client: their arguments are the client's output.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ends_with_calls: bool,
    /// Whether the run is deleted after its end, once the client has its result.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_temporary: bool,
    /// What the protocol of the request shows of it later. Unknown to the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<Arc<RawValue>>,
}

/// Which tool a reply has to call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// Any of them.
    Required,
    /// The one with this name.
    Named(String),
}

/// A tool that the client of a run executes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientTool {
    pub name: String,
    pub description: String,
    /// The JSON Schema of the arguments, which the client checks.
    pub parameters: Arc<RawValue>,
}

impl ClientTool {
    pub fn spec(&self) -> ToolSpec {
        ToolSpec::new(&self.name, &self.description, &self.parameters)
    }
}

impl ClientAdditions {
    pub fn is_empty(&self) -> bool {
        self.instructions.is_none()
            && self.tools.is_empty()
            && self.tools_left_out.is_empty()
            && self.echo.is_none()
            && !self.is_temporary
    }
}
