//! What an earlier process recorded of a run: its prompt, replies and results, and the calls that had started.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::value::RawValue;

use crate::domain::content::Content;
use crate::domain::context::Compaction;
use crate::domain::event::{EventKind, ResumeCause};
use crate::domain::input::{ArgumentsHash, InputKind};
use crate::domain::message::{AssistantMessage, ToolCall, ToolResult};
use crate::domain::run::{Run, RunId};
use crate::domain::server_question::ServerQuestions;
use crate::domain::usage::{CallLimit, TokenUsage};
use crate::engine::context::Engine;
use crate::engine::state::input_answer::InputAnswer;
use crate::engine::state::pending_batch::{PendingBatch, SubmittedBatch};
use crate::engine::state::prompt::{Prompt, RunInput};
use crate::record::entry::{Entry, RecordedEntry};
use crate::store::StoreError;

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
        for it in engine.journal.store().entries(run).await? {
            match it.entry {
                Entry::MessageAdded { content, .. } => messages.contents.push(content),
                Entry::MessagesRead { turn, last } => drop(messages.mark_read(turn, last)),
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

/// A request for a person's input.
#[derive(Clone, Debug)]
pub struct RecordedInput {
    pub time: Timestamp,
    /// When it ends by itself; `None` if it does not.
    pub deadline: Option<Timestamp>,
    pub kind: RecordedInputKind,
}

#[derive(Clone, Debug)]
pub enum RecordedInputKind {
    /// Of a call with these arguments.
    Approval(ArgumentsHash),
    /// With the schema of the answer.
    Question(Option<Arc<RawValue>>),
    /// For a time.
    Sleep,
    /// For an event.
    Event,
}

impl RecordedInputKind {
    pub fn kind(&self) -> InputKind {
        match self {
            Self::Approval(_) => InputKind::Approval,
            Self::Question(_) => InputKind::Question,
            Self::Sleep => InputKind::Sleep,
            Self::Event => InputKind::Event,
        }
    }
}

/// A call whose service asks people.
#[derive(Clone, Debug)]
pub struct SuspendedCall {
    /// The number of its first question.
    pub first: u32,
    pub required: ServerQuestions,
    /// Whether the call was begun again since.
    pub is_made_again: bool,
}

/// What has the end of a child in the background; nothing for other children.
#[derive(Clone, Debug, Default)]
pub struct ReturnedIn {
    /// The call of `await_agents`.
    pub awaited_by: Option<String>,
    /// The number of the message.
    pub message: Option<u32>,
}

/// Tool calls that an earlier process started: they are not started, counted or recorded again. Empty for a new run.
#[derive(Debug, Default)]
pub struct RecordedCalls {
    /// When calls started whose `tool.started` is in the log.
    pub started: HashMap<String, Timestamp>,
    /// How often they were started: again if a person said that they had not been done.
    pub starts: HashMap<String, u32>,
    /// Calls whose `agent.called` is in the log, with the child that it names.
    pub delegated: HashMap<String, RunId>,
    /// Calls whose `agent.returned` is in the log.
    pub returned: HashMap<String, ReturnedIn>,
    /// Calls whose child is in the background.
    pub background: HashSet<String>,
    /// The child runs by call.
    pub children: HashMap<String, Run>,
    /// By the id of the call or the question.
    pub inputs_requested: HashMap<String, RecordedInput>,
    /// The answers to these; the arguments that calls were approved with are in `changed_arguments`.
    pub decisions: HashMap<String, InputAnswer>,
    /// What a person approved calls with instead of the model's arguments.
    pub changed_arguments: HashMap<String, Arc<RawValue>>,
    /// The last questions of the service of a call.
    pub suspended: HashMap<String, SuspendedCall>,
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
    /// `None` if there is no such call.
    fn set_result(&mut self, turn: u32, position: u32, result: ToolResult) -> Option<()> {
        let mut turns = self.turns.iter_mut().rev();
        let recorded_turn = turns.find(|reply| reply.turn == turn)?;
        *recorded_turn.results.get_mut(position as usize)? = Some(result);
        Some(())
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

    /// Applies an entry to what the conversation is made of.
    fn apply(&mut self, run: RunId, entry: Entry) -> Result<(), StoreError> {
        match entry {
            Entry::Prompted {
                system,
                message,
                earlier,
                compaction,
            } => {
                self.prompt = Some(Prompt {
                    system,
                    input: RunInput {
                        earlier,
                        message,
                        compaction: None,
                    },
                    memory_warning: None,
                    warnings: Vec::new(),
                });
                self.compaction = compaction;
            }
            Entry::Replied { turn, message, .. } => {
                let results = message.tool_calls.iter().map(|_| None).collect();
                self.turns.push(RecordedTurn {
                    turn,
                    message,
                    results,
                    followup: None,
                    messages: Vec::new(),
                    compaction: None,
                });
                self.is_compacting = false;
            }
            Entry::MessageAdded { content, .. } => self.messages.contents.push(content),
            Entry::MessagesRead { turn, last } => self.mark_messages_read(turn, last),
            Entry::Remembers { at } => self.memory_time = Some(at),
            Entry::Compacting => self.is_compacting = true,
            Entry::Compacted { compaction, .. } => {
                self.is_compacting = false;
                let turn_compaction = self.turns.last_mut().map(|it| &mut it.compaction);
                *turn_compaction.unwrap_or(&mut self.compaction) = Some(compaction);
            }
            Entry::Followup { content } => {
                let reply = self.turns.last_mut();
                let reply = reply.ok_or_else(|| misplaced(run, "a message after a reply"))?;
                reply.followup = Some(content);
            }
            Entry::CallCompleted {
                turn,
                position,
                result,
                ..
            } => {
                let found = self.set_result(turn, position, result);
                found.ok_or_else(|| {
                    misplaced(
                        run,
                        &format!("the result of call {position} in turn {turn}"),
                    )
                })?;
            }
            Entry::Event(_) | Entry::CallDecided { .. } | Entry::CallSuspended { .. } => {}
        }
        Ok(())
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
    for it in store.entries(run.id).await? {
        recorded.calls.apply(&it);
        recorded.apply(run.id, it.entry)?;
    }
    for child in store.children(run.id).await? {
        if let Some(call) = child.tool_call_id.clone() {
            recorded.calls.children.insert(call, child);
        }
    }
    Ok(recorded)
}

/// The error of a step that follows nothing which it can belong to.
fn misplaced(run: RunId, step: &str) -> StoreError {
    StoreError::Corrupt(format!(
        "the steps of {run}: {step} does not follow the reply that it belongs to"
    ))
}

/// The progress of a run's calls, without their child runs.
pub async fn load_calls(engine: &Engine, run: RunId) -> Result<RecordedCalls, StoreError> {
    let mut calls = RecordedCalls::default();
    for entry in engine.journal.store().entries(run).await? {
        calls.apply(&entry);
    }
    Ok(calls)
}

impl RecordedCalls {
    /// Whether the call has ended with questions, and is not made again before they are answered.
    pub fn is_suspended(&self, call: &ToolCall) -> bool {
        let suspended = self.suspended.get(&call.id);
        suspended.is_some_and(|it| !it.is_made_again)
    }

    fn apply(&mut self, recorded: &RecordedEntry) {
        let time = recorded.time;
        match &recorded.entry {
            Entry::CallDecided {
                call_id, arguments, ..
            } if recorded.is_copied => {
                let changed = arguments
                    .as_ref()
                    .map(|it| (call_id.clone(), Arc::clone(it)));
                self.changed_arguments.extend(changed);
            }
            _ if recorded.is_copied => {}
            Entry::Replied { report, .. } => {
                self.resume_count = 0;
                self.reported_usage = Some(report.tokens);
            }
            Entry::CallCompleted {
                result, refused_by, ..
            } => {
                self.resume_count = 0;
                self.completed.insert(result.call_id.clone());
                self.refused_by.extend(refused_by);
            }
            Entry::CallDecided {
                call_id,
                decision,
                arguments,
                reason,
                by,
            } => {
                self.resume_count = 0;
                let changed = arguments
                    .as_ref()
                    .map(|it| (call_id.clone(), Arc::clone(it)));
                self.changed_arguments.extend(changed);
                self.decisions
                    .entry(call_id.clone())
                    .or_insert_with(|| InputAnswer {
                        decision: *decision,
                        reason: reason.clone(),
                        arguments: None,
                        arguments_hash: None,
                        by: by.clone(),
                        claim: None,
                        kind: InputKind::Approval,
                    });
            }
            Entry::CallSuspended {
                call_id,
                first,
                required,
            } => {
                let suspended = SuspendedCall {
                    first: *first,
                    required: required.clone(),
                    is_made_again: false,
                };
                self.suspended.insert(call_id.clone(), suspended);
            }
            Entry::Compacted { .. } => self.reported_usage = None,
            Entry::Event(kind) => self.apply_event(time, kind),
            Entry::Prompted { .. }
            | Entry::MessageAdded { .. }
            | Entry::MessagesRead { .. }
            | Entry::Followup { .. }
            | Entry::Remembers { .. }
            | Entry::Compacting => {}
        }
    }

    fn apply_event(&mut self, time: Timestamp, kind: &EventKind) {
        match kind {
            EventKind::RunResumed { cause, .. } => {
                self.resume_count += u32::from(*cause == ResumeCause::Restart);
            }
            EventKind::TurnStarted { turn, .. } => self.last_turn = *turn,
            EventKind::BatchSubmitted {
                turn,
                model,
                batch_id,
            } => {
                self.batch = Some(SubmittedBatch {
                    turn: *turn,
                    model: model.clone(),
                    batch_id: batch_id.clone(),
                    submitted_at: time,
                });
            }
            EventKind::ToolStarted { tool_call_id, .. } => {
                self.started.insert(tool_call_id.clone(), time);
                *self.starts.entry(tool_call_id.clone()).or_default() += 1;
                if let Some(suspended) = self.suspended.get_mut(tool_call_id) {
                    suspended.is_made_again = true;
                }
            }
            EventKind::AgentCalled {
                tool_call_id,
                child_id,
                background,
                ..
            } => {
                self.delegated.insert(tool_call_id.clone(), *child_id);
                if *background {
                    self.background.insert(tool_call_id.clone());
                }
            }
            EventKind::AgentReturned {
                tool_call_id,
                awaited_by,
                message,
                ..
            } => {
                let returned_in = ReturnedIn {
                    awaited_by: awaited_by.clone(),
                    message: *message,
                };
                self.returned.insert(tool_call_id.clone(), returned_in);
            }
            EventKind::ApprovalRequested {
                tool_call_id,
                arguments_hash,
                deadline,
                ..
            } => {
                let kind = RecordedInputKind::Approval(arguments_hash.clone());
                let requested = RecordedInput {
                    time,
                    deadline: *deadline,
                    kind,
                };
                self.inputs_requested
                    .insert(tool_call_id.clone(), requested);
            }
            EventKind::InputRequested {
                input_id,
                schema,
                deadline,
                ..
            } => {
                let kind = RecordedInputKind::Question(schema.clone());
                let requested = RecordedInput {
                    time,
                    deadline: *deadline,
                    kind,
                };
                self.inputs_requested.insert(input_id.clone(), requested);
            }
            EventKind::WaitStarted {
                tool_call_id,
                event,
                until,
                ..
            } => {
                let kind = match event {
                    Some(_) => RecordedInputKind::Event,
                    None => RecordedInputKind::Sleep,
                };
                let requested = RecordedInput {
                    time,
                    deadline: *until,
                    kind,
                };
                self.inputs_requested
                    .insert(tool_call_id.clone(), requested);
            }
            EventKind::WaitEnded { tool_call_id, data } => {
                self.resume_count = 0;
                let requested = self.inputs_requested.get(tool_call_id);
                let kind = requested.map_or(InputKind::Sleep, |it| it.kind.kind());
                let answers = self.decisions.entry(tool_call_id.clone());
                answers.or_insert_with(|| InputAnswer::to_wait(kind, data.clone()));
            }
            EventKind::InputAnswered {
                input_id,
                outcome,
                answer,
                reason,
                by,
            } => {
                self.resume_count = 0;
                let answers = self.decisions.entry(input_id.clone());
                answers.or_insert_with(|| {
                    InputAnswer::recorded(*outcome, answer.clone(), reason.clone(), by.clone())
                });
            }
            _ => {}
        }
    }
}
