//! `judge` assertions: an agent answers a question about the final text with yes or no, and says why.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::json;
use serde_json::value::to_raw_value;

use crate::cli::test::ended_run;
use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::expect::Judge;
use crate::domain::failure::FailureCode;
use crate::domain::message::shorten;
use crate::domain::run::Run;
use crate::engine::recording::assertions::Failed;
use crate::engine::request::{Overrides, RunRequest, StartError};
use crate::engine::runner::Runner;

/// Most characters of a reason.
const MAX_REASON: usize = 400;

#[derive(Deserialize)]
struct Answer {
    holds: bool,
    reason: String,
}

/// Why a judge gave no judgement.
pub enum JudgeError {
    /// Its provider gave no reply.
    Provider(String),
    Invalid(String),
}

/// The judgements that are no. An error if a judge gives none.
pub async fn judge(
    runner: &Runner,
    judges: &[Judge],
    run: &Run,
) -> Result<Vec<Failed>, JudgeError> {
    let mut failed = Vec::new();
    let content = run.content.as_deref().unwrap_or_default();
    for judge in judges {
        let answer = ask(runner, judge, content).await?;
        if !answer.holds {
            failed.push(Failed {
                assertion: "judge",
                message: format!(
                    "{}: no to \"{}\": {}",
                    judge.agent,
                    judge.question,
                    shorten(&answer.reason, MAX_REASON)
                ),
            });
        }
    }
    Ok(failed)
}

async fn ask(runner: &Runner, judge: &Judge, content: &str) -> Result<Answer, JudgeError> {
    let named = |why: String| format!("judge {}: {why}", judge.agent);
    let invalid = |why: String| JudgeError::Invalid(named(why));
    let provider = |why: String| JudgeError::Provider(named(why));
    let schema = to_raw_value(&json!({
        "type": "object",
        "properties": {"holds": {"type": "boolean"}, "reason": {"type": "string"}},
        "required": ["holds", "reason"],
        "additionalProperties": false,
    }));
    let schema = schema.map_err(|error| invalid(error.to_string()))?;
    let request = RunRequest {
        agent: judge.agent.clone(),
        input: Some(
            format!(
                "Does this hold for the text below? {}\nAnswer in JSON: `holds` (true for yes, false for no) and \
                 `reason` (one sentence).",
                judge.question
            )
            .into(),
        ),
        context: Some(content.to_owned()),
        overrides: Overrides {
            params: ParamsOverride {
                response_format: Some(ResponseFormat::JsonSchema(Arc::from(schema))),
                ..ParamsOverride::default()
            },
            ..Overrides::default()
        },
        ..RunRequest::default()
    };
    let started = runner.start(request).await;
    let run = started.map_err(|error| match error {
        StartError::Provider(error) => provider(error.to_string()),
        error => invalid(error.to_string()),
    })?;
    let run = ended_run::wait(runner, &run).await.map_err(invalid)?;
    if let Some(why) = ended_run::provider_failure(&run) {
        return Err(provider(why));
    }
    let Some(answer) = &run.content else {
        let why = run.error.as_ref().map(|error| error.message.clone());
        let why = why.unwrap_or_else(|| "it gave no answer".to_owned());
        let is_timeout = run
            .error
            .as_ref()
            .is_some_and(|it| it.code == FailureCode::Timeout);
        return Err(match is_timeout {
            true => provider(why),
            false => invalid(why),
        });
    };
    serde_json::from_str(answer).map_err(|error| provider(error.to_string()))
}
