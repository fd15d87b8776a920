//! `/runs/{id}/scores` and `/scores`: how good people, programs and scorers say that runs are.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::KeyScope;
use crate::domain::run::{Run, RunId, now};
use crate::domain::score::{MAX_COMMENT_CHARS, ScoreValue, is_score_name};
use crate::domain::timestamp_text;
use crate::engine::record::scores::ScoreRequest;
use crate::store::score_sums::{ScoreDimension, ScoreQuery, ScoreRow};
use crate::store::scores::{MAX_REPLACEMENTS, MAX_RUN_SCORES, Score, ScoreChange, ScoreKey};
use crate::web::auth::Principal;
use crate::web::error::{Problem, quote};
use crate::web::extract::body::JsonBody;
use crate::web::extract::path::{ChangedRunPath, Params, RunPath};
use crate::web::extract::query::{Labels, NoQuery, Query};
use crate::web::problem_code::ProblemCode::{
    InvalidParameter, RunNotTerminal, ScoreNotFound, TooManyScores,
};
use crate::web::response::json::{ListResponse, json_response};
use crate::web::route::{Route, delete, get, post};
use crate::web::routes::runs::require_run;
use crate::web::routes::usage::{self, parse_dimensions};
use crate::web::state::AppState;

const DIMENSIONS: &str = "agent, version, variant, name, day, label.<name>";

pub fn routes() -> Vec<Route> {
    vec![
        post("/runs/{id}/scores", [KeyScope::Run], add)
            .describe("score_run", "Scores a run")
            .details(
                "After the end of the run and its tree. A run has one score of each name and author: the key, or nobody without \
                 keys. Another one replaces it.",
            )
            .tag("scores")
            .body_required()
            .request_example("number", "A number", json!({"name": "grounded", "value": 0.8, "comment": "cites both pages"}))
            .request_example("thumb", "A thumb", json!({"name": "thumbs", "value": true}))
            .request_example("label", "A label", json!({"name": "tone", "value": "friendly"}))
            .response::<ScoreView>(201, "The score.")
            .example(example())
            .response::<ScoreView>(200, "The score; it has replaced one.")
            .example(example())
            .problems(&[RunNotTerminal, TooManyScores]),
        get("/runs/{id}/scores", [KeyScope::Read], list)
            .describe("list_run_scores", "Lists the scores of a run")
            .details("By name, then by author.")
            .tag("scores")
            .response::<ListResponse<ScoreView>>(200, "The scores.")
            .example(json!({"data": [example()]})),
        delete("/runs/{id}/scores/{name}", [KeyScope::Run], remove)
            .describe("delete_score", "Deletes a score")
            .details("One's own, or with the scope `admin` that of any author. Sums do not count it any more.")
            .tag("scores")
            .path::<String>("name", "The name of the score.", ScoreNotFound)
            .empty_response(204, "The score is deleted."),
        get("/scores", [KeyScope::Read], report)
            .describe("get_scores", "Sums scores of runs")
            .details(
                "A key sees the scores of its own runs, a key with the scope `admin` those of all. A score counts at the time at \
                 which the root of its run was accepted, and stays counted after the run's deletion. Sums are exact. \
                 `label.<name>` and `day` are those of the root run.",
            )
            .tag("scores")
            .response::<ReportView>(200, "The sums.")
            .example(json!({"data": [{
                "agent": "planner", "name": "grounded", "n": 412, "mean": 0.83, "variance": 0.021, "counts": {},
            }]}))
            .problems_with(422, &[InvalidParameter]),
    ]
}

/// A new score of a run.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "ScoreRequest")]
#[serde(deny_unknown_fields, default)]
struct ScoreBody {
    /// What is scored, such as `grounded`: letters, digits, `.`, `_` and `-`.
    #[schemars(required, with = "String", length(min = 1, max = 64))]
    name: Option<String>,
    /// How good it is.
    #[schemars(required, with = "ScoreValue")]
    value: Option<ScoreValue>,
    /// Why.
    #[schemars(length(max = 2000))]
    comment: Option<String>,
    /// The turn that the score is about, from 1; null for the whole run.
    #[schemars(range(min = 1))]
    turn: Option<u32>,
}

/// A score of a run.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Score")]
pub struct ScoreView {
    /// The run.
    run_id: RunId,
    /// What is scored.
    name: String,
    /// A number, or a label.
    value: ScoreValue,
    /// The name of a key, `scorer:` and the name of a scorer, or `feedback`; null without keys.
    author: Option<String>,
    /// Why.
    comment: Option<String>,
    /// The turn that the score is about; null for the whole run.
    turn: Option<u32>,
    /// When it was given.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    created_at: Timestamp,
}

impl ScoreView {
    fn new(run_id: RunId, score: Score) -> Self {
        Self {
            run_id,
            name: score.name,
            value: score.value,
            author: score.author,
            comment: score.comment,
            turn: score.turn,
            created_at: score.at,
        }
    }
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct DeleteQuery {
    /// Whose score, for the scope `admin`; by default one's own.
    author: Option<String>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct ReportQuery {
    /// What the sums are grouped by: one or more of `agent`, `version`, `variant`, `name`, `day`, `label.<name>`, separated by commas.
    #[schemars(example = "agent,name", example = "version,day")]
    by: Option<String>,
    /// Only scores of runs whose root was accepted at this time or later: a date, or an RFC 3339 time, rounded down to a day in UTC.
    #[schemars(example = "2026-01-01")]
    since: Option<String>,
    /// Only scores of runs whose root was accepted before this time, rounded up to a day in UTC.
    until: Option<String>,
    /// Only scores of runs of this agent.
    agent: Option<String>,
    /// Only scores of this name.
    name: Option<String>,
    /// `label.<key>=<value>`: only scores of runs whose root has this label. Several labels must all match.
    #[serde(rename = "label.")]
    labels: Labels,
}

/// Sums of scores, in groups.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ScoreReport")]
struct ReportView {
    /// One entry for each group, sorted by its values. Without `by` one entry; empty if no score is counted.
    data: Vec<ScoreGroup>,
}

/// The scores of one group. It has the values that `by` names; null stands for runs without that value.
#[derive(Serialize, JsonSchema)]
struct ScoreGroup {
    /// The agent of the runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<Option<String>>,
    /// The version of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<Option<String>>,
    /// The version that root runs of an agent with a rollout got: `current` or `candidate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    variant: Option<Option<String>>,
    /// What is scored.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Option<String>>,
    /// The day in UTC on which the root run was accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date"))]
    day: Option<Date>,
    /// `label.<name>`, for each label of `by`.
    #[serde(flatten)]
    labels: BTreeMap<String, Option<String>>,
    /// The number of scores.
    n: u64,
    /// The mean of the numbers; null if there are none.
    mean: Option<f64>,
    /// Their sample variance; null if there are fewer than two.
    variance: Option<f64>,
    /// The number of scores with each label.
    counts: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct NameParam {
    name: String,
}

async fn add(
    State(state): State<AppState>,
    ChangedRunPath(id): ChangedRunPath,
    principal: Principal,
    _: NoQuery,
    JsonBody(body): JsonBody<ScoreBody>,
) -> Result<Response, Problem> {
    let run = require_run(&state, id).await?;
    let request = ScoreRequest {
        name: checked_name(body.name)?,
        value: required(body.value, "/value")?,
        comment: checked_comment(body.comment)?,
        turn: body.turn,
        author: principal.key_name().map(str::to_owned),
        scorer: None,
    };
    if let Some(turn) = request.turn.filter(|turn| !(1..=run.turns).contains(turn)) {
        let why = format!("{} has no turn {turn}, but {} in all", run.id, run.turns);
        return Err(Problem::invalid_field("/turn", why));
    }
    let status = score(&state, &run, request.clone()).await?;
    let score = Score {
        name: request.name,
        author: request.author,
        value: request.value,
        comment: request.comment,
        turn: request.turn,
        at: now(),
        replacements: 0,
    };
    Ok(json_response(status, &ScoreView::new(id, score)))
}

/// Commits the score: 201, or 200 if it replaces one.
pub async fn score(
    state: &AppState,
    run: &Run,
    request: ScoreRequest,
) -> Result<StatusCode, Problem> {
    match state.runner.add_score(run, request).await? {
        ScoreChange::Added => Ok(StatusCode::CREATED),
        ScoreChange::Replaced => Ok(StatusCode::OK),
        ScoreChange::TooMany => Err(Problem::new(
            TooManyScores,
            format!(
                "{} has {MAX_RUN_SCORES} scores, or this one was replaced {MAX_REPLACEMENTS} times",
                run.id
            ),
        )),
        ScoreChange::NotScorable if state.runner.run(run.id).await?.is_none() => {
            Err(Problem::run_not_found(run.id))
        }
        ScoreChange::NotScorable => Err(Problem::new(
            RunNotTerminal,
            format!("{} cannot be scored yet: its tree has not ended", run.id),
        )),
    }
}

async fn list(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let scores = state.runner.store().scores(id).await?;
    let data: Vec<ScoreView> = scores
        .into_iter()
        .map(|it| ScoreView::new(id, it))
        .collect();
    Ok(json_response(StatusCode::OK, &ListResponse { data }))
}

async fn remove(
    State(state): State<AppState>,
    (ChangedRunPath(id), Params(NameParam { name })): (ChangedRunPath, Params<NameParam>),
    principal: Principal,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, Problem> {
    let own = principal.key_name().map(str::to_owned);
    let author = match query.author {
        None => own,
        Some(author) => {
            principal.require_scope(KeyScope::Admin)?;
            Some(author)
        }
    };
    let by = author
        .as_deref()
        .map_or(String::new(), |author| format!(" by {}", quote(author)));
    let not_found = || {
        Problem::new(
            ScoreNotFound,
            format!("{id} has no score {}{by}", quote(&name)),
        )
    };
    let key = ScoreKey {
        run: id,
        name: name.clone(),
        author,
    };
    match state.runner.store().delete_score(key).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(not_found()),
    }
}

pub fn required<T>(value: Option<T>, pointer: &str) -> Result<T, Problem> {
    value.ok_or_else(|| Problem::invalid_field(pointer, "is required"))
}

pub fn checked_name(name: Option<String>) -> Result<String, Problem> {
    let name = required(name, "/name")?;
    match is_score_name(&name) {
        true => Ok(name),
        false => Err(Problem::invalid_field(
            "/name",
            format!(
                "{} is no name of a score: it has 1 to 64 letters, digits, \".\", \"_\" and \"-\", and begins with a letter or a digit",
                quote(&name)
            ),
        )),
    }
}

pub fn checked_comment(comment: Option<String>) -> Result<Option<String>, Problem> {
    let comment = comment.filter(|comment| !comment.trim().is_empty());
    match comment
        .as_ref()
        .is_some_and(|it| it.chars().nth(MAX_COMMENT_CHARS).is_some())
    {
        true => Err(Problem::invalid_field(
            "/comment",
            format!("must be at most {MAX_COMMENT_CHARS} characters"),
        )),
        false => Ok(comment),
    }
}

async fn report(
    State(state): State<AppState>,
    principal: Principal,
    Query(query): Query<ReportQuery>,
) -> Result<Response, Problem> {
    let (since, until) = (query.since.as_deref(), query.until.as_deref());
    let (since, until) = usage::period(&TimeZone::UTC, since, until)?;
    let by = query.by.as_deref().map_or(Ok(Vec::new()), parse_by)?;
    let query = ScoreQuery {
        since,
        until,
        agent: query.agent,
        name: query.name,
        labels: query.labels.0,
        ..ScoreQuery::of(
            principal.owner_filter(),
            principal.admin_globs(),
            by.clone(),
        )
    };
    let rows = state.runner.store().score_report(query).await?;
    let rows = rows.ok_or_else(usage::too_many_groups)?;
    let data = rows.into_iter().map(|row| group(&by, row)).collect();
    Ok(json_response(StatusCode::OK, &ReportView { data }))
}

/// The sums of an agent's scores that the principal may see.
pub async fn visible_sums(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    by: Vec<ScoreDimension>,
) -> Result<Vec<ScoreRow>, Problem> {
    let query = ScoreQuery {
        agent: Some(agent.to_owned()),
        ..ScoreQuery::of(principal.owner_filter(), principal.admin_globs(), by)
    };
    Ok(state
        .runner
        .store()
        .score_report(query)
        .await?
        .unwrap_or_default())
}

fn parse_by(text: &str) -> Result<Vec<ScoreDimension>, Problem> {
    parse_dimensions(text, DIMENSIONS, |name, label| {
        Some(match (name, label) {
            ("agent", _) => ScoreDimension::Agent,
            ("version", _) => ScoreDimension::Version,
            ("variant", _) => ScoreDimension::Variant,
            ("name", _) => ScoreDimension::Name,
            ("day", _) => ScoreDimension::Day,
            (_, Some(label)) => ScoreDimension::Label(label.to_owned()),
            _ => return None,
        })
    })
}

fn group(by: &[ScoreDimension], row: ScoreRow) -> ScoreGroup {
    let mut group = ScoreGroup {
        agent: None,
        version: None,
        variant: None,
        name: None,
        day: row.day,
        labels: BTreeMap::new(),
        n: row.scores.n(),
        mean: row.scores.numbers.mean(),
        variance: row.scores.numbers.variance(),
        counts: row.scores.labels,
    };
    let named = by.iter().filter(|it| **it != ScoreDimension::Day);
    for (dimension, value) in named.zip(row.values) {
        match dimension {
            ScoreDimension::Agent => group.agent = Some(value),
            ScoreDimension::Version => group.version = Some(value),
            ScoreDimension::Variant => group.variant = Some(value),
            ScoreDimension::Name => group.name = Some(value),
            ScoreDimension::Label(name) => {
                drop(group.labels.insert(format!("label.{name}"), value))
            }
            ScoreDimension::Day => {}
        }
    }
    group
}

fn example() -> Value {
    json!({
        "run_id": "run_01980d3a-8f7e-7c3a-9d53-2f1d2b3c4d5e", "name": "grounded", "value": 0.8, "author": "reviewers",
        "comment": "cites both pages", "turn": null, "created_at": "2026-03-01T09:30:00.000Z",
    })
}
