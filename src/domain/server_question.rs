//! What the service of a tool asks people before it ends a call: MCP's elicitation.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The questions of one answer to a call. The call is sent again once they are answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerQuestions {
    /// A text of the server, which it gets back with the answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    pub questions: Vec<ServerQuestion>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerQuestion {
    /// The server's name for it; `None` if the server does not get the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The name of the server.
    pub server: String,
    pub text: String,
    /// The JSON Schema of the answer.
    pub schema: Arc<RawValue>,
    /// Whether the person answers on a page, and only says here that this is done.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_page: bool,
}
