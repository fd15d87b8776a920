//! An agent's definition, as the catalog reads it from a TOML file and validates it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::agent::client_additions::{ClientAdditions, ClientTool};
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::params::{Effort, Params};
use crate::domain::agent::retry::Retry;
use crate::domain::agent::settings::{
    Choice, ListRule, MAX_COUNT, Presence, Section, Setting, Visitor,
};
use crate::domain::attachment::Digest;
use crate::domain::context::ContextSettings;
use crate::domain::http_tool::HttpTool;
use crate::domain::mcp::McpServer;
use crate::domain::run::{DEFAULT_MAX_DEPTH, HARD_MAX_DEPTH};
use crate::domain::schedule::Schedule;
use crate::domain::service::Service;
use crate::domain::text_template::TextTemplate;
use crate::domain::trigger::Trigger;
use crate::domain::usage::Cost;
use crate::domain::webhook::Webhook;

pub mod client_additions;
pub mod descriptions;
pub mod model_ref;
pub mod overrides;
pub mod params;
pub mod response_format;
pub mod retry;
pub mod schema;
pub mod settings;

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

/// An immutable definition, shared by all runs that started with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Agent {
    /// The file's name without its extension.
    pub name: String,
    /// `sha256:` and the hex digest of the file's bytes.
    pub version: String,
    /// Shown in lists, and to the models of agents that may call it.
    pub description: Option<String>,
    /// The model that answers its turns.
    pub model: ModelRef,
    /// Tried in order when `model` is overloaded, rate-limited or down after its retries.
    pub fallback_models: Vec<ModelRef>,
    /// Whether they are also tried when a model, or a filter of its service, refuses to answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fallback_on_refusal: bool,
    /// The first part of the prompt.
    pub system_prompt: String,
    /// The schema that the input of its runs must fit; unset means that they take texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Arc<RawValue>>,
    /// The user message of such a run; unset means the input as JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_template: Option<TextTemplate>,
    /// The path or the name of a skill, as written.
    pub skill: Option<String>,
    /// Whether a request named the skill. If so, its path is untrusted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_requested_skill: bool,
    /// The directories of skills that it may read, as written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skills: Vec<String>,
    /// Globs of context files, as written and relative to the workdir.
    pub files: Vec<String>,
    /// The directory of its files and tools; unset means the daemon's working directory.
    pub workdir: Option<PathBuf>,
    /// The directory among `[tools] roots` that has the workdir, if a request named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_root: Option<PathBuf>,
    /// The labels that a node needs to drive its root runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node: Vec<String>,
    /// The names of its built-in tools.
    pub tools: Vec<String>,
    /// The hosts that `url_fetch` may ask, as `net::matches` reads them; empty means every public one, or its caller's.
    #[serde(default)]
    pub allowed_hosts: Vec<String>,
    /// The agents that `call_agent` may call, without duplicates, in the file's order.
    pub sub_agents: Vec<String>,
    /// Whether replies are streamed from the provider.
    pub stream: bool,
    /// The run's time limit. Unset means the server's default for a root run, and no limit beside the parent's for a child.
    pub timeout: Option<Duration>,
    pub delegation: Delegation,
    pub params: Params,
    /// The keys of `extra` that a request may set.
    #[serde(default)]
    pub allow_extra: Vec<String>,
    /// Whether its requests to providers may use a key that came with the root's request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_provider_keys: bool,
    /// The providers for which the root's request brought keys. The keys themselves are kept in memory only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_keys: Vec<String>,
    /// Whether the tree of this root adds nothing to the memory of agents.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_memory: bool,
    /// The digest of the recorded definitions in which the tree of this root calls other agents; not in files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned_agents: Option<Digest>,
    /// The most turns of one run, 1 to [`MAX_TURNS`].
    pub max_turns: u32,
    /// What becomes of a conversation that outgrows the model's window.
    #[serde(default)]
    pub context: ContextSettings,
    /// The limits of a run with all its descendants.
    pub budget: Budget,
    /// How failed provider requests are retried.
    pub retry: Retry,
    pub memory: Memory,
    /// The settings of ad-hoc sub-agents; unset if they are disabled.
    #[serde(default)]
    pub subagent: Option<SubagentSettings>,
    /// Set for an ad-hoc sub-agent, which a call of `subagent` started; `None` for agents of files.
    #[serde(default)]
    pub ad_hoc: Option<AdHocSettings>,
    /// The MCP servers that offer it further tools, in the file's order.
    #[serde(default)]
    pub mcp_servers: Vec<McpServer>,
    /// Its tools that are HTTP requests, in the file's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub http_tools: Vec<HttpTool>,
    /// Its runs that the daemon starts at times. No run needs them.
    #[serde(skip)]
    pub schedules: Vec<Schedule>,
    /// Webhooks of others that start its runs. No run needs them.
    #[serde(skip)]
    pub triggers: Vec<Trigger>,
    /// Receives the events of its root runs.
    #[serde(default)]
    pub webhook: Option<Webhook>,
    /// The tools whose calls wait for human approval.
    #[serde(default)]
    pub approve: Vec<String>,
    /// How long each such call waits; unset means without a limit.
    #[serde(default)]
    pub approve_timeout: Option<Duration>,
    /// What the client of this run adds; not in files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<Box<ClientAdditions>>,
}

impl Agent {
    /// The tools that the client of the run executes.
    pub fn client_tools(&self) -> &[ClientTool] {
        self.client.as_ref().map_or(&[], |client| &client.tools)
    }
}

impl Default for Agent {
    /// Every setting has its default; the model is empty.
    fn default() -> Self {
        Self {
            name: String::new(),
            version: String::new(),
            description: None,
            model: ModelRef {
                provider: String::new(),
                model: String::new(),
            },
            fallback_models: Vec::new(),
            fallback_on_refusal: false,
            system_prompt: String::new(),
            input_schema: None,
            input_template: None,
            skill: None,
            has_requested_skill: false,
            skills: Vec::new(),
            files: Vec::new(),
            workdir: None,
            requested_root: None,
            node: Vec::new(),
            tools: Vec::new(),
            allowed_hosts: Vec::new(),
            sub_agents: Vec::new(),
            stream: false,
            timeout: None,
            delegation: Delegation::default(),
            params: Params::default(),
            allow_extra: Vec::new(),
            allow_provider_keys: false,
            given_keys: Vec::new(),
            keeps_memory: false,
            pinned_agents: None,
            max_turns: MAX_TURNS,
            context: ContextSettings::default(),
            budget: Budget::default(),
            retry: Retry::default(),
            memory: Memory::default(),
            subagent: None,
            ad_hoc: None,
            mcp_servers: Vec::new(),
            http_tools: Vec::new(),
            schedules: Vec::new(),
            triggers: Vec::new(),
            webhook: None,
            approve: Vec::new(),
            approve_timeout: None,
            client: None,
        }
    }
}

/// An agent file. It has no key `name`: the file's own name is the agent's.
impl Section for Agent {
    const SCHEMA: &'static str = "AgentDefinition";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let unique = ListRule::Unique;
        v.setting("description", Setting::OptionalText(&mut self.description));
        v.setting("model", Setting::Model(&mut self.model));
        v.setting(
            "fallback_models",
            Setting::Models(&mut self.fallback_models),
        );
        v.setting(
            "fallback_on_refusal",
            Setting::Flag(&mut self.fallback_on_refusal),
        );
        v.setting("system_prompt", Setting::Text(&mut self.system_prompt));
        v.setting("input_schema", Setting::Schema(&mut self.input_schema));
        v.setting(
            "input_template",
            Setting::Template(&mut self.input_template),
        );
        v.setting("skill", Setting::OptionalText(&mut self.skill));
        v.setting("skills", Setting::Texts(unique, &mut self.skills));
        v.setting("files", Setting::Texts(ListRule::Any, &mut self.files));
        v.setting("workdir", Setting::Path(&mut self.workdir));
        v.setting("node", Setting::Texts(ListRule::NodeLabels, &mut self.node));
        v.setting("tools", Setting::Texts(unique, &mut self.tools));
        v.setting(
            "allowed_hosts",
            Setting::Texts(ListRule::Hosts, &mut self.allowed_hosts),
        );
        v.setting("sub_agents", Setting::Texts(unique, &mut self.sub_agents));
        v.setting("stream", Setting::Flag(&mut self.stream));
        v.setting("timeout", Setting::Seconds(&mut self.timeout));
        v.setting("approve", Setting::Texts(unique, &mut self.approve));
        v.setting(
            "approve_timeout",
            Setting::Seconds(&mut self.approve_timeout),
        );
        v.section("sub_agents_config", &mut self.delegation);
        self.params.visit_top_level(v);
        v.setting(
            "allow_extra",
            Setting::Texts(ListRule::ExtraKeys, &mut self.allow_extra),
        );
        v.setting(
            "allow_provider_keys",
            Setting::Flag(&mut self.allow_provider_keys),
        );
        v.section("params", &mut self.params);
        let mut limits = Limits {
            max_turns: self.max_turns,
        };
        v.section("limits", &mut limits);
        self.max_turns = limits.max_turns;
        v.section("context", &mut self.context);
        v.section("budget", &mut self.budget);
        v.section("retry", &mut self.retry);
        v.section("memory", &mut self.memory);
        v.setting("mcp_servers", Setting::McpServers(&mut self.mcp_servers));
        v.setting("http_tools", Setting::HttpTools(&mut self.http_tools));
        v.setting("schedules", Setting::Schedules(&mut self.schedules));
        v.setting("triggers", Setting::Triggers(&mut self.triggers));
        v.optional_section("subagent", Presence::Enabled, &mut self.subagent);
        v.optional_section("webhook", Presence::Key("url"), &mut self.webhook);
    }
}

/// `[limits]`
#[derive(Clone)]
struct Limits {
    max_turns: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_turns: MAX_TURNS,
        }
    }
}

impl Section for Limits {
    const SCHEMA: &'static str = "AgentLimits";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        v.setting(
            "max_turns",
            Setting::Whole(1..=u64::from(MAX_TURNS), &mut self.max_turns),
        );
    }
}

/// `[subagent]`: how an agent starts ad-hoc sub-agents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubagentSettings {
    /// The deepest level of an ad-hoc sub-agent, 1 to [`HARD_MAX_DEPTH`].
    pub max_depth: u8,
    /// The most turns if the call sets no limit, 1 to [`MAX_TURNS`].
    pub default_max_turns: u32,
    /// The most bytes of a result.
    pub output_max_size: usize,
    /// When an ad-hoc sub-agent summarizes its result.
    pub summary: SummaryMode,
    /// The most ad-hoc sub-agents of one tree; unset means no limit.
    pub max_executions: Option<u64>,
    /// The most tokens of all ad-hoc sub-agents of one tree; unset means no limit.
    pub max_total_tokens: Option<u64>,
    /// The most time of all ad-hoc sub-agents of one tree together; unset means no limit.
    pub max_total_time: Option<Duration>,
    /// Their model; unset means the parent's model.
    pub model: Option<ModelRef>,
    /// Their reasoning effort; unset means the parent's.
    #[serde(default)]
    pub effort: Option<Effort>,
    /// Their service tier; unset means the parent's.
    #[serde(default)]
    pub service: Option<Service>,
}

impl Default for SubagentSettings {
    fn default() -> Self {
        Self {
            max_depth: DEFAULT_MAX_DEPTH,
            default_max_turns: 10,
            output_max_size: 4096,
            summary: SummaryMode::OnRequest,
            max_executions: None,
            max_total_tokens: None,
            max_total_time: None,
            model: None,
            effort: None,
            service: None,
        }
    }
}

impl Section for SubagentSettings {
    const SCHEMA: &'static str = "AgentSubagent";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            max_depth,
            default_max_turns,
            output_max_size,
            summary,
            max_executions,
            max_total_tokens,
            max_total_time,
            model,
            effort,
            service,
        } = self;
        v.setting(
            "max_depth",
            Setting::Whole(1..=u64::from(HARD_MAX_DEPTH), max_depth),
        );
        v.setting(
            "default_max_turns",
            Setting::Whole(1..=u64::from(MAX_TURNS), default_max_turns),
        );
        v.setting(
            "output_max_size",
            Setting::Whole(MIN_OUTPUT_BYTES..=MAX_COUNT, output_max_size),
        );
        v.setting("summary", Setting::Choice(summary));
        v.setting(
            "max_executions",
            Setting::Whole(0..=MAX_BUDGET, max_executions),
        );
        v.setting(
            "max_total_tokens",
            Setting::Whole(0..=MAX_BUDGET, max_total_tokens),
        );
        v.setting("max_total_time", Setting::Seconds(max_total_time));
        v.setting("model", Setting::OptionalModel(model));
        v.setting("effort", Setting::Choice(effort));
        v.setting("service", Setting::Choice(service));
    }
}

/// When an ad-hoc sub-agent summarizes its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "AgentSubagentSummary")]
#[serde(rename_all = "snake_case")]
pub enum SummaryMode {
    /// If the parent's call requests it.
    #[default]
    OnRequest,
    /// Always.
    Always,
}

impl Choice for SummaryMode {
    const NAMES: &'static [(&'static str, Self)] =
        &[("on_request", Self::OnRequest), ("always", Self::Always)];
}

/// The settings that only an ad-hoc sub-agent has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdHocSettings {
    /// The only tools it has; unset means all of its parent's.
    pub allowed_tools: Option<Vec<String>>,
    /// Sent when its task is done; the model's answer becomes the result.
    pub summary_prompt: Option<String>,
}

/// `[sub_agents_config]`: how an agent calls others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delegation {
    /// The levels below this agent; unset means [`DEFAULT_MAX_DEPTH`] for a root run and no further limit for a child.
    pub max_depth: Option<u8>,
    /// Whether several tool calls of one reply run concurrently.
    pub parallel: bool,
    /// The time limit of each child run.
    pub timeout: Option<Duration>,
    /// The most concurrent children of one reply; unset means no limit of its own.
    pub max_concurrent: Option<usize>,
}

impl Default for Delegation {
    fn default() -> Self {
        Self {
            max_depth: None,
            parallel: true,
            timeout: None,
            max_concurrent: None,
        }
    }
}

impl Section for Delegation {
    const SCHEMA: &'static str = "AgentDelegation";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            max_depth,
            parallel,
            timeout,
            max_concurrent,
        } = self;
        v.setting(
            "max_depth",
            Setting::Whole(0..=u64::from(HARD_MAX_DEPTH), max_depth),
        );
        v.setting("parallel", Setting::Flag(parallel));
        v.setting("timeout", Setting::Seconds(timeout));
        v.setting(
            "max_concurrent",
            Setting::Whole(0..=MAX_COUNT, max_concurrent),
        );
    }
}

/// `[budget]`: limits of a run with all its descendants; unset means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Input and output tokens together.
    pub max_tokens: Option<u64>,
    /// Money at the configured prices.
    pub max_cost: Option<Cost>,
    /// Executed tool calls.
    pub max_tool_calls: Option<u64>,
    /// Runs, including the root.
    pub max_runs: Option<u64>,
}

impl Section for Budget {
    const SCHEMA: &'static str = "AgentBudget";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            max_tokens,
            max_cost,
            max_tool_calls,
            max_runs,
        } = self;
        v.setting("max_tokens", Setting::Whole(0..=MAX_BUDGET, max_tokens));
        v.setting("max_cost_usd", Setting::Usd(MAX_COST_USD, max_cost));
        v.setting(
            "max_tool_calls",
            Setting::Whole(0..=MAX_BUDGET, max_tool_calls),
        );
        v.setting("max_runs", Setting::Whole(0..=MAX_BUDGET, max_runs));
    }
}

/// `[memory]`: the results of earlier runs that an agent remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Whether the agent has a memory.
    pub enabled: bool,
    /// Whether all keys share one memory; otherwise each key has its own.
    #[serde(default)]
    pub shared: bool,
    /// The file; unset means `<data_dir>/memory/<agent>.md`, or `<data_dir>/memory/<agent>/<key>.md`.
    pub path: Option<PathBuf>,
    /// The number of newest entries in the prompt, oldest first; 0 means all.
    pub last_n: u32,
    /// The number of entries from which on a run gets a warning; 0 means never.
    pub max_entries: u32,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            enabled: false,
            shared: false,
            path: None,
            last_n: 10,
            max_entries: 100,
        }
    }
}

impl Section for Memory {
    const SCHEMA: &'static str = "AgentMemory";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            enabled,
            shared,
            path,
            last_n,
            max_entries,
        } = self;
        v.setting("enabled", Setting::Flag(enabled));
        v.setting("shared", Setting::Flag(shared));
        v.setting("path", Setting::Path(path));
        v.setting("last_n", Setting::Whole(0..=MAX_COUNT, last_n));
        v.setting("max_entries", Setting::Whole(0..=MAX_COUNT, max_entries));
    }
}

/// Whether `name` is a valid agent name: `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`. Other names are never used as paths.
pub fn is_agent_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    (1..=64).contains(&bytes.len())
        && bytes[0].is_ascii_alphanumeric()
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
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
