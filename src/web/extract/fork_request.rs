//! The body of `POST /runs/{id}/fork`: read and checked, it becomes a [`ForkRequest`].

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::domain::agent::overrides::{BudgetOverride, ParamsOverride};
use crate::domain::agent::params::Effort;
use crate::domain::message::{AssistantMessage, ToolCall, empty_arguments};
use crate::domain::run::RunId;
use crate::domain::run_ref::RunRef;
use crate::engine::fork::request::{DefinitionChoice, ForkEdit, ForkPoint, ForkRequest};
use crate::engine::request::{Overrides, RunRequest};
use crate::web::body::content::ContentInput;
use crate::web::body::json_body::{self, MAX_DEPTH, Object};
use crate::web::error::Problem;
use crate::web::extract::run_request::{
    MAX_LABEL_VALUE, ResponseFormatInput, WebhookInput, check_labels, check_params,
    check_session_name, invalid_override, parse_timeout,
};
use crate::web::state::Settings;

/// The request of a fork. Every field is optional.
#[derive(Default, Deserialize, JsonSchema)]
#[schemars(rename = "ForkRequest")]
#[serde(deny_unknown_fields, default)]
pub struct ForkInput {
    /// Where the tree is forked; absent means after the last recorded step of the run.
    at: Option<Object<ForkPointInput>>,
    /// What is changed in the run at which the tree is forked.
    edit: Option<Object<EditInput>>,
    /// The definitions that the copied runs continue with: `recorded` (the default), or `current`, those of today.
    definition: Option<DefinitionInput>,
    /// Labels in place of those of the source.
    labels: Option<BTreeMap<String, String>>,
    /// A webhook in addition to the agent's.
    webhook: Option<Object<WebhookInput>>,
    /// Limits of what the fork itself uses. 0 means the recorded limit.
    budget: Option<Object<BudgetOverride>>,
    /// The time limit in seconds, from the fork's start; 0 means the recorded one.
    timeout: Option<u64>,
    /// The session that the fork is in. Without it, the fork is in none.
    session: Option<String>,
    /// Whether the runs of the fork add to the memory of their agents.
    memory: bool,
}

/// Where a tree is forked.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "ForkPoint")]
struct ForkPointInput {
    /// A run of the same tree; absent means the run of the path.
    #[schemars(with = "Option<RunRef>")]
    run: Option<String>,
    /// The turn that is requested anew; the turns before it are kept. 0 also assembles the prompt anew.
    turn: Option<u32>,
    /// `reply`: the reply of the turn is kept too, and its calls are executed.
    after: Option<AfterInput>,
}

/// What is kept of the turn at which a tree is forked.
#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ForkAfter")]
enum AfterInput {
    /// Its reply.
    Reply,
}

/// Which definitions the copied runs continue with.
#[derive(Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ForkDefinition")]
enum DefinitionInput {
    /// Those that the source was recorded with.
    Recorded,
    /// Those of the agents' files of today.
    Current,
}

/// Changes of the run at which a tree is forked.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "ForkEdit")]
struct EditInput {
    /// The user message.
    message: Option<ContentInput>,
    /// Results of kept calls: texts by the ids of the calls.
    tool_results: BTreeMap<String, String>,
    /// `provider/model`.
    model: Option<String>,
    /// How much the model thinks before it answers.
    effort: Option<Effort>,
    /// Parameters of provider requests. Each one that is set replaces the recorded one.
    params: Option<Object<ParamsOverride<Object<ResponseFormatInput>>>>,
    /// The most turns of the run, copied ones included.
    #[schemars(range(min = 1, max = 50))]
    max_turns: Option<u32>,
    /// The whole system prompt. Needs the scope `admin`.
    system: Option<String>,
    /// In place of the reply that is kept; only with `at.after`. Needs the scope `admin`.
    reply: Option<Object<ReplyInput>>,
}

/// A reply of a model: a text, tool calls, or both.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "ForkReply")]
struct ReplyInput {
    /// The text.
    content: String,
    /// The tool calls.
    tool_calls: Vec<Object<CallInput>>,
}

/// A tool call of a reply.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ForkToolCall")]
struct CallInput {
    /// The call's id, unique within the run.
    id: String,
    /// The name of the tool.
    name: String,
    /// The arguments; absent means none.
    #[schemars(with = "Option<serde_json::Map<String, serde_json::Value>>")]
    arguments: Option<Box<RawValue>>,
}

impl ForkInput {
    /// The id of the run at which the tree is forked, which may be a part of one.
    pub fn run_mut(&mut self) -> Option<&mut String> {
        let Object(at) = self.at.as_mut()?;
        at.run.as_mut()
    }

    /// The first edit that needs the scope `admin`.
    pub fn admin_edit(&self) -> Option<&'static str> {
        let Object(edit) = self.edit.as_ref()?;
        match (&edit.system, &edit.reply) {
            (Some(_), _) => Some("/edit/system"),
            (None, Some(_)) => Some("/edit/reply"),
            (None, None) => None,
        }
    }

    /// The request of the body, checked as far as is possible without the run.
    pub async fn into_request(
        self,
        source: RunId,
        owner: Option<String>,
        settings: &Settings,
    ) -> Result<ForkRequest, Problem> {
        if let Some(labels) = &self.labels {
            check_labels(labels, settings.max_labels, MAX_LABEL_VALUE)?;
        }
        let at = match self.at {
            Some(Object(at)) => at.parse()?,
            None => ForkPoint::default(),
        };
        let edit = match self.edit {
            Some(Object(edit)) => edit.parse(owner.as_deref(), settings).await?,
            None => ForkEdit::default(),
        };
        let budget = self.budget.map(|Object(limits)| limits.into_budget());
        let budget = budget.transpose();
        let new_run = RunRequest {
            session: self.session.map(check_session_name).transpose()?,
            overrides: Overrides {
                timeout: parse_timeout(self.timeout, settings.max_timeout)?,
                budget: budget
                    .map_err(|error| invalid_override("/budget", error))?
                    .unwrap_or_default(),
                ..Overrides::default()
            },
            webhook: self.webhook.map(|Object(webhook)| webhook.into_request()),
            owner,
            ..RunRequest::default()
        };
        Ok(ForkRequest {
            source,
            at,
            edit,
            definition: match self.definition {
                Some(DefinitionInput::Current) => DefinitionChoice::Current,
                Some(DefinitionInput::Recorded) | None => DefinitionChoice::Recorded,
            },
            labels: self.labels,
            is_by_admin: false,
            adds_memory: self.memory,
            new_run,
        })
    }
}

impl ForkPointInput {
    fn parse(self) -> Result<ForkPoint, Problem> {
        let run = self.run.map(|id| id.parse::<RunId>()).transpose();
        let run = run.map_err(|error| Problem::invalid_field("/at/run", error.to_string()))?;
        Ok(ForkPoint {
            run,
            turn: self.turn,
            after_reply: matches!(self.after, Some(AfterInput::Reply)),
        })
    }
}

impl EditInput {
    async fn parse(self, owner: Option<&str>, settings: &Settings) -> Result<ForkEdit, Problem> {
        let mut counter = settings.attachment_counter();
        let message = self.message;
        let message = message.map(|it| it.into_content("/edit/message", &mut counter));
        let message = message.transpose()?;
        if message.as_ref().is_some_and(|message| message.is_blank()) {
            return Err(Problem::invalid_field("/edit/message", "must not be blank"));
        }
        let mut params = match self.params {
            Some(Object(params)) => check_params(params, "/edit/params", owner).await?,
            None => ParamsOverride::default(),
        };
        if self.effort.is_some() && params.effort.is_some() {
            let why = "is also given as edit.effort";
            return Err(Problem::invalid_field("/edit/params/effort", why));
        }
        params.effort = self.effort.or(params.effort);
        let reply = self.reply.map(|Object(reply)| reply.parse());
        Ok(ForkEdit {
            message,
            tool_results: self.tool_results,
            model: self.model,
            params,
            max_turns: self.max_turns,
            system: self.system,
            reply: reply.transpose()?,
        })
    }
}

impl ReplyInput {
    fn parse(self) -> Result<AssistantMessage, Problem> {
        let mut calls: Vec<ToolCall> = Vec::with_capacity(self.tool_calls.len());
        for (at, Object(call)) in self.tool_calls.into_iter().enumerate() {
            let pointer = format!("/edit/reply/tool_calls/{at}");
            let invalid = |field, why: &str| {
                Problem::invalid_field(json_body::join_pointer(&pointer, field), why)
            };
            if call.id.is_empty() || calls.iter().any(|other| other.id == call.id) {
                return Err(invalid("id", "must not be empty, nor that of another call"));
            }
            if call.name.is_empty() {
                return Err(invalid("name", "must not be empty"));
            }
            let arguments = match call.arguments {
                None => empty_arguments(),
                Some(json) if json_body::nesting_depth(json.get()) > MAX_DEPTH => {
                    return Err(json_body::too_deep());
                }
                Some(json) if !json.get().starts_with('{') => {
                    return Err(invalid("arguments", "must be an object"));
                }
                Some(json) => json.into(),
            };
            calls.push(ToolCall {
                id: call.id,
                provider_id: String::new(),
                name: call.name,
                arguments,
                invalid_arguments: None,
            });
        }
        if calls.is_empty() && self.content.trim().is_empty() {
            let why = "must have a content or tool_calls";
            return Err(Problem::invalid_field("/edit/reply", why));
        }
        Ok(AssistantMessage {
            content: self.content,
            tool_calls: calls,
            echo: None,
        })
    }
}
