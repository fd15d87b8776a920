//! The body of `POST /agents/{name}/runs`: read and checked, it becomes a [`RunRequest`].

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::config::AttachmentLimits;
use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::agent::is_agent_name;
use crate::domain::agent::overrides::{BudgetOverride, InvalidOverride, ParamsOverride};
use crate::domain::agent::response_format::{FormatKind, ResponseFormat};
use crate::domain::rate_limit::Priority;
use crate::domain::run::MARKS;
use crate::engine::request::{Overrides, RunRequest, WebhookRequest};
use crate::engine::state::provider_keys::Keys;
use crate::engine::state::sessions::OnBusy;
use crate::validation;
use crate::web::body::content::{AttachmentCounter, RunInput};
use crate::web::body::form::Form;
use crate::web::body::json_body::{self, MAX_DEPTH, Object};
use crate::web::body::known_fields;
use crate::web::body::request_body::{RequestBody, parse_large};
use crate::web::error::Problem;
use crate::web::extract::messages::{self, MessageInput};
use crate::web::state::Settings;

/// Maximum characters of a label's key and of its value.
const MAX_LABEL_KEY: usize = 64;
pub const MAX_LABEL_VALUE: usize = 256;
/// Maximum bytes of a path, which is the kernel's limit.
const MAX_PATH: usize = 4096;

/// Builds the request for a run from a body.
pub async fn build_run_request(
    body: RequestBody,
    agent: String,
    owner: Option<String>,
    settings: &Settings,
) -> Result<RunRequest, Problem> {
    match body {
        RequestBody::Empty => Ok(RunRequest {
            owner,
            agent,
            ..RunRequest::default()
        }),
        RequestBody::Form(form) => {
            let mut request = parse_body(form.fields.as_bytes())?;
            request.form = Some(form);
            Box::pin(request.into_run_request(agent, owner, settings)).await
        }
        RequestBody::Text(input) => Ok(RunRequest {
            owner,
            agent,
            input: Some(input.into()),
            ..RunRequest::default()
        }),
        RequestBody::Json(bytes) => {
            let request = parse_large(bytes.len(), move || parse_body(&bytes)).await?;
            Box::pin(request.into_run_request(agent, owner, settings)).await
        }
    }
}

/// Checks a body that has only what a case of a dataset has: input, context, messages and labels.
pub fn check_case(
    body: &str,
    max_labels: usize,
    attachments: AttachmentLimits,
) -> Result<(), Problem> {
    let request = parse_body(body.as_bytes())?;
    let labels = request.labels.unwrap_or_default();
    check_labels(&labels, max_labels, MAX_LABEL_VALUE)?;
    let mut counter = AttachmentCounter::new(attachments);
    if let Some(input) = request.input {
        input.into_content("/input", &mut counter)?;
    }
    messages::parse_messages(request.messages.unwrap_or_default(), &mut counter).map(drop)
}

fn parse_body(bytes: &[u8]) -> Result<CreateRunRequest, Problem> {
    json_body::parse_json_with_places(bytes, known_fields::place_in_agent_file)
}

/// The request of a run. Every field is optional.
#[derive(Default, Deserialize, JsonSchema)]
#[schemars(rename = "RunRequest")]
#[serde(deny_unknown_fields, default)]
pub struct CreateRunRequest {
    /// The user message; an object that fits the agent's `input_schema` if it has one. Without it, the message is the default.
    input: Option<RunInput>,
    /// Appended to `input` after a blank line.
    context: Option<String>,
    /// `provider/model`, instead of the agent's.
    model: Option<String>,
    /// The path or the name of a skill, instead of the agent's; only within `tools.roots`.
    skill: Option<String>,
    /// The directory of the run's files and tools, instead of the agent's; only within `tools.roots`.
    workdir: Option<String>,
    /// Parameters of provider requests. Each one that is set replaces the agent's.
    params: Option<Object<ParamsOverride<Object<ResponseFormatInput>>>>,
    /// The run's time limit in seconds, at most `server.max_timeout`; 0 means the agent's.
    timeout: Option<u64>,
    /// Limits of the whole tree. 0 means the agent's limit.
    budget: Option<Object<BudgetOverride>>,
    /// Which requests come first while a provider's rate limit makes some wait, instead of the agent's.
    priority: Option<Priority>,
    /// Labels to find the run by: keys of 1 to 64 characters, values of at most 256.
    labels: Option<BTreeMap<String, String>>,
    /// The format of the final text.
    response_format: Option<Object<ResponseFormatInput>>,
    /// Whether the runs of the tree stream replies from their providers.
    stream: Option<bool>,
    /// A webhook in addition to the agent's.
    webhook: Option<Object<WebhookInput>>,
    /// Continues the conversation of this session's last completed run of the agent; a new name starts a session.
    session: Option<String>,
    /// What happens to the run if another run of the session is active or queued; only with `session`.
    on_busy: Option<OnBusyInput>,
    /// The earlier conversation, oldest message first; not with `session`.
    messages: Option<Vec<Object<MessageInput>>>,
    /// The form that the other fields come from, with its own input.
    #[serde(skip)]
    form: Option<Box<Form>>,
}

/// What happens to a run if another run of its session is active or queued.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[schemars(rename = "OnBusy")]
#[serde(rename_all = "snake_case")]
enum OnBusyInput {
    /// The run is queued; the default.
    Queue,
    /// The request is refused with 409.
    Reject,
    /// The other runs are cancelled.
    CancelPrevious,
}

impl From<OnBusyInput> for OnBusy {
    fn from(busy: OnBusyInput) -> Self {
        match busy {
            OnBusyInput::Queue => Self::Queue,
            OnBusyInput::Reject => Self::Reject,
            OnBusyInput::CancelPrevious => Self::CancelPrevious,
        }
    }
}

// Not `Debug`: its address may hold a secret.
/// A receiver of the events of a run.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WebhookInput {
    /// An https URL.
    url: Option<String>,
    /// The types of events to send; absent means those that end a run.
    events: Option<Vec<String>>,
}

/// The format of the final text.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseFormatInput {
    /// The kind of format.
    r#type: FormatKind,
    /// The JSON Schema of the final text, for `json_schema` only.
    #[schemars(with = "Option<serde_json::Map<String, serde_json::Value>>")]
    schema: Option<Box<RawValue>>,
}

impl CreateRunRequest {
    /// The request of the body, checked as far as is possible without the agent.
    pub async fn into_run_request(
        self,
        agent: String,
        owner: Option<String>,
        settings: &Settings,
    ) -> Result<RunRequest, Problem> {
        let labels = self.labels.unwrap_or_default();
        check_labels(&labels, settings.max_labels, MAX_LABEL_VALUE)?;
        let session = self.session.map(check_session_name).transpose()?;
        if self.on_busy.is_some() && session.is_none() {
            return Err(Problem::invalid_field(
                "/on_busy",
                "is only for a run with a session",
            ));
        }
        if self.messages.is_some() && session.is_some() {
            let why = "cannot be sent with a session, which has a conversation of its own";
            return Err(Problem::invalid_field("/messages", why));
        }
        let format =
            ResponseFormatInput::parse(self.response_format, "/response_format", owner.as_deref())
                .await?;
        let mut params = match self.params {
            Some(Object(params)) => check_params(params, "/params", owner.as_deref()).await?,
            None => ParamsOverride::default(),
        };
        if format.is_some() && params.response_format.is_some() {
            return Err(Problem::invalid_field(
                "/params/response_format",
                "is also given as response_format",
            ));
        }
        params.response_format = format.or(params.response_format);
        let is_object_input = self.input.as_ref().is_some_and(RunInput::is_object);
        let (input, mut counter) = match (self.form, self.input) {
            (Some(form), _) => (form.input, form.counter.with_guard(&settings.link_guard)),
            (None, input) => {
                let mut counter = settings.attachment_counter();
                let input = input.map(|input| input.into_content("/input", &mut counter));
                (input.transpose()?, counter)
            }
        };
        Ok(RunRequest {
            owner,
            claim: None,
            definition: None,
            trace: None,
            provider_keys: Keys::new(),
            agent,
            input,
            is_object_input,
            context: self.context,
            messages: messages::parse_messages(self.messages.unwrap_or_default(), &mut counter)?,
            is_chat: false,
            session,
            on_busy: self.on_busy.map(OnBusy::from).unwrap_or_default(),
            overrides: Overrides {
                model: self.model,
                skill: check_path("/skill", self.skill)?,
                workdir: check_path("/workdir", self.workdir)?.map(PathBuf::from),
                params,
                timeout: parse_timeout(self.timeout, settings.max_timeout)?,
                budget: self
                    .budget
                    .map(|Object(limits)| limits.into_budget())
                    .transpose()
                    .map_err(|error| invalid_override("/budget", error))?
                    .unwrap_or_default(),
                priority: self.priority,
                client: ClientAdditions::default(),
            },
            labels,
            webhook: self.webhook.map(|Object(webhook)| webhook.into_request()),
            stream: self.stream,
            playback: None,
        })
    }
}

impl WebhookInput {
    pub fn into_request(self) -> WebhookRequest {
        WebhookRequest {
            url: self.url,
            events: self.events.unwrap_or_default(),
        }
    }
}

impl ResponseFormatInput {
    pub fn new(kind: FormatKind, schema: Option<Box<RawValue>>) -> Self {
        Self {
            r#type: kind,
            schema,
        }
    }

    /// The checked format, which is at `pointer` in the body.
    pub async fn parse(
        format: Option<Object<Self>>,
        pointer: &str,
        owner: Option<&str>,
    ) -> Result<Option<ResponseFormat>, Problem> {
        let Some(Object(format)) = format else {
            return Ok(None);
        };
        let schema_pointer = format!("{pointer}/schema");
        match (format.r#type, format.schema) {
            (FormatKind::Text, None) => Ok(Some(ResponseFormat::Text)),
            (FormatKind::JsonObject, None) => Ok(Some(ResponseFormat::JsonObject)),
            (FormatKind::JsonSchema, None) => Err(Problem::invalid_field(
                &schema_pointer,
                "is required when type is json_schema",
            )),
            (FormatKind::JsonSchema, Some(schema)) => {
                // Raw JSON is passed over without being followed, so its depth was not checked yet.
                if json_body::nesting_depth(schema.get()) > MAX_DEPTH {
                    return Err(json_body::too_deep());
                }
                if !schema.get().starts_with('{') {
                    return Err(Problem::invalid_field(
                        schema_pointer.as_str(),
                        "must be an object",
                    ));
                }
                let schema = validation::compile_schema(Arc::from(schema), owner)
                    .await
                    .map_err(|why| {
                        Problem::invalid_field(
                            schema_pointer.as_str(),
                            format!("is no JSON Schema: {why}"),
                        )
                    })?;
                let raw = Arc::clone(schema.raw());
                Ok(Some(ResponseFormat::JsonSchema(raw)))
            }
            (FormatKind::Text | FormatKind::JsonObject, Some(_)) => Err(Problem::invalid_field(
                schema_pointer.as_str(),
                "is only for type json_schema",
            )),
        }
    }
}

/// Checks parameters that are at `pointer` in the body.
pub async fn check_params(
    mut params: ParamsOverride<Object<ResponseFormatInput>>,
    pointer: &str,
    owner: Option<&str>,
) -> Result<ParamsOverride<ResponseFormat>, Problem> {
    params
        .check()
        .map_err(|error| invalid_override(pointer, error))?;
    let format = params.response_format.take();
    let format_pointer = format!("{pointer}/response_format");
    let format = ResponseFormatInput::parse(format, &format_pointer, owner).await?;
    Ok(params.with_response_format(format))
}

/// `max_value` in characters.
pub fn check_labels(
    labels: &BTreeMap<String, String>,
    max_labels: usize,
    max_value: usize,
) -> Result<(), Problem> {
    if labels.len() > max_labels {
        let why = format!(
            "{} labels are more than the {max_labels} that a run may have",
            labels.len()
        );
        return Err(Problem::invalid_field("/labels", why));
    }
    for (key, value) in labels {
        if key.is_empty() || key.chars().nth(MAX_LABEL_KEY).is_some() {
            let why = format!("a label's key has 1 to {MAX_LABEL_KEY} characters");
            return Err(Problem::invalid_field("/labels", why));
        }
        if MARKS.contains(&key.as_str()) {
            let why = "marks the runs that scorers and evaluations start; choose another key";
            return Err(Problem::invalid_field(
                json_body::join_pointer("/labels", key),
                why,
            ));
        }
        if value.chars().nth(max_value).is_some() {
            let why = format!("a label's value has at most {max_value} characters");
            return Err(Problem::invalid_field(
                json_body::join_pointer("/labels", key),
                why,
            ));
        }
    }
    Ok(())
}

/// 0 means that the request sets none, as it does in an agent's file.
pub fn parse_timeout(
    seconds: Option<u64>,
    max_timeout: Duration,
) -> Result<Option<Duration>, Problem> {
    match seconds.unwrap_or(0) {
        0 => Ok(None),
        seconds if seconds <= max_timeout.as_secs() => Ok(Some(Duration::from_secs(seconds))),
        _ => {
            let why = format!(
                "must be at most {} seconds (server.max_timeout)",
                max_timeout.as_secs()
            );
            Err(Problem::invalid_field("/timeout", why))
        }
    }
}

/// A session's name has the shape of an agent's.
pub fn check_session_name(name: String) -> Result<String, Problem> {
    match is_agent_name(&name) {
        true => Ok(name),
        false => Err(Problem::invalid_field(
            "/session",
            "must be 1 to 64 letters, digits, '.', '_' and '-', the first a letter or a digit",
        )),
    }
}

fn check_path(pointer: &str, path: Option<String>) -> Result<Option<String>, Problem> {
    match path {
        Some(path) if path.trim().is_empty() => {
            Err(Problem::invalid_field(pointer, "must not be blank"))
        }
        Some(path) if path.contains('\0') => {
            Err(Problem::invalid_field(pointer, "must not hold a NUL"))
        }
        Some(path) if path.len() > MAX_PATH => Err(Problem::invalid_field(
            pointer,
            format!("must have at most {MAX_PATH} bytes"),
        )),
        path => Ok(path),
    }
}

pub fn invalid_override(pointer: &str, error: InvalidOverride) -> Problem {
    Problem::invalid_field(json_body::join_pointer(pointer, error.key), error.reason)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::parse_body;
    use crate::domain::agent::response_format::ResponseFormat;
    use crate::domain::usage::Cost;
    use crate::engine::request::RunRequest;
    use crate::ssrf::SsrfGuard;
    use crate::web::body::body_budget::BodyBudget;
    use crate::web::error::Problem;
    use crate::web::server::forwarded::TrustedProxies;
    use crate::web::state::Settings;

    fn parse(body: &Value) -> Result<RunRequest, Problem> {
        let settings = Settings {
            keys: Vec::new(),
            loopback_port: None,
            metrics: true,
            path_prefix: String::new(),
            trusted_proxies: TrustedProxies::default(),
            cors: None,
            compression: true,
            max_trigger_body: 1000,
            body_budget: Arc::new(BodyBudget::new(0, 1000)),
            max_body: 4 << 20,
            attachments: crate::config::AttachmentLimits {
                count: 1,
                bytes: 9,
                total: 9,
            },
            link_guard: Arc::new(SsrfGuard::new([], "allow_hosts")),
            max_wait: Duration::from_secs(300),
            max_timeout: Duration::from_secs(86_400),
            client_timeout: Duration::from_secs(30),
            max_labels: 64,
            datasets: PathBuf::new(),
            clients: crate::config::clients::Clients::default(),
            retention: crate::config::Retention::default(),
            redactor: crate::domain::redaction::Redactor::default(),
        };
        let request = parse_body(body.to_string().as_bytes())?;
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let run_request = request.into_run_request("a".to_owned(), None, &settings);
        runtime.expect("a runtime").block_on(run_request)
    }

    fn refused(body: &Value) -> String {
        let problem = parse(body).expect_err("a problem");
        let body: Value = serde_json::from_slice(&problem.render("", "")).expect("JSON");
        format!(
            "{} {}",
            body["status"],
            body["detail"].as_str().unwrap_or("")
        )
    }

    #[test]
    fn a_full_body_becomes_a_run_request() {
        let request = parse(&json!({
            "input": "hello", "context": "more", "model": "openai/gpt", "timeout": 5, "stream": true,
            "params": {"temperature": 0.0, "max_tokens": 9, "stop": ["x"]},
            "budget": {"max_tokens": 100, "max_cost_usd": 0.5, "max_runs": 0},
            "labels": {"team": "a"},
            "response_format": {"type": "json_schema", "schema": {"type": "object"}},
            "session": null,
        }))
        .expect("a wish");
        assert_eq!(request.input, Some("hello".into()));
        assert_eq!(request.overrides.timeout, Some(Duration::from_secs(5)));
        assert_eq!(request.overrides.params.temperature, Some(0.0));
        assert_eq!(request.overrides.budget.max_cost, Some(Cost::from_usd(0.5)));
        assert_eq!(request.overrides.budget.max_runs, None);
        assert_eq!(
            (request.labels["team"].as_str(), request.stream),
            ("a", Some(true))
        );
        let Some(ResponseFormat::JsonSchema(schema)) = request.overrides.params.response_format
        else {
            panic!("no schema");
        };
        assert_eq!(schema.get(), r#"{"type":"object"}"#);
    }

    #[test]
    fn errors_name_their_field() {
        let many: Value = (0..100_000)
            .map(|n| (n.to_string(), json!("x")))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let deep = |levels: usize| -> Value {
            (0..levels).fold(json!({}), |inner, _| json!({ "items": inner }))
        };
        let cases = [
            json!({"labels": many}),
            json!({"labels": {"k".repeat(65): "v"}}),
            json!({"labels": {"": "v"}}),
            json!({"labels": {"a/b": "v".repeat(257)}}),
            json!({"labels": {"a": 1}}),
            json!({"timeout": 1_000_000_000}),
            json!({"params": {"temperature": -0.1}}),
            json!({"params": {"top_p": 1.1}}),
            json!({"params": {"max_tokens": 0}}),
            json!({"params": {"max_tokens": -5}}),
            json!({"params": {"response_format": {"type": "text"}}, "response_format": {}}),
            json!({"budget": {"max_cost_usd": -1}}),
            json!({"budget": {"max_token": 1}}),
            json!({"temperature": 1}),
            json!({"max_tokens": 1}),
            json!({"params": {"timeout": 1}}),
            json!({"max_turns": 3}),
            json!({"system_prompt": "Be kind."}),
            json!({"response_format": {"type": "json_schema"}}),
            json!({"response_format": {"type": "json_schema", "schema": []}}),
            json!({"response_format": {"type": "json_schema", "schema": deep(140)}}),
            json!({"response_format": {"type": "xml"}}),
            json!({"response_format": {"schema": {}}}),
            json!({"workdir": "a\0b"}),
            json!({"skill": " "}),
            json!({"webhook": "https://example.com"}),
            json!({"webhook": {"uri": "https://example.com"}}),
            json!({"session": ""}),
            json!({"session": "a/b"}),
            json!({"on_busy": "queue"}),
            json!({"session": "s", "on_busy": "wait"}),
            json!({"session": "s", "messages": []}),
        ];
        let all: Vec<String> = cases.iter().map(refused).collect();
        insta::assert_snapshot!(all.join("\n"));
    }
}
