//! What a caller asks of the runner, and what it is told at once.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::catalog::LoadError;
use crate::domain::agent::Budget;
use crate::domain::agent::model_ref::{ModelRef, ModelRefError};
use crate::domain::agent::params::{Effort, Params};
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content;
use crate::domain::context::ContextSettings;
use crate::domain::message::{Message, ToolSpec};
use crate::domain::run::RunId;
use crate::domain::service::Service;
use crate::domain::trace::TraceContext;
use crate::engine::admission::sessions::OnBusy;
use crate::engine::state::provider_keys::Keys;
use crate::fair::admission::QueueFull;
use crate::providers::registry::ProviderUnavailable;
use crate::store::{IdempotencyClaim, StoreError};

/// A wish for a root run.
#[derive(Clone, Debug, Default)]
pub struct RunRequest {
    /// The agent's name.
    pub agent: String,
    /// The input as given.
    pub input: Option<Content>,
    /// Appended to the user message.
    pub context: Option<String>,
    /// What was said before the run, in good order. Not together with a session.
    pub messages: Vec<Message>,
    /// The session whose conversation it goes on with.
    pub session: Option<String>,
    /// What becomes of it where that session has a run already.
    pub on_busy: OnBusy,
    /// What the request sets over the agent's file.
    pub overrides: Overrides,
    /// The client's labels, already within bounds.
    pub labels: BTreeMap<String, String>,
    /// The name of the key that asks; none without keys.
    pub owner: Option<String>,
    /// The idempotency key that accepts it, once. A repetition is [`StoreError::Claimed`].
    pub claim: Option<IdempotencyClaim>,
    /// Where the run's events are told, beside where its agent's file says.
    pub webhook: Option<WebhookRequest>,
    /// Whether the tree streams from its providers; none leaves it to the file.
    pub stream: Option<bool>,
    /// Where the caller stands in a trace.
    pub trace: Option<Box<TraceContext>>,
    /// The person's own keys for the tree's requests.
    pub provider_keys: Keys,
}

/// What a request sets over the agent's file.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `provider/model`.
    pub model: Option<String>,
    /// A skill within the configured roots.
    pub skill: Option<String>,
    /// A workdir within the configured roots.
    pub workdir: Option<PathBuf>,
    /// Single parameters; those set win over the file's.
    pub params: ParamsPatch,
    /// The run's deadline.
    pub timeout: Option<Duration>,
    /// Budget limits; those set win over the file's.
    pub budget: Budget,
}

/// A request's webhook, unchecked.
#[derive(Clone, Default)]
pub struct WebhookRequest {
    /// Its address.
    pub url: Option<String>,
    /// Names of events; none means the terminal ones.
    pub events: Vec<String>,
}

impl fmt::Debug for WebhookRequest {
    /// Without the address, which may hold a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookAsk")
            .field("events", &self.events)
            .finish_non_exhaustive()
    }
}

/// Single parameters of a request.
#[derive(Clone, Debug, Default)]
pub struct ParamsPatch {
    /// See [`Params`].
    pub temperature: Option<f64>,
    /// See [`Params`].
    pub max_tokens: Option<u32>,
    /// See [`Params`].
    pub top_p: Option<f64>,
    /// See [`Params`].
    pub stop: Option<Vec<String>>,
    /// See [`Params`].
    pub response_format: Option<ResponseFormat>,
    /// See [`Params`].
    pub effort: Option<Effort>,
    /// See [`Params`].
    pub service: Option<Service>,
    /// See [`Params`]; each key wins over the file's.
    pub extra: Map<String, Value>,
}

/// Why a run is not accepted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StartError {
    /// No such agent, or its file is not valid.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The request's `model` has the wrong shape.
    #[error("{0}")]
    Model(ModelRefError),
    /// No such provider, or its key is missing.
    #[error(transparent)]
    Provider(#[from] ProviderUnavailable),
    /// An override points outside the configured roots, or at nothing.
    #[error("{reason}")]
    Override {
        /// The body's field.
        field: &'static str,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A parameter that the agent does not let a request set, or that its model refuses.
    #[error("{reason}")]
    Param {
        /// The body's field below `/params`.
        field: &'static str,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A key for a provider that the agent does not take, or that nothing can be done with.
    #[error("{0}")]
    ProviderKey(String),
    /// The request names a model that the run's budget in money would not hold.
    #[error(
        "the price of {0} is not known, and this run has a budget in money: name a model with a price, or have [prices.\"{0}\"] added to the server's configuration"
    )]
    Unpriced(ModelRef),
    /// The queue is full.
    #[error("{} runs are at work and {} wait; try again later", .0.running, .0.queued)]
    QueueFull(QueueFull),
    /// The session has a run that has not ended, and the request does not want to wait for it.
    #[error(
        "session {session} is busy with {run}; wait for its end, or send on_busy queue or cancel_previous"
    )]
    SessionBusy {
        /// The session.
        session: String,
        /// The run at work in it.
        run: RunId,
    },
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Draining,
    /// The record could not be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The prompt could not be put together (dry run only: a real run is accepted and fails).
    #[error(transparent)]
    Prompt(#[from] crate::catalog::prompt::PromptError),
    /// The agent's memory could not be read (dry run only).
    #[error("{0}")]
    Memory(String),
}

/// What a run would be, without a model being asked.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DryRun {
    /// The agent.
    pub agent: String,
    /// Its definition's version.
    pub agent_version: String,
    /// Who would answer.
    pub model: ModelRef,
    /// Tried next.
    pub fallback_models: Vec<ModelRef>,
    /// The assembled prompt.
    pub system_prompt: String,
    /// The user message; of its pictures and files what they are known by.
    pub message: Content,
    /// The directory of its files and tools.
    pub workdir: PathBuf,
    /// What would be sent as parameters.
    pub params: Params,
    /// The tools on offer.
    pub tools: Vec<ToolSpec>,
    /// The names of more tools, which its model finds with `tool_search`.
    pub deferred_tools: Vec<String>,
    /// Whom it may call, and how.
    pub sub_agents: DrySubAgents,
    /// What bounds it.
    pub limits: DryLimits,
    /// What becomes of a conversation that outgrows the model's window.
    pub context: ContextSettings,
}

/// The delegation part of a dry run.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DrySubAgents {
    /// Names.
    pub names: Vec<String>,
    /// The tree's limit.
    pub max_depth: u8,
    /// Whether calls of one reply run at once.
    pub parallel: bool,
    /// Bound on each child in seconds; 0 means what is left of the run.
    pub timeout: u64,
}

/// The limits part of a dry run.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DryLimits {
    /// Turns.
    pub max_turns: u32,
    /// The deadline in seconds.
    pub timeout: u64,
    /// Tokens of the tree; null means none.
    pub max_tokens: Option<u64>,
    /// USD of the tree; null means none.
    pub max_cost_usd: Option<f64>,
    /// Tool calls of the tree; null means none.
    pub max_tool_calls: Option<u64>,
    /// Runs of the tree; null means none.
    pub max_runs: Option<u64>,
}
