//! `/sessions` and the routes below it: lists a key's sessions, shows one with its conversation, deletes it.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::{error, info};

use crate::config::KeyScope::{Cancel, Read};
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::timestamp_text;
use crate::engine::history::{self, RecordedConversation};
use crate::engine::state::sessions::SessionKey;
use crate::record::entry;
use crate::store::StoreError;
use crate::store::runs::{PAGE_BYTES, SessionQuery};
use crate::store::sessions::SessionListQuery;
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::SessionPath;
use crate::web::extract::query::{Cursor, KeyName, Query, SessionName};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{self, SessionBusy};
use crate::web::response::conversation::Conversation;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::route::{self, Route, get};
use crate::web::routes::runs::{MAX_PAGE_SIZE, PageSize};
use crate::web::state::AppState;

pub fn routes() -> Vec<Route> {
    vec![
        get("/sessions", [Read], list)
            .describe("list_sessions", "Lists the sessions of a key")
            .details("Sorted by name.")
            .response::<SessionsPage>(200, "The page.")
            .example(json!({"data": [examples::session_summary()], "next_cursor": null})),
        get("/sessions/{name}", [Read], get_session)
            .describe("get_session", "Returns a session with its runs")
            .details("The newest run is first.")
            .response::<SessionView<'static>>(200, "The session.")
            .example(json!({
                "name": "ada", "agent": "planner", "run": examples::ROOT, "messages": 4,
                "data": [examples::run()], "next_cursor": null,
            })),
        get("/sessions/{name}/messages", [Read], messages)
            .describe(
                "list_session_messages",
                "Returns the conversation of a session",
            )
            .details("The next run of the session continues this conversation.")
            .response::<SessionConversation<'static>>(200, "The page of the conversation.")
            .example(examples::session_conversation()),
        route::delete("/sessions/{name}", [Cancel], delete)
            .describe("delete_session", "Deletes a session with its conversation")
            .details("The runs of the session stay.")
            .empty_response(204, "The session is deleted.")
            .problems(&[SessionBusy]),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Maximum sessions of a page.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<SessionName>>,
    /// The key that owns the sessions; by default the request's own. Another key needs the scope `admin`.
    key: Option<KeyName>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct SessionRunsQuery {
    /// Only the runs and the conversation of this agent.
    agent: Option<String>,
    /// Maximum runs of a page.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<RunId>>,
    /// Whether to return long texts whole. By default texts above 1 KiB are cut, and a run with such a text has `truncated`.
    full: bool,
    /// The key that owns the sessions; by default the request's own. Another key needs the scope `admin`.
    key: Option<KeyName>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MessagesQuery {
    /// Only the runs and the conversation of this agent.
    agent: Option<String>,
    /// The number of messages to skip: the `next_after` of the previous page.
    after: usize,
    /// The key that owns the sessions; by default the request's own. Another key needs the scope `admin`.
    key: Option<KeyName>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct DeleteQuery {
    /// The key that owns the sessions; by default the request's own. Another key needs the scope `admin`.
    key: Option<KeyName>,
}

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

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    Query(query): Query<ListQuery>,
) -> Result<Response, Problem> {
    let owner = session_owner(&principal, query.key)?;
    let store = state.runner.store();
    let page = store
        .sessions(SessionListQuery {
            owner: owner.clone(),
            after: query.cursor.map(|Cursor(SessionName(name))| name),
            limit: query.limit.0,
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

async fn get_session(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    links: LinkPrefix,
    Query(query): Query<SessionRunsQuery>,
) -> Result<Response, Problem> {
    let limit = query.limit.0;
    let owner = session_owner(&principal, query.key)?;
    let last_query = session_query(owner, &name, query.agent);
    let page_query = SessionQuery {
        status: None,
        before: query.cursor.map(|Cursor(id)| id),
        limit: limit + 1,
        cut_texts: !query.full,
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
    let runs = state.runner.with_suspensions(runs);
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

async fn messages(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    Query(query): Query<MessagesQuery>,
) -> Result<Response, Problem> {
    let owner = session_owner(&principal, query.key)?;
    let last_query = session_query(owner, &name, query.agent);
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
        conversation: Conversation::page(&conversation, query.after),
    };
    Ok(json_response(StatusCode::OK, &view))
}

async fn delete(
    State(state): State<AppState>,
    SessionPath(name): SessionPath,
    principal: Principal,
    Query(DeleteQuery { key }): Query<DeleteQuery>,
) -> Result<StatusCode, Problem> {
    let owner = session_owner(&principal, key)?;
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
fn session_owner(principal: &Principal, key: Option<KeyName>) -> Result<Option<String>, Problem> {
    let Some(KeyName(key)) = key else {
        return Ok(principal.key_name().map(str::to_owned));
    };
    if principal.owner_filter().is_some_and(|owner| owner != key) {
        return Err(Problem::new(
            ProblemCode::InsufficientScope,
            "the sessions of another key need the scope admin",
        ));
    }
    Ok(Some(key))
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
        Some(run) => RecordedConversation::from_steps(entry::steps(store.entries(run.id).await?)),
        None => RecordedConversation::default(),
    };
    Ok((last, conversation))
}
