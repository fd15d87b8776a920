//! Decisions on tool calls during `axed run` and `axed chat`: on a terminal the user is prompted, otherwise stderr says how to decide.

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, IsTerminal};

use serde_json::Value;
use tokio::task::JoinHandle;

use crate::cli::client::{Client, ClientError};
use crate::cli::output;
use crate::cli::pending::PendingCall;
use crate::domain::run::{RunId, Status};
use crate::domain::terminal_text::sanitize_line;

/// HTTP's status for a call that somebody else has decided.
const CONFLICT: u16 = 409;

/// Most seconds of one request for the run. If a call has come to wait just before the request, the daemon responds only at
/// the end of this time.
const MAX_WAIT_SECONDS: u64 = 2;

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
        loop {
            let run = self.client.get_run(id, wait).await?;
            wait = MAX_WAIT_SECONDS;
            let status = run["status"].as_str().unwrap_or_default();
            if status.parse().is_ok_and(Status::is_terminal) {
                return Ok(run);
            }
            for call in PendingCall::all_of(&run)? {
                if self.shown.insert((call.run_id, call.tool_call_id.clone())) {
                    self.handle(id, &call).await?;
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

    fn show_command(&self, what: &str, call: &PendingCall) {
        let command = call.approve_command(self.client.base().trim_end_matches('/'));
        output::eprint_line(format_args!(
            "axed: {what}\naxed: to decide, at another terminal: {command}   (or deny, with --reason)"
        ));
    }

    async fn ask_and_decide(&mut self, root: &str, call: &PendingCall) -> anyhow::Result<()> {
        let answer = loop {
            match self.ask("Approve? [y/n] ", root, call).await? {
                Answer::Changed => return Ok(()),
                Answer::Line(None) => {
                    output::eprint_line(format_args!(""));
                    self.show_command("stdin is closed", call);
                    return Ok(());
                }
                Answer::Line(Some(line)) => match line.trim().to_lowercase().as_str() {
                    "y" | "yes" => break true,
                    "n" | "no" => break false,
                    _ => output::eprint_line(format_args!("Type y to approve or n to deny.")),
                },
            }
        };
        let mut reason = None;
        if !answer {
            match self
                .ask("Reason for the model (Enter for none): ", root, call)
                .await?
            {
                Answer::Changed => return Ok(()),
                Answer::Line(line) => reason = line.filter(|line| !line.trim().is_empty()),
            }
        }
        let decision = if answer { "approve" } else { "deny" };
        let run = call.run_id.to_string();
        let reason = reason.as_deref().map(str::trim);
        match self
            .client
            .decide(&run, &call.tool_call_id, decision, reason, None)
            .await
        {
            Err(ClientError::ErrorResponse {
                status: CONFLICT,
                detail,
                ..
            }) => {
                output::eprint_line(format_args!("axed: {detail}"));
                Ok(())
            }
            decided => Ok(decided.map(drop)?),
        }
    }

    /// Shows a question and reads a line, unless the call is decided elsewhere or its run ends in between.
    async fn ask(
        &mut self,
        question: &str,
        root: &str,
        call: &PendingCall,
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
            changed = until_decided(self.client, root, call) => {
                changed?;
                output::eprint_line(format_args!("\naxed: the call does not wait any more"));
                Ok(Answer::Changed)
            }
        }
    }
}

/// Returns once the call does not wait any more.
async fn until_decided(client: &Client, root: &str, call: &PendingCall) -> anyhow::Result<()> {
    loop {
        let run = client.get_run(root, 30).await?;
        let mut pending = PendingCall::all_of(&run)?.into_iter();
        if !pending.any(|it| it.run_id == call.run_id && it.tool_call_id == call.tool_call_id) {
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
