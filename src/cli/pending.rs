//! Tool calls that wait for approval, as commands show them.

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use crate::domain::run::RunId;
use crate::domain::terminal_text::{escape_json, sanitize_line};

#[derive(Clone, Debug, Deserialize)]
pub struct PendingCall {
    pub run_id: RunId,
    pub agent: String,
    pub tool_call_id: String,
    pub tool: String,
    pub arguments: Value,
    /// Whether `arguments` is only the beginning of their JSON.
    #[serde(default)]
    pub truncated: bool,
    pub requested_at: jiff::Timestamp,
}

impl PendingCall {
    pub fn parse(approval: Value) -> anyhow::Result<Self> {
        serde_json::from_value(approval)
            .context("this version of axed cannot read the daemon's response")
    }

    /// The pending calls of a run object.
    pub fn all_of(run: &Value) -> anyhow::Result<Vec<Self>> {
        let approvals = run["pending_approvals"].as_array();
        let approvals = approvals.into_iter().flatten().cloned();
        approvals.map(Self::parse).collect()
    }

    /// The tool and its arguments on one line. A person decides by it, so nothing in it is hidden.
    pub fn line(&self) -> String {
        format!("{} {}", sanitize_line(&self.tool), self.arguments_line())
    }

    pub fn arguments_line(&self) -> String {
        let json = match &self.arguments {
            Value::String(beginning) if self.truncated => format!("{beginning}…"),
            arguments => arguments.to_string(),
        };
        sanitize_line(&escape_json(&json))
    }

    /// The arguments on several lines.
    pub fn arguments_text(&self) -> String {
        let json = match &self.arguments {
            Value::String(beginning) if self.truncated => {
                let run = self.run_id;
                format!("{beginning}…\n(cut; all of it: axed runs messages {run} -o wide)")
            }
            arguments => serde_json::to_string_pretty(arguments).unwrap_or_default(),
        };
        escape_json(&json)
    }

    /// The command that approves the call at another terminal.
    pub fn approve_command(&self, server: &str) -> String {
        approve_command(&self.run_id.to_string(), &self.tool_call_id, server)
    }
}

/// The command that approves a call at another terminal.
fn approve_command(run: &str, call: &str, server: &str) -> String {
    let call = shell_quoted(&sanitize_line(call));
    format!("axed runs approve {run} {call} --server {server}")
}

/// Models choose ids, and the user may copy the line into a shell.
fn shell_quoted(id: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    match !id.is_empty() && id.chars().all(is_plain) {
        true => id.to_owned(),
        false => format!("'{}'", id.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::PendingCall;

    fn call(id: &str, arguments: serde_json::Value, truncated: bool) -> PendingCall {
        PendingCall::parse(json!({
            "run_id": "run_01980000-0000-7000-8000-000000000001", "agent": "a", "tool_call_id": id, "tool": "write\u{1b}[2J",
            "arguments": arguments, "truncated": truncated, "requested_at": "2026-01-01T00:00:00Z",
        }))
        .expect("a call")
    }

    #[test]
    fn hostile_texts_are_shown_without_effect() {
        let hostile = call("c'; rm -rf ~ #", json!({"path": "\u{202e}a\nb"}), false);
        assert_eq!(
            hostile.line(),
            "write\u{fffd}[2J {\"path\":\"\\u202ea\\nb\"}"
        );
        assert!(
            hostile
                .approve_command("http://h")
                .ends_with(" 'c'\\''; rm -rf ~ #' --server http://h")
        );
    }

    #[test]
    fn cut_arguments_say_where_the_whole_ones_are() {
        let long = call("c1", json!("{\"path\":"), true);
        assert!(long.line().ends_with("{\"path\":…"));
        assert!(
            long.arguments_text()
                .contains("axed runs messages run_0198")
        );
    }
}
