//! A definition in force, written as an agent file with every default filled in.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use serde_json::Value;

use crate::domain::agent::{Agent, Backoff, Cache, ResponseFormat, Summary};
use crate::domain::mcp::{McpServer, McpTransport, Template};

/// The agent as a file that would define it. Keys that are unset and have no default are left out.
pub fn to_toml(agent: &Agent) -> String {
    let mut file = Writer(String::new());
    file.key("name", text(&agent.name));
    file.maybe("description", agent.description.as_deref().map(text));
    file.key("model", text(&agent.model.to_string()));
    let fallbacks = agent.fallback_models.iter().map(|m| text(&m.to_string()));
    file.key("fallback_models", list(fallbacks));
    file.key("system_prompt", text(&agent.system_prompt));
    file.maybe("skill", agent.skill.as_deref().map(text));
    file.key("files", texts(&agent.files));
    let workdir = agent
        .workdir
        .as_ref()
        .map(|dir| text(&dir.display().to_string()));
    file.maybe("workdir", workdir);
    file.key("tools", texts(&agent.tools));
    file.key("allowed_hosts", texts(&agent.allowed_hosts));
    file.key("sub_agents", texts(&agent.sub_agents));
    file.key("approve", texts(&agent.approve));
    file.key("approve_timeout", whole_seconds(agent.approve_timeout));
    file.maybe("effort", agent.params.effort.map(|it| text(it.as_str())));
    let summary = agent.params.reasoning_summary;
    file.maybe("reasoning_summary", summary.map(|it| text(it.as_str())));
    let cache = Cache::ALL.iter().find(|(_, it)| *it == agent.params.cache);
    file.maybe("cache", cache.map(|(name, _)| text(name)));
    file.maybe("service", agent.params.service.map(|it| text(it.as_str())));
    file.key("allow_extra", texts(&agent.allow_extra));
    file.key("allow_provider_keys", agent.allow_provider_keys);
    file.key("stream", agent.stream);
    file.key("timeout", whole_seconds(agent.timeout));

    file.table("sub_agents_config");
    file.key("max_depth", agent.delegation.max_depth.unwrap_or(0));
    file.key("parallel", agent.delegation.parallel);
    file.key("timeout", whole_seconds(agent.delegation.timeout));
    file.key(
        "max_concurrent",
        agent.delegation.max_concurrent.unwrap_or(0),
    );

    file.table("params");
    file.maybe("temperature", agent.params.temperature.map(float));
    file.maybe("max_tokens", agent.params.max_tokens);
    file.maybe("top_p", agent.params.top_p.map(float));
    if !agent.params.stop.is_empty() {
        file.key("stop", texts(&agent.params.stop));
    }
    if !agent.params.extra.is_empty() {
        let extra = Value::Object(agent.params.extra.clone());
        file.maybe("extra", inline(&extra));
    }
    file.table("params.response_format");
    match &agent.params.response_format {
        ResponseFormat::Text => file.key("type", text("text")),
        ResponseFormat::JsonObject => file.key("type", text("json_object")),
        ResponseFormat::JsonSchema(schema) => {
            file.key("type", text("json_schema"));
            let schema = serde_json::from_str(schema.get()).unwrap_or(Value::Null);
            file.maybe("schema", inline(&schema));
        }
    }

    file.table("limits");
    file.key("max_turns", agent.max_turns);

    file.table("context");
    file.key("compact_at", float(agent.context.compact_at));
    file.key("strategy", text(agent.context.strategy.as_str()));
    file.key("recall", agent.context.recall);

    file.table("budget");
    file.key("max_tokens", agent.budget.max_tokens.unwrap_or(0));
    let cost = agent.budget.max_cost.map_or(0.0, |cost| cost.usd());
    file.key("max_cost_usd", float(cost));
    file.key("max_tool_calls", agent.budget.max_tool_calls.unwrap_or(0));
    file.key("max_runs", agent.budget.max_runs.unwrap_or(0));

    file.table("retry");
    file.key("max_retries", agent.retry.max_retries);
    let backoff = match agent.retry.backoff {
        Backoff::Exponential => "exponential",
        Backoff::Linear => "linear",
        Backoff::Fixed => "fixed",
    };
    file.key("backoff", text(backoff));
    file.key("initial_delay_ms", agent.retry.initial_delay.as_millis());
    file.key("max_delay_ms", agent.retry.max_delay.as_millis());

    if let Some(subagent) = &agent.subagent {
        file.table("subagent");
        file.key("enabled", true);
        file.key("max_depth", subagent.max_depth);
        file.key("default_max_turns", subagent.default_max_turns);
        file.key("output_max_size", subagent.output_max_size);
        file.key(
            "summary",
            text(match subagent.summary {
                Summary::OnRequest => "on_request",
                Summary::Always => "always",
            }),
        );
        file.key("max_executions", subagent.max_executions.unwrap_or(0));
        file.key("max_total_tokens", subagent.max_total_tokens.unwrap_or(0));
        file.key("max_total_time", whole_seconds(subagent.max_total_time));
        file.maybe(
            "model",
            subagent.model.as_ref().map(|it| text(&it.to_string())),
        );
        file.maybe("effort", subagent.effort.map(|it| text(it.as_str())));
        file.maybe("service", subagent.service.map(|it| text(it.as_str())));
    }

    file.table("memory");
    file.key("enabled", agent.memory.enabled);
    file.key("shared", agent.memory.shared);
    let path = agent
        .memory
        .path
        .as_ref()
        .map(|path| text(&path.display().to_string()));
    file.maybe("path", path);
    file.key("last_n", agent.memory.last_n);
    file.key("max_entries", agent.memory.max_entries);

    if let Some(webhook) = &agent.webhook {
        file.table("webhook");
        file.key("url", text(&webhook.url));
        file.maybe("secret_env", webhook.secret_env.as_deref().map(text));
        file.key("events", texts(&webhook.events));
    }
    for server in &agent.mcp_servers {
        mcp_server(&mut file, server);
    }
    file.0
}

fn mcp_server(file: &mut Writer, server: &McpServer) {
    let named = |texts: &BTreeMap<String, Template>| {
        let entry = |(name, value): (&String, &Template)| {
            format!("{} = {}", quoted(name), quoted(value.shown()))
        };
        let entries: Vec<_> = texts.iter().map(entry).collect();
        format!("{{ {} }}", entries.join(", "))
    };
    file.0.push_str("\n[[mcp_servers]]\n");
    file.key("name", text(&server.name));
    file.key("transport", text(server.transport.name()));
    match &server.transport {
        McpTransport::Stdio { command, args, env } => {
            file.key("command", text(command));
            file.key("args", texts(args));
            file.key("env", named(env));
        }
        McpTransport::StreamableHttp { url, headers } => {
            file.key("url", text(url));
            file.key("headers", named(headers));
        }
    }
    file.key("tools", texts(&server.tools));
    file.key("timeout", server.timeout.as_secs());
    file.key("required", server.required);
}

struct Writer(String);

impl Writer {
    fn key(&mut self, key: &str, value: impl Display) {
        self.0.push_str(&format!("{key} = {value}\n"));
    }

    fn maybe(&mut self, key: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.key(key, value);
        }
    }

    fn table(&mut self, name: &str) {
        self.0.push_str(&format!("\n[{name}]\n"));
    }
}

/// A TOML string; several lines stay several lines.
fn text(text: &str) -> String {
    if !text.contains('\n') {
        return quoted(text);
    }
    let lines: Vec<_> = text
        .split('\n')
        .map(|line| {
            let quoted = quoted(line);
            quoted[1..quoted.len() - 1].to_owned()
        })
        .collect();
    format!("\"\"\"\n{}\"\"\"", lines.join("\n"))
}

/// JSON's strings are TOML's, except that TOML wants DEL escaped, too.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn texts(values: &[String]) -> String {
    list(values.iter().map(|value| quoted(value)))
}

fn list(values: impl Iterator<Item = String>) -> String {
    format!("[{}]", values.collect::<Vec<_>>().join(", "))
}

/// With a point, which TOML wants where a float is meant.
fn float(number: f64) -> String {
    format!("{number:?}")
}

fn whole_seconds(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| time.as_secs())
}

/// A JSON value on one line; none for null, which TOML does not have.
fn inline(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => return None,
        Value::String(text) => quoted(text),
        Value::Array(values) => list(values.iter().filter_map(inline)),
        Value::Object(entries) => {
            let entries = entries
                .iter()
                .filter_map(|(key, value)| Some(format!("{} = {}", quoted(key), inline(value)?)));
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        plain => plain.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{inline, text};

    #[test]
    fn texts_are_escaped_and_keep_their_lines() {
        assert_eq!(text("a \"b\" \\ \u{7f}"), r#""a \"b\" \\ \u007f""#);
        assert_eq!(text("two\n\"\"\"\n"), "\"\"\"\ntwo\n\\\"\\\"\\\"\n\"\"\"");
    }

    #[test]
    fn a_schema_fits_on_one_line() {
        let schema = json!({"type": "object", "a b": {"enum": [1, 2.5, null, "x"]}});
        assert_eq!(
            inline(&schema).as_deref(),
            Some(r#"{ "type" = "object", "a b" = { "enum" = [1, 2.5, "x"] } }"#)
        );
    }
}
