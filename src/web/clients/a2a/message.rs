//! The body of `message:send` and `message:stream`. Fields that axed has no use for are passed over, as the protocol requires.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::web::body::json_body::Object;
use crate::web::clients::a2a::push_config::PushConfigInput;
use crate::web::error::Problem;
use crate::web::extract::run_request::check_session_name;

/// Maximum characters of a message's id, as of an idempotency key.
const MAX_MESSAGE_ID: usize = 255;

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct SendRequest {
    pub message: Option<Object<MessageInput>>,
    pub configuration: Option<Object<Configuration>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct MessageInput {
    pub message_id: String,
    pub context_id: Option<String>,
    pub task_id: Option<String>,
    role: String,
    pub parts: Vec<Object<PartInput>>,
}

/// One of `text`, `raw`, `url` and `data`.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct PartInput {
    pub text: Option<String>,
    /// Bytes in Base64.
    pub raw: Option<String>,
    pub url: Option<String>,
    #[schemars(with = "Option<Value>")]
    pub data: Option<Box<RawValue>>,
    pub filename: Option<String>,
    pub media_type: Option<String>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Configuration {
    pub history_length: Option<i64>,
    pub return_immediately: bool,
    pub task_push_notification_config: Option<Object<PushConfigInput>>,
}

impl SendRequest {
    /// The message and how it is answered, checked as far as is possible without the agent.
    pub fn into_checked(self) -> Result<(MessageInput, Configuration), Problem> {
        let invalid =
            |field: &str, why: &str| Err(Problem::invalid_field(format!("/message{field}"), why));
        let Some(Object(mut message)) = self.message else {
            return invalid("", "is required");
        };
        let id = &message.message_id;
        let is_visible = id.bytes().all(|byte| byte.is_ascii_graphic());
        if id.is_empty() || id.len() > MAX_MESSAGE_ID || !is_visible {
            return invalid(
                "/messageId",
                "must be 1 to 255 visible ASCII characters, such as a UUID",
            );
        }
        if message.role != "ROLE_USER" {
            return invalid("/role", "must be ROLE_USER");
        }
        if message.parts.is_empty() {
            return invalid("/parts", "needs at least one part");
        }
        message.task_id = message.task_id.filter(|id| !id.is_empty());
        message.context_id = message.context_id.filter(|id| !id.is_empty());
        let Object(configuration) = self.configuration.unwrap_or_default();
        check_history_length(configuration.history_length)
            .map_err(|why| Problem::invalid_field("/configuration/historyLength", why))?;
        Ok((message, configuration))
    }
}

impl Configuration {
    /// The most messages that the answer has; `None` for as many as one answer may have.
    pub fn history_length(&self) -> Option<usize> {
        self.history_length
            .and_then(|length| usize::try_from(length).ok())
    }
}

fn check_history_length(length: Option<i64>) -> Result<(), &'static str> {
    match length.is_some_and(|length| length < 0) {
        true => Err("must be 0 or more"),
        false => Ok(()),
    }
}

/// The session of a context; its name is the context's id.
pub fn session_of(context: String) -> Result<String, Problem> {
    check_session_name(context).map_err(|_| {
        let why = "must be 1 to 64 letters, digits, '.', '_' and '-', the first a letter or a digit: it is a session";
        Problem::invalid_field("/message/contextId", why)
    })
}
