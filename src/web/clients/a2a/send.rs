//! `POST /a2a/{agent}/message:send` and `message:stream`: a message starts a task, or is for one that has not ended.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::Uri;
use axum::response::Response;
use bytes::Bytes;

use crate::config::KeyScope;
use crate::domain::attachment::Digest;
use crate::domain::content::Content;
use crate::domain::run::{Run, RunId};
use crate::engine::control::add_message::{AddMessageError, MessageRequest};
use crate::engine::request::RunRequest;
use crate::engine::state::broadcaster::Subscription;
use crate::store::{IdempotencyClaim, StoreError};
use crate::web::auth::Principal;
use crate::web::body::content::AttachmentCounter;
use crate::web::body::json_body::{Object, parse_json};
use crate::web::body::request_body::{self, RequestBody, parse_large, unsupported_media_type};
use crate::web::clients::a2a::content::{self, MessageContent};
use crate::web::clients::a2a::context::context_id;
use crate::web::clients::a2a::decisions;
use crate::web::clients::a2a::error::task_ended;
use crate::web::clients::a2a::message::{Configuration, PartInput, SendRequest, session_of};
use crate::web::clients::a2a::push;
use crate::web::clients::a2a::response;
use crate::web::clients::a2a::stream::TaskStream;
use crate::web::clients::a2a::task::{TaskParts, is_stopped, task};
use crate::web::clients::a2a::tasks::{find, wait_for_stop};
use crate::web::clients::a2a::types::SendMessageResponse;
use crate::web::clients::a2a::version::Version1;
use crate::web::clients::start;
use crate::web::error::Problem;
use crate::web::extract::idempotency;
use crate::web::extract::path::AgentPath;
use crate::web::routes::create_run::ParsedRequest;
use crate::web::routes::messages::reject_links;
use crate::web::state::AppState;

/// A key needs one of these; a message that is no decision needs the first.
pub const SCOPES: [KeyScope; 2] = [KeyScope::Run, KeyScope::Approve];

/// The place of a configuration of push notifications in the body.
const PUSH_CONFIG: &str = "/configuration/taskPushNotificationConfig";

/// A message that was read, and checked as far as is possible without the agent.
struct ReadMessage {
    id: String,
    context: Option<String>,
    task: Option<String>,
    body: MessageBody,
    configuration: Configuration,
}

enum MessageBody {
    Content(MessageContent),
    /// Of a message to a task.
    Decision(Vec<PartInput>),
}

/// The task of an accepted message.
struct AcceptedMessage {
    /// If the message decides on calls, the record in which they wait.
    run: Arc<Run>,
    is_decided: bool,
    /// Whether an earlier request has brought the message.
    is_repeated: bool,
    subscription: Option<Subscription>,
    configuration: Configuration,
}

impl AcceptedMessage {
    /// The run, with the decisions of the message.
    async fn current_run(
        &self,
        state: &AppState,
        principal: &Principal,
    ) -> Result<Arc<Run>, Problem> {
        if !self.is_decided {
            return Ok(Arc::clone(&self.run));
        }
        let (agent, id) = (&self.run.agent, self.run.id.to_string());
        find(state, principal, agent, &id).await.map(Arc::new)
    }
}

/// `POST /a2a/{agent}/message:send`
pub async fn send(
    State(state): State<AppState>,
    _: Version1,
    AgentPath(agent): AgentPath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let parsed = Box::pin(parse_request(&state, request)).await?;
    respond(&state, &principal, agent, parsed).await
}

/// `POST /a2a/{agent}/message:stream`
pub async fn stream(
    State(state): State<AppState>,
    _: Version1,
    AgentPath(agent): AgentPath,
    principal: Principal,
    request: Request,
) -> Result<Response, Problem> {
    let parsed = Box::pin(parse_request(&state, request)).await?;
    respond_streaming(&state, &principal, agent, parsed).await
}

async fn parse_request(state: &AppState, mut request: Request) -> Result<ParsedRequest, Problem> {
    // The version may be a parameter.
    *request.uri_mut() = Uri::from_static("/");
    ParsedRequest::read_with_data(&state.settings, content::DATA_FIELDS, request).await
}

/// The task of a message, once it has ended or requires input.
pub async fn respond(
    state: &AppState,
    principal: &Principal,
    agent: String,
    request: ParsedRequest,
) -> Result<Response, Problem> {
    let accepted = Box::pin(accept(state, principal, agent, request, false)).await?;
    let parts = TaskParts::with_history(accepted.configuration.history_length());
    let id = accepted.run.id;
    let returns_immediately = accepted.configuration.return_immediately;
    let run = match returns_immediately || !accepted.is_decided && is_stopped(&accepted.run) {
        true => accepted.current_run(state, principal).await?,
        false => wait_for_stop(state, accepted.run).await,
    };
    let task = task(state, &run, parts).await?;
    let response = response::json(&SendMessageResponse::Task(task))?;
    Ok(response::with_run_id(response, id))
}

/// The events of a message's task.
pub async fn respond_streaming(
    state: &AppState,
    principal: &Principal,
    agent: String,
    request: ParsedRequest,
) -> Result<Response, Problem> {
    let accepted = Box::pin(accept(state, principal, agent, request, true)).await?;
    let parts = TaskParts::with_history(accepted.configuration.history_length());
    let shown = accepted.current_run(state, principal).await?;
    let first = task(state, &shown, parts).await?;
    let has_ended = is_stopped(&shown) && !accepted.is_decided;
    let stream = TaskStream::new(state, accepted.run, first).await;
    Ok(stream.into_response(state, accepted.subscription, has_ended))
}

/// Accepts the message, and then the push notifications that come with it. A repetition adds them only if the first request
/// may have been interrupted before it did.
async fn accept(
    state: &AppState,
    principal: &Principal,
    agent: String,
    request: ParsedRequest,
    subscribes: bool,
) -> Result<AcceptedMessage, Problem> {
    let (id, mut accepted) = accept_message(state, principal, agent, request, subscribes).await?;
    if let Some(Object(input)) = accepted.configuration.task_push_notification_config.take() {
        let run = &accepted.run;
        if !accepted.is_repeated || push::is_missing(state, run, &input, &id).await? {
            push::add(state, run, input, PUSH_CONFIG, id).await?;
        }
    }
    Ok(accepted)
}

async fn accept_message(
    state: &AppState,
    principal: &Principal,
    agent: String,
    parsed: ParsedRequest,
    subscribes: bool,
) -> Result<(String, AcceptedMessage), Problem> {
    let bytes = json_bytes(parsed.body)?;
    let fingerprint = idempotency::fingerprint(b"", &bytes);
    let mut message = read(state, bytes).await?;
    if let Some(Object(input)) = &message.configuration.task_push_notification_config {
        // Checked before the run starts.
        let guard = state.runner.webhook_guard();
        input
            .clone()
            .into_config(PUSH_CONFIG, guard, String::new(), String::new())?;
    }
    let id = std::mem::take(&mut message.id);
    let (key, fingerprint) = match parsed.idempotency_key {
        Some(header) => header,
        None => (message_key(&id, &fingerprint), fingerprint),
    };
    let route = format!("POST /a2a/{agent}/message");
    let claim = idempotency::new_claim(principal.key_name(), route, key, fingerprint);
    if let Some(existing) = start::find(state, Some(&claim)).await? {
        let accepted = AcceptedMessage {
            subscription: state.runner.subscribe(existing.run.id).await,
            run: existing.run,
            is_decided: false,
            is_repeated: true,
            configuration: message.configuration,
        };
        return Ok((id, accepted));
    }
    if !matches!(message.body, MessageBody::Decision(_)) {
        principal.require_scope(KeyScope::Run)?;
    }
    if message.task.is_some() {
        let accepted = continue_task(state, principal, &agent, message, claim).await?;
        return Ok((id, accepted));
    }
    let ReadMessage {
        context,
        body,
        configuration,
        ..
    } = message;
    let context = context.unwrap_or_else(|| RunId::new().0.as_hyphenated().to_string());
    let run_request = RunRequest {
        owner: principal.key_name().map(str::to_owned),
        session: Some(session_of(context)?),
        claim: Some(claim),
        trace: parsed.trace,
        provider_keys: parsed.provider_keys,
        ..request_of(state, agent, body)?
    };
    let started = start::start(state, run_request, subscribes).await?;
    let accepted = AcceptedMessage {
        run: started.run,
        is_decided: false,
        is_repeated: started.is_repeated,
        subscription: started.subscription,
        configuration,
    };
    Ok((id, accepted))
}

/// The id of a message with its content: a client that uses an id for another message sends another one.
fn message_key(id: &str, fingerprint: &[u8; 32]) -> String {
    format!("{id}.{}", Digest(*fingerprint))
}

fn json_bytes(body: RequestBody) -> Result<Bytes, Problem> {
    match body {
        RequestBody::Json(bytes) => Ok(bytes),
        RequestBody::Empty => Ok(Bytes::from_static(b"{}")),
        RequestBody::Text(_) => Err(unsupported_media_type("text/plain")),
        RequestBody::Form(_) => Err(unsupported_media_type(request_body::FORM_CONTENT_TYPE)),
    }
}

async fn read(state: &AppState, bytes: Bytes) -> Result<ReadMessage, Problem> {
    let counter = state.settings.attachment_counter();
    parse_large(bytes.len(), move || parse(&bytes, counter)).await
}

fn parse(bytes: &[u8], mut counter: AttachmentCounter) -> Result<ReadMessage, Problem> {
    let (message, configuration) = parse_json::<SendRequest>(bytes)?.into_checked()?;
    let parts = message.parts.into_iter().map(|Object(part)| part);
    let parts: Vec<PartInput> = parts.collect();
    let is_decision = message.task_id.is_some() && decisions::is_decision(&parts);
    let body = match is_decision {
        true => MessageBody::Decision(parts),
        false => MessageBody::Content(content::parse(parts, &mut counter)?),
    };
    Ok(ReadMessage {
        id: message.message_id,
        context: message.context_id,
        task: message.task_id,
        body,
        configuration,
    })
}

/// The request of a new task. Data is the input of an agent with an `input_schema`.
fn request_of(state: &AppState, agent: String, body: MessageBody) -> Result<RunRequest, Problem> {
    let MessageBody::Content(message) = body else {
        return Err(Problem::internal("a decision without a task"));
    };
    let agents = state.runner.catalog().current();
    let takes_objects = agents.get(&agent)?.input_schema.is_some();
    Ok(match message.structured.filter(|_| takes_objects) {
        Some(structured) => RunRequest {
            agent,
            input: Some(Content::Text(structured.object.get().to_owned())),
            is_object_input: true,
            context: structured.context,
            ..RunRequest::default()
        },
        None => RunRequest {
            agent,
            input: Some(message.content),
            ..RunRequest::default()
        },
    })
}

/// A message to a task that waits for decisions decides; to another one that has not ended, it is added.
async fn continue_task(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    message: ReadMessage,
    claim: IdempotencyClaim,
) -> Result<AcceptedMessage, Problem> {
    let id = message.task.unwrap_or_default();
    let run = find(state, principal, agent, &id).await?;
    if message
        .context
        .is_some_and(|context| context != context_id(&run))
    {
        let why = format!(
            "is not the context of the task, which is {}",
            context_id(&run)
        );
        return Err(Problem::invalid_field("/message/contextId", why));
    }
    if run.status.is_terminal() {
        return Err(task_ended(&id, run.status.as_str()));
    }
    let subscription = state.runner.subscribe(run.id).await;
    let waits = !run.pending_inputs.is_empty();
    let mut accepted = AcceptedMessage {
        run: Arc::new(run),
        is_decided: false,
        is_repeated: false,
        subscription,
        configuration: message.configuration,
    };
    let run = Arc::clone(&accepted.run);
    match message.body {
        MessageBody::Decision(parts) if waits => {
            let applied = decisions::apply(state, principal, &run, &parts, &claim).await;
            if let Err(problem) = applied {
                if start::find(state, Some(&claim)).await?.is_none() {
                    return Err(problem);
                }
                // A request with the same id was quicker.
                accepted.is_repeated = true;
            }
            accepted.is_decided = true;
        }
        MessageBody::Decision(_) => return Err(decisions::nothing_waits(&run)),
        MessageBody::Content(message) if waits => {
            let Content::Text(text) = &message.content else {
                return Err(decisions::missing(&run));
            };
            let answered = decisions::answer_text(state, principal, &run, text, &claim).await;
            if let Err(problem) = answered {
                if start::find(state, Some(&claim)).await?.is_none() {
                    return Err(problem);
                }
                accepted.is_repeated = true;
            }
            accepted.is_decided = true;
        }
        MessageBody::Content(message) => {
            reject_links(&message.content, "/message/parts")?;
            let request = MessageRequest {
                content: message.content,
                by: principal.key_name().map(str::to_owned),
                claim: Some(claim),
            };
            match state.runner.add_message(run.id, request).await {
                Ok(_) => {}
                // A request with the same id was quicker.
                Err(AddMessageError::Store(StoreError::AlreadyClaimed(_))) => {
                    accepted.is_repeated = true;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(accepted)
}
