//! The part of a recording that describes one run: the neutral form of its requests, its replies and its results.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::catalog::prompt;
use crate::domain::agent::Agent;
use crate::domain::agent::client_additions::ClientAdditions;
use crate::domain::context::Compaction;
use crate::domain::event::Decision;
use crate::domain::failure::{Failure, FailureCode};
use crate::domain::message::{Message, ToolCall};
use crate::domain::recording::{
    CallRecording, CompactionRecording, ErrorRecording, HistoryMessage, HistoryResult, HistoryRole,
    OutcomeRecording, ResultRecording, RunRecording, TurnRecording, UsageRecording,
};
use crate::domain::run::{Run, Scope, Status};
use crate::engine::capture::RecordingError;
use crate::engine::capture::offer::{self, ToolTable};
use crate::engine::context::Engine;
use crate::engine::record::agent_snapshots;
use crate::engine::recording::neutral::{neutral_params, plain_text, result_text};
use crate::engine::recovery;
use crate::engine::state::pinned_agents::SubAgents;
use crate::providers::ErrorCategory;
use crate::record::entry::{Entry, RecordedEntry};

pub struct CapturedRun {
    pub recording: RunRecording,
    pub position: TreePosition,
}

/// What the offer of a child depends on.
pub struct TreePosition {
    scope: Scope,
    agent: Arc<Agent>,
    /// The agents that the runs of its tree could call.
    sub_agents: Arc<SubAgents>,
}

impl TreePosition {
    /// What the client of the run added to its agent.
    pub fn client(&self) -> Option<&ClientAdditions> {
        self.agent.client.as_deref()
    }
}

pub async fn capture(
    engine: &Arc<Engine>,
    run: &Run,
    path: String,
    parent: Option<&TreePosition>,
    tools: &mut ToolTable,
) -> Result<CapturedRun, RecordingError> {
    let store = engine.journal.store();
    let incomplete = |reason: &str| RecordingError::Incomplete {
        run: run.id,
        reason: reason.to_owned(),
    };
    let definition = store.definition(run.id).await?;
    let agent = definition.and_then(|json| agent_snapshots::parse(&json));
    let agent = agent.ok_or_else(|| incomplete("its definition is not recorded"))?;
    let scope = scope(run, &agent, parent)
        .ok_or_else(|| incomplete("its position in the tree is not recorded"))?;
    let sub_agents = match parent {
        Some(parent) => Arc::clone(&parent.sub_agents),
        None => {
            let pinned = engine.agent_pins.load(&**store, run.id, &agent).await?;
            Arc::new(SubAgents::new(pinned, &engine.catalog))
        }
    };
    let offer = offer::offered_tools(engine, &agent, &scope, &sub_agents).await;
    let position = TreePosition {
        scope,
        agent: Arc::clone(&agent),
        sub_agents,
    };
    let params = neutral_params(&agent.params);
    let mut recording = RunRecording {
        path,
        agent: run.agent.clone(),
        definition: run.agent_version.clone(),
        model: agent.model.to_string(),
        effort: params.effort,
        params: params.others,
        response_format: params.response_format,
        error: run.error.as_ref().and_then(provider_error),
        cancelled: cancel_reason(run),
        ..RunRecording::default()
    };
    let decisions = add_entries(&mut recording, run, &agent, store.entries(run.id).await?);
    if recording.turns.is_empty() && !may_end_without_turn(run, &recording) {
        return Err(incomplete("it has no turn"));
    }
    let split = match agent.memory.enabled {
        true => prompt::split_memory(&recording.system, agent.client.as_deref()),
        false => None,
    };
    if let Some((system, memory)) = split {
        (recording.system, recording.memory) = (system, Some(memory));
    }
    complete(&mut recording, run, &decisions, &agent);
    recording.tools = tools.add(&offer);
    Ok(CapturedRun {
        recording,
        position,
    })
}

/// Adds what is in the entries. Returns the decisions by the ids of their calls.
fn add_entries(
    recording: &mut RunRecording,
    run: &Run,
    agent: &Agent,
    entries: Vec<RecordedEntry>,
) -> HashMap<String, Decision> {
    let mut messages = AddedMessages::default();
    let mut changed_arguments = HashMap::new();
    let mut decisions = HashMap::new();
    for RecordedEntry {
        entry, is_copied, ..
    } in entries
    {
        match entry {
            Entry::CallDecided {
                call_id,
                decision,
                arguments,
                ..
            } => {
                let changed = arguments.map(|arguments| (call_id.clone(), arguments));
                changed_arguments.extend(changed);
                if !is_copied {
                    decisions.entry(call_id).or_insert(decision);
                }
            }
            Entry::MessageAdded { content, .. } => messages.texts.push(plain_text(&content)),
            Entry::MessagesRead { turn, last } => messages.read(turn, last),
            Entry::Replied {
                turn,
                message,
                report,
            } => {
                let usage = UsageRecording::from(report.tokens);
                let turn = TurnRecording {
                    turn,
                    reply: message.content,
                    calls: message.tool_calls.iter().map(call_recording).collect(),
                    ..TurnRecording::default()
                };
                recording.turns.push(match is_copied {
                    true => turn,
                    false => TurnRecording {
                        model: (report.model != agent.model.model).then_some(report.model),
                        stop_reason: report.stop_reason,
                        usage: (usage != UsageRecording::default()).then_some(usage),
                        ..turn
                    },
                });
            }
            entry => add_entry(recording, entry),
        }
    }
    for turn in &mut recording.turns {
        turn.added = messages.by_turn.remove(&turn.turn).unwrap_or_default();
    }
    if let Some(error) = &mut recording.error {
        let next_turn = recording.turns.last().map_or(1, |turn| turn.turn + 1);
        error.added = messages.by_turn.remove(&next_turn).unwrap_or_default();
    }
    add_links(recording, run, &changed_arguments);
    decisions
}

/// Adds what is not in the entries.
fn complete(
    recording: &mut RunRecording,
    run: &Run,
    decisions: &HashMap<String, Decision>,
    agent: &Agent,
) {
    if let Some(turn) = recording.turns.last_mut() {
        turn.outcome = match run.error.as_ref().map(|failure| failure.code) {
            Some(FailureCode::OutputTruncated) => OutcomeRecording::Truncated,
            Some(FailureCode::Refused) => OutcomeRecording::Refused,
            Some(_) | None => OutcomeRecording::Complete,
        };
    }
    for result in &mut recording.results {
        let turn = recording.turns.iter().find(|it| it.turn == result.turn);
        let call = turn.and_then(|turn| turn.calls.get(result.position - 1));
        if let Some(call) = call {
            result.tool.clone_from(&call.tool);
            // Copied decisions are not those of the fork: such a call was approved in the source, unless it failed before. Other arguments
            // are only those of an approval.
            let is_copied = run
                .fork
                .as_ref()
                .is_some_and(|fork| result.turn <= fork.copied_turns);
            let was_executed = !result.is_error || result.arguments.is_some();
            let copied = (is_copied && was_executed && agent.approve.contains(&call.tool))
                .then_some(Decision::Approved);
            result.decision = decisions.get(&call.id).copied().or(copied);
        }
    }
    recording
        .results
        .sort_by_key(|result| (result.turn, result.position));
}

/// Adds to the results what persons and forks changed about their calls.
fn add_links(recording: &mut RunRecording, run: &Run, changed: &HashMap<String, Arc<RawValue>>) {
    let reused = run.fork.iter().flat_map(|fork| &fork.reused_runs);
    let reused: Vec<&str> = reused.map(|link| link.tool_call_id.as_str()).collect();
    for result in &mut recording.results {
        let turn = recording.turns.iter().find(|it| it.turn == result.turn);
        if let Some(call) = turn.and_then(|turn| turn.calls.get(result.position - 1)) {
            result.reused = reused.contains(&call.id.as_str());
            let arguments = changed.get(&call.id);
            result.arguments = arguments.map(|json| changed_arguments(json.get()));
        }
    }
}

/// A table only if its JSON is the same text: the note at the beginning of the result has this text.
fn changed_arguments(json: &str) -> Value {
    let is_same = |table: &Value| {
        let written = table.to_string();
        table.is_object() && written == json
    };
    let table = serde_json::from_str(json).ok().filter(is_same);
    table.unwrap_or_else(|| Value::String(json.to_owned()))
}

/// Why the run was cancelled.
fn cancel_reason(run: &Run) -> Option<String> {
    let reason = run.cancel_reason.clone();
    (run.status == Status::Cancelled).then(|| reason.unwrap_or_default())
}

/// Whether a test of a recording without turns ends as the run did.
fn may_end_without_turn(run: &Run, recording: &RunRecording) -> bool {
    let code = run.error.as_ref().map(|failure| failure.code);
    code == Some(FailureCode::Config) || recording.error.is_some() || recording.cancelled.is_some()
}

/// The messages that were sent to the run.
#[derive(Default)]
struct AddedMessages {
    texts: Vec<String>,
    read: usize,
    by_turn: HashMap<u32, Vec<String>>,
}

impl AddedMessages {
    /// The request of this turn is the first with the messages up to this number.
    fn read(&mut self, turn: u32, last: u32) {
        let last = (last as usize).min(self.texts.len());
        let new = self.texts.get(self.read..last).unwrap_or_default();
        self.by_turn.entry(turn).or_default().extend_from_slice(new);
        self.read = self.read.max(last);
    }
}

/// The scope that the run had.
fn scope(run: &Run, agent: &Agent, parent: Option<&TreePosition>) -> Option<Scope> {
    match parent {
        None => Some(Scope::root(run.id, agent.delegation.max_depth)),
        Some(parent) => recovery::child_scope(&parent.scope, &parent.agent, run.id, agent),
    }
}

fn add_entry(recording: &mut RunRecording, entry: Entry) {
    match entry {
        Entry::Prompted {
            system,
            message,
            earlier,
            compaction,
        } => {
            recording.system = system;
            recording.message = plain_text(&message);
            recording.history = earlier.iter().map(history_message).collect();
            recording.compaction = compaction.map(compaction_recording);
        }
        Entry::CallCompleted {
            turn,
            position,
            result,
            ..
        } => {
            // A later result of the same call replaces an earlier one, as in the conversation.
            let position = position as usize + 1;
            recording
                .results
                .retain(|it| (it.turn, it.position) != (turn, position));
            recording.results.push(ResultRecording {
                turn,
                position,
                text: result_text(&result),
                is_error: result.is_error,
                ..ResultRecording::default()
            });
        }
        Entry::Followup { content } => {
            if let Some(turn) = recording.turns.last_mut() {
                turn.followup = Some(content);
            }
        }
        Entry::Compacted { compaction, .. } => {
            let compaction = Some(compaction_recording(compaction));
            match recording.turns.last_mut() {
                Some(turn) => turn.compaction = compaction,
                None => recording.compaction = compaction,
            }
        }
        Entry::Event(_)
        | Entry::Replied { .. }
        | Entry::CallSuspended { .. }
        | Entry::Remembers { .. }
        | Entry::Compacting
        | Entry::MessageAdded { .. }
        | Entry::CallDecided { .. }
        | Entry::MessagesRead { .. } => {}
    }
}

/// A provider's error. The run's other failures come about again in a test.
fn provider_error(failure: &Failure) -> Option<ErrorRecording> {
    let category = ErrorCategory::parse(&failure.category)?;
    let prefix = format!("{}: ", category.as_str());
    let message = &failure.message;
    Some(ErrorRecording {
        category: failure.category.clone(),
        message: message.strip_prefix(&prefix).unwrap_or(message).to_owned(),
        added: Vec::new(),
    })
}

fn history_message(message: &Message) -> HistoryMessage {
    match message {
        Message::User { content } => HistoryMessage {
            role: HistoryRole::User,
            content: plain_text(content),
            ..HistoryMessage::default()
        },
        Message::Assistant(reply) => HistoryMessage {
            role: HistoryRole::Assistant,
            content: reply.content.clone(),
            calls: reply.tool_calls.iter().map(call_recording).collect(),
            ..HistoryMessage::default()
        },
        Message::Tool { tool_results } => HistoryMessage {
            role: HistoryRole::Tool,
            results: tool_results
                .iter()
                .map(|result| HistoryResult {
                    call: result.call_id.clone(),
                    text: result_text(result),
                    is_error: result.is_error,
                })
                .collect(),
            ..HistoryMessage::default()
        },
    }
}

fn call_recording(call: &ToolCall) -> CallRecording {
    let json = call.sent_arguments();
    CallRecording {
        id: call.id.clone(),
        tool: call.name.clone(),
        arguments: match serde_json::from_str(json) {
            Ok(Value::Object(fields)) => Value::Object(fields),
            Ok(_) | Err(_) => Value::String(json.to_owned()),
        },
    }
}

fn compaction_recording(compaction: Compaction) -> CompactionRecording {
    CompactionRecording {
        before: compaction.before,
        task: compaction.task,
        results_before: compaction.results_before,
        summary: compaction.summary,
    }
}
