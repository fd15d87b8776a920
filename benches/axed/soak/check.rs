//! What must hold of a run that has ended, and of the whole record in the end.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::soak::api::{Api, is_terminal};
use crate::soak::ledger::Ledger;
use crate::soak::provider::{self, Requests};

/// How a run must end.
pub struct Expected {
    status: &'static str,
    /// What its final text begins with.
    content: String,
    /// Its last event, if a client has followed it.
    last_event: Option<u64>,
}

impl Expected {
    /// With a text that begins so.
    pub fn completed(content: String) -> Self {
        Self {
            status: "completed",
            content,
            last_event: None,
        }
    }

    /// With this event as its last one.
    pub fn with_last_event(self, last_event: u64) -> Self {
        Self {
            last_event: Some(last_event),
            ..self
        }
    }

    /// Because a client wanted that.
    pub fn cancelled() -> Self {
        Self {
            status: "cancelled",
            content: String::new(),
            last_event: None,
        }
    }
}

/// Turns whose request may have been repeated, as the record has no reply to the first one.
#[derive(Clone, Copy)]
enum AllowedRepeats {
    All,
    FirstTurn,
    None,
}

/// Waits for the run's end, and holds its record against what is expected and what its provider has seen.
pub async fn check_run(
    api: &Api,
    requests: &Requests,
    ledger: &Ledger,
    id: &str,
    expected: Expected,
) -> Result<(), String> {
    let run = api.wait_for_end(id).await?;
    let text = |field: &str| run[field].as_str().unwrap_or_default();
    ledger.record_ended(id, text("status"));
    if text("status") != expected.status || !text("content").starts_with(&expected.content) {
        return Err(format!(
            "it should be {} with {:?}, and is {run}",
            expected.status, expected.content
        ));
    }
    let path = format!("/runs/{id}/events?limit=1000");
    let events = api.get_all(&path, "next_after").await?;
    check_events(&events, id, &run, expected.last_event)?;
    let tree = api.get(&format!("/runs/{id}/tree")).await?;
    let mut runs = Vec::new();
    collect_runs(&tree, &mut runs);
    let was_resumed = run["attempt"].as_u64() > Some(1);
    let repeats = match was_resumed {
        true => AllowedRepeats::All,
        // If its start could not be recorded it is queued again, and not resumed.
        false if run["started_at"] != run["created_at"] => AllowedRepeats::FirstTurn,
        false => AllowedRepeats::None,
    };
    for (id, status) in runs {
        let path = format!("/runs/{id}/messages?after=0");
        let messages = api.get_all(&path, "next_after").await?;
        check_requests(requests, &messages, status == "completed", repeats)?;
        ledger.count("runs checked");
    }
    if was_resumed {
        ledger.count("trees taken up again");
    }
    Ok(())
}

/// Whether the event is the end of this run.
pub fn is_end(event: &Value, id: &str) -> bool {
    event["run_id"] == id
        && matches!(
            event["type"].as_str(),
            Some("run.completed" | "run.failed" | "run.cancelled")
        )
}

/// The log of the tree has no gap, an end for each run that began, and the root's last.
fn check_events(
    events: &[Value],
    id: &str,
    run: &Value,
    client_last_event: Option<u64>,
) -> Result<(), String> {
    let mut seqs = events.iter().map(|event| event["seq"].as_u64());
    let is_gapless = (1..=events.len() as u64).all(|number| seqs.next() == Some(Some(number)));
    if !is_gapless {
        return Err(format!("its events have a gap or a repetition: {events:?}"));
    }
    let last = events.len() as u64;
    if run["last_event"].as_u64() != Some(last)
        || client_last_event.is_some_and(|number| number != last)
    {
        return Err(format!(
            "it has {last} events, its record says {}, its client had {client_last_event:?}",
            run["last_event"]
        ));
    }
    let mut ends: HashMap<&str, usize> = HashMap::new();
    for event in events {
        let run_id = event["run_id"].as_str().unwrap_or_default();
        *ends.entry(run_id).or_default() += usize::from(is_end(event, run_id));
    }
    if let Some((run_id, count)) = ends.iter().find(|(_, count)| **count != 1) {
        return Err(format!("its run {run_id} has {count} ends"));
    }
    match events.last().is_some_and(|event| is_end(event, id)) {
        true => Ok(()),
        false => Err("its last event is not its end".to_owned()),
    }
}

/// The runs of a tree with their status.
fn collect_runs<'t>(summary: &'t Value, runs: &mut Vec<(&'t str, &'t str)>) {
    let text = |field: &str| summary[field].as_str().unwrap_or_default();
    runs.push((text("id"), text("status")));
    for child in summary["children"].as_array().into_iter().flatten() {
        collect_runs(child, runs);
    }
}

/// Of each turn the record has the last reply: no recorded one was requested again.
fn check_requests(
    requests: &Requests,
    messages: &[Value],
    is_completed: bool,
    repeats: AllowedRepeats,
) -> Result<(), String> {
    let mut token = None;
    let mut recorded = Vec::new();
    for message in messages {
        match message["role"].as_str() {
            Some("user") => {
                token = message["content"].as_str().and_then(provider::token);
                recorded.clear();
            }
            Some("assistant") => recorded.push(provider::serial(message)),
            _ => {}
        }
    }
    let Some(token) = token else {
        return match is_completed {
            true => Err("a completed run has no message of its user".to_owned()),
            false => Ok(()),
        };
    };
    let serials_by_turn = requests.serials(token);
    for (turn, serial) in recorded.iter().enumerate() {
        let serials = serials_by_turn.get(turn).map_or(&[][..], Vec::as_slice);
        if serial.is_none() || serials.last().copied() != *serial {
            return Err(format!(
                "turn {turn} of {token} has reply {serial:?} on its record, and was given {serials:?}"
            ));
        }
    }
    if is_completed && serials_by_turn.len() != recorded.len() {
        return Err(format!(
            "{token} has {} replies on its record, and was given {serials_by_turn:?}",
            recorded.len()
        ));
    }
    let first = match repeats {
        AllowedRepeats::All => serials_by_turn.len(),
        AllowedRepeats::FirstTurn => 1,
        AllowedRepeats::None => 0,
    };
    if serials_by_turn
        .iter()
        .skip(first)
        .any(|serials| serials.len() > 1)
    {
        return Err(format!(
            "{token} requested twice without having been stopped: {serials_by_turn:?}"
        ));
    }
    Ok(())
}

/// Compares the whole record with the responses: nothing lost, nothing repeated, nothing unfinished.
pub async fn check_record(api: &Api, ledger: &Ledger) -> Result<usize, String> {
    let runs = api
        .get_all("/runs?all=true&limit=200", "next_cursor")
        .await?;
    let mut ended_runs = ledger.ended_runs();
    let (mut tokens, mut calls) = (HashSet::new(), HashSet::new());
    for run in &runs {
        let text = |field: &str| run[field].as_str().unwrap_or_default();
        let id = text("id");
        ledger.expect(is_terminal(run), || {
            format!("{id} is still {}", run["status"])
        });
        if run["parent_id"].is_null() {
            let token = provider::token(text("input")).unwrap_or_default();
            ledger.expect(tokens.insert(token), || {
                format!("the request {token} was accepted twice: {id} is the other")
            });
            ledger.expect(!ledger.was_refused(token), || {
                format!("the request {token} was answered 503, and {id} was made of it")
            });
            let seen_status = ended_runs.remove(id);
            ledger.expect(seen_status.as_deref() == Some(text("status")), || {
                format!("{id} was seen as {seen_status:?} and is {}", text("status"))
            });
        } else {
            let call = (text("parent_id"), text("tool_call_id"));
            ledger.expect(calls.insert(call), || {
                format!("the call {call:?} has two child runs, {id} is the other")
            });
        }
    }
    for id in ended_runs.keys() {
        ledger.report_problem(format!("{id} was accepted, and is lost"));
    }
    Ok(runs.len())
}

/// What commands and tools have left in their directory: no recorded call was performed twice.
pub fn check_side_effects(work: &Path, ledger: &Ledger) -> usize {
    let lines = fs::read_to_string(work.join("performed")).unwrap_or_default();
    let mut seen = HashSet::new();
    for line in lines.lines() {
        ledger.expect(seen.insert(line), || {
            format!("the command of {line:?} was performed twice")
        });
    }
    let mut files = 0;
    for entry in fs::read_dir(work).expect("the directory").flatten() {
        if entry.path().extension().is_some_and(|kind| kind == "txt") {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            files += 1;
            ledger.expect(matches!(text.as_str(), "x" | "xy"), || {
                format!("{:?} was edited twice: {text:?}", entry.file_name())
            });
        }
    }
    seen.len() + files
}
