//! What a modelled process leaves: records, events and requests.

use crate::recovery::model::{Place, Turn};
use axed::config::models::lookup::Models;
use axed::config::{
    AttachmentLimits, DEFAULT_MAX_REPLY, Provider, ProviderKind, RequestRecording, Runs,
};
use axed::domain::event::{EventName, StoredEvent};
use axed::domain::run::{Run, RunId};
use axed::engine::settings::{HistoryLimits, Settings};
use axed::ssrf::SsrfGuard;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// What lives come to, without what must differ: times, ids and attempts.
#[derive(Clone, Default)]
pub struct Outcome {
    pub requests: BTreeMap<Turn, String>,
    pub runs: BTreeMap<String, Value>,
    pub steps: BTreeMap<String, Vec<(Place, String)>>,
    pub memories: BTreeMap<String, usize>,
    pub replies: BTreeSet<Turn>,
    pub ids: BTreeMap<String, RunId>,
    pub events: Vec<StoredEvent>,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for event in &self.events {
            writeln!(f, "{} {}", event.seq, event.data)?;
        }
        Ok(())
    }
}

fn has_ended(run: &Value) -> bool {
    matches!(
        run["status"].as_str(),
        Some("completed" | "failed" | "cancelled")
    )
}

pub fn facts(run: &Run) -> Value {
    let failure = run.error.as_ref();
    json!({
        "status": run.status.as_str(), "depth": run.depth.0, "input": run.input, "task": run.task,
        "content": run.content, "partial": run.partial_content, "model": run.model, "stop": run.stop_reason,
        "error": failure.map(|failure| format!("{failure:?}")), "turns": run.turns, "tool_call": run.tool_call_id,
        "usage": run.usage, "tree": run.tree,
    })
}

impl Outcome {
    /// The log has one life of each run, with every number once, and all of them have ended.
    pub fn is_in_order(&self) {
        let mut reported = BTreeSet::new();
        for (at, event) in self.events.iter().enumerate() {
            assert_eq!(event.seq, at as u64 + 1, "{self:?}");
            let data: Value = serde_json::from_str(&event.data).expect("JSON");
            let once = match event.name {
                EventName::RunResumed
                | EventName::RetryScheduled
                | EventName::MemoryWarning
                | EventName::LoopWarning => continue,
                EventName::TurnStarted | EventName::TurnCompleted => data["turn"].to_string(),
                _ => data["tool_call_id"].to_string(),
            };
            // A turn whose reply was lost is begun again.
            let is_new = reported.insert((event.run_id, event.name.to_string(), once));
            assert!(
                is_new || event.name == EventName::TurnStarted,
                "{data} twice in {self:?}"
            );
        }
        for (agent, run) in &self.runs {
            assert!(has_ended(run), "{agent} is {run}");
        }
    }

    /// Whether this turn may not be requested again: its reply is recorded, or its run has ended.
    pub fn is_over(&self, turn: &Turn) -> bool {
        self.replies.contains(turn) || self.runs.get(&turn.0).is_some_and(has_ended)
    }

    /// What was in the record is still there.
    pub fn is_kept_in(&self, later: &Self) {
        for (agent, steps) in &self.steps {
            let kept = &later.steps[agent];
            assert!(
                steps.iter().all(|step| kept.contains(step)),
                "{agent} lost a step"
            );
        }
        assert!(
            later
                .ids
                .iter()
                .all(|(agent, id)| self.ids.get(agent).is_none_or(|it| it == id))
        );
    }

    /// The cost of a turn that has begun without a reply is unknown.
    pub fn unanswered_are_unreported(&self, runs: &mut BTreeMap<String, Value>) {
        let unfinished = self.runs.iter().filter(|(_, run)| !has_ended(run));
        for (agent, _) in unfinished {
            let own = self
                .events
                .iter()
                .filter(|event| event.run_id == self.ids[agent]);
            let begun = own
                .filter(|event| event.name == EventName::TurnStarted)
                .count();
            let answered = self.replies.iter().filter(|(of, _)| of == agent).count();
            if begun <= answered {
                continue;
            }
            let count = |usage: &mut Value| {
                let sum = usage["unreported"].as_u64().expect("a number") + 1;
                usage["unreported"] = sum.into();
            };
            count(&mut runs.get_mut(agent).expect("the same runs")["usage"]);
            // Its own tree and those above it: a name begins with its caller's.
            for (name, run) in runs.iter_mut() {
                if agent == name || agent.starts_with(&format!("{name}-")) {
                    count(&mut run["tree"]["usage"]);
                }
            }
        }
    }
}

pub fn served_at(url: String) -> Provider {
    Provider {
        kind: ProviderKind::Anthropic,
        api_key: Some("sk-fake-key".to_owned().into()),
        key_env: String::new(),
        base_url: Some(url),
        headers: BTreeMap::new(),
        max_concurrent: None,
        timeout: None,
        version: None,
        max_tokens_field: None,
        api: None,
        max_reply: DEFAULT_MAX_REPLY,
        batch_poll: axed::config::DEFAULT_BATCH_POLL,
        services: Vec::new(),
        scripts: Vec::new(),
        is_preset: false,
        missing_address: None,
        limits: BTreeMap::new(),
        models: BTreeMap::new(),
    }
}

pub fn settings(place: &Path) -> Settings {
    Settings {
        node: String::new(),
        node_labels: Vec::new(),
        config_dir: place.to_owned(),
        runs: Runs {
            max_running: 10,
            max_queued: 10,
            ..Runs::default()
        },
        default_timeout: Duration::from_secs(3600),
        max_timeout: Duration::from_secs(3600),
        loop_warn: 2,
        loop_stop: 3,
        max_context_file_bytes: 0,
        client_tool_wait: std::time::Duration::from_secs(60),
        world_events: axed::config::waits::Waits::default(),
        max_conversation_bytes: 1 << 20,
        history_limits: HistoryLimits {
            messages: 0,
            bytes: 0,
            attachments: AttachmentLimits {
                count: 0,
                bytes: 0,
                total: 0,
            },
        },
        webhook_guard: SsrfGuard::new([], "webhooks.allow_hosts"),
        webhook_secret_env: None,
        keys: BTreeMap::new(),
        models: Models::default(),
        requests: RequestRecording::default(),
    }
}
