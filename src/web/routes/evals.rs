//! `/evals`: compares versions of agents over cases.

use std::pin::pin;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::{HeaderValue, LOCATION};
use axum::http::request::Parts;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::info;

use crate::config::KeyScope::{Cancel, Read, Run};
use crate::domain::counted::counted;
use crate::domain::evaluation::{EvalId, Evaluation};
use crate::store::evals::{EvalChange, EvalQuery};
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::evals::request::{EvalBody, NewEval, check_accepts};
use crate::web::extract::body::JsonBody;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::Params;
use crate::web::extract::query::{Cursor, NoQuery, Query};
use crate::web::problem_code::ProblemCode::{
    AgentInvalid, AgentNotFound, Draining, EvalNotFound, InvalidField, QueueFull,
};
use crate::web::response::eval::{CaseRunView, CaseView, CasesPage, EvalView, EvalsPage};
use crate::web::response::json::json_response;
use crate::web::route::{Input, Route, get, post};
use crate::web::routes::runs::{CancelRequest, PageSize};
use crate::web::state::AppState;
use crate::web::wait::{Prefer, Seconds};

pub fn routes() -> Vec<Route> {
    vec![
        post("/evals", [Run], create)
            .describe("create_eval", "Evaluates an agent")
            .details(
                "Runs the agent once for each case, and the version that it is compared with too. The runs are marked with \
                 the label `evaluation`, start behind live work, send no webhooks and have no memory. Definitions and cases \
                 are recorded first: files that change later make no difference. `definition`, and `tools` = `live`, need the \
                 scope `admin`.",
            )
            .tag("evals")
            .body_required()
            .request_example("compare", "The agent's file against a version of the record", json!({
                "agent": "planner", "dataset": "release", "against": EXAMPLE_VERSION, "tools": "none",
                "gates": ["grounded >= -0.02", "cost <= 1.1x"],
            }))
            .request_example("cases", "Cases in the request", json!({
                "agent": "planner", "cases": [{"id": "a", "input": "Sum up ticket 1", "expected": "done"}], "repeat": 3,
            }))
            .request_example("backtest", "What the agent would have done in the runs of the last month", json!({
                "agent": "planner", "since": "30d", "limit": 200, "against": "recorded", "ignore": ["[0-9]{4}-[0-9]{2}-[0-9]{2}"],
            }))
            .response::<EvalView>(202, "The evaluation is accepted.")
            .example(example())
            .response_header(&[202], "Location", "The URL of the evaluation.")
            .problems(&[AgentNotFound, AgentInvalid, InvalidField, QueueFull, Draining]),
        get("/evals", [Read], list)
            .describe("list_evals", "Lists evaluations")
            .details("The newest is first, without results. A key sees its own, a key with the scope `admin` all.")
            .tag("evals")
            .response::<EvalsPage>(200, "The page.")
            .example(json!({"data": [example()], "next_cursor": null})),
        get("/evals/{id}", [Read], get_eval)
            .describe("get_eval", "Returns an evaluation with its result")
            .tag("evals")
            .response::<EvalView>(200, "The evaluation.")
            .example(example()),
        get("/evals/{id}/cases", [Read], cases)
            .describe("get_eval_cases", "Returns the cases of an evaluation with their runs")
            .details("In the order of the dataset. A run that has not started is left out.")
            .tag("evals")
            .response::<CasesPage>(200, "The page.")
            .example(example_cases()),
        post("/evals/{id}/cancel", [Cancel], cancel)
            .describe("cancel_eval", "Cancels an evaluation")
            .details("No more runs start, those that have started are cancelled, and its result is that of the others.")
            .tag("evals")
            .request_example("reason", "With a reason", json!({"reason": "the definition is wrong"}))
            .response::<EvalView>(200, "The evaluation has ended.")
            .example(example())
            .response::<EvalView>(202, "Runs of the evaluation have to end.")
            .example(example()),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Only evaluations of this agent.
    agent: Option<String>,
    /// Maximum evaluations of a page.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<EvalId>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct CasesQuery {
    /// Maximum cases of a page.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<u32>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct WaitedQuery {
    /// Seconds to wait for the end of the evaluation, at most `server.max_wait`.
    wait: Option<Seconds>,
}

/// The evaluation of a path. Responds 404 if there is none that the principal may see.
struct VisibleEval(Evaluation);

impl Input for VisibleEval {
    fn describe(route: Route) -> Route {
        route.path::<EvalId>("id", "The evaluation's id.", EvalNotFound)
    }
}

impl FromRequestParts<AppState> for VisibleEval {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let principal = Principal::from_parts(parts, state)?;
        let Params(id) = Params::<String>::from_request_parts(parts, state).await?;
        visible_eval(state, &principal, &id).await.map(Self)
    }
}

/// The evaluation with this id. Responds 404 if there is none that the principal may see.
pub async fn visible_eval(
    state: &AppState,
    principal: &Principal,
    id: &str,
) -> Result<Evaluation, Problem> {
    let found = match id.parse() {
        Ok(id) => state.runner.store().eval(id).await?,
        Err(()) => None,
    };
    found
        .filter(|eval| can_see(principal, eval))
        .ok_or_else(|| eval_not_found(id))
}

fn eval_not_found(id: &str) -> Problem {
    let detail = format!("there is no evaluation {}", quote(id));
    Problem::new(EvalNotFound, detail)
}

fn can_see(principal: &Principal, eval: &Evaluation) -> bool {
    let owner = principal.owner_filter();
    let is_own = owner.is_none_or(|owner| eval.owner.as_deref() == Some(owner));
    is_own && principal.can_use_agent(&eval.agent)
}

/// 202 once the evaluation with all its cases is in the record.
async fn create(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    _: NoQuery,
    JsonBody(body): JsonBody<EvalBody>,
) -> Result<Response, Problem> {
    let requested = NewEval::check(&state, &principal, body).await?;
    check_accepts(&state, &principal).await?;
    let eval = requested.accept(&state).await?;
    info!(agent = %eval.agent, "Accepted {} with {}", eval.id, counted(eval.planned, "run"));
    accepted(&EvalView::new(eval, &links))
}

/// 202 with the URL of the evaluation.
pub fn accepted(view: &EvalView) -> Result<Response, Problem> {
    let location = HeaderValue::try_from(&view.links.itself)
        .map_err(|error| Problem::internal(format!("no Location: {error}")))?;
    let mut response = json_response(StatusCode::ACCEPTED, view);
    response.headers_mut().insert(LOCATION, location);
    Ok(response)
}

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    links: LinkPrefix,
    Query(query): Query<ListQuery>,
) -> Result<Response, Problem> {
    let before = query.cursor.map(|Cursor(id)| id);
    let page = visible_page(&state, &principal, query.agent, before, query.limit.0).await?;
    let evals = page.evals.into_iter();
    let page = EvalsPage {
        data: evals.map(|eval| EvalView::new(eval, &links)).collect(),
        next_cursor: page.next,
    };
    Ok(json_response(StatusCode::OK, &page))
}

/// Evaluations, newest first, without results.
pub struct VisiblePage {
    pub evals: Vec<Evaluation>,
    /// The cursor of the next page.
    pub next: Option<EvalId>,
}

/// A page of the evaluations, perhaps of one agent, that the principal may see.
pub async fn visible_page(
    state: &AppState,
    principal: &Principal,
    agent: Option<String>,
    before: Option<EvalId>,
    limit: usize,
) -> Result<VisiblePage, Problem> {
    let query = EvalQuery {
        owner: principal.owner_filter().map(str::to_owned),
        agent,
        before,
        limit: limit + 1,
    };
    let mut evals = state.runner.store().evals(query).await?;
    let has_more = evals.len() > limit;
    evals.truncate(limit);
    let next = evals.last().map(|eval| eval.id).filter(|_| has_more);
    evals.retain(|eval| can_see(principal, eval));
    Ok(VisiblePage { evals, next })
}

/// The evaluation as it is now.
async fn read_again(state: &AppState, id: EvalId) -> Result<Evaluation, Problem> {
    let eval = state.runner.store().eval(id).await?;
    eval.ok_or_else(|| eval_not_found(&id.to_string()))
}

async fn get_eval(
    State(state): State<AppState>,
    links: LinkPrefix,
    Query(WaitedQuery { wait }): Query<WaitedQuery>,
    prefer: Prefer,
    VisibleEval(eval): VisibleEval,
) -> Result<Response, Problem> {
    let deadline = Instant::now() + prefer.timeout(wait, state.settings.max_wait)?;
    let eval = wait_for_end(&state, eval.id, deadline).await?;
    Ok(json_response(StatusCode::OK, &EvalView::new(eval, &links)))
}

/// The evaluation at its end, or as it is at this time.
pub async fn wait_for_end(
    state: &AppState,
    id: EvalId,
    deadline: Instant,
) -> Result<Evaluation, Problem> {
    loop {
        // Before the evaluation is read, so that its end is not missed.
        let mut finished = pin!(state.evals.finished());
        finished.as_mut().enable();
        let eval = read_again(state, id).await?;
        if eval.finished_at.is_some() || state.closing.is_cancelled() {
            return Ok(eval);
        }
        tokio::select! {
            () = finished => {}
            () = state.runner.leadership().poll() => {}
            () = state.closing.cancelled() => {}
            () = tokio::time::sleep_until(deadline) => return Ok(eval),
        }
    }
}

async fn cases(
    State(state): State<AppState>,
    Query(query): Query<CasesQuery>,
    VisibleEval(eval): VisibleEval,
) -> Result<Response, Problem> {
    let start = query.cursor.map_or(0, |Cursor(start)| start);
    let page = cases_page(&state, eval.id, start, query.limit.0).await?;
    Ok(json_response(StatusCode::OK, &page))
}

/// The cases from this number on, with their runs.
pub async fn cases_page(
    state: &AppState,
    eval: EvalId,
    start: u32,
    limit: usize,
) -> Result<CasesPage, Problem> {
    let end = start.saturating_add(u32::try_from(limit).unwrap_or(u32::MAX));
    let numbers = start..end;
    let store = state.runner.store();
    let cases = store.eval_cases(eval, numbers.clone()).await?;
    let mut runs = store
        .eval_runs(eval, numbers.clone())
        .await?
        .into_iter()
        .peekable();
    let is_full = cases.len() == limit;
    let mut data = Vec::new();
    for case in cases {
        let mut of_case = Vec::new();
        while let Some(run) = runs.next_if(|run| run.slot.case <= case.number) {
            of_case.push(CaseRunView::from(run));
        }
        data.push(CaseView {
            case: case.id,
            expected: case.expected,
            run: case.source,
            runs: of_case,
        });
    }
    let next_cursor = is_full.then(|| numbers.end.to_string());
    Ok(CasesPage { data, next_cursor })
}

/// 202 while runs have to end, 200 if the evaluation has ended.
async fn cancel(
    State(state): State<AppState>,
    links: LinkPrefix,
    _: NoQuery,
    VisibleEval(eval): VisibleEval,
    JsonBody(request): JsonBody<CancelRequest>,
) -> Result<Response, Problem> {
    let reason = request.into_reason()?;
    let reason = reason.unwrap_or_else(|| "requested by client".to_owned());
    let change = EvalChange::Cancel { reason };
    state.runner.store().change_eval(eval.id, change).await?;
    state.evals.cancel(eval.id);
    let eval = read_again(&state, eval.id).await?;
    let status = match eval.finished_at {
        Some(_) => StatusCode::OK,
        None => StatusCode::ACCEPTED,
    };
    Ok(json_response(status, &EvalView::new(eval, &links)))
}

const EXAMPLE_ID: &str = "eval_019a1f3c-c000-7e43-8f88-6c419d0e1f2a";
const EXAMPLE_VERSION: &str =
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

pub fn example() -> Value {
    json!({
        "id": EXAMPLE_ID, "agent": "planner", "state": "running",
        "versions": [
            {"agent": "planner", "version": "sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"},
            {"agent": "planner", "version": EXAMPLE_VERSION},
        ],
        "against_eval": null, "dataset": "release", "since": null, "scorers": ["grounded"], "tools": "none", "unknown": "stop", "ignore": [],
        "repeat": 1, "gates": ["grounded >= -0.02"], "planned": 200, "ended": 31, "estimate_usd": 1.84, "cap_usd": 5.0, "spent_usd": 0.29,
        "created_at": "2026-03-01T09:30:00.000Z", "finished_at": null, "reason": null, "result": null,
        "links": {
            "self": format!("/evals/{EXAMPLE_ID}"), "cases": format!("/evals/{EXAMPLE_ID}/cases"),
            "cancel": format!("/evals/{EXAMPLE_ID}/cancel"),
        },
    })
}

fn example_cases() -> Value {
    json!({
        "data": [{
            "case": "ticket-1", "expected": "done", "run": null,
            "runs": [{
                "version": 0, "repeat": 0, "run_id": "run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d", "outcome": "completed",
                "error": null, "scores": {"grounded": 0.9}, "unscored": {}, "cost_usd": 0.0094, "tokens": 3120, "turns": 2,
                "tool_calls": 0, "duration_ms": 1840, "diverged": null,
            }],
        }],
        "next_cursor": null,
    })
}
