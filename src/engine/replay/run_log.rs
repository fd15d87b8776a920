//! What an earlier process recorded of a run: its prompt, replies and results, and the calls that had started.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::event::ResumeCause;
use crate::domain::message::{AssistantMessage, ToolResult};
use crate::domain::run::{Run, RunId};
use crate::domain::usage::{CallLimit, TokenUsage};
use crate::engine::context::Engine;
use crate::engine::prepare::{Prompt, RunInput};
use crate::engine::state::approval_decision::ApprovalDecision;
use crate::engine::state::pending_batch::{PendingBatch, SubmittedBatch};
use crate::store::events::EventPages;
use crate::store::{Step, StoreError};

/// The events that describe the progress of a call.
const CALL_EVENTS: [&str; 6] = [
    "tool.started",
    "tool.completed",
    "agent.called",
    "agent.returned",
    "approval.requested",
    "approval.decided",
];

#[derive(Debug, Default)]
pub struct RecordedRun {
    /// A run that has not started has only its messages.
    pub prompt: Option<Prompt>,
    /// Oldest first.
    pub turns: Vec<RecordedTurn>,
    pub calls: RecordedCalls,
    /// The time of the entry in the agent's memory, which may be written already.
    pub memory_time: Option<Timestamp>,
    /// What the first request omits.
    pub compaction: Option<Compaction>,
    /// Whether a summary was requested and not recorded.
    pub is_compacting: bool,
    /// The messages that the first request has beside the prompt.
    pub first_messages: Vec<Content>,
    pub messages: RecordedMessages,
}

/// The messages that clients added to a run.
#[derive(Debug, Default)]
pub struct RecordedMessages {
    /// Oldest first.
    pub contents: Vec<Content>,
    /// How many of them the conversation has.
    pub read: u32,
    /// The turn whose request was the first with the last of those; 0 for none.
    pub read_in_turn: u32,
}

impl RecordedMessages {
    pub async fn read(engine: &Engine, run: RunId) -> Result<Self, StoreError> {
        let mut messages = Self::default();
        for step in engine.journal.store().steps(run).await? {
            match step {
                Step::Message { content } => messages.contents.push(content),
                Step::MessagesRead { turn, last } => drop(messages.mark_read(turn, last)),
                _ => {}
            }
        }
        Ok(messages)
    }

    pub fn count(&self) -> u32 {
        u32::try_from(self.contents.len()).unwrap_or(u32::MAX)
    }

    pub fn unread(&self) -> &[Content] {
        self.contents.get(self.read as usize..).unwrap_or_default()
    }

    /// Marks the messages up to `last` as read in this turn, and returns those that were not before.
    fn mark_read(&mut self, turn: u32, last: u32) -> Vec<Content> {
        let newly_read = self.contents.get(self.read as usize..last as usize);
        let newly_read = newly_read.unwrap_or_default().to_vec();
        (self.read, self.read_in_turn) = (last, turn);
        newly_read
    }
}

/// A reply and the recorded results of its calls.
#[derive(Debug)]
pub struct RecordedTurn {
    pub turn: u32,
    pub message: AssistantMessage,
    /// One for each call, in the order of the calls.
    pub results: Vec<Option<ToolResult>>,
    /// The message to the model if the reply was not the last one.
    pub followup: Option<String>,
    /// The messages of clients that came before the next request.
    pub messages: Vec<Content>,
    /// What later requests omit.
    pub compaction: Option<Compaction>,
}

/// Tool calls that an earlier process started: they are not started, counted or recorded again. Empty for a new run.
#[derive(Debug, Default)]
pub struct RecordedCalls {
    /// When calls started whose `tool.started` is in the log.
    pub started: HashMap<String, Timestamp>,
    /// Calls whose `agent.called` is in the log, with the child that it names.
    pub delegated: HashMap<String, RunId>,
    /// Calls whose `agent.returned` is in the log.
    pub returned: HashSet<String>,
    /// The child runs by call.
    pub children: HashMap<String, Run>,
    /// When calls requested approval.
    pub approvals_requested: HashMap<String, Timestamp>,
    pub decisions: HashMap<String, ApprovalDecision>,
    /// What a person approved calls with instead of the model's arguments.
    pub changed_arguments: HashMap<String, Arc<RawValue>>,
    /// Calls whose `tool.completed` is in the log.
    pub completed: HashSet<String>,
    /// The last turn whose `turn.started` is in the log; 0 for none.
    pub last_turn: u32,
    /// The last submitted batch.
    pub batch: Option<SubmittedBatch>,
    /// The limits that refused calls.
    pub refused_by: Vec<CallLimit>,
    /// How often the run was resumed since its last step.
    pub resume_count: u32,
    /// The usage of the last reply, unless the conversation was compacted since.
    pub reported_usage: Option<TokenUsage>,
}

impl RecordedRun {
    fn set_result(&mut self, turn: u32, position: usize, result: ToolResult) {
        let mut turns = self.turns.iter_mut().rev();
        let recorded_turn = turns.find(|reply| reply.turn == turn);
        let slot = recorded_turn.and_then(|reply| reply.results.get_mut(position));
        if let Some(slot) = slot {
            *slot = Some(result);
        }
    }

    fn mark_messages_read(&mut self, turn: u32, last: u32) {
        let newly_read = self.messages.mark_read(turn, last);
        let turn_messages = self.turns.last_mut().map(|it| &mut it.messages);
        let messages = turn_messages.unwrap_or(&mut self.first_messages);
        messages.extend(newly_read);
    }

    /// The recorded messages that a prompt is assembled with.
    pub fn input(&self, run: &Run) -> RunInput {
        let prompt = self.prompt.as_ref();
        let input = prompt.map_or_else(|| RunInput::from(run.input.clone()), |it| it.input.clone());
        RunInput {
            compaction: self.compaction.clone(),
            ..input
        }
    }

    /// Without the prompt, if `run` is a fork that assembles its own.
    pub fn without_prompt_of_fork(mut self, run: &Run) -> Self {
        if run.fork.as_ref().is_some_and(|fork| fork.assembles_prompt) {
            self.prompt = None;
        }
        self
    }

    /// The batch of a turn that started and has no reply.
    pub fn pending_batch(&self) -> PendingBatch {
        let (last_turn, last_reply) = (self.calls.last_turn, self.turns.last());
        if last_turn <= last_reply.map_or(0, |reply| reply.turn) {
            return PendingBatch::Absent;
        }
        match &self.calls.batch {
            Some(batch) if batch.turn == last_turn => {
                PendingBatch::Submitted(Box::new(batch.clone()))
            }
            Some(_) | None => PendingBatch::Unknown { turn: last_turn },
        }
    }
}

pub async fn load(engine: &Engine, run: &Run) -> Result<RecordedRun, StoreError> {
    let store = engine.journal.store();
    let mut recorded = RecordedRun::default();
    let (mut refused_limits, mut changed_arguments) = (Vec::new(), HashMap::new());
    for step in store.steps(run.id).await? {
        match step {
            Step::Prompt {
                system,
                message,
                earlier,
            } => {
                recorded.prompt = Some(Prompt {
                    system,
                    input: RunInput {
                        earlier,
                        message,
                        compaction: None,
                    },
                    memory_warning: None,
                    warnings: Vec::new(),
                });
                recorded.compaction = None;
            }
            Step::Reply { turn, message } => {
                let results = message.tool_calls.iter().map(|_| None).collect();
                recorded.turns.push(RecordedTurn {
                    turn,
                    message,
                    results,
                    followup: None,
                    messages: Vec::new(),
                    compaction: None,
                });
                recorded.is_compacting = false;
            }
            Step::Message { content } => recorded.messages.contents.push(content),
            Step::MessagesRead { turn, last } => recorded.mark_messages_read(turn, last),
            Step::ArgumentsChanged { call_id, arguments } => {
                changed_arguments.insert(call_id, arguments);
            }
            Step::Remembers { at } => recorded.memory_time = Some(at),
            Step::Compacting => recorded.is_compacting = true,
            Step::Compacted { compaction } => {
                recorded.is_compacting = false;
                let turn_compaction = recorded.turns.last_mut().map(|it| &mut it.compaction);
                *turn_compaction.unwrap_or(&mut recorded.compaction) = Some(compaction);
            }
            Step::Followup { content } => {
                if let Some(reply) = recorded.turns.last_mut() {
                    reply.followup = Some(content);
                }
            }
            Step::Result {
                turn,
                position,
                result,
                refused_by,
            } => {
                refused_limits.extend(refused_by);
                recorded.set_result(turn, position as usize, result);
            }
        }
    }
    recorded.calls = load_calls(engine, run.root_id, run.id).await?;
    recorded.calls.refused_by = refused_limits;
    recorded.calls.changed_arguments = changed_arguments;
    for child in store.children(run.id).await? {
        if let Some(call) = child.tool_call_id.clone() {
            recorded.calls.children.insert(call, child);
        }
    }
    Ok(recorded)
}

/// Reads the progress of a run's calls from the tree's events, without their child runs.
pub async fn load_calls(
    engine: &Engine,
    root: RunId,
    run: RunId,
) -> Result<RecordedCalls, StoreError> {
    let mut calls = RecordedCalls::default();
    let mut pages = EventPages::of_run(&**engine.journal.store(), root, run);
    while let Some(page) = pages.next().await? {
        for event in page {
            calls.apply(&event.name, &event.data);
        }
    }
    Ok(calls)
}

impl RecordedCalls {
    fn apply(&mut self, name: &str, data: &str) {
        #[derive(Deserialize)]
        struct CallEvent {
            tool_call_id: String,
            child_id: Option<RunId>,
            time: Timestamp,
        }
        #[derive(Deserialize)]
        struct TurnStarted {
            turn: u32,
        }
        match name {
            "run.resumed" if is_restart(data) => self.resume_count += 1,
            "turn.completed" | "tool.completed" | "approval.decided" => self.resume_count = 0,
            _ => {}
        }
        match name {
            "turn.completed" => self.reported_usage = parse_usage(data),
            "context.compacted" => self.reported_usage = None,
            "batch.submitted" => self.batch = serde_json::from_str(data).ok(),
            _ => {}
        }
        if name == "turn.started" {
            self.last_turn = serde_json::from_str::<TurnStarted>(data)
                .map_or(self.last_turn, |started| started.turn);
        }
        if !CALL_EVENTS.contains(&name) {
            return;
        }
        let Ok(call) = serde_json::from_str::<CallEvent>(data) else {
            return;
        };
        match (name, call.child_id) {
            ("tool.started", _) => drop(self.started.insert(call.tool_call_id, call.time)),
            ("agent.called", Some(child)) => drop(self.delegated.insert(call.tool_call_id, child)),
            ("approval.requested", _) => {
                self.approvals_requested
                    .insert(call.tool_call_id, call.time);
            }
            ("approval.decided", _) => {
                if let Ok(decision) = serde_json::from_str(data) {
                    self.decisions.entry(call.tool_call_id).or_insert(decision);
                }
            }
            ("tool.completed", _) => drop(self.completed.insert(call.tool_call_id)),
            ("agent.returned", _) => drop(self.returned.insert(call.tool_call_id)),
            _ => {}
        }
    }
}

/// Whether the run was resumed after a restart, and not by a client.
fn is_restart(data: &str) -> bool {
    #[derive(Deserialize)]
    struct RunResumed {
        /// Older versions did not write it.
        cause: Option<ResumeCause>,
    }
    let resumed = serde_json::from_str::<RunResumed>(data);
    resumed.is_ok_and(|resumed| resumed.cause != Some(ResumeCause::Request))
}

/// The tokens in `turn.completed`; `None` if the provider reported none.
fn parse_usage(data: &str) -> Option<TokenUsage> {
    #[derive(Deserialize)]
    struct TurnCompleted {
        input_tokens: u64,
        output_tokens: u64,
        #[serde(default)]
        reasoning_tokens: u64,
    }
    let completed: TurnCompleted = serde_json::from_str(data).ok()?;
    Some(TokenUsage {
        input: completed.input_tokens,
        output: completed.output_tokens,
        reasoning: completed.reasoning_tokens,
        ..TokenUsage::default()
    })
}
