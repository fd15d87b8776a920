//! One look of a scorer at a run: an agent judges it, assertions check it, or a service scores it.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};

use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content;
use crate::domain::event::EventKind;
use crate::domain::expect::Expect;
use crate::domain::message::shorten;
use crate::domain::run::{Run, RunId, now};
use crate::domain::run_path;
use crate::domain::score::{MAX_COMMENT_CHARS, ScoreNumber, ScoreValue};
use crate::domain::scorer::{Scorer, ScorerKind};
use crate::engine::blocking::run_blocking;
use crate::engine::recording::assertions::{self, Assertions, PlayedCall};
use crate::engine::request::{Overrides, RunRequest, StartError};
use crate::engine::runner::Runner;
use crate::record::entry::Entry;
use crate::signed_http::SignedHttp;
use crate::store::events::{self, EventQuery};
use crate::store::run_store::RunStore;
use crate::store::{IdempotencyClaim, StoreError};

/// What a scorer looks at.
pub struct Scored<'a> {
    /// A root run that has ended.
    pub run: &'a Run,
    /// What is known of the right answer.
    pub expected: Option<&'a Value>,
    /// Those of a judge's run.
    pub labels: BTreeMap<String, String>,
    /// So that a judge's run starts once.
    pub claim: Option<IdempotencyClaim>,
}

/// What a scorer says.
#[derive(Debug, Deserialize)]
pub struct Verdict {
    pub value: ScoreValue,
    #[serde(default)]
    pub comment: Option<String>,
}

/// Why a scorer says nothing.
#[derive(Debug)]
pub enum ScorerError {
    /// It cannot score this run.
    Failed(String),
    /// It may be able to later.
    Unavailable(String),
}

impl From<StoreError> for ScorerError {
    fn from(error: StoreError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

#[derive(Clone)]
pub struct Scorers {
    runner: Runner,
    http: SignedHttp,
}

impl Scorers {
    pub fn new(runner: Runner, http: SignedHttp) -> Self {
        Self { runner, http }
    }

    /// Has a scorer look at a run, and returns what it says.
    pub async fn perform(
        &self,
        scorer: &Scorer,
        scored: Scored<'_>,
    ) -> Result<Verdict, ScorerError> {
        let mut verdict = match &scorer.kind {
            ScorerKind::Assert { expect } => {
                self.check(Value::Object(expect.clone()), scored.run)
                    .await?
            }
            ScorerKind::Judge { agent } => self.judge(agent, scored).await?,
            ScorerKind::Http { url, secret_env } => {
                self.ask(scorer, (url, secret_env.as_ref()), &scored)
                    .await?
            }
        };
        let comment = verdict.comment.filter(|comment| !comment.trim().is_empty());
        verdict.comment = comment.map(|comment| shorten(&comment, MAX_COMMENT_CHARS));
        Ok(verdict)
    }

    async fn check(&self, expect: Value, run: &Run) -> Result<Verdict, ScorerError> {
        let calls = made_calls(self.runner.store().as_ref(), run.id).await?;
        let run = run.clone();
        let failed = run_blocking(move || {
            let expect: Expect = serde_json::from_value(expect).map_err(|it| it.to_string())?;
            let assertions = Assertions::compile(expect).map_err(|(_, why)| why)?;
            let cost = run.tree.usage.cost.map(|cost| cost.to_usd());
            Ok(assertions::check(&assertions, &run, &calls, cost))
        });
        let failed = failed.await.map_err(ScorerError::Failed)?;
        let steps = i64::from(failed.is_empty()) * ScoreNumber::ONE.steps;
        let reasons: Vec<String> = failed
            .into_iter()
            .map(|failed| format!("{}: {}", failed.assertion, failed.message))
            .collect();
        Ok(Verdict {
            value: ScoreValue::Number(ScoreNumber { steps }),
            comment: Some(reasons.join("\n")),
        })
    }

    async fn judge(&self, agent: &str, scored: Scored<'_>) -> Result<Verdict, ScorerError> {
        let input = self.case(&scored).await?;
        let schema = json!({
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "string"}]},
                "comment": {"type": "string"},
            },
            "required": ["value", "comment"],
            "additionalProperties": false,
        });
        let schema = to_raw_value(&schema).map_err(|it| ScorerError::Failed(it.to_string()))?;
        let agents = self.runner.catalog().current();
        let definition = agents.entries.get(agent).and_then(|it| it.agent.as_ref());
        let request = RunRequest {
            agent: agent.to_owned(),
            input: Some(Content::from(input.to_string())),
            is_object_input: definition.is_some_and(|it| it.input_schema.is_some()),
            labels: scored.labels,
            owner: scored.run.owner.clone(),
            claim: scored.claim,
            overrides: Overrides {
                params: ParamsOverride {
                    response_format: Some(ResponseFormat::JsonSchema(Arc::from(schema))),
                    ..ParamsOverride::default()
                },
                ..Overrides::default()
            },
            ..RunRequest::default()
        };
        let judge = match Box::pin(self.runner.start(request.in_background())).await {
            Ok(run) => run.id,
            Err(StartError::Store(StoreError::AlreadyClaimed(claimed))) => claimed.run,
            Err(
                error @ (StartError::Store(_) | StartError::Draining | StartError::QueueFull(_)),
            ) => return Err(ScorerError::Unavailable(error.to_string())),
            Err(error) => return Err(ScorerError::Failed(format!("{agent}: {error}"))),
        };
        let gone = || ScorerError::Failed(format!("{judge}, the judge's run, was deleted"));
        let judge = self
            .runner
            .wait_until_ended(judge)
            .await?
            .ok_or_else(gone)?;
        let Some(answer) = &judge.content else {
            let why = judge.error.as_ref().map(|error| error.message.as_str());
            let why = why
                .or(judge.cancel_reason.as_deref())
                .unwrap_or("it gave no answer");
            return Err(ScorerError::Failed(format!(
                "{agent} ({}): {why}",
                judge.id
            )));
        };
        serde_json::from_str(answer).map_err(|error| {
            let why = format!(
                "{agent} ({}) answers with no {{value, comment}}: {error}",
                judge.id
            );
            ScorerError::Failed(why)
        })
    }

    async fn ask(
        &self,
        scorer: &Scorer,
        (url, secret_env): (&str, Option<&String>),
        scored: &Scored<'_>,
    ) -> Result<Verdict, ScorerError> {
        let mut case = self.case(scored).await?;
        case["run"] = json!({
            "id": scored.run.id, "agent": scored.run.agent, "agent_version": scored.run.agent_version,
        });
        let id = (format!("score_{}_{}", scored.run.id, scorer.name), now());
        let secret = (secret_env, "[[scorers]]");
        let outcome = self.http.send(url, secret, id, case.to_string()).await;
        match (outcome.error, outcome.status) {
            (None, _) => serde_json::from_slice(&outcome.body).map_err(|error| {
                ScorerError::Failed(format!(
                    "the service answers with no {{value, comment}}: {error}"
                ))
            }),
            (Some(error), Some(status)) if (400..500).contains(&status) && status != 429 => {
                Err(ScorerError::Failed(error))
            }
            (Some(error), _) => Err(ScorerError::Unavailable(error)),
        }
    }

    /// What judges and services get.
    async fn case(&self, scored: &Scored<'_>) -> Result<Value, ScorerError> {
        let run = scored.run;
        Ok(json!({
            "input": run.input,
            "output": run.content,
            "context": requested_context(self.runner.store().as_ref(), run.id).await?,
            "expected": scored.expected,
        }))
    }
}

/// The context that the request of a root run gave.
async fn requested_context(store: &dyn RunStore, root: RunId) -> Result<Option<Value>, StoreError> {
    let first = EventQuery {
        root,
        run: root,
        exclude_descendants: true,
        after: 0,
        limit: 1,
    };
    let found = store.events(first).await?;
    let Some(event) = found.first() else {
        return Ok(None);
    };
    let request = match events::recorded(event)?.kind {
        EventKind::RunQueued { request, .. } => request,
        _ => None,
    };
    let request: Option<Value> = request.and_then(|it| serde_json::from_str(it.get()).ok());
    Ok(request.and_then(|mut it| it.get_mut("context").map(Value::take)))
}

/// The calls of a tree, in the order in which models made them.
async fn made_calls(store: &dyn RunStore, root: RunId) -> Result<Vec<PlayedCall>, StoreError> {
    let runs = store.tree(root).await?;
    let mut paths: BTreeMap<(RunId, String), String> = BTreeMap::new();
    let mut calls: Vec<(Timestamp, PlayedCall)> = Vec::new();
    // Parents come before their children.
    for run in &runs {
        let by_parent = run.parent_id.zip(run.tool_call_id.clone());
        let path = by_parent.and_then(|key| paths.get(&key).cloned());
        let path = path.map_or_else(|| run.agent.clone(), |path| format!("{path}{}", run.agent));
        for recorded in store.entries(run.id).await? {
            let Entry::Replied { turn, message, .. } = recorded.entry else {
                continue;
            };
            for (position, call) in (1..).zip(&message.tool_calls) {
                let child = run_path::child(&path, turn, position, "");
                paths.insert((run.id, call.id.clone()), child);
                let call = PlayedCall {
                    path: path.clone(),
                    turn,
                    position,
                    tool: call.name.clone(),
                    arguments: call.arguments.get().to_owned(),
                };
                calls.push((recorded.time, call));
            }
        }
    }
    calls.sort_by_key(|(time, _)| *time);
    Ok(calls.into_iter().map(|(_, call)| call).collect())
}
