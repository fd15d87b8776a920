//! `/sessions` and the routes below it: lists a key's sessions, shows one with its conversation, deletes it.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use tracing::{error, info};

use crate::config::environment::is_valid_name;
use crate::domain::agent::is_agent_name;
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::timestamp_text;
use crate::engine::admission::sessions::SessionKey;
use crate::engine::replay::history::{self, RecordedConversation};
use crate::store::StoreError;
use crate::store::runs::{PAGE_BYTES, SessionQuery};
use crate::store::sessions::SessionListQuery;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::SessionPath;
use crate::web::extract::query::{Query, count_up_to};
use crate::web::problem_code::ProblemCode;
use crate::web::response::conversation::Conversation;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::routes::runs::{DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, wants_full_texts};
use crate::web::state::AppState;

/// A page of sessions, sorted by name.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionPage")]
pub struct SessionsPage {
    /// The sessions.
    data: Vec<SessionBrief>,
    /// The `cursor` of the next page; null on the last page.
    next_cursor: Option<String>,
}

/// A session as the list shows it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionSummary")]
pub struct SessionBrief {
    /// The session's name.
    name: String,
    /// The number of the session's runs.
    runs: u64,
    /// The number of messages of the conversation that the next run of `agent` continues.
    messages: usize,
    /// The session's last run.
    last_run: RunId,
    /// The agent of `last_run`.
    agent: String,
    /// When its first run was accepted, of those that are stored.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    created_at: Timestamp,
    /// When its last run ended or, if that has not ended, was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    updated_at: Timestamp,
}

/// A session with a page of its runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Session")]
pub struct SessionView<'a> {
    /// The session's name.
    name: &'a str,
    /// The agent of `run`.
    agent: Option<&'a str>,
    /// The last completed run, whose conversation the next run continues.
    run: Option<RunId>,
    /// The number of messages of that conversation.
    messages: usize,
    /// The page of runs, newest first.
    data: Vec<RunView<'a>>,
    /// The `cursor` of the next page; null on the last page.
    next_cursor: Option<RunId>,
}

/// The conversation of a session.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionConversation")]
pub struct SessionConversation<'a> {
    /// The session's name.
    name: &'a str,
    /// The agent of `run`.
    agent: Option<&'a str>,
    /// The last completed run: the conversation is that of its record. Null if no run has completed.
    run: Option<RunId>,
    #[serde(flatten)]
    conversation: Conversation<'a>,
}

/// `GET /sessions`
pub async fn list(
    State(state): State<AppState>,
    principal: Principal,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["limit", "cursor", "key"])?;
    let owner = session_owner(&principal, &query)?;
    let session_name = |text: &str| is_agent_name(text).then(|| text.to_owned());
    let store = state.runner.store();
    let page = store
        .sessions(SessionListQuery {
            owner: owner.clone(),
            after: query.parse("cursor", "a cursor of this list", session_name)?,
            limit: limit(&query)?,
        })
        .await?;
    let mut next_cursor = page.next;
    let mut data = Vec::with_capacity(page.sessions.len());
    let mut bytes = 0;
    let mut records = page.sessions.into_iter();
    while let Some(session) = records.next() {
        if !principal.can_use_agent(&session.last_agent) {
            continue;
        }
        let key = session_query(
            owner.clone(),
            &session.name,
            Some(session.last_agent.clone()),
        );
        let (_, conversation) = readable_conversation(&state, &principal, key).await?;
        let lengths = conversation.messages.iter().map(history::message_bytes);
        bytes += lengths.sum::<usize>();
        let name = session.name.clone();
        data.push(SessionBrief {
            name: session.name,
            runs: session.runs,
            messages: conversation.messages.len(),
            last_run: session.last_run,
            agent: session.last_agent,
            created_at: session.created_at,
            updated_at: session.updated_at,
        });
        if bytes >= PAGE_BYTES && !records.as_slice().is_empty() {
            next_cursor = Some(name);
            break;
        }
    }
    Ok(json_response(
        StatusCode::OK,
        &SessionsPage { data, next_cursor },
    ))
}

/// `GET /sessions/{name}`: runs newest first. Sessions of other keys are not found.
pub async fn get(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    links: LinkPrefix,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["agent", "limit", "cursor", "full", "key"])?;
    let limit = limit(&query)?;
    let last_query = session_query(
        session_owner(&principal, &query)?,
        &name,
        query.get("agent").map(str::to_owned),
    );
    let page_query = SessionQuery {
        status: None,
        before: query.parse("cursor", "a cursor of this list", |text| text.parse().ok())?,
        limit: limit + 1,
        cut_texts: !wants_full_texts(&query)?,
        skip_damaged: true,
        ..last_query.clone()
    };
    let store = state.runner.store();
    let is_first = page_query.before.is_none();
    let mut runs = store.session_runs(page_query).await?;
    let has_more =
        runs.len() > limit || runs.iter().map(Run::text_bytes).sum::<usize>() >= PAGE_BYTES;
    runs.truncate(limit);
    let next_cursor = runs.last().filter(|_| has_more).map(|run| run.id);
    let runs = principal.visible_runs(runs, store.as_ref()).await?;
    if runs.is_empty() && is_first {
        let any_query = SessionQuery {
            status: None,
            ..last_query.clone()
        };
        // A session whose runs are all damaged exists: that fails.
        store.session_runs(any_query).await?;
        require_any_agent(&state, &principal, &last_query).await?;
    }
    let (last, conversation) = readable_conversation(&state, &principal, last_query).await?;
    let now = now();
    let view = SessionView {
        name: &name,
        agent: last.as_ref().map(|run| run.agent.as_str()),
        run: last.as_ref().map(|run| run.id),
        messages: conversation.messages.len(),
        data: runs
            .iter()
            .map(|run| RunView::new(run, &links, now))
            .collect(),
        next_cursor,
    };
    Ok(json_response(StatusCode::OK, &view))
}

/// `GET /sessions/{name}/messages`: what the session's next run of the agent continues.
pub async fn messages(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["agent", "after", "key"])?;
    let after = query.parse("after", "a number of messages", |text| text.parse().ok())?;
    let last_query = session_query(
        session_owner(&principal, &query)?,
        &name,
        query.get("agent").map(str::to_owned),
    );
    let any_query = SessionQuery {
        status: None,
        cut_texts: true,
        ..last_query.clone()
    };
    let store = state.runner.store();
    let any = store.session_runs(any_query).await?;
    if principal
        .visible_runs(any, store.as_ref())
        .await?
        .is_empty()
    {
        require_any_agent(&state, &principal, &last_query).await?;
    }
    let (last, conversation) = last_conversation(&state, &principal, last_query).await?;
    let view = SessionConversation {
        name: &name,
        agent: last.as_ref().map(|run| run.agent.as_str()),
        run: last.as_ref().map(|run| run.id),
        conversation: Conversation::page(&conversation, after.unwrap_or(0)),
    };
    Ok(json_response(StatusCode::OK, &view))
}

/// `DELETE /sessions/{name}`: the name and its conversation are gone, its runs stay.
pub async fn delete(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    uri: Uri,
) -> Result<StatusCode, Problem> {
    let owner = session_owner(&principal, &Query::read(&uri, &["key"])?)?;
    let key = SessionKey {
        owner,
        name: name.clone(),
    };
    require_visible(&state, &principal, &key).await?;
    state.runner.delete_session(key).await?;
    info!("Deleted session {name}; its runs stay");
    Ok(StatusCode::NO_CONTENT)
}

/// 404 for a session without a run of any agent that the principal may see.
async fn require_any_agent(
    state: &AppState,
    principal: &Principal,
    query: &SessionQuery,
) -> Result<(), Problem> {
    let store = state.runner.store();
    let any_query = SessionQuery {
        agent: None,
        status: None,
        cut_texts: true,
        skip_damaged: true,
        ..query.clone()
    };
    let runs = store.session_runs(any_query).await?;
    match principal
        .visible_runs(runs, store.as_ref())
        .await?
        .is_empty()
    {
        true => Err(Problem::session_not_found(&query.name)),
        false => Ok(()),
    }
}

/// 404 for a session with a run that the principal may not see.
async fn require_visible(
    state: &AppState,
    principal: &Principal,
    key: &SessionKey,
) -> Result<(), Problem> {
    if !principal.has_agent_globs() {
        return Ok(());
    }
    let store = state.runner.store();
    let mut query = SessionQuery {
        owner: key.owner.clone(),
        name: key.name.clone(),
        limit: MAX_PAGE_SIZE,
        cut_texts: true,
        ..SessionQuery::default()
    };
    loop {
        let runs = match store.session_runs(query.clone()).await {
            // One that cannot be read cannot be seen either.
            Err(error) if error.is_damage() => return Err(Problem::session_not_found(&key.name)),
            runs => runs?,
        };
        let (Some(last), count) = (runs.last().map(|run| run.id), runs.len()) else {
            return Ok(());
        };
        query.before = Some(last);
        if principal.visible_runs(runs, store.as_ref()).await?.len() < count {
            return Err(Problem::session_not_found(&key.name));
        }
    }
}

/// Whose sessions are meant: the principal's own, or those of the key that `?key=` names, which an admin may choose.
fn session_owner(principal: &Principal, query: &Query) -> Result<Option<String>, Problem> {
    let key_name = |text: &str| is_valid_name(text).then(|| text.to_owned());
    let Some(key) = query.parse("key", "a key's name", key_name)? else {
        return Ok(principal.key_name().map(str::to_owned));
    };
    if principal.owner_filter().is_some_and(|owner| owner != key) {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            ProblemCode::InsufficientScope,
            "the sessions of another key need the scope admin",
        ));
    }
    Ok(Some(key))
}

fn limit(query: &Query) -> Result<usize, Problem> {
    let parse = count_up_to(MAX_PAGE_SIZE);
    let limit = query.parse("limit", "a number from 1 to 200", parse)?;
    Ok(limit.unwrap_or(DEFAULT_PAGE_SIZE))
}

/// The last completed run of a session.
fn session_query(owner: Option<String>, name: &str, agent: Option<String>) -> SessionQuery {
    SessionQuery {
        owner,
        name: name.to_owned(),
        agent,
        status: Some(Status::Completed),
        before: None,
        limit: 1,
        cut_texts: false,
        skip_damaged: false,
    }
}

/// As [`last_conversation`], but none and an empty one if its record is damaged.
async fn readable_conversation(
    state: &AppState,
    principal: &Principal,
    query: SessionQuery,
) -> Result<(Option<Run>, RecordedConversation), StoreError> {
    let name = query.name.clone();
    match last_conversation(state, principal, query).await {
        Err(error) if error.is_damage() => {
            error!(error = %error, "The conversation of session {name} is left out of a list: {error}");
            Ok((None, RecordedConversation::default()))
        }
        found => found,
    }
}

/// The run that the query finds, with its conversation; none and an empty one if the principal may not see it.
async fn last_conversation(
    state: &AppState,
    principal: &Principal,
    query: SessionQuery,
) -> Result<(Option<Run>, RecordedConversation), StoreError> {
    let store = state.runner.store();
    let found = store.session_runs(query).await?;
    let last = principal.visible_runs(found, store.as_ref()).await?.pop();
    let conversation = match &last {
        Some(run) => RecordedConversation::from_steps(store.steps(run.id).await?),
        None => RecordedConversation::default(),
    };
    Ok((last, conversation))
}
