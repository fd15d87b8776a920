//! `axed runs`: lists, shows, approves and cancels the runs of a daemon over HTTP.

use std::process::ExitCode;

use anyhow::Context;
use comfy_table::{CellAlignment, Table, presets};
use serde::Deserialize;
use serde_json::Value;

use crate::cli::client::{Client, TreeNode};
use crate::cli::exit::InvalidInput;
use crate::cli::keys::ClientKey;
use crate::cli::{output, run, tree};
use crate::domain::content::Content;
use crate::domain::run::{RunId, Status};
use crate::domain::terminal_text;

const DEFAULT_SERVER: &str = "http://127.0.0.1:8080";
/// Maximum number of runs of one page, as in the API.
const MAX_PAGE_RUNS: usize = 200;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Exit codes:\n\
    0  done\n\
    1  invalid response\n\
    2  run not found, or invalid argument\n\
    3  daemon not reachable, or key missing or not permitted")]
pub enum Command {
    /// List runs, newest first
    List(List),
    /// Print a run: its status, input and final text
    Show(Show),
    /// Print a run with all its descendants
    Tree(Show),
    /// Cancel a run and its descendants
    Cancel(Cancel),
    /// Approve a tool call that waits for approval
    Approve(Decide),
    /// Deny a tool call that waits for approval
    Deny(Decide),
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct DaemonArgs {
    /// Address of the daemon [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    key: ClientKey,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct List {
    /// Filter by agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Filter by status
    #[arg(long, value_name = "STATUS", value_parser = parse_status)]
    status: Option<Status>,
    /// Filter by label; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = run::parse_label)]
    labels: Vec<(String, String)>,
    /// Include child runs
    #[arg(long)]
    all: bool,
    /// Maximum number of runs
    #[arg(long, value_name = "N", default_value_t = 50)]
    limit: usize,
    /// Print the runs as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Show {
    /// Id of the run
    #[arg(value_parser = parse_run_id)]
    id: RunId,
    /// Print it as JSON, as in the HTTP API
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Cancel {
    /// Id of the run
    #[arg(value_parser = parse_run_id)]
    id: RunId,
    /// Reason for the run's record
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "cancelled at the command line"
    )]
    reason: String,
    /// Wait until the run has ended
    #[arg(long)]
    wait: bool,
    /// Print the run as JSON, as in the HTTP API
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Decide {
    /// Id of the run
    #[arg(value_parser = parse_run_id)]
    id: RunId,
    /// Id of the tool call, as in the event approval.requested
    #[arg(value_name = "CALL")]
    call: String,
    /// Reason; the model gets it if the call is denied
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Print the run as JSON, as in the HTTP API
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Deserialize)]
struct RunDetails {
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

/// Usage of a run and its descendants.
#[derive(Deserialize)]
struct TreeUsage {
    runs: u64,
    input_tokens: u64,
    output_tokens: u64,
    tool_calls: u64,
    cost_usd: Option<f64>,
}

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
    let mut remaining = args.limit;
    while remaining > 0 {
        let page = client
            .list_runs(&filters, remaining.min(MAX_PAGE_RUNS), cursor.as_deref())
            .await?;
        remaining = remaining.saturating_sub(page.data.len());
        for run in page.data {
            match args.json {
                true => output::print_json_line(&run)?,
                false => drop(table.add_row(row(&parse_run(run)?))),
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
        output::eprint_line(format_args!("axed: no matching runs at {}", client.base()));
        return Ok(());
    }
    for column in table.column_iter_mut().skip(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    output::print_line(format_args!("{table}"))
}

fn row(run: &RunDetails) -> [String; 8] {
    [
        run.id.to_string(),
        terminal_text::sanitize_line(&run.agent),
        run.status.as_str().to_owned(),
        terminal_text::sanitize_line(&run.created_at),
        run.tree.runs.to_string(),
        run.tree.input_tokens.to_string(),
        run.tree.output_tokens.to_string(),
        tree::seconds(run.duration_ms),
    ]
}

async fn show(args: &Show) -> anyhow::Result<()> {
    let run = args
        .daemon
        .client()?
        .get_run(&args.id.to_string(), 0)
        .await?;
    if args.json {
        return output::print_json(&run);
    }
    let run = parse_run(run)?;
    let line = |key: &str, value: &str| {
        output::print_line(format_args!(
            "{key:<11}{}",
            terminal_text::sanitize_line(value)
        ))
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
    let usage = &run.tree;
    let cost = usage.cost_usd.map(|usd| format!(", {usd} USD"));
    let usage_text = format!(
        "{} tokens in, {} out, {} tool calls{} by {} runs",
        usage.input_tokens,
        usage.output_tokens,
        usage.tool_calls,
        cost.unwrap_or_default(),
        usage.runs
    );
    line("used", &usage_text)?;
    let content = run.content.as_ref().or(run.partial_content.as_ref());
    let (input, content) = (run.input.to_plain_text(), content.map(String::as_str));
    for (title, text) in [("input", Some(&*input)), ("content", content)] {
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            output::print_line(format_args!("\n{title}:\n{}", text.trim_end()))?;
        }
    }
    Ok(())
}

async fn show_tree(args: &Show) -> anyhow::Result<()> {
    let tree = args
        .daemon
        .client()?
        .get_tree_json(&args.id.to_string())
        .await?;
    if args.json {
        return output::print_json(&tree);
    }
    let root: TreeNode = serde_json::from_value(tree).context(UNKNOWN_RUN_FORMAT)?;
    output::print_line(format_args!("{}", tree::table(&root)))
}

async fn cancel(args: &Cancel) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = args.id.to_string();
    let mut run = client.cancel(&id, &args.reason).await?;
    if args.wait {
        run = run::wait_until_finished(&client, &id).await?;
    }
    if args.json {
        return output::print_json(&run);
    }
    let run = parse_run(run)?;
    output::print_line(format_args!("{} is {}", run.id, run.status.as_str()))
}

async fn decide(args: &Decide, decision: &str) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = args.id.to_string();
    let run = client
        .decide(&id, &args.call, decision, args.reason.as_deref())
        .await?;
    if args.json {
        return output::print_json(&run);
    }
    let run = parse_run(run)?;
    output::print_line(format_args!("{} is {}", run.id, run.status.as_str()))
}

impl DaemonArgs {
    fn client(&self) -> anyhow::Result<Client> {
        let server = self.server.as_deref().unwrap_or(DEFAULT_SERVER);
        Ok(self.key.client(server)?)
    }
}

const UNKNOWN_RUN_FORMAT: &str = "this version of axed cannot read the daemon's response";

fn parse_run(run: Value) -> anyhow::Result<RunDetails> {
    serde_json::from_value(run).context(UNKNOWN_RUN_FORMAT)
}

fn parse_run_id(text: &str) -> Result<RunId, InvalidInput> {
    text.parse().map_err(|_| {
        InvalidInput("a run id is run_ and a UUID; axed runs list shows them".to_owned())
    })
}

fn parse_status(text: &str) -> Result<Status, String> {
    let statuses = Status::ALL.map(Status::as_str).join(", ");
    text.parse()
        .map_err(|()| format!("a status must be one of {statuses}"))
}
