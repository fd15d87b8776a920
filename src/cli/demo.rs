//! `axed demo`: runs the shipped scripted agents over HTTP, in a temporary directory.

use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::json;
use tempfile::TempDir;

use crate::cli::client::{Client, RunView};
use crate::cli::exit::InvalidInput;
use crate::cli::signals::Signals;
use crate::cli::tree::Details;
use crate::cli::{in_process, output, tree};
use crate::config::Config;
use crate::config::environment::Environment;
use crate::config::load::{self, Flags};
use crate::domain::run::Status;
use crate::telemetry;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  axed demo\n  axed demo --serve")]
pub struct Args {
    /// Keep the daemon running afterwards and print requests to try
    #[arg(long)]
    serve: bool,
}

const AGENT: &str = "planner-scripted";
const INPUT: &str = "Prepare the release of version 2.0";

/// Files of `agents/`: the path below the demo's directory, and the text.
const FILES: &[(&str, &str)] = &[
    (
        "agents/planner-scripted.toml",
        include_str!("../../agents/planner-scripted.toml"),
    ),
    (
        "agents/researcher-scripted.toml",
        include_str!("../../agents/researcher-scripted.toml"),
    ),
    (
        "agents/critic-scripted.toml",
        include_str!("../../agents/critic-scripted.toml"),
    ),
    (
        "agents/triage-scripted.toml",
        include_str!("../../agents/triage-scripted.toml"),
    ),
    (
        "agents/writer-scripted.toml",
        include_str!("../../agents/writer-scripted.toml"),
    ),
    (
        "scripts/planner.toml",
        include_str!("../../agents/scripts/planner.toml"),
    ),
    (
        "scripts/researcher.toml",
        include_str!("../../agents/scripts/researcher.toml"),
    ),
    (
        "scripts/reader.toml",
        include_str!("../../agents/scripts/reader.toml"),
    ),
    (
        "scripts/critic.toml",
        include_str!("../../agents/scripts/critic.toml"),
    ),
    (
        "scripts/triage.toml",
        include_str!("../../agents/scripts/triage.toml"),
    ),
    (
        "scripts/writer.toml",
        include_str!("../../agents/scripts/writer.toml"),
    ),
];

/// The file that an agent reads, so that the demo does not read the user's directory.
const README: &str = "Version 2.0 of the importer reads empty files, too.\n";
const RESEARCHER_FILE: &str = "agents/researcher-scripted.toml";

pub async fn demo(args: Args) -> anyhow::Result<ExitCode> {
    let temp_dir = in_process::temp_dir()?;
    let config = write_demo_files(&temp_dir)?;
    telemetry::init(&config.telemetry).map_err(InvalidInput)?;
    let mut signals = Signals::new()?;
    in_process::with_daemon(config, async |client| {
        let run = tokio::select! {
            run_id = run_planner(client) => run_id?,
            () = signals.wait_for_stop() => bail!("stopped before the demo ended"),
        };
        if args.serve {
            print_requests(client.base(), &run)?;
            output::eprint_line(format_args!("axed: the console is at {}ui/", client.base()));
            signals.wait_for_stop().await;
        }
        Ok(())
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the demo's files and loads a configuration that depends neither on the environment nor on the current
/// directory.
fn write_demo_files(temp_dir: &TempDir) -> anyhow::Result<Config> {
    let dir = temp_dir.path();
    let write = |name: &str, text: &str| -> std::io::Result<()> {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(dir))?;
        std::fs::write(path, text)
    };
    // A JSON string is also a TOML string.
    let project = json!(dir.join("project").to_string_lossy());
    for (name, text) in FILES {
        // The shipped file cannot contain the path of the demo's directory.
        let text = match *name {
            RESEARCHER_FILE => format!("workdir = {project}\n{text}"),
            _ => (*text).to_owned(),
        };
        write(name, &text).with_context(|| format!("could not write the demo's {name}"))?;
    }
    write("project/README.md", README)?;
    write(
        "axed.toml",
        "[providers.scripted]\nscripts = [\"scripts\"]\n\n[telemetry]\nlog = \"error\"\n",
    )?;
    let flags = Flags {
        config: Some(dir.join("axed.toml")),
        agents: vec![dir.join("agents")],
        data: Some(dir.join("data")),
        ..Flags::default()
    };
    Ok(load::load(&flags, &Environment::new())?)
}

/// Runs the planner, prints its tree and its text, and returns the run's id.
async fn run_planner(client: &Client) -> anyhow::Result<String> {
    output::print_line(format_args!(
        "The input of a planner is \"{INPUT}\".\n\
         It calls three agents at once. One of them lists files, calls a fourth agent,\n\
         and starts an ad-hoc sub-agent to read the README. The models are scripts and\n\
         need no key and no network; the daemon, the runs and the HTTP are real.\n\n\
         POST {}agents/{AGENT}/runs\n",
        client.base()
    ))?;
    let accepted = client.create_run(AGENT, &json!({ "input": INPUT })).await?;
    let id = accepted["id"].as_str().context("the run has no id")?;
    let run: RunView = serde_json::from_value(client.get_run(id, 60).await?)?;
    tree::print(&client.get_tree(id).await?, Details::Usage)?;
    output::print_line(format_args!(""))?;
    if run.status != Status::Completed {
        let message = run
            .error
            .map_or_else(String::new, |failure| failure.message);
        bail!("the planner's run is {}: {message}", run.status.as_str());
    }
    output::print_line(format_args!(
        "{}\n",
        run.content.unwrap_or_default().trim_end()
    ))?;
    Ok(run.id)
}

fn print_requests(base: &str, run: &str) -> anyhow::Result<()> {
    output::print_line(format_args!(
        "The daemon runs until you press Ctrl-C. Try:\n\n\
         \x20 curl {base}agents\n\
         \x20 curl -d '{{\"input\": \"{INPUT}\"}}' -H 'content-type: application/json' '{base}agents/{AGENT}/runs?wait=30'\n\
         \x20 curl {base}runs\n\
         \x20 curl {base}runs/{run}/tree\n\
         \x20 curl -N -H 'accept: text/event-stream' {base}runs/{run}/events\n"
    ))
}
