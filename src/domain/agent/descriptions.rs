//! Describes the settings of an agent for the OpenAPI document.

/// The description of a key of a section; empty if the section has no such key.
pub fn describe(section: &str, key: &str) -> &'static str {
    match section {
        "AgentDefinition" => definition(key),
        "AgentLimits" => match key {
            "max_turns" => "The most turns of one run.",
            _ => "",
        },
        "AgentDelegation" => delegation(key),
        "AgentParams" => params(key),
        "AgentContext" => match key {
            "compact_at" => {
                "The share of the model's window that a request may fill before it is shortened."
            }
            "strategy" => "How a larger request is shortened.",
            "recall" => {
                "Whether the agent has the tool `recall`, which searches the recorded conversation."
            }
            _ => "",
        },
        "AgentBudget" => match key {
            "max_tokens" => "The most input and output tokens together; 0 means no limit.",
            "max_cost_usd" => {
                "The highest cost in US dollars, at the configured prices; 0 means no limit."
            }
            "max_tool_calls" => "The most executed tool calls; 0 means no limit.",
            "max_runs" => "The most runs, the root included; 0 means no limit.",
            _ => "",
        },
        "AgentRetry" => match key {
            "max_retries" => "Attempts after the first.",
            "backoff" => "How the delay grows with each retry.",
            "initial_delay_ms" => "The longest delay before the first retry, in milliseconds.",
            "max_delay_ms" => "The longest delay before any retry, in milliseconds.",
            _ => "",
        },
        "AgentMemory" => match key {
            "enabled" => "Whether the agent has a memory.",
            "shared" => "Whether all keys share one memory; otherwise each key has its own.",
            "path" => "The memory's file; null means a file in the data directory.",
            "last_n" => "The number of newest entries in the prompt; 0 means all.",
            "max_entries" => {
                "The number of entries from which on a run gets a warning; 0 means never."
            }
            _ => "",
        },
        "AgentSubagent" => subagent(key),
        "AgentWebhook" => match key {
            "url" => "The receiver's URL, without its query, which may hold a secret.",
            "secret_env" => {
                "The environment variable with the signing secret; null means the server's secret."
            }
            "events" => "The types of events to send; empty means those that end a run.",
            _ => "",
        },
        _ => "",
    }
}

/// The description of a section.
pub fn describe_section(section: &str) -> &'static str {
    match section {
        "AgentLimits" => "`[limits]`: limits of one run.",
        "AgentDelegation" => "`[sub_agents_config]`: how the agent calls others.",
        "AgentParams" => {
            "`[params]`: parameters of provider requests. A parameter that is not set is absent and not sent."
        }
        "AgentContext" => {
            "`[context]`: how a conversation that outgrows the model's window is shortened."
        }
        "AgentBudget" => "`[budget]`: limits of a run with all its descendants.",
        "AgentRetry" => "`[retry]`: how failed provider requests are retried.",
        "AgentMemory" => "`[memory]`: the results of earlier runs that the agent remembers.",
        "AgentSubagent" => "`[subagent]`: how the agent starts ad-hoc sub-agents.",
        "AgentWebhook" => "`[webhook]`: a receiver of the events of the agent's root runs.",
        _ => "",
    }
}

fn definition(key: &str) -> &'static str {
    match key {
        "description" => {
            "What the agent does, for people and for the models of agents that may call it."
        }
        "model" => "The model that replies.",
        "fallback_models" => {
            "Models that are tried in order if the model is overloaded, rate-limited or down."
        }
        "fallback_on_refusal" => {
            "Whether they are also tried if the model, or a filter of its service, refuses to answer."
        }
        "system_prompt" => "The first part of the prompt.",
        "input_schema" => {
            "The JSON Schema of objects that the input of a run must fit; null means that runs take texts."
        }
        "input_template" => {
            "The user message, with `{name}` for values of the input; null means the input as JSON."
        }
        "skill" => "The path or the name of a skill, as written in the file.",
        "skills" => {
            "The directories of the skills that the agent may read, as written in the file."
        }
        "files" => "Globs of context files, relative to `workdir`.",
        "workdir" => {
            "The directory of the agent's files and tools; null means the daemon's working directory."
        }
        "node" => "The labels that a node needs to drive root runs of the agent.",
        "tools" => "The built-in tools that the agent may use.",
        "allowed_hosts" => "The hosts that `url_fetch` may request; empty means every public host.",
        "sub_agents" => "The agents that the agent may call.",
        "stream" => "Whether replies are streamed from the provider.",
        "timeout" => "The time limit of a run in seconds; 0 means the server's.",
        "approve" => "The tools whose calls wait for a person's approval.",
        "approve_timeout" => "How long such a call waits, in seconds; 0 means without a limit.",
        "sub_agents_config" => "How the agent calls others.",
        "effort" => "The reasoning effort; null means the provider's default.",
        "reasoning_summary" => {
            "The length of a summary of the model's reasoning; null means no summary."
        }
        "cache" => "How long the provider caches the prompt.",
        "service" => "The tier of the provider's service; null means the provider's default.",
        "allow_extra" => "The keys of `params.extra` that a request may set.",
        "allow_provider_keys" => "Whether a request may bring its own keys for providers.",
        "params" => "Parameters of provider requests.",
        "limits" => "Limits of one run.",
        "context" => "How a conversation that outgrows the model's window is shortened.",
        "budget" => "Limits of a run with all its descendants.",
        "retry" => "How failed provider requests are retried.",
        "memory" => "The results of earlier runs that the agent remembers.",
        "http_tools" => "Tools that are HTTP requests.",
        "mcp_servers" => "MCP servers with further tools.",
        "schedules" => "Runs that the daemon starts at times.",
        "triggers" => "Webhooks of other services that start runs.",
        "subagent" => "How the agent starts ad-hoc sub-agents; absent if they are disabled.",
        "webhook" => "A receiver of the events of the agent's root runs; absent if there is none.",
        _ => "",
    }
}

fn delegation(key: &str) -> &'static str {
    match key {
        "max_depth" => {
            "The levels of runs below the agent; 0 means the default, or the parent's limit."
        }
        "parallel" => "Whether several tool calls of one reply run concurrently.",
        "timeout" => {
            "The time limit of each child run in seconds; 0 means the remaining time of the run."
        }
        "max_concurrent" => {
            "The most concurrent children of one reply; 0 means no limit of its own."
        }
        _ => "",
    }
}

fn params(key: &str) -> &'static str {
    match key {
        "temperature" => "How random replies are.",
        "max_tokens" => "The most tokens of one reply.",
        "top_p" => "The share of likely tokens that replies are sampled from (nucleus sampling).",
        "stop" => "Texts that end a reply.",
        "response_format" => "The format of the final text.",
        "extra" => "Merged into the body of each provider request.",
        _ => "",
    }
}

fn subagent(key: &str) -> &'static str {
    match key {
        "enabled" => "Always true.",
        "max_depth" => "The deepest level of an ad-hoc sub-agent.",
        "default_max_turns" => "The most turns if the call sets no limit.",
        "output_max_size" => "The most bytes of a result.",
        "summary" => "When an ad-hoc sub-agent summarizes its result.",
        "max_executions" => "The most ad-hoc sub-agents of one tree; 0 means no limit.",
        "max_total_tokens" => {
            "The most tokens of all ad-hoc sub-agents of one tree; 0 means no limit."
        }
        "max_total_time" => {
            "The most seconds of all ad-hoc sub-agents of one tree together; 0 means no limit."
        }
        "model" => "The model of ad-hoc sub-agents; null means the parent's.",
        "effort" => "The reasoning effort of ad-hoc sub-agents; null means the parent's.",
        "service" => "The service tier of ad-hoc sub-agents; null means the parent's.",
        _ => "",
    }
}
