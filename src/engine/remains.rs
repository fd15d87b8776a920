//! What an earlier process left of a run, read from the record: its prompt, its replies, the results that came, and
//! which calls it had begun. Knows no loop.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;
use serde::Deserialize;

use crate::domain::context::Compaction;
use crate::domain::event::{Decision, EventKind};
use crate::domain::message::{AssistantMessage, ToolResult};
use crate::domain::run::{Run, RunId};
use crate::domain::usage::TokenUsage;
use crate::engine::left_batch::{LeftBatch, Submitted};
use crate::engine::parts::Engine;
use crate::engine::resolve::{Input, Prompt};
use crate::store::{EventQuery, Step, StoreError};

/// Events read at once.
const PAGE: usize = 1000;

/// The events that say how far a call is.
const TOLD_OF_CALLS: [&str; 6] = [
    "tool.started",
    "tool.completed",
    "agent.called",
    "agent.returned",
    "approval.requested",
    "approval.decided",
];

/// The steps of a run, put together again.
#[derive(Debug, Default)]
pub struct Remains {
    /// The prompt, where it came to be assembled; of a run that has not started only its input.
    pub prompt: Option<Prompt>,
    /// Its replies, oldest first.
    pub replies: Vec<Replied>,
    /// Its calls.
    pub calls: Begun,
    /// The time of its entry in its agent's memory, which may be written already.
    pub remembers: Option<Timestamp>,
    /// What its first request leaves out.
    pub compaction: Option<Compaction>,
    /// Whether a summary was requested that is not recorded.
    pub is_compacting: bool,
}

/// One reply, with the results of its calls as far as they came.
#[derive(Debug)]
pub struct Replied {
    /// Its turn.
    pub turn: u32,
    /// What the model said.
    pub message: AssistantMessage,
    /// One for each call, in their order.
    pub results: Vec<Option<ToolResult>>,
    /// What the model was told of it where it was not to be the last word.
    pub told: Option<String>,
    /// What requests leave out from then on.
    pub compaction: Option<Compaction>,
}

/// Tool calls that an earlier process began: they are not begun, counted or told again. Empty for a fresh run.
#[derive(Debug, Default)]
pub struct Begun {
    /// Calls whose `tool.started` is in the log.
    pub started: HashSet<String>,
    /// Calls whose `agent.called` is in the log, with the child that it names.
    pub called: HashMap<String, RunId>,
    /// Calls whose `agent.returned` is in the log.
    pub returned: HashSet<String>,
    /// The child runs there are, by call.
    pub children: HashMap<String, Run>,
    /// When calls asked for a person's word.
    pub requested: HashMap<String, Timestamp>,
    /// The words that came.
    pub decided: HashMap<String, Decided>,
    /// Calls whose `tool.completed` is in the log.
    pub completed: HashSet<String>,
    /// The last turn whose `turn.started` is in the log; 0 for none.
    pub last_turn: u32,
    /// The last batch that a turn's request was handed over in.
    pub batch: Option<Submitted>,
    /// How often the run was resumed since its last step.
    pub resumed: u32,
    /// What the last reply reported, unless the conversation was made shorter since.
    pub reported: Option<TokenUsage>,
}

/// What was decided about a call that waited for a person's word.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Decided {
    /// What.
    pub decision: Decision,
    /// Why, for the model.
    pub reason: Option<String>,
    /// The name of the key that decided; none without keys.
    pub by: Option<String>,
}

impl Decided {
    /// Nobody said anything in time.
    pub fn timed_out() -> Self {
        Self {
            decision: Decision::TimedOut,
            reason: None,
            by: None,
        }
    }

    /// The event that tells it.
    pub fn event(&self, call: &str) -> EventKind {
        EventKind::ApprovalDecided {
            tool_call_id: call.to_owned(),
            decision: self.decision,
            reason: self.reason.clone(),
            by: self.by.clone(),
        }
    }
}

impl Remains {
    /// What is left of a turn that began and has no reply.
    pub fn left_batch(&self) -> LeftBatch {
        let (last, replied) = (self.calls.last_turn, self.replies.last());
        if last <= replied.map_or(0, |reply| reply.turn) {
            return LeftBatch::Nothing;
        }
        match &self.calls.batch {
            Some(batch) if batch.turn == last => LeftBatch::Known(batch.clone()),
            Some(_) | None => LeftBatch::Unknown { turn: last },
        }
    }
}

/// Reads what is left of a run.
pub async fn load(engine: &Engine, run: &Run) -> Result<Remains, StoreError> {
    let store = engine.journal.store();
    let mut remains = Remains::default();
    for step in store.steps(run.id).await? {
        match step {
            Step::Prompt {
                system,
                message,
                earlier,
            } => {
                remains.prompt = Some(Prompt {
                    system,
                    input: Input {
                        earlier,
                        message,
                        compaction: None,
                    },
                    memory_warning: None,
                });
                remains.compaction = None;
            }
            Step::Reply { turn, message } => {
                let results = message.tool_calls.iter().map(|_| None).collect();
                remains.replies.push(Replied {
                    turn,
                    message,
                    results,
                    told: None,
                    compaction: None,
                });
                remains.is_compacting = false;
            }
            Step::Remembers { at } => remains.remembers = Some(at),
            Step::Compacting => remains.is_compacting = true,
            Step::Compacted { compaction } => {
                remains.is_compacting = false;
                let of_reply = remains.replies.last_mut().map(|it| &mut it.compaction);
                *of_reply.unwrap_or(&mut remains.compaction) = Some(compaction);
            }
            Step::Said { content } => {
                if let Some(reply) = remains.replies.last_mut() {
                    reply.told = Some(content);
                }
            }
            Step::Result {
                turn,
                position,
                result,
            } => {
                let of = remains
                    .replies
                    .iter_mut()
                    .rev()
                    .find(|reply| reply.turn == turn);
                if let Some(place) = of.and_then(|reply| reply.results.get_mut(position as usize)) {
                    *place = Some(result);
                }
            }
        }
    }
    remains.calls = calls(engine, run.root_id, run.id).await?;
    for child in store.children(run.id).await? {
        if let Some(call) = child.tool_call_id.clone() {
            remains.calls.children.insert(call, child);
        }
    }
    Ok(remains)
}

/// Reads what the log of the tree says of a run's calls, without the children that they started.
pub async fn calls(engine: &Engine, root: RunId, of: RunId) -> Result<Begun, StoreError> {
    let store = engine.journal.store();
    let mut calls = Begun::default();
    let mut query = EventQuery {
        root,
        of,
        only: true,
        after: 0,
        limit: PAGE,
    };
    loop {
        let page = store.events(query).await?;
        let Some(last) = page.last() else {
            return Ok(calls);
        };
        query.after = last.seq;
        for event in page {
            calls.note(&event.name, &event.data);
        }
    }
}

impl Begun {
    fn note(&mut self, name: &str, data: &str) {
        #[derive(Deserialize)]
        struct Call {
            tool_call_id: String,
            child_id: Option<RunId>,
            time: Timestamp,
        }
        #[derive(Deserialize)]
        struct Turn {
            turn: u32,
        }
        match name {
            "run.resumed" => self.resumed += 1,
            "turn.completed" | "tool.completed" | "approval.decided" => self.resumed = 0,
            _ => {}
        }
        match name {
            "turn.completed" => self.reported = reported(data),
            "context.compacted" => self.reported = None,
            "batch.submitted" => self.batch = serde_json::from_str(data).ok(),
            _ => {}
        }
        if name == "turn.started" {
            self.last_turn =
                serde_json::from_str::<Turn>(data).map_or(self.last_turn, |started| started.turn);
        }
        if !TOLD_OF_CALLS.contains(&name) {
            return;
        }
        let Ok(call) = serde_json::from_str::<Call>(data) else {
            return;
        };
        match (name, call.child_id) {
            ("tool.started", _) => drop(self.started.insert(call.tool_call_id)),
            ("agent.called", Some(child)) => drop(self.called.insert(call.tool_call_id, child)),
            ("approval.requested", _) => {
                self.requested.insert(call.tool_call_id, call.time);
            }
            ("approval.decided", _) => {
                if let Ok(decided) = serde_json::from_str(data) {
                    self.decided.entry(call.tool_call_id).or_insert(decided);
                }
            }
            ("tool.completed", _) => drop(self.completed.insert(call.tool_call_id)),
            ("agent.returned", _) => drop(self.returned.insert(call.tool_call_id)),
            _ => {}
        }
    }
}

/// The tokens in `turn.completed`; none where the service reported none.
fn reported(data: &str) -> Option<TokenUsage> {
    #[derive(Deserialize)]
    struct Completed {
        input_tokens: u64,
        output_tokens: u64,
        #[serde(default)]
        reasoning_tokens: u64,
    }
    let completed: Completed = serde_json::from_str(data).ok()?;
    Some(TokenUsage {
        input: completed.input_tokens,
        output: completed.output_tokens,
        reasoning: completed.reasoning_tokens,
        ..TokenUsage::default()
    })
}
