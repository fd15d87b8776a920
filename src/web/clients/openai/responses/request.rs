//! The body of `POST /v1/responses`: read and checked, it becomes the request of a run. Unknown fields are passed over.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::params::Effort;
use crate::domain::agent::response_format::FormatKind;
use crate::domain::content::Content;
use crate::domain::message::{Message, ToolResult};
use crate::engine::request::{Overrides, RunRequest};
use crate::web::auth::Principal;
use crate::web::body::content::AttachmentCounter;
use crate::web::body::json_body::{self, Object};
use crate::web::clients::client_tools::{FunctionInput, RequestTools};
use crate::web::clients::history::{self, Entry, History};
use crate::web::clients::openai::chat::request::{
    FUNCTION, MAX_METADATA_VALUE, labels, split_model, tool_call, tool_result, user_field,
};
use crate::web::clients::openai::content;
use crate::web::clients::openai::responses::echo::Echo;
use crate::web::clients::openai::responses::record::ResponseRecord;
use crate::web::clients::openai::tool_choice;
use crate::web::error::{Problem, quote};
use crate::web::extract::run_request::{
    ResponseFormatInput, check_labels, check_session_name, invalid_override,
};
use crate::web::state::AppState;

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ResponsesRequest {
    model: String,
    input: Option<Box<RawValue>>,
    instructions: Option<String>,
    previous_response_id: Option<String>,
    conversation: Option<ConversationInput>,
    pub stream: Option<bool>,
    pub background: Option<bool>,
    pub store: Option<bool>,
    tools: Option<Vec<Object<ToolInput>>>,
    tool_choice: Option<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    max_output_tokens: Option<u32>,
    reasoning: Option<Object<ReasoningInput>>,
    text: Option<Object<TextInput>>,
    user: Option<String>,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be a name, or an object with an id")]
enum ConversationInput {
    Name(String),
    Object { id: String },
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
struct ReasoningInput {
    effort: Option<Effort>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
struct TextInput {
    format: Option<Object<FormatInput>>,
}

#[derive(Deserialize, JsonSchema)]
struct FormatInput {
    r#type: FormatKind,
    name: Option<String>,
    schema: Option<Box<RawValue>>,
}

#[derive(Deserialize, JsonSchema)]
struct ToolInput {
    r#type: Option<String>,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
}

/// An item of `input`. A message needs no type.
#[derive(Deserialize)]
struct ItemInput {
    r#type: Option<String>,
    role: Option<String>,
    content: Option<Box<RawValue>>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<Box<RawValue>>,
    /// The text of a custom call.
    input: Option<String>,
    output: Option<Box<RawValue>>,
}

/// The parts of a request that are read before it is known whether it starts a run.
pub struct ReadInput {
    pub agent: String,
    pub model_override: Option<String>,
    /// The entries of `input`, with their places.
    entries: Vec<(String, Entry)>,
}

impl ResponsesRequest {
    pub fn check(&self) -> Result<(), Problem> {
        let is_background = self.background.unwrap_or_default();
        if is_background && self.store == Some(false) {
            let why = "contradicts background: true, whose response is read later";
            return Err(Problem::invalid_field("/store", why));
        }
        if self.conversation.is_some() && self.previous_response_id.is_some() {
            let why = "contradicts conversation; send one of them";
            return Err(Problem::invalid_field("/previous_response_id", why));
        }
        Ok(())
    }

    pub fn read_input(
        &self,
        principal: &Principal,
        state: &AppState,
    ) -> Result<ReadInput, Problem> {
        let (agent, model_override) = split_model(&self.model, principal)?;
        let mut counter = state.settings.attachment_counter();
        let entries = read_items(self.input.as_deref(), &mut counter)?;
        Ok(ReadInput {
            agent,
            model_override,
            entries,
        })
    }

    /// `previous` is the response that the request continues.
    pub async fn prepare(
        self,
        read: ReadInput,
        previous: Option<&ResponseRecord>,
        owner: Option<&str>,
        state: &AppState,
    ) -> Result<RunRequest, Problem> {
        let settings = &state.settings;
        let run_labels = labels(self.metadata.clone(), self.user.clone())?;
        check_labels(&run_labels, settings.max_labels, MAX_METADATA_VALUE)?;
        let inherited = previous
            .map(ResponseRecord::conversation)
            .unwrap_or_default();
        let mut entries = Vec::new();
        for message in inherited {
            add_message(&mut entries, message);
        }
        let inherited = history::count_messages(&entries);
        entries.extend(read.entries);
        if entries.is_empty() {
            return Err(Problem::invalid_field("/input", "is required"));
        }
        let history = history::build(entries)?;
        let session = self.conversation.as_ref().map(|it| match it {
            ConversationInput::Name(id) | ConversationInput::Object { id } => id.clone(),
        });
        let session = session.map(check_session_name).transpose()?;
        if session.is_some() && !history.earlier.is_empty() {
            let why =
                "has earlier messages, but the conversation has its own; send the new message only";
            return Err(Problem::invalid_field("/input", why));
        }
        let messages = (history.earlier.len() + 1).saturating_sub(inherited);
        let echo = self.echo(session.clone(), messages);
        let is_temporary = !self.stores();
        let instructions = [self.instructions, history.instructions];
        let instructions: Vec<String> = instructions.into_iter().flatten().collect();
        let additions = tool_choice::additions(read_tools(self.tools)?, self.tool_choice.as_ref())?;
        let client = ClientAdditions {
            instructions: (!instructions.is_empty()).then(|| instructions.join("\n\n")),
            echo: to_raw_value(&echo).ok().map(Arc::from),
            is_temporary,
            // The next run of a session needs the results.
            ends_with_calls: additions.ends_with_calls && session.is_none(),
            ..additions
        };
        let format = self.text.and_then(|Object(text)| text.format);
        let format =
            format.map(|Object(it)| Object(ResponseFormatInput::new(it.r#type, it.schema)));
        let params = ParamsOverride {
            temperature: self.temperature,
            max_tokens: self.max_output_tokens,
            top_p: self.top_p,
            effort: self.reasoning.and_then(|Object(it)| it.effort),
            response_format: ResponseFormatInput::parse(format, "/text/format", owner).await?,
            ..ParamsOverride::default()
        };
        params
            .check()
            .map_err(|error| invalid_override("", error))?;
        let History { earlier, input, .. } = history;
        Ok(RunRequest {
            agent: read.agent,
            input: Some(input),
            messages: earlier,
            is_chat: true,
            session,
            labels: run_labels,
            overrides: Overrides {
                model: read.model_override,
                params,
                client,
                ..Overrides::default()
            },
            ..RunRequest::default()
        })
    }

    /// What the response shows of the request. `messages` are those of the request in the run's prompt.
    fn echo(&self, conversation: Option<String>, messages: usize) -> Echo {
        Echo {
            model: self.model.clone(),
            instructions: self.instructions.clone(),
            previous_response_id: self.previous_response_id.clone(),
            conversation,
            tool_choice: tool_choice::echo(self.tool_choice.as_ref()),
            format: format_echo(self.text.as_ref().map(|Object(text)| text)),
            effort: self.reasoning.as_ref().and_then(|Object(it)| it.effort),
            temperature: self.temperature,
            top_p: self.top_p,
            max_output_tokens: self.max_output_tokens,
            metadata: self.metadata.clone().unwrap_or_default(),
            user: self.user.clone(),
            background: self.background.unwrap_or_default(),
            store: self.stores(),
            messages,
        }
    }

    /// The names in this request of fields that a run names otherwise; see [`Problem::with_field_names`].
    pub fn field_names(&self) -> [(&'static str, &'static str); 5] {
        let session = match self.conversation {
            Some(ConversationInput::Object { .. }) => "/conversation/id",
            _ => "/conversation",
        };
        [
            ("/max_tokens", "/max_output_tokens"),
            ("/labels/user", user_field(self.metadata.as_ref())),
            ("/labels", "/metadata"),
            ("/session", session),
            ("/params", ""),
        ]
    }

    pub fn previous_response_id(&self) -> Option<&str> {
        self.previous_response_id.as_deref()
    }

    pub fn stores(&self) -> bool {
        self.store.unwrap_or(true)
    }
}

impl ReadInput {
    /// The results at the end of the input, and what the user says after them.
    pub fn new_results(&self) -> (Vec<ToolResult>, Option<&Content>) {
        let entries = self.entries.iter().rev().map(|(_, entry)| entry);
        let is_said = |entry: &&Entry| match entry {
            Entry::Instructions(_) => false,
            Entry::User(content) => !content.is_blank(),
            _ => true,
        };
        let mut entries = entries.filter(is_said).peekable();
        let message = match entries.next_if(|entry| matches!(entry, Entry::User(_))) {
            Some(Entry::User(content)) => Some(content),
            _ => None,
        };
        let results = entries.map_while(|entry| match entry {
            Entry::Result(result) => Some(result.clone()),
            _ => None,
        });
        (results.collect(), message)
    }
}

fn format_echo(text: Option<&TextInput>) -> Value {
    let Some(Object(format)) = text.and_then(|text| text.format.as_ref()) else {
        return json!({"type": "text"});
    };
    match (format.r#type, &format.schema) {
        (FormatKind::JsonSchema, Some(schema)) => json!({
            "type": "json_schema", "name": format.name.as_deref().unwrap_or("response"), "schema": schema,
            "strict": true, "description": null,
        }),
        (kind, _) => json!({"type": kind}),
    }
}

fn read_tools(inputs: Option<Vec<Object<ToolInput>>>) -> Result<RequestTools, Problem> {
    let mut tools = RequestTools::default();
    for (at, Object(tool)) in inputs.into_iter().flatten().enumerate() {
        let pointer = format!("/tools/{at}");
        match (tool.r#type.as_deref(), tool.name) {
            (None | Some(FUNCTION), Some(name)) => tools.functions.push(FunctionInput {
                pointer,
                name,
                description: tool.description,
                parameters: tool.parameters,
            }),
            (None | Some(FUNCTION), None) => {
                let name_pointer = format!("{pointer}/name");
                return Err(Problem::invalid_field(name_pointer, "is required"));
            }
            (Some(kind), name) => tools.leave_out(kind, name.as_deref()),
        }
    }
    Ok(tools)
}

fn read_items(
    input: Option<&RawValue>,
    counter: &mut AttachmentCounter,
) -> Result<Vec<(String, Entry)>, Problem> {
    let Some(json) = input.map(RawValue::get).filter(|json| *json != "null") else {
        return Ok(Vec::new());
    };
    if json.starts_with('"') {
        let content = content::parse(input, "/input", counter)?;
        return Ok(vec![("/input".to_owned(), Entry::User(content))]);
    }
    if !json.starts_with('[') {
        let why = "must be a text or a list of items";
        return Err(Problem::invalid_field("/input", why));
    }
    let items = json_body::parse_raw::<Vec<Object<ItemInput>>>(json, "/input")?;
    let mut entries = Vec::with_capacity(items.len());
    for (at, Object(item)) in items.into_iter().enumerate() {
        let pointer = format!("/input/{at}");
        if let Some(entry) = item.into_entry(&pointer, counter)? {
            entries.push((pointer, entry));
        }
    }
    Ok(entries)
}

impl ItemInput {
    /// `None` for items that only the service that wrote them can read.
    fn into_entry(
        self,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<Option<Entry>, Problem> {
        let required =
            |field: &str| Problem::invalid_field(format!("{pointer}/{field}"), "is required");
        match self.r#type.as_deref().unwrap_or("message") {
            "message" => {
                let role = self.role.ok_or_else(|| required("role"))?;
                let content_pointer = format!("{pointer}/content");
                let raw = self.content.as_deref();
                Ok(Some(match role.as_str() {
                    "user" => Entry::User(content::parse(raw, &content_pointer, counter)?),
                    "assistant" => {
                        Entry::Reply(content::parse_text(raw, &content_pointer, counter)?)
                    }
                    "system" | "developer" => {
                        Entry::Instructions(content::parse_text(raw, &content_pointer, counter)?)
                    }
                    other => {
                        let why = format!(
                            "{} is not user, assistant, system or developer",
                            quote(other)
                        );
                        return Err(Problem::invalid_field(format!("{pointer}/role"), why));
                    }
                }))
            }
            "function_call" => {
                let id = self.call_id.ok_or_else(|| required("call_id"))?;
                let name = self.name.ok_or_else(|| required("name"))?;
                let arguments = self.arguments.as_deref();
                tool_call(id, name, arguments, pointer).map(|call| Some(Entry::Call(call)))
            }
            "custom_tool_call" => {
                let id = self.call_id.ok_or_else(|| required("call_id"))?;
                let name = self.name.ok_or_else(|| required("name"))?;
                let arguments = to_raw_value(&json!({"input": self.input})).ok();
                let arguments = arguments.as_deref();
                tool_call(id, name, arguments, pointer).map(|call| Some(Entry::Call(call)))
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = self.call_id.ok_or_else(|| required("call_id"))?;
                let output_pointer = format!("{pointer}/output");
                let output = content::parse(self.output.as_deref(), &output_pointer, counter)?;
                tool_result(id, output, &output_pointer).map(|it| Some(Entry::Result(it)))
            }
            "reasoning"
            | "compaction"
            | "web_search_call"
            | "file_search_call"
            | "code_interpreter_call"
            | "image_generation_call"
            | "mcp_list_tools" => Ok(None),
            other => Err(Problem::invalid_field(
                format!("{pointer}/type"),
                format!(
                    "{} is not supported: use messages, function_call and function_call_output",
                    quote(other)
                ),
            )),
        }
    }
}

/// The entries of a recorded message.
fn add_message(entries: &mut Vec<(String, Entry)>, message: Message) {
    let mut add = |entry| entries.push(("/previous_response_id".to_owned(), entry));
    match message {
        Message::User { content } => add(Entry::User(content)),
        Message::Assistant(reply) => {
            add(Entry::Reply(reply.content));
            reply
                .tool_calls
                .into_iter()
                .for_each(|call| add(Entry::Call(call)));
        }
        Message::Tool { tool_results } => {
            tool_results
                .into_iter()
                .for_each(|result| add(Entry::Result(result)));
        }
    }
}
