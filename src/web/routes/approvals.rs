//! `/approvals` and `/runs/{id}/approvals/{tool_call_id}`: lists the tool calls that wait for approval, approves and denies
//! them.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};
use tracing::info;

use crate::config::KeyScope;
use crate::domain::event::Decision;
use crate::domain::input::{ArgumentsHash, InputKind};
use crate::domain::run::{PendingInput, Run, RunId, now};
use crate::engine::state::input_answer::InputAnswer;
use crate::record::entry::{self, Entry};
use crate::store::IdempotencyClaim;
use crate::store::inputs::{InputPage, InputQuery};
use crate::web::auth::Principal;
use crate::web::body::request_body::RequestBody;
use crate::web::error::{Problem, quote};
use crate::web::extract::idempotency::{self, RepeatKey};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{Params, RunPath, check_may_change};
use crate::web::extract::query::{AnyRun, Cursor, NoQuery, Query, filtered_run};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    AmbiguousRun, CallNotReached, Draining, NothingWaits, OtherArguments, RunNotFound,
};
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::route::{Route, get, post};
use crate::web::routes::runs::{PageSize, check_reason, find_claimed};
use crate::web::state::AppState;

/// Most bytes of arguments that a form shows.
const MAX_FORM_ARGUMENTS_BYTES: usize = 1 << 20;

pub fn routes() -> Vec<Route> {
    vec![
        get("/approvals", [KeyScope::Read], list)
            .describe(
                "list_approvals",
                "Lists the tool calls that wait for approval",
            )
            .details("Of all runs that the key may see, the oldest run first.")
            .response::<ApprovalsPage>(200, "The page.")
            .example(json!({"data": [examples::pending_approval()], "next_cursor": null}))
            .problems(&[RunNotFound, AmbiguousRun]),
        post(
            "/runs/{id}/approvals/{tool_call_id}",
            [KeyScope::Run, KeyScope::Approve],
            decide,
        )
        .describe("decide_tool_call", "Approves or denies a tool call")
        .details("Only while the tool call waits for approval. The run then continues.")
        .tag("approvals")
        .path::<String>("tool_call_id", "The id of the tool call.", RunNotFound)
        .request_body::<DecisionRequest>()
        .body_required()
        .request_example("approve", "Approve", json!({"decision": "approve"}))
        .request_example(
            "arguments",
            "Approve with other arguments",
            json!({"decision": "approve", "arguments": {"path": "notes.md", "content": "shorter"}}),
        )
        .request_example(
            "deny",
            "Deny, with a reason for the model",
            json!({"decision": "deny", "reason": "use the copy in /tmp"}),
        )
        .response::<RunView<'static>>(202, "The run; the decision is stored.")
        .example(examples::accepted_run())
        .problems(&[NothingWaits, OtherArguments, Draining, CallNotReached]),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Only calls of this root run's tree.
    root: Option<AnyRun>,
    /// Maximum calls of a page. All calls of a run are on one page, which may therefore be longer.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<RunId>>,
}

#[derive(Deserialize)]
struct CallParam {
    tool_call_id: String,
}

/// A person's decision on a tool call.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "DecisionRequest")]
#[serde(deny_unknown_fields, default)]
pub struct DecisionRequest {
    /// Whether the call is executed.
    #[schemars(required, with = "Verdict")]
    decision: Option<Verdict>,
    /// What the call is executed with instead of the model's arguments, if it is approved. The model is informed of it.
    arguments: Option<Map<String, Value>>,
    /// `arguments_hash` of the call that was looked at: if the call has other arguments, nothing is decided.
    arguments_hash: Option<ArgumentsHash>,
    /// The model reads this if the call is denied.
    #[schemars(length(max = 1000))]
    reason: Option<String>,
}

impl DecisionRequest {
    /// Approves a call, perhaps with other arguments than the model's.
    pub fn approve(arguments: Option<Map<String, Value>>, reason: Option<String>) -> Self {
        Self {
            decision: Some(Verdict::Approve),
            arguments,
            reason,
            ..Self::default()
        }
    }

    pub fn deny(reason: Option<String>) -> Self {
        Self {
            decision: Some(Verdict::Deny),
            reason,
            ..Self::default()
        }
    }

    /// Refuses to approve a call whose arguments a form could not show whole.
    ///
    /// # Errors
    /// A text for the client.
    pub fn check_shown(&self, approval: &PendingInput) -> Result<(), String> {
        let is_approval = matches!(self.decision, Some(Verdict::Approve));
        let is_informed = self.arguments.is_some() || self.arguments_hash.is_some();
        if !approval.request.truncated || !is_approval || is_informed {
            return Ok(());
        }
        let (run, call) = (approval.run_id, &approval.request.tool_call_id);
        Err(format!(
            "the arguments of {} are too long to be shown here; read them in /runs/{run}/messages and decide by POST \
             /runs/{run}/approvals/{call}",
            quote(call)
        ))
    }

    /// The decision, for a call with these arguments only.
    pub fn for_arguments(self, arguments_hash: Option<ArgumentsHash>) -> Self {
        Self {
            arguments_hash,
            ..self
        }
    }
}

/// A decision on a tool call.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[schemars(rename = "Decision")]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// The call is executed.
    Approve,
    /// The call is not executed; the model reads the reason.
    Deny,
}

/// A page of the tool calls that wait for approval, by age of their runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ApprovalPage")]
pub struct ApprovalsPage {
    /// The calls.
    data: Vec<PendingInput>,
    /// The `cursor` of the next page; null on the last page.
    next_cursor: Option<RunId>,
}

async fn list(
    State(state): State<AppState>,
    principal: Principal,
    Query(query): Query<ListQuery>,
) -> Result<Response, Problem> {
    let query = InputQuery {
        owner: None,
        kind: Some(InputKind::Approval),
        root: filtered_run(query.root.as_ref(), &principal, &state).await?,
        after: query.cursor.map(|Cursor(id)| id),
        limit: query.limit.0,
    };
    let page = visible_page(&state, &principal, query).await?;
    let page = ApprovalsPage {
        data: page.inputs,
        next_cursor: page.next,
    };
    Ok(json_response(StatusCode::OK, &page))
}

/// A page of the inputs that the principal may give.
pub async fn visible_page(
    state: &AppState,
    principal: &Principal,
    query: InputQuery,
) -> Result<InputPage, Problem> {
    let store = state.runner.store();
    let owner = principal.owner_filter().map(str::to_owned);
    let mut page = store.pending_inputs(InputQuery { owner, ..query }).await?;
    if principal.can_see_all_runs() {
        return Ok(page);
    }
    let roots: BTreeSet<RunId> = page.inputs.iter().map(|it| it.root_id).collect();
    let mut visible_roots = BTreeSet::new();
    for root in roots {
        let run = store.run(root).await?.into_iter().collect();
        let visible = principal.visible_runs(run, store.as_ref()).await?;
        if !visible.is_empty() {
            visible_roots.insert(root);
        }
    }
    page.inputs
        .retain(|it| visible_roots.contains(&it.root_id) && principal.can_use_agent(&it.agent));
    Ok(page)
}

/// Completes arguments that the record of the run shows cut, for forms: a person decides on what they see. Those that are too
/// long for a form stay cut.
pub async fn complete_arguments(
    state: &AppState,
    pending: &mut [PendingInput],
) -> Result<(), Problem> {
    for approval in pending.iter_mut().filter(|it| it.request.truncated) {
        let steps = entry::steps(state.runner.store().entries(approval.run_id).await?);
        let mut calls = steps.iter().flat_map(|step| match step {
            Entry::Replied { message, .. } => message.tool_calls.as_slice(),
            _ => &[],
        });
        let request = &mut approval.request;
        if let Some(call) = calls.find(|call| call.id == request.tool_call_id)
            && call.arguments.get().len() <= MAX_FORM_ARGUMENTS_BYTES
        {
            request.arguments = Arc::clone(&call.arguments);
            request.truncated = false;
        }
    }
    Ok(())
}

/// The run, with the arguments of its calls completed as by [`complete_arguments`].
pub async fn with_whole_arguments<'r>(
    state: &AppState,
    run: &'r Run,
) -> Result<Cow<'r, Run>, Problem> {
    if !run.pending_inputs.iter().any(|it| it.request.truncated) {
        return Ok(Cow::Borrowed(run));
    }
    let mut run = run.clone();
    complete_arguments(state, &mut run.pending_inputs).await?;
    Ok(Cow::Owned(run))
}

/// 202 once the decision is committed, and again for a repetition with the same `Idempotency-Key`.
async fn decide(
    State(state): State<AppState>,
    (principal, links): (Principal, LinkPrefix),
    (RunPath(id), Params(CallParam { tool_call_id: call })): (RunPath, Params<CallParam>),
    _: NoQuery,
    RepeatKey(key): RepeatKey,
    body: RequestBody,
) -> Result<Response, Problem> {
    let route = format!("POST /runs/{id}/approvals/{call}");
    let claim = claim_of(&principal, route, key, &body);
    let applied = async {
        let request: DecisionRequest = body.json()?;
        apply(&state, &principal, id, &call, request, claim.clone()).await
    };
    answer_once(&state, &links, claim.as_deref(), applied).await
}

/// The claim of a request with this idempotency key.
pub fn claim_of(
    principal: &Principal,
    route: String,
    key: Option<String>,
    body: &RequestBody,
) -> Option<Box<IdempotencyClaim>> {
    let hash = idempotency::body_hash(body);
    let claim = |key| idempotency::new_claim(principal.key_name(), route, key, hash);
    key.map(claim).map(Box::new)
}

/// The response once `applied` has answered what waits in a run; for a repetition, that of the first request.
pub async fn answer_once(
    state: &AppState,
    links: &str,
    claim: Option<&IdempotencyClaim>,
    applied: impl Future<Output = Result<Run, Problem>>,
) -> Result<Response, Problem> {
    // Before anything is checked: what a repetition answers does not wait any more.
    if let Some(response) = replay(state, links, claim).await? {
        return Ok(response);
    }
    match applied.await {
        Ok(run) => Ok(decided_response(links, &run)),
        // Perhaps another request with the same key was quicker.
        Err(problem) => match replay(state, links, claim).await? {
            Some(response) => Ok(response),
            None => Err(problem),
        },
    }
}

/// The response to a decision that an earlier request with the same key made; `None` if there was none.
async fn replay(
    state: &AppState,
    links: &str,
    claim: Option<&IdempotencyClaim>,
) -> Result<Option<Response>, Problem> {
    let found = find_claimed(state, claim).await?;
    Ok(found.map(|(_, run)| idempotency::mark_replayed(decided_response(links, &run))))
}

fn decided_response(links: &str, run: &Run) -> Response {
    json_response(StatusCode::ACCEPTED, &RunView::new(run, links, now()))
}

/// Decides on a call for the principal, and returns the run once the decision is committed.
pub async fn apply(
    state: &AppState,
    principal: &Principal,
    id: RunId,
    call: &str,
    decision_request: DecisionRequest,
    claim: Option<Box<IdempotencyClaim>>,
) -> Result<Run, Problem> {
    principal.require_any_scope(&[KeyScope::Run, KeyScope::Approve])?;
    check_may_change(principal, state, id).await?;
    let verdict = decision_request.decision.ok_or_else(|| {
        let why = "is required: \"approve\" or \"deny\"";
        Problem::invalid_field("/decision", why)
    })?;
    let arguments = check_new_arguments(verdict, decision_request.arguments)?;
    if arguments.is_some() {
        principal.require_scope(KeyScope::Approve)?;
    }
    let decision = InputAnswer {
        arguments,
        arguments_hash: decision_request.arguments_hash,
        decision: match verdict {
            Verdict::Approve => Decision::Approved,
            Verdict::Deny => Decision::Denied,
        },
        reason: check_reason(decision_request.reason, "/reason")?,
        by: principal.key_name().map(str::to_owned),
        claim,
        kind: InputKind::Approval,
    };
    let run = state.runner.decide(id, call, decision).await?;
    info!(
        run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
        "The tool call {} of {id} was decided: {verdict:?}", quote(call)
    );
    Ok(run)
}

fn check_new_arguments(
    verdict: Verdict,
    arguments: Option<Map<String, Value>>,
) -> Result<Option<Arc<RawValue>>, Problem> {
    let Some(arguments) = arguments else {
        return Ok(None);
    };
    if let Verdict::Deny = verdict {
        let why = "are only for a call that is approved";
        return Err(Problem::invalid_field("/arguments", why));
    }
    let json = to_raw_value(&arguments).map_err(|error| Problem::internal(error.to_string()))?;
    Ok(Some(json.into()))
}
