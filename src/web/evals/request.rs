//! Reads a request for an evaluation, with all that it names, and records it.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::catalog::datasets;
use crate::config::KeyScope;
use crate::domain::agent::tool_use::{ToolUse, UnknownCalls};
use crate::domain::counted::counted;
use crate::domain::dataset::{self, Case, DatasetError};
use crate::domain::evaluation::{
    EvalCase, EvalDefinition, EvalId, EvalRequest, EvalState, EvalVersion, Evaluation, LAST,
    MAX_RECORDED_CASES, MAX_REPEAT, MAX_RUNS, MAX_SCORERS, RECORDED,
};
use crate::domain::gate::Gate;
use crate::domain::ignore::Ignore;
use crate::domain::rollout::PromotionGate;
use crate::domain::run::{Status, are_marks, now};
use crate::domain::schedule::EvalBaseline;
use crate::domain::usage::Cost;
use crate::engine::blocking::run_blocking;
use crate::engine::evals::definitions::{self, ResolvedVersion, VersionError, VersionRef};
use crate::engine::evals::plan;
use crate::engine::history::tree_reads;
use crate::engine::request::StartError;
use crate::engine::schedules::scheduler::DueEval;
use crate::settings::choice::Choice;
use crate::settings::{quantity, suggestion};
use crate::store::StoreError;
use crate::store::evals::EvalQuery;
use crate::store::runs::RunFilter;
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::evals::recorded_case;
use crate::web::extract::path::unknown_agent;
use crate::web::extract::run_request;
use crate::web::problem_code::ProblemCode::{AgentInvalid, QueueFull};
use crate::web::response::run::RunView;
use crate::web::state::AppState;

/// Cases that one transaction adds, unless they are long.
const MAX_WRITE_CASES: usize = 200;
const MAX_WRITE_BYTES: usize = 1 << 20;
/// Runs of one page of the record, and the most pages that are read for cases.
const PAGE_RUNS: usize = 50;
const MAX_PAGES: usize = 200;
/// Evaluations among which the last one is found.
const MAX_EARLIER: usize = 200;
/// Most patterns to ignore, and their length.
const MAX_PATTERNS: usize = 16;
const MAX_PATTERN_BYTES: usize = 500;
/// Errors of a dataset that a problem names.
const MAX_SHOWN_ERRORS: usize = 3;

/// Evaluations of one key that have not ended.
const MAX_UNFINISHED: usize = 100;
const RETRY_SECONDS: u64 = 10;

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
        let unknown = unknown_calls(state, principal, body.unknown.as_deref())?;
        let versions = versions(state, principal, &body, &unknown).await?;
        let [new, ..] = &versions[..] else {
            return Err(Problem::internal("an evaluation without a version"));
        };
        let agent = new.version.agent.clone();
        let scorers = chosen_scorers(body.scorers.as_deref(), new)?;
        let is_against_recorded = body.is_against(RECORDED);
        let earlier = match body.is_against(LAST) {
            true => last_eval(state, principal, &new.version, &body).await?,
            false => None,
        };
        let gates = body.gates.unwrap_or_default();
        let has_old = versions.len() > 1 || is_against_recorded || earlier.is_some();
        check_gates(&gates, &scorers, has_old)?;
        let ignore = body.ignore.unwrap_or_default();
        check_ignore(&ignore)?;
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
        let source_owner = source_owner(principal);
        let named = NamedCases {
            dataset: body.dataset.as_deref(),
            cases: body.cases,
            since: body.since.as_deref(),
            limit: body.limit,
        };
        let wanted = WantedRuns {
            agent: &agent,
            owner: source_owner.as_deref(),
        };
        let (cases, since) = named.read(state, wanted).await?;
        let tools = tool_use(principal, body.tools.as_deref(), &cases)?;
        if tools != ToolUse::Recorded && unknown != UnknownCalls::Stop {
            let why = "is for recorded tools: set tools to recorded";
            return Err(Problem::invalid_field("/unknown", why));
        }
        if let Some(case) = cases
            .iter()
            .find(|it| is_against_recorded && it.run.is_none())
        {
            let why = format!("is recorded, but case {} has no run", quote(&case.id));
            return Err(Problem::invalid_field("/against", why));
        }
        let runs_of_version = cases.len() as u64 * u64::from(repeat);
        let mut eval_versions: Vec<EvalVersion> =
            versions.iter().map(|it| it.version.clone()).collect();
        if is_against_recorded {
            eval_versions.push(EvalVersion {
                agent: agent.clone(),
                version: RECORDED.to_owned(),
            });
        }
        eval_versions.extend(earlier.as_ref().map(|_| new.version.clone()));
        let planned = runs_of_version * eval_versions.len() as u64;
        if planned > MAX_RUNS {
            let why = format!("gives {planned} runs; an evaluation has at most {MAX_RUNS}");
            return Err(Problem::invalid_field("/repeat", why));
        }
        let mut mean_costs = Vec::new();
        for version in &versions {
            mean_costs.push(definitions::mean_cost(&state.runner, &version.version.agent).await?);
        }
        let eval = Evaluation {
            id: body.id.unwrap_or_default(),
            owner: principal.key_name().map(str::to_owned),
            agent,
            request: EvalRequest {
                versions: eval_versions,
                dataset: body.dataset,
                since,
                scorers,
                tools,
                unknown,
                ignore,
                is_against_recorded,
                against_eval: earlier.map(|earlier| earlier.id),
                schedule: body.schedule,
                source_owner,
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
    /// The name of a dataset of the daemon, instead of `cases` or `since`.
    dataset: Option<String>,
    /// The cases are the newest completed runs of the agent since then: an age such as `30d`, or a time (RFC 3339).
    since: Option<String>,
    /// With `since`, the most cases.
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<u32>,
    /// Cases as a dataset has them.
    #[schemars(with = "Option<Vec<serde_json::Map<String, Value>>>")]
    cases: Option<Vec<Box<RawValue>>>,
    /// What it is compared with; null for nothing.
    against: Option<Against>,
    #[serde(skip)]
    id: Option<EvalId>,
    #[serde(skip)]
    schedule: Option<String>,
    /// The names of scorers in the new version's file; null for all of them.
    #[schemars(length(max = 32))]
    scorers: Option<Vec<String>>,
    /// What happens to calls of tools: `none` offers them, and a call is a divergence, which ends the case; `live` executes them.
    /// `recorded`, the default if a case has a `run`, gives them the results of the same calls in the record of that run. Calls of
    /// other agents are always performed.
    tools: Option<String>,
    /// What happens to calls that have no recorded result: `stop`, the default, as `none`; `safe` performs built-in tools that read
    /// and HTTP tools with the method GET; `agent:NAME` has this agent make up the result.
    unknown: Option<String>,
    /// Regular expressions of what makes no difference in the arguments of calls.
    #[schemars(length(max = 16))]
    ignore: Option<Vec<String>>,
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
    /// The evaluation of a schedule: it has this id.
    pub fn of_schedule(due: &DueEval) -> Self {
        let against = due.eval.against.map(|EvalBaseline::Last| LAST.to_owned());
        Self {
            agent: Some(due.agent.clone()),
            dataset: Some(due.eval.dataset.clone()),
            against: against.map(Against::Name),
            id: Some(due.id),
            schedule: Some(due.schedule.clone()),
            ..Self::default()
        }
    }

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

/// The name of an agent, `sha256:` and the digest of a file that the agent had, `recorded` for the runs that the cases come from, `last`
/// for the last completed evaluation of the same version over the same dataset, or the text of a file.
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

impl EvalBody {
    fn is_against(&self, expected: &str) -> bool {
        matches!(&self.against, Some(Against::Name(name)) if name == expected)
    }
}

/// Refuses what is described and does not work yet, instead of doing something else.
fn refuse_unsupported(body: &EvalBody) -> Result<(), Problem> {
    if body.models.as_deref() == Some("recorded") {
        let why = "recorded replies of models: this is not there yet";
        return Err(Problem::invalid_field("/models", why));
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
    unknown: &UnknownCalls,
) -> Result<Vec<ResolvedVersion>, Problem> {
    let simulator = match unknown {
        UnknownCalls::Agent(name) => Some(name.as_str()),
        UnknownCalls::Stop | UnknownCalls::Safe => None,
    };
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
    let mut versions = vec![resolve(state, principal, new, simulator).await?];
    let agent = versions[0].version.agent.clone();
    let old = match &body.against {
        None => return Ok(versions),
        Some(Against::Name(name)) if name == RECORDED || name == LAST => return Ok(versions),
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
    versions.push(resolve(state, principal, old, simulator).await?);
    Ok(versions)
}

/// The newest completed evaluation of the same version over the same dataset; `None` if there is none among the newest of the agent.
async fn last_eval(
    state: &AppState,
    principal: &Principal,
    version: &EvalVersion,
    body: &EvalBody,
) -> Result<Option<Evaluation>, Problem> {
    if body.dataset.is_none() {
        let why = "is last, which needs a dataset";
        return Err(Problem::invalid_field("/against", why));
    }
    let query = EvalQuery {
        owner: principal.owner_filter().map(str::to_owned),
        agent: Some(version.agent.clone()),
        before: None,
        limit: MAX_EARLIER,
    };
    let mut evals = state.runner.store().evals(query).await?.into_iter();
    Ok(evals.find(|eval| {
        let request = &eval.request;
        eval.state == EvalState::Completed
            && request.dataset == body.dataset
            && request.versions.first() == Some(version)
            && body
                .tools
                .as_ref()
                .is_none_or(|tools| tools == request.tools.as_str())
    }))
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
    simulator: Option<&str>,
) -> Result<ResolvedVersion, Problem> {
    if matches!(version, VersionRef::Text(_)) {
        principal.require_scope(KeyScope::Admin)?;
    }
    let resolved = Box::pin(definitions::resolve(&state.runner, version, simulator)).await;
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

/// The key whose recorded runs may be read; `None` if all may.
fn source_owner(principal: &Principal) -> Option<String> {
    // An admin of some agents reads its own: a case may come from a run of any agent.
    let is_limited = principal.owner_filter().is_some() || principal.admin_globs().is_some();
    let name = principal.key_name().filter(|_| is_limited);
    name.map(str::to_owned)
}

/// What happens to calls that have no recorded result.
fn unknown_calls(
    state: &AppState,
    principal: &Principal,
    unknown: Option<&str>,
) -> Result<UnknownCalls, Problem> {
    let Some(text) = unknown else {
        return Ok(UnknownCalls::Stop);
    };
    let unknown = text.parse();
    let unknown = unknown.map_err(|why: String| {
        Problem::invalid_field("/unknown", format!("is {}; it {why}", quote(text)))
    })?;
    if let UnknownCalls::Agent(name) = &unknown {
        check_agent(state, principal, name)?;
    }
    Ok(unknown)
}

fn check_ignore(ignore: &[String]) -> Result<(), Problem> {
    if ignore.len() > MAX_PATTERNS {
        let why = format!("has more than {MAX_PATTERNS} patterns");
        return Err(Problem::invalid_field("/ignore", why));
    }
    let long = ignore.iter().position(|it| it.len() > MAX_PATTERN_BYTES);
    if let Some(index) = long {
        let why = format!("has more than {MAX_PATTERN_BYTES} bytes");
        return Err(Problem::invalid_field(format!("/ignore/{index}"), why));
    }
    let compiled = Ignore::new(ignore);
    compiled.map(drop).map_err(|(index, error)| {
        let why = format!("is not a regular expression: {error}");
        Problem::invalid_field(format!("/ignore/{index}"), why)
    })
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
        return Ok(match cases.iter().any(|case| case.run.is_some()) {
            true => ToolUse::Recorded,
            false => ToolUse::None,
        });
    };
    let tools = ToolUse::named(tools).ok_or_else(|| {
        let names = ToolUse::list_names();
        invalid(format!("is {}; it must be one of: {names}", quote(tools)))
    })?;
    match tools {
        ToolUse::Live => principal.require_scope(KeyScope::Admin)?,
        ToolUse::Recorded if cases.iter().all(|case| case.run.is_none()) => {
            return Err(invalid("is recorded, but no case has a run".to_owned()));
        }
        ToolUse::Recorded | ToolUse::None => {}
    }
    Ok(tools)
}

/// Where the cases come from.
struct NamedCases<'b> {
    dataset: Option<&'b str>,
    cases: Option<Vec<Box<RawValue>>>,
    since: Option<&'b str>,
    limit: Option<u32>,
}

/// Whose recorded runs may be cases.
struct WantedRuns<'r> {
    agent: &'r str,
    owner: Option<&'r str>,
}

impl NamedCases<'_> {
    /// The cases, and since when they are recorded runs.
    async fn read(
        self,
        state: &AppState,
        wanted: WantedRuns<'_>,
    ) -> Result<(Vec<Case>, Option<Timestamp>), Problem> {
        let settings = Arc::clone(&state.settings);
        let check = move |request: &str| {
            let checked =
                run_request::check_case(request, settings.max_labels, settings.attachments);
            checked.map_err(|problem| problem.detail().to_owned())
        };
        if self.since.is_none() && self.limit.is_some() {
            return Err(Problem::invalid_field("/limit", "is for since"));
        }
        let mut since = None;
        let (pointer, read) = match (self.dataset, self.cases, self.since) {
            (Some(name), None, None) => {
                let path = datasets::find(&state.settings.datasets, name);
                let path =
                    path.map_err(|error| Problem::invalid_field("/dataset", error.to_string()))?;
                (
                    "/dataset",
                    run_blocking(move || datasets::read(&path, &check)).await,
                )
            }
            (None, Some(cases), None) => {
                let read = move || {
                    let lines = cases.iter().map(|case| case.get().as_bytes());
                    dataset::parse_lines(lines, &check)
                };
                ("/cases", run_blocking(read).await)
            }
            (None, None, Some(text)) => {
                let time = parse_since(text)?;
                since = Some(time);
                let limit = self.limit.unwrap_or(MAX_RECORDED_CASES);
                if !(1..=MAX_RECORDED_CASES).contains(&limit) {
                    let why = format!("must be from 1 to {MAX_RECORDED_CASES}");
                    return Err(Problem::invalid_field("/limit", why));
                }
                let lines = recorded_lines(state, wanted, time, limit as usize).await?;
                let read = move || {
                    // What the API refuses today, because it was taken under other limits, is left out.
                    let cases = lines.iter().filter_map(|line| {
                        let parsed = dataset::parse_lines([line.as_bytes()].into_iter(), &check);
                        parsed.ok()
                    });
                    Ok(cases.flatten().collect())
                };
                ("/since", run_blocking(read).await)
            }
            _ => {
                let why = "is required, or cases or since instead, but only one of them";
                return Err(Problem::invalid_field("/dataset", why));
            }
        };
        let cases = read.map_err(|errors| Problem::invalid_field(pointer, describe(&errors)))?;
        match cases.is_empty() {
            true => Err(Problem::invalid_field(pointer, "has no case")),
            false => Ok((cases, since)),
        }
    }
}

/// A time, or the time that was so long ago.
fn parse_since(text: &str) -> Result<Timestamp, Problem> {
    let ago = quantity::parse_seconds(text).and_then(|seconds| i64::try_from(seconds).ok());
    let time = match ago {
        Some(seconds) => now().checked_sub(SignedDuration::from_secs(seconds)).ok(),
        None => text.parse().ok(),
    };
    time.ok_or_else(|| {
        let why = format!(
            "is {}; it must be an age such as 30d, or a time such as 2026-03-01T09:30:00Z",
            quote(text)
        );
        Problem::invalid_field("/since", why)
    })
}

/// The lines of the newest completed runs without marks, newest first.
async fn recorded_lines(
    state: &AppState,
    wanted: WantedRuns<'_>,
    since: Timestamp,
    limit: usize,
) -> Result<Vec<String>, Problem> {
    let store = state.runner.store();
    let (mut lines, mut bytes, mut before) = (Vec::new(), 0, None);
    for _ in 0..MAX_PAGES {
        let filter = RunFilter {
            agent: Some(wanted.agent.to_owned()),
            owner: wanted.owner.map(str::to_owned),
            status: Some(Status::Completed),
            since: Some(since),
            before,
            limit: PAGE_RUNS,
            ..RunFilter::default()
        };
        let page = store.list(filter).await?;
        let runs = page.runs.iter().filter(|run| !are_marks(&run.labels));
        for run in runs {
            let _permit = tree_reads::acquire(wanted.owner).await;
            let recorded = recorded_case::read(store.as_ref(), run.id).await?;
            let view = serde_json::to_value(RunView::new(run, "", now()));
            let view = view.map_err(|error| Problem::internal(error.to_string()))?;
            if let Ok(case) = recorded_case::case(&view, recorded, false) {
                let line = Value::Object(case).to_string();
                bytes += line.len();
                if bytes > dataset::MAX_BYTES {
                    let why = "its runs have more text than a dataset may have: set a limit";
                    return Err(Problem::invalid_field("/since", why));
                }
                lines.push(line);
            }
            if lines.len() == limit {
                return Ok(lines);
            }
        }
        match page.next {
            Some(next) => before = Some(next),
            None => break,
        }
    }
    Ok(lines)
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

/// Whether an evaluation can be accepted now.
pub async fn check_accepts(state: &AppState, principal: &Principal) -> Result<(), Problem> {
    if state.runner.is_draining() {
        return Err(StartError::Draining.into());
    }
    if let Some(error) = state.runner.store_error() {
        return Err(error.into());
    }
    let unfinished = state.runner.store().unfinished_evals().await?;
    let owner = principal.key_name();
    let own = unfinished.iter().filter(|it| it.owner.as_deref() == owner);
    match own.count() >= MAX_UNFINISHED {
        true => Err(Problem::new(
            QueueFull,
            format!("{MAX_UNFINISHED} evaluations have not ended; try again later"),
        )
        .with_retry_after(RETRY_SECONDS)),
        false => Ok(()),
    }
}

async fn accept(
    state: &AppState,
    eval: Evaluation,
    definitions: Vec<EvalDefinition>,
    cases: Vec<Case>,
) -> Result<(), StoreError> {
    let store = state.runner.store();
    let count = u32::try_from(cases.len()).unwrap_or(u32::MAX);
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
    store.accept_eval(eval, definitions, count).await?;
    state.evals.wake();
    Ok(())
}
