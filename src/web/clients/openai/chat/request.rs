//! The body of `POST /v1/chat/completions`: read and checked, it becomes the request of a run. Unknown fields are passed
//! over, because clients send many that concern only OpenAI's own service.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::catalog::LoadError;
use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::agent::is_agent_name;
use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::params::Effort;
use crate::domain::agent::response_format::FormatKind;
use crate::domain::content::{Content, Part};
use crate::domain::message::{ToolCall, ToolResult, empty_arguments, encoded_object};
use crate::engine::request::{Overrides, RunRequest};
use crate::web::auth::Principal;
use crate::web::body::content::AttachmentCounter;
use crate::web::body::json_body::{self, MAX_DEPTH, Object};
use crate::web::clients::client_tools::{FunctionInput, RequestTools};
use crate::web::clients::history::{self, Entry, History};
use crate::web::clients::openai::content;
use crate::web::clients::openai::tool_choice;
use crate::web::error::Problem;
use crate::web::extract::run_request::{
    MAX_LABEL_VALUE, ResponseFormatInput, check_labels, invalid_override,
};
use crate::web::state::AppState;

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ChatRequest {
    pub model: String,
    messages: Vec<Object<MessageInput>>,
    stream: Option<bool>,
    stream_options: Option<Object<StreamOptions>>,
    max_completion_tokens: Option<u32>,
    max_tokens: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    stop: Option<StopInput>,
    reasoning_effort: Option<Effort>,
    response_format: Option<Object<FormatInput>>,
    tools: Option<Vec<Object<ToolInput>>>,
    tool_choice: Option<Value>,
    n: Option<u32>,
    user: Option<String>,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, JsonSchema)]
struct MessageInput {
    role: Role,
    content: Option<Box<RawValue>>,
    tool_calls: Option<Vec<Object<ToolCallInput>>>,
    tool_call_id: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(Deserialize, JsonSchema)]
struct ToolCallInput {
    id: String,
    function: Object<CalledFunction>,
}

#[derive(Deserialize, JsonSchema)]
struct CalledFunction {
    name: String,
    /// JSON in a text.
    #[schemars(with = "String")]
    arguments: Option<Box<RawValue>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be a text or a list of texts")]
enum StopInput {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize, JsonSchema)]
struct FormatInput {
    r#type: FormatKind,
    json_schema: Option<Object<SchemaInput>>,
}

#[derive(Deserialize, JsonSchema)]
struct SchemaInput {
    schema: Option<Box<RawValue>>,
}

#[derive(Deserialize, JsonSchema)]
struct ToolInput {
    r#type: Option<String>,
    function: Option<Object<FunctionDescription>>,
}

#[derive(Deserialize, JsonSchema)]
struct FunctionDescription {
    name: String,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
}

/// How a completion is streamed.
#[derive(Clone, Copy, Debug)]
pub struct StreamSettings {
    pub includes_usage: bool,
}

/// OpenAI's limit, in characters.
pub const MAX_METADATA_VALUE: usize = 512;
/// The type of the tools that a client can execute.
pub const FUNCTION: &str = "function";
/// How often arguments are encoded as a text: once, and once more by some clients.
const MAX_ENCODINGS: u32 = 2;

/// A checked request.
pub struct PreparedChat {
    /// As the client named it.
    pub model: String,
    pub agent: String,
    pub run_request: RunRequest,
    /// See [`History::new_results`].
    pub new_results: Vec<ToolResult>,
    pub new_message: Option<Content>,
}

impl ChatRequest {
    /// `None` if the completion is not streamed.
    pub fn stream_settings(&self) -> Result<Option<StreamSettings>, Problem> {
        let options = self.stream_options.as_ref();
        match (self.stream.unwrap_or_default(), options) {
            (false, Some(_)) => Err(Problem::invalid_field(
                "/stream_options",
                "is only for stream: true",
            )),
            (false, None) => Ok(None),
            (true, options) => Ok(Some(StreamSettings {
                includes_usage: options
                    .and_then(|Object(it)| it.include_usage)
                    .unwrap_or_default(),
            })),
        }
    }

    /// The most tokens of a reply, under its name of today or of before.
    fn token_limit(&self) -> Result<Option<u32>, Problem> {
        match (self.max_completion_tokens, self.max_tokens) {
            (Some(limit), Some(other)) if limit != other => {
                let why = "differs from max_completion_tokens, which replaces it: send one of them";
                Err(Problem::invalid_field("/max_tokens", why))
            }
            (limit, other) => Ok(limit.or(other)),
        }
    }

    /// The names in this request of fields that a run names otherwise; see [`Problem::with_field_names`].
    pub fn field_names(&self) -> [(&'static str, &'static str); 4] {
        let max_tokens = match self.max_tokens {
            None if self.max_completion_tokens.is_some() => "/max_completion_tokens",
            _ => "/max_tokens",
        };
        [
            ("/max_tokens", max_tokens),
            ("/labels/user", user_field(self.metadata.as_ref())),
            ("/labels", "/metadata"),
            ("/params", ""),
        ]
    }

    pub async fn prepare(
        self,
        principal: &Principal,
        state: &AppState,
    ) -> Result<PreparedChat, Problem> {
        let owner = principal.key_name();
        let settings = &state.settings;
        let (agent, model_override) = split_model(&self.model, principal)?;
        if self.n.is_some_and(|n| n != 1) {
            return Err(Problem::invalid_field(
                "/n",
                "must be 1: a run has one answer",
            ));
        }
        if self.messages.is_empty() {
            return Err(Problem::invalid_field(
                "/messages",
                "needs at least one message",
            ));
        }
        let max_tokens = self.token_limit()?;
        let labels = labels(self.metadata, self.user)?;
        check_labels(&labels, settings.max_labels, MAX_METADATA_VALUE)?;
        let mut counter = settings.attachment_counter();
        let mut entries = Vec::new();
        for (at, Object(message)) in self.messages.into_iter().enumerate() {
            message.add_to(&mut entries, &format!("/messages/{at}"), &mut counter)?;
        }
        let History {
            instructions,
            earlier,
            input,
            new_results,
            new_message,
        } = history::build(entries)?;
        let tools = read_tools(self.tools.unwrap_or_default())?;
        let client = ClientAdditions {
            instructions,
            ..tool_choice::additions(tools, self.tool_choice.as_ref())?
        };
        let format = self.response_format.map(|it| it.0.into_format());
        let params = ParamsOverride {
            temperature: self.temperature,
            max_tokens,
            top_p: self.top_p,
            stop: self.stop.map(StopInput::into_list),
            effort: self.reasoning_effort,
            response_format: ResponseFormatInput::parse(
                format,
                "/response_format/json_schema",
                owner,
            )
            .await?,
            ..ParamsOverride::default()
        };
        params
            .check()
            .map_err(|error| invalid_override("", error))?;
        let run_request = RunRequest {
            agent: agent.clone(),
            input: Some(input),
            messages: earlier,
            is_chat: true,
            labels,
            overrides: Overrides {
                model: model_override,
                params,
                client,
                ..Overrides::default()
            },
            ..RunRequest::default()
        };
        Ok(PreparedChat {
            model: self.model,
            agent,
            run_request,
            new_results,
            new_message,
        })
    }
}

/// The agent and the model of `agent@provider/model`. 404 if the principal may not use the agent.
pub fn split_model(
    model: &str,
    principal: &Principal,
) -> Result<(String, Option<String>), Problem> {
    let (agent, model) = match model.split_once('@') {
        Some((agent, model)) => (agent, Some(model.to_owned())),
        None => (model, None),
    };
    if agent.is_empty() {
        return Err(Problem::invalid_field(
            "/model",
            "is required: the name of an agent",
        ));
    }
    match is_agent_name(agent) && principal.can_use_agent(agent) {
        true => Ok((agent.to_owned(), model)),
        false => Err(LoadError::NotFound(agent.to_owned()).into()),
    }
}

/// `user` is a label of its own, unless `metadata` has one.
pub fn labels(
    metadata: Option<BTreeMap<String, String>>,
    user: Option<String>,
) -> Result<BTreeMap<String, String>, Problem> {
    let mut labels = metadata.unwrap_or_default();
    if let Some(user) = user.filter(|user| !user.is_empty()) {
        if user.chars().nth(MAX_LABEL_VALUE).is_some() {
            let why = format!("has at most {MAX_LABEL_VALUE} characters");
            return Err(Problem::invalid_field("/user", why));
        }
        labels.entry("user".to_owned()).or_insert(user);
    }
    Ok(labels)
}

/// The field that the label `user` is from.
pub fn user_field(metadata: Option<&BTreeMap<String, String>>) -> &'static str {
    if metadata.is_some_and(|metadata| metadata.contains_key("user")) {
        "/metadata/user"
    } else {
        "/user"
    }
}

fn read_tools(inputs: Vec<Object<ToolInput>>) -> Result<RequestTools, Problem> {
    let mut tools = RequestTools::default();
    for (at, Object(tool)) in inputs.into_iter().enumerate() {
        let pointer = format!("/tools/{at}/function");
        match (tool.r#type.as_deref(), tool.function) {
            (None | Some(FUNCTION), Some(Object(function))) => {
                tools.functions.push(FunctionInput {
                    pointer,
                    name: function.name,
                    description: function.description,
                    parameters: function.parameters,
                })
            }
            (None | Some(FUNCTION), None) => {
                return Err(Problem::invalid_field(pointer, "is required"));
            }
            (Some(kind), _) => tools.leave_out(kind, None),
        }
    }
    Ok(tools)
}

impl StopInput {
    fn into_list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

impl FormatInput {
    fn into_format(self) -> Object<ResponseFormatInput> {
        let schema = self.json_schema.and_then(|Object(it)| it.schema);
        Object(ResponseFormatInput::new(self.r#type, schema))
    }
}

impl MessageInput {
    fn add_to(
        self,
        entries: &mut Vec<(String, Entry)>,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<(), Problem> {
        let content_pointer = format!("{pointer}/content");
        let raw = self.content.as_deref();
        let mut add = |entry| entries.push((pointer.to_owned(), entry));
        match self.role {
            Role::System | Role::Developer => add(Entry::Instructions(content::parse_text(
                raw,
                &content_pointer,
                counter,
            )?)),
            Role::User => add(Entry::User(content::parse(raw, &content_pointer, counter)?)),
            Role::Assistant => {
                add(Entry::Reply(content::parse_text(
                    raw,
                    &content_pointer,
                    counter,
                )?));
                for (at, Object(call)) in self.tool_calls.into_iter().flatten().enumerate() {
                    let call_pointer = format!("{pointer}/tool_calls/{at}");
                    let Object(CalledFunction { name, arguments }) = call.function;
                    add(Entry::Call(tool_call(
                        call.id,
                        name,
                        arguments.as_deref(),
                        &call_pointer,
                    )?));
                }
            }
            Role::Tool => {
                let id = self.tool_call_id.ok_or_else(|| {
                    Problem::invalid_field(format!("{pointer}/tool_call_id"), "is required")
                })?;
                let content = content::parse(raw, &content_pointer, counter)?;
                add(Entry::Result(tool_result(id, content, &content_pointer)?));
            }
        }
        Ok(())
    }
}

/// A call of an earlier reply. Its model may have broken or cut the arguments.
pub fn tool_call(
    id: String,
    name: String,
    arguments: Option<&RawValue>,
    pointer: &str,
) -> Result<ToolCall, Problem> {
    if id.is_empty() || name.is_empty() {
        return Err(Problem::invalid_field(pointer, "needs an id and a name"));
    }
    let arguments = arguments.and_then(|json| encoded_object(json.get(), MAX_ENCODINGS));
    let arguments = arguments.filter(|json| json_body::nesting_depth(json.get()) <= MAX_DEPTH);
    Ok(ToolCall {
        id,
        provider_id: String::new(),
        name,
        arguments: arguments.map_or_else(empty_arguments, Arc::from),
        invalid_arguments: None,
    })
}

/// A result: its texts joined, and its pictures and files as attachments.
pub fn tool_result(id: String, content: Content, pointer: &str) -> Result<ToolResult, Problem> {
    let parts = match content {
        Content::Text(text) => return Ok(ToolResult::text(&id, text, false)),
        Content::Parts(parts) => parts,
    };
    let (mut texts, mut attachments) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text { text } => texts.push(text),
            Part::Image(attachment) | Part::File(attachment) => attachments.push(attachment),
            Part::Link(_) => {
                let why = "the result of a tool has no URLs; send the data";
                return Err(Problem::invalid_field(pointer, why));
            }
        }
    }
    Ok(ToolResult {
        attachments,
        ..ToolResult::text(&id, texts.join("\n"), false)
    })
}
