//! `axed runs watch`, `wait` and `events`.

use std::process::ExitCode;
use std::time::Duration;

use crate::cli::age::parse_seconds;
use crate::cli::client::{Client, ReceivedEvent, RunView};
use crate::cli::event_lines::EventLines;
use crate::cli::output::{self, FormatArgs};
use crate::cli::reconnects::Reconnects;
use crate::cli::run;
use crate::cli::server::DaemonArgs;
use crate::cli::signals::Signals;
use crate::cli::table::{Cell, Column, Table};
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Prints from the run's first event on. Ctrl-C ends the command, not the run. The
exit code is that of the run, as for axed run.

Examples:
  axed runs watch run_019a2b3c
  axed runs watch run_019a2b3c -o json | jq -r .type"
)]
pub struct Watch {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The exit code is that of the run, as for axed run; 3 after the timeout.

Example:
  axed runs wait run_019a2b3c --timeout 10m && echo completed"
)]
pub struct Wait {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Stop waiting after this time, such as 90s or 10m; the run continues
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    timeout: Option<u64>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "With -o json each event is one line.

Examples:
  axed runs events run_019a2b3c --after 40
  axed runs events run_019a2b3c -o json | jq -r 'select(.type == \"run.failed\")'"
)]
pub struct Events {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Only events after the one with this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn watch(args: &Watch) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    watch_run(&client, &id, args.format.is_json()).await
}

/// Prints a run's events to its end, and then its final text.
pub async fn watch_run(client: &Client, id: &str, json: bool) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    tokio::select! {
        followed = follow_to_end(client, id, json) => followed?,
        () = signals.wait_for_stop() => {
            output::eprint_line(format_args!("axed: run {id} continues; axed runs cancel {id} stops it"));
            return Ok(ExitCode::FAILURE);
        }
    }
    let run = run::wait_until_finished(client, id).await?;
    match json {
        true => Ok(run::exit_code(&serde_json::from_value(run)?)),
        false => run::print_run(&run, false),
    }
}

/// Prints events until the run's last one.
async fn follow_to_end(client: &Client, id: &str, json: bool) -> anyhow::Result<()> {
    let mut lines = EventLines::default();
    let mut printed = Ok(());
    let mut reconnects = Reconnects::default();
    let followed = reconnects.follow(client, id, 0, |event| {
        let result = print_event(&mut lines, event, json);
        if printed.is_ok() {
            printed = result;
        }
    });
    let followed = followed.await;
    printed.and(followed)
}

fn print_event(lines: &mut EventLines, received: &ReceivedEvent, json: bool) -> anyhow::Result<()> {
    if json {
        return match received.number() {
            None => Ok(()),
            Some(_) => output::print_json_line(&received.json),
        };
    }
    match received.event.as_ref().and_then(|event| lines.line(event)) {
        Some(line) => output::print_styled(&line),
        None => Ok(()),
    }
}

pub async fn wait(args: &Wait) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    // A wrong address is an error at once. A run that has ended needs no wait, and no time for it.
    let run = client.get_run(&id, 0).await?;
    let run = match args.timeout {
        _ if run::is_finished(&run) => run,
        None => run::wait_until_finished(&client, &id).await?,
        Some(seconds) => {
            let finished = run::wait_until_finished(&client, &id);
            let Ok(run) = tokio::time::timeout(Duration::from_secs(seconds), finished).await else {
                output::eprint_line(format_args!(
                    "axed: run {id} has not ended after {seconds} s; it continues"
                ));
                return Ok(ExitCode::from(3));
            };
            run?
        }
    };
    let view: RunView = serde_json::from_value(run.clone())?;
    match args.format.is_json() {
        true => output::print_json(&run)?,
        false => output::print_line(format_args!("{} is {}", view.id, view.status.as_str()))?,
    }
    Ok(run::exit_code(&view))
}

pub async fn events(args: &Events) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let mut table = Table::new([
        Column::number("seq"),
        Column::text("time"),
        Column::text("type"),
        Column::flexible("event"),
    ]);
    let mut lines = EventLines::default();
    let mut after = args.after;
    loop {
        let page = client.get_events(&id, after, 1000).await?;
        let is_last = page.data.is_empty();
        for event in page.data {
            if args.format.is_json() {
                output::print_json_line(&event)?;
                continue;
            }
            let received = ReceivedEvent::new(event);
            let line = received.event.as_ref();
            let line = line.and_then(|event| lines.plain_line(event));
            let event = received.json;
            let text = |key: &str| event[key].as_str().unwrap_or_default();
            table.row([
                Cell::new(event["seq"].as_u64().unwrap_or_default()),
                Cell::new(text("time")).or_short(text("time").get(11..19).unwrap_or_default()),
                Cell::new(text("type")),
                Cell::new(line.unwrap_or_else(|| text("agent").to_owned())),
            ]);
        }
        match page.next_after {
            Some(next) if !is_last => after = next,
            _ => break,
        }
    }
    match args.format.is_json() {
        true => Ok(()),
        false => table.print(),
    }
}
