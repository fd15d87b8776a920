//! `axed runs show` and `axed runs tree`.

use anyhow::Context;
use jiff::Timestamp;

use crate::cli::age::{ago, seconds};
use crate::cli::client::TreeNode;
use crate::cli::output::{self, FormatArgs};
use crate::cli::pending::{PendingCall, PendingQuestion};
use crate::cli::runs::view::{RunDetails, UNKNOWN_RUN_FORMAT, parse_run};
use crate::cli::server::DaemonArgs;
use crate::cli::style::{Color, Styled, status_color};
use crate::cli::tree::{self, Details};
use crate::domain::counted::counted;
use crate::domain::run_ref::RunRef;
use crate::domain::terminal_text::sanitize_line;
use crate::domain::waiting_for::WaitingFor;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed runs show run_019a2b3c
  axed runs tree run_019a2b3c -o wide
  axed runs show run_019a2b3c -o json | jq .content"
)]
pub struct Show {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn show(args: &Show) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let run = client.get_run(&id, 0).await?;
    if args.format.is_json() {
        return output::print_json(&run);
    }
    let pending = PendingCall::all_of(&client, &run).await?;
    let questions = PendingQuestion::all_of(&run)?;
    let run = parse_run(run)?;
    print_facts(&run)?;
    print_wait(&run, &pending, &questions, client.base())?;
    let content = run.content.as_ref().or(run.partial_content.as_ref());
    let (input, content) = (run.input.to_plain_text(), content.map(String::as_str));
    for (title, text) in [("input", Some(&*input)), ("content", content)] {
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            let title = Styled::default().colored(Color::Dim, format!("\n{title}:\n"));
            output::print_styled(&title.plain(text.trim_end()))?;
        }
    }
    Ok(())
}

fn line(key: &str, value: &str, color: Option<Color>) -> anyhow::Result<()> {
    let key = Styled::default().colored(Color::Dim, format!("{key:<11}"));
    output::print_styled(&key.colored(color, sanitize_line(value)))
}

/// What the run waits for, and the commands that end the wait.
fn print_wait(
    run: &RunDetails,
    pending: &[PendingCall],
    questions: &[PendingQuestion],
    server: &str,
) -> anyhow::Result<()> {
    let Some(waiting_for) = run.waiting_for.or(match (pending, questions) {
        ([], []) => None,
        ([], _) => Some(WaitingFor::Input),
        _ => Some(WaitingFor::Approval),
    }) else {
        return Ok(());
    };
    let waits = run.explain_wait(waiting_for);
    line("waits", &waits, Some(Color::Yellow))?;
    let now = Timestamp::now();
    for call in pending {
        let (agent, age) = (&call.agent, ago(call.requested_at, now));
        line(
            "call",
            &format!("{} (of {agent}, {age})", call.line()),
            None,
        )?;
        line("", &call.approve_command(server), None)?;
    }
    for question in questions {
        for (number, text) in question.text().lines().enumerate() {
            let key = if number == 0 { "question" } else { "" };
            line(key, text, None)?;
        }
        line("", &question.answer_command(server), None)?;
    }
    if waiting_for == WaitingFor::Resume {
        let command = format!("axed runs resume {} --server {server}", run.id);
        line("", &command, None)?;
    }
    Ok(())
}

fn print_facts(run: &RunDetails) -> anyhow::Result<()> {
    line("run", &run.id.to_string(), None)?;
    if let Some(parent) = run.parent_id {
        line("parent", &parent.to_string(), None)?;
    }
    line("agent", &run.agent, None)?;
    line("model", &run.model, None)?;
    line("status", run.status.as_str(), status_color(run.status))?;
    if let Some(failure) = &run.error {
        line("error", &failure.message, Some(Color::Red))?;
    }
    if let Some(reason) = &run.cancel_reason {
        line("reason", reason, None)?;
    }
    if let Some(session) = &run.session {
        line("session", session, None)?;
    }
    for (key, value) in &run.labels {
        let value = value.as_str().unwrap_or_default();
        line("label", &format!("{key}={value}"), None)?;
    }
    if !run.scores.is_empty() {
        line("scores", &run.scores_text(), None)?;
    }
    let age = ago(run.created_at, Timestamp::now());
    line("created", &format!("{:.0} ({age})", run.created_at), None)?;
    line("time", &seconds(run.duration_ms), None)?;
    line("turns", &run.turns.to_string(), None)?;
    let usage = &run.tree;
    let cost = usage.cost_usd.map(|usd| format!(", {usd} USD"));
    let usage_text = format!(
        "{} in, {} out, {}{} by {}",
        counted(usage.input_tokens, "token"),
        usage.output_tokens,
        counted(usage.tool_calls, "tool call"),
        cost.unwrap_or_default(),
        counted(usage.runs, "run")
    );
    line("used", &usage_text, None)
}

pub async fn tree(args: &Show) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let tree = client.get_tree_json(&id).await?;
    if args.format.is_json() {
        return output::print_json(&tree);
    }
    let root: TreeNode = serde_json::from_value(tree).context(UNKNOWN_RUN_FORMAT)?;
    let details = match args.format.is_wide() {
        true => Details::Wide,
        false => Details::Ids,
    };
    tree::print(&root, details)
}
