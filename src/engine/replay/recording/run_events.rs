//! What the event log of a tree says about its runs and is not in their steps.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::domain::event::Decision;
use crate::domain::recording::{DecisionRecording, UsageRecording};
use crate::domain::run::RunId;
use crate::domain::usage::TokenUsage;
use crate::engine::context::Engine;
use crate::store::StoreError;
use crate::store::events::EventPages;

/// What the event log says about a run.
#[derive(Debug, Default)]
pub struct RunEvents {
    /// What its request set; only of a root.
    pub request: Map<String, Value>,
    pub turns: HashMap<u32, TurnEvent>,
    /// By the ids of the calls.
    pub decisions: HashMap<String, DecisionRecording>,
}

/// What the event at the end of a turn says.
#[derive(Debug)]
pub struct TurnEvent {
    pub model: String,
    pub stop_reason: Option<String>,
    pub usage: UsageRecording,
}

/// The events of all runs of a tree.
pub async fn read(engine: &Engine, root: RunId) -> Result<BTreeMap<RunId, RunEvents>, StoreError> {
    let mut runs = BTreeMap::new();
    let mut pages = EventPages::of_tree(&**engine.journal.store(), root);
    while let Some(page) = pages.next().await? {
        for event in page {
            let run: &mut RunEvents = runs.entry(event.run_id).or_default();
            run.apply(&event.name, &event.data);
        }
    }
    Ok(runs)
}

impl RunEvents {
    fn apply(&mut self, name: &str, data: &str) {
        #[derive(Deserialize)]
        struct Queued {
            #[serde(default)]
            request: Map<String, Value>,
        }
        #[derive(Deserialize)]
        struct TurnCompleted {
            turn: u32,
            model: String,
            stop_reason: Option<String>,
            input_tokens: u64,
            output_tokens: u64,
            #[serde(default)]
            cache_read_tokens: u64,
            #[serde(default)]
            cache_write_tokens: u64,
            #[serde(default)]
            reasoning_tokens: u64,
        }
        #[derive(Deserialize)]
        struct Decided {
            tool_call_id: String,
            decision: Decision,
        }
        match name {
            "run.queued" => {
                if let Ok(queued) = serde_json::from_str::<Queued>(data) {
                    self.request = queued.request;
                }
            }
            "turn.completed" => {
                let Ok(completed) = serde_json::from_str::<TurnCompleted>(data) else {
                    return;
                };
                let tokens = TokenUsage {
                    input: completed.input_tokens,
                    output: completed.output_tokens,
                    cache_read: completed.cache_read_tokens,
                    cache_write: completed.cache_write_tokens,
                    reasoning: completed.reasoning_tokens,
                };
                let event = TurnEvent {
                    model: completed.model,
                    stop_reason: completed.stop_reason,
                    usage: tokens.into(),
                };
                self.turns.insert(completed.turn, event);
            }
            "approval.decided" => {
                let Ok(decided) = serde_json::from_str::<Decided>(data) else {
                    return;
                };
                let decision = match decided.decision {
                    Decision::Approved => DecisionRecording::Approved,
                    Decision::Denied => DecisionRecording::Denied,
                    Decision::TimedOut => DecisionRecording::TimedOut,
                };
                self.decisions
                    .entry(decided.tool_call_id)
                    .or_insert(decision);
            }
            _ => {}
        }
    }
}
