//! Prints a dry run as sections for people.

use anyhow::Context;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::cli::output;
use crate::cli::style::{Color, Styled};
use crate::domain::content::Content;
use crate::domain::message::shorten;
use crate::domain::terminal_text::{escape_json, sanitize_line};

#[derive(Deserialize)]
struct Report {
    agent: String,
    agent_version: String,
    model: String,
    fallback_models: Vec<String>,
    system_prompt: String,
    message: Content,
    workdir: String,
    params: Map<String, Value>,
    tools: Vec<Tool>,
    deferred_tools: Vec<String>,
    sub_agents: SubAgents,
    limits: Limits,
}

#[derive(Deserialize)]
struct Tool {
    name: String,
    description: String,
}

#[derive(Deserialize)]
struct SubAgents {
    names: Vec<String>,
    max_depth: u8,
    parallel: bool,
    timeout: u64,
}

#[derive(Deserialize)]
struct Limits {
    max_turns: u32,
    timeout: u64,
    max_tokens: Option<u64>,
    max_cost_usd: Option<f64>,
    max_tool_calls: Option<u64>,
    max_runs: Option<u64>,
}

pub fn print(report: &Value) -> anyhow::Result<()> {
    let report: Report = serde_json::from_value(report.clone())
        .context("this version of axed cannot read the daemon's dry run; -o json prints it")?;
    fact("Agent", &report.agent)?;
    fact("Version", &report.agent_version)?;
    fact("Model", &report.model)?;
    fact("Fallback Models", &list(&report.fallback_models))?;
    fact("Workdir", &report.workdir)?;
    print_params(&report.params)?;
    print_text("System Prompt", &report.system_prompt)?;
    print_text("Message", &report.message.to_plain_text())?;
    print_tools(&report)?;
    print_sub_agents(&report.sub_agents)?;
    print_limits(&report.limits)
}

fn print_params(params: &Map<String, Value>) -> anyhow::Result<()> {
    let is_set = |value: &Value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    };
    let set = params.iter().filter(|(_, value)| is_set(value));
    let set: Vec<String> = set
        .map(|(key, value)| format!("{key}={}", escape_json(&value.to_string())))
        .collect();
    fact("Params", &list(&set))
}

fn print_tools(report: &Report) -> anyhow::Result<()> {
    let names: Vec<&str> = report.tools.iter().map(|tool| tool.name.as_str()).collect();
    output::print_line(format_args!(""))?;
    fact("Tools", &list(&names))?;
    for tool in &report.tools {
        let first_line = tool.description.lines().next().unwrap_or_default();
        fact(&format!("  {}", tool.name), &shorten(first_line, 200))?;
    }
    if !report.deferred_tools.is_empty() {
        fact("Found by tool_search", &list(&report.deferred_tools))?;
    }
    Ok(())
}

fn print_sub_agents(sub_agents: &SubAgents) -> anyhow::Result<()> {
    output::print_line(format_args!(""))?;
    fact("Sub-agents", &list(&sub_agents.names))?;
    fact("Max Depth", &sub_agents.max_depth.to_string())?;
    fact("Parallel", if sub_agents.parallel { "yes" } else { "no" })?;
    match sub_agents.timeout {
        0 => fact("Timeout", "(the rest of the run's)"),
        seconds => fact("Timeout", &format!("{seconds}s")),
    }
}

fn print_limits(limits: &Limits) -> anyhow::Result<()> {
    output::print_line(format_args!(""))?;
    fact("Max Turns", &limits.max_turns.to_string())?;
    fact("Run Timeout", &format!("{}s", limits.timeout))?;
    for (name, limit) in [
        (
            "Max Tokens",
            limits.max_tokens.map(|limit| limit.to_string()),
        ),
        (
            "Max Cost",
            limits.max_cost_usd.map(|limit| format!("{limit} USD")),
        ),
        (
            "Max Tool Calls",
            limits.max_tool_calls.map(|limit| limit.to_string()),
        ),
        ("Max Runs", limits.max_runs.map(|limit| limit.to_string())),
    ] {
        if let Some(limit) = limit {
            fact(name, &limit)?;
        }
    }
    Ok(())
}

fn fact(name: &str, value: &str) -> anyhow::Result<()> {
    let line = Styled::default().colored(Color::Cyan, format!("{}:", sanitize_line(name)));
    output::print_styled(&line.plain(format!(" {}", sanitize_line(value))))
}

fn print_text(name: &str, text: &str) -> anyhow::Result<()> {
    let text = match text.trim_end() {
        "" => "(none)",
        text => text,
    };
    let line = Styled::default().colored(Color::Cyan, format!("\n{name}:\n"));
    output::print_styled(&line.plain(text))
}

fn list(items: &[impl AsRef<str>]) -> String {
    match items.is_empty() {
        true => "(none)".to_owned(),
        false => items
            .iter()
            .map(AsRef::as_ref)
            .collect::<Vec<_>>()
            .join(", "),
    }
}
