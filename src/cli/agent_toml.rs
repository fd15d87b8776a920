//! A definition in force, written as an agent file with every default filled in.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use serde_json::Value;

use crate::domain::agent::params::Cache;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::{Agent, Backoff, SummaryMode};
use crate::domain::mcp::{McpServer, McpTransport, Template};

/// The agent as a file that would define it. Keys that are unset and have no default are left out.
pub fn to_toml(agent: &Agent) -> String {
    let mut file = TomlWriter(String::new());
    file.key("name", multiline_string(&agent.name));
    file.optional_key(
        "description",
        agent.description.as_deref().map(multiline_string),
    );
    file.key("model", multiline_string(&agent.model.to_string()));
    let fallbacks = agent
        .fallback_models
        .iter()
        .map(|m| multiline_string(&m.to_string()));
    file.key("fallback_models", array(fallbacks));
    file.key("system_prompt", multiline_string(&agent.system_prompt));
    file.optional_key("skill", agent.skill.as_deref().map(multiline_string));
    file.key("files", string_array(&agent.files));
    let workdir = agent
        .workdir
        .as_ref()
        .map(|dir| multiline_string(&dir.display().to_string()));
    file.optional_key("workdir", workdir);
    file.key("tools", string_array(&agent.tools));
    file.key("allowed_hosts", string_array(&agent.allowed_hosts));
    file.key("sub_agents", string_array(&agent.sub_agents));
    file.key("approve", string_array(&agent.approve));
    file.key("approve_timeout", seconds_or_zero(agent.approve_timeout));
    file.optional_key(
        "effort",
        agent.params.effort.map(|it| multiline_string(it.as_str())),
    );
    let summary = agent.params.reasoning_summary;
    file.optional_key(
        "reasoning_summary",
        summary.map(|it| multiline_string(it.as_str())),
    );
    let cache = Cache::ALL.iter().find(|(_, it)| *it == agent.params.cache);
    file.optional_key("cache", cache.map(|(name, _)| multiline_string(name)));
    file.optional_key(
        "service",
        agent.params.service.map(|it| multiline_string(it.as_str())),
    );
    file.key("allow_extra", string_array(&agent.allow_extra));
    file.key("allow_provider_keys", agent.allow_provider_keys);
    file.key("stream", agent.stream);
    file.key("timeout", seconds_or_zero(agent.timeout));

    file.table("sub_agents_config");
    file.key("max_depth", agent.delegation.max_depth.unwrap_or(0));
    file.key("parallel", agent.delegation.parallel);
    file.key("timeout", seconds_or_zero(agent.delegation.timeout));
    file.key(
        "max_concurrent",
        agent.delegation.max_concurrent.unwrap_or(0),
    );

    file.table("params");
    file.optional_key("temperature", agent.params.temperature.map(float_literal));
    file.optional_key("max_tokens", agent.params.max_tokens);
    file.optional_key("top_p", agent.params.top_p.map(float_literal));
    if !agent.params.stop.is_empty() {
        file.key("stop", string_array(&agent.params.stop));
    }
    if !agent.params.extra.is_empty() {
        let extra = Value::Object(agent.params.extra.clone());
        file.optional_key("extra", inline_value(&extra));
    }
    file.table("params.response_format");
    match &agent.params.response_format {
        ResponseFormat::Text => file.key("type", multiline_string("text")),
        ResponseFormat::JsonObject => file.key("type", multiline_string("json_object")),
        ResponseFormat::JsonSchema(schema) => {
            file.key("type", multiline_string("json_schema"));
            let schema = serde_json::from_str(schema.get()).unwrap_or(Value::Null);
            file.optional_key("schema", inline_value(&schema));
        }
    }

    file.table("limits");
    file.key("max_turns", agent.max_turns);

    file.table("context");
    file.key("compact_at", float_literal(agent.context.compact_at));
    file.key(
        "strategy",
        multiline_string(agent.context.strategy.as_str()),
    );
    file.key("recall", agent.context.recall);

    file.table("budget");
    file.key("max_tokens", agent.budget.max_tokens.unwrap_or(0));
    let cost = agent.budget.max_cost.map_or(0.0, |cost| cost.to_usd());
    file.key("max_cost_usd", float_literal(cost));
    file.key("max_tool_calls", agent.budget.max_tool_calls.unwrap_or(0));
    file.key("max_runs", agent.budget.max_runs.unwrap_or(0));

    file.table("retry");
    file.key("max_retries", agent.retry.max_retries);
    let backoff = match agent.retry.backoff {
        Backoff::Exponential => "exponential",
        Backoff::Linear => "linear",
        Backoff::Fixed => "fixed",
    };
    file.key("backoff", multiline_string(backoff));
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
            multiline_string(match subagent.summary {
                SummaryMode::OnRequest => "on_request",
                SummaryMode::Always => "always",
            }),
        );
        file.key("max_executions", subagent.max_executions.unwrap_or(0));
        file.key("max_total_tokens", subagent.max_total_tokens.unwrap_or(0));
        file.key("max_total_time", seconds_or_zero(subagent.max_total_time));
        file.optional_key(
            "model",
            subagent
                .model
                .as_ref()
                .map(|it| multiline_string(&it.to_string())),
        );
        file.optional_key(
            "effort",
            subagent.effort.map(|it| multiline_string(it.as_str())),
        );
        file.optional_key(
            "service",
            subagent.service.map(|it| multiline_string(it.as_str())),
        );
    }

    file.table("memory");
    file.key("enabled", agent.memory.enabled);
    file.key("shared", agent.memory.shared);
    let path = agent
        .memory
        .path
        .as_ref()
        .map(|path| multiline_string(&path.display().to_string()));
    file.optional_key("path", path);
    file.key("last_n", agent.memory.last_n);
    file.key("max_entries", agent.memory.max_entries);

    if let Some(webhook) = &agent.webhook {
        file.table("webhook");
        file.key("url", multiline_string(&webhook.url));
        file.optional_key(
            "secret_env",
            webhook.secret_env.as_deref().map(multiline_string),
        );
        file.key("events", string_array(&webhook.events));
    }
    for server in &agent.mcp_servers {
        write_mcp_server(&mut file, server);
    }
    file.0
}

fn write_mcp_server(file: &mut TomlWriter, server: &McpServer) {
    let template_table = |texts: &BTreeMap<String, Template>| {
        let entry = |(name, value): (&String, &Template)| {
            format!(
                "{} = {}",
                basic_string(name),
                basic_string(value.redacted())
            )
        };
        let entries: Vec<_> = texts.iter().map(entry).collect();
        format!("{{ {} }}", entries.join(", "))
    };
    file.0.push_str("\n[[mcp_servers]]\n");
    file.key("name", multiline_string(&server.name));
    file.key("transport", multiline_string(server.transport.name()));
    match &server.transport {
        McpTransport::Stdio { command, args, env } => {
            file.key("command", multiline_string(command));
            file.key("args", string_array(args));
            file.key("env", template_table(env));
        }
        McpTransport::StreamableHttp { url, headers } => {
            file.key("url", multiline_string(url));
            file.key("headers", template_table(headers));
        }
    }
    file.key("tools", string_array(&server.tools));
    file.key("timeout", server.timeout.as_secs());
    file.key("required", server.required);
}

struct TomlWriter(String);

impl TomlWriter {
    fn key(&mut self, key: &str, value: impl Display) {
        self.0.push_str(&format!("{key} = {value}\n"));
    }

    fn optional_key(&mut self, key: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.key(key, value);
        }
    }

    fn table(&mut self, name: &str) {
        self.0.push_str(&format!("\n[{name}]\n"));
    }
}

/// A TOML string; several lines stay several lines.
fn multiline_string(text: &str) -> String {
    if !text.contains('\n') {
        return basic_string(text);
    }
    let lines: Vec<_> = text
        .split('\n')
        .map(|line| {
            let line_string = basic_string(line);
            line_string[1..line_string.len() - 1].to_owned()
        })
        .collect();
    format!("\"\"\"\n{}\"\"\"", lines.join("\n"))
}

/// JSON's strings are TOML's, except that TOML wants DEL escaped, too.
fn basic_string(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn string_array(values: &[String]) -> String {
    array(values.iter().map(|value| basic_string(value)))
}

fn array(values: impl Iterator<Item = String>) -> String {
    format!("[{}]", values.collect::<Vec<_>>().join(", "))
}

/// With a point, which TOML wants where a float is meant.
fn float_literal(number: f64) -> String {
    format!("{number:?}")
}

fn seconds_or_zero(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| time.as_secs())
}

/// A JSON value on one line; none for null, which TOML does not have.
fn inline_value(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => return None,
        Value::String(text) => basic_string(text),
        Value::Array(values) => array(values.iter().filter_map(inline_value)),
        Value::Object(entries) => {
            let entries = entries.iter().filter_map(|(key, value)| {
                Some(format!("{} = {}", basic_string(key), inline_value(value)?))
            });
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        scalar => scalar.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{inline_value, multiline_string};

    #[test]
    fn texts_are_escaped_and_keep_their_lines() {
        assert_eq!(
            multiline_string("a \"b\" \\ \u{7f}"),
            r#""a \"b\" \\ \u007f""#
        );
        assert_eq!(
            multiline_string("two\n\"\"\"\n"),
            "\"\"\"\ntwo\n\\\"\\\"\\\"\n\"\"\""
        );
    }

    #[test]
    fn a_schema_fits_on_one_line() {
        let schema = json!({"type": "object", "a b": {"enum": [1, 2.5, null, "x"]}});
        assert_eq!(
            inline_value(&schema).as_deref(),
            Some(r#"{ "type" = "object", "a b" = { "enum" = [1, 2.5, "x"] } }"#)
        );
    }
}
