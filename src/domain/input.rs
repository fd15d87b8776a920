//! What waits for a person, as lists and run objects show it: the approval of a tool call, or the answer to a question.

use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::attachment::Digest;
use crate::domain::message::truncate_to_bytes;
use crate::domain::timestamp_text;
use crate::domain::waiting_for::{BegunCall, WaitingFor};
use crate::domain::world_event::WaitedEvent;
use crate::settings::choice::choice;

/// The longest arguments that are shown; the run's messages have all of them.
const MAX_ARGUMENTS_BYTES: usize = 2 << 10;

/// What a person has to decide on, or to answer.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct InputRequest {
    /// The id of the tool call; of a question, its own id.
    pub tool_call_id: String,
    /// The name of the tool.
    pub tool: String,
    /// The arguments as JSON; if they are long, the beginning of their JSON as a string.
    pub arguments: Arc<RawValue>,
    /// Identifies the whole arguments: a decision that names it is refused for other ones.
    pub arguments_hash: ArgumentsHash,
    /// Whether `arguments` is only the beginning.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
    /// When it was requested.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    pub requested_at: Timestamp,
    /// When the call is refused if nobody has decided; null if it waits without a limit.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    pub deadline: Option<Timestamp>,
    /// `None` if the request is for an approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    pub question: Option<Box<Question>>,
}

choice! {
    /// What a call waits for.
    pub enum InputKind {
        /// That a person approves it.
        Approval = "approval",
        /// That a person answers a question.
        Question = "question",
        /// A time.
        Sleep = "sleep",
        /// An event of the world outside.
        Event = "event",
    }
}

impl InputKind {
    /// What a run waits for meanwhile.
    pub fn waiting_for(self) -> WaitingFor {
        match self {
            Self::Approval => WaitingFor::Approval,
            Self::Question => WaitingFor::Input,
            Self::Sleep => WaitingFor::Sleep,
            Self::Event => WaitingFor::Event,
        }
    }
}

/// The longest question: lists, events and forms show it whole.
pub const MAX_QUESTION_BYTES: usize = 4 << 10;

/// The tool by which a model asks a person.
pub const ASK_PERSON: &str = "ask_person";

/// A question to a person.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Question {
    /// The tool call that asks it.
    pub call_id: String,
    pub text: String,
    /// The JSON Schema of the answer; without one, every answer fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<Arc<RawValue>>,
    /// Suggested answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// The MCP server that asks; `None` if the model does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// The call that it is about, if the daemon asks whether that was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun: Option<BegunCall>,
}

impl Question {
    /// The agent of the run, or its server, asks this, with the suggested answers.
    pub fn sentence(&self, agent: &str) -> String {
        let server = self.server.as_ref();
        let server = server.map_or_else(String::new, |server| format!("{server} of "));
        let options = match self.options.is_empty() {
            true => String::new(),
            false => format!(" ({})", self.options.join(" / ")),
        };
        format!("{server}{agent} asks: {}{options}", self.text)
    }

    /// The schema as JSON; null if there is none.
    pub fn schema_json(&self) -> Value {
        let schema = self.schema.as_deref();
        schema.map_or(Value::Null, |it| {
            serde_json::from_str(it.get()).unwrap_or_default()
        })
    }
}

impl PartialEq for Question {
    fn eq(&self, other: &Self) -> bool {
        let schema = |it: &Self| it.schema.as_deref().map(|it| it.get().to_owned());
        (&self.call_id, &self.text, &self.options, &self.server)
            == (&other.call_id, &other.text, &other.options, &other.server)
            && self.begun == other.begun
            && schema(self) == schema(other)
    }
}

impl InputRequest {
    /// The event that a call waits for.
    pub fn waited_event(&self) -> Option<WaitedEvent> {
        serde_json::from_str(self.arguments.get()).ok()
    }
}

/// Identifies the arguments of a call: the SHA-256 of their JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct ArgumentsHash(#[schemars(length(max = 71))] pub String);

impl ArgumentsHash {
    pub fn compute(arguments: &RawValue) -> Self {
        Self(format!(
            "sha256:{}",
            Digest::compute(arguments.get().as_bytes())
        ))
    }
}

impl InputRequest {
    /// Cuts the arguments to the length that is shown.
    pub fn cut_arguments(&mut self) {
        self.cut_arguments_to(MAX_ARGUMENTS_BYTES);
    }

    /// Cuts arguments of more than `max_bytes`.
    pub fn cut_arguments_to(&mut self, max_bytes: usize) {
        let json = self.arguments.get();
        if json.len() <= max_bytes {
            return;
        }
        // Arguments are objects: a string is the text of their JSON, from a call with deep or long ones.
        let text: Option<String> = serde_json::from_str(json).ok();
        let beginning = truncate_to_bytes(text.as_deref().unwrap_or(json), max_bytes);
        if let Ok(cut) = serde_json::value::to_raw_value(beginning) {
            self.arguments = Arc::from(cut);
            self.truncated = true;
        }
    }
}

impl PartialEq for InputRequest {
    fn eq(&self, other: &Self) -> bool {
        self.tool_call_id == other.tool_call_id
            && self.tool == other.tool
            && self.arguments.get() == other.arguments.get()
            && self.arguments_hash == other.arguments_hash
            && self.truncated == other.truncated
            && (self.requested_at, self.deadline) == (other.requested_at, other.deadline)
            && self.question == other.question
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{ArgumentsHash, InputRequest};

    #[test]
    fn long_arguments_are_cut_once_more_without_being_quoted_again() {
        let arguments = json!({"content": "ä".repeat(5000)});
        let arguments = serde_json::value::to_raw_value(&arguments).expect("JSON");
        let mut request = InputRequest {
            tool_call_id: "c".to_owned(),
            tool: "write_file".to_owned(),
            arguments_hash: ArgumentsHash::compute(&arguments),
            arguments: arguments.into(),
            truncated: false,
            requested_at: jiff::Timestamp::UNIX_EPOCH,
            deadline: None,
            question: None,
        };
        for max_bytes in [4096, 2048, 4096, 100] {
            request.cut_arguments_to(max_bytes);
            let shown: String = serde_json::from_str(request.arguments.get()).expect("a text");
            assert!(shown.starts_with("{\"content\":\"ä"), "{shown}");
            assert!(shown.len() <= max_bytes && request.truncated);
        }
    }
}
