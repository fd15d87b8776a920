//! `/runs` and the routes below it, except events, approvals and deliveries: read, list, cancel, delete.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::SignedDuration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::info;

use crate::config::KeyScope::{Admin, Cancel, Read};
use crate::domain::failure::FailureCode;
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::run_ref::RunRef;
use crate::domain::variant::Variant;
use crate::engine::history::RecordedConversation;
use crate::record::entry;
use crate::store::runs::{PAGE_BYTES, RunFilter, RunPage, StatusCount};
use crate::store::{ClaimedRun, IdempotencyClaim};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::extract::body::JsonBody;
use crate::web::extract::idempotency;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{ChangedRunPath, RunPath, unknown_run};
use crate::web::extract::query::{
    AnyRun, Count, Cursor, Labels, NoQuery, Query, ScoreFilters, TextSearch, Time, Usd,
    filtered_run,
};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    self, AmbiguousRun, NotARoot, RunNotFound, RunNotTerminal,
};
use crate::web::response::conversation::Conversation;
use crate::web::response::json::json_response;
use crate::web::response::revalidation::IfNoneMatch;
use crate::web::response::run::{ChildView, RunView};
use crate::web::response::run_fields::selected_fields;
use crate::web::response::tree::{CallOrder, RunSummary, call_ids, sort_by_call_order};
use crate::web::route::{self, Route, get, post};
use crate::web::state::AppState;
use crate::web::wait::{self, Prefer, Seconds, WaitQuery};

/// Default entries of a page.
pub const DEFAULT_PAGE_SIZE: usize = 50;
/// Maximum entries of a page.
pub const MAX_PAGE_SIZE: usize = 200;
/// Up to which number [`visible_counts`] counts.
pub const MAX_COUNT: usize = 10_000;
/// The time of which it counts ended runs, if the filter has none.
const COUNTED_TIME: SignedDuration = SignedDuration::from_hours(24);
pub type PageSize = Count<MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE>;

/// Maximum characters of the reason of a cancellation or a decision.
const MAX_REASON: usize = 1000;

pub fn routes() -> Vec<Route> {
    vec![
        get("/runs", [Read], list)
            .describe("list_runs", "Lists runs, newest first")
            .details(
                "Root runs only, unless `all` or `root` is given. Several filters must all match. Pass \
                 `next_cursor` as `cursor` to get the next page.",
            )
            .response::<RunsPage<'static>>(200, "The page.")
            .example(json!({"data": [examples::run()], "next_cursor": null}))
            .problems(&[RunNotFound, AmbiguousRun]),
        get("/runs/{id}", [Read], get_run)
            .describe("get_run", "Returns a run")
            .details("Responds at once, unless the client waits for the run's end.")
            .response::<RunView<'static>>(200, "The run. If the client waited, the run has ended.")
            .example(examples::run())
            .response::<RunView<'static>>(
                202,
                "The run, if it did not end while the client waited.",
            )
            .example(examples::accepted_run()),
        route::delete("/runs/{id}", [Admin], delete)
            .describe("delete_run", "Deletes a root run with its tree")
            .details("Deletes its descendants, events, conversation and deliveries, too.")
            .empty_response(204, "The tree is deleted.")
            .problems(&[RunNotTerminal, NotARoot]),
        get("/runs/{id}/tree", [Read], tree)
            .describe("get_run_tree", "Returns the tree of a run")
            .details("The summary of the run, with those of its descendants in the order of the calls.")
            .response::<RunSummary<'static>>(200, "The tree.")
            .example(examples::tree()),
        get("/runs/{id}/children", [Read], children)
            .describe("list_child_runs", "Lists the direct children of a run")
            .details("In the order of the calls.")
            .response::<ChildrenPage<'static>>(200, "The page.")
            .example(json!({"data": [examples::child_run()], "next_cursor": null})),
        get("/runs/{id}/messages", [Read], messages)
            .describe("list_run_messages", "Returns the conversation of a run")
            .details("As recorded, also while the run is active.")
            .response::<Conversation<'static>>(200, "The page of the conversation.")
            .example(examples::conversation()),
        post("/runs/{id}/cancel", [Cancel], cancel)
            .describe("cancel_run", "Cancels a run and its descendants")
            .details("Changes nothing if the run has ended.")
            .request_example("reason", "With a reason", json!({"reason": "no longer needed"}))
            .response::<RunView<'static>>(200, "The run, if it has ended.")
            .example(examples::cancelled_run())
            .response::<RunView<'static>>(202, "The run, if it is still being cancelled.")
            .example(examples::accepted_run()),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Only runs of this agent.
    agent: Option<String>,
    /// Only runs with this status.
    status: Option<Status>,
    /// Only the tree of this root run, which is included.
    root: Option<AnyRun>,
    /// Whether to include child runs.
    all: bool,
    /// Only runs of this session.
    session: Option<String>,
    /// Only runs whose input or final text contains this text, or whose id begins or ends with it. Letters are compared without
    /// case. A whole id finds this run alone, a child too.
    q: Option<TextSearch>,
    /// Only runs that failed with this code.
    error_code: Option<FailureCode>,
    /// Only root runs that got this version of an agent with a rollout.
    variant: Option<Variant>,
    /// Only runs that cost at least this in US dollars, with their descendants.
    min_cost_usd: Option<Usd>,
    /// Only runs that cost at most this in US dollars, with their descendants.
    max_cost_usd: Option<Usd>,
    /// Only runs accepted at this time or later.
    since: Option<Time>,
    /// Only runs accepted before this time.
    until: Option<Time>,
    /// Maximum runs of a page.
    limit: PageSize,
    /// Whether to return long texts whole. By default texts above 1 KiB are cut, and a run with such a text has `truncated`.
    full: bool,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<RunId>>,
    /// `label.<key>=<value>`: only runs with this label. Several labels must all match.
    #[serde(rename = "label.")]
    labels: Labels,
    /// `score.<name>=<condition>`: only runs whose scores of this name have such a mean (`<0.5`, `<=0.5`, `>0.5`, `>=0.5`), or
    /// this label (`=helpful`), or that have no such score (`none`). Several must all match.
    #[serde(rename = "score.")]
    scores: ScoreFilters,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct RunQuery {
    /// Seconds to wait for the run's end, at most `server.max_wait`. A run that comes to wait for a person is returned at
    /// once.
    wait: Option<Seconds>,
    /// Only these fields of the run, separated by commas. The others are absent, required or not.
    #[schemars(example = "id,status,content")]
    fields: Option<String>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ChildrenQuery {
    /// Maximum children of a page.
    limit: Count<1000, 1000>,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<RunId>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct MessagesQuery {
    /// The number of messages to skip: the `next_after` of the previous page.
    after: usize,
}

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
        check_reason(self.reason, "/reason")
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

async fn get_run(
    State(state): State<AppState>,
    (RunPath(id), principal): (RunPath, Principal),
    links: LinkPrefix,
    Query(RunQuery { wait, fields }): Query<RunQuery>,
    prefer: Prefer,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let timeout = prefer.timeout(wait, state.settings.max_wait)?;
    let Some(run) = state.runner.run(id).await? else {
        return Err(unknown_run(&principal, &state, &RunRef::Id(id)).await);
    };
    let mut run = Arc::new(run);
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

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    Query(query): Query<ListQuery>,
) -> Result<Response, Problem> {
    let root = filtered_run(query.root.as_ref(), &principal, &state).await?;
    let filter = RunFilter {
        root,
        ..query.into()
    };
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
    let runs = state.runner.with_suspensions(runs);
    Ok(RunPage { runs, next })
}

/// How many runs that the principal may see match a filter, by status. Those that have ended are counted from the filter's `since`
/// on, or of the last 24 hours; each status up to [`MAX_COUNT`]. See [`RunRecords::count`] for what of the filter does not count.
/// `None` if the principal may use some agents only, and the filter does not name one of them.
///
/// [`RunRecords::count`]: crate::store::runs::RunRecords::count
pub async fn visible_counts(
    state: &AppState,
    principal: &Principal,
    filter: RunFilter,
) -> Result<Option<Vec<StatusCount>>, Problem> {
    let has_visible_roots = !filter.include_children && filter.root.is_none();
    let agent = filter.agent.as_deref();
    let is_visible = has_visible_roots && agent.is_some_and(|agent| principal.can_use_agent(agent));
    if principal.has_agent_globs() && !is_visible {
        return Ok(None);
    }
    let mut filter = RunFilter {
        owner: principal.owner_filter().map(str::to_owned),
        before: None,
        limit: MAX_COUNT,
        ..filter
    };
    let store = state.runner.store();
    let (ended, active): (Vec<_>, Vec<_>) = Status::ALL
        .into_iter()
        .partition(|status| status.is_terminal());
    let mut counts = store.count(filter.clone(), active).await?;
    if filter.since.is_none() {
        let end = filter.until.unwrap_or_else(now);
        filter.since = end.checked_sub(COUNTED_TIME).ok();
    }
    counts.extend(store.count(filter, ended).await?);
    Ok(Some(counts))
}

async fn tree(
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
            call_order.insert(
                parent,
                call_ids(&entry::steps(state.runner.store().entries(parent).await?)),
            );
        }
    }
    Ok((runs, call_order))
}

async fn children(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    links: LinkPrefix,
    Query(query): Query<ChildrenQuery>,
) -> Result<Response, Problem> {
    let cursor = query.cursor.map(|Cursor(id)| id);
    let store = state.runner.store();
    require_run(&state, id).await?;
    let mut children = store.child_calls(id).await?;
    if children.len() > 1 {
        let calls = call_ids(&entry::steps(store.entries(id).await?));
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
    while runs.len() < query.limit.0
        && bytes < PAGE_BYTES
        && let Some((child, _)) = remaining.next()
    {
        // It may have been deleted in the meantime.
        if let Some(run) = state.runner.run(*child).await? {
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

async fn messages(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    Query(MessagesQuery { after }): Query<MessagesQuery>,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let conversation =
        RecordedConversation::from_steps(entry::steps(state.runner.store().entries(id).await?));
    Ok(json_response(
        StatusCode::OK,
        &Conversation::page(&conversation, after),
    ))
}

async fn cancel(
    State(state): State<AppState>,
    ChangedRunPath(id): ChangedRunPath,
    links: LinkPrefix,
    Query(WaitQuery { wait }): Query<WaitQuery>,
    prefer: Prefer,
    JsonBody(request): JsonBody<CancelRequest>,
) -> Result<Response, Problem> {
    let timeout = prefer.timeout(wait, state.settings.max_wait)?;
    let reason = request.into_reason()?;
    let run = state
        .runner
        .cancel(id, reason)
        .await?
        .ok_or_else(|| Problem::run_not_found(id))?;
    let run = wait::wait_for_end(&state, run, timeout).await;
    Ok(finished_or_accepted(&links, &run))
}

async fn delete(
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
            ProblemCode::NotARoot,
            format!("{id} is a child run; delete its root {}", run.root_id),
        ));
    }
    if !run.status.is_terminal() {
        return Err(Problem::new(
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
    let run = state.runner.run(id).await?;
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

impl From<ListQuery> for RunFilter {
    fn from(query: ListQuery) -> Self {
        Self {
            owner: None,
            agent: query.agent,
            status: query.status,
            // Found by `filtered_run`.
            root: None,
            include_children: query.all,
            session: query.session,
            cut_texts: !query.full,
            labels: query.labels.0,
            text: query.q.map(|TextSearch(text)| text),
            error_code: query.error_code,
            variant: query.variant,
            scores: query.scores.0,
            min_cost: query.min_cost_usd.map(|Usd(cost)| cost),
            max_cost: query.max_cost_usd.map(|Usd(cost)| cost),
            since: query.since.map(|Time(time)| time),
            until: query.until.map(|Time(time)| time),
            before: query.cursor.map(|Cursor(id)| id),
            limit: query.limit.0,
        }
    }
}

/// The reason, if it is not blank; an error if it is too long.
/// `field` is the pointer of the text.
pub fn check_reason(text: Option<String>, field: &'static str) -> Result<Option<String>, Problem> {
    let reason = text.filter(|reason| !reason.trim().is_empty());
    if reason
        .as_ref()
        .is_some_and(|reason| reason.chars().nth(MAX_REASON).is_some())
    {
        return Err(Problem::invalid_field(
            field,
            format!("must be at most {MAX_REASON} characters"),
        ));
    }
    Ok(reason)
}

#[cfg(test)]
mod tests {
    use super::ListQuery;
    use crate::domain::run::{RunId, Status};
    use crate::store::runs::RunFilter;
    use crate::web::extract::query::Query;

    fn read(query: &str) -> Result<RunFilter, String> {
        let uri = format!("/runs?{query}").parse().expect("a URI");
        Query::<ListQuery>::read(&uri)
            .map(|Query(query)| query.into())
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
        assert_eq!((all.status, all.before), (Some(Status::Failed), Some(id)));
        assert_eq!(all.until, "2026-01-02T00:00:00Z".parse().ok());
        assert_eq!(all.labels, [("team".to_owned(), "x".to_owned())]);
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
