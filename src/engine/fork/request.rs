//! A request for a fork, and why it may be refused.

use std::collections::BTreeMap;

use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content;
use crate::domain::message::AssistantMessage;
use crate::domain::run::RunId;
use crate::engine::request::{RunRequest, StartError};
use crate::store::StoreError;

#[derive(Clone, Debug)]
pub struct ForkRequest {
    /// A run of the tree to fork.
    pub source: RunId,
    pub at: ForkPoint,
    pub edit: ForkEdit,
    pub definition: DefinitionChoice,
    /// `None` copies those of the source's root.
    pub labels: Option<BTreeMap<String, String>>,
    /// Whether the runs of the fork add to the memory of their agents.
    pub adds_memory: bool,
    /// Whether recorded definitions hold as they are; else they are cut to what the agents' files of today allow.
    pub is_by_admin: bool,
    /// What the request sets of any new run. Its agent, input, messages and labels are ignored.
    pub new_run: RunRequest,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct ForkPoint {
    /// A run of the source's tree; `None` is the source.
    pub run: Option<RunId>,
    /// `None` is after the last recorded step.
    pub turn: Option<u32>,
    /// Whether the reply of the turn is kept.
    pub after_reply: bool,
}

/// Which definitions the copied runs continue with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefinitionChoice {
    #[default]
    Recorded,
    /// Those of today; the prompt of the forked run is assembled anew.
    Current,
}

/// What is changed in the run at which the tree is forked.
#[derive(Clone, Debug, Default)]
pub struct ForkEdit {
    /// The user message.
    pub message: Option<Content>,
    /// Texts of results by call.
    pub tool_results: BTreeMap<String, String>,
    /// `provider/model`.
    pub model: Option<String>,
    pub params: ParamsOverride<ResponseFormat>,
    pub max_turns: Option<u32>,
    /// The whole system prompt.
    pub system: Option<String>,
    /// In place of the reply that is kept.
    pub reply: Option<AssistantMessage>,
}

impl ForkEdit {
    /// The names of the edited parts.
    pub fn names(&self) -> Vec<String> {
        let Self {
            message,
            tool_results,
            model,
            params,
            max_turns,
            system,
            reply,
        } = self;
        let parts = [
            (message.is_some(), "message"),
            (!tool_results.is_empty(), "tool_results"),
            (model.is_some(), "model"),
            (!params.is_empty(), "params"),
            (max_turns.is_some(), "max_turns"),
            (system.is_some(), "system"),
            (reply.is_some(), "reply"),
        ];
        let edited = parts.into_iter().filter(|(is_edited, _)| *is_edited);
        edited.map(|(_, name)| name.to_owned()).collect()
    }
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum ForkError {
    #[error(transparent)]
    Start(#[from] StartError),
    /// The edited model cannot be requested.
    #[error(transparent)]
    EditedModel(StartError),
    #[error("there is no run {0}")]
    NotFound(RunId),
    /// A field of the request does not fit the record.
    #[error("{reason}")]
    Field {
        /// A JSON pointer.
        pointer: String,
        reason: String,
    },
    #[error(
        "{run} has begun the call {call} of {tool}, it has not ended, and it is not safe to repeat: fork at an earlier \
         turn, or give its result in edit.tool_results"
    )]
    NotForkable {
        run: RunId,
        call: String,
        tool: String,
    },
    /// The run was accepted by a version that did not record what a fork needs, or its record is damaged.
    #[error("{run} cannot be forked: {reason}")]
    Incomplete { run: RunId, reason: &'static str },
}

impl ForkError {
    pub fn field(pointer: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Field {
            pointer: pointer.into(),
            reason: reason.into(),
        }
    }
}

impl From<StoreError> for ForkError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::SourceDeleted(run) => Self::NotFound(run),
            error => Self::Start(error.into()),
        }
    }
}
