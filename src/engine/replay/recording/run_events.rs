//! What the event log of a tree says about its runs and is not in their steps.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use crate::domain::event::{Decision, Event, EventKind};
use crate::domain::recording::UsageRecording;
use crate::domain::run::RunId;
use crate::engine::context::Engine;
use crate::store::StoreError;
use crate::store::events::{self, EventPages};

/// What the event log says about a run.
#[derive(Debug, Default)]
pub struct RunEvents {
    /// What its request set; only of a root.
    pub request: Map<String, Value>,
    pub turns: HashMap<u32, TurnEvent>,
    /// By the ids of the calls.
    pub decisions: HashMap<String, Decision>,
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
            run.apply(events::recorded(&event)?)
                .map_err(|error| StoreError::Corrupt(format!("the request of {root}: {error}")))?;
        }
    }
    Ok(runs)
}

impl RunEvents {
    fn apply(&mut self, event: Event) -> serde_json::Result<()> {
        let tokens = event.kind.tokens().unwrap_or_default();
        match event.kind {
            EventKind::RunQueued {
                request: Some(request),
                ..
            } => self.request = serde_json::from_str(request.get())?,
            EventKind::TurnCompleted {
                turn,
                model,
                stop_reason,
                ..
            } => {
                let event = TurnEvent {
                    model,
                    stop_reason,
                    usage: tokens.into(),
                };
                self.turns.insert(turn, event);
            }
            EventKind::ApprovalDecided {
                tool_call_id,
                decision,
                ..
            } => {
                self.decisions.entry(tool_call_id).or_insert(decision);
            }
            _ => {}
        }
        Ok(())
    }
}
