//! Reads a request for an evaluation, with all that it names, and records it.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::catalog::datasets;
use crate::config::KeyScope;
use crate::domain::agent::tool_use::ToolUse;
use crate::domain::counted::counted;
use crate::domain::dataset::{self, Case, DatasetError};
use crate::domain::evaluation::{
    EvalCase, EvalDefinition, EvalId, EvalRequest, EvalState, Evaluation, MAX_REPEAT, MAX_RUNS,
    MAX_SCORERS,
};
use crate::domain::gate::Gate;
use crate::domain::rollout::PromotionGate;
use crate::domain::run::now;
use crate::domain::usage::Cost;
use crate::engine::blocking::run_blocking;
use crate::engine::evals::definitions::{self, ResolvedVersion, VersionError, VersionRef};
use crate::engine::evals::plan;
use crate::settings::choice::Choice;
use crate::settings::suggestion;
use crate::store::StoreError;
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::extract::path::unknown_agent;
use crate::web::extract::run_request;
use crate::web::problem_code::ProblemCode::AgentInvalid;
use crate::web::state::AppState;

/// Cases that one transaction adds, unless they are long.
const MAX_WRITE_CASES: usize = 200;
const MAX_WRITE_BYTES: usize = 1 << 20;
/// Errors of a dataset that a problem names.
const MAX_SHOWN_ERRORS: usize = 3;

/// An evaluation that can be accepted.
pub struct NewEval {
    eval: Evaluation,
    definitions: Vec<EvalDefinition>,
    cases: Vec<Case>,
}

impl NewEval {
    /// Resolves what the request names.
    pub async fn check(
        state: &AppState,
        principal: &Principal,
        body: EvalBody,
    ) -> Result<Self, Problem> {
        refuse_unsupported(&body)?;
        let versions = versions(state, principal, &body).await?;
        let [new, ..] = &versions[..] else {
            return Err(Problem::internal("an evaluation without a version"));
        };
        let scorers = chosen_scorers(body.scorers.as_deref(), new)?;
        let gates = body.gates.unwrap_or_default();
        check_gates(&gates, &scorers, versions.len() > 1)?;
        let budget = match body.budget {
            Some(usd) if !(usd.is_finite() && usd > 0.0) => {
                return Err(Problem::invalid_field("/budget", "must be above 0"));
            }
            budget => budget.map(Cost::from_usd),
        };
        let repeat = body.repeat.unwrap_or(1);
        if !(1..=MAX_REPEAT).contains(&repeat) {
            let why = format!("must be from 1 to {MAX_REPEAT}");
            return Err(Problem::invalid_field("/repeat", why));
        }
        let cases = read_cases(state, body.dataset.as_deref(), body.cases).await?;
        let tools = tool_use(principal, body.tools.as_deref(), &cases)?;
        let runs_of_version = cases.len() as u64 * u64::from(repeat);
        let planned = runs_of_version * versions.len() as u64;
        if planned > MAX_RUNS {
            let why = format!("gives {planned} runs; an evaluation has at most {MAX_RUNS}");
            return Err(Problem::invalid_field("/repeat", why));
        }
        let mut mean_costs = Vec::new();
        for version in &versions {
            mean_costs.push(definitions::mean_cost(&state.runner, &version.version.agent).await?);
        }
        let eval = Evaluation {
            id: EvalId::new(),
            owner: principal.key_name().map(str::to_owned),
            agent: new.version.agent.clone(),
            request: EvalRequest {
                versions: versions.iter().map(|it| it.version.clone()).collect(),
                dataset: body.dataset,
                scorers,
                tools,
                repeat,
                budget,
                gates,
                estimate: plan::estimate(&mean_costs, runs_of_version),
            },
            state: EvalState::Queued,
            planned,
            ended: 0,
            spent: Cost::default(),
            created_at: now(),
            finished_at: None,
            reason: None,
            result: None,
        };
        let definitions = versions.into_iter().map(|it| it.definition).collect();
        Ok(Self {
            eval,
            definitions,
            cases,
        })
    }

    /// Records its cases, then the evaluation, and has it driven.
    pub async fn accept(self, state: &AppState) -> Result<Evaluation, StoreError> {
        accept(state, self.eval.clone(), self.definitions, self.cases).await?;
        Ok(self.eval)
    }
}

/// A request for an evaluation.
#[derive(Default, Deserialize, JsonSchema)]
#[schemars(rename = "EvalRequest")]
#[serde(deny_unknown_fields, default)]
pub struct EvalBody {
    /// The agent in its new version; instead of `definition`.
    agent: Option<String>,
    /// The text of an agent's file, which is the new version; its key `name` names the agent.
    definition: Option<String>,
    /// The name of a dataset of the daemon, instead of `cases`.
    dataset: Option<String>,
    /// Not supported yet: recorded runs since then are the cases.
    since: Option<String>,
    /// Cases as a dataset has them.
    #[schemars(with = "Option<Vec<serde_json::Map<String, Value>>>")]
    cases: Option<Vec<Box<RawValue>>>,
    /// What it is compared with; null for nothing.
    against: Option<Against>,
    /// The names of scorers in the new version's file; null for all of them.
    #[schemars(length(max = 32))]
    scorers: Option<Vec<String>>,
    /// What happens to calls of tools: `none` offers them, and a call is a divergence, which ends the case; `live` executes them.
    /// Calls of other agents are performed in both. `recorded`, the default of cases with a `run`, is not supported yet.
    tools: Option<String>,
    /// Not supported yet: what happens to calls that have no recorded result.
    unknown: Option<String>,
    /// Only `live`: models are requested.
    models: Option<String>,
    /// How often each case runs.
    #[schemars(range(min = 1, max = 100))]
    repeat: Option<u32>,
    /// The most that its runs and their scores may cost in USD: then it stops with what it has.
    budget: Option<f64>,
    /// Conditions for the result, such as `grounded >= -0.02` or `cost <= 1.1x`.
    #[schemars(length(max = 32))]
    gates: Option<Vec<String>>,
}

impl EvalBody {
    /// The evaluation of a gate: what the text defines against the agent as it is.
    pub fn of_gate(agent: &str, text: &str, gate: &PromotionGate) -> Self {
        Self {
            definition: Some(text.to_owned()),
            dataset: Some(gate.dataset.clone()),
            against: Some(Against::Name(agent.to_owned())),
            scorers: Some(gate.scorers.clone()).filter(|it| !it.is_empty()),
            gates: Some(gate.gates.clone()),
            ..Self::default()
        }
    }
}

/// The name of an agent, `sha256:` and the digest of a file that the agent had, or the text of a file.
#[derive(Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Against {
    Name(String),
    Text(AgainstText),
}

/// An old version that is no agent of the daemon.
#[derive(Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(deny_unknown_fields)]
struct AgainstText {
    /// The text of an agent's file.
    definition: String,
}

/// Refuses what is described and does not work yet, instead of doing something else.
fn refuse_unsupported(body: &EvalBody) -> Result<(), Problem> {
    let against_record = matches!(&body.against, Some(Against::Name(name)) if name == "recorded");
    let not_yet = [
        (body.since.is_some(), "/since", "cases from the record"),
        (against_record, "/against", "comparing with the record"),
        (
            body.tools.as_deref() == Some("recorded"),
            "/tools",
            "recorded results of tools",
        ),
        (
            body.unknown.is_some(),
            "/unknown",
            "recorded results of tools",
        ),
        (
            body.models.as_deref() == Some("recorded"),
            "/models",
            "recorded replies of models",
        ),
    ];
    if let Some((_, pointer, what)) = not_yet.iter().find(|(is_used, _, _)| *is_used) {
        let why = format!("{what}: this is not there yet");
        return Err(Problem::invalid_field(*pointer, why));
    }
    match body.models.as_deref() {
        None | Some("live") => Ok(()),
        Some(other) => Err(Problem::invalid_field(
            "/models",
            format!("is {}; it must be live", quote(other)),
        )),
    }
}

/// The new version, and the one that it is compared with.
async fn versions(
    state: &AppState,
    principal: &Principal,
    body: &EvalBody,
) -> Result<Vec<ResolvedVersion>, Problem> {
    let new = match (&body.agent, &body.definition) {
        (Some(agent), None) => {
            check_agent(state, principal, agent)?;
            ("/agent", VersionRef::Agent(agent))
        }
        (None, Some(text)) => ("/definition", VersionRef::Text(text)),
        _ => {
            let why = "is required, or definition instead, but not both";
            return Err(Problem::invalid_field("/agent", why));
        }
    };
    let mut versions = vec![resolve(state, principal, new).await?];
    let agent = versions[0].version.agent.clone();
    let old = match &body.against {
        None => return Ok(versions),
        Some(Against::Text(text)) => ("/against/definition", VersionRef::Text(&text.definition)),
        Some(Against::Name(version)) if version.starts_with("sha256:") => {
            let agent = &agent;
            ("/against", VersionRef::Recorded { agent, version })
        }
        Some(Against::Name(name)) => {
            check_agent(state, principal, name)?;
            ("/against", VersionRef::Agent(name))
        }
    };
    versions.push(resolve(state, principal, old).await?);
    Ok(versions)
}

fn check_agent(state: &AppState, principal: &Principal, agent: &str) -> Result<(), Problem> {
    let is_known = state.runner.catalog().current().entries.contains_key(agent);
    match is_known && principal.can_use_agent(agent) {
        true => Ok(()),
        false => Err(unknown_agent(principal, state, agent)),
    }
}

async fn resolve(
    state: &AppState,
    principal: &Principal,
    (pointer, version): (&str, VersionRef<'_>),
) -> Result<ResolvedVersion, Problem> {
    if matches!(version, VersionRef::Text(_)) {
        principal.require_scope(KeyScope::Admin)?;
    }
    let resolved = Box::pin(definitions::resolve(&state.runner, version, None)).await;
    let resolved = resolved.map_err(|error| match (error, version) {
        (VersionError::Store(error), _) => error.into(),
        (VersionError::Load(error), VersionRef::Text(_)) => {
            Problem::field(AgentInvalid, pointer, error.to_string())
        }
        (VersionError::Load(error), _) => error.into(),
        (error, _) => Problem::invalid_field(pointer, error.to_string()),
    })?;
    let agent = &resolved.version.agent;
    match principal.can_use_agent(agent) {
        true => Ok(resolved),
        false => Err(unknown_agent(principal, state, agent)),
    }
}

/// The scorers of the new version that the request names, or all of them.
fn chosen_scorers(
    names: Option<&[String]>,
    version: &ResolvedVersion,
) -> Result<Vec<String>, Problem> {
    let known: Vec<&str> = version.agent.scorers.iter().map(|it| &*it.name).collect();
    let Some(names) = names else {
        return Ok(known.into_iter().map(str::to_owned).collect());
    };
    if names.len() > MAX_SCORERS {
        let why = format!("has more than {MAX_SCORERS} names");
        return Err(Problem::invalid_field("/scorers", why));
    }
    let mut chosen: Vec<String> = Vec::new();
    for (index, name) in names.iter().enumerate() {
        if !known.contains(&name.as_str()) {
            let agent = &version.version.agent;
            let hint = suggestion::did_you_mean(name, known.iter().copied());
            let why = format!(
                "agent {agent} has no scorer {}{}",
                quote(name),
                suggestion::clause(hint)
            );
            return Err(Problem::invalid_field(format!("/scorers/{index}"), why));
        }
        if !chosen.contains(name) {
            chosen.push(name.clone());
        }
    }
    Ok(chosen)
}

fn check_gates(gates: &[String], scorers: &[String], has_old: bool) -> Result<(), Problem> {
    if gates.len() > MAX_SCORERS {
        let why = format!("has more than {MAX_SCORERS} gates");
        return Err(Problem::invalid_field("/gates", why));
    }
    for (index, text) in gates.iter().enumerate() {
        let invalid = |why: String| Problem::invalid_field(format!("/gates/{index}"), why);
        let gate = Gate::parse(text).map_err(invalid)?;
        if let Some(scorer) = gate
            .scorer()
            .filter(|it| !scorers.iter().any(|name| name == it))
        {
            return Err(invalid(format!(
                "needs the scorer {}, which is not used",
                quote(scorer)
            )));
        }
        if gate.needs_old_version() && !has_old {
            return Err(invalid(
                "compares with an old version: name it in against".to_owned(),
            ));
        }
    }
    Ok(())
}

/// What happens to calls of tools.
fn tool_use(
    principal: &Principal,
    tools: Option<&str>,
    cases: &[Case],
) -> Result<ToolUse, Problem> {
    let invalid = |why: String| Problem::invalid_field("/tools", why);
    let Some(tools) = tools else {
        return match cases.iter().find(|case| case.run.is_some()) {
            None => Ok(ToolUse::None),
            Some(case) => Err(invalid(format!(
                "is recorded for case {}, which comes from a run, and this is not there yet: say none or live",
                quote(&case.id)
            ))),
        };
    };
    let tools = ToolUse::named(tools).ok_or_else(|| {
        let names = ToolUse::list_names();
        invalid(format!("is {}; it must be one of: {names}", quote(tools)))
    })?;
    if tools == ToolUse::Live {
        principal.require_scope(KeyScope::Admin)?;
    }
    Ok(tools)
}

/// The cases of the request, or of a dataset's file.
async fn read_cases(
    state: &AppState,
    dataset: Option<&str>,
    cases: Option<Vec<Box<RawValue>>>,
) -> Result<Vec<Case>, Problem> {
    let settings = Arc::clone(&state.settings);
    let check = move |request: &str| {
        let checked = run_request::check_case(request, settings.max_labels, settings.attachments);
        checked.map_err(|problem| problem.detail().to_owned())
    };
    let (pointer, read) = match (dataset, cases) {
        (Some(name), None) => {
            let path = datasets::find(&state.settings.datasets, name);
            let path =
                path.map_err(|error| Problem::invalid_field("/dataset", error.to_string()))?;
            (
                "/dataset",
                run_blocking(move || datasets::read(&path, &check)).await,
            )
        }
        (None, Some(cases)) => {
            let read = move || {
                let lines = cases.iter().map(|case| case.get().as_bytes());
                dataset::parse_lines(lines, &check)
            };
            ("/cases", run_blocking(read).await)
        }
        _ => {
            let why = "is required, or cases instead, but not both";
            return Err(Problem::invalid_field("/dataset", why));
        }
    };
    let cases = read.map_err(|errors| Problem::invalid_field(pointer, describe(&errors)))?;
    match cases.is_empty() {
        true => Err(Problem::invalid_field(pointer, "has no case")),
        false => Ok(cases),
    }
}

fn describe(errors: &[DatasetError]) -> String {
    let shown = errors.iter().take(MAX_SHOWN_ERRORS);
    let mut texts: Vec<String> = shown.map(ToString::to_string).collect();
    if errors.len() > MAX_SHOWN_ERRORS {
        let more = errors.len() - MAX_SHOWN_ERRORS;
        texts.push(format!("and {}", counted(more as u64, "more error")));
    }
    texts.join("; ")
}

async fn accept(
    state: &AppState,
    eval: Evaluation,
    definitions: Vec<EvalDefinition>,
    cases: Vec<Case>,
) -> Result<(), StoreError> {
    let store = state.runner.store();
    let (id, mut part, mut bytes) = (eval.id, Vec::new(), 0);
    for (number, case) in (0..).zip(cases) {
        bytes += case.request.len();
        part.push(EvalCase {
            number,
            id: case.id,
            request: case.request,
            expected: case.expected,
            source: case.run,
        });
        if part.len() >= MAX_WRITE_CASES || bytes >= MAX_WRITE_BYTES {
            store.add_eval_cases(id, std::mem::take(&mut part)).await?;
            bytes = 0;
        }
    }
    store.add_eval_cases(id, part).await?;
    store.accept_eval(eval, definitions).await?;
    state.evals.wake();
    Ok(())
}
