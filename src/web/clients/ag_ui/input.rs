//! The body of a request (`RunAgentInput`): what is new in the thread since the agent's last reply.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::content::Content;
use crate::domain::message::ToolResult;
use crate::web::body::content::AttachmentCounter;
use crate::web::body::json_body::{self, MAX_DEPTH, Object};
use crate::web::clients::ag_ui::content;
use crate::web::clients::client_tools::{self, FunctionInput, RequestTools};
use crate::web::error::Problem;

/// Members that axed has no use for, such as `state` and `forwardedProps`, are passed over.
#[derive(Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RunAgentInput {
    pub thread_id: String,
    pub run_id: String,
    /// As text: the values would take many times its memory for as long as the run lasts.
    #[schemars(with = "Vec<Value>")]
    pub messages: Box<RawValue>,
    tools: Vec<Object<ToolInput>>,
    context: Vec<Object<ContextInput>>,
    pub resume: Vec<Object<ResumeEntry>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
struct ToolInput {
    name: String,
    description: Option<String>,
    #[schemars(with = "Option<Value>")]
    parameters: Option<Box<RawValue>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
struct ContextInput {
    description: String,
    value: String,
}

/// The answer to an interrupt.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ResumeEntry {
    pub interrupt_id: String,
    pub status: String,
    pub payload: Value,
}

/// The messages after the agent's last reply.
#[derive(Debug, Default)]
pub struct NewMessages {
    /// What the user wrote.
    pub content: Option<Content>,
    /// Results of tools that the client executed.
    pub results: Vec<ToolResult>,
}

impl NewMessages {
    /// Those of the thread's messages.
    pub fn read(messages: &[Value], mut counter: AttachmentCounter) -> Result<Self, Problem> {
        let is_reply = |message: &Value| message["role"] == "assistant";
        let start = messages.iter().rposition(is_reply);
        let start = start.map_or(0, |at| at + 1);
        let (mut parts, mut results) = (Vec::new(), Vec::new());
        for (at, message) in messages.iter().enumerate().skip(start) {
            match message["role"].as_str() {
                Some("user") => parts.extend(content::parse(message, at, &mut counter)?),
                Some("tool") => {
                    let call = message["toolCallId"].as_str().unwrap_or_default();
                    let error = message["error"].as_str();
                    let text = match error {
                        Some(error) => error.to_owned(),
                        None => text_of(message, at)?,
                    };
                    results.push(ToolResult::text(call, text, error.is_some()));
                }
                _ => {}
            }
        }
        Ok(Self {
            content: (!parts.is_empty()).then(|| content::join(parts)),
            results,
        })
    }
}

impl Default for RunAgentInput {
    fn default() -> Self {
        Self {
            thread_id: String::new(),
            run_id: String::new(),
            messages: RawValue::from_string("[]".to_owned()).unwrap_or_default(),
            tools: Vec::new(),
            context: Vec::new(),
            resume: Vec::new(),
        }
    }
}

impl RunAgentInput {
    pub fn read_messages(&self) -> Result<Vec<Value>, Problem> {
        let json = self.messages.get();
        // The body has one level more.
        if json_body::nesting_depth(json) >= MAX_DEPTH {
            return Err(json_body::too_deep());
        }
        let messages = json_body::parse_raw::<Vec<Object<Map<String, Value>>>>(json, "/messages")?;
        let messages = messages.into_iter();
        Ok(messages.map(|Object(fields)| fields.into()).collect())
    }

    /// The client's tools, and the system messages of the thread.
    pub fn client_additions(&mut self, messages: &[Value]) -> Result<ClientAdditions, Problem> {
        let tools = std::mem::take(&mut self.tools).into_iter().enumerate();
        let functions = tools.map(|(at, Object(tool))| FunctionInput {
            pointer: format!("/tools/{at}"),
            name: tool.name,
            description: tool.description,
            parameters: tool.parameters,
        });
        let mut instructions = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            if matches!(message["role"].as_str(), Some("system" | "developer")) {
                instructions.push(text_of(message, at)?);
            }
        }
        let (tools, tools_left_out) = client_tools::parse(RequestTools {
            functions: functions.collect(),
            left_out: Vec::new(),
        })?;
        Ok(ClientAdditions {
            instructions: (!instructions.is_empty()).then(|| instructions.join("\n\n")),
            tools,
            tools_left_out,
            ..ClientAdditions::default()
        })
    }

    /// What the application knows, as text beside the user's.
    pub fn context_text(&self) -> Option<String> {
        let entries = self.context.iter();
        let lines = entries.map(|Object(entry)| format!("{}: {}", entry.description, entry.value));
        let text = lines.collect::<Vec<_>>().join("\n");
        (!text.is_empty()).then_some(text)
    }
}

/// The text of a message that has only texts: a string, or parts.
fn text_of(message: &Value, at: usize) -> Result<String, Problem> {
    let content = &message["content"];
    if let Some(text) = content.as_str() {
        return Ok(text.to_owned());
    }
    let parts = content.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(text)) => texts.push(text),
            _ => {
                let pointer = format!("/messages/{at}/content/{index}");
                return Err(Problem::invalid_field(pointer, "is not a text"));
            }
        }
    }
    Ok(texts.join("\n\n"))
}
