//! Decisions on tool calls and answers to questions during `axed run` and `axed chat`: on a terminal the user is prompted, otherwise
//! stderr says how to decide or answer.

use std::cell::Cell;
use std::collections::HashSet;
use std::fs;
use std::io::{self, IsTerminal};
use std::os::unix::process::ExitStatusExt;

use anyhow::Context;
use serde_json::Value;
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::cli::client::{Client, ClientError, Decision};
use crate::cli::in_process;
use crate::cli::output;
use crate::cli::pending::{PendingCall, PendingQuestion};
use crate::cli::reconnects::Reconnects;
use crate::config::environment;
use crate::domain::run::{RunId, Status};
use crate::domain::terminal_text::{escape_json, sanitize_line};

/// HTTP's status for a call that somebody else has decided.
const CONFLICT: u16 = 409;

/// HTTP's status for arguments that do not fit the tool's schema.
const UNPROCESSABLE: u16 = 422;

const QUESTION: &str = "Approve? [y/n/e] ";

/// Most seconds of one request for the run. If a call has come to wait just before the request, the daemon responds only at
/// the end of this time.
const MAX_WAIT_SECONDS: u64 = 2;
/// Most seconds of one request while a question is shown.
const DECISION_WAIT_SECONDS: u64 = 30;

type CallKey = (RunId, String);

pub struct ApprovalPrompt<'a> {
    client: &'a Client,
    /// Whether the user can answer: stdin and stderr are a terminal.
    is_interactive: bool,
    /// Set while a question is on the last line of the terminal.
    is_asking: &'a Cell<bool>,
    /// Calls that were shown, and are not shown again.
    shown: HashSet<CallKey>,
    /// A line that is being read. A read cannot be cancelled, not even by dropping a question: the next question takes over
    /// its line.
    line: Option<JoinHandle<Option<String>>>,
}

enum Answer {
    Line(Option<String>),
    /// The run changed before the user answered.
    Changed,
}

impl<'a> ApprovalPrompt<'a> {
    pub fn new(client: &'a Client, is_asking: &'a Cell<bool>) -> Self {
        Self {
            client,
            is_interactive: io::stdin().is_terminal() && io::stderr().is_terminal(),
            is_asking,
            shown: HashSet::new(),
            line: None,
        }
    }

    /// Waits for the end of a run and returns its record. Meanwhile has its pending calls decided.
    pub async fn wait_until_finished(&mut self, id: &str) -> anyhow::Result<Value> {
        let mut wait = 0;
        let mut reconnects = Reconnects::to_known_daemon();
        loop {
            let run = reconnects.get_run(self.client, id, wait).await?;
            wait = MAX_WAIT_SECONDS;
            let status = run["status"].as_str().unwrap_or_default();
            if status.parse().is_ok_and(Status::is_terminal) {
                return Ok(run);
            }
            for call in PendingCall::all_of(self.client, &run).await? {
                if self.shown.insert((call.run_id, call.tool_call_id.clone())) {
                    self.handle(id, &call).await?;
                    wait = 0;
                }
            }
            for question in PendingQuestion::all_of(&run)? {
                if self.shown.insert((question.run_id, question.id.clone())) {
                    self.handle_question(id, &question).await?;
                    wait = 0;
                }
            }
        }
    }

    /// Returns once no question reads stdin any more.
    pub async fn release_stdin(&mut self) {
        if let Some(line) = self.line.take() {
            output::eprint_line(format_args!("\nPress Enter to continue."));
            // What it reads answers nothing.
            let _ = line.await;
        }
    }

    async fn handle(&mut self, root: &str, call: &PendingCall) -> anyhow::Result<()> {
        output::eprint_status(format_args!(""));
        let agent = sanitize_line(&call.agent);
        if !self.is_interactive {
            self.show_command(
                &format!("{agent} waits for approval of {}", call.line()),
                call,
            );
            return Ok(());
        }
        let tool = sanitize_line(&call.tool);
        output::eprint_line(format_args!(
            "{agent} waits for approval of {tool}:\n{}",
            call.arguments_text()
        ));
        self.is_asking.set(true);
        let result = self.ask_and_decide(root, call).await;
        self.is_asking.set(false);
        result
    }

    async fn handle_question(
        &mut self,
        root: &str,
        question: &PendingQuestion,
    ) -> anyhow::Result<()> {
        output::eprint_status(format_args!(""));
        output::eprint_line(format_args!("{}", question.text()));
        if !self.is_interactive {
            self.show_answer_command(question);
            return Ok(());
        }
        self.is_asking.set(true);
        let result = self.ask_and_answer(root, question).await;
        self.is_asking.set(false);
        result
    }

    fn show_answer_command(&self, question: &PendingQuestion) {
        let command = question.answer_command(self.client.base().trim_end_matches('/'));
        output::eprint_line(format_args!(
            "axed: to answer, at another terminal: {command}   (or --decline WHY)"
        ));
    }

    async fn ask_and_answer(
        &mut self,
        root: &str,
        question: &PendingQuestion,
    ) -> anyhow::Result<()> {
        loop {
            let waits = |run: &Value| question.waits_in(run);
            let line = match self.ask("Answer: ", root, waits).await? {
                Answer::Changed => return Ok(()),
                Answer::Line(None) => {
                    output::eprint_line(format_args!(""));
                    self.show_answer_command(question);
                    return Ok(());
                }
                Answer::Line(Some(line)) => line.trim().to_owned(),
            };
            if line.is_empty() {
                continue;
            }
            let answer = match question.has_json_answer() {
                true => match serde_json::from_str(&line) {
                    Ok(answer) => answer,
                    Err(error) => {
                        output::eprint_line(format_args!("axed: this is not JSON: {error}"));
                        continue;
                    }
                },
                false => Value::String(line),
            };
            let run = question.run_id.to_string();
            let body = serde_json::json!({ "answer": answer });
            match self.client.answer(&run, &question.id, &body).await {
                Err(ClientError::ErrorResponse {
                    status: status @ (CONFLICT | UNPROCESSABLE),
                    detail,
                    ..
                }) => {
                    output::eprint_line(format_args!("axed: {detail}"));
                    if status == CONFLICT {
                        return Ok(());
                    }
                }
                answered => return Ok(answered.map(drop)?),
            }
        }
    }

    fn show_command(&self, what: &str, call: &PendingCall) {
        let command = call.approve_command(self.client.base().trim_end_matches('/'));
        output::eprint_line(format_args!(
            "axed: {what}\naxed: to decide, at another terminal: {command}   (or deny, with --reason)"
        ));
    }

    async fn ask_and_decide(&mut self, root: &str, call: &PendingCall) -> anyhow::Result<()> {
        // What the user has typed in the editor, and the arguments that it has.
        let mut edited: Option<(String, Value)> = None;
        loop {
            let waits = |run: &Value| call.waits_in(run);
            let line = match self.ask(QUESTION, root, waits).await? {
                Answer::Changed => return Ok(()),
                Answer::Line(None) => {
                    output::eprint_line(format_args!(""));
                    self.show_command("stdin is closed", call);
                    return Ok(());
                }
                Answer::Line(Some(line)) => line.trim().to_lowercase(),
            };
            match line.as_str() {
                "y" | "yes" => {
                    let arguments = edited.as_ref().map(|(_, arguments)| arguments);
                    if self.decide(call, "approve", None, arguments).await? {
                        return Ok(());
                    }
                }
                "n" | "no" => return self.deny(root, call).await,
                "e" | "edit" => edited = self.edit(call, edited).await?,
                _ => output::eprint_line(format_args!(
                    "Type y to approve, n to deny, or e to edit the arguments."
                )),
            }
        }
    }

    async fn deny(&mut self, root: &str, call: &PendingCall) -> anyhow::Result<()> {
        let question = "Reason for the model (Enter for none): ";
        let waits = |run: &Value| call.waits_in(run);
        let Answer::Line(line) = self.ask(question, root, waits).await? else {
            return Ok(());
        };
        let reason = line.filter(|line| !line.trim().is_empty());
        let reason = reason.as_deref().map(str::trim);
        self.decide(call, "deny", reason, None).await.map(drop)
    }

    /// Sends a decision; false if the user has to correct the arguments.
    async fn decide(
        &self,
        call: &PendingCall,
        decision: &str,
        reason: Option<&str>,
        arguments: Option<&Value>,
    ) -> anyhow::Result<bool> {
        let run = call.run_id.to_string();
        let decision = Decision {
            decision,
            reason,
            arguments,
            arguments_hash: Some(&call.arguments_hash),
        };
        match self
            .client
            .decide(&run, &call.tool_call_id, &decision)
            .await
        {
            Err(ClientError::ErrorResponse {
                status: status @ (CONFLICT | UNPROCESSABLE),
                detail,
                ..
            }) => {
                output::eprint_line(format_args!("axed: {detail}"));
                Ok(status == CONFLICT)
            }
            decided => Ok(decided.map(|_| true)?),
        }
    }

    /// Opens the arguments in an editor, as the user has left them before. Shows what the call gets, or why it gets
    /// what it had.
    async fn edit(
        &self,
        call: &PendingCall,
        before: Option<(String, Value)>,
    ) -> anyhow::Result<Option<(String, Value)>> {
        let text = match &before {
            Some((text, _)) => text.clone(),
            None => serde_json::to_string_pretty(&call.arguments)? + "\n",
        };
        let edited = edit_in_editor(&text).await;
        let parsed = edited.and_then(|text| Ok((parse_arguments(&text)?, text)));
        Ok(match parsed {
            Err(why) => {
                output::eprint_line(format_args!("axed: {why}; nothing is changed"));
                before
            }
            Ok((_, new)) if new == text => {
                output::eprint_line(format_args!("Nothing is changed."));
                before
            }
            Ok((arguments, text)) => {
                let shown = serde_json::to_string_pretty(&arguments).unwrap_or_default();
                let shown = escape_json(&shown);
                output::eprint_line(format_args!("With these arguments:\n{shown}"));
                Some((text, arguments))
            }
        })
    }

    /// Shows a question and reads a line, unless what it is about does not wait any more: by the run object of the root.
    async fn ask(
        &mut self,
        question: &str,
        root: &str,
        waits: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Answer> {
        output::eprint_status(format_args!("{question}"));
        let line = self
            .line
            .get_or_insert_with(|| tokio::task::spawn_blocking(read_line));
        tokio::select! {
            read = line => {
                self.line = None;
                Ok(Answer::Line(read.ok().flatten()))
            }
            changed = until_decided(self.client, root, waits) => {
                changed?;
                output::eprint_line(format_args!("\naxed: this does not wait any more"));
                Ok(Answer::Changed)
            }
        }
    }
}

/// Returns once nothing waits any more, as `waits` reads it from the run object.
async fn until_decided(
    client: &Client,
    root: &str,
    waits: impl Fn(&Value) -> bool,
) -> anyhow::Result<()> {
    let mut reconnects = Reconnects::to_known_daemon();
    loop {
        let run = reconnects
            .get_run(client, root, DECISION_WAIT_SECONDS)
            .await?;
        if !waits(&run) {
            return Ok(());
        }
    }
}

/// `None` at the end of stdin.
fn read_line() -> Option<String> {
    let mut line = String::new();
    match io::stdin().read_line(&mut line) {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(line),
    }
}

/// The editor if the environment names none, as for other programs.
const DEFAULT_EDITOR: &str = "vi";

/// Opens the text in the user's editor, and returns it when the editor has ended.
///
/// # Errors
/// A message for the user, who may try again.
async fn edit_in_editor(text: &str) -> Result<String, String> {
    let editor = environment::editor().unwrap_or_else(|| DEFAULT_EDITOR.to_owned());
    let edited = async {
        let dir = in_process::temp_dir()?;
        let file = dir.path().join("arguments.json");
        fs::write(&file, text).context("could not write the arguments to a file")?;
        // The variable may hold arguments too, as for other programs.
        let status = Command::new("sh")
            .arg("-c")
            .arg(format!("{editor} \"$1\""))
            .arg("sh")
            .arg(&file)
            .status()
            .await
            .with_context(|| format!("could not start {editor}"))?;
        if let Some(signal) = status.signal() {
            anyhow::bail!("{editor} was ended by signal {signal}");
        }
        if !status.success() {
            anyhow::bail!("{editor} failed; the variable EDITOR chooses another");
        }
        fs::read_to_string(&file).context("could not read the edited arguments")
    };
    edited.await.map_err(|error| format!("{error:#}"))
}

/// The arguments that an edited text has.
///
/// # Errors
/// A message for the user, who may try again.
fn parse_arguments(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(arguments @ Value::Object(_)) => Ok(arguments),
        Ok(_) => Err("the arguments are not a JSON object".to_owned()),
        Err(error) => Err(format!("the arguments are not JSON: {error}")),
    }
}
