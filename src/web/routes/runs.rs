//! `/runs` and the routes below it, except events, approvals and deliveries: read, list, cancel, delete.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::info;

use crate::domain::run::{Run, RunId, Status, now};
use crate::engine::replay::history::RecordedConversation;
use crate::store::runs::{PAGE_BYTES, RunFilter, RunPage};
use crate::store::{ClaimedRun, IdempotencyClaim};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::idempotency;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{ChangedRunPath, RunPath};
use crate::web::extract::query::{NoQuery, Query, count_up_to, parse_flag};
use crate::web::extract::request_body;
use crate::web::extract::time::parse_time;
use crate::web::problem_code::ProblemCode;
use crate::web::response::conversation::Conversation;
use crate::web::response::json::json_response;
use crate::web::response::revalidation::IfNoneMatch;
use crate::web::response::run::{ChildView, RunView};
use crate::web::response::run_fields::selected_fields;
use crate::web::response::tree::{CallOrder, RunSummary, call_ids, sort_by_call_order};
use crate::web::state::AppState;
use crate::web::wait;

/// Default runs of a page.
pub const DEFAULT_PAGE_SIZE: usize = 50;
/// Maximum runs of a page.
pub const MAX_PAGE_SIZE: usize = 200;
/// Maximum children of a page.
pub const MAX_CHILDREN: usize = 1000;
/// Maximum labels of one filter.
const MAX_LABELS: usize = 64;
/// Maximum characters of the reason of a cancellation or a decision.
const MAX_REASON: usize = 1000;

/// The query parameters of `GET /runs`.
const FILTER_PARAMS: [&str; 11] = [
    "agent", "status", "root", "all", "session", "since", "until", "full", "limit", "cursor",
    "label.",
];

/// A page of runs, newest first.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RunPage")]
pub struct RunsPage<'a> {
    /// The runs.
    data: Vec<RunView<'a>>,
    /// The `cursor` of the next page; null on the last page.
    next_cursor: Option<RunId>,
}

/// A page of a run's children, in the order of the calls.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChildRunPage")]
pub struct ChildrenPage<'a> {
    /// The children.
    data: Vec<ChildView<'a>>,
    /// The `cursor` of the next page; null on the last page.
    next_cursor: Option<RunId>,
}

/// A request to cancel a run.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "CancelRequest")]
#[serde(deny_unknown_fields, default)]
pub struct CancelRequest {
    /// Why the run is cancelled; shown as its `cancel_reason`.
    #[schemars(length(max = 1000))]
    reason: Option<String>,
}

impl CancelRequest {
    pub fn into_reason(self) -> Result<Option<String>, Problem> {
        check_reason(self.reason)
    }
}

fn run_response(links: &str, status: StatusCode, run: &Run) -> Response {
    json_response(status, &RunView::new(run, links, now()))
}

/// The run object: 200 if the run is terminal, else 202.
pub fn finished_or_accepted(links: &str, run: &Run) -> Response {
    if run.status.is_terminal() {
        run_response(links, StatusCode::OK, run)
    } else {
        run_response(links, StatusCode::ACCEPTED, run)
    }
}

/// `GET /runs/{id}`: 200, or 202 if the client waited and the run has not ended.
pub async fn get(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    links: LinkPrefix,
    if_none_match: IfNoneMatch,
    request: Request,
) -> Result<Response, Problem> {
    let query = Query::read(request.uri(), &["wait", "fields"])?;
    let timeout = wait::requested_wait(&query, request.headers(), state.settings.max_wait)?;
    let fields = query.get("fields").map(str::to_owned);
    drop(request);
    let mut run = Arc::new(require_run(&state, id).await?);
    if let Some(fields) = &fields {
        // Checked before the client waits.
        selected_fields(StatusCode::OK, &RunView::new(&run, &links, now()), fields)?;
    }
    let mut status = StatusCode::OK;
    if !timeout.is_zero() {
        run = wait::wait_for_end_or_person(&state, run, timeout).await;
        if !run.status.is_terminal() {
            status = StatusCode::ACCEPTED;
        }
    }
    match fields {
        Some(fields) => selected_fields(status, &RunView::new(&run, &links, now()), &fields),
        None if run.status.is_terminal() => {
            Ok(if_none_match.json_response(&RunView::new(&run, &links, now())))
        }
        None => Ok(run_response(&links, status, &run)),
    }
}

/// `GET /runs`
pub async fn list(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    uri: Uri,
) -> Result<Response, Problem> {
    let filter = parse_filter(&Query::read(&uri, &FILTER_PARAMS)?)?;
    let page = visible_page(&state, &principal, filter).await?;
    let now = now();
    let page = RunsPage {
        data: page
            .runs
            .iter()
            .map(|run| RunView::new(run, &links, now))
            .collect(),
        next_cursor: page.next,
    };
    Ok(json_response(StatusCode::OK, &page))
}

/// A page of the runs that the principal may see.
pub async fn visible_page(
    state: &AppState,
    principal: &Principal,
    filter: RunFilter,
) -> Result<RunPage, Problem> {
    let store = state.runner.store();
    let filter = RunFilter {
        owner: principal.owner_filter().map(str::to_owned),
        ..filter
    };
    let RunPage { runs, next } = store.list(filter).await?;
    let runs = principal.visible_runs(runs, store.as_ref()).await?;
    Ok(RunPage { runs, next })
}

/// `GET /runs/{id}/tree`
pub async fn tree(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    let (runs, call_order) = read_tree(&state, id).await?;
    let summary = RunSummary::build_tree(id, &runs, &call_order, now())
        .ok_or_else(|| Problem::run_not_found(id))?;
    Ok(json_response(StatusCode::OK, &summary))
}

/// The runs of the tree below `id`, and what their summary is sorted by.
pub async fn read_tree(state: &AppState, id: RunId) -> Result<(Vec<Run>, CallOrder), Problem> {
    let runs = state.runner.store().tree(id).await?;
    let mut call_order = CallOrder::new();
    let mut only_children = HashSet::new();
    for parent in runs.iter().filter_map(|run| run.parent_id) {
        // An only child needs no order.
        if !only_children.insert(parent) && !call_order.contains_key(&parent) {
            call_order.insert(parent, call_ids(&state.runner.store().steps(parent).await?));
        }
    }
    Ok((runs, call_order))
}

/// `GET /runs/{id}/children`
pub async fn children(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    links: LinkPrefix,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["limit", "cursor"])?;
    let limit = query
        .parse(
            "limit",
            "a number from 1 to 1000",
            count_up_to(MAX_CHILDREN),
        )?
        .unwrap_or(MAX_CHILDREN);
    let cursor: Option<RunId> =
        query.parse("cursor", "a cursor of this list", |text| text.parse().ok())?;
    let store = state.runner.store();
    require_run(&state, id).await?;
    let mut children = store.child_calls(id).await?;
    if children.len() > 1 {
        let calls = call_ids(&store.steps(id).await?);
        sort_by_call_order(&mut children, Some(&calls), |(id, call)| {
            (*id, call.as_deref())
        });
    }
    let after = cursor.and_then(|cursor| children.iter().position(|(id, _)| *id == cursor));
    if cursor.is_some() != after.is_some() {
        return Err(Problem::parameter("cursor", "is not in this list"));
    }
    let mut remaining = children.iter().skip(after.map_or(0, |at| at + 1));
    let (mut runs, mut bytes) = (Vec::new(), 0);
    while runs.len() < limit
        && bytes < PAGE_BYTES
        && let Some((child, _)) = remaining.next()
    {
        // It may have been deleted in the meantime.
        if let Some(run) = store.run(*child).await? {
            bytes += run.text_bytes();
            runs.push(run);
        }
    }
    let next_cursor = remaining.next().and(runs.last()).map(|run| run.id);
    let now = now();
    let data = runs
        .iter()
        .map(|run| ChildView::new(run, &links, now))
        .collect();
    Ok(json_response(
        StatusCode::OK,
        &ChildrenPage { data, next_cursor },
    ))
}

/// `GET /runs/{id}/messages`
pub async fn messages(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = Query::read(&uri, &["after"])?;
    let after = query.parse("after", "a number of messages", |text| text.parse().ok())?;
    require_run(&state, id).await?;
    let conversation = RecordedConversation::from_steps(state.runner.store().steps(id).await?);
    Ok(json_response(
        StatusCode::OK,
        &Conversation::page(&conversation, after.unwrap_or(0)),
    ))
}

/// `POST /runs/{id}/cancel`
pub async fn cancel(
    State(state): State<AppState>,
    ChangedRunPath(id): ChangedRunPath,
    links: LinkPrefix,
    request: Request,
) -> Result<Response, Problem> {
    let (reason, timeout) = {
        let (parts, body) = request.into_parts();
        let settings = &state.settings;
        let query = Query::read(&parts.uri, &["wait"])?;
        let timeout = wait::requested_wait(&query, &parts.headers, settings.max_wait)?;
        let request_body = request_body::read(&parts, body, settings.body_limits()).await?;
        (
            check_reason(request_body.json::<CancelRequest>()?.reason)?,
            timeout,
        )
    };
    let run = state
        .runner
        .cancel(id, reason)
        .await?
        .ok_or_else(|| Problem::run_not_found(id))?;
    let run = wait::wait_for_end(&state, run, timeout).await;
    Ok(finished_or_accepted(&links, &run))
}

/// `DELETE /runs/{id}`
pub async fn delete(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<StatusCode, Problem> {
    let store = state.runner.store();
    let run = match store.run(id).await {
        Ok(run) => run.ok_or_else(|| Problem::run_not_found(id))?,
        // A damaged run cannot be resumed, so it can be deleted.
        Err(error) if error.is_damage() && !state.runner.is_at_work(id).await => {
            if !store.delete(id).await? {
                return Err(error.into());
            }
            info!(run.id = %id, run.root = %id, "Deleted {id} with its tree; its record was damaged");
            return Ok(StatusCode::NO_CONTENT);
        }
        Err(error) => return Err(error.into()),
    };
    if run.parent_id.is_some() {
        return Err(Problem::new(
            StatusCode::CONFLICT,
            ProblemCode::NotARoot,
            format!("{id} is a child run; delete its root {}", run.root_id),
        ));
    }
    if !run.status.is_terminal() {
        return Err(Problem::new(
            StatusCode::CONFLICT,
            ProblemCode::RunNotTerminal,
            format!("{id} is {}; cancel it first", run.status.as_str()),
        ));
    }
    if !store.delete(id).await? {
        return Err(Problem::run_not_found(id));
    }
    info!(
        run.id = %id, run.root = %id, agent = %run.agent, depth = run.depth.0,
        "Deleted {id} with its tree"
    );
    Ok(StatusCode::NO_CONTENT)
}

/// Reads the run from the store; 404 if there is none.
pub async fn require_run(state: &AppState, id: RunId) -> Result<Run, Problem> {
    let run = state.runner.store().run(id).await?;
    run.ok_or_else(|| Problem::run_not_found(id))
}

/// The run that an earlier request with this key has started or changed; 422 if that had another body.
pub async fn find_claimed(
    state: &AppState,
    claim: Option<&IdempotencyClaim>,
) -> Result<Option<(ClaimedRun, Run)>, Problem> {
    let Some(claim) = claim else {
        return Ok(None);
    };
    let Some(claimed) = state.runner.store().claimed_run(claim.key.clone()).await? else {
        return Ok(None);
    };
    idempotency::check_same_body(claim, &claimed)?;
    let run = require_run(state, claimed.run).await?;
    Ok(Some((claimed, run)))
}

fn parse_filter(query: &Query) -> Result<RunFilter, Problem> {
    let run_id = |text: &str| text.parse::<RunId>().ok();
    let statuses = Status::ALL.map(Status::as_str).join(", ");
    let labels = query.with_prefix("label.");
    if labels.len() > MAX_LABELS {
        let why = format_args!(
            "{} labels are more than the maximum of {MAX_LABELS}",
            labels.len()
        );
        return Err(Problem::parameter("label.", why));
    }
    Ok(RunFilter {
        owner: None,
        agent: query.get("agent").map(str::to_owned),
        status: query.parse("status", &format!("one of {statuses}"), |text| {
            text.parse().ok()
        })?,
        root: query.parse("root", "a run's id", run_id)?,
        include_children: query
            .parse("all", "true or false", parse_flag)?
            .unwrap_or_default(),
        session: query.get("session").map(str::to_owned),
        cut_texts: !wants_full_texts(query)?,
        labels,
        min_cost: None,
        since: query.parse("since", "an RFC 3339 time", parse_time)?,
        until: query.parse("until", "an RFC 3339 time", parse_time)?,
        before: query.parse("cursor", "a cursor of this list", run_id)?,
        limit: query
            .parse(
                "limit",
                "a number from 1 to 200",
                count_up_to(MAX_PAGE_SIZE),
            )?
            .unwrap_or(DEFAULT_PAGE_SIZE),
    })
}

/// Whether a list has the whole texts of its runs.
pub fn wants_full_texts(query: &Query) -> Result<bool, Problem> {
    let full = query.parse("full", "true or false", parse_flag)?;
    Ok(full.unwrap_or_default())
}

/// The reason, if it is not blank; an error if it is too long.
pub fn check_reason(text: Option<String>) -> Result<Option<String>, Problem> {
    let reason = text.filter(|reason| !reason.trim().is_empty());
    if reason
        .as_ref()
        .is_some_and(|reason| reason.chars().nth(MAX_REASON).is_some())
    {
        return Err(Problem::invalid_field(
            "/reason",
            format!("must be at most {MAX_REASON} characters"),
        ));
    }
    Ok(reason)
}

#[cfg(test)]
mod tests {
    use super::{FILTER_PARAMS, parse_filter};
    use crate::domain::run::{RunId, Status};
    use crate::store::runs::RunFilter;
    use crate::web::extract::query::Query;

    fn read(query: &str) -> Result<RunFilter, String> {
        let uri = format!("/runs?{query}").parse().expect("a URI");
        Query::read(&uri, &FILTER_PARAMS)
            .and_then(|query| parse_filter(&query))
            .map_err(|problem| String::from_utf8_lossy(&problem.render("", "")).into_owned())
    }

    #[test]
    fn filters_are_read() {
        let none = read("").expect("a filter");
        assert_eq!((none.limit, none.include_children), (50, false));
        let id = RunId::new();
        let all = read(&format!(
            "agent=a&status=failed&root={id}&all=true&since=2026-01-01T00:00:00Z&\
             until=2026-01-02T01:00:00+01:00&limit=200&cursor={id}&label.team=x"
        ))
        .expect("a filter");
        assert_eq!((all.status, all.root), (Some(Status::Failed), Some(id)));
        assert_eq!(all.until, "2026-01-02T00:00:00Z".parse().ok());
        assert_eq!(all.labels, [("team".to_owned(), "x".to_owned())]);
    }

    #[test]
    fn too_many_labels_are_refused() {
        let labels =
            |number: usize| -> String { (0..number).map(|n| format!("label.{n}=&")).collect() };
        assert!(read(&labels(64)).is_ok());
        let error = read(&labels(65)).expect_err("too many");
        assert!(
            error.contains("65 labels are more than the maximum of 64"),
            "{error}"
        );
    }

    #[test]
    fn an_invalid_filter_is_named() {
        for (query, name) in [
            ("status=done", "status"),
            ("root=1", "root"),
            ("all=perhaps", "all"),
            ("since=yesterday", "since"),
            ("until=9999-12-31", "until"),
            ("until=9999-12-31T23:59:59", "until"),
            ("until=9999-12-32T00:00:00Z", "until"),
            ("until=10000-01-01T00:00:00Z", "until"),
            ("limit=201", "limit"),
            ("limit=-1", "limit"),
            ("cursor=%00", "cursor"),
        ] {
            let error = read(query).expect_err(query);
            assert!(error.contains(&format!(r#"\"{name}\":"#)), "{error}");
        }
    }
}
