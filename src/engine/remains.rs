//! What an earlier process left of a run, read from the record: its prompt, its replies, the results that came, and
//! which calls it had begun. Knows no loop.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;

use crate::domain::message::{AssistantMessage, ToolResult};
use crate::domain::run::{Run, RunId};
use crate::engine::parts::Engine;
use crate::store::{EventQuery, Step, StoreError};

/// Events read at once.
const PAGE: usize = 1000;

/// The steps of a run, put together again.
#[derive(Debug, Default)]
pub struct Remains {
    /// The prompt, where it came to be assembled: system prompt and user message.
    pub prompt: Option<(String, String)>,
    /// Its replies, oldest first.
    pub replies: Vec<Replied>,
    /// Its calls.
    pub calls: Begun,
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
    /// The last turn whose `turn.started` is in the log; 0 for none.
    pub last_turn: u32,
}

/// Reads what is left of a run.
pub async fn load(engine: &Engine, run: &Run) -> Result<Remains, StoreError> {
    let store = engine.journal.store();
    let mut remains = Remains::default();
    for step in store.steps(run.id).await? {
        match step {
            Step::Prompt { system, message } => remains.prompt = Some((system, message)),
            Step::Reply { turn, message } => {
                let results = message.tool_calls.iter().map(|_| None).collect();
                remains.replies.push(Replied {
                    turn,
                    message,
                    results,
                    told: None,
                });
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
    for child in store.children(run.id).await? {
        if let Some(call) = child.tool_call_id.clone() {
            remains.calls.children.insert(call, child);
        }
    }
    let mut query = EventQuery {
        root: run.root_id,
        of: run.id,
        only: true,
        after: 0,
        limit: PAGE,
    };
    loop {
        let page = store.events(query).await?;
        let Some(last) = page.last() else {
            return Ok(remains);
        };
        query.after = last.seq;
        for event in page {
            remains.calls.note(&event.name, &event.data);
        }
    }
}

impl Begun {
    fn note(&mut self, name: &str, data: &str) {
        #[derive(Deserialize)]
        struct Call {
            tool_call_id: String,
            child_id: Option<RunId>,
        }
        #[derive(Deserialize)]
        struct Turn {
            turn: u32,
        }
        if name == "turn.started" {
            self.last_turn =
                serde_json::from_str::<Turn>(data).map_or(self.last_turn, |started| started.turn);
        }
        if !matches!(name, "tool.started" | "agent.called" | "agent.returned") {
            return;
        }
        let Ok(call) = serde_json::from_str::<Call>(data) else {
            return;
        };
        match (name, call.child_id) {
            ("tool.started", _) => drop(self.started.insert(call.tool_call_id)),
            ("agent.called", Some(child)) => drop(self.called.insert(call.tool_call_id, child)),
            ("agent.returned", _) => drop(self.returned.insert(call.tool_call_id)),
            _ => {}
        }
    }
}
