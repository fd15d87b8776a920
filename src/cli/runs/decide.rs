//! `axed runs approve` and `deny`.

use std::path::Path;

use serde_json::Value;

use crate::cli::client::{Client, Decision};
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::pending::PendingCall;
use crate::cli::runs::view::{explain_wait, parse_run};
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;
use crate::domain::terminal_text::sanitize_line;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "RUN may also be the root of the run that waits.

Examples:
  axed approvals
  axed runs approve run_019a2b3c
  axed runs approve run_019a2b3c --deny --reason \"not on a Friday\"
  axed runs approve run_019a2b3c toolu_1
  axed runs approve run_019a2b3c --arguments '{\"path\": \"notes.md\"}'"
)]
pub struct Approve {
    #[command(flatten)]
    call: CallArgs,
    /// Deny the call instead
    #[arg(long)]
    deny: bool,
    /// Execute the call with these arguments instead: JSON, or @FILE with JSON (@- is stdin)
    #[arg(long, value_name = "JSON", conflicts_with_all = ["deny", "all"])]
    arguments: Option<String>,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "RUN may also be the root of the run that waits.

Example:
  axed runs deny run_019a2b3c --reason \"not on a Friday\""
)]
pub struct Deny {
    #[command(flatten)]
    call: CallArgs,
}

#[derive(Debug, clap::Args)]
struct CallArgs {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Id of the tool call; needed only if several calls wait
    #[arg(value_name = "CALL", conflicts_with = "all")]
    call: Option<String>,
    /// Decide all calls of the run and its descendants that wait
    #[arg(long)]
    all: bool,
    /// Reason; the model gets it if the call is denied
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn approve(args: &Approve) -> anyhow::Result<()> {
    let arguments = args.arguments.as_deref().map(read_arguments).transpose()?;
    let decision = if args.deny { "deny" } else { "approve" };
    decide(&args.call, decision, arguments.as_ref()).await
}

pub async fn deny(args: &Deny) -> anyhow::Result<()> {
    decide(&args.call, "deny", None).await
}

/// The arguments as JSON, from the command line or from a file.
fn read_arguments(argument: &str) -> anyhow::Result<Value> {
    let invalid = |why: String| InvalidInput(format!("--arguments: {why}"));
    let text = match argument.strip_prefix('@') {
        None => argument.to_owned(),
        Some("-") => std::io::read_to_string(std::io::stdin())
            .map_err(|error| invalid(format!("could not read stdin: {error}")))?,
        Some(file) => std::fs::read_to_string(file)
            .map_err(|error| invalid(InvalidInput::unreadable(Path::new(file), &error).0))?,
    };
    let value: Value =
        serde_json::from_str(&text).map_err(|error| invalid(format!("is not JSON: {error}")))?;
    match value.is_object() {
        true => Ok(value),
        false => Err(invalid("is not a JSON object".to_owned()).into()),
    }
}

async fn decide(args: &CallArgs, decision: &str, arguments: Option<&Value>) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let action = match (decision, arguments) {
        ("deny", _) => "denying",
        (_, None) => "approving",
        (_, Some(_)) => "approving with other arguments",
    };
    for chosen in chosen_calls(&client, args, &id).await? {
        let (run, call, tool, hash) = match &chosen {
            ChosenCall::Pending(call) => {
                let agent = sanitize_line(&call.agent);
                output::eprint_line(format_args!("axed: {action}, of {agent}: {}", call.line()));
                let hash = Some(call.arguments_hash.as_str());
                let (run, tool) = (call.run_id.to_string(), Some(&call.tool));
                (run, call.tool_call_id.as_str(), tool, hash)
            }
            ChosenCall::Unknown(call) => (id.clone(), call.as_str(), None, None),
        };
        let decision_request = Decision {
            decision,
            reason: args.reason.as_deref(),
            arguments,
            arguments_hash: hash,
        };
        let decided = client.decide(&run, call, &decision_request).await?;
        if args.format.is_json() {
            output::print_json(&decided)?;
            continue;
        }
        let run = parse_run(decided)?;
        let past = if decision == "deny" {
            "denied"
        } else {
            "approved"
        };
        output::print_line(format_args!(
            "{} is {}: {}{} {past}",
            run.id,
            run.status.as_str(),
            tool.map_or_else(String::new, |tool| format!("{} ", sanitize_line(tool))),
            sanitize_line(call)
        ))?;
    }
    Ok(())
}

enum ChosenCall {
    Pending(PendingCall),
    /// The id of a call that does not wait: the daemon explains why it cannot be decided.
    Unknown(String),
}

/// The calls to decide: the named one, or all, or the only one that waits.
async fn chosen_calls(
    client: &Client,
    args: &CallArgs,
    id: &str,
) -> anyhow::Result<Vec<ChosenCall>> {
    let run = client.get_run(id, 0).await?;
    let pending = PendingCall::all_of(client, &run).await?;
    if let Some(named) = &args.call {
        let found = pending.into_iter().find(|call| call.tool_call_id == *named);
        let unknown = || ChosenCall::Unknown(named.clone());
        return Ok(vec![found.map_or_else(unknown, ChosenCall::Pending)]);
    }
    if pending.is_empty() {
        let status = sanitize_line(run["status"].as_str().unwrap_or_default());
        let reason = parse_run(run)?.waiting_for.map(explain_wait);
        let reason = reason.map_or_else(String::new, |reason| format!(" {reason}"));
        let message = format!("no tool call of {id} waits for approval; it is {status}{reason}");
        return Err(InvalidInput(message).into());
    }
    if pending.len() > 1 && !args.all {
        let calls = pending.iter().map(|call| {
            let id = sanitize_line(&call.tool_call_id);
            format!("\n  {id}  {}", call.line())
        });
        let message = format!(
            "{} tool calls of {id} wait for approval; name one, or decide --all:{}",
            pending.len(),
            calls.collect::<String>()
        );
        return Err(InvalidInput(message).into());
    }
    Ok(pending.into_iter().map(ChosenCall::Pending).collect())
}
