//! The server's configuration as typed values with their defaults. Reading and merging its layers is `config::load`'s.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;

use crate::config::key_hash::KeyHash;
use crate::config::models::{ModelOverride, Models};
use crate::domain::glob;
use crate::domain::service::Service;

pub mod auth;
pub mod document;
pub mod environment;
pub mod key_hash;
pub mod load;
mod load_context;
pub mod models;
mod presets;
mod providers;
mod quantity;
pub mod table_reader;
mod telemetry;
mod web_tools;

/// Everything the daemon is told, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// `[server]`
    pub server: Server,
    /// `[auth]`
    pub auth: Auth,
    /// `[agents]`
    pub agents: Agents,
    /// `[data]`
    pub data: Data,
    /// `[runs]`
    pub runs: Runs,
    /// `[limits]`
    pub limits: Limits,
    /// `[tools]`
    pub tools: Tools,
    /// `[webhooks]`
    pub webhooks: Webhooks,
    /// `[providers.<name>]`, with `anthropic`, `openai` and `ollama` always there; keys and bases already looked up in
    /// the environment.
    pub providers: BTreeMap<String, Provider>,
    /// What is known of models: the shipped table under `[providers.<name>.models]` and `[prices]`.
    pub models: Models,
    /// `[telemetry]`
    pub telemetry: Telemetry,
    /// Where memories are kept: the data directory's folder `memory`.
    pub memory_dir: PathBuf,
    /// The directory of the config file, `config` without one: relative and bare skills are looked up there.
    pub config_dir: PathBuf,
    /// The config file; without one where it would be.
    pub config_file: PathBuf,
}

/// `[server]`
#[derive(Clone, Debug)]
pub struct Server {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where `/metrics` is served instead; none: beside the other routes.
    pub metrics_listen: Option<SocketAddr>,
    /// Put before every route; empty or `/something` without a slash at its end.
    pub path_prefix: String,
    /// Most bytes of a request body.
    pub max_body: usize,
    /// Most connections of one address that have not sent a whole request.
    pub max_pending_per_address: usize,
    /// Most of them in all.
    pub max_pending_connections: usize,
    /// Most seconds that `?wait` may ask for.
    pub max_wait: Duration,
    /// A root run's deadline where its file and its request say nothing.
    pub default_timeout: Duration,
    /// No root run's deadline is above this.
    pub max_timeout: Duration,
    /// How long a stop waits for running runs.
    pub drain_timeout: Duration,
}

/// `[auth]`
#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// `[auth.keys.<name>]`, in the order of their names; none asks nobody for a key.
    pub keys: Vec<Arc<ClientKey>>,
}

/// `[auth.keys.<name>]`: a key that clients come with. The key itself is nowhere in here.
#[derive(Clone, Debug)]
pub struct ClientKey {
    /// Its name, which owns the runs that it starts.
    pub name: String,
    /// What it is known by.
    pub sha256: KeyHash,
    /// What it may do.
    pub scopes: Vec<KeyScope>,
    /// The agents that exist for it; none means all.
    pub agents: Option<glob::Matcher>,
    /// The environment variable with the secret that signs webhooks of its requests; without one they may name none.
    pub webhook_secret_env: Option<String>,
}

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyScope {
    /// Start runs, and ask what they would be.
    Run,
    /// Read agents and its own runs.
    Read,
    /// Stop its own runs.
    Cancel,
    /// Everything, with everybody's runs.
    Admin,
    /// Read the daemon's metrics.
    Metrics,
}

/// `[agents]`
#[derive(Clone, Debug)]
pub struct Agents {
    /// Directories of agent files; the first that has a name wins.
    pub dirs: Vec<PathBuf>,
    /// Whether changes are picked up as they happen.
    pub watch: bool,
}

/// `[data]`
#[derive(Clone, Debug)]
pub struct Data {
    /// The data directory: database and memory.
    pub dir: PathBuf,
    /// What a committed step survives.
    pub durability: Durability,
    /// `[data.retention]`
    pub retention: Retention,
}

/// `[data.retention]`: how long ended root runs are kept, with their trees. Without it they are kept for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Of those that completed.
    pub completed: RetentionLimit,
    /// Of those that failed.
    pub failed: RetentionLimit,
    /// Of those that were cancelled.
    pub cancelled: RetentionLimit,
}

/// What is kept of the root runs that ended in one way. Where both are set, a run goes by whichever is reached first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionLimit {
    /// For how long after its end; none for ever.
    pub age: Option<Duration>,
    /// How many, the newest; none for all.
    pub count: Option<usize>,
}

/// What a committed step survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The death of the process.
    #[default]
    Process,
    /// The loss of power too: the disk is synced before anything is answered.
    Power,
}

/// `[runs]`
#[derive(Clone, Debug)]
pub struct Runs {
    /// Root runs at work at once.
    pub max_running: usize,
    /// Root runs waiting for a slot.
    pub max_queued: usize,
    /// Root runs of one agent at work at once, by its name; others have no limit of their own.
    pub per_agent: BTreeMap<String, usize>,
    /// Root runs of one key at work at once.
    pub per_key: PerKey,
    /// Runs of one tree over its whole life, the root counted.
    pub max_tree: usize,
    /// Runs at work at once, children counted.
    pub max_live: usize,
    /// Calls of one reply that start child runs.
    pub max_delegations: usize,
    /// Calls of one reply.
    pub max_calls: usize,
}

impl Default for Runs {
    fn default() -> Self {
        Self {
            max_running: 10_000,
            max_queued: 100_000,
            per_agent: BTreeMap::new(),
            per_key: PerKey::default(),
            max_tree: 1000,
            max_live: 50_000,
            max_delegations: 64,
            max_calls: 128,
        }
    }
}

/// `[runs] per_key`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerKey {
    /// By the key's name.
    pub named: BTreeMap<String, usize>,
    /// Of each key that is not named; none means no limit.
    pub others: Option<usize>,
}

impl PerKey {
    /// The limit of the key of this name; none where it has none.
    pub fn limit_for(&self, name: &str) -> Option<usize> {
        self.named.get(name).copied().or(self.others)
    }
}

/// `[limits]`
#[derive(Clone, Debug)]
pub struct Limits {
    /// After this many equal turns in a row a hint is added; 0 turns it off.
    pub loop_warn: u32,
    /// After this many the run fails; 0 turns it off.
    pub loop_stop: u32,
    /// Most bytes of all context files together.
    pub context_files: usize,
    /// Most labels of a run.
    pub labels: usize,
    /// Most bytes of one run's conversation: above it the run is not sent to its model again.
    pub conversation_bytes: usize,
    /// Most messages of its conversation that a session's next run goes on with.
    pub session_messages: usize,
    /// Most bytes of them.
    pub session_bytes: usize,
    /// Most pictures and files of a request, and of what a session's next run goes on with.
    pub attachments: usize,
    /// Most bytes of one of them, as decoded.
    pub attachment_bytes: usize,
}

impl Limits {
    /// What bounds the pictures and files of one request.
    pub fn attachment_limits(&self) -> AttachmentLimits {
        AttachmentLimits {
            count: self.attachments,
            bytes: self.attachment_bytes,
            total: self.conversation_bytes,
        }
    }
}

/// What bounds pictures and files.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachmentLimits {
    /// How many.
    pub count: usize,
    /// Bytes of one.
    pub bytes: usize,
    /// Bytes of all together.
    pub total: usize,
}

/// `[tools]`
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// Where a request's `workdir` and `skill` may point; empty refuses such overrides.
    pub roots: Vec<PathBuf>,
    /// Most bytes of a tool's result.
    pub max_result: usize,
    /// What bounds the pictures and files of a result, as `[limits]` says.
    pub attachments: AttachmentLimits,
    /// With more tools of MCP servers than this an agent finds them by searching; 0 offers all.
    pub deferred_above: usize,
    /// `[tools.url_fetch]`
    pub url_fetch: UrlFetch,
    /// `[tools.web_search]`; none where no service is configured.
    pub web_search: Option<WebSearch>,
    /// `allow_commands`: how commands are run; none where they are not.
    pub commands: Option<Commands>,
}

/// `[tools.url_fetch]`
#[derive(Clone, Debug)]
pub struct UrlFetch {
    /// Hosts that may be at addresses which are not public: names and addresses, in lower case, without brackets.
    pub allow_hosts: Vec<String>,
    /// For one call, its redirects included.
    pub timeout: Duration,
}

impl Default for UrlFetch {
    fn default() -> Self {
        Self {
            allow_hosts: Vec::new(),
            timeout: Duration::from_secs(30),
        }
    }
}

/// `[tools.web_search]`
#[derive(Clone, Debug)]
pub struct WebSearch {
    /// The wire it speaks.
    pub kind: SearchKind,
    /// What is asked; its query is kept. It may hold a secret.
    pub url: SecretString,
    /// The environment variable with the service's key; none where it needs none.
    pub api_key_env: Option<String>,
    /// The key, where the variable is set.
    pub api_key: Option<SecretString>,
    /// For one search.
    pub timeout: Duration,
}

/// The wires of search services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchKind {
    /// SearXNG's JSON.
    Searxng,
    /// Brave's web search.
    Brave,
}

/// What `[tools]` says of `run_command`.
#[derive(Clone, Debug, Default)]
pub struct Commands {
    /// Whether they are run where the system cannot confine them.
    pub allow_unconfined: bool,
    /// Whether confined ones reach the network.
    pub network: bool,
    /// Their environment, but for `HOME` and `TMPDIR`, which are made for each; what `pass_env` names may be secret.
    pub environment: BTreeMap<String, SecretString>,
}

/// `[webhooks]`
#[derive(Clone, Debug)]
pub struct Webhooks {
    /// Hosts exempt from the https and private-address rules: names and addresses, in lower case, without brackets.
    pub allow_hosts: Vec<String>,
    /// The environment variable with the secret that signs where an agent's file names none.
    pub secret_env: Option<String>,
    /// The wait before the first retry; each later one is twice as long.
    pub first_retry: Duration,
}

/// `[providers.<name>]`
#[derive(Clone, Debug)]
pub struct Provider {
    /// The wire it speaks.
    pub kind: ProviderKind,
    /// Its key, from the environment or the file.
    pub api_key: Option<SecretString>,
    /// The environment variable that would hold the key, for messages.
    pub key_env: String,
    /// Where it is, without a slash at its end; none means the service's own address.
    pub base_url: Option<String>,
    /// Whether it is a well-known service at its own address, which wants a key.
    pub is_preset: bool,
    /// The variable that would hold the address of a well-known service, where that is not known.
    pub missing_address: Option<&'static str>,
    /// Sent with every request.
    pub headers: BTreeMap<String, SecretString>,
    /// Requests at once; none means no limit.
    pub max_concurrent: Option<usize>,
    /// Bound on one request; none means only the run's deadline.
    pub timeout: Option<Duration>,
    /// Anthropic: the `anthropic-version` to send.
    pub version: Option<String>,
    /// OpenAI: `max_tokens` or `max_completion_tokens`; none means by the address.
    pub max_tokens_field: Option<String>,
    /// OpenAI: which of its two wires; none means by the address.
    pub api: Option<OpenAiApi>,
    /// Most bytes of one reply.
    pub max_reply: usize,
    /// The longest pause between two looks at a batch.
    pub batch_poll: Duration,
    /// The tiers that it sells beside the usual one.
    pub services: Vec<Service>,
    /// Scripted: files or directories of scripts.
    pub scripts: Vec<PathBuf>,
    /// What it says of single models, by their names.
    pub models: BTreeMap<String, ModelOverride>,
}

/// The wires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderKind {
    /// Anthropic's Messages API.
    Anthropic,
    /// OpenAI's Responses API or its Chat Completions API.
    Openai,
    /// Ollama's chat API.
    Ollama,
    /// The embedded scripted provider.
    Scripted,
}

/// The two wires of OpenAI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenAiApi {
    /// Responses, which OpenAI's current models want.
    Responses,
    /// Chat Completions, which many other servers speak.
    Chat,
}

/// `[telemetry]`
#[derive(Clone, Debug, Default)]
pub struct Telemetry {
    /// What is logged, in tracing's filter language.
    pub log: Option<String>,
    /// How: none means human on a terminal, JSON otherwise.
    pub log_format: Option<LogFormat>,
    /// Where traces go; none means nowhere.
    pub otlp: Option<Otlp>,
}

/// Where and how traces are sent.
#[derive(Clone, Debug)]
pub struct Otlp {
    /// The URL that takes them, its path included.
    pub endpoint: String,
    /// Sent with every request.
    pub headers: BTreeMap<String, SecretString>,
    /// What we are called there.
    pub service: String,
    /// The share of traces that is kept of those that begin here, 0 to 1.
    pub sampling: f64,
    /// Whether spans hold what models, tools and their users say.
    pub content: bool,
}

/// Forms of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For a person.
    Human,
    /// For a machine, one JSON object a line.
    Json,
}

/// The default of the longest pause between two looks at a batch.
pub const DEFAULT_BATCH_POLL: Duration = Duration::from_secs(60);

/// The default bound on one provider reply, in bytes.
pub const DEFAULT_MAX_REPLY: usize = 32 << 20;
