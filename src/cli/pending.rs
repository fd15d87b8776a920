//! Tool calls that wait for approval and questions that wait for an answer, as commands show them.

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use crate::cli::client::Client;
use crate::domain::run::RunId;
use crate::domain::terminal_text::{escape_json, sanitize_line};

const UNKNOWN_FORMAT: &str = "this version of axed cannot read the daemon's response";

#[derive(Clone, Debug, Deserialize)]
pub struct PendingCall {
    pub run_id: RunId,
    pub agent: String,
    pub tool_call_id: String,
    pub tool: String,
    pub arguments: Value,
    pub arguments_hash: String,
    /// Whether `arguments` is only the beginning of their JSON.
    #[serde(default)]
    truncated: bool,
    pub requested_at: jiff::Timestamp,
}

impl PendingCall {
    fn parse(approval: Value) -> anyhow::Result<Self> {
        serde_json::from_value(approval).context(UNKNOWN_FORMAT)
    }

    /// The call with all of its arguments: a person decides on what they see.
    pub async fn load(client: &Client, approval: Value) -> anyhow::Result<Self> {
        let mut call = Self::parse(approval)?;
        if call.truncated {
            call.arguments = whole_arguments(client, &call).await?;
            call.truncated = false;
        }
        Ok(call)
    }

    /// The pending calls of a run object.
    pub async fn all_of(client: &Client, run: &Value) -> anyhow::Result<Vec<Self>> {
        let mut calls = Vec::new();
        for approval in run["pending_approvals"].as_array().into_iter().flatten() {
            calls.push(Self::load(client, approval.clone()).await?);
        }
        Ok(calls)
    }

    /// Whether it is one of the pending calls of a run object.
    pub fn waits_in(&self, run: &Value) -> bool {
        let mut approvals = run["pending_approvals"].as_array().into_iter().flatten();
        approvals.any(|it| {
            it["run_id"] == self.run_id.to_string() && it["tool_call_id"] == self.tool_call_id
        })
    }

    /// The tool and its arguments on one line. A person decides by it, so nothing in it is hidden.
    pub fn line(&self) -> String {
        format!("{} {}", sanitize_line(&self.tool), self.arguments_line())
    }

    pub fn arguments_line(&self) -> String {
        sanitize_line(&escape_json(&self.arguments.to_string()))
    }

    /// The arguments on several lines.
    pub fn arguments_text(&self) -> String {
        escape_json(&serde_json::to_string_pretty(&self.arguments).unwrap_or_default())
    }

    /// The command that approves the call at another terminal.
    pub fn approve_command(&self, server: &str) -> String {
        approve_command(&self.run_id.to_string(), &self.tool_call_id, server)
    }
}

/// A question of a run.
#[derive(Clone, Debug)]
pub struct PendingQuestion {
    pub id: String,
    pub run_id: RunId,
    pub json: Value,
}

impl PendingQuestion {
    /// The questions of a run object.
    pub fn all_of(run: &Value) -> anyhow::Result<Vec<Self>> {
        let questions = run["pending_inputs"].as_array().into_iter().flatten();
        let questions = questions.map(|json| {
            let id = json["id"].as_str().map(str::to_owned);
            let run_id = json["run_id"].as_str().and_then(|it| it.parse().ok());
            let (id, run_id) = id.zip(run_id).context(UNKNOWN_FORMAT)?;
            let json = json.clone();
            Ok(Self { id, run_id, json })
        });
        questions.collect()
    }

    /// Whether it is one of the questions of a run object.
    pub fn waits_in(&self, run: &Value) -> bool {
        let mut questions = run["pending_inputs"].as_array().into_iter().flatten();
        questions.any(|it| it["run_id"] == self.run_id.to_string() && it["id"] == self.id)
    }

    /// Whether its answer has a form, so that it is read as JSON.
    pub fn has_json_answer(&self) -> bool {
        let schema = &self.json["schema"];
        let is_text = |it: &Value| it.is_string();
        let mut values = schema["enum"].as_array().into_iter().flatten();
        let is_choice = schema["enum"].is_array() && values.all(is_text);
        !schema.is_null() && schema["type"] != "string" && !is_choice
    }

    /// Who asks what, on one line.
    pub fn line(&self) -> String {
        let text = |name: &str| sanitize_line(self.json[name].as_str().unwrap_or_default());
        let asker = match text("server") {
            server if server.is_empty() => text("agent"),
            server => format!("{server} of {}", text("agent")),
        };
        format!("{asker} asks: {}", text("question"))
    }

    /// Whether it is about a call whose end is not known.
    pub fn is_about_call(&self) -> bool {
        self.json["began_at"].is_string()
    }

    /// The question with what helps to answer it.
    pub fn text(&self) -> String {
        let mut text = self.line();
        if self.is_about_call() {
            let arguments = escape_json(&self.json["arguments"].to_string());
            let began_at = self.json["began_at"].as_str().unwrap_or_default();
            text += &format!(
                "\n  the call began at {} with {}\n  answer with --outcome done, not_done or unknown",
                sanitize_line(began_at),
                sanitize_line(&arguments)
            );
            return text;
        }
        for option in self.json["options"].as_array().into_iter().flatten() {
            text += &format!(
                "\n  - {}",
                sanitize_line(option.as_str().unwrap_or_default())
            );
        }
        if !self.json["schema"].is_null() {
            let schema = escape_json(&self.json["schema"].to_string());
            text += &format!("\n  as JSON by this schema: {}", sanitize_line(&schema));
        }
        text
    }

    /// The command that answers it at another terminal.
    pub fn answer_command(&self, server: &str) -> String {
        let id = shell_quoted(&sanitize_line(&self.id));
        let answer = match self.has_json_answer() {
            _ if self.is_about_call() => "--outcome OUTCOME",
            true => "--value JSON",
            false => "TEXT",
        };
        format!(
            "axed runs answer {} {answer} --input {id} --server {server}",
            self.run_id
        )
    }
}

/// The arguments as the model gave them.
async fn whole_arguments(client: &Client, call: &PendingCall) -> anyhow::Result<Value> {
    let run = call.run_id.to_string();
    let mut after = Some(0);
    while let Some(start) = after {
        let page = client.get_messages(&run, start).await?;
        let calls = page
            .data
            .iter()
            .filter_map(|message| message["tool_calls"].as_array());
        let found = calls.flatten().find(|it| it["id"] == call.tool_call_id);
        if let Some(found) = found {
            return Ok(found["arguments"].clone());
        }
        after = page.next_after;
    }
    anyhow::bail!("{run} has no tool call {}", call.tool_call_id)
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

    fn call(id: &str, arguments: serde_json::Value) -> PendingCall {
        PendingCall::parse(json!({
            "run_id": "run_01980000-0000-7000-8000-000000000001", "agent": "a", "tool_call_id": id, "tool": "write\u{1b}[2J",
            "arguments": arguments, "arguments_hash": "sha256:0", "requested_at": "2026-01-01T00:00:00Z",
        }))
        .expect("a call")
    }

    #[test]
    fn hostile_texts_are_shown_without_effect() {
        let hostile = call("c'; rm -rf ~ #", json!({"path": "\u{202e}a\nb"}));
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
}
