//! `GET /a2a/{agent}/tasks`: a page of tasks, last changed first.

use crate::web::clients::a2a::types::{ListTasksResponse, TaskState};
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::domain::run::{RunId, Status};
use crate::store::changed_runs::{ChangedQuery, ChangedRun};
use crate::store::runs::PAGE_BYTES;
use crate::web::auth::Principal;
use crate::web::clients::a2a::context::context_id;
use crate::web::clients::a2a::response;
use crate::web::clients::a2a::task::{TaskParts, task, updated_at};
use crate::web::clients::a2a::version::Version1;
use crate::web::error::Problem;
use crate::web::extract::path::AgentPath;
use crate::web::extract::query::{self, Count, Query, Time};
use crate::web::state::AppState;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct ListQuery {
    context_id: Option<String>,
    status: Option<String>,
    page_size: Count<100, 50>,
    page_token: Option<String>,
    history_length: usize,
    status_timestamp_after: Option<Time>,
    include_artifacts: bool,
    #[serde(rename = "tenant")]
    _tenant: IgnoredAny,
    #[serde(rename = "A2A-Version")]
    _version: IgnoredAny,
}

pub async fn list(
    State(state): State<AppState>,
    _: Version1,
    AgentPath(agent): AgentPath,
    principal: Principal,
    uri: Uri,
) -> Result<Response, Problem> {
    let Query(query) = Query::<ListQuery>::read_form(&uri)?;
    let parts = TaskParts {
        // A page may have many tasks.
        history: Some(query.history_length),
        has_artifacts: query.include_artifacts,
    };
    let (statuses, waits_for_input) = statuses(query.status.as_deref())?;
    let limit = query.page_size.0;
    let token = query.page_token.as_deref();
    let changed = ChangedQuery {
        agent,
        owner: principal.owner_filter().map(str::to_owned),
        session: query.context_id,
        statuses,
        waits_for_input,
        since: query.status_timestamp_after.map(|Time(time)| time),
        after: query::parse("pageToken", token, "a token of this list", parse_token)?,
        limit,
    };
    let store = state.runner.store();
    let mut page = store.changed_runs(changed.clone()).await?;
    if page.total == 0 {
        page.runs
            .extend(own_context(&state, &principal, &changed).await?);
        page.total = page.runs.len() as u64;
    }
    let (mut tasks, mut bytes, mut last) = (Vec::with_capacity(page.runs.len()), 0, None);
    for changed in &page.runs {
        if bytes >= PAGE_BYTES {
            break;
        }
        last = Some(*changed);
        // It may have been deleted in the meantime.
        if let Some(run) = store.run(changed.run).await? {
            bytes += run.text_bytes();
            tasks.push(task(&state, &run, parts).await?);
        }
    }
    let is_cut = last != page.runs.last().copied();
    let next = last.filter(|_| page.has_more || is_cut);
    response::json(&ListTasksResponse {
        page_size: limit,
        tasks,
        next_page_token: next.map_or_else(String::new, write_token),
        total_size: page.total,
    })
}

/// The run without a session whose id is the wanted context.
async fn own_context(
    state: &AppState,
    principal: &Principal,
    query: &ChangedQuery,
) -> Result<Option<ChangedRun>, Problem> {
    let Some(context) = query.session.as_deref().filter(|_| query.after.is_none()) else {
        return Ok(None);
    };
    let Ok(id) = context.parse::<RunId>() else {
        return Ok(None);
    };
    let store = state.runner.store();
    let Some(run) = store.run(id).await? else {
        return Ok(None);
    };
    let waits_as_wanted =
        |waits: bool| run.status != Status::Waiting || waits != run.pending_inputs.is_empty();
    let is_wanted = context_id(&run) == context
        && run.parent_id.is_none()
        && run.agent == query.agent
        && query.statuses.contains(&run.status)
        && query.waits_for_input.is_none_or(waits_as_wanted)
        && query.since.is_none_or(|since| updated_at(&run) >= since);
    let is_visible = is_wanted && principal.can_see_run(&run, store.as_ref()).await?;
    Ok(is_visible.then(|| ChangedRun {
        at: updated_at(&run),
        run: run.id,
    }))
}

/// The statuses of runs whose tasks have the wanted state, and which of those that wait.
fn statuses(wanted: Option<&str>) -> Result<(Vec<Status>, Option<bool>), Problem> {
    let parse = |text: &str| serde_json::from_value::<TaskState>(text.into()).ok();
    let wanted = query::parse(
        "status",
        wanted,
        "a state such as TASK_STATE_WORKING",
        parse,
    )?;
    Ok(match wanted {
        None | Some(TaskState::Unspecified) => (Status::ALL.to_vec(), None),
        Some(TaskState::Submitted) => (vec![Status::Queued], None),
        Some(TaskState::Working) => (
            vec![Status::Running, Status::Waiting, Status::Cancelling],
            Some(false),
        ),
        Some(TaskState::InputRequired) => (vec![Status::Waiting], Some(true)),
        Some(TaskState::Completed) => (vec![Status::Completed], None),
        Some(TaskState::Failed) => (vec![Status::Failed], None),
        Some(TaskState::Canceled) => (vec![Status::Cancelled], None),
        Some(TaskState::Rejected | TaskState::AuthRequired) => (Vec::new(), None),
    })
}

/// `milliseconds.run`
fn write_token(run: ChangedRun) -> String {
    format!("{}.{}", run.at.as_millisecond(), run.run)
}

fn parse_token(text: &str) -> Option<ChangedRun> {
    let (at, run) = text.split_once('.')?;
    Some(ChangedRun {
        at: Timestamp::from_millisecond(at.parse().ok()?).ok()?,
        run: run.parse().ok()?,
    })
}
