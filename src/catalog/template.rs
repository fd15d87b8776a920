//! The file that `axed agents init` writes: every key of an agent file with its default as a comment.

use crate::config::models::table::SHIPPED;

/// Returns a valid agent file for this name.
pub fn template(name: &str) -> String {
    let mut models = SHIPPED.defaults.iter().map(String::as_str);
    let mut next_model = || models.next().unwrap_or_default();
    // A name contains only letters, digits, dots, dashes and underscores, so TOML needs no escapes.
    TEMPLATE
        .replace("{model}", next_model())
        .replace("{fallback}", next_model())
        .replace("{name}", name)
}

const TEMPLATE: &str = r#"# An agent. Its name is this file's name without ".toml".
# Every key is here; a key behind a # shows its default or an example.
# To test it, save a run that went well, and play it back after each change, without a model:
#   axed runs save RUN tests/{name}.toml && axed test

name = "{name}"
# Shown in lists, and to the models of agents that may call this one.
# description = "Answers questions in one sentence"

# provider/model. Providers are anthropic, openai, ollama and those of the server's configuration.
model = "{model}"
# Used in this order if the model's provider is overloaded, rate-limited or down after its retries.
# fallback_models = ["{fallback}"]
# Whether they are also used if a model, or a filter of its service, refuses to answer.
# fallback_on_refusal = true

system_prompt = """
You are a careful assistant. Answer in plain words, and say so when you do not know.
"""

# The user message, with values of the input (see [input_schema]); unset means the input as JSON.
# input_template = "Sort ticket {ticket.id}: {ticket.text}"

# A file with further instructions: a bare name means skills/<name>/SKILL.md in the config directory; a path is
# absolute, begins with ~, or is relative to that directory.
# skill = "code-review"
# Skills (agentskills.io) that the model reads when a task needs them: directories with a SKILL.md; a bare name means
# skills/<name> in the config directory.
# skills = ["pdf-forms"]

# Text files that enter the prompt: globs below workdir, ** for any depth.
# files = ["README.md", "docs/**/*.md"]

# The directory of files and of the file tools, which reach nothing else; unset means the daemon's working directory.
# workdir = "/srv/project"

# Labels that a node needs to drive its runs, if several nodes share a database ([cluster] labels of their configuration).
# node = ["gpu"]

# Built-in tools offered to the model (docs/TOOLS.md): list_directory, read_file, find_path and grep read; write_file,
# edit_file, create_directory, copy_path, move_path and delete_path change what is in workdir; url_fetch and web_search
# read the web; run_command runs commands, where the server allows it.
# tools = ["list_directory", "read_file", "find_path", "grep"]

# Hosts that url_fetch may reach: names, addresses, or *.example.com for all subdomains. Empty means every public
# host, or the caller's hosts if another agent calls this one.
# allowed_hosts = ["docs.rs", "*.wikipedia.org"]

# Agents that this one may call, by the names of their files. Naming one offers the tool call_agent.
# sub_agents = ["researcher", "critic"]

# Tools whose calls wait for human approval (docs/TOOLS.md): those of tools, call_agent, subagent, or <server>__<tool>.
# approve = ["call_agent"]
# Seconds that each call waits for approval; then it is denied. 0 means no limit.
# approve_timeout = 0

# How much the model thinks before it answers: none, minimal, low, medium, high, xhigh or max; unset leaves it to the
# service. A level that the model does not know becomes its nearest (`axed models` prints them).
# effort = "medium"
# Stream a summary of the model's reasoning (event reasoning.delta): auto, concise or detailed; unset means none.
# OpenAI's Responses API and Anthropic's support it.
# reasoning_summary = "auto"
# How long the service caches the prompt for the run's next turns (Anthropic): 5m, 1h or off.
# cache = "5m"
# Service tier: default, flex (slower and cheaper; OpenAI) or batch (within a day, at half the price; OpenAI and
# Anthropic).
# service = "default"
# The keys of [params.extra] that a request may set.
# allow_extra = ["service_tier"]
# Whether requests may come with keys of their own for providers (the header X-Provider-Key).
# allow_provider_keys = false

# Whether replies are streamed from the provider.
# stream = false

# Seconds until the run is stopped; 0 means the server's default (120).
# timeout = 0

# How it calls other agents. max_depth: levels of agents below this one, at most 5; unset means 3. parallel: whether
# several calls of one reply run at once. timeout: seconds for each called agent; unset means the rest of this agent's
# own time. max_concurrent: most called agents at once; unset means no limit.
# [sub_agents_config]
# max_depth = 3
# parallel = true
# timeout = 120
# max_concurrent = 8

# Sent to the provider only when set.
[params]
# temperature = 0.2
# max_tokens = 4096
# top_p = 0.95
# stop = ["END"]

# Merged into the body of each request, for what axed has no key for.
# extra = { service_tier = "priority" }

# The shape of the answer: text, json_object, or json_schema with a schema, as a table or as JSON text.
[params.response_format]
# type = "text"
# type = "json_schema"
# schema = { type = "object", required = ["answer"], properties = { answer = { type = "string" } } }

# What runs take as input: an object that fits this JSON Schema, as a table or as JSON text. Unset means text.
# [input_schema]
# type = "object"
# required = ["ticket"]
# properties = { ticket = { type = "object", properties = { id = { type = "integer" }, text = { type = "string" } } } }

[limits]
# Model requests in one run, 1 to 50.
# max_turns = 50

# How to handle a conversation that exceeds the model's context window, if that is known (`axed models`).
[context]
# The share of the window that a request may fill.
# compact_at = 0.8
# compact: the model sums up the oldest turns; drop_tool_results: the oldest results are left out; fail: the run fails.
# strategy = "compact"
# Offers the tool recall, which searches the whole recorded conversation.
# recall = false

# For the run and all runs below it together; 0 means no limit.
[budget]
# max_tokens = 0
# max_cost_usd = 0
# max_tool_calls = 0
# max_runs = 0

# How failed requests to the provider are tried again.
[retry]
# max_retries = 2
# exponential, linear or fixed.
# backoff = "exponential"
# initial_delay_ms = 500
# max_delay_ms = 30000

# Ad-hoc sub-agents for separate tasks, with this agent's model, prompt and tools.
[subagent]
# enabled = false
# The deepest level, 1 to 5.
# max_depth = 3
# Turns of a sub-agent whose call sets none.
# default_max_turns = 10
# Maximum size of a result in bytes.
# output_max_size = 4096
# always, or on_request.
# summary = "on_request"
# For all of them in one tree together, the time in seconds; 0 means no limit.
# max_executions = 0
# max_total_tokens = 0
# max_total_time = 0

# Memory of the agent's earlier runs.
[memory]
# enabled = false
# If the server has keys, each key has its own memory, unless this is true.
# shared = false
# Unset means <data directory>/memory/{name}.md, or {name}/<key>.md there. If the server has keys, this needs shared = true.
# With data.url, memories are in the database, and path is refused.
# path = "/srv/memory/{name}.md"
# The newest entries that enter the prompt; 0 means all.
# last_n = 10
# Warn from this many entries on; `axed gc {name}` trims them.
# max_entries = 100

# Signed notifications about the agent's runs.
[webhook]
# url = "https://hooks.example.com/axed"
# The environment variable with the secret; unset means the server's.
# secret_env = "HOOK_SECRET"
# Which events; empty means the ends: run.completed, run.failed, run.cancelled.
# events = []
# Tools that are HTTP requests. {name} is an argument, percent-encoded in url; ${VAR} is a variable of the daemon's environment.
#   [[http_tools]]
#   name = "find_ticket"
#   description = "Finds tickets by words"
#   method = "GET"                  # GET, POST, PUT, PATCH or DELETE
#   url = "https://tickets.example.com/api/{project}/tickets?q={words}"
#   headers = { Authorization = "Bearer ${TICKETS_TOKEN}" }
#   body = '{{"words": {words}}}'   # unset: the arguments that url does not use, as JSON
#   parameters = { type = "object", required = ["project"], properties = { project = { type = "string" }, words = { type = "string" } } }
#   safe_to_repeat = true           # whether a call may be repeated after a restart; unset: only GET
#   timeout = 30                    # seconds
#
#   # Operations of an OpenAPI document (3.0 or 3.1), a file relative to this one or a URL.
#   [[http_tools]]
#   openapi = "petstore.yaml"
#   operations = ["listPets", "POST /pets"]
#   prefix = "pets_"                # before each tool's name
#   base_url = "https://pets.example.com/v1" # unset: the document's first server
#
# MCP servers: each one's tools are offered as <name>__<tool>. ${VAR} is a variable of the daemon's environment.
#   [[mcp_servers]]
#   name = "tickets"
#   transport = "streamable-http"
#   url = "https://tickets.example.com/mcp"
#   headers = { X-Team = "${TICKETS_TEAM}" }
#   # A server that requires OAuth; without this table, set the header Authorization.
#   # With grant = "device_code" and no secret, an operator logs in: axed auth login tickets
#   oauth = { grant = "client_credentials", client_id = "axed", client_secret_env = "TICKETS_SECRET" }
#   tools = []                      # only these; empty means all
#   timeout = 60                    # seconds that one call may take
#   open_timeout = 10               # seconds that a run waits for the server to start, up to 600
#   required = false                # true: a run fails that begins while the server is not available
#
#   [[mcp_servers]]
#   name = "files"
#   transport = "stdio"
#   command = "npx"
#   args = ["-y", "@modelcontextprotocol/server-filesystem", "/srv/papers"]
#   env = { LOG_LEVEL = "warn" }

# Runs that the daemon starts at times: minute, hour, day of the month, month, day of the week.
#   [[schedules]]
#   name = "morning"
#   cron = "30 7 * * mon-fri"
#   timezone = "Europe/Berlin"      # unset means UTC
#   input = "Sum up the tickets of yesterday." # a table if there is an input_schema
#   overlap = "skip"                # if the last run has not ended: skip, queue (one waits) or allow
#   missed = "skip"                 # times without a daemon: skip, or once for the latest of the last day
#   labels = { team = "blue" }
#   key = "ada"                     # whose runs they are; unset means that only admins see them

# Webhooks of other services that start runs, at POST /triggers/{name}/<trigger>.
#   [[triggers]]
#   name = "issues"
#   kind = "github"                 # whose signatures: standard, github or stripe
#   secret_env = "GITHUB_SECRET"    # the environment variable with the secret
#   input_template = "Triage issue {body.issue.number}: {body.issue.title}"     # unset means the whole body
#   labels = { source = "github" }
#   key = "ada"                     # whose runs they are; unset means that only admins see them
"#;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::{TEMPLATE, template};
    use crate::catalog::read::read;
    use crate::domain::agent::Agent;
    use crate::domain::agent::settings::{Presence, Section, Setting, Visitor};

    /// Fails for a setting that the template does not explain.
    struct KeyCheck;

    impl Visitor for KeyCheck {
        fn setting(&mut self, key: &'static str, setting: Setting<'_>) {
            let text = match &setting {
                Setting::HttpTools(_)
                | Setting::McpServers(_)
                | Setting::Schedules(_)
                | Setting::Triggers(_) => {
                    format!("[[{key}]]")
                }
                Setting::Schema(_) => format!("# [{key}]"),
                Setting::ResponseFormat(_) => format!(".{key}]"),
                _ => format!("{key} = "),
            };
            assert!(TEMPLATE.contains(&text), "the template lacks {key}");
        }

        fn section<S: Section>(&mut self, key: &'static str, section: &mut S) {
            let headers = [format!("\n[{key}]\n"), format!("\n# [{key}]\n")];
            assert!(headers.iter().any(|it| TEMPLATE.contains(it)), "{key}");
            section.visit(self);
        }

        fn optional_section<S: Section>(
            &mut self,
            key: &'static str,
            _presence: Presence,
            _section: &mut Option<S>,
        ) {
            self.section(key, &mut S::default());
        }
    }

    #[test]
    fn every_setting_is_explained() {
        Agent::default().visit(&mut KeyCheck);
    }

    #[test]
    fn it_passes_the_check_as_it_is_and_with_every_key_uncommented() {
        let plain = template("helper-1");
        let file =
            read("helper-1", Path::new("helper-1.toml"), plain.as_bytes()).expect("an agent");
        assert_eq!(file.agent.name, "helper-1");
        assert_eq!(file.warnings, []);

        let is_key = |line: &str| {
            let key = line.split(" = ").next().unwrap_or_default();
            let is_plain = |c: char| c.is_ascii_lowercase() || matches!(c, '_' | '0'..='9');
            line.contains(" = ") && key.chars().all(is_plain)
        };
        let uncomment = |line: &str| match line.strip_prefix("# ") {
            Some("type = \"text\"") => String::new(),
            Some(line) if is_key(line) || line.starts_with('[') => line.to_owned(),
            _ => line.to_owned(),
        };
        let full: Vec<String> = plain.lines().map(uncomment).collect();
        let read = read(
            "helper-1",
            Path::new("helper-1.toml"),
            full.join("\n").as_bytes(),
        );
        let agent = read.expect("an agent").agent;
        assert_eq!(agent.delegation.max_depth, Some(3));
        assert_eq!(agent.delegation.timeout, Some(Duration::from_secs(120)));
        assert_eq!(agent.sub_agents, ["researcher", "critic"]);
        assert_eq!(agent.memory.max_entries, 100);
        assert_eq!(agent.allowed_hosts, ["docs.rs", "*.wikipedia.org"]);
        assert!(agent.webhook.is_some());
    }
}
