//! The server's configuration as typed values with their defaults. `config::load` reads and merges its sources.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;

use crate::config::clients::Clients;
use crate::config::cluster::Cluster;
use crate::config::key_hash::KeyHash;
use crate::config::models::lookup::Models;
use crate::config::models::row::ModelRow;
use crate::config::waits::Waits;
use crate::domain::glob;
use crate::domain::period_budget::PeriodBudget;
use crate::domain::rate_limit;
use crate::domain::redaction::Redactor;
use crate::domain::service::Service;
use crate::settings::choice::choice;
use crate::settings::kinds::{
    Age, FilePath, Flag, Limit, Milliseconds, NOT_A_KEY, Nested, OneOf, Parsed, ReadBy, Seconds,
    Secret, Size, Text, Whole, check_variable_name,
};
use crate::settings::section::section;
use crate::settings::table_reader::MAX_COUNT;
use crate::ssrf::SsrfGuard;

pub mod auth;
mod budgets;
pub mod clients;

pub mod cluster;
mod data_section;
pub mod environment;
pub mod in_force;
pub mod key_hash;
pub mod lint;
pub mod load;
mod load_context;
pub mod models;
pub mod presets;
mod providers;
pub mod proxies;
pub mod secrets;
mod telemetry;
mod variables;
pub mod waits;
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
    pub waits: Waits,
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

section! {
    /// `[server]`
    #[derive(Clone, Debug)]
    pub struct Server {
        /// Port 0 means any free port.
        pub listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8080)), Parsed(parse_listen_address);
        /// Serves `/metrics` on its own address; `None` serves it with the other routes.
        pub metrics_listen: Option<SocketAddr>, Parsed(parse_listen_address);
        /// Prefix of every route: empty, or `/something` without a trailing slash.
        pub path_prefix: String, Parsed(proxies::parse_path_prefix);
        /// The proxies whose `X-Forwarded-*` and `Forwarded` headers are read.
        pub trusted_proxies: Vec<IpNet>, ReadBy(proxies::read_trusted_proxies);
        /// `None`: pages of other origins cannot use the API.
        pub cors: Option<Cors>, ReadBy(proxies::read_cors);
        /// Whether responses are compressed for clients that accept it.
        pub compression: bool = true, Flag;
        /// Maximum size of a request body in bytes.
        pub max_body: usize = 4 << 20, Size;
        /// Maximum size of an event of a trigger in bytes.
        pub max_trigger_body: usize = 1 << 20, Size;
        /// Maximum bytes of all request bodies that are being read.
        pub body_memory: usize = 256 << 20, Size;
        /// Maximum number of connections from one address that have not sent a whole request.
        pub max_pending_per_address: usize = 1_000, Whole(1..=MAX_COUNT);
        /// The same over all addresses.
        pub max_pending_connections: usize = 10_000, Whole(1..=MAX_COUNT);
        /// Upper bound of `?wait`.
        pub max_wait: Duration = Duration::from_secs(300), Seconds(0);
        /// A root run's deadline if neither its agent nor its request sets one.
        pub default_timeout: Duration = Duration::from_secs(120), Seconds(1);
        /// Upper bound of every root run's deadline.
        pub max_timeout: Duration = Duration::from_secs(86_400), Seconds(1);
        /// How long a shutdown waits for running runs.
        pub drain_timeout: Duration = Duration::from_secs(25), Seconds(0);
    }
}

fn parse_listen_address(text: &str) -> Result<SocketAddr, String> {
    // The only name that needs no resolver.
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    numeric.parse().map_err(|_| {
        format!("is {text:?}, which is not an address and port; write one such as 127.0.0.1:8080 (port 0 takes a free port)")
    })
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

choice! {
    /// What a key may do.
    pub enum KeyScope {
        /// Start and steer runs, dry-run, approve or deny calls as they are.
        Run = "run",
        Read = "read",
        /// Cancel its own runs.
        Cancel = "cancel",
        /// Decide about calls, also with other arguments.
        Approve = "approve",
        /// Everything, including the runs of other keys.
        Admin = "admin",
        Metrics = "metrics",
    }
}

section! {
    /// `[agents]`
    #[derive(Clone, Debug)]
    pub struct Agents {
        /// Directories of agent files. If two define the same name, the first wins.
        pub dirs: Vec<PathBuf> = vec![PathBuf::from("agents")], FilePath;
        /// Whether to reload agent files when they change.
        pub watch: bool = true, Flag;
        /// The directory of datasets; `None`: `datasets` beside the first directory of agents.
        pub datasets: Option<PathBuf>, FilePath;
    }
}

impl Agents {
    /// The directory of datasets, which may not exist.
    pub fn datasets_dir(&self) -> PathBuf {
        let beside = || self.dirs.first()?.parent();
        match &self.datasets {
            Some(dir) => dir.clone(),
            None => beside().unwrap_or(Path::new("")).join("datasets"),
        }
    }
}

section! {
    /// `[data]`: where runs are recorded, what of them, and how long they are kept.
    #[derive(Clone, Debug)]
    pub struct Data {
        /// Holds the database, unless there is a URL, and the memories.
        pub dir: PathBuf = PathBuf::from("data"), FilePath;
        /// The PostgreSQL database; `None` for one file in the directory. May contain a password.
        pub url: Option<SecretString>, Secret(data_section::check_database_url);
        /// The same database without the pooler that `url` leads through: `LISTEN` needs a session.
        pub listen_url: Option<SecretString>, Secret(data_section::check_database_url);
        pub cluster: Cluster, NOT_A_KEY;
        /// What a committed step survives.
        pub durability: Durability, OneOf;
        pub retention: Retention, ReadBy(data_section::read_retention);
        /// How long sums of usage are kept: a year with a month before it; `None` means for ever.
        pub usage_retention: Option<Duration> = Some(Duration::from_secs(400 * 86_400)), Age;
        pub requests: RequestRecording, ReadBy(data_section::read_recording);
    }
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

section! {
    /// Retention of the root runs with one outcome. If both limits are set, a run is deleted when the first is exceeded.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RetentionLimit {
        /// Time since the run's end; `None` means no limit.
        pub age: Option<Duration>, Age;
        /// Number of newest runs to keep; `None` means no limit.
        pub count: Option<usize>, Whole(0..=MAX_COUNT);
    }
}

choice! {
    /// What a committed step survives.
    #[derive(Default)]
    pub enum Durability {
        /// A crash of the process.
        #[default]
        Process = "process",
        /// A power failure too: the disk is synced before a client gets a response.
        Power = "power",
    }
}

choice! {
    /// What follows if it is not known whether a call was performed.
    #[derive(Default)]
    pub enum Reconcile {
        /// The run waits for a person.
        #[default]
        Wait = "wait",
        /// The run fails as `interrupted`.
        Fail = "fail",
    }
}

section! {
    /// `[runs]`
    #[derive(Clone, Debug)]
    pub struct Runs {
        /// Root runs that run at once.
        pub max_running: usize = 10_000, Whole(1..=MAX_COUNT);
        /// Root runs in the queue.
        pub max_queued: usize = 100_000, Whole(0..=MAX_COUNT);
        /// Bytes that queued and waiting runs keep in memory.
        pub max_queued_bytes: usize = 512 << 20, Size;
        /// Concurrent root runs by agent name. Agents that are not listed have no limit of their own.
        pub per_agent: BTreeMap<String, usize>, ReadBy(load::read_per_agent);
        /// Concurrent root runs of one key.
        pub per_key: PerKey, NOT_A_KEY;
        /// Runs of one tree over its whole life, including the root.
        pub max_tree: usize = 1000, Limit;
        /// Runs that run at once, including children.
        pub max_live: usize = 50_000, Limit;
        /// Tool calls of one reply that start child runs.
        pub max_delegations: usize = 64, Limit;
        /// Tool calls of one reply.
        pub max_calls: usize = 128, Limit;
        /// How long a tree waits for a node with its labels; `None` means without a limit.
        pub unserved: Option<Duration> = Some(Duration::from_secs(3600)), Age;
        /// What follows if it is not known whether a call was performed, and it must not be repeated.
        pub reconcile: Reconcile, OneOf;
        /// How long a run waits for a person who knows; `None` means without a limit.
        pub reconcile_timeout: Option<Duration>, Age;
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

section! {
    /// `[limits]`
    #[derive(Clone, Debug)]
    pub struct Limits {
        /// Number of equal turns in a row after which the model gets a hint; 0 disables the hint.
        pub loop_warn: u32 = 3, Whole(0..=MAX_COUNT);
        /// Number of equal turns in a row after which the run fails; 0 disables the check.
        pub loop_stop: u32 = 6, Whole(0..=MAX_COUNT);
        /// Maximum total size of a prompt's context files in bytes.
        pub context_files: usize = 1 << 20, Size;
        /// Maximum number of labels of a run.
        pub labels: usize = 64, Whole(0..=MAX_COUNT);
        /// Maximum size of one run's conversation in bytes. A run above it fails.
        pub conversation_bytes: usize = 32 << 20, Size;
        /// Maximum number of messages that a session's next run takes over.
        pub session_messages: usize = 200, Whole(1..=MAX_COUNT);
        /// Maximum size of these messages in bytes.
        pub session_bytes: usize = 1 << 20, Size;
        /// Maximum number of images and files in a request, and in what a session's next run takes over.
        pub attachments: usize = 20, Whole(0..=MAX_COUNT);
        /// Maximum size of one image or file in bytes, after decoding.
        pub attachment_bytes: usize = 10 << 20, Size;
    }
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

section! {
    /// `[tools]`, whose keys for `run_command` are in [`Commands`].
    #[derive(Clone, Debug)]
    pub struct Tools {
        /// Directories that a request's `workdir` and `skill` must be in. If empty, requests may not set them.
        pub roots: Vec<PathBuf>, FilePath;
        /// Maximum size of a tool result in bytes.
        pub max_result: usize = 256 << 10, Size;
        /// Limits of the images and files of a result, from `[limits]`.
        pub attachments: AttachmentLimits, NOT_A_KEY;
        /// If an agent has more MCP tools than this, it finds them by search; 0 always offers all.
        pub deferred_above: usize = 40, Whole(0..=MAX_COUNT);
        pub url_fetch: UrlFetch, Nested;
        /// `None` if no service is configured.
        pub web_search: Option<WebSearch>, NOT_A_KEY;
        /// How commands run; `None` if they are not allowed.
        pub commands: Option<Commands>, NOT_A_KEY;
    }
}

section! {
    /// `[tools.url_fetch]`
    #[derive(Clone, Debug)]
    pub struct UrlFetch {
        /// Hosts that may have private addresses: names and addresses, in lower case, without brackets.
        pub allow_hosts: Vec<String>, web_tools::AllowHosts;
        /// For one call, including redirects.
        pub timeout: Duration = Duration::from_secs(30), Seconds(1);
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

choice! {
    /// The APIs of search services.
    pub enum SearchKind {
        Searxng = "searxng",
        Brave = "brave",
    }
}

section! {
    /// The settings of `run_command` in `[tools]`.
    #[derive(Clone, Debug)]
    pub struct Commands {
        /// Whether commands run if the system cannot sandbox them.
        pub allow_unconfined: bool, Flag;
        /// Whether sandboxed commands have network access.
        pub network: bool, Flag;
        /// Processes and threads of one command at once.
        pub max_processes ("max_command_processes"): usize = 256, Whole(16..=MAX_COUNT);
        /// Bytes of memory of all processes of one command.
        pub max_memory ("max_command_memory"): usize = 4 << 30, Size;
        /// Environment of the commands, without `HOME` and `TMPDIR`, which each command gets anew. The values that
        /// `pass_env` adds may be secret.
        pub environment: BTreeMap<String, SecretString>, NOT_A_KEY;
    }
}

section! {
    /// `[webhooks]`
    #[derive(Clone, Debug)]
    pub struct Webhooks {
        /// Hosts that need no https and may have private addresses: names and addresses, in lower case, without brackets.
        pub allow_hosts: Vec<String>, web_tools::AllowHosts;
        /// Environment variable with the secret that signs if an agent's file names none.
        pub secret_env: Option<String>, Parsed(check_variable_name);
        /// Wait before the first retry; it doubles with each further retry.
        pub first_retry ("first_retry_ms"): Duration = Duration::from_secs(5), Milliseconds(1..=3_600_000);
    }
}

impl Webhooks {
    /// The guard for their URLs.
    pub fn guard(&self) -> SsrfGuard {
        SsrfGuard::new(self.allow_hosts.iter().cloned(), "[webhooks] allow_hosts")
    }
}

section! {
    /// `[logins]`: how the operator's logins at MCP servers are kept.
    #[derive(Clone, Debug)]
    pub struct Logins {
        /// The folder `logins` of the data directory.
        pub dir: PathBuf, NOT_A_KEY;
        /// The environment variable with the key that encrypts them.
        pub key_env: String = "AXED_LOGIN_KEY".to_owned(), Parsed(check_variable_name);
    }
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
    /// `[providers.<name>.limits]`, by a model's name, the beginning of several before `*`, or `*` for each other model.
    pub limits: BTreeMap<String, rate_limit::Limits>,
    /// `[providers.<name>.models]`, by model name.
    pub models: BTreeMap<String, ModelRow>,
}

choice! {
    /// The provider APIs.
    pub enum ProviderKind {
        /// The Messages API.
        Anthropic = "anthropic",
        /// The Responses API or the Chat Completions API.
        Openai = "openai",
        /// The chat API.
        Ollama = "ollama",
        /// Canned replies from files, for demos and tests.
        Scripted = "scripted",
    }
}

impl ProviderKind {
    /// Whether its models cost nothing unless a price is configured.
    pub fn is_free(self) -> bool {
        matches!(self, Self::Ollama | Self::Scripted)
    }
}

choice! {
    /// The APIs of OpenAI.
    pub enum OpenAiApi {
        /// Responses; OpenAI's current models require it.
        Responses = "responses",
        /// Chat Completions; many other servers offer it.
        Chat = "chat",
    }
}

section! {
    /// `[telemetry]`
    #[derive(Clone, Debug)]
    pub struct Telemetry {
        /// A filter in the syntax of `tracing`.
        pub log: Option<String>, Text;
        /// `None` means human on a terminal, JSON otherwise.
        pub log_format: Option<LogFormat>, OneOf;
        /// `None` exports no traces.
        pub otlp: Option<Otlp>, NOT_A_KEY;
    }
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

choice! {
    /// The format of logs.
    pub enum LogFormat {
        Human = "human",
        /// One JSON object a line.
        Json = "json",
    }
}

/// The directory of a scripted provider's scripts, beside the configuration file, if it names none.
pub const DEFAULT_SCRIPTS: &str = "scripts";
pub const DEFAULT_BATCH_POLL: Duration = Duration::from_secs(60);

/// Bytes.
pub const DEFAULT_MAX_REPLY: usize = 32 << 20;
