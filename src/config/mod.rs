//! The server's configuration as typed values with their defaults. `config::load` reads and merges its sources.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;

use crate::config::clients::Clients;
use crate::config::cluster::Cluster;
use crate::config::key_hash::KeyHash;
use crate::config::models::lookup::Models;
use crate::config::models::row::ModelRow;
use crate::domain::glob;
use crate::domain::period_budget::PeriodBudget;
use crate::domain::redaction::Redactor;
use crate::domain::service::Service;
use crate::ssrf::SsrfGuard;

pub mod auth;
mod budgets;
pub mod clients;
mod clients_section;

pub mod cluster;
mod data_section;
pub mod environment;
pub mod in_force;
pub mod key_hash;
pub mod lint;
pub mod load;
mod load_context;
mod logins;
pub mod models;
pub mod presets;
mod providers;
pub mod proxies;
pub mod secrets;
mod telemetry;
mod variables;
mod web_tools;

/// The whole configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    pub server: Server,
    pub auth: Auth,
    pub agents: Agents,
    pub data: Data,
    pub runs: Runs,
    pub limits: Limits,
    pub tools: Tools,
    pub webhooks: Webhooks,
    pub logins: Logins,
    pub clients: Clients,
    /// `[providers.<name>]` and the built-in providers. Keys and base URLs from the environment are filled in.
    pub providers: BTreeMap<String, Provider>,
    /// The shipped model table, changed by `[models] file`, `[providers.<name>.models]` and `[prices]`.
    pub models: Models,
    /// `[budgets.<name>]`, ordered by name.
    pub budgets: Vec<PeriodBudget>,
    pub telemetry: Telemetry,
    /// The directory of the config file, `config` if there is none. Relative and bare skills are looked up there.
    pub config_dir: PathBuf,
    /// The config file; if there is none, the path where it would be.
    pub config_file: PathBuf,
    /// The files with secrets that the environment names.
    pub secret_files: Vec<PathBuf>,
    /// The configured data directory if another one is used.
    pub configured_data_dir: Option<PathBuf>,
}

impl Config {
    /// Keeps runs and memories in another directory. Logins stay, because they are the operator's.
    pub fn with_data_dir(mut self, dir: PathBuf) -> Self {
        self.configured_data_dir = Some(std::mem::replace(&mut self.data.dir, dir));
        self
    }
}

#[derive(Clone, Debug)]
pub struct Server {
    /// Port 0 means any free port.
    pub listen: SocketAddr,
    /// Serves `/metrics` on its own address; `None` serves it with the other routes.
    pub metrics_listen: Option<SocketAddr>,
    /// Prefix of every route: empty, or `/something` without a trailing slash.
    pub path_prefix: String,
    /// The proxies whose `X-Forwarded-*` and `Forwarded` headers are read.
    pub trusted_proxies: Vec<IpNet>,
    /// `None`: pages of other origins cannot use the API.
    pub cors: Option<Cors>,
    /// Whether responses are compressed for clients that accept it.
    pub compression: bool,
    /// Maximum size of a request body in bytes.
    pub max_body: usize,
    /// Maximum size of an event of a trigger in bytes.
    pub max_trigger_body: usize,
    /// Maximum bytes of all request bodies that are being read.
    pub body_memory: usize,
    /// Maximum number of connections from one address that have not sent a whole request.
    pub max_pending_per_address: usize,
    /// The same over all addresses.
    pub max_pending_connections: usize,
    /// Upper bound of `?wait`.
    pub max_wait: Duration,
    /// A root run's deadline if neither its agent nor its request sets one.
    pub default_timeout: Duration,
    /// Upper bound of every root run's deadline.
    pub max_timeout: Duration,
    /// How long a shutdown waits for running runs.
    pub drain_timeout: Duration,
}

/// `[server.cors]`: web pages that may use the API.
#[derive(Clone, Debug)]
pub struct Cors {
    pub origins: AllowedOrigins,
    /// Whether browsers may send cookies and the like, which only a proxy in front of axed reads.
    pub credentials: bool,
}

#[derive(Clone, Debug)]
pub enum AllowedOrigins {
    Any,
    /// As browsers write them in `Origin`.
    Only(Vec<String>),
}

impl AllowedOrigins {
    pub fn contains(&self, origin: &[u8]) -> bool {
        match self {
            Self::Any => true,
            Self::Only(origins) => origins.iter().any(|one| one.as_bytes() == origin),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// `[auth.keys.<name>]`, ordered by name. If empty, clients need no key.
    pub keys: Vec<Arc<ClientKey>>,
}

/// `[auth.keys.<name>]`: a client's key. Holds the key's hash, never the key.
#[derive(Clone, Debug)]
pub struct ClientKey {
    /// Owner of the runs that the key starts.
    pub name: String,
    pub sha256: KeyHash,
    pub scopes: Vec<KeyScope>,
    /// The agents that the key can see; `None` means all.
    pub agents: Option<glob::Matcher>,
    /// Environment variable with the secret that signs webhooks of this key's requests. `None`: the requests may not
    /// set a webhook.
    pub webhook_secret_env: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyScope {
    /// Start and steer runs, dry-run, approve or deny calls as they are.
    Run,
    Read,
    /// Cancel its own runs.
    Cancel,
    /// Decide about calls, also with other arguments.
    Approve,
    /// Everything, including the runs of other keys.
    Admin,
    Metrics,
}

#[derive(Clone, Debug)]
pub struct Agents {
    /// Directories of agent files. If two define the same name, the first wins.
    pub dirs: Vec<PathBuf>,
    /// Whether to reload agent files when they change.
    pub watch: bool,
}

#[derive(Clone, Debug)]
pub struct Data {
    /// Holds the database, unless there is a URL, and the memories.
    pub dir: PathBuf,
    /// The PostgreSQL database; `None` for one file in the directory. May contain a password.
    pub url: Option<SecretString>,
    /// The same database without the pooler that `url` leads through: `LISTEN` needs a session.
    pub listen_url: Option<SecretString>,
    pub cluster: Cluster,
    /// What a committed step survives.
    pub durability: Durability,
    pub retention: Retention,
    /// How long sums of usage are kept; `None` means for ever.
    pub usage_retention: Option<Duration>,
    pub requests: RequestRecording,
}

/// `[data] requests` and `redact`.
#[derive(Clone, Debug, Default)]
pub struct RequestRecording {
    /// Whether requests to providers are not recorded.
    pub is_off: bool,
    /// What is removed from them before.
    pub redactor: Redactor,
}

/// `[data.retention]`: how long ended root runs are kept, each with its tree. The default keeps them for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    pub completed: RetentionLimit,
    pub failed: RetentionLimit,
    pub cancelled: RetentionLimit,
}

/// Retention of the root runs with one outcome. If both limits are set, a run is deleted when the first is exceeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetentionLimit {
    /// Time since the run's end; `None` means no limit.
    pub age: Option<Duration>,
    /// Number of newest runs to keep; `None` means no limit.
    pub count: Option<usize>,
}

/// What a committed step survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// A crash of the process.
    #[default]
    Process,
    /// A power failure too: the disk is synced before a client gets a response.
    Power,
}

#[derive(Clone, Debug)]
pub struct Runs {
    /// Root runs that run at once.
    pub max_running: usize,
    /// Root runs in the queue.
    pub max_queued: usize,
    /// Bytes that queued and waiting runs keep in memory.
    pub max_queued_bytes: usize,
    /// Concurrent root runs by agent name. Agents that are not listed have no limit of their own.
    pub per_agent: BTreeMap<String, usize>,
    /// Concurrent root runs of one key.
    pub per_key: PerKey,
    /// Runs of one tree over its whole life, including the root.
    pub max_tree: usize,
    /// Runs that run at once, including children.
    pub max_live: usize,
    /// Tool calls of one reply that start child runs.
    pub max_delegations: usize,
    /// Tool calls of one reply.
    pub max_calls: usize,
    /// How long a tree waits for a node with its labels; `None` means without a limit.
    pub unserved: Option<Duration>,
}

impl Default for Runs {
    fn default() -> Self {
        Self {
            max_running: 10_000,
            max_queued: 100_000,
            max_queued_bytes: 512 << 20,
            per_agent: BTreeMap::new(),
            per_key: PerKey::default(),
            max_tree: 1000,
            max_live: 50_000,
            max_delegations: 64,
            max_calls: 128,
            unserved: Some(Duration::from_secs(3600)),
        }
    }
}

/// `[runs] per_key`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerKey {
    /// By key name.
    pub named: BTreeMap<String, usize>,
    /// Limit of each key that is not in `named`; `None` means no limit.
    pub others: Option<usize>,
}

impl PerKey {
    /// `None` means no limit.
    pub fn limit_for(&self, name: &str) -> Option<usize> {
        self.named.get(name).copied().or(self.others)
    }
}

#[derive(Clone, Debug)]
pub struct Limits {
    /// Number of equal turns in a row after which the model gets a hint; 0 disables the hint.
    pub loop_warn: u32,
    /// Number of equal turns in a row after which the run fails; 0 disables the check.
    pub loop_stop: u32,
    /// Maximum total size of a prompt's context files in bytes.
    pub context_files: usize,
    /// Maximum number of labels of a run.
    pub labels: usize,
    /// Maximum size of one run's conversation in bytes. A run above it fails.
    pub conversation_bytes: usize,
    /// Maximum number of messages that a session's next run takes over.
    pub session_messages: usize,
    /// Maximum size of these messages in bytes.
    pub session_bytes: usize,
    /// Maximum number of images and files in a request, and in what a session's next run takes over.
    pub attachments: usize,
    /// Maximum size of one image or file in bytes, after decoding.
    pub attachment_bytes: usize,
}

impl Limits {
    /// Limits of the images and files of one request.
    pub fn attachment_limits(&self) -> AttachmentLimits {
        AttachmentLimits {
            count: self.attachments,
            bytes: self.attachment_bytes,
            total: self.conversation_bytes,
        }
    }
}

/// Limits of images and files.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachmentLimits {
    /// Number.
    pub count: usize,
    /// Bytes of one.
    pub bytes: usize,
    /// Bytes of all together.
    pub total: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// Directories that a request's `workdir` and `skill` must be in. If empty, requests may not set them.
    pub roots: Vec<PathBuf>,
    /// Maximum size of a tool result in bytes.
    pub max_result: usize,
    /// Limits of the images and files of a result, from `[limits]`.
    pub attachments: AttachmentLimits,
    /// If an agent has more MCP tools than this, it finds them by search; 0 always offers all.
    pub deferred_above: usize,
    pub url_fetch: UrlFetch,
    /// `None` if no service is configured.
    pub web_search: Option<WebSearch>,
    /// How commands run; `None` if they are not allowed.
    pub commands: Option<Commands>,
}

#[derive(Clone, Debug)]
pub struct UrlFetch {
    /// Hosts that may have private addresses: names and addresses, in lower case, without brackets.
    pub allow_hosts: Vec<String>,
    /// For one call, including redirects.
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

#[derive(Clone, Debug)]
pub struct WebSearch {
    pub kind: SearchKind,
    /// The URL to query; its own query is kept. It may hold a secret.
    pub url: SecretString,
    /// Environment variable with the service's key; `None` if it needs none.
    pub api_key_env: Option<String>,
    /// The key, if the variable is set.
    pub api_key: Option<SecretString>,
    /// For one search.
    pub timeout: Duration,
}

/// The APIs of search services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchKind {
    Searxng,
    Brave,
}

/// The settings of `run_command` in `[tools]`.
#[derive(Clone, Debug, Default)]
pub struct Commands {
    /// Whether commands run if the system cannot sandbox them.
    pub allow_unconfined: bool,
    /// Whether sandboxed commands have network access.
    pub network: bool,
    /// Processes and threads of one command at once.
    pub max_processes: usize,
    /// Bytes of memory of all processes of one command.
    pub max_memory: usize,
    /// Environment of the commands, without `HOME` and `TMPDIR`, which each command gets anew. The values that
    /// `pass_env` adds may be secret.
    pub environment: BTreeMap<String, SecretString>,
}

#[derive(Clone, Debug)]
pub struct Webhooks {
    /// Hosts that need no https and may have private addresses: names and addresses, in lower case, without brackets.
    pub allow_hosts: Vec<String>,
    /// Environment variable with the secret that signs if an agent's file names none.
    pub secret_env: Option<String>,
    /// Wait before the first retry; it doubles with each further retry.
    pub first_retry: Duration,
}

impl Webhooks {
    /// The guard for their URLs.
    pub fn guard(&self) -> SsrfGuard {
        SsrfGuard::new(self.allow_hosts.iter().cloned(), "[webhooks] allow_hosts")
    }
}

/// How the operator's logins at MCP servers are kept.
#[derive(Clone, Debug)]
pub struct Logins {
    /// The folder `logins` of the data directory.
    pub dir: PathBuf,
    /// The environment variable with the key that encrypts them.
    pub key_env: String,
}

#[derive(Clone, Debug)]
pub struct Provider {
    pub kind: ProviderKind,
    /// From the environment or the file.
    pub api_key: Option<SecretString>,
    /// The environment variable for the key, for messages.
    pub key_env: String,
    /// Without a trailing slash; `None` means the service's own address.
    pub base_url: Option<String>,
    /// Whether this is a well-known service at its own address. Such a service requires a key.
    pub is_preset: bool,
    /// The environment variable for the address of a well-known service, if it is required and not set.
    pub missing_address: Option<&'static str>,
    /// Sent with every request.
    pub headers: BTreeMap<String, SecretString>,
    /// Maximum number of concurrent requests; `None` means no limit.
    pub max_concurrent: Option<usize>,
    /// Timeout of one request; `None` means only the run's deadline.
    pub timeout: Option<Duration>,
    /// Anthropic only: the `anthropic-version` header.
    pub version: Option<String>,
    /// OpenAI only: `max_tokens` or `max_completion_tokens`; `None` chooses by the service.
    pub max_tokens_field: Option<String>,
    /// OpenAI only; `None` chooses by the service.
    pub api: Option<OpenAiApi>,
    /// Maximum size of one reply in bytes.
    pub max_reply: usize,
    /// Maximum interval between two polls of a batch.
    pub batch_poll: Duration,
    /// The service tiers that it offers besides the default one.
    pub services: Vec<Service>,
    /// Scripted only: script files or directories of them.
    pub scripts: Vec<PathBuf>,
    /// `[providers.<name>.models]`, by model name.
    pub models: BTreeMap<String, ModelRow>,
}

/// The provider APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderKind {
    /// The Messages API.
    Anthropic,
    /// The Responses API or the Chat Completions API.
    Openai,
    /// The chat API.
    Ollama,
    /// Canned replies from files, for demos and tests.
    Scripted,
}

impl ProviderKind {
    /// Whether its models cost nothing unless a price is configured.
    pub fn is_free(self) -> bool {
        matches!(self, Self::Ollama | Self::Scripted)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenAiApi {
    /// Responses; OpenAI's current models require it.
    Responses,
    /// Chat Completions; many other servers offer it.
    Chat,
}

#[derive(Clone, Debug, Default)]
pub struct Telemetry {
    /// A filter in the syntax of `tracing`.
    pub log: Option<String>,
    /// `None` means human on a terminal, JSON otherwise.
    pub log_format: Option<LogFormat>,
    /// `None` exports no traces.
    pub otlp: Option<Otlp>,
}

/// Export of traces over OTLP.
#[derive(Clone, Debug)]
pub struct Otlp {
    /// The whole URL, including its path.
    pub endpoint: String,
    /// Sent with every request.
    pub headers: BTreeMap<String, SecretString>,
    /// What the spans say of the daemon: `service.name` and others.
    pub resource: BTreeMap<String, String>,
    /// Share of the traces that start here to sample, 0 to 1.
    pub sampling: f64,
    /// Whether spans contain prompts, replies, tool arguments and tool results.
    pub content: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Human,
    /// One JSON object a line.
    Json,
}

pub const DEFAULT_BATCH_POLL: Duration = Duration::from_secs(60);

/// Bytes.
pub const DEFAULT_MAX_REPLY: usize = 32 << 20;
