//! `/inputs`, `/runs/{id}/inputs/{input_id}` and `/runs/{id}/calls/{call_id}`: lists the questions that wait for a person, and
//! answers them.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use tracing::info;

use crate::config::KeyScope;
use crate::domain::input::InputKind;
use crate::domain::run::{Run, RunId};
use crate::engine::approval::reconcile::{CallOutcome, Reconciled};
use crate::engine::state::input_answer::InputAnswer;
use crate::record::event::MAX_CONTENT_BYTES;
use crate::store::IdempotencyClaim;
use crate::store::inputs::InputQuery;
use crate::web::auth::Principal;
use crate::web::body::request_body::RequestBody;
use crate::web::error::{Problem, quote};
use crate::web::extract::idempotency::RepeatKey;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{Params, RunPath, check_may_change};
use crate::web::extract::query::{AnyRun, Cursor, NoQuery, Query, filtered_run};
use crate::web::openapi::examples;
use crate::web::problem_code::ProblemCode::{
    AmbiguousRun, CallNotFound, Draining, NothingWaits, RunNotFound,
};
use crate::web::response::input::InputView;
use crate::web::response::json::json_response;
use crate::web::response::run::RunView;
use crate::web::route::{Route, get, post};
use crate::web::routes::approvals::{answer_once, claim_of, visible_page};
use crate::web::routes::runs::{PageSize, check_reason};
use crate::web::state::AppState;

pub fn routes() -> Vec<Route> {
    vec![
        get("/inputs", [KeyScope::Read], list)
            .describe("list_inputs", "Lists the questions that wait for an answer")
            .details("Of all runs that the key may see, the oldest run first.")
            .response::<InputsPage<'static>>(200, "The page.")
            .example(json!({"data": [examples::pending_question()], "next_cursor": null}))
            .problems(&[RunNotFound, AmbiguousRun]),
        post(
            "/runs/{id}/inputs/{input_id}",
            [KeyScope::Run, KeyScope::Approve],
            answer,
        )
        .describe("answer_input", "Answers a question, or declines to")
        .details(
            "Only while the question waits. The first answer wins. One that does not fit the schema is refused, and the question \
             waits on.",
        )
        .tag("inputs")
        .path::<String>("input_id", "The id of the question.", RunNotFound)
        .request_body::<AnswerRequest>()
        .body_required()
        .request_example("answer", "Answer", json!({"answer": "Berlin"}))
        .request_example("form", "Answer by the schema", json!({"answer": {"city": "Berlin", "nights": 2}}))
        .request_example("decline", "Decline, with a reason for the model", json!({"decline": "ask finance"}))
        .response::<RunView<'static>>(202, "The run; the answer is stored.")
        .example(examples::accepted_run())
        .problems(&[NothingWaits, Draining]),
        post(
            "/runs/{id}/calls/{call_id}",
            [KeyScope::Run, KeyScope::Approve],
            reconcile,
        )
        .describe("reconcile_call", "Says whether a call was done whose end is not known")
        .details("Only while the run waits for it (`reconcile`). The first answer wins.")
        .tag("inputs")
        .path::<String>("call_id", "The id of the tool call.", CallNotFound)
        .request_body::<ReconcileRequest>()
        .body_required()
        .request_example("done", "It was done", json!({"outcome": "done", "result": "order 17 is paid"}))
        .request_example("not_done", "It was not done: perform it", json!({"outcome": "not_done"}))
        .request_example("unknown", "Nobody knows: tell the model", json!({"outcome": "unknown"}))
        .response::<RunView<'static>>(202, "The run; the answer is stored.")
        .example(examples::accepted_run())
        .problems(&[RunNotFound, NothingWaits, Draining]),
    ]
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    /// Only questions of this root run's tree.
    root: Option<AnyRun>,
    /// Maximum questions of a page. All questions of a run are on one page, which may therefore be longer.
    limit: PageSize,
    /// The `next_cursor` of the previous page.
    cursor: Option<Cursor<RunId>>,
}

#[derive(Deserialize)]
struct InputParam {
    input_id: String,
}

#[derive(Deserialize)]
struct CallParam {
    call_id: String,
}

/// A person's answer to a question: one of the two.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AnswerRequest {
    /// The answer: JSON that fits the question's schema; without one, best a text.
    answer: Option<Value>,
    /// Why there is no answer; the model reads it.
    #[schemars(length(max = 1000))]
    decline: Option<String>,
}

impl AnswerRequest {
    pub fn answer(answer: Value) -> Self {
        Self {
            answer: Some(answer),
            decline: None,
        }
    }

    pub fn decline(reason: &str) -> Self {
        Self {
            answer: None,
            decline: Some(reason.to_owned()),
        }
    }
}

/// What a person says of a call that had begun.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct ReconcileRequest {
    /// Whether it was done.
    #[schemars(required, with = "CallOutcome")]
    outcome: Option<CallOutcome>,
    /// What the call returned, if it was done: a text, or JSON. The model gets it as the call's result.
    result: Option<Value>,
}

impl ReconcileRequest {
    fn into_answer(self) -> Result<Reconciled, Problem> {
        let outcome = self.outcome.ok_or_else(|| {
            let why = "is required: \"done\", \"not_done\" or \"unknown\"";
            Problem::invalid_field("/outcome", why)
        })?;
        let result = match (outcome, self.result) {
            (CallOutcome::Done, None) => {
                let why = "is required: what the call returned, \"\" for nothing";
                return Err(Problem::invalid_field("/result", why));
            }
            (CallOutcome::Done, Some(Value::String(text))) => Some(text),
            (CallOutcome::Done, Some(result)) => Some(result.to_string()),
            (_, Some(_)) => {
                let why = "is only for a call that was done";
                return Err(Problem::invalid_field("/result", why));
            }
            (_, None) => None,
        };
        Ok(Reconciled { outcome, result })
    }
}

/// A page of the questions that wait, by age of their runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "InputPage")]
struct InputsPage<'a> {
    /// The questions.
    data: Vec<InputView<'a>>,
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
        kind: Some(InputKind::Question),
        root: filtered_run(query.root.as_ref(), &principal, &state).await?,
        after: query.cursor.map(|Cursor(id)| id),
        limit: query.limit.0,
    };
    let page = visible_page(&state, &principal, query).await?;
    let questions = page.inputs.iter();
    let questions = questions.filter_map(|it| Some((it, it.request.question.as_deref()?)));
    let view = InputsPage {
        data: questions.map(InputView::from).collect(),
        next_cursor: page.next,
    };
    Ok(json_response(StatusCode::OK, &view))
}

/// 202 once the answer is committed, and again for a repetition with the same `Idempotency-Key`.
async fn answer(
    State(state): State<AppState>,
    (principal, links): (Principal, LinkPrefix),
    (RunPath(id), Params(InputParam { input_id })): (RunPath, Params<InputParam>),
    _: NoQuery,
    RepeatKey(key): RepeatKey,
    body: RequestBody,
) -> Result<Response, Problem> {
    let route = format!("POST /runs/{id}/inputs/{input_id}");
    let claim = claim_of(&principal, route, key, &body);
    let applied = async {
        let request: AnswerRequest = body.json()?;
        apply(&state, &principal, id, &input_id, request, claim.clone()).await
    };
    answer_once(&state, &links, claim.as_deref(), applied).await
}

/// The JSON of an answer.
fn encode(answer: &impl Serialize, pointer: &str) -> Result<Arc<RawValue>, Problem> {
    let json = to_raw_value(answer);
    let json = json.map_err(|error| Problem::internal(error.to_string()))?;
    if json.get().len() > MAX_CONTENT_BYTES {
        let why = format!("has more than {MAX_CONTENT_BYTES} bytes as JSON");
        return Err(Problem::invalid_field(pointer, why));
    }
    Ok(Arc::from(json))
}

/// 202 once the answer is committed, and again for a repetition with the same `Idempotency-Key`.
async fn reconcile(
    State(state): State<AppState>,
    (principal, links): (Principal, LinkPrefix),
    (RunPath(id), Params(CallParam { call_id })): (RunPath, Params<CallParam>),
    _: NoQuery,
    RepeatKey(key): RepeatKey,
    body: RequestBody,
) -> Result<Response, Problem> {
    let route = format!("POST /runs/{id}/calls/{call_id}");
    let claim = claim_of(&principal, route, key, &body);
    let applied = async {
        let request: ReconcileRequest = body.json()?;
        check_may_change(&principal, &state, id).await?;
        let reconciled = request.into_answer()?;
        let answer = encode(&reconciled, "/result")?;
        let by = principal.key_name().map(str::to_owned);
        let answer = InputAnswer::to_question(Ok(answer), by, claim.clone());
        let run = state.runner.reconcile(id, &call_id, answer).await?;
        info!(
            run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
            "The tool call {} of {id} was {}", quote(&call_id), reconciled.outcome.as_str()
        );
        Ok(run)
    };
    answer_once(&state, &links, claim.as_deref(), applied).await
}

/// Answers a question for the principal, and returns the run once the answer is committed.
pub async fn apply(
    state: &AppState,
    principal: &Principal,
    id: RunId,
    input: &str,
    request: AnswerRequest,
    claim: Option<Box<IdempotencyClaim>>,
) -> Result<Run, Problem> {
    principal.require_any_scope(&[KeyScope::Run, KeyScope::Approve])?;
    check_may_change(principal, state, id).await?;
    let answer = match (request.answer, request.decline) {
        (Some(answer), None) => Ok(encode(&answer, "/answer")?),
        (None, Some(reason)) => Err(check_reason(Some(reason), "/decline")?),
        (None, None) => {
            let why = "is required, or decline with the reason";
            return Err(Problem::invalid_field("/answer", why));
        }
        (Some(_), Some(_)) => {
            let why = "must not come with an answer";
            return Err(Problem::invalid_field("/decline", why));
        }
    };
    let is_answered = answer.is_ok();
    let by = principal.key_name().map(str::to_owned);
    let answer = InputAnswer::to_question(answer, by, claim);
    let run = state.runner.decide(id, input, answer).await?;
    let verb = if is_answered { "answered" } else { "declined" };
    info!(
        run.id = %id, run.root = %run.root_id, agent = %run.agent, depth = run.depth.0,
        "The question {} of {id} was {verb}", quote(input)
    );
    Ok(run)
}
