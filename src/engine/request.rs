//! What a caller requests of the runner, and the answers that it gets at once.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use crate::catalog::LoadError;
use crate::domain::agent::Budget;
use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::agent::model_ref::{ModelRef, ModelRefError};
use crate::domain::agent::overrides::ParamsOverride;
use crate::domain::agent::params::Params;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content;
use crate::domain::context::ContextSettings;
use crate::domain::json_schema::compiled::Mismatch;
use crate::domain::message::{Message, ToolSpec};
use crate::domain::node::describe_labels;
use crate::domain::rate_limit::Priority;
use crate::domain::run::RunId;
use crate::domain::trace::TraceContext;
use crate::domain::warning::RunWarning;
use crate::engine::recording::playback::Playback;
use crate::engine::state::period_budgets::BudgetExhausted;
use crate::engine::state::pinned_agents::PinnedRoot;
use crate::engine::state::provider_keys::Keys;
use crate::engine::state::sessions::OnBusy;
use crate::fair::admission::QueueFull;
use crate::providers::registry::ProviderUnavailable;
use crate::store::{IdempotencyClaim, StoreError};

/// A request for a root run.
#[derive(Clone, Debug, Default)]
pub struct RunRequest {
    pub agent: String,
    pub input: Option<Content>,
    /// Whether the input is the JSON of an object, which only agents with an `input_schema` take.
    pub is_object_input: bool,
    /// Appended to the user message.
    pub context: Option<String>,
    /// Messages from before the run. Not allowed together with a session.
    pub messages: Vec<Message>,
    /// Whether the client keeps the conversation, and sends it again with its next message.
    pub is_chat: bool,
    /// The session that the run continues.
    pub session: Option<String>,
    /// What happens if the session has an unfinished run.
    pub on_busy: OnBusy,
    pub overrides: Overrides,
    /// The client's labels, already checked.
    pub labels: BTreeMap<String, String>,
    /// The name of the requesting key; `None` without keys.
    pub owner: Option<String>,
    /// The idempotency key. A repeated request fails with [`StoreError::AlreadyClaimed`].
    pub claim: Option<IdempotencyClaim>,
    /// An additional webhook for the run's events.
    pub webhook: Option<WebhookRequest>,
    /// Whether the tree streams from its providers; `None` leaves that to the agent's settings.
    pub stream: Option<bool>,
    /// The caller's trace context.
    pub trace: Option<Box<TraceContext>>,
    /// The client's own provider keys for the tree's requests.
    pub provider_keys: Keys,
    /// Of a run that an evaluation starts: its definition, which need not be an agent's of today.
    pub definition: Option<Box<PinnedRoot>>,
    /// The recording that a test plays back. Only for an engine that runs tests.
    pub playback: Option<Arc<Playback>>,
}

/// Settings of the request that replace the agent's.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `provider/model`.
    pub model: Option<String>,
    /// A path within the configured roots.
    pub skill: Option<String>,
    /// A path within the configured roots.
    pub workdir: Option<PathBuf>,
    pub params: ParamsOverride<ResponseFormat>,
    pub timeout: Option<Duration>,
    pub budget: Budget,
    /// Which of its requests to providers come first.
    pub priority: Option<Priority>,
    /// Instructions and tools of the client.
    pub client: ClientAdditions,
}

/// A request's webhook, before it is checked.
#[derive(Clone, Default)]
pub struct WebhookRequest {
    pub url: Option<String>,
    /// Event names; empty means the terminal events.
    pub events: Vec<String>,
}

impl RunRequest {
    /// Has its requests to providers wait for those of runs that somebody waits for, unless it says otherwise.
    pub fn in_background(mut self) -> Self {
        self.overrides.priority.get_or_insert(Priority::Background);
        self
    }
}

impl fmt::Debug for WebhookRequest {
    /// Omits the URL, which may contain a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookAsk")
            .field("events", &self.events)
            .finish_non_exhaustive()
    }
}

/// Why a run was not accepted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("{0}")]
    Model(ModelRefError),
    #[error(transparent)]
    Provider(#[from] ProviderUnavailable),
    /// An override is missing or outside the configured roots.
    #[error("{reason}")]
    Override {
        /// The field of the request body.
        field: &'static str,
        reason: String,
    },
    /// The input does not fit the agent.
    #[error("{}", .0.first().map_or_else(String::new, Mismatch::to_string))]
    Input(Vec<Mismatch>),
    /// A parameter that the agent does not allow requests to set, or that its model rejects.
    #[error("{reason}")]
    Param {
        /// The field below `/params` of the request body.
        field: &'static str,
        reason: String,
    },
    /// A provider key that the agent does not accept, or for a provider that is not configured.
    #[error("{0}")]
    ProviderKey(String),
    /// The requested model has no known price, and the run has a cost budget.
    #[error(
        "the price of {0} is not known, and this run has a budget in money: name a model with a price, or have [prices.\"{0}\"] added to the server's configuration"
    )]
    Unpriced(ModelRef),
    /// This node has not the labels that the agent requires, and no other node can take the run.
    #[error("runs of agent {agent} need a node with {}; {why}", describe_labels(.labels))]
    NoNode {
        agent: String,
        labels: Arc<[String]>,
        why: &'static str,
    },
    #[error("the queue is full: {} running, {} queued; try again later", .0.running, .0.queued)]
    QueueFull(QueueFull),
    /// The session has an unfinished run, and `on_busy` is `reject`.
    #[error(
        "session {session} is busy with {run}; wait for its end, or send on_busy queue or cancel_previous"
    )]
    SessionBusy {
        session: String,
        /// The unfinished run.
        run: RunId,
    },
    #[error(transparent)]
    BudgetExhausted(#[from] BudgetExhausted),
    #[error("the daemon is stopping")]
    Draining,
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The prompt could not be assembled. Only for a dry run: a real run is accepted and fails.
    #[error(transparent)]
    Prompt(#[from] crate::catalog::prompt::PromptError),
    /// The agent's memory could not be read. Only for a dry run.
    #[error("{0}")]
    Memory(String),
}

/// A dry run: what a run would do, without a request to a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DryRun {
    /// The name of the agent.
    pub agent: String,
    /// The version of the agent's definition.
    pub agent_version: String,
    /// The model that would reply.
    pub model: ModelRef,
    /// Tried in order if the model is overloaded, rate-limited or down.
    pub fallback_models: Vec<ModelRef>,
    /// The assembled system prompt.
    pub system_prompt: String,
    /// The user message; contains the digests of images and files, not their bytes.
    pub message: Content,
    /// The directory of the run's files and tools.
    pub workdir: PathBuf,
    /// The parameters of provider requests.
    pub params: Params,
    /// The tools that the model can call.
    pub tools: Vec<ToolSpec>,
    /// The names of further tools, which the model can find with `tool_search`.
    pub deferred_tools: Vec<String>,
    /// How the run may delegate.
    pub sub_agents: DrySubAgents,
    /// The limits of the run.
    pub limits: DryLimits,
    /// What becomes of a conversation that outgrows the model's window.
    pub context: ContextSettings,
    /// What would go wrong without failing the run, as far as it is known before the first turn.
    pub warnings: Vec<RunWarning>,
}

/// The delegation part of a dry run.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "DryRunSubAgents")]
pub struct DrySubAgents {
    /// The agents that the run may call.
    pub names: Vec<String>,
    /// The deepest level of the tree, counted from the root.
    pub max_depth: u8,
    /// Whether the calls of one reply run concurrently.
    pub parallel: bool,
    /// The time limit of each child in seconds; 0 means the remaining time of the run.
    pub timeout: u64,
}

/// The limits part of a dry run.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "DryRunLimits")]
pub struct DryLimits {
    /// The most turns of the run.
    pub max_turns: u32,
    /// The time limit in seconds.
    pub timeout: u64,
    /// The most tokens of the tree; null means no limit.
    pub max_tokens: Option<u64>,
    /// The highest cost of the tree in USD; null means no limit.
    pub max_cost_usd: Option<f64>,
    /// The most tool calls of the tree; null means no limit.
    pub max_tool_calls: Option<u64>,
    /// The most runs of the tree; null means no limit.
    pub max_runs: Option<u64>,
}
