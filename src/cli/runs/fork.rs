//! `axed runs fork`: continues from a part of another run's record.

use std::process::ExitCode;
use std::str::FromStr;

use anyhow::Context;
use serde_json::{Map, Value, json};

use crate::cli::age::parse_seconds;
use crate::cli::client::Client;
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::run::{parse_label, parse_pair};
use crate::cli::runs::follow;
use crate::cli::runs::view::UNKNOWN_RUN_FORMAT;
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The new run takes over what RUN recorded before the point, which costs nothing,
and continues from there: without TURN after the last step, else it requests
TURN anew. Child runs that had ended are not repeated.

Examples:
  axed runs fork run_019a2b3c
  axed runs fork run_019a2b3c:3 --model openai/gpt-6-sol --watch
  axed runs fork run_019a2b3c@run_019a2b3d:1 --edit-message \"Be brief\"
  axed runs fork run_019a2b3c:2 --edit-result call_1=\"no such file\""
)]
pub struct Fork {
    /// Run to fork, a run below it to fork there, and the turn to request anew
    #[arg(value_name = "RUN[@CHILD][:TURN]")]
    at: ForkRef,
    /// Keep the reply of TURN too, and execute its calls
    #[arg(long)]
    after_reply: bool,
    /// Use this model instead
    #[arg(long, value_name = "PROVIDER/MODEL")]
    model: Option<String>,
    /// Let the model think this much, such as low or high
    #[arg(long, value_name = "EFFORT")]
    effort: Option<String>,
    /// Parameter of provider requests, such as temperature=0.2; repeatable
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parse_param)]
    params: Vec<(String, String)>,
    /// Most turns, those that are taken over included
    #[arg(long, value_name = "NUMBER")]
    max_turns: Option<u32>,
    /// Replace the user message
    #[arg(long, value_name = "TEXT")]
    edit_message: Option<String>,
    /// Replace the result of a tool call; repeatable
    #[arg(long = "edit-result", value_name = "CALL=TEXT", value_parser = parse_result)]
    edit_results: Vec<(String, String)>,
    /// Replace the system prompt; needs a key with the scope admin
    #[arg(long, value_name = "TEXT")]
    edit_system: Option<String>,
    /// Replace the reply of TURN by this text; needs a key with the scope admin
    #[arg(long, value_name = "TEXT", requires = "after_reply")]
    edit_reply: Option<String>,
    /// Use the agents' definitions of today
    #[arg(long)]
    current: bool,
    /// Add to the memory of the agents
    #[arg(long)]
    memory: bool,
    /// Session of the new run
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    /// Deadline of the new run, such as 90, 90s, 2m or 1h30m
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    timeout: Option<u64>,
    /// Label of the new run, in place of those of RUN; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    labels: Vec<(String, String)>,
    /// Print what the new run does until it ends, then its final text
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

fn parse_param(text: &str) -> Result<(String, String), String> {
    let form = || "a parameter must be NAME=VALUE, such as temperature=0.2".to_owned();
    parse_pair(text).ok_or_else(form)
}

fn parse_result(text: &str) -> Result<(String, String), String> {
    let form = || "a result must be CALL=TEXT, with the id of the tool call".to_owned();
    parse_pair(text).ok_or_else(form)
}

/// A run, a run below it, and a turn.
#[derive(Clone, Debug)]
struct ForkRef {
    run: RunRef,
    child: Option<RunRef>,
    turn: Option<u32>,
}

impl FromStr for ForkRef {
    type Err = InvalidInput;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (runs, turn) = match text.split_once(':') {
            Some((runs, turn)) => (runs, Some(turn)),
            None => (text, None),
        };
        let turn = turn.map(|turn| {
            let why = || InvalidInput(format!("{turn:?} is no turn; turns are numbers from 0"));
            turn.parse().map_err(|_| why())
        });
        let (run, child) = match runs.split_once('@') {
            Some((run, child)) => (run, Some(child)),
            None => (runs, None),
        };
        let parse = |run: &str| {
            let parsed = run.parse::<RunRef>();
            parsed.map_err(|error| InvalidInput(error.to_string()))
        };
        Ok(Self {
            run: parse(run)?,
            child: child.map(parse).transpose()?,
            turn: turn.transpose()?,
        })
    }
}

pub async fn fork(args: &Fork) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.at.run).await?;
    let mut at = Map::new();
    if let Some(child) = &args.at.child {
        at.insert("run".to_owned(), client.find_run(child).await?.into());
    }
    if let Some(turn) = args.at.turn {
        at.insert("turn".to_owned(), turn.into());
    }
    if args.after_reply {
        at.insert("after".to_owned(), "reply".into());
    }
    let mut body = request_body(args);
    if !at.is_empty() {
        body.insert("at".to_owned(), at.into());
    }
    let request = ForkCommand {
        body: body.into(),
        relation: "forks",
        watch: args.watch,
        format: args.format,
    };
    request.send(&client, &id).await
}

/// The body without the point.
fn request_body(args: &Fork) -> Map<String, Value> {
    let mut edit = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            edit.insert(key.to_owned(), value);
        }
    };
    set("model", args.model.clone().map(Value::from));
    set("effort", args.effort.clone().map(Value::from));
    set("max_turns", args.max_turns.map(Value::from));
    set("message", args.edit_message.clone().map(Value::from));
    set("system", args.edit_system.clone().map(Value::from));
    let reply = args.edit_reply.as_ref();
    set("reply", reply.map(|text| json!({ "content": text })));
    // A value that is no JSON is a text.
    let param = |(name, value): &(String, String)| {
        let json = serde_json::from_str(value).unwrap_or_else(|_| value.as_str().into());
        (name.clone(), json)
    };
    let params: Map<String, Value> = args.params.iter().map(param).collect();
    set(
        "params",
        Some(params.into()).filter(|_| !args.params.is_empty()),
    );
    let results = texts(&args.edit_results);
    set("tool_results", results);
    let mut body = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(key.to_owned(), value);
        }
    };
    set("edit", Some(edit.into()).filter(|edit| *edit != json!({})));
    set("definition", args.current.then(|| "current".into()));
    set("memory", args.memory.then(|| true.into()));
    set("session", args.session.clone().map(Value::from));
    set("timeout", args.timeout.map(Value::from));
    set("labels", texts(&args.labels));
    body
}

/// An object of texts; `None` without any.
fn texts(pairs: &[(String, String)]) -> Option<Value> {
    let object = pairs
        .iter()
        .map(|(key, value)| (key.clone(), Value::from(value.as_str())));
    let object: Map<String, Value> = object.collect();
    Some(object.into()).filter(|_| !pairs.is_empty())
}

/// A fork that a command starts and reports.
pub struct ForkCommand {
    pub body: Value,
    /// What the new run does with the other one: `forks`, `repeats`.
    pub relation: &'static str,
    pub watch: bool,
    pub format: FormatArgs,
}

impl ForkCommand {
    pub async fn send(self, client: &Client, id: &str) -> anyhow::Result<ExitCode> {
        let accepted = client.fork(id, &self.body).await?;
        let new = accepted["id"].as_str().context(UNKNOWN_RUN_FORMAT)?;
        if self.watch {
            return follow::watch_run(client, new, self.format.is_json()).await;
        }
        match self.format.is_json() {
            true => output::print_json(&accepted)?,
            false => output::print_line(format_args!("{new} {} {id}", self.relation))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
