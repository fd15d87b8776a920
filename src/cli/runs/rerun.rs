//! `axed runs rerun`: requests a recorded run again.

use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Map, Value};

use crate::cli::client::Client;
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::runs::follow;
use crate::cli::runs::run_ref::RunRef;
use crate::cli::runs::view::UNKNOWN_RUN_FORMAT;
use crate::cli::server::DaemonArgs;
use crate::domain::content::{Content, Part};

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The new run has the recorded input, context, earlier messages, labels, model,
params, timeout and budget of RUN, and the agent's definition of today. It is
not in the session of RUN; webhooks of the request are not repeated.

Examples:
  axed runs rerun run_019a2b3c
  axed runs rerun run_019a2b3c --model openai/gpt-5 --watch"
)]
pub struct Rerun {
    /// Id of a root run, or its beginning
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Use this model instead
    #[arg(long, value_name = "PROVIDER/MODEL")]
    model: Option<String>,
    /// Print what the new run does until it ends, then its final text
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn rerun(args: &Rerun) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let id = args.id.resolve(&client).await?;
    let run = client.get_run(&id, 0).await?;
    let mut body = recorded_body(&client, &id, &run).await?;
    if let Some(model) = &args.model {
        body.insert("model".to_owned(), model.as_str().into());
    }
    let agent = run["agent"].as_str().context(UNKNOWN_RUN_FORMAT)?;
    let accepted = client.create_run(agent, &body.into()).await?;
    let new = accepted["id"].as_str().context(UNKNOWN_RUN_FORMAT)?;
    if args.watch {
        return follow::watch_run(&client, new, args.format.is_json()).await;
    }
    match args.format.is_json() {
        true => output::print_json(&accepted)?,
        false => output::print_line(format_args!("{new} repeats {id}"))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The body of the request that started the run.
async fn recorded_body(
    client: &Client,
    id: &str,
    run: &Value,
) -> anyhow::Result<Map<String, Value>> {
    let refused =
        |why: &str| anyhow::Error::from(InvalidInput(format!("could not repeat {id}: {why}")));
    if let Some(parent) = run["parent_id"].as_str() {
        return Err(refused(&format!(
            "its parent {parent} started it; repeat the root run {}",
            run["root_id"].as_str().unwrap_or(parent)
        )));
    }
    let events = client.get_events(id, 0).await?.data;
    let of_root = |kind: &str| {
        let mut own = events.iter().filter(|event| event["run_id"] == id);
        own.find(|event| event["type"] == kind)
    };
    let queued = of_root("run.queued").ok_or_else(|| refused("its events are gone"))?;
    let mut body = queued["request"].as_object().cloned().unwrap_or_default();
    if body.contains_key("too_large") {
        return Err(refused("its request was too large to be recorded"));
    }
    let input: Content =
        serde_json::from_value(run["input"].clone()).context(UNKNOWN_RUN_FORMAT)?;
    let has_files = input
        .parts()
        .into_iter()
        .flatten()
        .any(|part| !matches!(part, Part::Text { .. }));
    if has_files {
        return Err(refused(
            "its input has images or files, which only the client has",
        ));
    }
    body.insert("input".to_owned(), run["input"].clone());
    body.insert("labels".to_owned(), run["labels"].clone());
    // The first request had the earlier messages, and the message of the run.
    let first_turn = of_root("turn.started").and_then(|turn| turn["messages"].as_u64());
    let earlier = first_turn.map_or(0, |messages| messages.saturating_sub(1));
    if earlier > 0 {
        let messages = earlier_messages(client, id, usize::try_from(earlier)?).await?;
        body.insert("messages".to_owned(), messages.into());
    }
    Ok(body)
}

async fn earlier_messages(client: &Client, id: &str, count: usize) -> anyhow::Result<Vec<Value>> {
    let mut messages = Vec::new();
    let mut after = Some(0);
    while let Some(at) = after.filter(|_| messages.len() < count) {
        let page = client.get_messages(id, at).await?;
        messages.extend(page.data);
        after = page.next_after;
    }
    messages.truncate(count);
    Ok(messages)
}
