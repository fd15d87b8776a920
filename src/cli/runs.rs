//! `axed runs`: lists, shows, decides and stops the runs of a daemon, over HTTP.

use std::process::ExitCode;

use anyhow::Context;
use comfy_table::{CellAlignment, Table, presets};
use serde::Deserialize;
use serde_json::Value;

use crate::cli::client::{Client, TreeNode};
use crate::cli::exit::Invalid;
use crate::cli::keys::Key;
use crate::cli::{output, run, tree};
use crate::domain::content::Content;
use crate::domain::run::{RunId, Status};
use crate::domain::terminal_text;

/// Where a daemon listens that nobody told otherwise.
const USUAL_SERVER: &str = "http://127.0.0.1:8080";
/// Most runs of one answer, as the API has it.
const PAGE: usize = 200;

#[derive(Debug, clap::Subcommand)]
#[command(
    after_help = "Exit codes: 0 done; 1 an answer that makes no sense; 2 no such run, or a wrong argument;\n\
    3 no daemon there, or a key is missing or may not do this."
)]
pub enum Command {
    /// List runs, the newest first
    List(List),
    /// Print a run: how it stands, what it was asked and what it said
    Show(Show),
    /// Print a run with all its descendants
    Tree(Show),
    /// Ask a run and its descendants to stop
    Cancel(Cancel),
    /// Let a tool call be performed that waits for a person's word
    Approve(Decide),
    /// Refuse a tool call that waits for a person's word
    Deny(Decide),
}

#[derive(Debug, clap::Args)]
pub struct Daemon {
    /// The daemon [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    key: Key,
}

#[derive(Debug, clap::Args)]
pub struct List {
    /// Only this agent's
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Only those that stand so
    #[arg(long, value_name = "STATUS", value_parser = status)]
    status: Option<Status>,
    /// Only those with this label; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = run::label)]
    labels: Vec<(String, String)>,
    /// Child runs too
    #[arg(long)]
    all: bool,
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 50)]
    limit: usize,
    /// Print the runs as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

#[derive(Debug, clap::Args)]
pub struct Show {
    /// The run's id
    #[arg(value_parser = id)]
    id: RunId,
    /// Print it as JSON, as the HTTP API shows it
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

#[derive(Debug, clap::Args)]
pub struct Cancel {
    /// The run's id
    #[arg(value_parser = id)]
    id: RunId,
    /// Why, for the run's record
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "cancelled at the command line"
    )]
    reason: String,
    /// Come back when it has ended
    #[arg(long)]
    wait: bool,
    /// Print the run as JSON, as the HTTP API shows it
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

#[derive(Debug, clap::Args)]
pub struct Decide {
    /// The run's id
    #[arg(value_parser = id)]
    id: RunId,
    /// The tool call's id, as the event approval.requested tells it
    #[arg(value_name = "CALL")]
    call: String,
    /// Why; the model is told where the call is denied
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Print the run as JSON, as the HTTP API shows it
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// The parts of a run that are shown.
#[derive(Deserialize)]
struct RunView {
    id: RunId,
    agent: String,
    status: Status,
    input: Content,
    content: Option<String>,
    partial_content: Option<String>,
    model: String,
    turns: u64,
    duration_ms: u64,
    created_at: String,
    parent_id: Option<RunId>,
    cancel_reason: Option<String>,
    error: Option<crate::domain::run::Failure>,
    tree: TreeUsage,
}

/// What a run and its descendants used.
#[derive(Deserialize)]
struct TreeUsage {
    runs: u64,
    input_tokens: u64,
    output_tokens: u64,
    tool_calls: u64,
    cost_usd: Option<f64>,
}

/// Does what is asked.
pub async fn runs(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List(args) => list(&args).await?,
        Command::Show(args) => show(&args).await?,
        Command::Tree(args) => show_tree(&args).await?,
        Command::Cancel(args) => cancel(&args).await?,
        Command::Approve(args) => decide(&args, "approve").await?,
        Command::Deny(args) => decide(&args, "deny").await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(args: &List) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let mut filters = Vec::new();
    let mut filter = |name: &str, value: &str| filters.push((name.to_owned(), value.to_owned()));
    if let Some(agent) = &args.agent {
        filter("agent", agent);
    }
    if let Some(status) = args.status {
        filter("status", status.as_str());
    }
    if args.all {
        filter("all", "true");
    }
    for (key, value) in &args.labels {
        filter(&format!("label.{key}"), value);
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "run",
        "agent",
        "status",
        "created",
        "runs",
        "tokens in",
        "tokens out",
        "time",
    ]);
    let mut cursor = None;
    let mut left = args.limit;
    while left > 0 {
        let page = client
            .runs(&filters, left.min(PAGE), cursor.as_deref())
            .await?;
        left = left.saturating_sub(page.data.len());
        for run in page.data {
            match args.json {
                true => output::json_line(&run)?,
                false => drop(table.add_row(row(&view(run)?))),
            }
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    if args.json {
        return Ok(());
    }
    if table.is_empty() {
        output::note(format_args!("axed: no such runs at {}", client.base()));
        return Ok(());
    }
    for column in table.column_iter_mut().skip(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    output::line(format_args!("{table}"))
}

fn row(run: &RunView) -> [String; 8] {
    [
        run.id.to_string(),
        terminal_text::line(&run.agent),
        run.status.as_str().to_owned(),
        terminal_text::line(&run.created_at),
        run.tree.runs.to_string(),
        run.tree.input_tokens.to_string(),
        run.tree.output_tokens.to_string(),
        tree::seconds(run.duration_ms),
    ]
}

async fn show(args: &Show) -> anyhow::Result<()> {
    let run = args.daemon.client()?.run(&args.id.to_string(), 0).await?;
    if args.json {
        return output::json(&run);
    }
    let run = view(run)?;
    let line = |key: &str, value: &str| {
        output::line(format_args!("{key:<11}{}", terminal_text::line(value)))
    };
    line("run", &run.id.to_string())?;
    if let Some(parent) = run.parent_id {
        line("parent", &parent.to_string())?;
    }
    line("agent", &run.agent)?;
    line("model", &run.model)?;
    line("status", run.status.as_str())?;
    if let Some(failure) = &run.error {
        line("error", &failure.message)?;
    }
    if let Some(reason) = &run.cancel_reason {
        line("reason", reason)?;
    }
    line("created", &run.created_at)?;
    line("time", &tree::seconds(run.duration_ms))?;
    line("turns", &run.turns.to_string())?;
    let used = &run.tree;
    let cost = used.cost_usd.map(|usd| format!(", {usd} USD"));
    let used = format!(
        "{} tokens in, {} out, {} tool calls{} by {} runs",
        used.input_tokens,
        used.output_tokens,
        used.tool_calls,
        cost.unwrap_or_default(),
        used.runs
    );
    line("used", &used)?;
    let said = run.content.as_ref().or(run.partial_content.as_ref());
    let (input, said) = (run.input.plain(), said.map(String::as_str));
    for (what, text) in [("input", Some(&*input)), ("content", said)] {
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            output::line(format_args!("\n{what}:\n{}", text.trim_end()))?;
        }
    }
    Ok(())
}

async fn show_tree(args: &Show) -> anyhow::Result<()> {
    let tree = args
        .daemon
        .client()?
        .tree_as_json(&args.id.to_string())
        .await?;
    if args.json {
        return output::json(&tree);
    }
    let root: TreeNode = serde_json::from_value(tree).context(NO_RUN)?;
    output::line(format_args!("{}", tree::table(&root)))
}

async fn cancel(args: &Cancel) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = args.id.to_string();
    let mut run = client.cancel(&id, &args.reason).await?;
    if args.wait {
        run = run::settle(&client, &id).await?;
    }
    if args.json {
        return output::json(&run);
    }
    let run = view(run)?;
    output::line(format_args!("{} is {}", run.id, run.status.as_str()))
}

async fn decide(args: &Decide, decision: &str) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = args.id.to_string();
    let run = client
        .decide(&id, &args.call, decision, args.reason.as_deref())
        .await?;
    if args.json {
        return output::json(&run);
    }
    let run = view(run)?;
    output::line(format_args!("{} is {}", run.id, run.status.as_str()))
}

impl Daemon {
    fn client(&self) -> anyhow::Result<Client> {
        let server = self.server.as_deref().unwrap_or(USUAL_SERVER);
        Ok(self.key.client(server)?)
    }
}

const NO_RUN: &str = "the daemon's answer is no run that this version knows";

fn view(run: Value) -> anyhow::Result<RunView> {
    serde_json::from_value(run).context(NO_RUN)
}

fn id(text: &str) -> Result<RunId, Invalid> {
    text.parse()
        .map_err(|_| Invalid("a run's id is run_ and a UUID; axed runs list shows them".to_owned()))
}

fn status(text: &str) -> Result<Status, String> {
    let known = Status::ALL.map(Status::as_str).join(", ");
    text.parse()
        .map_err(|()| format!("a status is one of {known}"))
}
