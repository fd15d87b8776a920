//! The settings of an agent, each declared once, and the agent that a run uses.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::SchemaGenerator;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::domain::agent::client_additions::{ClientAdditions, ClientTool};
use crate::domain::agent::model_ref::{ModelName, ModelRef};
use crate::domain::agent::params::{Effort, Params, check_extra_keys};
use crate::domain::agent::retry::Retry;
use crate::domain::agent::tool_use::EvalTools;
use crate::domain::attachment::Digest;
use crate::domain::context::ContextSettings;
use crate::domain::http_tool::{HttpTool, HttpToolView};
use crate::domain::mcp::{McpServer, McpServerView};
use crate::domain::name::is_name;
use crate::domain::node::check_labels;
use crate::domain::rate_limit::Priority;
use crate::domain::rollout::{PromotionGate, Rollout};
use crate::domain::run::{DEFAULT_MAX_DEPTH, HARD_MAX_DEPTH};
use crate::domain::schedule::Schedule;
use crate::domain::scorer::Scorer;
use crate::domain::service::Service;
use crate::domain::text_template::TextTemplate;
use crate::domain::trigger::Trigger;
use crate::domain::usage::Cost;
use crate::domain::webhook::Webhook;
use crate::settings::choice::choice;
use crate::settings::kinds::{
    FilePath, Flag, Nested, NestedIf, ObjectSchema, OneOf, Parsed, ReadElsewhere, Seconds, Text,
    Texts, Unique, Whole,
};
use crate::settings::section::{Audience, Kind, section};
use crate::settings::table_reader::{MAX_COUNT, TableReader};
use crate::ssrf;

pub mod client_additions;
pub mod model_ref;
pub mod overrides;
pub mod params;
pub mod response_format;
pub mod retry;
pub mod tool_use;

/// The most turns of a run, and the default.
pub const MAX_TURNS: u32 = 50;

/// The highest limit on tokens, calls or runs.
const MAX_BUDGET: u64 = i64::MAX as u64;
/// The highest limit on costs, in USD.
const MAX_COST_USD: f64 = 1e6;
/// The lowest limit on the size of an ad-hoc sub-agent's result, in bytes.
const MIN_OUTPUT_BYTES: u64 = 1024;

/// The built-in tools that an agent may list in `tools`. The server's configuration may forbid some of them.
pub const BUILT_IN_TOOLS: &[&str] = &[
    "copy_path",
    "create_directory",
    "delete_path",
    "edit_file",
    "find_path",
    "grep",
    "list_directory",
    "move_path",
    "read_file",
    "run_command",
    "url_fetch",
    "web_search",
    "write_file",
];

section! {
    /// An agent's file, with defaults filled in. The file's own name is the agent's.
    #[derive(Clone, Debug, Serialize, Deserialize)]
    #[serde(default)]
    pub struct AgentSettings in "AgentDefinition" {
        /// What the agent does, for people and for the models of agents that may call it.
        pub description: Option<String>, Text, example = "\"Answers questions in one sentence\"";
        /// The model that replies: `provider/model`. Providers are anthropic, openai, ollama and those of the server's configuration.
        pub model: ModelRef = ModelRef::unset(), ModelName;
        /// Models that are tried in order if the model's provider is overloaded, rate-limited or down after its retries.
        pub fallback_models: Vec<ModelRef>, ModelName;
        /// Whether they are also tried if the model, or a filter of its service, refuses to answer.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        pub fallback_on_refusal: bool, Flag;
        /// The first part of the prompt.
        pub system_prompt: String, Text;
        /// The JSON Schema of the objects that runs take as input, as a table or as JSON text; null means that runs take texts.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub input_schema: Option<Arc<RawValue>>, ObjectSchema, example = r#"[input_schema]
type = "object"
required = ["ticket"]
properties = { ticket = { type = "object", properties = { id = { type = "integer" }, text = { type = "string" } } } }"#;
        /// The user message, with `{name}` for values of the input (see `input_schema`); null means the input as JSON.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub input_template: Option<TextTemplate>, Parsed(TextTemplate::parse), example = "\"Sort ticket {ticket.id}: {ticket.text}\"";
        /// A file with further instructions: a path that is absolute, begins with `~`, or is relative to the config directory; a
        /// bare name means `skills/<name>/SKILL.md` there.
        pub skill: Option<String>, Text, example = "\"code-review\"";
        /// Skills (agentskills.io) that the model reads when a task needs them: directories with a `SKILL.md`; a bare name means
        /// `skills/<name>` in the config directory.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub skills: Vec<String>, Unique(Ok), example = "[\"pdf-forms\"]";
        /// Globs of text files that enter the prompt, relative to `workdir`, with `**` for any depth.
        pub files: Vec<String>, Texts, example = "[\"README.md\", \"docs/**/*.md\"]";
        /// The directory of files and of the file tools, which reach nothing else; null means the daemon's working directory.
        pub workdir: Option<PathBuf>, FilePath, example = "\"/srv/project\"";
        /// Labels that a node needs to drive root runs of the agent, if several nodes share a database.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub node: Vec<String>, Unique(|labels| check_labels(&labels).map(|()| labels)), example = "[\"gpu\"]";
        /// The built-in tools that the agent may use (docs/tools/): `list_directory`, `read_file`, `find_path` and `grep` read;
        /// `write_file`, `edit_file`, `create_directory`, `copy_path`, `move_path` and `delete_path` change what is in `workdir`;
        /// `url_fetch` and `web_search` read the web; `run_command` runs commands, where the server allows it.
        pub tools: Vec<String>, Unique(Ok), example = "[\"list_directory\", \"read_file\", \"find_path\", \"grep\"]";
        /// The hosts that `url_fetch` may reach: names, addresses, or `*.example.com` for all subdomains; empty means every public
        /// host, or the caller's hosts if another agent calls this one.
        pub allowed_hosts: Vec<String>, Unique(parse_hosts), example = "[\"docs.rs\", \"*.wikipedia.org\"]";
        /// The agents that this one may call with the tool `call_agent`, by the names of their files.
        pub sub_agents: Vec<String>, Unique(Ok), example = "[\"researcher\", \"critic\"]";
        /// Which requests come first while a provider's rate limit makes some wait: interactive, or background, which gets at least a
        /// tenth; also of the runs that it calls.
        #[serde(skip_serializing_if = "is_interactive")]
        pub priority: Priority, OneOf;
        /// Whether replies are streamed from the provider.
        pub stream: bool, Flag;
        /// The time limit of a run in seconds; 0 means the server's.
        pub timeout: Option<Duration>, Seconds(0);
        /// The tools whose calls wait for a person's approval (docs/tools/): those of `tools`, `call_agent`, `subagent`,
        /// `read_skill`, or `<server>__<tool>`.
        pub approve: Vec<String>, Unique(Ok), example = "[\"call_agent\"]";
        /// Seconds that each such call waits; then it is denied. 0 means no limit.
        pub approve_timeout: Option<Duration>, Seconds(0);
        /// Whether the agent may ask people; absent if it may not.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ask: Option<AskSettings>, NestedIf(|ask: &AskSettings| ask.enabled);
        /// Whether the agent may sleep, and wait for events; absent if it may not.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub wait: Option<WaitSettings>, NestedIf(|wait: &WaitSettings| wait.enabled);
        /// Seconds that each question to a person waits; then `ask_default` is the answer. 0 means no limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ask_timeout: Option<Duration>, Seconds(0);
        /// The answer to a question that nobody answers in time, as text or as JSON that fits the question's schema; null means
        /// that the model gets an error.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub ask_default: Option<String>, Text, example = "\"Do what you think is best\"";
        /// How the agent calls others.
        pub delegation ("sub_agents_config"): Delegation, Nested;
        /// The keys of `params.extra` that a request may set.
        pub allow_extra: Vec<String>, Unique(check_extra_keys), example = "[\"service_tier\"]";
        /// Whether a request may bring its own keys for providers (the header `X-Provider-Key`).
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        pub allow_provider_keys: bool, Flag;
        /// Parameters of provider requests.
        pub params: Params, Nested;
        /// Limits of one run.
        pub limits: Limits, Nested;
        /// How a conversation that outgrows the model's window is shortened.
        pub context: ContextSettings, Nested;
        /// Limits of a run with all its descendants.
        pub budget: Budget, Nested;
        /// How failed provider requests are retried.
        pub retry: Retry, Nested;
        /// The results of earlier runs that the agent remembers.
        pub memory: Memory, Nested;
        /// MCP servers: the tools of each are offered as `<name>__<tool>`. `${VAR}` is a variable of the daemon's environment.
        pub mcp_servers: Vec<McpServer>, McpServers, example = r#"[[mcp_servers]]
name = "tickets"
transport = "streamable-http"
url = "https://tickets.example.com/mcp"
headers = { X-Team = "${TICKETS_TEAM}" }
# A server that requires OAuth; without this table, set the header Authorization.
# With grant = "device_code" and no secret, an operator logs in: axed auth login tickets
oauth = { grant = "client_credentials", client_id = "axed", client_secret_env = "TICKETS_SECRET" }
tools = []                      # only these; empty means all
timeout = 60                    # seconds that one call may take
open_timeout = 10               # seconds that a run waits for the server to start, up to 600
required = false                # true: a run fails that begins while the server is not available

[[mcp_servers]]
name = "files"
transport = "stdio"
command = "npx"
args = ["-y", "@modelcontextprotocol/server-filesystem", "/srv/papers"]
env = { LOG_LEVEL = "warn" }"#;
        /// Tools that are HTTP requests. `{name}` is an argument, percent-encoded in `url`; `${VAR}` is a variable of the daemon's
        /// environment.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub http_tools: Vec<HttpTool>, HttpTools, example = r#"[[http_tools]]
name = "find_ticket"
description = "Finds tickets by words"
method = "GET"                  # GET, POST, PUT, PATCH or DELETE
url = "https://tickets.example.com/api/{project}/tickets?q={words}"
headers = { Authorization = "Bearer ${TICKETS_TOKEN}" }
body = '{{"words": {words}}}'   # unset: the arguments that url does not use, as JSON
parameters = { type = "object", required = ["project"], properties = { project = { type = "string" }, words = { type = "string" } } }
repeat = "with_key"             # if the end of a call is not known: never, safe (send again) or with_key; unset: GET is safe, others never
idempotency_header = "Idempotency-Key" # has the key of the call, which stays the same if it is sent again
probe = { url = "https://tickets.example.com/api/calls/{key}" } # requested first: 200 is the result, 404 means not done
timeout = 30                    # seconds

# Operations of an OpenAPI document (3.0 or 3.1), a file relative to this one or a URL.
[[http_tools]]
openapi = "petstore.yaml"
operations = ["listPets", "POST /pets"]
prefix = "pets_"                # before each tool's name
base_url = "https://pets.example.com/v1" # unset: the document's first server"#;
        /// Runs that the daemon starts at times: minute, hour, day of the month, month, day of the week.
        #[serde(skip)]
        pub schedules: Vec<Schedule>, ReadElsewhere, example = r#"[[schedules]]
name = "morning"
cron = "30 7 * * mon-fri"
timezone = "Europe/Berlin"      # unset means UTC
input = "Sum up the tickets of yesterday." # a table if there is an input_schema
overlap = "skip"                # if the last run has not ended: skip, queue (one waits) or allow
missed = "skip"                 # times without a daemon: skip, or once for the latest of the last day
labels = { team = "blue" }
key = "ada"                     # whose runs they are; unset means that only admins see them

# An evaluation with all scorers instead of a run: if it is worse than the last one, the webhook gets eval.regressed.
[[schedules]]
name = "nightly"
cron = "0 3 * * *"
eval = { dataset = "release", against = "last" }"#;
        /// Webhooks of other services that start runs, at `POST /triggers/<agent>/<trigger>`.
        #[serde(skip)]
        pub triggers: Vec<Trigger>, ReadElsewhere, example = r#"[[triggers]]
name = "issues"
kind = "github"                 # whose signatures: standard, github or stripe
secret_env = "GITHUB_SECRET"    # the environment variable with the secret
input_template = "Triage issue {body.issue.number}: {body.issue.title}"     # unset means the whole body
labels = { source = "github" }
key = "ada"                     # whose runs they are; unset means that only admins see them

# Wakes runs of the key that wait for this event, instead of starting one.
[[triggers]]
name = "payments"
kind = "stripe"
secret_env = "STRIPE_SECRET"
wake = { event = "{body.type}", key = "{body.data.object.id}" }"#;
        /// What scores the agent's root runs after their end: an agent (judge), assertions or a service (http).
        #[serde(skip)]
        pub scorers: Vec<Scorer>, ReadElsewhere, example = r#"[[scorers]]
name = "grounded"
kind = "judge"
agent = "grounding-judge"       # gets input, output and context; answers with JSON: value, comment
sample = 0.1                    # the share of the runs; unset means all
per_day_usd = 2.0               # unset means any amount

[[scorers]]
name = "short"
kind = "assert"
expect = { completed = true, max_turns = 4 }    # as [expect] of a test

[[scorers]]
name = "policy"
kind = "http"
url = "https://scores.example.com/axed"
secret_env = "SCORES_SECRET"    # signs the requests; unset means the secret of [webhooks]"#;
        /// A candidate for the agent's next version; absent if there is none.
        #[serde(skip)]
        pub rollout: Option<Rollout>, NestedIf(|rollout: &Rollout| !rollout.candidate.is_empty());
        /// The evaluation before the candidate becomes the current version; absent if there is none.
        #[serde(skip)]
        pub gate: Option<PromotionGate>, NestedIf(|gate: &PromotionGate| !gate.dataset.is_empty());
        /// How the agent starts ad-hoc sub-agents; absent if they are disabled.
        pub subagent: Option<SubagentSettings>, NestedIf(|subagent: &SubagentSettings| subagent.enabled);
        /// A receiver of the events of the agent's root runs; absent if there is none.
        pub webhook: Option<Webhook>, NestedIf(|webhook: &Webhook| !webhook.url.is_empty());
    }
    also in params {
        /// How much the model reasons before it answers: none, minimal, low, medium, high, xhigh or max; null means the
        /// provider's default. A level that the model does not know becomes its nearest (`axed models` prints them).
        effort: OneOf, example = "\"medium\"";
        /// The length of a summary of the model's reasoning in the event `reasoning.delta`: auto, concise or detailed; null means no
        /// summary. OpenAI's Responses API and Anthropic's support it.
        reasoning_summary: OneOf, example = "\"auto\"";
        /// How long the provider caches the prompt for the run's next turns (Anthropic): 5m, 1h or off.
        cache: OneOf;
        /// The tier of the provider's service: default, flex (slower and cheaper; OpenAI) or batch (within a day, at half the price;
        /// OpenAI and Anthropic); null means the provider's default.
        service: OneOf, example = "\"flex\"";
    }
}

fn is_interactive(priority: &Priority) -> bool {
    *priority == Priority::Interactive
}

/// An agent as a run uses it, shared by all runs that started with it. It reads like its settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Agent {
    /// The file's name without its extension.
    pub name: String,
    /// `sha256:` and the hex digest of the file's bytes.
    pub version: String,
    /// Those of its file, with what the request of the run overrides.
    pub settings: AgentSettings,
    /// Whether a request named the skill. If so, its path is untrusted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_requested_skill: bool,
    /// The directory among `[tools] roots` that has the workdir, if a request named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_root: Option<PathBuf>,
    /// The providers for which the root's request brought keys. The keys themselves are kept in memory only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_keys: Vec<String>,
    /// Whether the tree of this root adds nothing to the memory of agents.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_memory: bool,
    /// What the tree of this root, which an evaluation has started, does with calls of tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Box<EvalTools>>,
    /// The digest of the recorded definitions in which the tree of this root calls other agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned_agents: Option<Digest>,
    /// Set for an ad-hoc sub-agent, which a call of `subagent` started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ad_hoc: Option<AdHocSettings>,
    /// What the client of this run adds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<Box<ClientAdditions>>,
}

impl Agent {
    /// The tools that the client of the run executes.
    pub fn client_tools(&self) -> &[ClientTool] {
        self.client.as_ref().map_or(&[], |client| &client.tools)
    }

    pub fn subagent_settings(&self) -> SubagentSettings {
        self.subagent.clone().unwrap_or_default()
    }
}

impl Deref for Agent {
    type Target = AgentSettings;

    fn deref(&self) -> &AgentSettings {
        &self.settings
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut AgentSettings {
        &mut self.settings
    }
}

section! {
    /// `[limits]`: limits of one run.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Limits in "AgentLimits" {
        /// The most turns of one run, which are requests to the model.
        pub max_turns: u32 = MAX_TURNS, Whole(1..=u64::from(MAX_TURNS));
    }
}

section! {
    /// `[ask]`: how the agent asks people.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct AskSettings in "AgentAsk" {
        /// Whether the agent has the tool `ask_person`.
        pub enabled: bool, Flag;
    }
}

section! {
    /// `[wait]`: how the agent waits for times and events.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct WaitSettings in "AgentWait" {
        /// Whether the agent has the tools `sleep` and `wait_for`.
        pub enabled: bool, Flag;
        /// The longest wait of one call, in seconds.
        pub max: Duration = Duration::from_secs(30 * 24 * 3600), Seconds(1);
    }
}

section! {
    /// `[subagent]`: how the agent starts ad-hoc sub-agents, which have its model, prompt and tools.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct SubagentSettings in "AgentSubagent" {
        /// Whether the agent has the tool `subagent`.
        pub enabled: bool, Flag;
        /// The deepest level of an ad-hoc sub-agent, 1 to 5.
        pub max_depth: u8 = DEFAULT_MAX_DEPTH, Whole(1..=u64::from(HARD_MAX_DEPTH));
        /// The most turns if the call sets no limit.
        pub default_max_turns: u32 = 10, Whole(1..=u64::from(MAX_TURNS));
        /// The most bytes of a result.
        pub output_max_size: usize = 4096, Whole(MIN_OUTPUT_BYTES..=MAX_COUNT);
        /// When an ad-hoc sub-agent summarizes its result: always, or on_request.
        pub summary: SummaryMode, OneOf;
        /// The most ad-hoc sub-agents of one tree; 0 means no limit.
        pub max_executions: Option<u64>, Whole(0..=MAX_BUDGET);
        /// The most tokens of all ad-hoc sub-agents of one tree; 0 means no limit.
        pub max_total_tokens: Option<u64>, Whole(0..=MAX_BUDGET);
        /// The most seconds of all ad-hoc sub-agents of one tree together; 0 means no limit.
        pub max_total_time: Option<Duration>, Seconds(0);
        /// The model of ad-hoc sub-agents; null means the parent's.
        pub model: Option<ModelRef>, ModelName, example = "\"ollama/qwen3\"";
        /// The reasoning effort of ad-hoc sub-agents; null means the parent's.
        pub effort: Option<Effort>, OneOf, example = "\"low\"";
        /// The service tier of ad-hoc sub-agents; null means the parent's.
        pub service: Option<Service>, OneOf, example = "\"flex\"";
    }
}

choice! {
    /// When an ad-hoc sub-agent summarizes its result.
    #[derive(Default)]
    #[schemars(rename = "AgentSubagentSummary")]
    pub enum SummaryMode {
        /// If the parent's call requests it.
        #[default]
        OnRequest = "on_request",
        /// Always.
        Always = "always",
    }
}

/// The settings that only an ad-hoc sub-agent has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdHocSettings {
    /// The only tools it has; unset means all of its parent's.
    pub allowed_tools: Option<Vec<String>>,
    /// Sent when its task is done; the model's answer becomes the result.
    pub summary_prompt: Option<String>,
}

section! {
    /// `[sub_agents_config]`: how the agent calls others.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Delegation in "AgentDelegation" {
        /// The levels of runs below the agent, at most 5; 0 means the default (3), or the parent's limit.
        pub max_depth: Option<u8>, Whole(0..=u64::from(HARD_MAX_DEPTH)), example = "3";
        /// Whether several tool calls of one reply run concurrently.
        pub parallel: bool = true, Flag;
        /// The time limit of each child run in seconds; 0 means the remaining time of the run.
        pub timeout: Option<Duration>, Seconds(0), example = "120";
        /// The most concurrent children of one reply, and the most in the background; 0 means no limit of its own.
        pub max_concurrent: Option<usize>, Whole(0..=MAX_COUNT), example = "8";
        /// Whether calls may start children in the background, whose ends reach the agent later.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        pub background: bool, Flag, example = "true";
        /// What happens if the agent replies with its final text while children in the background work: wait, or cancel (they are
        /// cancelled); null means wait.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub on_end: Option<OnEnd>, OneOf, example = "\"cancel\"";
    }
}

choice! {
    /// What a final text means for children in the background.
    #[schemars(rename = "AgentDelegationOnEnd")]
    pub enum OnEnd {
        /// The run waits for them, and replies again.
        Wait = "wait",
        /// They are cancelled.
        Cancel = "cancel",
    }
}

section! {
    /// `[budget]`: limits of a run with all its descendants.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Budget in "AgentBudget" {
        /// The most input and output tokens together; 0 means no limit.
        pub max_tokens: Option<u64>, Whole(0..=MAX_BUDGET);
        /// The highest cost in US dollars, at the configured prices; 0 means no limit.
        pub max_cost ("max_cost_usd"): Option<Cost>, Usd;
        /// The most executed tool calls; 0 means no limit.
        pub max_tool_calls: Option<u64>, Whole(0..=MAX_BUDGET);
        /// The most runs, the root included; 0 means no limit.
        pub max_runs: Option<u64>, Whole(0..=MAX_BUDGET);
    }
}

section! {
    /// `[memory]`: the results of earlier runs that the agent remembers.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Memory in "AgentMemory" {
        /// Whether the agent has a memory.
        pub enabled: bool, Flag;
        /// Whether all keys share one memory; otherwise each key has its own.
        pub shared: bool, Flag;
        /// The memory's file; null means `<data directory>/memory/<agent>.md`, or `<agent>/<key>.md` there. If the server has keys,
        /// this needs `shared = true`. With `data.url`, memories are in the database, and a path is refused.
        pub path: Option<PathBuf>, FilePath, example = "\"/srv/memory/notes.md\"";
        /// The number of newest entries in the prompt, oldest first; 0 means all.
        pub last_n: u32 = 10, Whole(0..=MAX_COUNT);
        /// The number of entries from which on a run gets a warning; 0 means never. `axed gc AGENT` trims them.
        pub max_entries: u32 = 100, Whole(0..=MAX_COUNT);
    }
}

/// US dollars; 0 means unset.
struct Usd;

impl Kind<Option<Cost>> for Usd {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<Cost>) {
        let usd = table.number(key, 0.0..=MAX_COST_USD);
        *value = usd.filter(|usd| *usd > 0.0).map(Cost::from_usd);
    }

    fn show(&self, value: &Option<Cost>, _audience: Audience) -> Value {
        json!(value.map_or(0.0, |cost| cost.to_usd()))
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Value {
        json!({"type": "number", "minimum": 0.0, "maximum": MAX_COST_USD})
    }
}

/// `[[http_tools]]`, which the catalog reads, since it has their documents.
struct HttpTools;

impl Kind<Vec<HttpTool>> for HttpTools {
    fn read(&self, _table: &mut TableReader<'_>, _key: &'static str, _value: &mut Vec<HttpTool>) {}

    fn show(&self, value: &Vec<HttpTool>, audience: Audience) -> Value {
        let view = match audience {
            Audience::Client => HttpToolView::for_client,
            Audience::Operator => HttpToolView::for_operator,
        };
        json!(value.iter().map(view).collect::<Vec<_>>())
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        generator
            .subschema_for::<Vec<HttpToolView<'static>>>()
            .to_value()
    }
}

/// `[[mcp_servers]]`, which the catalog reads.
struct McpServers;

impl Kind<Vec<McpServer>> for McpServers {
    fn read(&self, _table: &mut TableReader<'_>, _key: &'static str, _value: &mut Vec<McpServer>) {}

    fn show(&self, value: &Vec<McpServer>, audience: Audience) -> Value {
        let view = match audience {
            Audience::Client => McpServerView::for_client,
            Audience::Operator => McpServerView::for_operator,
        };
        json!(value.iter().map(view).collect::<Vec<_>>())
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        generator
            .subschema_for::<Vec<McpServerView<'static>>>()
            .to_value()
    }
}

fn parse_hosts(texts: Vec<String>) -> Result<Vec<String>, String> {
    let texts = texts.iter();
    let hosts = texts.map(|text| ssrf::parse_host_pattern(text).map_err(|why| why.to_string()));
    hosts.collect()
}

/// Whether `name` is a valid agent name: `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`. Other names are never used as paths.
pub fn is_agent_name(name: &str) -> bool {
    is_name(name)
}

#[cfg(test)]
mod tests {
    use super::is_agent_name;

    #[test]
    fn names_cannot_leave_a_directory() {
        for good in ["a", "planner-2", "A.b_c", "0"] {
            assert!(is_agent_name(good), "{good}");
        }
        for bad in [
            "",
            "..",
            ".a",
            "a/b",
            "a\\b",
            "a\0",
            "ä",
            "-a",
            &"a".repeat(65),
        ] {
            assert!(!is_agent_name(bad), "{bad}");
        }
    }
}
