//! Feedback links: `/runs/{id}/feedback-links` makes one, `/feedback/{token}` scores a run by it.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::KeyScope;
use crate::domain::run::now;
use crate::domain::score::{FEEDBACK, ScoreValue};
use crate::domain::timestamp_text;
use crate::engine::record::scores::ScoreRequest;
use crate::settings::quantity::parse_seconds;
use crate::web::error::Problem;
use crate::web::extract::body::JsonBody;
use crate::web::extract::link_prefix::PublicUrl;
use crate::web::extract::path::{ChangedRunPath, Params};
use crate::web::extract::query::NoQuery;
use crate::web::feedback_links::FeedbackLink;
use crate::web::problem_code::ProblemCode::{FeedbackLinkNotFound, RunNotTerminal, TooManyScores};
use crate::web::response::json::json_response;
use crate::web::route::{Route, get, post};
use crate::web::routes::runs::require_run;
use crate::web::routes::scores::{checked_comment, checked_name, required, score};
use crate::web::state::AppState;

/// How long a feedback link is valid, at most.
const MAX_LINK_TIME: u64 = 30 * 24 * 3_600;

pub fn routes() -> Vec<Route> {
    vec![
        post("/runs/{id}/feedback-links", [KeyScope::Run], create_link)
            .describe("create_feedback_link", "Makes a link that scores a run without a key")
            .details("For a person who used what the run made: any number of times until its end, and the last score counts.")
            .tag("scores")
            .body_required()
            .request_example("week", "For a week", json!({"name": "thumbs", "expires_in": "7d"}))
            .response::<FeedbackLinkView>(201, "The link.")
            .example(json!({"url": "https://agents.example.com/feedback/AZtL…", "expires_at": "2026-03-08T09:30:00.000Z"})),
        post("/feedback/{token}", [], give_feedback)
            .describe("give_feedback", "Scores a run by a feedback link")
            .details("The link names the run and the score; nobody needs a key. The author is `feedback`.")
            .tag("scores")
            .path::<String>("token", "The secret of the link.", FeedbackLinkNotFound)
            .body_required()
            .request_example("thumb", "A thumb", json!({"value": true, "comment": "just what I needed"}))
            .response::<FeedbackView>(201, "The score.")
            .example(json!({"name": "thumbs", "value": 1}))
            .response::<FeedbackView>(200, "The score; it has replaced one.")
            .example(json!({"name": "thumbs", "value": 1}))
            .problems(&[RunNotTerminal, TooManyScores]),
        get("/feedback/{token}", [], show_link)
            .describe("get_feedback_link", "Returns what a feedback link is for")
            .details("Changes nothing: programs that preview links may read it.")
            .tag("scores")
            .path::<String>("token", "The secret of the link.", FeedbackLinkNotFound)
            .response::<LinkView>(200, "What the link scores.")
            .example(json!({"name": "thumbs", "expires_at": "2026-03-08T09:30:00.000Z"})),
    ]
}

/// A score by a feedback link.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "FeedbackRequest")]
#[serde(deny_unknown_fields, default)]
struct FeedbackBody {
    /// How good it is.
    #[schemars(required, with = "ScoreValue")]
    value: Option<ScoreValue>,
    /// Why.
    #[schemars(length(max = 2000))]
    comment: Option<String>,
}

/// A request for a feedback link.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "FeedbackLinkRequest")]
#[serde(deny_unknown_fields, default)]
struct LinkBody {
    /// What is scored: letters, digits, `.`, `_` and `-`.
    #[schemars(required, with = "String", length(min = 1, max = 64))]
    name: Option<String>,
    /// How long the link is valid, at most 30 days: seconds, or a text such as `7d`.
    #[schemars(required, with = "Period")]
    expires_in: Option<Period>,
}

/// Seconds, or a text such as `7d`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
enum Period {
    Seconds(u64),
    Text(String),
}

/// A feedback link.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "FeedbackLink")]
struct FeedbackLinkView {
    /// Takes `POST` with a value. Who has it can score the run.
    url: String,
    /// Until then.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    expires_at: Timestamp,
}

/// What a feedback link scores.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "FeedbackLinkDetails")]
struct LinkView {
    /// What is scored.
    name: String,
    /// Until when the link is valid.
    #[serde(serialize_with = "timestamp_text::serialize")]
    #[schemars(with = "Timestamp")]
    expires_at: Timestamp,
}

/// A score by a feedback link.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Feedback")]
struct FeedbackView {
    /// What is scored.
    name: String,
    /// A number, or a label.
    value: ScoreValue,
}

#[derive(Deserialize)]
struct TokenParam {
    token: String,
}

async fn create_link(
    State(state): State<AppState>,
    ChangedRunPath(id): ChangedRunPath,
    url: PublicUrl,
    _: NoQuery,
    JsonBody(body): JsonBody<LinkBody>,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let name = checked_name(body.name)?;
    let seconds = match required(body.expires_in, "/expires_in")? {
        Period::Seconds(seconds) => Some(seconds),
        Period::Text(text) => parse_seconds(&text),
    };
    let seconds = seconds.filter(|seconds| (1..=MAX_LINK_TIME).contains(seconds));
    let seconds = seconds.ok_or_else(|| {
        Problem::invalid_field(
            "/expires_in",
            "must be 1 second to 30 days: whole seconds, or a text such as 7d",
        )
    })?;
    let end = now() + SignedDuration::from_secs(seconds.cast_signed());
    let expires_at = Timestamp::from_second(end.as_second()).unwrap_or(end);
    let link = FeedbackLink {
        run: id,
        name,
        expires_at,
    };
    let secret = state.runner.store().link_secret().await?;
    let view = FeedbackLinkView {
        url: url.join(&format!("/feedback/{}", link.token(&secret))),
        expires_at,
    };
    Ok(json_response(StatusCode::CREATED, &view))
}

async fn give_feedback(
    State(state): State<AppState>,
    Params(TokenParam { token }): Params<TokenParam>,
    _: NoQuery,
    JsonBody(body): JsonBody<FeedbackBody>,
) -> Result<Response, Problem> {
    let link = valid_link(&state, &token).await?;
    let run = state.runner.run(link.run).await?.ok_or_else(unknown_link)?;
    let request = ScoreRequest {
        name: link.name,
        value: required(body.value, "/value")?,
        comment: checked_comment(body.comment)?,
        turn: None,
        author: Some(FEEDBACK.to_owned()),
        scorer: None,
    };
    let (name, value) = (request.name.clone(), request.value.clone());
    let status = score(&state, &run, request).await?;
    Ok(json_response(status, &FeedbackView { name, value }))
}

async fn show_link(
    State(state): State<AppState>,
    Params(TokenParam { token }): Params<TokenParam>,
    _: NoQuery,
) -> Result<Response, Problem> {
    let FeedbackLink {
        name, expires_at, ..
    } = valid_link(&state, &token).await?;
    Ok(json_response(
        StatusCode::OK,
        &LinkView { name, expires_at },
    ))
}

async fn valid_link(state: &AppState, token: &str) -> Result<FeedbackLink, Problem> {
    let secret = state.runner.store().link_secret().await?;
    let link = FeedbackLink::read(token, &secret).filter(|link| now() < link.expires_at);
    link.ok_or_else(unknown_link)
}

fn unknown_link() -> Problem {
    let why = "the link is not valid: it was changed, its time is over, or its run was deleted";
    Problem::new(FeedbackLinkNotFound, why)
}
