//! The part of the configuration that the engine reads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::models::lookup::Models;
use crate::config::waits::Waits;
use crate::config::{AttachmentLimits, RequestRecording, Runs};
use crate::fair::Limits;
use crate::ssrf::SsrfGuard;

#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory that relative skill paths are resolved against.
    pub config_dir: PathBuf,
    /// The name of this node.
    pub node: String,
    /// The labels of this node.
    pub node_labels: Vec<String>,
    /// How many runs may run and wait.
    pub runs: Runs,
    /// A root run's deadline if neither its request nor its agent sets one.
    pub default_timeout: Duration,
    /// The longest deadline that a root run may have.
    pub max_timeout: Duration,
    pub loop_warn: u32,
    pub loop_stop: u32,
    pub max_context_file_bytes: usize,
    pub max_conversation_bytes: usize,
    pub history_limits: HistoryLimits,
    /// The addresses that webhooks may reach.
    pub webhook_guard: SsrfGuard,
    /// See [`crate::config::Webhooks`].
    pub webhook_secret_env: Option<String>,
    /// The configured keys by name, with `webhook_secret_env`.
    pub keys: BTreeMap<String, Option<String>>,
    pub models: Models,
    pub requests: RequestRecording,
    /// How long a run waits for the results of its client's tools.
    pub client_tool_wait: Duration,
    /// The events that runs wait for.
    pub world_events: Waits,
}

impl Settings {
    /// The limits of the admission queue.
    pub fn queue_limits(&self) -> Limits {
        let Runs {
            max_running,
            max_queued,
            per_agent,
            per_key,
            max_live,
            ..
        } = self.runs.clone();
        Limits {
            max_running,
            max_live,
            max_queued,
            per_agent,
            per_key: per_key.named,
            default_per_key: per_key.others,
            keys: self.keys.keys().cloned().collect(),
            shares_permits: false,
        }
    }
}

/// How much of a session's conversation its next run receives.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimits {
    pub messages: usize,
    /// The size of the texts, tool arguments included.
    pub bytes: usize,
    /// The limits of images and files: the full count and half of the bytes, which leaves the other half to the next message.
    pub attachments: AttachmentLimits,
}
