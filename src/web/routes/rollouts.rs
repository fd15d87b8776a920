//! The versions of an agent, the share that the candidate of its rollout gets, and the candidate's promotion.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::info;

use crate::config::KeyScope::{Admin, Read};
use crate::domain::agent::Agent;
use crate::domain::evaluation::{EvalId, EvalState, EvalVersion, Evaluation};
use crate::domain::rollout::{Loss, PromotionGate};
use crate::domain::score::RunScores;
use crate::domain::timestamp_text;
use crate::domain::variant::Variant;
use crate::engine::rollouts::change::{self, ChangeError, CurrentRollout, Promotable};
use crate::store::rollouts::VersionRuns;
use crate::store::score_sums::{ScoreDimension, ScoreRow};
use crate::web::auth::Principal;
use crate::web::error::Problem;
use crate::web::evals::request::{EvalBody, NewEval, check_accepts};
use crate::web::extract::body::JsonBody;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::{AgentPath, require_agent};
use crate::web::extract::query::{NoQuery, Query};
use crate::web::problem_code::ProblemCode::{
    CandidateUnusable, EvalNotFound, GateFailed, InvalidField, NoRollout,
};
use crate::web::response::eval::EvalView;
use crate::web::response::json::json_response;
use crate::web::route::{Route, get, post};
use crate::web::routes::{evals, scores};
use crate::web::state::AppState;
use crate::web::wait::Seconds;

pub fn routes() -> Vec<Route> {
    vec![
        get("/agents/{name}/versions", [Read], versions)
            .describe("list_agent_versions", "Lists the versions of an agent that runs had")
            .details(
                "From the record: runs that were deleted do not count. The version of the last run is first, at most 200. A key \
                 sees its own runs and their scores, a key with the scope `admin` those of all.",
            )
            .response::<VersionsView>(200, "The versions.")
            .example(json!({"data": [example_version()], "rollout": example_rollout()})),
        post("/agents/{name}/rollout", [Admin], set_percent)
            .describe("set_rollout", "Sets the share of the runs that the candidate of an agent gets")
            .details(
                "In force within 5 seconds on all nodes, until `percent` in the agent's file changes. A share above 0 starts a \
                 rollout anew that was stopped. Sessions stay with the version that they have, except with 0.",
            )
            .body_required()
            .request_example("percent", "Half of the runs", json!({"percent": 50}))
            .response::<RolloutView>(200, "The rollout.")
            .example(example_rollout())
            .problems(&[NoRollout, InvalidField]),
        post("/agents/{name}/promote", [Admin], promote)
            .describe("promote_candidate", "Makes the candidate of an agent its current version")
            .details(
                "For all nodes, and recorded. Where the file has a `[gate]`, its evaluation runs first, and the candidate is refused \
                 if a condition does not hold. If the evaluation takes longer than `wait`, the response is 202: send its id then. \
                 The agent's file is written if it can be; otherwise `commit` is the text that it must have. A later change of \
                 the file wins.",
            )
            .request_example("eval", "After an evaluation that took longer", json!({"eval": EXAMPLE_EVAL}))
            .response::<PromotionView>(200, "The candidate is the current version.")
            .example(json!({
                "agent": "editor", "version": EXAMPLE_VERSION, "previous": EXAMPLE_CANDIDATE, "file": "editor.toml",
                "written": true, "reason": null, "commit": null, "eval": EXAMPLE_EVAL,
            }))
            .response::<EvalView>(202, "The evaluation of the gate has not ended.")
            .example(evals::example())
            .problems(&[NoRollout, CandidateUnusable, GateFailed, EvalNotFound, InvalidField]),
    ]
}

/// The versions of an agent.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentVersions")]
struct VersionsView {
    /// The versions that runs had.
    data: Vec<VersionView>,
    /// The rollout of the agent; null if there is none.
    rollout: Option<RolloutView>,
}

/// A version of an agent.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentVersion")]
struct VersionView {
    /// `sha256:` and the digest of the file.
    version: String,
    /// Whether it is the current version now, or the candidate; null for others.
    variant: Option<Variant>,
    /// The number of its runs.
    runs: u64,
    /// The number of its runs that failed.
    failed: u64,
    /// When its first run was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    first_run_at: Timestamp,
    /// When its last run was accepted.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    last_run_at: Timestamp,
    /// The scores of its runs, by name, also of runs that were deleted.
    scores: RunScores,
}

/// The rollout of a candidate.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Rollout")]
struct RolloutView {
    /// The version of the candidate.
    candidate: String,
    /// The candidate's file.
    file: String,
    /// The share of the runs that gets it now, from 0 to 100.
    percent: f64,
    /// From when on its runs count; null until that is recorded.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    started_at: Option<Timestamp>,
    /// When it was taken off; null if it was not.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    stopped_at: Option<Timestamp>,
    /// Why it was taken off.
    loss: Option<Loss>,
    /// When it became the current version; null if it did not.
    #[serde(serialize_with = "timestamp_text::serialize_option")]
    #[schemars(with = "Option<Timestamp>")]
    promoted_at: Option<Timestamp>,
}

impl From<CurrentRollout> for RolloutView {
    fn from(found: CurrentRollout) -> Self {
        let percent = found.percent();
        let record = found.record;
        let stopped = record.as_ref().and_then(|it| it.stopped.clone());
        let promotion = record.as_ref().and_then(|it| it.promotion.as_ref());
        Self {
            candidate: found.candidate.version.clone(),
            file: found.rollout.candidate,
            percent,
            promoted_at: promotion.map(|it| it.at),
            stopped_at: stopped.as_ref().map(|(at, _)| *at),
            loss: stopped.map(|(_, loss)| loss),
            started_at: record.map(|it| it.started_at),
        }
    }
}

/// The share that a candidate gets.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "RolloutRequest")]
#[serde(deny_unknown_fields, default)]
struct RolloutBody {
    /// From 0 to 100.
    #[schemars(required, with = "f64", range(min = 0.0, max = 100.0))]
    percent: Option<f64>,
}

/// Which evaluation holds the candidate's gate.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "PromotionRequest")]
#[serde(deny_unknown_fields, default)]
struct PromoteBody {
    /// One that an earlier request started; null starts one, if there is a gate.
    eval: Option<String>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct PromoteQuery {
    /// Seconds to wait for the evaluation of the gate, at most `server.max_wait`, which is the default.
    wait: Option<Seconds>,
}

/// A candidate that has become the current version.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Promotion")]
struct PromotionView {
    /// The name of the agent.
    agent: String,
    /// The current version.
    version: String,
    /// The version before.
    previous: String,
    /// The agent's file.
    file: String,
    /// Whether the file was written.
    written: bool,
    /// Why it was not written.
    reason: Option<String>,
    /// The text that the file must have; null if it was written.
    commit: Option<String>,
    /// The evaluation of the gate; null without one.
    eval: Option<EvalId>,
}

async fn versions(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    principal: Principal,
    _: NoQuery,
) -> Result<Response, Problem> {
    let owner = principal.owner_filter().map(str::to_owned);
    let found = state.runner.store().agent_versions(name.clone(), owner);
    let found = found.await?;
    if found.is_empty() {
        require_agent(&principal, &state, &name)?;
    }
    let by = vec![ScoreDimension::Version, ScoreDimension::Name];
    let sums = scores::visible_sums(&state, &principal, &name, by).await?;
    let agents = state.runner.catalog().current();
    let entry = agents.entries.get(&name);
    let is_of =
        |agent: Option<&Agent>, version: &str| agent.is_some_and(|it| it.version == version);
    let variant = |version: &str| match entry {
        Some(entry) if is_of(entry.agent.as_deref(), version) => Some(Variant::Current),
        Some(entry) if is_of(entry.candidate.as_deref(), version) => Some(Variant::Candidate),
        _ => None,
    };
    let data = found
        .into_iter()
        .map(|runs| version_view(variant(&runs.version), runs, &sums))
        .collect();
    // An agent that is gone, or broken, has none.
    let rollout = match change::find(&state.runner, &name).await {
        Ok(found) => found.map(RolloutView::from),
        Err(ChangeError::Store(error)) => return Err(error.into()),
        Err(_) => None,
    };
    Ok(json_response(
        StatusCode::OK,
        &VersionsView { data, rollout },
    ))
}

fn version_view(variant: Option<Variant>, runs: VersionRuns, sums: &[ScoreRow]) -> VersionView {
    let of_version = sums.iter().filter_map(|row| match &row.values[..] {
        [Some(version), Some(name)] if *version == runs.version => {
            Some((name.clone(), row.scores.clone()))
        }
        _ => None,
    });
    VersionView {
        scores: of_version.collect(),
        variant,
        runs: runs.runs,
        failed: runs.failed,
        first_run_at: runs.first,
        last_run_at: runs.last,
        version: runs.version,
    }
}

async fn set_percent(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    principal: Principal,
    _: NoQuery,
    JsonBody(body): JsonBody<RolloutBody>,
) -> Result<Response, Problem> {
    require_agent(&principal, &state, &name)?;
    let percent = scores::required(body.percent, "/percent")?;
    if !(0.0..=100.0).contains(&percent) {
        return Err(Problem::invalid_field("/percent", "must be from 0 to 100"));
    }
    let found = change::set_percent(&state.runner, &name, percent).await?;
    Ok(json_response(StatusCode::OK, &RolloutView::from(found)))
}

async fn promote(
    State(state): State<AppState>,
    AgentPath(name): AgentPath,
    (principal, links): (Principal, LinkPrefix),
    Query(query): Query<PromoteQuery>,
    JsonBody(body): JsonBody<PromoteBody>,
) -> Result<Response, Problem> {
    require_agent(&principal, &state, &name)?;
    let max_wait = state.settings.max_wait;
    let wait = query.wait.map_or(max_wait, Seconds::duration);
    let deadline = Instant::now() + wait.min(max_wait);
    let mut promotable = change::promotable(&state.runner, &name).await?;
    let mut held = None;
    if let Some(gate) = promotable.agent().gate.clone() {
        let eval = match body.eval {
            Some(id) => evaluated(&state, &principal, (&promotable, &gate), &id).await?,
            None => evaluate(&state, &principal, &promotable, &gate).await?,
        };
        let eval = evals::wait_for_end(&state, eval.id, deadline).await?;
        if eval.finished_at.is_none() {
            let view = EvalView::new(eval, &links);
            return Ok(json_response(StatusCode::ACCEPTED, &view));
        }
        check_held(&eval)?;
        // Files may have changed meanwhile.
        promotable = change::promotable(&state.runner, &name).await?;
        check_same(&eval, &promotable)?;
        held = Some(eval.id);
    }
    let promoted = promotable.promote(&state.runner).await?;
    let file = promoted.path.file_name().unwrap_or_default();
    let (commit, reason) = promoted.unwritten.unzip();
    let view = PromotionView {
        agent: name,
        version: promoted.version,
        previous: promoted.from,
        file: file.to_string_lossy().into_owned(),
        written: commit.is_none(),
        reason,
        commit,
        eval: held,
    };
    Ok(json_response(StatusCode::OK, &view))
}

/// Starts the evaluation of a gate: the candidate against the current version.
async fn evaluate(
    state: &AppState,
    principal: &Principal,
    promotable: &Promotable,
    gate: &PromotionGate,
) -> Result<Evaluation, Problem> {
    let agent = &promotable.agent().name;
    let body = EvalBody::of_gate(agent, &promotable.text, gate);
    let requested = Box::pin(NewEval::check(state, principal, body)).await?;
    check_accepts(state, principal).await?;
    let eval = requested.accept(state).await?;
    info!(agent = %agent, "{} decides whether the candidate of agent {agent} becomes its current version", eval.id);
    Ok(eval)
}

/// An evaluation that an earlier request has started.
async fn evaluated(
    state: &AppState,
    principal: &Principal,
    (promotable, gate): (&Promotable, &PromotionGate),
    id: &str,
) -> Result<Evaluation, Problem> {
    let eval = evals::visible_eval(state, principal, id).await?;
    check_same(&eval, promotable)?;
    let request = &eval.request;
    let has_scorers = gate.scorers.is_empty() || gate.scorers == request.scorers;
    let is_of_gate = request.dataset.as_ref() == Some(&gate.dataset) && request.gates == gate.gates;
    match is_of_gate && has_scorers {
        true => Ok(eval),
        false => Err(Problem::invalid_field(
            "/eval",
            format!("{} is not the evaluation of the gate", eval.id),
        )),
    }
}

/// Whether the evaluation compares what would become current with what is.
fn check_same(eval: &Evaluation, promotable: &Promotable) -> Result<(), Problem> {
    let current = promotable.agent();
    let version = |version: &str| EvalVersion {
        agent: current.name.clone(),
        version: version.to_owned(),
    };
    let compared = [version(&promotable.version), version(&current.version)];
    match eval.request.versions == compared {
        true => Ok(()),
        false => Err(Problem::invalid_field(
            "/eval",
            format!("{} compares other versions; evaluate again", eval.id),
        )),
    }
}

fn check_held(eval: &Evaluation) -> Result<(), Problem> {
    let gates = eval.result.iter().flat_map(|result| &result.gates);
    let fallen: Vec<String> = gates
        .filter(|gate| !gate.held)
        .map(|gate| format!("{}: {}", gate.gate, gate.why))
        .collect();
    let why = match (eval.state, fallen.is_empty()) {
        (EvalState::Completed, true) => return Ok(()),
        (EvalState::Completed, false) => fallen.join("; "),
        (state, _) => {
            let reason = eval.reason.as_deref().unwrap_or_default();
            format!("it is {}: {reason}", state.as_str())
        }
    };
    let detail = format!("the gate does not hold ({}): {why}", eval.id);
    Err(Problem::new(GateFailed, detail))
}

const EXAMPLE_EVAL: &str = "eval_019a1f3c-c000-7e43-8f88-6c419d0e1f2a";
const EXAMPLE_VERSION: &str =
    "sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752";
const EXAMPLE_CANDIDATE: &str =
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

fn example_version() -> Value {
    json!({
        "version": EXAMPLE_VERSION, "variant": "current", "runs": 1840, "failed": 12,
        "first_run_at": "2026-02-03T08:00:00.000Z", "last_run_at": "2026-03-01T09:30:00.000Z",
        "scores": {"grounded": {"n": 184, "mean": 0.83}},
    })
}

fn example_rollout() -> Value {
    json!({
        "candidate": EXAMPLE_CANDIDATE, "file": "editor.next.toml", "percent": 10.0,
        "started_at": "2026-02-28T12:00:00.000Z", "stopped_at": null, "loss": null, "promoted_at": null,
    })
}
